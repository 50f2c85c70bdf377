"""A model that reduces its gradients over ranks by itself is refused."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tutti.errors import UsageError


def test_distributed_data_parallel_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    finally:
        dist.destroy_process_group()
    for name, model in {"the model": wrapped, "0": nn.Sequential(wrapped)}.items():
        with pytest.raises(UsageError, match=rf"^{name} is wrapped in DistributedDataParallel.*\.module"):
            tutti.prepare(model, "sgd", TensorDataset(torch.zeros(8, 3)), workers=3)
    # The model itself trains.
    before = wrapped.module.weight.detach().clone()
    run = tutti.prepare(wrapped.module, "sgd:lr=0.1", TensorDataset(torch.ones(8, 3)), workers=3, batch_size=4)
    for (inputs,) in run.microbatches(0):
        run.backward(wrapped.module(inputs).mean())
        run.gated_step()
    assert not torch.equal(before, wrapped.module.weight)
