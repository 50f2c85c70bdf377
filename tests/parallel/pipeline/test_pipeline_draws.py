"""Random numbers that a model's own forwards draw by functions are those of one device, on whichever stage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.errors import UsageError
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.graph_trace import draws_by_functions


class Block(nn.Module):
    """Drops by a function, and by a module in the middle of it."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.dropout(torch.tanh(self.up(inputs)), 0.5, self.training)
        hidden = self.down(self.dropout(hidden))
        return inputs + hidden * torch.rand_like(hidden) if self.training else inputs + hidden


class Listed(nn.Module):
    """Blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 6), nn.ModuleList(Block() for _ in range(4)), nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


class Between(nn.Module):
    """Draws by functions between its layers, where it is cut, and by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.drop = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), nn.Dropout(0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for number, layer in enumerate(self.layers):
            hidden = torch.tanh(layer(hidden)) + 0.1 * torch.randn_like(hidden)
            if number == 3:
                hidden = self.drop(hidden)
        return hidden * torch.rand_like(hidden)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "cut":
        return Between().double()
    if kind == "listed":
        return Listed().double()
    if kind == "nested":
        pairs = [nn.Sequential(Block(), nn.Tanh(), Block()) for _ in range(2)]
        return nn.Sequential(nn.Linear(4, 6), *pairs, nn.Linear(6, 2)).double()
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)).double()


def loss(model: Any, batch: Tensor) -> Tensor:
    """Draws by itself before and after the model's call."""
    result = model(batch + 0.1 * torch.randn_like(batch))
    out: Tensor = (result * torch.rand_like(result)).square().mean()
    return out


def train(kind: str, strategy: str, micro_batch: int | None = None, recompute: str = "none") -> Any:
    data = torch.randn(22, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = {"strategy": strategy, "workers": 2, "batch_size": 15, "micro_batch": micro_batch}
    options = {"reproducible": True, "activation_checkpointing": recompute}
    run = tutti.prepare(build(kind), "adamw:lr=0.01", data, loss, **arguments, **options)
    losses = [run.step(batch) for epoch in range(2) for batch in run.epoch(epoch)]
    return [*losses, run.evaluate(run.feed.source, batch=5).loss], run.weights_sha256()


@pytest.mark.parametrize(
    ("kind", "schedule"),
    in_turn(["listed", "nested", "in the loss", "cut"], ["1f1b", "zero_bubble", "gpipe"], each=2),
)
def test_what_functions_draw_is_what_one_device_would(kind: str, schedule: str) -> None:
    want = worlds.alone(train, kind=kind, strategy="single", micro_batch=2)
    asked = "blocks" if schedule != "1f1b" and kind in ("listed", "nested") else "none"
    got = worlds.run(3, train, kind=kind, strategy=f"pipeline:schedule={schedule},micro_batches=4", recompute=asked)
    assert got == [want] * 3


def test_and_on_devices_with_two_stages_each() -> None:
    want = worlds.alone(train, kind="listed", strategy="single", micro_batch=2)
    for strategy in ("pipeline:schedule=interleaved,micro_batches=4", "model_parallel"):
        micro = None if "micro" in strategy else 2
        assert worlds.run(2, train, kind="listed", strategy=strategy, micro_batch=micro) == [want] * 2, strategy


class Own(nn.Module):
    """Its forward is a function of the test."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.layers = body, nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers[1](self.body(self.layers[0](inputs)))
        return out


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "bernoulli_": lambda x: x * x.new_empty(3).bernoulli_(0.5),
    "rand_like": lambda x: x + torch.rand_like(x),
    "a function such as torch.rand": lambda x: x + torch.rand(3),
    "fractional_max_pool2d": lambda x: functional.fractional_max_pool2d(x, 2, 2),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
}
UNSTEADY = {**DRAWING, "such": lambda x: -x if random.random() < 0.5 else x}


def test_a_forward_that_draws_without_its_inputs_is_refused_by_name() -> None:
    name = "a function such as torch.rand"
    model = Own(DRAWING[name])
    before = torch.get_rng_state()
    with pytest.raises(UsageError, match=rf"draws random numbers by {name}"):
        stage_partition.find_stage_partition(model, 2, ())
    assert torch.equal(before, torch.get_rng_state()), "reading a forward leaves no trace"


@pytest.mark.parametrize("name", UNSTEADY)
def test_what_may_draw_is_known(name: str) -> None:
    inside = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 1, enable_nested_tensor=False)
    inside.layers[0] = Own(UNSTEADY[name])
    assert draws_by_functions(Own(UNSTEADY[name])) and draws_by_functions(inside)


def test_what_does_not_draw_is_known() -> None:
    quiet = [Own(torch.tanh), nn.Sequential(nn.Dropout(0.5)), nn.TransformerEncoderLayer(4, 2), nn.LSTM(2, 2)]
    assert not any(map(draws_by_functions, quiet))
