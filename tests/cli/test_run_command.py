"""``tutti run``: the words after the script, and the timeout that its processes get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forkserver import run
from tutti.cli.run_command import end_options

PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    "options",
    [
        "-np 4",
        "--num_proc 4 --show-all",
        "--hostfile hosts --save-all",
        "--nnodes 2 --node_rank 1",
        "--horovod --min-np 1 --blacklist-cooldown-range 1 2",
        "--timeout=9 -m",
    ],
)
def test_words_after_the_script_are_its_own(options: str) -> None:
    words = ["run", *options.split()]
    assert end_options([*words, "train.py", "--timeout", "3"]) == [*words, "--", "train.py", "--timeout", "3"]


@pytest.mark.parametrize(
    ("options", "environ", "seconds"),
    [
        ("", {}, "300"),
        ("--timeout 7", {"TUTTI_TIMEOUT": "9"}, "7"),
        ("", {"TUTTI_TIMEOUT": "9"}, "9"),
        ("--horovod --min-np 1", {}, "20"),
        ("--horovod --min-np 1 --timeout 300", {}, "300"),
        # Under another launcher, such as torchrun.
        ("--timeout 7", RANK | {"MASTER_PORT": "1"}, "7"),
    ],
)
def test_the_timeout_of_the_processes(options: str, environ: dict[str, str], seconds: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os\nprint(os.environ['TUTTI_TIMEOUT'])\n")
    one = [] if "RANK" in environ else ["-np", "1"]
    done = run(["-m", "tutti", "run", *one, *options.split(), "script.py"], tmp_path, PLAIN | environ, 120)
    assert (done.returncode, done.stdout) == (0, f"{seconds}\n"), done.stderr


@pytest.mark.parametrize(("words", "warned"), [("script.py -np 2", True), ("-np 1 script.py -np 2", False)])
def test_a_number_of_processes_after_the_script_is_warned_of(words: str, warned: bool, tmp_path: Path) -> None:
    """The script may have an option of this name, but then tutti has its own as well."""
    (tmp_path / "script.py").write_text("import sys\nprint(*sys.argv[1:])\n")
    done = run(["-m", "tutti", "run", *words.split()], tmp_path, PLAIN, 120)
    assert (done.returncode, done.stdout) == (0, "-np 2\n"), done.stderr
    assert (
        "-np after script.py is an argument of the script: write tutti run -np N script.py" in done.stderr
    ) is warned


@pytest.mark.parametrize(("module", "told"), [("horovod.torch", True), ("horovodrun", False)])
def test_a_horovod_script_without_the_flag_is_told_of_it(module: str, told: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import {module}\n")
    done = run(["-m", "tutti", "run", "-np", "1", "script.py"], tmp_path, PLAIN, 120)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
    assert ("tutti run --horovod -np N script.py" in done.stderr) is told


def test_a_log_folder_that_cannot_be_made_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    done = run(["-m", "tutti", "run", "-np", "1", "--logs", "script.py/logs", "script.py"], tmp_path, PLAIN, 120)
    assert done.returncode == 8 and "Choose a folder that you may write, with --logs" in done.stderr
