"""Predict the seconds in which a step's messages, sums of gradients and copies in memory take place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from tutti.config.sync_config import AllReduceConfig
from tutti.errors import UsageError
from tutti.parallel.ddp.step_agreement import DIGESTS
from tutti.planning.collective_laws import schedule_seconds
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.pass_prices import Pass, PassPrices
from tutti.planning.scaling_laws import Array
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_facts import StepFacts, TensorFacts, carried
from tutti.planning.step_program import PeriodicCollective
from tutti.planning.strategy_work import StrategyWork
from tutti.workload.workload_file import Affine, OperatorWork

COPIED = 2
"""Bytes that a copy of a tensor reads and writes, over the tensor's bytes."""
READ_WRITE = 3
"""Bytes that adding one tensor to another moves, over the bytes of one: two reads and a write."""
BARRIERS = "barriers in shared memory take no time besides the waiting for the slowest rank"
"""A guess of every sum in shared memory, to be printed."""


def sums_in_memory(costs: StepCosts, sync: AllReduceConfig, devices: int) -> bool:
    """Return whether data ranks add up their gradients in shared memory, as CPUs of one node do by default.

    Args:
        costs: durations on the machine; read are the kind of its devices (CPUs or accelerators) and how many of them
            are on a node.
        sync: options of gradient synchronisation. Another ``algorithm`` than ``auto`` and ``shared_memory``,
            another ``wire`` than ``fp32``, or a ``bucket_mb`` rules out shared memory.
        devices: number of devices of the run: data ranks × devices of a replica.

    Raises:
        UsageError: the options ask for shared memory, which these devices do not have.
    """
    if sync.algorithm not in ("auto", "shared_memory") or sync.wire != "fp32" or sync.bucket_mb is not None:
        return False
    shared = not costs.overlaps and costs.network.nodes(devices) == 1
    if sync.algorithm == "shared_memory" and not shared:
        raise UsageError(
            "these devices cannot share memory",
            why="they are on several nodes, or are accelerators",
            remedy="take algorithm=native",
        )
    return shared


def all_reduce_seconds(costs: StepCosts, sync: AllReduceConfig, ranks: int, size: float, apart: int = 1) -> Array:
    """Predict the seconds of the all-reduce of one gradient vector over the data ranks.

    In shared memory each rank copies its vector into its slot, adds up one slice of all slots, and copies the sum back.

    Args:
        costs: predicts the seconds of computing and communication on the machine.
        sync: options of gradient synchronisation: the ``algorithm``, such as ``ring``; and ``wire`` and
            ``bucket_mb``, which rule out shared memory if they are not at their defaults.
        ranks: number of data ranks.
        size: bytes of the vector.
        apart: stride in devices from one data rank to the next, which is the number of devices of a replica.

    Returns:
        Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
        constants; all equal for an algorithm that tutti carries out itself, such as ``ring``.

    Raises:
        UsageError: the machine's data lack the collective or the cost of a link; or the options ask for shared memory,
            which the devices do not have.
    """
    if ranks > 1 and sums_in_memory(costs, sync, ranks * apart):
        costs.note(BARRIERS)
        slices = (ranks - 1) / ranks * size
        packed, read = copy_seconds(costs, COPIED * size, 1), copy_seconds(costs, COPIED * slices, ranks - 1)
        return packed + copy_seconds(costs, READ_WRITE * slices, ranks - 1, "other") + read
    if sync.schedule is None:
        return costs.collective("all_reduce", ranks, size, apart)
    devices, node = ranks * apart, costs.within()
    per_node = min(max(costs.network.per_node // apart, 1), ranks)
    hierarchical = sync.schedule == "hierarchical"
    if hierarchical:
        costs.note("transfers within a node take as long as copies in its memory")
    # All slices of a node, and the parts of its replicas, take the node's link at once.
    together = min(apart, costs.network.per_node) * (per_node if hierarchical else 1)

    # Rounds of these send towards one rank, and then away from it: no link carries both ways at once.
    ways = 1 if sync.schedule in ("tree", "central") else 2

    def over(size: float) -> float:
        return costs.transfer(size, devices, together, ways)

    return np.full(DRAWS, schedule_seconds(sync.schedule, ranks, size, over, node, per_node))


def collective_seconds(costs: StepCosts, each: PeriodicCollective, ranks: int, apart: int = 1) -> Array:
    """Predict the seconds of one collective of a training step, by the communication backend or through shared memory.

    Args:
        costs: predicts the seconds of computing and communication on the machine.
        each: ``kind`` and ``bytes`` of the collective that really runs, as ``step_facts.carried`` returns it: on CPUs
            an ``all_to_all`` in place of a reduce-scatter, and ``shared_memory`` for small tensors on one node.
        ranks: number of ranks that take part.
        apart: stride in devices from one of these ranks to the next.

    Returns:
        Seconds of one call, whatever its ``calls`` and ``period``, array of shape (256,): one value for each of the
        Monte Carlo draws of the machine's uncertain constants.

    Raises:
        UsageError: the machine's data lack the collective or the cost of a link.
    """
    if each.kind == "shared_memory":
        costs.note("small collectives in shared memory take as long as copies; waiting for other ranks takes none")
        return copy_seconds(costs, COPIED * each.bytes * (ranks + 1) / ranks, ranks + 1)
    if each.kind == "all_to_all":
        # tutti bench measures the communicator's reduce-scatter, which is an all-to-all on CPUs.
        costs.note("an all-to-all takes as long as a reduce-scatter of as many bytes")
        return costs.collective("reduce_scatter", ranks, each.bytes, apart)
    return costs.collective(each.kind, ranks, each.bytes, apart)


def copy_seconds(costs: StepCosts, size: float, calls: float, kind: str = "copy", resident: float = math.inf) -> Array:
    """Predict the seconds in which a device or host process copies or adds up bytes in memory.

    Args:
        costs: predicts the seconds of computing and communication on the machine.
        size: bytes that all operators together read and write: of a copy twice the bytes of the tensor.
        calls: number of operators.
        kind: ``copy``, or ``other`` for elementwise operators.
        resident: bytes that the step touches between two uses of a tensor.

    Returns:
        Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
        constants.

    Raises:
        UsageError: the machine's data lack the seconds of copies or of elementwise operators.
    """
    return costs.compute([{kind: OperatorWork(Affine(), Affine(size), Affine(calls))}], 1, resident=resident)


def micro_batch_overhead(
    costs: StepCosts, work: StrategyWork, tensors: Sequence[TensorFacts], first: bool, units: float | None = None
) -> Array:
    """Predict the seconds that a micro-batch takes on a device in addition to its forward and backward passes.

    They are the seconds of the strategy's Python work and of adding up gradients. The first micro-batch includes the
    Python work of the step. For each other micro-batch, autograd adds its gradients to those of the micro-batches
    before.

    Args:
        costs: predicts the seconds of computing and communication on the machine.
        work: seconds of the strategy's Python work.
        tensors: trainable parameters of the device, each with the elements of its gradient there.
        first: whether the micro-batch is the first of the step.
        units: number of tensors, or with FSDP of wrapped modules, with which the Python work grows; None: the number of
            ``tensors``.

    Returns:
        Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
        constants.

    Raises:
        UsageError: the machine's data lack the seconds of elementwise operators; not for the first micro-batch.
    """
    seconds = np.full(DRAWS, work.of_micro_batch(len(tensors) if units is None else units))
    if first:
        return seconds + work.of_step(len(tensors))
    if not tensors:
        return seconds
    added = READ_WRITE * sum(t.bytes for t in tensors)
    # Backward has just written what is added, into memory that is there: activations of other layers are left out.
    return seconds + copy_seconds(costs, added, len(tensors), "other", added)


def pass_messages(
    facts: StepFacts, checkpointing: str, passed: Pass, samples: int, groups: Sequence[str] | None
) -> list[PeriodicCollective]:
    """Return the collectives that tensor parallelism makes in a forward or backward of a micro-batch, in order.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        facts: FLOP, parameters, pipeline stages and tensor-parallel collectives of a step of the model.
        checkpointing: value of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.
        passed: ``forward`` or ``backward``; backward includes recomputation.
        samples: number of samples in the micro-batch.
        groups: names of the module groups whose collectives are wanted; None for all.

    Returns:
        One element for each collective, with ``kind``, such as ``all_reduce``, and ``bytes`` of the whole tensor; empty
        where no layer is split over tensor ranks.
    """
    return [
        PeriodicCollective(each.kind, round(each.bytes.at(samples)), axis="tensor")
        for each in facts.messages.get(checkpointing, ())
        if each.passed == passed and (groups is None or each.group in groups)
    ]


def gradient_norm_seconds(costs: StepCosts, devices: int, squares: int | None = None) -> Array:
    """Predict the seconds of the all-reduce by which the devices of one model replica agree on the gradient norm.

    The message is that of ``gradient_norm_bytes``, with hashes by which the ranks check that they are in the same step.

    Args:
        costs: predicts the seconds of computing and communication on the machine.
        devices: pipeline stages × tensor ranks of the replica; one device alone takes 0 s.
        squares: number of squared norms in the message; None: one for each device.

    Returns:
        Seconds, array of shape (256,): one value for each of the Monte Carlo draws of the machine's uncertain
        constants.

    Raises:
        UsageError: the machine's data lack the collective or the cost of a link.
    """
    return costs.collective("all_reduce", devices, gradient_norm_bytes(devices, squares))


def gradient_norm_bytes(devices: int, squares: int | None) -> int:
    """Return the bytes of the all-reduced message by which the devices of a replica agree on the gradient norm.

    The message holds 8 bytes for each squared norm, for one further number, and for each of ``DIGESTS`` hashes.

    Args:
        devices: pipeline stages × tensor ranks of the replica.
        squares: number of squared norms in the message; None: one for each device.
    """
    return 8 * ((devices if squares is None else squares) + 1 + DIGESTS)


def message_seconds(prices: PassPrices, sent: Sequence[PeriodicCollective], ranks: int) -> Array:
    """Predict the seconds of collectives over the tensor ranks of a replica, which are neighbouring devices.

    Args:
        prices: cache of predicted seconds, whose ``costs`` predict those of a collective on the machine.
        sent: the collectives, as ``pass_messages`` returns them.
        ranks: number of tensor ranks.

    Returns:
        Seconds of all of them together, array of shape (256,): one value for each of the Monte Carlo draws of the
        machine's uncertain constants.

    Raises:
        UsageError: the machine's data lack the collective or the cost of a link.
    """
    total, cpu, shared = np.zeros(DRAWS), not prices.costs.overlaps, prices.costs.network.nodes(ranks) == 1

    def price(kind: str, size: int) -> Array:
        each = carried(kind, ranks, size, cpu=cpu, shared=shared)
        return prices.once(
            ("tensor", each.kind, each.bytes, ranks), lambda: collective_seconds(prices.costs, each, ranks)
        )

    for (kind, size), number in Counter((each.kind, each.bytes) for each in sent).items():
        total += number * price(kind, size)
    return total
