"""Batches that are copied ahead of their steps: in order, each waited for, none forgotten.

Streams are stood in for, and real ones copy on the simulated accelerator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tutti.data.adapt import TensorSource
from tutti.data.batches import placer
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.feed import Feed
from tutti.data.reader import MapReader, Position, RankBatch
from tutti.data.transfer import Transfer, one_ahead


class Streams:
    """Stands for the streams of an accelerator: notes what is asked of them, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[Any] = []
        self.within: list[Any] = []
        self.events = 0
        monkeypatch.setattr(torch, "Stream", lambda device: self)
        monkeypatch.setattr("tutti.data.transfer.current_stream", lambda device: self)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.notes.append(("keep", int(tensor[0]))))

    def __enter__(self) -> None:
        self.within.append(self)

    def __exit__(self, *_: object) -> None:
        self.within.pop()

    def record_event(self) -> int:
        self.events += 1
        return self.events - 1

    def wait_event(self, event: int) -> None:
        assert not self.within
        self.notes.append(("wait", event))

    def place(self, batch: Tensor) -> Tensor:
        assert self.within == [self]
        self.notes.append(("copy", int(batch[0])))
        return batch + 0

    def placed(self, part: RankBatch) -> RankBatch:
        return replace(part, batch=self.place(part.batch), dummy=part.dummy)


def test_each_batch_is_copied_before_the_one_in_front_of_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    parts = [
        RankBatch(torch.full((2,), i), 2, Position(0, i + 1), torch.full((1,), 9) if i == 2 else None) for i in range(3)
    ]
    for part in Transfer(torch.device("cuda")).parts(iter(parts), streams.placed):
        streams.notes.append(("given", int(part.batch[0]), part.after.batch))
    assert streams.notes == [
        *[("copy", 0), ("copy", 1), ("wait", 0), ("keep", 0), ("given", 0, 1)],
        *[("copy", 2), ("wait", 1), ("keep", 1), ("given", 1, 2)],
        *[("wait", 2), ("keep", 2), ("keep", 9), ("given", 2, 3)],
    ]


def test_a_feed_gives_the_same_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    source, epochs = TensorSource(torch.arange(23)), Epochs(BatchContract(23, 6, 3, 2))
    reader = MapReader(source, epochs, 1, 3)
    plain = Feed(reader, epochs, 1, 3, lambda batch: batch)
    ahead = Feed(reader, epochs, 1, 3, streams.place, transfer=Transfer(torch.device("cuda")))
    for start in (0, 2):
        for want, got in zip(plain.read(1, start), ahead.read(1, start), strict=True):
            assert torch.equal(got.batch, want.batch) and (got.samples, got.after) == (want.samples, want.after)


def failing() -> Iterator[int]:
    yield 1
    yield 2
    raise ValueError("the third")


def test_an_error_comes_in_its_turn() -> None:
    items, got = one_ahead(failing()), []
    with pytest.raises(ValueError, match="the third"):
        for item in items:
            got.append(item)
    assert got == [1, 2]
    assert list(one_ahead(iter([]))) == []


def test_nothing_is_asked_for_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    items = one_ahead(asked.append(i) or i for i in range(3))  # type: ignore[func-returns-value]
    assert asked == []
    assert next(items) == 0 and asked == [0, 1]


def test_to_a_gpu_goes_what_is_pinned_in_the_right_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.dtype] = []
    to = Tensor.to

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.dtype)
        return tensor

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *given, **options: to(tensor, given[-1]))
    batch = (torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64))
    placed = placer(torch.device("cuda"), torch.bfloat16, False)(batch)
    assert pinned == [torch.bfloat16, torch.int64] == [tensor.dtype for tensor in placed]
    pinned.clear()
    placer(torch.device("cpu"), torch.bfloat16, False)(batch)
    assert pinned == []


def on_the_device(waits: bool) -> list[list[float]]:
    """Batches that a feed copies ahead from pinned memory; without ``waits``, nothing waits for the copies."""
    device = torch.device(DEVICE, tutti.rank())
    source, epochs = TensorSource(torch.arange(23.0)), Epochs(BatchContract(23, 6, 3, 2))
    transfer = Transfer(device)
    if not waits:
        transfer._arrived = lambda moving: moving.part  # type: ignore[method-assign]
    place = placer(device, torch.float32, False)
    feed = Feed(MapReader(source, epochs, 1, 3), epochs, 1, 3, place, transfer=transfer)
    batches = [part.batch for part in feed.read(1, 0)]
    assert {batch.device.type for batch in batches} == {DEVICE}
    return [batch.nan_to_num(-1.0).tolist() for batch in batches]


def test_batches_arrive_on_the_simulated_accelerator_only_if_the_step_waits() -> None:
    source, epochs = TensorSource(torch.arange(23.0)), Epochs(BatchContract(23, 6, 3, 2))
    plain = Feed(MapReader(source, epochs, 1, 3), epochs, 1, 3, lambda batch: batch)
    want = [part.batch.tolist() for part in plain.read(1, 0)]
    assert worlds.run_on(DEVICE, 1, on_the_device, waits=True) == [want]
    assert worlds.run_on(DEVICE, 1, on_the_device, waits=False) != [want]
