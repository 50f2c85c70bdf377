"""Choose the steps at the turn of epochs in which a script's code is checked again, as in the first steps of a run."""

from __future__ import annotations

from tutti.data.reader import Position

FIRST = 5
"""First steps of a run, in which the checks of values that pass from step to step act by themselves."""
_ALL = 2
"""First steps of a run, in which all checks act by themselves."""
_TURNS = 4
"""Turns of epochs that are all checked (a guess)."""
_STEPS_EACH = 192
"""Steps of a run for each later turn that is checked: at most one step in 64 is checked (a guess)."""


class WatchWindows:
    """Decides in which steps at the turn of an epoch the code for a step is checked, beside the first steps of a run.

    Where an epoch begins, scripts begin to do something else: a loss gets a second term, a memory bank that has filled
    is read, a teacher's average starts. A window is the last step of an epoch, which leaves values behind, and the
    first two of the next one; the first two steps of a run are in none. All turns of epochs within the first five steps
    have a window, so have the next four, and later ones as long as no more than one step in 64 is in a window. The
    choice depends on data positions and the number of steps alone, so that it is the same on all ranks.

    Attributes:
        is_open: whether the present step is in a window.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._steps = self._windows = 0
        # The epoch before which the last window may be, and whether there is one.
        self._turn, self._chosen = -1, False

    def begin_step(self, after: Position | None) -> None:
        """Begin a step, and set ``is_open``. Not collective.

        Args:
            after: the data position once the step's batch is consumed; None for a batch that the caller made, which is
                in no window.
        """
        self._steps += 1
        self.is_open = False
        if self._steps <= _ALL or after is None or after.batch > 2 or after.epoch == 0:
            return
        if self._steps <= FIRST:
            self.is_open = True
            return
        if after.epoch != self._turn:
            self._turn = after.epoch
            self._chosen = self._windows < _TURNS or self._steps >= self._windows * _STEPS_EACH
            self._windows += self._chosen
        self.is_open = self._chosen


def is_watched_step(step: int) -> bool:
    """Return whether the checks of kept values run in a step: in steps 1 to 5, 2ᵏ and 2ᵏ + 1.

    The step after 2ᵏ is among them because a check may need values that it has recorded in the step before.

    Args:
        step: number of the step, from 1.
    """
    return step <= FIRST or not step & (step - 1) or not (step - 1) & (step - 2)
