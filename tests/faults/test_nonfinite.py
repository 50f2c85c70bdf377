"""Fault 19: NaN or infinity in one rank's gradient. All ranks skip that step alike; after too many the run ends."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import largest_difference
from tests.faults.commands import complaint, write_task
from tests.faults.commands import tutti as command

pytestmark = [pytest.mark.faults, pytest.mark.row(19)]

STEPS, WORKERS = 6, 4
SYNCHRONOUS = ["mirrored", "mirrored:algorithm=native", "model_parallel", "central_storage", "local_sgd:post=9"]


def poison(plain: nn.Module, name: str, run: list[Any], worker: int, steps: list[int], value: float) -> None:
    """Put ``value`` into one element of ``worker``'s gradient of parameter ``name`` in ``steps``, from 0."""
    calls = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal calls
        mine = run[0].context.mine
        step, nth = divmod(calls, len(mine))
        calls += 1
        if step not in steps or mine[nth] != worker:
            return gradient
        spoiled = gradient.clone()
        spoiled.view(-1)[0] = value
        return spoiled

    plain.get_parameter(name).register_hook(spoil)


def train(
    strategy: str, name: str, worker: int, steps: list[int], value: float, reproducible: bool = False, most: int = 10
) -> Any:
    """What each step said and left: (skipped, culprits, hash, loss); the final state; what ended it."""
    plain = model()
    made: list[Any] = []
    poison(plain, name, made, worker, steps, value)
    run = tutti.prepare(
        plain,
        "sgd:lr=0.1,momentum=0.9",
        samples(),
        loss,
        strategy=strategy,
        workers=WORKERS,
        batch_size=25,
        max_nonfinite=most,
        reproducible=reproducible,
    )
    made.append(run)
    seen, end = [], ""
    batches = (batch for epoch in range(STEPS) for batch in run.epoch(epoch))
    try:
        for _ in range(STEPS):
            value = run.step(next(batches))
            assert run.updated is not None
            parameters = [p.numpy().tobytes() for p in parameters_of(run).values()]
            seen.append((run.updated.skipped, run.updated.nonfinite, parameters, value))
    except tutti.errors.NonFiniteError as error:
        end = str(error)
    return seen, {n: t.numpy().copy() for n, t in run.state().items()}, end


def parameters_of(run: Any) -> dict[str, Tensor]:
    """All parameters as the optimizer left them; batch-norm statistics follow the data, not the gradient."""
    return {name: t for name, t in run.state().items() if "running" not in name and "num_batches" not in name}


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("strategy", SYNCHRONOUS)
def test_all_ranks_skip_the_same_step(
    strategy: str, ranks: int, seed: int, record_property: Callable[[str, object], None]
) -> None:
    draw = random.Random(f"{strategy} {ranks} {seed}")
    value = draw.choice([math.nan, math.inf, -math.inf])
    name = draw.choice(["0.weight", "4.weight", "9.bias"])
    worker, step = draw.randrange(WORKERS), draw.randrange(1, STEPS)
    for reproducible in (False, True) if strategy == "mirrored" else (False,):
        fault = {"name": name, "worker": worker, "steps": [step], "value": value, "reproducible": reproducible}
        [(_, want, _)] = worlds.run(1, train, strategy="single", **fault)
        for seen, state, end in worlds.run(ranks, train, strategy=strategy, **fault):
            assert [skipped for skipped, *_ in seen] == [number == step for number in range(STEPS)]
            assert seen[step][2] == seen[step - 1][2], "a skipped step changed the weights"
            assert seen[step - 1][2] != seen[step - 2][2] or step < 2
            assert seen[step][1] == (name,)
            assert all(math.isfinite(value) for *_, value in seen)
            record_property("max|Δ| to one device, float64", largest_difference(state, want))
            assert largest_difference(state, want) <= 1e-10
            assert end == ""


@pytest.mark.parametrize("ranks", [3, 4])
def test_local_sgd_skips_the_update_of_that_worker_alone(ranks: int, seed: int) -> None:
    draw = random.Random(f"local {ranks} {seed}")
    worker, step = draw.randrange(WORKERS), draw.randrange(STEPS)
    fault = {"name": "4.weight", "worker": worker, "steps": [step], "value": math.nan, "strategy": "local_sgd:period=2"}
    [(_, want, _)] = worlds.run(1, train, **fault)
    for seen, state, _ in worlds.run(ranks, train, **fault):
        assert [skipped for skipped, *_ in seen] == [number == step for number in range(STEPS)]
        assert seen[step][1] == ("4.weight",)
        assert largest_difference(state, want) <= 1e-10
        assert all(torch.isfinite(torch.from_numpy(t)).all() for t in state.values())


@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, "local_sgd"])
def test_too_many_in_a_row_end_the_run_on_every_rank(strategy: str) -> None:
    fault = {"name": "9.bias", "worker": 3, "steps": [0, 2, 3, 4], "value": math.nan, "most": 3}
    for seen, _, end in worlds.run(4, train, strategy=strategy, **fault):
        assert [skipped for skipped, *_ in seen] == [True, False, True, True]
        assert "3 steps in a row had a NaN or infinite gradient" in end
        assert "step 5, 9.bias" in end


POISON = """
COUNT = 0

def model():
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    def spoil(gradient):
        global COUNT
        COUNT += 1
        return gradient * float("nan") if COUNT in {steps} else gradient
    # Of four stages or four copies, this parameter is the last rank's.
    if RANK == int(os.environ["WORLD_SIZE"]) - 1:
        plain.get_parameter("4.weight").register_hook(spoil)
    return plain
"""
FLAGS = ("--batch-size", "12", "--steps", "6", "--devices", "3", "--out", "run", "--timeout", "20", "--log-every", "1")


@pytest.mark.parametrize("strategy", ["mirrored", "model_parallel", "local_sgd"])
def test_command_line_counts_and_warns_of_one_skipped_step(tmp_path: Path, strategy: str) -> None:
    own = write_task(tmp_path, POISON.format(steps="(2,)"))
    result = command(tmp_path, "train", own, "--strategy", strategy, *FLAGS)
    assert result.code == 0, result.err
    [warned] = [line for line in result.err.splitlines() if "skipped" in line]
    assert "step 2" in warned and "4.weight" in warned
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["skipped"], summary["steps"], summary["exit_code"]) == (1, 6, 0)
    if strategy != "local_sgd":
        assert summary["updates"] == 5
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r.get("skipped")] == [2]


@pytest.mark.parametrize("strategy", ["mirrored", "model_parallel", "local_sgd"])
def test_command_line_ends_with_6_and_the_parameter(tmp_path: Path, strategy: str) -> None:
    own = write_task(tmp_path, POISON.format(steps="(3, 4)"))
    result = command(tmp_path, "train", own, "--strategy", strategy, *FLAGS, "--max-nonfinite", "2")
    assert result.code == 6, result.err
    said = complaint(result)
    assert "failed" in said[0] and "NonFiniteError" in said[0] and "step 4" in said[0] and "4.weight" in said[0]
    assert "Traceback" not in result.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 6
