"""Loss functions that advance generators and iterators of their own: right, or refused before an update."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn, thinned
from tests.scripts.oracle import global_batches
from tutti.errors import UsageError

BATCH = 8
Loss = Callable[[int, Tensor, Tensor], Tensor]


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(24, width, generator=draw, dtype=torch.float64) for width in (4, 1)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def weighted(weight: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets) + weight * outputs.abs().mean()


def of_torch() -> Loss:
    own = torch.Generator().manual_seed(3)
    return lambda _, outputs, targets: weighted(torch.rand((), generator=own), outputs, targets)


def of_python() -> Loss:
    own = random.Random(3)
    return lambda _, outputs, targets: weighted(own.random(), outputs, targets)


def of_numpy() -> Loss:
    own = np.random.default_rng(3)

    def loss(_: int, outputs: Tensor, targets: Tensor) -> Tensor:
        order = torch.from_numpy(own.permutation(2))
        return weighted(torch.tensor([0.1, 0.9], dtype=torch.float64)[order][0], outputs, targets)

    return loss


def next_number() -> Loss:
    own = itertools.cycle([0.0, 0.1, 0.2, 0.3])
    return lambda _, outputs, targets: weighted(next(own), outputs, targets)


def next_tensor() -> Loss:
    own = iter(torch.linspace(0, 1, 50, dtype=torch.float64))
    return lambda _, outputs, targets: weighted(next(own), outputs, targets)


def seeded() -> Loss:
    own = torch.Generator()
    return lambda step, outputs, targets: weighted(
        torch.rand((), generator=own.manual_seed(step)) + random.Random(step).random(), outputs, targets
    )


def for_a_log() -> Loss:
    own, seen = random.Random(3), list[float]()

    def loss(_: int, outputs: Tensor, targets: Tensor) -> Tensor:
        if own.random() < 0.5:
            seen.append(float(outputs.detach().mean()))
        return functional.mse_loss(outputs, targets)

    return loss


def item_of_a_step() -> Loss:
    own, kept = itertools.count(1), dict[int, int]()

    def loss(step: int, outputs: Tensor, targets: Tensor) -> Tensor:
        if step not in kept:
            kept[step] = next(own)
        return weighted(kept[step] / 10, outputs, targets)

    return loss


def plain(made: Callable[[], Loss]) -> list[Tensor]:
    model, loss = network(), made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, (inputs, targets) in enumerate(global_batches(dataset(), BATCH, 0)):
        optimizer.zero_grad()
        loss(step, model(inputs), targets).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def train(made: Callable[[], Loss], strategy: str, workers: int) -> tuple[str, int, list[Tensor]]:
    model, own = network(), made()
    steps: list[Any] = []
    run = tutti.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        dataset(),
        lambda model, batch: own(steps[0].global_step, model(batch[0]), batch[1]),
        strategy=strategy,
        workers=workers,
        batch_size=BATCH,
        seed=0,
    )
    steps.append(run)
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except UsageError as error:
        return str(error), run.updates, []
    return "", run.updates, list(run.state().values())


@pytest.mark.parametrize("made", thinned([of_torch, of_numpy, of_python, next_number, next_tensor], 2))
def test_what_each_micro_batch_would_advance_is_refused(made: Callable[[], Loss]) -> None:
    [(error, updates, _)] = worlds.run(1, train, made=made, strategy="single", workers=2)
    assert "micro-batch" in error
    assert updates == 0


@pytest.mark.parametrize("made", thinned([of_python, next_tensor, of_torch], 3))
def test_so_it_is_where_forwards_are_collective(made: Callable[[], Loss]) -> None:
    for error, updates, _ in worlds.run(2, train, made=made, strategy="sharded", workers=4):
        assert "micro-batch" in error
        assert updates == 0


SAME = (seeded, for_a_log, item_of_a_step)
WORLDS = ((2, "mirrored", 2), (2, "tensor", 1), (1, "single", 3), (1, "single", 1))


@pytest.mark.parametrize(("world", "made"), in_turn(WORLDS, SAME))
def test_what_is_the_same_for_all_micro_batches_is_right(world: tuple[int, str, int], made: Callable[[], Loss]) -> None:
    equal(made, *world)


@pytest.mark.parametrize(("made", "world"), in_turn((of_python, next_number, next_tensor), (WORLDS[3], *WORLDS[:2])))
def test_a_rank_of_one_micro_batch_advances_once_a_step(made: Callable[[], Loss], world: tuple[int, str, int]) -> None:
    equal(made, *world)


def equal(made: Callable[[], Loss], ranks: int, strategy: str, workers: int) -> None:
    for error, updates, found in worlds.run(ranks, train, made=made, strategy=strategy, workers=workers):
        assert (error, updates) == ("", 3)
        for own, expected in zip(found, plain(made), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
