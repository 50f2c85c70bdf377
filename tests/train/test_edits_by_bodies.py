"""Edits of complete gradients on a rank that runs the body of a loop for several micro-batches of a global batch."""

from __future__ import annotations

from collections.abc import Callable
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
Kept = dict[str, Tensor]


def dataset() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(29, width, generator=draw, dtype=torch.float64) for width in (4, 1))
    return inputs, targets


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    """Add an average of gradients (Grokfast, arXiv 2405.20233), which is returned."""
    new = {n: 0.9 * kept.get(n, torch.zeros_like(p)) + 0.1 * _gradient(p) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = _gradient(parameter) + 2 * new[name]
    return new


def momentum_in_place(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    for name, parameter in model.named_parameters():
        kept.setdefault(name, torch.zeros_like(parameter)).mul_(0.9).add_(_gradient(parameter))
        _gradient(parameter).copy_(kept[name])
    return kept


def by_loss(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    for parameter in model.parameters():
        _gradient(parameter).mul_(loss.item())
    return kept


def by_mean_loss(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    for parameter in model.parameters():
        _gradient(parameter).mul_(total)
    return kept


def with_own_gradient(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    parameters = list(model.parameters())
    for parameter, more in zip(parameters, torch.autograd.grad(loss.square(), parameters), strict=True):
        _gradient(parameter).add_(more)
    return kept


def clipped_to_its_sign(model: nn.Module, loss: Tensor, total: float, kept: Kept) -> Kept:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = _gradient(parameter).sign() * _gradient(parameter).norm()
    return kept


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


EDITS: dict[str, Callable[[nn.Module, Tensor, float, Kept], Kept]] = {
    each.__name__: each
    for each in (momentum, momentum_in_place, by_loss, by_mean_loss, with_own_gradient, clipped_to_its_sign)
}


def plain(edit: str) -> dict[str, Any]:
    model, optimizer = built()
    kept: Kept = {}
    for epoch in range(2):
        for inputs, targets in global_batches(dataset(), BATCH, epoch):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward(retain_graph=True)
            kept = EDITS[edit](model, loss, loss.item(), kept)
            optimizer.step()
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def train(edit: str, workers: int, guarded: bool = False) -> Any:
    """Return the state, or the refusal and the number of updates before it; ``guarded``: keep values of updates."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, dataset(), workers=workers, batch_size=BATCH, seed=0)
    kept: Kept = {}
    try:
        for epoch in range(2):
            for inputs, targets in run.microbatches(epoch):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                run.backward(loss, retain_graph=True)
                total = run.stats.loss if run.stats is not None else 0.0
                new = EDITS[edit](model, loss, total, kept)
                optimizer.step()
                if run.stepped or not guarded:
                    kept = new
    except UsageError as error:
        return str(error), run.updates
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("edit", ["momentum", "momentum_in_place", "by_loss", "with_own_gradient"])
def test_an_edit_by_one_micro_batch_is_refused(edit: str) -> None:
    [(said, updates)] = worlds.run(1, train, edit=edit, workers=3)
    assert "depends on one of several micro-batches" in said and "test_edits_by_bodies.py" in said
    assert updates == 0


@pytest.mark.parametrize(
    ("edit", "ranks", "workers", "guarded"),
    [
        ("momentum", 1, 3, True),
        ("momentum", 2, 4, True),
        ("by_mean_loss", 1, 3, False),
        ("clipped_to_its_sign", 1, 3, False),
        ("clipped_to_its_sign", 2, 4, False),
        ("by_loss", 1, 1, False),
        ("momentum_in_place", 2, 2, False),
    ],
)
def test_an_edit_by_what_is_the_same_for_all_is_that_of_plain_pytorch(
    edit: str, ranks: int, workers: int, guarded: bool
) -> None:
    want = worlds.alone(plain, edit=edit)
    for got in worlds.run(ranks, train, edit=edit, workers=workers, guarded=guarded):
        assert isinstance(got, dict), got
        assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
