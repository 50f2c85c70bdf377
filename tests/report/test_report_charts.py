"""What is drawn in the charts of a report."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from tutti.report.report_charts import contour_chart


def test_every_second_contour_line_is_labelled() -> None:
    """Labels of all overlap around a minimum."""
    offsets = [number / 4 - 1 for number in range(9)]
    values = [[x * x + y * y for x in offsets] for y in offsets]
    text = contour_chart(offsets, values, [0.3, 0.6, 1.1, 1.7], "loss").svg
    assert [level for level in ("0.3", "0.6", "1.1", "1.7") if f">{level}<" in text] == ["0.3", "1.1"]
