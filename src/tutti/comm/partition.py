"""Partition of ranges and of weighted items into even parts."""

from __future__ import annotations

from collections.abc import Sequence


def even_share(total: int, parts: int, index: int) -> range:
    """Split ``range(total)`` into ``parts`` contiguous ranges of nearly equal length, and return number ``index``.

    The first ``total mod parts`` ranges are one longer.

    Args:
        total: length of the range.
        parts: number of parts.
        index: number of the part, from 0, below ``parts``.

    >>> [list(even_share(10, 4, i)) for i in range(4)]
    [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    """
    size, rest = divmod(total, parts)
    start = index * size + min(index, rest)
    return range(start, start + size + (index < rest))


def workers_of(workers: int, ranks: int, rank: int) -> range:
    """Return the indices of the logical workers, fixed shares of the global batch, that a data-parallel rank computes.

    With at least as many workers as ranks, each rank computes a contiguous range of whole workers; the ranges are as
    even as possible, and the first ones are longer. With fewer workers than ranks, each rank computes a part of the
    samples of one worker, and several consecutive ranks have the same worker. Arithmetic only; no collective.

    Args:
        workers: number of logical workers, at least 1.
        ranks: number of data-parallel ranks.
        rank: index of the data-parallel rank, from 0.

    Returns:
        Range of worker indices, from 0; never empty.

    >>> [list(workers_of(3, 2, rank)) for rank in range(2)], [list(workers_of(2, 3, rank)) for rank in range(3)]
    ([[0, 1], [2]], [[0], [0], [1]])
    """
    if ranks <= workers:
        return even_share(workers, ranks, rank)
    worker = next(w for w in range(workers) if rank in even_share(ranks, workers, w))
    return range(worker, worker + 1)


def sharers(workers: int, ranks: int, rank: int) -> range:
    """Return the data-parallel ranks that compute samples of the same logical worker as ``rank``, as a range.

    A logical worker is a fixed share of the global batch. With fewer workers than ranks, consecutive ranks divide the
    samples of a worker. With at least as many workers as ranks every rank has whole workers, and the range is ``rank``
    alone.

    Args:
        workers: number of logical workers.
        ranks: number of data-parallel ranks.
        rank: index of the data-parallel rank, from 0.

    >>> [list(sharers(2, 3, rank)) for rank in range(3)], list(sharers(3, 2, 1))
    ([[0, 1], [0, 1], [2]], [1])
    """
    if ranks <= workers:
        return range(rank, rank + 1)
    return even_share(ranks, workers, workers_of(workers, ranks, rank)[0])


def owners(sizes: Sequence[int], parts: int) -> list[int]:
    """Assign items to ``parts`` so that the parts have nearly equal total sizes, each item going to one part.

    Greedy: the largest item first, to the part with the smallest total so far.

    Args:
        sizes: size of each item.
        parts: number of parts.

    Returns:
        For each item the index of its part. No part is heavier than 4/3 of the optimum (Graham 1969, SIAM J. Appl.
        Math. 17, theorem 2).

    >>> owners([5, 3, 3, 2, 1], 2)
    [0, 1, 1, 0, 1]
    """
    loads, of = [0] * parts, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        of[index] = min(range(parts), key=lambda part: loads[part])
        loads[of[index]] += sizes[index]
    return of


def chunks(total: int, largest: int | None) -> list[range]:
    """Return ``range(total)`` split into the fewest contiguous ranges of at most ``largest`` elements.

    The ranges are as even as possible.

    Args:
        total: length of the range; 0 gives an empty list.
        largest: largest length of a part; None: one part.

    >>> [list(r) for r in chunks(7, 3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    if total == 0:
        return []
    parts = 1 if largest is None else -(-total // largest)
    return [even_share(total, parts, i) for i in range(parts)]


def block(total: int, parts: int, index: int) -> range:
    """Split ``range(total)`` into ``parts`` contiguous ranges as ``torch.chunk`` does, and return number ``index``.

    The ranges have ⌈total / parts⌉ elements, except the last ones, which are shorter or empty.

    Args:
        total: length of the range.
        parts: number of parts.
        index: number of the part, from 0.

    >>> [list(block(5, 4, i)) for i in range(4)]
    [[0, 1], [2, 3], [4], []]
    """
    size = -(-total // parts)
    return range(min(index * size, total), min((index + 1) * size, total))
