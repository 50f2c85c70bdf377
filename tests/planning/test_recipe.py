"""``recipe.json`` is read as it was written, and an invalid one is refused with its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tutti.errors import UsageError
from tutti.planning.recipe import TrainingRecipe, read_recipe, recipe_text, write_recipe

RECIPE = TrainingRecipe("accuracy", 0.93, 64000.0, 64.0, ((60000.0, 50.0), (68000.0, 80.0)), "gradient noise")


def test_a_recipe_is_read_as_written(tmp_path: Path) -> None:
    write_recipe(RECIPE, tmp_path / "recipe.json")
    assert read_recipe(tmp_path / "recipe.json") == RECIPE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"critical_batch": 0}, "critical_batch is 0"),
        ({"samples_min": None}, "invalid"),
        ({"samples_min": 10**400}, "invalid"),
        ({"critical_batch": 1e-300}, "no number of samples"),
        ({"samples_min": "64000"}, 'samples_min is "64000", and no number'),
        ({"draws": [[1.0]]}, "draws is no list of pairs"),
        ({"draws": "abc"}, "draws is no list of pairs"),
        ({"target": "loss"}, "target is not {"),
        ({"draws": [[1.0, -1.0]]}, "draws is -1"),
        ({"target": {"metric": "loss", "value": float("nan")}}, "target.value is nan"),
        ({"target": {"metric": "loss"}}, "no 'value'"),
    ],
)
def test_an_invalid_recipe_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**json.loads(recipe_text(RECIPE)), **change}), encoding="utf-8")
    with pytest.raises(UsageError, match="recipe") as refused:
        read_recipe(path)
    assert message in str(refused.value) and str(path) in str(refused.value)


def test_a_missing_file_and_text_that_is_not_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_recipe(tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(UsageError, match="format None"):
        read_recipe(tmp_path / "list.json")
    (tmp_path / "text.json").write_text("recipe", encoding="utf-8")
    with pytest.raises(UsageError, match="not JSON"):
        read_recipe(tmp_path / "text.json")
