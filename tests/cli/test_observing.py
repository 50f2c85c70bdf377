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
