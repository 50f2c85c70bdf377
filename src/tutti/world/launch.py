"""Starting the processes of one host, and running a user's script in them. Imports torch only when it starts them."""

from __future__ import annotations

import errno
import gc
import importlib
import importlib.util
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tutti.errors import DiskError, ExitCode, UsageError
from tutti.world import child, failure
from tutti.world.budget import Budget
from tutti.world.orphans import adopt_orphans
from tutti.world.watchdog import Limits

if TYPE_CHECKING:
    from tutti.world.agent import Agent


def launch(
    entry: Callable[..., None],
    args: tuple[Any, ...],
    *,
    processes: int,
    logs: Path,
    timeout: float = 300.0,
    show_all: bool = False,
    restarts: int = 0,
    progress: Callable[[], int] | None = None,
    limits: Limits | None = None,
    grace: float = 30.0,
    preload: Collection[str] = (),
) -> int:
    """Run ``entry(*args)`` in local processes and return the exit code of the whole, as in ``tutti.errors.ExitCode``.

    Workers are forked after one import of torch and of ``preload``. They find torchrun's variables in their
    environment, ``TUTTI_STORE`` (path of a file store that only this user can open) and ``TUTTI_TIMEOUT``. Rank 0 keeps
    the terminal, the others write to ``logs/rank{N}.log``. When one fails, all are ended, and the first cause is told
    on standard error. A signal is passed on once; what has not ended after ``grace`` seconds is killed, and a second
    signal kills at once.

    Args:
        entry: runs in every worker.
        args: its arguments.
        processes: how many workers.
        logs: directory for logs and failure records; made where it does not exist.
        timeout: seconds that ranks may wait for each other.
        show_all: show the other ranks' output too, as ``[rank 3] …``; also by ``TUTTI_LOG_RANKS=all``.
        restarts: how often in a row to start all workers anew after a failure without progress.
        progress: a number that grows with what is saved for good, such as the step of the newest checkpoint; without
            it no attempt makes progress.
        limits: how long a worker may show no progress before its watchdog ends it.
        grace: seconds between a signal and SIGKILL.
        preload: modules that every worker needs. Not imported where torch has CUDA, which must not be touched before
            a fork.

    Raises:
        UsageError: fewer than one process.
        DiskError: the log or store directory cannot be made.
    """
    if processes < 1:
        raise UsageError(f"cannot start {processes} processes", remedy="give a whole number of at least 1")
    store = _directories(logs)
    shown = show_all or os.environ.get("TUTTI_LOG_RANKS") == "all"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // processes)
    job = child.Job(entry, args, logs.absolute(), store, os.getpid(), threads, limits or Limits())
    try:
        with _environment(_settings(threads, timeout)), _signal_handlers(), _adopting():
            import torch

            from tutti.world.agent import Agent, run

            if torch.version.cuda is None:
                for module in preload:
                    importlib.import_module(module)
            agent = Agent(job, processes, Budget(restarts, progress), shown, grace)
            stopped = run(agent)
        return _conclude(agent, stopped, logs)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskError(
            "the processes cannot be started",
            why=error.strerror,
            remedy="free some space in /dev/shm, where their semaphores lie, and on the disk of the run",
        ) from error
    finally:
        shutil.rmtree(store, ignore_errors=True)


def check_script(script: str, module: bool = False) -> None:
    """Raise UsageError where there is no such script or, with ``module``, no such module. Runs nothing of it."""
    if not module:
        path = Path(script)
        if not path.is_file() and not (path / "__main__.py").is_file():
            raise UsageError(f"there is no script '{script}'", remedy="give the path of a Python file, or -m MODULE")
        return
    parts = script.split(".")
    original = sys.path[:]
    sys.path[:] = [os.getcwd(), *original]
    try:
        spec = importlib.util.find_spec(parts[0]) if all(parts) else None
        for depth in range(2, len(parts) + 1):
            # The path finder looks without importing the packages above, which may be slow or do things.
            inside = spec.submodule_search_locations if spec else None
            spec = PathFinder.find_spec(".".join(parts[:depth]), inside) if inside else None
    finally:
        sys.path[:] = original
    if spec is None:
        raise UsageError(f"there is no module '{script}'", remedy="check the name and the current directory")


def run_script(script: str, argv: list[str], module: bool = False) -> None:
    """Run a script or module as ``__main__`` in this process, as ``python script …`` or ``python -m module …`` would.

    Args:
        script: path of the script, or name of the module.
        argv: its arguments, without its own name.
        module: whether ``script`` names a module.
    """
    sys.argv = [script, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    gc.freeze()
    child.at_last(_end_names)
    try:
        if module:
            kept = runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            kept = runpy.run_path(script, run_name="__main__")
    finally:
        # Much of what the script has made is freed now; a DDP model frees its group with it.
        child.let_go()
    del kept


def _end_names() -> None:
    """Free what a script has made as Python does at its end, name by name: so files that it left open are written."""
    # Threads that nobody waits for find these names gone; at Python's end they do not run any more.
    threading.excepthook = lambda _: None
    own = vars(sys.modules["__main__"])
    for names in gc.get_objects():
        if type(names) is dict and names.get("__name__") == "__main__" and names is not own:
            for name in names.keys() - {"__builtins__"}:
                names[name] = None
    gc.collect()


def _directories(logs: Path) -> Path:
    """Make the log directory and a private one for the store; returns the latter."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for old in logs.glob("rank*.log"):
            old.unlink()
        for kind in ("failure", "flight"):
            for old in logs.glob(f"{kind}-rank*"):
                old.unlink()
        return Path(tempfile.mkdtemp(prefix="tutti-store-"))
    except OSError as error:
        raise DiskError(
            "cannot make the directories of a run", where=str(error.filename or logs), why=error.strerror
        ) from error


def _settings(threads: int | None, timeout: float) -> dict[str, str]:
    """Environment of the workers; what the user has set stays."""
    settings = {
        "TUTTI_TIMEOUT": f"{timeout:g}",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in child.SIGNALS),
    }
    if threads is not None:
        settings["OMP_NUM_THREADS"] = str(threads)
    own = {"TUTTI_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    return {name: value for name, value in settings.items() if name in own or name not in os.environ}


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """End quietly on a signal until the agent has its own handlers, and put the caller's back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("processes are started from a thread", remedy="call launch from the main thread")
    before = {number: signal.signal(number, _leave_early) for number in child.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install and cannot put back.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _adopting() -> Iterator[None]:
    """What workers leave behind becomes this process's, which waits until it has ended."""
    adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(False)


def _leave_early(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _conclude(agent: Agent, stopped: signal.Signals | None, logs: Path) -> int:
    """The exit code of the run; tells the user of a failure."""
    failures = agent.failures()
    if stopped is not None:
        if ExitCode.PREEMPTED in agent.exit_codes():
            return int(ExitCode.PREEMPTED)
        return 128 + stopped
    if not failures:
        return int(ExitCode.DONE)
    cause = failure.root_cause(failures)
    if cause.exit_code not in failure.QUIET:
        print(failure.describe(cause, failure.log_path(logs, cause.rank)), file=sys.stderr, flush=True)
        if agent.exhausted:
            print(f"tutti: {agent.exhausted}", file=sys.stderr, flush=True)
    return cause.exit_code
