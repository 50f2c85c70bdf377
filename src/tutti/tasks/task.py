"""The noun of this room. A user's own function returns one of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tutti.types import LossFn

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Task:
    """What ``tutti train`` needs to know, and all it needs to know.

    Attributes:
        name: shown and recorded.
        model: builds the plain model, without arguments; called once a process under the run's seed.
        loss: ``loss(model, batch)`` → mean over the batch's samples, or ``(sum, count)``, or
            ``(sum, count, {"accuracy": number_correct, …})`` with sums over the samples as metrics.
        train: training samples: a ``tutti.data.Source``, a ``TensorDataset`` or any map-style dataset.
        eval: held-out samples, of the same kind; None for no evaluation.
        images: batches hold NCHW images, so that channels-last memory layout helps.
        describe: words about the data for the header, such as ``"50,000 + 10,000 images 32×32"``.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: LossFn
    train: Any
    eval: Any = None
    images: bool = False
    describe: str = ""
