"""Restarts: so many in a row without progress, after pauses that grow, and anew whenever there is progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import launched
from tutti.launcher.budget import Budget, Restart


class Raw(str):
    """Text that is put into the launcher's script as it is."""

    __repr__ = str.__str__


def test_pauses_grow_to_half_a_minute() -> None:
    budget = Budget(9)
    restarts = [budget.spend() for _ in range(10)]
    assert [restart and restart.pause for restart in restarts] == [0, 1, 2, 4, 8, 16, 30, 30, 30, None]
    assert [restart and restart.left for restart in restarts] == [8, 7, 6, 5, 4, 3, 2, 1, 0, None]


def test_progress_makes_the_budget_full_again() -> None:
    saved = 50
    budget = Budget(2, lambda: saved)
    assert budget.spend() == Restart(0, 1, 50), "what was there before the run is no progress"
    assert budget.spend() == Restart(1, 0, 50)
    saved = 60
    assert budget.spend() == Restart(0, 1, 60)
    saved = 55
    assert budget.spend() == Restart(1, 0, 60), "a checkpoint went away"
    assert budget.spend() is None
    assert budget.describe() == "not restarted: 3 failures since step 60 was saved, and --max-restarts is 2"


def test_without_restarts_nothing_is_said_of_them() -> None:
    budget = Budget(0)
    assert budget.spend() is None and budget.describe() == ""


def test_what_is_said() -> None:
    assert Restart(0, 1, 0).describe() == "restarting, 1 restart left"
    assert Restart(4, 0, 20).describe() == "restarting, 0 restarts left (in 4 s, from step 20)"


def test_a_run_that_progresses_survives_more_failures_than_restarts(tmp_path: Path) -> None:
    """Every attempt has a store and a number of its own, however often the budget was full again."""
    result = launched(
        tmp_path,
        """
        import json
        def entry():
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if RANK() == 1:
                names = [Path(os.environ["TUTTI_STORE"]).name, os.environ["TORCHELASTIC_MAX_RESTARTS"]]
                (HERE / f"saved-{attempt}").write_text(json.dumps(names))
                if attempt < 3:
                    raise ValueError("after progress")
        """,
        restarts=1,
        progress=Raw("lambda: len(list(HERE.glob('saved-*')))"),
    )
    assert result.code == 0, result.err
    said = [line for line in result.err.splitlines() if " left" in line]
    assert said == [f"tutti: restarting, 0 restarts left (from step {step})" for step in (1, 2, 3)]
    names = [json.loads((tmp_path / f"saved-{attempt}").read_text()) for attempt in range(4)]
    assert names == [["attempt-0", "1"], ["attempt-1", "1"], ["attempt-2", "2"], ["attempt-3", "3"]]


def test_a_run_that_never_progresses_ends_when_the_restarts_are_spent(tmp_path: Path) -> None:
    result = launched(tmp_path, "def entry():\n    raise ValueError('always')\n", restarts=2)
    assert result.code == 1
    said = [line for line in result.err.splitlines() if " left" in line]
    assert said == ["tutti: restarting, 1 restart left", "tutti: restarting, 0 restarts left (in 1 s)"]
    last = result.err.splitlines()[-1]
    assert last == "tutti: not restarted: 3 failures before anything was saved, and --max-restarts is 2"


FINAL = {
    "sys.exit(75)": 75,
    "raise errors.UsageError('never')": 2,
    "raise errors.DataError('a torn picture')": 3,
    "raise errors.CheckpointError('of another model')": 4,
    "raise errors.DiskError('three saves in a row have failed')": 8,
    "raise OSError(28, 'No space left on device')": 8,
}


@pytest.mark.parametrize("leave", FINAL)
def test_what_cannot_change_is_not_tried_again(leave: str, tmp_path: Path) -> None:
    result = launched(tmp_path, f"from tutti import errors\ndef entry():\n    {leave}\n", restarts=2)
    assert result.code == FINAL[leave], result.err
    assert "restarting" not in result.err and "not restarted" not in result.err


@pytest.mark.parametrize("leave", ["raise errors.LoaderError('loader process 0 was killed')", "sys.exit(8)"])
def test_a_lost_loader_process_and_a_code_of_the_scripts_own_are_tried_again(leave: str, tmp_path: Path) -> None:
    result = launched(tmp_path, f"from tutti import errors\ndef entry():\n    {leave}\n", restarts=1, processes=1)
    assert result.code in (3, 8)
    assert result.err.count("restarting") == 1, result.err
