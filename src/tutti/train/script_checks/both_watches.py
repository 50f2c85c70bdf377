"""Run the checks of values between micro-batches and of values kept from earlier steps together in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tutti.train.script_checks.loss_watch import LossWatch
from tutti.types.micro_batch import LossFn, MicroBatch


class BothWatches:
    """Combines two ``LossWatch`` modes, which check values that losses depend on, into one with the same methods.

    At the turn of an epoch a rank with several micro-batches has both: ``CrossWorkerWatch``, for values that pass from
    one micro-batch to another, and ``CrossStepWatch``, for values that the rank has kept of its own samples.

    Args:
        outer: the mode that is entered first, ``CrossStepWatch``.
        inner: the mode that is entered within, ``CrossWorkerWatch``; it alone checks divisors and edited gradients.
    """

    def __init__(self, outer: LossWatch, inner: LossWatch) -> None:
        self._outer, self._inner = outer, inner

    @property
    def size_lines(self) -> list[str]:
        """The script's lines, at most eight, that have read the size of a tensor with a row for each sample."""
        return self._inner.size_lines

    def begin_body(self, micro_batch: MicroBatch) -> None:
        """Enter both modes before the body of a custom training loop runs for a micro-batch.

        Args:
            micro_batch: the micro-batch.
        """
        self._outer.begin_body(micro_batch)
        self._inner.begin_body(micro_batch)

    def end(self) -> None:
        """Leave both modes."""
        self._inner.end()
        self._outer.end()

    def check(self, loss: Any) -> None:
        """Raise UsageError if a loss depends on values that either mode refuses; see ``check`` of each.

        Args:
            loss: the loss of the micro-batch, as the loss function returns it or ``run.backward`` is given it.
        """
        self._inner.check(loss)
        self._outer.check(loss)

    def check_divisor(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raise UsageError if constants or divisors in a loss make it no mean over the micro-batch's samples.

        Args:
            loss: the loss of the micro-batch.
            micro_batch: the micro-batch.
        """
        self._inner.check_divisor(loss, micro_batch)

    def note_gradients(self, gradients: Iterable[Tensor], complete: bool) -> None:
        """Record in the inner mode the gradients that ``run.backward`` has left in ``.grad``.

        Args:
            gradients: the tensors.
            complete: whether they are gradients of the global batch, and not of one micro-batch.
        """
        self._inner.note_gradients(gradients, complete)

    def check_edits(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise UsageError if the script's edits of gradients depend on values that the inner mode refuses.

        Args:
            gradients: the edited gradients of the global batch, by the parameters' names.
        """
        self._inner.check_edits(gradients)

    def watched(self, loss: LossFn, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> LossFn:
        """Return a function that calls the loss function of ``run.step`` within both modes, and checks its result.

        Args:
            loss: the loss function.
            work: pairs (index of a logical worker, its micro-batches), one for each worker of this rank.

        Returns:
            A function with the arguments and the result of ``loss``; it raises UsageError as ``check`` and
            ``check_divisor``.
        """
        return self._outer.watched(self._inner.watched(loss, work), work)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context manager for ``run.backward``, which enters ``backward`` of both modes."""
        with self._outer.backward(), self._inner.backward():
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context manager in which neither mode follows tensors."""
        with self._outer.updating(), self._inner.updating():
            yield
