"""The contract of every epoch: steps and samples of a run whose batch grows, counted one by one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tutti.config.growth import BatchGrowth
from tutti.config.spec import Duration
from tutti.data.adapt import TensorSource
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed
from tutti.data.order import permutation
from tutti.data.reader import MapReader
from tutti.errors import UsageError

DATASET, SPENT = 101, 7
GROWN = BatchGrowth.parse("milestones=2ep+3ep+5ep,factor=2.5,largest=30")
BATCHES = [8, 8, 20, 30, 30, 30, 30]


def epochs(ranks: int = 1, growth: BatchGrowth | None = GROWN) -> Epochs:
    return Epochs(BatchContract(DATASET, 8, 4, ranks), growth)


def sizes(found: Epochs) -> list[list[int]]:
    """Samples of every step of every epoch."""
    return [[c.samples(step) for step in range(c.steps_per_epoch)] for c in map(found.contract_of, range(SPENT))]


def test_every_epoch_has_its_batch_and_its_rate() -> None:
    found = epochs()
    assert [found.contract_of(epoch).batch for epoch in range(SPENT)] == BATCHES
    rates = [found.phase(epoch).rate for epoch in range(SPENT)]
    assert rates == pytest.approx([1, 1, 1, 30 / 50, 30 / 50, 30 / 125, 30 / 125])
    assert all(sum(epoch) == DATASET for epoch in sizes(found))
    assert epochs(growth=None).phase(99).rate == 1 and epochs(growth=None).contract_of(99) == BatchContract(
        DATASET, 8, 4
    )


@pytest.mark.parametrize("growth", [None, GROWN])
def test_steps_and_samples_are_those_of_the_epochs_one_by_one(growth: BatchGrowth | None) -> None:
    found = epochs(growth=growth)
    taken = [samples for epoch in sizes(found) for samples in epoch]
    for steps in range(len(taken) + 1):
        assert found.consumed(steps) == sum(taken[:steps])
    places = [(epoch, batch) for epoch, batches in enumerate(sizes(found)) for batch in range(len(batches))]
    assert [found.position_after(steps) for steps in range(len(taken))] == places
    for whole in range(SPENT + 1):
        assert found.steps(Duration(whole, "ep")) == sum(map(len, sizes(found)[:whole]))
    for samples in range(sum(taken) + 1):
        steps = found.steps(Duration(samples, "sa"))
        assert sum(taken[:steps]) >= samples and (steps == 0 or sum(taken[: steps - 1]) < samples)
    assert found.steps(Duration(5, "st")) == 5


def test_a_part_of_an_epoch_is_a_part_of_its_own_steps() -> None:
    found = epochs()
    before = found.steps(Duration(3, "ep"))
    assert found.contract_of(3).steps_per_epoch == 4
    assert [found.steps(Duration(3 + part, "ep")) - before for part in (0, 0.25, 0.5, 0.75, 1)] == [0, 1, 2, 3, 4]


def test_one_batch_counts_as_a_duration_does() -> None:
    for dataset, value, unit in product((3, 20, 101), (0, 0.5, 1, 1.5, 2.5, 7, 1e15), ("ep", "sa", "st")):
        contract = BatchContract(dataset, 8, 4)
        duration = Duration(value if unit == "ep" else int(value), unit)
        assert Epochs(contract).steps(duration) == duration.steps(dataset, 8)
    unknown = Epochs(BatchContract(None, 8, 4))
    assert unknown.steps(Duration(30, "sa")) == 4 and unknown.steps(Duration(3, "st")) == 3
    with pytest.raises(UsageError, match="of a stream of unknown length"):
        unknown.steps(Duration(2, "ep"))


def test_every_sample_once_an_epoch_in_the_same_batches_on_any_ranks_from_any_batch_on() -> None:
    for ranks in (1, 2, 3, 4):
        found = epochs(ranks)
        feeds = [
            Feed(MapReader(TensorSource(torch.arange(DATASET)), found, rank, 3), found, rank, 3, lambda batch: batch)
            for rank in range(ranks)
        ]
        for epoch, batch in enumerate(BATCHES):
            order = permutation(3, epoch, DATASET).tolist()
            for start in (0, 2):
                parts = list(zip(*(feed.read(epoch, start) for feed in feeds), strict=True))
                got = [torch.cat([part.batch for part in step]).tolist() for step in parts]
                assert got == [order[i : i + batch] for i in range(start * batch, DATASET, batch)]
                assert [step[0].after for step in parts][-1] == (epoch + 1, 0)


def test_the_description_says_each_phase() -> None:
    lines = epochs().describe()
    assert lines["global batch"] == "8 samples" and lines["epoch"] == "101 samples = 13 steps"
    assert [lines[f"from epoch {number}"] for number in (3, 4, 6)] == [
        "20 samples a step, 5 samples × 1 accumulated, 6 steps",
        "30 samples a step, 8 samples × 1 accumulated, 4 steps, learning rate × 0.6",
        "30 samples a step, 8 samples × 1 accumulated, 4 steps, learning rate × 0.24",
    ]
    assert epochs(growth=None).describe() == BatchContract(DATASET, 8, 4).describe()


def test_what_cannot_grow_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="cannot grow with a stream whose length is not known"):
        Epochs(BatchContract(None, 8, 4), GROWN)
    with pytest.raises(UsageError, match="a batch of 8 cannot grow: the largest is 7, a tenth of the 70 samples"):
        Epochs(BatchContract(70, 8, 4), BatchGrowth(milestones=("1ep",), factor=2))
