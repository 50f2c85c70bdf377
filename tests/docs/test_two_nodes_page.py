"""The batch script of docs/two-nodes.md, with ``srun`` and ``scontrol`` that only say how they were called."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tutti.cli.app import build_app

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
FAKE = '#!/bin/bash\nprintf "%s\\n" "$0" "$@" > "$CALLS/${0##*/}"\nexit "${CODE_OF_SRUN:-0}"\n'


def submitted(folder: Path, code: int) -> tuple[int, list[str], list[str]]:
    """Exit code of the script where srun returns ``code``; how srun and scontrol were called, [] where not."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(FAKE)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8", "SLURM_SUBMIT_DIR": str(folder / "home of jobs")}
    environ = os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}
    environ |= {"CALLS": str(folder / "calls"), "CODE_OF_SRUN": str(code)}
    (folder / "calls").mkdir()
    done = subprocess.run(["bash", str(SCRIPT)], env=environ, timeout=60, capture_output=True)
    calls = [folder / "calls" / name for name in ("srun", "scontrol")]
    srun, scontrol = (call.read_text().splitlines()[1:] if call.exists() else [] for call in calls)
    return done.returncode, srun, scontrol


@pytest.mark.parametrize("code", [0, 1, 5, 8, 75, 130])
def test_a_job_that_was_asked_to_leave_queues_again_and_no_other(code: int, tmp_path: Path) -> None:
    returned, srun, scontrol = submitted(tmp_path, code)
    assert (srun[0], srun[1]) == ("--cpus-per-task=8", "tutti")
    assert srun[-1] == f"{tmp_path}/home of jobs/runs/4711", "another attempt would not find its run"
    assert scontrol == (["requeue", "4711"] if code == 75 else [])
    # scontrol's own failure must not hide the run's code.
    assert returned == code
    command, bound, _ = build_app().parse_args(srun[2:], print_error=False, exit_on_error=False)
    assert command.__name__ == "train" and bound.args


def test_the_page_shows_the_script_as_it_is() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert f"```bash\n{text}```\n" in (ROOT / "docs" / "two-nodes.md").read_text(encoding="utf-8")
    heads = dict(
        shlex.split(line)[1].lstrip("-").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line
    )
    assert heads["signal"] == "USR1@120" and "requeue" in heads
