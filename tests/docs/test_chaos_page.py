"""The examples of docs/chaos.md: those in ``bash`` blocks run, in their order; the others are at least understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.faults.commands import tutti
from tutti.cli.app import build_app

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8"), re.M | re.S)


def commands(*languages: str) -> list[list[str]]:
    lines = [line for language, block in BLOCKS if language in languages for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("tutti ")]


def test_examples_are_understood() -> None:
    verbs = []
    for words in commands("", "bash"):
        command, bound, _ = build_app().parse_args(words, print_error=False, exit_on_error=False)
        verbs.append(command.__name__)
        # What follows -- is the command's, dashes and all.
        assert list(bound.args)[-1:] == words[-1:] or "--" not in words
    assert {"kill", "stop", "slow", "corrupt", "fill", "soak"} == set(verbs)


@pytest.mark.full
def test_examples_run(tmp_path: Path) -> None:
    first, second = (tutti(tmp_path, *words) for words in commands("bash"))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    shown = next(block for language, block in BLOCKS if not language and block.startswith("fault"))
    heads, _, _, verdict = shown.splitlines()
    assert first.out.splitlines()[0].split() == heads.split() and first.out.splitlines()[-1] == verdict
    assert "weights: equal bits" in first.out
    assert second.out.splitlines()[-1] == "everything was detected"
