"""Processes that fetch batches ahead, for sources whose samples are slow.

They are forked from their rank and answer in order; what they are asked says everything that a batch depends on, so
that nobody can tell from a batch who fetched it. A batch crosses in a block of shared memory that has no name and no
place in ``/dev/shm``; its structure travels beside it, over a socket between parent and child that nobody else has.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import pickle
import signal
import sys
import tempfile
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.data.batches import map_tensors
from tutti.data.source import AugmentKey, Source
from tutti.errors import DataError, LoaderError
from tutti.types import Batch
from tutti.world.child import SIGNALS
from tutti.world.forking import fork
from tutti.world.orphans import die_with_parent

Task: TypeAlias = tuple[NDArray[np.int64], AugmentKey | None]
"""The arguments of one ``Source.fetch``."""

_AHEAD = 2
_ALIGNED = 64


@dataclass(frozen=True)
class Prefetch:
    """Who fetches: this process (no ``workers``), or processes that fetch ahead of it.

    Attributes:
        workers: loader processes of this rank.
        rank: this rank, for messages.
        timeout: seconds that a batch may take.
    """

    workers: int = 0
    rank: int = 0
    timeout: float = 300.0

    def batches(self, source: Source, tasks: Iterable[Task]) -> Iterator[Batch]:
        """The batches of ``tasks``, in order; loader processes end with the iteration."""
        if not self.workers:
            yield from (source.fetch(*task) for task in tasks)
            return
        loader = self.loader(source)
        try:
            yield from loader.batches(tasks)
        finally:
            loader.close()

    def loader(self, source: Source) -> Loader:
        """Loader processes that stay until they are closed."""
        return Loader(source, self.workers, self.rank, self.timeout)


IN_PROCESS = Prefetch()


class Loader:
    """Some processes that fetch from one source.

    Args:
        source: copied into each process as it is now.
        workers: how many processes.
        rank: of this process, for messages.
        timeout: seconds that a batch may take.
    """

    def __init__(self, source: Source, workers: int, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._processes = [_start(source, f"data worker {number} of rank {rank}") for number in range(workers)]
        self._numbers = count()
        self._wanted: set[int] = set()
        self._arrived: dict[int, Any] = {}
        self._finish = weakref.finalize(self, _end, self._processes, os.getpid())

    def close(self) -> None:
        """End the processes. Calling it twice changes nothing."""
        self._finish()

    def batches(self, tasks: Iterable[Task]) -> Iterator[Batch]:
        """The batches of ``tasks``, in order; each process has up to two ahead.

        Raises:
            DataError: a process was killed, ended, or gave nothing for too long.
            Exception: whatever ``fetch`` raised there, with its message.
        """
        ahead: deque[int] = deque()
        rest = iter(tasks)
        try:
            ahead.extend(map(self._ask, islice(rest, _AHEAD * len(self._processes))))
            while ahead:
                batch = self._take(ahead.popleft())
                ahead.extend(map(self._ask, islice(rest, 1)))
                yield batch
        finally:
            # An epoch that is left early: its answers are thrown away when they come.
            self._wanted.difference_update(ahead)
            for number in ahead:
                self._arrived.pop(number, None)

    def _ask(self, task: Task) -> int:
        number = next(self._numbers)
        # Whether the process is still there is seen where its answer is needed: what it gave before is good.
        with suppress(OSError):
            self._processes[number % len(self._processes)].channel.send((number, task))
        self._wanted.add(number)
        return number

    def _take(self, number: int) -> Batch:
        worker = number % len(self._processes)
        while number not in self._arrived:
            arrived, answer = self._receive(worker)
            if arrived in self._wanted:
                self._wanted.remove(arrived)
                self._arrived[arrived] = answer
        answer = self._arrived.pop(number)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _receive(self, worker: int) -> tuple[int, Any]:
        channel = self._processes[worker].channel
        try:
            if not channel.poll(self._timeout):
                raise LoaderError(
                    f"data worker {worker} gave no batch for {self._timeout:g} s",
                    where=f"rank {self._rank}",
                    why="reading a sample hangs, or takes longer than that",
                    remedy="look at what it reads, or raise --timeout",
                )
            number, answer = channel.recv()
            memory = recv_handle(channel) if isinstance(answer, _Packed) else -1
        except (EOFError, OSError):
            raise self._lost(worker) from None
        return number, answer.unpack(memory) if isinstance(answer, _Packed) else answer

    def _lost(self, worker: int) -> LoaderError:
        ended = self._processes[worker].ended()
        return LoaderError(
            f"data worker {worker} of rank {self._rank} {ended}",
            where=f"rank {self._rank}",
            why="reading a sample crashed, the host ran out of memory, or somebody ended it",
            remedy="look at the rank's log; fewer --data-workers need less memory, and with 0 the rank itself reads",
        )


class _Process:
    """A forked process and the way to it."""

    def __init__(self, pid: int, channel: Connection[Any, Any]) -> None:
        self.pid, self.channel = pid, channel
        self._end = ""

    def ended(self) -> str:
        """How it ended; waits for that."""
        if not self._end:
            try:
                code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:
                self._end = "has ended"
            else:
                self._end = (
                    f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                )
        return self._end

    def end(self) -> None:
        """End it, unless it has: its number may be another's then."""
        self.channel.close()
        if not self._end:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.ended()


def _start(source: Source, name: str) -> _Process:
    """Fork a process that fetches. Of this process's threads it has none, and it calls nothing that needs them."""
    here, there = Pipe()
    parent = os.getpid()
    # What is still in the buffers would be written twice.
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.flush()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = fork()
        if pid == 0:
            _serve(source, name, there, parent, blocked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # From now on the child alone holds its end, so that its death is seen.
    there.close()
    return _Process(pid, here)


def _end(processes: list[_Process], owner: int) -> None:
    # A process that its owner has forked inherits this duty, and must not do it.
    if os.getpid() == owner:
        for process in processes:
            process.end()


def _serve(source: Source, name: str, channel: Connection[Any, Any], parent: int, blocked: Any) -> NoReturn:
    """What the forked process does until its rank ends it."""
    code = 1
    try:
        # What the rank had left for the collector may wait for threads that are not here.
        gc.freeze()
        die_with_parent(parent=parent)
        # Signals are for the rank, which saves and then ends this process.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # The threads of the rank's arithmetic were not forked with it.
        torch.set_num_threads(1)
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        while True:
            number, task = channel.recv()
            _answer(channel, number, source, task, name)
    except (EOFError, OSError):
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _answer(channel: Connection[Any, Any], number: int, source: Source, task: Task, name: str) -> None:
    try:
        packed, memory = _pack(source.fetch(*task))
    except Exception as error:
        channel.send((number, _portable(error, name)))
        return
    try:
        channel.send((number, packed))
        send_handle(channel, memory, os.getppid())
    finally:
        os.close(memory)


def _portable(error: Exception, name: str) -> Exception:
    """``error`` as it can be sent: with its traceback as a note, and by name where it cannot be copied."""
    error.add_note(f"In {name}:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class _Place(NamedTuple):
    """Where a tensor lies in a block of memory."""

    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes that it takes; its numbers lie densely."""
        return math.prod(self.size) * self.dtype.itemsize

    def tensor(self, memory: Tensor) -> Tensor:
        """The tensor in ``memory``, as bytes."""
        flat = memory[self.offset : self.offset + self.length].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


@dataclass(frozen=True)
class _Packed:
    """A batch whose tensors are replaced by their places in a block of ``size`` bytes."""

    batch: Any
    size: int

    def unpack(self, descriptor: int) -> Batch:
        """The batch as views of the block, which lives as long as they do."""
        memory = _map(descriptor, self.size)
        os.close(descriptor)
        return map_tensors(self.batch, lambda place: place.tensor(memory), _Place)


def _pack(batch: Batch) -> tuple[_Packed, int]:
    """A batch in a new block of memory, and the block's descriptor. Raises DataError where there is no room."""
    tensors: list[tuple[Tensor, _Place]] = []
    size = 0

    def place(tensor: Tensor) -> _Place:
        nonlocal size
        # A kernel's rounding may depend on the layout, which is kept wherever the numbers lie densely.
        stride = torch.empty_like(tensor, device="meta").stride()
        spot = _Place(size, tensor.dtype, tuple(tensor.shape), stride)
        tensors.append((tensor, spot))
        size = -(-(size + spot.length) // _ALIGNED) * _ALIGNED
        return spot

    structure = map_tensors(batch, place)
    packed = _Packed(structure, max(size, 1))
    descriptor = os.memfd_create("tutti-batch") if sys.platform == "linux" else _unnamed_file()
    try:
        # Pages are taken as they are written, so that a host without memory ends this process and no other.
        os.ftruncate(descriptor, packed.size)
        memory = _map(descriptor, packed.size)
    except OSError as error:
        os.close(descriptor)
        raise DataError(
            f"no memory for a batch of {packed.size / 2**20:,.0f} MiB",
            why=error.strerror,
            remedy="take fewer --data-workers or a smaller batch",
        ) from error
    for tensor, spot in tensors:
        spot.tensor(memory).copy_(tensor)
    return packed, descriptor


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
