"""Losses of a part of the batch that do not add up to that of the batch are refused, and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.nn import functional

from tutti.errors import UsageError
from tutti.parallel.ddp.loss_output import read_loss
from tutti.parallel.ddp.loss_shape import undivided_sum
from tutti.train.script_checks.batch_statistics import BatchStatistics
from tutti.train.script_checks.storage_records import memories_of
from tutti.types.micro_batch import MicroBatch

SAMPLES = 8
mse, bce, entropy = functional.mse_loss, functional.binary_cross_entropy_with_logits, functional.cross_entropy
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]


def read(loss: Loss, whole: bool = False) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, SAMPLES), nn.Tanh(), nn.Linear(SAMPLES, 3)).double()
    inputs = torch.randn(SAMPLES, 3, dtype=torch.float64)
    mask = (torch.arange(SAMPLES) < 5).double()
    found = loss(net, net(inputs), inputs, mask)
    read_loss(found, MicroBatch(0, 0, None, SAMPLES, 1 / SAMPLES, 0, True, whole=whole))


def by_token(net: nn.Module, out: Tensor) -> Tensor:
    """Four numbers of each sample, as of tokens, in one dimension with the samples."""
    return net[0](out).view(SAMPLES, 4, 2).flatten(0, 1).square().sum(1)


def covariance(net: nn.Module, want: Tensor) -> Tensor:
    """Of as many features as samples."""
    hidden: Tensor = net[0](want)
    return hidden.T @ hidden / len(hidden) - torch.eye(SAMPLES, dtype=hidden.dtype)


def masked(out: Tensor, want: Tensor, mask: Tensor) -> Tensor:
    return ((out - want).square().mean(1) * mask).sum()


REFUSED: dict[str, Loss] = {
    "root of a mean": lambda net, out, want, mask: mse(out, want).sqrt(),
    "root of a mean by hand": lambda net, out, want, mask: 2 * ((out - want) ** 2).mean().sqrt() + 1,
    "root of a cross-entropy": lambda net, out, want, mask: entropy(out, want.argmax(1)).sqrt(),
    "perplexity": lambda net, out, want, mask: entropy(out, want.argmax(1)).exp(),
    "flooding": lambda net, out, want, mask: (mse(out, want) - 0.5).abs() + 0.5,
    "logarithm of a sum": lambda net, out, want, mask: mse(out, want, reduction="sum").log(),
    "dice": lambda net, out, want, mask: 1 - 2 * (out * want).sum() / (out.square().sum() + want.square().sum()),
    "product of means": lambda net, out, want, mask: mse(out, want) * out.abs().mean(),
    "largest of two means": lambda net, out, want, mask: torch.maximum(mse(out, want), out.abs().mean()),
    "mean over a mask": lambda net, out, want, mask: masked(out, want, mask) / mask.sum(),
    "mean over at least one": lambda net, out, want, mask: masked(out, want, mask) / mask.sum().clamp(min=1),
    "sum over a constant": lambda net, out, want, mask: masked(out, want, mask) / 100,
    "largest": lambda net, out, want, mask: (out - want).square().max(),
    "smallest of samples": lambda net, out, want, mask: (out - want).square().mean(1).amin(),
    "median": lambda net, out, want, mask: (out - want).abs().median(),
    "hardest": lambda net, out, want, mask: (out - want).square().mean(1).topk(2).values.mean(),
    "norm of all": lambda net, out, want, mask: (out - want).norm(),
    "distance": lambda net, out, want, mask: torch.dist(out, want),
    "logsumexp of samples": lambda net, out, want, mask: (out - want).square().mean(1).logsumexp(0),
    "product of samples": lambda net, out, want, mask: (1 + (out - want).square().mean(1)).prod(),
    "variance of features": lambda net, out, want, mask: (1 - out.var(0)).relu().mean() + mse(out, want),
    "variance of as many features": lambda net, out, want, mask: (
        (1 - net[0](want).var(0)).relu().mean() + mse(out, want)
    ),
    "square of as many means": lambda net, out, want, mask: net[0](want).mean(0).square().sum() + mse(out, want),
    "norm of as many means": lambda net, out, want, mask: net[0](want).mean(0, keepdim=True).norm(),
    "root of as many means": lambda net, out, want, mask: net[0](want).square().mean(0).sqrt().mean(),
    "entropy of as many means": lambda net, out, want, mask: (lambda p: (p * p.log()).sum())(
        net[0](want).softmax(1).mean(0)
    ),
    "deviation": lambda net, out, want, mask: mse(out, want) - 0.1 * out.std(),
    "covariance": lambda net, out, want, mask: torch.cov(out.T).square().sum() / 9,
    "covariance by einsum": lambda net, out, want, mask: torch.einsum("bi,bj->ij", out, out).div(8).square().sum(),
    "half a sum": lambda net, out, want, mask: 0.5 * (out - want).square().sum(),
    "negative sum": lambda net, out, want, mask: -1 * out.abs().sum() + mse(out, want),
    "small sum": lambda net, out, want, mask: mse(out, want) + 0.01 * out.abs().sum(),
    "sum of tokens": lambda net, out, want, mask: by_token(net, out).sum(),
    "sum of tokens beside": lambda net, out, want, mask: mse(out, want) + 0.1 * by_token(net, out).sum(),
    "mean over chosen tokens": lambda net, out, want, mask: (
        (by_token(net, out) * (torch.arange(4 * SAMPLES) < 13)).sum() / 13
    ),
    "root of a mean of tokens": lambda net, out, want, mask: by_token(net, out).mean().sqrt(),
    "covariance of as many features": lambda net, out, want, mask: covariance(net, want).square().mean(),
    "covariance without its diagonal": lambda net, out, want, mask: (
        covariance(net, want).masked_fill(torch.eye(SAMPLES, dtype=torch.bool), 0).pow(2).sum() + mse(out, want)
    ),
    "product of a covariance with itself": lambda net, out, want, mask: (lambda each: (each * each).mean())(
        covariance(net, want)
    ),
    "correlation": lambda net, out, want, mask: (out.T @ want / len(out) - torch.eye(3)).square().sum(),
    "moment of features": lambda net, out, want, mask: out.mean(0).square().sum(),
    "entropy of the mean": lambda net, out, want, mask: (out.softmax(1).mean(0) * out.softmax(1).mean(0).log()).sum(),
    "sum": lambda net, out, want, mask: (out - want).square().sum(),
    "sum of as many columns": lambda net, out, want, mask: net[0](want).square().mean(-1).sum(),
    "sum of a loss": lambda net, out, want, mask: mse(out, want, reduction="sum"),
    "two sums": lambda net, out, want, mask: bce(out, want.sigmoid(), reduction="sum") - 0.5 * out.square().sum(),
    "sum of a cross-entropy beside": lambda net, out, want, mask: (
        entropy(out, want.argmax(1), reduction="sum") + 0.1 * out.square().sum()
    ),
    "largest of as many losses": lambda net, out, want, mask: torch.stack([mse(out, want)] * SAMPLES).max(),
    "mean of sums": lambda net, out, want, mask: (out - want).square().sum(0).mean(),
    "chosen rows beside": lambda net, out, want, mask: bce(out[mask > 0, 0], mask[mask > 0]) + out.square().mean(),
    "mean of a mask beside": lambda net, out, want, mask: (
        (out - want).square().mean(1)[mask > 0].mean() + out.square().mean()
    ),
    "means of masks": lambda net, out, want, mask: sum(mse(out[mask == each], want[mask == each]) for each in (0, 1)),
}
TAKEN: dict[str, Loss] = {
    "mean": lambda net, out, want, mask: mse(out, want),
    "sum over samples": lambda net, out, want, mask: mse(out, want, reduction="sum") / len(out),
    "weighted": lambda net, out, want, mask: masked(out, want, mask) / len(out),
    "mean over elements by hand": lambda net, out, want, mask: (out - want).square().sum() / out.numel(),
    "sum times a constant": lambda net, out, want, mask: (out - want).square().sum() * (1 / len(out)),
    "sum of parts": lambda net, out, want, mask: ((out - want) / len(out)).abs().sum(),
    "mean by weights": lambda net, out, want, mask: (
        (out - want).square().mean(1) @ torch.full((SAMPLES,), 1 / SAMPLES, dtype=torch.float64)
    ),
    "as many losses as samples": lambda net, out, want, mask: torch.stack([mse(out, want)] * SAMPLES).sum(),
    "as many learned weights": lambda net, out, want, mask: (
        torch.stack([mse(out, want)] * SAMPLES) * (-net[0].bias).exp() + net[0].bias
    ).sum(),
    "means of columns": lambda net, out, want, mask: (out - want).square().mean(0).mean(),
    "largest of each": lambda net, out, want, mask: (out - want).abs().amax(1).mean() + out.var(1).mean(),
    "norm of a product": lambda net, out, want, mask: mse(out, want) + 0.1 * (net[0].weight.T @ net[2].weight.T).norm(),
    "norm of a product of as many rows": lambda net, out, want, mask: (
        mse(out, want) + (net[0].weight @ net[2].weight).norm() + (net[0].weight @ net[2].weight).square().sum().sqrt()
    ),
    "distance of as many weights": lambda net, out, want, mask: (
        mse(out, want) + (net[0].weight - net[2].weight.T).norm() + (net[0].weight - net[2].weight.T).abs().max()
    ),
    "half a mean": lambda net, out, want, mask: 0.5 * (out - want).square().sum() / len(out),
    "half of each": lambda net, out, want, mask: (0.5 * (out - want).square().sum(1)).mean() - 0.5 * mse(out, want),
    "sum for all data": lambda net, out, want, mask: (out - want).square().sum() * (100 / len(out)),
    "half a penalty": lambda net, out, want, mask: mse(out, want) + 0.5 * net[0].weight.square().sum(),
    "nothing of a sum": lambda net, out, want, mask: mse(out, want) + 0 * out.sum() + out.max() * 0.0,
    "nothing of all": lambda net, out, want, mask: out.sum() * 0,
    "nothing of a sum of weights": lambda net, out, want, mask: (
        entropy(out, want.argmax(1).masked_fill(mask == 0, -100)) + 0.0 * sum(p.sum() for p in net.parameters())
    ),
    "mean of tokens": lambda net, out, want, mask: by_token(net, out).mean(),
    "sum of tokens over their number": lambda net, out, want, mask: by_token(net, out).sum() / (4 * SAMPLES),
    "focal loss of tokens": lambda net, out, want, mask: (lambda each: ((1 - (-each).exp()) ** 2 * each).mean())(
        entropy(net[0](out).view(SAMPLES, 4, 2).flatten(0, 1), torch.arange(4 * SAMPLES) % 2, reduction="none")
    ),
    "half a cross-entropy's mean": lambda net, out, want, mask: (
        entropy(out, want.argmax(1), reduction="sum") * (0.5 / len(out))
    ),
    "cross-entropy over all targets": lambda net, out, want, mask: (
        entropy(out, want.argmax(1).masked_fill(mask == 0, -100), reduction="sum") / len(out)
    ),
    "similarity of pairs": lambda net, out, want, mask: (net[0](want) @ net[0](want).T).mean() + mse(out, want),
    "layer without a bias": lambda net, out, want, mask: (
        functional.linear(net[0](want).tanh(), net[0](net[0].weight.new_ones(SAMPLES, 3)).detach()).square().mean()
        + functional.linear(net[1](net[0](want)), net[0].weight @ net[2].weight).square().mean()
    ),
    "sum by einsum": lambda net, out, want, mask: torch.einsum("bi,bi->", out, want) / 8 + mse(out, want),
    "products by einsum": lambda net, out, want, mask: torch.einsum("bi,ij->bj", out, want[:3]).square().mean(),
    "sum of as many columns' means": lambda net, out, want, mask: net[0](want).square().mean(0).sum(),
    "losses of single rows": lambda net, out, want, mask: (
        sum(mse(net(want[k : k + 1]), want[k : k + 1]) for k in range(SAMPLES)) / SAMPLES
    ),
    "two terms": lambda net, out, want, mask: 0.3 * mse(out, want) + out.abs().mean() / 4,
    "learned weights": lambda net, out, want, mask: mse(out, want) * (-net[0].bias[0]).exp() + net[0].bias[0],
    "penalty": lambda net, out, want, mask: mse(out, want) + sum(p.square().sum().sqrt() for p in net.parameters()),
    "Gram penalty": lambda net, out, want, mask: (
        mse(out, want) + (net[0].weight @ net[0].weight.T).square().sum().sqrt()
    ),
    "anchor": lambda net, out, want, mask: mse(out, want) + mse(net[2].bias, torch.zeros(3).double()),
    "detached weight": lambda net, out, want, mask: mse(out, want) * mask.sum() / 8,
    "norms of samples": lambda net, out, want, mask: (out - want).norm(dim=1).mean(),
    "hinge": lambda net, out, want, mask: (1 - out * want).relu().mean(),
    "cross-entropy of chosen rows": lambda net, out, want, mask: entropy(out[mask > 0], want.argmax(1)[mask > 0]),
    "sum and count": lambda net, out, want, mask: (masked(out, want, mask), mask.sum()),
    "mean over chosen rows": lambda net, out, want, mask: mse(out[mask > 0, 0], want[mask > 0, 0]),
    "root as one says": lambda net, out, want, mask: (mse(out, want).sqrt() * len(out), len(out)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused_in_a_part_of_the_batch(name: str) -> None:
    with pytest.raises(UsageError, match="the losses of the parts do not add up"):
        read(REFUSED[name])
    read(REFUSED[name], whole=True)


def test_a_mean_of_columns_counts_samples() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 5)
    for samples in (2, 3):
        loss = net(torch.randn(samples, 3)).square().mean(0).mean()
        _, _, found = read_loss(loss, MicroBatch(0, 0, None, samples, 1 / 5, 0, True))
        assert float(found.sums[1]) == samples


@pytest.mark.parametrize("name", TAKEN)
def test_means_over_samples_are_taken(name: str) -> None:
    read(TAKEN[name])


def errors(out: Tensor, want: Tensor) -> Tensor:
    return (out - want).square().mean(1)


UNDIVIDED: dict[str, Loss] = {
    "weights of samples": lambda net, out, want, mask: (errors(out, want) * mask).sum(),
    "inner product": lambda net, out, want, mask: errors(out, want) @ mask,
    "einsum": lambda net, out, want, mask: -torch.einsum("b,b->", errors(out, want), mask),
    "divided targets": lambda net, out, want, mask: (out * (want / 3)).sum(1).neg().sum(),
    "sum of samples": lambda net, out, want, mask: sum(
        each.abs() * weight for each, weight in zip(errors(out, want), 1 + mask, strict=True)
    ),
    "stacked samples": lambda net, out, want, mask: (
        lambda each: torch.stack([each[k] * (1 + mask[k]) for k in range(SAMPLES)]).sum()
    )(errors(out, want)),
    "parts of samples": lambda net, out, want, mask: (
        sum((out[k, : 1 + k % 3] - 1).square().sum() for k in range(SAMPLES)) / 13
    ),
    "trace": lambda net, out, want, mask: torch.trace((out - want) @ (out - want).T),
    "sum of chosen samples": lambda net, out, want, mask: errors(out, want)[mask > 0].sum() / 5,
    "Poisson": lambda net, out, want, mask: functional.poisson_nll_loss(out, want.abs(), reduction="sum"),
    "einsum of all": lambda net, out, want, mask: torch.einsum("bc,bc->", out - want, out - want) / 3,
    "einsum of features": lambda net, out, want, mask: torch.einsum("bc,c->", (out - want).abs(), want[0]),
    "log-probability of a normal distribution": lambda net, out, want, mask: (
        -Independent(Normal(out, torch.ones(3).double()), 1).log_prob(want).sum()
    ),
    "last of running sums": lambda net, out, want, mask: errors(out, want).cumsum(0)[-1],
    "last row of running sums": lambda net, out, want, mask: (out - want).abs().cumsum(0)[-1].mean(),
    "dot with ones": lambda net, out, want, mask: errors(out, want).dot(torch.ones(SAMPLES).double()),
    "row of ones times rows": lambda net, out, want, mask: (
        torch.ones(1, SAMPLES).double() @ (out - want).abs()
    ).mean(),
    "row of ones times a vector": lambda net, out, want, mask: torch.ones(1, SAMPLES).double() @ errors(out, want),
    "columns times ones": lambda net, out, want, mask: ((out - want).abs().T @ torch.ones(SAMPLES).double()).mean(),
    "flat row times flat column": lambda net, out, want, mask: (
        (out - want).view(1, -1) @ (out - want).view(-1, 1)
    ).squeeze(),
    "trace of products": lambda net, out, want, mask: torch.trace((out - want).T @ (out - want)),
    "losses of samples": lambda net, out, want, mask: sum(mse(*pair) for pair in zip(out, want, strict=True)),
    "norms of samples": lambda net, out, want, mask: sum((each - 1).norm() for each in out) / 3,
    "cross-entropies of single rows": lambda net, out, want, mask: sum(
        entropy(out[k : k + 1], want[k : k + 1].argmax(1)) for k in range(SAMPLES)
    ),
    "losses of calls for each sample": lambda net, out, want, mask: sum(
        mse(net(want[k : k + 1]), want[k : k + 1]) for k in range(SAMPLES)
    ),
    "stacked losses of calls for each sample": lambda net, out, want, mask: torch.stack(
        [entropy(net(want[k : k + 1]), want[k : k + 1].argmax(1)) for k in range(SAMPLES)]
    ).sum(),
    "losses of split rows": lambda net, out, want, mask: sum(map(mse, out.split(1), want.split(1))),
}
DIVIDED: dict[str, Loss] = {
    "einsum over all": lambda net, out, want, mask: torch.einsum("bc,bc->", out - want, out - want) / out.numel(),
    "einsum by samples": lambda net, out, want, mask: torch.einsum("bc,bc->b", out, want).mean(),
    "einsum of tokens": lambda net, out, want, mask: (
        torch.einsum("bti,ij->btj", net[0](want).view(SAMPLES, 4, 2), torch.eye(2).double()).square().mean()
    ),
    "attention": lambda net, out, want, mask: (
        (lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x)(net[0](want).view(SAMPLES, 2, 4)).square().mean()
    ),
    "mean log-probability of a normal distribution": lambda net, out, want, mask: (
        -Independent(Normal(out, torch.ones(3).double()), 1).log_prob(want).mean()
    ),
    "losses of calls for each sample over their number": lambda net, out, want, mask: (
        sum(mse(net(want[k : k + 1]), want[k : k + 1]) for k in range(SAMPLES)) / SAMPLES
    ),
    "mean of losses of calls for each sample": lambda net, out, want, mask: torch.stack(
        [entropy(net(want[k : k + 1]), want[k : k + 1].argmax(1)) for k in range(SAMPLES)]
    ).mean(),
    "dot with shares": lambda net, out, want, mask: errors(out, want).dot(torch.full((SAMPLES,), 1 / SAMPLES).double()),
    "last of running sums over all": lambda net, out, want, mask: errors(out, want).cumsum(0)[-1] / SAMPLES,
    "mean of running sums of features": lambda net, out, want, mask: out.cumsum(1)[:, -1].mean(),
    "mean of losses of samples": lambda net, out, want, mask: (
        sum(mse(*pair) for pair in zip(out, want, strict=True)) / SAMPLES
    ),
    "cross-entropies of single rows over their number": lambda net, out, want, mask: torch.stack(
        [entropy(out[k : k + 1], want[k : k + 1].argmax(1)) for k in range(SAMPLES)]
    ).mean(),
    "inner product over samples": lambda net, out, want, mask: errors(out, want) @ mask / SAMPLES,
    "mean of samples": lambda net, out, want, mask: torch.stack(list(errors(out, want))).mean(),
    "sum of samples over their number": lambda net, out, want, mask: sum(errors(out, want).unbind()) / SAMPLES,
    "parts of samples over their number": lambda net, out, want, mask: (
        sum(out[k, :2].mean() for k in range(SAMPLES)) / SAMPLES
    ),
    "chosen samples over their number": lambda net, out, want, mask: errors(out, want)[mask > 0].sum() / SAMPLES,
    "mean of chosen samples": lambda net, out, want, mask: errors(out, want)[mask > 0].mean(),
    "mean of rows": lambda net, out, want, mask: errors(out, want)[:5].mean(),
    "columns": lambda net, out, want, mask: sum(mse(out[:, k], want[:, k]) for k in range(3)),
    "smoothing": lambda net, out, want, mask: entropy(out, want.argmax(1), label_smoothing=0.1),
    "elements of a parameter": lambda net, out, want, mask: (
        mse(out, want) + sum(net[0].bias[k] for k in range(SAMPLES))
    ),
    "without NaN": lambda net, out, want, mask: torch.where(mask > 0, errors(out, want), torch.nan).nanmean(),
}


PAIRS = ("sum and count", "root as one says")


def adds(loss: Loss, may_divide: bool) -> bool:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, SAMPLES), nn.Tanh(), nn.Linear(SAMPLES, 3)).double()
    inputs, mask = torch.randn(SAMPLES, 3, dtype=torch.float64), (torch.arange(SAMPLES) < 5).double()
    return undivided_sum(
        loss(net, net(inputs), inputs, mask).grad_fn, SAMPLES, lambda _: may_divide, lambda _: may_divide
    )


@pytest.mark.parametrize("name", UNDIVIDED)
def test_a_sum_over_samples_that_nothing_divides_is_found(name: str) -> None:
    assert adds(UNDIVIDED[name], may_divide=False)


@pytest.mark.parametrize("name", [*DIVIDED, *(name for name in TAKEN if name not in PAIRS)])
def test_a_mean_over_samples_is_no_undivided_sum(name: str) -> None:
    assert not adds((TAKEN | DIVIDED)[name], may_divide=True)


def test_a_sum_over_two_samples_may_be_divided_by_a_sum_over_them() -> None:
    """As the mean over observed times of transformers' time series; two may also be a number of a formula."""
    losses, observed = nn.Linear(3, 5)(torch.randn(2, 3)).square(), torch.ones(2, 5)
    for batch in ((), memories_of([observed])):
        statistics = BatchStatistics(2, batch)
        number = observed.sum()
        statistics.note("sum", (observed,), number)
        divisor = number.clamp(min=1.0)
        statistics.note("clamp", (number,), divisor)
        may_divide = partial(statistics.may_divide, reads_sizes=False)
        for loss, is_found in (((losses * observed).sum() / divisor, False), (losses.sum() / 10, True)):
            assert undivided_sum(loss.grad_fn, 2, may_divide, may_scale=lambda _: False) == is_found


def test_a_single_sample_may_be_divided_by_one() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    error = net(torch.randn(1, 3)).square()
    for loss in (error.mean() + error.sum() / 1, error[torch.tensor([0])].sum() / 1, 2 * error.sum() / 1):
        read_loss(loss, MicroBatch(0, 0, None, 1, 1 / 8, 0, True))


def test_a_loss_times_zero_counts_no_samples() -> None:
    net = nn.Linear(3, 5)
    loss = net(torch.randn(4, 3)).sum() * 0
    for whole, count in ((False, 0), (True, 4)):
        _, _, found = read_loss(loss, MicroBatch(0, 0, None, 4, 1 / 8, 0, True, whole=whole))
        assert float(found.sums[1]) == count
