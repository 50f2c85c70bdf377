"""Samples that cannot be one batch are refused: what differs, in which samples, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, default_collate

import tutti
from tests import worlds
from tests.worlds import RankError
from tutti.data.adapt import adapt
from tutti.data.collation import collate
from tutti.errors import DataError


class Pair(NamedTuple):
    inputs: Tensor
    target: int


def collated(*samples: Any) -> Any:
    return collate(samples, lambda place: f"sample {place}", "Mine")


ALIKE: list[list[Any]] = [
    [torch.ones(2), torch.zeros(2)],
    [1, 2],
    [0.5, 1.5],
    [True, False],
    [np.float32(1), np.float32(2)],
    [np.ones(3, dtype=np.uint8), np.zeros(3, dtype=np.uint8)],
    [(torch.ones(2), 1), (torch.zeros(2), 0)],
    [[torch.ones(2), 1.0], [torch.zeros(2), 0.0]],
    [{"x": torch.ones(2), "y": {"z": 1}}, {"y": {"z": 2}, "x": torch.zeros(2)}],
    [Pair(torch.ones(2), 1), Pair(torch.zeros(2), 0)],
    [torch.ones(2, dtype=torch.float32), torch.ones(2, dtype=torch.float64)],
]


@pytest.mark.parametrize("samples", ALIKE, ids=str)
def test_samples_of_one_form_are_collated_as_pytorch_does(samples: list[Any]) -> None:
    got, want = collated(*samples), default_collate(samples)
    assert type(got) is type(want)
    assert str(got) == str(want)


DIFFERENT: list[tuple[Any, Any, str, str, str]] = [
    # first, second, where, what, remedy
    (torch.ones(5), torch.ones(7), "", r"tensor of float32 with shape \(5,\) and a .* \(7,\)", "pad or crop"),
    ((torch.ones(5), 1), (torch.ones(7), 1), r"they differ in \[0\]", r"\(5,\) and .* \(7,\)", "pad or crop"),
    ({"x": np.ones(2)}, {"x": np.ones(3)}, r"in \['x'\]", r"NumPy array of float64 with shape \(2,\)", "pad or crop"),
    ({"x": 1}, {"x": 1, "y": 2}, "", "no entry 'y' and an entry 'y'", "same structure"),
    ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, r"in \['a'\]", "an entry 'y' and no entry 'y'", "same structure"),
    ((1, 2), (1, 2, 3), "", "a tuple of 2 and a tuple of 3", "same structure"),
    ([1, 2], (1, 2), "", "a list of 2 and a tuple of 2", "same structure"),
    (torch.ones(2), torch.ones(2).long(), "", "float32 .* and .* int64", "dtypes"),
    (torch.ones(2).int(), torch.ones(2).long(), "", "int32 .* and .* int64", "dtypes"),
    ((torch.ones(2), 1), (torch.ones(2), 1.5), r"in \[1\]", "an int and a float", "types"),
    (1, True, "", "an int and a bool", "types"),
    (torch.ones(2), np.ones(2), "", "a tensor .* and a NumPy array", "types"),
    (torch.ones(2), None, "", "a tensor .* and None", "types"),
    (torch.tensor(1), 1, "", "a tensor .* and an int", "types"),
]


@pytest.mark.parametrize(("first", "second", "where", "what", "remedy"), DIFFERENT)
def test_samples_that_differ_are_named(first: Any, second: Any, where: str, what: str, remedy: str) -> None:
    with pytest.raises(DataError, match=where or None) as caught:
        collated(first, first, second)
    text = str(caught.value)
    assert text.startswith("sample 0 and sample 2 cannot be in one batch")
    assert "(Mine)" in text
    for wanted in (what, remedy):
        assert re.search(wanted, text), text


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((torch.ones(2), object()), r"holds an object in \[1\]"),
        (object(), "holds an object"),
        ({"deep": [1, {2}]}, r"holds a set in \['deep'\]\[1\]"),
        (np.array(["cat"]), "holds a NumPy array of <U3"),
        (np.array([object()]), "holds a NumPy array of object"),
        ({1, 2}, "holds a set"),
    ],
)
def test_a_sample_that_no_batch_can_hold_is_named(sample: Any, said: str) -> None:
    for samples in ([sample], [sample, sample]):
        with pytest.raises(DataError, match=f"sample 0 {said} .*Mine.*tensors, arrays, numbers, texts and None"):
            collated(*samples)


class Sentences:
    """Sample 9 is longer than the others."""

    def __init__(self, odd: int = 9) -> None:
        self.odd = odd

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if number >= 12:
            raise IndexError(number)
        return torch.ones(4 if number == self.odd else 3), torch.zeros(1)


class Flow(IterableDataset[Any]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return map(Sentences().__getitem__, range(12))


def test_a_map_style_data_set_names_the_samples_by_their_numbers() -> None:
    with pytest.raises(DataError, match=r"sample 3 and sample 9 cannot .* \(Sentences\)"):
        adapt(Sentences()).fetch(np.array([3, 5, 9, 0]), None)


def step_through(data: Any, **options: Any) -> None:
    model = nn.Linear(3, 1)
    run = tutti.prepare(
        model, "sgd:lr=0.1", data, lambda called, b: ((called(b[0]) - b[1]) ** 2).mean(), batch_size=12, **options
    )
    for batch in run.epoch(0):
        run.step(batch)


@pytest.mark.parametrize(
    ("kind", "devices", "loaders"),
    [
        (Sentences, 1, 0),
        (Sentences, 3, 0),
        (Flow, 1, 0),
        *(pytest.param(*row, marks=pytest.mark.full) for row in [(Sentences, 2, 1), (Flow, 3, 0)]),
    ],
)
def test_a_run_on_samples_of_unequal_length_ends_with_the_reason(kind: Any, devices: int, loaders: int) -> None:
    with pytest.raises(RankError) as caught:
        worlds.run_within(3.0, devices, step_through, data=kind(), data_workers=loaders)
    said = [f for f in caught.value.failures if f is not None and f.kind == "DataError"]
    assert said
    assert all("sample 9" in f.text and "pad or crop" in f.text and kind.__name__ in f.text for f in said)
    assert all(f.exit_code == 3 for f in said)


def test_strings_and_none_become_a_list_with_one_entry_a_sample() -> None:
    samples = [{"x": torch.tensor(i), "name": name, "note": None, "deep": (i, b"r")} for i, name in enumerate("ab")]
    batch = collated(*samples)
    assert batch["x"].tolist() == [0, 1] and batch["name"] == ["a", "b"] and batch["note"] == [None, None]
    assert batch["deep"][0].tolist() == [0, 1] and batch["deep"][1] == [b"r", b"r"]
    assert collated("a", None) == ["a", None]
    with pytest.raises(DataError, match="an int and None"):
        collated((1, None), (None, None))
