"""Shares and chunks: nothing lost, nothing twice, sizes that differ by at most one."""

from __future__ import annotations

from tutti.comm.partition import chunks, even_share


def test_shares_are_a_partition_in_order_and_even() -> None:
    for total in range(40):
        for parts in range(1, 12):
            pieces = [even_share(total, parts, i) for i in range(parts)]
            assert [x for piece in pieces for x in piece] == list(range(total))
            sizes = [len(piece) for piece in pieces]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True), "the longer ones come first"


def test_chunks_are_a_partition_of_fewest_even_parts() -> None:
    for total in range(40):
        assert chunks(total, None) == ([range(total)] if total else [])
        for largest in range(1, 12):
            pieces = chunks(total, largest)
            assert [x for piece in pieces for x in piece] == list(range(total))
            assert len(pieces) == (total + largest - 1) // largest
            sizes = [len(piece) for piece in pieces]
            assert all(1 <= size <= largest for size in sizes)
            assert not sizes or max(sizes) - min(sizes) <= 1
