"""Build the program of one step from the objects that a run uses: buckets, FSDP-wrapped modules, pipeline orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch

from tutti import parallel
from tutti.comm.partition import even_share
from tutti.comm.tree_sum import tree_sum_traffic
from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.config.sync_config import AllReduceConfig, DiLoCoConfig, LocalSGDConfig, RowsConfig
from tutti.config.train_config import TrainConfig
from tutti.data.contract import BatchContract
from tutti.errors import UsageError
from tutti.parallel.ddp.buckets import Tail, plan_buckets
from tutti.parallel.local_sgd.local_sgd import LOSS_LANES
from tutti.parallel.pipeline.pipeline_schedule import Action, Order, make_order, timeline
from tutti.planning.machine_costs import SAMPLES, StepCosts, median_draw, schedule_seconds
from tutti.planning.pass_prices import PASSES, Pass, PassPrices
from tutti.planning.scaling_laws import Array
from tutti.planning.step_program import (
    COMMUNICATION,
    UPDATE,
    GradientVector,
    PeriodicCollective,
    StepAction,
    StepProgram,
)
from tutti.workload.workload_file import LOSS, REST, GroupWork, Workload

BUILT = ("single", "mirrored", "sharded", "pipeline", "model_parallel", "local_sgd", "diloco")
"""Strategies whose step can be built."""
_MEGABYTE = 1 << 20
_BUCKET_MB = 25.0
_SHOWN = 64
"""Micro-batches that a program has one by one; more are one action, because nothing happens between them."""
_WIRE_BYTES = {"bf16": 2, "fp16": 2}
_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


@dataclass(frozen=True)
class TensorFacts:
    """A trainable parameter.

    Attributes:
        name: in the model.
        group: name of the module group of the workload that holds it.
        shape: its shape.
        dtype: its dtype.
    """

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements of the parameter."""
        return int(np.prod(self.shape, dtype=np.int64)) if self.shape else 1

    @property
    def bytes(self) -> int:
        """Bytes of the parameter."""
        return self.elements * self.dtype.itemsize

    def padded(self, ranks: int) -> int:
        """Return the elements on all ranks together if each holds equally many rows (first dimension), with padding."""
        rows = self.shape[0] if self.shape else 1
        return len(even_share(rows, ranks, 0)) * ranks * (self.elements // max(rows, 1))


@dataclass(frozen=True)
class StageFacts:
    """What the virtual stages of a pipeline hold and send.

    Attributes:
        groups: names of the module groups of each virtual stage.
        tensors: places of the trainable parameters of each virtual stage in ``StepFacts.tensors``.
        crossing: names of the module groups whose outputs cross each cut.
    """

    groups: tuple[tuple[str, ...], ...]
    tensors: tuple[tuple[int, ...], ...]
    crossing: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StepFacts:
    """What the step of a model computes and sends.

    Attributes:
        workload: of the model and its loss.
        tensors: trainable parameters, in the model's order.
        stages: of a pipeline, else None.
    """

    workload: Workload
    tensors: tuple[TensorFacts, ...]
    stages: StageFacts | None = None


def gradient_vectors(
    tensors: Sequence[TensorFacts], wire: str = "fp32", bucket_mb: float | None = None
) -> list[GradientVector]:
    """Return the flat vectors that data ranks all-reduce in a step: gradient buckets, then loss sums and flags.

    Loss sums and flags are part of the last bucket where dtypes allow it, else a vector of their own, as in
    ``OverlappedReducer``.

    Args:
        tensors: trainable parameters, in the model's order.
        wire: dtype of the messages: ``fp32`` (as the gradients), ``bf16`` or ``fp16``.
        bucket_mb: megabytes of a bucket; None: 25.
    """
    tail = Tail(len(tensors), 0).size
    groups = plan_buckets([(t.bytes, str(t.dtype)) for t in tensors], int((bucket_mb or _BUCKET_MB) * _MEGABYTE))
    found = []
    rides = False
    for number, group in enumerate(groups):
        dtype = tensors[group[0]].dtype
        rides = number == len(groups) - 1 and wire == "fp32" and dtype in (torch.float32, torch.float64)
        elements = sum(tensors[place].elements for place in group) + tail * rides
        found.append(GradientVector(tuple(group), elements, _WIRE_BYTES.get(wire, dtype.itemsize)))
    if not rides:
        found.append(GradientVector((), tail, torch.float64.itemsize))
    return found


def local_sgd_collectives(
    tensors: Sequence[TensorFacts], ranks: int, workers: int, period: int, rank: int = 0
) -> list[PeriodicCollective]:
    """List the collectives that a rank makes in local SGD: loss sums in each step, parameters once in a period.

    Args:
        tensors: trainable parameters.
        ranks: data ranks.
        workers: logical workers over all ranks.
        period: steps between two averages.
        rank: the rank; the first has most workers.
    """
    lengths: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        lengths[tensor.dtype] += tensor.elements
    sums = [(LOSS_LANES, torch.float64, 1), *((n, dtype, period) for dtype, n in sorted(lengths.items(), key=str))]
    return [
        PeriodicCollective(kind, size, every)
        for length, dtype, every in sums
        for kind, size in tree_sum_traffic(ranks, workers, rank, length, dtype.itemsize).items()
    ]


def row_bytes(tensors: Sequence[TensorFacts], ranks: int) -> list[int]:
    """Return the bytes of each gradient bucket of ZeRO stage 1, in which ranks have equally many rows of every tensor.

    Args:
        tensors: trainable parameters, in the model's order.
        ranks: ranks that shard the optimizer state; rows are padded to a multiple of them.
    """
    buckets = plan_buckets([(t.bytes, str(t.dtype)) for t in tensors], int(_BUCKET_MB * _MEGABYTE))
    return [sum(tensors[i].padded(ranks) * tensors[i].dtype.itemsize for i in group) for group in buckets]


def module_bytes(facts: StepFacts, ranks: int) -> dict[str, int]:
    """Return the bytes of trainable parameters of each module group, as FSDP gathers them: rows padded to all ranks.

    Args:
        facts: what the model computes and sends.
        ranks: ranks over which the rows are sharded.
    """
    sizes = {group.name: 0 for group in facts.workload.groups}
    for tensor in facts.tensors:
        sizes[tensor.group] += tensor.padded(ranks) * tensor.dtype.itemsize
    return sizes


def totals_bytes(tensors: Sequence[TensorFacts]) -> int:
    """Return the bytes of the small all-reduce of a sharded step: loss sums, flags by parameter, and squared norm."""
    return 8 * (Tail(len(tensors), 0).size + 1)


def rank_micro_batches(config: TrainConfig) -> list[list[int]]:
    """Return the sizes in samples of the micro-batches of data rank 0, one list for each of its logical workers.

    Rank 0 has at least as many samples as any other.
    """
    choice = parallel.parse_strategy(config.strategy)
    ranks = choice.data_ranks(int(config.devices))
    workers = config.workers or ranks
    micro = parallel.micro_batch(choice, config.micro_batch, config.batch_size, workers)
    contract = BatchContract(1, config.batch_size, workers, ranks, micro)
    return [
        [len(part) for part in contract.micro_batches(len(contract.worker(config.batch_size, worker)))]
        for worker in contract.mine(0)
    ]


def check_buildable(config: TrainConfig) -> None:
    """Raise UsageError if the step of this strategy, or of one of its options, cannot be simulated."""
    choice = parallel.parse_strategy(config.strategy)
    where = f"--strategy {config.strategy}"
    if choice.name not in BUILT:
        raise UsageError(
            f"a step of {choice.name} cannot be simulated yet", where=where, remedy=f"take one of {', '.join(BUILT)}"
        )
    exchange = choice.exchange
    if isinstance(exchange, AllReduceConfig) and exchange.algorithm == "shared_memory":
        raise UsageError(
            "sums in shared memory cannot be simulated",
            where=where,
            why="tutti bench measures no such sum",
            remedy="take algorithm=native, or an algorithm with a schedule: ring, tree, halving, hierarchical, central",
        )
    if isinstance(exchange, RowsConfig) and (exchange.offload or exchange.param_dtype):
        raise UsageError(
            "offload and param_dtype cannot be simulated",
            where=where,
            why="nothing measures copies to the host, or casts of parameters",
            remedy="leave them out",
        )
    if isinstance(exchange, LocalSGDConfig) and exchange.post:
        raise UsageError(
            "a synchronous phase at the start cannot be simulated together with the local steps",
            where=where,
            why="its steps cost more than the local ones, and one step stands for all",
            remedy="leave out post; --strategy mirrored is near its steps",
        )
    for option, value in (("reproducible", config.reproducible), ("batch_norm", config.batch_norm != "worker")):
        if value:
            flag = option.replace("_", "-")
            raise UsageError(f"--{flag} cannot be simulated", where=where, remedy=f"leave out --{flag}")


def build_step(
    facts: StepFacts, config: TrainConfig, costs: StepCosts, prices: PassPrices | None = None
) -> tuple[StepProgram, Array]:
    """List all computations and messages of a training step, with their seconds and dependences.

    Args:
        facts: what the model computes and sends.
        config: the run, with a number of devices.
        costs: prices of the machine.
        prices: of the workload's passes, where other plans on as many devices a node have computed some; None: none.

    Returns:
        The program of a device that computes as long as the slowest, or of one pipeline of such devices; and the
        factor by which the slowest computes longer than the typical one, one element a draw.

    Raises:
        UsageError: the strategy, one of its options, or a link cannot be priced.
    """
    check_buildable(config)
    choice = parallel.parse_strategy(config.strategy)
    devices = int(config.devices)
    # The number of devices must fit the strategy.
    shape = choice.shape(devices)
    parts = rank_micro_batches(config)
    prices = PassPrices(facts.workload, costs) if prices is None else prices
    computing = typical_computing(config, parts, prices)
    slow = costs.slowest(devices, median_draw(computing) / shape["stage"])
    builder = _Builder(facts, config, costs, slow, prices)
    if isinstance(choice.layout, PipelineConfig | LayersConfig):
        return builder.pipeline(choice, parts, shape), slow
    if isinstance(choice.exchange, RowsConfig) and choice.exchange.stage > 1 and devices > 1:
        return builder.fully_sharded(choice.exchange.stage, parts, devices), slow
    if isinstance(choice.exchange, RowsConfig) and devices > 1:
        return builder.sharded_optimizer(parts, devices), slow
    if isinstance(choice.exchange, LocalSGDConfig):
        return builder.local_steps(choice.exchange, parts, devices), slow
    return builder.whole(choice.exchange, parts, devices), slow


def typical_computing(config: TrainConfig, parts: Sequence[Sequence[int]], prices: PassPrices) -> Array:
    """Return the seconds of forward and backward of all micro-batches of a data rank, on one typical device.

    Args:
        config: the run.
        parts: samples of each micro-batch, by logical worker (``rank_micro_batches``).
        prices: of the passes.

    Returns:
        (draws,) seconds, as if the device held the whole model.
    """
    total, choice = np.zeros(SAMPLES), config.activation_checkpointing
    for samples, number in Counter(samples for worker in parts for samples in worker).items():
        total += number * (prices.total("forward", samples, choice) + prices.total("backward", samples, choice))
    return total


def all_reduce_seconds(costs: StepCosts, exchange: Any, ranks: int, size: float) -> Array:
    """Return the seconds of the all-reduce of one vector over the data ranks, one element a draw.

    Args:
        costs: prices of the machine.
        exchange: options of an all-reduce, such as the algorithm.
        ranks: data ranks.
        size: bytes of the vector.
    """
    if exchange.schedule is None:
        return costs.collective("all_reduce", ranks, size)
    network, node = costs.link(ranks)
    per_node = min(costs.network.per_node, ranks)
    if exchange.schedule == "hierarchical":
        costs.note("transfers within a node take as long as copies in its memory")
    return np.full(SAMPLES, schedule_seconds(exchange.schedule, ranks, size, network, node, per_node))


def stage_passes(prices: PassPrices, facts: StageFacts, passed: Pass, samples: int, checkpointing: str) -> Array:
    """Return the seconds of a forward or backward of each virtual stage of a pipeline over a micro-batch.

    Work of no stage's modules is spread evenly over the stages; the loss belongs to the last stage.

    Args:
        prices: of the workload's passes.
        facts: of the stages.
        passed: ``forward`` or ``backward``.
        samples: of the micro-batch.
        checkpointing: choice of activation checkpointing, such as ``none``.

    Returns:
        (virtual stages, draws).
    """

    def add() -> Array:
        groups = {group.name: group for group in prices.workload.groups}
        rest = prices.group(groups[REST], passed, samples, checkpointing) / len(facts.groups)
        found = [
            sum((prices.group(groups[name], passed, samples, checkpointing) for name in names), rest)
            for names in facts.groups
        ]
        found[-1] = found[-1] + prices.group(groups[LOSS], passed, samples, checkpointing)
        return np.stack(found)

    return prices.once(("stages", facts.groups, passed, samples, checkpointing), add)


def crossing_bytes(prices: PassPrices, facts: StageFacts, cut: int, samples: int) -> float:
    """Return the bytes that a micro-batch sends over a cut between two virtual stages, in each direction.

    Args:
        prices: of the workload's passes; only the sizes of outputs are read.
        facts: of the stages.
        cut: index of the cut, which is between the virtual stages ``cut`` and ``cut + 1``.
        samples: of the micro-batch.
    """
    sizes = {group.name: group.output_bytes for group in prices.workload.groups}
    return sum(sizes[name].at(samples) for name in facts.crossing[cut])


@dataclass
class _Builder:
    """Builds programs of one configuration.

    Attributes:
        facts, config, costs: as of ``build_step``.
        slow: factor of the slowest device on computing.
        prices: of the workload's passes.
    """

    facts: StepFacts
    config: TrainConfig
    costs: StepCosts
    slow: Array
    prices: PassPrices

    def whole(self, exchange: Any, parts: Sequence[Sequence[int]], ranks: int) -> StepProgram:
        """Build the step of whole replicas whose gradients are added up in buckets."""
        program = StepProgram()
        samples = [count for worker in parts for count in worker]
        ends = self._passes(program, samples)
        needs = [len(program.actions) - 1]
        if ranks > 1:
            program.vectors += gradient_vectors(self.facts.tensors, exchange.wire, exchange.bucket_mb)
            needs = self._all_reduces(program, exchange, ranks, ends)
        self._update(program, sum(t.elements for t in self.facts.tensors), needs)
        return program

    def local_steps(self, exchange: LocalSGDConfig, parts: Sequence[Sequence[int]], ranks: int) -> StepProgram:
        """Build a step of local SGD: each worker's passes and update, loss sums, and its share of the averaging.

        The average of the parameters once in a period, and DiLoCo's outer update after it, take their time divided by
        the period.
        """
        program, tensors = StepProgram(), self.facts.tensors
        self._passes(program, [count for worker in parts for count in worker])
        elements = sum(t.elements for t in tensors)
        last = len(program.actions) - 1
        for _ in parts:
            last = self._update(program, elements, [last])
        workers = self.config.workers or ranks
        program.collectives += local_sgd_collectives(tensors, ranks, workers, exchange.period)
        if program.collectives:
            self.costs.note("an all-to-all takes as long as a reduce-scatter of as many bytes")
        for number, each in enumerate(program.collectives):
            kind = "reduce_scatter" if each.kind == "all_to_all" else each.kind
            seconds = self.costs.collective(kind, ranks, each.bytes) / each.period
            text = f"{each.kind} of " + ("loss sums" if number < 2 else f"parameters, 1/{each.period} of it")
            last = self._message(program, seconds, (last,), text)
        if isinstance(exchange, DiLoCoConfig):
            self.costs.note("DiLoCo's outer update takes as long as a step of SGD with as many parameters")
            outer = self.costs.update("sgd", elements) / exchange.period
            program.add(StepAction(0, UPDATE, outer, (last,), text="outer update"))
        return program

    def sharded_optimizer(self, parts: Sequence[Sequence[int]], ranks: int) -> StepProgram:
        """Build the step of ZeRO stage 1: reduce-scatters after backward, all-gathers after the update."""
        program, tensors = StepProgram(), self.facts.tensors
        self._passes(program, [count for worker in parts for count in worker])
        sizes = row_bytes(tensors, ranks)
        last = len(program.actions) - 1
        for number, size in enumerate(sizes):
            last = self._send(program, "reduce_scatter", ranks, size, (last,), f"gradients {number}")
        last = self._totals(program, ranks, last)
        last = self._update(program, sum(t.padded(ranks) for t in tensors) / ranks, [last])
        for number, size in enumerate(sizes):
            last = self._send(program, "all_gather", ranks, size, (last,), f"parameters {number}")
        return program

    def fully_sharded(self, stage: int, parts: Sequence[Sequence[int]], ranks: int) -> StepProgram:
        """Build the step of FSDP2: modules gathered one ahead, and reduce-scattered in every micro-batch.

        Where collectives block (CPUs), each waits for the computing before it.
        """
        program = StepProgram()
        groups = {group.name: group for group in self.facts.workload.groups}
        sizes = module_bytes(self.facts, ranks)
        names = [name for name in groups if name not in (REST, LOSS)]
        last = -1
        for samples in (count for worker in parts for count in worker):
            order = [REST, *names, LOSS]
            computed = [last]
            for number, name in enumerate(order):
                needs = [computed[-1]]
                if sizes[name]:
                    # One module ahead: its all-gather begins as the module before the previous one has ended.
                    ahead = computed[-1] if not self.costs.overlaps else computed[max(0, number - 1)]
                    needs.append(self._send(program, "all_gather", ranks, sizes[name], _known(ahead), name))
                seconds = self._group(groups[name], "forward", samples)
                computed.append(program.add(StepAction(0, "forward", seconds, _known(*needs), text=name)))
            last, sent = computed[-1], -1
            before = last
            for name in [LOSS, *reversed(names), REST]:
                needs = [last]
                if stage == 3 and name in names and sizes[name]:
                    ahead = before if self.costs.overlaps else last
                    needs.append(self._send(program, "all_gather", ranks, sizes[name], _known(ahead), name))
                seconds = self._group(groups[name], "backward", samples)
                before = last
                last = program.add(StepAction(0, "backward", seconds, _known(*needs), text=name))
                if sizes[name]:
                    sent = self._send(program, "reduce_scatter", ranks, sizes[name], (last,), name)
                    last = last if self.costs.overlaps else sent
            last = max(last, sent)
        last = self._totals(program, ranks, last)
        self._update(program, sum(t.padded(ranks) for t in self.facts.tensors) / ranks, [last])
        return program

    def pipeline(self, choice: Any, parts: Sequence[Sequence[int]], shape: Mapping[str, int]) -> StepProgram:
        """Build the step of a pipeline: its order of micro-batches, then the all-reduces of each stage."""
        stages, replicas, layout = shape["stage"], shape["replica"], choice.layout
        facts = self.facts.stages
        if facts is None:
            raise UsageError("the stages of this pipeline are not known", remedy="take --strategy mirrored")
        program = StepProgram(devices=stages)
        for worker in parts:
            order = make_order(layout.schedule, stages, len(worker), layout.chunks)
            self._play(program, order, facts, worker)
        for device in range(stages):
            held = [i for virtual in range(device, order.stages, stages) for i in facts.tensors[virtual]]
            tensors = [self.facts.tensors[i] for i in held]
            last = max(i for i, action in enumerate(program.actions) if action.device == device)
            needs = [last]
            if replicas > 1:
                vectors = gradient_vectors(tensors, choice.exchange.wire, choice.exchange.bucket_mb)
                program.vectors += vectors
                for vector in vectors:
                    seconds = all_reduce_seconds(self.costs, choice.exchange, replicas, vector.bytes)
                    needs = [self._message(program, seconds, (needs[-1],), "gradients", device)]
            self._update(program, sum(t.elements for t in tensors), needs, device)
        return program

    def _play(self, program: StepProgram, order: Order, facts: StageFacts, samples: Sequence[int]) -> None:
        """Append one worker's micro-batches in the order of the schedule."""
        ranks, places = len(order.ranks), dict[Action, int]()
        checkpointing, passes = self.config.activation_checkpointing, dict[tuple[Pass, int], Array]()
        arrivals: dict[Action, int] = {}
        rows = timeline(order, lambda action: 1.0)
        flat = sorted(((span.start, rank, span.action) for rank, row in enumerate(rows) for span in row))
        for _, rank, action in flat:
            count = samples[action.micro]
            needs = [
                arrivals.get(need, places[need]) if need.stage != action.stage else places[need]
                for need in order.needs(action)
            ]
            passed: Pass = "forward" if action.kind == "F" else "backward"
            if (passed, count) not in passes:
                passes[passed, count] = stage_passes(self.prices, facts, passed, count, checkpointing) * self.slow
            seconds = passes[passed, count][action.stage]
            if action.kind in ("I", "W"):
                # Input and weight backward each take half of a backward: a guess.
                seconds = seconds / 2
            text = f"{action.kind}{action.micro} of stage {action.stage}"
            places[action] = program.add(StepAction(rank, _PHASES[action.kind], seconds, tuple(needs), text=text))
            # The output goes to the next stage, the gradient of the input to the previous one.
            other = action.stage + 1 if action.kind == "F" else action.stage - 1
            if action.kind == "W" or not 0 <= other < order.stages or other % ranks == rank:
                continue
            cut = min(action.stage, other)
            size = crossing_bytes(self.prices, facts, cut, count)
            program.count_between_stages(rank, other % ranks, len(facts.crossing[cut]), round(size))
            price = self.costs.message(size, int(self.config.devices))
            arrivals[action] = self._message(program, price, (places[action],), text, rank)

    def _passes(self, program: StepProgram, samples: Sequence[int]) -> dict[str, int]:
        """Append forwards and backwards; return the place of each group's backward in the last micro-batch."""
        groups = {group.name: group for group in self.facts.workload.groups}
        order = self._backward_order()
        ends: dict[str, int] = {}
        shown = samples
        if len(samples) > _SHOWN:
            # Many accumulated micro-batches, which nothing interrupts, are one forward and one backward.
            before, shown = Counter(samples[:-1]), samples[-1:]
            for phase in PASSES:
                seconds = np.zeros(SAMPLES)
                for (count, number), group in product(before.items(), groups.values()):
                    seconds += number * self._group(group, phase, count)
                program.add(StepAction(0, phase, seconds, text=f"{len(samples) - 1} micro-batches"))
        for count in shown:
            forward = sum((self._group(group, "forward", count) for group in groups.values()), np.zeros(SAMPLES))
            program.add(StepAction(0, "forward", forward))
            for name in order:
                seconds = self._group(groups[name], "backward", count)
                ends[name] = program.add(StepAction(0, "backward", seconds, text=name))
        return ends

    def _backward_order(self) -> list[str]:
        """Return the groups in the order in which backward reaches them: the loss, then by complete gradients.

        What no module group holds, such as the head, is computed where its first gradient becomes complete.
        """
        order = {name: place for place, name in enumerate(self.facts.workload.gradient_order)}
        places: dict[str, float] = {LOSS: -1.0}
        rest = [order[t.name] for t in self.facts.tensors if t.group == REST and t.name in order]
        for group in self.facts.workload.groups:
            if group.name not in (REST, LOSS):
                places[group.name] = float(-0.5 if group.ready is None else group.ready)
        places[REST] = float(min(rest, default=len(order)))
        return sorted(places, key=lambda name: places[name])

    def _all_reduces(self, program: StepProgram, exchange: Any, ranks: int, ends: Mapping[str, int]) -> list[int]:
        """Append the all-reduces of all buckets, in order; those of the backend overlap backward."""
        order = {name: place for place, name in enumerate(self.facts.workload.gradient_order)}
        sequence = self._backward_order()
        ready = {g.name: g.ready for g in self.facts.workload.groups}
        last = len(program.actions) - 1
        needs: list[int] = []
        if exchange.algorithm == "auto" and not self.costs.overlaps:
            self.costs.note(
                "algorithm=auto is priced as the backend's all-reduce; processes of one node sum in shared "
                "memory, which tutti bench does not measure"
            )
        for number, vector in enumerate(program.vectors):
            complete = last
            if exchange.schedule is None and number < len(program.vectors) - 1:
                complete = max(
                    (
                        max(ends[self.facts.tensors[i].group], self._reached(order, ready, sequence, ends, i))
                        for i in vector.parameters
                    ),
                    default=last,
                )
            seconds = all_reduce_seconds(self.costs, exchange, ranks, vector.bytes)
            needs = [self._message(program, seconds, (complete,), f"gradient bucket {number}")]
        return needs

    def _reached(
        self,
        order: Mapping[str, int],
        ready: Mapping[str, int | None],
        sequence: Sequence[str],
        ends: Mapping[str, int],
        tensor: int,
    ) -> int:
        """Return the place of the backward that precedes the completion of a parameter's gradient."""
        name = self.facts.tensors[tensor].name
        place = order.get(name, len(order))
        before = [ends[g] for g in sequence if g not in (REST, LOSS) and (ready[g] is None or (ready[g] or 0) <= place)]
        return max(before, default=ends[LOSS])

    def _totals(self, program: StepProgram, ranks: int, last: int) -> int:
        """Append the all-reduce of loss sums, used flags and the norm."""
        return self._send(program, "all_reduce", ranks, totals_bytes(self.facts.tensors), (last,), "totals")

    def _send(self, program: StepProgram, kind: str, ranks: int, size: float, needs: tuple[int, ...], text: str) -> int:
        return self._message(program, self.costs.collective(kind, ranks, size), needs, f"{kind} of {text}")

    def _message(self, program: StepProgram, seconds: Array, needs: tuple[int, ...], text: str, device: int = 0) -> int:
        return program.add(StepAction(device, COMMUNICATION, seconds, needs, link=True, text=text))

    def _update(self, program: StepProgram, parameters: float, needs: Sequence[int], device: int = 0) -> int:
        seconds = self.costs.update(self.config.optimizer, parameters)
        return program.add(StepAction(device, UPDATE, seconds, _known(*needs), text=self.config.optimizer))

    def _group(self, group: GroupWork, phase: Pass, samples: int) -> Array:
        """Price a group's forward or backward on the slowest device."""
        return np.asarray(self.prices.group(group, phase, samples, self.config.activation_checkpointing) * self.slow)


def _known(*places: int) -> tuple[int, ...]:
    """Return the places of actions, without those before the first."""
    return tuple(dict.fromkeys(place for place in places if place >= 0))


def crossing_groups(uses: Mapping[str, tuple[int, int]], bounds: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return for each cut between pipeline stages the names of the modules whose output a later stage needs.

    Args:
        uses: by module name, index of its call in the traced forward, and of the last node that uses its output.
        bounds: index of the first node of each stage, and at the end the number of nodes.

    >>> crossing_groups({"a": (0, 2), "b": (1, 2), "c": (2, 3)}, [0, 1, 2, 3])
    (('a',), ('a', 'b'))
    """
    inner = [high for _, high in pairwise(bounds)][:-1]
    return tuple(tuple(name for name, (place, last) in uses.items() if place < cut <= last) for cut in inner)
