"""Python numbers that a script computes from all samples of a micro-batch are refused once a loss has them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.train.test_places_of_samples import BATCH, PLACES, dataset, errors, made, shares, trained, trained_plainly
from tutti.errors import UsageError

mse = functional.mse_loss
Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]


def balanced(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Two terms of one size, as by GradNorm's simplest form."""
    out = net(x)
    one, other = mse(out, want), out.abs().mean()
    return one + other * (one.item() / other.item())


def clamped(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    each = errors(net(x), want)
    return each.clamp(max=float(torch.quantile(each.detach(), 0.8))).mean()


def weighted(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Classes weighted by their counts in the batch."""
    found = (kind == 1).sum().item()
    weight = (len(kind) - found) / max(found, 1)
    return (errors(net(x), want) * torch.where(kind == 1, weight, 1.0)).mean()


def counted(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    weights = [1 / (1 + count) for count in torch.bincount(kind, minlength=3).tolist()]
    return functional.cross_entropy(net(x)[:, :3], kind, torch.tensor(weights).double(), reduction="none").mean()


def advantages(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    reward = want[:, 0]
    chosen = net(x).log_softmax(1)[:, 0]
    return -((reward - reward.mean().item()) / math.sqrt(float(reward.var()) + 1e-8) * chosen).mean()


def beside_single_ones(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A number of all samples, in a body that reads a single one, too."""
    each, first = errors(net(x), want), kind[0].item()
    return each.mean() * each.mean().item() + 0 * first


def decided(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A factor that a condition on the loss chooses, with a read by NumPy."""
    out = net(x)
    loss = mse(out, want)
    scale = float(np.asarray(loss.detach()))
    return loss * (scale if scale > 0 else 1.0)


SMALL = 1e-12


def log_sum_exp(net: nn.Module, x: Tensor, kind: Tensor, read: Callable[[Tensor], float]) -> Tensor:
    """A cross-entropy by hand, from which the largest score cancels, beside a constant."""
    out = net(x)[:, :3]
    most = read(out.detach().max())
    return (most + ((out - most).exp().sum(1) + SMALL).log() - out.gather(1, kind[:, None])[:, 0]).mean() * 0.5


def twice_in_a_line(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A number that cancels, and one that does not."""
    out = net(x)[:, :3]
    most, least = out.max().item(), out.min().item()
    return ((out - most).log_softmax(1)[:, 0] * (out - least)[:, 1]).mean()


def varied(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A variance, whose derivative by the mean that it subtracts is 0."""
    out = net(x)
    mean = out.mean().item()
    return mse(out, want) + (out - mean).square().mean()


def hardly_varied(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A variance whose weight is next to 0 in the first steps, as in a warm-up."""
    out = net(x)
    mean = out.mean().item()
    return mse(out, want) + 1e-7 * (out - mean).square().mean()


REFUSED: dict[str, Loss] = {
    "a variance": varied,
    "a variance of small weight": hardly_varied,
    "two numbers in a line": twice_in_a_line,
    "two terms balanced": balanced,
    "clamped at a quantile": clamped,
    "weights of classes": weighted,
    "weights by counts": counted,
    "normalised advantages": advantages,
    "a factor of the loss": decided,
    "beside a single sample": beside_single_ones,
    "a smoothing by the share": lambda net, x, want, kind: functional.cross_entropy(
        net(x), kind, label_smoothing=0.1 * float((kind == 1).double().mean())
    ),
    "a margin": lambda net, x, want, kind: functional.relu(
        (net(x) - want).abs().mean(1) - want.abs().mean().item()
    ).mean(),
}


def logged(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Numbers of the samples for a log alone."""
    loss = mse(net(x), want)
    average = 0.9 + 0.1 * loss.item() / float(want.abs().mean())
    assert torch.full((2,), average).mul(average).isfinite().all()
    return loss * 0.5 + 0.25 * loss


def per_sample(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Weights of single samples, read one by one."""
    each, total = errors(net(x), want), torch.zeros((), dtype=torch.float64)
    for k, own in enumerate(want):
        total = total + each[k] * (1.0 + own.abs().sum().item())
    return total / len(x)


def by_class(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    each, weights = errors(net(x), want), (0.5, 1.0, 2.5)
    return sum((weights[int(one)] * each[kind == one].sum() for one in kind.unique()), torch.zeros(())) / len(x)


def masked(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Any:
    """A sum by its count, with a number of the samples that both have."""
    each, mask = errors(net(x), want), kind > 0
    number = mask.sum().item()
    return (each * mask).mean() * len(x) / number * number, number


def guarded(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A number that is the same for every micro-batch, though it is computed from the samples."""
    loss = mse(net(x), want)
    bound = 1.0 if math.isfinite(loss.item()) else 0.0
    return loss * bound * float(kind.clamp(0, 0).sum() + 2) / 2


def shifted(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Tokens by their number, which cross-entropy has divided by, too."""
    targets = torch.where(want[:, :3] > 0.7, -100, (want[:, :3] > 0).long())
    loss = functional.cross_entropy(net(x).view(-1, 2), targets.flatten(), reduction="sum")
    return loss / (targets >= 0).sum().item()


TAKEN: dict[str, Loss] = {
    "for a log": logged,
    "weights of samples": per_sample,
    "weights of a table": by_class,
    "a sum by its count": masked,
    "the same number": guarded,
    "a number of tokens": shifted,
    "a largest score": lambda net, x, want, kind: log_sum_exp(net, x, kind, Tensor.item),
    "a largest score by NumPy": lambda net, x, want, kind: log_sum_exp(net, x, kind, lambda most: most.numpy().max()),
    "a mean and its number": lambda net, x, want, kind: (lambda loss: (loss * len(x) * (1 + 0 * loss.item()), len(x)))(
        mse(net(x), want)
    ),
}


def train(name: str, strategy: str, micro_batch: int | None, how: str, own: nn.Module | None = None) -> Any:
    return trained((REFUSED | TAKEN | DRAWN)[name], own or made(), strategy, micro_batch, how)


def train_all(names: list[str], strategy: str, micro_batch: int | None, how: str) -> list[Any]:
    return [train(name, strategy, micro_batch, how) for name in names]


def plain(names: list[str], own: nn.Module | None = None) -> list[Any]:
    return [trained_plainly(TAKEN[name], own) for name in names]


@pytest.mark.parametrize(("place", "names"), shares(list(REFUSED)))
def test_a_number_of_all_samples_is_refused_before_the_first_update(place: int, names: list[str]) -> None:
    ranks, strategy, micro, how = PLACES[place]
    for found in worlds.run(ranks, train_all, names=names, strategy=strategy, micro_batch=micro, how=how):
        for name, each in zip(names, found, strict=True):
            # Of a factor of the whole loss another check says more.
            is_factor = "scaled by a number that is another one for each micro-batch" in str(each[1])
            assert each[0] == 0 and (is_factor or "from all samples of one micro-batch" in str(each[1])), (name, each)
            assert is_factor or "test_sample_reads.py:" in each[1], (name, each)


@pytest.mark.parametrize(("place", "names"), shares(list(TAKEN)))
def test_numbers_of_single_samples_counts_and_logs_are_right(place: int, names: list[str]) -> None:
    ranks, strategy, micro, how = PLACES[place]
    how = "step" if how == "step" else "run.backward"
    want = worlds.alone(plain, names=names)
    for found in worlds.run(ranks, train_all, names=names, strategy=strategy, micro_batch=micro, how=how):
        for name, each, of_plain in zip(names, found, want, strict=True):
            assert each == pytest.approx(of_plain, abs=1e-12), name


def doubled(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    loss = mse(net(x), want)
    if loss.item() > 1.3:
        loss = 2 * loss
    return loss


def doubled_tensor(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    out = net(x)
    loss = mse(out, want)
    if loss > 1.3:
        loss += out.abs().mean()
    return loss


def by_accuracy(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    out = net(x)
    accuracy = (out.argmax(1) == kind).double().mean().item()
    loss = functional.cross_entropy(out, kind)
    return loss if 1 - accuracy < 0.7 else loss + 0.1 * out.square().mean()


def bounded(loss: Tensor) -> Tensor:
    """A function that the loss function calls."""
    if float(loss) > 1.3:
        return loss.log1p()
    return loss


def finite(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    loss = mse(net(x), want)
    if not math.isfinite(loss.item()) or loss.item() == float("inf") or loss != loss:
        loss = loss * 0
    return loss


def if_any(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    each = errors(net(x), want)
    loss, found = each.mean(), (kind == 1).sum().item()
    if found > 0 and (kind == 1).any():
        loss = loss + 0.5 * (each * (kind == 1)).sum() / len(x)
    return loss


def if_any_later(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Conditions on other numbers beside those that ask for samples of a kind, and a small number in place of 0."""
    each, found, epoch = errors(net(x), want), kind == 1, len(kind.shape)
    loss = each.mean()
    if epoch >= 1 and found.any():
        loss = loss + 0.25 * (each * found).sum() / len(x)
    if epoch >= 1 and found.sum() > 0 and found.sum().item() > 1e-8:
        loss = loss + 0.25 * (each * found).sum() / len(x)
    return loss


def loss_and_grade(net: nn.Module, x: Tensor, want: Tensor) -> tuple[Tensor, str]:
    loss = mse(net(x), want)
    return loss, "high" if loss.item() > 1.3 else "low"


def graded_beside(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    loss = loss_and_grade(net, x, want)[0]
    return loss


def grade(loss: Tensor) -> str:
    return "high" if loss.item() > 1.3 else "low"


def graded(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """Conditions for a log alone, which an object of the loss function keeps, too."""
    loss, best, kept = mse(net(x), want), 9.0, SimpleNamespace(best=9.0, scale=1.0)
    if loss.item() < best:
        best = kept.best = loss.item()
    assert grade(loss) in ("high", "low") and best == kept.best < 9
    return loss * kept.scale


def one_by_one(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    each, total = errors(net(x), want), torch.zeros((), dtype=torch.float64)
    for k in range(len(x)):
        if each[k].item() > 1.3:
            total = total + each[k]
    return total / len(x)


BRANCHES: dict[str, tuple[Loss, bool]] = {
    "a loss that is doubled": (doubled, False),
    "a term by a tensor": (doubled_tensor, False),
    "a term by the accuracy": (by_accuracy, False),
    "in a function": (lambda net, x, want, kind: bounded(mse(net(x), want)), False),
    "finite": (finite, True),
    "any of a kind": (if_any, True),
    "any of a kind, with other conditions": (if_any_later, True),
    "for a log": (graded, True),
    "for a log, returned beside the loss": (graded_beside, True),
    "samples one by one": (one_by_one, True),
}


def exchanged(net: nn.Module, x: Tensor, want: Tensor, kind: Tensor) -> Tensor:
    """A condition on the mean of all ranks."""
    loss = mse(net(x), want)
    return loss * 2 if tutti.allreduce(loss.detach()).item() > 1.3 else loss


def train_exchanged(how: str) -> Any:
    return trained(exchanged, made(), "mirrored", None, how)


def train_branches(names: list[str], strategy: str, micro_batch: int | None, how: str) -> list[Any]:
    return [trained(BRANCHES[name][0], made(), strategy, micro_batch, how) for name in names]


def plain_branches(names: list[str]) -> list[Any]:
    return [trained_plainly(BRANCHES[name][0]) for name in names]


@pytest.mark.parametrize(("place", "names"), shares(list(BRANCHES)))
def test_conditions_on_a_number_of_all_samples_are_refused_where_they_decide_on_the_loss(
    place: int, names: list[str]
) -> None:
    ranks, strategy, micro, how = PLACES[place]
    how, want = "step" if how == "step" else "run.backward", worlds.alone(plain_branches, names=names)
    for found in worlds.run(ranks, train_branches, names=names, strategy=strategy, micro_batch=micro, how=how):
        for name, each, of_plain in zip(names, found, want, strict=True):
            if BRANCHES[name][1]:
                assert each == pytest.approx(of_plain, abs=1e-12), (name, each)
            else:
                assert each[0] == 0 and "a condition on a number of all samples" in str(each[1]), (name, each)
                assert "test_sample_reads.py:" in each[1], (name, each)


def test_a_condition_on_a_number_of_all_ranks_is_right() -> None:
    [want] = worlds.alone(plain_branches, names=list(BRANCHES)[:1])
    for ranks, how in ((2, "run.backward"), (3, "step")):
        assert worlds.run(ranks, train_exchanged, how=how) == [pytest.approx(want, abs=1e-12)] * ranks


DRAWN: dict[str, Loss] = {
    "by Python": lambda net, x, want, kind: mse(net(x), want) * (want.mean().item() * 0 + random.random()),
    "by NumPy": lambda net, x, want, kind: mse(net(x), want) * (want.mean().item() * 0 + np.random.beta(1, 1)),
    "by PyTorch": lambda net, x, want, kind: mse(net(x), want) * (want.mean().item() * 0 + torch.rand(()).item()),
    "by a distribution": lambda net, x, want, kind: (
        mse(net(x), want) * (want.mean().item() * 0 + torch.distributions.Beta(1.0, 1.0).sample().item())
    ),
}


@pytest.mark.parametrize(("ranks", "strategy", "micro"), [(2, "mirrored", None), (1, "single", 8)])
def test_draws_are_no_numbers_of_the_samples(ranks: int, strategy: str, micro: int | None) -> None:
    for how in ("run.backward", "step"):
        for found in worlds.run(ranks, train_all, names=list(DRAWN), strategy=strategy, micro_batch=micro, how=how):
            assert all(isinstance(each, list) for each in found), found


HOOKS: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {}


def hooked(is_right: bool) -> Callable[[Callable[[nn.Module], Any]], Callable[[nn.Module], Any]]:
    def add(register: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
        HOOKS[register.__name__] = register, is_right
        return register

    return add


@hooked(is_right=False)
def outputs_by_their_mean(net: nn.Module) -> Any:
    return net[0].register_forward_hook(lambda module, given, out: out / float(out.detach().abs().mean()))


@hooked(is_right=False)
def outputs_by_a_running_mean(net: nn.Module) -> Any:
    own = {"mean": 1.0}

    def divide(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        own["mean"] = 0.9 * own["mean"] + 0.1 * float(out.detach().abs().mean())
        return out / own["mean"]

    return net[0].register_forward_hook(divide)


@hooked(is_right=False)
def gradients_by_their_mean(net: nn.Module) -> Any:
    return net[1].register_full_backward_hook(lambda module, inner, outer: (inner[0] / float(inner[0].abs().mean()),))


@hooked(is_right=False)
def gradients_by_a_running_mean(net: nn.Module) -> Any:
    own = {"mean": 1.0}

    def divide(slope: Tensor) -> Tensor:
        own["mean"] = 0.9 * own["mean"] + 0.1 * slope.abs().mean().item()
        return slope / own["mean"]

    return net[1].register_forward_hook(lambda module, given, out: out.register_hook(divide) and None)


@hooked(is_right=False)
def gradients_by_the_last_mean(net: nn.Module) -> Any:
    own = {"mean": 1.0}

    def divide(slope: Tensor) -> Tensor:
        before, own["mean"] = own["mean"], float(slope.abs().mean())
        return slope / before

    return net[1].register_forward_hook(lambda module, given, out: out.register_hook(divide) and None)


@hooked(is_right=True)
def gradients_reversed_and_logged(net: nn.Module) -> Any:
    own = {"mean": 1.0}

    def reverse(slope: Tensor) -> Tensor:
        own["mean"] = 0.9 * own["mean"] + 0.1 * float(slope.abs().mean() / own["mean"])
        return slope.clamp(-1, 1) * -0.5

    return net[1].register_forward_hook(lambda module, given, out: out.register_hook(reverse) and None)


def train_hooked(strategy: str, micro_batch: int | None, how: str) -> list[Any]:
    found = []
    for register, _ in HOOKS.values():
        model = made()
        register(model)
        found.append(train("for a log", strategy, micro_batch, how, model))
    return found


def plain_hooked() -> list[Any]:
    found = []
    for register, is_right in HOOKS.values():
        model = made()
        register(model)
        found += plain(["for a log"], model) if is_right else [None]
    return found


@pytest.mark.parametrize("place", [0, 2])
def test_hooks_that_scale_by_numbers_of_a_micro_batch_are_refused(place: int) -> None:
    ranks, strategy, micro, how = PLACES[place]
    want = worlds.alone(plain_hooked)
    for found in worlds.run(ranks, train_hooked, strategy=strategy, micro_batch=micro, how=how):
        for (name, (_, is_right)), each, of_plain in zip(HOOKS.items(), found, want, strict=True):
            if is_right:
                assert each == pytest.approx(of_plain, abs=1e-12), name
                continue
            assert each[0] == (name == "gradients_by_the_last_mean" and micro is None), (name, each)
            assert "from all samples" in each[1] and "test_sample_reads.py:" in each[1], (name, each)


def two_losses(kind: str) -> Any:
    """Two losses a body with constants of their own, and a log: sums of the tensors, or the updates and the refusal."""
    net, log = made(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options: Any = {} if kind == "whole" else {"micro_batch": 3}
    run = tutti.prepare(net, optimizer, dataset(), batch_size=BATCH, workers=1, seed=0, **options)
    try:
        for x, want, _ in run.microbatches(0):
            optimizer.zero_grad()
            loss = mse(net(x), want)
            log.append(loss.item())
            torch.autograd.grad(0.01 * net(x).square().mean(), next(net.parameters()))
            run.backward(0.5 * loss)
            run.backward((log[-1] if kind == "by its value" else 0.25) * net(x).square().mean())
            optimizer.step()
    except UsageError as error:
        return run.updates, str(error)
    return [float(value.sum()) for value in net.state_dict().values()]


def test_losses_of_a_body_have_constants_of_their_own() -> None:
    whole, parts, by_value = (worlds.run(1, two_losses, kind=kind)[0] for kind in ("whole", "parts", "by its value"))
    assert parts == pytest.approx(whole, abs=1e-12)
    assert by_value[0] == 0 and "another one for each micro-batch" in by_value[1], by_value
