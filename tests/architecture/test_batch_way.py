"""The calls from a rank's entry point to ``backward`` and ``optimizer.step`` are those in docs/architecture.md."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.architecture.sources import ROOT, SOURCE
from tests.forkserver import run

SCRIPT = """
import sys
import torch
from tutti.cli.app import main
from tutti.parallel.ddp import replica_part

def watched(name, owner, attribute):
    real = getattr(owner, attribute)
    def call(*args, **kwargs):
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            path, _, file = frame.f_code.co_filename.rpartition("/tutti/")
            if path:
                frames.append(f"{file} {frame.f_code.co_qualname}")
            frame = frame.f_back
        print(name, *reversed(frames), sep="|", flush=True)
        setattr(owner, attribute, real)
        return real(*args, **kwargs)
    setattr(owner, attribute, call)

watched("backward", replica_part, "engine_backward")
watched("step", torch.optim.Adam, "step")
sys.stdout.reconfigure(line_buffering=True)
sys.stderr = sys.stdout
sys.argv = ["tutti", "train", "digits", "--strategy", "mirrored", "--devices", "1", "--steps", "1", "--out", "run"]
main()
"""
MOST_CALLS = 10


def blocks() -> list[list[str]]:
    """The two chains in the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = re.findall(r"^```\n((?:\w+/[\w/]*\.py [\w.<>]+\n)+)```$", page, re.MULTILINE)
    return [block.splitlines() for block in found]


def test_the_page_shows_the_chain_of_calls(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = run(["script.py"], tmp_path, os.environ | {"PYTHONPATH": str(SOURCE.parent)}, 200)
    calls = {line.split("|")[0]: line.split("|")[1:] for line in done.stdout.splitlines() if "|" in line}
    assert calls.keys() == {"backward", "step"}, done.stdout + done.stderr
    backward, step = blocks()
    assert calls["backward"][-len(backward) :] == backward
    assert calls["step"][-len(step) :] == step
    entry = calls["backward"].index(backward[0])
    assert calls["step"][: entry + 6] == calls["backward"][: entry + 6]
    assert len(backward) <= MOST_CALLS
    assert not any(call.startswith("cli/") for call in calls["backward"][entry:])
