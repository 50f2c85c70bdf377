"""Truncated backpropagation through time: a recurrent state stays with its logical worker, or the loop is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError

COLUMNS, PARTS, LENGTH, WIDTH = 4, 6, 3, 5
TEXT = torch.randn(COLUMNS, PARTS * LENGTH, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SAMPLES = TensorDataset(torch.cat(TEXT.split(LENGTH, dim=1)))


class Recurrent(nn.Module):
    """Predicts the sum of what it has seen; the state comes and goes with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(2, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        outputs, state = self.layer(inputs, state)
        return self.head(outputs), state


class Remembering(Recurrent):
    """Keeps the state in buffers."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        for name in ("hidden", "cell"):
            self.register_buffer(name, torch.zeros(1, samples, WIDTH, dtype=torch.float64))

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        outputs, (hidden, cell) = super().forward(inputs, (self.hidden, self.cell))
        self.hidden, self.cell = hidden.detach(), cell.detach()
        return outputs, None


class Attribute(Recurrent):
    """Keeps the state in an attribute, of which there is one on each device."""

    state: Any = None

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        outputs, state = super().forward(inputs, self.state)
        self.state = tuple(each.detach() for each in state)
        return outputs, None


def loss_of(outputs: Tensor, inputs: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, inputs.sum(dim=2, keepdim=True))


def model_of(kind: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def detached(state: Any) -> Any:
    return None if state is None else tuple(each.detach() for each in state)


def body(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, state: Any, backward: Any) -> Any:
    optimizer.zero_grad()
    outputs, state = model(inputs, detached(state))
    backward(loss_of(outputs, inputs))
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return state


def plain() -> dict[str, Tensor]:
    model, optimizer = model_of(Recurrent)
    state = None
    for part in range(PARTS):
        inputs = TEXT[:, part * LENGTH : (part + 1) * LENGTH]
        state = body(model, optimizer, inputs, state, lambda loss: loss.backward())
    return dict(model.state_dict())


def moved(workers: int, kind: Callable[[], nn.Module] = Recurrent, micro_batch: int | None = None) -> dict[str, Tensor]:
    """The script with ``run.microbatches`` and ``run.backward``, in the data's order."""
    model, optimizer = model_of(kind)
    run = tutti.prepare(
        model, optimizer, SAMPLES, workers=workers, batch_size=COLUMNS, shuffle=False, micro_batch=micro_batch
    )
    state = None
    for (inputs,) in run.microbatches(0):
        state = body(model, optimizer, inputs, state, run.backward)
    return {name: value.clone() for name, value in run.state().items() if name not in ("hidden", "cell")}


def equal(found: dict[str, Tensor]) -> None:
    for name, value in plain().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_a_state_stays_with_its_worker() -> None:
    equal(moved(1))
    for found in worlds.run(2, moved, workers=2):
        equal(found)


@pytest.mark.parametrize("kind", [Recurrent, Attribute])
def test_a_state_that_passes_between_workers_is_refused(kind: Callable[[], nn.Module]) -> None:
    with pytest.raises(UsageError, match=r"step 1, .*test_recurrent_state.py:\d+.*buffer"):
        moved(2, kind)


def test_a_state_that_passes_between_micro_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="an output of another micro-batch"):
        moved(1, micro_batch=2)


def test_a_state_in_buffers_is_each_workers_own() -> None:
    equal(moved(2, lambda: Remembering(COLUMNS // 2)))


def test_inputs_that_share_memory_are_no_state() -> None:
    """Samples that are views of one tensor, and a layer that returns a view of what it is given."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Flatten(), nn.Linear(6, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, TEXT.reshape(-1, 6), workers=2, batch_size=COLUMNS, shuffle=False)
    before = [value.clone() for value in run.state().values()]
    for inputs in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(model(inputs).square().mean())
        optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, run.state().values(), strict=True))


def test_the_model_as_a_function_of_its_parameters() -> None:
    """Gradients of each sample by ``torch.func``, in the bodies of two workers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, TEXT.reshape(-1, 6), workers=2, batch_size=COLUMNS, shuffle=False)

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (sample[None],)).square().mean()

    for inputs in run.microbatches(0):
        optimizer.zero_grad()
        weights = {name: value.detach() for name, value in model.named_parameters()}
        slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, inputs)
        held = [value.grad.clone() if value.grad is not None else 0 for value in model.parameters()]
        model(inputs).square().mean().backward()
        for value, before, slope in zip(model.parameters(), held, slopes.values(), strict=True):
            assert value.grad is not None
            torch.testing.assert_close(value.grad - before, slope.mean(0))
        optimizer.step()
