"""Gradient norm over the ranks of one replica, each with a part of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.parallel.ddp.step_agreement import digests, digests_agree, refuse_mismatch
from tutti.types.step_records import StepContext


def norm_across_model(comm: Communicator, square: float, stop: bool, step_context: StepContext) -> tuple[float, bool]:
    """Sum the squared gradient norms of all ranks of one replica, and find out whether any of them asks to stop.

    Collective: one all-reduce over the ranks of one replica, each of which has a part of the model (stages or slices);
    none for a single rank.

    Args:
        comm: the ranks of one replica.
        square: sum of squares of the gradients that this rank counts. Of a tensor with copies on several ranks only one
            rank counts the gradient.
        stop: whether this rank asks to stop the run.
        step_context: the step under way, which the ranks compare by small hashes sent with the sum.

    Returns:
        The squared L2 norm of the replica's whole gradient, and whether any rank asks to stop; equal on all these
        ranks.

    Raises:
        MismatchError: the ranks are in different steps.
        UsageError: the script's edits of parameters or gradients that are split over ranks differ between these ranks.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    if comm.size == 1:
        return square, stop
    [total], asked = _sum_over_replica(comm, torch.tensor([square], dtype=torch.float64), stop, step_context)
    return total, asked


class ReplicaSums:
    """Sums numbers, such as squares of gradient norms, over the ranks of one replica, with exact rounding.

    Each rank has a part of the model (stages or slices) and contributes several numbers. Every rank receives all
    numbers and adds them up with exact rounding, so that the sum does not depend on the division of the model.

    Args:
        comm: the ranks of one replica.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # Number of places of each rank in a row; None before the first sum.
        self._places: list[int] | None = None

    def total(
        self, rows: Sequence[Sequence[float]], most: int, stop: bool, step_context: StepContext
    ) -> tuple[list[float], bool]:
        """Return the sum of each row of numbers over the ranks of the replica, and whether any rank asks to stop.

        Collective over the ranks of the replica: an all-reduce, and in the first call an all-gather of ``most``; none
        for a single rank.

        Args:
            rows: this rank's numbers, in rows of equal lengths; the number of rows is equal on all ranks.
            most: upper bound of the length of this rank's rows in this and all later calls; read in the first call
                only.
            stop: whether this rank asks to stop the run.
            step_context: the step under way, which the ranks compare by small hashes sent with the numbers.

        Returns:
            A pair, equal on all ranks: a list with the sum of each row, infinity on overflow; and whether any rank asks
            to stop.

        Raises:
            MismatchError: the ranks are in different steps.
            UsageError: the script's edits of parameters or gradients that are split over ranks differ between these
                ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm = self._comm
        if comm.size == 1:
            return [_exact_sum(row) for row in rows], stop
        if self._places is None:
            self._places = [int(n) for n in comm.all_gather(torch.tensor([most]), "parts of the gradient norm")]
        width, start = sum(self._places), sum(self._places[: comm.rank])
        # Each number has a place of its own, which is 0 on all other ranks: the all-reduce gathers them.
        table = torch.zeros(len(rows), width, dtype=torch.float64)
        table[:, start : start + len(rows[0])] = torch.tensor(rows, dtype=torch.float64)
        numbers, asked = _sum_over_replica(comm, table.flatten(), stop, step_context)
        return [_exact_sum(numbers[i * width : (i + 1) * width]) for i in range(len(rows))], asked


def _sum_over_replica(
    comm: Communicator, numbers: Tensor, stop: bool, step_context: StepContext
) -> tuple[list[float], bool]:
    """All-reduce float64 numbers (n,) over the ranks of one replica, and check that these are in the same step.

    Args:
        comm: the ranks of one replica.
        numbers: this rank's summands, on the CPU.
        stop: whether this rank asks to stop the run.
        step_context: the step under way, whose digests travel with the numbers.

    Returns:
        The n sums, and whether any rank asks to stop.
    """
    digest = digests(step_context)
    message = torch.cat([numbers, torch.tensor([stop, *digest], dtype=torch.float64)]).to(comm.device)
    comm.start_all_reduce(message, "all_reduce of the gradient norm").wait()
    found = message.tolist()
    sums, (asked, *together) = found[: len(numbers)], found[len(numbers) :]
    if not digests_agree(tuple(together), digest, comm.size):
        refuse_mismatch(comm, step_context)
    return sums, asked > 0


def _exact_sum(row: Sequence[float]) -> float:
    """Return the exactly rounded sum, which does not depend on the order of the numbers; infinity on overflow."""
    try:
        return math.fsum(row)
    except OverflowError:
        return math.inf
