"""Fault 27: folders with links out of them, broken images and pickles. Exit 3, nothing outside read, nothing run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.checkpoint.checkpoints import Canary
from tests.faults.commands import complaint, tutti
from tests.launching import SOURCE

pytestmark = [pytest.mark.faults, pytest.mark.row(27)]

# Every process of the run notes which files outside of the data it opens, by whatever name.
AUDIT = """
import os, sys

def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(os.environ["OUTSIDE"]):
            file = os.open(os.environ["READ"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, path.encode() + b"\\n")
            os.close(file)

sys.addaudithook(hook)
"""


def save(file: Path, seed: int, size: int = 32, grey: bool = False) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    levels = np.random.default_rng(seed).integers(0, 2, (size, size) if grey else (size, size, 3), dtype=np.uint8)
    Image.fromarray(levels * np.uint8(255)).save(file)


def cifar(data: Path) -> Path:
    for part in ("train", "test"):
        for number, kind in enumerate(("cat", "dog")):
            for name in "abc":
                save(data / part / kind / f"{name}.png", number + ord(name))
    return data / "train" / "dog" / "c.png"


def membranes(data: Path) -> Path:
    for number in range(8):
        for name in ("image", "label"):
            save(data / "train" / name / f"{number}.png", number, 16, grey=True)
    return data / "train" / "label" / "3.png"


def linked(file: Path, outside: Path, canary: Path) -> None:
    (outside / "secret.png").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(outside / "secret.png")


def linked_folder(file: Path, outside: Path, canary: Path) -> None:
    file.parent.rename(outside / "all")
    file.parent.symlink_to(outside / "all")


def broken(file: Path, outside: Path, canary: Path) -> None:
    file.write_bytes(file.read_bytes()[:60])


def pickled(file: Path, outside: Path, canary: Path) -> None:
    file.write_bytes(pickle.dumps(Canary(canary)))
    file.with_suffix(".pkl").write_bytes(pickle.dumps(Canary(canary)))


Spoil = Callable[[Path, Path, Path], None]
CASES: list[tuple[str, Callable[[Path], Path], Spoil, str]] = [
    ("cifar10", cifar, linked, "points outside the data folder"),
    ("cifar10", cifar, linked_folder, "points outside the data folder"),
    ("cifar10", cifar, pickled, "an image is broken"),
    ("membranes", membranes, linked, "not an image file of the folder"),
    ("membranes", membranes, broken, "an image is broken"),
]


@pytest.mark.parametrize(("task", "make", "spoil", "said"), CASES, ids=[f"{c[0]}-{c[2].__name__}" for c in CASES])
def test_a_folder_of_images(
    task: str,
    make: Callable[[Path], Path],
    spoil: Spoil,
    said: str,
    tmp_path: Path,
    seed: int,
    record_property: Callable[[str, object], None],
) -> None:
    outside, read, canary = tmp_path / "outside", tmp_path / "read", tmp_path / "executed"
    outside.mkdir()
    file = make(tmp_path / "data")
    spoil(file, outside, canary)
    (tmp_path / "sitecustomize.py").write_text(AUDIT)
    watched = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}", "OUTSIDE": str(outside), "READ": str(read)}
    watched["TUTTI_CACHE"] = str(tmp_path / "cache")
    words = (
        "--data",
        "data",
        "--devices",
        str((1, 3, 4)[seed % 3]),
        "--batch-size",
        "5",
        "--steps",
        "1",
        "--out",
        "out",
    )
    result = tutti(tmp_path, "train", task, *words, **watched)
    assert result.code == 3, result.err
    text = " ".join(complaint(result))
    assert said in text and file.parent.name in text and "Traceback" not in result.err
    record_property("files outside read", len(read.read_text().splitlines()) if read.exists() else 0)
    record_property("canaries executed", int(canary.exists()))
    assert not read.exists() and not canary.exists()
    # The watch works: who does open a file outside is seen.
    (outside / "other").touch()
    subprocess.run([sys.executable, "-c", f"open({str(outside / 'other')!r})"], env=os.environ | watched, check=True)
    assert read.read_text().splitlines() == [str(outside / "other")]
