"""Worlds of several real processes for tests: started once from a fork server that has torch loaded, used many times.

``run(size, function, **arguments)`` calls ``function`` on every rank of a world of ``size`` and returns the results in
rank order; an exception on any rank is raised here as ``RankError`` with every rank's, and a rank that dies as one with
its exit code or signal. What the ranks of a run that failed wrote to standard error is written to this process's.

``run_on(device, …)`` does so on a device, such as the simulated accelerator; ``TEST_DEVICE=simgpu`` lets all other
tests run on it, too, and ``TEST_DEVICE=cuda`` on this machine's GPUs. A world of more ranks than there are devices is
skipped, unless ``TEST_SHARE_GPU=1`` lets all ranks share the first GPU (``tests/gpu/sharing.py``).
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import sharing
from tests.simulated_accelerator import build
from tutti.device import accelerator_type, count_by_driver
from tutti.launcher.orphans import die_with_parent
from tutti.launcher.script_rank import show_crashes

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
ACCELERATOR = build.DEVICE if DEVICE == "cpu" else DEVICE
"""The device of tests that are about accelerators."""
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.rank_server"])


@dataclass
class Failure:
    """An exception as it came out of a rank."""

    kind: str
    text: str
    exit_code: int
    trace: str


class RankError(AssertionError):
    """At least one rank raised. ``failures`` has None for ranks that did not."""

    def __init__(self, failures: list[Failure | None]) -> None:
        self.failures = failures
        super().__init__("\n".join(f"rank {r}: {f.trace}" for r, f in enumerate(failures) if f))


class Pool:
    """A world of ``size`` ranks that lives until ``close``."""

    def __init__(self, size: int, timeout: float = 30.0, device: str = DEVICE) -> None:
        require_devices(device, size)
        self.size, self.runs = size, 0
        self._directory = tempfile.mkdtemp()
        self._pipes: list[Connection] = []
        self.processes: list[ForkServerProcess] = []
        for rank in range(size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(there, rank, size, self._directory, timeout, device), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *, limit: float = 240.0, **arguments: Any) -> list[Any]:
        """Results in rank order. Raises RankError; TimeoutError after ``limit`` seconds."""
        try:
            return self._run(function, limit, arguments)
        except BaseException:
            self._show_errors()
            # Whatever interrupted it, ranks that are still busy must not answer the next call.
            self.close()
            raise

    def _run(self, function: Callable[..., Any], limit: float, arguments: dict[str, Any]) -> list[Any]:
        self.runs += 1
        for pipe in self._pipes:
            # A rank that has died since the last call gives no answer either.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe.send((function, arguments))
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.size:
            pending = [p for r, p in enumerate(self._pipes) if r not in answers]
            ready = wait(pending, limit)
            if not ready:
                raise TimeoutError(f"ranks {sorted(set(range(self.size)) - set(answers))} did not answer")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    how = self._death(rank)
                    answers[rank] = ("error", Failure("Died", how, 1, how))
        failures = [answers[r][1] if answers[r][0] == "error" else None for r in range(self.size)]
        if any(failures):
            raise RankError(failures)
        return [answers[r][1] for r in range(self.size)]

    def _death(self, rank: int) -> str:
        """How the process of a rank ended, which has closed its pipe."""
        self.processes[rank].join(_REAPED_WITHIN)
        code = self.processes[rank].exitcode
        if code is None:
            return "the process closed its pipe and lives on"
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"

    def _show_errors(self) -> None:
        """Write to standard error what the ranks have written there during the last run."""
        for rank in range(self.size):
            path = _errors_of(self._directory, rank)
            if path.is_file() and (said := path.read_text(errors="replace")[-_MOST_SHOWN:]):
                print(f"standard error of rank {rank}:\n{said}", file=sys.stderr)

    @property
    def closed(self) -> bool:
        return not self._pipes

    def stop(self) -> None:
        """Let the ranks, and the processes that they have started, take no CPU time until ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in (process.pid for process in self.processes):
            with suppress(ProcessLookupError):
                if pid is not None:
                    os.killpg(pid, number)

    def close(self) -> None:
        """Kill the ranks. Does nothing in a closed pool: other processes may have the ids of its ranks by then."""
        if self.closed:
            return
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        # With what ranks have started, such as stopped servers.
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


def _errors_of(directory: str, rank: int) -> Path:
    """The file that is the standard error of a rank."""
    return Path(directory, f"stderr-{rank}")


# Seconds from the end of a rank's pipe to that of its process.
_REAPED_WITHIN = 10.0
# Characters of a rank's standard error.
_MOST_SHOWN = 4000
_pools: dict[tuple[int, float, str], Pool] = {}
# Process groups that a run leaves keep connections and threads. A rank's start and first run take 0.1 s of CPU more
# than its later runs, of which the hundredth takes as long, and as many threads and files, as the fifth.
_MOST_RUNS = 120
# So many ranks share no machine with others, not even idle ones.
_LARGE = 6
# Idle ranks take memory.
_MOST_IDLE = 9
_calls = 0
_last_call: dict[tuple[int, float, str], int] = {}


def run(size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Call ``function(**arguments)`` on every rank of a world of ``size``, in a pool that is kept for a while."""
    return run_within(30.0, size, function, **arguments)


_alone: dict[tuple[str, Callable[..., Any], str], Any] = {}


def alone(function: Callable[..., Any], **arguments: Any) -> Any:
    """What one rank returns, run once for all tests of this process that ask for the same: the reference of a table."""
    key = DEVICE, function, repr(sorted(arguments.items()))
    if key not in _alone:
        [_alone[key]] = run(1, function, **arguments)
    return _alone[key]


def run_within(seconds: float, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """The same in a pool whose ranks wait ``seconds`` for one another, and not half a minute."""
    return _run((size, seconds, DEVICE), function, arguments)


def run_on(device: str, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """The same as ``run`` on another device than ``DEVICE``. Skips the test where the device cannot be built."""
    return _run((size, 30.0, device), function, arguments)


def _run(key: tuple[int, float, str], function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    global _calls
    _calls += 1
    size = key[0]
    for other, pool in _pools.items():
        beside = 1 not in (size, other[0]) and size != other[0] and max(size, other[0]) >= _LARGE
        if beside or pool.runs >= _MOST_RUNS or _calls - _last_call[other] > _MOST_RUNS:
            pool.close()
    idle = [other for other, pool in _pools.items() if other != key and not pool.closed]
    for other in sorted(idle, key=_last_call.__getitem__):
        if sum(size for size, *_ in idle) > _MOST_IDLE:
            _pools[other].close()
            idle.remove(other)
    if key not in _pools or _pools[key].closed:
        _pools[key] = Pool(*key)
    _last_call[key] = _calls
    pool = _pools[key]
    pool.go_on()
    answers = pool.run(function, **arguments)
    # Each rank wakes up a hundred times a second for its connections, which takes half a per cent of a core.
    pool.stop()
    return answers


def require_devices(device: str, count: int, *, own: bool = False) -> None:
    """Skip the test where fewer than ``count`` devices of this type are here, or the simulated one cannot be built.

    ``own``: whether each rank needs a device of its own, also where ``TEST_SHARE_GPU`` lets ranks share one.
    """
    if device == build.DEVICE:
        build.require()
        return
    shared = sharing.SHARED and not own
    if device != "cpu" and (here := devices_here(device)) < (min(count, 1) if shared else count):
        pytest.skip(f"{count} devices of type {device} are needed, and {here} are here")


@cache
def devices_here(device: str) -> int:
    """How many real devices of this type are here, by the driver's files where they tell, so that no driver loads."""
    by_driver = count_by_driver(os.environ)
    if by_driver is not None:
        return by_driver if device == "cuda" else 0
    import torch

    return torch.accelerator.device_count() if accelerator_type() == device else 0


def forget(size: int) -> None:
    """Let the next call begin with new processes: those of this size may be in the middle of something."""
    for (own, *_), pool in _pools.items():
        if own == size:
            pool.close()


@atexit.register
def close_all() -> None:
    """Before ``multiprocessing`` asks ranks to end, and waits for them: stopped ones would not."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _share_event_loop() -> None:
    """Let all Gloo process groups of this process share one event loop.

    PyTorch gives every group a loop of its own, which wakes up a hundred times a second. The ranks of a pool make
    dozens of groups: 40 of them take 3 % of a core from the tests for each rank, also when the pool is idle.
    """
    from torch.distributed import distributed_c10d

    plain = distributed_c10d.ProcessGroupGloo
    device = plain.create_default_device()

    class SharedLoop(plain):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = plain._Options()
            options._timeout, options._devices, options._threads = timeout, [device], 2
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedLoop  # type: ignore[misc]


def _serve(pipe: Connection, rank: int, size: int, directory: str, timeout: float, device: str) -> None:
    with _errors_of(directory, rank).open("ab") as errors:
        os.dup2(errors.fileno(), 2)
    show_crashes()

    import torch

    import tutti
    from tutti.comm import shared_memory, stall

    # A process group of its own can be stopped. Stopped ranks do not see that the tests have ended.
    os.setpgid(0, 0)
    die_with_parent()
    # Ranks of tests of deadlocks begin to read each other's notes after half a second and not after two; what the notes
    # must say, and how long, stays.
    stall._PATIENCE = timedelta(seconds=0.5)
    # Ranks that wait for others leave the cores to all tests that compute.
    shared_memory._YIELDS = 20
    torch.set_num_threads(1)
    # What was imported and what outlives a run are frozen: collections and tutti's own searches of live objects look at
    # what the run itself has made, which takes a fourth less of the CPU time of a run. With little else alive Python
    # would look for garbage all the time, 8 % of it, and each run ends with a collection.
    gc.set_threshold(20_000, 50, 100)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(number) for name, number in numbers.items()}, TUTTI_STORE=f"{directory}/store")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _share_event_loop()
    if device == build.DEVICE:
        build.load()
    if device != "cpu" and sharing.SHARED:
        sharing.share_first_device(device)
    tutti.init(device, timeout=timeout)
    gc.freeze()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        os.ftruncate(2, 0)
        try:
            answer = ("ok", function(**arguments))
        except BaseException as error:
            code = int(getattr(error, "exit_code", 1))
            answer = ("error", Failure(type(error).__name__, str(error), code, traceback.format_exc()))
        pipe.send(answer)
        # A run that waits for the garbage collector would check every call of PyTorch in the runs after it.
        del answer, function, arguments
        gc.collect()
        gc.freeze()
