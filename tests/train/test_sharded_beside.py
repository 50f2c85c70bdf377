"""A model that the script shards by itself, beside a run."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tutti
from tests import worlds


def trained() -> int:
    """Number of steps of a run and of a model under FSDP2 by hand, whose rows differ between ranks."""
    torch.manual_seed(0)
    model, other = nn.Linear(4, 1), nn.Linear(4, 4)
    fully_shard(other, mesh=init_device_mesh("cpu", (tutti.size(),)))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(24, 4), lambda called, batch: called(batch).square().mean(), batch_size=4
    )
    for batch in run.epoch(0):
        run.step(batch)
        other(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.updates


def test_an_optimizer_of_shards_is_the_scripts_own_business() -> None:
    assert worlds.run(2, trained) == [6, 6]
    worlds.forget(2)
