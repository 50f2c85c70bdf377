"""Gradients of several losses, each complete, that a script combines and assigns to ``.grad`` (Yu et al., PCGrad)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches
from tutti.errors import UsageError

BATCH = 8


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(inputs)
        return self.first(hidden), self.second(hidden)


def dataset() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(29, width, generator=draw, dtype=torch.float64) for width in (4, 2))
    return inputs, targets


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TwoTasks().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def losses(model: nn.Module, batch: Any) -> Iterator[Tensor]:
    inputs, targets = batch
    for output, target in zip(model(inputs), targets.split(1, dim=1), strict=True):
        yield nn.functional.mse_loss(output, target)


def combine(model: nn.Module, first: list[Tensor | None], second: list[Tensor | None]) -> None:
    """Assign the sum of both gradients, the second without its part against the first; a task has one head's alone."""
    for parameter, one, other in zip(model.parameters(), first, second, strict=True):
        if one is not None and other is not None:
            against = (one * other).sum().clamp(max=0) / (one * one).sum()
            parameter.grad = one + other - against * one
        else:
            parameter.grad = one if other is None else other


def taken(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def arrays(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def plain() -> dict[str, Any]:
    model, optimizer = built()
    for epoch in range(2):
        for batch in global_batches(dataset(), BATCH, epoch):
            gradients = []
            for loss in losses(model, batch):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                gradients.append(taken(model))
            combine(model, *gradients)
            optimizer.step()
    return arrays(model.state_dict())


def train(strategy: str, workers: int) -> dict[str, Any]:
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, dataset(), strategy=strategy, workers=workers, batch_size=BATCH, seed=0)
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            gradients = []
            for loss in losses(model, batch):
                optimizer.zero_grad()
                run.backward(loss, retain_graph=True)
                gradients.append(taken(model))
            combine(model, *gradients)
            optimizer.step()
    return arrays(run.state())


@pytest.mark.parametrize(
    ("strategy", "ranks", "workers"),
    [
        ("single", 1, 3),
        ("mirrored", 2, 3),
        ("mirrored", 3, 3),
        ("sharded:stage=1", 2, 2),
        ("sharded", 2, 2),
        ("central_storage", 2, 2),
        ("parameter_server", 2, 2),
        ("tensor:least=1", 2, 1),
    ],
)
def test_complete_gradients_are_combined_and_assigned(strategy: str, ranks: int, workers: int) -> None:
    want = worlds.alone(plain)
    for got in worlds.run(ranks, train, strategy=strategy, workers=workers):
        assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())


def assigned_apart() -> str:
    """Return the refusal of a gradient of this rank's samples for a parameter that ``run.backward`` has not reached."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, dataset(), workers=tutti.size(), batch_size=BATCH, seed=0)
    for batch in run.microbatches(0):
        first, second = losses(model, batch)
        optimizer.zero_grad()
        run.backward(first, retain_graph=True)
        heads = list(model.get_submodule("second").parameters())
        for head, gradient in zip(heads, torch.autograd.grad(second, heads), strict=True):
            head.grad = gradient
        try:
            optimizer.step()
        except UsageError as error:
            return str(error) if run.updates == 0 else ""
    return ""


def test_a_gradient_of_a_rank_of_its_own_beside_a_complete_one_is_refused() -> None:
    for said in worlds.run(2, assigned_apart):
        assert "the gradient" in said and "test_gradient_surgery.py" in said, said


def by_one_vector(strategy: str, assigns: bool) -> Any:
    """Halve the gradient as one vector of all parameters: the final state, or the number of updates and the refusal."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, dataset(), strategy=strategy, batch_size=BATCH, seed=0)
    try:
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(sum(losses(model, batch)))
            there = [p for p in model.parameters() if p.grad is not None]
            vector = torch.cat([p.grad.flatten() for p in there if p.grad is not None]) / 2
            for parameter, part in zip(there, vector.split([p.numel() for p in there]), strict=True):
                if assigns or parameter.grad is None:
                    parameter.grad = part.view(parameter.shape).clone()
                else:
                    parameter.grad.copy_(part.view(parameter.shape))
            optimizer.step()
    except UsageError as error:
        return run.updates, str(error)
    return arrays(run.state())


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "sharded:stage=2"), (3, "sharded")])
def test_whole_gradients_are_written_into_shards_and_not_assigned(ranks: int, strategy: str) -> None:
    [want] = worlds.run(1, by_one_vector, strategy="single", assigns=True)
    for got in worlds.run(ranks, by_one_vector, strategy=strategy, assigns=False):
        assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
    for updates, said in worlds.run(ranks, by_one_vector, strategy=strategy, assigns=True):
        assert updates == 0 and "assigned a whole tensor to .grad" in said and "test_gradient_surgery.py" in said


def weighted(each: Tensor) -> Tensor:
    scores, kinds = torch.stack([each, -each], 1), (each > 0.5).long()
    return nn.functional.cross_entropy(scores, kinds, weight=torch.tensor([1.5, 2.0]).double())


DECLARED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "mean": (lambda each: each.mean(), ""),
    "sum": (lambda each: each.sum(), "a sum over"),
    "largest": (lambda each: each.topk(2).values.mean(), "topk"),
    "weighted": (weighted, "a mean over"),
}


def declared(kinds: list[str]) -> list[str]:
    """What is said of gradients by ``torch.autograd.grad`` that ``run.reduce_gradients`` declares to be of a mean."""
    found = []
    for kind in kinds:
        model, optimizer = built()
        run = tutti.prepare(model, optimizer, dataset(), workers=tutti.size(), batch_size=BATCH, seed=0)
        try:
            for batch in run.microbatches(0):
                first, _ = model(batch[0])
                error = (first - batch[1][:, :1]).square().mean(1)
                loss = DECLARED[kind][0](error)
                reached = [p for name, p in model.named_parameters() if not name.startswith("second")]
                for parameter, gradient in zip(reached, torch.autograd.grad(loss, reached), strict=True):
                    parameter.grad = gradient.detach()
                run.reduce_gradients()
                optimizer.step()
            found.append("")
        except UsageError as error:
            found.append(f"{run.updates} updates: {error}")
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_are_declared_to_be_of_a_mean_are_of_one(ranks: int) -> None:
    for found in worlds.run(ranks, declared, kinds=list(DECLARED)):
        assert found[0] == ""
        for (_, what), said in list(zip(DECLARED.values(), found, strict=True))[1:]:
            assert "0 updates" in said and what in said and "test_gradient_surgery.py" in said, said
