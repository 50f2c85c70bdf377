"""Fault 28: processes that fetch ahead. One is killed; their rank is killed; everybody is asked to stop."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.faults.commands import complaint, starting, tutti, write_task
from tests.launching import alive, until

pytestmark = [pytest.mark.faults, pytest.mark.row(28)]

# Half of the items do it, in a loader process of rank {rank} alone.
BODY = """
class Samples(Samples):
    def __init__(self):
        self.pid = os.getpid()

    def __getitem__(self, index):
        if RANK == {rank} and index >= {first} and os.getpid() != self.pid:
            {action}
        return super().__getitem__(index)
"""
OPTIONS = ("--batch-size", "12", "--workers", "4", "--eval-every", "none", "--out", "out", "--timeout", "60")


def body(action: str, rank: int, first: int = 24) -> str:
    return BODY.format(action=action, rank=rank, first=first)


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("raise ValueError('a torn picture')", "ValueError: a torn picture"),
    ],
)
def test_a_loader_process_that_fails_is_named_with_its_rank(action: str, said: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(f"{action} {seed}")
    devices = draw.choice([1, 3, 4])
    rank, count = draw.randrange(devices), draw.choice([1, 2])
    own = write_task(tmp_path, body(action, rank))
    words = ("train", own, *OPTIONS, "--devices", str(devices), "--data-workers", str(count), "--epochs", "9")
    result = tutti(tmp_path, *words)
    assert result.code == 3, result.err
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["exit_code"] == 3
    first = complaint(result)[0]
    assert said in first and "Traceback" not in result.err
    if devices > 1:
        assert first.startswith(f"tutti: rank {rank} failed")
    if "ValueError" not in said:
        assert f"of rank {rank} {said}" in first and "loader process " in first


WAIT = "(open(os.path.join(HERE, f'ready-{os.getpid()}'), 'w').close(), signal.pause())"


def test_loader_processes_die_with_their_rank(tmp_path: Path, seed: int) -> None:
    own = write_task(tmp_path, body(WAIT, 0, first=0))
    with starting(tmp_path, "train", own, *OPTIONS, "--devices", "1", "--data-workers", "2") as running:
        running.wait_ready(2)
        loaders = running.workers()
        assert len(loaders) == 2
        running.launcher.kill()
        until(lambda: not alive(loaders))


def step(folder: Path) -> int:
    """The newest complete checkpoint's."""
    paths = folder.glob("out/checkpoints/step-????????/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in paths), default=0)


def test_signals_to_every_process_of_a_run_are_for_its_ranks(tmp_path: Path, seed: int) -> None:
    """As a terminal or a scheduler sends them: loader processes must live until their rank has taken its step."""
    own = write_task(tmp_path)
    words = ("train", own, *OPTIONS, "--devices", "3", "--data-workers", "2", "--epochs", "10000")
    with starting(tmp_path, *words, "--checkpoint-every", "2st") as running:
        until(lambda: step(tmp_path) or running.launcher.poll() is not None)
        everybody = running.workers()
        ranks = psutil.Process(running.launcher.pid).children()
        loaders = [process for process in everybody if process not in ranks]
        assert (len(ranks), len(loaders)) == (3, 9), "each rank with two loaders and its watchdog"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            for process in loaders:
                process.send_signal(number)
        # More steps than there are batches ahead.
        later = step(tmp_path) + 20
        until(lambda: step(tmp_path) > later or running.launcher.poll() is not None)
        running.launcher.send_signal(signal.SIGTERM)
        result = running.finish()
        until(lambda: not alive(everybody))
    assert result.code == 75, result.err
    assert "--resume" in result.err
