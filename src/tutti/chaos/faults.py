"""Plan faults: draw kinds, steps and ranks from a seed before the run starts. Injects nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tutti.errors import ExitCode, UsageError, counted

Kind = Literal["kill", "stop", "slow", "terminate", "corrupt", "fill"]
"""kill: SIGKILL. stop: SIGSTOP, then SIGCONT. slow: SIGSTOP and SIGCONT in turn. terminate: SIGTERM to the launcher.
corrupt: flip one bit of the newest checkpoint, then SIGKILL. fill: fill the disk of the run directory."""

LAUNCHER = -1
"""Stands in place of a rank for the process that started the ranks."""

KILLED = -9
"""``subprocess`` return code of a process that SIGKILL ended."""


@dataclass(frozen=True)
class Fault:
    """One fault that is planned for a training run.

    Attributes:
        kind: kind of fault, such as ``kill`` or ``fill``.
        step: inject the fault once the run has made this step; 0: as soon as there is a checkpoint.
        rank: rank whose process is the target, or ``LAUNCHER``.
        seconds: duration of the kinds ``stop``, ``slow`` and ``fill``; None: to the end of the run.
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
        """Return the non-zero exit codes with which a run may end because of this fault.

        A run that ends with one of them can be continued with ``--resume``.

        Returns:
            For ``terminate`` 75 (preempted), for ``fill`` 8 (disk), and for ``slow`` none, because the run must go on.
            For ``kill``, ``stop`` and ``corrupt``: -9 (``subprocess``'s code after SIGKILL) alone if the target is the
            launcher; 5 (a peer is lost) and -9 if it is a rank, because a run of one process has no launcher that turns
            SIGKILL into an exit code.
        """
        if self.kind in ("slow", "terminate", "fill"):
            orderly = {"slow": (), "terminate": (ExitCode.PREEMPTED,), "fill": (ExitCode.DISK,)}
            return frozenset(map(int, orderly[self.kind]))
        # A run in one process has no launcher that could turn SIGKILL into an exit code.
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
"""Faults that a soak draws from, by name; it draws ranks and steps, too."""


def draw_faults(
    fault: Fault,
    *,
    step: int | Literal["random"],
    rank: int | Literal["random"],
    times: int,
    ranks: int,
    total: int | None,
    seed: int,
) -> tuple[Fault, ...]:
    """Plan one kind of fault ``times`` times in a run, at multiples of ``step`` or at random steps.

    Args:
        fault: gives ``kind``, ``seconds`` and ``factor`` of every planned fault; its ``step`` and ``rank`` are
            replaced.
        step: training step of the first fault and distance between faults; 0: as soon as the run has a checkpoint, for
            a single fault; ``random``: distinct steps from 1 on. Late steps are drawn only if there are more faults
            than other steps: the last 100 or 5 % of the run, if that is more; in a run of less than 200 steps the
            second half.
        rank: target rank, or ``LAUNCHER`` (-1), the run's launcher process; ``random``: a rank drawn for each fault.
        times: number of faults.
        ranks: number of processes of the run.
        total: steps of the whole run; None if unknown, which random steps do not allow.
        seed: seed of steps and ranks.

    Returns:
        The faults in increasing order of steps; the same for the same arguments. Multiples of ``step`` are not compared
        with ``total``, so that faults may lie beyond the run's end.

    Raises:
        UsageError: there is no such rank; ``step`` is 0 for several faults; or ``step`` is ``random`` and ``total`` is
            None or not larger than ``times``.
    """
    if rank != "random" and not LAUNCHER <= rank < ranks:
        raise UsageError(f"there is no rank {rank}", remedy=f"the run has ranks 0 to {ranks - 1}")
    if step != "random" and times > 1 and step == 0:
        raise UsageError(
            "only one fault can be injected at the first checkpoint", remedy="give --at-step a number, or random"
        )
    dice = random.Random(seed)
    steps = _random_steps(times, total, dice) if step == "random" else [step * (n + 1) for n in range(times)]
    return tuple(replace(fault, step=at, rank=dice.randrange(ranks) if rank == "random" else rank) for at in steps)


def draw_soak(kinds: Sequence[str], *, count: int, ranks: int, total: int | None, seed: int) -> tuple[Fault, ...]:
    """Plan faults of several kinds at distinct random steps of a run.

    The kinds are shuffled; their counts differ by at most one. Steps in the last 5 % of the run, or among its last 100
    (in a run of less than 200 steps: in its second half), are drawn only if there are more faults than other steps.

    >>> [f"{fault} at {fault.step}" for fault in draw_soak(["kill", "terminate"], count=3, ranks=2, total=100, seed=0)]
    ['kill rank 1 at 3', 'kill rank 1 at 17', 'terminate at 33']

    Args:
        kinds: kinds of fault, at least one of ``kill``, ``launcher`` (kill the launcher), ``stop``, ``slow``,
            ``terminate``, ``corrupt`` and ``fill``.
        count: number of faults.
        ranks: number of processes of the run.
        total: steps of the whole run; None if unknown, which is an error.
        seed: seed of kinds, steps and ranks.

    Returns:
        ``count`` faults in increasing order of steps, each with kind, step and target rank; the same for the same
        arguments.

    Raises:
        UsageError: ``total`` is None, or not larger than ``count``.
        KeyError: there is no such kind.
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
        raise UsageError(
            f"there is no room for {counted(count, 'fault')} in {counted(total, 'step')}",
            remedy="give fewer, or a longer run",
        )
    # An observer from outside may be late: the last steps are reserved for the effects of the last fault.
    last = max(count, total - max(total // 20, min(100, total // 2)))
    return sorted(dice.sample(range(1, last + 1), count))


def duty(factor: float, period: float = 0.1) -> Iterator[tuple[bool, float]]:
    """Yield for ever the phases in which to stop and to continue a process, so that it becomes slower.

    Each period begins with ``period * (1 - 1 / factor)`` seconds of stand-still, followed by ``period / factor``
    seconds in which the process runs, so that it becomes ``factor`` times slower.

    Args:
        factor: slowdown, greater than 1.
        period: seconds of one stop and the run that follows.

    Yields:
        Whether the process runs in the phase, and the seconds of the phase.

    >>> from itertools import islice
    >>> list(islice(duty(4.0, 1.0), 3))
    [(False, 0.75), (True, 0.25), (False, 0.75)]
    """
    while True:
        yield False, period * (1 - 1 / factor)
        yield True, period / factor
