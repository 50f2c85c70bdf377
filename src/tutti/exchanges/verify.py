"""Before the first step: do all ranks hold the same model, and do they start from the same numbers?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tutti.comm.communicator import Communicator
from tutti.comm.spread import spread
from tutti.nn.swap import buffers, describe, parameters


def agree_on_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Compare names, shapes, dtypes, order and trainability of parameters and buffers over the ranks.

    Raises MismatchError on every rank, with the first entry that differs.
    """
    comm.agree(describe(parts), "the model", "build the same model, in the same order and precision, on every rank")


def spread_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Overwrite parameters and buffers by the first rank's. Collective; see ``spread``."""
    spread(comm, [p.data for _, p in parameters(parts)] + [slot.get() for slot in buffers(parts)], "initial state")
