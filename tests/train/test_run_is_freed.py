"""A run that the script no longer refers to leaves memory, with its function mode and a model that is not kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tutti
from tests import worlds
from tests.parallel.mixers import loss, prepared
from tutti.torch_compat import MODULE_HOOK_TABLES, accumulation_hooks, function_mode_depth


def train(strategy: str, custom: bool, whole: bool) -> tuple[weakref.ref[object], weakref.ref[object]]:
    run = prepared(strategy, "adamw")
    if custom:
        for batch in run.microbatches(0):
            run.backward(loss(run.model, batch))
            run.optimizer.step()  # type: ignore[union-attr]
            run.optimizer.zero_grad()  # type: ignore[union-attr]
            if not whole:
                break
    else:
        for batch in run.epoch(0):
            run.step(batch)
    # The first rank's run ends its parameter servers, whose answers others may still wait for.
    run.context.comms.world.agree(["ended"], "the end of the training", "none")
    return weakref.ref(run), weakref.ref(run.model)


def left_over(strategy: str, custom: bool, whole: bool = True) -> tuple[bool, bool, int]:
    """Whether run and model are still there, and the number of function modes that are still active."""
    gc.collect()
    modes = function_mode_depth()
    run, model = train(strategy, custom, whole)
    gc.collect()
    return run() is not None, model() is not None, function_mode_depth() - modes


ALL = ("mirrored", "sharded:stage=1", "sharded:units=Linear", "tensor:least=1", "central_storage", "parameter_server")
PLACES = [
    *((3, strategy, custom) for strategy in ALL for custom in (False, True)),
    *((3, "local_sgd:period=2", False), (4, "hybrid:stages=2,tensor=2,least=1", False)),
]


@pytest.mark.parametrize(("size", "strategy", "custom"), PLACES)
def test_a_run_that_is_no_longer_used_is_freed(size: int, strategy: str, custom: bool) -> None:
    assert worlds.run(size, left_over, strategy=strategy, custom=custom) == [(False, False, 0)] * size


def replaced(strategy: str) -> tuple[bool, int]:
    """Whether the next ``tutti.prepare`` leaves a run that is no longer used, and its function modes."""
    gc.collect()
    modes = function_mode_depth()
    gc.disable()
    try:
        run, _ = train(strategy, custom=False, whole=True)
        prepared("mirrored", "adamw")
        return run() is not None, function_mode_depth() - modes
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", ["sharded:units=Linear", "tensor:least=1"])
def test_the_next_run_does_not_wait_for_the_garbage_collector(strategy: str) -> None:
    """A script that tries rates one after another would pay for the function modes of all its runs."""
    assert worlds.run(2, replaced, strategy=strategy) == [(False, 0)] * 2


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=1", "sharded", "tensor:least=1", "central_storage"])
def test_a_loop_that_the_script_leaves_early_leaves_no_function_mode(strategy: str) -> None:
    assert worlds.run(2, left_over, strategy=strategy, custom=True, whole=False) == [(False, False, 0)] * 2


class Recomputed(nn.Module):
    """Draws, and computes its middle again in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.draw, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.last(checkpoint(lambda y: self.draw(self.first(y)).tanh(), x, use_reentrant=False))


def fold(model: nn.Module, strategy: str, custom: bool) -> weakref.ref[object]:
    """Train with two micro-batches a rank, whose bodies are compared."""
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(2)), torch.zeros(16, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    run = tutti.prepare(model, optimizer, data, loss, strategy=strategy, workers=4, batch_size=8)
    if custom:
        for batch in run.microbatches(0):
            run.backward(loss(run.model, batch))
            optimizer.step()
            optimizer.zero_grad()
    else:
        for batch in run.epoch(0):
            run.step(batch)
    return weakref.ref(run)


def hooks(model: nn.Module) -> int:
    of_modules = sum(len(vars(module)[name]) for module in model.modules() for name in MODULE_HOOK_TABLES)
    return of_modules + sum(len(accumulation_hooks(p) or ()) for p in model.parameters())


def folds(strategy: str, custom: bool, same: bool) -> tuple[list[bool], bool]:
    """Whether the runs of three folds are still there while the script keeps their models, and whether hooks add up."""
    models, runs, counts = [Recomputed()], [], []
    for _ in range(3):
        models += [] if same else [Recomputed()]
        runs.append(fold(models[-1], strategy, custom))
        counts.append(hooks(models[-1]))
    gc.collect()
    return [run() is not None for run in runs], counts[0] < counts[-1]


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("strategy", "custom"), [("mirrored", True), ("mirrored", False), ("central_storage", True)])
def test_a_model_that_is_kept_keeps_no_run(strategy: str, custom: bool, same: bool) -> None:
    assert worlds.run(2, folds, strategy=strategy, custom=custom, same=same) == [([False] * 3, False)] * 2


def weights(folds: int) -> list[Any]:
    model = Recomputed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(folds):
        model.load_state_dict(before)
        fold(model, "mirrored", custom=True)
    return [p.tolist() for p in model.parameters()]


def test_a_fold_trains_a_model_as_if_it_were_the_first() -> None:
    assert worlds.run(2, weights, folds=3) == worlds.run(2, weights, folds=1)


def loaded_later() -> tuple[str, bool]:
    """Dtype of a whole model that has loaded weights and was converted after its run, and whether the run is gone."""
    model = Recomputed()
    run = fold(model, "mirrored", custom=False)
    gc.collect()
    model.load_state_dict(Recomputed().state_dict())
    return str(model.double().first.weight.dtype), run() is None


def test_a_model_is_a_plain_one_after_its_run() -> None:
    assert worlds.run(2, loaded_later) == [("torch.float64", True)] * 2
