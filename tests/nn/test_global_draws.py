"""Draws from Python's and NumPy's global generators within a step: functions of the micro-batch's key alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tutti.nn.global_draws import GlobalDraws, draws_marker
from tutti.nn.rng_streams import RngStreams
from tutti.python_compat import PublicGeneratorState

CPU = torch.device("cpu")


def draw() -> tuple[float, ...]:
    """Draw from each generator, and half of a pair of normal numbers from each."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.standard_normal()


@pytest.fixture(autouse=True, params=["memory", "public"])
def own_states(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """States of these tests, read from memory, and as in a Python that has them elsewhere."""
    if request.param == "public":
        monkeypatch.setattr("tutti.nn.global_draws.generator_memory", PublicGeneratorState())
    states = random.getstate(), np.random.get_state()
    random.seed(3), np.random.seed(3)
    yield
    random.setstate(states[0]), np.random.set_state(states[1])


def test_draws_of_a_step_follow_from_the_key_and_leave_the_scripts_stream() -> None:
    want = draw(), draw()
    random.seed(3), np.random.seed(3)
    draws, found = GlobalDraws(), []
    assert draw() == want[0]
    for _ in range(2):
        draws.begin_step(keyed=True)
        for key in (5, 5 + 2**40, 5):
            draws.enter(key, (0, 0))
            found.append((draw(), draw()))
        draws.end_step()
    assert draw() == want[1], "the script's own stream goes on, with the halves of its normal numbers"
    assert found[0] == found[2] == found[3] and len({each for pair in found for each in pair}) == 4


def test_a_slot_that_has_drawn_is_seeded_and_others_start_alike() -> None:
    """A rank with both slots, and two ranks with one each, draw the same, though one slot begins later."""

    def play(slots: list[int]) -> dict[tuple[int, int], tuple[float, ...]]:
        random.seed(3), np.random.seed(3)
        draws, found = GlobalDraws(), {}
        for step in range(3):
            draws.begin_step(keyed=False)
            for slot in slots:
                draws.enter(100 * step + slot, (slot, 0))
                if step > slot:
                    found[step, slot] = draw()
            draws.end_step()
        assert draws.late and draw()[0] == random.Random(3).random()
        return found

    together, first, second = play([0, 1]), play([0]), play([1])
    assert together == first | second and len(set(together.values())) == len(together) - 1
    assert together[1, 0] == together[2, 1], "those of steps in which nothing was seeded"


def test_code_that_draws_nothing_is_never_seeded_in_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = GlobalDraws()
    monkeypatch.setattr(random, "seed", pytest.fail)
    for _ in range(2):
        draws.begin_step(keyed=False)
        draws.enter(7, (0, 0))
        draws.end_step()
    assert not draws.late


def test_the_marker_moves_with_draws_of_the_script_alone() -> None:
    draws, before = GlobalDraws(), draws_marker()
    draws.begin_step(keyed=True)
    draws.enter(1, (0, 0))
    assert draws_marker() == before
    np.random.rand()
    drawn = draws_marker()
    random.random()
    assert len({before, drawn, draws_marker()}) == 3
    draws.enter(2, (0, 1))
    begun = draws_marker()
    draws.enter(3, (0, 2))
    draws.leave_block(draws.enter_block(5))  # type: ignore[arg-type]
    assert draws_marker() == begun and not draws.has_drawn()
    around = draws.enter_block(5)
    random.random()
    draws.leave_block(around)  # type: ignore[arg-type]
    within = draws_marker()
    assert within != begun
    draws.end_step()
    assert draws_marker() == within
    random.random()
    assert draws_marker() != within


def test_an_exception_leaves_the_scripts_stream() -> None:
    draws, want = GlobalDraws(), random.Random(3).random()
    draws.begin_step(keyed=True)
    draws.enter(1, (0, 0))
    draw()
    draws.begin_step(keyed=False)
    assert random.random() == want


@pytest.mark.parametrize("drawn", [0, 1, 2])
def test_packed_states_go_on_elsewhere(drawn: int) -> None:
    draws, other = GlobalDraws(), GlobalDraws()
    draws.enter(9)
    for _ in range(drawn):
        draw()
    packed = draws.packed()
    want = draw(), draw()
    other.enter(4)
    other.unpack(packed)
    assert (draw(), draw()) == want


def test_another_bit_generator_of_numpy_is_seeded_too() -> None:
    own: Any = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        draws, found = GlobalDraws(), []
        draws.begin_step(keyed=True)
        for key in (5, 5, 6):
            draws.enter(key, (0, 0))
            found.append(np.random.rand())
        draws.end_step()
        assert found[0] == found[1] != found[2]
        np.random.set_bit_generator(np.random.PCG64(1))
    finally:
        np.random.set_bit_generator(own)


class Scaled(nn.Module):
    """Draws by Python and NumPy."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (random.random() + np.random.rand() if self.training else 1)


def test_a_block_draws_alike_in_a_part_and_so_does_the_code_after_it() -> None:
    whole = nn.Sequential(Scaled(), nn.Identity(), Scaled())
    first, second = RngStreams(whole, CPU), RngStreams(whole[2:], CPU)
    first.enter(77)
    middle = whole[1](whole[0](torch.ones(3)))
    want, after = whole[2](middle), draw()
    second.enter(77)
    random.random(), np.random.rand()
    found = whole[2](middle)
    second.enter(77)
    assert torch.equal(found, want) and draw() == after
