"""Scripts that fail on one rank of an engine: first cause, exit code and the lines that the user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import SAFETY_NET, SOURCE
from tutti.cli.run_command import run
from tutti.errors import ExitCode, UsageError
from tutti.launcher import failure
from tutti.launcher.failure import read_failure
from tutti.launcher.script_rank import run_as_rank

SCRIPT = """
import os
import sys
import time

if os.environ["RANK"] == sys.argv[1]:
    open("failed", "w").close()
    raise ValueError("of this rank")
while not os.path.exists("failed"):
    time.sleep(0.05)
raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_script_that_fails_first_is_named_with_its_own_lines(rank: int, tmp_path: Path) -> None:
    (tmp_path / "a script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "tutti", "run", "-np", "2", "--on", "local", "a script.py", str(rank)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=SAFETY_NET,
        check=False,
    )
    assert done.returncode == 1
    assert f"tutti: rank {rank} on localhost failed: ValueError: of this rank\n" in done.stderr
    # Once: the terminal has rank 0's output already, and that of rank 1 is in its log.
    assert done.stderr.count('raise ValueError("of this rank")') == 1
    for absent in ("Please report", "run_command.py", "runpy", "is empty", "no exception"):
        assert absent not in done.stderr, done.stderr


def test_a_node_without_the_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=rf"this node has no script 'ignored.py' \({tmp_path} on .*\.gitignore"):
        run("ignored.py")


def lose_peer() -> None:
    raise RuntimeError("Connection reset by peer")


def test_a_lost_peer_is_no_cause_and_needs_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_as_rank(lose_peer, 1, tmp_path) == ExitCode.PEER
    found = read_failure([tmp_path], 1)
    assert found is not None and found.exit_code == ExitCode.PEER
    assert run_as_rank(lose_peer, 1, tmp_path / "gone") == ExitCode.PEER
    assert capsys.readouterr().err.count("RuntimeError: Connection reset by peer") == 2


def test_a_note_on_an_error_is_shown_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure.before_report(lambda error: error.add_note("It is far away."))
    try:
        run_as_rank(lose_peer, 1, tmp_path)
    finally:
        failure.before_report(lambda error: None)
    found = read_failure([tmp_path], 1)
    assert found is not None and "It is far away." in found.traceback
    assert "It is far away." in capsys.readouterr().err


ENGINE_RANK = """
import faulthandler
import sys
from pathlib import Path

from tutti.train.engine_rank import engine_rank

print(engine_rank(Path(sys.argv[1])), faulthandler.is_enabled())
"""


def test_a_rank_of_an_engine_leaves_the_stack_of_a_crash(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ENGINE_RANK, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONFAULTHANDLER": ""}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=SAFETY_NET, check=False)
    assert done.stdout.endswith(" True\n") and done.stderr.startswith("tutti: "), done.stderr
