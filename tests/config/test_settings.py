"""Flag > TUTTI_* > file > default; and the printed configuration reads back as itself."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from tutti.cli.app import main
from tutti.cli.run_command import end_options
from tutti.config.settings import GROUPS, descriptions, read_file, resolve_config
from tutti.config.train_config import TrainConfig
from tutti.device import check_device, count_by_driver, is_device_choice
from tutti.errors import UsageError
from tutti.tasks.task_registry import TASKS

FIELDS = [field.name for field in dataclasses.fields(TrainConfig)]


def resolved(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    """What ``tutti train … --print-config`` says."""
    assert main(["train", *words, "--print-config"]) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_every_field_has_a_group_and_a_description() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(FIELDS)
    assert sorted(descriptions()) == sorted(FIELDS)


def test_the_help_of_train_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"Train {', '.join(TASKS)} or your own." in told and "your own: tutti train file.py:function" in told


def test_precedence(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.toml"
    file.write_text('task = "linear"\nbatch-size = 1\nseed = 1\nclip = 1\n')
    given = ["--config", str(file)]
    assert TrainConfig().batch_size == 64
    assert resolved(capsys, *given)["batch_size"] == 1
    monkeypatch.setenv("TUTTI_BATCH_SIZE", "2")
    found = resolved(capsys, *given)
    assert (found["batch_size"], found["seed"], found["clip"], found["task"]) == (2, 1, 1.0, "linear")
    found = resolved(capsys, "digits", *given, "--batch_size", "3", "--clip", "none")
    assert (found["batch_size"], found["task"]) == (3, "digits")
    assert "clip" not in found


def test_a_flag_may_restate_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.toml"
    file.write_text("batch_size = 1\naugment = true\n")
    found = resolved(capsys, "digits", "--config", str(file), "--batch-size", "128", "--no-augment")
    assert (found["batch_size"], found["augment"]) == (128, False)


def test_later_files_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("batch_size = 1\nseed = 1\n")
    second.write_text("batch_size = 2\ndevices = 2\n")
    found = resolved(capsys, "digits", "--config", str(first), "--config", str(second))
    assert (found["batch_size"], found["seed"], found["devices"]) == (2, 1, "2")


def test_other_variables_do_not_disturb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = resolved(capsys, "digits")
    for name in ("STORE", "CACHE", "LOG_RANKS"):
        monkeypatch.setenv(f"TUTTI_{name}", "all")
    assert resolved(capsys, "digits") == plain


def test_printed_configuration_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["digits", "--clip", "0.5", "--steps", "7", "--channels-last", "--workers", "4"]
    words += ["--optimizer", "sgd:lr=0.1"]
    assert main(["train", *words, "--print-config"]) == 0
    text = capsys.readouterr().out
    file = tmp_path / "a.toml"
    file.write_text(text)
    expected = TrainConfig(clip=0.5, steps=7, channels_last=True, workers=4, optimizer="sgd:lr=0.1")
    assert resolve_config({}, [file], None) == ("digits", expected)
    assert main(["train", "--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_values_of_every_type(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('epochs = 2\nworkers = 3\nprecision = "bf16"\ndevice = "cpu"\nreproducible = true\ntimeout = 1.5\n')
    assert read_file(file) == {
        "epochs": 2.0,
        "workers": 3,
        "precision": "bf16",
        "device": "cpu",
        "reproducible": True,
        "timeout": 1.5,
    }


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("run -np 2 a.py -np 3 --help", 3),
        ("run a.py -m x", 1),
        ("run --max-restarts 2 --step_timeout 5 a.py -np 3", 5),
        ("run -m --devices=2 pkg.mod -v", 3),
        ("run -np 2 -- a.py --x -- y", None),
        ("run --help", None),
        ("train digits --seed 3", None),
    ],
)
def test_what_follows_the_script_is_the_scripts(words: str, ours: int | None) -> None:
    given = words.split()
    expected = given if ours is None else [*given[:ours], "--", *given[ours:]]
    assert end_options(given) == expected


def test_counting_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.device.DEVICE_FILES", tmp_path)
    monkeypatch.setattr("tutti.device._torch_version", lambda: "2.13.0+cu130")
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    visible = {None: 3, "": 0, "1": 1, "0,2": 2, "-1": 0, "0,1,2,3": 3, "1,-1,2": 1, "GPU-1a2b,GPU-3c4d": 2}
    for value, count in visible.items():
        assert count_by_driver({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == count
    monkeypatch.setattr("tutti.device._torch_version", lambda: "2.13.0+cpu")
    assert count_by_driver({}) == 0


def test_torch_counts_where_the_driver_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.device._plugins", lambda environ: ())
    for version in ("2.13.0+rocm6.4", "2.13.0+xpu"):
        monkeypatch.setattr("tutti.device._torch_version", lambda version=version: version)
        assert count_by_driver({}) is None
    monkeypatch.setattr("tutti.device._plugins", lambda environ: ("simgpu",))
    monkeypatch.setattr("tutti.device._torch_version", lambda: "2.13.0+cpu")
    assert count_by_driver({}) is None
    assert is_device_choice("simgpu") and not is_device_choice("sim gpu")


def test_a_mistyped_device_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.device._plugins", lambda environ: ())
    for choice in ("auto", "cpu", "cuda", "xpu"):
        check_device(choice)
    with pytest.raises(UsageError, match=r"unknown device 'cud'.*ake cuda"):
        check_device("cud")
