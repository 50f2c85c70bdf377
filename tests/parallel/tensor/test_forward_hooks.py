"""Forward hooks that a script registers after ``tutti.prepare`` on modules that compute on slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.config.layout_config import TensorConfig
from tutti.parallel.tensor.tp_apply import find_tp_plan

SEEN: list[Any] = []


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.0)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = (f(x).view(n, t, 2, width // 2).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = self.drop((q @ k.transpose(-2, -1)).softmax(-1))
        return x + self.out((weights @ v).transpose(1, 2).reshape(n, t, width))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 4)).double()


def squares(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss + 0.1 * sum(seen.square().mean() for seen in [SEEN.pop() for _ in list(SEEN)])


def written(module: nn.Module, args: Any, out: Tensor) -> None:
    out[:, 1] = 0.0


# The module, and a hook that it gets.
HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "scales": ("0", lambda module, args, out: out * 1.5),
    "norm": ("1", lambda module, args, out: functional.normalize(out, dim=-1)),
    "norm of the layer": ("0", lambda module, args, out: functional.normalize(out, dim=-1)),
    "features": ("0", lambda module, args, out: SEEN.append(out.softmax(-1))),
    "input": ("1", lambda module, args: (args[0] - args[0].mean(-1, keepdim=True),)),
    "rows": ("3", lambda module, args: (args[0] * torch.arange(8.0),)),
    "whole": ("3", lambda module, args, out: out + 0.5),
}


def trained(strategy: str, hook: str, own: bool = False) -> Any:
    model = small()
    optimizer, inputs = torch.optim.SGD(model.parameters(), 0.3), torch.randn(12, 4, dtype=torch.float64)
    run = tutti.prepare(model, optimizer, inputs, squares, strategy=strategy, batch_size=4, seed=3)
    name, function = HOOKS[hook]
    module = model.get_submodule(name)
    if function.__code__.co_argcount == 2:
        module.register_forward_pre_hook(function)
    else:
        module.register_forward_hook(function)
    for batch in run.microbatches(0) if own else run.epoch(0):
        if own:
            optimizer.zero_grad()
            run.backward(squares(model, batch))
            optimizer.step()
        else:
            run.step(batch)
    return {key: value.numpy().copy() for key, value in run.state().items()}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_late_hook_is_given_whole_tensors(hook: str) -> None:
    want = worlds.alone(trained, strategy="single", hook=hook)
    for own in (False, True):
        for got in worlds.run(2, trained, strategy="tensor:least=1", hook=hook, own=own):
            assert largest_difference(got, want) <= 1e-10


def hooked(name: str, hook: str, before: bool) -> str:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Attention(), nn.LayerNorm(4), small()).double(), torch.randn(8, 3, 4).double()
    function = {"nothing": lambda module, args, out: None, "written": written}[hook]
    if before:
        model.get_submodule(name).register_forward_hook(function)
    run = tutti.prepare(
        model, "sgd:lr=0.1", inputs, lambda called, batch: called(batch).square().mean(), strategy="tensor:least=1",
        batch_size=4,
    )  # fmt: skip
    if not before:
        model.get_submodule(name).register_forward_hook(function)
    try:
        run.step(next(iter(run.epoch(0))))
    except tutti.errors.UsageError as error:
        return str(error) if run.updates == 0 else "after the update"
    return ""


def test_a_late_hook_on_a_slice_of_heads_is_refused() -> None:
    for said in worlds.run(2, hooked, name="0.drop", hook="nothing", before=False):
        assert said.startswith("the strategy cannot be combined with the forward hook on 0.drop (")
        assert "test_forward_hooks.py:" in said and "before tutti.prepare" in said and "tensor:whole=0" in said
    assert worlds.run(2, hooked, name="0.drop", hook="nothing", before=True) == ["", ""]
    assert worlds.run(2, hooked, name="0", hook="nothing", before=False) == ["", ""]
    for said in worlds.run(2, hooked, name="2.0", hook="written", before=False):
        assert "changes the output of 2.0 in place" in said
    worlds.forget(2)


class Collecting(nn.Module):
    """Registers a hook in its first forward, as models of transformers do that collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.kept, self.hooked = nn.Sequential(Attention(), small(), Attention()), list[Tensor](), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.blocks[0].drop.register_forward_hook(lambda module, args, out: self.kept.append(out))  # type: ignore[union-attr]
            self.hooked = True
        self.kept.clear()
        return self.blocks(x).square().mean() + self.kept.pop().square().mean()  # type: ignore[no-any-return]


def collected(strategy: str) -> Any:
    torch.manual_seed(0)
    model, inputs = Collecting().double(), torch.randn(8, 3, 4).double()
    run = tutti.prepare(
        model, "sgd:lr=0.1", inputs, lambda called, batch: called(batch), strategy=strategy, batch_size=4
    )
    for batch in run.epoch(0):
        run.step(batch)
    return {key: value.numpy().copy() for key, value in run.state().items()}


def test_a_hook_of_the_first_forward_leaves_the_block_around_it_whole() -> None:
    want = worlds.alone(collected, strategy="single")
    for got in worlds.run(2, collected, strategy="tensor:least=1000"):
        assert largest_difference(got, want) <= 1e-10
    x, cpu = torch.randn(2, 3, 4).double(), torch.device("cpu")
    plan = find_tp_plan(Collecting().double(), 2, TensorConfig(least=1000), lambda called, most: called(x), cpu)
    assert {entry.name.rpartition(".")[0] for entry in plan if entry.role == "column"} == {"blocks.1", "blocks.2"}
