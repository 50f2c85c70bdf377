"""A run that the script no longer refers to leaves memory, with its model and its function mode."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests import worlds
from tests.parallel.mixers import loss, prepared
from tutti.torch_compat import function_mode_depth


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
