"""What ``tutti train`` says of the classic mistakes, in its metrics and its summary; of sound runs nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tutti.config.train_config import TrainConfig
from tutti.train.main import train_rank

NEVER = {"eval_every": "none", "checkpoint_every": "none"}
LARGE: dict[str, Any] = {"workers": 8, "batch_size": 512, "epochs": 6}


def diagnosed(folder: Path, task: str, **options: Any) -> tuple[list[str], list[str]]:
    """Names in the summary, and the warnings in the metrics."""
    model = "mlp" if task == "digits" else None
    config = TrainConfig(**{**NEVER, "model": model, "out": str(folder), **options})
    assert train_rank(task, config, str(folder)) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    texts = [line["text"] for line in lines if line["group"] == "warning"]
    return json.loads((folder / "summary.json").read_text())["diagnoses"], texts


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("linear", {"workers": 4}),
        ("digits", {"workers": 4, "steps": 2}),
        ("digits", {"workers": 1, "optimizer": "adam:lr=0.3", "batch_size": 512, "steps": 2}),
        ("digits", {**LARGE, "epochs": 1, "regime_batch": 64}),
        ("digits", {"workers": 4, "steps": 2, "strategy": "local_sgd", "micro_batch": 5}),
    ],
)
def test_a_sound_run_is_silent(tmp_path: Path, task: str, options: dict[str, Any]) -> None:
    assert diagnosed(tmp_path, task, **options) == ([], [])


def test_mistakes_are_told_by_name_with_what_to_do(tmp_path: Path) -> None:
    names, texts = diagnosed(tmp_path, "digits", **LARGE, optimizer="adam:lr=0.2", identical_batches=True)
    assert names == ["few-updates", "far-rate", "same-data"]
    assert texts[0].startswith("few-updates: 18 updates in the whole run, in batches of 512, 36% of the data: ")
    assert texts[0].endswith(
        "Take --regime-batch with one worker's batch, more epochs, a smaller batch, or LAMB or LARS."
    )
    assert "usual for adam (rank 0, step 1): " in texts[1]
    said = "same-data: workers 0 (rank 0) and 1 (rank 0) train on the same samples (rank 0, step 1): "
    assert texts[2].startswith(said) and texts[2].endswith("Leave identical_batches out.")


def test_a_name_that_is_silenced_stays_in_the_summary(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "few-updates")
        assert diagnosed(tmp_path, "digits", **LARGE) == (["few-updates"], [])
