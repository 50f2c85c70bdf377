"""Cross-entropy and argmax of scores that are split by classes over ranks (loss parallel).

Shoeybi et al. 2019, arXiv 1909.08053, §3: ranks exchange a few numbers for each position, never the scores
themselves. Instead of three all-reduces (the maximum, the sum of exponentials, the target's score) there is one
all-gather of each rank's log-sum-exp and target's score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.device import is_accelerator, widest_float
from tutti.parallel.ddp.loss_count import annotate_targets
from tutti.parallel.tensor.tensor_slice import LayerSlice
from tutti.torch_compat import assert_async


def cross_entropy(
    part: Tensor,
    dim: int,
    slice_: LayerSlice,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` of scores split by classes over ranks; targets are class indices.

    Collective over the tensor-parallel ranks: an all-gather of two numbers for each target (three with label
    smoothing); backward sends nothing.

    Args:
        part: scores (logits) of this rank's classes.
        dim: dimension of the classes.
        slice_: which classes this rank has (a contiguous range), and collectives over the ranks that have the others.
        target: class indices, the shape of ``part`` without ``dim``, the same on every rank.
        weight: (classes,) of all classes; None for equal ones.
        ignore_index, reduction, label_smoothing: as in PyTorch.

    Returns:
        The loss over all classes, the same on every rank; of the shape of ``target`` for ``reduction="none"``, else ().
        Its dtype is that of ``part``; float32 under autocast if that has 16 bits.

    Raises:
        IndexError: a target is not a class index, on a CPU; on an accelerator a device-side assertion fails.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    dtype = part.dtype
    # As autocast does for PyTorch's own function of this loss.
    wide = part.float() if dtype.itemsize < 4 else part
    ignored, mine = target == ignore_index, slice_.mine
    _check(target, ignored, slice_.length)
    elsewhere = (target < mine.start) | (target >= mine.stop)
    rows = (target - mine.start).masked_fill(elsewhere, 0).unsqueeze(dim)
    statistics = [wide.logsumexp(dim), wide.gather(dim, rows).squeeze(dim).masked_fill(elsewhere, 0)]
    if label_smoothing:
        statistics.append(wide.sum(dim))
    table = slice_.ranks.all_gather_stacked(torch.stack(statistics), f"loss of {slice_.name}")
    all_, own = table[:, 0].logsumexp(0), table[:, 1].sum(0)
    loss = all_ - own
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (all_ - table[:, 2].sum(0) / slice_.length)
    counts = None if weight is None else weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    loss = (loss if counts is None else loss * counts).masked_fill(ignored, 0)
    if reduction != "none":
        count = (~ignored).sum() if counts is None else counts.sum()
        loss = loss.sum() / count if reduction == "mean" else loss.sum()
        annotate_targets(loss, count, target.numel(), reduction)
    return loss if torch.is_autocast_enabled(part.device.type) else loss.to(dtype)


def best_class(part: Tensor, dim: int, slice_: LayerSlice) -> tuple[Tensor, Tensor]:
    """Return each position's largest score and its class, over the classes of all ranks: argmax of split scores.

    Collective over the tensor-parallel ranks: one all-gather.

    Args:
        part: scores (logits) of this rank's classes.
        dim: dimension of the classes.
        slice_: which classes this rank has (a contiguous range), and collectives over the ranks that have the others.

    Returns:
        ``(scores, classes)``, the same on every rank, in the shape of ``part`` with length 1 along ``dim``; classes are
        long indices among all classes. Of equal scores the first class counts.

    Raises:
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    at = part.argmax(dim, keepdim=True)
    wide = widest_float(part.device)
    message = torch.stack([part.gather(dim, at).to(wide), (at + slice_.mine.start).to(wide)])
    table = slice_.ranks.all_gather_stacked(message, f"best of {slice_.name}")
    rank = table[:, 0].argmax(0, keepdim=True)
    values, classes = (table[:, lane].gather(0, rank)[0] for lane in (0, 1))
    return values.to(part.dtype), classes.long()


def _check(target: Tensor, ignored: Tensor, classes: int) -> None:
    right = (((target >= 0) & (target < classes)) | ignored).all()
    if is_accelerator(target.device):
        assert_async(right)
    elif not right:
        raise IndexError(f"a target is not one of the {classes} classes")


def plain_loss(target: Any, weight: Tensor | None, label_smoothing: float, deprecated: bool) -> bool:
    """Return whether the loss-parallel ``cross_entropy`` of this module supports these arguments of PyTorch's.

    PyTorch's is ``torch.nn.functional.cross_entropy``. True for targets that are class indices, without deprecated
    options, and with at most one of class weights and label smoothing.

    Args:
        target: class indices, or class probabilities, which are not supported.
        weight: (classes,) class weights; None for none.
        label_smoothing: 0 for none.
        deprecated: whether ``size_average`` or ``reduce`` is given.
    """
    numbers = isinstance(target, Tensor) and not target.is_floating_point()
    return numbers and not deprecated and not (weight is not None and label_smoothing)
