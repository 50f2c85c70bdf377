"""Losses as training wants them: one a sample and a count, so that uneven shares weigh exactly."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


def classification(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Cross-entropy of class scores.

    Args:
        model: maps inputs to scores (samples, classes, …).
        batch: inputs, and class numbers (samples, …) as int64.

    Returns:
        -log p(target) summed over each sample's targets (samples,), number of targets, and the number of right answers
        as ``accuracy``; nothing waits for the device.
    """
    inputs, targets = batch
    scores = model(inputs)
    right = (scores.detach().argmax(dim=1) == targets).sum()
    values = functional.cross_entropy(scores, targets, reduction="none")
    return per_sample(values), targets.numel(), {"accuracy": right}


def regression(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Squared error: (output - target)² summed over each sample (samples,), and the number of targets.

    Args:
        model: maps inputs to outputs of the targets' shape.
        batch: inputs and targets.
    """
    inputs, targets = batch
    return per_sample((model(inputs) - targets).square()), targets.numel()


def per_sample(values: Tensor) -> Tensor:
    """Each sample's sum: (samples, …) → (samples,)."""
    return values if values.dim() == 1 else values.flatten(1).sum(dim=1)
