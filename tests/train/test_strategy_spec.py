"""Strategies with Python values: they become text with the names of the model's modules, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import tutti
from tutti.errors import UsageError
from tutti.train.strategy_spec import strategy_text

MODEL = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "pipeline"),
        ({"stages": None, "schedule": "gpipe"}, "pipeline:schedule=gpipe"),
        ({"stages": [[MODEL[0]], ["1.0", MODEL[1][1]]]}, "pipeline:stages=0/1.0+1.1"),  # type: ignore[index]
        ({"stages": [["0"], "1"]}, "pipeline:stages=0/1"),
        ({"cuts": [MODEL[1]], "micro_batches": 4}, "pipeline:cuts=1,micro_batches=4"),
    ],
)
def test_modules_become_names(options: dict[str, Any], text: str) -> None:
    assert strategy_text(tutti.strategy("pipeline", **options), MODEL) == text
    assert strategy_text(text, MODEL) == text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": [[nn.Linear(2, 2)], ["1"]]}, "a Linear in stages is no module of the model"),
        ({"stages": [[MODEL], ["1"]]}, "a Sequential in stages is no module of the model"),
        ({"stages": [["a,b"], ["1"]]}, "'a,b' is not possible in stages"),
        ({"cuts": [print]}, "is not possible in cuts"),
        ({"cuts": [""]}, "'' is not possible in cuts"),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        strategy_text(tutti.strategy("pipeline", **options), MODEL)
    assert words in str(caught.value)
