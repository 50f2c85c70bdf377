"""Options of ``--batch-norm``. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.spec import Spec


@dataclass(frozen=True, kw_only=True)
class OfTheWorker:
    """Statistics of each worker's micro-batch, as the model's own batch norm takes them."""


@dataclass(frozen=True, kw_only=True)
class Ghost:
    """Statistics of few samples, whatever the batch (Hoffer et al. 2017, arXiv 1705.08741).

    Attributes:
        size: samples that are normalised together.
    """

    size: int = 32

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size} and should be at least 1")


BATCH_NORMS: Mapping[str, type[Any]] = {"worker": OfTheWorker, "ghost": Ghost}


def check_batch_norm(text: str) -> Any:
    """The options of ``--batch-norm``. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--batch-norm")
    return spec.build(spec.choose(BATCH_NORMS, "batch norm"), "--batch-norm")
