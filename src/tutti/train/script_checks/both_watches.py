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
        """The script's lines, at most eight, that have read the size of a tensor with a row for each sample.

        Lines are given as ``FILE:LINE``, and are those of the present micro-batch.
        """
        return self._inner.size_lines

    def begin_body(self, micro_batch: MicroBatch) -> None:
        """Enter both function modes before the body of a custom training loop runs for a micro-batch.

        Within them PyTorch hands each call of a function on tensors to ``CrossStepWatch`` and ``CrossWorkerWatch``;
        ``end`` leaves them.

        Args:
            micro_batch: the micro-batch whose body follows.
        """
        self._outer.begin_body(micro_batch)
        self._inner.begin_body(micro_batch)

    def end(self) -> None:
        """Leave the function modes ``CrossWorkerWatch`` and ``CrossStepWatch`` after the code for a micro-batch."""
        self._inner.end()
        self._outer.end()

    def check(self, loss: Any) -> None:
        """Raise UsageError if a loss depends on samples of another logical worker (fixed share of the global batch).

        Where the loss depends on values of earlier steps' samples, this is recorded, and data ranks compare the values
        later; UsageError is raised at once if they cannot compare them.

        Args:
            loss: the loss of the micro-batch, as the loss function returns it or ``run.backward`` is given it.
        """
        self._inner.check(loss)
        self._outer.check(loss)

    def check_divisor(self, loss: Any, micro_batch: MicroBatch) -> None:
        """Raise UsageError if constants or divisors in a loss make it no mean over the micro-batch's samples.

        ``errors.sum() / BATCH`` with the global batch's size is refused, ``errors.sum() / len(errors)`` and ``0.5 *
        errors.mean()`` are means. Called after the loss is computed and before its backward.

        Args:
            loss: the loss of the micro-batch; other results of a loss function than a tensor pass.
            micro_batch: the micro-batch.
        """
        self._inner.check_divisor(loss, micro_batch)

    def note_gradients(self, gradients: Iterable[Tensor], complete: bool) -> None:
        """Record the gradients that ``run.backward`` has left in ``.grad``, to follow tensors computed from them.

        Args:
            gradients: the tensors.
            complete: whether they are gradients of the global batch, and not of one micro-batch.
        """
        self._inner.note_gradients(gradients, complete)

    def check_edits(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise UsageError if the script's edits of complete gradients depend on a single micro-batch of this rank.

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
            A function with the arguments and the result of ``loss``. It raises UsageError if the loss depends on
            samples of another logical worker (fixed share of the global batch), or on a statistic or constant that
            makes it no mean over samples (``check``, ``check_divisor``).
        """
        return self._outer.watched(self._inner.watched(loss, work), work)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Return a context manager for ``run.backward``, in which both modes follow what the script's hooks do.

        Tensors that hooks keep are followed to losses of other micro-batches, and numbers that hooks give to PyTorch
        are compared with those of earlier steps (``backward`` of each mode).
        """
        with self._outer.backward(), self._inner.backward():
            yield

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context manager for a backward or an update, in which neither mode follows tensors."""
        with self._outer.updating(), self._inner.updating():
            yield
