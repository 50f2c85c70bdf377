"""The iterator over the batches of an epoch that a run gives to a script."""

from __future__ import annotations

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
