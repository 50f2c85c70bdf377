"""Which faults are played, and when: all of it drawn from the seed, before anything acts."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from tutti.chaos.faults import KILLED, LAUNCHER, SOAK, Fault, draw_faults, draw_soak, duty
from tutti.errors import UsageError

KILL = Fault("kill")


def test_the_seed_decides_everything() -> None:
    def one(seed: int) -> tuple[Fault, ...]:
        return draw_soak(list(SOAK), count=20, ranks=3, total=1000, seed=seed)

    assert one(5) == one(5) != one(6)
    again = [
        draw_faults(KILL, step="random", rank="random", times=9, ranks=4, total=100, seed=seed) for seed in (1, 1, 2)
    ]
    assert again[0] == again[1] != again[2]


@pytest.mark.parametrize("seed", range(5))
def test_a_soak_has_every_kind_at_steps_of_the_run(seed: int) -> None:
    faults = draw_soak(list(SOAK), count=100, ranks=3, total=500, seed=seed)
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps)) and steps[0] >= 1 and steps[-1] <= 400
    kinds = Counter((fault.kind, fault.rank == LAUNCHER) for fault in faults)
    assert len(kinds) == len(SOAK) and max(kinds.values()) - min(kinds.values()) <= 1
    assert {fault.rank for fault in faults if fault.kind == "kill"} == {LAUNCHER, 0, 1, 2}


def test_given_steps_are_multiples() -> None:
    faults = draw_faults(KILL, step=20, rank=1, times=3, ranks=2, total=None, seed=0)
    assert [(fault.step, fault.rank) for fault in faults] == [(20, 1), (40, 1), (60, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"rank": 3}, "no rank 3.*0 to 2"),
        ({"step": "random"}, "random steps cannot be drawn.*--steps"),
        ({"step": "random", "total": 3, "times": 3}, "no room for 3 faults in 3 steps"),
        ({"step": 0, "times": 2}, "only one fault can be injected at the first checkpoint"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, object], message: str) -> None:
    usual = {"step": 1, "rank": 0, "times": 1, "ranks": 3, "total": None, "seed": 0}
    with pytest.raises(UsageError, match=message):
        draw_faults(KILL, **{**usual, **words})  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [1.5, 5.0, 40.0])
def test_a_slow_process_runs_its_part_of_the_time(factor: float) -> None:
    spans = list(islice(duty(factor), 100))
    assert sum(seconds for runs, seconds in spans if runs) == pytest.approx(sum(s for _, s in spans) / factor)


def test_a_run_may_end_as_promised_and_not_otherwise() -> None:
    assert Fault("slow", rank=1).ends() == frozenset()
    assert Fault("terminate").ends() == {75} and Fault("fill").ends() == {8}
    assert Fault("kill", rank=LAUNCHER).ends() == {KILLED} and 5 in Fault("kill", rank=1).ends()
