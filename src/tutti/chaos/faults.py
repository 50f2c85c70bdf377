"""What goes wrong, and when: drawn from a seed before anything is started. Nothing here acts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tutti.errors import ExitCode, UsageError

Kind = Literal["kill", "stop", "slow", "terminate", "corrupt", "fill"]
"""kill: SIGKILL. stop: SIGSTOP, then SIGCONT. slow: both in turn. terminate: SIGTERM to the launcher. corrupt: one
bit of the newest checkpoint, then SIGKILL. fill: the disk of the run directory."""

LAUNCHER = -1
"""In place of a rank: the process that started the ranks."""

KILLED = -9
"""How a process ended, as ``subprocess`` says it, that got SIGKILL."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: what is done.
        step: it is done once the run has made this step; 0: as soon as there is a checkpoint.
        rank: to whose process, or ``LAUNCHER``.
        seconds: how long stop, slow and fill last; None: to the end of the run.
        factor: how many times slower a slowed process runs.
    """

    kind: Kind
    step: int = 0
    rank: int = LAUNCHER
    seconds: float | None = None
    factor: float = 5.0

    def __str__(self) -> str:
        if self.kind in ("terminate", "fill"):
            return self.kind
        return f"{self.kind} {'the launcher' if self.rank == LAUNCHER else f'rank {self.rank}'}"

    def ends(self) -> frozenset[int]:
        """Exit codes other than 0 with which a run may end that meets this fault, to be resumed."""
        if self.kind in ("slow", "terminate", "fill"):
            orderly = {"slow": (), "terminate": (ExitCode.PREEMPTED,), "fill": (ExitCode.DISK,)}
            return frozenset(map(int, orderly[self.kind]))
        # A run in one process has no launcher that could turn its death into a code.
        return frozenset({KILLED} if self.rank == LAUNCHER else {ExitCode.PEER, KILLED})


SOAK: dict[str, Fault] = {
    "kill": Fault("kill", rank=0),
    "launcher": Fault("kill", rank=LAUNCHER),
    "stop": Fault("stop", rank=0, seconds=0.3),
    "slow": Fault("slow", rank=0, seconds=0.3, factor=5.0),
    "terminate": Fault("terminate"),
    "corrupt": Fault("corrupt", rank=0),
    "fill": Fault("fill", seconds=0.0),
}
"""What a soak draws from, by name; ranks and steps are drawn too."""


def draw(
    fault: Fault,
    *,
    step: int | Literal["random"],
    rank: int | Literal["random"],
    times: int,
    ranks: int,
    total: int | None,
    seed: int,
) -> tuple[Fault, ...]:
    """``fault`` several times in one run: at multiples of ``step`` or at random ones, in order.

    Args:
        fault: kind, length and factor.
        step: of the first; ``random``: anywhere in the run.
        rank: whose process; ``random``: drawn each time.
        times: how often.
        ranks: processes of the run.
        total: steps of the whole run, where known.
        seed: what is drawn follows from it alone.

    Raises:
        UsageError: no such rank, random steps of a run of unknown length, or more faults than steps.
    """
    if rank != "random" and not LAUNCHER <= rank < ranks:
        raise UsageError(f"there is no rank {rank}", remedy=f"the run has ranks 0 to {ranks - 1}")
    if step != "random" and times > 1 and step == 0:
        raise UsageError("only one fault can meet the first checkpoint", remedy="give --at-step a number, or random")
    dice = random.Random(seed)
    steps = _random_steps(times, total, dice) if step == "random" else [step * (n + 1) for n in range(times)]
    return tuple(replace(fault, step=at, rank=dice.randrange(ranks) if rank == "random" else rank) for at in steps)


def soak(kinds: Sequence[str], *, count: int, ranks: int, total: int | None, seed: int) -> tuple[Fault, ...]:
    """``count`` faults at random steps of a run, every kind as often as any other, to within one.

    >>> [f"{fault} at {fault.step}" for fault in soak(["kill", "terminate"], count=3, ranks=2, total=100, seed=0)]
    ['kill rank 1 at 3', 'kill rank 1 at 17', 'terminate at 33']

    Raises UsageError for more faults than steps.
    """
    dice = random.Random(seed)
    names = [kinds[n % len(kinds)] for n in range(count)]
    dice.shuffle(names)
    return tuple(
        _placed(SOAK[name], step, ranks, dice)
        for name, step in zip(names, _random_steps(count, total, dice), strict=True)
    )


def _placed(fault: Fault, step: int, ranks: int, dice: random.Random) -> Fault:
    return replace(fault, step=step, rank=LAUNCHER if fault.rank == LAUNCHER else dice.randrange(ranks))


def _random_steps(count: int, total: int | None, dice: random.Random) -> list[int]:
    if total is None:
        why = "how many steps the run has is known only once its data are loaded"
        remedy = "give the run --steps, or add --verify, or give --at-step a number"
        raise UsageError("random steps cannot be drawn", why=why, remedy=remedy)
    if count >= total:
        raise UsageError(f"{count} faults do not fit into {total} steps", remedy="give fewer, or a longer run")
    # Somebody who watches from outside may be late: the last steps are left for what the last fault brings.
    last = max(count, total - max(total // 20, min(100, total // 2)))
    return sorted(dice.sample(range(1, last + 1), count))


def duty(factor: float, period: float = 0.1) -> Iterator[tuple[bool, float]]:
    """For ever: whether a process runs, and for how many seconds, so that it is ``factor`` times slower.

    >>> from itertools import islice
    >>> list(islice(duty(4.0, 1.0), 3))
    [(False, 0.75), (True, 0.25), (False, 0.75)]
    """
    while True:
        yield False, period * (1 - 1 / factor)
        yield True, period / factor
