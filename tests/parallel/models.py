"""Small models and losses that the tests of exchanges share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tutti

NATIVE = "mirrored:algorithm=native"
WORLDS = [
    (3, "mirrored"),
    (4, "mirrored"),
    (3, NATIVE),
    (4, "mirrored:algorithm=native,bucket_mb=0.0001"),
    (3, "model_parallel"),
    (4, "model_parallel:stages=2"),
    (3, "central_storage"),
]


class Optional(nn.Module):
    """Uses its own weight only where a batch asks for it; returns the same otherwise."""

    def __init__(self, size: int, never: bool = False) -> None:
        super().__init__()
        self.weight, self.never = nn.Parameter(torch.full((size,), 0.5)), never

    def forward(self, inputs: Tensor) -> Tensor:
        asked = not self.never and bool((inputs[:, 0] > 9).any())
        return inputs * self.weight if asked else inputs


def trained(
    model: nn.Module, optimizer: Any, data: Any, loss: Any, steps: int = 3, **options: Any
) -> tuple[dict[str, Any], list[Any], str]:
    """State, what was agreed on in each step, and the hash after ``steps`` steps."""
    run = tutti.prepare(model, optimizer, data, loss, **options)
    said: list[Any] = []
    epoch = 0
    while len(said) < steps:
        for batch in run.epoch(epoch):
            run.step(batch)
            stats = run.stats
            said.append(stats and (stats.loss, stats.count, stats.grad_norm, dict(stats.metrics)))
            if len(said) == steps:
                break
        epoch += 1
    return {n: t.cpu().double().numpy().copy() for n, t in sorted(run.state().items())}, said, run.weights_sha256()
