"""``--keep-best`` by a metric whose direction only the task knows: declared, it is kept; else refused before a step."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from tests.compare.test_compare import prepare
from tests.faults.commands import tutti

WORDS = ("train", "own.py:task", "--workers", "2", "--batch-size", "12", "--epochs", "3", "--out", "run")


def test_the_task_declares_what_is_better(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0, "own.py")
    own = (tmp_path / "own.py").read_text().replace('"accuracy": correct', '"distance": correct')
    (tmp_path / "own.py").write_text(own)
    refused = tutti(tmp_path, *WORDS, "--keep-best", "distance")
    assert refused.code == 2 and "distance:min or distance:max" in refused.err, refused.err
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    (tmp_path / "own.py").write_text(own.replace('name="own"', 'name="own", directions={"distance": "lower"}'))
    result = tutti(tmp_path, *WORDS, "--keep-best", "distance", "--overwrite")
    assert result.code == 0, result.err
    assert "the checkpoint with the lowest held-out distance" in result.err
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["keep_best"] == "distance:lower"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["directions"] == {"distance": "lower"}
    exported = tutti(tmp_path, "export", "run", "--step", "best")
    assert exported.code == 0, exported.err
