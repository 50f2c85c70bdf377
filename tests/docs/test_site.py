"""The documentation site: every page has a place in it, its links stay on it, and it is built without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tutti

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_site", ROOT / "docs" / "site" / "make_site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_one_place(site: ModuleType) -> None:
    pages = {name for name in site.sources() if name.endswith(".md")}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} < pages
    reference = {"reference/command-line.md", "reference/api.md"}
    sections = site.navigation(pages | reference)
    assert [title for section in sections for title in section] == ["Tutorial", "How-to", "Reference", "Explanation"]
    with pytest.raises(SystemExit, match=r"differ, or name a page twice: new\.md"):
        site.navigation(pages | reference | {"new.md"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](docs/data.md#x)", "[a](../data.md#x)"),
        ("two\nlines [of\ntext](docs/data.md)", "two\nlines [of\ntext](../data.md)"),
        ("[code](src/tutti/errors.py) and [web](https://a.b)", "code and [web](https://a.b)"),
        ("[here](#x)", "[here](#x)"),
        ("```python continued\n[a](docs/data.md)\n```", "```python\n[a](docs/data.md)\n```"),
    ],
)
def test_links_stay_on_the_site(text: str, expected: str, site: ModuleType) -> None:
    places = {(ROOT / "docs" / "data.md").resolve(): "data.md"}
    assert site.relinked(text, ROOT / "README.md", "folder/index.md", places) == expected


def test_the_reference_is_made_from_the_code(site: ModuleType) -> None:
    commands, names = site.command_line(), site.public_names()
    for flag in ("--batch-size", "--change", "--set", "## tutti train", "tutti config show"):
        assert flag in commands
    for usage in ("train TASK [OPTIONS]", "chaos kill [OPTIONS] -- tutti train …", "config show [TASK] [OPTIONS"):
        assert f"\ntutti {usage}" in commands
    listed = set(re.findall(r"^::: [\w.]+\.(\w+)$", names, re.MULTILINE))
    assert {"prepare", "Run", "init", "launch", "allreduce"} <= listed <= set(tutti.__all__)


@pytest.mark.full
def test_it_is_built_without_a_warning() -> None:
    """``make site``, which is run with ``make test``, ends at a warning, too."""
    pytest.importorskip("zensical", reason="zensical is not installed: make site")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: make site")
    command = [sys.executable, str(ROOT / "docs" / "site" / "make_site.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 0 and "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    page = (ROOT / "build" / "site" / "html" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert "tutti.train.prepare.prepare" in page and "without any code for ranks" in page
