"""Runs that an older version wrote (``saved/``, at commit 1d20d09) are continued to what that version came to.

One for each strategy: four steps of ``tutti train digits --model mlp:hidden=8,dropout=0.25 --precision fp64``, saved
at the end.
``expected.json`` has the held-out loss after eight steps, by the version that wrote them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.faults.commands import tutti

FOLDER = Path(__file__).parent
EXPECTED: dict[str, float] = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))


def test_every_old_run_has_an_expectation() -> None:
    assert {path.name for path in (FOLDER / "saved").iterdir()} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_an_old_run_is_continued(name: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "saved" / name, tmp_path / "run")
    result = tutti(tmp_path, "train", "--resume", "run", "--steps", "8", "--json")
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert summary["steps"] == 8
    assert summary["eval"]["loss"] == pytest.approx(EXPECTED[name], rel=1e-10, abs=0)


def test_old_weights_are_exported(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "saved" / "sharded", tmp_path / "run")
    result = tutti(tmp_path, "export", "run", "-o", "weights.safetensors")
    assert result.code == 0 and (tmp_path / "weights.safetensors").stat().st_size > 0, result.err
