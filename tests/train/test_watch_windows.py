"""Scripts that begin something in their second epoch are checked there, as others are in the first steps of a run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tests import worlds
from tests.covering import marked
from tests.scripts.harness import Arrays, arrays, difference
from tests.scripts.oracle import global_batches
from tutti.data.reader import Position
from tutti.errors import UsageError
from tutti.train.script_checks.watch_windows import WatchWindows

BATCH, STEPS = 8, 10
"""Ten steps an epoch: the second one begins between the powers of two at which other checks act again."""


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 4, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.arange(BATCH * STEPS) % 3, torch.arange(BATCH * STEPS))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


class Loop:
    """A loop of which each subclass begins something in the second epoch (``late``)."""

    def __init__(self) -> None:
        self.model, self.late, self.run = network(), False, None
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(scores, batch[1])

    def before_step(self, loss: Tensor) -> None:
        pass

    def after_step(self, batch: Any) -> None:
        pass

    def after_epoch(self) -> None:
        pass

    def train(self, batches: Callable[[int], Iterator[Any]], backward: Callable[[Tensor], None]) -> None:
        for epoch in range(2):
            self.late = epoch > 0
            for batch in batches(epoch):
                self.optimizer.zero_grad()
                loss = self.loss(self.model(batch[0]), batch)
                backward(loss)
                self.before_step(loss)
                self.optimizer.step()
                self.after_step(batch)
            self.after_epoch()


class Table(Loop):
    """Losses by sample, of which the second epoch makes weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(BATCH * STEPS, dtype=torch.float64)

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        each = functional.cross_entropy(scores, batch[1], reduction="none")
        loss = (each * self.table[batch[2]]).mean() if self.late else each.mean()
        self.table[batch[2]] = each.detach()
        return loss


class Bank(Loop):
    """A queue that fills in the first epoch, and has negatives for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(16, 3, dtype=torch.float64)

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        loss = super().loss(scores, batch)
        if self.late:
            loss = loss + 0.1 * (scores @ self.queue.T).logsumexp(1).mean()
        self.queue = torch.cat([scores.detach(), self.queue])[:16]
        return loss


class Teacher(Loop):
    """A teacher that every body averages, from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def moves(self) -> bool:
        return self.late

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        loss = super().loss(scores, batch)
        return loss + functional.mse_loss(scores, self.teacher(batch[0])) if self.late else loss

    def after_step(self, batch: Any) -> None:
        if self.moves():
            for slow, fast in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.2)


class SteppedTeacher(Teacher):
    """The same, once a global batch."""

    def moves(self) -> bool:
        return self.late and (self.run is None or self.run.stepped)


class Counter(Loop):
    """A weight that a counter moves in every body."""

    count = 0

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        self.count += self.late
        loss = super().loss(scores, batch)
        return loss + self.count / 100 * scores.abs().mean() if self.late else loss


class GlobalCounter(Loop):
    """The same by the number of global batches."""

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        loss = super().loss(scores, batch)
        return loss + 0.1 * scores.abs().mean() if self.late else loss


class Edit(Loop):
    """A gradient that is scaled by the body's loss."""

    def before_step(self, loss: Tensor) -> None:
        if self.late:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / (1 + loss.detach()))


class Scheduler(Loop):
    """A scheduler that every body advances."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = ExponentialLR(self.optimizer, 0.9)

    def after_step(self, batch: Any) -> None:
        if self.late:
            self.scheduler.step()


class Loader(Loop):
    """A second loader, of which every body takes a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = iter(DataLoader(TensorDataset(torch.randn(99, 4, dtype=torch.float64)), batch_size=1))

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        loss = super().loss(scores, batch)
        return loss + self.model(next(self.loader)[0]).pow(2).mean() if self.late else loss


class Probe(Loop):
    """A probe that the script trains by itself from the second epoch on, and that the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(3, 3).double()
        self.other = torch.optim.SGD(self.probe.parameters(), lr=0.1)

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        return super().loss(scores, batch) + functional.cross_entropy(self.probe(scores), batch[1])

    def after_step(self, batch: Any) -> None:
        if self.late:
            self.other.zero_grad()
            functional.cross_entropy(self.probe(self.model(batch[0]).detach()), batch[1]).backward()
            self.other.step()


class ClassWeights(Loop):
    """Errors of the first epoch by class, of which NumPy makes weights for the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.wrong = torch.ones(3, dtype=torch.float64), np.ones(3)

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        for each in batch[1][scores.argmax(1) != batch[1]].tolist():
            self.wrong[each] += 1
        return (functional.cross_entropy(scores, batch[1], reduction="none") * self.weights[batch[1]]).mean()

    def after_epoch(self) -> None:
        self.weights = torch.tensor(self.wrong / self.wrong.mean())


class Threshold(Loop):
    """The mean loss of the last epoch, by which the next one leaves out samples."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.seen = math.inf, list[float]()

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        each = functional.cross_entropy(scores, batch[1], reduction="none")
        self.seen += each.tolist()
        return (each * (each.detach() < self.most)).mean()

    def after_epoch(self) -> None:
        self.most = float(np.mean(self.seen))


class NewThreshold(Threshold):
    """The same in code that the first epoch does not run."""

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        each = functional.cross_entropy(scores, batch[1], reduction="none")
        self.seen += each.tolist()
        return (each * (each.detach() < self.most)).mean() if self.late else each.mean()


class MeanThreshold(Loop):
    """The same by the mean loss of the last global batch."""

    most = math.inf

    def loss(self, scores: Tensor, batch: Any) -> Tensor:
        each = functional.cross_entropy(scores, batch[1], reduction="none")
        assert each.min().item() >= 0
        return (each * (each.detach() < self.most)).mean()

    def before_step(self, loss: Tensor) -> None:
        self.last = loss.item()

    def after_step(self, batch: Any) -> None:
        if self.run is not None and self.run.stepped:
            self.last = self.run.stats.loss

    def after_epoch(self) -> None:
        self.most = 1.01 * float(self.last)


def play(kind: type[Loop], strategy: str, workers: int, batch: int = BATCH) -> tuple[Arrays | None, str, int]:
    """The weights at the end, or else the refusal's text; and the number of updates."""
    loop = kind()
    run = tutti.prepare(
        loop.model, loop.optimizer, dataset(), strategy=strategy, workers=workers, batch_size=batch, seed=0
    )
    loop.run = run
    try:
        loop.train(run.microbatches, run.backward)
    except UsageError as error:
        return None, str(error), run.updates
    return arrays(run.state()), "", run.updates


def plain(kind: type[Loop], batch: int = BATCH) -> Arrays:
    loop = kind()
    loop.train(lambda epoch: global_batches(dataset(), batch, epoch), Tensor.backward)
    return arrays(loop.model.state_dict())


RANKS = (("mirrored", 2, 2), ("sharded", 2, 2), ("mirrored", 3, 3))
WORKERS = (("single", 1, 3), ("mirrored", 2, 4), ("sharded:stage=1", 2, 4))
BY_RANK = (Table, Bank, Probe, ClassWeights, Threshold, NewThreshold)
BY_BODY = (Bank, Teacher, Counter, Edit, Scheduler, Loader)
RIGHT = (SteppedTeacher, GlobalCounter, MeanThreshold)
UNEQUAL = (("mirrored", 2, 3),)


@pytest.mark.parametrize(
    ("kind", "strategy", "devices", "workers"),
    marked(
        [(kind, *row) for kind in BY_RANK for row in RANKS]
        + [(kind, *row) for kind in BY_BODY for row in WORKERS]
        + [(kind, *row) for kind in (ClassWeights, Threshold) for row in UNEQUAL],
        1,
    ),
)
def test_refused_before_the_first_wrong_update(kind: type[Loop], strategy: str, devices: int, workers: int) -> None:
    for _, text, updates in worlds.run_within(10.0, devices, play, kind=kind, strategy=strategy, workers=workers):
        # A probe must have made a step before ranks have other values.
        assert text and updates == STEPS + (kind is Probe), (text, updates)
        assert ".py:" in text or kind is Scheduler
    worlds.forget(devices)


@pytest.mark.parametrize(
    ("kind", "strategy", "devices", "workers"),
    marked([(kind, *row) for kind in RIGHT for row in (*RANKS, *WORKERS)], 1),
)
def test_right_ones_are_equal(kind: type[Loop], strategy: str, devices: int, workers: int) -> None:
    [want] = worlds.run(1, plain, kind=kind)
    for got, text, _ in worlds.run(devices, play, kind=kind, strategy=strategy, workers=workers):
        assert got is not None, text
        assert difference(got, want) <= 1e-10


@pytest.mark.parametrize("updates", [2, 4])
@pytest.mark.parametrize("kind", [Bank, Teacher, Counter, Loader])
def test_an_epoch_of_few_steps_is_checked_at_its_first_turn(kind: type[Loop], updates: int) -> None:
    [(_, text, made)] = worlds.run_within(10.0, 1, play, kind=kind, strategy="single", workers=2, batch=80 // updates)
    assert text and made == updates, text


@pytest.mark.parametrize("kind", RIGHT)
def test_right_ones_in_epochs_of_few_steps_are_equal(kind: type[Loop]) -> None:
    [want] = worlds.run(1, plain, kind=kind, batch=40)
    [(got, text, _)] = worlds.run(1, play, kind=kind, strategy="single", workers=2, batch=40)
    assert got is not None and difference(got, want) <= 1e-10, text


def steps(epochs: int, batches: int) -> list[bool]:
    """Whether each step of some epochs is in a window."""
    windows, found = WatchWindows(), []
    for epoch in range(epochs):
        for batch in range(1, batches + 1):
            windows.begin_step(Position(epoch, batch) if batch < batches else Position(epoch + 1, 0))
            found.append(windows.is_open)
    return found


def test_a_window_is_the_last_step_of_an_epoch_and_the_first_two_of_the_next() -> None:
    assert [number for number, is_open in enumerate(steps(2, 10), 1) if is_open] == [10, 11, 12, 20]
    assert [number for number, is_open in enumerate(steps(2, 4), 1) if is_open] == [4, 5, 6, 8]


def test_later_windows_take_one_step_in_64() -> None:
    assert sum(steps(4000, 5)) <= 4 * 3 + 20000 / 64 + 3
    assert sum(steps(10, 1000)) == 9 * 3 + 1
    assert any(steps(4000, 5)[-400:])


def test_batches_of_the_script_are_in_no_window() -> None:
    windows = WatchWindows()
    windows.begin_step(None)
    assert not windows.is_open
