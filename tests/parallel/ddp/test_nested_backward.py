"""A backward that calls backward itself adds to one gradient several times; the sums over ranks have all of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError
from tutti.parallel.ddp import allreduce

WIDTH = 300
STEPS = 3


class Reversible(torch.autograd.Function):
    """RevNet's block (Gomez et al., 2017): backward recomputes the inputs, and runs backward of each half."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, first: nn.Module, second: nn.Module, *parameters: Tensor) -> Tensor:
        left, right = inputs.chunk(2, 1)
        with torch.no_grad():
            left = left + torch.tanh(first(right))
            right = right + torch.tanh(second(left))
        ctx.halves, ctx.modules, ctx.parameters = (left, right), (first, second), len(parameters)
        return torch.cat([left, right], 1)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (left, right), (first, second) = ctx.halves, ctx.modules
        left_slope, right_slope = slope.chunk(2, 1)
        with torch.enable_grad():
            entered = left.detach().requires_grad_()
            added = torch.tanh(second(entered))
            torch.autograd.backward(added, right_slope)
        left_slope = left_slope + entered.grad
        with torch.enable_grad():
            entered = (right - added).detach().requires_grad_()
            torch.autograd.backward(torch.tanh(first(entered)), left_slope)
        return torch.cat([left_slope, right_slope + entered.grad], 1), None, None, *[None] * ctx.parameters


class Net(nn.Module):
    """Two gradient buckets, of which backward completes that of ``second`` and ``outer`` first.

    ``kind``: "reversible"; "tied", with one module for both halves; "some", "later", "one": tied, and reversible only
    where the first input is positive, in later steps, or where both hold.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.first = nn.Linear(4, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)
        self.kind, self.is_later = kind, False

    def forward(self, inputs: Tensor) -> Tensor:
        first, entered = self.first, self.inner(inputs)
        if self.kind != "reversible":
            left, right = entered.chunk(2, 1)
            first, entered = self.second, torch.cat([left, self.first(right)], 1)
        is_reversible = self.kind in ("later", "reversible", "tied") or bool(inputs[0, 0] > 0)
        if not is_reversible or (self.kind in ("later", "one") and not self.is_later):
            left, right = entered.chunk(2, 1)
            left = left + torch.tanh(first(right))
            return self.outer(torch.cat([left, right + torch.tanh(self.second(left))], 1))
        parameters = [*first.parameters(), *self.second.parameters()]
        return self.outer(Reversible.apply(entered, first, self.second, *parameters))


def trained(kind: str, strategy: str, loop: bool) -> Any:
    """Train in plain PyTorch, or with a strategy in a loop of the script or in tutti's."""
    torch.manual_seed(0)
    model = Net(kind).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
    inputs = torch.randn(8 * STEPS, 4, dtype=torch.float64)
    # Each rank's share of a batch begins with another sign.
    inputs[::8, 0], inputs[4::8, 0] = 1, -1
    if strategy == "plain":
        for step, batch in enumerate(inputs.split(8)):
            model.is_later = step > 0
            optimizer.zero_grad()
            for share in batch.split(4):
                (model(share).square().mean() / 2).backward()
            optimizer.step()
        return model.state_dict()
    loss = None if loop else lambda called, batch: called(batch[0]).square().mean()
    run = tutti.prepare(model, optimizer, TensorDataset(inputs), loss, strategy=strategy, batch_size=8, shuffle=False)
    try:
        for step, (batch,) in enumerate(run.microbatches(0) if loop else run.epoch(0)):
            model.is_later = step > 0
            if loop:
                optimizer.zero_grad()
                run.backward(model(batch).square().mean())
                optimizer.step()
            else:
                run.step((batch,))
    except UsageError as error:
        return run.updates, str(error)
    return run.state()


@pytest.mark.parametrize(
    ("kind", "strategy", "loop"),
    [
        ("reversible", "mirrored", False),
        ("tied", "mirrored", True),
        ("reversible", "mirrored:algorithm=native", True),
        ("tied", "mirrored:algorithm=native", False),
        ("some", "mirrored:algorithm=native", False),
        ("later", "mirrored:algorithm=native", True),
        ("later", "mirrored:algorithm=ring", False),
        ("reversible", "central_storage", False),
        ("tied", "central_storage", False),
        ("some", "central_storage", True),
    ],
)
def test_gradients_of_a_nested_backward_are_summed_whole(kind: str, strategy: str, loop: bool) -> None:
    want = trained(kind, "plain", True)
    for found in worlds.run(2, trained, kind=kind, strategy=strategy, loop=loop):
        for name, tensor in want.items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-10), name


def updated_first(kind: str, strategy: str) -> Any:
    with patch.object(allreduce, "LEAST_WAIT", 0.0):
        return trained(kind, strategy, loop=False)


def test_a_late_gradient_of_one_device_alone_is_refused_where_the_update_does_not_wait() -> None:
    for updates, text in worlds.run_on(worlds.ACCELERATOR, 2, updated_first, kind="one", strategy="mirrored"):
        assert updates == 1
        assert "again after the gradient was sent" in text
        assert "test_nested_backward.py" in text
        assert "reproducible=True" in text
