"""Loss functions that return one loss a sample and a count, so that uneven shares of a batch are weighted exactly."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


def classification(model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
    """Compute the cross-entropy of class scores and the number of correct predictions, without host synchronisation.

    Args:
        model: maps inputs to logits (samples, classes, …).
        batch: inputs, and class indices (samples, …) as int64.

    Returns:
        A tuple of the losses (samples,), -log p(target) summed over each sample's targets; the number of targets; and a
        dict with ``accuracy``, the number of correct predictions (a 0-d tensor).
    """
    inputs, targets = batch
    scores = model(inputs)
    right = (scores.detach().argmax(dim=1) == targets).sum()
    values = functional.cross_entropy(scores, targets, reduction="none")
    return per_sample(values), targets.numel(), {"accuracy": right}


def regression(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    """Compute the squared error (output - target)² of each sample, and the number of targets.

    Args:
        model: maps inputs to outputs of the targets' shape.
        batch: inputs and targets.

    Returns:
        A tuple of the losses (samples,), squared errors summed over each sample's targets; and the number of targets in
        the batch.
    """
    inputs, targets = batch
    return per_sample((model(inputs) - targets).square()), targets.numel()


def per_sample(values: Tensor) -> Tensor:
    """Sum the values of each sample, over all dimensions but the first: (samples, …) → (samples,).

    Args:
        values: such as the loss of each target; a 1-d tensor is returned as it is.
    """
    return values if values.dim() == 1 else values.flatten(1).sum(dim=1)
