"""The iterator over the batches of an epoch that a run gives to a script."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from tutti.errors import UsageError
from tutti.types.micro_batch import Batch


class EpochBatches(Iterator[Batch]):
    """Iterates once over an epoch, and has the length of the ``DataLoader`` that it replaces.

    The length is the number of the epoch's global batches, on any number of devices, also where the loop's body runs
    once for each of several micro-batches: schedules that are computed from it count updates.

    Args:
        batches: the batches or micro-batches of this rank.
        steps: returns the number of the epoch's global batches, or raises UsageError if it is unknown.
    """

    def __init__(self, batches: Iterator[Batch], steps: Callable[[], int]) -> None:
        self._batches, self._steps = batches, steps

    @staticmethod
    def check_number(number: object, call: str) -> None:
        """Raise UsageError if a script's number of an epoch is not an integer of at least 0.

        Every object with ``__index__`` counts as an integer, such as a NumPy integer.

        Args:
            number: the argument with which the script calls the method ``call``.
            call: name of the method, such as ``run.epoch``, for the message.
        """
        try:
            right = operator.index(number) >= 0  # type: ignore[arg-type]
        except TypeError:
            right = False
        if not right:
            shown = repr(number) if isinstance(number, int | float | str) else f"of type {type(number).__name__}"
            raise UsageError(
                f"the number of the epoch is {shown}",
                where=call,
                remedy=f"write for epoch in range(3): for batch in {call}(epoch):",
            )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        """Return the number of the epoch's global batches; raises TypeError, as ``len`` does, if it is unknown."""
        try:
            return self._steps()
        except UsageError as error:
            raise TypeError(str(error)) from error
