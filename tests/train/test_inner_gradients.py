"""Losses with gradients in them: as on one device, or refused where the micro-batch's own gradients are others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches
from tutti.errors import UsageError

BATCH = 12
Loss = Callable[[Any, Tensor, Tensor], Tensor]
entropy, gradients = functional.cross_entropy, torch.autograd.grad


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(24, 5, generator=draw, dtype=torch.float64), torch.randint(0, 3, (24,), generator=draw)
    )


def of_inputs(net: Any, x: Tensor, y: Tensor, reduction: str, graph: bool = False) -> tuple[Tensor, Tensor]:
    """A loss, and its gradient with respect to the inputs."""
    inputs = x.clone().requires_grad_()
    loss: Tensor = entropy(net(inputs), y, reduction=reduction)
    return loss, gradients(loss, inputs, create_graph=graph)[0]


def penalised(net: Any, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    loss, slopes = of_inputs(net, x, y, reduction, graph=True)
    penalty: Tensor = (slopes.norm(dim=1) - 1).square().mean()
    return (loss if reduction == "mean" else loss / len(x)) + penalty


def adversarial(step: Callable[[Tensor], Tensor], reduction: str = "mean") -> Loss:
    return lambda net, x, y: entropy(net((x + step(of_inputs(net, x, y, reduction)[1])).detach()), y)


def balanced(ratio: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """Two losses, the second one weighted by gradients of the last layer, as in VQGAN (arXiv 2012.09841)."""

    def loss(net: Any, x: Tensor, y: Tensor) -> Tensor:
        outputs, weight = net(x), net[2].weight
        one, other = entropy(outputs, y), outputs.square().mean()
        slopes = [gradients(each, weight, retain_graph=True)[0] for each in (one, other)]
        balanced: Tensor = one + ratio(*slopes).detach() * other
        return balanced

    return loss


def of_weights(net: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = entropy(net(x), y)
    slope: Tensor = gradients(loss, net[2].weight, create_graph=True)[0]
    return loss + slope.square().mean()


def between(net: Any, x: Tensor, y: Tensor, whole: Callable[[Tensor], Tensor] | None) -> Tensor:
    """A penalty at points that are drawn between two samples each, as of a WGAN-GP (arXiv 1704.00028)."""
    outputs, weights = net(x), torch.rand(len(x), 1, dtype=x.dtype)
    points = (weights * x + (1 - weights) * x.tanh()).requires_grad_()
    slope = whole_slope(net(points), points, whole).view(len(x), -1)
    penalty: Tensor = ((slope.norm(2, 1) - 1) ** 2).mean()
    return entropy(outputs, y) + 10 * penalty


def whole_slope(values: Tensor, points: Tensor, whole: Callable[[Tensor], Tensor] | None) -> Tensor:
    if whole is None:
        return gradients(values, points, torch.ones_like(values), create_graph=True)[0]
    return gradients(whole(values), points, create_graph=True)[0]


def at_samples(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """The penalty R1 (arXiv 1801.04406)."""
    inputs = x.clone().requires_grad_()
    outputs = net(inputs)
    slope = gradients(outputs.sum(), inputs, create_graph=True)[0]
    penalty: Tensor = slope.view(slope.size(0), -1).square().sum(1).mean()
    return entropy(outputs, y) + penalty


def view_of_mean(net: Any, x: Tensor, y: Tensor) -> Tensor:
    loss, slopes = of_inputs(net, x, y, "mean", graph=True)
    penalty: Tensor = (slopes.view(slopes.size(0), -1).norm(2, 1) - 1).square().mean()
    return loss + penalty


def by_tasks(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A step for each sample as a task, as in MAML (arXiv 1703.03400), and the squares of its gradients."""
    losses = []
    for each, target in zip(x.unbind(), y.unbind(), strict=True):
        weights = dict(net.named_parameters())
        outputs = (each @ weights["0.weight"].T + weights["0.bias"]).tanh() @ weights["2.weight"].T + weights["2.bias"]
        slopes = gradients(entropy(outputs, target), list(weights.values()), create_graph=True)
        moved = {key: value - 0.1 * slope for (key, value), slope in zip(weights.items(), slopes, strict=True)}
        loss = entropy(torch.func.functional_call(net, moved, (each[None],)), target[None])
        losses.append(loss + slopes[2].square().sum())
    return torch.stack(losses).mean()


def perturbed(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Steps by the sign from a perturbation that is a parameter, as in PGD (arXiv 1706.06083)."""
    change = nn.Parameter(torch.zeros_like(x))
    for _ in range(2):
        slope = gradients(entropy(net(x + change), y), change)[0]
        change = nn.Parameter((change + 0.05 * slope.sign()).clamp(-0.1, 0.1).detach())
    loss: Tensor = entropy(net(x + change.detach()), y)
    return loss


def in_towers(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two gradients of one number, for disjoint parts, after the first of which its graph is partly freed."""
    first, second = net(x), net(x.cos())
    number = first.square().mean() + second.tanh().mean()
    gradients(number, [first])
    with suppress(RuntimeError):
        gradients(number, [second])
    return entropy(net(x), y)


def averaged(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weights by the norm of a gradient that collectives have averaged, one by an in-place call of PyTorch's own."""
    outputs, weight = net(x), net[2].weight
    slope = gradients(entropy(outputs, y), weight, retain_graph=True)[0]
    other = gradients(outputs.square().mean(), weight, retain_graph=True)[0]
    if dist.is_initialized():
        dist.all_reduce(slope)
        slope = slope / dist.get_world_size()
        other = tutti.allreduce(other)
    loss: Tensor = entropy(outputs, y) + (slope.norm() / other.norm()) * outputs.square().mean()
    return loss


def mapped(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Weights by norms, as in GradNorm (arXiv 1711.02257)."""
    outputs = net(x)
    one, other = entropy(outputs, y), outputs.square().mean()
    norms = [gradients(each, net[2].weight, create_graph=True)[0].norm() for each in (one, other)]
    mean = (norms[0] + norms[1]) / 2
    loss: Tensor = one + other + sum((norm - mean.detach()).abs() for norm in norms)
    return loss


def drawn_after(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on some elements of each sample's gradient, which a draw after it chooses."""
    loss, slopes = of_inputs(net, x, y, "sum", graph=True)
    return loss / len(x) + functional.dropout(slopes, 0.5).square().mean()


REFUSED: dict[str, tuple[Loss, str]] = {
    "penalty on gradients of a mean": (lambda net, x, y: penalised(net, x, y, "mean"), "size of gradients of a mean"),
    "raw step": (adversarial(lambda slope: 3 * slope), "size of gradients of a mean"),
    "step by the norm of all": (adversarial(lambda slope: slope / slope.norm()), "size of gradients of a mean"),
    "ratio of norms": (balanced(lambda a, b: a.norm() / b.norm()), "not linear in gradients of parameters"),
    "between samples": (lambda net, x, y: between(net, x, y, lambda values: values.mean()), "gradients of a mean"),
    "view of gradients of a mean": (view_of_mean, "size of gradients of a mean"),
    "norms of parameters": (mapped, "not linear in gradients of parameters"),
    "penalty on gradients of weights": (of_weights, "not linear in gradients of parameters"),
}
RIGHT: dict[str, Loss] = {
    "penalty on gradients of a sum": lambda net, x, y: penalised(net, x, y, "sum"),
    "sign": adversarial(lambda slope: 0.1 * slope.sign()),
    "norm of each": adversarial(lambda slope: slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12)),
    "raw step of a sum": adversarial(lambda slope: 0.3 * slope, "sum"),
    "times the samples": adversarial(lambda slope: 0.3 * slope * len(slope)),
    "at samples": at_samples,
    "tasks": by_tasks,
    "perturbation": perturbed,
    "towers": in_towers,
    "for a log": lambda net, x, y: entropy(net(x), y) + 0 * of_inputs(net, x, y, "mean")[1].norm(),
}
DRAWN: dict[str, Loss] = {
    "between samples": lambda net, x, y: between(net, x, y, None),
    "between samples by a sum": lambda net, x, y: between(net, x, y, lambda values: values.sum()),
    "draw after it": drawn_after,
}
"""Losses that draw, and so do not train as the whole batch does in plain PyTorch."""
ALL = (
    RIGHT
    | {f"{name}, drawn": loss for name, loss in DRAWN.items()}
    | {"averaged": averaged}
    | {name: loss for name, (loss, _) in REFUSED.items()}
)


def train(names: list[str], how: str, **options: Any) -> list[Any]:
    """Of each loss the parameters after two updates, or the number of updates and the error."""
    found: list[Any] = []
    for name in names:
        net, loss = made(), ALL[name]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def of_batch(net: Any, batch: Any, loss: Loss = loss) -> Tensor:
            return loss(net, *batch)

        run = tutti.prepare(net, optimizer, dataset(), of_batch, batch_size=BATCH, **options)
        try:
            for batch in run.epoch(0) if how == "step" else run.microbatches(0):
                if how == "step":
                    run.step(batch)
                else:
                    optimizer.zero_grad()
                    run.backward(loss(net, *batch))
                    optimizer.step()
            found.append({key: value.numpy().copy() for key, value in run.state().items()})
        except UsageError as error:
            found.append((run.updates, str(error)))
    return found


def plain() -> list[Any]:
    found = []
    for loss in RIGHT.values():
        net = made()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for inputs, targets in global_batches(dataset(), BATCH, 0):
            optimizer.zero_grad()
            loss(net, inputs, targets).backward()
            optimizer.step()
        found.append({key: value.numpy().copy() for key, value in net.state_dict().items()})
    return found


PLACES = [(2, "loop", {}), (1, "step", {"micro_batch": 4}), (3, "loop", {"strategy": "sharded:stage=1"})]


@pytest.mark.parametrize(("ranks", "how", "options"), PLACES)
def test_gradients_in_a_loss_are_as_on_one_device(ranks: int, how: str, options: Any) -> None:
    want = worlds.alone(plain)
    for found in worlds.run(ranks, train, names=list(RIGHT), how=how, **options):
        for name, got, expected in zip(RIGHT, found, want, strict=True):
            assert isinstance(got, dict), (name, got)
            assert all(got[key] == pytest.approx(expected[key], abs=1e-10) for key in expected), name


@pytest.mark.parametrize(("ranks", "how", "options"), PLACES)
def test_a_loss_by_a_micro_batch_s_own_gradients_is_refused(ranks: int, how: str, options: Any) -> None:
    for found in worlds.run(ranks, train, names=list(REFUSED), how=how, **options):
        for (name, (_, what)), got in zip(REFUSED.items(), found, strict=True):
            assert isinstance(got, tuple), name
            assert got[0] == 0 and what in got[1] and "test_inner_gradients.py:" in got[1], (name, got)


@pytest.mark.parametrize(("ranks", "how", "options"), PLACES)
def test_right_losses_with_draws_train(ranks: int, how: str, options: Any) -> None:
    for found in worlds.run(ranks, train, names=[f"{name}, drawn" for name in DRAWN], how=how, **options):
        assert all(isinstance(got, dict) for got in found), found


@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_of_averaged_gradients_train(ranks: int) -> None:
    for found in worlds.run(ranks, train, names=["averaged"], how="loop", workers=ranks):
        assert all(isinstance(got, dict) for got in found), found
