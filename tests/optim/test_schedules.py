"""Schedules: worked numbers, ends and corners; a factor is a function of the step alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, PolynomialLR, StepLR

from tutti.config.optimizer_config import check_schedule
from tutti.config.spec import Duration
from tutti.errors import UsageError
from tutti.optim.schedules import make_schedule


def of_a_stream(duration: Duration) -> int:
    return duration.steps(None, 8)


def rates(
    text: str, steps: list[int], total: int = 100, dataset: int = 120, batch: int = 10, scaled: float = 1.0
) -> list[float]:
    factor = make_schedule(check_schedule(text), total, lambda duration: duration.steps(dataset, batch), scaled)
    return [factor(step) for step in steps]


def test_warm_up_from_an_eighth_in_five_epochs_of_twelve_steps() -> None:
    """Rate 0.1 times 8 workers, i = 0, 30, 59 of 60: equal increments from the rate of one worker."""
    steps = [0, 30, 59, 60, 99]
    for factors in (
        rates("constant:warmup=5ep,warmup_from=0.125", steps),
        rates("constant:warmup=5ep", steps, scaled=8),
    ):
        assert [0.8 * f for f in factors] == pytest.approx([0.1, 0.45, 0.788333333, 0.8, 0.8], abs=1e-9)
    assert rates("constant:warmup=4st", [0, 3, 4], scaled=0.5) == [0.25, 1.0, 1.0]


def test_constant() -> None:
    assert rates("constant", [0, 50, 99, 1000]) == [1.0] * 4
    assert rates("constant:warmup=4st", [0, 1, 2, 3, 4]) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates("constant:warmup=40sa", [0, 3, 4]) == [0.25, 1.0, 1.0], "40 samples are 4 batches of 10"


def test_cosine_begins_at_one_and_ends_a_step_before_the_final_factor() -> None:
    half = (1 + math.cos(math.pi / 4)) / 2
    assert rates("cosine", [0, 1, 2, 3, 4, 9], total=4) == pytest.approx([1, half, 0.5, 1 - half, 0, 0], abs=1e-12)
    assert rates("cosine:final=0.2", [0, 2, 4], total=4) == pytest.approx([1, 0.6, 0.2])


def test_the_decay_takes_what_the_warm_up_leaves() -> None:
    assert rates("cosine:warmup=2st", [0, 1, 2, 4, 6], total=6) == pytest.approx([0.5, 1, 1, 0.5, 0], abs=1e-12)
    assert rates("linear:warmup=2st,final=0.5", [0, 1, 2, 4, 6, 9], total=6) == [0.5, 1, 1, 0.75, 0.5, 0.5]
    assert rates("linear:warmup=20st", [0, 5, 19, 20], total=6) == pytest.approx([0.05, 0.3, 1, 1])


def test_milestones_in_epochs_steps_and_samples() -> None:
    at = [0, 23, 24, 49, 50, 59, 60]
    assert rates("step:milestones=2ep+50st+600sa,gamma=0.5", at) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert rates("step:milestones=2ep", [24]) == [0.1]
    warm = rates("step:milestones=2st,gamma=0.5,warmup=4st", [0, 1, 3, 4])
    assert warm == [0.25, 0.5, 1.0, 0.5], "counted from the start of the run, not from the end of the warm-up"


def test_any_step_without_those_before_it() -> None:
    for text in ("constant:warmup=7st", "cosine:warmup=7st", "linear", "step:milestones=3ep"):
        forward = rates(text, list(range(120)))
        assert rates(text, list(range(119, -1, -1))) == forward[::-1]
        assert all(0 <= f <= 1 for f in forward)


@pytest.mark.parametrize("text", ["cosine", "linear:final=0.1"])
def test_what_falls_over_the_whole_run_needs_its_length(text: str) -> None:
    with pytest.raises(UsageError, match="decreases over the whole run, whose length is not known"):
        make_schedule(check_schedule(text), None, of_a_stream)
    assert make_schedule(check_schedule(text), 10, of_a_stream)(0) == 1.0


def test_what_does_not_works_on_a_stream() -> None:
    factor = make_schedule(check_schedule("step:milestones=5st+80sa,gamma=0.5,warmup=16sa"), None, of_a_stream)
    assert [factor(step) for step in range(12)] == [0.5, 1.0, 1.0, 1.0, 1.0, *[0.5] * 5, 0.25, 0.25]
    with pytest.raises(UsageError, match="2ep of a stream of unknown length"):
        make_schedule(check_schedule("constant:warmup=2ep"), None, of_a_stream)


def torchs(make: Any, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("onecycle", lambda o: OneCycleLR(o, 1.0, total_steps=40, cycle_momentum=False)),
        (
            "onecycle:rise=0.55,start=0.1,final=0.01",
            lambda o: OneCycleLR(o, 1.0, 40, pct_start=0.55, div_factor=10, final_div_factor=10, cycle_momentum=False),
        ),
        ("polynomial:power=1.5", lambda o: PolynomialLR(o, 40, power=1.5)),
        ("exponential:gamma=0.8,every=1st", lambda o: ExponentialLR(o, 0.8)),
        ("exponential:gamma=0.5", lambda o: StepLR(o, 12, 0.5)),
    ],
)
def test_schedules_are_those_of_pytorch(text: str, make: Any) -> None:
    assert rates(text, [*range(40)], total=40) == pytest.approx(torchs(make, 40), abs=1e-12)


def test_warm_up_stable_decay() -> None:
    steps = [0, 1, 2, 79, 80, 90, 95, 100]
    assert rates("wsd:warmup=2st", steps) == pytest.approx([0.5, 1, 1, 1, 1, 0.5, 0.25, 0])
    falling = rates("wsd:decay=0.5,shape=sqrt,final=0.1", [50, 75, 100])
    assert falling == pytest.approx([1, 1 - 0.9 * math.sqrt(0.5), 0.1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("onecycle:warmup=3st", "a warm-up of its own"),
        ("onecycle:rise=1", "between 0 and 1"),
        ("wsd:decay=0", "fraction of the run"),
        ("polynomial:power=-1", "power is -1"),
        ("exponential:every=0st", "every is 0"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_schedule(text)


@pytest.mark.parametrize("text", ["onecycle", "wsd", "polynomial"])
def test_a_schedule_over_the_whole_run_needs_its_length(text: str) -> None:
    with pytest.raises(UsageError, match=f"the schedule {text} decreases over the whole run"):
        make_schedule(check_schedule(text), None, of_a_stream)
