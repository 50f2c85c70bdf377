"""``optimizer.step()`` after the loop, for a last group of accumulated batches that is smaller than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import TuttiError

DATA = TensorDataset(torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
EVERY = 3


def trained(strategy: str, workers: int = 1, early: bool = False, unlike: bool = False) -> Any:
    """Step two optimizers after every third of four batches, and after the loop; ``early``: before it, too."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizers: list[Any] = [
        torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(net[2].parameters()),
    ]
    run = None
    if strategy != "plain":
        run = tutti.prepare(net, optimizers, DATA, strategy=strategy, workers=workers, batch_size=6, shuffle=False)
    backward = torch.Tensor.backward if run is None else run.backward

    def update(number: float) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), number)
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad()

    try:
        if early:
            update(0.1)
        for epoch in range(2):
            for done, batch in enumerate(
                [(rows,) for rows in DATA.tensors[0].split(6)] if run is None else run.microbatches(epoch)
            ):
                done = done if run is None else run.global_step % run.steps_per_epoch
                backward(net(batch[0]).square().mean() / EVERY)
                if done % EVERY == EVERY - 1:
                    update(0.1)
            update(0.1 / (1 + (tutti.rank() if unlike else 0)))
    except TuttiError as error:
        return run.updates if run is not None else 0, str(error)
    return dict(net.state_dict() if run is None else run.state())


@pytest.mark.parametrize(
    ("strategy", "ranks", "workers"),
    [
        ("mirrored", 2, 3),
        ("mirrored", 3, 3),
        ("central_storage", 2, 2),
        ("parameter_server", 2, 3),
        ("sharded:stage=1", 2, 2),
        ("sharded", 2, 3),
        ("tensor:least=1", 2, 1),
        ("pipeline", 2, 2),
    ],
)
def test_the_last_group_steps_after_the_loop(strategy: str, ranks: int, workers: int) -> None:
    want = worlds.alone(trained, strategy="plain")
    for state in worlds.run(ranks, trained, strategy=strategy, workers=workers):
        torch.testing.assert_close(state, want, rtol=0, atol=1e-10)


def test_ranks_that_clip_it_differently_are_refused_before_the_update() -> None:
    for updates, said in worlds.run(2, trained, strategy="mirrored", workers=2, unlike=True):
        assert updates == 2 and "changed the gradient of 0.weight in another way on each rank" in said
        assert "test_leftover_group.py:" in said
    worlds.forget(2)


@pytest.mark.parametrize(("strategy", "early"), [("local_sgd:period=2", False), ("mirrored", True)])
def test_steps_before_the_loop_or_after_an_average_are_refused(strategy: str, early: bool) -> None:
    for _, said in worlds.run(2, trained, strategy=strategy, workers=2, early=early):
        assert "optimizer.step() needs a batch of run.microbatches()" in said and "test_leftover_group.py:" in said
    worlds.forget(2)
