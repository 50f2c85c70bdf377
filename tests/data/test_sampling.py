"""What a DataLoader does with its samples, tutti does too: the same batches as iterating the loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from tutti.data.adapt import adapt
from tutti.data.item_source import ItemSource
from tutti.data.sampling import given_sampling, of_loader
from tutti.data.source import AugmentKey
from tutti.errors import DataError, UsageError

COUNT, BATCH = 23, 5
DATA = TensorDataset(torch.arange(COUNT))


class Buckets(Sampler[list[int]]):
    """Batches of samples of a like length, of different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        for start in random.sample(range(0, COUNT, 4), 6):
            yield list(range(start, min(start + 4, COUNT)))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS = {
    "in order": lambda: DataLoader(DATA, BATCH),
    "drop last": lambda: DataLoader(DATA, BATCH, drop_last=True),
    "subset": lambda: DataLoader(DATA, BATCH, sampler=SequentialSampler(range(7))),
    "shuffled with a generator": lambda: DataLoader(DATA, BATCH, shuffle=True, generator=seeded()),
    "random subset": lambda: DataLoader(DATA, BATCH, sampler=SubsetRandomSampler(range(3, 11), seeded())),
    "weights": lambda: DataLoader(
        DATA, BATCH, sampler=WeightedRandomSampler(torch.arange(COUNT).float(), 12, generator=seeded())
    ),
    "replacement": lambda: DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, True, 31, seeded()), drop_last=True),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 4, drop_last=True)),
    "a list": lambda: DataLoader(DATA, BATCH, sampler=[3, 1, 2]),
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_loader(name: str) -> None:
    """Also where epochs are read out of order, as after a resume."""
    loader = LOADERS[name]()
    want = [[batch[0].tolist() for batch in loader] for _ in range(3)]
    found = of_loader(LOADERS[name]())
    order = found.order(0, COUNT)
    for epoch in (2, 0, 1):
        got = [numbers.tolist() for numbers in order.batches(epoch, found.batch_size or 0)]
        assert got == want[epoch]
    assert found.in_an_epoch(COUNT) == sum(map(len, want[0]))
    assert (order.digest(0) != order.digest(1)) == (want[0] != want[1])


def test_without_a_generator_the_order_is_that_of_the_seed() -> None:
    """And a function of (seed, epoch), whatever was drawn before."""
    for loader in (
        DataLoader(DATA, BATCH, shuffle=True),
        DataLoader(DATA, BATCH, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT)),
        DataLoader(DATA, batch_sampler=Buckets()),  # type: ignore[arg-type]
    ):
        drawn = []
        for seed in (0, 0, 1):
            torch.manual_seed(len(drawn)), random.seed(len(drawn))
            found = of_loader(loader).sized(seed)
            order = found.order(seed, COUNT)
            drawn.append([[n.tolist() for n in order.batches(epoch, found.batch_size or 0)] for epoch in (1, 0)])
        assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


def test_a_batch_sampler_keeps_its_batches_and_the_longest_is_the_global_batch() -> None:
    found = of_loader(DataLoader(DATA, batch_sampler=Buckets())).sized(0)  # type: ignore[arg-type]
    assert found.batch_size == 4 and found.in_an_epoch(COUNT) is None
    sizes = sorted(len(batch) for batch in found.order(0, COUNT).batches(0, 4))
    assert sizes == [3, 4, 4, 4, 4, 4]


def test_repeated_samples_are_augmented_apart() -> None:
    class Noisy(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(())

        def __len__(self) -> int:
            return 4

    loader = DataLoader(Noisy(), 6, sampler=[1, 1, 2, 1, 3, 2])
    order = of_loader(loader).order(0, 4)
    [numbers] = order.batches(0, 6)
    assert order.repeats(0, 0).tolist() == [0, 1, 0, 2, 0, 1]  # type: ignore[union-attr]
    source = ItemSource(Noisy())
    _, draws = source.fetch(numbers, AugmentKey(0, 0, order.repeats(0, 0)))
    assert len(set(draws.tolist())) == 6
    _, once = source.fetch(np.array([1, 2, 3]), AugmentKey(0, 0))
    assert once.tolist() == [draws[0], draws[2], draws[4]]


class Together(Dataset[Any]):
    def __init__(self, draws: bool) -> None:
        self.draws, self.calls = draws, list[str]()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.calls.append("one")
        return {"n": index, "draw": random.random() if self.draws else 0.0}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.calls.append("many")
        found = [self[index] for index in indices]
        del self.calls[-len(indices) :]
        return found


def test_items_are_read_together_unless_they_draw() -> None:
    plain, drawing = Together(False), Together(True)
    assert adapt(plain).fetch(np.array([4, 2]), None)["n"].tolist() == [4, 2] and plain.calls == ["many"]
    source = adapt(drawing)
    pair = source.fetch(np.array([4, 2]), AugmentKey(0, 0))["draw"].tolist()
    alone = [source.fetch(np.array([i]), AugmentKey(0, 0))["draw"].item() for i in (4, 2)]
    assert pair == alone and pair[0] != pair[1]


def test_draws_of_a_collate_function_depend_on_its_samples_alone() -> None:
    source = adapt(DATA, lambda items: torch.rand(len(items)))
    first = source.fetch(np.array([3, 4]), AugmentKey(0, 0))
    torch.manual_seed(9)
    assert torch.equal(source.fetch(np.array([3, 4]), AugmentKey(0, 0)), first)
    assert not torch.equal(source.fetch(np.array([4, 4]), AugmentKey(0, 0)), first)


class Numbered(Sampler[int]):
    """Shuffles by a number that the script sets, and counts epochs."""

    def __init__(self) -> None:
        self.number, self.counted, self.rng = 0, 0, np.random.default_rng(0)

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.counted += 1
        return iter(np.random.default_rng(self.number).permutation(COUNT).tolist())


class Epochs(Numbered):
    def set_epoch(self, epoch: int) -> None:
        self.number = epoch + 7


def weighted() -> DataLoader[Any]:
    return DataLoader(DATA, BATCH, sampler=WeightedRandomSampler(torch.ones(COUNT), COUNT, generator=torch.Generator()))


CHANGED: dict[str, tuple[Any, Any]] = {
    "number": (lambda: DataLoader(DATA, BATCH, sampler=Numbered()), lambda s: setattr(s, "number", 1)),
    "weights": (weighted, lambda s: setattr(s, "weights", torch.arange(1.0, COUNT + 1))),
    "one weight": (weighted, lambda s: s.weights.__setitem__(3, 9.0)),
    "seed": (weighted, lambda s: s.generator.manual_seed(1)),
    "indices": (
        lambda: DataLoader(DATA, BATCH, sampler=SubsetRandomSampler(list(range(20)))),
        lambda s: s.indices.__setitem__(0, 1),
    ),
    "seed of a loader": (
        lambda: DataLoader(DATA, BATCH, shuffle=True, generator=torch.Generator()),
        lambda s: s.generator.manual_seed(1),
    ),
}
UNCHANGED: dict[str, tuple[Any, Any]] = {
    "set_epoch": (lambda: DataLoader(DATA, BATCH, sampler=Epochs()), lambda s: s.set_epoch(1)),
    "looked at": (weighted, lambda s: next(iter(s))),
    "counted": (lambda: DataLoader(DATA, BATCH, sampler=Numbered()), lambda s: next(iter(s))),
    "drawn": (lambda: DataLoader(DATA, BATCH, sampler=Numbered()), lambda s: s.rng.random()),
    "buckets": (lambda: DataLoader(DATA, batch_sampler=Buckets()), lambda s: next(iter(s))),
}


@pytest.mark.parametrize("how", [*CHANGED, *UNCHANGED])
def test_a_sampler_that_the_script_changes_between_epochs_is_refused(how: str) -> None:
    """Not one that counts its epochs, or from which the script takes samples."""
    make, change = (CHANGED | UNCHANGED)[how]
    loader = make()
    found = of_loader(loader)
    order = found.order(0, COUNT)
    order.batches(0, BATCH)
    change(found.sampler)
    if how in UNCHANGED:
        order.batches(1, BATCH)
        return
    for _ in range(2):
        with pytest.raises(UsageError, match=r"has changed .* of the sampler .* set_epoch"):
            order.batches(1, BATCH)


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([1, 2])


REFUSED = [
    (lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 2, 0)), "divides the samples over ranks"),
    (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 0), 4, drop_last=False)),
        "divides the samples over ranks",
    ),
    (lambda: DataLoader(DATA, None), "batch_size=None makes no batches"),
    (lambda: Own(DATA, BATCH), "Own has an __iter__ of its own"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_cannot_be_kept_is_refused_with_a_way_out(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        of_loader(make())
    assert caught.value.remedy


@pytest.mark.parametrize(
    "beside", [{"batch_size": 6}, {"collate": list}, {"shuffle": True}, {"drop_last": True}, {"data_workers": 3}]
)
def test_an_argument_beside_the_loaders_own_is_refused(beside: dict[str, Any]) -> None:
    nothing = {"batch_size": None, "collate": None, "shuffle": None, "drop_last": False, "data_workers": None}
    with pytest.raises(UsageError, match=f"{next(iter(beside))} is given beside a DataLoader"):
        given_sampling(DataLoader(DATA, BATCH), **nothing | beside)
    assert given_sampling(DataLoader(DATA, BATCH), **nothing | {"batch_size": BATCH}).batch_size == BATCH
    assert given_sampling(DATA, **nothing | {"collate": default_collate}).collate is None


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ([1, COUNT], f"yields sample {COUNT} of {COUNT}"),
        (["a"], "something else than indices"),
        ([], "yields 0 samples"),
    ],
)
def test_samplers_that_yield_no_samples_are_named(sampler: list[Any], words: str) -> None:
    found = of_loader(DataLoader(DATA, BATCH, sampler=sampler))
    order = found.order(0, COUNT)
    for _ in range(2):
        with pytest.raises(DataError, match=words):
            order.batches(0, BATCH)


def test_drop_last_of_everything_is_refused() -> None:
    with pytest.raises(DataError, match="drop_last leaves none of 23 samples"):
        of_loader(DataLoader(DATA, 24, drop_last=True)).in_an_epoch(COUNT)


def test_a_sampler_without_an_end_is_refused_before_it_is_iterated() -> None:
    """minGPT's way to train by steps: an epoch that no run reaches the end of."""
    endless = RandomSampler(DATA, replacement=True, num_samples=10**10)
    with pytest.raises(UsageError, match="RandomSampler draws 10,000,000,000 samples an epoch") as caught:
        of_loader(DataLoader(DATA, BATCH, sampler=endless)).in_an_epoch(COUNT)
    assert "num_samples" in str(caught.value.remedy)
