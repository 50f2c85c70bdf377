"""Sharded models beside a run: one that the script shards by itself, and that of another run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tutti
from tests import worlds
from tutti.errors import UsageError


def trained() -> int:
    """Number of steps of a run and of a model under FSDP2 by hand, whose rows differ between ranks."""
    torch.manual_seed(0)
    model, other = nn.Linear(4, 1), nn.Linear(4, 4)
    fully_shard(other, mesh=init_device_mesh("cpu", (tutti.size(),)))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    run = tutti.prepare(
        model, "sgd:lr=0.1", torch.randn(24, 4), lambda called, batch: called(batch).square().mean(), batch_size=4
    )
    for batch in run.epoch(0):
        run.step(batch)
        other(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.updates


def test_an_optimizer_of_shards_is_the_scripts_own_business() -> None:
    assert worlds.run(2, trained) == [6, 6]
    worlds.forget(2)


def mean(called: Any, batch: Any) -> Any:
    return called(batch).square().mean()


def draw(wide: nn.Module) -> None:
    """Draws other numbers into the rows of each rank than a draw for the whole parameter."""
    with torch.no_grad():
        next(wide.parameters()).normal_()


class Drawing(torch.optim.SGD):
    """An optimizer of the script that draws into the parameters of ``wide``."""

    wide: nn.Module | None = None

    def step(self, closure: Any = None) -> Any:
        if self.wide is not None:
            draw(self.wide)
        return super().step(closure)


def beside(place: str) -> str:
    """What the refusal says of a draw into a sharded run's parameters, at a place of the fourth step of another run."""
    torch.manual_seed(0)
    wide, model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), nn.Linear(4, 1)
    sharded = tutti.prepare(wide, "sgd:lr=0.1", torch.randn(16, 4), mean, strategy="sharded:units=Linear")
    sharded.step(next(iter(sharded.epoch(0))))
    optimizer = (Drawing if place == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    draws = {"loss": False, "body": False}

    def loss(called: Any, batch: Any) -> Any:
        if draws["loss"]:
            draw(wide)
        return mean(called, batch)

    custom = place == "body"
    run = tutti.prepare(model, optimizer, torch.randn(96, 4), None if custom else loss, workers=2, batch_size=8)
    try:
        for step, batch in enumerate(run.microbatches(0) if custom else run.epoch(0)):
            if step == 3:
                draws[place] = True
                if place == "between":
                    draw(wide)
                elif place == "step hook":
                    optimizer.register_step_pre_hook(lambda *_: draw(wide))
                elif isinstance(optimizer, Drawing):
                    optimizer.wide = wide
            if not custom:
                run.step(batch)
                continue
            if draws["body"]:
                draw(wide)
            run.backward(mean(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", ["between", "loss", "body", "step hook", "optimizer"])
def test_a_draw_into_a_sharded_runs_parameters_is_refused_in_another_runs_step(place: str) -> None:
    for said in worlds.run(2, beside, place=place):
        assert "the script draws random numbers for a parameter of which each rank has some rows" in said
    worlds.forget(2)
