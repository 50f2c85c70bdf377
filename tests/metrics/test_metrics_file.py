"""Readers of a run's metrics take what a run may leave behind: cut lines, foreign bytes, other line separators."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.errors import UsageError
from tutti.metrics.metrics_file import METRICS, metric_lines, metric_records
from tutti.metrics.records import _until


def test_what_is_no_record_is_left_out(tmp_path: Path) -> None:
    lines = [
        b'{"group": "warning", "text": "a\xe2\x80\xa8b \xff"}\n',
        b"[1]\n",
        b'{"group": "eval"}\n',
        b'{"group": "tr',
    ]
    (tmp_path / METRICS).write_bytes(b"".join(lines))
    assert metric_records(tmp_path) == [{"group": "warning", "text": "a\u2028b \udcff"}, {"group": "eval"}]
    assert [line for line, _ in metric_lines(tmp_path)] == lines
    assert [record is None for _, record in metric_lines(tmp_path)] == [False, True, False, True]


def test_a_run_without_metrics_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the run's metrics") as refused:
        metric_records(tmp_path)
    assert str(tmp_path / METRICS) in str(refused.value)


def test_a_resumed_run_keeps_whole_lines(tmp_path: Path) -> None:
    """The run was killed after a record and before the end of its line; a cut record follows no longer."""
    (tmp_path / METRICS).write_bytes(b'{"group": "train", "step": 1}\n{"group": "train", "step": 2}')
    kept = _until(tmp_path, 2, 1.0, None).splitlines()
    assert len(kept) == 3 and kept[1] == b'{"group": "train", "step": 2}'
