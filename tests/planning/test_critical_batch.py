"""The critical batch from runs' metrics, and ``tutti noise``, which prints it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tutti.cli.app import main
from tutti.errors import ExitCode, UsageError
from tutti.planning.critical_batch import critical_batch, noise_evidence
from tutti.planning.recipe import read_recipe


def run_directory(
    path: Path,
    batch: int = 64,
    noise: float | None = 200.0,
    samples: int | None = None,
    target: float | None = None,
    loss: float | None = 0.1,
) -> Path:
    """A run whose noise scale was ten times smaller in its first half."""
    path.mkdir()
    generator = random.Random(0)
    lines: list[dict[str, Any]] = [{"group": "warning", "text": "a word"}]
    for step in range(1, 81):
        line: dict[str, Any] = {"group": "train", "step": step, "loss": loss if step == 80 else 1.0}
        if noise is not None and step % 2:
            square = 1 + 0.2 * generator.gauss(0, 1)
            trace = noise * (1 if step > 40 else 0.1) * (1 + 0.2 * generator.gauss(0, 1))
            line |= {"noise/trace": trace, "noise/square": square}
            line |= {"noise/adam/trace": 3 * trace, "noise/adam/square": square}
        lines.append(line)
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{half a li")
    summary: dict[str, Any] = {"task": "digits", "global_batch_size": batch}
    if target is not None:
        before = None if samples is None else samples - 100
        summary["target"] = {"metric": "accuracy", "value": target, "samples": samples, "samples_before": before}
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def test_the_noise_of_the_last_half_counts(tmp_path: Path) -> None:
    run = noise_evidence(run_directory(tmp_path / "a"))
    found = critical_batch([run])
    assert found.critical_batch == pytest.approx(200, rel=0.15) and found.band[0] < 200 < found.band[1]
    assert found.recipe is None and found.basis == "gradient noise alone"
    assert critical_batch([run], optimizer_noise=True).critical_batch == pytest.approx(600, rel=0.15)
    assert critical_batch([noise_evidence(tmp_path / "a", last=1.0)]).critical_batch < 150


def test_samples_to_the_target_decide(tmp_path: Path) -> None:
    runs = []
    for number, batch in enumerate((16, 64, 256, 1024)):
        # The worked example: E_min 64,000 and B_crit 64; each evaluation is 100 samples after the one before.
        samples = round(64000 * (1 + batch / 64)) + 50
        path = run_directory(tmp_path / str(number), batch, noise=None, samples=samples, target=0.9)
        runs.append(noise_evidence(path))
    found = critical_batch(runs)
    assert found.critical_batch == pytest.approx(64, rel=0.1) and found.band[0] < 64 < found.band[1]
    assert found.recipe is not None and found.recipe.samples_min == pytest.approx(64000, rel=0.1)
    assert found.recipe.samples_at(256) == pytest.approx(320000, rel=0.1)


def test_one_batch_and_the_noise_make_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_directory(tmp_path / "a", 64, samples=5000, target=0.9)
    assert main(["noise", str(path), "--recipe", str(tmp_path / "recipe.json"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    recipe = read_recipe(tmp_path / "recipe.json")
    assert (recipe.metric, recipe.value, len(recipe.draws)) == ("accuracy", 0.9, 256)
    assert said["critical_batch"] == recipe.critical_batch and said["samples_min"] == recipe.samples_min
    assert recipe.critical_batch == pytest.approx(200, rel=0.3)
    assert recipe.samples_at(64) == pytest.approx(4950, rel=0.05)
    assert said["noise"]["low"] < said["noise"]["scale"] < said["noise"]["high"]


def test_the_table_and_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    paths = [str(run_directory(tmp_path / str(batch), batch, samples=5000, target=0.9)) for batch in (32, 64)]
    assert main(["noise", *paths, "--svg", str(tmp_path / "noise.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("critical batch ") and lines[0].endswith("2 batch sizes, and gradient noise")
    assert [line.split()[0] for line in lines[-2:]] == ["32", "64"]
    assert "samples to the target" in (tmp_path / "noise.svg").read_text() or (tmp_path / "noise.svg").stat().st_size


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([{"noise": None}], "such as tutti train digits --workers 8 --noise-every"),
        ([{"noise": None, "samples": 900, "target": 0.9}], "does not fix the two constants"),
        ([{"samples": None, "target": 0.9}], "a run did not reach its target"),
        ([{"samples": 900, "target": 0.9}, {"samples": 900, "target": 0.8}], "the runs have different targets"),
        ([{"noise": -50.0}], "the gradient is lost in its noise"),
    ],
)
def test_what_says_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: list[dict[str, Any]], words: str
) -> None:
    paths = [str(run_directory(tmp_path / str(number), **options)) for number, options in enumerate(made)]
    assert main(["noise", *paths]) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_diverged_ends_with_the_code_of_diverged_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_directory(tmp_path / "a", loss=None)
    assert main(["noise", str(path)]) == ExitCode.NON_FINITE
    assert "the run diverged" in capsys.readouterr().err
    # tutti train leaves no more than this of a run that has ended so.
    (path / "summary.json").write_text('{"exit_code": 6}')
    assert main(["noise", str(path)]) == ExitCode.NON_FINITE
    assert "the run diverged" in capsys.readouterr().err
    (path / "summary.json").write_text('{"exit_code": 5}')
    assert main(["noise", str(path)]) == 2 and "ended with exit code 5" in capsys.readouterr().err
    (path / "summary.json").unlink()
    (path / "config.toml").touch()
    assert main(["noise", str(path)]) == 2 and "has not ended, or was interrupted" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    path = run_directory(tmp_path / "a")
    for arguments, words in (
        ([], "no run is given"),
        ([str(tmp_path / "nothing")], "there is no run directory"),
        ([str(tmp_path / "empty")], "cannot read the run"),
        ([str(path), "--last", "0"], "--last is 0"),
        ([str(path), "--recipe", str(tmp_path / "r.json")], "noise and branches alone fix no number of samples"),
    ):
        assert main(["noise", *arguments]) == 2
        assert words in capsys.readouterr().err
    (path / "metrics.jsonl").write_bytes(b"\x00 no record\n[1]\n")
    with pytest.raises(UsageError, match=r"no step of the run can be read .*metrics\.jsonl"):
        noise_evidence(path)
    (path / "summary.json").write_text("[]")
    with pytest.raises(UsageError, match="has no global_batch_size"):
        noise_evidence(path)
