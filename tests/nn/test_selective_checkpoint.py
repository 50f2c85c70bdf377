"""Selective activation checkpointing: expensive functions are called once, and nothing else about a step changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tutti.config.module_config import Selective, check_checkpointing
from tutti.config.task_config import GptConfig, UnetConfig
from tutti.errors import UsageError
from tutti.nn import selective_checkpoint
from tutti.nn.ac_and_compile import recompute, restore_forwards
from tutti.tasks.gpt import gpt
from tutti.tasks.unet import unet
from tutti.workload.tensor_memory import Tracker

ATEN = torch.ops.aten


class Counted(TorchDispatchMode):
    """Calls of expensive functions."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in selective_checkpoint._EXPENSIVE
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    """What a convolution gives is written into, at once and later."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.act, self.norm = nn.ReLU(inplace=True), nn.BatchNorm2d(width)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.norm(self.second(self.act(self.first(inputs))))
        out += inputs
        return self.act(out)


class Added(nn.Module):
    """A sum written into the result of a convolution: docs/decisions/017."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.conv(inputs)
        out += inputs
        return out.tanh().square()


def images() -> Tensor:
    return torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def numbers() -> Tensor:
    return torch.arange(96).reshape(4, 24) % 9


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (lambda: gpt(GptConfig(layers=3, heads=2, width=16, block=24), 9), numbers),
    "unet": (lambda: unet(UnetConfig(depth=2, width=4, batch_norm=True)), images),
    "added": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), *(Added(4) for _ in range(2))), images),
    "residual": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), *(Residual(4) for _ in range(3))), images),
}


def step(name: str, choice: str, backwards: int = 1) -> tuple[dict[str, Tensor], int, int, int]:
    """Gradients and buffers; calls of expensive functions in forward and in backward; bytes between the two."""
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make()
    recompute(model, check_checkpointing(choice))
    with Tracker() as memory, Counted() as counted:
        loss = model(inputs()).square().mean()
        forward, held = counted.calls, memory.now
        for i in range(backwards):
            loss.backward(retain_graph=i < backwards - 1)
    restore_forwards(model)
    tensors = {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | dict(model.named_buffers())
    return tensors, forward, counted.calls - forward, held


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_expensive_functions_are_called_once(name: str) -> None:
    plain, blocks, selective = (step(name, choice) for choice in ("none", "blocks", "selective"))
    # Backward of a product calls products, too.
    assert blocks[2] > plain[2] == selective[2]
    assert blocks[3] < selective[3] < 0.8 * plain[3]
    for found in (blocks, selective):
        assert found[1] == plain[1] and found[0].keys() == plain[0].keys()
        assert all(torch.equal(found[0][n], plain[0][n]) for n in plain[0])


@pytest.mark.parametrize("name", ["added", "residual"])
def test_what_is_written_into_is_computed_again(name: str) -> None:
    plain, blocks, selective = (step(name, choice) for choice in ("none", "blocks", "selective"))
    assert all(torch.equal(selective[0][n], plain[0][n]) for n in plain[0])
    assert plain[2] < selective[2] <= blocks[2]


@pytest.mark.parametrize("name", list(MODELS))
def test_backward_twice(name: str) -> None:
    plain, selective = step(name, "none", 2), step(name, "selective", 2)
    assert all(torch.equal(selective[0][n], plain[0][n]) for n in plain[0])
    assert name in ("added", "residual") or selective[2] == plain[2]


def test_every_other_block() -> None:
    every, other = step("gpt", "blocks"), step("gpt", "blocks:every=2")
    plain = step("gpt", "none")
    assert every[3] < other[3] < plain[3]
    assert plain[2] < other[2] < every[2]


def test_functions_that_draw_are_called_again() -> None:
    fused, q = ATEN._scaled_dot_product_flash_attention.default, torch.empty(1)
    assert selective_checkpoint.function_draws(fused, (q, q, q, 0.1), {}) and selective_checkpoint.function_draws(
        fused, (q, q, q), {"dropout_p": 0.1}
    )
    assert not selective_checkpoint.function_draws(
        fused, (q, q, q, 0.0), {}
    ) and not selective_checkpoint.function_draws(fused, (q, q, q), {})
    assert not selective_checkpoint.function_draws(ATEN.mm.default, (q, q), {})


def test_fused_attention_is_kept() -> None:
    first, second = selective_checkpoint.selective_checkpoint_contexts()
    q, calls = torch.randn(1, 2, 8, 4), []
    with first:
        functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    with Counted() as counted:
        functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        calls.append(counted.calls)
        with second:
            functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        calls.append(counted.calls)
    assert calls == [1, 1]


class Forgetful(nn.Module):
    """A module whose forward multiplies once more, or once less, when it is recomputed."""

    def __init__(self, products: tuple[int, int]) -> None:
        super().__init__()
        self.products, self.calls = products, 0
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():  # Autograd saves nothing of these products, so PyTorch's own check does not see them.
            for _ in range(self.products[self.calls > 1]):
                inputs = self.first(inputs)
        out: Tensor = self.last(inputs).tanh()
        return out


@pytest.mark.parametrize("products", [(1, 2), (2, 1), (1, 0)])
def test_a_forward_that_calls_others_when_it_is_recomputed_is_refused(products: tuple[int, int]) -> None:
    model = nn.Sequential(Forgetful(products))
    recompute(model, Selective())
    loss = model(torch.ones(2, 4)).sum()
    with pytest.raises(UsageError, match=r"recomputing a module in backward calls .*in their order"):
        loss.backward()
