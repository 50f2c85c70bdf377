"""``tutti.launch``: run a function in ranks of its own, from a script or a notebook, and return what each returned."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tutti.config.watchdog_limits import TIMEOUT
from tutti.device import reason_not_to_fork
from tutti.errors import ExitCode, PeerError, Preempted, UsageError
from tutti.launcher import context
from tutti.launcher.child import SIGNALS
from tutti.launcher.elastic_driver import ElasticOptions
from tutti.launcher.launch import OPTIMIZER_MODULES
from tutti.launcher.launch import launch as launch_ranks

T = TypeVar("T")


def launch_function(
    function: Callable[..., T],
    *args: Any,
    devices: int,
    timeout: float = TIMEOUT,
    show_all: bool = False,
    **named: Any,
) -> list[T]:
    """Call ``function(*args, **named)`` in ``devices`` new processes, the ranks of one job; public as ``tutti.launch``.

    The ranks are forked, so that the function may be defined anywhere, also interactively in a notebook or in a script
    without ``if __name__ == "__main__"``. Changes that ``function`` makes to variables do not reach this process; only
    its return value does. Rank 0 writes to this process's output. The call blocks until all ranks have ended.
    Before the fork it imports ``torch._dynamo``, as every optimizer of PyTorch does, once for all ranks.

    Args:
        function: called in every rank; it joins the job itself, by ``tutti.prepare`` or ``tutti.init``.
        args: positional arguments of ``function``.
        devices: number of ranks, one for each device.
        timeout: seconds that ranks may wait for each other in a collective.
        show_all: show the other ranks' output, too.
        named: keyword arguments of ``function``; none may be called ``function``, ``devices``, ``timeout`` or
            ``show_all``.

    Returns:
        List of length ``devices``: what ``function`` returned in each rank, in rank order. The values must be possible
        to pickle.

    Raises:
        UsageError: ``devices`` is less than 1; this process is a rank itself, already trains, or has used the
            accelerator or autograd, whose driver and threads do not survive a fork; or the call is made outside the
            main thread.
        Exception: the first error of a rank, with the rank and its traceback as a note; a RuntimeError with its type
            and text if it cannot be pickled.
        PeerError: a rank was killed, or ended without a result.
        Preempted: a rank ended with exit code 75.
        KeyboardInterrupt: a signal stopped the job, and no rank raised an error.
        SystemExit: a signal came before the ranks were started; the code is 128 + its number.
        DiskError: there is no space to start the ranks or to write their logs.

    >>> import tutti
    >>> def square_of_rank(base):
    ...     tutti.init()
    ...     return (base + tutti.rank()) ** 2
    >>> tutti.launch(square_of_rank, 3, devices=2)  # doctest: +SKIP
    [9, 16]
    """
    _check_outside()
    folder = Path(tempfile.mkdtemp(prefix="tutti-launch-"))
    try:
        code = launch_ranks(
            _call,
            (folder, function, args, named),
            processes=devices,
            logs=folder / "logs",
            timeout=timeout,
            show_all=show_all,
            preload=OPTIMIZER_MODULES,
        )
        _raise_first(folder, f"of {devices}", code)
        if code - 128 in SIGNALS:
            raise KeyboardInterrupt(f"stopped by signal {code - 128}")
        return [_result(folder, rank, code) for rank in range(devices)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


launch = launch_function


def launch_elastic_function(function: Callable[[], T], limits: ElasticOptions, timeout: float) -> list[T]:
    """Call ``function()`` in the ranks of an elastic job on this machine, whose set of ranks changes while it runs.

    All ranks, those that join later included, are forked from this process as it is now. Blocks until all have ended.

    Args:
        function: called in every rank.
        limits: numbers of ranks, the host discovery script and the other limits of the job.
        timeout: seconds that ranks may wait for each other in a collective.

    Returns:
        List of what ``function`` returned in the ranks that ended without an error, in the order of their last rank.
        The values must be possible to pickle.

    Raises:
        UsageError: as from ``launch_function``; or the host discovery script fails or prints a malformed line.
        Exception: all ranks have failed: the first error, with the rank and its traceback as a note.
        PeerError: the job ended without such an error: its ranks were killed, or a limit was reached.
        KeyboardInterrupt: a signal stopped the job.
        SystemExit: a signal came before the ranks were started; the code is 128 + its number.
        DiskError: there is no space to start the ranks or to write their logs.
    """
    _check_outside()
    folder = Path(tempfile.mkdtemp(prefix="tutti-launch-"))
    try:
        code = launch_ranks(
            _call,
            (folder, function, (), {}),
            processes=limits.np,
            logs=folder / "logs",
            timeout=timeout,
            preload=OPTIMIZER_MODULES,
            elastic=limits,
        )
        if code == 0:
            return [_result(folder, rank, code) for rank in _ranks(folder, "result")]
        if code - 128 in SIGNALS:
            raise KeyboardInterrupt(f"stopped by signal {code - 128}")
        _raise_first(folder, "of the elastic job", code)
        raise PeerError(f"the elastic job ended with exit code {code}", remedy="see what it wrote on standard error")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ranks(folder: Path, kind: str) -> list[int]:
    """Return the ranks that have left a ``result`` or an ``error`` in ``folder``, in order."""
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f"{kind}-*") if not path.suffix)


def _check_outside() -> None:
    """Raise UsageError if this process is a rank, or has the threads and connections of one, which do not fork."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise UsageError(
            "tutti.launch is called inside a rank",
            why=f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} already",
            remedy="call the function itself, or start the script with python and not with tutti run",
        )
    if context.is_initialized():
        raise UsageError(
            "tutti.launch in a process that trains",
            why="the ranks are forked, and its process group cannot be",
            remedy="call tutti.launch before tutti.prepare, or call tutti.shutdown() first; in a notebook restart the "
            "kernel and prepare inside the function",
        )
    if (why := reason_not_to_fork()) is not None:
        raise UsageError(
            "tutti.launch in a process that has computed already",
            why=why,
            remedy="call tutti.launch first, and move tensors to the accelerator and train inside the function; in a "
            "notebook restart the kernel",
        )


def _call(folder: Path, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Call the function in a rank, and leave what it returns or raises in ``folder``."""
    try:
        answer = pickle.dumps(function(*args, **named))
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        _write(folder / f"error-{os.environ['RANK']}", pickle.dumps((time.time(), _portable(error), text)))
        raise
    # Ranks of an elastic job have another rank at the end than at the beginning.
    _write(folder / f"result-{os.environ['RANK']}", answer)


def _write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def _portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _raise_first(folder: Path, job: str, code: int) -> None:
    """Raise the first error of a rank; one about a lost peer only if there is no other, and none was preempted."""
    found = []
    for rank in _ranks(folder, "error"):
        moment, error, text = pickle.loads((folder / f"error-{rank}").read_bytes())
        found.append((isinstance(error, PeerError), moment, rank, error, text))
    if code == ExitCode.PREEMPTED and all(lost for lost, *_ in found):
        raise Preempted("the job was preempted", why=f"a rank ended with exit code {code}")
    if not found:
        return
    _, _, rank, error, text = min(found, key=lambda each: each[:3])
    error.add_note(f"On rank {rank} {job}:\n{text}")
    raise error


def _result(folder: Path, rank: int, code: int) -> Any:
    path = folder / f"result-{rank}"
    if not path.is_file():
        raise PeerError(
            f"rank {rank} ended without a result",
            why=f"it was killed or left early; the job's exit code is {code}",
            remedy="see what it wrote on standard error",
        )
    return pickle.loads(path.read_bytes())
