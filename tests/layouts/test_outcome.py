"""What a loss function may return: a mean, or sums and counts; anything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tutti.errors import UsageError
from tutti.layouts.outcome import read, seed
from tutti.types import Cell

CELL = Cell(worker=0, micro=0, batch=None, samples=6, weight=1 / 24, key=0, last=True)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_over_the_samples(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.full(shape, 2.5, dtype=dtype, requires_grad=True)
    objective, factor, totals = read(value, CELL)
    assert objective.shape == () and float(objective.detach()) == 2.5 and factor == pytest.approx(6 / 24)
    assert totals.lanes.tolist() == [15.0, 6.0] and totals.names == ()
    assert totals.lanes.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not totals.lanes.requires_grad


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("count", [40, 40.0, torch.tensor(40)])
def test_a_sum_with_its_count_and_metrics(kind: Any, count: Any) -> None:
    total = torch.tensor(80.0, dtype=torch.float64, requires_grad=True)
    objective, factor, totals = read(kind((total, count)), CELL)
    assert objective is total and factor == 1 / 24
    assert (totals.lanes.tolist(), totals.names) == ([80.0, 40.0], ())
    metrics = {"accuracy": torch.tensor(3), "error": 1.5}
    _, factor, totals = read(kind((total, count, metrics)), CELL)
    assert factor == 1 / 24
    assert (totals.lanes.tolist(), totals.names) == ([80.0, 40.0, 3.0, 1.5], ("accuracy", "error"))
    assert not totals.lanes.requires_grad


def test_backward_starts_with_the_factor() -> None:
    start = seed(0.25, torch.float64, torch.device("cpu"))
    assert (float(start), start.dtype, start.shape) == (0.25, torch.float64, torch.Size([]))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "returned NoneType"),
        (2.5, "returned float"),
        ({"loss": torch.tensor(1.0)}, "returned dict"),
        ((), "returned tuple"),
        ((torch.tensor(1.0),), "returned tuple"),
        ((torch.tensor(1.0), 1, {}, 2), "returned tuple"),
        (torch.ones(3), "not a scalar but (3,)"),
        (torch.ones(0), "not a scalar but (0,)"),
        ((torch.ones(2), 1), "not a scalar but (2,)"),
        ((2.5, 1), "not a scalar but float"),
    ],
)
def test_anything_else_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(returned, CELL)
    assert words in str(caught.value)
    assert "Re" in str(caught.value), "says what to return"
