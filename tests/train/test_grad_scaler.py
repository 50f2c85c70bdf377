"""``torch.amp.GradScaler`` in a custom loop whose body plays several logical workers: a disabled one only passes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(24, 3))


def trained(
    scaler: torch.amp.GradScaler | None, workers: int = 2, strategy: str = "single", loss_scale: str | None = None
) -> dict[str, Tensor]:
    """A loop as scripts have it that take a scaler for float16 alone; or the same loop without one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"strategy": strategy, "workers": workers, "loss_scale": loss_scale}
    run = tutti.prepare(model, optimizer, DATA, batch_size=12, **options)
    for inputs, targets in run.microbatches(0):
        loss = nn.functional.mse_loss(model(inputs), targets)
        if scaler is None:
            run.backward(loss)
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        else:
            run.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in run.state().items()}


def test_a_disabled_scaler_changes_nothing() -> None:
    found = trained(torch.amp.GradScaler("cpu", enabled=False))
    assert all(torch.equal(value, found[name]) for name, value in trained(None).items())


def test_an_enabled_scaler_is_refused() -> None:
    with pytest.raises(UsageError, match=r"GradScaler.*test_grad_scaler.py:\d+.*loss_scale='dynamic'"):
        trained(torch.amp.GradScaler("cpu", init_scale=2.0**10))


def test_the_advised_loss_scale_trains_as_without_one() -> None:
    found = trained(None, loss_scale="dynamic")
    assert all(torch.allclose(value, found[name], atol=1e-6) for name, value in trained(None).items())


def plain_backward(strategy: str) -> str:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 3), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, strategy=strategy, batch_size=12)
    try:
        for inputs, targets in run.microbatches(0):
            scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["sharded", "sharded:stage=1", "mirrored"])
def test_a_scaler_and_a_plain_backward_are_refused_where_parameters_are_split(strategy: str) -> None:
    for said in worlds.run(2, plain_backward, strategy=strategy):
        assert ("run.backward(scaler.scale(loss))" in said) == (strategy != "mirrored"), said
        assert not said or "test_grad_scaler.py:" in said


def refused(strategy: str, unused: bool) -> str:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    try:
        trained(None if unused else scaler, 4, strategy)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded"])
def test_an_enabled_scaler_is_refused_where_the_optimizer_has_rows(strategy: str) -> None:
    for said in worlds.run(2, refused, strategy=strategy, unused=False):
        assert "torch.amp.GradScaler cannot be combined with several micro-batches" in said
        assert "test_grad_scaler.py:" in said and "loss_scale='dynamic'" in said
    worlds.forget(2)


def test_a_scaler_that_scales_nothing_changes_nothing() -> None:
    assert worlds.run(2, refused, strategy="sharded", unused=True) == ["", ""]
