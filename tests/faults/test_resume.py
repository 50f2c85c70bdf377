"""Faults 13, 15 and 16 on real runs: a damaged, forged or foreign checkpoint is passed over, or refused with exit 4."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.checkpoints import Canary, forge, own
from tests.faults.commands import complaint, tutti, write_task
from tests.faults.survival import printed
from tests.launching import Result

pytestmark = pytest.mark.faults
Record = Callable[[str, object], None]

OPTIONS = (
    *("--workers", "5", "--batch-size", "14", "--optimizer", "adam:lr=0.01", "--reproducible", "--log-every", "1"),
    *("--checkpoint-every", "10st", "--eval-every", "none", "--timeout", "60", "--steps", "20"),
)
PLACES = [
    ("mirrored", 4),
    ("model_parallel", 3),
    ("single", 1),
    ("mirrored:algorithm=native", 3),
    ("model_parallel", 4),
    ("central_storage", 3),
]
RESUME = ("--resume", "out", "--steps", "30")


def train(folder: Path, turn: int, *more: str) -> Result:
    strategy, devices = PLACES[turn % len(PLACES)]
    words = [*OPTIONS, "--strategy", strategy, "--devices", str(devices), *more]
    for name in {word for word in more if word.startswith("--")}:
        # What comes later counts, as in a shell's alias.
        while words.count(name) > 1:
            at = words.index(name)
            del words[at : at + 2]
    return tutti(folder, "train", "own.py:task", *words)


def made_once(folder: Path, *more: str, start: Path | None = None) -> Path:
    """A run in ``folder`` that all of pytest's processes share, from ``start``'s run on where that is given."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            write_task(folder)
            if start:
                shutil.copytree(start / "out", folder / "out")
            result = train(folder, 3, *more)
            assert result.code == 0, result.err
    return folder


@pytest.fixture
def run(kept: Path, tmp_path: Path) -> Path:
    """A folder with a run of three devices in ``out``, which has the checkpoints of steps 10 and 20."""
    shutil.copytree(made_once(kept / "saved", "--out", "out") / "out", tmp_path / "out")
    write_task(tmp_path)
    return tmp_path


def checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted((folder / "out" / "checkpoints").iterdir(), reverse=True)


def digest(folder: Path) -> str:
    return str(json.loads((folder / "out" / "summary.json").read_text())["weights_sha256"])


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(file: Path, draw: random.Random) -> None:
    os.truncate(file, file.stat().st_size * draw.randrange(16) // 16)


def drop(file: Path, draw: random.Random) -> None:
    file.unlink()


def mix(file: Path, draw: random.Random) -> None:
    """The same file of the other step."""
    [other] = {"step-00000010", "step-00000020"} - {file.parts[-3]}
    shutil.copy(file.parents[2] / other / file.parts[-2] / file.name, file)


def flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def link(file: Path, draw: random.Random) -> None:
    outside = file.parents[4] / f"outside-{file.parts[-3]}"
    shutil.copy(file, outside)
    file.unlink()
    file.symlink_to(outside)


DAMAGES = [truncate, drop, mix, flip, link]


def damage(path: Path, how: Callable[[Path, random.Random], None], draw: random.Random) -> str:
    """Spoil one file of tensors of a checkpoint; its name as messages show it."""
    file = draw.choice(sorted((path / "optim").iterdir()))
    how(file, draw)
    return f"{path.name}/optim/{file.name}"


@pytest.mark.row(13)
def test_a_damaged_checkpoint_is_passed_over(run: Path, kept: Path, seed: int, record_property: Record) -> None:
    """The run goes on from the one before, says so, and ends as if nothing had happened."""
    how = DAMAGES[seed % len(DAMAGES)]
    name = damage(checkpoints(run)[0], how, random.Random(f"{how.__name__} {seed}"))
    result = train(run, seed, *RESUME)
    assert result.code == 0, result.err
    assert any(name in line for line in result.err.splitlines() if "ignored: " in line), result.err
    assert printed(result.err)[0] == 11
    whole = made_once(kept / "whole", *RESUME, start=kept / "saved")
    record_property("weights that differ", int(digest(run) != digest(whole)))
    assert digest(run) == digest(whole)


def refused(result: Result, *said: str) -> None:
    """Exit 4 in one message, before any step, on every rank."""
    assert result.code == 4, result.err
    assert printed(result.err) == [] and "Traceback" not in result.err
    text = " ".join(complaint(result))
    assert all(part in text for part in said), text


@pytest.mark.row(13)
def test_a_run_without_a_good_checkpoint_does_not_start_anew(run: Path, seed: int) -> None:
    names = [
        damage(path, DAMAGES[(seed + turn + 1) % len(DAMAGES)], random.Random(f"{seed} {turn}"))
        for turn, path in enumerate(checkpoints(run))
    ]
    refused(train(run, seed + 1, *RESUME), "no checkpoint of the run is valid", *names)


# --- forgery --------------------------------------------------------------------------------------------------------


def pickled(path: Path, canary: Path) -> None:
    file = path / "model" / "rank0.safetensors"
    size = file.stat().st_size
    poison = pickle.dumps(Canary(canary))
    file.write_bytes((poison * (size // len(poison) + 1))[:size])
    forge(path, lambda document: own(document, path) and None)


def zipped(path: Path, canary: Path) -> None:
    """What ``torch.save`` makes, with a gigabyte of zeros in it."""
    file = path / "model" / "rank0.safetensors"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Canary(canary)))
        with archive.open("archive/data/0", "w", force_zip64=True) as inside:
            for _ in range(64):
                inside.write(b"\0" * 2**20)
    forge(path, lambda document: own(document, path) and None)


def facts(path: Path, canary: Path) -> None:
    forge(path, lambda document: document["facts"].update(step="20", updates=[1]))


def means(path: Path, canary: Path) -> None:
    forge(path, lambda document: document["facts"].update(means={"loss": "much"}))


def version(path: Path, canary: Path) -> None:
    forge(path, lambda document: document.update(version=2))


FORGERIES = {
    pickled: "header",
    zipped: "bytes",
    facts: "epoch, batch and samples are '20', [1],",
    means: "'means'",
    version: "format version 2",
}


@pytest.mark.row(15, 16)
def test_a_forged_checkpoint_runs_no_code(run: Path, seed: int, record_property: Record) -> None:
    forgery, said = list(FORGERIES.items())[seed % len(FORGERIES)]
    canary = run / "executed"
    for path in checkpoints(run):
        forgery(path, canary)
    refused(train(run, seed + 2, *RESUME), said)
    record_property("15: canaries executed", int(canary.exists()))
    assert not canary.exists()


# --- another run's --------------------------------------------------------------------------------------------------

WIDER = """
def model():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
"""
OTHERS: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    ((), WIDER, ("of another model", "0.weight [6, 4], not [7, 4]", "missing: 5.")),
    (("--optimizer", "sgd:lr=0.1"), "", ("optimizer adam, which keeps exp_avg, exp_avg_sq, step, not sgd",)),
    (("--batch-size", "15"), "", ("batch_size 14, not 15",)),
    (("--seed", "3"), "", ("seed 0, not 3",)),
]


@pytest.mark.row(16)
def test_the_checkpoint_of_another_run(run: Path, seed: int) -> None:
    for turn in (seed, seed + 1):
        more, body, said = OTHERS[turn % len(OTHERS)]
        write_task(run, body)
        refused(train(run, turn, *RESUME, *more), *said)
