"""``tutti simulate``: what its table is followed by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from tutti.cli.simulate_command import _show
from tutti.planning.machine_choice import open_machine
from tutti.planning.step_prediction import StepPrediction


@pytest.mark.parametrize(("efficiency", "said"), [(1.68, True), (1.001, False), (0.9, False)])
def test_an_efficiency_above_one_is_explained(
    efficiency: float, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    each = SimpleNamespace(
        strategy="mirrored",
        devices=2,
        batch=64,
        seconds=1.0,
        draws=(1.0, 1.0),
        band=None,
        band_text="no band",
        shares={"compute": 1.0},
        samples_per_second=64.0,
        efficiency=efficiency,
        memory={"total": 1.0},
        delays=(),
    )
    _show([cast(StepPrediction, each)], open_machine("a100x8", "bf16", None, None))
    assert ("efficiency above 100 %" in capsys.readouterr().out) == said
