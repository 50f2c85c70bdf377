"""Forwards under ``torch.inference_mode()`` in the body of a custom loop, as for a metric or a target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import TuttiError

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def trained(strategy: str, workers: int = 1, first: bool = False) -> Any:
    """Count something after each update, in place, too; ``first``: before it, and as a part of the loss."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizer, DATA, strategy=strategy, workers=workers, batch_size=6, shuffle=False)
    backward = torch.Tensor.backward if run is None else run.backward
    try:
        for batch in [(rows,) for rows in DATA.tensors[0].split(6)] if run is None else run.microbatches(0):
            target = torch.zeros(len(batch[0]), 2, dtype=torch.float64)
            if first:
                with torch.inference_mode():
                    target = net(batch[0]).softmax(1)
                target = target.clone()
            optimizer.zero_grad()
            backward(nn.functional.mse_loss(net(batch[0]), target))
            optimizer.step()
            with torch.inference_mode():
                outputs = net(batch[0])
                int((outputs.add_(1.0).argmax(1) == 0).sum())
    except TuttiError as error:
        return run.updates if run is not None else 0, str(error)
    return dict(net.state_dict() if run is None else run.state())


@pytest.mark.parametrize(
    ("strategy", "ranks", "workers", "first"),
    [("single", 1, 3, False), ("single", 1, 3, True), ("mirrored", 3, 3, True), ("sharded", 2, 3, False)],
)
def test_inference_tensors_are_as_good_as_others(strategy: str, ranks: int, workers: int, first: bool) -> None:
    want = worlds.alone(trained, strategy="plain", first=first)
    for state in worlds.run(ranks, trained, strategy=strategy, workers=workers, first=first):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def test_parameters_that_fsdp2_would_gather_into_inference_tensors_are_refused() -> None:
    for updates, said in worlds.run(2, trained, strategy="sharded", workers=2, first=True):
        assert updates == 0 and "the first forward of sharded parameters is one under torch.inference_mode()" in said
        assert "test_inference_mode.py:" in said and "torch.no_grad()" in said
    worlds.forget(2)
