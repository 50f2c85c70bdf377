"""The task and the command of docs/tasks.md, on two devices."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from tests.forkserver import run

ROOT = Path(__file__).parents[2]
SAFETY_NET = 200


def test_the_task_of_the_page_learns(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    command = re.search(r"```console\n(.*?)```", page, re.DOTALL)
    assert code and command
    name = code[1].splitlines()[0].removeprefix("# ")
    (tmp_path / name).write_text(code[1], encoding="utf-8")
    words = shlex.split(command[1].replace("\\\n", " "))
    assert words[:2] == ["tutti", "train"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    done = run(["-m", *words, "--out", "out", "--json"], tmp_path, environ, SAFETY_NET)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["task"] == "spirals.py:spirals" and summary["eval"]["accuracy"] > 0.95
