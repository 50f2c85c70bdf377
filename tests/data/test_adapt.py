"""Sources from tensors and map-style data sets; random draws of an item belong to the item."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tutti.data.adapt import ItemSource, TensorSource, adapt, adapt_training
from tutti.data.source import AugmentKey
from tutti.errors import DataError, UsageError

INDICES = np.array([3, 0, 3, 1])


class Augmented:
    """Draws from all three generators that people use."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError(index)
        return {"index": index, "draws": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])}


def test_tensors_alone_in_tuples_and_in_a_dataset() -> None:
    images, labels = torch.randn(5, 2), torch.arange(5)
    for data in ((images, labels), [images, labels], TensorDataset(images, labels)):
        source = adapt(data)
        assert isinstance(source, TensorSource) and len(source) == 5
        got = source.fetch(INDICES, None)
        assert type(got) is (list if isinstance(data, TensorDataset) else tuple), "a list, as of DataLoader"
        assert torch.equal(got[0], images[[3, 0, 3, 1]]) and got[1].tolist() == [3, 0, 3, 1]
    alone = adapt(images).fetch(INDICES, AugmentKey(0, 0))
    assert torch.equal(alone, images[[3, 0, 3, 1]])


@pytest.mark.parametrize("data", ["train.csv", Path("train")])
def test_a_path_is_no_data_set(data: Any) -> None:
    with pytest.raises(UsageError, match=r"the text or path 'train.*Give a data set that reads it"):
        adapt_training(data)


def test_a_source_is_taken_as_it_is() -> None:
    source = ItemSource(Augmented())
    assert adapt(source) is source
    assert isinstance(adapt(Augmented()), ItemSource)


def test_draws_depend_on_seed_epoch_and_sample_alone() -> None:
    source = adapt(Augmented())
    whole = source.fetch(np.arange(5), AugmentKey(1, 2))["draws"]
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    for part in ([3], [4, 1], [2, 2, 0]):
        batch = source.fetch(np.array(part), AugmentKey(1, 2))
        assert torch.equal(batch["draws"], whole[part]) and batch["index"].tolist() == part
    assert len({tuple(row) for row in whole.tolist()}) == 5
    for other in (AugmentKey(1, 3), AugmentKey(2, 2), None):
        assert not (source.fetch(np.arange(5), other)["draws"] == whole).any()
    evaluated = [source.fetch(np.arange(5), None)["draws"] for _ in range(2)]
    assert torch.equal(*evaluated)


def test_the_callers_generators_are_left_alone() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    adapt(Augmented()).fetch(INDICES, AugmentKey(0, 0))
    assert state() == before
    with pytest.raises(DataError):
        adapt(Augmented()).fetch(np.array([0, 7]), None)
    assert state() == before


def test_an_item_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match=r"cannot read sample 7 \(Augmented, .*test_adapt\.py:\d+\): IndexError: 7"):
        adapt(Augmented()).fetch(np.array([0, 7]), None)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (iter([1, 2]), UsageError, "__len__ and __getitem__"),
        (7, UsageError, "samples from an int"),
        (Augmented(0), DataError, "Augmented) is empty"),
        (torch.empty(0, 3), DataError, "is empty"),
        ([], DataError, "is empty"),
        ((torch.zeros(3), torch.zeros(4)), DataError, "different lengths: [3, 4]"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        adapt(data)
    assert words in str(caught.value)


def test_tensors_of_other_lengths_beside_a_collate_are_refused_with_the_way_out() -> None:
    with pytest.raises(DataError, match=r"different lengths: \[2, 3\].*DataLoader"):
        adapt([torch.zeros(2), torch.zeros(3)], collate=list)
