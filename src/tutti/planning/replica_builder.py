"""Build the program of a step of whole replicas, or replicas that share rows of their state: passes and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from tutti.config.sync_config import AllReduceConfig, DiLoCoConfig, LocalSGDConfig
from tutti.planning.communication_seconds import (
    COPIED,
    all_reduce_seconds,
    collective_seconds,
    copy_seconds,
    gradient_norm_bytes,
    gradient_norm_seconds,
    message_seconds,
    micro_batch_overhead,
    pass_messages,
    sums_in_memory,
)
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.pass_prices import PASSES, Pass, PassPrices
from tutti.planning.planned_run import PlannedRun
from tutti.planning.scaling_laws import Array
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_delays import worker_delays
from tutti.planning.step_facts import (
    StepFacts,
    TensorFacts,
    carried,
    gradient_vectors,
    local_sgd_collectives,
    module_bytes,
    rank_row_bytes,
    row_bytes,
    row_tensors,
    totals_bytes,
    unwrapped_tensors,
    whole_gradient_bytes,
    wrapped_module_count,
)
from tutti.planning.step_program import COMMUNICATION, IDLE, UPDATE, PeriodicCollective, StepAction, StepProgram
from tutti.planning.strategy_work import StrategyWork, strategy_key
from tutti.workload.workload_file import LOSS, REST, GroupWork

_SHOWN = 64
"""Most micro-batches that have actions of their own in a program; the passes of further ones are one action."""


@dataclass
class ReplicaBuilder:
    """Builds the simulated training step of one configuration: computations and messages with their dependences.

    A step is a ``StepProgram``. Its actions (computations and messages) belong to one device, which stands for all
    devices with the same work, or to one device of each pipeline stage. A module group is a module that FSDP wraps or a
    pipeline stage calls, the rest of the model, or the loss. Nothing is computed or sent on a device. Methods that
    build or price raise UsageError where ``costs`` lack what the prediction needs, such as the cost of a link between
    nodes.

    Attributes:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model.
        config: configuration of the run, with a number of devices.
        costs: predicts the seconds of computing and communication on the machine.
        slow: (256,) ratios by which the slowest device computes longer than a typical one.
        prices: seconds of the passes of the model's module groups on a typical device.
        shape: extents of the device mesh, by axis.
    """

    facts: StepFacts
    config: PlannedRun
    costs: StepCosts
    slow: Array
    prices: PassPrices
    shape: Mapping[str, int]

    def whole(self, sync: AllReduceConfig, parts: Sequence[Sequence[int]], ranks: int) -> StepProgram:
        """Build the simulated step of data parallelism with whole replicas, which all-reduce gradients in buckets.

        The step has the passes of all micro-batches, the all-reduces over the data ranks and the update; with tensor
        parallelism also its collectives in the passes, broadcasts of gradients that every tensor rank holds whole, and
        an all-reduce of the gradient norm over the replica's devices. All-reduces by the communication backend's own
        algorithm overlap backward; all-reduces by another algorithm, and sums in shared memory, follow backward.

        Args:
            sync: options of gradient synchronisation: ``schedule`` (all-reduce algorithm, None for the backend's
                own), ``wire`` (dtype of messages) and ``bucket_mb``.
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).
            ranks: number of data ranks; 1 makes no all-reduce.

        Returns:
            Computations and messages of one replica, which stands for all. Each of ``actions`` has a device, a phase, a
            duration (seconds, one value for each of the Monte Carlo draws of the machine's uncertain constants) and the
            indices in ``actions`` of the actions that have to end before this action begins; ``vectors`` lists the
            gradient vectors that are summed over data ranks, ``collectives`` all other collectives.

        Raises:
            UsageError: the machine's data lack a class of operators, the optimizer, a collective or the cost of a link;
                or ``sync`` asks for shared memory, which the devices do not have.
        """
        program = StepProgram()
        ends = self.passes(program, parts)
        needs = [len(program.actions) - 1]
        if ranks > 1:
            program.vectors += gradient_vectors(self.facts.tensors, sync.wire, sync.bucket_mb)
            needs = self._all_reduces(program, sync, ranks, ends)
        needs = self.broadcast_whole_gradients(program, needs, uneven=ranks > 1)
        self.count_norm(program)
        needs = self._agree_norm(program, needs)
        self.update(program, sum(t.elements for t in self.facts.tensors), needs)
        return program

    def local_steps(self, sync: LocalSGDConfig, parts: Sequence[Sequence[int]], ranks: int) -> StepProgram:
        """Build a simulated step of local SGD, in which each worker updates its own copy of the parameters.

        The step has each worker's passes and update, and an all-to-all and an all-gather of the loss sums over the data
        ranks. By the same two collectives the parameters are averaged once in a period, and DiLoCo's outer update
        follows; each takes its time divided by the period, so that the step is the mean over a period.

        Args:
            sync: options of local SGD, with the period in steps.
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).
            ranks: number of data ranks.

        Returns:
            Computations and messages of one rank, which stands for all. Each of ``actions`` has a device, a phase, a
            duration (seconds, one value for each of the Monte Carlo draws of the machine's uncertain constants) and the
            indices in ``actions`` of the actions that have to end before this action begins; ``collectives`` lists
            kind, bytes and period of each collective.

        Raises:
            UsageError: the machine's data lack a class of operators, the optimizer, a collective or the cost of a link.
        """
        program, tensors = StepProgram(), self.facts.tensors
        self.passes(program, parts)
        elements = sum(t.elements for t in tensors)
        last = len(program.actions) - 1
        for _ in parts:
            last = self.update(program, elements, [last])
        workers = self.config.workers or ranks
        program.collectives += local_sgd_collectives(tensors, ranks, workers, sync.period)
        for number, each in enumerate(program.collectives):
            seconds = collective_seconds(self.costs, each, ranks) / each.period
            text = f"{each.kind} of " + ("loss sums" if number < 2 else f"parameters, 1/{each.period} of it")
            last = self.message(program, seconds, (last,), text)
        if isinstance(sync, DiLoCoConfig):
            self.costs.note("DiLoCo's outer update takes as long as a step of SGD with as many parameters")
            outer = self.costs.update("sgd", elements) / sync.period
            program.add(StepAction(0, UPDATE, outer, (last,), text="outer update"))
        return program

    def sharded_optimizer(self, parts: Sequence[Sequence[int]]) -> StepProgram:
        """Build the simulated step of ZeRO stage 1, whose ranks each update a shard of the rows of every parameter.

        The step has the passes of all micro-batches; reduce-scatters of the gradient buckets over the shards;
        all-reduces of gradient rows over the replicas, and of loss sums and flags over all data ranks; the update; and
        all-gathers of the updated rows over the shards. With tensor parallelism the step also has its collectives in
        the passes, broadcasts of gradients that every tensor rank holds whole, and an all-reduce of the gradient norm
        over the replica's devices. With a single shard, ranks hold whole tensors, and only all-reduce gradients over
        the replicas.

        Args:
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).

        Returns:
            Computations and messages of one rank, which stands for all. Each of ``actions`` has a device, a phase, a
            duration (seconds, one value for each of the Monte Carlo draws of the machine's uncertain constants) and the
            indices in ``actions`` of the actions that have to end before this action begins; ``collectives`` lists
            kind, bytes and ranks (mesh axis) of each collective.

        Raises:
            UsageError: the machine's data lack a class of operators, the optimizer, a collective or the cost of a link.
        """
        program, tensors, shards = StepProgram(), self.facts.tensors, self.shape["shard"]
        self.passes(program, parts)
        sizes = row_bytes(tensors, shards) if shards > 1 else []
        last = len(program.actions) - 1
        for number, size in enumerate(sizes):
            last = self._rows(program, "reduce_scatter", size, (last,), f"gradients {number}")
        [last] = self.broadcast_whole_gradients(program, [last], uneven=self.shape["replica"] > 2, shards=shards)
        last = self._totals(program, tensors, last)
        # The squares of all rows have been summed: one number is left.
        self.count_norm(program, squares=1)
        needs = self._agree_norm(program, [last], squares=1)
        last = self.update(program, sum(t.padded(shards) for t in tensors) / shards, needs)
        for number, size in enumerate(sizes):
            last = self._rows(program, "all_gather", size, (last,), f"parameters {number}")
        return program

    def fully_sharded(self, stage: int, parts: Sequence[Sequence[int]]) -> StepProgram:
        """Build the simulated step of FSDP2 (ZeRO stages 2 and 3), with gradient reduce-scatters in every micro-batch.

        Modules are all-gathered over the shards, one ahead of computing, and gradients reduce-scattered over the
        shards; after the micro-batches, gradient rows are all-reduced over the replicas, and loss sums and flags over
        all data ranks. Where collectives block (CPUs), each waits for the computing before the collective. Parameters
        that FSDP2 does not shard are sharded as in ZeRO stage 1: every rank holds them whole and updates a part of
        their rows.

        Args:
            stage: ZeRO stage, 2 or 3; in stage 3 modules are gathered again for backward.
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).

        Returns:
            Computations and messages of one rank, which stands for all. Each of ``actions`` has a device, a phase, a
            duration (seconds, one value for each of the Monte Carlo draws of the machine's uncertain constants) and the
            indices in ``actions`` of the actions that have to end before this action begins; ``collectives`` lists
            kind, bytes and ranks (mesh axis) of each collective.

        Raises:
            UsageError: the machine's data lack a class of operators, the optimizer, a collective or the cost of a link.
        """
        program, shards = StepProgram(), self.shape["shard"]
        groups = {group.name: group for group in self.facts.workload.groups}
        gathered, reduced = module_bytes(self.facts, shards, frozen=True), module_bytes(self.facts, shards)
        names = [name for name in groups if name not in (REST, LOSS)]
        *earlier, after = self.delays(parts)
        last = self.delay(program, earlier)
        modules, rows = wrapped_module_count(gathered), row_tensors(self.facts.tensors, shards)
        for micro, samples in enumerate(count for worker in parts for count in worker):
            order = [REST, *names, LOSS]
            overhead = micro_batch_overhead(self.costs, self.work, rows, micro == 0, modules)
            last = program.add(StepAction(0, "forward", overhead, existing_actions(last), text="overhead"))
            computed = [last]
            for number, name in enumerate(order):
                needs = [computed[-1]]
                if gathered[name]:
                    # One module ahead: its all-gather begins as the module before the previous one has ended.
                    ahead = computed[-1] if not self.costs.overlaps else computed[max(0, number - 1)]
                    needs.append(
                        self._module_rows(program, "all_gather", gathered[name], existing_actions(ahead), name)
                    )
                seconds = self._group(groups[name], "forward", samples)
                computed.append(program.add(StepAction(0, "forward", seconds, existing_actions(*needs), text=name)))
            last, sent = computed[-1], -1
            again = {name for name in names if stage == 3 and gathered[name]}
            asked: dict[str, int] = {}
            backwards = [LOSS, *reversed(names), REST]
            for name, following in zip(backwards, [*backwards[1:], ""], strict=True):
                begun, needs = last, [last]
                if name in again and name not in asked:
                    asked[name] = self._module_rows(program, "all_gather", gathered[name], existing_actions(last), name)
                if name in again:
                    needs.append(asked[name])
                seconds = self._group(groups[name], "backward", samples)
                last = program.add(StepAction(0, "backward", seconds, existing_actions(*needs), text=name))
                if self.costs.overlaps and following in again:
                    # Asked for as this module's backward begins, and so before its gradients on the same link.
                    asked[following] = self._module_rows(
                        program, "all_gather", gathered[following], existing_actions(begun), following
                    )
                if reduced[name]:
                    sent = self._module_rows(program, "reduce_scatter", reduced[name], (last,), name)
                    last = last if self.costs.overlaps else sent
            last = max(last, sent)
        last = self.delay(program, [after])
        rest = unwrapped_tensors(self.facts)
        sizes = row_bytes(rest, shards)
        for number, size in enumerate(sizes):
            last = self._rows(program, "reduce_scatter", size, (last,), f"gradients {number}")
        last = self._totals(program, self.facts.tensors, last)
        last = self.update(program, sum(t.padded(shards) for t in self.facts.tensors) / shards, [last])
        for number, size in enumerate(sizes):
            last = self._rows(program, "all_gather", size, (last,), f"parameters {number}")
        return program

    def passes(
        self, program: StepProgram, parts: Sequence[Sequence[int]], delays: Sequence[Array] | None = None
    ) -> dict[str, int]:
        """Append the forwards and backwards of a rank's micro-batches to a simulated step, and delays of ``--slow``.

        The collectives that tensor parallelism makes in these passes are included. A module group is a module that FSDP
        wraps or a pipeline stage calls, the rest of the model, or the loss.

        Args:
            program: the simulated step, to which actions (computations and messages) are added.
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers (fixed
                shares of the global batch).
            delays: seconds by which ``--slow`` delays the worker of each list of ``parts``, shape (256,) (Monte Carlo
                draws); None: the result of the method ``delays``.

        Returns:
            Name of a module group → index in ``program.actions`` of the last action of the group's backward in the last
            micro-batch.

        Raises:
            UsageError: the machine's data lack a class of operators, a collective of tensor parallelism or the cost of
                a link.
        """
        groups = {group.name: group for group in self.facts.workload.groups}
        samples = [count for worker in parts for count in worker]
        *earlier, after = self.delays(parts) if delays is None else delays
        # Messages that overlap the last worker's backward cannot overlap the delays of the workers before it.
        self.delay(program, earlier)
        order = self._backward_order()
        earliest, later = (
            micro_batch_overhead(self.costs, self.work, self.facts.tensors, first) for first in (True, False)
        )
        ends: dict[str, int] = {}
        shown = samples
        if len(samples) > _SHOWN:
            # Many accumulated micro-batches, which nothing interrupts, are one forward and one backward.
            before, shown, last = Counter(samples[:-1]), samples[-1:], len(program.actions) - 1
            for phase in PASSES:
                seconds = (len(samples) - 2) * later + earliest if phase == "forward" else np.zeros(DRAWS)
                for (count, number), group in product(before.items(), groups.values()):
                    seconds += number * self._group(group, phase, count)
                text = f"{len(samples) - 1} micro-batches"
                last = program.add(StepAction(0, phase, seconds, existing_actions(last), text=text))
                for count, number in before.items():
                    last = self.tensor_messages(program, phase, count, None, (last,), times=number)
        for number, count in enumerate(shown, len(samples) - len(shown)):
            overhead = later if number else earliest
            forward = sum((self._group(group, "forward", count) for group in groups.values()), overhead)
            last = program.add(StepAction(0, "forward", forward, existing_actions(len(program.actions) - 1)))
            last = self.tensor_messages(program, "forward", count, None, (last,))
            for name in order:
                seconds = self._group(groups[name], "backward", count)
                last = program.add(StepAction(0, "backward", seconds, existing_actions(last), text=name))
                last = ends[name] = self.tensor_messages(program, "backward", count, (name,), (last,))
        self.delay(program, [after])
        return ends

    def delays(self, parts: Sequence[Sequence[int]]) -> list[Array]:
        """Return the delays by ``--slow`` of each logical worker, on the data rank with the longest delays.

        The option ``--slow`` delays ranks or workers on purpose. A logical worker is a fixed share of the global batch.

        Args:
            parts: number of samples in each micro-batch of a data rank, one list for each of its logical workers.

        Returns:
            One array for each list of ``parts``, in their order: the delay in seconds, shape (256,), one value for
            each of the Monte Carlo draws of the machine's uncertain constants; zeros where nothing is delayed.

        Raises:
            UsageError: the machine's data lack a class of operators.
        """
        choice = self.config.activation_checkpointing
        computing = [
            sum((self.prices.total(p, n, choice) for p, n in product(PASSES, worker)), np.zeros(DRAWS)) * self.slow
            for worker in parts
        ]
        return worker_delays(self.config, computing)

    def delay(
        self, program: StepProgram, delays: Sequence[Array], device: int = 0, needs: tuple[int, ...] | None = None
    ) -> int:
        """Append delays of a device to a simulated step as one action in which the device idles.

        The option ``--slow`` asks for such delays. Nothing is appended if all delays are zero.

        Args:
            program: the simulated step.
            delays: seconds of each delay, shape (256,) each (Monte Carlo draws); the action lasts their sum.
            device: index of the device in the program.
            needs: indices in ``program.actions`` of the actions that have to end before the delay begins; None: the
                last action of the step.

        Returns:
            Index in ``program.actions`` of the step's last action: the delay, if one was appended; -1 for a step
            without actions.
        """
        seconds, last = sum(delays, np.zeros(DRAWS)), len(program.actions) - 1
        if not seconds.any():
            return last
        return program.add(
            StepAction(device, IDLE, seconds, existing_actions(last) if needs is None else needs, text="delay")
        )

    def tensor_messages(
        self,
        program: StepProgram,
        passed: Pass,
        samples: int,
        groups: Sequence[str] | None,
        needs: tuple[int, ...],
        *,
        device: int = 0,
        times: int = 1,
    ) -> int:
        """Append the collectives that tensor parallelism makes in a forward or backward to a simulated step.

        All of them are one action. The collectives block: what follows on the device waits for their end. A module
        group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

        Args:
            program: the step, to which the action is added.
            passed: ``forward`` or ``backward``, over a micro-batch.
            samples: number of samples in the micro-batch.
            groups: names of the module groups whose collectives are made; None for all.
            needs: indices in ``program.actions`` of the actions that have to end before the collectives begin.
            device: index of the device in the program, which is its pipeline stage.
            times: number of micro-batches.

        Returns:
            Index in ``program.actions`` of the action after which the device continues: the collectives, or the last
            element of ``needs``, which must not be empty, where there are none.

        Raises:
            UsageError: the machine's data lack the collective or the cost of a link.
        """
        sent = pass_messages(self.facts, self.config.activation_checkpointing, passed, samples, groups)
        if not sent:
            return needs[-1]
        ranks = self.shape["tensor"]
        for each in sent:
            one = self._carried(each.kind, ranks, each.bytes, "tensor", shared=self._one_node(ranks))
            program.collectives.append(replace(one, stage=device, calls=times))
        seconds = times * message_seconds(self.prices, sent, ranks)
        return self.message(program, seconds, needs, f"{passed} of tensor ranks", device)

    def broadcast_whole_gradients(
        self,
        program: StepProgram,
        needs: Sequence[int],
        *,
        uneven: bool,
        device: int = 0,
        places: Sequence[int] | None = None,
        shards: int = 1,
    ) -> list[int]:
        """Append to a simulated step broadcasts of the gradients of parameters that every tensor rank holds whole.

        The broadcasts keep such parameters, for example of norm layers, equal on all tensor ranks of a replica. There
        is one broadcast for each dtype, each after the one before. No broadcast is added where the gradients are equal
        already: without tensor ranks, and on CPUs unless ``uneven``. A simulated step is a list of actions
        (computations and messages of devices), each of which begins after the actions that it needs.

        Args:
            program: the step, to which the broadcasts are added.
            needs: indices in ``program.actions`` of the actions that have to end before the first broadcast begins.
            uneven: whether tensor ranks may add the gradients of the data ranks in different orders.
            device: index of the device in the program, which is its pipeline stage.
            places: indices, in the model's list of trainable parameters, of the parameters that the device holds; None:
                the device holds all of them.
            shards: number of ranks over which the rows of gradients are sharded.

        Returns:
            Indices in ``program.actions`` of the actions that have to end before the optimizer step: the last broadcast
            alone, or ``needs`` if no broadcast was added.

        Raises:
            UsageError: the machine's data lack the collective or the cost of a link.
        """
        if not uneven and not self.costs.overlaps:
            return [*needs]
        for size in whole_gradient_bytes(self.facts, places, shards):
            each = PeriodicCollective("broadcast", size, axis="tensor", stage=device)
            program.collectives.append(each)
            seconds = collective_seconds(self.costs, each, self.shape["tensor"])
            needs = [self.message(program, seconds, existing_actions(*needs), "gradients of whole tensors", device)]
        return [*needs]

    def count_norm(self, program: StepProgram, squares: int | None = None) -> None:
        """Add the all-reduces of the gradient norm over a replica's devices to the collectives of a simulated step.

        The list ``program.collectives`` gets one entry for each pipeline stage, and none for replicas of one device. No
        time is added to the step; ``norm_seconds`` predicts it.

        Args:
            program: the simulated step.
            squares: number of squared norms in the message; None: one for each device of the replica.
        """
        if self.apart > 1:
            size = gradient_norm_bytes(self.apart, squares)
            program.collectives += [
                PeriodicCollective("all_reduce", size, axis="model", stage=stage)
                for stage in range(self.shape["stage"])
            ]

    def norm_seconds(self, squares: int | None = None) -> Array:
        """Predict the seconds of an all-reduce of the gradient norm over the devices of one replica.

        The devices are the replica's pipeline stages × tensor ranks.

        Args:
            squares: number of squared norms in the message; None: one for each device of the replica.

        Returns:
            Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
            constants.

        Raises:
            UsageError: the machine's data lack the collective or the cost of a link.
        """
        return gradient_norm_seconds(self.costs, self.apart, squares)

    def _agree_norm(self, program: StepProgram, needs: Sequence[int], squares: int | None = None) -> list[int]:
        """Append the all-reduce of the gradient norm over tensor ranks, for which the update waits."""
        if self.apart == 1:
            return [*needs]
        return [self.message(program, self.norm_seconds(squares), existing_actions(*needs), "gradient norm")]

    def _backward_order(self) -> list[str]:
        """Return the groups in the order in which backward reaches them: the loss, then by complete gradients.

        Work outside of the module groups, such as the head's, is done where its first gradient becomes complete.
        """
        order = {name: place for place, name in enumerate(self.facts.workload.gradient_order)}
        places: dict[str, float] = {LOSS: -1.0}
        rest = [order[t.name] for t in self.facts.tensors if t.group == REST and t.name in order]
        for group in self.facts.workload.groups:
            if group.name not in (REST, LOSS):
                places[group.name] = float(-0.5 if group.ready is None else group.ready)
        places[REST] = float(min(rest, default=len(order)))
        return sorted(places, key=lambda name: places[name])

    def _all_reduces(
        self, program: StepProgram, sync: AllReduceConfig, ranks: int, ends: Mapping[str, int]
    ) -> list[int]:
        """Append the all-reduces of all buckets, in order; those of the backend overlap backward and delays."""
        order = {name: place for place, name in enumerate(self.facts.workload.gradient_order)}
        sequence = self._backward_order()
        ready = {g.name: g.ready for g in self.facts.workload.groups}
        last = complete = len(program.actions) - 1
        needs: list[int] = []
        # Of sums in shared memory the copies into it overlap backward, but take the same core.
        after_backward = sync.schedule is not None or sums_in_memory(self.costs, sync, ranks * self.apart)
        for number, vector in enumerate(program.vectors):
            if after_backward:
                complete = last
            elif vector.parameters:
                # As in a run, which sends a bucket within backward: a delay after the passes holds none of them back.
                complete = max(
                    max(ends[self.facts.tensors[i].group], self._reached(order, ready, sequence, ends, i))
                    for i in vector.parameters
                )
            seconds = all_reduce_seconds(self.costs, sync, ranks, vector.bytes, self.apart)
            if sync.schedule == "central" and number == 0:
                # The reducer receives from all but the delayed rank during its delay.
                early = seconds / 2 * (ranks - 2) / (ranks - 1)
                self.message(program, early, existing_actions(self.undelayed(program)), "gradients of other ranks")
                seconds = seconds - early
            needs = [self.message(program, seconds, (complete,), f"gradient bucket {number}")]
        return needs

    @staticmethod
    def undelayed(program: StepProgram) -> int:
        """Return the index of the last action of a simulated step, not counting a delay (``--slow``) at its end.

        Actions are the computations, messages and delays of the step.

        Args:
            program: the step up to the end of a rank's passes.

        Returns:
            Index in ``program.actions``; -1 if there is no such action.
        """
        last = len(program.actions) - 1
        return last - (last >= 0 and program.actions[last].phase == IDLE)

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

    @property
    def apart(self) -> int:
        """Number of devices of one model replica: pipeline stages × tensor ranks of the configuration.

        Consecutive devices belong to one replica, so data rank r + 1 begins this number of devices after data rank r.
        """
        return self.shape["stage"] * self.shape["tensor"]

    def _totals(self, program: StepProgram, tensors: Sequence[TensorFacts], last: int) -> int:
        """Append the sum of the rows' gradients over copies (HSDP), then of loss sums, used flags and the norm."""
        copies, ranks = self.shape["replica"], self.shape["replica"] * self.shape["shard"]
        for dtype, size in rank_row_bytes(tensors, self.shape["shard"]).items() if copies > 1 else ():
            each = self._carried("all_reduce", copies, size, "replica", shared=False)
            last = self._send(program, each, copies, (last,), f"{dtype} gradients over copies", self.shape["shard"])
        each = self._carried("all_reduce", ranks, totals_bytes(tensors), "data", shared=self._one_node(ranks))
        return self._send(program, each, ranks, (last,), "totals", 1) if ranks > 1 else last

    def _rows(self, program: StepProgram, kind: str, size: float, needs: tuple[int, ...], text: str) -> int:
        """Append a collective of rows over the shards, as the communicator carries it."""
        shards = self.shape["shard"]
        each = self._carried(kind, shards, size, "shard", shared=self._one_node(shards * self.shape["replica"]))
        return self._send(program, each, shards, needs, text, 1)

    def _module_rows(self, program: StepProgram, kind: str, size: float, needs: tuple[int, ...], text: str) -> int:
        """Append a collective of FSDP, which copies a module's tensors into one buffer before it, or out of one after.

        Nothing hides these copies on CPUs.
        """
        place = self._rows(program, kind, size, needs, text)
        if self.costs.overlaps:
            return place
        copies = copy_seconds(self.costs, COPIED * size, 1)
        return self.message(program, copies, (place,), f"copies of {text}")

    def _carried(self, kind: str, ranks: int, size: float, axis: str, *, shared: bool) -> PeriodicCollective:
        return carried(kind, ranks, size, cpu=not self.costs.overlaps, shared=shared, axis=axis)

    def _one_node(self, ranks: int) -> bool:
        return self.costs.network.nodes(ranks) == 1

    def _send(
        self, program: StepProgram, each: PeriodicCollective, ranks: int, needs: tuple[int, ...], text: str, apart: int
    ) -> int:
        program.collectives.append(each)
        seconds = collective_seconds(self.costs, each, ranks, apart)
        return self.message(program, seconds, needs, f"{each.kind} of {text}")

    def message(self, program: StepProgram, seconds: Array, needs: tuple[int, ...], text: str, device: int = 0) -> int:
        """Append a message or collective of a device to a simulated step, and return its index in ``program.actions``.

        While it runs, the device's link is occupied, and its compute units are free.

        Args:
            program: the step, to which the message is added.
            seconds: duration in seconds, shape (256,): one value for each of the Monte Carlo draws of the machine's
                constants.
            needs: indices in ``program.actions`` of the actions that have to end before the message begins.
            text: name of the message in timelines.
            device: index of the device in the program.
        """
        return program.add(StepAction(device, COMMUNICATION, seconds, needs, link=True, text=text))

    def update(
        self,
        program: StepProgram,
        parameters: float,
        needs: Sequence[int],
        device: int = 0,
        tensors: int | None = None,
    ) -> int:
        """Append an optimizer step to a simulated training step, and return its index in ``program.actions``.

        Its seconds are those of the configuration's optimizer on the machine.

        Args:
            program: the training step.
            parameters: number of parameters that the optimizer updates on the device.
            needs: indices in ``program.actions`` of the actions that have to end before the optimizer step begins;
                negative ones stand for no action.
            device: index of the device in the program.
            tensors: number of trainable parameter tensors of the device; None: all of the model's.

        Raises:
            UsageError: the machine's data lack the optimizer of the configuration.
        """
        number = len(self.facts.tensors) if tensors is None else tensors
        seconds = self.costs.update(self.config.optimizer_choice.name, parameters, number)
        return program.add(StepAction(device, UPDATE, seconds, existing_actions(*needs), text=self.config.optimizer))

    @cached_property
    def work(self) -> StrategyWork:
        """Seconds that the Python code of the configuration's strategy takes besides operators and messages; cached.

        A ``StrategyWork``: ``step``, seconds of a step; ``tensor``, additional seconds of a step for each parameter
        tensor; ``micro_batch``, seconds of a micro-batch; and ``unit``, additional seconds of a micro-batch for each
        parameter tensor, with FSDP for each wrapped module.
        """
        return self.costs.strategy_work(strategy_key(self.config, self.shape))

    def _group(self, group: GroupWork, phase: Pass, samples: int) -> Array:
        """Price a group's forward or backward on the slowest device."""
        return np.asarray(self.prices.group(group, phase, samples, self.config.activation_checkpointing) * self.slow)


def existing_actions(*places: int) -> tuple[int, ...]:
    """Drop negative indices, which stand for no action of a simulated step, and repetitions.

    Args:
        places: indices in ``StepProgram.actions``, or negative numbers.

    Returns:
        The remaining indices in the order of the arguments; may be empty.
    """
    return tuple(dict.fromkeys(place for place in places if place >= 0))
