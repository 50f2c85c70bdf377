"""Restart budget of a run: a number of restarts in a row without progress; progress resets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tutti.errors import counted

_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Restart:
    """Decision to restart a failed run, as ``Budget.spend`` returns it.

    Attributes:
        pause: seconds to wait before the restart: 0, 1, 2, 4, … with each further failure in a row without progress, at
            most 30.
        left: number of restarts that are still allowed after this restart if no further progress is saved.
        saved: the saved step that the run resumes from; 0 if nothing is saved.
    """

    pause: float
    left: int
    saved: int

    def describe(self) -> str:
        """Return the user's message about this restart of a failed run, in one line.

        It says how many restarts are left, and in parentheses the pause (unless 0) and the saved step from which the
        run goes on (unless nothing is saved), as in ``restarting, 2 restarts left (in 1 s, from step 10)``.
        """
        more = [f"in {self.pause:g} s"] * bool(self.pause) + [f"from step {self.saved}"] * bool(self.saved)
        return f"restarting, {counted(self.left, 'restart')} left" + (f" ({', '.join(more)})" if more else "")


class Budget:
    """Decides whether a failed run is restarted: limits the number of restarts in a row without saved progress.

    Args:
        restarts: restarts allowed in a row without progress.
        progress: function without arguments that returns a number which grows with saved progress, such as the step of
            the newest checkpoint; called by the constructor and at each ``spend``. None: nothing is ever saved.

    >>> saved = iter([0, 10, 10, 10, 20, 20])
    >>> budget = Budget(2, lambda: next(saved))
    >>> [(restart.pause, restart.left) if restart else None for restart in (budget.spend() for _ in range(5))]
    [(0.0, 1), (1.0, 0), None, (0.0, 1), (1.0, 0)]
    """

    def __init__(self, restarts: int, progress: Callable[[], int] | None = None) -> None:
        self._restarts, self._progress = restarts, progress or (lambda: 0)
        self._saved = self._progress()
        self._failures = 0

    @property
    def left(self) -> int:
        """Number of restarts of the run that are still allowed if no further progress is saved."""
        return max(0, self._restarts - self._failures)

    def spend(self) -> Restart | None:
        """Count a failure of the run and decide whether to restart it.

        Progress saved since the last failure restores the full number of restarts first. Does not wait.

        Returns:
            The restart to make: ``pause`` (seconds for which the caller must sleep before it), ``left`` (number of
            restarts left after it) and ``saved`` (the saved step to resume from; 0: none). None if no restart is left.
        """
        saved = self._progress()
        if saved > self._saved:
            self._saved, self._failures = saved, 0
        self._failures += 1
        if self._failures > self._restarts:
            return None
        pause = min(2.0 ** (self._failures - 2), _LONGEST_PAUSE) if self._failures > 1 else 0.0
        return Restart(pause, self.left, self._saved)

    def describe(self) -> str:
        """Return the message that tells the user why a failed run is not restarted; empty if no restart was allowed.

        It has the number of failures since the last saved step, and the limit, ``--max-restarts``.
        """
        if not self._restarts:
            return ""
        since = f"since step {self._saved} was saved" if self._saved else "before anything was saved"
        return f"not restarted: {counted(self._failures, 'failure')} {since}, and --max-restarts is {self._restarts}"
