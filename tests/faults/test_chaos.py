"""``tutti chaos`` on real runs: what survives is said to, and what does not is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.disks import small_disk
from tests.faults.commands import starting, tutti, write_task
from tests.launching import Result, Running, alive, status, until
from tutti.chaos.following import checkpoints, unfinished
from tutti.cli.app import main

pytestmark = pytest.mark.faults

TRAIN = (
    *("train", "own.py:task", "--devices", "3", "--workers", "4", "--batch-size", "8", "--reproducible"),
    *("--optimizer", "adam:lr=0.01", "--checkpoint-every", "10st", "--eval-every", "none", "--timeout", "60"),
)
SLOW = """
def loss(model, batch):
    inputs, labels = batch
    time.sleep(0.005)
    return nn.functional.cross_entropy(model(inputs), labels)
"""
SOAKED = ["kill", "kill the launcher", "stop", "slow", "terminate", "corrupt", "fill"]


def report(result: Result, code: int = 0) -> dict[str, Any]:
    assert result.code == code, result.out + result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_soak_ends_with_the_weights_of_a_run_without_faults(tmp_path: Path, seed: int) -> None:
    write_task(tmp_path, SLOW)
    with small_disk(tmp_path, "2m") as disk:
        words = ("--faults", str(len(SOAKED)), "--devices", "2,3,4", "--seed", str(seed), "--json", "--")
        command = (*TRAIN, "--steps", "250", "--max-restarts", "9", "--out", str(disk / "run"))
        result = tutti(tmp_path, "chaos", "soak", *words, "tutti", *command)
        told = report(result)
        assert told["survived"] and told["verdict"] == "equal bits"
        kinds = ["kill the launcher" if "launcher" in each["fault"] else each["kind"] for each in told["outcomes"]]
        assert sorted(kinds) == sorted(SOAKED)
        assert told["executed"] == told["steps"] + sum(each["lost_steps"] for each in told["outcomes"])
        assert told["steps"] == 250 and told["goodput"] == 250 / told["executed"]
        assert sum(f"/{len(SOAKED)} step" in line for line in result.err.splitlines()) == len(SOAKED), result.err
        assert not unfinished(disk / "run")
    assert not list((tmp_path / "temporary").glob("tutti-soak-*")), "the log of a good soak is kept"


@pytest.mark.full
def test_other_weights_are_told(tmp_path: Path, seed: int) -> None:
    write_task(tmp_path)
    (tmp_path / "other").mkdir()
    other = {"exit_code": 0, "steps": 30, "weights_sha256": "0" * 64}
    (tmp_path / "other" / "summary.json").write_text(json.dumps(other))
    # Without restarts: the run ends with code 5, and goes on from its checkpoint.
    words = ("chaos", "kill", "--reference", "other", "--at-step", "15", "--seed", str(seed), "--json", "--", "tutti")
    told = report(tutti(tmp_path, *words, *TRAIN, "--steps", "30", "--out", "run"), 9)
    assert told["verdict"] == "different" and not told["survived"]
    assert told["problems"] == ["the weights are not those of the uninterrupted run"]
    [outcome] = told["outcomes"]
    assert (outcome["exit_code"], outcome["resumed"], outcome["restarts"]) == (5, True, 0)
    assert 0 <= outcome["lost_steps"] <= 20 and outcome["noticed_seconds"] is not None


def test_a_full_disk(tmp_path: Path) -> None:
    write_task(tmp_path)
    with small_disk(tmp_path, "1m") as disk:
        command = (*TRAIN, "--steps", "60", "--out", str(disk / "run"))
        result = tutti(tmp_path, "chaos", "fill", "--json", "--", "tutti", *command)
        told = report(result)
        assert "3 saves in a row have failed" in result.err and "No space left on device" in result.err
        [outcome] = told["outcomes"]
        assert (outcome["exit_code"], outcome["resumed"], outcome["broken"]) == (8, True, [])
        assert [path.name for path in checkpoints(disk / "run")] == ["step-00000060", "step-00000050"]


@pytest.fixture
def act(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Does something to the run that goes on in ``out``, and gives the report."""

    def done(*words: str) -> dict[str, Any]:
        assert main(["chaos", *words, "--run", str(tmp_path / "out"), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        [outcome] = found["outcomes"]
        return found | outcome

    return done


def test_a_run_that_goes_on_already(tmp_path: Path, act: Callable[..., dict[str, Any]]) -> None:
    write_task(tmp_path)
    command = (*TRAIN, "--steps", "1000000", "--out", "out", "--max-restarts", "1", "--keep", "1")
    with starting(tmp_path, *command) as running:
        until(lambda: checkpoints(tmp_path / "out") or running.launcher.poll() is not None)
        ranks = psutil.Process(running.launcher.pid).children()
        stopped = act("stop", "--rank", "1", "--for", "0.2")
        # Not 0.2 s: the others finish the step in which a rank is stopped after its part of it.
        assert stopped["stood_still_seconds"] > 0 and stopped["noticed_seconds"] is None
        slowed = act("slow", "--rank", "2", "--for", "0.2", "--factor", "3")
        assert (slowed["restarts"], slowed["lost_steps"], slowed["noticed_seconds"]) == (0, 0, None)
        assert len(alive(ranks)) >= 3 and running.launcher.poll() is None
        killed = act("kill", "--rank", "0")
        assert (killed["restarts"], killed["resumed"], killed["exit_code"]) == (1, False, None)
        over = act("kill", "--rank", "launcher")
        assert (over["exit_code"], over["resumed"], over["broken"]) == (-9, False, [])


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    write_task(tmp_path)
    command = (*TRAIN, "--steps", "1000000", "--out", "out", "--keep", "1")
    with starting(tmp_path, "chaos", "stop", "--rank", "1", "--", "tutti", *command) as running:
        until(lambda: stopped(running) or running.launcher.poll() is not None)
        family = running.workers()
        running.launcher.terminate()
        result = running.finish()
        assert result.code == 143, result.err
        # The stopped rank was let go, so that the run could end in order.
        assert "State saved, continue with --resume" in result.err
        until(lambda: not alive(family))


def stopped(running: Running) -> bool:
    """Whether a process below this one is stopped."""
    return any(status(process) == psutil.STATUS_STOPPED for process in running.workers())
