"""The summation tree against a literal recursive sum that knows nothing of ranks: all N up to 33, all splits."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest

from tutti.comm.partition import even_share
from tutti.comm.summation_tree import Node, children, fold, merge_siblings, subtree_roots


def literal(low: int, high: int) -> str:
    """The sum of workers low … high as its brackets: split at the largest power of two below their number."""
    if high - low == 1:
        return str(low)
    half = 1
    while half * 2 < high - low:
        half *= 2
    return f"({literal(low, low + half)}+{literal(low + half, high)})"


def add(a: str, b: str) -> str:
    return f"({a}+{b})"


def played(mine: range, workers: int) -> dict[Node, str]:
    """What a device holds after its workers came in order."""
    pieces: dict[Node, str] = {}
    for worker in mine:
        pieces[worker, worker + 1] = str(worker)
        merge_siblings(pieces, worker, workers, add)
        assert len(pieces) <= 2 * math.log2(workers) + 1
    return pieces


@pytest.mark.parametrize("workers", range(1, 34))
def test_every_split_gives_the_literal_sum(workers: int) -> None:
    """Every contiguous range of workers settles to its roots; every even split folds to the literal sum."""
    for low, high in combinations(range(workers + 1), 2):
        pieces = played(range(low, high), workers)
        assert list(pieces) == subtree_roots(range(low, high), workers) or set(pieces) == set(
            subtree_roots(range(low, high), workers)
        )
        assert all(text == literal(*node) for node, text in pieces.items())
    for ranks in range(1, workers + 1):
        everything: dict[Node, str] = {}
        for rank in range(ranks):
            everything |= played(even_share(workers, ranks, rank), workers)
        assert fold((0, workers), everything, add) == literal(0, workers)


def test_uneven_splits_fold_too() -> None:
    for workers in range(2, 14):
        for cuts in combinations(range(1, workers), min(3, workers - 1)):
            bounds = [0, *cuts, workers]
            everything: dict[Node, str] = {}
            for low, high in pairwise(bounds):
                everything |= played(range(low, high), workers)
            assert fold((0, workers), everything, add) == literal(0, workers)


def test_roots_are_maximal_and_cover() -> None:
    for workers in range(1, 34):
        for low, high in combinations(range(workers + 1), 2):
            found = subtree_roots(range(low, high), workers)
            assert [w for node in found for w in range(*node)] == list(range(low, high))
            joined = {(a[0], b[1]) for a, b in pairwise(found)}
            assert not any(is_node(node, workers) and children(node) in pairs(found) for node in joined)
    assert subtree_roots(range(0), 5) == []


def pairs(nodes: list[Node]) -> set[tuple[Node, Node]]:
    return set(pairwise(nodes))


def is_node(node: Node, workers: int) -> bool:
    here = (0, workers)
    while here != node and here[1] - here[0] > 1:
        left, right = children(here)
        here = left if node[0] < left[1] else right
    return here == node


def test_in_order_a_single_device_holds_few_pieces() -> None:
    for workers in (2, 8, 33, 1000):
        pieces: dict[Node, int] = {}
        most = 0
        for worker in range(workers):
            pieces[worker, worker + 1] = 1
            merge_siblings(pieces, worker, workers, lambda a, b: a + b)
            most = max(most, len(pieces))
        assert pieces == {(0, workers): workers}
        assert most <= math.ceil(math.log2(workers))


def test_a_missing_piece_is_an_error() -> None:
    with pytest.raises(KeyError):
        fold((0, 4), {(0, 2): "a", (2, 3): "b"}, add)
