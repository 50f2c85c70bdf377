"""``tutti landscape``: files, equality on one and two devices, the line between two runs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import worlds
from tests.faults.commands import tutti
from tutti.cli.app import main
from tutti.cli.landscape_command import show_landscape
from tutti.config.train_config import TrainConfig
from tutti.errors import NonFiniteError
from tutti.planning.landscape import landscape_rank
from tutti.planning.landscape_options import LandscapeOptions

TASK = """
import torch
from torch import nn
from tutti.tasks.task import Task

def loss(model, batch):
    scores = model(batch[0])
    right = (scores.argmax(1) == batch[1]).sum()
    return nn.functional.cross_entropy(scores, batch[1], reduction="sum"){scale}, len(batch[1]), {{"accuracy": right}}

def own():
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=draws)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    model = lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    return Task(name="own", model=model, loss=loss, train={train}, eval=data)
"""
SCRIPT = """
import sys
import torch
import tutti
from task import own

task, run = own(), None
if __name__ == "__main__":
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
    run = tutti.prepare(model, optimizer, task.train, task.loss, batch_size=4)
    for epoch in run.epochs(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    run.save("saved")
"""
SMALL = ("--samples=24", "--micro-batch=8", "--probes=2", "--lanczos=4", "--points=3", "--grid=3", "--eigenvalues=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task, and two runs of it."""
    path = tmp_path_factory.mktemp("landscape")
    write_task(path)
    for name, batch in (("one", "4"), ("two", "20")):
        done = tutti(path, "train", "task.py:own", "--batch-size", batch, "--epochs", "2", "--out", name)
        assert done.code == 0, done.err
    return path


def write_task(path: Path, scale: str = "", train: str = "data") -> None:
    (path / "task.py").write_text(TASK.format(scale=scale, train=train), encoding="utf-8")


def test_files_are_equal_on_one_and_two_devices(folder: Path) -> None:
    found = []
    for devices in ("1", "2"):
        words = ["landscape", "one", "--to", "two", *SMALL, "--reproducible", "--devices", devices, "--out", devices]
        done = tutti(folder, *words)
        assert done.code == 0, done.err
        assert "eigenvalue 1 of the Hessian" in done.out and "plane: 9 of 9 passes" in done.err
        assert (folder / devices / "landscape.svg").read_text(encoding="utf-8").count("<svg") == 1
        found.append(json.loads((folder / devices / "landscape.json").read_text(encoding="utf-8")))
    assert [each.pop("devices") for each in found] == [1, 2]
    assert found[0] == found[1]
    one = found[0]
    assert (one["parameters"], one["samples"], one["to"]) == (43, {"training": 24, "held-out": 24}, "two")
    assert one["line"]["training"]["loss"][1] == one["training"]["loss"] == one["plane"]["training"]["loss"][1][1]
    assert one["between"]["offsets"] == [-0.5, 0.5, 1.5]
    first, second = one["eigenvalues"]
    assert first["value"] > second["value"] and first["residual"] < 1e-3 * first["value"]
    assert one["density"]["highest"] <= first["value"] * 1.001
    assert one["sharpness"]["epsilon_sharpness_percent"] > 0 < one["sharpness"]["sam_sharpness"]


def test_the_landscape_of_a_script_is_that_of_the_same_task(folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    (folder / "loop.py").write_text(SCRIPT.replace("task.loss, ", ""), encoding="utf-8")
    trained = tutti(folder, "run", "train.py", "0.1")
    assert trained.code == 0, trained.err
    found = []
    for words in (["saved", "--script", "train.py", "--devices", "2"], ["as-task"]):
        if words == ["as-task"]:
            (folder / "as-task").mkdir()
            (folder / "as-task" / "checkpoints").symlink_to(folder / "saved")
            (folder / "as-task" / "config.toml").write_bytes((folder / "one" / "config.toml").read_bytes())
        more = ["--", "0.1"] if "--script" in words else []
        done = tutti(folder, "landscape", *words, *SMALL, "--reproducible", *more)
        assert done.code == 0, done.err
        found.append(json.loads((folder / words[0] / "landscape.json").read_text(encoding="utf-8")))
    script, task = found
    assert (script["task"], script["run"], list(script["samples"])) == ("train.py", "saved", ["training"])
    for part in ("training", "eigenvalues", "trace", "sharpness", "plane", "weights_sha256"):
        assert script[part] == task[part]
    loop = tutti(folder, "landscape", "saved", "--script", "loop.py", *SMALL, "--", "0.1")
    assert loop.code == 2 and "gives no loss to tutti.prepare" in loop.err


def test_a_loss_that_is_not_finite_ends_with_code_6_and_a_stream_with_2(folder: Path) -> None:
    try:
        write_task(folder, scale=" * float('nan')")
        diverged = tutti(folder, "landscape", "one", *SMALL)
        write_task(folder, train="lambda: iter(data)")
        stream = tutti(folder, "landscape", "one", *SMALL)
    finally:
        write_task(folder)
    assert diverged.code == 6 and "loss at the checkpoint is not finite" in diverged.err
    assert stream.code == 2 and "are a stream" in stream.err
    assert not (folder / "one" / "landscape.json").exists()


def landscape_on_a_rank(task: str, checkpoint: str) -> str:
    options = LandscapeOptions(checkpoint=Path(checkpoint), samples=24, block=8)
    try:
        landscape_rank(task, TrainConfig(device="cpu"), options, Path())
    except NonFiniteError as error:
        return error.what
    return "returned"


def test_the_other_ranks_return_where_the_loss_is_not_finite(folder: Path) -> None:
    checkpoint = max((folder / "one" / "checkpoints").glob("step-*"))
    write_task(folder, scale=" * float('nan')")
    # Ranks of its own: the command leaves the job at its end.
    pool = worlds.Pool(2, timeout=30.0)
    try:
        told = pool.run(landscape_on_a_rank, task=f"{folder / 'task.py'}:own", checkpoint=str(checkpoint))
    finally:
        pool.close()
        write_task(folder)
    assert told == ["the loss at the checkpoint is not finite", "returned"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["gone"], 2, "there is no run with checkpoints"),
        (["one", "--step", "77"], 2, "there is no checkpoint of step 77"),
        (["one", "--parts", "curvatur"], 2, "Did you mean 'curvature'"),
        (["one", "--samples", "0"], 2, "--samples is '0'"),
        (["one", "--grid", "1"], 2, "--grid is 1"),
        (["one", "--rho", "-1"], 2, "--rho is -1"),
        (["one", "--devices", "0"], 2, "--devices is 0"),
        (["one", "--ema"], 4, "no average of the weights"),
        (["one", "--to", "other"], 2, "the runs differ in --model"),
        (["script"], 2, "--script train.py"),
        (["task.py"], 2, "tutti landscape FOLDER --script task.py"),
        (["one", "two"], 2, "there is no argument 'two'"),
        (["one", "--script", "gone.py"], 2, "there is no script 'gone.py'"),
        (["one", "--out", "task.py"], 8, "cannot write the landscape"),
    ],
)
def test_refusals(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    told: str,
) -> None:
    monkeypatch.chdir(folder)
    for name in ("other", "script"):
        if not (folder / name).exists():
            (folder / name).mkdir()
            (folder / name / "checkpoints").symlink_to(folder / "one" / "checkpoints")
    text = (folder / "one" / "config.toml").read_text(encoding="utf-8")
    (folder / "other" / "config.toml").write_text(f'{text}model = "cnn"\n', encoding="utf-8")
    assert main(["landscape", *words]) == code
    assert told in capfd.readouterr().err


def test_unbounded_and_missing_figures_are_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    density = {"lowest": -1.0, "highest": 2.0}
    found = {"run": "a", "step": 3, "parameters": 5, "samples": {"training": 7}, "training": {"loss": None}}
    found |= {"gradient_norm": 0.5, "trace": {"value": 1.0, "low": None, "high": None}, "density": density}
    show_landscape(found)
    shown = capsys.readouterr().out
    assert "no band" in shown and "training loss" not in shown
