"""Forward hooks and writes of a script on a model that is cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference

SEEN: list[Any] = []


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def squares(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss + 0.1 * sum(seen.square().mean() for seen in [SEEN.pop() for _ in list(SEEN)] if seen.requires_grad)


def prepared(strategy: str, micro_batch: int | None = None) -> tuple[nn.Sequential, tutti.Run]:
    model, inputs = small(), torch.randn(16, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    return model, tutti.prepare(
        model, optimizer, inputs, squares, strategy=strategy, batch_size=8, micro_batch=micro_batch, workers=1
    )


HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "scales": ("0", lambda module, args, out: out * 1.5),
    "figure": ("0", lambda module, args, out: SEEN.append(out.detach().abs().mean())),
    "scales the last": ("4", lambda module, args, out: out * 1.5),
    "feature of the last": ("4", lambda module, args, out: SEEN.append(out)),
    "whole model": ("", lambda module, args, out: out + 0.5),
    "feature": ("0", lambda module, args, out: SEEN.append(out.abs())),
    "input": ("1", lambda module, args, out: SEEN.append(args[0])),
}


def trained(strategy: str, hook: str, micro_batch: int | None = None) -> Any:
    SEEN.clear()
    model, run = prepared(strategy, micro_batch)
    name, function = HOOKS[hook]
    model.get_submodule(name).register_forward_hook(function)
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except tutti.errors.TuttiError as error:
        return str(error) if run.updates == 0 else "after the update"
    return {key: value.numpy().copy() for key, value in run.state().items()}


@pytest.mark.parametrize("hook", ["scales", "figure", "scales the last", "feature of the last"])
def test_a_late_hook_of_a_stage_acts_as_on_one_device(hook: str) -> None:
    want = worlds.alone(trained, strategy="single", hook=hook)
    for micro_batch in (None, 2):
        for got in worlds.run(2, trained, strategy="pipeline", hook=hook, micro_batch=micro_batch):
            assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("whole model", "the strategy cannot be combined with the forward hook on Sequential ("),
        ("feature", "the forward hook on 0 keeps a tensor with its graph"),
        ("input", "the forward hook on 1 keeps a tensor with its graph"),
    ],
)
def test_a_late_hook_that_stages_cannot_follow_is_refused(hook: str, text: str) -> None:
    said = worlds.run_within(3.0, 2, trained, strategy="pipeline", hook=hook)
    assert text in said[0] and "test_script_hooks.py:" in said[0]
    assert all(isinstance(each, str) and each != "after the update" for each in said)
    worlds.forget(2)


def by_norm(parameter: Tensor) -> None:
    parameter.mul_(1 - 0.1 * parameter.norm())


def of_data(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.5


def a_row(parameter: Tensor) -> None:
    parameter.detach()[0].zero_()


WRITES: dict[str, Callable[[Tensor], Any]] = {"by its norm": by_norm, "of .data": of_data, "a row": a_row}


def looped(strategy: str, write: str) -> tuple[str, dict[str, Any]]:
    """A loop over all parameters between steps: what is said, and the parameters after it."""
    model, run = prepared(strategy)
    run.step(next(iter(run.epoch(0))))
    said = ""
    try:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                (WRITES[write] if number else by_norm)(parameter)
    except tutti.errors.UsageError as error:
        said = str(error)
    return said, {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def stepped() -> dict[str, Any]:
    _, run = prepared("single")
    run.step(next(iter(run.epoch(0))))
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("write", WRITES)
def test_a_loop_over_all_parameters_is_that_of_one_device_or_changes_none(write: str) -> None:
    refused = write == "a row"
    want = worlds.alone(stepped) if refused else worlds.alone(looped, strategy="single", write=write)[1]
    for said, state in worlds.run(2, looped, strategy="pipeline", write=write):
        assert largest_difference(state, want) <= 1e-10
        assert ("of the model" in said and "test_script_hooks.py:" in said) if refused else not said
