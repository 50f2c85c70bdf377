"""A planned run parses its strategy once; all that plans and simulates it takes the object."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from tutti.config import train_config
from tutti.config.strategy_choice import parse_strategy
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.planning.pipeline_memory import MicroBatchSizes, needs_module_times, timing_config
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_builders import check_buildable, rank_micro_batches
from tutti.planning.step_delays import check_delays


def test_the_strategy_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def counted(text: str, parse: object = parse_strategy) -> object:
        texts.append(text)
        return parse(text)  # type: ignore[operator]

    monkeypatch.setattr(train_config, "parse_strategy", counted)
    run = PlannedRun(strategy="pp:stages=2,micro_batches=4", devices="4", batch_size=32, slow="rank=1,factor=2")
    check_buildable(run)
    check_delays(run)
    assert rank_micro_batches(run) == [[4, 4, 4, 4]]
    assert (MicroBatchSizes.of(run).count, needs_module_times(run), timing_config(run).micro_batch) == (4, True, 4)
    assert (run.shape["stage"], run.data_ranks, run.device_count, run.strategy_choice.name) == (2, 2, 4, "pipeline")
    assert texts == [run.strategy]


def test_a_resized_run_is_the_replaced_one() -> None:
    base = PlannedRun(strategy="pipeline:stages=2", devices="4", batch_size=64, micro_batch=16)
    made, plain = (
        base.sized(32, 8, "blocks"),
        replace(base, batch_size=32, micro_batch=8, activation_checkpointing="blocks"),
    )
    assert made == plain and (made.shape, made.data_ranks) == (plain.shape, plain.data_ranks)
    assert made.checkpointing == plain.checkpointing and base.checkpointing is None
    assert rank_micro_batches(made) == rank_micro_batches(plain) == [[8, 8]]
    growing = replace(base, batch_growth="milestones=1ep,factor=5,largest=200")
    with pytest.raises(UsageError, match="largest"):
        growing.sized(256, None, "none")


def test_a_planned_run_is_the_same_configuration_in_every_process() -> None:
    plain = TrainConfig(strategy="sharded:stage=2", devices="2")
    run = PlannedRun.of(plain)
    assert all(getattr(run, field.name) == getattr(plain, field.name) for field in fields(TrainConfig))
    assert run.strategy_choice.sync.zero_stage == 2 and PlannedRun.of(run) is run
    there = pickle.loads(pickle.dumps(run))
    assert there == run and there.strategy_choice.name == "sharded"
    assert replace(run, strategy="mirrored").strategy_choice.name == "mirrored"
