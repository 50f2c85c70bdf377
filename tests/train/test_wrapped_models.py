"""A model that reduces gradients over ranks, or divides batches over devices, by itself is refused."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError


def refused() -> list[str]:
    """What is said of a wrapped model and of a part that is wrapped."""
    wrapped, said = nn.parallel.DistributedDataParallel(nn.Linear(3, 1)), []
    for model in (wrapped, nn.Sequential(wrapped)):
        try:
            tutti.prepare(model, "sgd", TensorDataset(torch.zeros(8, 3)), workers=4)
        except UsageError as error:
            said.append(str(error))
    return said


def trained() -> bool:
    """Whether the model inside of the wrapper trains."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1)).module
    before = model.weight.detach().clone()
    run = tutti.prepare(model, "sgd:lr=0.1", TensorDataset(torch.ones(8, 3)), workers=2, batch_size=4)
    for (inputs,) in run.microbatches(0):
        run.backward(model(inputs).mean())
        run.gated_step()
    return not torch.equal(before, model.weight)


def test_distributed_data_parallel_is_refused() -> None:
    for said in worlds.run(2, refused):
        assert len(said) == 2
        for text, name in zip(said, ("the model", "0"), strict=True):
            assert text.startswith(f"{name} is wrapped in DistributedDataParallel") and ".module" in text


def test_the_model_inside_trains() -> None:
    assert worlds.run(2, trained) == [True] * 2


def in_data_parallel(devices: list[int]) -> str:
    model = nn.DataParallel(nn.Linear(3, 1))
    model.device_ids = devices  # as on a node with accelerators; none without
    try:
        run = tutti.prepare(model, "sgd:lr=0.1", TensorDataset(torch.ones(8, 3)), workers=2, batch_size=4)
    except UsageError as error:
        return str(error)
    return ", ".join(run.state())


def test_data_parallel_over_other_devices_is_refused() -> None:
    for said in worlds.run(2, in_data_parallel, devices=[0, 1]):
        assert said.startswith("the model is wrapped in DataParallel over devices 0, 1") and ".module" in said
    assert worlds.run(1, in_data_parallel, devices=[]) == ["module.weight, module.bias"]
