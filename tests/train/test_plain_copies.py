"""Copies and pickles of a prepared model are those of the plain model, as scripts make them that save whole models."""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(5)), torch.zeros(24, 3))
PLAIN = [nn.Sequential, nn.Linear, nn.Dropout, nn.Tanh, nn.BatchNorm1d]


def trained(workers: int) -> tuple[nn.Module, tutti.Run]:
    """A model with layers that draw and layers with statistics, after an epoch of a custom loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, DATA, workers=workers, batch_size=12)
    for inputs, targets in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return model, run


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_saved_model_loads_without_tutti(workers: int) -> None:
    model, _ = trained(workers)
    with torch.serialization.safe_globals(PLAIN):
        loaded = torch.load(io.BytesIO(saved(model)), weights_only=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    inputs = torch.ones(3, 4)
    assert torch.equal(loaded.eval()(inputs), model.eval()(inputs))
    assert "__reduce_ex__" not in vars(loaded)


def test_a_copy_is_prepared_and_trained_by_itself() -> None:
    """A copy's hooks are not those of the first run; its own draw by the same keys."""
    model, _ = trained(2)
    other = copy.deepcopy(model)
    results: list[dict[str, Tensor]] = []
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        run = tutti.prepare(each, optimizer, DATA, workers=2, batch_size=12)
        for inputs, targets in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(nn.functional.mse_loss(each(inputs), targets))
            optimizer.step()
        results.append({name: value.clone() for name, value in run.state().items()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_the_scripts_own_hooks_stay() -> None:
    model, _ = trained(1)
    seen: list[Any] = []
    model.get_submodule("0").register_forward_hook(lambda module, args, output: seen.append(module))
    other = copy.deepcopy(model)
    other(torch.ones(2, 4))
    assert seen == [other.get_submodule("0")]


def test_a_file_with_an_average_names_no_class_of_tutti() -> None:
    model, _ = trained(2)
    average = torch.optim.swa_utils.AveragedModel(model)
    names = {argument for opcode, argument, _ in pickletools.genops(_pickle(average)) if "GLOBAL" in opcode.name}
    assert not any("tutti" in str(name) for name in names)


def _pickle(model: nn.Module) -> bytes:
    with zipfile.ZipFile(io.BytesIO(saved(model))) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
