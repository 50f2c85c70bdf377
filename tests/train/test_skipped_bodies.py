"""Bodies of a custom loop that skip micro-batches by their sizes: refused where one device would train, else right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches
from tutti.errors import TuttiError

BATCH, SAMPLES = 12, 50


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 4, generator=draw, dtype=torch.float64), torch.arange(SAMPLES) % 3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def chosen(kind: str, batches: Any, least: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a loop on which a script trains that wants at least ``least`` samples."""
    for inputs, targets in batches:
        if kind == "continue":
            if len(inputs) < least:
                continue
        elif kind == "a variable":
            size = inputs.shape[0]
            if size != least:
                continue
        yield inputs, targets


def train(kind: str, strategy: str, least: int, workers: int | None = None) -> Any:
    """Return the number of updates and the sum of each tensor after two epochs; or the error, and the updates."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, dataset(), strategy=strategy, workers=workers, batch_size=BATCH, seed=0)
    try:
        for epoch in range(2):
            if kind == "around":
                for inputs, targets in run.microbatches(epoch):
                    if inputs.size(0) >= least:
                        optimizer.zero_grad()
                        run.backward(functional.cross_entropy(model(inputs), targets))
                        optimizer.step()
                continue
            if kind == "by the clock":
                seen = 0
                for inputs, targets in run.microbatches(epoch):
                    seen += len(inputs)
                    if run.global_step < 2:
                        continue
                    optimizer.zero_grad()
                    run.backward(functional.cross_entropy(model(inputs), targets))
                    optimizer.step()
                continue
            for inputs, targets in chosen(kind, run.microbatches(epoch), least):
                optimizer.zero_grad()
                run.backward(functional.cross_entropy(model(inputs), targets))
                optimizer.step()
    except TuttiError as error:
        return str(error), run.updates
    return run.updates, [float(value.sum()) for value in run.state().values()]


def plain(first: int, least: int) -> Any:
    """Return what one device does that skips the first batches, and those with fewer than ``least`` samples."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [each for epoch in range(2) for each in global_batches(dataset(), BATCH, epoch)][first:]
    batches = [each for each in batches if len(each[0]) >= least]
    for inputs, targets in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return len(batches), [float(value.sum()) for value in model.state_dict().values()]


@pytest.mark.parametrize("kind", ["continue", "a variable", "around"])
def test_a_body_that_skips_its_share_of_a_complete_batch_is_refused(kind: str) -> None:
    for ranks, strategy, workers in ((2, "mirrored", None), (3, "sharded", None), (1, "single", 2), (2, "mirrored", 4)):
        for said, updates in worlds.run(
            ranks, train, kind=kind, strategy=strategy, least=BATCH if kind != "around" else 7, workers=workers
        ):
            assert "skips a micro-batch because of its size" in said and "test_skipped_bodies.py:" in said, said
            assert updates == 0


def test_where_a_worker_trains_alone_it_is_refused_too() -> None:
    for said, updates in worlds.run(2, train, kind="continue", strategy="local_sgd:period=2", least=BATCH):
        assert "skips a micro-batch because of its size" in said and updates == 0


@pytest.mark.parametrize("kind", ["continue", "a variable", "around"])
def test_a_body_that_skips_short_shares_of_a_short_batch_is_right(kind: str) -> None:
    want = worlds.alone(plain, first=0, least=BATCH)
    for ranks in (1, 2, 3):
        for updates, sums in worlds.run(ranks, train, kind=kind, strategy="mirrored", least=BATCH // ranks):
            assert updates == want[0] and sums == pytest.approx(want[1], abs=1e-12)


def test_a_body_that_skips_for_another_reason_is_right() -> None:
    want = worlds.alone(plain, first=2, least=0)
    for ranks in (1, 2, 3):
        for updates, sums in worlds.run(ranks, train, kind="by the clock", strategy="mirrored", least=0):
            assert updates == want[0] and sums == pytest.approx(want[1], abs=1e-12)
