"""``tutti config show``: every option, its value and its origin; and single options of a specification."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from tutti.cli.app import main
from tutti.config.dotted import changed_fields
from tutti.config.origins import line_of
from tutti.config.train_config import TrainConfig

FILE = """# mine
batch-size = 32

optimizer = "sgd:lr=0.1,momentum=0.9"  # and a comment
until = \"\"\"
accuracy=0.9\"\"\"
seed = 4
"""


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[object, str]]:
    assert main(["config", "show", *words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    table.pop("task")
    return {name: (entry["value"], entry["origin"]) for name, entry in table.items()}


def test_every_field_and_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, second = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text(FILE)
    second.write_text("\nseed = 5\n")
    monkeypatch.setenv("TUTTI_CLIP", "1")
    monkeypatch.setenv("TUTTI_KEEP", "3")
    words = ["digits", "--config", str(file), "--config", str(second), "--keep", "4", "--optimizer.lr", "0.3"]
    found = shown(capsys, *words, "--schedule", "cosine", "--schedule.warmup=1ep", "--no-augment")
    assert list(found) == [field.name for field in dataclasses.fields(TrainConfig)]
    expected = {
        "batch_size": (32, f"{file}:2"),
        "optimizer": ("sgd:lr=0.3,momentum=0.9", f"{file}:4 and --optimizer.lr"),
        "until": ("accuracy=0.9", f"{file}:5"),
        "seed": (5, f"{second}:2"),
        "clip": (1.0, "TUTTI_CLIP"),
        "keep": (4, "--keep"),
        "schedule": ("cosine:warmup=1ep", "--schedule and --schedule.warmup"),
        "augment": (False, "--augment"),
        "workers": (None, "default"),
    }
    assert {name: found[name] for name in expected} == expected
    assert main(["config", "show", *words, "--origin"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith("clip ")] == [["clip", "1.0", "TUTTI_CLIP"]]


def test_what_is_shown_is_what_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["digits", "--optimizer.beta1", "0.8", "--set", "optimizer.lr=0.1", "--steps", "3"]
    found = shown(capsys, *words)
    assert main(["train", *words, "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    printed.pop("task")
    assert {name: value for name, (value, _) in found.items() if value is not None} == printed
    assert printed["optimizer"] == "adam:lr=0.1,beta1=0.8"


def test_a_resumed_run_is_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('task = "digits"\nbatch_size = 16\nworkers = 2\n')
    found = shown(capsys, "--resume", str(tmp_path))
    assert found["batch_size"] == (16, f"{tmp_path / 'config.toml'}:2")


@pytest.mark.parametrize(
    ("text", "change", "expected"),
    [
        ("a.b:Class", "optimizer.lr=1", "a.b:Class:lr=1"),
        ("a.b:Class:lr=2,x=y", "optimizer.lr=1", "a.b:Class:lr=1,x=y"),
        ("adam", "optimizer.weight-decay=1", "adam:weight_decay=1"),
    ],
)
def test_optimizers_of_other_packages(text: str, change: str, expected: str) -> None:
    assert changed_fields({"optimizer": text}, [change]) == {"optimizer": expected}


def test_specifications_without_a_name() -> None:
    given = {"batch_growth": "milestones=9ep,factor=5"}
    assert changed_fields(given, ["batch_growth.factor=2"]) == {"batch_growth": "milestones=9ep,factor=2"}


@pytest.mark.parametrize(("name", "line"), [("batch_size", 2), ("optimizer", 4), ("until", 5), ("seed", 7)])
def test_lines(name: str, line: int, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(FILE)
    found = line_of(file, name)
    # Blank lines and comments before a key are TOML by themselves.
    assert found == line and name.replace("_", "-") in FILE.splitlines()[found - 1].replace("_", "-")
