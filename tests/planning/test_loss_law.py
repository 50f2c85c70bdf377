"""The law of the loss: exact data, noisy data, regions, held-out runs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tutti.cli import loss_law_command
from tutti.cli.app import main
from tutti.errors import UsageError
from tutti.planning.loss_law import FittedLoss, LossLaw, fit_loss, larger_run_spread, loss_band, loss_regions

TRUE = LossLaw(1.8172, 482.01, 0.3478, 2085.43, 0.3658)
SIZES, DATA = (axis.ravel() for axis in np.meshgrid(np.geomspace(5e7, 1e10, 6), np.geomspace(5e8, 2e11, 6)))


def test_constants_of_exact_losses_are_found() -> None:
    law = fit_loss(SIZES, DATA, TRUE.loss(SIZES, DATA), draws=0).law
    for name in ("irreducible", "size_exponent", "data_exponent"):
        assert getattr(law, name) == pytest.approx(getattr(TRUE, name), rel=1e-3)


def test_hestness_example_with_a_floor_is_found_from_data_alone() -> None:
    data = np.geomspace(1e4, 1e6, 9)
    true = LossLaw(0.05, 0.0, 0.0, 10.0, 0.35)
    assert true.loss(np.ones(3), np.array([1e4, 1e5, 1e6])) == pytest.approx([0.448107, 0.227828, 0.129433], abs=1e-6)
    law = fit_loss(np.ones(9), data, true.loss(np.ones(9), data), draws=0).law
    assert (law.size_factor, law.size_exponent) == (0, 0)
    assert (law.irreducible, law.data_factor, law.data_exponent) == pytest.approx((0.05, 10.0, 0.35), rel=1e-2)


def test_intervals_and_bands_hold_the_truth_of_noisy_runs() -> None:
    noise = np.exp(0.01 * np.random.default_rng(2).standard_normal(12))
    data = np.geomspace(1e4, 1e7, 12)
    true = LossLaw(0.5, 0.0, 0.0, 20.0, 0.3)
    loss = true.loss(np.ones(12), data) * noise
    fitted = fit_loss(np.ones(12), data, loss, draws=40)
    low, high = fitted.interval("data_exponent")
    assert low <= 0.3 <= high and 0.002 < high - low < 0.3
    below, above = loss_band(fitted, larger_run_spread(fitted, np.ones(12), data, loss), np.ones(1), np.array([4e7]))
    assert below[0] <= true.loss(np.ones(1), np.array([4e7]))[0] <= above[0]


def test_too_few_runs_for_their_draws_have_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    law = LossLaw(0.5, 0.0, 0.0, 20.0, 0.3)
    lost = FittedLoss(law, (law, law, LossLaw(0.5, 0.0, 0.0, np.inf, 200.0)))
    monkeypatch.setattr(loss_law_command, "fit_loss", lambda *given: lost)
    words = write_runs(tmp_path, 6)
    assert main([*words, "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["constants"]["data_factor"] == {"value": 20.0, "low": None, "high": None}
    assert found["constants"]["irreducible"]["low"] == 0.5 and found["held_out"][0]["band"] == [None, None]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "nan" not in said and "none: the runs are too few" in said and "0 of 0 within" in said


def test_spread_of_larger_runs_is_their_error_where_they_miss_the_law_by_more() -> None:
    data = np.geomspace(1e4, 1e7, 12)
    loss = LossLaw(0.5, 0.0, 0.0, 20.0, 0.3).loss(np.ones(12), data)
    loss[-1] *= np.exp(0.2)
    fitted = fit_loss(np.ones(12), data, loss, draws=0)
    assert larger_run_spread(fitted, np.ones(12), data, loss) == pytest.approx(0.2, rel=1e-2)
    assert larger_run_spread(fitted, np.ones(4), data[:4], loss[:4]) < 0.2


def test_regions() -> None:
    data = np.geomspace(1e2, 1e9, 16)
    law = LossLaw(1.0, 0.0, 0.0, 30.0, 0.4)
    loss = np.minimum(law.loss(np.ones(16), data), 2.3)
    found = loss_regions(law, np.ones(16), data, loss)
    assert found[0] == "small data" and found[-1] == "irreducible" and "power law" in found
    assert found == sorted(found, key=["small data", "power law", "irreducible"].index)


@pytest.mark.parametrize(
    ("sizes", "data", "told"),
    [
        ([1, 1, 1], [1, 2, 3], "3 runs cannot fit a law of 3 constants"),
        ([1, 1, 1, 1], [1, 1, 2, 2], "2 amounts of data"),
        ([1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6], "2 model sizes"),
    ],
)
def test_fewer_points_than_constants_are_refused(sizes: list[float], data: list[float], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        fit_loss(np.array(sizes, float), np.array(data, float), np.ones(len(data)))


def write_runs(folder: Path, count: int, **change: object) -> list[str]:
    """Runs of one model whose loss is 0.5 + 20/D^0.3; ``change`` is made in the summary of the last."""
    for number, data in enumerate(np.geomspace(1e3, 1e6, count).tolist()):
        run = folder / f"run{number}"
        run.mkdir()
        (run / "config.toml").write_text('task = "digits"\n')
        summary = {"task": "digits", "parameters": 100, "samples": data, "eval": {"loss": 0.5 + 20 / data**0.3}}
        summary |= {"exit_code": 0} | (change if number == count - 1 else {})
        (run / "summary.json").write_text(json.dumps(summary))
    return ["plan", "--law", str(folder)]


def test_the_command_predicts_the_largest_run_from_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_runs(tmp_path, 6)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["constants"]["data_exponent"]["value"] == pytest.approx(0.3, rel=1e-2)
    (checked,) = found["held_out"]
    assert checked["run"].endswith("run5") and checked["predicted"] == pytest.approx(checked["loss"], rel=1e-3)
    assert main(words) == 0
    assert "β, of samples" in capsys.readouterr().out


def test_the_command_says_so_where_the_largest_run_is_needed_for_the_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(write_runs(tmp_path, 4)) == 0
    assert "without them, 3 runs cannot fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"exit_code": 6}, 6, "diverged"),
        ({"exit_code": 75, "task": None}, 2, "has not finished"),
        ({"task": "text"}, 2, "several tasks"),
        ({"eval": None}, 2, "others have none"),
        ({"parameters": None}, 2, "no number of parameters"),
    ],
)
def test_runs_that_say_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], code: int, told: str
) -> None:
    assert main(write_runs(tmp_path, 5, **change)) == code
    assert told in capsys.readouterr().err


def test_law_and_plan_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert main(["plan", "digits", *write_runs(tmp_path, 5)[1:]]) == 2
    assert "makes no plan" in capsys.readouterr().err
