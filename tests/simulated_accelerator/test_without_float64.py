"""A device without float64, such as an Apple GPU: one process trains on it in float32."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_daily_use import data, loss, measured
from tutti import device as devices
from tutti.torch_compat import TorchDispatchMode, tree_leaves

pytestmark = pytest.mark.timeout(600)


class Refusing(TorchDispatchMode):
    """Operators refuse to make tensors of float64 on the device, as those of an Apple GPU do."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.device.type == DEVICE and each.dtype == torch.float64:
                raise TypeError("the device has no float64")
        return made


def train(loop: str, known: bool) -> Any:
    torch.manual_seed(0)
    # No bias before batch norm: its gradient is rounding, which Adam would make a step of full length.
    model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    without = patch.object(devices, "WITHOUT_FLOAT64", (DEVICE,)) if known else nullcontext()
    try:
        with without, Refusing():
            if loop == "run.step":
                run = tutti.prepare(model, "adam:lr=0.01", data(), measured, workers=2, batch_size=8, ema=0.9, clip=0.5)
                found = [run.step(batch) for batch in run.epoch(0)]
                return [*found, run.evaluate(data(21)).loss, float(run.stats.grad_norm)]
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            run, found = tutti.prepare(model, optimizer, data(), workers=2, batch_size=8), []
            for batch in run.microbatches(0):
                run.backward(loss(model, batch))
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                found.append(run.stats.loss if run.stepped else 0.0)
            return [*found, run.evaluate(data(21), loss=loss).loss]
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("loop", ["run.step", "custom"])
def test_one_process_trains_on_a_device_without_float64(loop: str) -> None:
    [want] = worlds.run_on("cpu", 1, train, loop=loop, known=False)
    [got] = worlds.run_on(DEVICE, 1, train, loop=loop, known=True)
    assert got == pytest.approx(want, rel=1e-5)
    assert worlds.run_on(DEVICE, 1, train, loop=loop, known=False) == ["the device has no float64"]
