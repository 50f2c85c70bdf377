"""From the global order to cells: which samples, with which weight and key; and held-out samples, each once."""

from __future__ import annotations

from collections import namedtuple
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from tutti.comm.random_keys import mix
from tutti.data.adapt import TensorSource
from tutti.data.batches import CollatedBatch, length, map_tensors, placer, script_batch, slice_batch
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed, HeldOut, evaluation, evaluation_blocks
from tutti.data.order import permutation
from tutti.data.reader import MapReader
from tutti.errors import DataError, UsageError

CPU = torch.device("cpu")


def feed(contract: BatchContract, rank: int, seed: int = 3) -> Feed:
    source = TensorSource(torch.arange(contract.known))
    epochs = Epochs(contract)
    return Feed(MapReader(source, epochs, rank, seed), epochs, rank, seed, lambda batch: batch)


def test_ranks_together_read_the_global_order() -> None:
    for dataset, batch, workers, ranks in product((23, 40), (8, 9), (4, 5), (1, 2, 3, 4)):
        contract = BatchContract(dataset, batch, workers, ranks)
        feeds = [feed(contract, rank) for rank in range(ranks)]
        for epoch in (0, 1):
            parts = zip(*(f.read(epoch) for f in feeds), strict=True)
            got = [torch.cat([part.batch for part in step]).tolist() for step in parts]
            order = permutation(3, epoch, dataset).tolist()
            assert got == [order[i : i + batch] for i in range(0, dataset, batch)]


def test_cells_are_the_same_for_any_ranks() -> None:
    """Worker, micro-batch, samples, weight and key of every micro-batch of every step; the last batch leaves workers
    out."""
    found = []
    for ranks in (1, 2, 3, 4):
        contract = BatchContract(18, 16, 4, ranks, micro=3)
        micro_batches = {}
        for rank in range(ranks):
            own = feed(contract, rank)
            for step, part in enumerate(own.read(0)):
                for worker, work in own.micro_batches(part.batch, step, part.samples, "step"):
                    assert [c.last for c in work] == [False] * (len(work) - 1) + [True] * bool(work)
                    for c in work:
                        assert c.worker == worker and c.samples == len(c.batch)
                        micro_batches[step, worker, c.micro] = (c.batch.tolist(), c.weight, c.key)
        found.append(micro_batches)
    assert found[1:] == found[:1] * 3
    assert sorted(i for samples, _, _ in found[0].values() for i in samples) == list(range(18))
    assert {w for (step, *_), (_, w, _) in found[0].items() if step == 0} == {1 / 16}
    assert [key[1:] for key in found[0] if key[0] == 1] == [(0, 0), (1, 0)]
    assert all(key == mix(3, *place) for place, (_, _, key) in found[0].items())


def test_a_gradient_over_the_worker_is_the_mean_over_its_share() -> None:
    contract = BatchContract(10, 10, 4, micro=2)
    own = feed(contract, 0)
    work = own.micro_batches(next(own.read(0)).batch, 0, 10, "worker")
    assert [[(c.samples, c.weight) for c in micro_batches] for _, micro_batches in work] == [
        [(2, 1 / 3), (1, 1 / 3)],
        [(2, 1 / 3), (1, 1 / 3)],
        [(2, 1.0)],
        [(2, 1.0)],
    ], "a share in one piece keeps its mean as the loss function made it"


def test_a_batch_of_the_callers_own_making_is_shared_out() -> None:
    own = feed(BatchContract(100, 16, 4, 2), 1)
    work = own.micro_batches(torch.arange(5), 0, 10, "step")
    assert [(w, [c.batch.tolist() for c in micro_batches]) for w, micro_batches in work] == [
        (2, [[0, 1, 2]]),
        (3, [[3, 4]]),
    ]


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 16, 17, 33, 100, 513, 1000])
def test_evaluation_takes_every_sample_once_in_blocks_that_do_not_depend_on_ranks(samples: int) -> None:
    source = TensorSource(torch.arange(samples))
    for largest in (7, 512):
        held_out = HeldOut(source, [np.asarray(block) for block in evaluation_blocks(samples, largest)])
        want = None
        for ranks in (1, 2, 3, 4, 7):
            blocks: dict[int, Any] = {}
            for rank in range(ranks):
                for number, micro_batch in evaluation(held_out, ranks, rank, lambda batch: batch):
                    assert number not in blocks and micro_batch.samples == len(micro_batch.batch) <= largest
                    blocks[number] = micro_batch.batch.tolist()
            assert [i for number in sorted(blocks) for i in blocks[number]] == list(range(samples))
            assert len(blocks) == len(evaluation_blocks(samples, largest))
            assert want in (None, blocks)
            want = blocks


Pair = namedtuple("Pair", ["a", "b"])
BATCHES = [
    torch.arange(6.0).view(3, 2),
    (torch.zeros(3, 1), torch.ones(3)),
    [torch.zeros(3)],
    {"x": torch.zeros(3), "more": {"y": torch.ones(3, 2)}},
    Pair(torch.zeros(3), (torch.ones(3),)),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: type(b).__name__)
def test_batches_of_every_structure(batch: Any) -> None:
    assert length(batch) == 3
    shorter = slice_batch(batch, 1, 3)
    assert type(shorter) is type(batch) and length(shorter) == 2
    places = []
    map_tensors(batch, lambda t: places.append(t.data_ptr()))
    map_tensors(shorter, lambda t: places.append(t.data_ptr() - t.element_size() * t[0].numel()))
    assert places[: len(places) // 2] == places[len(places) // 2 :], "cuts are views"


@pytest.mark.parametrize("batch", [torch.tensor(1.0), (), {}, "text", ([],)])
def test_a_batch_without_samples_is_refused(batch: Any) -> None:
    with pytest.raises(DataError):
        length(batch)


def test_a_batch_of_something_else_is_refused() -> None:
    """Objects pass where a batch stays whole, and stop what has to divide its samples."""
    batch = (torch.zeros(2), "name", {1})
    assert map_tensors(batch, lambda t: t + 1)[1:] == ("name", {1})
    with pytest.raises(UsageError, match="holds a str"):
        slice_batch(batch, 0, 1)


def test_columns_of_strings_are_divided_with_the_samples() -> None:
    batch = {"x": torch.arange(3), "name": ["a", "b", "c"], "note": (None, "n", None)}
    assert slice_batch(batch, 1, 3)["name"] == ["b", "c"] and slice_batch(batch, 1, 2)["note"] == ("n",)
    assert length({"name": ["a", "b"]}) == 2


def test_a_collated_batch_is_taken_apart_at_its_micro_batches_only() -> None:
    batch = CollatedBatch(("first", "second"), (2, 3))
    assert length(batch) == 5 and slice_batch(batch, 2, 5) == "second" and length(slice_batch(batch, 0, 0)) == 0
    assert script_batch(CollatedBatch(("only",), (4,))) == "only" and script_batch(batch) is batch
    with pytest.raises(UsageError, match="cannot be sliced"):
        slice_batch(batch, 1, 2)
    with pytest.raises(UsageError, match="2 batches of collate_fn"):
        next(iter(batch))


def test_objects_move_by_their_own_method() -> None:
    packed = pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    moved = placer(CPU, torch.float64, channels_last=False)({"x": packed, "n": None})
    assert moved["x"].data.dtype == torch.float64 and moved["n"] is None


def test_placing_converts_floats_and_image_layout_alone() -> None:
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.arange(2), "row": np.ones((2, 3))}
    batch["row"] = torch.from_numpy(batch["row"])
    placed = placer(CPU, torch.float32, channels_last=True)(batch)
    assert placed["row"].dtype == torch.float32 and placed["label"].dtype == torch.int64
    assert placed["image"].is_contiguous(memory_format=torch.channels_last)
    assert placer(CPU, torch.float32, channels_last=False)(batch)["image"] is batch["image"]


def test_identical_batches_give_every_worker_worker_0s_share() -> None:
    """On any number of ranks, also where the last batch leaves nothing for the last workers."""
    plain = {}
    for step, part in enumerate((own := feed(BatchContract(18, 8, 4), 0)).read(0)):
        plain[step] = own.micro_batches(part.batch, step, part.samples, "step")[0][1]
    for ranks in (1, 2, 3, 4):
        contract = BatchContract(18, 8, 4, ranks, identical=True)
        for rank in range(ranks):
            own = feed(contract, rank)
            for step, part in enumerate(own.read(0)):
                work = own.micro_batches(part.batch, step, part.samples, "step")
                assert [worker for worker, _ in work] == list(contract.mine(rank))
                for _, micro_batches in work:
                    assert [c.batch.tolist() for c in micro_batches] == [c.batch.tolist() for c in plain[step]]
    assert "the same 2 samples" in BatchContract(18, 8, 4, identical=True).describe()["identical batches"]
