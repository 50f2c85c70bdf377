"""Buffers of several workers on one device: the script's writes are found without a wait of the host for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_mistakes import loss
from tests.simulated_accelerator.test_simulated_accelerator import syncs
from tests.train.test_written_buffers import DATA, WRITES, built, mean, restart, restart_silently, set_count, trained
from tutti.errors import UsageError

pytestmark = pytest.mark.timeout(600)

STRATEGIES = ("mirrored", "sharded", "local_sgd:period=1")


def waits(strategy: str, norm: bool) -> list[int]:
    """How often the host waits for the device in each step of the second epoch, with two workers a device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8) if norm else nn.LayerNorm(8), nn.Linear(8, 3))
    data = torch.randn(48, 5), torch.randint(0, 3, (48,))
    run = tutti.prepare(model, "adam:lr=0.01", data, loss, strategy=strategy, workers=4, batch_size=16)
    found = []
    for epoch in range(2):
        for batch in run.epoch(epoch):
            with syncs() as counted:
                run.step(batch)
            found.append(counted[0])
    return found[3:]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_buffers_of_several_workers_add_no_wait(strategy: str) -> None:
    plain, normed = (worlds.run_on(DEVICE, 2, waits, strategy=strategy, norm=norm) for norm in (False, True))
    assert normed == plain


def assign_integer(model: Any, value: float) -> None:
    model.temperature = torch.ones((1,), dtype=torch.int64, device=model.temperature.device)


def written() -> list[dict[str, Tensor]]:
    writes = (*WRITES, assign_integer)
    cases: list[tuple[Any, str]] = [(write, when) for write in writes for when in ("epoch", "update")]
    cases += [(restart, "epoch"), (restart_silently, "epoch")]
    return [
        {name: value.cpu() for name, value in trained(write, when, workers=4, loop=loop).items()}
        for write, when in cases
        for loop in (True, False)
    ]


def test_writes_of_the_script_reach_every_worker_as_on_the_cpu() -> None:
    [here], [there] = worlds.run_on("cpu", 1, written), worlds.run_on(DEVICE, 1, written)
    assert len(there) == len(here) and all(
        torch.equal(got[name], value) for got, want in zip(there, here, strict=True) for name, value in want.items()
    )


def refused(strategy: str, after: str) -> tuple[str, bool]:
    """The refusal of a count that differs between workers, and whether the parameters are those of before it."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, DATA, mean, strategy=strategy, workers=4, batch_size=4)
    steps = list(run.epoch(0))
    run.step(steps[0])
    before = [value.clone() for value in model.layer.parameters()]
    set_count(model, 0)
    try:
        if after == "step":
            run.step(steps[1])
        else:
            run.state()
    except UsageError as error:
        return str(error), all(map(torch.equal, model.layer.parameters(), before))
    return "", False


@pytest.mark.parametrize(
    ("strategy", "after"), [("mirrored", "step"), ("mirrored", "state"), ("sharded:stage=1", "step")]
)
def test_one_workers_value_is_refused_before_the_update(strategy: str, after: str) -> None:
    [(said, untouched)] = worlds.run_on(DEVICE, 1, refused, strategy=strategy, after=after)
    assert "the script has written the buffer seen between global batches" in said and untouched
