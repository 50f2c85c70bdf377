"""Losses of the outputs of all ranks, which the script gathers, train as in plain PyTorch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches
from tests.train.test_places_of_samples import BATCH, dataset, errors, made, train_epoch
from tutti.errors import UsageError

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def dice(own: Tensor, out: Tensor, own_want: Tensor, want: Tensor) -> Tensor:
    found, there = out.sigmoid(), (want > 0).double()
    return 1 - (2 * (found * there).sum() + 1) / (found.sum() + there.sum() + 1)


def of_own_rows(own: Tensor, out: Tensor, own_want: Tensor, want: Tensor) -> Tensor:
    """Similarities of the rank's own samples with those of all ranks."""
    first = tutti.rank() * len(own) if len(own) < len(out) else 0
    scores = functional.normalize(own_want, dim=1) @ functional.normalize(out, dim=1).T
    return functional.cross_entropy(scores / 0.1, torch.arange(first, first + len(own)))


def decorrelated(own: Tensor, out: Tensor, own_want: Tensor, want: Tensor) -> Tensor:
    centred = (out - out.mean(0)) / out.std(0)
    return (centred.T @ centred / len(out) - torch.eye(out.shape[1]).double()).square().sum()


LOSSES: dict[str, Loss] = {
    "dice": dice,
    "similarities of own rows": of_own_rows,
    "similarities of all rows": lambda own, out, own_want, want: functional.cross_entropy(
        out @ want.T, torch.arange(len(out))
    ),
    "decorrelated features": decorrelated,
    "hardest": lambda own, out, own_want, want: errors(out, want).topk(6).values.mean(),
    "the first": lambda own, out, own_want, want: errors(out, want)[:5].mean(),
    "root of a mean": lambda own, out, own_want, want: functional.mse_loss(out, want).sqrt(),
    "beside a mean": lambda own, out, own_want, want: (
        errors(own, own_want).mean() + (errors(out, want) * want[:, 0].abs()).sum() / want[:, 0].abs().sum()
    ),
}


def stepped(loss_fn: Loss, model: nn.Module, batch: Any, gathers: bool) -> Tensor:
    inputs, want, _ = batch
    own = model(inputs)
    out, all_want = (tutti.allgather(own), tutti.allgather(want)) if gathers else (own, want)
    return loss_fn(own, out, want, all_want)


def train(how: str, strategy: str, **options: Any) -> list[Any]:
    found: list[Any] = []
    for loss_fn in LOSSES.values():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(model: Any, batch: Any, loss_fn: Loss = loss_fn) -> Tensor:
            return stepped(loss_fn, model, batch, gathers=True)

        run = tutti.prepare(model, optimizer, dataset(), loss, strategy=strategy, batch_size=BATCH, **options)
        try:
            train_epoch(run, model, optimizer, loss, how)
        except UsageError as error:
            found.append(str(error))
            continue
        found.append([float(value.sum()) for value in run.state().values()])
    return found


def plain() -> list[Any]:
    found = []
    for loss_fn in LOSSES.values():
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, want, _ in global_batches(dataset(), BATCH, 0):
            optimizer.zero_grad()
            stepped(loss_fn, model, (inputs, want, None), gathers=False).backward()
            optimizer.step()
        found.append([float(value.sum()) for value in model.state_dict().values()])
    return found


@pytest.mark.parametrize(
    ("ranks", "how", "strategy"),
    [(2, "run.backward", "mirrored"), (3, "run.backward", "sharded:stage=1"), (3, "step", "mirrored")],
)
def test_a_loss_of_all_ranks_outputs_is_that_of_one_device(ranks: int, how: str, strategy: str) -> None:
    want = worlds.alone(plain)
    for found in worlds.run(ranks, train, how=how, strategy=strategy):
        for name, each, of_plain in zip(LOSSES, found, want, strict=True):
            assert each == pytest.approx(of_plain, abs=1e-10), name


def test_a_plain_backward_through_a_gather_is_refused() -> None:
    for found in worlds.run(2, train, how="loss.backward", strategy="mirrored"):
        assert all("Call run.backward(loss)" in each for each in found), found


@pytest.mark.parametrize(
    ("ranks", "how", "options"), [(2, "run.backward", {"workers": 4}), (3, "step", {"micro_batch": 2})]
)
def test_a_gather_of_parts_of_the_batch_is_refused(ranks: int, how: str, options: dict[str, Any]) -> None:
    for found in worlds.run(ranks, train, how=how, strategy="mirrored", **options):
        assert all("tensors that ranks have gathered, and a rank computes several" in str(each) for each in found), (
            found
        )
