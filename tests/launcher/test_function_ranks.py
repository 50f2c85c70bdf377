"""``tutti.launch``: results in rank order, the first error with its rank, from scripts as people write them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import tutti
from tests.forkserver import run
from tutti.launcher import function_ranks

ROOT = Path(__file__).parents[2]
SAFETY_NET = 200

TRAINS = """
import torch
import tutti

data = torch.arange(12.0).view(12, 1)

def train(rate):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    run = tutti.prepare(model, f"sgd:lr={rate}", data, lambda model, x: (model(x) - x).pow(2).mean(), batch_size=4,
                        workers=2, reproducible=True)
    losses = [run.step(batch) for epoch in range(2) for batch in run.epoch(epoch)]
    print("trained on rank", tutti.rank())
    return tutti.rank(), losses, run.weights_sha256()

one, = tutti.launch(train, 0.001, devices=1)
two = tutti.launch(train, rate=0.001, devices=2)
assert [each[0] for each in two] == [0, 1] and {each[1:] == one[1:] for each in two} == {True}, (one, two)
print("equal")
"""
FAILS = """
import os, signal, sys, time
import tutti

class Own(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")

def fail(kind):
    tutti.init()
    tutti.barrier()  # or one rank may leave while another still connects
    if tutti.rank() == 1:
        if kind == "raise":
            raise ValueError("this one")
        if kind == "own":
            raise Own("cannot", "be pickled")
        if kind.isdecimal():
            sys.exit(int(kind))
        os.kill(os.getpid(), signal.SIGKILL) if kind == "killed" else os._exit(0)
    if kind == "75":
        raise tutti.errors.PeerError("rank 1 has ended")
    if kind != "200":
        tutti.barrier()

for kind, error, words in (
    ("raise", ValueError, ["this one", "On rank 1 of 2", "in fail"]),
    ("own", RuntimeError, ["Own: cannot and be pickled"]),
    ("killed", tutti.errors.PeerError, ["rank"]),
    ("200", tutti.errors.PeerError, ["ended without a result", "exit code is 200"]),
    ("75", tutti.errors.Preempted, ["exit code 75"]),
):
    try:
        tutti.launch(fail, kind, devices=2, timeout=20)
    except error as found:
        text = "\\n".join([str(found), *getattr(found, "__notes__", [])])
        assert all(word in text for word in words), text
        print("raised", kind)
    else:
        print("nothing was raised", kind)

tutti.init()
try:
    tutti.launch(fail, "raise", devices=2)
except tutti.errors.UsageError as found:
    assert "already" in str(found) or "that trains" in str(found), found
    print("refused")
"""


def started(code: str, tmp_path: Path, **more: str) -> tuple[int, str, str]:
    script = tmp_path / "script.py"
    script.write_text(code, encoding="utf-8")
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = outside | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | more
    done = run([script.name], tmp_path, environment, SAFETY_NET)
    return done.returncode, done.stdout, done.stderr


def test_results_come_back_in_rank_order_from_a_script_without_a_main_guard(tmp_path: Path) -> None:
    code, out, err = started(TRAINS, tmp_path)
    assert code == 0, err
    assert out.splitlines()[-1] == "equal" and out.count("trained on rank 0") == 2 and "rank 1" not in out


def test_the_first_error_is_raised_with_its_rank(tmp_path: Path) -> None:
    code, out, err = started("import tutti.errors\n" + FAILS, tmp_path)
    assert code == 0, err
    kinds = ("raise", "own", "killed", "200", "75")
    assert out.splitlines() == [*(f"raised {kind}" for kind in kinds), "refused"], out + err


def test_inside_a_rank_it_is_refused(tmp_path: Path) -> None:
    code, _, err = started(TRAINS, tmp_path, RANK="0", WORLD_SIZE="1")
    assert code == 1 and "UsageError: tutti.launch is called inside a rank" in err


def test_the_snippet_of_the_page_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [snippet] = [each for each in snippets if "tutti.launch(" in each]
    code, out, err = started(snippet, tmp_path)
    assert code == 0, err
    first, last = (float(loss) for loss in re.findall(r"loss ([\d.]+)", out))
    assert last < first / 2


ENDED = """
import torch
import tutti

def train(end):
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 256), torch.nn.Linear(256, 1))
    run = tutti.prepare(model, "sgd:lr=0.1", torch.ones(8, 4), lambda model, x: model(x).mean(), strategy="pipeline",
                        batch_size=4)
    for batch in run.epoch(0):
        run.step(batch)
    if end:
        torch.distributed.destroy_process_group()
    try:
        return len(run.state())
    except tutti.errors.UsageError as error:
        return str(error)

assert tutti.launch(train, False, devices=2) == [6, 6]
for said in tutti.launch(train, True, devices=2):
    assert "the script has destroyed the process groups" in said and "Call them last" in said, said
print("told")
"""


def test_a_collective_after_the_script_has_destroyed_the_process_groups_says_so(tmp_path: Path) -> None:
    """As scripts of DDP and accelerate do at their end, before they read the weights of a pipeline once more."""
    code, out, err = started(ENDED, tmp_path)
    assert (code, out.splitlines()[-1:]) == (0, ["told"]), out + err


COUNTS = """
import itertools
import torch
import tutti

def train():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, torch.ones(24, 1), workers=3, batch_size=6)
    for batch in itertools.islice(run.microbatches(0), 4):
        run.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()

try:
    tutti.launch(train, devices=2)
except tutti.errors.PeerError as error:
    print(error)
"""


def test_a_loop_that_counts_its_bodies_is_told_to_count_steps(tmp_path: Path) -> None:
    """Rank 0 has two of the three workers: four bodies are two updates there, and four on rank 1."""
    code, out, err = started(COUNTS, tmp_path)
    assert code == 0 and "rank 0 has ended" in out and "end loops by run.global_step" in out, out + err


NOTEBOOK = """
import nbformat, sys
from nbclient import NotebookClient

cells = [open("first.py").read(), "tutti.launch(train, 0.001, devices=2)[1][0]"]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.outputs:
        print(output.get("text") or output.get("data", {}).get("text/plain") or output)
"""


def test_what_optimizers_import_is_imported_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, preload: Collection[str] = (), **options: Any) -> int:
        raise InterruptedError(*preload)

    monkeypatch.setattr(function_ranks, "launch_ranks", launched)
    with pytest.raises(InterruptedError) as caught:
        tutti.launch(print, devices=2)
    assert caught.value.args == ("torch._dynamo",)


def test_it_works_in_a_notebook(tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason="needs nbclient and ipykernel")
    (tmp_path / "first.py").write_text(TRAINS, encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=SAFETY_NET,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "equal" in done.stdout and done.stdout.strip().endswith("1"), done.stdout
