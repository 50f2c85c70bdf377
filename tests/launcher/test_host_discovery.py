"""Slots for ranks of elastic jobs: lines of the discovery script, and slots that failures take."""

from __future__ import annotations

from pathlib import Path

import pytest

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
