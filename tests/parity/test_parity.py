"""``tutti.prepare`` against the same training written by hand: a plain loop, and DDP, in float64."""

from __future__ import annotations

from functools import cache

import pytest

from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tests.parity.loops import CASES, Result, by_cells, by_hand, by_step

WORLDS = {
    # name: (ranks, workers): as many, and several workers a rank, unevenly
    "1 rank, 3 workers": (1, 3),
    "2 ranks": (2, 2),
    "1 rank": (1, 1),
    "3 ranks": (3, 3),
    "2 ranks, 5 workers": (2, 5),
}


@cache
def plain(case: str) -> Result:
    return worlds.run(1, on_name, name=case, way="plain")[0]  # type: ignore[no-any-return]


def on_name(name: str, way: str, workers: int = 1) -> Result:
    """Cases hold functions that cannot be sent; their names can."""
    case = CASES[name]
    if way in ("plain", "ddp"):
        return by_hand(case, ddp=way == "ddp")
    return (by_step if way == "step" else by_cells)(case, workers)


def check(name: str, results: list[Result]) -> None:
    tolerance = CASES[name].tolerance
    weights, losses, rates = plain(name)
    for own_weights, own_losses, own_rates in results:
        assert own_weights.keys() == weights.keys()
        assert largest_difference(own_weights, weights) <= tolerance
        assert own_losses == pytest.approx(losses, rel=max(10 * tolerance, 1e-9))
        assert own_rates == rates


@pytest.mark.parametrize(("name", "ranks"), in_turn(list(CASES), [2, 3]))
def test_hand_written_ddp_equals_the_plain_loop(name: str, ranks: int) -> None:
    """What tutti is held to is true of PyTorch itself."""
    check(name, worlds.run(ranks, on_name, name=name, way="ddp"))


PLACES = [(world, ("step", "cells")[(number + turn) % 2]) for turn in range(2) for number, world in enumerate(WORLDS)]
"""Of any two that follow one another, one has several ranks."""


@pytest.mark.parametrize(("name", "place"), in_turn(list(CASES), PLACES, each=2), ids=str)
def test_tutti_equals_the_plain_loop(name: str, place: tuple[str, str]) -> None:
    world, way = place
    ranks, workers = WORLDS[world]
    check(name, worlds.run(ranks, on_name, name=name, way=way, workers=workers))
