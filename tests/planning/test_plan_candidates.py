"""Measured steps replace predicted ones, and scale the predictions that no run has measured."""

from __future__ import annotations

import numpy as np
import pytest

from tutti.planning.device_plan import DRAWS, PlannedStep
from tutti.planning.plan_candidates import PlanCandidates, prefer_measured


def made(devices: int, batch: int, strategy: str, seconds: float, measured: bool = False) -> PlannedStep:
    terms = {} if measured else {"compute": seconds}
    return PlannedStep(devices, batch, strategy, seconds, np.full(DRAWS, seconds), terms, "made by hand", measured)


def test_measured_steps_win_and_scale_the_others() -> None:
    found = PlanCandidates([made(1, 64, "mirrored", 0.1), made(2, 64, "mirrored", 0.06), made(2, 64, "sharded", 0.08)])
    prefer_measured(found, [made(1, 64, "mirrored", 0.2, measured=True), made(4, 8, "mirrored", 0.5, measured=True)])
    steps = {(each.devices, each.strategy): each for each in found.steps}
    assert steps[1, "mirrored"].measured and steps[1, "mirrored"].seconds == 0.2
    for key, seconds in (((2, "mirrored"), 0.12), ((2, "sharded"), 0.16)):
        assert steps[key].seconds == pytest.approx(seconds) and not steps[key].measured
        assert steps[key].draws[0] == pytest.approx(seconds) and steps[key].terms["compute"] == pytest.approx(seconds)
        assert "scaled × 2.00 by 1 measured step" in steps[key].basis
    assert steps[4, "mirrored"].seconds == 0.5 and len(found.steps) == 4
    assert "÷ predicted 2.00" in found.rests[0]


def test_without_a_common_choice_predictions_stay_as_they_are() -> None:
    found = PlanCandidates([made(2, 64, "mirrored", 0.06)])
    prefer_measured(found, [made(1, 32, "mirrored", 0.2, measured=True)])
    assert [each.seconds for each in found.steps] == [0.06, 0.2] and not found.rests
