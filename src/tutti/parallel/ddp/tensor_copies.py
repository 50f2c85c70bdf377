"""Gradients of parameters that every tensor rank holds whole, such as those of norm layers: the same on all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator


def share_whole_gradients(whole: Iterable[nn.Parameter], comm: Communicator) -> None:
    """Broadcast the gradients of parameters that are not split from the first tensor-parallel rank into ``.grad``.

    Every tensor rank holds a copy of such a parameter, and the copies must stay equal. The order in which a backend
    adds the gradients of the data ranks depends on a gradient's place in the message, which differs between tensor
    ranks with slices of unequal sizes, and on the links between the ranks. The sums of two tensor ranks then differ by
    rounding, and so would their copies of the parameter, more in each step. Collective over the tensor ranks: one
    broadcast a dtype. Where ``.grad`` is None it stays None; sparse gradients and frozen parameters are left out.

    Args:
        whole: this rank's parameters, or its rows of parameters, that are not split over the tensor ranks.
        comm: the tensor ranks.
    """
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for parameter in whole:
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
        comm.broadcast_unchecked(flat, 0, "broadcast of the gradients of whole tensors")
        if comm.rank:
            parts = flat.split([grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.detach().copy_(part.view(grad.shape))
