"""benchmarks/moved_scripts.py on scripts of the project's own, and the table of docs/moved-scripts.md."""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forkserver import run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "moved-scripts.md"
NAMES = (
    "2026-11-25-moved-scripts",
    "2026-11-28-moved-scripts",
    "2026-11-28-moved-library-scripts",
    "2026-11-28-moved-trainer-scripts",
    "2026-11-28-moved-project-scripts",
    "2026-11-29-moved-scripts",
)
RESULTS = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in NAMES]

BEFORE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shapes import WIDTH

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, WIDTH), torch.randn(24, 1))
model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=float(open("rate.txt").read()))
loader = DataLoader(data, batch_size=8, shuffle=True)
updates = 0
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        updates += 1
torch.save(model, "model.pt")
"""
MOVES = {
    "import torch\n": "import torch\nimport tutti\n",
    "updates = 0": "run = tutti.prepare(model, optimizer, loader, workers=2)\nupdates = 0",
    "in loader": "in run.microbatches(epoch)",
    "loss.backward()": "run.backward(loss)",
}


@pytest.fixture(scope="module")
def moved_scripts() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return __import__("moved_scripts")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def words(folder: Path, *edits: tuple[str, str]) -> list[str]:
    """The command line for the script before and after its move, with further edits."""
    after = BEFORE
    for old, new in [*MOVES.items(), *edits]:
        assert after.count(old) == 1
        after = after.replace(old, new)
    for name in ("before", "after", "modules", "data"):
        (folder / name).mkdir(parents=True)
    (folder / "before" / "train.py").write_text(BEFORE, encoding="utf-8")
    (folder / "after" / "train.py").write_text(after, encoding="utf-8")
    (folder / "modules" / "shapes.py").write_text("WIDTH = 3\n", encoding="utf-8")
    (folder / "data" / "rate.txt").write_text("0.1", encoding="utf-8")
    scripts = [str(folder / name / "train.py") for name in ("before", "after")]
    options = ["--in", str(folder / "data"), "--path", str(folder / "modules"), "--dtype", "float64"]
    return [*scripts, *options, "--save", str(folder / "results.json")]


def compared(options: list[str], folder: Path) -> int:
    """Exit code of the comparison, in a process of its own: it launches ranks."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return run([str(ROOT / "benchmarks" / "moved_scripts.py"), *options], folder, environ, 200).returncode


def saved(folder: Path) -> Any:
    [one] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["scripts"]
    return one


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        ("a\nb\nc", "a\nb\nc", (0, 0)),
        ("a\nb\nc", "a\nB\nc", (1, 0)),
        ("a\nb\nc", "a\nc", (0, 1)),
        ("a\nb\nc", "x\na\nB\nB\nc", (3, 0)),
        ("a\nb\nb2\nc", "a\nB\nc", (1, 1)),
    ],
)
def test_lines_are_counted(moved_scripts: Any, before: str, after: str, counted: tuple[int, int]) -> None:
    assert moved_scripts.changed_lines(before, after) == counted


def test_a_moved_script_is_equal_on_both_devices(moved_scripts: Any, tmp_path: Path) -> None:
    assert compared([*words(tmp_path), "--unchanged="], tmp_path) == 0
    one = saved(tmp_path)
    assert (one["changed_lines"], one["removed_lines"], one["updates"], one["dtype"]) == (4, 0, 6, "float64")
    assert one["unchanged"] == "runs" and one["difference"] <= 1e-10
    assert not list((tmp_path / "data").glob("model.pt"))
    assert moved_scripts.table([one]).splitlines()[2].startswith("| train | 4 | float64 | 6 | ")


def test_a_result_that_depends_on_the_devices_is_found(tmp_path: Path) -> None:
    edit = ("mse_loss(model(inputs), targets)", "mse_loss(model(inputs), targets * tutti.size())")
    assert compared(words(tmp_path, edit), tmp_path) == 9
    assert saved(tmp_path)["difference"] > 1e-3


def test_the_page_has_the_table_of_the_results(moved_scripts: Any) -> None:
    found = [each for file in RESULTS for each in json.loads(file.read_text(encoding="utf-8"))["scripts"]]
    # A later result of a script replaces the earlier one.
    scripts = list({each["name"]: each for each in found}.values())
    page = PAGE.read_text(encoding="utf-8")
    assert moved_scripts.table(scripts) in page
    assert f"The median is {statistics.median(each['changed_lines'] for each in scripts):g} changed lines" in page
    assert all(each["difference"] is None or each["difference"] <= 1e-10 for each in scripts)
    for each in scripts:
        assert f"{each['repository']} at {each['commit']}" in " ".join(page.split())
