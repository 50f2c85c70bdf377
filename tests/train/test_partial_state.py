"""Figures of ``optimizer.state`` where each rank has a part of it: refused by name, or those of plain PyTorch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError

DRAW = torch.Generator().manual_seed(5)
DATA = TensorDataset(*(torch.randn(12, n, generator=DRAW, dtype=torch.float64) for n in (4, 1)))
PARTS = ["sharded:stage=1", "sharded", "tensor:least=1"]
Case = Callable[[nn.Sequential, torch.optim.Optimizer], Any]


def of(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of the first layer's weight, asked for by the model's own parameter."""
    found: dict[str, Any] = optimizer.state[model.get_parameter("0.weight")]
    return found


READS: dict[str, Case] = {
    "norm": lambda model, optimizer: of(model, optimizer)["exp_avg"].norm().item(),
    "sums of all": lambda model, optimizer: [s["exp_avg_sq"].sum() for s in optimizer.state.values()],
    "a mean after arithmetic": lambda model, optimizer: (of(model, optimizer)["exp_avg"].abs() + 1e-8).mean(),
    "an element": lambda model, optimizer: of(model, optimizer)["exp_avg"][0, 0],
    "numpy": lambda model, optimizer: of(model, optimizer)["exp_avg"].numpy(),
    "a copy of a copy": lambda model, optimizer: copy.deepcopy(of(model, optimizer)["exp_avg"]).tolist(),
    "another tensor of the whole's shape": lambda model, optimizer: of(model, optimizer)["exp_avg"].add_(
        torch.ones(6, 4, dtype=torch.float64)
    ),
    "a row written": lambda model, optimizer: of(model, optimizer)["exp_avg"][0].zero_(),
    "pickle": lambda model, optimizer: copy.copy(optimizer.state),
}


def reset(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
        state["step"].zero_()


def anew(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


RIGHT: dict[str, Case] = {
    "moments set to zero": reset,
    "one parameter's state removed": lambda model, optimizer: optimizer.state.pop(model.get_parameter("0.weight")),
    "a new mapping": anew,
    "scaled by numbers": lambda model, optimizer: [s["exp_avg"].mul_(0.5).add_(1e-3) for s in optimizer.state.values()],
    "shape and step": lambda model, optimizer: (
        tuple(of(model, optimizer)["exp_avg"].shape),
        float(of(model, optimizer)["step"]),
    ),
}


def build() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def refused(strategy: str) -> dict[str, str]:
    model, optimizer = build()
    run = tutti.prepare(model, optimizer, DATA, mean, batch_size=4, strategy=strategy)
    run.step(next(iter(run.epoch(0))))
    said = {}
    hooked: list[float] = []
    optimizer.register_step_pre_hook(lambda own, *_: hooked.append(next(iter(own.state.values()))["exp_avg"].norm()))
    for name, read in {**READS, "hook": lambda *_: run.step(next(iter(run.epoch(1))))}.items():
        try:
            read(model, optimizer)
            said[name] = "not refused"
        except UsageError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("strategy", PARTS)
def test_figures_of_a_part_are_refused(strategy: str) -> None:
    for said in worlds.run(2, refused, strategy=strategy):
        for name, text in said.items():
            assert "of which each rank has a part" in text
            assert name == "pickle" or "test_partial_state.py:" in text
            assert "run.optimizer_state()" in text


Seen = dict[str, tuple[Any, dict[str, Tensor], dict[str, Tensor]]]


def train(strategy: str) -> Seen:
    """What a script sees of the state, and what its writes between two epochs come to."""
    found: Seen = {}
    for name, act in RIGHT.items():
        model, optimizer = build()
        run = tutti.prepare(model, optimizer, DATA, mean, batch_size=4, shuffle=False, strategy=strategy)
        seen = None
        for epoch in range(2):
            if epoch:
                seen = act(model, optimizer)
            for batch in run.epoch(epoch):
                run.step(batch)
        found[name] = seen if name == "shape and step" else None, run.state(), run.optimizer_state()
    return found


def plainly() -> Seen:
    found: Seen = {}
    for name, act in RIGHT.items():
        model, optimizer = build()
        seen = None
        for epoch in range(2):
            if epoch:
                seen = act(model, optimizer)
            for inputs, targets in zip(*(tensor.split(4) for tensor in DATA.tensors), strict=True):
                optimizer.zero_grad()
                mean(model, (inputs, targets)).backward()
                optimizer.step()
        states = {f"{n}/{key}": each for n, p in model.named_parameters() for key, each in optimizer.state[p].items()}
        found[name] = seen if name == "shape and step" else None, dict(model.state_dict()), states
    return found


@pytest.mark.parametrize("strategy", PARTS)
def test_what_acts_by_element_is_that_of_one_device(strategy: str) -> None:
    want = plainly()
    for other in worlds.run(2, train, strategy=strategy):
        for name, (seen, model, state) in other.items():
            assert seen == want[name][0]
            torch.testing.assert_close(model, want[name][1], rtol=0, atol=1e-10)
            torch.testing.assert_close(state, want[name][2], rtol=0, atol=1e-10)


def whole(strategy: str) -> dict[str, Tensor]:
    model, optimizer = build()
    run = tutti.prepare(model, optimizer, DATA, mean, batch_size=4, shuffle=False, strategy=strategy)
    for batch in run.epoch(0):
        run.step(batch)
    return run.optimizer_state()


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage", "model_parallel", "parameter_server"])
def test_whole_state_is_that_of_one_device(strategy: str) -> None:
    [want] = worlds.run(1, whole, strategy="single")
    for state in worlds.run(2, whole, strategy=strategy):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def replaced(strategy: str) -> str:
    model, optimizer = build()
    run = tutti.prepare(model, optimizer, DATA, mean, batch_size=4, strategy=strategy)
    batches = iter(run.epoch(0))
    run.step(next(batches))
    optimizer.state = defaultdict(dict)
    try:
        run.step(next(batches))
    except UsageError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("strategy", ["central_storage", "model_parallel"])
def test_new_state_that_nobody_would_read_is_refused(strategy: str) -> None:
    for said in worlds.run(2, replaced, strategy=strategy):
        assert "the state of the optimizer after tutti.prepare" in said


def shared(strategy: str) -> tuple[str, int]:
    """Moments read where one device plays two workers, each with moments of its own; and ``zero_grad`` before."""
    model, optimizer = build()
    run = tutti.prepare(model, optimizer, DATA, mean, batch_size=4, workers=2, strategy=strategy)
    optimizer.zero_grad()
    for batch in run.epoch(0):
        run.step(batch)
    try:
        return str(len(optimizer.state)), run.updates
    except UsageError as error:
        return str(error), run.updates


def test_moments_of_one_of_several_workers_are_refused() -> None:
    said, _ = worlds.alone(shared, strategy="local_sgd:period=2")
    assert "the state of the optimizer after tutti.prepare" in said
