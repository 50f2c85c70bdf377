"""A real run over a stream that is watched: its epochs end with the stream, its profile and its events are there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tests.faults.commands import tutti, write_task

STREAM = """
class Samples(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(22):
            yield torch.randn(4), index % 3
"""


def test_a_stream_that_is_watched(tmp_path: Path) -> None:
    own = write_task(tmp_path, STREAM)
    watched = ["--tensorboard"] if importlib.util.find_spec("tensorboard") else []
    words = ["--devices", "3", "--workers", "4", "--batch-size", "6", "--epochs", "2", "--profile", "2:3", *watched]
    done = tutti(tmp_path, "train", own, *words, "--out", "out")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["samples"]) == (8, 2, 44)
    said = " ".join(done.err.split())
    for words_ in ("epoch until the stream ends", "order that of the stream", "training 2ep", "3 steps on rank 0"):
        assert words_ in said
    profile = tmp_path / "out" / "profile"
    assert {path.name for path in profile.iterdir()} == {"rank0.json", "rank1.json", "rank2.json", "operations.txt"}
    assert len(list((tmp_path / "out").glob("tensorboard/events.*"))) == len(watched)


def test_a_resumed_run_goes_on_in_its_own_log(tmp_path: Path) -> None:
    words = (
        "train",
        "linear",
        "--devices",
        "2",
        "--logger",
        "jsonl:path=log.jsonl",
        "--batch-size",
        "64",
        "--out",
        "out",
    )
    steps = []
    for more in (("--epochs", "1"), ("--epochs", "2", "--resume", "out")):
        done = tutti(tmp_path, *words, *more)
        assert done.code == 0, done.err
        steps.append(json.loads((tmp_path / "out" / "summary.json").read_text())["steps"])
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [*range(1, steps[1] + 1)]
    assert [line["step"] for line in lines if "eval/loss" in line] == steps and steps[0] < steps[1]
