"""The fits of benchmarks/mlperf_batches.py on series that obey the law, and that break it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tutti.planning.measurement_table import TableRow


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "mlperf_batches.py"
    spec = importlib.util.spec_from_file_location("mlperf_batches", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(points: dict[int, float]) -> list[TableRow]:
    return [TableRow({}, {"batch": batch, "last_eval": data, "ok": 3.0}) for batch, data in points.items()]


def law(batch: int) -> float:
    return 10.0 * (1 + batch / 1000)


def test_a_series_of_the_law_gives_its_critical_batch(benchmark: Any) -> None:
    points = {batch: law(batch) for batch in (100, 200, 400, 800, 1600)}
    # A row in another unit, and one without a successful run, are left out.
    odd = [
        TableRow({}, {"batch": 800.0, "last_eval": 5e4}),
        TableRow({}, {"batch": 400.0, "last_eval": 1.0, "ok": 0.0}),
    ]
    found = benchmark.studied([*rows(points), *odd])
    assert found["batches"] == found["submissions"] == 5 and found["critical_batch"] == pytest.approx(1000, rel=0.05)
    assert found["critical_low"] < 1000 < found["critical_high"] and found["worst_error"] < 0.02
    assert found["data_fall"] == found["steps_grow"] == 0
    assert found["data_largest_over_smallest"] == pytest.approx(law(1600) / law(100))


def test_neighbours_that_the_law_forbids_are_counted(benchmark: Any) -> None:
    # From 200 to 400 the data fall; from 400 to 500 they grow more than the batch.
    points = {100: law(100), 200: law(200), 400: 0.8 * law(200), 500: 1.5 * law(500), 1600: law(1600)}
    found = benchmark.studied(rows(points))
    assert (found["data_fall"], found["steps_grow"]) == (1, 1) and found["worst_error"] > 0.1
    assert benchmark.studied(rows({100: 1.0, 200: 2.0, 400: 3.0})) is None
