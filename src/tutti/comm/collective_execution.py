"""Perform agreed collectives on a process group: all-reduce of several tensors at once, uneven gathers, all-to-all.

All functions are collective over ``ranks`` and run in the engine's thread without gradient tracking. Tensors that are
only moved travel as bytes, so that every dtype does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from tutti.comm.adasum import adasum_tree
from tutti.comm.collective_call import CollectiveCall, ReduceOperation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NATIVE = {
    ReduceOperation.SUM: dist.ReduceOp.SUM,
    ReduceOperation.AVERAGE: dist.ReduceOp.SUM,
    ReduceOperation.MIN: dist.ReduceOp.MIN,
    ReduceOperation.MAX: dist.ReduceOp.MAX,
    ReduceOperation.PRODUCT: dist.ReduceOp.PRODUCT,
}
_WIDENED = {torch.int16: torch.int32, torch.bool: torch.uint8}
"""Dtypes that Gloo does not reduce, and the ones that stand for them."""


def scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a number, without a change of dtype.

    Integers are multiplied in float64 and truncated towards zero, float16 and bfloat16 in float32.

    Args:
        tensor: any tensor; not changed.
        factor: the number.

    Returns:
        A new tensor; ``tensor`` itself if ``factor`` is 1.
    """
    if factor == 1.0:
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor


def finish_reduction(total: Tensor, call: CollectiveCall, size: int) -> Tensor:
    """Turn the reduction over the ranks into the result: divide by ``size`` for an average, then apply the postscale.

    Local arithmetic. Results of integers are truncated towards zero, once, after the division and the postscale.

    Args:
        total: sum, minimum, maximum or product of the ranks' tensors, in their dtype; may be overwritten.
        call: description of the collective, whose ``op`` may be ``average`` and whose ``postscale`` is a factor.
        size: number of ranks.

    Returns:
        The finished reduction, ``total`` itself or a new tensor.
    """
    averaged = call.op == ReduceOperation.AVERAGE
    if not (total.is_floating_point() or total.is_complex()):
        if call.postscale != 1.0:
            return scale(total, call.postscale / size if averaged else call.postscale)
        return total.div_(size, rounding_mode="trunc") if averaged else total
    if averaged:
        total.div_(size)
    return scale(total, call.postscale)


def reduce_all(
    tensors: Sequence[Tensor], call: CollectiveCall, ranks: tuple[int, ...], group: ProcessGroup | None
) -> list[Tensor]:
    """All-reduce several tensors of one dtype as one flat message, and return the results.

    Collective over ``ranks``; blocks, on an accelerator only the current stream. Prescale, reduction, averaging and
    postscale are applied.

    Args:
        tensors: not empty, of one dtype and device; equal shapes on all ranks. Not overwritten.
        call: description of the collective, which gives operation and scale factors.
        ranks: global ranks of the members.
        group: process group of the members; None for one rank.

    Returns:
        One tensor for each of ``tensors``, of its shape; views of one new tensor.

    Raises:
        RuntimeError: a connection broke, or the process group's timeout has passed.
        IndexError: for ``adasum``, the number of ranks is not a power of two.
    """
    first = tensors[0]
    parts = [tensor.reshape(-1) for tensor in tensors]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
    if call.op == ReduceOperation.ADASUM:
        reduced = _reduce_adasum(scale(flat, call.prescale), [part.numel() for part in parts], ranks, group)
        reduced = scale(reduced, call.postscale)
    else:
        flat = scale(flat, call.prescale)
        wide = flat.to(_WIDENED.get(flat.dtype, flat.dtype))
        if group is not None and wide.numel():
            carried = torch.view_as_real(wide) if wide.is_complex() else wide
            dist.all_reduce(carried, op=_NATIVE[ReduceOperation(call.op)], group=group)
        if first.dtype == torch.bool:
            wide = wide.clamp_(max=1)
        reduced = finish_reduction(wide.to(first.dtype), call, len(ranks))
    return [
        part.view(tensor.shape) for part, tensor in zip(reduced.split([p.numel() for p in parts]), tensors, strict=True)
    ]


def _reduce_adasum(flat: Tensor, sizes: list[int], ranks: tuple[int, ...], group: ProcessGroup | None) -> Tensor:
    # Every rank combines all vectors itself, in the same order, so that results are equal bit by bit.
    if group is None:
        return flat
    rows = [torch.empty_like(flat) for _ in ranks]
    dist.all_gather(_bytes_of(rows), flat.view(torch.uint8), group=group)
    split = [row.split(sizes) for row in rows]
    return torch.cat([adasum_tree([parts[i] for parts in split]) for i in range(len(sizes))])


def gather_all(
    tensor: Tensor, counts: Sequence[int], ranks: tuple[int, ...], me: int, group: ProcessGroup | None
) -> Tensor:
    """All-gather: concatenate the ranks' tensors along the first dimension, in rank order.

    Collective over ``ranks``: an all-gather, or where ``counts`` differ a broadcast from each rank. Blocks, on an
    accelerator only the current stream.

    Args:
        tensor: this rank's, (counts[me], …); trailing dimensions and dtype are equal on all ranks.
        counts: size of the first dimension of each rank's tensor, in the order of ``ranks``.
        ranks: global ranks of the members.
        me: index of this rank in ``ranks``.
        group: process group of ``ranks``; None for one rank.

    Returns:
        The concatenation, a new tensor of shape (sum(counts), …).

    Raises:
        RuntimeError: a connection broke, or the process group's timeout has passed.
    """
    whole = tensor.new_empty(sum(counts), *tensor.shape[1:])
    parts = list(whole.split(list(counts)))
    parts[me].copy_(tensor)
    if group is None or not whole.numel():
        return whole
    if len(set(counts)) == 1:
        dist.all_gather(_bytes_of(parts), _as_bytes(tensor.contiguous()), group=group)
        return whole
    works = [
        dist.broadcast(_as_bytes(part), rank, group=group, async_op=True)
        for part, rank in zip(parts, ranks, strict=True)
        if part.numel()
    ]
    for work in works:
        work.wait()
    return whole


def broadcast_from(tensors: Sequence[Tensor], root: int, group: ProcessGroup | None) -> None:
    """Broadcast contiguous tensors in place from global rank ``root``, one broadcast for each tensor.

    Collective over the ranks of ``group``; blocks, on an accelerator only the current stream.

    Args:
        tensors: contiguous tensors, each of equal shape and dtype on all ranks; overwritten on all ranks but ``root``.
        root: global rank of the source.
        group: process group of the ranks; None for one rank.

    Raises:
        RuntimeError: a connection broke, or the process group's timeout has passed.
    """
    if group is None:
        return
    works = [dist.broadcast(_as_bytes(t), root, group=group, async_op=True) for t in tensors if t.numel()]
    for work in works:
        work.wait()


def exchange_all(tensor: Tensor, send: Sequence[int], receive: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """All-to-all of rows: send ``send[r]`` rows to the r-th rank of ``group`` and receive ``receive[r]`` rows from it.

    Collective over the ranks of ``group``; blocks, on an accelerator only the current stream. A row is a slice along
    the first dimension.

    Args:
        tensor: (sum(send), …), rows for the first rank of the group first.
        send: rows for each rank.
        receive: rows from each rank.
        group: process group of the ranks; None for one rank.

    Returns:
        The received rows, a new tensor of shape (sum(receive), …), the first rank's rows first.

    Raises:
        RuntimeError: a connection broke, or the process group's timeout has passed.
    """
    if group is None:
        return tensor.clone()
    result = tensor.new_empty(sum(receive), *tensor.shape[1:])
    row = tensor[:1].numel() * tensor.element_size() if len(tensor) else result[:1].numel() * result.element_size()
    dist.all_to_all_single(
        _as_bytes(result),
        _as_bytes(tensor.contiguous()),
        [n * row for n in receive],
        [n * row for n in send],
        group=group,
    )
    return result


def scatter_reduced(tensor: Tensor, call: CollectiveCall, me: int, size: int, group: ProcessGroup | None) -> Tensor:
    """Reduce-scatter: reduce over the ranks of ``group`` and return this rank's part of the first dimension.

    Each rank gets ⌊rows / ranks⌋ consecutive rows, the first (rows mod ranks) ranks one more. Collective over the ranks
    of ``group``: an all-to-all, before a local sum in rank order. Blocks, on an accelerator only the current stream.

    Args:
        tensor: (rows, …), of equal shape on all ranks.
        call: description of the collective, which gives operation (``sum`` or ``average``), prescale and postscale.
        me: index of this rank among the ranks.
        size: number of ranks.
        group: process group of the ranks; None for one rank.

    Returns:
        This rank's rows of the reduction, a new tensor of shape (rows of this rank, …).

    Raises:
        RuntimeError: a connection broke, or the process group's timeout has passed.
    """
    counts = [len(tensor) // size + (rank < len(tensor) % size) for rank in range(size)]
    mine = exchange_all(scale(tensor, call.prescale), counts, [counts[me]] * size, group)
    mine = mine.view(size, counts[me], *tensor.shape[1:])
    # Gloo's reduce-scatter is an all-reduce. The sum in rank order is the same on any hardware.
    total = mine.sum(dim=0, dtype=tensor.dtype) if tensor.is_floating_point() else mine.sum(dim=0).to(tensor.dtype)
    return finish_reduction(total, call, size)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's bytes, sharing its memory."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [_as_bytes(tensor) for tensor in tensors]
