"""From one real command to the next: train, export, load in plain PyTorch, begin again with the weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.cli.test_refusals import tutti as without_torch
from tests.faults.commands import complaint, tutti

NET = """
import torch
from torch import nn

class Net(nn.Module):
    # A tied weight under two names, a module that comes twice with its buffers, a frozen layer.
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.last.weight, self.again = self.first.weight, self.norm
        self.head = nn.Linear(6, 3)
        self.last.bias.requires_grad_(False)

    def forward(self, inputs):
        return self.head(self.again(self.last(self.norm(self.first(inputs)).tanh())))

def samples(count, seed):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(dim=1)

def loss(model, batch):
    inputs, labels = batch
    scores = model(inputs)
    correct = (scores.argmax(dim=1) == labels).sum()
    return nn.functional.cross_entropy(scores, labels, reduction="sum"), len(labels), {"accuracy": correct}
"""
TASK = """
import os, sys
import net
from torch.utils.data import TensorDataset
from tutti.tasks.task import Task

def task(model="whole"):
    made = net.Net if model == "whole" else lambda: net.nn.Linear(6, 3)
    return Task(name="own", model=made, loss=net.loss, train=TensorDataset(*net.samples(96, 1)),
                eval=TensorDataset(*net.samples(50, 2)))

def crashing(model="whole"):
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        calls = []
        def loss(model, batch):
            calls.extend([0] * model.training)
            if len(calls) > 14:
                raise RuntimeError("not today")
            return net.loss(model, batch)
        made = task(model)
        return Task(name="own", model=made.model, loss=loss, train=made.train, eval=made.eval)
    return task(model)
"""
# What a user without tutti does.
PLAIN = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tutti":
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import json, torch, net
from safetensors import safe_open
from safetensors.torch import load_file

for name in sys.argv[1:]:
    model = net.Net()
    model.load_state_dict(load_file(name), strict=True)
    model.eval()
    with torch.no_grad():
        value, count, sums = net.loss(model, net.samples(50, 2))
    with safe_open(name, "pt") as file:
        found = {"loss": float(value) / count, "accuracy": float(sums["accuracy"]) / count, **file.metadata()}
    print(json.dumps(found))
"""
OPTIONS = (
    *("--workers", "4", "--batch-size", "16", "--optimizer", "adam:lr=0.02", "--reproducible", "--eval-every", "4st"),
    *("--checkpoint-every", "3st", "--device", "cpu", "--log-every", "1"),
)


def train(folder: Path, out: str, *words: str, task: str = "own.py:task") -> tuple[dict[str, Any], str]:
    """The summary of a run, and what was shown of it."""
    done = tutti(folder, "train", task, *OPTIONS, "--out", out, *words)
    assert done.code == 0, done.err
    return json.loads((folder / out / "summary.json").read_text()), done.err


def plainly(folder: Path, *files: str) -> list[dict[str, Any]]:
    """What PyTorch alone makes of each file."""
    words = [sys.executable, "-c", PLAIN, *files]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=200)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def exported(folder: Path, file: str, *words: str) -> str:
    """What ``tutti export`` says, where torch cannot be imported."""
    done = without_torch("export", "first", "-o", file, *words, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of the user's own, a run ``first`` of it on three devices, and one without checkpoints."""
    here = tmp_path_factory.mktemp("user")
    (here / "net.py").write_text(NET, encoding="utf-8")
    (here / "own.py").write_text(TASK, encoding="utf-8")
    train(here, "first", "--devices", "3", "--steps", "14", "--ema", "0.9:warmup", "--keep-best", "accuracy")
    (here / "bare" / "checkpoints").mkdir(parents=True)
    return here


def test_plain_pytorch_loads_it_and_finds_the_same(folder: Path) -> None:
    summary = json.loads((folder / "first" / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "first" / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines if line["group"] == "eval"}
    assert [*evaluations] == [4, 8, 12, 14] and all(line["weights"] == "ema" for line in evaluations.values())
    highest = max(line["accuracy"] for line in evaluations.values())
    best = max(step for step, line in evaluations.items() if line["accuracy"] == highest)
    assert (summary["best"]["step"], summary["best"]["accuracy"]) == (best, highest)
    said = [
        json.loads(exported(folder, "weights", "--json")),
        json.loads(exported(folder, "average", "--ema", "--json")),
        json.loads(exported(folder, "best", "--step", "best", "--ema", "--json")),
    ]
    found = plainly(folder, "weights", "average", "best")
    for one, other, step, prefix in zip(said, found, (14, 14, best), ("raw_", "", ""), strict=True):
        assert (one["step"], other["step"], one["eval"]["accuracy"]) == (step, str(step), evaluations[step]["accuracy"])
        assert (one["weights_sha256"], one["config_sha256"]) == (other["weights_sha256"], other["config_sha256"])
        assert other["loss"] == pytest.approx(evaluations[step][f"{prefix}loss"], rel=1e-4)
        assert other["accuracy"] == pytest.approx(evaluations[step][f"{prefix}accuracy"])
    assert said[0]["weights_sha256"] == summary["weights_sha256"] != summary["ema_sha256"] == said[1]["weights_sha256"]
    assert said[0]["checkpoint"] == "first/checkpoints/step-00000014"
    assert said[0]["bytes"] == (folder / "weights").stat().st_size


def test_one_line_says_what_was_written(folder: Path) -> None:
    best = json.loads((folder / "first" / "summary.json").read_text())["best"]["step"]
    for number, step in enumerate(("best:accuracy", str(best))):
        [line] = exported(folder, f"line-{number}", "--step", step, "--ema").splitlines()
        assert line.startswith(f"line-{number}: average of the weights at step {best} · 16 tensors, 0.0 MB · ")
    files = [(folder / f"line-{number}").read_bytes() for number in range(2)]
    assert files[0] == files[1]


def test_a_folder_of_transformers_is_read_and_begun_with(folder: Path) -> None:
    said = json.loads(exported(folder, "hf", "--format", "hf", "--json"))
    [found] = plainly(folder, "hf/model.safetensors")
    assert (said["format"], said["weights_sha256"]) == ("hf", found["weights_sha256"])
    [line] = exported(folder, "hf", "--format", "hf", "--overwrite").splitlines()
    assert line.startswith("hf: weights at step 14 · 16 tensors, 0.0 MB · ")
    exported(folder, "head.safetensors", "--only", "head.*+norm.weight")
    head = load_file(folder / "head.safetensors")
    assert head.keys() == {"head.bias", "head.weight", "norm.weight"}
    assert all((load_file(folder / "hf" / "model.safetensors")[name] == head[name]).all() for name in head)
    begun, _ = train(folder, "from-hf", "--devices", "1", "--steps", "1", "--init-from", "hf")
    same, _ = train(folder, "from-run", "--devices", "1", "--steps", "1", "--init-from", "first")
    assert begun["weights_sha256"] == same["weights_sha256"] and begun["init_from"] == "hf"


def test_the_documented_way_to_read_a_checkpoint_without_tutti(folder: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [code] = [block for block in blocks if "load_file" in block]
    exported(folder, "whole.safetensors")
    code += """
assert "tutti" not in sys.modules
want = load_file("whole.safetensors")
assert state.keys() == want.keys() and all((state[name] == want[name]).all() for name in want)
"""
    words = [sys.executable, "-c", code, "first/checkpoints/step-00000014"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("14 {") and all(f"'{group}'" in done.stdout for group in ("model", "ema", "optim"))


REFUSED = {
    "export gone": (2, "there is no run with checkpoints (gone)"),
    "export first --step 7": (2, "there is no checkpoint of step 7"),
    "export first --step last": (2, "--step is 'last'"),
    "export first --step best:nothing:max": (4, "none was evaluated so. Take --step newest"),
    "export bare": (4, "none was saved. Give another run; --checkpoint-every saves while"),
    "export first -o first": (2, "the file exists already (first)"),
    "export first -o net.py": (2, "Choose another -o, or add --overwrite"),
    "export first -o gone/x": (8, "the weights could not be written (gone/x): No such file"),
    "export first/checkpoints/step-00000014 --step 14": (2, "give the run directory"),
    "train own.py:task --init-from gone": (2, "there are no weights to start from (gone)"),
    "train own.py:task --init-from first/logs": (2, "there are no weights to start from (first/logs)"),
    "train own.py:task --init-map new=head.*": (2, "--init-map does nothing without initial weights"),
    "train own.py:task --init-from first --init-map nwe=head.*": (2, "unknown option 'nwe' (--init-map)"),
    "export first --only haed.*": (2, "no tensor of the weights matches 'haed.*' (--only)"),
    "export first --format dcp --overwrite": (2, "--format dcp writes a new folder"),
    "export first --format hf -o net.py": (2, "a file has the name of the folder (net.py)"),
    "train own.py:task --init-from net.py": (4, "it is no safetensors file"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused_without_torch(folder: Path, line: str) -> None:
    code, words = REFUSED[line]
    before = sorted(folder.rglob("*"))
    done = without_torch(*line.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith("tutti: ") and len(done.stderr.splitlines()) == 1
    assert words.lower() in done.stderr.lower()
    assert [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts] == before


def test_another_model_ends_with_code_4(folder: Path) -> None:
    words = ("--devices", "2", "--workers", "2", "--init-from", "first", "--model", "other", "--steps", "2")
    done = tutti(folder, "train", "own.py:task", *words, "--out", "other")
    assert done.code == 4
    assert "the checkpoint is of another model" in complaint(done)[0] and "missing: bias, weight" in complaint(done)[0]
    assert "unexpected: again.bias" in complaint(done)[0]


def test_a_restarted_attempt_resumes_and_does_not_begin_again(folder: Path) -> None:
    """The second attempt has the weights of its own checkpoint, and ends with those of a run that never failed."""
    words = ("--steps", "9", "--init-from", "first")
    whole, _ = train(folder, "whole", *words, "--devices", "1")
    again, shown = train(folder, "again", *words, "--devices", "2", "--max-restarts", "1", task="own.py:crashing")
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert whole["init_from"] == "first/checkpoints/step-00000014" and "init_from" not in again
    assert re.search(r"initial weights  this run's at step [36]; first is not read again", shown)
