"""Streams: what is read, what is refused, and where reading goes on; on ranks that are stood for by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tutti.data import Sharded
from tutti.data.adapt import ItemSource, TensorSource, adapt, adapt_training
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.loader import Prefetch
from tutti.data.reader import BatchReader, Position, RankBatch
from tutti.data.reading import make_reader
from tutti.data.stream import Stream
from tutti.errors import CheckpointError, DataError, UsageError


class Alone:
    """The communicators of a world of one; writes down what is compared."""

    rank = 0

    def __init__(self) -> None:
        self.lines: list[list[str]] = []
        self.world = self.replica = self.model = self

    def agree(self, lines: Sequence[str], name: str, remedy: str) -> None:
        self.lines.append(list(lines))

    def all_gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        return [tensor]


class Numbers(IterableDataset[Any]):
    """0, 1, 2, … with a draw of each generator, shifted by 100 an epoch."""

    def __init__(self, count: int = 20) -> None:
        self.count, self.epoch, self.given = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.count):
            self.given += 1
            yield 100 * self.epoch + number, torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


class Sized(Numbers):
    """Says how many it has."""

    said = 20

    def __len__(self) -> int:
        return self.said


class Stateful(Numbers):
    """Goes on where its state says."""

    start = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.start, self.count):
            self.start = number
            self.given += 1
            yield self.start, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.start + 1, "more": [None, {"x": 0.5}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["next"]


def reader(
    data: Any, batch: int = 8, *, comms: Any = None, ranks: int = 1, rank: int = 0, seed: int = 3
) -> BatchReader:
    source = adapt_training(data)
    assert isinstance(source, Stream)
    epochs = Epochs(BatchContract(source.samples, batch, 4, ranks))
    return make_reader(source, epochs, rank, seed, comms or Alone(), Prefetch())


def numbers(parts: Iterator[RankBatch]) -> list[list[int]]:
    return [part.batch[0].tolist() for part in parts]


def everything(parts: Iterator[RankBatch]) -> list[Any]:
    return [(*(field.tolist() for field in part.batch), part.samples, part.after) for part in parts]


@pytest.mark.parametrize("data", [Numbers, Sized, lambda: Numbers])
def test_epochs_go_to_the_end_and_say_where_they_are(data: Callable[[], Any]) -> None:
    own = reader(data())
    for epoch in (0, 1):
        parts = list(own.read(epoch, 0))
        assert numbers(iter(parts)) == [[100 * epoch + i for i in range(20)[low : low + 8]] for low in (0, 8, 16)]
        assert [part.samples for part in parts] == [8, 8, 4]
        assert [part.after for part in parts] == [(epoch, 1), (epoch, 2), (epoch + 1, 0)]


@pytest.mark.parametrize("count", [8, 16])
def test_a_stream_that_ends_with_a_whole_batch(count: int) -> None:
    assert [part.after for part in reader(Numbers(count)).read(0, 0)][-1] == Position(1, 0)
    assert len(list(reader(Numbers(count)).read(0, 0))) == count // 8


def test_ranks_keep_their_own_samples_and_those_without_any_have_a_stand_in() -> None:
    for ranks in (2, 3, 4):
        own = [list(reader(Numbers(17), ranks=ranks, rank=rank).read(0, 0)) for rank in range(ranks)]
        for step, parts in enumerate(zip(*own, strict=True)):
            assert [n for part in parts for n in part.batch[0].tolist()] == list(range(17)[8 * step : 8 * step + 8])
            assert [part.dummy is None for part in parts] == [len(part.batch[0]) > 0 for part in parts]
            assert {part.batch[1].shape[1:] for part in parts} == {(3,)}, "also where there is no sample"
        assert own[-1][-1].dummy[0].tolist() == [16]


def test_draws_belong_to_seed_epoch_and_sample() -> None:
    def draws(**options: Any) -> list[float]:
        return [x for part in reader(Numbers(), **options).read(1, 0) for x in part.batch[1].flatten().tolist()]

    want = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate()
    assert draws() == draws(batch=5) == want and len(set(want)) == 60
    assert draws(seed=4) != want and random.getstate() == before


def test_it_goes_on_where_it_was() -> None:
    want = everything(reader(Numbers()).read(1, 0))
    for start in (1, 2):
        own = reader(Numbers())
        own.load(Position(1, start), None)
        assert everything(own.read(1, start)) == want[start:]


@pytest.mark.parametrize("own", [False, True])
def test_a_first_batch_is_read_again_with_the_same_draws(own: bool) -> None:
    kept = Numbers()
    wanted = everything(reader(Sharded(Numbers()) if own else Numbers()).read(0, 0))
    source = adapt_training(Sharded(kept) if own else kept)
    assert isinstance(source, Stream)
    for count in (2, 3):
        batch = source.first_batch(count, source.key(3, 0))
        assert [field.tolist() for field in batch] == [field[:count] for field in wanted[0][:2]]
    reading = make_reader(source, Epochs(BatchContract(source.samples, 8, 4, 1)), 0, 3, Alone(), Prefetch())
    assert everything(reading.read(0, 0)) == wanted
    assert kept.given == 20, "each sample is read once"
    assert everything(reading.read(0, 0)) == wanted and kept.given == 40, "and from the start for another epoch"


def test_a_first_batch_has_the_draws_of_its_own_key() -> None:
    def drawn(source: Stream, key: int) -> list[float]:
        return [field.tolist() for field in source.first_batch(2, key)]

    source = Stream(Numbers())
    wanted = [drawn(Stream(Numbers()), key) for key in (3, 4)]
    assert wanted[0] != wanted[1]
    assert [drawn(source, key) for key in (3, 4)] == wanted


def test_an_empty_stream_has_no_first_batch() -> None:
    with pytest.raises(DataError, match="the stream is empty"):
        Stream(Numbers(0)).first_batch(2, 3)


def test_a_state_of_its_own_spares_reading_again() -> None:
    first, again = Stateful(), Stateful()
    own, other = reader(first), reader(again)
    parts = own.read(0, 0)
    place = [next(parts) for _ in range(2)][-1].after
    state = {"next": 16, "more": [None, {"x": 0.5}]}
    assert own.state() == {"own state": state}, "before the sample that is read ahead"
    other.load(place, own.state())
    assert numbers(other.read(*place)) == [[16, 17, 18, 19]] and again.given == 4
    assert numbers(other.read(*place)) == [[16, 17, 18, 19]]


@pytest.mark.parametrize(
    "state", [{"x": torch.zeros(1)}, {1: 2}, {"x": (1, 2)}, {"x": float("nan")}, {"x": np.int64(3)}]
)
def test_a_state_that_json_would_change_is_not_kept(state: Any) -> None:
    class Other(Numbers):
        def state_dict(self) -> Any:
            return state

    own = reader(Other())
    next(own.read(0, 0))
    assert own.state() is None


def test_samples_are_compared_ever_more_rarely_and_the_length_at_the_end() -> None:
    comms = Alone()
    assert len(list(reader(Numbers(), 4, comms=comms).read(0, 0))) == 5
    heads = [lines[0].partition(", ")[0] for lines in comms.lines]
    assert heads == [f"sample {first} of epoch 0" for first in (0, 4, 8, 16)] + ["epoch 0 with 20 samples"]
    assert len({line for lines in comms.lines for line in lines}) == 17


class Lying(Sized):
    """Has other samples than it says."""

    def __init__(self, count: int, said: int) -> None:
        super().__init__(count)
        self.said = said


@pytest.mark.parametrize(
    ("count", "said", "words", "batches"),
    [
        (20, 24, "says that it has 24 samples, and has 20", 2),
        (24, 20, "says that it has 20 samples, and has 24", 2),
        (16, 17, "says that it has 17 samples, and has 16", 1),
        (17, 16, "says that it has 16 samples, and goes on after 16", 1),
        (8, 16, "says that it has 16 samples, and has 8", 0),
    ],
)
def test_a_length_that_lies_is_refused_with_both_numbers(count: int, said: int, words: str, batches: int) -> None:
    parts = reader(Lying(count, said)).read(0, 0)
    for _ in range(batches):
        next(parts)
    with pytest.raises(DataError, match=words):
        next(parts)


class Once(Numbers):
    """Its file can be read only once."""

    def __init__(self) -> None:
        super().__init__(3)
        self.items = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        return self.items


class Bad(Numbers):
    """Its third sample cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield from list(super().__iter__())[:2]
        raise ValueError("half a picture")


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match=r"cannot read sample 2 of epoch 0 \(Bad, .*stream.py:\d+\): ValueError"):
        list(reader(Bad()).read(0, 0))
    own = reader(Once())
    assert numbers(own.read(0, 0)) == [[0, 1, 2]]
    with pytest.raises(DataError, match=r"the stream is empty in epoch 1 \(Once\).*more than once"):
        list(own.read(1, 0))
    with pytest.raises(DataError, match="ended after 20 samples, and the run was at sample 24"):
        list(reader(Numbers()).read(0, 3))


def test_an_own_stream_goes_on_with_as_many_ranks_only() -> None:
    own, other = (reader(Sharded(Numbers()), ranks=ranks) for ranks in (2, 3))
    own.load(Position(0, 1), own.state())
    with pytest.raises(CheckpointError, match="had 2 data ranks and now has 3"):
        other.load(Position(0, 1), own.state())
    for foreign in (None, {"next": 8}):
        with pytest.raises(CheckpointError, match="read its data in another way"):
            own.load(Position(0, 1), foreign)


@pytest.mark.parametrize("foreign", [{"streams": 2}, {"epoch": 0, "order": "1f"}, {"next": 8}, [8]])
def test_a_stream_that_is_the_same_on_all_ranks_takes_no_state_of_other_data(foreign: Any) -> None:
    with pytest.raises(CheckpointError, match="read its data in another way"):
        reader(Stateful()).load(Position(0, 1), foreign)


def test_which_data_are_a_stream() -> None:
    for data, samples in [(Numbers(), None), (Sized(), 20), ({1, 2, 3}, 3), (lambda: iter([1]), None)]:
        source = adapt_training(data)
        assert isinstance(source, Stream) and source.samples == samples and not source.sharded
    sharded = adapt_training(Sharded(Sized()))
    assert isinstance(sharded, Stream) and sharded.sharded and sharded.samples is None
    assert isinstance(adapt_training([1, 2]), ItemSource) and isinstance(adapt_training(torch.ones(3)), TensorSource)


REFUSED = [
    (iter([1, 2]), UsageError, "can be read only once. Give an iterable, or a function that returns one"),
    (DataLoader([1, 2]), UsageError, "a DataLoader makes its own batches"),
    (7, UsageError, "cannot read samples from an int. Give an iterable, or tensors"),
    (Sharded(7), UsageError, "cannot read samples from an int. Give an iterable"),
    (Lying(3, 0), DataError, "(Lying) is empty"),
]


@pytest.mark.parametrize(("data", "kind", "words"), REFUSED)
def test_what_is_no_stream_is_refused(data: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        adapt_training(data)
    assert words in str(caught.value)


def test_held_out_samples_need_numbers() -> None:
    with pytest.raises(UsageError, match="__len__ and __getitem__"):
        adapt(Sized())


def test_loader_processes_of_a_stream_that_shards_itself_are_refused() -> None:
    with pytest.raises(UsageError, match="2 loader processes cannot be combined with a data set that shards itself"):
        make_reader(Stream(Numbers(), sharded=True), Epochs(BatchContract(None, 8, 4)), 0, 0, Alone(), Prefetch(2))


class Divided(Numbers):
    """Divides its samples over loader processes; each has the epoch as an attribute of its own."""

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        assert process is not None
        for number in range(process.id, self.count, process.num_workers):
            yield 100 * int(self.epoch) + number, torch.zeros(1)


class EpochInSharedMemory(Divided):
    """As Hugging Face's data sets: processes share the epoch, and two updates at once add twice."""

    def __init__(self) -> None:
        super().__init__(8)
        self.epoch: Any = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        more = epoch - int(self.epoch)
        time.sleep(0.1)
        self.epoch += more


@pytest.mark.parametrize("kind", [lambda: Divided(8), EpochInSharedMemory])
@pytest.mark.parametrize("function", [False, True])
def test_loader_processes_read_the_epoch_that_the_rank_reads(kind: Callable[[], Any], function: bool) -> None:
    data = kind()
    source = Stream((lambda: data) if function else data, processes=2)
    read = make_reader(source, Epochs(BatchContract(None, 2, 1)), 0, 3, Alone(), Prefetch(2)).read
    for epoch in (0, 1, 3):
        want = [[0, 2], [1, 3], [4, 6], [5, 7]]
        assert numbers(read(epoch, 0)) == [[100 * epoch + number for number in batch] for batch in want]


def test_loader_processes_read_hugging_face_streams_in_the_order_of_the_epoch() -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets")
    shards = list(range(4))

    def samples(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for number in range(3):
                yield {"number": 10 * shard + number}

    def stream() -> Any:
        made = datasets.IterableDataset.from_generator(samples, gen_kwargs={"shards": shards})
        return made.shuffle(seed=7, buffer_size=2)

    data, orders = stream(), []
    read = make_reader(Stream(data, processes=2), Epochs(BatchContract(None, 2, 1)), 0, 3, Alone(), Prefetch(2)).read
    for epoch in range(3):
        plain = stream()
        plain.set_epoch(epoch)
        want = [batch["number"].tolist() for batch in DataLoader(plain, 2, num_workers=2)]
        assert [part.batch["number"].tolist() for part in read(epoch, 0)] == want
        orders.append(str(want))
    assert len(set(orders)) == 3
