"""The planned run: which run's options it takes, and at which learning rate another batch is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.planning.test_run_evidence import TARGET, evidence, write_run
from tutti.planning.device_plan import DataDemand, DevicePlan, PlannedStep
from tutti.planning.plan_file import model_run, plan_config, rate_words
from tutti.planning.planned_run import PlannedRun


def plan_of(batch: int, strategy: str = "mirrored") -> DevicePlan:
    step = PlannedStep(1, batch, strategy, 0.1, np.ones(1), {}, "")
    return DevicePlan(step, DataDemand(4000.0, np.ones(1), None, ""), 40, 4.0, np.ones(1), None, None)


@pytest.mark.parametrize(
    ("optimizer", "own", "batch", "rule", "rate"),
    [
        ("adam:lr=0.004", "none", 512, "sqrt:base_batch=128", 0.008),
        ("sgd:lr=0.1,momentum=0.9", "none", 512, "linear:base_batch=128", 0.4),
        ("adam:lr=0.004", "linear:base_batch=64", 512, "linear:base_batch=64", 0.032),
        ("adam:lr=0.004", "none", 128, "none", 0.004),
        ("adam:lr=0.004", "none", 32, "none", 0.002),
    ],
)
def test_the_rate_of_a_plan_follows_its_batch(
    tmp_path: Path, optimizer: str, own: str, batch: int, rule: str, rate: float
) -> None:
    runs = evidence(
        write_run(tmp_path / "large", 128, 9600, optimizer=optimizer, lr_scale=own),
        write_run(tmp_path / "small", 32, 6400, optimizer="adam:lr=0.002"),
    )
    plan = plan_of(batch)
    near = model_run(plan, runs)
    assert near is not None and near.config.batch_size == min(batch, 128)
    config = plan_config(plan, PlannedRun.of(runs[0].config), TARGET, near)
    assert config.lr_scale == rule and config.batch_size == batch
    words = rate_words(config, near)
    assert words.startswith(f"{rate:g}") and ("an assumption" in words) == (batch == 512), words
    assert config.optimizer_choice.options.lr * config.lr_rule.factor(batch) == pytest.approx(rate)
    if own != "none":
        assert "the rule of the run" in words


def test_the_run_of_the_plans_batch_and_strategy_is_taken(tmp_path: Path) -> None:
    runs = evidence(
        write_run(tmp_path / "a", 32, 7000, optimizer="adam:lr=0.1"),
        write_run(tmp_path / "b", 32, 6000, optimizer="adam:lr=0.2"),
        write_run(tmp_path / "c", 32, 5000, optimizer="adam:lr=0.3"),
        write_run(tmp_path / "d", 32, None, optimizer="adam:lr=0.4"),
        write_run(tmp_path / "e", 32, 9000, strategy="local_sgd:period=4", workers=2, devices="2"),
        write_run(tmp_path / "f", 64, 9000),
    )

    def taken(batch: int, strategy: str) -> str:
        found = model_run(plan_of(batch, strategy), runs)
        assert found is not None
        return found.path.name

    assert taken(32, "mirrored") == "b" and taken(32, "local_sgd:period=4") == "e"
    assert taken(256, "mirrored") == "f"
    # No run has reached its target: what they were trained with is all there is.
    assert model_run(plan_of(32), runs[3:4]) is runs[3] and model_run(plan_of(32), []) is None


def test_a_rate_that_no_run_has_tried_is_called_an_assumption() -> None:
    config = plan_config(plan_of(64), PlannedRun(optimizer="sgd:lr=0.05"), TARGET, None)
    assert config.lr_scale == "none" and "0.05" in rate_words(config, None)
    assert "no run has tried it" in rate_words(config, None)
