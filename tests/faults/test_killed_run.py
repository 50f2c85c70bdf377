"""Fault 3: the launcher of a run is killed in the middle of training. Nothing of it stays behind."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.commands import starting, tutti, write_task
from tests.launching import alive, until

pytestmark = pytest.mark.faults

SHARED_MEMORY = Path("/dev/shm")


def segments(owners: list[psutil.Process]) -> list[Path]:
    """Shared memory with a name of one of these processes."""
    return [path for owner in owners for path in SHARED_MEMORY.glob(f"tutti-{owner.pid}-*")]


def steps(folder: Path) -> int:
    """The last step on record."""
    file = folder / "out" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


@pytest.mark.parametrize("strategy", ["mirrored", "mirrored:algorithm=native", "model_parallel"])
def test_kill_9_of_the_launcher_in_the_middle(strategy: str, tmp_path: Path, seed: int) -> None:
    devices = 4
    words = ["train", "digits", "--strategy", strategy, "--devices", str(devices), "--epochs", "10000"]
    with starting(tmp_path, *words, "--out", "out", "--log-every", "1") as running:
        until(lambda: steps(tmp_path) >= 3 or running.launcher.poll() is not None)
        time.sleep(random.Random(seed).random() / 4)
        workers = running.workers()
        assert running.launcher.poll() is None, running.launcher.communicate()
        assert len(workers) == devices
        ports = {c.laddr.port for w in workers for c in w.net_connections() if c.status == psutil.CONN_LISTEN}
        running.launcher.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: not alive(workers))
        # The promise itself: gone within two seconds.
        assert time.monotonic() - killed <= 2
    assert not segments(workers)
    # The last thread of a process that has ended may still be closing its files.
    until(lambda: not ports & listening())


def listening() -> set[int]:
    """Ports on this host that somebody listens on."""
    return {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("body", "code"), [("", 0), ("def loss(model, batch):\n    1 / 0\n", 1)])
def test_a_finished_run_leaves_nothing(body: str, code: int, tmp_path: Path) -> None:
    before = set(SHARED_MEMORY.glob("tutti-*"))
    own = write_task(tmp_path, body)
    result = tutti(tmp_path, "train", own, "--devices", "4", "--batch-size", "12", "--steps", "3", "--out", "out")
    assert result.code == code, result.err
    assert not list((tmp_path / "temporary").iterdir()), "the store of a finished run is left"
    named = {
        path for path in set(SHARED_MEMORY.glob("tutti-*")) - before if psutil.pid_exists(int(path.name.split("-")[1]))
    }
    assert set(SHARED_MEMORY.glob("tutti-*")) - before <= named, "shared memory of a process that has ended is left"


def test_the_store_of_a_killed_launcher_is_private_and_small(tmp_path: Path) -> None:
    own = write_task(tmp_path)
    words = ["train", own, "--devices", "3", "--batch-size", "12", "--epochs", "100000", "--out", "out"]
    with starting(tmp_path, *words) as running:
        until(lambda: steps(tmp_path) >= 3 or running.launcher.poll() is not None)
        workers = running.workers()
        running.launcher.kill()
        until(lambda: not alive(workers))
    [store] = (tmp_path / "temporary").iterdir()
    assert store.stat().st_mode & 0o077 == 0
    assert sum(file.stat().st_size for file in store.rglob("*")) < 1 << 20
