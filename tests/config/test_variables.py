"""``TUTTI_*``: the one table of them, and what is refused wherever they are read."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.forkserver import run
from tutti.config import variables
from tutti.config.variables import KNOWN, check_variables, values_of_type, without_settings
from tutti.errors import UsageError

ROOT = Path(__file__).parents[2]
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("TUTTI_")}


TYPES = [
    (int, "a whole number", "3", "3.5"),
    (int | None, "a whole number, or none", "None", "x"),
    (float, "a number", "1e-3", "none"),
    (float | None, "a number, or none", "none", "nan"),
    (bool, "true or false", "No", "perhaps"),
    (bool | None, "true or false, or none", "none", "2"),
    (Literal["fp32", "bf16"], "fp32 or bf16", "bf16", "fp23"),
    (str, "text", "none", None),
    (str | None, "text", "", None),
]


@pytest.mark.parametrize(("hint", "words", "valid", "wrong"), TYPES, ids=[str(each[0]) for each in TYPES])
def test_the_type_of_an_option_decides_the_values_of_its_variable(
    hint: Any, words: str, valid: str, wrong: str | None
) -> None:
    values = values_of_type(hint)
    assert values.words == words and values.valid(valid)
    assert wrong is None or not values.valid(wrong)


def test_every_variable_in_the_sources_is_in_the_table() -> None:
    found = {
        name
        for folder in ("src", "benchmarks", "docs", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".cpp", ".sbatch"}
        for name in re.findall(r"\bTUTTI_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert found - {"TUTTI_BATHSIZE"} <= KNOWN.keys()
    assert found >= {"TUTTI_KERNELS", "TUTTI_CACHE", "TUTTI_LOG_RANKS", "TUTTI_STORE", "TUTTI_TETHER", "TUTTI_TIMEOUT"}


REFUSED = [
    ({"TUTTI_BATHSIZE": "3"}, "there is no variable TUTTI_BATHSIZE. Did you mean TUTTI_BATCH_SIZE?"),
    ({"TUTTI_CACHES": "x"}, "Did you mean TUTTI_CACHE?"),
    ({"TUTTI_KERNEL": "off"}, "Did you mean TUTTI_KERNELS?"),
    ({"TUTTI_QQQ": "1"}, "Unset it; variables are TUTTI_ with an option of tutti train in capitals"),
    ({"TUTTI_LOG_RANKS": "0,3"}, "TUTTI_LOG_RANKS is '0,3'. Give all, or unset it."),
    ({"TUTTI_KERNELS": "no"}, "TUTTI_KERNELS is 'no'. Give on or 1 or off or 0, or unset it."),
    ({"TUTTI_BATCH_SIZE": "many"}, "TUTTI_BATCH_SIZE is 'many'. Give a whole number, or unset it."),
    ({"TUTTI_REPRODUCIBLE": "perhaps"}, "TUTTI_REPRODUCIBLE is 'perhaps'. Give true or false, or unset it."),
    ({"TUTTI_PRECISION": "fp23"}, "Give fp32 or bf16 or fp16 or fp64 or fp8, or unset it."),
    ({"TUTTI_CLIP": "inf"}, "TUTTI_CLIP is 'inf'. Give a number, or none, or unset it."),
]


@pytest.mark.parametrize(("environ", "message"), REFUSED, ids=[next(iter(environ)) for environ, _ in REFUSED])
def test_refused(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_variables(environ)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"TUTTI_BATCH_SIZE": "3", "TUTTI_CLIP": "none", "TUTTI_REPRODUCIBLE": "No", "TUTTI_KERNELS": "on"},
        {"tutti_x": "1", "MY_TUTTI_X": "1"},
        # A service of Kubernetes that is called tutti-store.
        {
            "TUTTI_STORE_SERVICE_HOST": "10.0.0.1",
            "TUTTI_STORE_SERVICE_PORT": "80",
            "TUTTI_STORE_PORT": "tcp://10.0.0.1:80",
            "TUTTI_STORE_PORT_80_TCP_ADDR": "10.0.0.1",
        },
    ],
)
def test_accepted(environ: Mapping[str, str]) -> None:
    check_variables(environ)


def test_a_run_whose_configuration_is_complete_keeps_what_is_said_of_the_machine() -> None:
    environ = {"TUTTI_STEPS": "3", "TUTTI_KERNELS": "off", "TUTTI_CACHE": "x", "PATH": "y"}
    assert without_settings(environ) == {"TUTTI_KERNELS": "off", "TUTTI_CACHE": "x", "PATH": "y"}


def ran(*words: str, cwd: Path, torch: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    return run(words, cwd, PLAIN | {"PYTHONPATH": str(ROOT / "src")} | environ, 300, torch)


@pytest.mark.parametrize(
    "words", ["train digits", "run script.py", "compare digits", "export runs/a", "chaos kill train digits"]
)
def test_every_command_refuses_before_it_does_anything(words: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    for environ in ({"TUTTI_BATHSIZE": "3"}, {"TUTTI_KERNELS": "no"}):
        done = ran("-m", "tutti", *words.split(), cwd=tmp_path, torch=False, **environ)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert next(iter(environ)) in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_help_and_version_answer_all_the_same(tmp_path: Path) -> None:
    for word in ("--help", "--version"):
        assert ran("-m", "tutti", word, cwd=tmp_path, torch=False, TUTTI_BATHSIZE="3").returncode == 0


def test_a_script_is_refused_where_it_calls_init(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import tutti\ntutti.init()\nprint('ran')")
    done = ran("script.py", cwd=tmp_path, TUTTI_BATHSIZE="3")
    assert done.returncode == 1 and done.stdout == ""
    assert "UsageError: there is no variable TUTTI_BATHSIZE. Did you mean TUTTI_BATCH_SIZE?" in done.stderr


def test_the_page_names_them() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    hidden = {"TUTTI_STORE", "TUTTI_TEST_DATA"}
    own = {f"TUTTI_{name}" for name in (*variables.MACHINE, *variables.INTERNAL)} - hidden
    assert own <= set(re.findall(r"^\| `(TUTTI_\w+)`", page, re.MULTILINE))


@pytest.mark.parametrize(("value", "changed"), [("on", True), ("off", False)])
def test_the_process_is_left_alone_where_asked(value: str, changed: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, os, tutti\n"
        "tutti.init()\n"
        "from tutti.launcher import malloc_tuning\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read().split()\n"
        "hook = type(sys.excepthook).__module__.startswith('tutti')\n"
        "print(hook, malloc_tuning.keep_freed_memory(), bool(children))\n"
    )
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = ran("script.py", cwd=tmp_path, TUTTI_PROCESS_SETUP=value, MASTER_PORT="0", **one)
    assert (done.returncode, done.stdout) == (0, f"{changed} {changed} {changed}\n"), done.stderr


@pytest.mark.parametrize(("value", "said"), [("on", "left"), ("off", "")])
def test_the_process_leaves_the_job_at_its_end_unless_it_is_left_alone(value: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import tutti\n"
        "from tutti.launcher import context\n"
        "tutti.init()\n"
        "context.before_shutdown(lambda: print('left', end=''))\n"
    )
    done = ran("script.py", cwd=tmp_path, TUTTI_PROCESS_SETUP=value)
    assert (done.returncode, done.stdout) == (0, said), done.stderr


@pytest.mark.parametrize(("value", "calls"), [("on", 11), ("off", 2)])
def test_diagnostics_call_the_loss_unless_they_are_off(value: str, calls: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import torch, tutti\n"
        "from torch.utils.data import TensorDataset\n"
        "def loss(model, batch):\n"
        "    print('called')\n"
        "    out = model(batch[0])\n"
        "    return (out * out.detach().mean()).mean()\n"
        # How many calls show that the loss mixes samples depends on the data.
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 1)\n"
        "data = TensorDataset(torch.randn(8, 3))\n"
        "run = tutti.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data, loss, workers=2, batch_size=8)\n"
        "for batch in run.epoch(0):\n"
        "    run.step(batch)\n"
    )
    done = ran("script.py", cwd=tmp_path, TUTTI_DIAGNOSTICS=value)
    assert (done.returncode, done.stdout) == (0, "called\n" * calls), done.stderr
    assert ("mixed-samples" in done.stderr) == (value == "on")


def test_a_launched_script_has_the_limit_of_saves(tmp_path: Path) -> None:
    script = "import tutti\nfrom tutti.launcher import watchdog\ntutti.init()\nprint(watchdog.save_limit())\n"
    (tmp_path / "script.py").write_text(script)
    words = ["-m", "tutti", "run", "-np", "1", "script.py"]
    environ = PLAIN | {"PYTHONPATH": str(ROOT / "src"), "TUTTI_SAVE_TIMEOUT": "77"}
    assert run(words, tmp_path, environ, 300).stdout.splitlines()[-1] == "77.0"
