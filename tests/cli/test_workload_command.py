"""``tutti workload``: the page's examples, a user's task or script, and a task that cannot be traced."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.faults.commands import tutti
from tutti.workload.workload_file import read_workload

PAGE = Path(__file__).parents[2] / "docs" / "workload.md"
OWN = """
import torch
from torch import nn
from tutti.tasks.task import Task

def loss(model, batch):
    value = model(batch[0]).square().mean()
    return value{rest}

def own():
    data = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.zeros(8))
    return Task(name="own", model=lambda: nn.Linear(6, 3), loss=loss, train=data)
"""
SCRIPT = """
import sys

import torch
from torch import nn

import tutti

model = nn.Linear(6, int(sys.argv[1]))
data = torch.utils.data.TensorDataset(torch.randn(8, 6))
"""
GIVEN = "tutti.prepare(model, 'sgd', data, lambda model, batch: model(batch[0]).sum(), batch_size=4, precision='bf16')"
LOOP = """
run = tutti.prepare(model, "sgd", data, batch_size=4, precision="bf16")
for x in run.microbatches(0):
    run.backward(model(x[0]).sum())
"""


def test_examples_of_the_page_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    first, second = (shlex.split(line)[1:] for line in blocks[0][1].splitlines())
    shown = tutti(tmp_path, *first)
    assert shown.code == 0, shown.err
    assert blocks[1][1] in shown.out
    found = read_workload(tmp_path / "workload.json")
    assert [group.name for group in found.groups] == ["block1", "block2", "(rest)", "(loss)"]
    printed = tutti(tmp_path, *second)
    assert printed.code == 0 and json.loads(printed.out)["format"] == "tutti workload"


def test_a_task_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(OWN.format(rest=""))
    done = tutti(tmp_path, "workload", "task.py:own")
    assert done.code == 0, done.err
    assert re.search(r"^\(rest\) +Linear +21 +36 +36 ", done.out, re.M)


def test_a_loss_that_reads_values_ends_with_its_line_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(OWN.format(rest=" / value.item()"))
    refused = tutti(tmp_path, "workload", "task.py:own")
    assert refused.code == 2
    assert "task.py, line 8: return value / value.item()" in refused.err and "--real" in refused.err
    assert tutti(tmp_path, "workload", "task.py:own", "--real").code == 0


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    assert tutti(tmp_path, "workload", "digit").code == 2


def test_a_script_is_traced_up_to_its_loss_in_its_own_precision(tmp_path: Path) -> None:
    for place, body in enumerate((GIVEN, LOOP)):
        (tmp_path / "train.py").write_text(SCRIPT + body)
        done = tutti(tmp_path, "workload", "train.py", "-o", f"{place}.json", "--", "3")
        assert done.code == 0, done.err
    given, own = (read_workload(tmp_path / name) for name in ("0.json", "1.json"))
    assert given == own and given.task == "train.py" and given.precision == "bf16"
    assert re.search(r"^\(rest\) +Linear +21 +36 +36 ", done.out, re.M)
    refused = tutti(tmp_path, "workload", "train.py", "--model", "cnn", "--", "3")
    assert refused.code == 2 and "a script makes its own model and data" in refused.err
