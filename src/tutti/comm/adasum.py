"""Adasum: a sum of gradients that counts their common component once (Maleki et al., 2020, arXiv 2006.02924)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adasum_pair(a: Tensor, b: Tensor) -> Tensor:
    """Combine two gradient vectors by Adasum: return (1 − a·b / 2|a|²) a + (1 − a·b / 2|b|²) b.

    The result is a + b for orthogonal vectors and their mean for parallel ones. If a is zero, the result is b; if b is
    zero, it is a. Computed in float64. Maleki et al., 2020, arXiv 2006.02924.

    Args:
        a: a tensor of any shape, treated as one vector.
        b: a tensor of the shape of ``a``.

    Returns:
        A tensor of the shape and dtype of ``a``.

    >>> adasum_pair(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0])).tolist()
    [1.0, 2.0]
    >>> adasum_pair(torch.tensor([2.0]), torch.tensor([4.0])).tolist()
    [3.0]
    """
    x, y = a.double().flatten(), b.double().flatten()
    dot, aa, bb = torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)
    one = torch.ones_like(dot)
    left = torch.where(aa > 0, 1 - dot / (2 * aa), one)
    right = torch.where(bb > 0, 1 - dot / (2 * bb), one)
    return (left * x + right * y).view_as(a).to(a.dtype)


def adasum_tree(vectors: Sequence[Tensor]) -> Tensor:
    """Reduce vectors to one by Adasum in a binary tree: ``adasum_pair`` of neighbours, then of neighbouring results.

    Local arithmetic, not collective.

    Args:
        vectors: one tensor for each rank, in rank order, all of one shape; their number must be a power of two.

    Returns:
        One tensor, of the shape and dtype of the first vector; of a single vector that vector itself.

    Raises:
        IndexError: the number of vectors is not a power of two.
    """
    level = list(vectors)
    while len(level) > 1:
        level = [adasum_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]
