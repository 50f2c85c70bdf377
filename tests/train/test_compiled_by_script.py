"""What the script compiles by itself after ``tutti.prepare`` gives what it gives uncompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(*(torch.randn(11, n, generator=DRAW, dtype=torch.float64) for n in (4, 1)))


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mean(model: Any, batch: Any) -> Tensor:
    apart: Tensor = model(batch[0]) - batch[1]
    return (apart**2).mean()


def compiled(part: str, strategy: str) -> dict[str, Tensor]:
    """A loop with something compiled; the last batch is smaller, for which PyTorch makes sizes symbolic."""
    model, optimizer = build()
    run = tutti.prepare(model, optimizer, DATA, batch_size=4, shuffle=False, strategy=strategy)
    loss = mean
    if part == "loss":
        loss = torch.compile(mean, backend="eager")
    elif part == "targets":
        apart = torch.compile(lambda ours, theirs: ((ours - theirs) ** 2).mean(), backend="eager", dynamic=True)

        def loss(model: Any, batch: Any) -> Any:
            return apart(model(batch[0]), batch[1])

    called = torch.compile(model, backend="eager") if part == "wrapped" else model

    def body(batch: Any) -> None:
        optimizer.zero_grad()
        run.backward(loss(called, batch))
        optimizer.step()

    if part == "model":
        model.compile(backend="eager")
    elif part == "body":
        body = torch.compile(body, backend="eager")
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            body(batch)
    return run.state()


def plainly() -> dict[str, Tensor]:
    model, optimizer = build()
    for _ in range(2):
        for inputs, targets in zip(*(tensor.split(4) for tensor in DATA.tensors), strict=True):
            optimizer.zero_grad()
            mean(model, (inputs, targets)).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("part", "strategy"),
    [
        ("loss", "tensor:least=1"),
        ("targets", "tensor:least=1"),
        ("model", "tensor:least=1"),
        ("wrapped", "sharded"),
        ("body", "mirrored"),
        ("targets", "pipeline"),
        ("body", "pipeline"),
        ("loss", "model_parallel"),
        # Both strategies are one layout, and each of these parts is above with the other.
        pytest.param("loss", "pipeline", marks=pytest.mark.full),
        pytest.param("body", "model_parallel", marks=pytest.mark.full),
    ],
)
def test_a_loop_with_a_compiled_part_is_that_of_one_device(part: str, strategy: str) -> None:
    want = plainly()
    for state in worlds.run(2, compiled, part=part, strategy=strategy):
        torch.testing.assert_close(state, dict(want), rtol=0, atol=1e-10)


def compiled_loss_of_the_run(strategy: str) -> dict[str, Tensor]:
    """``run.step`` with a compiled loss function."""
    model, optimizer = build()
    loss = torch.compile(mean, backend="eager")
    run = tutti.prepare(model, optimizer, DATA, loss, batch_size=4, shuffle=False, strategy=strategy, workers=1)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.state()


@pytest.mark.parametrize("strategy", ["pipeline", pytest.param("model_parallel", marks=pytest.mark.full)])
def test_a_compiled_loss_function_is_that_of_one_device(strategy: str) -> None:
    want = plainly()
    for state in worlds.run(2, compiled_loss_of_the_run, strategy=strategy):
        torch.testing.assert_close(state, dict(want), rtol=0, atol=1e-10)
