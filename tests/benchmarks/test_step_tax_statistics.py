"""The statistics and the verdict of benchmarks/step_tax.py, and one real run of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paired() -> Any:
    return _load("paired")


@pytest.fixture(scope="module")
def step_tax() -> Any:
    return _load("step_tax")


def _load(name: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def _drifting(rounds: int) -> Any:
    """Reference times that rise from 1 to 3 while the race goes on, in two launches."""
    return np.linspace(1.0, 3.0, rounds).reshape(2, -1)


def test_a_drift_of_the_machine_cancels(paired: Any) -> None:
    noise = np.random.default_rng(3).normal(1.0, 0.02, size=(2, 200))
    slower = paired.paired_ratio(1.05 * noise * _drifting(400), _drifting(400))
    assert slower.low <= slower.median <= slower.high
    assert slower.low > 1.045 and slower.high < 1.055
    assert slower.above(1.02) and not slower.above(1.05)


def test_the_pairs_stay_together(paired: Any) -> None:
    """Ratio of medians and unpaired resampling would both give a wide interval here; the pairs are all equal."""
    reference = np.random.default_rng(5).uniform(1.0, 100.0, size=(1, 50))
    ratio = paired.paired_ratio(2.0 * reference, reference)
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_the_interval_covers_the_true_median(paired: Any) -> None:
    """A 95 % interval holds the truth in about 95 of 100 draws; 88 or fewer has a chance below 0.5 %."""
    drawn = np.random.default_rng(7).lognormal(0.0, 0.3, size=(200, 60))
    ratios = [paired.paired_ratio(row[None], np.ones((1, 60)), seed) for seed, row in enumerate(drawn)]
    held = sum(ratio.low <= 1.0 <= ratio.high for ratio in ratios)
    assert 176 <= held < 200


def test_the_luck_of_a_launch_widens_the_interval(paired: Any) -> None:
    """Rounds that agree to 0.1 % cannot make up for launches that differ by 20 %."""
    noise = np.random.default_rng(9).normal(1.0, 0.001, size=(4, 250))
    luck = np.array([[0.9], [0.98], [1.02], [1.1]])
    ratio = paired.paired_ratio(luck * noise, np.ones((4, 250)))
    assert ratio.low < 0.99 and ratio.high > 1.01


def test_a_reference_against_itself_is_one(paired: Any) -> None:
    ratio = paired.paired_ratio(_drifting(10), _drifting(10))
    assert (ratio.median, ratio.low, ratio.high) == (1.0, 1.0, 1.0)
    assert not ratio.above(1.0)


def test_an_interval_around_the_limit_is_not_above_it(paired: Any) -> None:
    times = np.array([[0.9, 1.5] * 50])
    ratio = paired.paired_ratio(times, np.ones((1, 100)))
    assert ratio.low <= 1.02 <= ratio.high
    assert not ratio.above(1.02)


@pytest.mark.parametrize("shapes", [((1, 3), (1, 4)), ((1, 1), (1, 1)), ((4,), (4,))])
def test_unpaired_times_are_refused(paired: Any, shapes: Any) -> None:
    with pytest.raises(ValueError, match="paired times"):
        paired.paired_ratio(np.ones(shapes[0]), np.ones(shapes[1]))


def test_orders_are_agreed_and_every_place_is_had(paired: Any) -> None:
    orders = [paired.order(6, 0, 0, turn) for turn in range(200)]
    assert orders == [paired.order(6, 0, 0, turn) for turn in range(200)]
    assert all(sorted(row) == list(range(6)) for row in orders)
    first = np.bincount([row[0] for row in orders], minlength=6)
    assert first.min() > 10
    assert orders != [paired.order(6, 1, 0, turn) for turn in range(200)]
    assert orders != [paired.order(6, 0, 1, turn) for turn in range(200)]


def _results(name: str, low: float, distance: float) -> dict[str, Any]:
    return {"mlp": {"contestants": {name: {"low": low, "high": low + 0.1, "weight_distance": distance}}}}


@pytest.mark.parametrize("name", ["tutti-step", "tutti-loop", "horovod"])
def test_tutti_is_judged_by_the_lower_end(step_tax: Any, name: str) -> None:
    assert step_tax.failures(_results(name, 1.019, 0.0), 1.02) == []
    (found,) = step_tax.failures(_results(name, 1.021, 0.0), 1.02)
    assert "mlp" in found and name in found and "1.021" in found


def test_others_and_quick_runs_are_not_judged_by_time(step_tax: Any) -> None:
    assert step_tax.failures(_results("fabric", 9.0, 0.0), 1.02) == []
    assert step_tax.failures(_results("tutti-step", 9.0, 0.0), None) == []


@pytest.mark.parametrize("distance", [2e-5, float("nan"), float("inf")])
def test_other_weights_are_a_failure_at_any_speed(step_tax: Any, distance: float) -> None:
    (found,) = step_tax.failures(_results("fabric", 0.5, distance), None)
    assert "fabric" in found and "weights" in found


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "step_tax.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_two_processes_race_and_train_the_same_weights(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = _run(
        "--quick", "--workloads", "mlp", "--contestants", "ddp,ddp-again", "--launches", "1", "--json", str(report)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    rows = found["workloads"]["mlp"]["contestants"]
    assert list(rows) == ["ddp", "ddp-again"] and found["workloads"]["mlp"]["blocks"] == 8
    assert rows["ddp"]["ratio"] == 1.0 and rows["ddp-again"]["ms"] > 0
    assert rows["ddp-again"]["weight_distance"] == 0.0
    assert found["hardware"]["cores"] == os.cpu_count() and found["failures"] == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--workloads", "resnet"], "resnet"),
        (["--contestants", "fabric"], "ddp"),
        (["--rounds", "1"], "--rounds"),
        (["--launches", "0"], "--launches"),
        (["--quick", "--save"], "--save"),
        (["--json", "missing/folder/out.json"], "missing/folder"),
    ],
)
def test_what_cannot_be_run_is_refused(step_tax: Any, capsys: Any, flags: list[str], named: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        step_tax.main(flags)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
