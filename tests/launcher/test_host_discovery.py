"""Slots for ranks of elastic jobs: lines of the discovery script, and slots that failures take."""

from __future__ import annotations

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
