"""How a run's outcome reaches stdout, the exit code and summary.json, with the training itself replaced."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tutti.cli.app import main
from tutti.config.train_config import TrainConfig
from tutti.errors import DataError
from tutti.metrics import records
from tutti.metrics.records import RunDirectory, record_exit
from tutti.report import html_report

SUMMARY = {
    "task": "digits",
    "eval": {"loss": 0.25, "accuracy": 0.9},
    "samples_per_second": 1234.5,
    "weights_sha256": "ab" * 32,
    "exit_code": 0,
}

Install = Callable[[Callable[[str, TrainConfig, str | None], int]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    monkeypatch.chdir(tmp_path)

    def put(training: Callable[[str, TrainConfig, str | None], int]) -> None:
        module: Any = types.ModuleType("tutti.train.main")
        module.train_rank = training
        monkeypatch.setitem(sys.modules, "tutti.train.main", module)

    return put


def succeed(task: str, config: TrainConfig, directory: str | None) -> int:
    assert directory is not None
    print("a print of the user's model")
    listener = RunDirectory(directory, config, task)
    listener.finished(SUMMARY)
    listener.close()
    return 0


def test_result_line(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(succeed)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == 0
    out, err = capsys.readouterr()
    assert out == "digits: held-out loss 0.2500, accuracy 0.9000 · 1,234 samples/s · weights abababababab · here\n"
    assert err == "a print of the user's model\n"


def test_json_alone_on_stdout(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(succeed)
    assert main(["train", "digits", "--devices", "1", "--out", "here", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SUMMARY


@pytest.mark.parametrize(
    ("package", "words", "option"),
    [
        ("tensorboard", ("--tensorboard",), "--tensorboard"),
        ("trackio", ("--logger", "jsonl:path=log+trackio:project=mine"), "--logger"),
    ],
)
def test_a_logger_whose_package_is_not_there_is_refused(
    package: str,
    words: tuple[str, ...],
    option: str,
    install: Install,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    install(succeed)
    assert main(["train", "digits", "--devices", "1", "--out", "here", *words]) == 2
    remedy = f"Run pip install 'tutti-train[{package}]', or leave it out."
    said = f"tutti: {option} needs the package {package}. {remedy}\n"
    assert capsys.readouterr() == ("", said)
    assert not Path("here").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("wandbb", "unknown logger 'wandbb'. Did you mean 'wandb'"),
        ("wandb:projekt=mine", "Did you mean 'project'"),
        ("jsonl", "path"),
    ],
)
def test_a_malformed_logger_is_refused(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--devices", "1", "--logger", text]) == 2
    assert said in capsys.readouterr().err


def test_config_reruns_elsewhere(install: Install, tmp_path: Path) -> None:
    seen: list[tuple[str, TrainConfig, str | None]] = []

    def remember(task: str, config: TrainConfig, directory: str | None) -> int:
        seen.append((task, config, directory))
        return succeed(task, config, directory)

    install(remember)
    assert main(["train", "digits", "--devices", "1", "--seed", "7", "--out", "here"]) == 0
    assert main(["train", "--config", "here/config.toml"]) == 0
    (task, first, _), (again, second, directory) = seen
    assert (task, first.seed) == (again, second.seed) == ("digits", 7)
    assert directory is not None and Path(directory).parent == Path("runs")
    texts = [Path(path, "config.toml").read_text() for path in ("here", directory)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("bad image", where="x.png"), 3, "tutti: bad image (x.png).\n"),
        (KeyboardInterrupt(), 130, "tutti: interrupted\n"),
    ],
)
def test_failure(
    install: Install, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    def fail(task: str, config: TrainConfig, directory: str | None) -> int:
        raise error

    install(fail)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == code
    assert capsys.readouterr() == ("", said)
    assert json.loads(Path("here/summary.json").read_text()) == {"exit_code": code}


def test_bug_shows_its_traceback(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(task: str, config: TrainConfig, directory: str | None) -> int:
        raise ZeroDivisionError("oh")

    install(fail)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("tutti: unexpected ZeroDivisionError: oh. Please report it.\n")


def test_code_of_a_failed_run_joins_its_summary(install: Install) -> None:
    def fail(task: str, config: TrainConfig, directory: str | None) -> int:
        record_exit(Path(str(directory)), 0)
        Path(str(directory), "summary.json").write_text('{"steps": 3}')
        return 6

    install(fail)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == 6
    assert json.loads(Path("here/summary.json").read_text()) == {"steps": 3, "exit_code": 6}


@pytest.mark.parametrize("words", [("--out", "here", "--overwrite"), ("--resume", "here")])
def test_a_directory_of_a_run_that_goes_on_is_refused(
    words: tuple[str, ...], install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks hold the directory, too, after the launcher was killed: for as long, the next run waits."""
    install(succeed)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == 0
    Path("here/checkpoints").mkdir()
    monkeypatch.setattr(records, "_ENDING", 0.0)
    with records.claim_run_directory(Path("here")):
        assert main(["train", "digits", "--devices", "1", *words]) == 2
    assert "another run writes into this run directory" in capsys.readouterr().err
    assert Path("here/checkpoints").is_dir() and json.loads(Path("here/summary.json").read_text()) == SUMMARY
    with records.claim_run_directory(Path("here")):
        pid = os.fork()
        if pid == 0:
            time.sleep(0.5)
            os._exit(0)
    monkeypatch.setattr(records, "_ENDING", 60.0)
    assert main(["train", "digits", "--devices", "1", *words]) == 0
    os.waitpid(pid, 0)


def test_joined_ranks_share_the_first_ones_directory(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    def remember(task: str, config: TrainConfig, directory: str | None) -> int:
        seen.append((config.devices, directory))
        return 0

    install(remember)
    watched: list[int] = []
    # A real one would end this process, once its limit for a start without progress is over.
    monkeypatch.setattr("tutti.launcher.watchdog.start_watchdog", lambda rank, limits: watched.append(rank))
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train", "digits", "--out", "here"]) == 0
    assert seen == [("2", "here"), ("2", None)]
    assert watched == [0, 1]


def test_a_run_of_a_minute_gets_its_report(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    install(succeed)
    assert main(["train", "digits", "--devices", "1", "--out", "short"]) == 0
    monkeypatch.setattr(html_report, "WORTH_A_REPORT", 0.0)
    assert main(["train", "digits", "--devices", "1", "--out", "long"]) == 0
    assert not (tmp_path / "short" / "report.html").exists()
    assert (tmp_path / "long" / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_report_that_fails_or_cannot_be_made_leaves_the_run_as_it_is(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(succeed)
    monkeypatch.setattr(html_report, "WORTH_A_REPORT", 0.0)

    def fail(*_: object) -> Path:
        raise RecursionError("too deep")

    monkeypatch.setattr(html_report, "write_report", fail)
    monkeypatch.setattr(html_report, "PACKAGES", ("json",))
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == 0
    assert "the report of the run was not written: too deep" in capsys.readouterr().err
    monkeypatch.setattr(html_report, "PACKAGES", ("a_package_that_is_not_there",))
    assert main(["train", "digits", "--devices", "1", "--out", "there"]) == 0
    assert "report" not in capsys.readouterr().err


def test_a_failed_run_writes_no_report(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(task: str, config: TrainConfig, directory: str | None) -> int:
        raise DataError("nothing there")

    install(fail)
    monkeypatch.setattr(html_report, "WORTH_A_REPORT", 0.0)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == 3
    assert not (tmp_path / "here" / "report.html").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 8),
        (RuntimeError("[gloo/transport/tcp/pair.cc:545] Connection closed by peer [127.0.0.1]:1"), 5),
    ],
)
def test_what_others_raise_has_the_code_that_a_rank_gives_it(
    install: Install, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(task: str, config: TrainConfig, directory: str | None) -> int:
        raise error

    install(fail)
    assert main(["train", "digits", "--devices", "1", "--out", "here"]) == code
    assert json.loads(Path("here/summary.json").read_text()) == {"exit_code": code}
    assert capsys.readouterr().err.endswith(f"tutti: unexpected {type(error).__name__}: {error}.\n")
