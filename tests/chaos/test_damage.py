"""``tutti chaos corrupt``: every kind of damage is tried on copies, and what a loader lets through is told."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from tests.checkpoint.checkpoints import save
from tutti.chaos.damage import files, flip, flip_any
from tutti.checkpoint import read
from tutti.checkpoint.manifest import Manifest
from tutti.cli.app import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the checkpoints of two steps."""
    save(tmp_path / "checkpoints", 10)
    save(tmp_path / "checkpoints", 20)
    return tmp_path


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in files(run)}


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[int, int]]:
    report = json.loads(capsys.readouterr().out)
    return {damage["name"]: (damage["tried"], damage["detected"]) for damage in report["damages"]}


def test_everything_is_tried_and_detected(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    assert main(["chaos", "corrupt", str(run), "--flips", "200", "--truncate", "4", "--json"]) == 0
    assert told(capsys) == {
        "one bit flipped": (200, 200),
        "a file cut off": (4 * 8, 4 * 8),
        "a file missing": (8, 8),
        "a file of another step": (8, 8),
    }
    assert contents(run) == before, "the original was touched"


def test_an_empty_file_is_not_cut_off(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints" / "step-00000020" / "empty").touch()
    monkeypatch.setattr(read, "verify", read.load_manifest)
    main(["chaos", "corrupt", str(run), "--flips", "8", "--truncate", "4", "--json"])
    found = told(capsys)
    assert found["a file cut off"][0] == 4 * 8 and found["a file missing"][0] == 9


def test_what_a_loader_lets_through_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trusting(path: Path) -> Manifest:
        """Looks at sizes and at the manifest, as many loaders do."""
        manifest = read.load_manifest(path)
        for file in manifest.files:
            with read._opened(path, file.group, file.name) as (descriptor, size):
                read._check(path, file, descriptor, size)
        return manifest

    monkeypatch.setattr(read, "verify", trusting)
    assert main(["chaos", "corrupt", str(run / "checkpoints" / "step-00000010"), "--truncate", "0", "--no-drop"]) == 9
    out = capsys.readouterr().out
    assert re.search(r"one bit flipped +1000 +\d{1,3}\n", out) and "not detected: bit " in out and "cut off" not in out


def test_one_bit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes([0, 255, 0]))
    flip(file, 9)
    assert file.read_bytes() == bytes([0, 253, 0])
    flip(file, 9)
    assert file.read_bytes() == bytes([0, 255, 0])


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "corrupt", str(tmp_path)]) == 4
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_damaged_original_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_any(run / "checkpoints" / "step-00000020", random.Random(0))
    assert main(["chaos", "corrupt", str(run)]) == 4
    assert "damaged" in capsys.readouterr().err
