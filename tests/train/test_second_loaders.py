"""A DataLoader of the script beside the run's data, as for unlabelled samples: equal to plain PyTorch, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError

BATCH, EPOCHS = 6, 2


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(count)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, labelled: Tensor, unlabelled: Tensor) -> Tensor:
    mean = functional.mse_loss(model(labelled), labelled.sum(1, keepdim=True))
    return mean + 0.1 * model(unlabelled).square().mean()


def endless() -> Iterator[Any]:
    loader = DataLoader(rows(50), batch_size=4)
    while True:
        yield from loader


def train(body: str, workers: int) -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = endless() if body == "endless" else itertools.cycle(DataLoader(rows(50), batch_size=4))

    def loss_fn(model: Any, batch: Any) -> Tensor:
        return loss_of(model, batch[0], next(beside)[0])

    run = tutti.prepare(
        model,
        optimizer,
        rows(20),
        loss_fn if body == "step" else None,
        workers=workers,
        batch_size=BATCH,
        shuffle=False,
    )
    if body == "step":
        for epoch in range(EPOCHS):
            for batch in run.epoch(epoch):
                run.step(batch)
    clock, unlabelled = -1, None
    for epoch in range(EPOCHS if body != "step" else 0):
        for (labelled,) in run.microbatches(epoch):
            if body != "once" or run.global_step > clock:
                clock, (unlabelled,) = run.global_step, next(beside)
            optimizer.zero_grad()
            assert unlabelled is not None
            run.backward(loss_of(model, labelled, unlabelled))
            optimizer.step()
            if run.stepped:
                # A look at held-out samples after the update takes no samples from training.
                next(iter(DataLoader(rows(4))))
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def plain() -> list[float]:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = endless()
    for _ in range(EPOCHS):
        for (labelled,) in DataLoader(rows(20), batch_size=BATCH):
            optimizer.zero_grad()
            loss_of(model, labelled, next(beside)[0]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize(
    ("size", "workers", "body"),
    [(1, 1, "zip"), (3, 3, "zip"), (2, 2, "endless"), (1, 3, "once"), (2, 3, "once"), (1, 1, "step")],
)
def test_one_batch_for_each_update_is_equal_to_plain_pytorch(size: int, workers: int, body: str) -> None:
    want = worlds.alone(plain)
    for found in worlds.run(size, train, body=body, workers=workers):
        assert found == pytest.approx(want, abs=1e-10)


@pytest.mark.parametrize(
    ("size", "workers", "body", "what"),
    [
        # Each body moves the cycle on, which is found before the loader.
        (1, 3, "zip", "the code for another one has moved"),
        (2, 4, "endless", "the loop takes a batch"),
        (1, 3, "step", "the loss function takes batches"),
        (2, 2, "step", "the loss function takes batches"),
    ],
)
def test_batches_for_every_micro_batch_are_refused(size: int, workers: int, body: str, what: str) -> None:
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(size, train, body=body, workers=workers)
    for failure in raised.value.failures:
        assert failure is not None and failure.kind == UsageError.__name__ and what in failure.text
