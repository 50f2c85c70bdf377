"""Partition a list of weights into contiguous parts that are as even as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate


def balance(
    weights: Sequence[float], parts: int, may: Callable[[int, int, int], bool] = lambda part, start, end: True
) -> list[int]:
    """Partition weighted items into contiguous, non-empty parts such that the largest sum of weights is smallest.

    Of partitions with an equal largest sum, the one with the smallest sum of squares of the parts' sums is taken.

    Args:
        weights: weights of the items, in order.
        parts: number of parts.
        may: function ``may(part, start, end)`` that returns whether the part with index ``part``, from 0, may hold the
            items from ``start`` to ``end``, exclusive. By default all parts may.

    Returns:
        (parts + 1,) bounds: part i holds the items from bound i to bound i + 1, exclusive.

    Raises:
        ValueError: ``may`` allows no partition, or there are fewer items than parts.

    >>> balance([4, 1, 1, 4], 2), balance([0, 0, 9], 2)
    ([0, 2, 4], [0, 1, 3])
    >>> balance([4, 1, 1, 4], 2, lambda part, start, end: end - start < 4 - 2 * part)
    [0, 3, 4]
    """
    count, before = len(weights), [0, *accumulate(weights)]
    # best[p][i]: (largest sum, sum of squares) of the first i items in p parts, and the last cut.
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for part in range(1, parts + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(part, count - (parts - part) + 1):
            options = []
            for start, (largest, squares, _) in best[part - 1].items():
                if start < end and may(part - 1, start, end):
                    weight = before[end] - before[start]
                    options.append((max(largest, weight), squares + weight**2, start))
            if options:
                row[end] = min(options)
        best.append(row)
    if count not in best[parts]:
        raise ValueError(f"{count} weights cannot be cut into {parts} parts")
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(best[part][bounds[-1]][2])
    return bounds[::-1]
