"""Under which name tutti is installed, and other modules of its name: found by a real process, said by doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tutti
from tutti.distribution import DISTRIBUTION, VERSION

ROOT = Path(__file__).parents[2]
CHECK = """
import json
from tutti.doctor.software import module
[found] = module()
print(json.dumps([found.mark, found.text, found.remedy, found.values["foreign"], found.values["copies"]]))
"""


def checked(cwd: Path, *path: Path) -> tuple[str, str, str, list[str], list[str]]:
    """What the check finds where ``path`` follows our sources on the module search path."""
    search = os.pathsep.join(map(str, (ROOT / "src", *path)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECK],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr
    found: Any = json.loads(done.stdout)
    return tuple(found)  # type: ignore[return-value]


def stranger(site: Path, name: str = "tutti") -> Path:
    """A folder of packages with a distribution that has a module ``tutti``, as pip leaves it."""
    (site / "tutti").mkdir(parents=True)
    (site / "tutti" / "__init__.py").write_text("raise ImportError('not the one that you want')")
    info = site / f"{name}-1.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
    (info / "RECORD").write_text(f"tutti/__init__.py,,\ntutti-1.0.0.dist-info/METADATA,,\n{info.name}/RECORD,,\n")
    return site


def test_nothing_is_in_the_way_here(tmp_path: Path) -> None:
    mark, text, remedy, foreign, copies = checked(tmp_path)
    assert foreign == [], text
    # A checkout beside the installed one is worth a note.
    assert (mark, bool(remedy)) == (("note", True) if copies else ("ok", False))


def test_another_distribution_with_our_module_is_a_problem(tmp_path: Path) -> None:
    mark, text, remedy, foreign, _ = checked(tmp_path, stranger(tmp_path / "site"))
    assert mark == "problem" and "tutti 1.0.0" in text and str(tmp_path / "site") in text
    assert "pip uninstall tutti" in remedy and "pip install --force-reinstall . in a checkout" in remedy
    assert len(foreign) == 2  # the distribution, and the module that Python would find


def test_a_file_of_the_users_own_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "tutti.py").write_text("print('my first run')")
    mark, text, remedy, *_ = checked(tmp_path)
    assert mark == "problem" and str(tmp_path / "tutti.py") in text and "Rename" in remedy


def test_another_copy_of_ours_is_a_note(tmp_path: Path) -> None:
    site = stranger(tmp_path / "site", DISTRIBUTION)
    (site / "tutti" / "cli").mkdir()
    (site / "tutti" / "cli" / "app.py").touch()
    mark, text, _, foreign, copies = checked(tmp_path, site)
    assert (mark, foreign) == ("note", []) and str(site / "tutti") in copies and "another copy" in text


def test_a_folder_that_is_no_module_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "tutti" / "runs").mkdir(parents=True)
    assert checked(tmp_path)[3] == []


def test_the_version_is_the_files_own(tmp_path: Path) -> None:
    """Also where another distribution of this name says otherwise, or none is installed."""
    assert tutti.__version__ == VERSION
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["name"], project["version"]) == (DISTRIBUTION, VERSION)
    search = f"{ROOT / 'src'}{os.pathsep}{stranger(tmp_path / 'site')}"
    words = [sys.executable, "-m", "tutti", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search}, cwd=tmp_path)
    assert done.stdout.startswith(f"tutti {VERSION}\ntorch ")


ADVICE = re.compile(r"tutti\[\w")


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "docs", "README.md"])
def test_nobody_is_told_to_install_another_project(folder: str) -> None:
    top = ROOT / folder
    paths = [top] if top.is_file() else [p for p in top.rglob("*") if p.suffix in {".py", ".md"}]
    assert [str(p) for p in paths if ADVICE.search(p.read_text(encoding="utf-8"))] == []
