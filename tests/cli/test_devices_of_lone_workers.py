"""Workers that train alone, by real commands: what the number of devices changes with the defaults, and when not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.cli.test_rerun import tutti
from tutti.cli.app import main


def summaries(folder: Path, strategy: str, devices: str, *words: str) -> list[dict[str, Any]]:
    """One run on each of these numbers of devices, in the folder's ``NUMBER OF WORDS-DEVICES``."""
    found = []
    for number in devices:
        told = ("--workers", "3", "--devices", number, "--strategy", strategy, "--steps", "5", "--eval-every", "none")
        out = f"{len(words)}-{number}"
        done = tutti("train", "digits", "--device", "cpu", *told, *words, "--out", out, cwd=folder)
        assert done.returncode == 0, done.stderr
        found.append(json.loads((folder / out / "summary.json").read_text()))
    return found


def weights(folder: Path, run: str) -> dict[str, Any]:
    assert main(["export", str(folder / run), "-o", str(folder / f"{run}.safetensors")]) == 0
    return load_file(folder / f"{run}.safetensors")


@pytest.mark.parametrize("strategy", ["local_sgd:period=2", pytest.param("diloco:period=2", marks=pytest.mark.full)])
def test_bits_depend_on_the_threads_of_a_process_alone(strategy: str, tmp_path: Path) -> None:
    """The cores are shared out over the processes of a host: with the defaults fewer devices have more threads each."""
    plain = summaries(tmp_path, strategy, "123")
    for summary in plain:
        equal = [other for other in plain if other["threads"] == summary["threads"]]
        assert {other["weights_sha256"] for other in equal} == {summary["weights_sha256"]}
    first, last = weights(tmp_path, "0-1"), weights(tmp_path, "0-3")
    assert max(abs(first[name] - last[name]).max() for name in first) < 1e-5
    one = [
        *summaries(tmp_path, strategy, "13", "--threads", "1"),
        *summaries(tmp_path, strategy, "2", "--reproducible"),
    ]
    assert {summary["threads"] for summary in one} == {1}
    assert len({summary["weights_sha256"] for summary in one}) == 1
