"""The one binary tree in which workers are summed, whatever devices play them.

A node is a half-open range of workers ``(low, high)``. A node of more than one worker splits at the largest power of
two below its size, so that the tree of N workers does not depend on who computes which leaf: floating-point sums come
out bit-identical on any number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def children(node: Node) -> tuple[Node, Node]:
    """The two halves of a node.

    >>> children((0, 6)), children((4, 6))
    (((0, 4), (4, 6)), ((4, 5), (5, 6)))
    """
    low, high = node
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def roots(mine: range, workers: int) -> list[Node]:
    """The maximal subtrees of the tree over ``workers`` that lie within ``mine``, left to right.

    These are what a device sends: never one blind partial sum, whose order would depend on the device.

    >>> roots(range(0, 3), 8), roots(range(3, 6), 8), roots(range(6, 8), 8)
    ([(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8)])
    """

    def inside(node: Node) -> list[Node]:
        low, high = node
        if high <= mine.start or mine.stop <= low:
            return []
        if mine.start <= low and high <= mine.stop:
            return [node]
        left, right = children(node)
        return inside(left) + inside(right)

    return inside((0, workers)) if len(mine) else []


def fold(node: Node, pieces: Mapping[Node, T], add: Callable[[T, T], T]) -> T:
    """The sum at ``node`` from the sums at its descendants, added in tree order. Raises KeyError if one is missing.

    >>> fold((0, 3), {(0, 2): "ab", (2, 3): "c"}, lambda a, b: f"({a}+{b})")
    '(ab+c)'
    """
    if node in pieces:
        return pieces[node]
    if node[1] - node[0] == 1:
        raise KeyError(node)
    left, right = children(node)
    return add(fold(left, pieces, add), fold(right, pieces, add))


def settle(pieces: dict[Node, T], leaf: int, workers: int, add: Callable[[T, T], T]) -> None:
    """Merge upward in place after leaf ``leaf`` was put into ``pieces``: siblings that are both there become one.

    Leaves must come in increasing order; then at most log2(workers) pieces are ever held.
    """
    path: list[tuple[Node, Node]] = []
    node: Node = (0, workers)
    while node[1] - node[0] > 1:
        left, right = children(node)
        path.append((left, right))
        node = left if leaf < left[1] else right
    for left, right in reversed(path):
        if left not in pieces or right not in pieces:
            return
        pieces[left[0], right[1]] = add(pieces.pop(left), pieces.pop(right))
