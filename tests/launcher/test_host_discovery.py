"""Slots for ranks of elastic jobs: lines of the discovery script, and slots that failures take."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.launching import alive, until
from tutti.errors import UsageError
from tutti.launcher.host_discovery import SlotTable, parse_slots


@pytest.mark.parametrize("text", ["localhost:x", "localhost", "far.example:2"])
def test_lines_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="host discovery script"):
        parse_slots(text, None)


def test_a_failure_takes_a_slot_for_longer_each_time() -> None:
    table = SlotTable(None, 2, None, (10, 15), lambda _: None)
    table.fail("localhost", 0.0)
    assert [table.slots(now)["localhost"] for now in (1.0, 9.0, 11.0)] == [1, 1, 2]
    table.fail("localhost", 20.0)
    assert [table.slots(now)["localhost"] for now in (34.0, 36.0)] == [1, 2]


def test_without_a_cool_down_a_slot_is_lost_for_good() -> None:
    table = SlotTable(None, 2, None, None, lambda _: None)
    table.fail("localhost", 0.0)
    assert table.slots(1e9) == {"localhost": 1}


def test_a_script_that_cannot_be_run_any_more_leaves_the_hosts_as_they_were(tmp_path: Path) -> None:
    script, told = tmp_path / "discover.sh", list[str]()
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    table = SlotTable(script, 1, None, None, told.append)
    script.unlink()
    for now in (0.0, 1.0, 2.0):
        table.poll(now)
    assert table.slots(2.0) == {"localhost": 2}
    assert len(told) == 1 and "cannot be run" in told[0] and "still hold" in told[0]


def polled(table: SlotTable, slots: int) -> bool:
    table.poll(time.monotonic())
    return table.slots(0.0) == {"localhost": slots}


def test_a_process_that_the_script_leaves_behind_stalls_nothing(tmp_path: Path) -> None:
    """The process keeps the script's standard output open, and outlives the reading of it."""
    script, pids = tmp_path / "discover.sh", tmp_path / "pids"
    script.write_text(
        f"#!/bin/sh\nsleep 20 &\necho $! >> {pids}\nslots=$(wc -l < {pids})\necho localhost:$slots\n"
        "[ $slots -lt 3 ] || exec sleep 20\n"
    )
    script.chmod(0o755)
    table, left = SlotTable(script, 1, None, None, pytest.fail), list[psutil.Process]()
    try:
        until(lambda: polled(table, 2))
        until(lambda: polled(table, 2) and len(pids.read_text().split()) == 3)
        table.close()
    finally:
        left += [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        still = alive(left)
        for process in left:
            process.kill()
    assert len(still) == 3


def test_output_larger_than_a_pipe_is_read(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:1\n")
    script.chmod(0o755)
    table = SlotTable(script, 1, None, None, pytest.fail)
    script.write_text("#!/bin/sh\nyes localhost:1 | head -n 20000\n")
    until(lambda: polled(table, 20000))
    table.close()
