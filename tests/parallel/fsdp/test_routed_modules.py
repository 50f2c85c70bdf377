"""Sharded parameters of modules that not every rank calls in every step, such as experts without a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tutti.errors import UsageError
from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_around, wrapped_modules
from tutti.parallel.fsdp.routed_modules import routed_modules, suspected_routers

INPUTS = torch.randn(26, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True).sin())


def expert(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, width))


class Experts(nn.Module):
    """Two of four experts compute each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(expert(width) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        weights, chosen = self.router(inputs).softmax(-1).topk(2, -1)
        outputs = torch.zeros_like(inputs)
        for number, each in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                outputs = outputs.index_add(0, rows, each(inputs[rows]) * weights[rows, place, None])
        return outputs


class Model(nn.Module):
    """Two layers of experts, each with a stack of its own, and blocks that every sample passes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(expert(6) for _ in range(2))
        self.layers = nn.ModuleDict({"first": Experts(6), "second": Experts(6)})
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        for layer in self.layers.values():
            inputs = inputs + layer(inputs)
        outputs: Tensor = self.head(inputs)
        return outputs


class Tail(nn.Module):
    """Leaves a block out for a later batch, as a trial of the first batch cannot see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(expert(6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](inputs)
        outputs: Tensor = self.head(self.blocks[1](hidden) if inputs.sum() < 7 else hidden)
        return outputs


def mean(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(kind: type[nn.Module], strategy: str, loop: bool) -> Any:
    torch.manual_seed(0)
    model = kind(6) if kind is Experts else kind()
    optimizer = torch.optim.Adam(model.double().parameters(), lr=0.01)
    run = tutti.prepare(model, optimizer, DATA, None if loop else mean, strategy=strategy, workers=2, batch_size=8)
    try:
        for epoch in range(2):
            for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
                if loop:
                    optimizer.zero_grad()
                    run.backward(mean(model, batch))
                    optimizer.step()
                else:
                    run.step(batch)
    except UsageError as error:
        return run.updates, str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(("kind", "loop"), in_turn([Experts, Model], [False, True]))
def test_experts_without_samples_equal_one_device(kind: type[nn.Module], loop: bool) -> None:
    want = worlds.alone(trained, kind=kind, strategy="mirrored", loop=loop)
    for got in worlds.run(2, trained, kind=kind, strategy="sharded", loop=loop):
        assert largest_difference(got, want) <= 1e-10


def test_modules_that_only_some_ranks_call_are_refused_by_name() -> None:
    for updates, said in worlds.run(2, trained, kind=Tail, strategy="sharded", loop=True):
        assert "ranks use different modules of the model in one step" in said and "blocks.1" in said, said
        assert updates == 5 and "test_routed_modules.py:" in said and "sharded:units=" in said, said
    worlds.forget(2)


def called_by_length(calls: int) -> str:
    """Call the model once for each letter of a sample, as a recurrent network; samples differ in length."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    run = tutti.prepare(model, "sgd:lr=0.1", DATA, strategy="sharded", workers=2, batch_size=2, micro_batch=1)
    try:
        for inputs, _ in run.microbatches(0):
            hidden = inputs
            for _ in range(1 + calls * tutti.rank() * (run.global_step > 0)):
                hidden = model(hidden)
            run.backward(hidden.square().mean())
            run.gated_step()
    except UsageError as error:
        return str(error)
    return ""


def test_a_number_of_calls_that_differs_between_ranks_is_refused_with_the_reason() -> None:
    assert worlds.run(2, called_by_length, calls=0) == [""] * 2
    for said in worlds.run(2, called_by_length, calls=2):
        assert "ranks use different modules" in said and "how often" in said and "test_routed_modules.py:" in said, said
    worlds.forget(2)


def test_experts_are_wrapped_together() -> None:
    model = Model().double()
    names = {module: name for name, module in model.named_modules()}
    blocks = wrapped_modules(model)
    suspects = suspected_routers(model, blocks)
    assert sorted(names[each] for each in suspects) == ["layers.first", "layers.second"]
    routed = routed_modules(model, suspects, lambda net: net(INPUTS[:4]), torch.device("cpu"))
    assert routed == ["layers.first", "layers.second"]
    assert sorted(wrapped_around(model, [model.get_submodule(name) for name in routed])) == [
        "blocks.0",
        "blocks.1",
        *routed,
    ]
    always = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)
    assert not routed_modules(
        always, {always: list(always.layers)}, lambda net: net(torch.ones(2, 3, 8)), torch.device("cpu")
    )
