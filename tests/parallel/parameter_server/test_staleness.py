"""Clocks and staleness without a network: bounded at the right step, each push once, the same script the same bits."""

from __future__ import annotations

import pytest
import torch

from tutti.parallel.parameter_server.simulate import simulate
from tutti.parallel.parameter_server.staleness import StalenessTracker


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_a_worker_may_be_so_many_steps_ahead_and_no_more(bound: int) -> None:
    """Ho et al. 2013: s = 2 and the slowest at 5, a worker at 7 runs and one at 8 waits."""
    core = StalenessTracker(3, bound)
    core.hear(0, 5)
    for clock in range(5, 5 + bound + 3):
        core.hear(1, clock)
        core.hear(2, 5 + bound)
        assert core.may_proceed(1) == (clock <= 5 + bound)
        assert core.may_proceed(0)


def test_no_bound_lets_everybody_run() -> None:
    core = StalenessTracker(2)
    core.hear(0, 0)
    core.hear(1, 1000)
    assert core.may_proceed(1)


def test_each_push_counts_once_in_whatever_order_it_comes() -> None:
    core, made = StalenessTracker(2), []
    for worker, clock in [(0, 0), (0, 0), (1, 0), (0, 1), (0, 0), (1, 1), (1, 0), (0, 1), (1, 1)]:
        core.push(worker, clock, core.version, lambda _, key=(worker, clock): made.append(key))  # type: ignore[misc]
    assert made == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert core.version == 4


def test_a_step_without_a_push_moves_the_clock() -> None:
    core = StalenessTracker(2, bound=0)
    core.push(0, 0, 0, None)
    assert (core.version, core.may_proceed(0), core.may_proceed(1)) == (0, False, True)
    core.push(1, 0, 0, None)
    assert core.may_proceed(0)


def test_staleness_is_the_updates_since_the_reading() -> None:
    core, seen = StalenessTracker(3), []
    for worker, read in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 4)]:
        core.push(worker, core.version, read, seen.append)
    assert seen == [0, 1, 2, 2, 0]
    assert core.staleness == {0: 2, 1: 1, 2: 2}


def test_a_worker_that_is_known_to_be_gone_is_not_waited_for_at_all() -> None:
    gone: set[int] = set()
    core = StalenessTracker(3, bound=1, gone=lambda: gone)
    for clock in range(2):
        core.push(0, clock, 0, lambda _: None)
        core.push(1, clock, 0, lambda _: None)
    assert not core.may_proceed(0)
    gone.add(2)
    assert core.may_proceed(0)
    core.push(0, 2, 0, lambda _: None)
    core.push(0, 3, 0, lambda _: None)
    assert not core.may_proceed(0), "the others are"
    assert core.steps == [4, 2, 0]


def test_a_worker_that_is_gone_is_no_longer_waited_for() -> None:
    now = [0.0]
    core = StalenessTracker(2, bound=1, lease=10, now=lambda: now[0])
    for clock in range(2):
        core.push(0, clock, 0, lambda _: None)
    assert not core.may_proceed(0)
    now[0] = 9.0
    core.hear(0, 2)
    assert not core.may_proceed(0)
    now[0] = 11.0
    assert core.may_proceed(0)
    # What it computed before is older than the bound allows, and does not count; then it is waited for again.
    core.push(0, 2, 0, lambda _: None)
    before = core.version
    assert not core.push(1, 0, 0, lambda _: None).taken
    assert (core.version, core.stale, core.may_proceed(0)) == (before, 1, False)


def test_all_hear_of_a_stop_before_the_step_that_it_is_after() -> None:
    core = StalenessTracker(3)
    for worker, clock in [(0, 0), (1, 0), (1, 1), (2, 0)]:
        core.push(worker, clock, 0, None)
    core.ask_to_stop()
    # Worker 1 has done two steps and may be in its third.
    assert core.stop_at == 3
    core.push(1, 2, 0, None)
    core.ask_to_stop()
    assert core.stop_at == 3


def test_where_the_steps_of_all_count_all_stop_after_the_next_one_of_these() -> None:
    core = StalenessTracker(3, together=True)
    for worker, clock in [(0, 4), (0, 5), (0, 6), (1, 4), (0, 7)]:
        core.push(worker, clock, 0, None)
    # Seventeen in all: 8, 5 and 4, where the third has begun like the first.
    assert core.steps == [8, 5, 4] and core.clock == 5
    core.ask_to_stop()
    assert core.stop_at == 6
    core.push(2, 4, 0, None)
    assert (core.clock, core.stop_at) == (6, 6)


def test_state_goes_on_where_it_was() -> None:
    core = StalenessTracker(2, bound=1)
    core.push(0, 7, 0, lambda _: None)
    other = StalenessTracker(2, bound=1)
    other.load(core.state())
    assert (other.version, other.slowest()) == (1, 7)
    assert not other.push(0, 7, 0, lambda _: None).taken
    # What workers have seen and it has not is what was lost.
    other.push(1, 9, 4, lambda _: None)
    assert other.lost == 3


def trained(seconds: list[float], bound: int | None) -> tuple[torch.Tensor, int]:
    """A quadratic, trained by workers that are so fast: the parameters, and the largest lead that was seen."""
    generator = torch.Generator().manual_seed(0)
    parameters, copies = torch.randn(16, generator=generator), {}
    clocks = dict.fromkeys(range(len(seconds)), 0)
    lead = 0

    def read(worker: int, clock: int) -> None:
        nonlocal lead
        clocks[worker] = clock
        lead = max(lead, clock - min(clocks.values()))
        copies[worker] = parameters.clone()

    def update(worker: int, clock: int, staleness: int) -> None:
        clocks[worker] = clock + 1
        noise = torch.randn(16, generator=torch.Generator().manual_seed(1000 * worker + clock))
        parameters.sub_(0.1 / max(1, staleness) * (copies[worker] + 0.1 * noise))

    simulate(seconds, 20, bound=bound, read=read, update=update)
    return parameters, lead


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_the_same_script_gives_the_same_bits(bound: int | None) -> None:
    want, lead = trained([1.0, 1.3, 1.0, 5.0], bound)
    assert torch.equal(trained([1.0, 1.3, 1.0, 5.0], bound)[0], want)
    assert not torch.equal(trained([1.3, 1.0, 1.0, 5.0], bound)[0], want)
    assert lead == (16 if bound is None else bound)
