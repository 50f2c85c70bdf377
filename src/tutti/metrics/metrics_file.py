"""Read ``metrics.jsonl`` of a run directory: one JSON object a line for each step, evaluation, resume and warning."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tutti.errors import UsageError

METRICS = "metrics.jsonl"


def metric_lines(run: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line of a run's ``metrics.jsonl``, as bytes with the line end, and the record that the line holds.

    The record is a dict, the line's JSON object. It is None for a line that is no JSON object, such as the last one of
    a run that was killed as it wrote. File names in records may have bytes that are invalid in UTF-8; these become
    surrogates, as in ``os.fsdecode``. The first ``next`` reads the whole file.

    Args:
        run: the run directory.

    Raises:
        OSError: from the first ``next``: ``metrics.jsonl`` is missing or cannot be read.
    """
    for line in (run / METRICS).read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line.decode(errors="surrogateescape"))
        except (ValueError, RecursionError):
            record = None
        yield line, record if isinstance(record, dict) else None


def metric_records(run: Path) -> list[dict[str, Any]]:
    """Return all readable records of a run's metrics, in the order of the file.

    A record is a dict, the JSON object of one line of ``metrics.jsonl``. Its key ``group`` is ``train`` for a step,
    ``eval`` for an evaluation, ``resume`` or ``warning``. Lines that are no JSON object, such as the unfinished last
    line of a killed run, are left out.

    Args:
        run: the run directory.

    Raises:
        UsageError: ``metrics.jsonl`` is missing or cannot be read.
    """
    try:
        return [record for _, record in metric_lines(run) if record is not None]
    except OSError as error:
        raise UsageError(
            "cannot read the run's metrics",
            where=str(run / METRICS),
            why=error.strerror,
            remedy="give the directory of a run, such as runs/digits-…",
        ) from error


def to_json_number(value: float | None) -> float | None:
    """Return a number as a JSON value: None in place of NaN and infinity, and of a missing number.

    >>> to_json_number(0.5), to_json_number(math.inf)
    (0.5, None)
    """
    return value if value is None or math.isfinite(value) else None


def from_json_number(value: float | None) -> float:
    """Return a number from a JSON value, in which null stands for a number that is not finite: None becomes NaN."""
    return math.nan if value is None else float(value)
