"""Lengths and intervals of ``tutti train`` in steps, once the number of samples is known."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.errors import UsageError
from tutti.train.train_plan import TrainPlan, make_train_plan

EVERY = {"eval_every": "none", "checkpoint_every": "none"}
PLANS: list[tuple[dict[str, Any], int | None, TrainPlan, int | None]] = [
    # options, samples in an epoch, plan, steps
    ({"epochs": 2}, 20, TrainPlan(6), 6),
    ({"epochs": 0.33}, 20, TrainPlan(1), 1),
    ({"epochs": 2, "eval_every": "0.1ep", "checkpoint_every": "1ep"}, 20, TrainPlan(6, 1, 3), 6),
    ({"steps": 5, "eval_every": "2st"}, None, TrainPlan(5, 2), 5),
    ({"epochs": 2, "eval_every": "1ep"}, None, TrainPlan(Duration(2, "ep"), Duration(1, "ep")), None),
    ({"samples": 30, "checkpoint_every": "16sa"}, None, TrainPlan(Duration(30, "sa"), None, Duration(16, "sa")), 4),
]


@pytest.mark.parametrize(("options", "dataset", "plan", "steps"), PLANS)
def test_plans(options: dict[str, Any], dataset: int | None, plan: TrainPlan, steps: int | None) -> None:
    assert make_train_plan(TrainConfig(**(EVERY | options)), Epochs(BatchContract(dataset, 8, 4))) == (plan, steps)


@pytest.mark.parametrize("options", [{"epochs": 0.5}, {"steps": 3, "eval_every": "0.5ep"}])
def test_parts_of_an_epoch_that_nobody_knows_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"0.5ep of a stream of unknown length cannot be counted"):
        make_train_plan(TrainConfig(**(EVERY | options)), Epochs(BatchContract(None, 8, 4)))


def test_a_part_of_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^0\.1 epochs .* train nothing .* --steps 1, or at least 0\.33 epochs"):
        make_train_plan(TrainConfig(epochs=0.1), Epochs(BatchContract(20, 8, 4)))
