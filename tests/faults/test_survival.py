"""Faults 1 and 3: kill -9 of one rank, then of the launcher. The run goes on and ends as one that was left alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.commands import starting, write_task
from tests.faults.survival import (
    EVERY,
    MEMBERS,
    TASK,
    Member,
    largest_difference,
    marked,
    printed,
    resumed,
    uninterrupted,
    when,
)
from tests.launching import Running, alive, until

pytestmark = [pytest.mark.faults, pytest.mark.row(1)]
Record = Callable[[str, object], None]


@pytest.mark.row(1, 3)
@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_kill_9_of_a_rank_and_of_the_launcher(
    member: Member, tmp_path: Path, kept: Path, seed: int, record_property: Record
) -> None:
    devices, draw = member.devices(seed), random.Random(f"{member} {seed}")
    rank = draw.randrange(devices)
    fault = {"kind": "kill", "rank": rank, "step": EVERY + draw.randrange(8), "delay": draw.random() / 20}
    fault["later"] = draw.randrange(1, 12)
    write_task(tmp_path, TASK)
    with starting(tmp_path, *member.words(devices, "--max-restarts", "1"), FAULT=json.dumps(fault)) as running:
        until(lambda: marked(tmp_path, "later") == devices or running.launcher.poll() is not None)
        assert running.launcher.poll() is None, running.finish().err
        recovered = when(tmp_path, "began-0")
        time.sleep(draw.random() / 20)
        killed = time.time()
        kill_the_launcher(running, record_property)
        said = running.finish().err
    first, again, rest = said.partition("restarting, 0 restarts left")
    assert again and f"rank {rank} was killed by SIGKILL" in first, said
    record_property("1: recovery after a rank, s", recovered - when(tmp_path, f"killed-{rank}"))
    record_property("1: steps lost", lost(printed(first), printed(rest)))
    # Where bits do not depend on it, the run goes on with a device more or less.
    after = 7 - devices if member.anywhere else devices
    ended, steps = resumed(tmp_path, member, after)
    record_property("1: recovery after the launcher, s", when(tmp_path, "began-0") - killed)
    record_property("1: steps lost", lost(printed(rest), steps))
    want = uninterrupted(member, devices, kept)
    record_property("1: max|Δloss|", largest_difference(ended, want))
    record_property("1: weights that differ", int(ended.digest != want.digest))
    assert ended == want


def lost(before: list[int], after: list[int]) -> int:
    """Steps that were made twice. A save waits for the one before it, so they are fewer than two intervals."""
    number = before[-1] - after[0] + 1
    assert 0 <= number < 2 * EVERY, (before, after)
    return number


def kill_the_launcher(running: Running, record_property: Record) -> None:
    """And see that nothing of it stays: no process, no port, no shared memory."""
    workers = running.workers()
    assert workers
    ports = {c.laddr.port for w in workers for c in w.net_connections() if c.status == psutil.CONN_LISTEN}
    running.launcher.kill()
    start = time.monotonic()
    until(lambda: not alive(workers))
    record_property("3: until the last worker is gone, s", time.monotonic() - start)
    # The last thread of a process that has ended may still be closing its files.
    until(lambda: not ports & listening())
    left = [path.stat().st_size for w in workers for path in Path("/dev/shm").glob(f"tutti-{w.pid}-*")]
    for name, value in (("orphans", alive(workers)), ("ports left open", ports & listening())):
        record_property(f"3: {name}", len(value))
    record_property("3: bytes of shared memory left", sum(left))
    assert not left


def listening() -> set[int]:
    """Ports on this host that somebody listens on."""
    return {c.laddr.port for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN}
