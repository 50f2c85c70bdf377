"""Loggers write a run's metrics on rank 0 alone, continue a restored run, and name the extra that is missing."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tutti
from tests import worlds
from tests.metrics.test_events import read
from tests.train.test_callbacks import INPUTS, TARGETS, prepared
from tutti.errors import UsageError
from tutti.metrics.metric_names import LOGGED

ROOT = Path(__file__).parents[2]


def trained(logger: Any, epochs: int = 1, folder: str | None = None) -> tuple[Any, str | None]:
    run = prepared([logger])
    if folder is not None:
        run.restore(folder)
    for epoch in run.epochs(epochs):
        for batch in run.epoch(epoch):
            run.step(batch)
        run.evaluate((INPUTS, TARGETS))
        if folder is not None:
            run.save(folder)
    return run.weights_sha256(), getattr(logger, "identity", None)


def to_file(path: str) -> Any:
    return trained(tutti.JsonLinesLogger(path) if path else lambda run: None)[0]


def test_rank_0_alone_writes_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "run.jsonl"
    assert worlds.run(2, to_file, path=str(file)) == worlds.run(2, to_file, path="")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert {"step", "train/loss", "train/lr"} <= lines[0].keys() and list(lines[4]) == ["step", "eval/loss"]


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        *((tutti.WandbLogger, "wandb"), (tutti.MLflowLogger, "mlflow")),
        *((tutti.TrackioLogger, "trackio"), (tutti.TensorBoardLogger, "tensorboard")),
    ],
)
def test_a_missing_package_is_named(kind: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"tutti-train\[{package}\]"):
        kind("project")


def test_mlflow_continues_a_restored_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/runs.db"
    _, first = trained(tutti.MLflowLogger("digits", uri=uri), 1, str(tmp_path / "kept"))
    _, again = trained(tutti.MLflowLogger("digits", uri=uri), 2, str(tmp_path / "kept"))
    assert first == again
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert client.get_run(first).info.status == "FINISHED"
    assert [each.step for each in client.get_metric_history(first, "train/loss")] == [*range(1, 9)]
    assert [each.step for each in client.get_metric_history(first, "eval/loss")] == [4, 8]


def test_wandb_writes_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    _, identity = trained(tutti.WandbLogger("digits", mode="offline", folder=tmp_path))
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1 and identity is not None and identity in files[0].name
    assert b"train/loss" in files[0].read_bytes() and b"eval/loss" in files[0].read_bytes()


def test_tensorboard_has_each_step_of_a_restored_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events = tmp_path / "events"
    trained(tutti.TensorBoardLogger(events), 1, str(tmp_path / "kept"))
    # A run that was killed after its checkpoint, in the sixth step.
    run = prepared([tutti.TensorBoardLogger(events)])
    run.restore(str(tmp_path / "kept"))
    for batch, _ in zip(run.epoch(1), range(2), strict=False):
        run.step(batch)
    trained(tutti.TensorBoardLogger(events), 2, str(tmp_path / "kept"))
    found = read(events)
    assert [step for step, _ in found["train/loss"]] == [*range(1, 9)] == [step for step, _ in found["train/lr"]]
    assert [step for step, _ in found["eval/loss"]] == [4, 8]


TRACKED = """
import sys
from trackio.sqlite_storage import SQLiteStorage
import tutti
from tests.train.test_metric_loggers import trained
first, again = (trained(tutti.TrackioLogger("digits"), epochs, sys.argv[1])[1] for epochs in (1, 2))
assert first == again, (first, again)
logs = SQLiteStorage.get_logs("digits", first)
print(*([log["step"] for log in logs if name in log] for name in ("train/loss", "eval/loss")))
"""


def test_trackio_continues_a_restored_run_on_this_machine(tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    # Its folder is a constant of the module.
    environ = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", TRACKED, str(tmp_path / "kept")]
    done = subprocess.run(words, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[*range(1, 9)]} [4, 8]\n", "what trackio prints goes to stderr"


def test_the_page_has_the_table_of_names() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for key, (name, meaning) in LOGGED.items():
        assert f"| `{key}` | `{name}` | {meaning} |" in page


class Ends(tutti.JsonLinesLogger):
    """Notes how it is closed."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.ends: list[bool] = []

    def close(self, failed: bool) -> None:
        super().close(failed)
        self.ends.append(failed)


def test_evaluations_before_and_after_training_and_nan_are_written(tmp_path: Path) -> None:
    logger = Ends(tmp_path / "run.jsonl")
    run = prepared([logger])
    run.evaluate((INPUTS, TARGETS))
    for epoch in run.epochs(1):
        for batch in run.epoch(epoch):
            run.step(batch)
    assert logger.ends == [False]
    found = run.evaluate((INPUTS, TARGETS), loss=lambda net, batch: (net(batch[0]).sum() * 0, 0, {"part": 0}))
    assert math.isnan(found.loss) and math.isnan(found.metrics["part"])
    assert logger.ends == [False, False]
    for epoch in run.epochs(2):
        for batch in run.epoch(epoch):
            run.step(batch)
        assert logger.ends == [False, False]
    assert logger.ends == [False] * 3
    lines = [json.loads(line, parse_constant=pytest.fail) for line in logger.path.read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert lines[0]["eval/loss"] > 0 and lines[5] == {"step": 4, "eval/loss": None, "eval/part": None}


@pytest.mark.parametrize("how", ["break", "exception", "refused"])
def test_a_run_that_a_break_ends_is_no_failure(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = Ends(tmp_path / "run.jsonl")
    run = prepared([logger])
    for epoch in run.epochs(3):
        for batch in run.epoch(epoch):
            run.step(batch)
            break
        break
    if how == "exception":
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    logger.failed = how == "refused"
    logger._exit()
    assert logger.ends == [how != "break"]
