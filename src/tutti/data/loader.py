"""Prefetch batches in loader processes, for sources whose samples are slow to read.

Loader processes are forked from their rank and answer in order. A task holds all that its batch depends on, so that a
batch is the same from any process. A batch's tensors are passed in an anonymous block of shared memory, without a file
in ``/dev/shm``; its structure and the block's descriptor travel over a private socket between parent and child.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice, starmap
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutti.config.watchdog_limits import TIMEOUT
from tutti.data.batches import map_tensors
from tutti.data.source import AugmentKey
from tutti.errors import DataError, LoaderError
from tutti.launcher.child import SIGNALS
from tutti.launcher.forking import fork
from tutti.launcher.orphans import die_with_parent
from tutti.torch_compat import enter_loader_process
from tutti.types.micro_batch import Batch

Task: TypeAlias = tuple[NDArray[np.int64], AugmentKey | None]
"""The arguments of one ``Source.fetch``."""


class BatchMaker(Protocol):
    """Protocol of an object that makes batches one by one, each by a call of its ``fetch``.

    Implemented by a map-style data set (``Source``) and by the reader of an iterable data set.
    """

    @property
    def fetch(self) -> Callable[..., Any]:
        """Function that makes and returns one batch; called in loader processes, or without them in the rank's process.

        The function's arguments describe the batch, such as the indices of samples and a key of random augmentation.
        Loader processes copy the batch's tensors, on the CPU, to shared memory, and pickle the rest of the batch.
        """


_AHEAD = 2
_ALIGNED = 64


@dataclass(frozen=True)
class Prefetch:
    """Settings for fetching batches in this process, or ahead of time in forked loader processes.

    Attributes:
        workers: number of loader processes of this rank; 0: this process fetches each batch when it is asked for.
        rank: this rank, for error messages.
        timeout: seconds to wait for the next batch of a loader process, before a ``LoaderError``.
        begin: called once in each loader process as ``begin(number)``, with the index of the process from 0, like a
            DataLoader's ``worker_init_fn``; None for no call.
        persistent: whether loader processes of training go on with the next epoch, and do not see what the script has
            changed in the data set since they were started.
    """

    workers: int = 0
    rank: int = 0
    timeout: float = TIMEOUT
    begin: Callable[[int], None] | None = None
    persistent: bool = False

    def batches(self, source: BatchMaker, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Iterate over the batches ``source.fetch(*task)`` of tasks, in order, made here or by loader processes.

        Loader processes are forked when the iteration begins, fetch ahead, and are killed when the iteration ends or is
        left. Each step of the iteration blocks until the next batch is made.

        Args:
            source: makes the batches.
            tasks: arguments of ``source.fetch``, one tuple a batch.

        Raises:
            LoaderError: a loader process was killed, ended, or gave no batch within ``timeout`` seconds.
            DataError: there is no memory for a batch of a loader process.
            OSError: no loader process can be forked.
            Exception: the exception that ``source.fetch`` raised.
        """
        return self._ahead(source, tasks) if self.workers else starmap(source.fetch, tasks)

    def _ahead(self, source: BatchMaker, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        loader = self.loader(source)
        try:
            yield from loader.batches(tasks)
        finally:
            loader.close()

    def loader(self, source: BatchMaker) -> Loader:
        """Start a pool of loader processes that make batches by ``source.fetch``, and return it.

        The pool has as many processes as these settings' ``workers`` says. They run until the pool's ``close`` is
        called.

        Args:
            source: makes the batches; forking copies its present state into each process.

        Returns:
            A ``Loader``: its ``batches(tasks)`` yields the result of ``source.fetch(*task)`` for each task, in order.

        Raises:
            OSError: no process can be forked.
        """
        return Loader(source, self.workers, self.rank, self.timeout, self.begin)


IN_PROCESS = Prefetch()


class Loader:
    """A pool of loader processes that make the batches of one data set; the constructor forks them.

    Batches are dealt to the processes in turn. The pool serves several calls of ``batches``, such as one an epoch.

    Args:
        source: its method ``fetch`` makes a batch; forking copies the present state of ``source`` into each process.
        workers: number of loader processes, at least 1.
        rank: this rank, for error messages.
        timeout: seconds to wait for the next batch, before a ``LoaderError``.
        begin: called as ``begin(number)`` in each loader process before it reads, with the number of the process from
            0, as a DataLoader's ``worker_init_fn``; None for no call. ``torch.utils.data.get_worker_info()`` then
            returns the process's number, with or without ``begin``.

    Raises:
        OSError: no process can be forked.
    """

    def __init__(
        self,
        source: BatchMaker,
        workers: int,
        rank: int,
        timeout: float,
        begin: Callable[[int], None] | None = None,
    ) -> None:
        self._rank, self._timeout = rank, timeout
        self._processes = [
            _start(source, f"loader process {number} of rank {rank}", partial(_begin, source, number, workers, begin))
            for number in range(workers)
        ]
        self._numbers = count()
        self._wanted: set[int] = set()
        self._arrived: dict[int, Any] = {}
        self._finish = weakref.finalize(self, _end, self._processes, os.getpid())

    def close(self) -> None:
        """Kill this pool's loader processes by SIGKILL, and wait for their end. A second call does nothing."""
        self._finish()

    def batches(self, tasks: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yield the batch ``source.fetch(*task)`` for each task, in order, with up to two batches a process made ahead.

        ``source`` is the data set that the pool of loader processes was made for. Blocks until the next batch is made.
        A batch's tensors are views of one block of memory that no other batch uses and that the tensors keep alive, so
        that the caller may change and keep them. Batches made ahead are discarded if the iteration is left early.

        Args:
            tasks: arguments of ``source.fetch``, one tuple a batch.

        Raises:
            LoaderError: a process was killed, ended, or gave no batch within the timeout.
            DataError: there is no memory for a batch.
            Exception: the exception that ``fetch`` raised in the process, with its traceback as a note; a RuntimeError
                with its type and text if it cannot be pickled.
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
            # After an epoch that is left early, outstanding answers are discarded when they arrive.
            self._wanted.difference_update(ahead)
            for number in ahead:
                self._arrived.pop(number, None)

    def _ask(self, task: tuple[Any, ...]) -> int:
        number = next(self._numbers)
        # A dead process is reported when its answer is needed: batches that it sent before are valid.
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
                    f"loader process {worker} returned no batch for {self._timeout:g} s",
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
            f"loader process {worker} of rank {self._rank} {ended}",
            where=f"rank {self._rank}",
            why="reading a sample crashed, the host ran out of memory, or the process was killed",
            remedy="look at the rank's log; fewer loader processes (--data-workers, in a script data_workers) need less"
            " memory, and with 0 the rank itself reads",
        )


class _Process:
    """A forked loader process and this end of its socket."""

    def __init__(self, pid: int, channel: Connection[Any, Any]) -> None:
        self.pid, self.channel = pid, channel
        self._end = ""

    def ended(self) -> str:
        """Wait for the process to end and return how it ended, for messages."""
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
        """Kill and reap the process, unless it has been reaped: the kernel may then have reused its process id."""
        self.channel.close()
        if not self._end:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.ended()


def _begin(source: BatchMaker, number: int, workers: int, begin: Callable[[int], None] | None) -> None:
    """Set what ``torch.utils.data.get_worker_info`` returns in a loader process, and call ``begin``."""
    enter_loader_process(number, workers, getattr(source, "items", source))
    if begin is not None:
        begin(number)


def _start(source: BatchMaker, name: str, begin: Callable[[], None]) -> _Process:
    """Fork a loader process. It has none of this process's other threads, and calls nothing that needs them."""
    here, there = Pipe()
    parent = os.getpid()
    # Output left in the buffers would be written twice, by parent and child.
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError):
            stream.flush()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = fork()
        if pid == 0:
            _serve(source, name, there, parent, blocked, begin)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # Only the child may hold its end of the socket, so that its death closes the socket.
    there.close()
    return _Process(pid, here)


def _end(processes: list[_Process], owner: int) -> None:
    # A process forked from the owner inherits this finalizer, and must not run it.
    if os.getpid() == owner:
        for process in processes:
            process.end()


def _serve(
    source: BatchMaker,
    name: str,
    channel: Connection[Any, Any],
    parent: int,
    blocked: Any,
    begin: Callable[[], None],
) -> NoReturn:
    """Answer tasks in the forked process until its rank ends it or closes the socket."""
    code = 1
    try:
        # Collecting the rank's garbage here could wait for threads that were not forked.
        gc.freeze()
        die_with_parent(parent=parent)
        # Only the rank handles signals: it saves and then ends this process.
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # The threads of the rank's intra-op pool were not forked.
        torch.set_num_threads(1)
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        begin()
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


def _answer(channel: Connection[Any, Any], number: int, source: BatchMaker, task: Task, name: str) -> None:
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
    """Return ``error``, or a RuntimeError with its text if it cannot be pickled, with the traceback as a note."""
    # A DataError only adds the sample's number to an error of the data set.
    shown = error.__cause__ if isinstance(error, DataError) and error.__cause__ else error
    note = f"In {name}:\n{''.join(traceback.format_exception(shown))}"
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


class _Place(NamedTuple):
    """Offset, dtype, size and stride of a tensor in a block of memory."""

    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def length(self) -> int:
        """Bytes of the tensor, whose elements are dense."""
        return math.prod(self.size) * self.dtype.itemsize

    def tensor(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of ``memory``, a tensor of bytes."""
        flat = memory[self.offset : self.offset + self.length].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


@dataclass(frozen=True)
class _Packed:
    """A batch with a ``_Place`` for each tensor, in a block of ``size`` bytes."""

    batch: Any
    size: int

    def unpack(self, descriptor: int) -> Batch:
        """Return the batch as views of the block, which they keep alive; closes ``descriptor``."""
        memory = _map(descriptor, self.size)
        os.close(descriptor)
        return map_tensors(self.batch, lambda place: place.tensor(memory), _Place)


def _pack(batch: Batch) -> tuple[_Packed, int]:
    """Copy a batch into a new block of memory; return it with the block's descriptor. Raises DataError without room."""
    tensors: list[tuple[Tensor, _Place]] = []
    size = 0

    def place(tensor: Tensor) -> _Place:
        nonlocal size
        # A kernel's rounding may depend on the strides, which are kept for dense tensors.
        stride = torch.empty_like(tensor, device="meta").stride()
        spot = _Place(size, tensor.dtype, tuple(tensor.shape), stride)
        tensors.append((tensor, spot))
        size = -(-(size + spot.length) // _ALIGNED) * _ALIGNED
        return spot

    structure = map_tensors(batch, place)
    packed = _Packed(structure, max(size, 1))
    descriptor = os.memfd_create("tutti-batch") if sys.platform == "linux" else _unnamed_file()
    try:
        # Pages are allocated on write, so that running out of host memory kills this process and not the rank.
        os.ftruncate(descriptor, packed.size)
        memory = _map(descriptor, packed.size)
    except OSError as error:
        os.close(descriptor)
        raise DataError(
            f"there is no memory for a batch of {packed.size / 2**20:,.0f} MiB",
            why=error.strerror,
            remedy="take fewer loader processes (--data-workers, in a script data_workers) or a smaller batch",
        ) from error
    for tensor, spot in tensors:
        spot.tensor(memory).copy_(tensor)
    return packed, descriptor


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
