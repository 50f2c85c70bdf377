"""Losses with gradients in them: as on one device, or refused where the micro-batch's own gradients are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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


REFUSED: dict[str, tuple[Loss, str]] = {
    "penalty on gradients of a mean": (lambda net, x, y: penalised(net, x, y, "mean"), "size of gradients of a mean"),
    "raw step": (adversarial(lambda slope: 3 * slope), "size of gradients of a mean"),
    "step by the norm of all": (adversarial(lambda slope: slope / slope.norm()), "size of gradients of a mean"),
    "ratio of norms": (balanced(lambda a, b: a.norm() / b.norm()), "not linear in gradients of parameters"),
    "penalty on gradients of weights": (of_weights, "not linear in gradients of parameters"),
}
RIGHT: dict[str, Loss] = {
    "penalty on gradients of a sum": lambda net, x, y: penalised(net, x, y, "sum"),
    "sign": adversarial(lambda slope: 0.1 * slope.sign()),
    "norm of each": adversarial(lambda slope: slope / slope.norm(dim=1, keepdim=True).clamp(min=1e-12)),
    "raw step of a sum": adversarial(lambda slope: 0.3 * slope, "sum"),
    "times the samples": adversarial(lambda slope: 0.3 * slope * len(slope)),
    "for a log": lambda net, x, y: entropy(net(x), y) + 0 * of_inputs(net, x, y, "mean")[1].norm(),
}
ALL = RIGHT | {name: loss for name, (loss, _) in REFUSED.items()}


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
