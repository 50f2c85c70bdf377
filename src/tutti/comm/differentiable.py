"""Collectives that autograd goes through, among ranks that compute one replica together on the same samples.

Shoeybi et al. 2019, arXiv 1909.08053, §3: ``copy`` is their f, ``reduce`` their g. Every rank must call them in the
same order, with tensors whose shapes follow from its rank. What comes in whole is the same on all ranks, and so is the
gradient of what comes out whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.comm.communicator import Communicator
from tutti.laws.shares import share


class Ranks:
    """The tensor ranks of one replica.

    Attributes:
        rank, size: this one, and how many.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._copied: tuple[Tensor, int, Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def copy(self, whole: Tensor, name: str) -> Tensor:
        """The same; backward sums the ranks' gradients: one all-reduce, also for neighbours that copy one tensor."""
        if not torch.is_grad_enabled():
            return whole
        if self._copied is None or self._copied[0] is not whole or self._copied[1] != whole._version:
            self._copied = whole, whole._version, _Copy.apply(whole, self, name)  # type: ignore[no-untyped-call]
        return self._copied[2]

    def reduce(self, part: Tensor, name: str) -> Tensor:
        """The sum of all ranks' tensors (one all-reduce); backward passes the gradient on."""
        self._copied = None
        result: Tensor = _Reduce.apply(part, self, name)  # type: ignore[no-untyped-call]
        return result

    def gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All ranks' shares of ``length`` along ``dim``, in rank order (one all-gather); backward takes this rank's."""
        self._copied = None
        result: Tensor = _Gather.apply(part, self, dim, length, name)  # type: ignore[no-untyped-call]
        return result

    def sum(self, tensor: Tensor, name: str) -> Tensor:
        """The sum of all ranks' tensors, a new one."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._comm.start_all_reduce(total, name).wait()
        return total

    def all(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """What ``gather`` gives; uneven shares travel in messages of the largest one's size."""
        lengths = [len(share(length, self.size, rank)) for rank in range(self.size)]
        # By the stride, because one channel alone is contiguous in both ways; dropout draws in the order of memory.
        last = part.dim() == 4 and part.stride(1) == 1
        if lengths[self.rank] < lengths[0]:
            shape = list(part.shape)
            shape[dim] = lengths[0] - lengths[self.rank]
            part = torch.cat([part, part.new_zeros(shape)], dim)
        pieces = self._comm.gather_slices(part.reshape(-1), name).view(self.size, *part.shape).unbind()
        whole = torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, lengths, strict=True)], dim)
        return whole.contiguous(memory_format=torch.channels_last) if last else whole


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.ranks.sum(gradients[0], f"gradient of the input of {ctx.name}"), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, name: str) -> Tensor:
        return ranks.sum(part, f"output of {name}")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, dim: int, length: int, name: str) -> Tensor:
        ctx.mine, ctx.dim = share(length, ranks.size, ranks.rank), dim
        return ranks.all(part, dim, length, f"output of {name}")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].narrow(ctx.dim, ctx.mine.start, len(ctx.mine)), None, None, None, None
