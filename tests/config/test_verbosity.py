"""``-v``, ``-vv`` and ``-q``: what a command tells, on which rank, and what of it Python's logging sees."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import run
from tutti.config.verbosity import VERBOSITY, take_verbosity
from tutti.errors import UsageError

SCRIPT = """
import sys, torch, tutti
{before}
run = tutti.prepare(torch.nn.Linear(3, 1), "sgd:lr=0.1", torch.randn(8, 3), lambda m, b: m(b).square().mean())
print("argv", sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "left", "chosen"),
    [
        ("train digits -v", "train digits", "verbose"),
        ("train -vv digits", "train digits", "debug"),
        ("bench --verbose", "bench", "verbose"),
        ("bench -vvv", "bench", "debug"),
        ("run -q -- a.py -v", "run -- a.py -v", "quiet"),
        ("run -- a.py -v", "run -- a.py -v", None),
    ],
)
def test_flags_of_a_command_and_not_of_its_script(words: str, left: str, chosen: str | None) -> None:
    environ: dict[str, str] = {}
    assert take_verbosity(words.split(), environ) == left.split()
    assert environ.get(VERBOSITY) == chosen


def test_both_at_once_are_refused() -> None:
    with pytest.raises(UsageError, match="-q and -v contradict each other"):
        take_verbosity(["train", "-q", "-v"], {})


def tutti(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(["-m", "tutti", *words], folder, os.environ | environ, 200)


def test_quiet_leaves_the_result(tmp_path: Path) -> None:
    words = ("train", "linear", "--steps", "2", "--devices", "1", "--out", "out")
    quiet = tutti(tmp_path, *words, "-q")
    assert (quiet.returncode, quiet.stderr) == (0, "") and quiet.stdout.startswith("linear: ")
    failed = tutti(tmp_path, *words, "-q")
    assert failed.returncode == 2 and "the run directory is not empty" in failed.stderr


def test_decisions_are_told_once_and_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(before=""))
    told = tutti(tmp_path, "run", "-v", "-np", "2", "script.py", "-v")
    assert told.returncode == 0 and "argv ['-v']" in told.stdout
    reason = "tutti.prepare: logical workers: 2, as many as data ranks, because workers is not given"
    assert told.stderr.splitlines().count(reason) == 1
    assert "tutti.prepare: global batch: 128 samples, the default" in told.stderr.splitlines()
    assert "parameter weight" not in told.stderr
    assert "tutti.prepare" not in (tmp_path / "runs" / "logs" / "rank1.log").read_text()
    more = tutti(tmp_path, "run", "-vv", "-np", "2", "script.py")
    assert "tutti.prepare: parameter weight: (1, 3) torch.float32" in more.stderr
    assert "tutti.prepare: parameter weight" in (tmp_path / "runs" / "logs" / "rank1.log").read_text()


def test_python_sees_the_logger_and_the_root_stays_as_it_is(tmp_path: Path) -> None:
    """Without the variable nothing is configured; a script's own configuration gets each record once."""
    script = tmp_path / "script.py"
    check = "import logging; assert not logging.getLogger('tutti').handlers and not logging.getLogger().handlers"
    script.write_text(SCRIPT.format(before="") + check)
    done = run([script.name], tmp_path, os.environ, 200)
    assert (done.returncode, done.stderr) == (0, "")
    own = "import logging; logging.basicConfig(format='own %(message)s'); logging.getLogger('tutti').setLevel('INFO')"
    script.write_text(SCRIPT.format(before=own))
    for environ in ({}, {VERBOSITY: "verbose"}):
        done = run([script.name], tmp_path, os.environ | environ, 200)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if "device mesh: 1 rank" in line]
        assert lines == ["own device mesh: 1 rank = 1 data"]


def test_a_wrong_level_is_refused(tmp_path: Path) -> None:
    done = tutti(tmp_path, "train", "linear", TUTTI_VERBOSITY="loud")
    assert done.returncode == 2 and "TUTTI_VERBOSITY is 'loud'. Give quiet or verbose or debug" in done.stderr
