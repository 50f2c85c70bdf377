"""A lower bound of a step's seconds in closed form, which costs the same however many actions its program has.

No draw of the program's seconds is below the bound's. A search over plans needs the program, whose actions grow with
modules and micro-batches, only where the bound is below the best plan that it knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutti.config.sync_config import AllReduceConfig, RowsConfig
from tutti.planning.communication_seconds import (
    all_reduce_seconds,
    collective_seconds,
    gradient_norm_seconds,
    message_seconds,
    micro_batch_overhead,
    pass_messages,
    sums_in_memory,
)
from tutti.planning.monte_carlo import DRAWS, median_draw
from tutti.planning.pass_prices import PASSES, Pass, PassPrices
from tutti.planning.pipeline_builder import crossing_bytes, stage_groups, stage_passes
from tutti.planning.planned_run import PlannedRun
from tutti.planning.scaling_laws import Array
from tutti.planning.step_builders import rank_micro_batches, slowness, typical_computing
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_facts import (
    StageFacts,
    StepFacts,
    TensorFacts,
    carried,
    gradient_vectors,
    module_bytes,
    pipeline_layout,
    rank_row_bytes,
    row_bytes,
    row_tensors,
    totals_bytes,
    unwrapped_tensors,
    wrapped_module_count,
)
from tutti.planning.strategy_work import strategy_key
from tutti.workload.workload_file import REST


@dataclass(frozen=True, eq=False)
class StepFloor:
    """A lower bound of a training step's seconds.

    Attributes:
        seconds: (256,) lower bounds, one for each Monte Carlo draw of the machine's uncertain constants; the
            simulated step takes as long or longer in each.
        terms: seconds of the median bound by cause: compute, communication, bubble, idling.
    """

    seconds: Array
    terms: Mapping[str, float]


def step_floor(facts: StepFacts, config: PlannedRun, costs: StepCosts, prices: PassPrices) -> StepFloor | None:
    """Return a lower bound of a training step's seconds in closed form, without simulating the step.

    The bound is the computing of the slowest device, the communication that cannot overlap this computing, and the
    update. A search over plans simulates a step only if its bound is below the best step found so far.

    Args:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model.
        config: configuration of the run, with a number of devices.
        costs: predicts the seconds of computing and communication on the machine.
        prices: predicts the seconds of the model's forwards and backwards over a micro-batch, and caches them.

    Returns:
        A ``StepFloor``: ``seconds``, lower bounds as an array of shape (256,), one for each of the Monte Carlo draws of
        the machine's uncertain constants; and ``terms``, the seconds of the median bound by cause: ``compute``,
        ``communication``, ``idling``, and for a pipeline ``bubble``. None for a strategy without a bound, such as
        parameter servers, and for a pipeline whose ``facts`` have no stages: such a step must be simulated
        (``build_step``).

    Raises:
        UsageError: the machine's data lack the cost of a link, a collective, a class of operators or the optimizer; the
            devices do not fit the strategy; or activation checkpointing finds nothing to recompute in this model.
    """
    choice, shape, parts = config.strategy_choice, config.shape, rank_micro_batches(config)

    def opened() -> _Floor:
        computing = typical_computing(config, parts, prices)
        return _Floor(facts, config, costs, prices, slowness(config, costs, computing), computing, shape)

    layout, sync = pipeline_layout(choice, shape), choice.sync
    if layout is not None and isinstance(sync, AllReduceConfig):
        stages = facts.stages
        if stages is None:
            return None
        # In zero bubble, weight backwards follow after the last gradient has been sent.
        drains, counts = layout.schedule != "zero_bubble", Counter(count for worker in parts for count in worker)
        # Schedules of as many virtual stages have one bound, such as gpipe and 1f1b.
        sizes = tuple(counts.items()), config.activation_checkpointing, config.optimizer, tuple(shape.values())
        key = "pipeline", stages, sync, drains, *sizes
        return prices.once(key, lambda: opened().pipeline(sync, stages, counts, drains))
    floor = opened()
    if isinstance(sync, RowsConfig) and shape["shard"] > 1:
        return floor.rows(sync.stage, parts)
    if isinstance(sync, AllReduceConfig):
        return floor.whole(sync, parts, config.data_ranks)
    return None


@dataclass
class _Floor:
    """Bounds of one configuration.

    Attributes:
        facts, config, costs, prices: as of ``step_floor``.
        slow: factor of the slowest device on computing.
        computing: all passes of a data rank on a typical device.
        shape: extents of the device mesh.
    """

    facts: StepFacts
    config: PlannedRun
    costs: StepCosts
    prices: PassPrices
    slow: Array
    computing: Array
    shape: Mapping[str, int]

    def whole(self, sync: AllReduceConfig, parts: Sequence[Sequence[int]], ranks: int) -> StepFloor:
        """Return a lower bound of the seconds of a data-parallel step whose replicas all-reduce their gradients.

        At least the last all-reduce follows backward; the others may overlap the last micro-batch's backward.

        Args:
            sync: options of gradient synchronisation.
            parts: number of samples in each micro-batch, one list for each logical worker of a data rank.
            ranks: number of data ranks.
        """
        tensors, computed = self.facts.tensors, self.computing * self.slow
        samples = Counter(samples for worker in parts for samples in worker)
        for count, number in samples.items() if self.facts.messages else ():
            computed = computed + number * sum(self._tensor(passed, count, None) for passed in PASSES)
        update = self._update(sum(t.elements for t in tensors), len(tensors))
        computed = computed + self._norm() + self._whole_overhead(sum(samples.values()))
        if ranks < 2:
            return self._of(computed + update, self.computing + update)
        sums = self._sums(sync, ranks)
        total = sums.sum(axis=0)
        if sync.schedule is not None or sums_in_memory(self.costs, sync, ranks * self.shape["tensor"]):
            return self._of(computed + total + update, self.computing + update)
        last = [samples for worker in parts for samples in worker][-1]
        hidden = self.prices.total("backward", last, self.config.activation_checkpointing) * self.slow
        if self.facts.messages:
            # The all-reduces of gradients take turns with those of the tensor ranks on the link.
            return self._of(computed + sums[-1] + update, self.computing + update)
        return self._of(np.maximum(computed + sums[-1], computed - hidden + total) + update, self.computing + update)

    def _tensor(self, passed: Pass, samples: int, groups: tuple[str, ...] | None) -> Array:
        """Return the seconds of the collectives over the tensor ranks in a pass over a micro-batch."""
        choice = self.config.activation_checkpointing

        def add() -> Array:
            sent = pass_messages(self.facts, choice, passed, samples, groups)
            return message_seconds(self.prices, sent, self.shape["tensor"])

        return self.prices.once(("tensor pass", passed, samples, choice, groups), add)

    def _sums(self, sync: AllReduceConfig, ranks: int) -> Array:
        """Return the seconds of the all-reduces of a replica, in order."""
        apart = self.shape["stage"] * self.shape["tensor"]

        def add() -> Array:
            vectors = gradient_vectors(self.facts.tensors, sync.wire, sync.bucket_mb)
            return np.stack([all_reduce_seconds(self.costs, sync, ranks, vector.bytes, apart) for vector in vectors])

        return self.prices.once(("sums", sync, ranks, apart), add)

    def rows(self, stage: int, parts: Sequence[Sequence[int]]) -> StepFloor:
        """Return a lower bound of the seconds of a step with ZeRO sharding, by tutti (stage 1) or FSDP2 (2 and 3).

        Its collectives follow each other; from stage 2 on they may overlap computing, where the machine allows it.

        Args:
            stage: ZeRO stage.
            parts: number of samples in each micro-batch, one list for each logical worker of a data rank.
        """
        tensors, micro_batches, shards = self.facts.tensors, sum(map(len, parts)), self.shape["shard"]
        update = self.prices.once(
            ("update of rows", self.config.optimizer, shards),
            lambda: self._update(sum(t.padded(shards) for t in tensors) / shards, len(tensors)),
        )
        sent = self._rows_sent(stage) * (micro_batches if stage > 1 else 1)
        after = self._after_rows(stage) + self._norm(squares=1)
        computed = self.computing * self.slow + self._rows_overhead(stage, micro_batches)
        both = np.maximum(computed, sent) if stage > 1 and self.costs.overlaps else computed + sent
        return self._of(both + after + update, self.computing + update)

    def _overhead(self, tensors: Sequence[TensorFacts], micro_batches: int, units: int | None = None) -> Array:
        """Return the seconds that a step's micro-batches take in addition to their passes."""
        work = self.costs.strategy_work(strategy_key(self.config, self.shape))
        first, later = (micro_batch_overhead(self.costs, work, tensors, each, units) for each in (True, False))
        return first + (micro_batches - 1) * later

    def _whole_overhead(self, micro_batches: int) -> Array:
        key = "whole overhead", strategy_key(self.config, self.shape), micro_batches
        return self.prices.once(key, lambda: self._overhead(self.facts.tensors, micro_batches))

    def _rows_overhead(self, stage: int, micro_batches: int) -> Array:
        """Return ``_overhead`` of a rank, which from stage 2 on adds up the gradients of its own rows alone."""
        shards = self.shape["shard"]

        def add() -> Array:
            if stage == 1:
                return self._overhead(self.facts.tensors, micro_batches)
            modules = wrapped_module_count(module_bytes(self.facts, shards, frozen=True))
            return self._overhead(row_tensors(self.facts.tensors, shards), micro_batches, modules)

        return self.prices.once(("rows overhead", stage, shards, micro_batches), add)

    def _norm(self, squares: int | None = None) -> Array:
        """Return the seconds of the all-reduce of the gradient norm over the devices of a replica."""
        devices = self.shape["stage"] * self.shape["tensor"]
        return self.prices.once(("norm", devices, squares), lambda: gradient_norm_seconds(self.costs, devices, squares))

    def _rows_sent(self, stage: int) -> Array:
        """Return the seconds of the reduce-scatters and all-gathers of a micro-batch, in stage 1 of a step."""
        shards = self.shape["shard"]

        def add() -> Array:
            if stage == 1:
                scattered = gathered = row_bytes(self.facts.tensors, shards)
            else:
                sizes = {name: size for name, size in module_bytes(self.facts, shards, frozen=True).items() if size}
                scattered = [size for size in module_bytes(self.facts, shards).values() if size]
                gathered = [*sizes.values(), *(size for name, size in sizes.items() if name != REST and stage == 3)]
            return self._rows(scattered, gathered)

        return self.prices.once(("rows", stage, shards, self.shape["replica"]), add)

    def _after_rows(self, stage: int) -> Array:
        """Return the seconds of what follows the micro-batches: tensors that FSDP2 leaves, copies, and totals."""
        shards, copies = self.shape["shard"], self.shape["replica"]

        def add() -> Array:
            rest = row_bytes(unwrapped_tensors(self.facts), shards) if stage > 1 else []
            found = self._rows(rest, rest) + self._carried(
                "all_reduce", shards * copies, totals_bytes(self.facts.tensors)
            )
            for size in rank_row_bytes(self.facts.tensors, shards).values() if copies > 1 else ():
                found = found + self.costs.collective("all_reduce", copies, size, shards)
            return found

        return self.prices.once(("after rows", stage, shards, copies), add)

    def _rows(self, scattered: Sequence[int], gathered: Sequence[int]) -> Array:
        sent = np.zeros(DRAWS)
        for kind, each in (("reduce_scatter", scattered), ("all_gather", gathered)):
            for size, number in Counter(each).items():
                sent += number * self._carried(kind, self.shape["shard"], size)
        return sent

    def _carried(self, kind: str, ranks: int, size: float) -> Array:
        """Return the seconds of a collective of the data ranks, as the communicator carries it."""
        shared = self.costs.network.nodes(self.shape["shard"] * self.shape["replica"]) == 1
        each = carried(kind, ranks, size, cpu=not self.costs.overlaps, shared=shared)
        return self.prices.once((each, ranks), lambda: collective_seconds(self.costs, each, ranks))

    def pipeline(self, sync: AllReduceConfig, stages: StageFacts, counts: Mapping[int, int], drains: bool) -> StepFloor:
        """Return a lower bound of the seconds of a pipeline's step, the largest over its devices.

        Each device waits for its first micro-batch, and earlier stages for their last gradient.

        Args:
            sync: options of gradient synchronisation.
            stages: module groups and parameters of each virtual stage.
            counts: number of micro-batches of a data rank by their samples.
            drains: whether earlier stages compute their last gradient after the later ones.
        """
        devices = self.shape["stage"]
        filled, drain, sent_within, typical = self._stage_work(stages, counts)
        sums = self._stage_sums(sync, stages, devices, self.shape["replica"])
        after = np.maximum(sums, drain * self.slow * drains + sums[0])
        overhead = self._stage_overhead(stages, sum(counts.values()))
        found = (filled * self.slow + sent_within + overhead + after).max(axis=0) + self._norm()
        sent = np.zeros(DRAWS)
        if len(stages.groups) > 1 and devices > 1:
            for samples, number in counts.items():
                sent += number * self._message(crossing_bytes(self.prices, stages, 0, samples))
        return self._of(np.maximum(found, sent), typical, pipeline=True)

    def _stage_work(self, stages: StageFacts, counts: Mapping[int, int]) -> tuple[Array, Array, Array, Array]:
        """Return seconds of the devices of a pipeline, which plans of equal micro-batches share.

        For each device, (devices, draws): until the end of its passes, after earlier stages' first forward; of earlier
        stages' last backward; and of its messages to tensor ranks. Last, (draws,): of passes, the mean over devices.

        Args:
            stages: module groups and parameters of each virtual stage.
            counts: number of micro-batches by their samples.
        """
        devices, choice = self.shape["stage"], self.config.activation_checkpointing

        def add() -> tuple[Array, Array, Array, Array]:
            work = np.zeros((len(stages.groups), DRAWS))
            for samples, number in counts.items():
                for passed in PASSES:
                    work += number * stage_passes(self.prices, stages, passed, samples, choice)
            work = work.reshape(-1, devices, DRAWS).sum(axis=0)
            sent_within = self._stage_messages(stages, counts).reshape(-1, devices, DRAWS).sum(axis=0)
            forward, backward = (stage_passes(self.prices, stages, passed, min(counts), choice) for passed in PASSES)
            fill, drain = (np.cumsum(each[:devices], axis=0) - each[:devices] for each in (forward, backward))
            return fill + work, drain, sent_within, work.mean(axis=0)

        key = "stage work", stages.groups, tuple(counts.items()), choice, devices, self.shape["tensor"]
        return self.prices.once(key, add)

    def _stage_messages(self, stages: StageFacts, counts: Mapping[int, int]) -> Array:
        """Return the seconds of the collectives over the tensor ranks in all micro-batches, by virtual stage."""
        found = np.zeros((len(stages.groups), DRAWS))
        for virtual in range(len(stages.groups)) if self.facts.messages else ():
            for samples, number in counts.items():
                for passed in PASSES:
                    found[virtual] += number * self._tensor(passed, samples, stage_groups(stages, virtual))
        return found

    def _stage_sums(self, sync: AllReduceConfig, stages: StageFacts, devices: int, replicas: int) -> Array:
        """Return the seconds of each device's all-reduces and update after its passes."""
        apart = devices * self.shape["tensor"]

        def add(device: int) -> Array:
            tensors: list[TensorFacts] = [self.facts.tensors[i] for i in stages.held(device, devices)]
            found = self._update(sum(t.elements for t in tensors), len(tensors))
            if replicas > 1:
                for vector in gradient_vectors(tensors, sync.wire, sync.bucket_mb):
                    found = found + all_reduce_seconds(self.costs, sync, replicas, vector.bytes, apart)
            return found

        key = "stage sums", sync, stages.tensors, devices, replicas, apart
        return self.prices.once(key, lambda: np.stack([add(device) for device in range(devices)]))

    def _stage_overhead(self, stages: StageFacts, micro_batches: int) -> Array:
        """Return ``_overhead`` of each device of a pipeline, (devices, draws)."""
        devices = self.shape["stage"]

        def add() -> Array:
            held = [[self.facts.tensors[i] for i in stages.held(device, devices)] for device in range(devices)]
            return np.stack([self._overhead(tensors, micro_batches) for tensors in held])

        return self.prices.once(("stage overhead", stages.tensors, devices, self.shape["tensor"], micro_batches), add)

    def _update(self, parameters: float, tensors: int) -> Array:
        optimizer = self.config.optimizer_choice.name
        return self.prices.once(
            ("update", optimizer, parameters, tensors), lambda: self.costs.update(optimizer, parameters, tensors)
        )

    def _message(self, size: float) -> Array:
        devices = self.config.device_count
        return self.prices.once(("message", size, devices), lambda: self.costs.message(size, devices))

    def _of(self, seconds: Array, typical: Array, pipeline: bool = False) -> StepFloor:
        """Return the bound; ``typical``: seconds that a typical device computes."""
        whole, computed = median_draw(seconds), median_draw(typical)
        waited = computed * (median_draw(self.slow) - 1)
        rest = max(0.0, whole - computed - waited)
        terms = {"compute": computed, "communication": rest, "idling": waited}
        return StepFloor(seconds, {**terms, "communication": 0.0, "bubble": rest} if pipeline else terms)
