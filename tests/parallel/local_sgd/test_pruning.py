"""Masks that a script computes again between steps, where logical workers have weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.scripts.oracle import Algorithm, play
from tutti.errors import TuttiError

PERIOD = 3
ALGORITHMS = {"local_sgd": Algorithm(PERIOD), "diloco": Algorithm(PERIOD, (0.7, 0.9))}


def script(prepare: Callable[..., Any], after: int) -> dict[str, Any]:
    """Return the state after an epoch of ten steps, with pruned weights that are pruned again after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    prune.l1_unstructured(model[0], "weight", 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(60, 4, generator=draw, dtype=torch.float64), torch.arange(60) % 3)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    run = prepare(model, optimizer, data, loss, batch_size=6)
    if after == 0:
        prune.l1_unstructured(model[0], "weight", 0.5)
    for taken, batch in enumerate(run.epoch(0), 1):
        run.step(batch)
        if taken == after:
            prune.l1_unstructured(model[0], "weight", 0.5)
    if after > 10:
        prune.l1_unstructured(model[0], "weight", 0.5)
    return {name: tensor.detach().numpy().copy() for name, tensor in run.state().items()}


def train(strategy: str, after: int, workers: int | None = None) -> Any:
    try:
        return script(partial(tutti.prepare, strategy=strategy, workers=workers, seed=0), after)
    except TuttiError as error:
        return str(error)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_mask_of_each_rank_s_own_weights_is_its_worker_s(name: str) -> None:
    for workers in (2, 3):
        want = play(partial(script, after=5), workers, ALGORITHMS[name]).results[0]
        for got in worlds.run(workers, train, strategy=f"{name}:period={PERIOD}", after=5):
            assert all(abs(got[key] - value).max() <= 1e-12 for key, value in want.items())


@pytest.mark.parametrize(("after", "name"), in_turn([4, 6, 11], list(ALGORITHMS)))
def test_a_mask_of_one_of_a_rank_s_workers_is_refused(name: str, after: int) -> None:
    for ranks, workers in ((1, 2), (2, 4), (3, 6)):
        for said in worlds.run(ranks, train, strategy=f"{name}:period={PERIOD}", after=after, workers=workers):
            assert "has pruned 0.weight_orig, of which each logical worker" in said, said


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_mask_before_the_first_step_of_their_own_is_that_of_all_workers(name: str) -> None:
    for after in (0, 2):
        want = worlds.run(4, train, strategy=f"{name}:period={PERIOD},post=2", after=after)[0]
        for ranks in (1, 2):
            for got in worlds.run(ranks, train, strategy=f"{name}:period={PERIOD},post=2", after=after, workers=4):
                assert not isinstance(got, str), got
                assert all(abs(got[key] - value).max() <= 1e-12 for key, value in want.items())
