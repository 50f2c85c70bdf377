"""What a loss function may return: a mean, or sums and counts; anything else is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tutti.errors import UsageError
from tutti.parallel.ddp.loss_output import read_loss
from tutti.types.micro_batch import MicroBatch

CELL = MicroBatch(worker=0, micro=0, batch=None, samples=6, weight=1 / 24, key=0, last=True)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_over_the_samples(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.full(shape, 2.5, dtype=dtype, requires_grad=True)
    objective, start, totals = read_loss(value, CELL)
    assert objective.shape == () and float(objective.detach()) == 2.5
    assert float(start) == pytest.approx(6 / 24) and (start.dtype, start.shape) == (dtype, ())
    assert totals.sums.tolist() == [15.0, 6.0] and totals.names == ()
    assert totals.sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not totals.sums.requires_grad


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("count", [40, 40.0, torch.tensor(40)])
def test_a_sum_with_its_count_and_metrics(kind: Any, count: Any) -> None:
    total = torch.tensor(80.0, dtype=torch.float64, requires_grad=True)
    objective, start, totals = read_loss(kind((total, count)), CELL)
    assert objective is total and float(start) == 1 / 24
    assert (totals.sums.tolist(), totals.names) == ([80.0, 40.0], ())
    metrics = {"accuracy": torch.tensor(3), "error": 1.5}
    _, start, totals = read_loss(kind((total, count, metrics)), CELL)
    assert float(start) == 1 / 24
    assert (totals.sums.tolist(), totals.names) == ([80.0, 40.0, 3.0, 1.5], ("accuracy", "error"))
    assert not totals.sums.requires_grad


LOSSES = torch.arange(1.0, 7.0, dtype=torch.float64)


@pytest.mark.parametrize(
    ("outcome", "lanes", "names"),
    [
        (LOSSES, [21.0, 6.0], ()),
        ((LOSSES, 40), [21.0, 40.0], ()),
        ([LOSSES, 40, {"accuracy": torch.tensor(3)}], [21.0, 40.0, 3.0], ("accuracy",)),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_one_loss_a_sample_is_their_sum(outcome: Any, lanes: Any, names: Any, noise: float) -> None:
    objective, start, totals = read_loss(outcome, replace(CELL, noise=noise))
    assert objective is LOSSES and (start.shape, start.dtype) == (LOSSES.shape, LOSSES.dtype)
    assert (totals.sums.tolist(), totals.names) == (lanes, names), "without noise in them"
    assert (start.tolist() == [1 / 24] * 6) == (noise == 0)


def test_one_sample_is_as_its_loss() -> None:
    value = torch.tensor([2.5])
    for outcome in (value, (value, 1)):
        objective, start, totals = read_loss(outcome, replace(CELL, samples=1, noise=1.0))
        assert objective.shape == start.shape == (1,) and totals.sums.tolist() == [2.5, 1.0]


def test_a_stand_in_counts_for_nothing_whatever_its_length() -> None:
    _, start, totals = read_loss(LOSSES[:2], replace(CELL, samples=0, weight=0.0))
    assert start.tolist() == [0.0, 0.0] and totals.samples == 0


def test_noise_follows_from_the_cells_key() -> None:
    starts = [read_loss(LOSSES, replace(CELL, noise=1.5, key=key))[1] for key in (7, 7, 8)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read_loss(LOSSES, replace(CELL, noise=1.5))
    assert torch.equal(torch.get_rng_state(), before), "the model's own draws are another stream"


def test_the_covariance_of_the_noisy_gradient() -> None:
    """(1/M)[(1 + σ²)Σ + σ²GGᵀ] exactly; for the first number 1.5, where σ²-fold second moments alone would say 2.5."""
    kinds = torch.tensor([[1.0, 0.0], [3.0, 2.0]], dtype=torch.float64)
    picks = torch.randint(0, 2, (40_000, 4), generator=torch.Generator().manual_seed(0))
    micro_batch = replace(CELL, samples=4, weight=1 / 4, noise=1.0)
    found = torch.stack(
        [read_loss(LOSSES[:4], replace(micro_batch, key=key))[1] @ kinds[pick] for key, pick in enumerate(picks)]
    )
    mean, spread = kinds.mean(0), torch.cov(kinds.T, correction=0)
    want = (2 * spread + torch.outer(mean, mean)) / 4
    assert float(want[0, 0]) == 1.5
    assert torch.allclose(torch.cov(found.T), want, rtol=0.04), "the standard error is 1 %"
    assert torch.allclose(found.mean(0), mean, atol=0.03)


@pytest.mark.parametrize("outcome", [torch.tensor(1.0), (torch.tensor(1.0), 6), (torch.ones(1), 6, {})])
def test_noise_needs_a_loss_a_sample(outcome: Any) -> None:
    with pytest.raises(UsageError, match="the loss of each sample"):
        read_loss(outcome, replace(CELL, noise=0.5))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "the loss is None"),
        (2.5, "the loss is a Python number"),
        ({"loss": torch.tensor(1.0)}, "the loss is a dict"),
        ((), "the loss is a tuple"),
        ((torch.tensor(1.0),), "the loss is a tuple"),
        ((torch.tensor(1.0), 1, {}, 2), "the loss is a tuple"),
        (torch.ones(3), "not a scalar but (3,)"),
        (torch.ones(6, 1), "not a scalar but (6, 1)"),
        (torch.ones(0), "not a scalar but (0,)"),
        ((torch.ones(2), 1), "not a scalar but (2,)"),
        ((2.5, 1), "not a scalar but float"),
    ],
)
def test_anything_else_is_refused(returned: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_loss(returned, CELL)
    assert words in str(caught.value)
    assert "Re" in str(caught.value) or "Leave .item()" in str(caught.value), "says what to return"
