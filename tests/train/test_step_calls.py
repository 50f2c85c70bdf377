"""The Python work of a step: calls of functions, whose number does not depend on the machine or its load."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds

WARM_UP, COUNTED = 65, 32
"""Checks of the first steps, and of steps whose number is a power of two, are not counted."""


class Calls:
    """Counts calls of Python functions and of built-in ones while it is the process's profile function."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


def start(calls: Calls) -> None:
    """Begin to count; no garbage is collected meanwhile, whose finalizers would count, too."""
    gc.collect()
    gc.disable()
    sys.setprofile(calls)


def end() -> None:
    sys.setprofile(None)
    gc.enable()


def calls_per_step(layers: int, loop: bool) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    data = TensorDataset(torch.randn(8 * (WARM_UP + COUNTED), 4))

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).square().mean()

    run = tutti.prepare(model, optimizer, data, None if loop else loss, workers=1, batch_size=8)
    calls = Calls()

    for taken, batch in enumerate(run.microbatches(0) if loop else run.epoch(0)):
        if loop:
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
        else:
            run.step(batch)
        if taken == WARM_UP - 1:
            start(calls)
    end()
    return calls.count / COUNTED


def calls_beside(sharded: bool, prepared: bool) -> float:
    """Calls in a step of a plain model, or of a run of it, without and with a sharded run in the process.

    The fewest of all steps: a rank that waits for the other one looks for it in a loop.
    """
    torch.manual_seed(0)
    wide, other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), None
    if sharded:
        other = tutti.prepare(wide, "sgd", torch.randn(16, 4), lambda m, x: m(x).square().mean(), strategy="sharded")
        other.step(next(iter(other.epoch(0))))
    model, sample = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    run = tutti.prepare(model, optimizer, sample, lambda m, x: m(x).square().mean()) if prepared else None
    calls, counts = Calls(), []
    for step in range(WARM_UP + COUNTED):
        if run is not None:
            run.step(sample)
        else:
            model(sample).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == WARM_UP - 1:
            start(calls)
        counts.append(calls.count)
    end()
    del other
    return min(after - before for before, after in pairwise(counts[WARM_UP - 1 :]))


@pytest.mark.parametrize(("prepared", "most"), [(False, 630), (True, 300)])
def test_a_sharded_run_adds_few_calls_to_the_steps_of_other_models(prepared: bool, most: int) -> None:
    """Its function mode sees each call by the script: 573 calls more in a plain step when the bounds were set.

    In a run's step it is off but for the loss function: 94 calls more, and some tens where a rank waits. Where it is
    on, each of 140 calls of PyTorch adds several.
    """
    before = worlds.run(2, calls_beside, sharded=False, prepared=prepared)
    beside = worlds.run(2, calls_beside, sharded=True, prepared=prepared)
    more = [after - alone for alone, after in zip(before, beside, strict=True)]
    assert max(more) <= most, more


@pytest.mark.parametrize(("loop", "most", "most_more"), [(False, 680, 17), (True, 1020, 35)])
def test_a_step_calls_few_functions(loop: bool, most: int, most_more: int) -> None:
    """With 6 parameters, and for each further one; the bounds are a tenth above the counts when they were set."""
    few, many = (worlds.run(1, calls_per_step, layers=layers, loop=loop)[0] for layers in (3, 30))
    more = (many - few) / 54
    assert few <= most and more <= most_more, (few, more)


def calls_of_watched_steps() -> tuple[int, int]:
    """Calls in the first step of a loop, and the fewest in one of its next four, which checks of values watch, too."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4))
    counts = list[int]()
    # The first run fills caches.
    for _ in range(2):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
        run = tutti.prepare(model, optimizer, data, workers=2, batch_size=8)
        counts, calls = [0], Calls()
        start(calls)
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(model(batch[0]).square().mean())
            optimizer.step()
            counts.append(calls.count)
        end()
    first, *later = (after - before for before, after in pairwise(counts))
    return first, min(later)


def test_watched_steps_call_few_functions() -> None:
    """Modes that follow values see the calls of the loop's body, and not the hundreds of its backward and update.

    Rank 0 looks, too, whether the first loss mixes samples. When the bounds were set it was 29,900 and 14,100 to
    14,800 calls in the first step, and 10,000 in others; 37,800, 18,900 and 11,500 where the modes see all calls.
    """
    counts = worlds.run(2, calls_of_watched_steps)
    for rank, (first, later) in enumerate(counts):
        assert first <= (16_200 if rank else 32_900) and later <= 10_900, counts
