"""Ranks and workers that are slow on purpose: how long they sleep, who does, and that nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import pytest

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tutti.config.slowness import Slowness
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.train import slow_replica as module

STEPS = 3  # an epoch of 70 samples in batches of 25


class Clock:
    """In place of ``time``: counts what is slept, and lets each look at the clock take a second."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._now = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def thread_time(self) -> float:
        self._now += 1.0
        return self._now


def train(slow: str, strategy: str = "mirrored", custom_loop: bool = False, **options: Any) -> tuple[str, float]:
    clock: Any = Clock()
    module.time = clock  # type: ignore[attr-defined]
    try:
        arguments: dict[str, Any] = {"workers": 4, "batch_size": 25, "strategy": strategy, "reproducible": True}
        run = tutti.prepare(model(), "adam", samples(), loss, slow=slow, **arguments, **options)
        if custom_loop:
            for batch in run.microbatches(0):
                run.model.zero_grad()
                run.backward(loss(run.model, batch))
                run.gated_step()
        else:
            for batch in run.epoch(0):
                run.step(batch)
            run.evaluate(samples())
        return run.weights_sha256(), sum(clock.slept)
    finally:
        module.time = time  # type: ignore[attr-defined]


@pytest.mark.parametrize("custom_loop", [False, True])
def test_a_slow_rank_sleeps_and_trains_as_the_others(custom_loop: bool) -> None:
    [(want, _)] = worlds.run(1, train, slow="")
    cases = {"rank=1,ms=20": [0, 0.02], "rank=1,factor=3": [0, 2.0], "rank=0,ms=10;rank=1,ms=30": [0.01, 0.03]}
    for slow, expected in cases.items():
        answers = worlds.run(2, train, slow=slow, custom_loop=custom_loop)
        assert [digest for digest, _ in answers] == [want] * 2
        # Two workers a rank, each of them so much; each backward has taken one second by the clock.
        assert [slept for _, slept in answers] == pytest.approx([2 * STEPS * each for each in expected])


@pytest.mark.parametrize("strategy", ["single", "mirrored", "local_sgd:period=2", "central_storage"])
def test_a_slow_worker_is_slow_wherever_it_is(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 3
    answers = worlds.run(ranks, train, slow="worker=2+3,ms=10", strategy=strategy, micro_batch=2)
    assert sum(slept for _, slept in answers) == pytest.approx(2 * 0.01 * STEPS)


def test_a_split_model_is_slow_too() -> None:
    answers = worlds.run(2, train, slow="rank=0,ms=5", strategy="model_parallel")
    assert [slept for _, slept in answers] == pytest.approx([4 * 0.005 * STEPS, 0])


def untouched(slow: str) -> set[str]:
    run = tutti.prepare(model(), "adam", samples(), loss, slow=slow, workers=4, batch_size=25)
    return {name for name in ("run", "begin", "backward") if name in vars(run.replica)}


def test_it_costs_nothing_where_it_is_off() -> None:
    assert worlds.run(2, untouched, slow="") == [set(), set()]
    assert worlds.run(2, untouched, slow="rank=1,ms=1") == [set(), {"begin", "backward"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("factor=3", "give rank=1 or worker=1"),
        ("rank=1,worker=1,ms=2", "give rank=1 or worker=1"),
        ("rank=1", "give factor=3, or ms=20"),
        ("rank=1,factor=0.5", "factor is 0.5"),
        ("rank=-1,ms=3", "give rank=1"),
        ("rank=1,facter=3", "did you mean 'factor'"),
        ("rank=1,factor=nan", "'nan' is not a finite number"),
        ("rank", "write rank=1,factor=3"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainConfig(slow=text)
    assert words in str(caught.value).lower() and "--slow" in str(caught.value)


def test_nobody_is_slowed_who_is_not_there() -> None:
    [slow] = Slowness.parse("rank=2,factor=3")
    slow.check(3, 3)
    with pytest.raises(UsageError, match="there is no rank 2"):
        slow.check(2, 4)
    with pytest.raises(UsageError, match="there is no worker 4"):
        Slowness(worker=(4,), ms=1).check(2, 4)
    said = [str(each) for each in Slowness.parse("rank=1+2,factor=3,ms=4;worker=0,ms=2")]
    assert said == ["rank 1, 2: 3 × as slow and 4 ms a step", "worker 0: 2 ms a step"]
