"""Run a job on an engine: start ranks, pass signals on, find the first cause, restart, shrink, grow. No torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from tutti.config.engine_config import WAIT
from tutti.config.verbosity import is_quiet
from tutti.errors import DiskError, ExitCode, PeerError, UsageError, counted
from tutti.launcher import failure
from tutti.launcher.budget import Budget
from tutti.launcher.engine import EndedRank, Engine, EngineGone, SlotsGone
from tutti.launcher.failure import Failure

ELASTIC_RESTARTS = 3
"""Restarts in a row without progress of a job that may shrink, unless ``--max-restarts`` says otherwise."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ASKED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_POLL = 0.05
_LOOK = 2.0
_KILLS = 2
_FAILED_STARTS = 5
# After a failure the other ranks mostly fail too, with records of their own.
_SETTLE = 1.0


@dataclass(frozen=True)
class EngineAttempt:
    """Record of one attempt of a job: from the start of all ranks to the end of the last one.

    Attributes:
        devices: number of ranks.
        nodes: node name → number of ranks on the node; empty if the engine was lost.
        started: Unix time of the start, in seconds.
        seconds: duration from the start to the end of the last rank.
        first_step: saved training step that the attempt continued from; 0 for none.
        ending: why the attempt ended: ``done``, ``more devices``, ``signal``, ``the engine was lost``, or the rank that
            failed first with its error.
    """

    devices: int
    nodes: Mapping[str, int]
    started: float
    seconds: float
    first_step: int
    ending: str


@dataclass(frozen=True)
class EngineJob:
    """Description of a job that ``supervise`` runs: command line, numbers of ranks, and number of restarts.

    Attributes:
        words: command line of every rank, behind the Python interpreter.
        sizes: numbers of ranks that the job can have, ascending. With several sizes the job shrinks when slots (places
            for a rank) are lost, and grows when there are more.
        logs: folder of the ranks' logs and failure records.
        restarts: greatest number of restarts in a row without progress.
        progress: returns a number that grows with saved progress, such as the step of the newest checkpoint; None:
            nothing is ever saved.
        wait: seconds to wait for another slot when a slot is lost.
        grace: seconds between a signal and SIGKILL.
        environment: additional environment variables of every rank.
        attempted: called with the record of each attempt when the attempt has ended, but not for an attempt whose ranks
            could not be started; None: not called.
        first_attempt: number of the first attempt; above 0 the run continues from its newest checkpoint.
        first_rank: number within the whole job of the engine's first rank, where other nodes start the other ranks.
    """

    words: Sequence[str]
    sizes: Sequence[int]
    logs: Path
    restarts: int = 0
    progress: Callable[[], int] | None = None
    wait: float = WAIT
    grace: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)
    attempted: Callable[[EngineAttempt], None] | None = None
    first_attempt: int = 0
    first_rank: int = 0


@dataclass(frozen=True)
class _Outcome:
    """How an attempt ended.

    Attributes:
        ended: the end of each rank.
        first: the first rank that failed; None if none has.
        grown: whether the ranks were ended to go on with more.
        killed: ranks that this process has killed after the grace period.
    """

    ended: Sequence[EndedRank]
    first: int | None
    grown: bool
    killed: frozenset[int] = frozenset()


def supervise(engine: Engine, job: EngineJob) -> int:
    """Run a job on an engine, which starts ranks on this node, over SSH, by Slurm or Ray; return the run's exit code.

    Blocks until the job has ended. When a rank fails, all ranks are ended, the first cause is printed, and the job is
    restarted, unless the cause would recur (such as wrong usage or missing data), as often as ``job.restarts`` allows,
    with the largest of ``job.sizes`` for which there are slots (places for a rank). When slots for a larger size become
    free, the ranks are ended by SIGTERM, on which they save, and as many as fit are started. A signal is passed on to
    all ranks once; a second signal kills the ranks. To be called in the main thread. The ranks' logs of an earlier run
    in ``job.logs`` are deleted first.

    Args:
        engine: starts, polls and ends the ranks.
        job: command line, permitted numbers of ranks, restarts and grace period.

    Returns:
        0 for success; the exit code of the rank whose failure caused the others; ``ExitCode.PREEMPTED`` (75) if too few
        slots are left, or the ranks saved and ended on a signal; or 128 + the number of the signal.

    Raises:
        UsageError: the engine has fewer slots than the smallest size.
        PeerError: the engine does not answer any more, or has failed to start the ranks six times in a row.
        SystemExit: a second signal came; the code is 128 + its number.
        DiskError: a log cannot be written, or an old one not deleted.
        Exception: another exception of the engine's methods propagates.
    """
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
        for old in job.logs.glob("rank*.log"):
            old.unlink()
    except OSError as error:
        raise DiskError("cannot write logs", where=str(job.logs), why=error.strerror) from error
    with _signals() as asked:
        try:
            return _Supervisor(engine, job, asked).run()
        except EngineGone as gone:
            raise PeerError(str(gone), remedy="start the command again with --resume when it is back") from gone
        finally:
            engine.stop(signal.SIGKILL)


def describe_slots(slots: Mapping[str, int]) -> str:
    """Return free slots (places for a rank) in words, for messages: their sum, and the number on each node.

    Args:
        slots: node name → number of free slots.

    >>> describe_slots({"a": 2, "b": 1, "c": 0})
    '3: 2 on a, 1 on b'
    >>> describe_slots({"a": 0, "b": 0}), describe_slots({})
    ('none free on a, b', 'none, and no node')
    """
    if not sum(slots.values()):
        return f"none free on {', '.join(slots)}" if slots else "none, and no node"
    return f"{sum(slots.values())}: {', '.join(f'{count} on {node}' for node, count in slots.items() if count)}"


class _Supervisor:
    """Makes the attempts of one job, each on as many slots as there are, until the job ends."""

    def __init__(self, engine: Engine, job: EngineJob, asked: list[int]) -> None:
        self._engine, self._job, self._asked = engine, job, asked
        self._budget = Budget(job.restarts, job.progress)
        self._progress = job.progress or (lambda: 0)
        self._kills = Counter[str]()
        self._killed_at = self._progress()
        self._withheld = 0
        self._unstarted = ""

    def run(self) -> int:
        """Run the job, and return its exit code."""
        size, attempt, failed_starts = self._first_size(), self._job.first_attempt, 0
        while True:
            outcome, code = self._recorded_attempt(size, attempt)
            attempt += 1
            if code is None and self._asked:
                code = self._asked_code(outcome)
            if code is not None:
                return code
            failed_starts = failed_starts + 1 if outcome is None else 0
            if failed_starts > 1:
                # The engine may count slots of a lost node until it notices the loss.
                self._sleep(_LOOK)
            found = self._await_slots(size) if failed_starts <= _FAILED_STARTS else None
            if self._asked:
                return self._asked_code(outcome)
            if found is None and failed_starts > _FAILED_STARTS and self._unstarted:
                raise PeerError(
                    f"the ranks could not be started {failed_starts} times in a row",
                    why=self._unstarted,
                    remedy="mend the node, and start the command again with --resume",
                )
            if found is None:
                self._say_too_few_slots()
                return int(ExitCode.PREEMPTED)
            if found != size:
                self._tell(f"tutti: going on with {counted(found, 'device')} instead of {size}")
            size = found

    def _recorded_attempt(self, size: int, attempt: int) -> tuple[_Outcome | None, int | None]:
        """Make one attempt and record it.

        Returns:
            How the attempt ended, None if the slots were gone before it started; and the job's exit code, None if the
            job goes on.
        """
        started, saved = time.time(), self._progress()
        try:
            outcome = self._attempt(size, attempt)
        except EngineGone:
            self._note(EngineAttempt(size, {}, started, time.time() - started, saved, "the engine was lost"))
            raise
        if outcome is None:
            return None, None
        seconds = time.time() - started
        code, ending = self._judge(outcome)
        nodes = dict(Counter(ended.node for ended in outcome.ended))
        self._note(EngineAttempt(size, nodes, started, seconds, saved, ending))
        return outcome, code

    def _say_too_few_slots(self) -> None:
        least, saved = self._job.sizes[0], self._progress()
        self._say(
            f"tutti: the run needs {counted(least, 'device')}, and there are {describe_slots(self._engine.slots())}. "
            + (f"The run is saved at step {saved}; start" if saved else "Start")
            + " the command again with --resume when there are more."
        )

    def _judge(self, outcome: _Outcome) -> tuple[int | None, str]:
        """Return the exit code of an attempt, None if the job goes on, and why the attempt ended."""
        if outcome.grown:
            return None, "more devices"
        if outcome.first is None or self._asked:
            return self._asked_code(outcome), "signal" if self._asked else "done"
        cause = self._cause(outcome)
        place = f" on {cause.node}" if cause.node else ""
        ending = f"rank {cause.rank}{place} {cause.message.splitlines()[0] if cause.message else cause.kind}"
        restart = None if failure.is_final(cause) else self._budget.spend()
        if cause.exit_code not in failure.QUIET and not self._is_said(cause):
            # The engine shows its first rank's output on the terminal.
            log = None if cause.rank == self._job.first_rank else failure.log_path(self._job.logs, cause.rank)
            self._say(failure.describe_failure(cause, log))
        if restart is None:
            if not failure.is_final(cause) and self._budget.describe():
                self._say(f"tutti: {self._budget.describe()}")
            return cause.exit_code, ending
        self._withhold(cause, outcome)
        self._tell(f"tutti: {restart.describe()}")
        self._sleep(restart.pause)
        return None, ending

    def _is_said(self, cause: Failure) -> bool:
        """Return whether the first rank has told the terminal of a usage error, which is the same on every rank."""
        first = failure.read_failure([self._job.logs], self._job.first_rank)
        return first is not None and all(
            each.kind == UsageError.__name__ and each.message == cause.message and each.step is None
            for each in (cause, first)
        )

    def _withhold(self, cause: Failure, outcome: _Outcome) -> None:
        """Use one slot fewer from now on if ranks of one node are killed twice in a row without progress."""
        ended = outcome.ended[cause.rank - self._job.first_rank]
        if len(self._job.sizes) == 1 or ended.lost or ended.code != -signal.SIGKILL:
            return
        saved = self._progress()
        if saved > self._killed_at:
            self._killed_at = saved
            self._kills.clear()
        self._kills[ended.node] += 1
        if self._kills[ended.node] == _KILLS:
            self._kills.clear()
            self._withheld += 1
            self._tell(
                f"tutti: ranks on {ended.node} were killed {_KILLS} times without progress: one slot is left empty"
            )

    def _note(self, attempt: EngineAttempt) -> None:
        if self._job.attempted is not None:
            self._job.attempted(attempt)

    def _first_size(self) -> int:
        slots = self._engine.slots()
        size = self._largest(sum(slots.values()))
        if size is None:
            least = self._job.sizes[0]
            raise UsageError(
                f"the run needs {counted(least, 'slot')}, and there are {describe_slots(slots)}",
                remedy="give fewer devices, or add nodes" if least > 1 else "add a node, or wait for a free one",
            )
        return size

    def _largest(self, room: int) -> int | None:
        """Return the largest size that fits on ``room`` slots; None if none does."""
        return max((size for size in self._job.sizes if size <= room), default=None)

    def _room(self) -> int:
        """Return the number of free slots that may be used."""
        return sum(self._engine.slots().values()) - self._withheld

    def _attempt(self, size: int, attempt: int) -> _Outcome | None:
        """Run all ranks once; None if the slots for them were gone before they started."""
        first = self._job.first_rank
        failure.clear([self._job.logs], range(first, first + self._job.sizes[-1]))
        environment = {**self._job.environment, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        try:
            self._engine.start(size, self._job.words, environment)
            return self._watch(size)
        except SlotsGone as gone:
            self._unstarted = str(gone)
            return None
        finally:
            self._engine.stop(signal.SIGKILL)

    def _watch(self, size: int) -> _Outcome:
        """Wait for all ranks, and end them together when one has failed, a signal came or there are more slots."""
        first, deadline, term, killed = None, float("inf"), float("inf"), frozenset[int]()
        passed, saved, look, grown = 0, None, time.monotonic() + _LOOK, False
        while None in (ended := self._engine.poll()):
            now = time.monotonic()
            if len(self._asked) > passed:
                number = self._asked[passed]
                passed += 1
                if passed > 1:
                    raise SystemExit(128 + number)
                self._engine.stop(number)
                deadline = min(deadline, now + self._job.grace)
            first = _first_failed(ended) if first is None else first
            if first is not None and deadline == float("inf"):
                # In a run that was asked to stop, other ranks may still be saving, and a second signal would end them.
                orderly = _code(ended[first]) in _ASKED
                term = float("inf") if orderly else now + _SETTLE
                deadline = now + self._job.grace
            if now > term:
                self._engine.stop(signal.SIGTERM)
                term = float("inf")
            if now > deadline:
                killed |= frozenset(rank for rank, each in enumerate(ended) if each is None)
                self._engine.stop(signal.SIGKILL)
            if now > look and deadline == float("inf") and size < self._job.sizes[-1]:
                look = now + _LOOK
                if (self._largest(size + self._room()) or 0) <= size:
                    saved = None
                elif saved is None:
                    saved = self._progress()
                elif self._progress() > saved:
                    # The signal makes the ranks save once more, so that no step is lost.
                    grown, deadline = True, now + self._job.grace
                    self._engine.stop(signal.SIGTERM)
            time.sleep(_POLL)
        whole = [each for each in ended if each is not None]
        first = _first_failed(whole) if first is None else first
        grown = grown and all(_code(each) == ExitCode.PREEMPTED for each in whole)
        return _Outcome(whole, first, grown, killed)

    def _await_slots(self, wanted: int) -> int | None:
        """Wait until ``wanted`` slots are free, at most ``wait`` seconds; return the largest size that fits by then."""
        end = time.monotonic() + self._job.wait
        wanted = min(wanted, self._job.sizes[-1] - self._withheld)
        while (room := self._room()) < wanted and time.monotonic() < end and not self._asked:
            time.sleep(min(0.5, self._job.wait))
        return self._largest(room)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._asked:
            time.sleep(_POLL)

    def _cause(self, outcome: _Outcome) -> Failure:
        """Return the failure that caused the others; a lost slot comes before all."""
        found = []
        now = time.time()
        # Ranks that were killed here or were asked to save are no cause while another rank failed by itself.
        asked = {rank for rank, ended in enumerate(outcome.ended) if ended.code == 0 or _code(ended) in _ASKED}
        own = set(range(len(outcome.ended))) - outcome.killed - asked
        for place, ended in enumerate(outcome.ended):
            if own and place not in own:
                continue
            rank = self._job.first_rank + place
            if ended.lost:
                found.append(Failure(rank, 0.0, "", ended.lost, int(ExitCode.PEER), remedy=ended.remedy, signal=9))
            elif ended.code:
                death = failure.from_death(rank, ended.code, now - (place == outcome.first))
                # Without a shared disk, an exception is in the rank's output alone.
                message = death.message if ended.code < 0 else f"ended with exit code {ended.code}"
                death = replace(death, message=ended.why or message, remedy=ended.remedy or death.remedy)
                found.append(replace(failure.read_failure([self._job.logs], rank) or death, node=ended.node))
        return failure.root_cause(found)

    def _asked_code(self, outcome: _Outcome | None) -> int:
        """Return the exit code of a job that ended without a failure, or because a signal asked for it."""
        codes = {_code(ended) for ended in outcome.ended} if outcome else {int(ExitCode.PREEMPTED)}
        if not self._asked or codes == {0}:
            return int(ExitCode.DONE)
        return int(ExitCode.PREEMPTED) if ExitCode.PREEMPTED in codes else 128 + self._asked[0]

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _tell(self, text: str) -> None:
        """Say what is no error: nothing with ``-q``."""
        if not is_quiet(os.environ):
            self._say(text)


def _first_failed(ended: Sequence[EndedRank | None]) -> int | None:
    return next((rank for rank, each in enumerate(ended) if each is not None and each.code), None)


def _code(ended: EndedRank | None) -> int:
    code = 0 if ended is None else ended.code
    return 128 - code if code < 0 else code


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Within the block, collect signals in the list that it yields; a third one raises SystemExit at once."""
    seen: list[int] = []

    def take(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) > 2:
            raise SystemExit(128 + number)

    before = {number: signal.signal(number, take) for number in _SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
