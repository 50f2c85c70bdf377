"""Processes that fetch ahead: they give what the rank itself would have read; and what becomes of their faults."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
from collections import namedtuple
from itertools import islice
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests import worlds
from tutti.data.adapt import adapt
from tutti.data.batches import map_tensors
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.data.loader import Loader, Prefetch, Task
from tutti.data.reader import MapReader
from tutti.data.source import AugmentKey

Pair = namedtuple("Pair", ["a", "b"])


class Everything:
    """Batches of every structure, type and layout; samples draw from all generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        draws = torch.tensor([random.random(), float(np.random.rand()), torch.rand(()).item()])
        return {"draws": draws, "pair": Pair(index, [torch.full((2, 3, 4), index % 2 == 0)]), "pid": os.getpid()}


class Layouts:
    """A source of its own, with tensors that are not contiguous, empty, or of rare types."""

    def __len__(self) -> int:
        return 23

    def fetch(self, indices: Any, augment: AugmentKey | None) -> Any:
        images = torch.arange(len(indices) * 24.0).view(-1, 2, 3, 4)
        return (
            images.contiguous(memory_format=torch.channels_last),
            images.transpose(0, 1).to(torch.bfloat16),
            torch.empty(len(indices), 0),
            torch.zeros(len(indices), dtype=torch.complex64),
            torch.from_numpy(indices),
        )


def tasks(batch: int = 5) -> list[Task]:
    return [(np.arange(low, min(low + batch, 23)), AugmentKey(1, 2)) for low in range(0, 23, batch)]


def plain(batch: Any) -> Any:
    def tell(tensor: torch.Tensor) -> Any:
        return str(tensor.dtype), tensor.stride(), tensor.tolist()

    if isinstance(batch, dict):
        batch = {key: value for key, value in batch.items() if key != "pid"}
    return map_tensors(batch, tell)


def fetched(kind: Any, workers: int) -> list[Any]:
    return [plain(batch) for batch in Prefetch(workers).batches(adapt(kind()), tasks())]


@pytest.mark.parametrize("kind", [Everything, Layouts])
def test_batches_do_not_tell_who_fetched_them(kind: Any) -> None:
    [want] = worlds.run(1, fetched, kind=kind, workers=0)
    assert len(want) == 5
    for workers in (1, 2, 7):
        assert worlds.run(1, fetched, kind=kind, workers=workers) == [want]


def by_whom(workers: int) -> Any:
    pids = [int(batch["pid"][0]) for batch in Prefetch(workers).batches(adapt(Everything()), tasks(2))]
    return [pid == os.getpid() for pid in pids], [pids.index(pid) for pid in pids]


def test_processes_take_turns() -> None:
    assert worlds.run(1, by_whom, workers=0) == [([True] * 12, [0] * 12)]
    assert worlds.run(1, by_whom, workers=3) == [([False] * 12, [0, 1, 2] * 4)]


def epochs(workers: int, persistent: bool = False) -> list[Any]:
    """Several epochs of a reader: one left early, one half read beside another, one from its middle."""
    prefetch = Prefetch(workers, persistent=persistent)
    reader = MapReader(adapt(Everything()), Epochs(BatchContract(23, 5, 4, 2)), 1, 3, prefetch)
    got = [plain(part.batch) for part in islice(reader.read(0, 0), 2)]
    first, second = reader.read(1, 0), reader.read(2, 0)
    for _ in range(3):
        got += [plain(next(first).batch), plain(next(second).batch)]
    first.close(), second.close()
    got += [plain(part.batch) for start in (3, 0) for part in reader.read(4, start)]
    loader = reader._loader
    assert (loader is not None) == persistent
    assert loader is None or (not loader._arrived and not loader._wanted)
    return got


def test_epochs_that_are_left_or_mixed_stay_apart() -> None:
    want = worlds.run(1, epochs, workers=0)
    assert len(want[0]) == 15 and len({str(batch) for batch in want[0]}) == 13
    for workers, persistent in ((1, False), (2, True)):
        assert worlds.run(1, epochs, workers=workers, persistent=persistent) == want


class Odd(Exception):
    """Cannot be copied to another process."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


ERRORS: dict[str, Any] = {
    "OSError": lambda: OSError(5, "Input/output error"),
    "ZeroDivisionError": lambda: ZeroDivisionError("in an item"),
    "Odd": lambda: Odd(1, 2),
}


class Faulty(Everything):
    """Its item 12 does what it is told."""

    def __init__(self, what: str) -> None:
        self.what, self.rank = what, os.getpid()

    def __getitem__(self, index: int) -> Any:
        if index == 12 and self.what in ERRORS:
            raise ERRORS[self.what]()
        if index == 12 and os.getpid() != self.rank:
            if self.what == "exit":
                raise SystemExit(7)
            if self.what == "stop":
                signal.pause()
            os.kill(os.getpid(), getattr(signal, self.what))
        return super().__getitem__(index)


def faulty(what: str, workers: int, timeout: float = 60.0) -> tuple[int, str, str, str]:
    prefetch = Prefetch(workers, rank=4, timeout=timeout)
    good = 0
    try:
        for _ in prefetch.batches(adapt(Faulty(what)), tasks()):
            good += 1
    except Exception as error:
        return good, type(error).__name__, str(error), "".join(getattr(error, "__notes__", []))
    return good, "", "", ""


@pytest.mark.parametrize("what", ERRORS)
def test_an_item_that_raises_keeps_its_message(what: str) -> None:
    [(good, kind, said, note)] = worlds.run(1, faulty, what=what, workers=0)
    assert good == 2 and not note
    for workers in (1, 2):
        if what == "Odd":
            kind, said = "RuntimeError", "Odd: 1 and 2"
        [(*answer, note)] = worlds.run(1, faulty, what=what, workers=workers)
        assert answer == [2, kind, said]
        assert f"In loader process {2 % workers} of rank 4:" in note and "in __getitem__" in note
        assert note.count("Traceback") == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGBUS", "was killed by SIGBUS"),
        ("exit", "ended with exit code 7"),
    ],
)
def test_a_process_that_ends_is_named(what: str, words: str) -> None:
    for workers in (1, 2):
        [(good, kind, said, _)] = worlds.run(1, faulty, what=what, workers=workers)
        assert (good, kind) == (2, "LoaderError")
        assert said.startswith(f"loader process {2 % workers} of rank 4 {words} (rank 4)")


def test_a_process_that_hangs_is_named() -> None:
    [(_, kind, said, _)] = worlds.run(1, faulty, what="stop", workers=1, timeout=2.0)
    assert kind == "LoaderError" and "loader process 0 returned no batch for 2 s (rank 4)" in said


def left_behind(how: str) -> tuple[int, list[str]]:
    """Processes while it loads, and what they are after it was closed or forgotten."""
    loader = Loader(adapt(Everything()), 3, 0, 60.0)
    pids = [process.pid for process in loader._processes]
    batches = loader.batches(tasks())
    next(batches)
    running = sum(_alive(pid) for pid in pids)
    if how == "closed":
        loader.close()
        loader.close()
    else:
        del batches, loader
        gc.collect()
    return running, [str(pid) for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_nothing_is_left_behind(how: str) -> None:
    assert worlds.run(1, left_behind, how=how) == [(3, [])]


class Huge:
    """A batch of a GiB, where there is room for a quarter of one."""

    def __len__(self) -> int:
        return 2

    def fetch(self, indices: Any, augment: AugmentKey | None) -> Any:
        most = psutil.Process().memory_info().vms + (1 << 28)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return torch.zeros(1).expand(1 << 28)


def too_much() -> str:
    try:
        list(Prefetch(1).batches(Huge(), [(np.arange(2), None)]))
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def test_a_batch_without_room_is_refused() -> None:
    [said] = worlds.run(1, too_much)
    assert said.startswith("DataError there is no memory for a batch of 1,024 MiB: Cannot allocate memory")
