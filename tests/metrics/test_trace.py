"""A trace shows every device's phases in their order, changes nothing, and leaves nothing in the run's way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests import worlds
from tests.metrics.test_profile import BATCHES, owned, prepared, train
from tutti.comm.stall import StallInspector
from tutti.errors import DiskError
from tutti.metrics.trace import TABLE


def traced(strategy: str, custom_loop: bool, folder: str | None) -> Any:
    run, optimizer = prepared(strategy, custom_loop)
    before, poll = owned(run), StallInspector.poll
    if folder is None:
        train(run, optimizer, custom_loop)
    else:
        with run.trace(Path(folder) / "deep"):
            train(run, optimizer, custom_loop)
        assert (owned(run), StallInspector.poll) == (before, poll)
    return run.weights_sha256()


@pytest.mark.parametrize(
    ("strategy", "devices", "custom_loop"),
    [("single", 1, False), ("mirrored", 3, False), ("mirrored", 2, True), ("model_parallel", 3, False)],
)
def test_one_row_a_device(strategy: str, devices: int, custom_loop: bool, tmp_path: Path) -> None:
    case = {"strategy": strategy, "custom_loop": custom_loop}
    want = worlds.run(devices, traced, folder=None, **case)
    assert worlds.run(devices, traced, folder=str(tmp_path), **case) == want
    place = tmp_path / "deep"
    assert {path.name for path in place.iterdir()} == {"timeline.svg", "trace.json", TABLE}
    events = [e for e in json.loads((place / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in range(devices):
        own = [e for e in events if e["tid"] == rank]
        assert {"forward", "backward", "update"} <= {e["name"] for e in own}
        assert sum(e["name"] == "update" for e in own) >= BATCHES
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in itertools.pairwise(own)), "they overlap"
    if devices > 1:
        assert {"idle", "communication"} & {e["name"] for e in events}
    assert (place / TABLE).read_text().startswith(f"steps 1 to {BATCHES} on {devices} device")
    assert (place / "timeline.svg").read_text().count(">device ") == devices


def into_a_file(place: str) -> str:
    run, _ = prepared("single")
    try:
        with run.trace(Path(place) / "inside"):
            run.step(next(run.epoch(0)))
    except DiskError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [said] = worlds.run(1, into_a_file, place=str(tmp_path / "file"))
    assert said.startswith("cannot write the trace") and "Not a directory" in said
