"""Build the program of a pipeline's step: micro-batches in the order of the schedule, then the sums of each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.config.sync_config import AllReduceConfig
from tutti.errors import UsageError
from tutti.parallel.pipeline.pipeline_schedule import Action, Order, make_order, timeline
from tutti.planning.communication_seconds import all_reduce_seconds, micro_batch_overhead
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.pass_prices import PASSES, Pass, PassPrices
from tutti.planning.replica_builder import ReplicaBuilder, existing_actions
from tutti.planning.scaling_laws import Array
from tutti.planning.step_delays import worker_delays
from tutti.planning.step_facts import StageFacts, gradient_vectors, rank_row_bytes
from tutti.planning.step_program import PeriodicCollective, StepAction, StepProgram
from tutti.workload.workload_file import LOSS, REST

_PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def stage_groups(facts: StageFacts, virtual: int) -> tuple[str, ...]:
    """Return the names of the module groups whose tensor-parallel collectives a virtual pipeline stage makes.

    A module group is a module that a pipeline stage calls, the rest of the model (named by the constant ``REST``), or
    the loss (``LOSS``).

    Args:
        facts: names of the module groups of each virtual stage.
        virtual: index of the virtual stage in the whole pipeline, from 0 in the order of the forward.

    Returns:
        Names of the stage's own groups, in the model's order; for the last stage ``REST`` and ``LOSS`` follow.
    """
    last = virtual == len(facts.groups) - 1
    return (*facts.groups[virtual], REST, LOSS) if last else facts.groups[virtual]


def stage_passes(prices: PassPrices, facts: StageFacts, passed: Pass, samples: int, checkpointing: str) -> Array:
    """Predict the seconds of a forward or backward of each virtual stage of a pipeline over a micro-batch.

    Work outside of the stages' modules is spread evenly over the stages; the loss belongs to the last stage. A module
    group is a module that a pipeline stage calls, the rest of the model, or the loss.

    Args:
        prices: seconds of the passes of the model's module groups.
        facts: names of the module groups of each virtual stage.
        passed: ``forward`` or ``backward``.
        samples: number of samples in the micro-batch.
        checkpointing: value of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.

    Returns:
        Seconds on a typical device, array of shape (virtual stages, 256): a row for each virtual stage, a column for
        each of the Monte Carlo draws of the machine's uncertain constants. The array is cached in ``prices`` and shared
        by later calls: do not change it.

    Raises:
        UsageError: the machine's data lack a class of operators; or, for ``backward`` only, ``checkpointing`` finds
            nothing to recompute in this model.
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
    """Return the bytes of activations that a micro-batch sends over a cut between two virtual pipeline stages.

    The gradients that the backward sends over the same cut have the same size. A module group is a module that a
    pipeline stage calls, the rest of the model, or the loss.

    Args:
        prices: passes of the model's module groups, of which only the sizes of their outputs are read.
        facts: names of the module groups whose outputs cross each cut.
        cut: index of the cut, which is between the virtual stages ``cut`` and ``cut + 1``.
        samples: number of samples in the micro-batch.

    Returns:
        Bytes in one direction, for one micro-batch.
    """
    sizes = {group.name: group.output_bytes for group in prices.workload.groups}
    return sum(sizes[name].at(samples) for name in facts.crossing[cut])


class PipelineBuilder(ReplicaBuilder):
    """Builds the simulated training step of a pipeline, whose stages may be split over tensor ranks.

    A simulated step (``StepProgram``) holds the computations and messages of one device of each stage.
    """

    def build(
        self, layout: PipelineConfig | LayersConfig, sync: AllReduceConfig, parts: Sequence[Sequence[int]]
    ) -> StepProgram:
        """Build the simulated step of a pipeline: micro-batches in the schedule's order, then each stage's update.

        After the micro-batches of each logical worker, stages that hold copies of a parameter, such as a tied weight,
        sum its gradients (two of them by an all-reduce, more by an all-gather), and the last stage broadcasts the loss
        sums over the stages. Before the update each stage all-reduces its gradients over the data-parallel replicas of
        the pipeline; with more than two replicas, whose sums may round differently on two stages, the gradients of
        copies are then broadcast from the first of the stages.

        Args:
            layout: options of the stages, with the pipeline schedule.
            sync: options of gradient synchronisation.
            parts: number of samples in each micro-batch of a replica of the pipeline, one list for each of its logical
                workers (fixed shares of the global batch).

        Returns:
            Computations and messages of one device of each stage. Each of ``actions`` has a device, a phase, a duration
            (seconds, one value for each of the Monte Carlo draws of the machine's uncertain constants) and the indices
            in ``actions`` of the actions that have to end before this action begins; ``vectors`` lists the gradient
            vectors that are summed over data ranks, ``collectives`` all other collectives.

        Raises:
            UsageError: the facts about the model that this builder was given hold no partition into stages; or the
                machine's data lack a class of operators, the optimizer, a collective or the cost of a link.
        """
        stages, replicas = self.shape["stage"], self.shape["replica"]
        facts = self.facts.stages
        if facts is None:
            raise UsageError("the stages of this pipeline are not known", remedy="take --strategy mirrored")
        program = StepProgram(devices=stages)
        delays = [worker_delays(self.config, self._computing(facts, parts, device), device) for device in range(stages)]
        for number, worker in enumerate(parts):
            order = make_order(layout.schedule, stages, len(worker), layout.chunks)
            self._play(program, layout.schedule, order, facts, worker)
            self._sum_tied(program, facts)
            # The last stage's loss, count and metrics. The stages before it end later, so that each finds them near.
            sums = 8 * (2 + self.facts.workload.metrics)
            price = self.costs.message(sums, self.config.device_count)
            for device in range(stages):
                program.collectives.append(PeriodicCollective("broadcast", sums, axis="stage", stage=device))
                self.message(program, price, (self._last(program, device),), "loss sums", device)
                self.delay(program, [delays[device][number]], device, (self._last(program, device),))
        rows = [facts.held(device, stages) for device in range(stages)]
        for device, held in enumerate(rows if replicas > 1 else ()):
            tensors = [self.facts.tensors[i] for i in held]
            vectors = gradient_vectors(tensors, sync.wire, sync.bucket_mb)
            program.vectors += vectors
            for vector in vectors:
                seconds = all_reduce_seconds(self.costs, sync, replicas, vector.bytes, self.apart)
                self.message(program, seconds, (self._last(program, device),), "gradients", device)
        if replicas > 2:
            self._share_tied(program, facts)
        ends = list[tuple[list[int], int]]()
        for device, held in enumerate(rows):
            needs = [self._last(program, device)]
            needs = self.broadcast_whole_gradients(program, needs, uneven=replicas > 1, device=device, places=held)
            ends.append((needs, sum(self.facts.tensors[i].elements for i in held)))
        norm = self.norm_seconds()
        everywhere = existing_actions(*(need for needs, _ in ends for need in needs))
        for device, (_, elements) in enumerate(ends):
            # The gradient norm is one number of the whole replica: its slowest stage holds all updates up.
            agreed = self.message(program, norm, everywhere, "gradient norm", device)
            self.update(program, elements, [agreed], device, len(rows[device]))
        self.count_norm(program)
        return program

    def _sum_tied(self, program: StepProgram, facts: StageFacts) -> None:
        """Append the sums of gradients of parameters with copies on several stages, with a flag each, over the stages.

        Two stages all-reduce each gradient; more of them gather the gradients and add them in order.
        """
        for group, places in facts.tied(self.shape["stage"]).items():
            for tensor in (self.facts.tensors[place] for place in places):
                size = tensor.bytes + tensor.dtype.itemsize
                if len(group) == 2:
                    self._over_stages(program, group, "all_reduce", size, "sum of tied gradients")
                else:
                    self._over_stages(program, group, "all_gather", len(group) * size, "tied gradients")

    def _share_tied(self, program: StepProgram, facts: StageFacts) -> None:
        """Append the broadcasts that make summed gradients equal on all stages with copies, one for each dtype."""
        for group, places in facts.tied(self.shape["stage"]).items():
            for size in rank_row_bytes([self.facts.tensors[place] for place in places], 1).values():
                self._over_stages(program, group, "broadcast", size, "broadcast of tied gradients")

    def _over_stages(self, program: StepProgram, group: tuple[int, ...], kind: str, size: int, text: str) -> None:
        """Append a collective over some stages of a replica, for which each of them waits, and which blocks them."""
        tensor, per_node = self.shape["tensor"], self.costs.network.per_node
        one_node = len({stage * tensor // per_node for stage in group}) == 1
        apart = 1 if one_node else (group[-1] - group[0]) // (len(group) - 1) * tensor
        seconds = self.costs.collective(kind, len(group), size, apart, tensor)
        needs = existing_actions(*(self._last(program, device) for device in group))
        for device in group:
            program.collectives.append(PeriodicCollective(kind, size, axis="tied", stage=device))
            self.message(program, seconds, needs, text, device)

    @staticmethod
    def _last(program: StepProgram, device: int) -> int:
        """Return the index of a device's last action."""
        return next(i for i in reversed(range(len(program.actions))) if program.actions[i].device == device)

    def _computing(self, facts: StageFacts, parts: Sequence[Sequence[int]], device: int) -> list[Array]:
        """Return (draws,) seconds of forward and backward of each logical worker on a device's stages."""
        checkpointing, found = self.config.activation_checkpointing, list[Array]()
        for worker in parts:
            total = np.zeros(DRAWS)
            for passed, (count, number) in product(PASSES, Counter(worker).items()):
                stages = stage_passes(self.prices, facts, passed, count, checkpointing)
                total += number * stages[device :: self.shape["stage"]].sum(axis=0)
            found.append(total * self.slow)
        return found

    def _play(
        self, program: StepProgram, schedule: str, order: Order, facts: StageFacts, samples: Sequence[int]
    ) -> None:
        """Append one worker's micro-batches, of so many samples each, in the order of the schedule."""
        ranks, places, prices = len(order.ranks), dict[Action, int](), dict[float, Array]()
        sizes = dict[tuple[int, int], float]()
        checkpointing, passes = self.config.activation_checkpointing, dict[tuple[Pass, int], Array]()
        arrivals: dict[Action, int] = {}
        overheads = self._overheads(facts, ranks, begun=bool(program.actions))
        # Collectives block their device: those of tensor ranks, and those between two workers' micro-batches.
        blocked = {rank: self._last(program, rank) for rank in range(ranks)} if program.actions else {}
        for rank, action, needed in _played(schedule, ranks, len(samples), order.chunks):
            count = samples[action.micro]
            needs = [
                arrivals.get(need, places[need]) if need.stage != action.stage else places[need] for need in needed
            ]
            passed: Pass = "forward" if action.kind == "F" else "backward"
            if (passed, count) not in passes:
                passes[passed, count] = stage_passes(self.prices, facts, passed, count, checkpointing) * self.slow
            seconds = passes[passed, count][action.stage]
            if action.kind == "F" and action.stage < ranks:
                seconds = seconds + overheads[rank, action.micro > 0]
            if action.kind in ("I", "W"):
                # Input and weight backward each take half of a backward: a guess.
                seconds = seconds / 2
            text = f"{action.kind}{action.micro} of stage {action.stage}"
            place = program.add(
                StepAction(
                    rank, _PHASES[action.kind], seconds, existing_actions(*needs, blocked.get(rank, -1)), text=text
                )
            )
            if action.kind != "W":
                groups = stage_groups(facts, action.stage)
                place = self.tensor_messages(program, passed, count, groups, (place,), device=rank)
                blocked[rank] = place if self.facts.messages else -1
            places[action] = place
            # The output goes to the next stage, the gradient of the input to the previous one.
            other = action.stage + 1 if action.kind == "F" else action.stage - 1
            if action.kind == "W" or not 0 <= other < order.stages or other % ranks == rank:
                continue
            cut = min(action.stage, other)
            if (cut, count) not in sizes:
                sizes[cut, count] = crossing_bytes(self.prices, facts, cut, count)
            size = sizes[cut, count]
            program.count_between_stages(rank, other % ranks, len(facts.crossing[cut]), round(size))
            if size not in prices:
                prices[size] = self.costs.message(size, self.config.device_count)
            arrivals[action] = self.message(program, prices[size], (places[action],), text, rank)

    def _overheads(self, facts: StageFacts, ranks: int, begun: bool) -> dict[tuple[int, bool], Array]:
        """Return the overhead of a micro-batch by rank, and whether the micro-batch is not the worker's first.

        Args:
            facts: parameters of each virtual stage.
            ranks: number of pipeline ranks.
            begun: whether gradients of an earlier worker are there.
        """
        held = [[self.facts.tensors[place] for place in facts.held(rank, ranks)] for rank in range(ranks)]
        return {
            (rank, later): micro_batch_overhead(self.costs, self.work, held[rank], not (begun or later))
            for rank in range(ranks)
            for later in (False, True)
        }


@lru_cache(maxsize=64)
def _played(
    schedule: str, ranks: int, micro_batches: int, chunks: int
) -> tuple[tuple[int, Action, tuple[Action, ...]], ...]:
    """Return rank, action and needed actions of a schedule, in the order of their starts if each takes one second."""
    order = make_order(schedule, ranks, micro_batches, chunks)
    rows = timeline(order, lambda action: 1.0)
    flat = sorted(((span.start, rank, span.action) for rank, row in enumerate(rows) for span in row))
    return tuple((rank, action, tuple(order.needs(action))) for _, rank, action in flat)
