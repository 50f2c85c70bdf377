"""Samples that ranks compare: equal but for rounding of floats, whatever a sample is and draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import tutti
from tests import worlds
from tutti.comm.communicator import world_communicator
from tutti.data.adapt import adapt
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.loader import Prefetch
from tutti.data.reader import MapReader
from tutti.errors import MismatchError
from tutti.launcher import context

ROWS = 6
_OWN = np.random.default_rng(0)


def _wide(index: int, rank: int) -> Tensor:
    """A bag of a few words of many."""
    return torch.zeros(100_000).index_fill_(0, torch.tensor([index * 7919 % 100_000, (index + rank) * 31]), 1.0)


def _drawn() -> float:
    own = float(torch.rand(())) + np.random.rand() + random.random()
    return own + float(_OWN.normal())


def _picture() -> Any:
    image = pytest.importorskip("PIL.Image")
    return image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))


ALIKE: dict[str, Callable[[int, int], Any]] = {
    "float32": lambda index, rank: (torch.linspace(-1, 2, 500) + index) * (1 + 3e-7 * rank),
    "many": lambda index, rank: torch.linspace(1, 2, 1_100_000) * (1 + 3e-7 * rank),
    "near zero": lambda index, rank: torch.tensor([1.0, 2.0, 1e-7 * rank]),
    "float64": lambda index, rank: np.linspace(1, 2, 700) * (1 + 1e-14 * rank),
    "bfloat16": lambda index, rank: torch.full((3,), 1 + 2**-7 * rank, dtype=torch.bfloat16),
    "complex": lambda index, rank: torch.full((3,), (1 + 2j) * (1 + 3e-7 * rank), dtype=torch.complex64),
    "scalars": lambda index, rank: {"a": 0.1 + 1e-16 * rank, "b": np.float32(0.1 + 1e-8 * rank), "c": 1e300},
    "not finite": lambda index, rank: np.array([np.nan, np.inf, 1 + 1e-15 * rank]),
    "augmented": lambda index, rank: (torch.ones(3) * _drawn(), index),
    "paths": lambda index, rank: {"path": f"/of/rank/{rank}", "x": torch.ones(2), "note": None},
    "ragged": lambda index, rank: [torch.ones(index % 3), np.array([[1], [1, 2]], dtype=object), [1] * index],
    "empty": lambda index, rank: (torch.empty(0), np.empty((0, 3)), ""),
    "picture": lambda index, rank: (_picture(), index),
    "words": lambda index, rank: f"text {index}",
}
UNLIKE: dict[str, Callable[[int, int], Any]] = {
    "shuffled float32": lambda index, rank: torch.full((4,), float(index + rank)),
    "another float64": lambda index, rank: np.full(4, 1 + 1e-7 * rank),
    "a word of many": _wide,
    "one of many": lambda index, rank: torch.ones(3000).index_fill_(0, torch.tensor([2999]), 1.0 + rank),
    "one of millions": lambda index, rank: torch.ones(2_100_000).index_fill_(0, torch.tensor([2_099_999]), 1.2 + rank),
    "beside a large one": lambda index, rank: torch.tensor([1.7e9, 1 + 0.01 * rank, 0.5], dtype=torch.float64),
    "label": lambda index, rank: (torch.ones(3), index + rank),
    "pixel": lambda index, rank: torch.full((4, 4), 100 + rank, dtype=torch.uint8),
    "float": lambda index, rank: {"x": torch.ones(3), "target": 0.1 + 0.1 * rank},
    "sign": lambda index, rank: torch.tensor([0.0, 1.0 - 2.0 * (rank % 2)]),
    "not finite": lambda index, rank: torch.tensor([1.0, float("nan") if rank == 1 else 0.0]),
    "dtype": lambda index, rank: torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32),
    "text": lambda index, rank: f"text {index + rank}",
}


class Items(Dataset[Any]):
    """Samples of a function of index and rank."""

    def __init__(self, item: Callable[[int, int], Any]) -> None:
        self.item, self.rank = item, tutti.rank()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.item(index, self.rank)


def compared(data_workers: int) -> dict[str, str]:
    """What ranks say of each kind of samples: an empty text if they begin to train."""
    said = {}
    for name, item in [*ALIKE.items(), *((f"un{name}", item) for name, item in UNLIKE.items())]:
        source, epochs = adapt(Items(item), lambda items: len(items)), Epochs(BatchContract(ROWS, 3, 3, tutti.size()))
        world = world_communicator(context.current())
        reader = MapReader(source, epochs, tutti.rank(), 0, Prefetch(data_workers), world=world)
        try:
            said[name] = "" if sum(part.samples for part in reader.read(0, 0)) == ROWS else "too few"
        except MismatchError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(("ranks", "data_workers"), [(3, 0), (2, 1)])
def test_ranks_with_other_samples_are_refused_and_with_rounded_ones_are_not(ranks: int, data_workers: int) -> None:
    for said in worlds.run(ranks, compared, data_workers=data_workers):
        assert not any(said[name] for name in ALIKE), said
        assert all("the samples of the data set" in said[f"un{name}"] for name in UNLIKE), said
