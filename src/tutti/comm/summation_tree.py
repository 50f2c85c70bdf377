"""The binary summation tree of reproducible mode, over logical workers.

A node is a half-open range of workers ``(low, high)``. A node of more than one worker splits at the largest power of
two below its size. The tree of N workers does not depend on which device computes which leaf, so floating-point sums
are bit-identical on any number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def children(node: Node) -> tuple[Node, Node]:
    """Return the left and right child of a node of the binary summation tree over logical workers.

    The tree fixes the order in which the vectors of logical workers (fixed shares of the global batch) are added. A
    node is the range (low, high), ``high`` exclusive, of the workers whose sum it stands for. The left child has the
    largest power of two of workers that is smaller than their number in the node.

    Args:
        node: a node of more than one worker.

    Raises:
        ValueError: the node has fewer than two workers.

    >>> children((0, 6)), children((4, 6))
    (((0, 4), (4, 6)), ((4, 5), (5, 6)))
    """
    low, high = node
    middle = low + (1 << ((high - low - 1).bit_length() - 1))
    return (low, middle), (middle, high)


def subtree_roots(mine: range, workers: int) -> list[Node]:
    """Return the largest subtrees of the summation tree whose logical workers all belong to one device, left to right.

    The tree is binary, over logical workers (fixed shares of the global batch). A device sends the sum of each of these
    subtrees, never one sum over all its workers, whose order of addition would depend on the number of devices.

    Args:
        mine: logical workers of the device, contiguous.
        workers: number of all logical workers.

    Returns:
        The subtrees' ranges of workers (low, high), ``high`` exclusive; empty if the device has no worker.

    >>> subtree_roots(range(0, 3), 8), subtree_roots(range(3, 6), 8), subtree_roots(range(6, 8), 8)
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
    """Return the sum over the logical workers of a tree node, from partial sums, in the order of the summation tree.

    The tree is binary; its nodes are ranges of logical workers (fixed shares of the global batch).

    Args:
        node: root of the subtree, a range (low, high) of workers.
        pieces: range (low, high) of workers → sum of their vectors; together they cover all workers of ``node``.
        add: addition of two sums, the left one first.

    Raises:
        KeyError: a worker of ``node`` is in none of ``pieces``.

    >>> fold((0, 3), {(0, 2): "ab", (2, 3): "c"}, lambda a, b: f"({a}+{b})")
    '(ab+c)'
    """
    if node in pieces:
        return pieces[node]
    if node[1] - node[0] == 1:
        raise KeyError(node)
    left, right = children(node)
    return add(fold(left, pieces, add), fold(right, pieces, add))


def merge_siblings(pieces: dict[Node, T], leaf: int, workers: int, add: Callable[[T, T], T]) -> None:
    """Add up neighbouring partial sums in ``pieces`` wherever they are siblings in the binary summation tree.

    The tree's leaves are logical workers (fixed shares of the global batch). Called after the vector of worker ``leaf``
    was put into ``pieces`` under the key ``(leaf, leaf + 1)``: if the sum of the sibling node is in ``pieces``, both
    sums are replaced by their sum under the parent's range. This is repeated with the parent, until a sibling is
    missing.

    If workers come in increasing order, ``pieces`` never holds more than about log2(workers) sums.

    Args:
        pieces: range (low, high) of workers → sum of their vectors; modified.
        leaf: the worker added last.
        workers: number of all logical workers, N.
        add: addition of two sums, the left one first.
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
