"""Fault 4: asked to stop within a step, within a save, and twice. The step is finished, the state saved."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.commands import starting, write_task
from tests.faults.survival import (
    EVERY,
    MEMBERS,
    TASK,
    Member,
    largest_difference,
    marked,
    metrics,
    printed,
    resumed,
    saved,
    uninterrupted,
)
from tests.launching import Running, until

pytestmark = [pytest.mark.faults, pytest.mark.row(4)]
MOMENTS = ("step", "save", "again")
SIGNALS = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130, signal.SIGUSR2: 75}


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_asked_to_stop(
    member: Member, tmp_path: Path, kept: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    devices, turn = member.devices(seed), seed + MEMBERS.index(member)
    draw, when = random.Random(f"stop {member} {seed}"), MOMENTS[turn % 3]
    number, code = list(SIGNALS.items())[turn // 3 % len(SIGNALS)]
    # Rank 0 has two micro-batches in every batch: between them it is in the middle of an accumulation.
    call = draw.randrange(2)
    fault = {"kind": "stop", "when": when, "call": call, "rank": 0 if call else draw.randrange(devices)}
    fault["step"] = draw.randrange(2 * EVERY, 4 * EVERY)
    write_task(tmp_path, TASK)
    with starting(tmp_path, *member.words(devices), FAULT=json.dumps(fault)) as running:
        wait(running, "began", devices)
        wait(running, "holding", int(when != "again"))
        start = time.monotonic()
        running.launcher.send_signal(number)
        if when == "again":
            wait(running, "saving", 1)
            running.launcher.send_signal(number)
        result = running.finish()
    assert "Traceback" not in result.err
    if when == "again":
        assert result.code in (128 + number, -number), result.err
        assert max(saved(tmp_path), default=0) <= printed(result.err)[-1]
    else:
        assert result.code == code, result.err
        assert "--resume" in result.err
        record_property("from signal to exit, s", time.monotonic() - start)
        # Nothing is done again: the newest checkpoint is of the last step that was made.
        last = max(record["step"] for record in metrics(tmp_path) if record["group"] == "train")
        record_property("steps lost", last - max(saved(tmp_path)))
        assert max(saved(tmp_path)) == last
    ended, _ = resumed(tmp_path, member, 7 - devices if member.anywhere else devices)
    want = uninterrupted(member, devices, kept)
    record_property("max|Δloss|", largest_difference(ended, want))
    record_property("weights that differ", int(ended.digest != want.digest))
    assert ended == want


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_scheduler_s_signals_save_and_leave_with_75(number: signal.Signals, devices: int, tmp_path: Path) -> None:
    """Slurm's ``--signal=USR1``, and SIGUSR2, which submitit sends."""
    own = write_task(tmp_path)
    words = ("train", own, "--devices", str(devices), "--workers", "3", "--batch-size", "6", "--steps", "100000")
    with starting(tmp_path, *words, "--eval-every", "none", "--out", "run") as running:
        until(lambda: metrics_of(tmp_path) or running.launcher.poll() is not None)
        running.launcher.send_signal(number)
        result = running.finish()
    assert result.code == 75 and "--resume" in result.err, result.err
    assert list(tmp_path.glob("run/checkpoints/step-*/manifest.json"))


def metrics_of(folder: Path) -> bool:
    path = folder / "run" / "metrics.jsonl"
    return path.is_file() and b"train" in path.read_bytes()


def wait(running: Running, name: str, ranks: int) -> None:
    until(lambda: marked(running.folder, name) >= ranks or running.launcher.poll() is not None)
    assert running.launcher.poll() is None, running.finish().err
