"""Every sample exactly once an epoch, in one order, whatever the devices (docs/architecture.md, contract 2)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.data.adapt import adapt
from tutti.data.order import permutation

WORLDS = [
    (1, "single"),
    (2, "mirrored"),
    (3, "mirrored"),
    (4, "mirrored"),
    (3, "local_sgd:period=2"),
    (3, "model_parallel"),
    (4, "model_parallel"),
    (4, "model_parallel:stages=2"),
    (3, "pipeline"),
    (4, "pipeline:stages=2,schedule=zero_bubble"),
    (3, "central_storage"),
    (3, "local_sgd:period=2,post=1"),
    (3, "diloco:period=2"),
    (2, "tensor:least=1"),
    (4, "hybrid:tensor=2,replicas=2,least=1"),
    (3, "sharded:stage=1"),
]


class Augmented:
    """A data set of the user's own, which draws from Python's, NumPy's and PyTorch's generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([random.random(), float(np.random.randn()), torch.rand(()).item()])


class Streamed(IterableDataset[dict[str, Any]]):
    """The same as a stream of dicts in an order of its own, another one in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in order(self.epoch, self.count):
            yield {"number": index, "row": Augmented(self.count)[index][1]}


def order(epoch: int, count: int) -> list[int]:
    return [*range(count)[epoch::2], *range(count)[1 - epoch :: 2]]


def numbered(count: int) -> Any:
    return torch.arange(count), torch.arange(3.0 * count).view(count, 3)


def generated(count: int) -> Any:
    """A function that returns an iterable, of batches whose length nobody knows."""
    return lambda: Streamed(count)


DATA: dict[str, Any] = {"numbered": numbered, "augmented": Augmented, "streamed": Streamed, "generated": generated}


def fields(batch: Any) -> tuple[Any, Any]:
    return (batch["number"], batch["row"]) if isinstance(batch, dict) else batch


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(3, 1))


def seen(
    strategy: str, workers: int, cases: list[tuple[int, int, int | None]], data: str, data_workers: int = 0
) -> list[Any]:
    """For each (samples, batch, micro): what this rank got in each step, and what its loss function was called with.

    In two epochs of the first case, and in the second epoch of the others.
    """
    told = []
    for case, (count, batch_size, micro) in enumerate(cases):
        called: list[Any] = []

        def loss(net: Any, batch: Any, called: list[Any] = called) -> Any:
            numbers, rows = fields(batch)
            if torch.is_grad_enabled():
                called.extend(zip(numbers.tolist(), rows.tolist(), strict=True))
            return net(rows).sum(), len(numbers)

        torch.manual_seed(tutti.rank())
        run = tutti.prepare(
            model(),
            "sgd:lr=0",
            DATA[data](count),
            loss,
            strategy=strategy,
            workers=workers,
            batch_size=batch_size,
            micro_batch=micro,
            data_workers=data_workers,
        )
        # A model is cut into stages after a trial of its forward and loss, which is no training.
        called.clear()
        steps, reached = [], []
        for epoch in epochs_of(case):
            for batch in run.epoch(epoch):
                run.step(batch)
                steps.append(list(zip(*(field.tolist() for field in fields(batch)), strict=True)))
                reached.append(list(called))
                called.clear()
        told.append((run.context.mesh.data_rank, steps, reached))
    return told


def epochs_of(case: int) -> list[int]:
    return [1] if case else [0, 1]


def joined(answers: list[Any], case: int, which: int) -> list[list[Any]]:
    """Global batches from the ranks' parts; the stages of one replica must have seen the same."""
    by_rank: dict[int, Any] = {}
    for answer in answers:
        assert by_rank.setdefault(answer[case][0], answer[case][which]) == answer[case][which]
    return [[x for rank in sorted(by_rank) for x in by_rank[rank][step]] for step in range(len(by_rank[0]))]


CASES: list[tuple[int, int, int | None]] = [(23, 8, None), (29, 17, 3), (24, 8, None), (5, 9, None)]


GIVEN = [("numbered", 4), ("streamed", 5), ("numbered", 5), ("streamed", 4)]


@pytest.mark.parametrize(("world", "given"), in_turn(WORLDS, GIVEN), ids=str)
def test_every_sample_once_in_the_global_order(world: tuple[int, str], given: tuple[str, int]) -> None:
    """Every world with a data set or a stream; the test below has a stream with each of them."""
    check(world, given, CASES)


def check(world: tuple[int, str], given: tuple[str, int], cases: list[tuple[int, int, int | None]]) -> None:
    (devices, strategy), (data, workers) = world, given
    answers = worlds.run(devices, seen, strategy=strategy, workers=workers, cases=cases, data=data)
    for case, (count, batch_size, _) in enumerate(cases):
        for which in (1, 2):
            batches = [[i for i, _ in batch] for batch in joined(answers, case, which)]
            shuffled = [permutation(0, epoch, count).tolist() for epoch in epochs_of(case)]
            orders = shuffled if data == "numbered" else [order(epoch, count) for epoch in epochs_of(case)]
            assert batches == [o[i : i + batch_size] for o in orders for i in range(0, count, batch_size)]


@pytest.mark.parametrize("turn", [0, 1], ids=["augmented", "generated"])
def test_random_augmentation_belongs_to_the_sample(turn: int) -> None:
    """Every other world with a data set, and the others with a stream."""
    data = ("augmented", "generated")[turn]
    cases: list[tuple[int, int, int | None]] = [(11, 5, 2)]
    want: list[list[Any]] = []
    for devices, strategy in [WORLDS[0], *WORLDS[1 + turn :: 2]]:
        answers = worlds.run(devices, seen, strategy=strategy, workers=4, cases=cases, data=data)
        got = joined(answers, 0, 1)
        assert got == joined(answers, 0, 2)
        assert not want or got == want, (devices, strategy)
        want = got
    draws = [x for batch in want for _, row in batch for x in row]
    assert len(set(draws)) == len(draws) == 2 * 11 * 3, "every sample draws anew in every epoch"


@pytest.mark.parametrize(("world", "data_workers"), in_turn([WORLDS[0], WORLDS[2], WORLDS[5]], [2, 1]), ids=str)
def test_loader_processes_change_nothing(world: tuple[int, str], data_workers: int) -> None:
    devices, strategy = world
    case = {"strategy": strategy, "workers": 4, "cases": [(11, 5, 2), (5, 9, None)], "data": "augmented"}
    want = worlds.run(devices, seen, **case)
    assert worlds.run(devices, seen, **case, data_workers=data_workers) == want


SIZES = (1, 2, 3, 5, 16, 17, 33, 47, 100)


def evaluated(strategy: str, workers: int, data_workers: int = 0, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """Means and which samples were looked at, for held-out sets of many sizes."""
    called: list[int] = []

    def loss(net: Any, batch: Any) -> Any:
        called.extend(batch[0].tolist())
        value = net(batch[1])
        return (value**2).sum(), len(batch[0]), {"index": batch[0].sum(), "seen": len(batch[0])}

    options = {"strategy": strategy, "workers": workers, "batch_size": 10, "data_workers": data_workers}
    run = tutti.prepare(model(), "sgd", Augmented(20), loss, **options)
    told = []
    for size in sizes:
        for batch in (4, 512):
            called.clear()
            result = run.evaluate(adapt(Augmented(size)), batch=batch)
            told.append((result.loss, result.metrics, result.samples, run.context.mesh.data_rank, list(called)))
    return told


@pytest.mark.parametrize(
    ("strategy", "devices"),
    in_turn(["mirrored", "model_parallel", "local_sgd", "central_storage", "diloco", "sharded:stage=1"], [3, 4]),
)
def test_evaluation_counts_every_sample_once(strategy: str, devices: int) -> None:
    """And gives the same bits whatever the devices: blocks do not depend on them and are added in order."""
    want = worlds.alone(evaluated, strategy="single", workers=4)
    answers = worlds.run(devices, evaluated, strategy=strategy, workers=4)
    for row, (loss, metrics, samples, _, _) in enumerate(want):
        assert metrics == {"index": (samples - 1) / 2, "seen": 1.0}
        looked: dict[int, list[int]] = {}
        for answer in answers:
            assert answer[row][:3] == (loss, metrics, samples)
            assert looked.setdefault(answer[row][3], answer[row][4]) == answer[row][4]
        assert sorted(i for part in looked.values() for i in part) == list(range(samples))


def test_evaluation_by_loader_processes_is_the_same() -> None:
    case = {"strategy": "mirrored", "workers": 4, "sizes": (2, 17)}
    assert worlds.run(3, evaluated, **case, data_workers=2) == worlds.run(3, evaluated, **case)
