"""Refuse code that takes a batch of a second DataLoader, such as one of unlabelled samples, for every micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tutti.errors import UsageError, script_line
from tutti.python_compat import LiveObjects
from tutti.torch_compat import LoaderIterator, loader_position
from tutti.types.micro_batch import LossFn

if TYPE_CHECKING:
    from tutti.train.run import Run

_ITERATORS = LiveObjects(LoaderIterator)
_WATCHED = 2
"""Global batches in which DataLoaders are looked at; each look takes tens of milliseconds."""


class LoaderWatch:
    """Raises UsageError where code that runs for each micro-batch takes batches of a DataLoader of the script's own.

    In plain PyTorch the loop's body runs once for each update, and takes one batch of the second loader. On a device
    with several micro-batches it would take as many, so that the result would depend on the number of devices. A loss
    function of ``run.step`` is called more often still, for checks. Not collective.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._batches = run, 0
        self._before: dict[LoaderIterator, int] | None = None
        self._taken: set[LoaderIterator] | None = None

    def begin_batch(self) -> None:
        """Begin a global batch of a custom training loop: count it, and forget which DataLoaders the last one used.

        The first two global batches are checked, and those at the turn of an epoch (``WatchWindows``).
        """
        self._batches += 1
        self._taken = None

    def begin_body(self, several: bool) -> None:
        """Record the positions of this process's DataLoader iterators, before the loop's body runs for a micro-batch.

        After the body ``check`` refuses a DataLoader from which two bodies of a global batch have taken batches. Only
        the first two global batches of a run and those at the turn of an epoch are checked: in others, and if
        ``several`` is False, nothing is recorded.

        Args:
            several: whether some rank has several micro-batches of this global batch.
        """
        self._before = _positions() if several and self._is_due() else None

    def check(self) -> None:
        """Raise UsageError if this loop body and the previous one both took a batch of the same DataLoader.

        Bodies of one global batch are compared. To be called in the body, before its first backward; later calls in the
        same body do nothing. Not collective.
        """
        if self._before is None:
            return
        taken, self._before = _advanced(self._before), None
        again = taken & self._taken if self._taken is not None else set()
        self._taken = taken
        if again:
            raise UsageError(
                "the loop takes a batch of a DataLoader of its own for every micro-batch",
                where=script_line(),
                why="its body runs several times for each global batch on this device, and would take as many batches",
                remedy="keep the batch for as long as run.global_step is the same; or give tutti.prepare one data set"
                " of both (torch.utils.data.StackDataset); or take as many workers as data ranks"
                f" ({self._run.context.mesh.data_ranks}), no micro_batch",
            )

    def watched(self, loss: LossFn, micro_batches: int) -> LossFn:
        """Return the loss function of ``run.step``, in checked steps wrapped to refuse batches of a second DataLoader.

        Checked are the first two steps, and those at the turn of an epoch (``WatchWindows``). To be called once in each
        step.

        Args:
            loss: the loss function.
            micro_batches: number of micro-batches of this rank in the step.

        Returns:
            A function with the arguments and the result of ``loss``, which raises UsageError if the call takes a batch
            of a DataLoader. ``loss`` itself in other steps, and in a run of one rank if the rank has one
            micro-batch.
        """
        self._batches += 1
        if not self._is_due() or (micro_batches == 1 and self._run.context.comms.world.size == 1):
            return loss
        before = _positions()

        def watch(model: Any, batch: Any) -> Any:
            result = loss(model, batch)
            if _advanced(before):
                raise UsageError(
                    "the loss function takes batches of a DataLoader of its own",
                    why="it is called for each micro-batch, and once more for checks",
                    remedy="give tutti.prepare one data set of both (torch.utils.data.StackDataset), or write a loop"
                    " over run.microbatches()",
                )
            return result

        return watch

    def _is_due(self) -> bool:
        return self._batches <= _WATCHED or self._run.lifecycle.windows.is_open


def _positions() -> dict[LoaderIterator, int]:
    """Return the iterators of DataLoaders that are under way, each with its number of batches so far."""
    return {iterator: loader_position(iterator) for iterator in _ITERATORS.all()}


def _advanced(before: dict[LoaderIterator, int]) -> set[LoaderIterator]:
    """Return the iterators that have yielded batches since, also of those that are new."""
    return {iterator for iterator, position in _positions().items() if position > before.get(iterator, 0)}
