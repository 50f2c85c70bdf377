"""Time to a target survives a resume: seconds go on from what was spent, and every line has a time."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from tests.faults.commands import tutti, write_task


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return found


def test_the_clock_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    own, before = write_task(tmp_path), time.time()
    words = ("--workers", "2", "--batch-size", "4", "--checkpoint-every", "2st", "--eval-every", "2st")
    first = tutti(tmp_path, "train", own, *words, "--devices", "1", "--steps", "4", "--out", "run")
    assert first.code == 0, first.err
    spent, started = summary(tmp_path)["seconds"], summary(tmp_path)["started"]
    assert before <= started <= time.time() and spent > 0
    # As if the last save had never been, and step 4 were lost.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    again = tutti(tmp_path, "train", own, *words, "--devices", "2", "--steps", "6", "--resume", "run")
    assert again.code == 0, again.err
    found = lines(tmp_path)
    [resume] = [line for line in found if line["group"] == "resume"]
    assert (resume["from"], resume["lost"]) == (2, 2) and resume["seconds"] >= spent - 1e-5
    seconds, times = ([line[name] for line in found] for name in ("seconds", "time"))
    assert seconds == sorted(seconds) and times == sorted(times)
    assert before <= times[0] and times[-1] <= time.time() and times[0] >= started - 0.01
    assert [line["step"] for line in found if line["group"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert summary(tmp_path)["started"] == started
    assert summary(tmp_path)["seconds"] >= seconds[-1] - 1e-5 > spent - 1e-5
