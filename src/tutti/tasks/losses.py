"""Losses as training wants them: sums over the samples and their count, so that uneven shares weigh exactly."""

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
        Sum of -log p(target), number of targets, and the number of right answers as ``accuracy``; nothing waits
        for the device.
    """
    inputs, targets = batch
    scores = model(inputs)
    right = (scores.detach().argmax(dim=1) == targets).sum()
    return functional.cross_entropy(scores, targets, reduction="sum"), targets.numel(), {"accuracy": right}


def regression(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Squared error: the sum of (output - target)², and the number of targets.

    Args:
        model: maps inputs to outputs of the targets' shape.
        batch: inputs and targets.
    """
    inputs, targets = batch
    return (model(inputs) - targets).square().sum(), targets.numel()
