"""A gradient that overflows under a loss scale: every rank skips the step and lowers the scale, or ends where that
cannot help."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.faults.commands import tutti as command
from tests.faults.commands import write_task
from tests.faults.test_nonfinite import FLAGS, POISON, STEPS, WORKERS, parameters_of, poison

pytestmark = [pytest.mark.faults, pytest.mark.row(19)]

STRATEGIES = [
    "mirrored",
    "mirrored:algorithm=native",
    "model_parallel",
    "local_sgd:period=2",
    "central_storage",
    "pipeline",
]


def train(strategy: str, steps: list[int], scale: str, most: int = 10, broken_sample: bool = False) -> Any:
    """For each step (skipped, scale used, whether weights changed); the scale at the end; what ended the run."""
    plain, made = model(), []
    images, labels = samples()
    if broken_sample:
        images[0] = math.nan
    poison(plain, "4.weight", made, 2, steps, math.inf)
    options: dict[str, Any] = {"workers": WORKERS, "batch_size": 25, "max_nonfinite": most, "loss_scale": scale}
    run = tutti.prepare(plain, "sgd:lr=0.1", (images, labels), loss, strategy=strategy, **options)
    made.append(run)
    seen, end = [], ""
    before = parameters_of(run)
    before = {name: tensor.clone() for name, tensor in before.items()}
    batches = (batch for epoch in range(STEPS) for batch in run.epoch(epoch))
    try:
        for _ in range(STEPS):
            run.step(next(batches))
            assert run.updated is not None and run.loss_scale is not None
            after = {name: tensor.clone() for name, tensor in parameters_of(run).items()}
            changed = any(not torch.equal(after[name], before[name]) for name in after)
            seen.append((run.updated.skipped, run.loss_scale.used, changed))
            before = after
    except tutti.errors.NonFiniteError as error:
        end = str(error)
    assert run.loss_scale is not None
    return seen, run.loss_scale.state(), end


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_skip_and_lower_the_scale_in_the_same_step(strategy: str, ranks: int) -> None:
    """Of four workers one overflows; with ``most=1`` a skip that counted would end the run."""
    local = strategy.startswith("local_sgd")
    for seen, scale, end in worlds.run(
        ranks, train, strategy=strategy, steps=[2], scale="dynamic:init=1024,growth_interval=2", most=1
    ):
        assert [skipped for skipped, *_ in seen] == [False, False, True, False, False, False]
        assert [used for _, used, _ in seen] == [1024, 1024, 2048, 1024, 1024, 2048]
        assert [changed for *_, changed in seen] == [True, True, local, True, True, True]
        assert (scale, end) == ({"value": 2048, "good_steps": 1}, "")


def test_skips_count_where_no_scale_can_help() -> None:
    """At the floor; with a scale that is stated; and where the loss itself is not finite."""
    every = list(range(STEPS))
    for strategy in ("mirrored", "local_sgd"):
        arguments: dict[str, Any] = {"strategy": strategy, "most": 2}
        for scale, want in (("dynamic:init=4,min=1", [4, 2, 1]), ("4", [4])):
            for seen, _, end in worlds.run(3, train, steps=every, scale=scale, **arguments):
                assert [used for _, used, _ in seen] == want
                assert "2 steps in a row" in end and "precision='bf16'" in end
        [*_, (seen, _, end)] = worlds.run(
            3,
            train,
            steps=[],
            scale="dynamic:init=1024,growth_interval=1",
            broken_sample=True,
            strategy=strategy,
            most=1,
        )
        assert not any(skipped for skipped, *_ in seen) and "1 step in a row" in end


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd"])
def test_command_line_reports_the_scale(tmp_path: Path, strategy: str) -> None:
    own = write_task(tmp_path, POISON.format(steps="(2,)"))
    words = ("--strategy", strategy, *FLAGS, "--precision", "fp16", "--loss-scale", "dynamic:init=512")
    result = command(tmp_path, "train", own, *words, "--max-nonfinite", "1")
    assert result.code == 0, result.err
    [warned] = [line for line in result.err.splitlines() if "skipped" in line]
    assert "step 2 skipped: the gradient of 4.weight is not finite at loss scale 512, the next is 256" in warned
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["skipped"], summary["loss_scale"], summary["precision"]) == (1, 256, "fp16")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss_scale"] for r in records if r["group"] == "train"] == [512, 512, 256, 256, 256, 256]
    assert all(r["grad_norm"] < 10 for r in records if r["group"] == "train" and not r.get("skipped"))
