"""What the ranks of one replica, each with a part of the model, tell each other of a step."""

from __future__ import annotations

import torch

from tutti.comm.communicator import Communicator
from tutti.exchanges.buckets import agreed, digests
from tutti.exchanges.reducers import refuse
from tutti.types import Tick


def across_model(comm: Communicator, square: float, stop: bool, tick: Tick) -> tuple[float, bool]:
    """The square of the whole gradient's norm, and whether any part asks to stop. One all-reduce.

    Raises MismatchError where parts are not in the same step.
    """
    if comm.size == 1:
        return square, stop
    digest = digests(tick)
    message = torch.tensor([square, stop, *digest], dtype=torch.float64, device=comm.device)
    comm.start_all_reduce(message, "all_reduce of the gradient norm").wait()
    total, asked, *together = message.tolist()
    if not agreed(tuple(together), digest, comm.size):
        refuse(comm, tick)
    return total, asked > 0
