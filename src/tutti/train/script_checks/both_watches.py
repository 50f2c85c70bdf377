"""The checks of values between micro-batches and of values kept from earlier steps, together in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tutti.train.script_checks.loss_watch import LossWatch
from tutti.types.micro_batch import LossFn, MicroBatch


class BothWatches:
    """Two function modes that follow values up to the losses of one step, with the methods of a ``LossWatch``.

    At the turn of an epoch a rank with several micro-batches has both: values that pass between its micro-batches, and
    values that it has kept of its own samples.

    Args:
        outer: the mode that is entered first.
        inner: the mode that is entered within.
    """

    def __init__(self, outer: LossWatch, inner: LossWatch) -> None:
        self._outer, self._inner = outer, inner

    @property
    def size_lines(self) -> list[str]:
        """The script's first lines that have read the size of a tensor with a row for each sample."""
        return self._inner.size_lines

    def begin_body(self, micro_batch: MicroBatch) -> None:
        """Enter both modes for the body of a custom loop; see ``LossWatch``."""
        self._outer.begin_body(micro_batch)
        self._inner.begin_body(micro_batch)

    def end(self) -> None:
        """Leave both modes."""
        self._inner.end()
        self._outer.end()

    def check(self, loss: Any) -> None:
        """Check the values on which a loss depends by both modes; see ``LossWatch``."""
        self._inner.check(loss)
        self._outer.check(loss)

    def check_divisor(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Check a loss for constants and divisors; see ``LossWatch``."""
        self._inner.check_divisor(loss, micro_batch)

    def note_gradients(self, gradients: Iterable[Tensor], complete: bool) -> None:
        """Record the gradients that ``run.backward`` has left; see ``LossWatch``."""
        self._inner.note_gradients(gradients, complete)

    def check_edits(self, gradients: Mapping[str, Tensor]) -> None:
        """Check on what the script's edits of complete gradients depend; see ``LossWatch``."""
        self._inner.check_edits(gradients)

    def watched(self, loss: LossFn, work: Sequence[tuple[int, Sequence[MicroBatch]]]) -> LossFn:
        """Return a function that calls the loss function of ``run.step`` within both modes; see ``LossWatch``."""
        return self._outer.watched(self._inner.watched(loss, work), work)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context manager for ``run.backward``."""
        with self._outer.backward(), self._inner.backward():
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context manager in which neither mode follows tensors."""
        with self._outer.updating(), self._inner.updating():
            yield
