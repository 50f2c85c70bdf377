"""The timelines and figures of docs/pipeline.md are those of the orders that are run."""

from __future__ import annotations

import pytest

from tests.architecture.sources import ROOT
from tutti.parallel.pipeline import pipeline_schedule

PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "ranks", "micro", "chunks"),
    [
        ("one_by_one", 3, 2, 1),
        ("gpipe", 3, 4, 1),
        ("1f1b", 3, 4, 1),
        ("interleaved", 2, 4, 2),
        ("zero_bubble", 3, 4, 1),
    ],
)
def test_timelines(name: str, ranks: int, micro: int, chunks: int) -> None:
    drawn = pipeline_schedule.picture(
        pipeline_schedule.make_order(name, ranks, micro, chunks), lambda action: 1 + (action.kind == "B")
    )
    assert f"```\n{drawn}\n```" in PAGE


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_idle_times(name: str, chunks: int) -> None:
    row = " | ".join(
        f"{pipeline_schedule.bubble_fraction(name, 4, micro, chunks):.1%}" for micro in (1, 2, 4, 8, 16, 32)
    )
    assert f"| `{name}` | {row} |" in PAGE
