"""Landscapes measured on an accelerator have the CPU's curvature, and need no float64 there."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tutti
from tests import worlds
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_without_float64 import Refusing
from tutti import device as devices
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.planning.landscape import landscape_rank
from tutti.planning.landscape_options import LANDSCAPE_FILE, LandscapeOptions
from tutti.tasks import task_registry

pytestmark = pytest.mark.timeout(600)

TASK = """
import torch
from torch import nn
from tutti.tasks.task import Task

def loss(model, batch):
    scores = model(batch[0])
    return nn.functional.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1])

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3))

def own():
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
    return Task(name="own", model=model, loss=loss, train=data, eval=data)
"""


def landscape(folder: str, precision: str, without: bool) -> dict[str, Any]:
    """Train and measure on this rank's device, which may have no float64; return rank 0's findings."""
    path, threads, name = Path(folder), torch.get_num_threads(), f"{folder}/own.py:own"
    task = task_registry.load_task(name)
    device = context.current().device.type
    known = patch.object(devices, "WITHOUT_FLOAT64", (DEVICE,)) if without else nullcontext()
    with known, Refusing() if without else nullcontext(), patch.object(context, "shutdown"):
        run = tutti.prepare(task.model(), "sgd:lr=0.1", task.train, task.loss, batch_size=8, batch_norm="ghost:size=4")
        for batch in run.epoch(0):
            run.step(batch)
        saved = run.save(path / f"{device}-{context.current().identity.size}")
        options = LandscapeOptions(
            checkpoint=saved, samples=40, block=8, eigenvalues=2, probes=2, lanczos=6, points=3, grid=3
        )
        try:
            landscape_rank(name, TrainConfig(device=device, precision=precision), options, path)  # type: ignore[arg-type]
        except UsageError as error:
            return {"refused": str(error)}
        finally:
            torch.set_num_threads(threads)
    return {} if tutti.rank() else dict(json.loads((path / LANDSCAPE_FILE).read_text("utf-8")))


@pytest.mark.parametrize(("ranks", "precision", "exact"), [(2, "fp64", 1e-9), (1, "fp32", 1e-4)])
def test_a_landscape_is_the_cpus(ranks: int, precision: str, exact: float, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK, encoding="utf-8")
    given = {"folder": str(tmp_path), "precision": precision}
    want = worlds.run_on("cpu", ranks, landscape, **given, without=False)[0]
    got = worlds.run_on(DEVICE, ranks, landscape, **given, without=precision == "fp32")[0]
    assert got["devices"] == ranks and got.keys() == want.keys()
    for one, other in zip(got["eigenvalues"], want["eigenvalues"], strict=True):
        assert one["value"] == pytest.approx(other["value"], rel=exact)
    for name in ("gradient_norm", "trace", "sharpness", "line", "plane"):
        assert flat(got[name]) == pytest.approx(flat(want[name]), rel=exact, abs=exact), name


def flat(value: Any) -> list[float]:
    """The numbers of nested dicts and lists."""
    if isinstance(value, dict | list):
        return [each for one in (value.values() if isinstance(value, dict) else value) for each in flat(one)]
    return [] if value is None else [float(value)]


def test_float64_is_refused_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TASK, encoding="utf-8")
    [found] = worlds.run_on(DEVICE, 1, landscape, folder=str(tmp_path), precision="fp64", without=True)
    assert found["refused"] == "SIMGPU has no float64 (--precision fp64). Take --precision fp32, or --device cpu."
