"""What the user reads of a rank that failed."""

from __future__ import annotations

from pathlib import Path

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
