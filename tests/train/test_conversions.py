"""Conversions of a prepared model to another dtype or device are kept, or refused before the next update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn, thinned
from tutti.errors import UsageError

DATA = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))


def mean(net: Any, batch: Any) -> Any:
    return net(batch[0]).square().mean()


def same(net: nn.Module) -> None:
    net.to("cpu")
    net.float().to(torch.float32)
    net[1].cpu()  # type: ignore[index]


def there_and_back(net: nn.Module) -> None:
    net.double()
    net.float()


def copied(net: nn.Module) -> None:
    other = copy.deepcopy(net).double()
    assert next(other.parameters()).dtype == torch.float64


def double(net: nn.Module) -> None:
    net.double()


def half_of_a_layer(net: nn.Module) -> None:
    net[1].half()  # type: ignore[index]


def off_the_device(net: nn.Module) -> None:
    net.cpu()


def shared_memory(net: nn.Module) -> None:
    net.share_memory()


def trained(strategy: str, convert: Callable[[nn.Module], None]) -> Any:
    """Convert the model after two steps: updates made, and what the run says or the loss that it ends with."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Tanh())
    run = tutti.prepare(net, torch.optim.Adam(net.parameters(), 0.01), DATA, mean, strategy=strategy, batch_size=4)
    try:
        for batch in run.epoch(0):
            run.step(batch)
            if run.global_step == 2:
                convert(net)
    except UsageError as error:
        return run.updates, str(error)
    return run.updates, ""


PARTS = ["sharded", "tensor:least=1", "pipeline"]
WHOLE = ["mirrored", "sharded:stage=1", "central_storage", "parameter_server"]


@pytest.mark.parametrize("strategy", thinned([*PARTS, *WHOLE], 2))
def test_a_conversion_that_changes_nothing_passes(strategy: str) -> None:
    assert worlds.run(2, trained, strategy=strategy, convert=same) == [(4, "")] * 2


@pytest.mark.parametrize("convert", [there_and_back, copied])
def test_a_model_may_be_converted_back_and_its_copy_converted(convert: Callable[[nn.Module], None]) -> None:
    assert worlds.run(2, trained, strategy="mirrored", convert=convert) == [(4, "")] * 2


@pytest.mark.parametrize(("strategy", "convert"), in_turn([*PARTS, *WHOLE], [double, half_of_a_layer]))
def test_another_dtype_is_refused_before_the_next_update(strategy: str, convert: Callable[[Any], None]) -> None:
    for updates, said in worlds.run(2, trained, strategy=strategy, convert=convert):
        assert updates == 2 and "after tutti.prepare" in said and "test_conversions.py:" in said, said
        assert "float32 on cpu" in said and "run.state()" in said
    worlds.forget(2)


@pytest.mark.parametrize("strategy", ["sharded", "mirrored"])
def test_sharing_the_memory_of_a_part_is_refused(strategy: str) -> None:
    for updates, said in worlds.run(2, trained, strategy=strategy, convert=shared_memory):
        if strategy == "mirrored":
            assert (updates, said) == (4, "")
        else:
            assert updates == 2 and "memory of this process to shared memory" in said, said


@pytest.mark.parametrize("strategy", ["mirrored", "sharded"])
def test_another_device_is_refused_before_the_next_update(strategy: str) -> None:
    for updates, said in worlds.run_on(worlds.ACCELERATOR, 2, trained, strategy=strategy, convert=off_the_device):
        assert updates == 2 and "after tutti.prepare" in said and "test_conversions.py:" in said, said
        assert "on cpu" in said and worlds.ACCELERATOR in said
