"""A strategy is parsed once, at the command or at ``tutti.prepare``, and carried as an object."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import nn

from tutti.config import train_config
from tutti.config.strategy_choice import StrategyChoice, parse_strategy
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.train import strategy_spec
from tutti.train.strategy_spec import choose_strategy, strategy_text


def fail(text: str) -> StrategyChoice:
    raise AssertionError(f"'{text}' is parsed again")


def test_a_configuration_takes_the_parsed_strategy_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(strategy="fsdp:stage=2")
    assert config.strategy_choice.name == "sharded"
    sent = pickle.dumps(config)
    monkeypatch.setattr(train_config, "parse_strategy", fail)
    there: TrainConfig = pickle.loads(sent)
    assert there == config
    assert there.strategy_choice == config.strategy_choice


def test_prepare_takes_a_parsed_strategy_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = parse_strategy("pipeline:stages=2")
    monkeypatch.setattr(strategy_spec, "parse_strategy", fail)
    assert choose_strategy(choice, nn.Linear(1, 1)) is choice
    assert strategy_text(choice, nn.Linear(1, 1)) == "pipeline:stages=2"


@pytest.mark.parametrize("given", ["tp:tensor=2", strategy_spec.strategy("tensor", tensor=2)])
def test_texts_and_python_values_are_the_same_strategy(given: Any) -> None:
    assert choose_strategy(given, nn.Linear(1, 1)) == parse_strategy("tensor:tensor=2")


def test_micro_batches_of_a_pipeline_are_counted_within_a_workers_share() -> None:
    pipeline, mirrored = parse_strategy("pipeline:micro_batches=3"), parse_strategy("mirrored")
    assert (pipeline.micro_batch(None, 32, 3), mirrored.micro_batch(None, 32, 3)) == (4, None)
    assert mirrored.micro_batch(5, 32, 3) == 5
    with pytest.raises(UsageError, match="both say how a worker's share is cut"):
        pipeline.micro_batch(5, 32, 3)
