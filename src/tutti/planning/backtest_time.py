"""Protocols of the back-test for time: steps, iterations, throughput, collectives; and for loss over scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tutti.planning.conformal_band import CheckedPrediction
from tutti.planning.hardware_anchor import (
    HardwareAnchor,
    anchored_rate,
    chip_of,
    joined_devices,
    kindred_rate,
    peak_flops,
    precision_class,
    shipped_anchors,
    stated_wire,
    usual_links,
)
from tutti.planning.law_fit import OTHER_SETS, FittedLaw, fit_law
from tutti.planning.measurement_table import TableRow
from tutti.planning.protocol import (
    ANCHORED,
    EXTRAPOLATED,
    NOT_STATED,
    ONE_LENGTH,
    ONE_ROW,
    OTHER_HARDWARE,
    OTHER_HARDWARE_SPLIT,
    OTHER_SPLIT,
    PUBLISHED_ROWS,
    PUBLISHED_ROWS_SPLIT,
    SEVERAL_SIZES,
    ZERO_SHOT,
    GroupPredictions,
    fit_limits,
    grouped,
)
from tutti.planning.scaling_laws import (
    ALLREDUCE_LAW,
    ANCHORED_LAW,
    BETWEEN_SETS,
    DATA_PARALLEL_LAW,
    GPT_GRID_LAW,
    LOSS_LAW,
    Array,
    Inputs,
    ScalingLaw,
    transformer_flops_per_token,
)

Mask = NDArray[np.bool_]

_FAR = f"{EXTRAPOLATED}, more than 4 ×"
_NO_SHAPE = "the table does not say what the model computes"


def _inputs(rows: Sequence[TableRow], roles: dict[str, str]) -> dict[str, Array]:
    return {name: np.array([row.number(role) for row in rows]) for name, role in roles.items()}


def _fit_and_ask(
    law: ScalingLaw,
    group: str,
    set_name: str,
    data: tuple[Inputs, Array, Array, list[str]],
    enough: Callable[[Mask], bool],
) -> Iterator[GroupPredictions]:
    """Fit a law on the smallest size, and on each cut, and ask it for larger sizes.

    Args:
        law: the law.
        group: the group's name in results.
        set_name: the set whose scores must not band it.
        data: inputs, seconds, sizes and series, row by row.
        enough: whether the rows of a mask determine the law's constants.
    """
    inputs, seconds, sizes, series = data

    def ask(fitted: FittedLaw, rows: Mask, base: float, basis: str) -> list[CheckedPrediction]:
        places = np.flatnonzero(rows)
        if not len(places):
            return []
        doublings = np.log2(sizes[places] / base)
        centre, sigma = fitted.predict({name: column[places] for name, column in inputs.items()}, doublings)
        return [
            CheckedPrediction(
                set_name, basis, float(sizes[i] / base), series[i], float(value), float(wide), float(seconds[i])
            )
            for i, value, wide in zip(places, centre, sigma, strict=True)
        ]

    def fit(rows: Mask) -> FittedLaw:
        places = np.flatnonzero(rows)
        return fit_law(
            law,
            {name: column[places] for name, column in inputs.items()},
            seconds[places],
        )

    least = sizes.min()
    if sizes.max() > least:
        yield GroupPredictions(group, ANCHORED, ask(fit(sizes == least), sizes > least, float(least), ONE_ROW))
    else:
        yield GroupPredictions(group, ANCHORED, reason="one size only")
    near: list[CheckedPrediction] = []
    far: list[CheckedPrediction] = []
    for cut in fit_limits(sizes.tolist()):
        if enough(sizes <= cut):
            fitted = fit(sizes <= cut)
            near += ask(fitted, (sizes >= 2 * cut) & (sizes <= 4 * cut), cut, SEVERAL_SIZES)
            far += ask(fitted, sizes > 4 * cut, cut, SEVERAL_SIZES)
    yield GroupPredictions(group, EXTRAPOLATED, near, "" if near else "no half of the sizes determines the constants")
    if far:
        yield GroupPredictions(group, _FAR, far)


def all_reduce(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Back-test predictions of all-reduces over more ranks from all-reduces over fewer, for each hardware by itself.

    The law of a ring all-reduce is fitted to the measurements of the fewest ranks, and predicts all others
    (*anchored*); and for each measured number N of ranks to those of up to N ranks, to predict 2 N ranks and more
    (*extrapolated*).

    Args:
        rows: one row for each measured all-reduce: ranks, message size in bytes, seconds, hardware, as tables of the
            kind ``all-reduce`` have them.

    Yields:
        For each hardware and protocol (zero-shot: from no row of the table; anchored; extrapolated to at most 4 × as
        many as were fitted; extrapolated further) one record with ``group`` (the hardware), ``protocol``,
        ``predictions`` (in seconds, a list of ``CheckedPrediction``, with ``predicted`` and ``measured``) and
        ``reason``: why that list is empty, as always for zero-shot, else an empty text.
    """
    for group, same in grouped(rows, lambda row: row.label("hardware") or "hardware not stated").items():
        seconds = np.array([row.number("out_of_place", row.number("in_place")) for row in same])
        inputs = _inputs(same, {"ranks": "ranks", "bytes": "size"})
        inputs["nodes"] = np.array([_ring_nodes(row) for row in same])
        local, wire = usual_links(group)
        inputs |= {"wire": np.full(len(same), wire), "local": np.full(len(same), local)}
        # Sizes in other units come back with a rounding error, which must not change the power of two below.
        series = [f"{group} 2^{math.floor(math.log2(size) + 1e-6)} B" for size in inputs["bytes"]]
        many = inputs["ranks"] > 1
        yield GroupPredictions(
            group, ZERO_SHOT, reason="no all-reduce of another set on this hardware ships with the package"
        )
        if many.sum() < 2:
            for protocol in (ANCHORED, EXTRAPOLATED):
                yield GroupPredictions(group, protocol, reason="fewer than two measurements over several ranks")
            continue
        kept = np.flatnonzero(many)
        data = (
            {name: column[kept] for name, column in inputs.items()},
            seconds[kept],
            inputs["ranks"][kept],
            [series[i] for i in kept],
        )
        yield from _fit_and_ask(
            ALLREDUCE_LAW, group, f"all-reduce {group}", data, lambda fitted: bool(fitted.sum() >= 4)
        )


_NODE_RANKS = 8.0
"""Ranks of a node where a table does not say it: those of the usual server."""


def _ring_nodes(row: TableRow) -> float:
    """Return the number of nodes of an all-reduce; where the row does not state it, of full nodes."""
    ranks = row.number("ranks")
    return min(row.number("nodes", math.ceil(ranks / row.number("per_node", _NODE_RANKS))), ranks)


def small_cluster(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict the seconds of data-parallel steps on more replicas from steps on fewer, for each workload and GPU.

    A law of computing and of rings within and between nodes is fitted to the fewest replicas (*anchored*), or to up to
    N replicas to predict 2 N and more (*extrapolated*). *Anchored, other workloads' network* takes the network's
    constants from the other workloads of the table, and only the computing from the predicted workload's fewest
    replicas.

    Args:
        rows: one row for each measured configuration: workload, hardware, replicas, seconds of a step, and where stated
            nodes and local batch, as tables of the kind ``small cluster`` have them.

    Yields:
        For each workload on its hardware and each protocol (zero-shot: from no row of the table; anchored; extrapolated
        to at most 4 × and, where there are such predictions, further; and anchored with other workloads' network, where
        another workload was measured on three or more numbers of nodes) one record with ``group``, ``protocol``,
        ``predictions`` (in seconds, a list of ``CheckedPrediction``, with ``predicted`` and ``measured``) and
        ``reason``: why that list is empty, as always for zero-shot, or what the predictions guess because the table
        does not state it.
    """
    groups = grouped(rows, lambda row: row.label("workload", "hardware") or NOT_STATED.format("workload"))
    steps = {group: _steps(same) for group, same in groups.items()}
    workloads = {group: same[0].label("workload") for group, same in groups.items()}
    networks: dict[str, Array] = {}
    for group, (inputs, seconds) in steps.items():
        if len(groups) > 1 and len(set(inputs["nodes"])) >= 3:
            fitted = fit_law(DATA_PARALLEL_LAW, inputs, seconds, OTHER_SETS)
            networks[group] = fitted.log_constants - np.log(DATA_PARALLEL_LAW.centre(inputs, seconds))
    for group, (inputs, seconds) in steps.items():
        series = [f"{group} {batch:g}" for batch in inputs["local_batch"]]
        others = {other: found for other, found in networks.items() if workloads[other] != workloads[group]}
        hardware = groups[group][0].label("hardware")
        same = [found for other, found in others.items() if groups[other][0].label("hardware") == hardware]

        def enough(fitted: Mask, nodes: Array = inputs["nodes"], replicas: Array = inputs["replicas"]) -> bool:
            below = nodes[fitted]
            return bool(
                fitted.sum() >= 6 and (len(set(below)) >= 3 or (nodes.max() == 1 and len(set(replicas[fitted])) >= 2))
            )

        yield GroupPredictions(group, ZERO_SHOT, reason=_NO_SHAPE)
        data = (inputs, seconds, inputs["replicas"], series)
        name = f"small cluster {workloads[group]}"
        guess = _guesses(groups[group])
        for asked in _fit_and_ask(DATA_PARALLEL_LAW, group, name, data, enough):
            asked.reason = asked.reason or guess
            yield asked
        if others:
            asked = next(_fit_and_ask(_with_network(same or [*others.values()]), group, name, data, enough))
            basis = "one measured row and a known network"
            asked.predictions = [replace(one, basis=basis) for one in asked.predictions]
            asked.protocol = f"{ANCHORED}, other workloads' network"
            yield asked


def _steps(rows: Sequence[TableRow]) -> tuple[dict[str, Array], Array]:
    inputs = _inputs(rows, {"replicas": "replicas", "nodes": "nodes", "local_batch": "local_batch"})
    inputs["nodes"] = np.fmin(inputs["nodes"], inputs["replicas"])
    inputs["local_batch"] = np.nan_to_num(inputs["local_batch"], nan=1.0)
    inputs["wire"] = np.array([usual_links(row.label("hardware"))[1] for row in rows])
    return inputs, np.array([row.number("step_time") for row in rows])


def _guesses(rows: Sequence[TableRow]) -> str:
    """Return what the table does not say and the predictions therefore guess; empty where there is nothing."""
    guesses = {"nodes": "each replica counts as a node", "local_batch": "all batches count as equal"}
    return "; ".join(f"{role} not stated: {text}" for role, text in guesses.items() if role not in rows[0].numbers)


def _with_network(others: Sequence[Array]) -> ScalingLaw:
    """Return the law whose prior of the network, relative to the shortest step, is that of other workloads."""
    stacked = np.stack(others)
    shift, wide = np.median(stacked, axis=0), stacked.std(axis=0)
    law = DATA_PARALLEL_LAW
    # Two constants of computing come first; the workload's own rows say those.
    shift[:2] = 0.0
    spread = (*law.spread[:2], *(float(min(old, new + 0.4)) for old, new in zip(law.spread[2:], wide[2:], strict=True)))
    return replace(law, centre=lambda inputs, seconds: law.centre(inputs, seconds) * np.exp(shift), spread=spread)


def iteration_by_grid(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict the seconds of a GPT's training iterations on more devices of a host from iterations on fewer.

    The devices are split into data, tensor and pipeline parallelism. A law of computing, collectives and pipeline
    bubbles is fitted to the fewest devices (*anchored*), or to up to N devices to predict 2 N and more
    (*extrapolated*).

    Args:
        rows: one row for each measured configuration: hardware, model shape, batch, degrees of parallelism, seconds, as
            tables of the kind ``iteration by grid`` have them.

    Yields:
        For each hardware and protocol (zero-shot: from no row of the table; anchored; extrapolated to at most 4 × as
        many as were fitted; extrapolated further) one record with ``group`` (the hardware), ``protocol``,
        ``predictions`` (in seconds, a list of ``CheckedPrediction``, with ``predicted`` and ``measured``) and
        ``reason``: why that list is empty, as always for zero-shot, else an empty text.
    """
    roles = {"tensor": "tp", "data": "dp", "pipeline": "pp", "micro_batch": "micro_batch", "hidden": "hidden"}
    roles |= {"layers": "layers", "seq_len": "seq_len", "global_batch": "global_batch"}
    for group, same in grouped(rows, lambda row: row.label("hardware") or "hardware not stated").items():
        inputs = _inputs(same, roles)
        heads = [row.number("heads", max(1.0, row.number("hidden") // 64)) for row in same]
        inputs["heads"] = np.array(heads)
        if all("vocabulary" in row.numbers for row in same):
            inputs["vocabulary"] = np.array([row.number("vocabulary") for row in same])
        if all("per_node" in row.numbers for row in same):
            inputs["per_node"] = np.array([row.number("per_node") for row in same])
        sizes = np.array([row.number("devices") for row in same])
        seconds = np.array([row.number("step_time") for row in same])
        shape = ("hidden", "layers", "seq_len", "micro_batch")
        series = [" ".join(f"{row.number(role):g}" for role in shape) for row in same]
        yield GroupPredictions(group, ZERO_SHOT, reason="a grid's constants are fitted, not taken from other hardware")
        data = (inputs, seconds, sizes, series)
        yield from _fit_and_ask(GPT_GRID_LAW, group, f"grid {group}", data, lambda fitted: bool(fitted.sum() >= 12))


_TOKENS = 512.0
"""Tokens that a sample of unknown length counts as, such as an image: a guess."""
_LAYERS = 24.0
"""Layers of a model whose table does not state them: a guess."""


class _Job:
    """A row of published jobs with what the laws need; NaN where the table is silent."""

    def __init__(self, row: TableRow) -> None:
        number = row.number
        self.row = row
        self.set_name = row.label("set") or "set not stated"
        self.group = " / ".join((self.set_name, row.label("hardware") or "hardware not stated"))
        self.devices = number("devices")
        self.length = number("seq_len")
        roles = ("set", "model", "hardware", "precision", "framework")
        self.kind = tuple(row.label(role) for role in roles)
        if not row.text.get("model"):
            # Rows without a model's name are one series where they have one shape.
            self.kind += tuple(row.label(role) for role in ("params_b", "layers", "hidden"))
        self.plan = number("tp", 1.0), number("pp", 1.0)
        # Context ranks divide the tokens of a sample, and hold the same weights.
        self.context = number("cp", 1.0)
        self.split = math.prod(self.plan)
        self.tokens = _TOKENS if math.isnan(self.length) else self.length
        batch = number("global_batch")
        if row.text.get("batch_unit", "").startswith("token"):
            batch /= self.tokens
        micro = number("micro_batch")
        data = max(1.0, self.devices / self.split / self.context)
        local = batch / data
        # A pipeline is filled with as many micro-batches as there are samples: one alone would be all bubble.
        each = 1.0 if math.isnan(micro) and number("pp", 1.0) > 1 else micro
        self.passes = max(1.0, local / each) if not math.isnan(local * each) else 1.0
        self.batch_known = not math.isnan(batch)
        self.batch = batch if self.batch_known else data * (micro if not math.isnan(micro) else 64.0)
        self.call = micro * self.tokens / self.context if not math.isnan(micro) else 1e12
        self.flops = self._flops()
        self.seconds = self._device_seconds()
        self.series = " / ".join((*(part for part in self.kind if part), f"{self.length:g}"))

    def _device_seconds(self) -> float:
        """Return the device-seconds of a sample, from the step, samples, tokens or FLOP a second; NaN without them."""
        row, number = self.row, self.row.number
        if "step_time" in row.numbers and self.batch_known:
            return number("step_time") * self.devices / self.batch
        if "samples_per_s" in row.numbers:
            return self.devices / number("samples_per_s")
        if "tokens_per_s_per_device" in row.numbers:
            return self.tokens / number("tokens_per_s_per_device")
        if "tflops_per_device" not in row.numbers:
            return math.nan
        flops = self.tokens if math.isnan(self.flops) else self.flops
        hardware = row.text.get("tflops_kind", "").startswith("hardware")
        kept = flops if hardware else flops / (4 / 3 if self.recompute else 1.0)
        return kept / (number("tflops_per_device") * 1e12)

    @property
    def recompute(self) -> bool:
        return self.row.text.get("recompute", "").lower() in ("full", "true", "yes", "1")

    def _bubbles(self) -> tuple[float, float]:
        """Return by how much a pipeline's bubble lengthens a step, at most and at least: 1 without a pipeline.

        A table that does not state the number of model chunks of a stage says a bubble between those of one chunk and
        of as many as a stage has layers (Narayanan et al. 2021, arXiv 2104.04473, §2.2).
        """
        number = self.row.number
        stages = number("pp", 1.0)
        most = max(1.0, number("layers", _LAYERS) / stages)
        each = (stages - 1) / self.passes
        return 1 + each / number("vpp", 1.0), 1 + each / number("vpp", most)

    @property
    def bubble_sigma(self) -> float:
        """Standard deviation of the logarithm of the pipeline's bubble where the table does not state its schedule."""
        most, least = self._bubbles()
        return 0.5 * math.log(most / least)

    def _flops(self) -> float:
        """Return the hardware FLOP of a sample with the pipeline's bubble, NaN where the shape is not known."""
        number = self.row.number
        blocks = 12 * number("layers") * number("hidden") ** 2
        attention = (number("layers", 0.0), number("hidden", 0.0))
        shape = [number("params_b", blocks / 1e9) * 1e9, *attention, self.length, float(self.recompute)]
        one = transformer_flops_per_token(*(np.array([value]) for value in shape))[0] * self.length
        return float(one)

    def flops_per_second(self) -> float:
        """Return the hardware FLOP/s of each device of a published job, not divided by the chip's peak.

        The number follows from the model's shape and the throughput, or else is the one that the table prints; NaN
        without both.
        """
        shape = self.flops / self.seconds
        return shape if math.isfinite(shape) else self.row.number("tflops_per_device") * 1e12

    def columns(self, shaped: bool = True) -> dict[str, float]:
        """Return a published training job as inputs of ``ANCHORED_LAW``, the law of a job's device-seconds a sample.

        Args:
            shaped: count FLOP from the model's shape; False: let computing be proportional to the tokens.

        Returns:
            One number for each input: ``devices``, ``per_node``, ``split`` (tensor × pipeline degree), ``tensor``,
            ``sharded``, ``recompute`` (0 or 1), ``parameters``, ``layers``, ``hidden``, ``tokens`` (of a sample),
            ``passes`` (micro-batches of a step), ``call`` (tokens of a micro-batch), ``global_batch`` (samples),
            ``flops`` (of a sample, with the pipeline's bubble), ``word`` (bytes of an element), ``wire`` and ``local``
            (bytes/s of a device between and within nodes).
        """
        number, text = self.row.number, self.row.text
        hardware, server = self.row.label("hardware"), number("per_node", 8.0)
        local, per_node = usual_links(hardware)[0], joined_devices(hardware, server)
        stated = stated_wire(text.get("interconnect", ""), hardware, server)
        bubble = math.sqrt(math.prod(self._bubbles()))
        how = text.get("sharding") or text.get("framework", "")
        sharded = re.search(r"zero-?3|fsdp|full", how.lower()) is not None
        # FSDP keeps the weights that it gathers for recomputation, DeepSpeed gathers them again (Rajbhandari et al.
        # 2021, arXiv 2104.07857, §4.2).
        again = self.recompute and "deepspeed" in text.get("framework", "").lower()
        wide = precision_class(self.row.label("precision")) in ("32", "tf32")
        known = {"devices": self.devices, "per_node": per_node, "split": self.split, "sharded": float(sharded)}
        known |= {"parameters": number("params_b", 0.0) * 1e9, "passes": self.passes, "word": 4.0 if wide else 2.0}
        known |= {"wire": stated, "local": local, "tensor": number("tp", 1.0), "recompute": float(self.recompute)}
        known |= {"gathers": 4.0 if again else 3.0}
        known |= {"layers": number("layers", _LAYERS), "hidden": number("hidden", 0.0), "tokens": self.tokens}
        flops = self.flops if shaped else self.tokens * (4 / 3 if self.recompute else 1.0)
        return known | {"call": self.call, "flops": flops * bubble, "global_batch": self.batch}


def _job_guesses(jobs: Sequence[_Job]) -> str:
    """Return what the rows of some jobs do not say and the predictions therefore guess; empty where nothing."""
    guesses = {
        "interconnect": "links of the servers in which the chip is usually sold",
        "global_batch": "each device has one micro-batch, of 64 samples where that is not stated either",
        "layers": f"{_LAYERS:g} of them",
        "params_b": "no gradients are sent",
        "micro_batch": "one of all samples of a device, or of one sample in a pipeline",
        "precision": "32 bits",
    }
    lacking = [role for role in guesses if any(role not in job.row.text for job in jobs)]
    return "; ".join(f"{role} not stated: {guesses[role]}" for role in lacking)


def _pairs(pairs: Sequence[tuple[_Job, _Job]]) -> dict[str, Array]:
    """Return the inputs of `ANCHORED_LAW` for pairs of an anchor and a job."""
    found: dict[str, list[float]] = {}
    for anchor, job in pairs:
        shaped = not math.isnan(job.flops * anchor.flops)
        both = job.columns(shaped) | {f"a_{name}": value for name, value in anchor.columns(shaped).items()}
        for name, value in (both | {"a_seconds": anchor.seconds}).items():
            found.setdefault(name, []).append(value)
    return {name: np.array(column) for name, column in found.items()}


def _nearest(job: _Job, jobs: Sequence[_Job]) -> _Job:
    """Return the job that is most like another: in the split of the model, then in passes over it, then in devices."""

    def far(other: _Job) -> tuple[bool, float, float]:
        size = abs(math.log2(other.devices / job.devices))
        call = abs(math.log2(other.call / job.call)) + float(other.recompute != job.recompute)
        return other.plan != job.plan, call, size

    return min(jobs, key=far)


def _predict(fitted: FittedLaw, pairs: Sequence[tuple[_Job, _Job]], basis: str) -> list[CheckedPrediction]:
    if not pairs:
        return []
    # The law was fitted to jobs on several times an anchor's devices: its misfit is of such distances.
    centre, sigma = fitted.predict(_pairs(pairs))
    return [
        CheckedPrediction(
            *(job.set_name, basis if job.plan == anchor.plan else OTHER_SPLIT, job.devices / anchor.devices),
            job.series,
            *(float(value), math.hypot(wide, job.bubble_sigma - anchor.bubble_sigma), job.seconds),
        )
        for (anchor, job), value, wide in zip(pairs, centre, sigma, strict=True)
    ]


def _first(same: Sequence[_Job]) -> _Job:
    """Return the job with fewest devices; of several the one with the largest call, whose kernels are busiest."""
    least = min(job.devices for job in same)
    return max((job for job in same if job.devices == least), key=lambda job: job.call)


def _middle(same: Sequence[_Job]) -> _Job:
    """Return the job with fewest devices whose sequence length is nearest to the middle of the lengths."""
    least = min(job.devices for job in same)
    few = [job for job in same if job.devices == least]
    middle = float(np.median([math.log(job.length) for job in few]))
    return min(few, key=lambda job: (abs(math.log(job.length) - middle), -job.call))


def published_jobs(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict the throughput of published training jobs, as device-seconds for each sample.

    A law of stragglers, rings and fixed costs, fitted to the other sources, scales a known speed to each job's devices.
    The protocols differ in this speed. *Zero-shot*: the utilisation (FLOP/s over the chip's peak) that other sources
    reached on the same chip; without such sources, on other chips. *Zero-shot, other hardware*: always on other chips.
    *Anchored*: the job of the same model and sequence length on the fewest devices. *Anchored, other sequence
    lengths*: a job of the same model with another length. *Extrapolated*: a job on at most half the devices.

    Args:
        rows: one row for each job: source, model, hardware, number of devices and throughput, as tables of the kind
            ``published jobs`` have them.

    Yields:
        For each pair of source and hardware, and each protocol, one record with ``group`` (the pair), ``protocol``,
        ``predictions`` (a list of ``CheckedPrediction``, with ``predicted`` and ``measured`` in device-seconds a
        sample) and ``reason``: why some or all jobs could not be predicted, or what the predictions guess because the
        table does not state it.
    """
    every = list(map(_Job, rows))
    jobs = [job for job in every if math.isfinite(job.seconds)]
    for group in dict.fromkeys(job.group for job in every):
        if not any(job.group == group for job in jobs):
            for protocol in (ZERO_SHOT, ANCHORED, EXTRAPOLATED):
                yield GroupPredictions(
                    group, protocol, reason="steps without a global batch: their samples are not known"
                )
    series = grouped(jobs, lambda job: job.series)
    several = {name: same for name, same in series.items() if len({job.devices for job in same}) > 1}
    anchors = [*shipped_anchors(), *utilisation_anchors(rows)]
    fits: dict[str, FittedLaw] = {}

    def law_without(left_out: str) -> FittedLaw:
        if left_out not in fits:
            pairs = [
                (anchor, job)
                for same in several.values()
                if same[0].set_name != left_out
                for anchor in [_first(same)]
                for job in same
                if job.devices > anchor.devices
            ]
            inputs = _pairs(pairs)
            fitted = fit_law(ANCHORED_LAW, inputs, np.array([job.seconds for _, job in pairs]), OTHER_SETS)
            fits[left_out] = _of_a_new_set(fitted)
        return fits[left_out]

    for group, members in grouped(jobs, lambda job: job.group).items():
        fitted = law_without(members[0].set_name)
        yield from _zero_shot(group, members, fitted, anchors)
        anchored = [
            (_first(same), job)
            for same in grouped(members, lambda job: job.series).values()
            for job in same
            if job.devices > _first(same).devices
        ]
        alone, guess = "no series with two numbers of devices", _job_guesses(members)
        yield GroupPredictions(group, ANCHORED, _predict(fitted, anchored, ONE_ROW), guess if anchored else alone)
        lengths = [
            (_middle(same), job)
            for same in grouped(members, lambda job: job.kind).values()
            for job in same
            if job.length != _middle(same).length and not math.isnan(job.length * _middle(same).length)
        ]
        if lengths:
            yield GroupPredictions(group, f"{ANCHORED}, other sequence lengths", _predict(fitted, lengths, ONE_LENGTH))
        near = _half_the_devices(members)
        predictions: list[CheckedPrediction] = []
        for devices, asked in grouped(near, lambda pair: pair[1].devices).items():
            own = [pair for pair in near if pair[1].devices <= devices / 2]
            predictions += _predict(_refit(fitted, own), asked, SEVERAL_SIZES)
        yield GroupPredictions(group, EXTRAPOLATED, predictions, guess if near else alone)


def _of_a_new_set(fitted: FittedLaw) -> FittedLaw:
    """Return a law that is fitted to other sets as that of a set never seen.

    Sets differ about their mean by ``BETWEEN_SETS``. One set, the least that says something of a constant, tells the
    mean that well; the law's prior is the other source.
    """
    prior, between = np.square(fitted.law.spread), np.square(BETWEEN_SETS)
    centre = np.log(fitted.law.centre({}, np.ones(1)))
    mean = centre + (fitted.log_constants - centre) * prior / (prior + between)
    return replace(fitted, log_constants=mean, covariance=fitted.covariance + np.diag(between))


def _half_the_devices(jobs: Sequence[_Job]) -> list[tuple[_Job, _Job]]:
    """Return pairs of an anchor and a job of one series: the job most like it of those on at most half the devices."""
    return [
        (_nearest(job, below), job)
        for same in grouped(jobs, lambda job: job.series).values()
        for job in same
        if (below := [other for other in same if other.devices <= job.devices / 2])
    ]


def _refit(fitted: FittedLaw, pairs: Sequence[tuple[_Job, _Job]]) -> FittedLaw:
    """Fit a law's constants to pairs of the set that is predicted, with what other sets say as the prior."""
    if not pairs:
        return fitted
    constants, spread = np.exp(fitted.log_constants), np.sqrt(np.diag(fitted.covariance))
    law = replace(fitted.law, centre=lambda inputs, seconds: constants, spread=tuple(spread.tolist()))
    return fit_law(law, _pairs(pairs), np.array([job.seconds for _, job in pairs]))


def _zero_shot(
    group: str, members: Sequence[_Job], fitted: FittedLaw, anchors: Sequence[HardwareAnchor]
) -> Iterator[GroupPredictions]:
    """Predict jobs from the rate that other published sets reached on the same chip, and from that on other chips.

    Where no other set has rows of the chip, the first protocol takes the rate from other chips, too.
    """

    def on_chip(hardware: str, precision: str, name: str, width: float) -> tuple[float, float, str]:
        return anchored_rate(hardware, precision, anchors, name, width)

    def on_others(hardware: str, precision: str, name: str, width: float) -> tuple[float, float, str]:
        return kindred_rate(hardware, precision, anchors, name, width)

    own = _from_rates(group, members, fitted, on_chip, (PUBLISHED_ROWS, PUBLISHED_ROWS_SPLIT))
    other = _from_rates(group, members, fitted, on_others, (OTHER_HARDWARE, OTHER_HARDWARE_SPLIT))
    if own.predictions or not other.predictions:
        yield own
        other.protocol = f"{ZERO_SHOT}, other hardware"
        yield other
    else:
        other.reason = f"{own.reason}: rates of other hardware"
        yield other


def _from_rates(
    group: str,
    members: Sequence[_Job],
    fitted: FittedLaw,
    rate_of: Callable[[str, str, str, float], tuple[float, float, str]],
    bases: tuple[str, str],
) -> GroupPredictions:
    """Predict jobs from a rate of computing by hardware, precision, set and hidden size.

    Args:
        group: the group's name in results.
        members: the jobs.
        fitted: the law of what many devices take besides computing.
        rate_of: returns FLOP/s, the standard deviation of its logarithm, and why there is none.
        bases: names of what a prediction rests on, for whole and for split models.
    """
    asked = GroupPredictions(group, ZERO_SHOT)
    pairs: list[dict[str, float]] = []
    kept: list[tuple[_Job, float]] = []
    for job in members:
        if math.isnan(job.flops):
            asked.reason = _NO_SHAPE
            continue
        text = job.row.label
        rate, spread, reason = rate_of(text("hardware"), text("precision"), job.set_name, job.row.number("hidden", 0.0))
        if reason:
            asked.reason = reason
            continue
        there = job.columns() | {
            "devices": 1.0,
            "split": 1.0,
            "tensor": 1.0,
            "flops": job.flops,
            "seconds": job.flops / rate,
        }
        there |= {"call": max(2048.0, min(job.call, 1e12))}
        pairs.append(job.columns() | {f"a_{name}": value for name, value in there.items()})
        kept.append((job, math.hypot(spread, job.bubble_sigma)))
    if kept:
        inputs = {name: np.array([pair[name] for pair in pairs]) for name in pairs[0]}
        centre, sigma = fitted.predict(inputs)
        asked.predictions = [
            CheckedPrediction(
                *(job.set_name, bases[job.split > 1], 1.0, job.series),
                *(float(value), float(np.hypot(wide, spread)), job.seconds),
            )
            for (job, spread), value, wide in zip(kept, centre, sigma, strict=True)
        ]
    return asked


def _median_width(jobs: Sequence[_Job]) -> float:
    widths = [job.row.numbers["hidden"] for job in jobs if "hidden" in job.row.numbers]
    return float(np.median(widths)) if widths else 0.0


def utilisation_anchors(rows: Sequence[TableRow]) -> list[HardwareAnchor]:
    """Summarise the utilisation (hardware FLOP/s over the chip's dense peak) that published training jobs reached.

    Jobs of the same chip, memory, class of precision and set (column ``set``, such as a paper or a vendor's table)
    become one anchor, with the median utilisation of its jobs and the standard deviation of their natural logarithms.
    A job counts if its hardware FLOP/s follow from the number of parameters or the shape of its model and
    from its throughput, or if the table states TFLOP/s for each device. Chips and precisions without a known peak are
    left out.

    Args:
        rows: one row for each job, as tables of the kind ``published jobs`` have them.

    Returns:
        One ``HardwareAnchor`` for each (chip, memory, precision, set), in the order of first appearance: ``chip``,
        ``memory_gb`` (0 if not stated), ``precision``, median ``utilisation``, ``spread`` (that standard deviation),
        ``rows`` (number of jobs), ``set_name`` (the column ``set``) and ``width`` (median hidden size of the models, 0
        if not stated). Its ``source`` (place of publication) is an empty text.
    """
    jobs = [job for job in map(_Job, rows) if math.isfinite(job.flops_per_second())]
    found = []

    def key(job: _Job) -> tuple[tuple[str, int], str, str]:
        return chip_of(job.row.label("hardware")), precision_class(job.row.label("precision")), job.set_name

    for (chip, precision, name), same in grouped(jobs, key).items():
        peak = peak_flops(same[0].row.label("hardware"), same[0].row.label("precision"))
        if math.isnan(peak):
            continue
        logs = np.log([job.flops_per_second() / peak for job in same])
        found.append(
            HardwareAnchor(
                *(chip[0], chip[1], precision, round(float(np.exp(np.median(logs))), 4), round(float(logs.std()), 4)),
                *(len(same), name, "", _median_width(same)),
            )
        )
    return found


def scaling_law(rows: Sequence[TableRow]) -> Iterator[GroupPredictions]:
    """Predict the final losses of the largest 10 % of the training runs, by training FLOP, from the other 90 %.

    The law L = E + A/N^α + B/D^β, for N parameters and D = FLOP/(6 N) tokens, is fitted to the smaller runs. With fewer
    than 20 runs nothing is predicted.

    Args:
        rows: one row for each training run: model size, training FLOP and final loss, as tables of the kind ``scaling
            law`` have them.

    Yields:
        For each protocol (zero-shot: from no run; anchored: from one run; extrapolated: from the smaller runs) one
        record with ``group`` (``loss``), ``protocol``, ``predictions`` (a list of ``CheckedPrediction``, with
        ``predicted`` and ``measured``) and ``reason``: why that list is empty, as always for the first two, else an
        empty text.
    """
    flop = np.array([row.number("training_flop") for row in rows])
    inputs = {"parameters": np.array([row.number("model_size") for row in rows]), "flop": flop}
    loss = np.array([row.number("loss") for row in rows])
    yield GroupPredictions("loss", ZERO_SHOT, reason="the constants of a loss are fitted, not taken from other data")
    yield GroupPredictions("loss", ANCHORED, reason="one run does not fix five constants")
    if len(rows) < 20:
        yield GroupPredictions("loss", EXTRAPOLATED, reason="fewer than 20 runs for five constants")
        return
    large = flop >= np.quantile(flop, 0.9)
    fitted = fit_law(LOSS_LAW, {name: column[~large] for name, column in inputs.items()}, loss[~large])
    centre, sigma = fitted.predict({name: column[large] for name, column in inputs.items()})
    base = flop[~large].max()
    predictions = [
        CheckedPrediction("scaling law", "loss of smaller runs", *each)
        for each in zip(
            (flop[large] / base).tolist(),
            [f"{size:.3g}" for size in inputs["parameters"][large]],
            centre.tolist(),
            sigma.tolist(),
            loss[large].tolist(),
            strict=True,
        )
    ]
    yield GroupPredictions("loss", EXTRAPOLATED, predictions)
