"""Sums over samples times a constant, and losses that are divided by a statistic: refused in parts of the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.scripts.oracle import global_batches
from tutti.errors import TuttiError

BATCH, SAMPLES = 12, 24
Loss = Callable[[Tensor, Tensor], Tensor]
CLASS_WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)


class Shaped(nn.Module):
    """Reads sizes of its batch in its forward, as models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8).double(), nn.Linear(8, 2).double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.view(inputs.shape[0], -1)).tanh()
        return self.second(hidden.reshape(len(inputs), 8))


class Halved(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / (2 * outputs.size(0))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    made = [torch.randn(SAMPLES, width, generator=draw, dtype=torch.float64) for width in (4, 2)]
    return TensorDataset(*made)


def halved_size(outputs: Tensor, targets: Tensor) -> Tensor:
    count = targets.shape[0]
    return (outputs - targets).abs().sum() / (2 * count)


def weights_of(targets: Tensor) -> Tensor:
    return 1 + targets[:, 0].abs()


def by_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = weights_of(targets)
    return (weights * by_sample(outputs, targets)).mean() / weights.mean()


def weighted_by_number(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = weights_of(targets)
    return (weights * by_sample(outputs, targets)).sum() / weights.sum().item()


def weighted_by_shares(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = weights_of(targets)
    return (weights / weights.sum() * by_sample(outputs, targets)).sum()


def weighted_by_smoothed_shares(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = weights_of(targets)
    return (weights / (weights.sum() + 1e-8) * by_sample(outputs, targets)).sum()


def shares_of_ones(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.ones_like(targets[:, 0])
    return (weights / weights.sum().clamp(min=1) * by_sample(outputs, targets)).sum()


def smoothed_shares_aside(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean beside smoothed shares of the samples that the loss does not take, such as a codebook's counts."""
    counts = weights_of(targets)
    shares = (counts + 1e-5) / (counts.sum() + 1e-5 * len(counts))
    assert torch.isclose(shares.sum(), torch.ones((), dtype=shares.dtype))
    return by_sample(outputs, targets).mean()


def of_weights(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum with weights by sample, as of log probabilities times advantages."""
    return (weights_of(targets) * by_sample(outputs, targets)).sum()


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    mask = (targets > -0.5).flatten()
    return ((outputs - targets).flatten().square() * mask).sum() / mask.sum().clamp(min=1)


def of_ones(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.ones_like(targets[:, 0])
    return (weights * by_sample(outputs, targets)).sum() / weights.sum()


def normalised(outputs: Tensor, targets: Tensor) -> Tensor:
    """A factor on each sample's loss, as of advantages that are normalised within a micro-batch of one worker."""
    return by_sample(outputs, targets).mean() + 0 * outputs.sum()


CONSTANT: dict[str, Loss] = {
    "sum": lambda out, want: (out - want).square().sum() / BATCH,
    "loss function": lambda out, want: functional.mse_loss(out, want, reduction="sum") / BATCH,
    "factors": lambda out, want: 0.3 * (out - want).abs().sum() * (1 / BATCH),
    "beside a size": lambda out, want: (out.view(len(out), 2) - want).square().sum() / BATCH,
    "two terms": lambda out, want: functional.mse_loss(out, want) + (out.abs().sum() + out.square().sum()) / BATCH,
}
UNEVEN: dict[str, tuple[Loss, str]] = {
    "half a sum": (lambda out, want: 0.5 * (out - want).square().sum(), "times 0.5|a sum over"),
    "twice a sum": (lambda out, want: (out - want).square().sum() * 2, "times 2"),
    "half a sum, beside a size": (
        lambda out, want: 0.5 * (out.view(len(out), 2) - want).square().sum(),
        "times 0.5|a sum over",
    ),
    "twice a sum, beside a size": (
        lambda out, want: 2 * (out.view(len(out), 2) - want).square().sum(),
        "a sum over|times 2",
    ),
    "a hundredth of a loss": (
        lambda out, want: 0.01 * functional.mse_loss(out, want, reduction="sum"),
        "times 0.01|a sum over",
    ),
    "cross-entropy by the batch": (
        lambda out, want: functional.cross_entropy(out, want.argmax(1), reduction="sum") * (1 / BATCH),
        "divided by 12, the global",
    ),
    "half a cross-entropy": (
        lambda out, want: 0.5 * functional.cross_entropy(out, want.argmax(1), reduction="sum"),
        "times 0.5|a sum over",
    ),
    "sum with class weights over the batch": (
        lambda out, want: (CLASS_WEIGHTS[want.argmax(1)] * by_sample(out, want)).sum() / BATCH,
        "divided by 12, the global",
    ),
    "sum of a mask's samples over the batch": (
        lambda out, want: (by_sample(out, want) * (want[:, 0] > 0)).sum() / BATCH,
        "divided by 12, the global",
    ),
    "mean over weights": (weighted, "a mean or a sum over the micro-batch's"),
    "mean over weights by a number": (
        weighted_by_number,
        "a mean or a sum over the micro-batch's|a sum divided by|a sum over",
    ),
    "shares of weights": (weighted_by_shares, "a mean or a sum over the micro-batch's|a sum over"),
    "sum with weights": (of_weights, "a sum over"),
    "sum with class weights": (
        lambda out, want: (CLASS_WEIGHTS[want.argmax(1)] * by_sample(out, want)).sum(),
        "a sum over",
    ),
    "log-probabilities of a normal distribution": (
        lambda out, want: -Normal(out, torch.ones(2).double()).log_prob(want).sum(),
        "a sum over",
    ),
    "mean times a mean without gradient": (
        lambda out, want: by_sample(out, want).mean() * by_sample(out, want).mean().detach(),
        "another one for each micro-batch",
    ),
    "mean times a mean by NumPy": (
        lambda out, want: functional.cross_entropy(out, want.argmax(1)) * float(np.mean(want.numpy()) + 2),
        "another one for each micro-batch",
    ),
    "mean over the largest": (
        lambda out, want: by_sample(out, want).mean() / max(float(want.abs().max()), 0.1),
        "another one for each micro-batch",
    ),
    "mean over a list's sum": (
        lambda out, want: by_sample(out, want).sum() / (len(out) * max(sum((want > -1).flatten().tolist()), 1)),
        "another one for each micro-batch|a mean or a sum over the micro-batch's",
    ),
    "weights by softmax": (
        lambda out, want: (want[:, 0].softmax(0) * by_sample(out, want)).sum(),
        "a mean or a sum over the micro-batch's|a sum over",
    ),
    "sum of a soft cross-entropy": (
        lambda out, want: -(want.softmax(1) * out.log_softmax(1)).sum(),
        "a sum over",
    ),
    "half of each, by einsum": (lambda out, want: torch.einsum("bc,bc->", out - want, (out - want) / 2), "a sum over"),
    "mean times its samples": (
        lambda out, want: functional.mse_loss(out, want) * len(out),
        "times .*number of samples",
    ),
    "mean times its share of the batch": (
        lambda out, want: by_sample(out, want).mean() * want.shape[0] / BATCH,
        "times .*number of samples",
    ),
    "mean times a share of the batch": (
        lambda out, want: functional.mse_loss(out, want) * (len(out) / BATCH),
        "times .*part of the global batch",
    ),
    "mean over a mask of elements": (masked, "a mean or a sum over the micro-batch's|a sum divided by|a sum over"),
    "smoothed shares of weights": (weighted_by_smoothed_shares, "a mean or a sum over the micro-batch's|a sum over"),
}
OF_SAMPLES: dict[str, Loss] = {
    "weights of one": of_ones,
    "shares of ones": shares_of_ones,
    "smoothed shares aside": smoothed_shares_aside,
    "nothing of a sum": normalised,
    "mean with class weights": lambda out, want: (CLASS_WEIGHTS[want.argmax(1)] * by_sample(out, want)).mean(),
    "mean log-probability": lambda out, want: -Normal(out, torch.ones(2).double()).log_prob(want).sum(1).mean(),
    "mean of a soft cross-entropy": lambda out, want: -(want.softmax(1) * out.log_softmax(1)).sum() / len(want),
    "mean times a constant of NumPy": lambda out, want: (
        by_sample(out, want).mean() * np.sqrt(2) + 0.1 * out.square().sum() / len(out)
    ),
    "mean times the global batch's size": lambda out, want: functional.mse_loss(out, want) * BATCH / (0 * len(out) + 1),
    "mean times a constant beside a size": lambda out, want: 4 * by_sample(out, want).mean() + 0 * out.sum() / len(out),
    "half the mean": lambda out, want: (out - want).square().sum() / (2 * len(out)),
    "half the mean by size": halved_size,
    "half by a factor": lambda out, want: 0.5 * (out - want).square().sum() / len(out),
    "half the mean in a module": Halved(),
    "half the mean beside a size": lambda out, want: functional.mse_loss(out, want) * 0.5 + 0 * out.sum() / len(out),
    "mean, halved by a constant": lambda out, want: functional.mse_loss(out, want) / BATCH,
    "divergence by the batch": lambda out, want: functional.kl_div(
        out.log_softmax(1), want.softmax(1), reduction="batchmean"
    ),
    "twice a module's divergence": lambda out, want: (
        2 * nn.KLDivLoss(reduction="batchmean")(out.log_softmax(1), want.softmax(1))
    ),
}


ALL = CONSTANT | OF_SAMPLES | {name: loss for name, (loss, _) in UNEVEN.items()}


def train(name: str, how: str, strategy: str, workers: int | None = None, micro_batch: int | None = None) -> Any:
    """Return the sums of all tensors after two updates, and None; or the number of updates, and the error."""
    loss_fn, model = ALL[name], Shaped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, batch: Any) -> Tensor:
        return loss_fn(model(batch[0]), batch[1])

    options: dict[str, Any] = {} if micro_batch is None else {"micro_batch": micro_batch}
    run = tutti.prepare(
        model, optimizer, dataset(), loss, strategy=strategy, workers=workers, batch_size=BATCH, seed=0, **options
    )
    try:
        if how == "step":
            for batch in run.epoch(0):
                run.step(batch)
        else:
            for inputs, targets in run.microbatches(0):
                optimizer.zero_grad()
                value = loss_fn(model(inputs), targets)
                if how == "run.backward":
                    run.backward(value)
                else:
                    value.backward()
                optimizer.step()
    except TuttiError as error:
        return run.updates, str(error)
    return [float(value.sum()) for value in run.state().values()], None


def plain(name: str) -> list[float]:
    model = Shaped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in global_batches(dataset(), BATCH, 0):
        optimizer.zero_grad()
        ALL[name](model(inputs), targets).backward()
        optimizer.step()
    return [float(value.sum()) for value in model.state_dict().values()]


HOW = ("step", "run.backward", "loss.backward")


@pytest.mark.parametrize(("name", "how"), in_turn(list(CONSTANT), HOW))
def test_a_sum_over_the_size_of_the_global_batch_is_refused_in_a_part(name: str, how: str) -> None:
    for ranks, strategy, workers in ((2, "mirrored", None), (3, "sharded:stage=1", None), (1, "single", 2)):
        if strategy != "mirrored" and how == "loss.backward":
            continue
        for updates, said in worlds.run(ranks, train, name=name, how=how, strategy=strategy, workers=workers):
            assert said is not None and f"divided by {BATCH}, the global batch's size" in said, said
            assert "test_constant_divisors.py:" in said and updates == 0


PLACES = [
    (2, "mirrored", None, None),
    (3, "mirrored", None, 2),
    (4, "sharded:stage=1", None, None),
    (1, "single", None, 2),
    (1, "single", 4, 1),
    (2, "central_storage", None, 2),
]
OF_ONE_SAMPLE = PLACES[4]
OF_WORKERS = [name for name, (_, what) in UNEVEN.items() if "another one for each micro-batch" in what]
"""Losses with a factor of a worker's own samples: only micro-batches of one worker must not differ in it."""
WITHIN_WORKERS = [place for place in PLACES if place[3] is not None]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("name", "place"),
    [
        *in_turn([name for name in UNEVEN if name not in OF_WORKERS], PLACES, each=2),
        *in_turn(OF_WORKERS, WITHIN_WORKERS, each=2),
        ("mean times its samples", OF_ONE_SAMPLE),
        ("smoothed shares of weights", OF_ONE_SAMPLE),
    ],
)
def test_a_loss_that_is_no_mean_of_its_parts_is_refused(
    name: str, place: tuple[int, str, int | None, int | None], how: str
) -> None:
    ranks, strategy, workers, micro = place
    options = {"strategy": strategy, "workers": workers, "micro_batch": micro}
    found = worlds.run(ranks, train, name=name, how=how, **options)
    assert all(updates == 0 for updates, said in found if said is not None), found
    said = [text for _, text in found]
    assert None not in said and any(
        re.search(f"{UNEVEN[name][1]}|for one sample, and .* for this one twice", text) for text in said
    ), said
    assert any("test_constant_divisors.py:" in text for text in said)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", [*OF_SAMPLES, "sum"])
def test_a_mean_over_samples_is_right_where_it_is_divided_by_as_much(name: str, how: str) -> None:
    want = worlds.alone(plain, name=name)
    places = [(1, None), (1, 2), (1, 1)] if "divergence" in name else [(1, None), (2, None)]
    for ranks, micro in places if name in OF_SAMPLES else places[:1]:
        for sums, said in worlds.run(ranks, train, name=name, how=how, strategy="mirrored", micro_batch=micro):
            assert said is None, said
            assert sums == pytest.approx(want, abs=1e-12)
