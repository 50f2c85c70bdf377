"""On the accelerator's devices (``TEST_DEVICE``, else CUDA's): one a process, memory, products, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.launcher.test_context import apart
from tests.simulated_accelerator import build
from tutti import device as devices
from tutti.errors import TuttiError, UsageError, no_memory
from tutti.launcher import context

DEVICE = "cuda" if worlds.DEVICE == "cpu" else worlds.DEVICE
REAL = DEVICE != build.DEVICE
EXACT = 1e-10 if REAL else 0.0


def loss(net: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def train(steps: int = 6, optimizer: str = "adamw:lr=0.01", **options: Any) -> dict[str, Any]:
    """Train a small model; return its weights on the host, where they were, and how the optimizer computes."""
    options = {"strategy": "mirrored", "precision": "fp64", **options}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(48, 5, generator=draw), torch.randint(0, 3, (48,), generator=draw)
    run = tutti.prepare(model, optimizer, data, loss, workers=2, batch_size=8, **options)
    losses = [run.step(batch) for batch in run.epoch(0)][:steps]
    made = run.gradient_sync.optimizers[0]
    return {
        "weights": {name: value.cpu() for name, value in run.state().items()},
        "places": {str(p.device) for p in run.model.parameters()},
        "fused": made.param_groups[0].get("fused"),
        "losses": losses,
    }


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    gaps = [(one["weights"][name] - value).abs().max() for name, value in other["weights"].items()]
    return float(torch.stack([gap.double() for gap in gaps]).max())


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_process_trains_on_the_device_of_its_local_rank(ranks: int) -> None:
    worlds.require_devices(DEVICE, ranks, own=True)
    found = worlds.run_on(DEVICE, ranks, train)
    assert [each["places"] for each in found] == [{f"{DEVICE}:{rank}"} for rank in range(ranks)]
    [alone] = worlds.run_on("cpu", 1, train)
    assert all(distance(each, alone) <= EXACT for each in found)


def test_optimizers_are_fused() -> None:
    assert [each["fused"] for each in worlds.run_on(DEVICE, 1, train)] == [True]


@pytest.mark.parametrize("strategy", ["sharded:stage=1", "sharded", "sharded:offload=true", "local_sgd:period=2"])
def test_strategies_of_two_devices(strategy: str) -> None:
    reference = strategy if strategy.startswith("local") else "single"
    [alone] = worlds.run_on("cpu", 1, train, strategy=reference)
    for each in worlds.run_on(DEVICE, 2, train, strategy=strategy):
        assert distance(each, alone) <= 1e-10


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2), ("fp16", 1e-2)])
def test_precisions_train(precision: str, tolerance: float) -> None:
    [exact] = worlds.run_on("cpu", 1, train)
    options = {} if precision != "fp16" else {"loss_scale": "1024"}
    [got] = worlds.run_on(DEVICE, 1, train, precision=precision, **options)
    assert got["losses"] == pytest.approx(exact["losses"], rel=tolerance)


def raised(**options: Any) -> str:
    try:
        train(**options)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "reduce-overhead", "strategy": "local_sgd"}, "records CUDA graphs"),
    ],
)
def test_what_cannot_run_is_refused_by_name(options: dict[str, str], words: str) -> None:
    [said] = worlds.run_on(DEVICE, 1, raised, **options)
    assert words in said


def many(rank: int, count: int) -> str:
    """One process more than there are devices, as its launcher would describe it."""
    if not REAL:
        build.load(count)
    os.environ.update(
        LOCAL_RANK=str(count), LOCAL_WORLD_SIZE=str(count + 1), RANK=str(count), WORLD_SIZE=str(count + 1)
    )
    try:
        context.init(DEVICE, timeout=5)
    except TuttiError as error:
        return str(error)
    return ""


def test_more_processes_than_devices_are_refused() -> None:
    worlds.require_devices(DEVICE, 1)
    count = worlds.devices_here(DEVICE) if REAL else 2
    assert f"{count + 1} processes on this host share {count} GPU" in apart(1, many, count)[0]


def exhausted() -> str:
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=context.current().device)
    except RuntimeError as error:
        return str(no_memory(error))
    return ""


def test_exhausted_memory_names_what_needs_less() -> None:
    [said] = worlds.run_on(DEVICE, 1, exhausted)
    assert "strategies sharded" in said and "smaller micro-batch" in said


def counted() -> list[bool]:
    """Whether peak memory counts a tensor, and whether draws on the device leave the CPU's generator alone."""
    place = context.current().device
    devices.reset_peak_memory(place)
    before = devices.peak_memory(place) or 0
    held = torch.empty(1 << 20, device=place)
    found = [(devices.peak_memory(place) or 0) - before >= held.nbytes]
    devices.synchronize(place)
    state = torch.default_generator.get_state()
    torch.randn(3, device=place)
    return [*found, torch.equal(state, torch.default_generator.get_state())]


def test_memory_and_generators_are_those_of_the_device() -> None:
    assert worlds.run_on(DEVICE, 1, counted) == [[True, True]]


def command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **({} if REAL else build.environment(2)), **variables}
    return subprocess.run(
        [sys.executable, "-m", "tutti", *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("more", [(), ("--compile", "default")], ids=["eager", "compiled"])
def test_a_run_of_the_command_line(more: tuple[str, ...], tmp_path: Path) -> None:
    worlds.require_devices(DEVICE, 1)
    if more and not REAL:
        pytest.skip("torch.compile has no backend for the simulated accelerator")
    words = ("train", "digits", "--device", DEVICE, "--devices", "1", "--steps", "8", "--profile", "2:2")
    done = command(tmp_path, *words, *more, "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "run").glob("profile*"))
