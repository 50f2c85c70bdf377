"""Faults 1 and 4: a run that is killed, or asked to stop, ends with the weights of one that never was."""

from __future__ import annotations

import json
import random
import signal
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.faults.commands import starting, write_task
from tests.launching import Running, until

pytestmark = pytest.mark.faults

STEPS, EVERY = 60, 10
SLOW = """
def loss(model, batch):
    inputs, labels = batch
    time.sleep(0.02 / 4)
    return nn.functional.cross_entropy(model(inputs), labels)
"""
# strategy, devices before, devices after
PLACES = [("mirrored", 3, 4), ("model_parallel", 3, 2), ("local_sgd:period=4", 4, 3)]
OPTIONS = (
    *("--workers", "4", "--batch-size", "8", "--steps", str(STEPS), "--optimizer", "adam:lr=0.01", "--reproducible"),
    *("--checkpoint-every", f"{EVERY}st", "--eval-every", "none", "--out", "out", "--timeout", "30"),
)


def words(strategy: str, devices: int, *more: str) -> tuple[str, ...]:
    return ("train", "own.py:task", *OPTIONS, "--strategy", strategy, "--devices", str(devices), *more)


def digest(folder: Path) -> str:
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["exit_code"]) == (STEPS, 0)
    return str(summary["weights_sha256"])


@cache
def uninterrupted(strategy: str) -> str:
    with TemporaryDirectory() as folder:
        write_task(Path(folder))
        single = strategy if strategy.startswith("local_sgd") else "single"
        with starting(Path(folder), *words(single, 1)) as running:
            assert running.finish().code == 0
        return digest(Path(folder))


def saved(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    paths = (folder / "out" / "checkpoints").glob("step-????????/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in paths)


def wait_for_a_save(running: Running, seed: int) -> None:
    wanted = EVERY * random.Random(seed).randrange(1, STEPS // EVERY - 1)
    until(lambda: max(saved(running.folder), default=0) >= wanted or running.launcher.poll() is not None)
    assert running.launcher.poll() is None, running.finish().err


def workers_of(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.launcher.pid).children()


def continued(folder: Path, strategy: str, devices: int) -> str:
    with starting(folder, *words(strategy, devices, "--resume", "out")) as running:
        result = running.finish()
        assert result.code == 0, result.err
    return digest(folder)


@pytest.mark.parametrize(("strategy", "before", "after"), PLACES)
def test_kill_9_of_the_whole_run(strategy: str, before: int, after: int, tmp_path: Path, seed: int) -> None:
    write_task(tmp_path, SLOW)
    with starting(tmp_path, *words(strategy, before)) as running:
        wait_for_a_save(running, seed)
        workers = workers_of(running)
        running.launcher.kill()
        running.launcher.wait()
        until(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))
    assert continued(tmp_path, strategy, after) == uninterrupted(strategy)


@pytest.mark.parametrize(("strategy", "devices"), [(strategy, before) for strategy, before, _ in PLACES])
def test_kill_9_of_one_rank_restarts_from_the_last_save(strategy: str, devices: int, tmp_path: Path, seed: int) -> None:
    write_task(tmp_path, SLOW)
    with starting(tmp_path, *words(strategy, devices, "--max-restarts", "2")) as running:
        wait_for_a_save(running, seed)
        victim = random.Random(seed).randrange(devices)
        next(w for w in workers_of(running) if w.environ().get("RANK", str(victim)) == str(victim)).kill()
        result = running.finish()
    assert result.code == 0, result.err
    assert "was killed by SIGKILL" in result.err and "starting again, 1 restarts left" in result.err
    assert digest(tmp_path) == uninterrupted(strategy)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)], ids=["term", "usr1", "int"]
)
@pytest.mark.parametrize(("strategy", "before", "after"), [*PLACES, ("single", 1, 2)])
def test_asked_to_stop(
    strategy: str, before: int, after: int, number: signal.Signals, code: int, tmp_path: Path, seed: int
) -> None:
    write_task(tmp_path, SLOW)
    with starting(tmp_path, *words(strategy, before)) as running:
        wait_for_a_save(running, seed)
        running.launcher.send_signal(number)
        result = running.finish()
    assert result.code == code, result.err
    assert "Traceback" not in result.err and "--resume" in result.err
    stopped = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-2])["step"]
    assert max(saved(tmp_path)) == stopped, "a step was lost"
    other = "mirrored" if strategy == "single" else strategy
    assert continued(tmp_path, other, after) == uninterrupted(strategy)
