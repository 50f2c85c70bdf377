"""Waiting told apart into idling and communication; shares, traces and pictures of segments."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest

from tutti.metrics.timeline import TimelineSegment, chrome, resolve_waits, shares, span, table, timeline_svg

ROWS = [
    [
        TimelineSegment("forward", 10.0, 12.0),
        TimelineSegment("waiting", 12.0, 15.0, "sum", (0, 1)),
        TimelineSegment("waiting", 15.0, 16.0, "sum", (0, 1)),
        TimelineSegment("waiting", 16.0, 18.0, "transfer", (0, 2)),
    ],
    [TimelineSegment("waiting", 14.0, 15.0, "sum", (0, 1)), TimelineSegment("waiting", 15.0, 16.0, "sum", (0, 1))],
    [TimelineSegment("backward", 10.0, 20.0)],
]


def test_equal_calls_are_matched_in_order() -> None:
    first, second, third = resolve_waits(ROWS)
    assert [(s.phase, s.start, s.end) for s in first] == [
        ("forward", 10.0, 12.0),
        ("idle", 12.0, 14.0),
        ("communication", 14.0, 15.0),
        ("communication", 15.0, 16.0),
        # Rank 2 never waits for it, so that nobody knows when it came.
        ("idle", 16.0, 18.0),
    ]
    assert [s.phase for s in second] == ["communication", "communication"]
    assert third == ROWS[2]


def test_ranks_after_a_loss_are_not_the_rows() -> None:
    """Rank 0 is lost, and rows 0 and 1 are those of ranks 1 and 2."""
    late = TimelineSegment("waiting", 1.0, 3.0, "sum", (1, 2)), TimelineSegment("waiting", 2.0, 3.0, "sum", (1, 2))
    first, second = resolve_waits([[late[0]], [late[1]]], [1, 2])
    assert [(s.phase, s.start, s.end) for s in first] == [("idle", 1.0, 2.0), ("communication", 2.0, 3.0)]
    assert [s.phase for s in second] == ["communication"]


def test_no_time_is_lost_or_made() -> None:
    for row, split in zip(ROWS, resolve_waits(ROWS), strict=True):
        assert sum(s.end - s.start for s in split) == pytest.approx(sum(s.end - s.start for s in row))
        assert all(a.end <= b.start for a, b in itertools.pairwise(split))


def test_shares_are_of_the_whole_span() -> None:
    found = shares(resolve_waits(ROWS))
    assert found[0] == pytest.approx({"forward": 0.2, "idle": 0.4, "communication": 0.2, "other": 0.2})
    assert found[2] == {"backward": 1.0, "other": 0.0}
    assert table(resolve_waits(ROWS)).endswith("60.0% of 3 devices × 10.000 s was neither forward nor backward\n")


def test_a_chrome_trace_has_every_segment_in_microseconds() -> None:
    events = json.loads(json.dumps(chrome(resolve_waits(ROWS))))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(map(len, resolve_waits(ROWS)))
    assert {"name": "backward", "ph": "X", "pid": 0, "tid": 2, "ts": 0.0, "dur": 10e6} in spans
    assert sorted(e["args"]["name"] for e in events if e["ph"] == "M") == ["device 0", "device 1", "device 2"]


def test_a_picture_is_well_formed_and_to_scale() -> None:
    picture = ElementTree.fromstring(timeline_svg(resolve_waits(ROWS), "steps <1> & 2"))
    space = "{http://www.w3.org/2000/svg}"
    titled = [r for r in picture.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    widths = {r.find(f"{space}title").text: float(r.get("width", 0)) for r in titled}  # type: ignore[union-attr]
    assert widths["backward 10000.00 ms"] == pytest.approx(900)
    assert widths["forward 2000.00 ms"] == pytest.approx(180)
    assert "steps <1> & 2" in [t.text for t in picture.iter(f"{space}text")]


def test_segments_without_length() -> None:
    rows = [[TimelineSegment("forward", 2.0, 2.0)], []]
    assert shares(rows) == [{"forward": 0.0, "other": 1.0}, {"other": 1.0}]
    assert "100.0% of 2 devices" in table(rows)
    ElementTree.fromstring(timeline_svg(rows, "empty"))


def test_nothing_traced_is_said() -> None:
    with pytest.raises(ValueError, match="nothing was traced"):
        span([[], []])
