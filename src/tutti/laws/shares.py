"""How wholes are cut into contiguous parts that differ by at most one."""

from __future__ import annotations


def share(total: int, parts: int, index: int) -> range:
    """Part ``index`` of ``range(total)``; the first ``total mod parts`` parts are one longer.

    >>> [list(share(10, 4, i)) for i in range(4)]
    [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    """
    size, rest = divmod(total, parts)
    start = index * size + min(index, rest)
    return range(start, start + size + (index < rest))


def chunks(total: int, largest: int | None) -> list[range]:
    """``range(total)`` in the fewest parts of at most ``largest``, as equal as possible; none where it is empty.

    >>> [list(r) for r in chunks(7, 3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    if total == 0:
        return []
    parts = 1 if largest is None else -(-total // largest)
    return [share(total, parts, i) for i in range(parts)]


def block(total: int, parts: int, index: int) -> range:
    """Part ``index`` of ``range(total)`` in blocks of one size, the last ones shorter or empty; as ``torch.chunk``.

    >>> [list(block(5, 4, i)) for i in range(4)]
    [[0, 1], [2, 3], [4], []]
    """
    size = -(-total // parts)
    return range(min(index * size, total), min((index + 1) * size, total))
