"""What ``tutti train`` makes of its configuration once the data are there: lengths, and steps to profile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.config.spec import Duration
from tutti.config.train_config import TrainConfig
from tutti.data.contract import BatchContract
from tutti.data.epochs import Epochs
from tutti.errors import UsageError
from tutti.metrics.listener import Listeners
from tutti.train.loop import TrainPlan
from tutti.train.main import _plan, _windows
from tutti.train.step_windows import Window

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
    assert _plan(TrainConfig(**(EVERY | options)), Epochs(BatchContract(dataset, 8, 4))) == (plan, steps)


@pytest.mark.parametrize("options", [{"epochs": 0.5}, {"steps": 3, "eval_every": "0.5ep"}])
def test_parts_of_an_epoch_that_nobody_knows_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"0.5ep of a stream of unknown length cannot be counted"):
        _plan(TrainConfig(**(EVERY | options)), Epochs(BatchContract(None, 8, 4)))


def test_a_part_of_an_epoch_without_a_step_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^0\.1 epochs .* train nothing .* --steps 1, or at least 0\.33 epochs"):
        _plan(TrainConfig(epochs=0.1), Epochs(BatchContract(20, 8, 4)))


class Heard(Listeners):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(())
        self.texts: list[str] = []

    def warned(self, text: str) -> None:
        self.texts.append(text)


def windows(total: int | None, clock: int, again: bool) -> tuple[list[Window], list[str]]:
    run: Any = SimpleNamespace(clock=clock, taken=clock)
    heard = Heard()
    return _windows(TrainConfig(profile="3:4", trace="1:2"), run, total, "out", again, heard), heard.texts


def test_steps_to_profile_must_be_in_the_run() -> None:
    for total, clock in ((6, 0), (None, 0), (9, 3)):
        found, said = windows(total, clock, again=clock > 0)
        assert len(found) == 2 and not said
    with pytest.raises(UsageError, match="--profile 3:4 needs 6 steps, and the run has 5"):
        windows(5, 0, again=False)
    found, said = windows(9, 4, again=True)
    assert len(found) == 1
    assert said == ["--profile 3:4 needs 6 steps, and the run has 5 left: there will be no profile"]
