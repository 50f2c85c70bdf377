"""Every Python block of the documentation runs, alone and on two devices, and what it trains learns."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.forkserver import run

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/python.md", "docs/data.md", "docs/checkpoints.md", "docs/custom-loop.md", "docs/sharded.md"),
    *("docs/time-to-target.md", "docs/pipeline.md", "docs/tensor.md", "docs/questions.md", "docs/models.md"),
)
SAFETY_NET = 100
CHANGED_LINES = 4

STARTS = {
    "alone": [],
    "tutti run": ["-m", "tutti", "run", "-np", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
FALLS = """
import sys
import torch
_seen = torch.nn.functional.mse_loss, torch.nn.functional.cross_entropy, []

def _watch(loss):
    def watched(scores, targets, **options):
        value = loss(scores, targets, **options)
        # tutti calls the functions of the first batch again, to find losses that mix samples.
        if torch.is_grad_enabled() and not sys._getframe(1).f_globals["__name__"].startswith("tutti"):
            _seen[2].append(value.item() / (len(targets) if options.get("reduction") == "sum" else 1))
        return value
    return watched

torch.nn.functional.mse_loss, torch.nn.functional.cross_entropy = map(_watch, _seen[:2])
"""
PROVE = """
import os
_losses = _seen[2]
_part = len(_losses) // 8
print(f"rank {os.environ.get('RANK', 0)}: {len(_losses)} losses", flush=True)
if not sum(_losses[-_part:]) < 0.5 * sum(_losses[:_part]):
    raise SystemExit(f"the loss does not fall: {_losses}")
"""


def blocks(page: str) -> list[str]:
    """Python blocks of a page; one marked ``continued`` makes one script with the block before it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[str] = []
    for indent, mark, body in re.findall(r"^( *)```python(.*)\n((?:.*\n)*?) *```$", text, re.MULTILINE):
        code = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        found.append(found.pop() + code if mark.strip() == "continued" else code)
    return found


SNIPPETS = {f"{page} {number}": code for page in PAGES for number, code in enumerate(blocks(page), 1)}
FEWER_EPOCHS = {"docs/pipeline.md 1": 3, "docs/pipeline.md 2": 2}
"""Of snippets that train in many micro-batches; the pages say six."""
TWO_DEVICES = ["docs/pipeline.md 2"]
"""Snippets that need two devices."""
# The README's stands for all alone. torchrun's processes each import torch anew: ordinary runs have it in
# ``tests/launcher/test_joining.py`` and ``tests/faults/test_stuck.py``.
CASES = [
    pytest.param(
        name,
        start,
        marks=[pytest.mark.full]
        * (start == "torchrun" or (start == "alone" and "tutti" in code and name != "README.md 1")),
    )
    for name, code in SNIPPETS.items()
    for start in STARTS
    if (start == "alone" and name not in TWO_DEVICES)
    or (start != "alone" and "tutti" in code and (start != "torchrun" or name.startswith("README")))
]


def start(launcher: str, script: Path) -> subprocess.CompletedProcess[str]:
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment = outside | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return run([*STARTS[launcher], script.name], script.parent, environment, SAFETY_NET)


def test_there_is_something_to_run() -> None:
    assert [sum(name.startswith(page) for name in SNIPPETS) for page in PAGES] == [1, 3, 3, 2, 4, 1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_snippets_train(name: str, launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    code = SNIPPETS[name]
    if name in FEWER_EPOCHS:
        assert "range(6)" in code
        code = code.replace("range(6)", f"range({FEWER_EPOCHS[name]})")
    if "import transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed: make models")
    # Two players' losses need not fall.
    falls = re.search(r"mse_loss|(?<!binary_)cross_entropy", code) is not None
    script.write_text(FALLS + code + PROVE if falls else code, encoding="utf-8")
    done = start(launcher, script)
    assert done.returncode == 0, done.stderr
    assert ("rank 0: " if falls else "epoch 1") in done.stdout


def test_the_best_weights_are_kept_while_training_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SNIPPETS["docs/checkpoints.md 2"], encoding="utf-8")
    done = start("tutti run", script)
    assert done.returncode == 0, done.stderr
    last, best, loaded = re.findall(r"(?:loss|best|loaded) (\d\.\d{4})", done.stdout)
    assert loaded == best < last


def test_losses_of_all_but_three_snippets_fall() -> None:
    assert [n for n, code in SNIPPETS.items() if not re.search(r"mse_loss|(?<!binary_)cross_entropy", code)] == [
        "docs/custom-loop.md 2",
        "docs/pipeline.md 2",  # the last stage alone calls the loss function
        "docs/models.md 1",  # transformers computes the loss
    ]


def test_a_custom_loop_changes_few_lines() -> None:
    before, after = (
        re.search(rf"<!-- {name} -->\n```python\n((?:.*\n)*?)```", (ROOT / PAGES[1]).read_text(encoding="utf-8"))
        for name in ("before", "after")
    )
    assert before and after
    lines = list(difflib.ndiff(*([line for line in found[1].splitlines() if line] for found in (before, after))))
    removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
    assert 0 < max(removed, added) <= CHANGED_LINES


def test_the_readmes_difference_leads_to_its_script() -> None:
    found = re.search(
        r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found
    lines = [line for line in found[1].splitlines() if line]
    script = iter(SNIPPETS["README.md 1"].splitlines())
    assert all(line[1:] in script for line in lines if line[0] in "+ ")
    assert sum(line[0] == "+" for line in lines) == 4 == sum(line[0] == "-" for line in lines) + 2
