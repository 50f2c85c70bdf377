"""The picture of a run's parameter servers: its bars and curves are the numbers that it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import pytest

from tutti.measure.servers import staleness, svg

SVG = "{http://www.w3.org/2000/svg}"
TWO: list[Mapping[str, Any]] = [
    {"staleness": {"0": 10, "3": 30}, "bytes": 3 << 20, "updates_per_second": 120.0},
    {"staleness": {"3": 40}, "bytes": 1 << 20, "updates_per_second": 118.0},
]
POINTS = [(0.5 * step, 10.0 * step) for step in range(200)]


def bars(picture: str, colour: str) -> list[Mapping[str, str]]:
    return [each.attrib for each in ElementTree.fromstring(picture).iter(f"{SVG}rect") if each.get("fill") == colour]


def texts(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def test_bars_are_as_high_as_their_part_of_the_updates() -> None:
    low, high = bars(svg(TWO, POINTS, "a <run>"), "#0072B2")
    assert float(high["height"]) == pytest.approx(7 * float(low["height"]), abs=0.1)
    assert {"a <run>", "mean 2.6, 99 % at most 3, largest 3"} <= set(texts(svg(TWO, POINTS, "a <run>")))


def test_bars_are_as_long_as_the_bytes_of_their_server() -> None:
    first, second = bars(svg(TWO, POINTS, ""), "#D55E00")
    assert float(first["width"]) == pytest.approx(3 * float(second["width"]), abs=0.1)
    assert {"4.0 MiB in all, read and pushed", "1.0 MiB, 118 updates/s"} <= set(texts(svg(TWO, POINTS, "")))


def test_the_curve_is_flat_where_updates_come_evenly() -> None:
    [line] = ElementTree.fromstring(svg(TWO, POINTS, "")).iter(f"{SVG}polyline")
    heights = {point.partition(",")[2] for point in line.attrib["points"].split()}
    assert len(heights) == 1
    assert "mean 20" in texts(svg(TWO, POINTS, ""))


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], POINTS[:2]])
def test_short_runs_and_synchronous_servers_have_a_picture_too(points: list[tuple[float, float]]) -> None:
    assert "staleness of updates" not in texts(svg([{"bytes": 0}], points, ""))


def test_a_long_tail_is_in_the_last_bar() -> None:
    tail: list[Mapping[str, Any]] = [{"staleness": {"0": 600, "1": 400, "2": 3, "700": 1}}]
    first, second, last = bars(svg(tail, POINTS, ""), "#0072B2")
    assert float(first["height"]) == pytest.approx(150 * float(last["height"]), rel=0.02)
    assert float(second["height"]) == pytest.approx(100 * float(last["height"]), rel=0.02)
    assert "2+" in texts(svg(tail, POINTS, ""))


def test_a_wide_distribution_has_few_bars() -> None:
    wide: list[Mapping[str, Any]] = [{"staleness": {str(tau): 1 for tau in range(1000)}}]
    assert len(bars(svg(wide, POINTS, ""), "#0072B2")) == 32
    assert staleness(wide).total() == 1000
