"""How often a run may start again: so many times in a row without progress, and anew after each progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_LONGEST_PAUSE = 30.0


@dataclass(frozen=True)
class Restart:
    """One more attempt.

    Attributes:
        pause: seconds to wait before it: 0, 1, 2, 4 … with each failure in a row that came before any progress.
        left: restarts that are left after it, unless there is progress.
        saved: what the run goes on from; 0 where nothing is saved.
    """

    pause: float
    left: int
    saved: int

    def describe(self) -> str:
        """What the user reads."""
        more = [f"in {self.pause:g} s"] * bool(self.pause) + [f"from step {self.saved}"] * bool(self.saved)
        return f"starting again, {self.left} restarts left" + (f" ({', '.join(more)})" if more else "")


class Budget:
    """Counts failures without progress.

    Args:
        restarts: how many may follow each other.
        progress: a number that grows with what is saved for good; None: nothing is ever saved.

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
        """Restarts that are left, unless there is progress."""
        return max(0, self._restarts - self._failures)

    def spend(self) -> Restart | None:
        """After a failure: the restart that follows, None where there have been too many without progress."""
        saved = self._progress()
        if saved > self._saved:
            self._saved, self._failures = saved, 0
        self._failures += 1
        if self._failures > self._restarts:
            return None
        pause = min(2.0 ** (self._failures - 2), _LONGEST_PAUSE) if self._failures > 1 else 0.0
        return Restart(pause, self.left, self._saved)

    def describe(self) -> str:
        """Why there is no further restart; nothing where none was allowed."""
        if not self._restarts:
            return ""
        since = f"since step {self._saved} was saved" if self._saved else "before anything was saved"
        return f"not started again: {self._failures} failures {since}, and --max-restarts is {self._restarts}"
