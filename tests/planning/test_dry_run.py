"""``tutti train --dry-run``: figures before anything runs, a step's beside them, and what cannot fit refused."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forkserver import run
from tests.simulated_accelerator import build
from tutti.errors import UsageError
from tutti.host_memory import parse_bytes
from tutti.planning import dry_run as command_line
from tutti.planning.dry_run import _notes
from tutti.planning.memory_plan import model_facts, nearest_plan, plan_memory
from tutti.planning.pipeline_memory import observe_stages
from tutti.planning.planned_run import PlannedRun
from tutti.workload.tensor_memory import Tracker

BASE = {"batch_size": 32, "device": "cpu", "devices": "2"}


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "tutti", "train", "digits", "--device", "cpu", "--dry-run", *words]
    return run(command, folder, {**os.environ, "COLUMNS": "100"}, 240)


def figures(out: str) -> dict[str, list[str]]:
    """The numbers of each line, as they are printed."""
    return {line[:16].strip(): line[16:].split() for line in out.splitlines()[1:]}


def test_state_is_predicted_as_it_is(tmp_path: Path) -> None:
    result = command(tmp_path, "--devices", "2", "--strategy", "sharded:stage=1", "--optimizer", "adam", "--ema", "0.9")
    assert result.returncode == 0, result.stderr
    said = figures(result.stdout)
    for name in ("parameters", "optimizer"):
        value, unit, own, own_unit = said[name]
        assert unit == own_unit and float(own) == pytest.approx(float(value), rel=0.03), name
    assert len(said["total"]) == 4
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def test_what_cannot_fit_is_refused_with_what_does(tmp_path: Path) -> None:
    result = command(tmp_path, "--devices", "2", "--memory", "700KB")
    assert result.returncode == 2
    assert "a device needs" in result.stderr and "has 684 KiB" in result.stderr
    assert "sharded:stage=" in result.stderr and "--devices" in result.stderr
    assert "Traceback" not in result.stderr


def test_plans_fit_and_share_out_no_more_than_needed() -> None:
    config = PlannedRun(**BASE)
    found = model_facts("digits", config)
    total = plan_memory(found, config).total
    assert (
        nearest_plan(found, config, total) == config
        or plan_memory(found, nearest_plan(found, config, total)).total <= total
    )
    tight = nearest_plan(found, config, total * 0.6)
    assert tight is not None and plan_memory(found, tight).total <= total * 0.6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_divides_what_it_shares_out(stage: int) -> None:
    whole = plan_memory(found := model_facts("digits", PlannedRun(**BASE)), PlannedRun(**BASE))
    part = plan_memory(found, PlannedRun(**{**BASE, "strategy": f"sharded:stage={stage}"}))
    assert part.optimizer == whole.optimizer / 2
    assert part.gradients == whole.gradients / (2 if stage > 1 else 1)
    assert part.parameters == whole.parameters / (2 if stage > 2 else 1)


def test_a_model_without_parameters_needs_memory_for_its_activations_alone() -> None:
    found = replace(model_facts("digits", PlannedRun(**BASE)), parameters=0, whole=0, trained=0, unit=0, rest=0)
    memory = plan_memory(found, PlannedRun(**BASE))
    assert memory.total == memory.activations + memory.buffers > 0


def test_a_batch_has_no_more_samples_than_the_data() -> None:
    """A batch larger than the data is all of them, as in the run."""
    found = model_facts("digits", PlannedRun(**{**BASE, "batch_size": 100_000, "workers": 1, "devices": "1"}))
    assert found.samples == found.dataset == 1438


def test_recomputation_and_smaller_batches_take_less() -> None:
    text = {**BASE, "model": "gpt:layers=4,width=64"}
    data = {"data": __file__}
    whole = model_facts("text", PlannedRun(**text, **data)).activations
    again, chosen = (
        model_facts("text", PlannedRun(**text, **data, activation_checkpointing=kind)).activations
        for kind in ("blocks", "selective")
    )
    half = model_facts("text", PlannedRun(**{**text, "batch_size": 16}, **data)).activations
    assert whole is not None and again is not None and chosen is not None and half is not None
    assert again < 0.7 * whole and 0.4 * whole < half < 0.7 * whole
    assert again < chosen < 0.9 * whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param("cuts=fc1", "stages: 2, cut before fc1 (30% | 70% of the parameters;", marks=pytest.mark.full),
        (
            "schedule=interleaved,stages=conv1+conv2/conv3/fc1/fc2",
            "stages: 4, cut before conv3, fc1, fc2 (10% | 19% | 69% | 1%",
        ),
    ],
)
def test_a_pipeline_is_looked_at_where_it_is_cut(options: str, words: str, tmp_path: Path) -> None:
    result = command(tmp_path, "--devices", "2", "--strategy", f"pipeline:micro_batches=4,{options}")
    assert result.returncode == 0, result.stderr
    assert words in result.stdout
    said = figures(result.stdout)
    for name in ("parameters", "optimizer"):
        value, unit, own, own_unit = said[name]
        assert unit == own_unit and float(own) == pytest.approx(float(value), rel=0.03), name
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


@pytest.mark.parametrize("checkpointing", ["blocks", "selective"])
def test_stages_of_a_sequence_that_is_recomputed_as_a_whole_are_looked_at(checkpointing: str) -> None:
    """Recomputation replaces the forward of the whole model, whose arguments are those of its own forward."""
    plain, again = (
        observe_stages("digits", PlannedRun(**BASE, strategy="pipeline", activation_checkpointing=choice), {})
        for choice in ("none", checkpointing)
    )
    assert again.bounds == plain.bounds and [b.parameters for b in again.blocks] == [b.parameters for b in plain.blocks]


def test_a_cut_that_does_not_fit_is_moved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All the time is in the first convolution, and most parameters in the first linear layer."""
    monkeypatch.setattr(command_line, "_seconds", lambda *_: {"conv1": 1.0, "conv2": 1e-3, "fc1": 1e-3})
    config = PlannedRun(**{**BASE, "strategy": "pipeline:micro_batches=8"})
    found = model_facts("digits", config)
    own, other, chosen = command_line._of_stages("digits", config, found, 10**9, ())
    assert (other, chosen.strategy) == (None, "pipeline:micro_batches=8,cuts=conv2")
    room = 0.97 * own.total
    moved, other, chosen = command_line._of_stages("digits", config, found, int(room), ())
    said = capsys.readouterr().out.splitlines()
    assert moved.total <= room and other is None
    assert "most even in time: 2, cut before conv2" in said[1] and "which does not fit" in said[1]
    assert said[2].startswith("most even that fits: 2, cut before ") and said[3] == f"to train so: {chosen.strategy}"
    own, other, chosen = command_line._of_stages("digits", config, found, 100_000, ())
    assert own.total > 100_000 and other is None, "one layer alone takes more"


DECIDING = """
import torch
from torch import nn
from tutti import Task

class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs):
        for block in self.blocks if inputs.sum() > 0 else []:
            inputs = block(inputs)
        return inputs

def task():
    data = (torch.ones(8, 4), torch.ones(8, 4))
    return Task(name="own", model=Deciding, loss=lambda m, b: (m(b[0]) - b[1]).square().mean(), train=data, eval=data)
"""


def test_stages_of_a_recorded_forward_are_not_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deciding.py").write_text(DECIDING)
    monkeypatch.chdir(tmp_path)
    config = PlannedRun(**BASE, strategy="pipeline")
    with pytest.raises(UsageError, match="the memory of the stages of this model cannot be predicted"):
        observe_stages("deciding.py:task", config, {})


def test_what_this_host_has_no_room_for_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fits into the devices that were told of, which need not be here."""
    monkeypatch.setattr("tutti.planning.dry_run.free_memory", lambda processes: 2**29 // processes)
    monkeypatch.setattr(command_line, "launch", lambda *_, **__: pytest.fail("a process was started"))
    assert command_line.dry_run("digits", PlannedRun(**BASE), "16GB", ()) == 0
    *table, said = capsys.readouterr().out.splitlines()
    assert table[-1].startswith("total")
    assert said == "not measured: this host has 256 MiB free for each of 2 processes, too little"


def test_what_is_taken_for_granted_is_said() -> None:
    strategies = ("pipeline", "tensor", "central_storage", "parameter_server")
    told = {s: _notes(PlannedRun(**BASE, strategy=s), known=True) for s in strategies}
    assert told["pipeline"] == []
    assert "into equal parts" in told["tensor"][0] and "not one copy for all" in told["central_storage"][0]
    assert told["parameter_server"] == told["central_storage"]
    assert "without activations" in _notes(PlannedRun(**BASE), known=False)[0]


def test_bytes_are_counted_while_they_are_there() -> None:
    import torch

    with Tracker() as tracker:
        first = torch.zeros(1000, dtype=torch.float64)
        second = first + 1
        assert tracker.now == 16000
        del first
        assert tracker.now == 8000
        second.add_(1)
    assert (tracker.peak, parse_bytes("1.5KiB", "")) == (16000, 1536)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("device", "strategy"), [("cpu", "mirrored"), pytest.param("simgpu", "pipeline", marks=pytest.mark.full)]
)
def test_a_dry_run_on_a_machine_with_an_accelerator(device: str, strategy: str, tmp_path: Path) -> None:
    """The launcher runs no backward of its own: autograd would start the device's threads, and could not fork."""
    build.require()
    words = ["train", "digits", "--dry-run", "--devices", "2", "--device", device, "--strategy", strategy]
    environ = {**os.environ, **build.environment(2)}
    done = subprocess.run(
        [sys.executable, "-m", "tutti", *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert len(figures(done.stdout)["total"]) == 4
