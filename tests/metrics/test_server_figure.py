"""The figure of a run's parameter servers: its bars, curves and titles are the numbers that it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import pytest

from tutti.metrics.server_figure import server_figure, staleness_bars, total_staleness, update_rates

SVG = "{http://www.w3.org/2000/svg}"
TWO: list[Mapping[str, Any]] = [
    {"staleness": {"0": 10, "3": 30}, "bytes": 3 << 20, "updates_per_second": 120.0},
    {"staleness": {"3": 40}, "bytes": 1 << 20, "updates_per_second": 118.0},
]
POINTS = [(0.5 * step, 10.0 * step) for step in range(200)]


def texts(picture: bytes) -> str:
    root = ElementTree.fromstring(picture)
    return "\n".join("".join(each.itertext()) for each in root.iter(f"{SVG}text"))


def test_the_figure_states_what_the_servers_measured() -> None:
    found = texts(server_figure(TWO, POINTS, "a <run>"))
    for text in (
        *("a <run>", "staleness of updates", "mean 2.6, 99 % at most 3, largest 3", "mean 20"),
        *("4.0 MiB in all, read and pushed", "1.0 MiB, 118 updates/s", "3.0 MiB, 120 updates/s"),
    ):
        assert text in found


def test_equal_runs_have_equal_files() -> None:
    assert server_figure(TWO, POINTS, "") == server_figure(TWO, POINTS, "") != server_figure(TWO, POINTS[:9], "")


def test_rates_are_even_where_updates_come_evenly() -> None:
    assert {rate for _, rate in update_rates(POINTS)} == {20.0}


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], POINTS[:2]])
def test_short_runs_and_synchronous_servers_have_a_figure_too(points: list[tuple[float, float]]) -> None:
    assert "staleness of updates" not in texts(server_figure([{"bytes": 0}], points, ""))


def test_the_last_bar_has_a_long_tail() -> None:
    seen = total_staleness([{"staleness": {"0": 600, "1": 400, "2": 3, "700": 1}}])
    assert staleness_bars(seen) == [("0", 600), ("1", 400), ("2+", 4)]


def test_a_wide_distribution_has_few_bars() -> None:
    seen = total_staleness([{"staleness": {str(tau): 1 for tau in range(1000)}}])
    bars = staleness_bars(seen)
    assert len(bars) == 32 and sum(count for _, count in bars) == 1000
