"""A mean of cross-entropy counts its targets, so that micro-batches of padded sequences add up to the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tutti.errors import UsageError
from tutti.parallel.ddp.loss_output import read_loss
from tutti.types.micro_batch import MicroBatch

TARGETS = torch.tensor([[0, 1, 2], [3, -100, -100], [-100, -100, -100], [4, 2, -100]])
"""Of four samples; the third has none."""
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 1.5, 3.0], dtype=torch.float64)
PARTS = [(0, 1), (1, 3), (3, 4)]
Loss = Callable[[Tensor, Tensor], Any]


def scores() -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, 3, 5, generator=draw, dtype=torch.float64).requires_grad_()


def by_parts(loss: Loss) -> tuple[Tensor, float]:
    """Gradient and loss of the batch in three micro-batches, of which the second has two samples."""
    inputs = scores()
    sums: Any = None
    for micro, (low, high) in enumerate(PARTS):
        micro_batch = MicroBatch(0, micro, None, high - low, 1 / 4, 0, True)
        objective, start, part = read_loss(loss(inputs[low:high], TARGETS[low:high]), micro_batch)
        objective.backward(start)
        sums = part if sums is None else sums + part
    assert inputs.grad is not None
    count = float(sums.sums[1])
    return inputs.grad * (4 / count), float(sums.sums[0]) / count


def flat(inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(inputs.flatten(0, 1), targets.flatten(), **options)


def known(inputs: Tensor, targets: Tensor) -> Tensor:
    """Squared errors, NaN where there is no target."""
    return torch.where(targets >= 0, (inputs[..., 0] + inputs[..., 1] - targets).square(), torch.nan)


@pytest.mark.parametrize(
    "loss",
    [
        flat,
        lambda x, y: flat(x, y).reshape(1, 1, 1).clone(),
        lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
        lambda x, y: flat(x, y, weight=WEIGHTS),
        lambda x, y: flat(x, y, label_smoothing=0.1),
        lambda x, y: flat(x, y.abs() % 5, label_smoothing=0.1),
        lambda x, y: functional.cross_entropy(x.transpose(1, 2), y, WEIGHTS, label_smoothing=0.1),
        lambda x, y: 3.0 * flat(x, y),
        lambda x, y: flat(x, y, reduction="sum") / (y != -100).sum(),
        lambda x, y: flat(x, y, reduction="sum") * (1 / (y != -100).sum().item()) if (y != -100).any() else x.sum() * 0,
        lambda x, y: flat(x, y) + 0.0 * x.square().sum(),
        lambda x, y: flat(x, y) if (y != -100).any() else x.sum() * 0,
        lambda x, y: flat(x, y, reduction="sum") / y.numel(),
        lambda x, y: functional.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
        lambda x, y: 0.5 * known(x, y).nanmean(),
        lambda x, y: known(x, y).nansum() / (y >= 0).sum(),
    ],
)
def test_the_mean_over_tokens_of_a_batch_in_parts(loss: Loss) -> None:
    inputs = scores()
    want = loss(inputs, TARGETS).sum()
    want.backward()
    gradient, mean = by_parts(loss)
    assert mean == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(gradient, inputs.grad, rtol=1e-12, atol=1e-12)


def modelled(inputs: Tensor) -> Tensor:
    """Scores from two parameters, as a model's."""
    return inputs + torch.zeros(5, dtype=torch.float64, requires_grad=True)


def by_token(inputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each token."""
    return -modelled(inputs).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: by_token(x, y)[y >= 0].mean(),
        lambda x, y: -2.0 * torch.masked_select(-by_token(x, y), y >= 0).mean() / 3,
        lambda x, y: modelled(x)[y >= 0].square().mean(),
        lambda x, y: modelled(x)[..., :2][y >= 0].square().mean(),
        lambda x, y: by_token(x, y).transpose(0, 1).mean(),
        lambda x, y: modelled(x).transpose(0, 1).square().mean(),
    ],
)
def test_the_mean_of_chosen_or_transposed_elements_of_a_batch_in_parts(loss: Loss) -> None:
    """Two numbers are chosen for each token: as many as one of the parts has samples."""
    test_the_mean_over_tokens_of_a_batch_in_parts(loss)


@pytest.mark.parametrize("divisor", [lambda y: (y >= 0).sum(), lambda y: (y >= 0).sum().item()])
def test_sums_divided_by_a_number_of_tokens_are_refused(divisor: Callable[[Tensor], Any]) -> None:
    loss = -(by_token(scores(), TARGETS)[:3] * (TARGETS[:3] >= 0)).sum() / (divisor(TARGETS[:3]) + 1)
    with pytest.raises(UsageError, match=r"a sum divided by 5, of 3 samples.*Return \(sum, count\)"):
        read_loss(loss, MicroBatch(0, 0, None, 3, 1 / 8, 0, True))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: flat(x, y) + 0.1 * x.square().mean(),
        lambda x, y: flat(x, y) + flat(2 * x, y),
        lambda x, y: flat(x, y) + 0.1 * flat(2 * x, y, label_smoothing=0.1),
        lambda x, y: 0.9 * flat(x, y) - 0.1 * x.log_softmax(-1).sum(-1).masked_fill(y < 0, 0).sum() / (y >= 0).sum(),
        lambda x, y: flat(x, y, reduction="sum"),
        lambda x, y: flat(x, y, reduction="sum") / 7,
        lambda x, y: flat(x, y, reduction="sum") / 2,
        lambda x, y: 0.5 * flat(x, y, reduction="sum"),
        lambda x, y: -1 * flat(x, y, reduction="sum"),
        lambda x, y: x.square().mean() + 0.1 * flat(x, y, reduction="sum"),
    ],
)
def test_terms_of_different_counts_are_refused(loss: Loss) -> None:
    with pytest.raises(UsageError, match="Return \\(sum, count\\)"):
        read_loss(loss(scores(), TARGETS), MicroBatch(0, 0, None, 4, 1 / 8, 0, True))
    whole = read_loss(loss(scores(), TARGETS), MicroBatch(0, 0, None, 4, 1.0, 0, True, whole=True))
    assert float(whole[1]) == 1.0


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: flat(x, y.abs() % 5) + 0.1 * x.square().mean(),
        lambda x, y: flat(x, y, reduction="sum") / len(x),
        lambda x, y: x.square().mean(),
    ],
)
def test_other_means_are_over_samples(loss: Loss) -> None:
    _, start, part = read_loss(loss(scores(), TARGETS), MicroBatch(0, 0, None, 4, 1 / 8, 0, True))
    assert (float(start), float(part.sums[1])) == (0.5, 4.0)
