"""A batch, the micro-batches into which logical workers cut their shares of it, and the sums of their losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Batch: TypeAlias = Any
"""A tensor, or a tuple, list or dict of tensors; the first dimension of each is the samples."""

LossFn: TypeAlias = "Callable[[Any, Batch], Any]"
"""``loss_fn(model, batch)`` → a scalar (mean over samples), ``(sum, count)``, or ``(sum, count, metric_sums)``.

A 1-d tensor with one loss a sample may take the place of the mean or of the sum."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass of one logical worker.

    A logical worker is one of N fixed shares of the global batch; its share is cut into micro-batches.

    Attributes:
        worker: logical worker, 0 … N-1.
        micro: index, from 0, of this micro-batch among those into which the worker's share of the global batch is cut.
        batch: the samples.
        samples: number of samples; 0 for a dummy micro-batch, whose forward and backward keep collectives aligned and
            whose gradient is ignored.
        weight: factor on each sample's loss in backward: loss scale / samples in the global batch, or in the worker's
            share where ``GradientSync.loss_normalisation`` is "worker". For a ``whole`` micro-batch the loss scale.
        key: 64-bit key of this micro-batch's RNG streams, a function of (seed, step, worker, micro).
        last: whether this is the worker's last micro-batch in this step.
        noise: standard deviation σ of the weights z ~ N(1, σ²) on the samples' losses.
        whole: whether the gradient is the mean over this micro-batch alone. Backward then starts from loss scale /
            count, as in PyTorch, and the gradient is not divided by a count afterwards.
    """

    worker: int
    micro: int
    batch: Batch
    samples: int
    weight: float
    key: int
    last: bool
    noise: float = 0.0
    whole: bool = False

    @property
    def share(self) -> float:
        """Factor by which backward multiplies the mean loss of this micro-batch's samples.

        It is the loss scale times the number of ``samples``, divided by the samples of the global batch, or of the
        logical worker (a fixed share of the global batch) where each worker has a gradient of its own. For a ``whole``
        micro-batch, whose gradient is the mean over this micro-batch alone, it is the loss scale.
        """
        return self.weight if self.whole else self.samples * self.weight


@dataclass
class LossSums:
    """Loss sum, count and metric sums over samples. ``a + b`` adds ``sums`` and ``samples``.

    Attributes:
        sums: float tensor ``[loss_sum, count, *metric_sums]`` on the compute device.
        names: names of the metric sums, in order.
        samples: number of samples; the loss function's count may differ from it (tokens, pixels).
        whole: whether the gradient of these samples is the mean over a single micro-batch alone (``MicroBatch.whole``).
    """

    sums: Tensor
    names: tuple[str, ...] = ()
    samples: int = 0
    whole: bool = False

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(self.sums + other.sums, self.names or other.names, self.samples + other.samples)
