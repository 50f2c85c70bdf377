"""Gradients of parameters of which ranks of one replica hold copies: the same on all of them.

Tensor ranks hold copies of parameters that are not split, such as norm layers; pipeline stages of tied weights.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator


def share_gradients(copied: Iterable[nn.Parameter], comm: Communicator) -> None:
    """Overwrite the gradients of parameters that several ranks of one replica hold with rank 0's gradients.

    The ranks are tensor ranks with their unsplit parameters, or the pipeline stages that use a tied weight. The order
    in which a backend adds the gradients of the data ranks depends on a gradient's place in the message, which differs
    between tensor ranks with slices of unequal sizes and between stages, and on the links between the ranks. The sums
    of two ranks then differ by rounding, and so would their copies of the parameter, more in each step.

    Collective over the ranks of ``comm``: one broadcast from its rank 0 for each dtype; blocks. The result is written
    into ``.grad`` in place. A ``.grad`` that is None stays None, and counts as zeros where rank 0 sends it. Sparse
    gradients and frozen parameters are left out.

    Args:
        copied: this rank's copies, or its rows of them, in an order equal on all ranks.
        comm: the ranks that hold the copies.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
        MismatchError: the ranks wait in different calls.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for parameter in copied:
        grad = parameter.grad
        if parameter.requires_grad:
            if grad is None:
                # A gradient that another rank may have: its place in the message is kept.
                kinds.setdefault(parameter.dtype, []).append(torch.zeros_like(parameter))
            elif grad.layout == torch.strided:
                kinds.setdefault(parameter.dtype, []).append(grad)
    for dtype in sorted(kinds, key=str):
        grads = kinds[dtype]
        flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
        comm.broadcast_unchecked(flat, 0, "broadcast of gradients of copied parameters")
        if comm.rank:
            parts = flat.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.detach().copy_(part.view(grad.shape))
