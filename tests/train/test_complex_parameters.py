"""Complex parameters and buffers, as of Fourier operators and rotary embeddings, train as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import tutti
from tests import worlds
from tests.scripts.oracle import global_batches

BATCH, CLIP = 8, 0.05


class Rotated(nn.Module):
    """Multiplies pairs of features by unit complex numbers, which stay, and by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 1).double()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        angles = torch.arange(4, dtype=torch.float64)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, inputs: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.first(inputs).view(-1, 4, 2)) * self.turns * self.weight
        result: Tensor = self.last(torch.view_as_real(pairs).flatten(1))
        return result


def dataset() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(29, width, generator=draw, dtype=torch.float64) for width in (4, 1))
    return inputs, targets


def loss_fn(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Rotated()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def arrays(state: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def plain() -> dict[str, Any]:
    model, optimizer = built()
    for epoch in range(2):
        for batch in global_batches(dataset(), BATCH, epoch):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
    return arrays(model.state_dict())


def train(strategy: str, workers: int, loop: bool) -> dict[str, Any]:
    model, optimizer = built()
    options: dict[str, Any] = {"strategy": strategy, "workers": workers, "batch_size": BATCH}
    run = tutti.prepare(model, optimizer, dataset(), loss_fn, clip=None if loop else CLIP, seed=0, **options)
    for epoch in range(2):
        if loop:
            for batch in run.microbatches(epoch):
                optimizer.zero_grad()
                run.backward(loss_fn(model, batch))
                clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
            continue
        for batch in run.epoch(epoch):
            run.step(batch)
    return arrays(run.state())


@pytest.mark.parametrize(
    ("strategy", "ranks", "loop"),
    [
        ("mirrored", 2, False),
        ("mirrored", 3, True),
        ("mirrored:algorithm=native", 2, True),
        ("sharded:stage=1", 2, True),
        ("sharded", 2, False),
        ("tensor:least=1", 2, True),
        ("central_storage", 2, False),
        ("central_storage", 3, True),
        ("parameter_server", 2, True),
    ],
)
def test_a_clipped_complex_gradient(strategy: str, ranks: int, loop: bool) -> None:
    want = worlds.alone(plain)
    for got in worlds.run(
        ranks, train, strategy=strategy, workers=1 if strategy.startswith("tensor") else 3, loop=loop
    ):
        assert all(np.abs(got[name] - value).max() <= 1e-12 for name, value in want.items())
