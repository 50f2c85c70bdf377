"""Fault 3: nothing of a run stays behind, however it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.commands import starting, tutti, write_task
from tests.launching import alive, until

pytestmark = [pytest.mark.faults, pytest.mark.row(3)]

SHARED_MEMORY = Path("/dev/shm")


def steps(folder: Path) -> int:
    """The last step on record."""
    file = folder / "out" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


PID = """
with open(os.path.join(HERE, f"pid-{RANK}"), "w") as file:
    file.write(str(os.getpid()))
"""


@pytest.mark.parametrize(("body", "code"), [("", 0), ("def loss(model, batch):\n    1 / 0\n", 1)])
def test_a_finished_run_leaves_nothing(body: str, code: int, tmp_path: Path) -> None:
    own = write_task(tmp_path, PID + body)
    result = tutti(tmp_path, "train", own, "--devices", "4", "--batch-size", "12", "--steps", "3", "--out", "out")
    assert result.code == code, result.err
    assert not list((tmp_path / "temporary").glob("tutti-*")), "the store of a finished run is left"
    pids = [file.read_text() for file in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert not [path for pid in pids for path in SHARED_MEMORY.glob(f"tutti-{pid}-*")]


def test_the_store_of_a_killed_launcher_is_private_and_small(tmp_path: Path) -> None:
    own = write_task(tmp_path)
    words = ["train", own, "--devices", "3", "--batch-size", "12", "--epochs", "100000", "--out", "out"]
    with starting(tmp_path, *words) as running:
        until(lambda: steps(tmp_path) >= 3 or running.launcher.poll() is not None)
        workers = running.workers()
        running.launcher.kill()
        until(lambda: not alive(workers))
    [store] = (tmp_path / "temporary").glob("tutti-*")
    assert store.stat().st_mode & 0o077 == 0
    assert sum(file.stat().st_size for file in store.rglob("*")) < 1 << 20
