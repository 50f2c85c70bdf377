"""Stages by hand: lists of modules, by name or as modules; equal to one device, or refused by name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from torch import nn

import tutti
from tests import worlds
from tests.parallel.shapes import build, data, loss
from tests.parallel.splitting import TOLERANCE, check, outcome, train
from tutti import parallel
from tutti.config.strategy_choice import parse_strategy
from tutti.errors import UsageError
from tutti.parallel.pipeline.stage_partition import find_stage_partition

GPT = "embed+block1/block2+norm+head"


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        (f"pipeline:stages={GPT}", 2),
        ("model_parallel:stages=embed/block1+block2/norm+head", 3),
        ("pipeline:schedule=interleaved,stages=embed/block1/block2/norm+head", 2),
        (f"hybrid:tensor=2,least=1,stages={GPT}", 4),
    ],
)
def test_equals_one_device(strategy: str, devices: int) -> None:
    check("gpt", strategy, devices, steps=2, workers=1)


def by_modules(stages: int) -> Any:
    model = build("gpt")
    lists = [[model.embed, model.block1], [model.block2, model.norm, model.head]]
    strategy = tutti.strategy("pipeline", stages=lists) if stages > 1 else "single"
    arguments = {"strategy": strategy, "workers": 1, "batch_size": 8, "micro_batch": 3, "precision": "fp64", "ema": 0.8}
    run = tutti.prepare(model, "adamw:lr=0.01", data("gpt"), loss("gpt"), **arguments)  # type: ignore[arg-type]
    train(run, 2)
    return outcome(run), dict(run.replica.summary)


def test_from_python() -> None:
    [(want, _)] = worlds.run(1, by_modules, stages=1)
    for got, said in worlds.run(2, by_modules, stages=2):
        assert max(abs(got[name] - want[name]).max() for name in want) <= TOLERANCE
        assert "cut before block2" in said["stages"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages=a/b,cuts=b", "leave out one of the two"),
        ("stages=a/a+a", "stage 1 of stages names a twice"),
        ("stages=a+/b", "stage 0 of stages has an empty name, or no module"),
        ("stages=a//b", "stage 1 of stages has an empty name, or no module"),
        ("stages=a/b/c,schedule=interleaved", "3 stages cannot be 2 virtual stages"),
        ("stages=a/b,schedule=interleaved", "2 stages cannot be 2 virtual stages"),
        ("stages=two", "'two' is not a whole number"),
        ("stages=0", "stages is 0, must be at least 1"),
    ],
)
def test_malformed_lists_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategy(f"pipeline:{text}")
    assert words in str(caught.value)


def test_other_numbers_of_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="3 devices cannot hold 2 stages"):
        parallel.check_strategy(parse_strategy("pipeline:stages=a/b"), 3)


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ((("a",), ("b", "d")), "the model has no module 'd'"),
        ((("a", "c"), ("b",)), "stage 0 cannot have c, which stages= names for it: the forward calls it on stage 1"),
        ((("b", "c"), ("a",)), "no stage can begin with a"),
        ((("a",), ("b",)), "stages= does not name c, which the forward calls on stage 1"),
    ],
)
def test_lists_that_do_not_fit_the_forward_are_refused(lists: tuple[tuple[str, ...], ...], words: str) -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), r=nn.ReLU(), b=nn.Linear(2, 2), c=nn.Linear(2, 2)))
    with pytest.raises(UsageError) as caught:
        find_stage_partition(model, 2, [names[0] for names in lists[1:]], members=lists)
    assert words in str(caught.value)


def test_modules_without_parameters_need_no_name() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), r=nn.ReLU(), b=nn.Linear(2, 2)))
    assert find_stage_partition(model, 2, ["b"], members=(("a",), ("b",))).bounds == (0, 2, 3)
