"""``--optimizer package.module:Class:lr=…``: anybody's optimizer, as if the script had made it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.config.optimizer_config import check_optimizer
from tutti.errors import UsageError

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
