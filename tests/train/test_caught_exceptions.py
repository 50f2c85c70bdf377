"""Exceptions within a step that the script catches: the step is skipped as a whole, or the next one is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tutti.errors import UsageError

DRAW = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(48, 4, generator=DRAW, dtype=torch.float64), torch.arange(48.0, dtype=torch.float64))
BAD = 1
"""Index of the batch that raises."""


class Script:
    """A model and a loss that raise in one batch, ``in`` the first or second forward or in the last backward."""

    def __init__(self, place: str) -> None:
        torch.manual_seed(0)
        self.place, self.batch, self.forwards = place, 0, 0
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1)).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.forwards += 1
        self._raise("first forward" if self.forwards == 1 else "second forward")
        return (model(batch[0]).squeeze(1) - batch[1] / 10).square().mean()

    def hook(self, gradient: Tensor) -> None:
        self._raise("backward")

    def _raise(self, place: str) -> None:
        if self.place == place and self.batch == BAD:
            raise ValueError("a bad batch")


def trained(place: str, skip: bool, loop: bool, **options: Any) -> Any:
    """The model of a script that catches the exception in its loop, or skips the batch beforehand."""
    script = Script(place)
    given = () if loop else (script.loss,)
    run = tutti.prepare(script.net, script.optimizer, DATA, *given, batch_size=12, seed=0, **options)
    next(iter(script.net.parameters())).register_hook(script.hook)
    try:
        for batch in run.microbatches(0) if loop else run.epoch(0):
            script.batch, script.forwards = (run.data_position.batch if loop else script.batch), 0
            if not skip or script.batch != BAD:
                try:
                    if loop:
                        script.optimizer.zero_grad()
                        run.backward(script.loss(script.net, batch))
                        script.optimizer.step()
                    else:
                        run.step(batch)
                except ValueError:
                    pass
            script.batch += not loop
        return {name: tensor.tolist() for name, tensor in run.state().items()}
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("first forward", {"workers": 2}),
        ("second forward", {"workers": 2}),
        ("second forward", {"workers": 1, "micro_batch": 6}),
        ("second forward", {"workers": 2, "reproducible": True}),
        ("backward", {"workers": 1}),
    ],
)
def test_on_one_device_the_step_is_skipped(place: str, options: dict[str, Any]) -> None:
    want = worlds.alone(trained, place=place, skip=True, loop=False, strategy="mirrored", **options)
    got = worlds.alone(trained, place=place, skip=False, loop=False, strategy="mirrored", **options)
    assert got == want


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage"])
def test_on_several_devices_a_step_is_skipped_whose_backward_has_not_begun(strategy: str) -> None:
    options = {"place": "first forward", "loop": False, "strategy": strategy, "workers": 2}
    assert worlds.run(2, trained, skip=False, **options) == worlds.run(2, trained, skip=True, **options)


@pytest.mark.parametrize(
    ("place", "strategy"),
    [
        ("backward", "mirrored:algorithm=native,bucket_mb=0.00001"),
        ("second forward", "mirrored"),
        ("second forward", "central_storage"),
        pytest.param("second forward", "local_sgd:period=2", marks=pytest.mark.full),
        pytest.param("second forward", "sharded:stage=1", marks=pytest.mark.full),
        ("second forward", "sharded:units=Linear"),
        ("second forward", "parameter_server"),
        ("second forward", "pipeline"),
    ],
)
def test_on_several_devices_the_next_step_is_refused(place: str, strategy: str) -> None:
    workers = 2 if place == "backward" else 4
    for said in worlds.run(2, trained, place=place, skip=False, loop=False, strategy=strategy, workers=workers):
        assert "the script has caught a ValueError within step 2 and goes on" in said
    # Messages of the step may be under way.
    worlds.forget(2)


def test_a_loop_with_one_micro_batch_skips_it() -> None:
    options = {"place": "backward", "loop": True, "strategy": "mirrored", "workers": 1}
    assert worlds.alone(trained, skip=False, **options) == worlds.alone(trained, skip=True, **options)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 2)])
def test_a_loop_whose_gradients_are_summed_is_refused(ranks: int, workers: int) -> None:
    for said in worlds.run(
        ranks, trained, place="backward", skip=False, loop=True, strategy="mirrored", workers=workers
    ):
        assert "the script has caught a ValueError within step 2 and goes on" in said
    worlds.forget(2)
