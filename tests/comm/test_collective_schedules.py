"""Schedules by their definition: every chunk counted once, nobody waits for ever, and the times of the formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tutti.comm.collective_schedules import (
    LinkCost,
    Schedule,
    central_schedule,
    halving_schedule,
    hierarchical_schedule,
    prove,
    ring_schedule,
    tree_schedule,
)

FLAT = {"ring": ring_schedule, "tree": tree_schedule, "halving": halving_schedule, "central": central_schedule}
NETWORK, NODE = LinkCost(2e-5, 1e10), LinkCost(5e-6, 1e11)
SIZE = 1e8


def nodes_of(*sizes: int) -> list[list[int]]:
    """Nodes with so many ranks each, numbered in order."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("ranks", range(1, 34))
@pytest.mark.parametrize("name", FLAT)
def test_every_chunk_of_every_rank_is_counted_once_and_no_rank_waits_for_ever(name: str, ranks: int) -> None:
    schedule = FLAT[name](ranks)
    assert schedule.ranks == ranks
    prove(schedule)


@pytest.mark.parametrize("ranks", range(1, 34))
def test_the_same_on_nodes_of_any_size(ranks: int) -> None:
    for most in range(1, ranks + 1):
        whole, rest = divmod(ranks, most)
        prove(hierarchical_schedule(nodes_of(*[most] * whole, *[rest] * (rest > 0))))
    prove(hierarchical_schedule([list(range(place, ranks, min(3, ranks))) for place in range(min(3, ranks))]))


def without(schedule: Schedule, number: int) -> Schedule:
    """The schedule without the last transfer of one round."""
    rounds = list(schedule.rounds)
    rounds[number] = rounds[number][:-1]
    return replace(schedule, rounds=tuple(rounds))


def doubled(schedule: Schedule, number: int) -> Schedule:
    """The schedule with one round twice."""
    rounds = schedule.rounds
    return replace(schedule, rounds=(*rounds[: number + 1], *rounds[number:]))


@pytest.mark.parametrize(
    "schedule", [make(5) for make in FLAT.values()] + [hierarchical_schedule(nodes_of(2, 3))], ids=lambda s: s.name
)
def test_the_proof_finds_every_missing_transfer_and_every_reduction_made_twice(schedule: Schedule) -> None:
    for number, transfers in enumerate(schedule.rounds):
        with pytest.raises(ValueError, match="sum"):
            prove(without(schedule, number))
        if transfers[0].reduce:
            with pytest.raises(ValueError, match="sum of ranks"):
                prove(doubled(schedule, number))


class Crossed(Schedule):
    """A ring of which rank 0 makes its rounds in the opposite order."""

    def of_rank(self, rank: int) -> list[tuple[list, list]]:
        own = super().of_rank(rank)
        return own[::-1] if rank == 0 else own


def test_the_proof_finds_ranks_that_wait_for_ever() -> None:
    ring = ring_schedule(4)
    with pytest.raises(ValueError, match="wait for ever"):
        prove(Crossed(ring.name, ring.ranks, ring.chunks, ring.rounds))


def test_the_proof_finds_a_round_that_reads_what_it_writes() -> None:
    ring = ring_schedule(3)
    with pytest.raises(ValueError, match="reads and writes"):
        prove(replace(ring, rounds=((*ring.rounds[0], *ring.rounds[1]), *ring.rounds[2:])))


def test_nodes_hold_every_rank_once() -> None:
    for nodes in ([], [[0], []], [[0, 1], [1]], [[1, 2]]):
        with pytest.raises(ValueError, match="each rank from 0 once"):
            hierarchical_schedule(nodes)


@pytest.mark.parametrize(
    ("schedule", "size", "seconds"),
    [
        (ring_schedule(8), SIZE, 0.01778),
        (tree_schedule(8), SIZE, 0.06012),
        (halving_schedule(8), SIZE, 0.01762),
        # Eight ranks and the reducer; the two directions follow each other, as on a half-duplex link.
        (central_schedule(9), SIZE, 0.16004),
        (hierarchical_schedule(nodes_of(4, 4)), SIZE, 0.00407),
        (ring_schedule(8), 1e3, 2.80175e-4),
        (tree_schedule(8), 1e3, 1.206e-4),
        (halving_schedule(8), 1e3, 1.20175e-4),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else f"{value:g}",
)
def test_worked_times(schedule: Schedule, size: float, seconds: float) -> None:
    """Each from its formula by hand, with α = 20 µs and 10 GB/s between nodes, 5 µs and 100 GB/s within."""
    assert schedule.seconds(size, NETWORK, NODE) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("ranks", range(1, 34))
def test_times_are_those_of_the_formulas(ranks: int) -> None:
    alpha, beta = NETWORK
    levels, power = math.ceil(math.log2(ranks)), 2 ** math.floor(math.log2(ranks))
    formulas = {
        "ring": 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * SIZE / beta,
        "tree": 2 * levels * (alpha + SIZE / beta),
        "halving": 2 * math.log2(power) * alpha
        + 2 * (power - 1) / power * SIZE / beta
        + 2 * (ranks > power) * (alpha + SIZE / beta),
        "central": 2 * (ranks > 1) * alpha + 2 * (ranks - 1) * SIZE / beta,
    }
    for name, make in FLAT.items():
        assert make(ranks).seconds(SIZE, NETWORK) == pytest.approx(formulas[name], rel=1e-9, abs=0), name


@pytest.mark.parametrize(("each", "count"), [(1, 4), (2, 2), (3, 5), (4, 2), (8, 1)])
def test_times_of_two_levels(each: int, count: int) -> None:
    want = 2 * (each - 1) * NODE.alpha + 2 * (each - 1) / each * SIZE / NODE.beta
    want += 2 * (count - 1) * NETWORK.alpha + 2 * (count - 1) / count * SIZE / each / NETWORK.beta
    schedule = hierarchical_schedule(nodes_of(*[each] * count))
    assert schedule.seconds(SIZE, NETWORK, NODE) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("elements", [0, 1, 3, 1000])
def test_traffic_is_a_link_s_share_of_the_vector(name: str, elements: int) -> None:
    schedule = FLAT[name](5)
    traffic = schedule.traffic(elements, 8)
    assert set(traffic) <= set(schedule.links())
    whole = {
        "ring": 8 * elements,
        "tree": 8 * elements,
        "halving": 2 * 3 * elements + 2 * elements,
        "central": 8 * elements,
    }
    assert sum(count.bytes for count in traffic.values()) == 8 * whole[name]
    assert bool(traffic) == (elements > 0)


def test_only_the_rings_leave_a_node() -> None:
    schedule = hierarchical_schedule(nodes_of(2, 2))
    assert schedule.links() == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert {link: count.bytes for link, count in schedule.traffic(1000, 4).items() if link in schedule.links()} == (
        dict.fromkeys(schedule.links(), 2000)
    )
