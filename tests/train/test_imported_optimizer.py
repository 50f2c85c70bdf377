"""``--optimizer package.module:Class:lr=…``: anybody's optimizer, as if the script had made it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.config.optimizer_config import OptimizerChoice, check_optimizer
from tutti.errors import UsageError
from tutti.train.prepare import prepare_run
from tutti.train.run_options import RunOptions

INPUTS = torch.arange(40.0).view(20, 2) / 40
OPTIONS = "lr=0.1,momentum=0.9,nesterov=true"


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(optimizer: str, **options: Any) -> str:
    torch.manual_seed(0)
    data = INPUTS, INPUTS.sum(dim=1, keepdim=True)
    run = tutti.prepare(nn.Linear(2, 1), optimizer, data, loss, batch_size=6, reproducible=True, **options)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    return run.weights_sha256()


def test_it_trains_as_the_same_optimizer_by_name() -> None:
    text = f"torch.optim:SGD:{OPTIONS},fused=true"
    for more in ({}, {"lr_scale": "linear:base_batch=3"}):
        [want] = worlds.run(1, trained, optimizer=f"sgd:{OPTIONS}", workers=2, **more)
        for devices, strategy in ((1, "single"), (2, "mirrored"), (2, "central_storage")):
            got = worlds.run(
                devices,
                trained,
                optimizer=text,
                strategy=strategy,
                workers=2,
                **more,
            )
            assert got == [want] * devices


def scheduled(optimizer: str, strategy: str) -> list[float]:
    """Weights of four steps whose rate halves each time, with the schedule of the command line."""
    torch.manual_seed(0)
    data = INPUTS, INPUTS.sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    options = RunOptions(strategy=strategy, batch_size=6, workers=1 if strategy == "pipeline" else 4)
    run = prepare_run(
        model, OptimizerChoice.parse(optimizer), data, loss, options, lambda epochs: lambda step: 0.5**step
    )
    for batch in run.epoch(0):
        run.step(batch)
    return [value for tensor in run.state().values() for value in tensor.flatten().tolist()]


@pytest.mark.parametrize(
    "strategy", ["mirrored", "sharded", "sharded:stage=1", "pipeline", "local_sgd:period=2", "parameter_server"]
)
def test_the_schedule_acts_on_it_under_every_strategy(strategy: str) -> None:
    """Strategies rebuild it over other parameters, and each copy takes the original's settings before it steps."""
    want = worlds.run(2, scheduled, optimizer="sgd:lr=0.1,momentum=0.9", strategy=strategy)
    got = worlds.run(2, scheduled, optimizer="torch.optim:SGD:lr=0.1,momentum=0.9", strategy=strategy)
    for one, other in zip(want, got, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_its_options_are_numbers_truth_values_tuples_and_texts() -> None:
    given = check_optimizer("some.where:Lion:lr=3e-4,betas=0.9+0.99,fused=none,steps=5,mode=fast")
    assert (given.module, given.name, given.lr) == ("some.where", "Lion", 3e-4)
    assert given.options == {"betas": (0.9, 0.99), "fused": None, "steps": 5, "mode": "fast"}
    assert check_optimizer("here:Mine:lr=1").module == "here"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch.optim:SGD", "SGD is given no learning rate"),
        ("torch.optim:SDG:lr=0.1", "has no optimizer 'SDG'.*SGD"),
        ("torch.optim:SGD:lr=0.1,speed=3", "SGD refuses its arguments: .*speed"),
        ("torch.nowhere:SGD:lr=0.1", "cannot be imported"),
        ("torch.optim", "cannot read"),
    ],
)
def test_what_is_no_optimizer_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tutti.prepare(nn.Linear(2, 1), text, (INPUTS, INPUTS), loss)
