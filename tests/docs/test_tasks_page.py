"""The tasks and commands of docs/tasks.md on two devices; that with an optimizer of its own equals plain PyTorch."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forkserver import run
from tutti.data.order import permutation

ROOT = Path(__file__).parents[2]
SAFETY_NET = 200


def parts(number: int) -> tuple[str, str, list[str]]:
    """File name and code of the page's task, and the words of its command."""
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    words = shlex.split(re.findall(r"```console\n(.*?)```", page, re.DOTALL)[number].replace("\\\n", " "))
    assert words[:2] == ["tutti", "train"]
    return code.splitlines()[0].removeprefix("# "), code, words


def train(folder: Path, words: list[str], *more: str) -> dict[str, Any]:
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo"}
    done = run(["-m", *words, "--out", "out", "--json", *more], folder, environ, SAFETY_NET)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def test_the_task_of_the_page_learns(tmp_path: Path) -> None:
    name, code, words = parts(0)
    (tmp_path / name).write_text(code, encoding="utf-8")
    summary = train(tmp_path, words)
    assert summary["task"] == "spirals.py:spirals" and summary["eval"]["accuracy"] > 0.95


def plain(code: str, epochs: int, batch: int) -> tuple[list[float], list[list[float]], float]:
    """Losses of all steps, rates of all epochs and the held-out loss of the page's second task in plain PyTorch."""
    names: dict[str, Any] = {"__name__": "sums"}
    exec(code, names)
    torch.manual_seed(0)
    model = names["Reader"]()
    optimizer = names["optimizer"](model)
    scheduler, samples = names["scheduler"](optimizer), names["sequences"](1024, seed=0)
    losses, rates = [], []
    for epoch in range(epochs):
        rates.append([group["lr"] for group in optimizer.param_groups])
        order = [samples[index] for index in permutation(0, epoch, len(samples))]
        for start in range(0, len(order), batch):
            total, count, _ = names["loss"](model, names["collate"](order[start : start + batch]))
            optimizer.zero_grad()
            (total / count).backward()
            optimizer.step()
            losses.append(total.item() / count)
        scheduler.step()
    with torch.no_grad():
        total, count, _ = names["loss"](model.eval(), names["collate"](names["sequences"](256, seed=1)))
    return losses, rates, total.item() / count


def test_a_task_with_optimizer_scheduler_collate_and_callbacks_equals_plain_pytorch(tmp_path: Path) -> None:
    name, code, words = parts(1)
    (tmp_path / name).write_text(code, encoding="utf-8")
    losses, rates, held_out = plain(code, 6, 32)
    summary = train(tmp_path, words)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["loss"] for line in lines if line["group"] == "train"] == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert summary["eval"]["loss"] == pytest.approx(held_out, rel=1e-4)
    assert [json.loads(line) for line in (tmp_path / "rates.txt").read_text().splitlines()] == rates
    assert len(list((tmp_path / "best").glob("step-*"))) == 1 and len({rate for rate, _ in rates}) == 6
    assert summary["optimizer"] == "AdamW of the task, 2 parameter groups"
