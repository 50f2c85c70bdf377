"""Data that a script keeps on the accelerator: the weights are the same, and casts follow the kernels before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_simulated_accelerator import syncs
from tutti.data.adapt import TensorSource
from tutti.data.batches import placer
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed
from tutti.data.reader import MapReader
from tutti.data.transfer import Transfer
from tutti.device import current_stream
from tutti.launcher import context

pytestmark = pytest.mark.timeout(600)


def loss(net: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def train(there: str, form: str) -> Any:
    """Hash of the weights and a held-out loss; ``there``: what of inputs and targets is on the rank's device."""
    device = context.current().device
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(44, 3, 6, 6, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, 3, (44,), generator=draw)
    inputs, targets = inputs.to(device if "i" in there else "cpu"), targets.to(device if "t" in there else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    data: Any = (inputs, targets) if form == "tensors" else TensorDataset(inputs, targets)
    run = tutti.prepare(model, "sgd:lr=0.1", data, loss, workers=2, batch_size=8, channels_last=True)
    for batch in run.epoch(0):
        run.step(batch)
    return run.weights_sha256(), run.evaluate(data)


@pytest.mark.parametrize(("there", "form", "ranks"), [("it", "tensors", 1), ("it", "data set", 2), ("t", "tensors", 2)])
def test_weights_are_those_of_the_cpu(there: str, form: str, ranks: int) -> None:
    want = worlds.run_on("cpu", ranks, train, there="", form=form)
    assert worlds.run_on(DEVICE, ranks, train, there=there, form=form) == want


def streams_of_a_cast(there: bool) -> tuple[list[bool], list[float], int]:
    """Whether each cast runs on the stream of the step, the batches' sums, and the waits of the host to read them."""
    device = context.current().device
    source, epochs = TensorSource(torch.arange(23.0).double()), Epochs(BatchContract(23, 6, 3, 2))
    if there:
        source = TensorSource(torch.arange(23.0).double().to(device))
    cast, found = placer(device, torch.float32, False), []

    def place(batch: Tensor) -> Tensor:
        found.append(current_stream(device) == usual)
        return cast(batch)

    usual = current_stream(device)
    feed = Feed(MapReader(source, epochs, 1, 3), epochs, 1, 3, place, transfer=Transfer(device))
    with syncs() as waits:
        batches = [part.batch for part in feed.read(1, 0)]
    return found, [float(batch.sum()) for batch in batches], waits[0]


def test_a_batch_of_the_device_is_cast_on_the_stream_that_makes_it() -> None:
    """On another stream the cast may run before the batch is there; the simulated device cannot show that itself."""
    [(copied, want, _)] = worlds.run_on(DEVICE, 1, streams_of_a_cast, there=False)
    [(cast, sums, waits)] = worlds.run_on(DEVICE, 1, streams_of_a_cast, there=True)
    assert not any(copied) and cast and all(cast)
    assert sums == want and waits == 0
