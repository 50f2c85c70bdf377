"""Launch the ranks of one node, and run a user's script in them. Imports torch only when it starts processes."""

from __future__ import annotations

import errno
import gc
import importlib.util
import logging
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tutti.config.watchdog_limits import TIMEOUT, WatchdogLimits
from tutti.device import is_compiled_in
from tutti.errors import DiskError, ExitCode, UsageError, counted
from tutti.launcher import child, failure
from tutti.launcher.budget import Budget
from tutti.launcher.elastic_driver import ElasticDriver, ElasticOptions
from tutti.launcher.held_signals import held_signals
from tutti.launcher.orphans import adopt_orphans
from tutti.python_compat import import_uncollected

if TYPE_CHECKING:
    from tutti.launcher.agent import Agent

OPTIMIZER_MODULES = ("torch._dynamo",)
"""Modules that every optimizer of PyTorch imports when it is made, which takes nearly a second."""

log = logging.getLogger("tutti.launcher")


def launch(
    entry: Callable[..., None],
    args: tuple[Any, ...],
    *,
    processes: int,
    logs: Path,
    timeout: float = TIMEOUT,
    show_all: bool = False,
    restarts: int = 0,
    progress: Callable[[], int] | None = None,
    limits: WatchdogLimits | None = None,
    grace: float = 30.0,
    preload: Collection[str] = (),
    elastic: ElasticOptions | None = None,
) -> int:
    """Run ``entry(*args)`` in local processes, the ranks of a job, and return the run's exit code.

    Blocks until all ranks have ended, restarts included. Ranks are forked after one import of torch and of ``preload``.
    Their environment has torchrun's variables, ``TUTTI_STORE`` (path of a file store that only this user can open) and
    ``TUTTI_TIMEOUT``. Rank 0 keeps the terminal, the other ranks write to ``logs/rank{N}.log``. When a rank fails, all
    are ended, and the first cause is printed on standard error. A signal is passed on once; ranks that run on after
    ``grace`` seconds are killed, and a second signal kills at once.

    Args:
        entry: called in every rank.
        args: arguments of ``entry``.
        processes: number of ranks.
        logs: directory for logs and failure records; made if missing. Such files of an earlier run are deleted.
        timeout: seconds that ranks may wait for each other in a collective.
        show_all: show the output of ranks above 0 too, as ``[rank 3] …``; also by ``TUTTI_LOG_RANKS=all``.
        restarts: how often in a row to restart all ranks after a failure without progress; none follows a failure that
            would recur, such as wrong usage or missing data.
        progress: function without arguments that returns a number which grows with saved progress, such as the step of
            the newest checkpoint; None: nothing is ever saved.
        limits: how long a rank may make no progress before its watchdog kills it; None: the default limits.
        grace: seconds between a signal and SIGKILL.
        preload: modules that every rank imports, imported here before the fork. Not imported here if torch is built for
            an accelerator, which must not be touched before a fork.
        elastic: limits of an elastic job, whose number of ranks changes while it runs, and which ``processes`` and
            ``restarts`` do not limit; None: all ranks start and end together.

    Returns:
        0 if all ranks have succeeded, not counting ranks that were killed while the run went on without them; else the
        exit code of the failure that caused the others, a member of ``tutti.errors.ExitCode`` or the code that the rank
        gave to ``sys.exit``; ``PREEMPTED`` (75) if the ranks saved and ended on a signal; or 128 + the number of the
        signal that stopped the run. With ``elastic`` one rank that succeeds is enough for 0.

    Raises:
        UsageError: fewer than one process, called outside the main thread, or the host discovery script of ``elastic``
            fails or prints a malformed line.
        DiskError: the log or store directory cannot be made, or there is no space to start processes.
        ImportError: a module of ``preload`` cannot be imported; other errors of its code pass through.
        SystemExit: a signal came before the ranks were started; the code is 128 + its number.
    """
    if processes < 1:
        raise UsageError(f"cannot start {processes} processes", remedy="give a whole number of at least 1")
    store = _directories(logs)
    shown = show_all or os.environ.get("TUTTI_LOG_RANKS") == "all"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, cores // processes)
    each = (
        "OMP_NUM_THREADS"
        if threads is None
        else f"{threads} CPU threads, as this process may use {counted(cores, 'core')}"
    )
    log.info("%s, each with %s; logs are in %s", counted(processes, "process"), each, logs)
    job = child.Job(entry, args, logs.absolute(), store, os.getpid(), threads, limits or WatchdogLimits(), shown)
    try:
        with environment_set(_settings(threads, timeout)), _signal_handlers(), _adopting():
            with held_signals(child.SIGNALS):
                import_uncollected(["tutti.launcher.agent"])
                from tutti.launcher.agent import Agent, run_agent

                if not is_compiled_in():
                    import_uncollected(preload)
            if elastic is not None:
                return ElasticDriver(job, elastic, grace).run()
            agent = Agent(job, processes, Budget(restarts, progress), grace)
            stopped = run_agent(agent)
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
    """Raise UsageError if a script or module does not exist; run none of its code.

    Args:
        script: path of a Python file or of a directory with ``__main__.py``; with ``module`` a dotted module name,
            which is looked up from the working directory.
        module: whether ``script`` names a module.

    Raises:
        UsageError: the script or module does not exist.
    """
    if not module:
        path = Path(script)
        if not path.is_file() and not (path / "__main__.py").is_file():
            python = re.fullmatch(r"(.*/)?python[\d.]*", script) is not None
            remedy = "leave out the word python" if python else "give the path of a Python file, or -m MODULE"
            raise UsageError(f"there is no script '{script}'", remedy=remedy)
        return
    parts = script.split(".")
    original = sys.path[:]
    sys.path[:] = [os.getcwd(), *original]
    try:
        spec = importlib.util.find_spec(parts[0]) if all(parts) else None
        for depth in range(2, len(parts) + 1):
            # The path finder does not import parent packages, which may be slow or have side effects.
            inside = spec.submodule_search_locations if spec else None
            spec = PathFinder.find_spec(".".join(parts[:depth]), inside) if inside else None
    finally:
        sys.path[:] = original
    if spec is None:
        raise UsageError(f"there is no module '{script}'", remedy="check the name and the current directory")


def run_script(script: str, argv: list[str], module: bool = False) -> None:
    """Run a script or module as ``__main__`` in this process, as ``python script …`` or ``python -m module …`` would.

    Returns when the script ends, with the script's global objects freed; exceptions of the script are passed on. Sets
    ``sys.argv`` and ``sys.path[0]``. To be called once, as the last work of a process.

    Args:
        script: path of the script, or name of the module.
        argv: arguments of the script, without its own name.
        module: whether ``script`` names a module.
    """
    sys.argv = [script, *argv]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if module else str(Path(script).resolve().parent)
    gc.freeze()
    child.register_last(_end_names)
    warn_of_lone_training(script)
    try:
        if module:
            kept = runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            kept = runpy.run_path(script, run_name="__main__")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "horovod":
            error.add_note(f"tutti runs scripts of Horovod without it: tutti run --horovod -np N {script}")
        raise
    finally:
        # The script's objects are freed now, such as a DDP model with its process group.
        child.drain_gloo()
    del kept


def _end_names() -> None:
    """Delete a script's globals as Python does at interpreter exit, so that files left open are flushed."""
    # Daemon threads find these names gone; at interpreter exit they would not run any more.
    threading.excepthook = lambda _: None
    own = vars(sys.modules["__main__"])
    for names in gc.get_objects():
        if type(names) is dict and names.get("__name__") == "__main__" and names is not own:
            for name in names.keys() - {"__builtins__"}:
                names[name] = None
    gc.collect()


def _directories(logs: Path) -> Path:
    """Make and clean the log directory; make a private directory for the store and return it."""
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
            "cannot make the directories of a run",
            where=str(error.filename or logs),
            why=error.strerror,
            remedy="choose a folder that you may write, with --logs of tutti run",
        ) from error


def _settings(threads: int | None, timeout: float) -> dict[str, str]:
    """Return the ranks' environment variables; the user's take precedence, but for the timeout and signals."""
    settings = {
        "TUTTI_TIMEOUT": f"{timeout:g}",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in child.forwarded_signals()),
    }
    if threads is not None:
        settings["OMP_NUM_THREADS"] = str(threads)
    own = {"TUTTI_TIMEOUT", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    return {name: value for name, value in settings.items() if name in own or name not in os.environ}


@contextmanager
def environment_set(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process within a ``with`` block, and restore them after it.

    Args:
        settings: values by name.
    """
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
    """Exit quietly on a signal until the agent installs its handlers; restore the caller's handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("launch is called outside the main thread", remedy="call it from the main thread")
    before = {number: signal.signal(number, _leave_early) for number in child.forwarded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None stands for a handler that Python did not install and cannot put back.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, this process adopts orphans of its ranks, to reap them."""
    adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(False)


def _leave_early(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _conclude(agent: Agent, stopped: signal.Signals | None, logs: Path) -> int:
    """Print the first cause of a failure and return the run's exit code."""
    failures = agent.failures()
    if stopped is not None:
        if ExitCode.PREEMPTED in agent.exit_codes():
            return int(ExitCode.PREEMPTED)
        return 128 + stopped
    if not failures:
        return int(ExitCode.DONE)
    cause = failure.root_cause(failures)
    if cause.exit_code not in failure.QUIET:
        print(failure.describe_failure(cause, failure.log_path(logs, cause.rank)), file=sys.stderr, flush=True)
        if agent.exhausted:
            print(f"tutti: {agent.exhausted}", file=sys.stderr, flush=True)
    return cause.exit_code


def warn_of_lone_training(script: str) -> None:
    """Let rank 0 print a warning at its first optimizer step if the script has not joined the ranks by then.

    Each of several ranks then trains the whole model alone. A script joins them by ``tutti.init`` (which
    ``tutti.prepare`` calls) or ``torch.distributed``. To be called in every rank before the script runs; registers a
    hook in rank 0. Does nothing with one rank, or in a process without torch: ``tutti run`` imports torch before it
    forks the ranks, other launchers do not. Not collective.

    Args:
        script: name of the script, for the message.
    """
    if os.environ.get("RANK") != "0" or os.environ.get("WORLD_SIZE", "1") == "1" or "torch" not in sys.modules:
        return
    from torch import distributed
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tutti.launcher import context

    def warn(optimizer: Any, args: Any, kwargs: Any) -> None:
        first.remove()
        if not context.is_initialized() and not distributed.is_initialized():
            print(
                f"tutti: warning: {script} trains without tutti and without torch.distributed, so that each of"
                f" {os.environ['WORLD_SIZE']} processes trains the whole model by itself. Give tutti.prepare the model,"
                " optimizer and data set, or start one process.",
                file=sys.stderr,
                flush=True,
            )

    first = register_optimizer_step_pre_hook(warn)
