"""The wheel in an environment with nothing but what it requires: it trains, and says which extra a feature needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti.distribution import DISTRIBUTION, VERSION

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(names: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that these require without any extra, and those that they require, once each."""
    seen: set[str] = set()
    while names:
        name = re.split(r"[^\w.-]", names.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            # Required on other systems or versions of Python alone.
            continue
        yield found
        names += [each for each in found.requires or () if "extra ==" not in each]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the built wheel, and links to the distributions that it requires."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed")
    pytest.importorskip("pip", reason="pip is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, built], check=True, timeout=200)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    for each in required(list(PROJECT["dependencies"])):
        for top in {file.parts[0] for file in each.files or () if ".." not in file.parts}:
            source, link = Path(str(each.locate_file(top))), packages / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder / "venv"


def tutti(environment: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(environment / "bin" / "tutti"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=folder, env=outside)


def test_it_is_the_installed_one_and_no_extra_is_there(environment: Path, tmp_path: Path) -> None:
    code = "import tutti, importlib.util as u; print(tutti.__file__, *map(u.find_spec, ('sklearn', 'scipy', 'PIL')))"
    done = subprocess.run(
        [str(environment / "bin" / "python"), "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.startswith(f"{environment}/lib") and done.stdout.endswith("None None None\n"), done
    assert tutti(environment, tmp_path, "--version").stdout.startswith(f"tutti {VERSION}\ntorch 2.")


def test_it_trains_and_exports(environment: Path, tmp_path: Path) -> None:
    done = tutti(environment, tmp_path, "train", "linear", "--devices", "2", "--steps", "20", "--out", "run")
    assert done.returncode == 0 and done.stdout.startswith("linear: "), done.stderr
    done = tutti(environment, tmp_path, "export", "run", "-o", "model.safetensors")
    assert done.returncode == 0 and (tmp_path / "model.safetensors").is_file(), done.stderr


NEEDS = [
    ("train digits --steps 1", "demo"),
    ("train linear --steps 1 --tensorboard", "tensorboard"),
    ("train cifar10 --data {folder} --steps 1", "data"),
]


@pytest.mark.parametrize(("line", "extra"), NEEDS, ids=[line for line, _ in NEEDS])
def test_a_missing_extra_is_named(line: str, extra: str, environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").touch()
    (tmp_path / "test.parquet").touch()
    done = tutti(environment, tmp_path, *line.format(folder=tmp_path).split())
    assert done.returncode in (2, 3) and f"pip install '{DISTRIBUTION}[{extra}]'" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {PROJECT['version']}\n" in text and PROJECT["version"] == VERSION
    assert f"\nlicense: {PROJECT['license']}\n" in text
