"""Cross-entropy and the best class of scores of which each rank has those of some classes.

Shoeybi et al. 2019, arXiv 1909.08053, §3: what ranks tell each other is a few numbers for each position, never the
scores themselves. Instead of three sums (the maximum, the exponentials, the target's score) there is one all-gather of
each rank's log-sum-exp and target's score.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tutti.nn.slices import Slice


def cross_entropy(
    part: Tensor,
    dim: int,
    slice_: Slice,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As ``torch.nn.functional.cross_entropy`` of whole scores, for targets that are class numbers.

    One all-gather of two numbers a target (three with label smoothing); backward sends nothing.

    Args:
        part: scores of this rank's classes.
        dim: which dimension the classes are.
        slice_: of the classes.

    Raises:
        IndexError: a target that is no class, on a CPU; on a GPU its own assertion fails.
    """
    dtype = part.dtype
    # As autocast does, which knows this loss by another name.
    wide = part.float() if dtype.itemsize < 4 else part
    ignored, mine = target == ignore_index, slice_.mine
    _check(target, ignored, slice_.length)
    elsewhere = (target < mine.start) | (target >= mine.stop)
    rows = (target - mine.start).masked_fill(elsewhere, 0).unsqueeze(dim)
    lanes = [wide.logsumexp(dim), wide.gather(dim, rows).squeeze(dim).masked_fill(elsewhere, 0)]
    if label_smoothing:
        lanes.append(wide.sum(dim))
    table = slice_.ranks.join(torch.stack(lanes), f"loss of {slice_.name}")
    all_, own = table[:, 0].logsumexp(0), table[:, 1].sum(0)
    loss = all_ - own
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (all_ - table[:, 2].sum(0) / slice_.length)
    counts = None if weight is None else weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
    loss = (loss if counts is None else loss * counts).masked_fill(ignored, 0)
    if reduction == "mean":
        loss = loss.sum() / ((~ignored).sum() if counts is None else counts.sum())
    elif reduction == "sum":
        loss = loss.sum()
    return loss if torch.is_autocast_enabled(part.device.type) else loss.to(dtype)


def best(part: Tensor, dim: int, slice_: Slice) -> tuple[Tensor, Tensor]:
    """The largest score and its class, the first of equal ones; ``dim`` stays, with length 1. One all-gather."""
    at = part.argmax(dim, keepdim=True)
    message = torch.stack([part.gather(dim, at).double(), (at + slice_.mine.start).double()])
    table = slice_.ranks.join(message, f"best of {slice_.name}")
    rank = table[:, 0].argmax(0, keepdim=True)
    values, classes = (table[:, lane].gather(0, rank)[0] for lane in (0, 1))
    return values.to(part.dtype), classes.long()


def _check(target: Tensor, ignored: Tensor, classes: int) -> None:
    right = (((target >= 0) & (target < classes)) | ignored).all()
    if target.is_cuda:
        torch._assert_async(right)
    elif not right:
        raise IndexError(f"a target is not one of the {classes} classes")


def plain_loss(target: Any, weight: Tensor | None, label_smoothing: float, deprecated: bool) -> bool:
    """Whether ``cross_entropy`` here knows how: class numbers, and not both weights and smoothing."""
    numbers = isinstance(target, Tensor) and not target.is_floating_point()
    return numbers and not deprecated and not (weight is not None and label_smoothing)
