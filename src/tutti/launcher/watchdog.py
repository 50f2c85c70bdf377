"""Watchdog: a small process beside each rank that kills the rank when it makes no progress, and reports where.

The rank records phase and heartbeats in shared memory (``tutti.launcher.heartbeat``), which the watchdog polls. A rank
that waits in a collective still beats, because it polls meanwhile: only the rank that blocks the others stands still.
Time in which the watchdog itself did not run (a suspended job, an overloaded machine) does not count. No torch.
"""

from __future__ import annotations

import atexit
import gc
import math
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tutti.config.watchdog_limits import TIMEOUT, WatchdogLimits
from tutti.errors import ExitCode
from tutti.launcher import dumps, failure, heartbeat
from tutti.launcher.dumps import Dumps
from tutti.launcher.failure import Failure
from tutti.launcher.forking import fork
from tutti.launcher.heartbeat import Phase, Seen
from tutti.launcher.orphans import await_end, die_with_parent

# A rank that waits in a collective starts to poll, and so to beat, after two seconds.
_LOOKING_AROUND = 4.0
# Native code that waits for other ranks gives up by itself, a minute after tutti's own limit.
_MEETING = 60.0
_IGNORED = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2")
_INNERMOST = 8
# The report may get stuck where the rank is stuck, such as on a dead disk.
_REPORT_WITHIN, _END_WITHIN = 20.0, 1.0
_LIMIT_OF = {
    Phase.START: "start",
    Phase.DATA: "step",
    Phase.COMPUTE: "step",
    Phase.WAITING: "step",
    Phase.EVALUATE: "start",
    Phase.SAVE: "save",
    Phase.REPORT: "save",
    Phase.END: "start",
}
_WHEN = {
    Phase.EVALUATE: "in the evaluation after",
    Phase.SAVE: "in the save of",
    Phase.REPORT: "after",
    Phase.END: "after",
}


def phase_limit(limits: WatchdogLimits, phase: int) -> float:
    """Return the seconds for which a rank may stay in a phase without progress before its watchdog kills it.

    - ``START``, ``EVALUATE``, ``END``: ``limits.start``.
    - ``DATA``, ``COMPUTE``: ``limits.step``; ``WAITING`` (in a collective that polls): 4 seconds more.
    - ``SAVE``, ``REPORT``: ``limits.save``.
    - ``CONNECTING`` (making process groups, in native code): twice the job's timeout for collectives, plus a minute.
    - ``IDLE``: infinite.

    Args:
        limits: seconds for start, step and save; None stands for the job's timeout for collectives, 0 for no limit
            (infinite).
        phase: phase of training in which the rank is, an integer constant of ``heartbeat.Phase``, such as
            ``Phase.COMPUTE``.
    """
    wait = heartbeat.process.timeout() or TIMEOUT
    if phase == Phase.IDLE:
        return math.inf
    if phase == Phase.CONNECTING:
        return 2 * wait + _MEETING
    limit = {"start": limits.start, "step": limits.step, "save": limits.save}[_LIMIT_OF[phase]]
    limit = wait if limit is None else limit
    return (limit or math.inf) + _LOOKING_AROUND * (phase == Phase.WAITING)


def polling_interval(limits: WatchdogLimits) -> float:
    """Return the seconds between two readings of a rank's heartbeats by its watchdog process.

    A twentieth of the shortest time for which the rank may stay in a phase without progress, at most 1.

    Args:
        limits: seconds for start, step and save, from which ``phase_limit`` computes the limit of each phase; None
            stands for the job's timeout for collectives, 0 for no limit.
    """
    return min(1.0, min(phase_limit(limits, phase) for phase in range(len(Phase.NAMES))) / 20)


@dataclass(frozen=True)
class Stall:
    """Observation of a rank that makes no progress.

    Attributes:
        seen: phase, step and collective call that the rank last recorded in its heartbeats.
        seconds: duration without progress.
        stopped: whether a signal had stopped the process.
        background: whether the stuck thread is the one that writes checkpoints.
    """

    seen: Seen
    seconds: float
    stopped: bool = False
    background: bool = False

    def describe(self, place: str | None) -> str:
        """Return a sentence for the user that says for how long and in which step and phase a rank made no progress.

        The sentence does not name the rank: it begins with ``made no progress for``.

        Args:
            place: innermost stack frame of the stuck thread, as ``dumps.place_of`` gives it; None: unknown.
        """
        phase = self.seen.phase
        when = "at the start" if not self.seen.step else f"{_WHEN.get(phase, 'in')} step {self.seen.step}"
        if self.background:
            when = f"in the save of step {self.seen.step}"
        call = f": {self.seen.text}" if self.seen.text else ""
        how = ", stopped by a signal" if self.stopped else f", in {place}" if place else ""
        return f"made no progress for {self.seconds:.0f} s {when} (phase {Phase.NAMES[phase]}{call}){how}"

    def remedy(self) -> str:
        """Return advice for the user about a rank that the watchdog kills, as a phrase without a full stop.

        For a rank that a signal had stopped: to look for who stopped it. Otherwise: the option that raises the limit of
        the rank's phase, in case the rank was only slow.
        """
        if self.stopped:
            return "look for who stopped it"
        name = _LIMIT_OF.get(self.seen.phase)
        option = f"--{name}-timeout (TUTTI_{name.upper()}_TIMEOUT)" if name else "--timeout"
        return f"if it was not stuck, raise {option}"


class Watch:
    """Detects that a rank makes no progress: adds up the time since the last heartbeat of each of its threads.

    A rank has two such threads: the one that trains, and the one that writes checkpoints in the background. The
    watchdog process calls ``look`` every ``polling_interval`` seconds.

    Args:
        limits: seconds for start, step and save, from which ``phase_limit`` computes the limit of each phase.
    """

    def __init__(self, limits: WatchdogLimits) -> None:
        self._limits = limits
        self._lanes = {lane: (lane.seen(), 0.0) for lane in (heartbeat.training, heartbeat.saving)}
        self._stopped = 0.0

    def look(self, passed: float, stopped: bool) -> Stall | None:
        """Read the rank's heartbeats once; return the stall if the rank made no progress for longer than allowed.

        The limit depends on the phase that the rank has recorded (``phase_limit``). A rank that a signal has stopped
        may stay so for the limit of the compute phase.

        Args:
            passed: seconds since the last call, without time in which the watchdog process itself did not run; added to
                the time without progress.
            stopped: whether a signal has stopped the rank.

        Returns:
            A ``Stall``: ``seen`` (phase, step and call that the thread recorded last), ``seconds`` without progress,
            ``stopped``, and ``background`` (whether the stalled thread is the one that writes checkpoints); None if no
            limit is exceeded.
        """
        self._stopped = self._stopped + passed if stopped else 0.0
        if self._stopped >= phase_limit(self._limits, Phase.COMPUTE):
            return Stall(heartbeat.training.seen(), self._stopped, stopped=True)
        for lane, (before, quiet) in self._lanes.items():
            seen = lane.seen()
            quiet = quiet + passed if seen == before else 0.0
            self._lanes[lane] = seen, quiet
            if quiet >= phase_limit(self._limits, seen.phase):
                return Stall(seen, quiet, stopped, background=lane is heartbeat.saving)
        return None


_guard: tuple[int, int] | None = None
_tools: Dumps | None = None
_limits = WatchdogLimits()


def start_watchdog(rank: int, limits: WatchdogLimits, *, launched: bool = False) -> None:
    """Fork a watchdog process that kills this rank when it makes no progress; a second call does nothing.

    Call it early: the fork inherits all memory that the process has by then. Forks nothing if all ``limits`` are 0
    (never), or without ``os.fork``.

    Args:
        rank: this process's rank, for messages.
        limits: how long each phase may last without progress.
        launched: whether tutti's launcher reports to the user; else the watchdog does, on standard error.

    Raises:
        OSError: the process cannot be forked.
    """
    global _guard, _tools, _limits
    if _guard is None:
        _limits = limits
    if _guard is not None or limits.never or not hasattr(os, "fork"):
        return
    memory = memoryview(mmap.mmap(-1, heartbeat.SIZE))
    heartbeat.beat_into(memory)
    _tools, parent = Dumps(), os.getpid()
    # The parent-death signal is bound to the forking thread, which must not end before the process does.
    bound = threading.current_thread() is threading.main_thread()
    pid = fork()
    if not pid:
        _run(rank, limits, _tools, parent, bound, launched)
    _guard = pid, parent
    atexit.register(stop_watchdog)


def save_limit() -> float:
    """Return the seconds for which a save of this rank may make no progress; infinite where the limit is off.

    It is the limit that ``start_watchdog`` was given, or the default before that call.
    """
    return phase_limit(_limits, Phase.SAVE)


def stop_watchdog() -> None:
    """Kill the watchdog process that ``start_watchdog`` forked, and wait up to one second for its end.

    Does nothing in a process without a watchdog, or in a fork of the rank. Called at the end of the process.
    """
    global _guard
    guard, _guard = _guard, None
    if guard is not None and guard[1] == os.getpid():
        with suppress(ProcessLookupError):
            os.kill(guard[0], signal.SIGKILL)
        await_end(guard[0], _END_WITHIN)


def keep_flights(rank: int, recorder: Callable[[], bytes]) -> None:
    """Let this rank's watchdog save the rank's last collectives (a flight recording) before killing the rank.

    Starts a thread, which writes the recording to ``flight-rankN.json`` beside the logs when the watchdog requests it.
    To be called after ``start_watchdog``: without a watchdog, and in a second call, it does nothing.

    Args:
        rank: this process's rank.
        recorder: returns the recording, as the bytes of the file.
    """
    global _tools
    tools, _tools = _tools, None

    def target() -> Path | None:
        directory = heartbeat.process.directory()
        return None if directory is None else failure.flight_path(directory, rank)

    if tools is not None:
        tools.answer(recorder, target)
        heartbeat.process.set_recorder()


def _run(rank: int, limits: WatchdogLimits, tools: Dumps, parent: int, bound: bool, launched: bool) -> NoReturn:
    """Main function of the watchdog process."""
    try:
        # No object inherited from the rank may be finalised, flushed or freed here.
        gc.disable()
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        _close_all_but({*tools.descriptors} | (set() if launched else {2}))
        with suppress(OSError):
            # The process name that ps and top show.
            Path("/proc/self/comm").write_text("tutti-watchdog")
        if bound:
            die_with_parent(parent=parent)
        stall = _watch(limits, parent)
        if stall is not None:
            reporter = threading.Thread(target=_report, args=(rank, stall, tools, parent, launched), daemon=True)
            reporter.start()
            reporter.join(_REPORT_WITHIN)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
    finally:
        os._exit(0)


def _watch(limits: WatchdogLimits, parent: int) -> Stall | None:
    """Poll the process ``parent`` until it stalls; return the stall, or None if the process has ended."""
    watch, now = Watch(limits), time.monotonic()
    while os.getppid() == parent:
        time.sleep(pause := polling_interval(limits))
        before, now = now, time.monotonic()
        stall = watch.look(min(now - before, 2 * pause), dumps.is_stopped(parent))
        if stall is not None:
            return stall
    return None


def _report(rank: int, stall: Stall, tools: Dumps, parent: int, launched: bool) -> None:
    """Dump the rank's stacks and last collectives, and write its failure record."""
    for lane in (heartbeat.training, heartbeat.saving):
        lane.give_up()
    stacks = tools.stacks(parent)
    frames = dumps.lines_of(stacks, stall.seen.thread)
    if frames and "/torch/distributed/" in frames[0]:
        # The rank waits for another one in a collective without heartbeats: the watchdog there names the cause first.
        time.sleep(_LOOKING_AROUND)
    directory, log = heartbeat.process.directory(), _log(rank)
    if directory is not None:
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
    flight = failure.flight_path(directory, rank) if directory and heartbeat.process.has_recorder() else None
    dumped = flight is not None and tools.flight(flight)
    found = Failure(
        rank=rank,
        time=time.time(),
        kind="",
        message=stall.describe(dumps.place_of(frames)),
        exit_code=int(ExitCode.PEER),
        traceback="\n".join(frames[:_INNERMOST]),
        step=stall.seen.step or None,
        remedy=f"The stacks of all its threads are in {log or 'its output'}"
        + (f", its last collectives in {flight}" if dumped else "")
        + f"; {stall.remedy()}.",
        signal=int(signal.SIGKILL),
    )
    _append(log, f"tutti: rank {rank} {found.message}; the stacks of all its threads:\n{stacks}")
    if directory is not None:
        failure.write_failure((directory,), found)
    if not launched:
        os.write(2, f"{failure.describe_failure(found, log)}\n".encode())


def _log(rank: int) -> Path | None:
    directory = heartbeat.process.directory()
    return None if directory is None else failure.log_path(directory, rank)


def _append(log: Path | None, text: str) -> None:
    """Append to the log if there is one, else write to standard error."""
    with suppress(OSError):
        if log is None:
            os.write(2, text.encode())
            return
        with log.open("a", encoding="utf-8") as file:
            file.write(text)


def _close_all_but(kept: set[int]) -> None:
    """Close every descriptor but ``kept``; standard streams that are not kept lead to the null device."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in {0, 1, 2} - kept:
        os.dup2(nothing, number)
    for number in {int(name) for name in os.listdir("/dev/fd")} - kept - {0, 1, 2}:
        with suppress(OSError):
            os.close(number)
