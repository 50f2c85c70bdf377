"""Differentiable collectives among the tensor-parallel ranks of one replica, which compute on the same samples.

Shoeybi et al. 2019, arXiv 1909.08053, §3: ``all_reduce_gradient`` is their f, ``all_reduce`` their g. Korthikanti et
al. 2022, arXiv 2205.05198, §4.2: ``all_gather_input`` is their g, ``reduce_scatter`` their ḡ. Every rank must call them
in the same order, with tensors whose shapes follow from its rank. A whole input tensor is equal on all ranks, and so is
the gradient of a whole output, except for ``all_reduce_gradient`` and ``all_gather_input``, whose backward sums
different gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tutti.comm.graph_breaks import left_out_of_graphs
from tutti.comm.partition import even_share
from tutti.comm.single_call import single_call
from tutti.errors import UsageError
from tutti.torch_compat import tensor_version


class SliceCollectives(Protocol):
    """Protocol of the collectives over tensor-parallel ranks from which differentiable ones are made.

    A ``Communicator`` performs them; a ``MessageLog`` records them while one rank's model is traced alone.

    Attributes:
        rank, size: index of this tensor-parallel rank, number of these ranks.
    """

    rank: int
    size: int

    def sum_in_place(self, tensor: Tensor, text: str) -> None:
        """All-reduce (sum) ``tensor`` in place.

        Args:
            tensor: this rank's summand, of equal shape on all ranks.
            text: name of the collective for errors.
        """

    def gather_slices(self, mine: Tensor, text: str) -> Tensor:
        """All-gather slices of equal sizes, and return them concatenated in rank order.

        Args:
            mine: (n,), this rank's slice.
            text: name of the collective for errors.
        """

    def scatter_sum(self, mine: Tensor, whole: Tensor, text: str) -> None:
        """Reduce-scatter: write this rank's slice of the sum of ``whole`` over the ranks into ``mine``.

        Args:
            mine: (n,), overwritten.
            whole: (ranks · n,), this rank's summand.
            text: name of the collective for errors.
        """


class TensorRanks:
    """Differentiable collectives over the tensor axis of the device mesh, whose ranks split layers among them.

    Each rank has ``even_share(length, size, rank)`` of the dimension ``dim`` of a split tensor: if ``size`` does not
    divide ``length``, the first ranks have one more. The constructor sends nothing; it loads the front end of
    ``torch.compile``, which breaks graphs at these collectives.

    Args:
        comm: communicator of the tensor-parallel ranks, or a log in its place.

    Attributes:
        rank, size: index of this tensor-parallel rank, number of these ranks.
    """

    def __init__(self, comm: SliceCollectives) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self._copied: tuple[Tensor, int, Tensor] | None = None
        for name in (
            "all_reduce_gradient",
            "all_reduce_gradients",
            "all_reduce",
            "all_gather",
            "all_gather_input",
            "take_slice",
            "reduce_scatter",
        ):
            vars(self)[name] = left_out_of_graphs(getattr(self, name))

    def __deepcopy__(self, memo: Any) -> TensorRanks:
        return self

    def all_reduce_gradient(self, whole: Tensor, name: str) -> Tensor:
        """Return ``whole`` unchanged, and in backward all-reduce (sum) its gradient over the tensor-parallel ranks.

        The operator f of Shoeybi et al. 2019 (arXiv 1909.08053), for the input of layers that are split over the ranks.
        The forward sends nothing. Consecutive calls with the same tensor return the same result, whose gradient is
        all-reduced once.

        Args:
            whole: any tensor, equal on all ranks.
            name: the layer whose input it is; named in UsageError, and in the backward's PeerError (a rank is lost or
                late) and MismatchError (the ranks wait in different calls).

        Returns:
            A tensor with the values of ``whole``, to be used in its place; ``whole`` itself under ``torch.no_grad``.

        Raises:
            UsageError: within ``torch.func`` transforms.
        """
        if not torch.is_grad_enabled():
            return whole
        if self._copied is None or self._copied[0] is not whole or self._copied[1] != tensor_version(whole):
            try:
                copied: Tensor = _AllReduceGradient.apply(whole, self, name)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if "functorch" not in str(error):
                    raise
                raise UsageError(
                    f"torch.func.grad and vmap cannot be combined with the split layer {name}",
                    why="torch.func cannot transform the collectives of the layer",
                    remedy="take strategy='mirrored'",
                ) from error
            self._copied = whole, tensor_version(whole), copied
        return self._copied[2]

    def all_reduce(self, part: Tensor, name: str) -> Tensor:
        """All-reduce (sum) ``part`` over the tensor-parallel ranks; its backward is the identity.

        Collective over the tensor-parallel ranks; blocks. For the output of layers that are split over the ranks: the
        operator g of Shoeybi et al. 2019 (arXiv 1909.08053).

        Args:
            part: this rank's summand, of equal shape on all ranks.
            name: the layer whose output it is; named in PeerError (a rank is lost or late) and in MismatchError (the
                ranks wait in different calls).

        Returns:
            The sum as a new tensor of the shape of ``part``, equal on all ranks.
        """
        self._copied = None
        result: Tensor = _TensorAllReduce.apply(part, self, f"output of {name}")  # type: ignore[no-untyped-call]
        return result

    def all_gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the ranks' slices along ``dim`` into the whole tensor, in rank order.

        Collective over the tensor-parallel ranks; blocks. Its backward takes this rank's slice of the gradient and
        sends nothing, so that the gradient must be equal on all ranks.

        Args:
            part: this rank's slice; its size along ``dim`` is ``len(even_share(length, self.size, self.rank))``.
            dim: dimension of which each rank has a slice.
            length: whole size of ``dim`` over all ranks; if the number of ranks does not divide it, the first ranks
                have one more.
            name: the layer whose output it is; named in PeerError (a rank is lost or late) and in MismatchError (the
                ranks wait in different calls).

        Returns:
            The whole tensor, new, of ``length`` along ``dim``, equal on all ranks.
        """
        self._copied = None
        result: Tensor = _TensorAllGather.apply(part, self, dim, length, f"output of {name}")  # type: ignore[no-untyped-call]
        return result

    def take_slice(self, whole: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Return this rank's slice along ``dim`` of a tensor that all tensor-parallel ranks hold.

        The forward sends nothing. Its backward all-gathers the gradients of the slices, and is collective over the
        tensor-parallel ranks.

        Args:
            whole: of ``length`` along ``dim``, equal on all ranks.
            dim: dimension to split.
            length: size of ``dim``; if the number of ranks does not divide it, the first ranks have one more.
            name: the layer whose input it is; named in the backward's PeerError (a rank is lost or late) and
                MismatchError (the ranks wait in different calls).

        Returns:
            A copy of the slice, in the memory order of ``whole``.
        """
        result: Tensor = _TakeSlice.apply(whole, self, dim, length, name)  # type: ignore[no-untyped-call]
        return result

    def reduce_scatter(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Reduce-scatter: return this rank's slice along ``dim`` of the sum of ``part`` over the tensor-parallel ranks.

        Collective over the tensor-parallel ranks, as is its backward, which all-gathers the gradient; both block. The
        operator ḡ of Korthikanti et al. 2022 (arXiv 2205.05198).

        Args:
            part: this rank's summand, of ``length`` along ``dim``.
            dim: dimension to split.
            length: size of ``dim``; if the number of ranks does not divide it, the first ranks have one more.
            name: the layer whose output it is; named in PeerError (a rank is lost or late) and in MismatchError (the
                ranks wait in different calls).

        Returns:
            The slice of the sum, a new contiguous tensor, whose size along ``dim`` is
            ``len(even_share(length, self.size, self.rank))``.
        """
        self._copied = None
        result: Tensor = _TensorReduceScatter.apply(  # type: ignore[no-untyped-call]
            part, self, dim, length, f"output of {name}"
        )
        return result

    def all_gather_input(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the ranks' slices along ``dim``, for an input that each rank uses differently.

        Collective over the tensor-parallel ranks, as is its backward, which reduce-scatters the ranks' different
        gradients; both block. The operator g of Korthikanti et al. 2022 (arXiv 2205.05198).

        Consecutive calls with the same tensor return one result, and so share the all-gather and the reduce-scatter.

        Args:
            part: this rank's slice; its size along ``dim`` is ``len(even_share(length, self.size, self.rank))``.
            dim: dimension of which each rank has a slice.
            length: whole size of ``dim`` over all ranks; if the number of ranks does not divide it, the first ranks
                have one more.
            name: the layer whose input it is; named in PeerError (a rank is lost or late) and in MismatchError (the
                ranks wait in different calls).

        Returns:
            The whole tensor, of ``length`` along ``dim``, equal on all ranks.
        """
        if self._copied is None or self._copied[0] is not part or self._copied[1] != tensor_version(part):
            wide = _AllGatherInput.apply(part, self, dim, length, f"input of {name}")  # type: ignore[no-untyped-call]
            self._copied = part, tensor_version(part), wide
        return self._copied[2]

    def all_reduce_gradients(self, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        """Return several tensors unchanged, and in backward all-reduce (sum) their gradients in one message.

        The sum is over the tensor-parallel ranks. For parameters that are not split, whose gradients differ between
        ranks. The forward sends nothing.

        Args:
            tensors: parameters that are equal on all ranks.
            name: the layer that they belong to; named in the backward's PeerError (a rank is lost or late) and
                MismatchError (the ranks wait in different calls).

        Returns:
            Views of ``tensors``, in their order, to be used in their place; ``tensors`` itself under ``torch.no_grad``
            or if none requires a gradient.
        """
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return tensors
        result: Sequence[Tensor] = _AllReduceGradients.apply(self, name, *tensors)  # type: ignore[no-untyped-call]
        return result

    def all_gather_stacked(self, tensor: Tensor, name: str) -> Tensor:
        """All-gather the tensor-parallel ranks' tensors of one shape and stack them along a new first dimension.

        Collective over the tensor-parallel ranks; blocks. Its backward takes this rank's slice of the gradient and
        sends nothing, so that the gradient must be equal on all ranks.

        Args:
            tensor: this rank's tensor, of equal shape on all ranks.
            name: the layer whose output it is; named in PeerError (a rank is lost or late) and in MismatchError (the
                ranks wait in different calls).

        Returns:
            A tensor of shape (tensor-parallel ranks, …), in rank order, equal on all ranks.
        """
        return self.all_gather(tensor.unsqueeze(0), 0, self.size, name)

    @single_call
    def all_reduce_detached(self, tensor: Tensor, name: str) -> Tensor:
        """All-reduce (sum) a tensor over the tensor-parallel ranks without autograd and return the sum.

        Collective over the tensor-parallel ranks; blocks.

        Args:
            tensor: this rank's summand, of equal shape on all ranks.
            name: names the call, such as ``output of mlp``, in PeerError (a rank is lost or late) and in MismatchError
                (the ranks wait in different calls).

        Returns:
            A new, contiguous tensor, equal on all ranks.
        """
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._comm.sum_in_place(total, name)
        return total

    @single_call
    def all_gather_detached(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All-gather the ranks' slices along ``dim``, in rank order, without autograd.

        Collective over the tensor-parallel ranks; blocks. Uneven slices are padded to the largest for the message.

        Args:
            part: this rank's slice; its size along ``dim`` is ``len(even_share(length, self.size, self.rank))``.
            dim: dimension of which each rank has a slice.
            length: whole size of ``dim`` over all ranks; if the number of ranks does not divide it, the first ranks
                have one more.
            name: names the call, such as ``output of mlp``, in PeerError (a rank is lost or late) and in MismatchError
                (the ranks wait in different calls).

        Returns:
            The whole tensor, new, of ``length`` along ``dim``, in channels-last format where ``part`` is.
        """
        lengths = [len(even_share(length, self.size, rank)) for rank in range(self.size)]
        # Channels-last is told by the stride: with one channel a tensor is contiguous in both formats. The format is
        # kept because dropout draws its mask in memory order.
        last = part.dim() == 4 and part.stride(1) == 1
        if lengths[self.rank] < lengths[0]:
            shape = list(part.shape)
            shape[dim] = lengths[0] - lengths[self.rank]
            part = torch.cat([part, part.new_zeros(shape)], dim)
        pieces = self._comm.gather_slices(part.reshape(-1), name).view(self.size, *part.shape).unbind()
        whole = torch.cat([piece.narrow(dim, 0, n) for piece, n in zip(pieces, lengths, strict=True)], dim)
        return whole.contiguous(memory_format=torch.channels_last) if last else whole

    @single_call
    def reduce_scatter_detached(self, tensor: Tensor, dim: int, length: int, name: str) -> Tensor:
        """Reduce-scatter without autograd: return this rank's slice along ``dim`` of the tensor-parallel ranks' sum.

        Collective over the tensor-parallel ranks; blocks. Uneven slices are padded to the largest for the message.

        Args:
            tensor: this rank's summand, of ``length`` along ``dim``.
            dim: dimension to split.
            length: size of ``dim``; if the number of ranks does not divide it, the first ranks have one more.
            name: names the call, such as ``output of mlp``, in PeerError (a rank is lost or late) and in MismatchError
                (the ranks wait in different calls).

        Returns:
            The slice of the sum, a new contiguous tensor, whose size along ``dim`` is
            ``len(even_share(length, self.size, self.rank))``.
        """
        first = tensor.movedim(dim, 0)
        shares = [even_share(length, self.size, rank) for rank in range(self.size)]
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


# Each backward is the forward of another of these functions, so that second derivatives are right, too. Their names are
# not those of ``comm.collectives``, whose autograd nodes ``is_collective_node`` recognises by name.


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks, name: str) -> Tensor:
        ctx.given = ranks, f"gradient of the input of {name}"
        # view_as would change the stride of a dimension of size 1, and with it the memory format of a convolution's
        # output.
        same: Tensor = torch.ops.aten.alias(whole)
        return same

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _TensorAllReduce.apply(gradients[0], *ctx.given), None, None  # type: ignore[no-untyped-call]


class _TensorAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, name: str) -> Tensor:
        ctx.given = ranks, name
        return ranks.all_reduce_detached(part, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _differentiated(_AllReduceGradient, gradients[0], *ctx.given), None, None


class _TensorAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, name
        ctx.mine, ctx.dim = even_share(length, ranks.size, ranks.rank), dim
        return ranks.all_gather_detached(part, dim, length, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            return _TakeSlice.apply(gradients[0], *ctx.given), None, None, None, None  # type: ignore[no-untyped-call]
        return gradients[0].narrow(ctx.dim, ctx.mine.start, len(ctx.mine)), None, None, None, None


class _TakeSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, f"gradient of the input of {name}"
        mine = even_share(length, ranks.size, ranks.rank)
        # Keep the memory order of the whole tensor: dropout draws its mask in memory order.
        order = sorted(range(whole.dim()), key=lambda d: -whole.stride()[d])
        part = whole.narrow(dim, mine.start, len(mine)).permute(order).clone(memory_format=torch.contiguous_format)
        return part.permute([order.index(d) for d in range(whole.dim())])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _TensorAllGather.apply(gradients[0], *ctx.given), None, None, None, None  # type: ignore[no-untyped-call]


class _TensorReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, f"gradient of the {name}"
        return ranks.reduce_scatter_detached(part, dim, length, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllGatherInput.apply(gradients[0], *ctx.given), None, None, None, None  # type: ignore[no-untyped-call]


class _AllGatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks, dim: int, length: int, name: str) -> Tensor:
        ctx.given = ranks, dim, length, f"gradient of the {name}"
        return ranks.all_gather_detached(part, dim, length, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _TensorReduceScatter.apply(gradients[0], *ctx.given), None, None, None, None  # type: ignore[no-untyped-call]


class _AllReduceGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: TensorRanks, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.given = ranks, f"gradients of parameters of {name}"
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        flat = torch.cat([g.reshape(-1) for g in gradients])
        total = _TensorAllReduce.apply(flat, *ctx.given)  # type: ignore[no-untyped-call]
        parts = total.split([gradient.numel() for gradient in gradients])
        return None, None, *(part.view_as(g).to(g.dtype) for part, g in zip(parts, gradients, strict=True))


def _differentiated(function: Any, tensor: Tensor, *given: Any) -> Tensor:
    """Apply ``function`` where a gradient of the gradient may be asked for (grad mode); else return ``tensor``."""
    result: Tensor = function.apply(tensor, *given) if torch.is_grad_enabled() else tensor
    return result
