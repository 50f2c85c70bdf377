"""The batch contract: who gets which samples, for any workers and ranks; what cannot be is refused."""

from __future__ import annotations

from itertools import product

import pytest

from tutti.data.contract import BatchContract
from tutti.errors import DataError, UsageError


def test_every_sample_of_every_batch_has_one_worker_and_one_rank() -> None:
    for dataset, batch, workers, ranks in product((1, 7, 20, 23), (4, 7, 30), (1, 3, 4), (1, 2, 3, 4)):
        if ranks > workers:
            continue
        contract = BatchContract(dataset, batch, workers, ranks)
        assert [w for r in range(ranks) for w in contract.mine(r)] == list(range(workers))
        counts = [contract.samples(step) for step in range(contract.steps_per_epoch)]
        assert sum(counts) == dataset and min(counts) > 0 and set(counts[:-1]) <= {batch}
        for count in counts:
            spans = [contract.worker(count, w) for w in range(workers)]
            assert [i for span in spans for i in span] == list(range(count))
            assert max(map(len, spans)) - min(map(len, spans)) <= 1


def test_ranks_share_the_micro_batches_of_a_worker() -> None:
    for samples, workers, ranks, micro in product((1, 5, 19, 24), (1, 2, 3), (2, 3, 4, 7), (1, 2)):
        if ranks <= workers:
            continue
        contract, alone = BatchContract(None, 24, workers, ranks, micro), BatchContract(None, 24, workers, 1, micro)
        parts = [contract.part(samples, rank) for rank in range(ranks)]
        assert [i for part in parts for i in part] == list(range(samples))
        found: dict[int, list[range]] = {worker: [] for worker in range(workers)}
        most = 0
        for rank, part in enumerate(parts):
            [(worker, pieces)] = contract.spans(samples, rank, len(part))
            assert contract.first_micro(samples, rank) == len(found[worker])
            found[worker] += [range(part.start + p.start, part.start + p.stop) for p in pieces]
            most = max(most, len(pieces))
        assert most == contract.most_micro_batches(samples)
        assert list(found.items()) == alone.spans(samples, 0, samples)


def test_workers_do_not_see_how_many_ranks_there_are() -> None:
    one = BatchContract(100, 25, 5)
    for ranks in (2, 3, 4, 5):
        other = BatchContract(100, 25, 5, ranks)
        assert [other.worker(20, w) for w in range(5)] == [one.worker(20, w) for w in range(5)]


def test_micro_batches() -> None:
    contract = BatchContract(100, 50, 1, micro=8)
    assert [len(c) for c in contract.micro_batches(50)] == [8, 7, 7, 7, 7, 7, 7]
    assert contract.micro_batches(0) == [] and contract.micro_batches(8) == [range(8)]
    assert BatchContract(100, 50, 1).micro_batches(50) == [range(50)]


def test_consumed_counts_the_smaller_last_batch() -> None:
    contract = BatchContract(70, 25, 3)
    consumed = 0
    for steps in range(1, 20):
        consumed += contract.samples((steps - 1) % contract.steps_per_epoch)
        assert contract.consumed(steps) == consumed
    assert contract.consumed(0) == 0


def test_description_holds_every_derived_number() -> None:
    assert BatchContract(1000, 128, 3, 2, 20).describe() == {
        "global batch": "128 samples",
        "workers": "3, each 42 or 43 samples a step",
        "micro-batch": "15 samples × 3 accumulated",
        "data ranks": "2, each plays 1 or 2 workers",
        "epoch": "1,000 samples = 8 steps",
        "imbalance": "ranks with 1 wait for those with 2: 75% busy",
        "last batch": "104 samples, weighted exactly",
    }
    even = BatchContract(1024, 128, 4, 2).describe()
    assert "imbalance" not in even and "last batch" not in even
    assert even["workers"] == "4, each 32 samples a step"


def test_a_rank_s_part_is_that_of_its_workers() -> None:
    for samples, workers, ranks in product((0, 1, 7, 20), (4, 5), (1, 2, 3, 4)):
        contract = BatchContract(None, 20, workers, ranks)
        parts = [contract.part(samples, rank) for rank in range(ranks)]
        assert [i for part in parts for i in part] == list(range(samples))
        assert min(map(len, parts)) == len(parts[-1])


def test_what_a_stream_leaves_open() -> None:
    contract = BatchContract(None, 20, 4, 3)
    lines = contract.describe()
    assert (lines["epoch"], lines["last batch"]) == ("until the stream ends", "what is left, weighted exactly")
    for ask in (lambda: contract.steps_per_epoch, lambda: contract.samples(0), lambda: contract.consumed(3)):
        with pytest.raises(UsageError, match="stream whose length is not known"):
            ask()


@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [
        ((0, 4, 1), DataError, "training set is empty"),
        ((10, 3, 4), UsageError, "--batch-size 4"),
        ((10, 8, 2, 3), UsageError, "take --micro-batch 2 or less, --workers 3 or more"),
        ((10, 2, 1, 3), UsageError, "take --workers 3 or more, or fewer devices"),
    ],
)
def test_impossible_contracts_are_refused(numbers: tuple[int, ...], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        BatchContract(*numbers)
    assert words in str(caught.value).lower()
