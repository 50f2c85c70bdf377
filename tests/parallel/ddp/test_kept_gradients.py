"""``.grad`` of earlier steps: a script that keeps it, or a view of it, finds the numbers that PyTorch leaves there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds

DATA = torch.utils.data.TensorDataset(torch.arange(48.0, dtype=torch.float64).view(12, 4) / 48)


def itself(gradient: Tensor) -> Any:
    return gradient


def detached(gradient: Tensor) -> Any:
    return gradient.detach()


def flat(gradient: Tensor) -> Any:
    return gradient.view(-1)


def row(gradient: Tensor) -> Any:
    return gradient[0]


def array(gradient: Tensor) -> Any:
    return gradient.numpy()


Keep = Callable[[Tensor], Any]


def cleared(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()


def zeroed(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def cleared_in_turn(model: Any, optimizer: Any, step: int) -> None:
    if step % 2 == 0:
        optimizer.zero_grad()


def partly_cleared(model: Any, optimizer: Any, step: int) -> None:
    model[0].weight.grad = None


Clear = Callable[[Any, Any, int], None]


def kept(strategy: str, keep: Keep, clear: Clear) -> tuple[list[float], set[int]]:
    """Return sums of kept gradients after training, and the addresses of the last steps' gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(model, optimizer, DATA, strategy=strategy, batch_size=2, shuffle=False)
    backward = torch.Tensor.backward if run is None else run.backward
    found, places = [], []
    batches = [(rows,) for rows in DATA.tensors[0].split(2)] if run is None else run.microbatches(0)
    for step, (inputs,) in enumerate(batches):
        clear(model, optimizer, step)
        backward(model(inputs).square().mean())
        gradient: Any = model[0].weight.grad
        places.append(0 if strategy in ("tensor", "sharded:stage=1") else gradient.data_ptr())
        found.append(keep(gradient))
        optimizer.step()
        del gradient
    return [float(each.sum()) for each in found], set(places[2:])


STRATEGIES = ["mirrored", "mirrored:algorithm=native", "central_storage"]


@pytest.mark.parametrize(
    ("keep", "clear"),
    [
        (itself, cleared_in_turn),
        (row, cleared),
        (flat, partly_cleared),
        (array, cleared),
        (array, zeroed),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_views_of_gradients_have_the_values_that_one_device_leaves(strategy: str, keep: Keep, clear: Clear) -> None:
    want, _ = kept("plain", keep, clear)
    for got, _ in worlds.run(2, kept, strategy=strategy, keep=keep, clear=clear):
        assert got == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded", "tensor"])
def test_gradients_in_parts_keep_their_values(strategy: str) -> None:
    want, _ = kept("plain", detached, cleared)
    for got, _ in worlds.run(2, kept, strategy=strategy, keep=detached, clear=cleared):
        assert got == pytest.approx(want, abs=1e-12)


def summed(gradient: Tensor) -> Any:
    return gradient.sum()


@pytest.mark.parametrize("clear", [cleared, zeroed])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_that_keeps_no_gradient_uses_the_same_memory_in_each_step(strategy: str, clear: Clear) -> None:
    for _, places in worlds.run(2, kept, strategy=strategy, keep=summed, clear=clear):
        assert len(places) == 1


class WithEarlierGradient(torch.optim.Optimizer):
    """Adds a part of the gradient of the step before, which it keeps without a copy."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])
                if "before" in self.state[parameter]:
                    parameter.add_(self.state[parameter]["before"], alpha=0.05)
                self.state[parameter]["before"] = parameter.grad


def mean(model: Any, batch: Any) -> Any:
    return model(batch[0]).square().mean()


def trained(strategy: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    optimizer = WithEarlierGradient(model.parameters())
    if strategy == "plain":
        for batch in DATA.tensors[0].split(2):
            optimizer.zero_grad()
            mean(model, [batch]).backward()
            optimizer.step()
        return dict(model.state_dict())
    run = tutti.prepare(model, optimizer, DATA, mean, strategy=strategy, batch_size=2, shuffle=False, clip=10)
    for batch in run.epoch(0):
        run.step(batch)
    return dict(run.state())


@pytest.mark.parametrize("strategy", [*STRATEGIES, "sharded", "tensor", "parameter_server"])
def test_optimizers_of_scripts_may_keep_gradients(strategy: str) -> None:
    want = trained("plain")
    for state in worlds.run(2, trained, strategy=strategy):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-12)
