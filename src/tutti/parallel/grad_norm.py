"""Gradient norm over the ranks of one replica, each with a part of the model."""

from __future__ import annotations

import torch

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
    digest = digests(step_context)
    message = torch.tensor([square, stop, *digest], dtype=torch.float64, device=comm.device)
    comm.start_all_reduce(message, "all_reduce of the gradient norm").wait()
    total, asked, *together = message.tolist()
    if not digests_agree(tuple(together), digest, comm.size):
        refuse_mismatch(comm, step_context)
    return total, asked > 0
