"""Every command of tutti that a page shows is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from tutti.cli.app import build_app
from tutti.cli.launch_flags import hosts_as_engine, node_of_job
from tutti.cli.run_command import end_options, run_options
from tutti.cli.train_command import bare_options
from tutti.config.verbosity import take_verbosity
from tutti.horovod.run_flags import translate_flags

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|[$;=\d] +|\bdo +|-m +)tutti ((?:[a-z]+) .*)")


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, but for those that leave words out."""
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    for block in (block for language, block in blocks if language in ("", "console", "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            found = _COMMAND.search(re.sub(r"\s#.*|; done$| > \S+$", "", line))
            if found and "…" not in line:
                yield found[1].replace("$n", "1")


@pytest.fixture(scope="module")
def app() -> App:
    return build_app()


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=lambda page: page.stem)
def test_commands_are_understood(page: Path, app: App) -> None:
    for command in commands(page):
        words = end_options(translate_flags(shlex.split(command), {}, run_options()))
        words = hosts_as_engine(bare_options(take_verbosity(words, {})))
        if node_of_job(words, {}) is None:
            app.parse_args(words, print_error=False, exit_on_error=False)


def test_there_are_commands_to_understand() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 120
