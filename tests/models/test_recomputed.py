"""Activation checkpointing of Hugging Face's models, which keep caches of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.models import zoo


def train(name: str, strategy: str, choice: str | None) -> Any:
    model = zoo.build(name)
    options = {
        "batch_size": 6,
        "workers": 1,
        "micro_batch": 3,
        "strategy": strategy,
        "activation_checkpointing": choice,
    }
    with zoo.exact():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        run = tutti.prepare(model, optimizer, zoo.dataset(name, "own"), zoo.loss_fn(name, "own"), **options)  # type: ignore[arg-type]
        for batch in run.epoch(0):
            run.step(batch)
    return {key: tensor.cpu().numpy().copy() for key, tensor in run.state().items()}


@pytest.mark.models
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("sharded", 2), ("pipeline", 2)])
@pytest.mark.parametrize("name", ["T5", "GPT-2, eager attention"])
def test_models_with_a_cache_are_computed_again(name: str, strategy: str, devices: int) -> None:
    pytest.importorskip("transformers")
    [want] = worlds.run(1, train, name=name, strategy="single", choice=None)
    got = worlds.run(devices, train, name=name, strategy=strategy, choice="blocks")[0]
    assert largest_difference(got, want) <= 1e-12
