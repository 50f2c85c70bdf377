"""``tutti --install-completion`` writes a script by which bash completes commands and options."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.test_refusals import tutti

COMPLETE = """
source ./completion
function=$(complete -p tutti | sed -E 's/.*-F ([^ ]+) .*/\\1/')
COMP_WORDS=(tutti "$@")
COMP_CWORD=$#
$function
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    shell = ["bash", "-c", COMPLETE, "bash", *words]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in done.stdout.split()]


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    done = tutti("--install-completion", "--shell", "bash", "--output", "completion", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "completion" in done.stdout
    assert completed(tmp_path, "expo") == ["export"]
    assert completed(tmp_path, "train", "--init-f") == ["--init-from"]
    assert completed(tmp_path, "export", "--format", "h") == ["hf"]


@pytest.mark.parametrize(("shell", "code"), [("nope", 2), ("fish", 0)])
def test_nothing_is_written_beside_the_script(shell: str, code: int, tmp_path: Path) -> None:
    done = tutti("--install-completion", "--shell", shell, cwd=tmp_path, HOME=str(tmp_path))
    assert done.returncode == code, done.stderr
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ([".config/fish/completions/tutti.fish"] if code == 0 else [])
