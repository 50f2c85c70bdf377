"""Every sample exactly once an epoch, in one order, whatever the devices (docs/architecture.md, contract 2)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tests import worlds
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
]


class Augmented:
    """A data set of the user's own, which draws from Python's, NumPy's and PyTorch's generators."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([random.random(), float(np.random.randn()), torch.rand(()).item()])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(3, 1))


def seen(strategy: str, workers: int, cases: list[tuple[int, int, int | None]], augmented: bool) -> list[Any]:
    """For each (samples, batch, micro): what this rank got in each step, and what its loss function was called with."""
    told = []
    for count, batch_size, micro in cases:
        called: list[Any] = []

        def loss(net: Any, batch: Any, called: list[Any] = called) -> Any:
            called.extend(zip(batch[0].tolist(), batch[1].tolist(), strict=True))
            return net(batch[1]).sum(), len(batch[0])

        torch.manual_seed(tutti.rank())
        data = Augmented(count) if augmented else (torch.arange(count), torch.arange(3.0 * count).view(count, 3))
        run = tutti.prepare(
            model(),
            "sgd:lr=0",
            data,
            loss,
            strategy=strategy,
            workers=workers,
            batch_size=batch_size,
            micro_batch=micro,
        )
        steps, reached = [], []
        for epoch in range(2):
            for batch in run.epoch(epoch):
                run.step(batch)
                steps.append(list(zip(batch[0].tolist(), batch[1].tolist(), strict=True)))
                reached.append(list(called))
                called.clear()
        told.append((run.setting.grid.data_rank, steps, reached))
    return told


def joined(answers: list[Any], case: int, which: int) -> list[list[Any]]:
    """Global batches from the ranks' parts; the stages of one replica must have seen the same."""
    by_rank: dict[int, Any] = {}
    for answer in answers:
        assert by_rank.setdefault(answer[case][0], answer[case][which]) == answer[case][which]
    return [[x for rank in sorted(by_rank) for x in by_rank[rank][step]] for step in range(len(by_rank[0]))]


CASES: list[tuple[int, int, int | None]] = [(23, 8, None), (23, 8, 2), (70, 25, 3), (24, 8, None), (5, 9, None)]


@pytest.mark.parametrize(("devices", "strategy"), WORLDS)
def test_every_sample_once_in_the_global_order(devices: int, strategy: str) -> None:
    for workers in (4, 5):
        answers = worlds.run(devices, seen, strategy=strategy, workers=workers, cases=CASES, augmented=False)
        for case, (count, batch_size, _) in enumerate(CASES):
            for which in (1, 2):
                batches = [[i for i, _ in batch] for batch in joined(answers, case, which)]
                orders = [permutation(0, epoch, count).tolist() for epoch in range(2)]
                assert batches == [o[i : i + batch_size] for o in orders for i in range(0, count, batch_size)]


def test_random_augmentation_belongs_to_the_sample() -> None:
    cases: list[tuple[int, int, int | None]] = [(11, 5, 2)]
    want: list[list[Any]] = []
    for devices, strategy in WORLDS:
        answers = worlds.run(devices, seen, strategy=strategy, workers=4, cases=cases, augmented=True)
        got = joined(answers, 0, 1)
        assert got == joined(answers, 0, 2)
        assert not want or got == want, (devices, strategy)
        want = got
    draws = [x for batch in want for _, row in batch for x in row]
    assert len(set(draws)) == len(draws) == 2 * 11 * 3, "every sample draws anew in every epoch"


SIZES = (1, 2, 3, 5, 16, 17, 33, 47, 100)


def evaluated(strategy: str, workers: int) -> list[Any]:
    """Means and which samples were looked at, for held-out sets of many sizes."""
    called: list[int] = []

    def loss(net: Any, batch: Any) -> Any:
        called.extend(batch[0].tolist())
        value = net(batch[1])
        return (value**2).sum(), len(batch[0]), {"index": batch[0].sum(), "seen": len(batch[0])}

    run = tutti.prepare(model(), "sgd", Augmented(20), loss, strategy=strategy, workers=workers, batch_size=10)
    told = []
    for size in SIZES:
        for batch in (4, 512):
            called.clear()
            result = run.evaluate(adapt(Augmented(size)), batch=batch)
            told.append((result.loss, result.metrics, result.samples, run.setting.grid.data_rank, list(called)))
    return told


@pytest.mark.parametrize("strategy", ["mirrored", "model_parallel", "local_sgd"])
def test_evaluation_counts_every_sample_once(strategy: str) -> None:
    """And gives the same bits whatever the devices: blocks do not depend on them and are added in order."""
    [want] = worlds.run(1, evaluated, strategy="single", workers=4)
    for devices in (3, 4):
        answers = worlds.run(devices, evaluated, strategy=strategy, workers=4)
        for row, (loss, metrics, samples, _, _) in enumerate(want):
            assert metrics == {"index": (samples - 1) / 2, "seen": 1.0}
            looked: dict[int, list[int]] = {}
            for answer in answers:
                assert answer[row][:3] == (loss, metrics, samples)
                assert looked.setdefault(answer[row][3], answer[row][4]) == answer[row][4]
            assert sorted(i for part in looked.values() for i in part) == list(range(samples))
