"""Options of a warm start from weights of another model: parsed, applied, and refused where they name nothing."""

from __future__ import annotations

import pytest

from tutti.config.init_map import FittedWeights, InitMap
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError

OWN = {"body.w": (2, 3), "head.w": (4, 2), "head.b": (4,)}
TIED = {"body.w": ("again.w",)}


def test_differences_that_are_allowed() -> None:
    saved = {"again.w": (2, 3), "head.w": (5, 2), "old": (1,)}
    asked = InitMap.parse("new=head.b,unused=o*,reshaped=head.*")
    assert asked.fit(OWN, TIED, saved) == FittedWeights(["head.b"], ["old"], ["head.w"])
    assert asked.fit(OWN, TIED, saved).kept == ["head.b", "head.w"]
    assert InitMap.parse("new=head.*").fit(OWN, TIED, saved) == FittedWeights(["head.b"], [], [])


def test_the_first_beginning_that_matches_counts() -> None:
    asked = InitMap.parse("rename=a.b.:c.+a.:d.+e:")
    assert asked.names(["a.b.x", "a.x", "e.f", "z"]) == {"c.x": "a.b.x", "d.x": "a.x", ".f": "e.f", "z": "z"}
    assert InitMap.parse("rename=:model.").names(["x"]) == {"model.x": "x"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("renam=a:b", "Did you mean 'rename'?"),
        ("rename=a", "must be OLD:NEW"),
        ("new", "cannot read 'new'"),
        ("new=haed.*", "no tensor of the model matches 'haed.*'"),
        ("unused=heads", "no tensor of the weights matches 'heads'"),
        ("reshaped=x", "no tensor of the model matches 'x'"),
        ("rename=bdoy:b", "no tensor of the weights begins with 'bdoy'"),
        ("rename=head.w:head.b", "head.w and head.b would both be head.b"),
    ],
)
def test_what_names_nothing_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked = InitMap.parse(text)
        asked.names(OWN)
        asked.fit(OWN, TIED, OWN)
    assert words in str(caught.value)


def test_a_map_without_weights_is_refused() -> None:
    with pytest.raises(UsageError, match="--init-map does nothing without initial weights"):
        TrainConfig(init_map="new=head")
