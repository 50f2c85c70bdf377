"""Playing faults on a run, one after the other, and seeing what becomes of it."""

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
from tutti.chaos.faults import LAUNCHER, Fault
from tutti.chaos.following import Follower, checkpoints, unfinished
from tutti.chaos.outcome import Outcome
from tutti.chaos.processes import Crew, Held, alive, crew, frozen, send
from tutti.errors import ExitCode, UsageError

POLL = 0.01
LEFT_BEHIND = 10.0
"""Seconds after the end of a run after which a process of it that still lives counts as left behind."""

_RESTARTS = ("kill", "corrupt", "terminate")


@dataclass(frozen=True)
class Rules:
    """How faults are played.

    Attributes:
        every: steps between checkpoints, where that is known.
        devices: numbers of devices, one of which a run is resumed on; none: as before.
        disk: directory on the disk to fill; None: the run directory's.
        leave: bytes that filling leaves free; None: half of what a checkpoint needs.
        most_filled: largest number of bytes to fill.
        seed: of the little that is drawn on the way.
    """

    every: int | None = None
    devices: Sequence[int] = ()
    disk: Path | None = None
    leave: int | None = None
    most_filled: int = MOST
    seed: int = 0

    def most_lost(self, fault: Fault, since_full: int | None = None) -> int | None:
        """Steps that a fault may cost: a checkpoint is still being written while training goes on up to the next.

        Args:
            fault: which.
            since_full: checkpoints that are there and were finished after the disk was full; None: it never was.
                Saves that failed then leave a gap, and nothing is promised of a fault that falls back over it.
        """
        if fault.kind in ("slow", "terminate"):
            return 0
        if self.every is None or fault.kind == "fill":
            return None
        if since_full is not None and since_full < (2 if fault.kind == "corrupt" else 1):
            return None
        return self.every * (3 if fault.kind == "corrupt" else 2)


class Play:
    """Faults played on one run.

    Attributes:
        follower: what the run has done.
        outcomes: one a fault that was played; fewer than faults where the run was over before.
        exit_code: with which the run ended; None while it goes on.
    """

    def __init__(self, run: Started | Running, rules: Rules) -> None:
        self._run, self._rules = run, rules
        self._dice = random.Random(rules.seed)
        self._fault: Fault | None = None
        self._crew = Crew()
        self._hold: Held | Ballast | None = None
        self._resumes = 0
        self._newest: Path | None = None
        # The newest checkpoint when the disk was last full.
        self._full: Path | None = None
        self._spoilt: set[tuple[Path, int]] = set()
        self.follower = Follower(run.directory)
        self.outcomes: list[Outcome] = []
        self.exit_code: int | None = None

    def play(self, faults: Sequence[Fault], tell: Callable[[int, Outcome], None] | None = None) -> None:
        """All of ``faults`` in order, then to the end of the run; one that is not ours is left when they are over.

        Args:
            faults: by step.
            tell: told of each when it is over, with its number.
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
        """Whether the run comes to ``step`` (0: to a checkpoint) before it ends."""
        while self._going():
            if self.follower.made and self.follower.step >= step and (step or checkpoints(self._run.directory)):
                return True
        return False

    def _going(self) -> bool:
        """Wait a moment and look; whether the run goes on, be it because it was resumed."""
        time.sleep(POLL)
        # In this order: what a run leaves at its end is seen before the end.
        self.exit_code = self._run.code()
        self.follower.poll()
        return self.exit_code is None or (self.exit_code != ExitCode.DONE and self._resumed(self.exit_code))

    def _resumed(self, code: int) -> bool:
        """Whether a run that has ended with ``code`` may do so because of the last fault, and was continued."""
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
            if self._newest and checkpoints(self._run.directory)[:1] < [self._newest]:
                outcome.broken.append("the old checkpoint is gone")
        if not isinstance(self._run, Started):
            return False
        outcome.resumed = True
        self._run.resume(self._dice.choice(self._rules.devices) if self._rules.devices else None)
        return True

    def _left_behind(self) -> list[str]:
        """Processes of the run that outlive it."""
        end = time.monotonic() + LEFT_BEHIND
        while self._crew.living() and time.monotonic() < end:
            time.sleep(POLL)
        return [f"rank {rank} outlives the run" for rank in self._crew.living()]

    def _strike(self, fault: Fault) -> bool:
        """Play one fault until it is over and training goes on, or the run has ended; False where it has before."""
        if not self._assemble():
            return False
        self._account()
        found = checkpoints(self._run.directory)
        self._fault, self._newest = fault, next(iter(found), None)
        self._resumes = len(self.follower.resumes)
        since_full = None if self._full is None else sum(path > self._full for path in found)
        most = self._rules.most_lost(fault, since_full)
        outcome = Outcome(str(fault), fault.kind, self.follower.step, most_lost=most)
        self.outcomes.append(outcome)
        victim = self._victim(fault)
        others = [process for process in self._crew.ranks.values() if process != victim] or [victim]
        scene = _Scene(fault, others, self.follower)
        self._act(fault, victim, outcome)
        while True:
            going = self._going()
            scene.look(outcome)
            if self._hold and scene.over():
                self._let_go()
                scene.quiet_from = self.follower.mark
            if not going or (self._hold is None and scene.settled()):
                break
        if self.exit_code == ExitCode.DONE and len(self.follower.resumes) == self._resumes and fault.kind != "fill":
            # Its processes have ended because it was over.
            outcome.noticed_seconds = None
            outcome.notes.append("the run was over before it could notice")
        self._account()
        return True

    def _assemble(self) -> bool:
        """Find all processes of the run; whether it goes on that long."""
        while len(self._crew.living()) < self._run.devices or not self._crew.ranks:
            self._crew = crew(self._run.directory, self._run.launcher)
            if not self._going():
                return False
        return True

    def _victim(self, fault: Fault) -> psutil.Process:
        """Whose process a fault concerns. Raises UsageError where that was started by another launcher than ours."""
        if fault.rank != LAUNCHER:
            return self._crew.ranks[fault.rank % len(self._crew.ranks)]
        if self._crew.launcher is None:
            raise UsageError("the launcher of this run is not known", remedy="name a rank instead")
        return self._crew.launcher

    def _act(self, fault: Fault, victim: psutil.Process, outcome: Outcome) -> None:
        if fault.kind == "fill":
            self._hold = Ballast(self._rules.disk or self._run.directory, self._leave(), self._rules.most_filled)
            outcome.notes.append(f"{self._hold.size} bytes filled")
        elif fault.kind in ("stop", "slow"):
            self._hold = Held(victim, fault.factor if fault.kind == "slow" else None)
        elif fault.kind == "terminate":
            send(victim, signal.SIGTERM)
        elif fault.kind == "kill":
            send(victim, signal.SIGKILL)
        else:
            # Nobody may write a newer checkpoint between the damage and the death.
            with frozen(self._crew.ranks.values()):
                outcome.notes.append(self._spoil())
                send(victim, signal.SIGKILL)

    def _spoil(self) -> str:
        """Damage the newest checkpoint, if there is an older one that is whole; what was done."""
        found = checkpoints(self._run.directory)
        whole = [path for path in found if (path, path.stat().st_ino) not in self._spoilt]
        if len(whole) < 2 or whole[0] != found[0]:
            return "no two whole checkpoints: killed only"
        self._spoilt.add((found[0], found[0].stat().st_ino))
        return f"{flip_any(found[0], self._dice)} flipped"

    def _leave(self) -> int:
        """Bytes to leave free: too few for another checkpoint, and enough for the run to say so."""
        if self._rules.leave is not None or self._newest is None:
            return self._rules.leave or 0
        return sum(file.stat().st_blocks * 512 for file in files(self._newest)) // 2

    def _let_go(self) -> None:
        if self._hold:
            if isinstance(self._hold, Ballast):
                self._full = next(iter(checkpoints(self._run.directory)), self._run.directory)
            self._hold.release()
            self._hold = None

    def _account(self) -> None:
        """Count what the last fault has cost so far."""
        if self.outcomes:
            outcome, resumes = self.outcomes[-1], self.follower.resumes[self._resumes :]
            outcome.lost_steps = sum(resume.lost for resume in resumes)
            outcome.restarts = max(0, len(resumes) - outcome.resumed)


class _Scene:
    """One fault while it is played: what is seen of it, and whether it is over.

    Attributes:
        quiet_from: the follower's mark after which a new step shows that training goes on.
    """

    def __init__(self, fault: Fault, others: Sequence[psutil.Process], follower: Follower) -> None:
        self._fault, self._others, self._follower = fault, others, follower
        self._resumes, self._warnings = len(follower.resumes), len(follower.warnings)
        self._begun = self._last = time.monotonic()
        self.quiet_from = self._mark = follower.mark

    def look(self, outcome: Outcome) -> None:
        now = time.monotonic()
        if self._follower.made and self._follower.mark != self._mark:
            outcome.stood_still_seconds = max(outcome.stood_still_seconds, now - self._last)
            self._mark, self._last = self._follower.mark, now
        if outcome.noticed_seconds is None and (self._said() or self._ended()):
            outcome.noticed_seconds = now - self._begun

    def over(self) -> bool:
        """Whether what is held may be let go. A disk stays full at least until the run has felt it."""
        late = self._fault.seconds is not None and time.monotonic() - self._begun >= self._fault.seconds
        return late and (self._said() or self._ended()) if self._fault.kind == "fill" else late or self._ended()

    def settled(self) -> bool:
        """Whether training goes on, in a new attempt where the fault has ended the old one."""
        if not self._follower.made or self._follower.mark == self.quiet_from:
            return False
        anew = self._fault.kind in _RESTARTS or self._ended()
        return not anew or len(self._follower.resumes) > self._resumes

    def _said(self) -> bool:
        return self._fault.kind == "fill" and len(self._follower.warnings) > self._warnings

    def _ended(self) -> bool:
        return not any(map(alive, self._others))
