"""``TUTTI_TETHER=stdin``: a launcher elsewhere signals a process over its standard input, whose end is the end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.covering import in_turn
from tests.faults.commands import write_task
from tests.forkserver import Process
from tests.launching import SAFETY_NET, SOURCE, until

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
RUN = """
import time
import tutti

tutti.init()
open("began", "w").close()
time.sleep(600)
"""


@contextmanager
def tethered(folder: Path, *words: str, **environ: str) -> Iterator[Process]:
    told = {**os.environ, "PYTHONPATH": str(SOURCE), "TUTTI_TETHER": "stdin", **environ}
    process = Process(["-m", "tutti", *words], folder, told, piped=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("how", "end"), in_turn(["rank", "launcher"], ["SIGUSR2", "the supervisor dies"]))
def test_train_saves_and_ends_with_its_supervisor(how: str, end: str, tmp_path: Path) -> None:
    own = write_task(tmp_path)
    devices, environ = ("1", RANK) if how == "rank" else ("2", {})
    words = ("train", own, "--workers", "2", "--batch-size", "6", "--steps", "100000", "--eval-every", "none")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with tethered(tmp_path, *words, "--devices", devices, "--out", "run", **environ) as process:
        until(lambda: process.poll() is not None or (metrics.is_file() and b"train" in metrics.read_bytes()))
        assert process.stdin is not None and process.poll() is None
        if end == "SIGUSR2":
            process.stdin.write(f"{int(signal.SIGUSR2)}\n".encode())
            process.stdin.flush()
        else:
            process.stdin.close()
        assert process.wait(SAFETY_NET) == 75
    assert list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 75


@pytest.mark.parametrize("environ", [RANK, {}], ids=["rank", "launcher"])
def test_run_ends_with_its_supervisor(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RUN)
    with tethered(tmp_path, "run", "script.py", **environ) as process:
        until(lambda: process.poll() is not None or (tmp_path / "began").exists())
        assert process.stdin is not None and process.poll() is None
        process.stdin.close()
        assert process.wait(SAFETY_NET) in (-signal.SIGTERM, 128 + signal.SIGTERM)
