"""Steps to profile and to trace: they must be steps that the run has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.metrics.listener import Listeners
from tutti.train.step_windows import Window, planned_windows


class Heard(Listeners):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(())
        self.texts: list[str] = []

    def warned(self, text: str) -> None:
        self.texts.append(text)


def windows(total: int | None, clock: int, resumes: bool) -> tuple[list[Window], list[str]]:
    run: Any = SimpleNamespace(global_step=clock, local_step=clock)
    heard = Heard()
    return planned_windows(TrainConfig(profile="3:4", trace="1:2"), run, total, "out", resumes, heard), heard.texts


def test_steps_to_profile_must_be_in_the_run() -> None:
    for total, clock in ((6, 0), (None, 0), (9, 3)):
        found, said = windows(total, clock, resumes=clock > 0)
        assert len(found) == 2 and not said
    with pytest.raises(UsageError, match="--profile 3:4 needs 6 steps, and the run has 5"):
        windows(5, 0, resumes=False)
    found, said = windows(9, 4, resumes=True)
    assert len(found) == 1
    assert said == ["--profile 3:4 needs 6 steps, and the run has 5 left: there will be no profile"]
