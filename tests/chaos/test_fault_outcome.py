"""When a run has survived: every promise kept, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tutti.chaos.fault_outcome import FaultOutcome, Report, summarize


def report(*outcomes: FaultOutcome, **changes: Any) -> Report:
    values = {"directory": "run", "planned": len(outcomes), "exit_code": 0, "finished": True} | {
        "steps": 60,
        "executed": 80,
        "seconds": 1.0,
        "weights_sha256": "a",
        "reference_sha256": "a",
    }
    return Report(outcomes=outcomes, **{**values, **changes})


GOOD = FaultOutcome("kill rank 1", "kill", 25, noticed_seconds=0.1, restarts=1, lost_steps=20, most_lost=20)


def test_survival() -> None:
    good = report(GOOD)
    assert good.problems() == [] and good.goodput == 0.75 and good.verdict == "equal bits"
    assert report(GOOD, reference_sha256=None).verdict == "not compared"
    told = json.loads(json.dumps(good.as_json()))
    assert told["survived"] and told["goodput"] == 0.75 and told["outcomes"][0]["lost_steps"] == 20


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            report(FaultOutcome("kill rank 1", "kill", 25, lost_steps=21, most_lost=20)),
            "kill rank 1 at step 25: 21 steps",
        ),
        (report(FaultOutcome("fill", "fill", 25, broken=["the old checkpoint is gone"])), "fill at step 25: the old"),
        (report(GOOD, planned=2), "the run was over after 1 of 2 faults"),
        (report(GOOD, exit_code=5), "the run ended with exit code 5"),
        (report(GOOD, weights_sha256="b"), "the weights are not those of the uninterrupted run"),
        (report(GOOD, weights_sha256=None), "the weights are not"),
        (report(GOOD, left=["step-00000010.tmp-0"]), "step-00000010.tmp-0 was left"),
    ],
)
def test_a_broken_promise_is_told(bad: Report, said: str) -> None:
    [problem] = bad.problems()
    assert problem.startswith(said) and not bad.as_json()["survived"]


def test_a_run_of_somebody_else_need_not_be_over() -> None:
    assert not report(GOOD, finished=False, exit_code=None, reference_sha256=None).problems()


def test_kinds_are_summed_up() -> None:
    launcher = FaultOutcome("kill the launcher", "kill", 30, stood_still_seconds=2.0, resumed=True, lost_steps=4)
    rows = summarize([GOOD, launcher, FaultOutcome("kill rank 2", "kill", 40, lost_steps=10, broken=["no"])])
    assert [(row[0], row[1], row[5], row[-1]) for row in rows] == [
        ("kill", "2", "20", "1"),
        ("kill the launcher", "1", "4", "1"),
    ]
