"""``tutti train --batch-growth``: everything that counts steps, said and written, resumed, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tutti.config.train_config import TrainConfig
from tutti.errors import CheckpointError, UsageError
from tutti.train.main import train_rank

# 512 samples: batches of 16, 40 and 51, a tenth, where 100 are wanted.
GROWTH = "milestones=1ep+2ep,factor=2.5"
STEPS = [32, 13, 11, 11]
OPTIONS: dict[str, Any] = {
    "batch_size": 16,
    "batch_growth": GROWTH,
    "workers": 4,
    "optimizer": "sgd:lr=0.01,momentum=0.9",
    "lr_scale": "linear:base_batch=8",
    "schedule": "step:milestones=3ep,gamma=0.5,warmup=528sa",
    "epochs": 4.0,
    "eval_every": "1ep",
    "checkpoint_every": "1.5ep",
    "keep": 5,
    "reproducible": True,
}


def trained(folder: Path, **options: Any) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """The lines of a run by their group, and its summary."""
    folder.mkdir(exist_ok=True)
    assert train_rank("linear", TrainConfig(**{**OPTIONS, "out": str(folder), **options}), str(folder)) == 0
    lines: dict[str, list[dict[str, Any]]] = {"train": [], "eval": [], "warning": []}
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        lines.setdefault(line["group"], []).append(line)
    return lines, json.loads((folder / "summary.json").read_text())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_everything_that_counts_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, summary = trained(tmp_path)
    steps, before = lines["train"], [0, *(line["samples"] for line in lines["train"])]
    sizes = [line["samples"] - earlier for line, earlier in zip(steps, before, strict=False)]
    assert sizes == [16] * 32 + [40] * 12 + [32] + ([51] * 10 + [2]) * 2
    assert [line["epoch"] for line in steps] == [n for n, count in enumerate(STEPS, 1) for _ in range(count)]
    # The warm-up ends after an epoch and 16 samples, which are one larger batch; a batch of 51 takes half of the last
    # factor, the rate the rest; and then the schedule halves it.
    rates = [0.01 * (1 + step / 33) for step in range(33)] + [0.02] * 12 + [0.02 * 0.51] * 11 + [0.01 * 0.51] * 11
    assert [line["lr"] for line in steps] == pytest.approx(rates)
    assert [line["step"] for line in lines["eval"]] == [32, 45, 56, 67]
    assert checkpoints(tmp_path) == [f"step-{step:08}" for step in (39, 56, 67)]
    named = {name: summary[name] for name in ("steps", "updates", "samples", "epochs", "global_batch_size")}
    assert named == {"steps": 67, "updates": 67, "samples": 2048, "epochs": 4, "global_batch_size": 16}
    assert summary["batch_growth"] == GROWTH and not lines["warning"]
    said = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    for line in (
        "global batch 16 samples",
        "from epoch 2 40 samples a step, 10 samples × 1 accumulated, 13 steps",
        "from epoch 3 51 samples a step, 13 samples × 1 accumulated, 11 steps, learning rate × 0.51",
        "training 67 steps = 4ep, fp32, reproducible",
    ):
        assert line in said
    assert any(line.startswith("train 67 4 ") and line.endswith(" 0:00") for line in said), "nothing is left to do"


def test_a_run_goes_on_and_with_no_other_growth(tmp_path: Path) -> None:
    _, whole = trained(tmp_path)
    for step in (56, 67):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08}")
    for other in (None, "milestones=1ep+2ep,factor=3"):
        with pytest.raises(CheckpointError, match=f"made with batch_growth {GROWTH}".replace("+", r"\+")):
            trained(tmp_path, batch_growth=other, resume=str(tmp_path))
    lines, summary = trained(tmp_path, resume=str(tmp_path))
    assert lines["resume"] and [line["step"] for line in lines["train"]] == list(range(1, 68))
    assert summary["weights_sha256"] == whole["weights_sha256"]
    assert checkpoints(tmp_path) == [f"step-{step:08}" for step in (39, 56, 67)]


def test_lengths_in_samples_and_steps(tmp_path: Path) -> None:
    lines, summary = trained(tmp_path, epochs=None, samples=1000, eval_every="10st", checkpoint_every="none")
    assert summary["steps"] == 32 + 13 and summary["samples"] == 1024
    assert [line["step"] for line in lines["eval"]] == [10, 20, 30, 40, 45]


def test_what_undoes_it_is_said(tmp_path: Path) -> None:
    more = {"eval_every": "none", "checkpoint_every": "none"}
    lines, _ = trained(tmp_path / "short", epochs=1.0, schedule="constant", **more)
    assert [line["text"] for line in lines["warning"]] == ["the run ends before the batch grows, which is after 1ep"]
    lines, _ = trained(tmp_path / "cosine", epochs=1.1, schedule="cosine:warmup=1ep", **more)
    [said] = [line["text"] for line in lines["warning"]]
    assert said.startswith("the schedule cosine:warmup=1ep lowers the learning rate while the batch grows")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr_scale": "adascale"}, "cannot be combined with --lr-scale adascale"),
        ({"gradient_noise": "multiplicative:base_batch=8"}, "cannot be combined with --gradient-noise"),
        ({"regime_batch": 8}, "--batch-growth cannot be combined with --regime-batch"),
        ({"schedule": "step:milestones=2ep,gamma=0.4"}, "at 2ep the batch grows and the schedule lowers the rate"),
        ({"batch_growth": "milestones=1ep,factor=2,largest=16"}, "a batch of 16 cannot grow: the largest is 16"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TrainConfig(**{**OPTIONS, **options})


def test_none_is_no_growth() -> None:
    assert TrainConfig(batch_growth="none").growth is None
