"""Data sets with random generators and counters of their own: the same on any number of devices, or refused."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

import tutti
from tests import worlds
from tutti.data.item_source import ItemSource
from tutti.data.source import AugmentKey

ROWS, BATCH = 20, 6
_OF_MODULE = np.random.RandomState(0)


class Rows(Dataset[Any]):
    """Four numbers a sample, to which ``noise`` adds."""

    def __init__(self, noise: Callable[[], float]) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(4.0, dtype=torch.float64) + index % 3 + self.noise()


class Normal:
    """Draws from a NumPy generator, which it makes ``late``, with its first draw, or at once."""

    def __init__(self, late: bool = False) -> None:
        self.rng = None if late else np.random.default_rng(0)

    def __call__(self) -> float:
        if self.rng is None:
            self.rng = np.random.default_rng(0)
        return float(self.rng.normal())


class OfClass:
    """Draws from a generator that all objects of the class share."""

    rng = random.Random(0)

    def __call__(self) -> float:
        return self.rng.random()


class Counting:
    """Counts the samples."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 0.1 * self.count


def of_closure() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    return lambda: float(torch.rand((), generator=generator))


def of_module() -> float:
    return float(_OF_MODULE.rand())


def of_system() -> float:
    return random.SystemRandom().random()


def drawing(late: bool = False) -> Callable[[list[Tensor]], Tensor]:
    noise = Normal(late)
    return lambda samples: default_collate(samples) + noise()


def still() -> float:
    return 0.0


class Caching(Rows):
    """Keeps what it draws for a sample; or only makes something with draws by the first read of all."""

    def __init__(self, noise: Callable[[], float], each: bool) -> None:
        super().__init__(noise)
        self.each, self.kept = each, dict[int, float]()

    def __getitem__(self, index: int) -> Tensor:
        key = index if self.each else -1
        if key not in self.kept:
            self.kept[key] = self.noise()
        return torch.arange(4.0, dtype=torch.float64) + index % 3 + self.kept[key] * self.each


DATA: dict[str, Callable[[], Any]] = {
    "made by the first read": lambda: Caching(random.random, each=False),
    "made by a generator": lambda: Caching(Normal(), each=False),
    "kept draws": lambda: Caching(np.random.rand, each=True),
    "attribute": lambda: Rows(Normal()),
    "class": lambda: Rows(OfClass()),
    "late": lambda: Rows(Normal(late=True)),
    "subset": lambda: Subset(Rows(Normal()), range(ROWS)),
    "method": lambda: Rows(random.Random(0).random),
    "partial": lambda: Rows(partial(random.Random(0).uniform, 0.0, 1.0)),
    "closure": lambda: Rows(of_closure()),
    "module": lambda: Rows(of_module),
    "collate": lambda: DataLoader(Rows(still), BATCH, collate_fn=drawing()),
    "late collate": lambda: DataLoader(Rows(still), BATCH, collate_fn=drawing(late=True)),
    "loader processes": lambda: DataLoader(Rows(Normal()), BATCH, num_workers=1),
    "counter": lambda: Rows(Counting()),
    "system": lambda: Rows(of_system),
}
KEYED = [name for name in DATA if name not in ("counter", "system", "kept draws")]


def loss_fn(model: Any, batch: Tensor) -> Tensor:
    return functional.mse_loss(model(batch), batch.sum(1, keepdim=True))


def train(data: str, strategy: str = "mirrored") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = DATA[data]()
    size: dict[str, Any] = {} if isinstance(dataset, DataLoader) else {"batch_size": BATCH}
    run = tutti.prepare(model, optimizer, dataset, loss_fn, strategy=strategy, workers=3, **size)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("data", KEYED)
def test_draws_do_not_depend_on_the_number_of_devices(data: str) -> None:
    want = worlds.alone(train, data=data)
    for size in (2, 3):
        for found in worlds.run(size, train, data=data):
            assert found == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("data", ["counter", "system"])
def test_samples_that_depend_on_those_before_are_refused_on_several_devices(data: str) -> None:
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(2, train, data=data)
    assert all(
        each is not None and "is another one when it is read again" in each.text for each in raised.value.failures
    )
    worlds.alone(train, data=data)


def test_samples_that_keep_what_their_first_read_draws_are_refused_on_several_devices() -> None:
    """A device that reads a sample first in the second epoch would draw by that epoch's key."""
    with pytest.raises(worlds.RankError) as raised:
        worlds.run(2, train, data="kept draws")
    assert all(each is not None and "random numbers of its first read" in each.text for each in raised.value.failures)


def unchecked(data: str) -> Any:
    with patch.dict(os.environ, TUTTI_DIAGNOSTICS="off"):
        return train(data)


def test_the_check_that_samples_repeat_can_be_switched_off() -> None:
    first, second = worlds.run(2, unchecked, data="counter")
    assert first == second


def fetch(source: ItemSource, *indices: int) -> list[float]:
    batch: Tensor = source.fetch(np.array(indices), AugmentKey(0, 0))
    return batch[:, 0].tolist()


def test_a_draw_depends_on_the_sample_and_not_on_the_samples_before() -> None:
    one = fetch(ItemSource(Rows(Normal())), 3, 4, 5)
    source = ItemSource(Rows(Normal()))
    assert fetch(source, 5, 3) == [one[2], one[0]]
    assert fetch(source, 4) == [one[1]]
    assert len({value - index % 3 for value, index in zip(one, (3, 4, 5), strict=True)}) == 3


def test_fetching_leaves_the_generator_as_it_was() -> None:
    generator = random.Random(7)
    before = generator.getstate()
    fetch(ItemSource(Rows(generator.random)), 0, 1)
    assert generator.getstate() == before


def test_two_generators_of_one_data_set_draw_other_numbers() -> None:
    one, other = random.Random(0), random.Random(0)
    apart: Iterator[float] = iter([])

    def noise() -> float:
        nonlocal apart
        first, second = one.random(), other.random()
        apart = iter([*apart, first - second])
        return 0.0

    fetch(ItemSource(Rows(noise)), 0)
    assert all(apart)


def test_the_global_generators_are_not_taken_for_the_data_sets_own() -> None:
    drawn = fetch(ItemSource(Rows(np.random.rand)), 3)
    assert drawn == fetch(ItemSource(Rows(lambda: np.random.rand())), 3)
