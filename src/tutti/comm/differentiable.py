"""Collectives that autograd goes through, among ranks that compute one replica together on the same samples.

Shoeybi et al. 2019, arXiv 1909.08053, §3: ``copy`` is their f, ``reduce`` their g. Korthikanti et al. 2022, arXiv
2205.05198, §4.2: ``widen`` is their g, ``scatter`` their ḡ. Every rank must call them in the same order, with tensors
whose shapes follow from its rank. What comes in whole is the same on all ranks, and so is the gradient of what comes
out whole, but for ``copy`` and ``widen``.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def take(self, whole: Tensor, dim: int, length: int, name: str) -> Tensor:
        """This rank's share along ``dim`` of what all have alike; backward gathers (one all-gather)."""
        result: Tensor = _Take.apply(whole, self, dim, length, name)  # type: ignore[no-untyped-call]
        return result

    def scatter(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """This rank's share along ``dim`` of the sum of all ranks' tensors (one reduce-scatter); backward gathers."""
        self._copied = None
        result: Tensor = _Scatter.apply(part, self, dim, length, name)  # type: ignore[no-untyped-call]
        return result

    def widen(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """As ``gather``, for each rank to use in its own way; backward sums and takes this rank's share of that.

        One all-gather forward and one reduce-scatter backward, also for neighbours that widen one tensor.
        """
        if self._copied is None or self._copied[0] is not part or self._copied[1] != part._version:
            self._copied = part, part._version, _Widen.apply(part, self, dim, length, name)  # type: ignore[no-untyped-call]
        return self._copied[2]

    def copies(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        """The same; backward sums the ranks' gradients: one all-reduce of all together."""
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return tensors
        result: Sequence[Tensor] = _Copies.apply(self, name, *tensors)  # type: ignore[no-untyped-call]
        return result

    def join(self, tensor: Tensor, name: str) -> Tensor:
        """All ranks' tensors of one shape, along a new first dimension (one all-gather); backward takes this rank's."""
        return self.gather(tensor.unsqueeze(0), 0, self.size, name)

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

    def sum_share(self, tensor: Tensor, dim: int, length: int, name: str) -> Tensor:
        """This rank's share along ``dim`` of the sum; uneven shares travel in messages of the largest one's size."""
        first = tensor.movedim(dim, 0)
        shares = [share(length, self.size, rank) for rank in range(self.size)]
        if length % self.size == 0:
            send = first.reshape(self.size, -1).contiguous()
        else:
            padded = first.new_zeros(self.size, len(shares[0]), *first.shape[1:])
            for target, mine in zip(padded, shares, strict=True):
                target[: len(mine)] = first[mine.start : mine.stop]
            send = padded.view(self.size, -1)
        kept = send.new_empty(send.shape[1])
        self._comm.scatter_sum(kept, send.view(-1), name)
        rows = kept.view(len(shares[0]), *first.shape[1:])[: len(shares[self.rank])]
        return rows.movedim(0, dim).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks, name: str) -> Tensor:
        ctx.ranks, ctx.name = ranks, name
        # view_as would give a dimension of one another stride, and a convolution's output another layout.
        same: Tensor = torch.ops.aten.alias(whole)
        return same

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


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, f"gradient of the input of {name}"
        mine = share(length, ranks.size, ranks.rank)
        # In the order of memory of the whole, for dropout draws in it.
        order = sorted(range(whole.dim()), key=lambda d: -whole.stride()[d])
        part = whole.narrow(dim, mine.start, len(mine)).permute(order).clone(memory_format=torch.contiguous_format)
        return part.permute([order.index(d) for d in range(whole.dim())])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ranks, *given = ctx.given
        return ranks.all(gradients[0], *given), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, f"gradient of the output of {name}"
        return ranks.sum_share(part, dim, length, f"output of {name}")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ranks, *given = ctx.given
        return ranks.all(gradients[0], *given), None, None, None, None


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, f"gradient of the input of {name}"
        return ranks.all(part, dim, length, f"input of {name}")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ranks, *given = ctx.given
        return ranks.sum_share(gradients[0], *given), None, None, None, None


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.name = ranks, name
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = ctx.ranks.sum(torch.cat([g.reshape(-1) for g in gradients]), f"gradients of parameters of {ctx.name}")
        parts = total.split([gradient.numel() for gradient in gradients])
        return None, None, *(part.view_as(g).to(g.dtype) for part, g in zip(parts, gradients, strict=True))
