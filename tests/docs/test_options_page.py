"""The options and defaults of docs/options.md are those of the code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tutti.config.optimizer_config import OPTIMIZERS, SCHEDULES, LayerWiseConfig, StepSchedule
from tutti.config.spec import Spec
from tutti.tasks.task_registry import TASKS

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
LAYER_WISE = {field.name for field in fields(LayerWiseConfig)}
WARM_UP = {"warmup", "warmup_from"}


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| `\w", line)
    ]


def compare(text: str, kinds: Mapping[str, Any], apart: set[str]) -> str:
    """Check that a choice on the page names every option but those ``apart``, with its default; return its name."""
    spec = Spec.parse(text, "the page")
    kind = kinds[spec.name]
    assert set(spec.options) == {field.name for field in fields(kind)} - apart
    built = spec.build(kind, "the page")
    assert built == (replace(built, gamma=0.1) if kind is StepSchedule else kind()), text
    return spec.name


@pytest.mark.parametrize(
    ("title", "kinds", "apart"), [("Optimizers", OPTIMIZERS, LAYER_WISE), ("Schedules", SCHEDULES, WARM_UP)]
)
def test_the_tables_have_every_choice_with_its_defaults(title: str, kinds: Mapping[str, Any], apart: set[str]) -> None:
    named = [compare(row[0].strip("`"), kinds, apart) for row in rows(title)]
    assert sorted(named) == sorted(kinds)
    assert all(f"`{name}=" in PAGE for name in apart - {"warmup_from"})


def test_the_table_of_tasks_has_every_model_and_held_out_value() -> None:
    found = {row[0].strip("`"): row for row in rows("Tasks")}
    assert list(found) == list(TASKS)
    for name, task in TASKS.items():
        models = [compare(text, task.models, set()) for text in re.findall(r"`([^`]+)`", found[name][2])]
        assert models == list(task.models)
        assert tuple(re.findall(r"`([^`]+)`", found[name][3])) == task.reports
        assert all(f"extra `{extra}`" in found[name][1] for extra in task.needs.values())
