"""Before the first step: compare the model's structure over the ranks and broadcast its values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tutti.comm.broadcast import broadcast_tensors
from tutti.comm.communicator import Communicator
from tutti.nn.swap import buffers, describe_tensors, parameters


def agree_on_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Compare names, shapes, dtypes, order and trainability of parameters and buffers over the ranks.

    Values are not compared. Collective over the ranks of ``comm``: an all-gather of digests.

    Args:
        comm: the ranks to compare.
        parts: this rank's modules, in order.

    Raises:
        MismatchError: some rank's entries differ; raised on every rank, with the first entry that differs.
    """
    comm.agree(
        describe_tensors(parts), "the model", "build the same model, in the same order and precision, on every rank"
    )


def broadcast_state(comm: Communicator, parts: Sequence[nn.Module]) -> None:
    """Broadcast all parameters and buffers of the modules from the first rank of ``comm``, in place.

    All ranks must hold the same names, shapes and dtypes; ``agree_on_state`` checks this. Collective over the ranks of
    ``comm``: one broadcast for up to 64 MiB of tensors of one dtype.

    Args:
        comm: the ranks; the first one sends.
        parts: this rank's modules, in order.
    """
    broadcast_tensors(
        comm, [p.data for _, p in parameters(parts)] + [slot.get() for slot in buffers(parts)], "initial state"
    )
