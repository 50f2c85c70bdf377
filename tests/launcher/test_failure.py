"""What the user reads of a rank that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

import tutti
from tutti.errors import ExitCode
from tutti.launcher.failure import Failure, describe_failure

SAID = "the model has no module 'Blok'. Did you mean 'Block'?"


def test_what_is_wrong_on_every_rank_is_said_as_without_ranks(tmp_path: Path) -> None:
    assert (
        describe_failure(Failure(1, 0.0, "UsageError", SAID, int(ExitCode.USAGE)), tmp_path / "rank1.log")
        == f"tutti: {SAID}"
    )


def test_what_is_wrong_in_a_step_names_rank_and_step(tmp_path: Path) -> None:
    failure = Failure(1, 0.0, "UsageError", SAID, int(ExitCode.USAGE), step=3)
    assert describe_failure(failure, tmp_path / "rank1.log").startswith(
        f"tutti: rank 1 failed at step 3: UsageError: {SAID}"
    )


def traceback_of(*frames: str) -> str:
    """A traceback with a frame in each of these files, outermost first."""
    lines = (
        f'  File "{file}", line 7, in call\n    return function(batch)\n           ^^^^^^^^^^^^^^^\n' for file in frames
    )
    return "Traceback (most recent call last):\n" + "".join(lines) + "RuntimeError: shapes cannot be multiplied\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_long_traceback_shows_the_frames_of_the_script(tmp_path: Path, rank: int) -> None:
    own, torch = (
        f"{Path(tutti.__file__).parent}/train/run.py",
        "/env/lib/python3.11/site-packages/torch/nn/modules/module.py",
    )
    log = tmp_path / "rank.log"
    text = traceback_of("script.py", *[own] * 9, "model.py", *[torch] * 9)
    log.write_text(text, encoding="utf-8")
    said = describe_failure(Failure(rank, 0.0, "RuntimeError", "shapes", int(ExitCode.UNEXPECTED), traceback=text), log)
    assert 'File "script.py", line 7' in said and 'File "model.py", line 7' in said
    assert own not in said and torch not in said
    assert str(log) in said, "the whole traceback is there"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_short_traceback_is_shown_whole(tmp_path: Path, rank: int) -> None:
    own = f"{Path(tutti.__file__).parent}/train/run.py"
    log = tmp_path / "rank.log"
    text = traceback_of("script.py", own, "tutti/train/run.py")
    log.write_text(text, encoding="utf-8")
    said = describe_failure(Failure(rank, 0.0, "RuntimeError", "shapes", int(ExitCode.UNEXPECTED), traceback=text), log)
    assert [line.strip() for line in text.splitlines()] == [line.strip() for line in said.splitlines()][2:]
