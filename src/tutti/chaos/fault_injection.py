"""Inject faults into a run, one after the other, and observe their outcomes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tutti.chaos.ballast import MOST, Ballast
from tutti.chaos.command import Running, Started
from tutti.chaos.damage import files, flip_any
from tutti.chaos.fault_outcome import FaultOutcome
from tutti.chaos.faults import LAUNCHER, Fault
from tutti.chaos.following import Follower, checkpoints, saved_step, unfinished
from tutti.chaos.processes import RunProcesses, StoppedProcess, alive, find_processes, frozen, send
from tutti.errors import FINISHED, UsageError

POLL = 0.01
"""Seconds between two looks at a run's progress."""
LEFT_BEHIND = 10.0
"""Seconds after the end of a run after which a rank that is still alive counts as left behind."""

_RESTARTS = ("kill", "corrupt", "terminate")


@dataclass(frozen=True)
class Rules:
    """Options of injecting faults into a training run.

    Attributes:
        every: steps between checkpoints; None if unknown.
        devices: numbers of devices from which each resume draws one; empty: as many devices as before.
        disk: directory on the file system that a ``fill`` fault fills; None: the run directory.
        leave: bytes that a ``fill`` fault leaves free; None: half the size of a checkpoint.
        most_filled: largest number of bytes that a ``fill`` fault allocates.
        seed: seed of the choice of flipped bits and of numbers of devices.
    """

    every: int | None = None
    devices: Sequence[int] = ()
    disk: Path | None = None
    leave: int | None = None
    most_filled: int = MOST
    seed: int = 0

    def most_lost(self, fault: Fault, since_full: int | None = None) -> int | None:
        """Return the largest number of training steps that a run may have to repeat after an injected fault.

        It is two checkpoint intervals for a run that is killed or stopped, because a checkpoint may still be being
        written while training goes on up to the next, and three for a ``corrupt`` fault, which damages the newest
        checkpoint.

        Args:
            fault: the fault, of which only the kind counts.
            since_full: number of checkpoints that were finished since a ``fill`` fault ended; None: the disk was never
                full.

        Returns:
            Number of steps; 0 for ``slow`` and ``terminate``. None if no limit is promised: for ``fill``; for an
            unknown checkpoint interval (``every``); and if ``since_full`` is 0 (for ``corrupt``: 0 or 1), because the
            run may have to resume from a checkpoint that is older than the failed saves of the full disk.
        """
        if fault.kind in ("slow", "terminate"):
            return 0
        if self.every is None or fault.kind == "fill":
            return None
        if since_full is not None and since_full < (2 if fault.kind == "corrupt" else 1):
            return None
        return self.every * (3 if fault.kind == "corrupt" else 2)


class FaultInjection:
    """Injects faults into one training run, resumes the run if a fault ends it, and records the outcomes.

    Args:
        run: the run, started by this process or by another.
        rules: options of injecting faults.

    Attributes:
        follower: progress of the run.
        outcomes: one outcome for each fault that was injected; fewer than planned if the run ended early.
        exit_code: exit code of the run; None while it goes on.
    """

    def __init__(self, run: Started | Running, rules: Rules) -> None:
        self._run, self._rules = run, rules
        self._dice = random.Random(rules.seed)
        self._fault: Fault | None = None
        self._processes = RunProcesses()
        self._hold: StoppedProcess | Ballast | None = None
        self._resumes = 0
        self._newest: Path | None = None
        # The newest checkpoint at the time when the disk was last full.
        self._full: int | None = None
        self._spoilt: set[tuple[Path, int]] = set()
        self.follower = Follower(run.directory)
        self.outcomes: list[FaultOutcome] = []
        self.exit_code: int | None = None

    def inject(self, faults: Sequence[Fault], tell: Callable[[int, FaultOutcome], None] | None = None) -> None:
        """Inject faults into a training run in order, resume the run each time one ends it, and record ``outcomes``.

        To resume is to start the run again with ``tutti train --resume``. A run that this process started is resumed
        at most once after each fault, if its exit code is one with which this fault may end it (``Fault.ends``); it is
        not resumed if it ends before the first fault. Blocks until the run has ended. A run of another process is never
        resumed, and is left running after the last fault. Faults that are left when the run ends are not injected. At
        the end, also after an exception, a stopped process is continued and a filled disk emptied. Sets ``outcomes`` (a
        ``FaultOutcome`` for each injected fault) and ``exit_code`` of the run.

        Args:
            faults: faults sorted by step.
            tell: called after each fault with its number, from 1, and its outcome.

        Raises:
            UsageError: a fault is for the launcher, which is not known, or would fill more bytes than the rules permit.
            DiskError: the disk cannot be filled.
        """
        try:
            for fault in faults:
                if not (self._reach(fault.step) and self._strike(fault)):
                    return
                if tell:
                    tell(len(self.outcomes), self.outcomes[-1])
            while isinstance(self._run, Started) and self._going():
                pass
        finally:
            self._let_go()
            self._account()

    def _reach(self, step: int) -> bool:
        """Wait for ``step`` (0: for a checkpoint); return False if the run ends first."""
        while self._going():
            if self.follower.made and self.follower.step >= step and (step or checkpoints(self._run.directory)):
                return True
        return False

    def _going(self) -> bool:
        """Wait ``POLL`` seconds and read the run's progress; return whether the run goes on, or was resumed."""
        time.sleep(POLL)
        # The exit code first: lines that the run wrote before its end are then read before the end is handled.
        self.exit_code = self._run.code()
        self.follower.poll()
        return self.exit_code is None or (self.exit_code not in FINISHED and self._resumed(self.exit_code))

    def _resumed(self, code: int) -> bool:
        """Resume a run that ended with ``code``, if the last fault permits that code; return whether it was resumed."""
        self._let_go()
        outcome = self.outcomes[-1] if self.outcomes else None
        if self._fault is None or outcome is None:
            return False
        if outcome.exit_code is not None or code not in self._fault.ends():
            outcome.broken.append(f"the run ended with exit code {code}")
            return False
        outcome.exit_code = code
        outcome.broken += self._left_behind()
        if self._fault.kind == "fill":
            outcome.broken += [f"{path.name} was left" for path in unfinished(self._run.directory)]
            if self._newest and self._saved() < saved_step(self._newest):
                outcome.broken.append("the old checkpoint is gone")
        if not isinstance(self._run, Started):
            return False
        outcome.resumed = True
        self._run.resume(self._dice.choice(self._rules.devices) if self._rules.devices else None)
        return True

    def _saved(self) -> int:
        """Return the step of the newest checkpoint; -1 if there is none."""
        return max(map(saved_step, checkpoints(self._run.directory)), default=-1)

    def _left_behind(self) -> list[str]:
        """Wait up to ``LEFT_BEHIND`` seconds; return one sentence for each rank that outlives the run."""
        end = time.monotonic() + LEFT_BEHIND
        while self._processes.living() and time.monotonic() < end:
            time.sleep(POLL)
        return [f"rank {rank} outlives the run" for rank in self._processes.living()]

    def _strike(self, fault: Fault) -> bool:
        """Inject one fault and wait until training goes on or the run ends; return False if the run ended before it."""
        if not self._assemble():
            return False
        self._account()
        found = checkpoints(self._run.directory)
        self._fault, self._newest = fault, next(iter(found), None)
        self._resumes = len(self.follower.resumes)
        since_full = None if self._full is None else sum(saved_step(path) > self._full for path in found)
        most = self._rules.most_lost(fault, since_full)
        outcome = FaultOutcome(str(fault), fault.kind, self.follower.step, most_lost=most)
        self.outcomes.append(outcome)
        victim = self._victim(fault)
        others = [process for process in self._processes.ranks.values() if process != victim] or [victim]
        progress = _FaultInProgress(fault, others, self.follower)
        self._act(fault, victim, outcome)
        while True:
            going = self._going()
            progress.look(outcome)
            if self._hold and progress.over():
                self._let_go()
                progress.quiet_from = self.follower.mark
            if not going or (self._hold is None and progress.settled()):
                break
        if self.exit_code in FINISHED and len(self.follower.resumes) == self._resumes and fault.kind != "fill":
            # The processes ended because the run was complete.
            outcome.noticed_seconds = None
            outcome.notes.append("the run was over before it could notice")
        self._account()
        return True

    def _assemble(self) -> bool:
        """Find all processes of the run; return False if the run ends first."""
        while len(self._processes.living()) < self._run.devices or not self._processes.ranks:
            self._processes = find_processes(self._run.directory, self._run.launcher)
            if not self._going():
                return False
        return True

    def _victim(self, fault: Fault) -> psutil.Process:
        """Return the process that is the target of a fault. Raises UsageError if the target is an unknown launcher."""
        if fault.rank != LAUNCHER:
            return self._processes.ranks[fault.rank % len(self._processes.ranks)]
        if self._processes.launcher is None:
            raise UsageError("the launcher of this run is not known", remedy="name a rank instead")
        return self._processes.launcher

    def _act(self, fault: Fault, victim: psutil.Process, outcome: FaultOutcome) -> None:
        if fault.kind == "fill":
            self._hold = Ballast(self._rules.disk or self._run.directory, self._leave(), self._rules.most_filled)
            outcome.notes.append(f"{self._hold.size} bytes filled")
        elif fault.kind in ("stop", "slow"):
            self._hold = StoppedProcess(victim, fault.factor if fault.kind == "slow" else None)
        elif fault.kind == "terminate":
            send(victim, signal.SIGTERM)
        elif fault.kind == "kill":
            send(victim, signal.SIGKILL)
        else:
            # The ranks are stopped so that none writes a newer checkpoint between the damage and SIGKILL.
            with frozen(self._processes.ranks.values()):
                outcome.notes.append(self._spoil())
                send(victim, signal.SIGKILL)

    def _spoil(self) -> str:
        """Flip a bit of the newest checkpoint if an older undamaged one exists; return a note for the report."""
        found = checkpoints(self._run.directory)
        whole = [path for path in found if (path, path.stat().st_ino) not in self._spoilt]
        if len(whole) < 2 or whole[0] != found[0]:
            return "no two whole checkpoints: killed only"
        self._spoilt.add((found[0], found[0].stat().st_ino))
        return f"{flip_any(found[0], self._dice)} flipped"

    def _leave(self) -> int:
        """Return the bytes to leave free: too few for another checkpoint, enough for the run's warning about it."""
        if self._rules.leave is not None or self._newest is None:
            return self._rules.leave or 0
        return sum(file.stat().st_blocks * 512 for file in files(self._newest)) // 2

    def _let_go(self) -> None:
        if self._hold:
            if isinstance(self._hold, Ballast):
                self._full = self._saved()
            self._hold.release()
            self._hold = None

    def _account(self) -> None:
        """Update lost steps and restarts of the last fault."""
        if self.outcomes:
            outcome, resumes = self.outcomes[-1], self.follower.resumes[self._resumes :]
            outcome.lost_steps = sum(resume.lost for resume in resumes)
            outcome.restarts = max(0, len(resumes) - outcome.resumed)


class _FaultInProgress:
    """Observe the run during one fault: the time until it notices, its stand-still, and whether the fault is over.

    Args:
        fault: the fault.
        others: ranks other than the target; their end shows that the run noticed.
        follower: progress of the run.

    Attributes:
        quiet_from: the follower's mark after which a new step shows that training goes on.
    """

    def __init__(self, fault: Fault, others: Sequence[psutil.Process], follower: Follower) -> None:
        self._fault, self._others, self._follower = fault, others, follower
        self._resumes, self._warnings = len(follower.resumes), len(follower.warnings)
        self._begun = self._last = time.monotonic()
        self.quiet_from = self._mark = follower.mark

    def look(self, outcome: FaultOutcome) -> None:
        """Update the outcome's stand-still, and the time until the run noticed."""
        now = time.monotonic()
        if self._follower.made and self._follower.mark != self._mark:
            outcome.stood_still_seconds = max(outcome.stood_still_seconds, now - self._last)
            self._mark, self._last = self._follower.mark, now
        if outcome.noticed_seconds is None and (self._said() or self._ended()):
            outcome.noticed_seconds = now - self._begun

    def over(self) -> bool:
        """Return whether to release the stopped process or the disk; a disk stays full until the run has noticed it."""
        late = self._fault.seconds is not None and time.monotonic() - self._begun >= self._fault.seconds
        return late and (self._said() or self._ended()) if self._fault.kind == "fill" else late or self._ended()

    def settled(self) -> bool:
        """Return whether training goes on; if the fault ended the attempt, in a new one."""
        if not self._follower.made or self._follower.mark == self.quiet_from:
            return False
        anew = self._fault.kind in _RESTARTS or self._ended()
        return not anew or len(self._follower.resumes) > self._resumes

    def _said(self) -> bool:
        return self._fault.kind == "fill" and len(self._follower.warnings) > self._warnings

    def _ended(self) -> bool:
        return not any(map(alive, self._others))
