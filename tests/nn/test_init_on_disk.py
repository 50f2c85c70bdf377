"""Models that are built in files: the same numbers, nothing left behind, and less memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import disks, worlds
from tests.covering import in_turn
from tutti.config.train_config import TrainConfig
from tutti.errors import DiskError
from tutti.launcher.context import World
from tutti.nn import init_on_disk
from tutti.nn.init_on_disk import load_spilled, spilled, spilling
from tutti.parallel.ddp import replica_part
from tutti.tasks import task_registry
from tutti.train.task_run import build_task_model


class Tied(nn.Module):
    """A mebibyte each: an embedding that is the last layer, too, two matrices, and a buffer that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 256)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(2)))
        self.head = nn.Linear(256, 1024, bias=False)
        self.head.weight = self.embed.weight
        for block in self.blocks:
            block.register_buffer("mask", torch.ones(256, 1024).tril())
        self.blocks[1].mask = self.blocks[0].mask
        self.apply(_init)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(numbers)))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)


def make(inside: bool) -> Tied:
    torch.manual_seed(3)
    with spilling() if inside else nullcontext():
        return Tied()


def test_the_same_numbers_in_files_without_names(tmp_path: Path) -> None:
    plain = make(False)
    torch.manual_seed(3)
    with spilling(tmp_path):
        model = Tied()
    assert not list(tmp_path.iterdir())
    assert model.head.weight is model.embed.weight
    assert model.blocks[0].mask is model.blocks[1].mask
    for (name, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
        assert spilled(mine) == (mine.nbytes >= 1 << 20), name


def test_what_is_made_first_stays_in_memory() -> None:
    with spilling(above=2 << 20):
        tensors = [torch.empty(1 << 18), torch.zeros(1 << 18), torch.zeros(1 << 18), torch.zeros(10)]
    assert [spilled(t) for t in tensors] == [False, False, True, False]


def test_tensors_of_every_form_are_what_they_would_be() -> None:
    def forms() -> list[Tensor]:
        torch.manual_seed(0)
        base = torch.randn(600, 700)
        image = torch.rand(8, 16, 64, 64).contiguous(memory_format=torch.channels_last)
        empty = torch.empty(8, 16, 64, 64, dtype=torch.bfloat16, memory_format=torch.channels_last).fill_(2)
        whole, where = base.sort(dim=0)
        flags = base.repeat(3, 1) > 0
        return [base.t(), base[3:, ::2], base.double(), image, empty, whole, where, flags, base.t() @ base]

    plain = forms()
    with spilling():
        found = forms()
    for mine, theirs in zip(found, plain, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)
    assert all(map(spilled, found))


def test_a_model_is_taken_out_of_its_files() -> None:
    model = make(True)
    before = dict(model.named_parameters())
    load_spilled([model])
    assert not any(map(spilled, [*model.parameters(), *model.buffers()]))
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.blocks[0].mask is model.blocks[1].mask
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), make(False).parameters(), strict=True))


def test_a_disk_without_room_is_told_and_ends_no_process(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, "3m") as disk, spilling(disk):
        kept = [torch.ones(1 << 18) for _ in range(2)]
        with pytest.raises(DiskError, match="TMPDIR"):
            torch.ones(1 << 19)
        assert sum(float(t.sum()) for t in kept) == 2 << 18


def test_what_takes_memory_is_known(tmp_path: Path) -> None:
    with disks.small_disk(tmp_path, "1m") as memory_backed:
        assert init_on_disk._in_memory(memory_backed)
    assert not init_on_disk._in_memory(Path("/proc"))
    assert not init_on_disk._in_memory(tmp_path / "missing")


def test_files_go_where_there_is_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = []
    for in_memory in ([], [tmp_path], [tmp_path, Path("/var/tmp"), Path(".")]):
        monkeypatch.setattr(init_on_disk, "_in_memory", in_memory.__contains__)
        found.append(init_on_disk._folder())
    assert found == [tmp_path, Path("/var/tmp"), tmp_path]


_BUILD = """
import resource, sys, psutil, tutti
from torch import nn
# 200 MB beside what PyTorch has loaded: 0.2 GB in builds for CPUs, 0.7 GB in builds for CUDA.
limit = psutil.Process().memory_info().data + (200 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
def build():
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(20)))
if sys.argv[1] == "spilling":
    with tutti.spilling():
        build()
else:
    build()
"""


def test_a_model_larger_than_the_limit_is_built() -> None:
    def code(how: str) -> int:
        # 336 MB of parameters.
        words = [sys.executable, "-c", _BUILD, how]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(words, env=environ, capture_output=True).returncode

    assert (code("spilling"), code("plain")) == (0, 1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    numbers, labels = batch
    return functional.cross_entropy(model(numbers), labels)


def trained(strategy: str, precision: str, inside: bool) -> tuple[str, list[str], bool]:
    """Hash of the weights after two steps, what still lies in files, and whether anything did before the first."""
    numbers = torch.arange(24)
    model = make(inside)
    workers = 3 if strategy.startswith("sharded") else 1
    seen: list[bool] = []

    def noting(parts: Sequence[nn.Module], trained: bool = True) -> None:
        seen.extend(spilled(p) for each in parts for p in each.parameters())
        load_spilled(parts, trained)

    replica_part.load_spilled = noting
    run = tutti.prepare(
        *(model, "adam:lr=0.01", (numbers % 7, numbers % 5), loss),
        **{"strategy": strategy, "workers": workers, "batch_size": 12, "precision": precision},
    )
    for batch in run.epoch(0):
        run.step(batch)
    parts = nn.ModuleList(run.replica.parts)
    left = [name for name, tensor in [*parts.named_parameters(), *parts.named_buffers()] if spilled(tensor)]
    replica_part.load_spilled = load_spilled
    return run.weights_sha256(), left, any(seen)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    in_turn(["sharded", "sharded:stage=2", "tensor", "pipeline:cuts=blocks.0+head", "single"], ["fp32", "fp64"]),
)
def test_training_is_the_same_and_leaves_nothing_in_files(strategy: str, precision: str) -> None:
    size = 1 if strategy == "single" else 3
    plain = worlds.run(size, trained, strategy=strategy, precision=precision, inside=False)
    found = worlds.run(size, trained, strategy=strategy, precision=precision, inside=True)
    assert [weights for weights, *_ in found] == [weights for weights, *_ in plain]
    assert not any(left for _, left, _ in found)
    # What was made double, too; slices of layers are taken out at once.
    assert any(before for *_, before in found) or strategy == "tensor"


@pytest.mark.parametrize(
    ("strategy", "devices", "expected"),
    [
        ("mirrored", 4, False),
        ("sharded", 4, True),
        ("sharded:stage=1", 4, False),
        ("sharded:shards=1", 4, False),
        ("tensor", 2, True),
        ("pipeline", 2, True),
        ("hybrid:stages=2,tensor=2", 8, True),
        ("hybrid", 1, False),
    ],
)
def test_only_what_no_device_keeps_whole_is_built_in_files(
    strategy: str, devices: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two mebibytes of the host's are this process's: half a mebibyte of the model stays in memory.
    monkeypatch.setattr("tutti.train.task_run.free_memory", lambda processes: 2**21 * devices // processes)
    config = TrainConfig(strategy=strategy, model="gpt:layers=1,width=512,heads=8,block=8", data=__file__)
    world = cast(World, SimpleNamespace(identity=SimpleNamespace(size=devices, local_size=devices)))
    task = task_registry.load_task("text", data=config.data, model=config.model, augment=None)
    model = build_task_model(task, config, world)
    assert any(map(spilled, model.parameters())) == expected


# A process of its own: threads of earlier tests end at any time, and each gives back 8 MiB.
_LIMITED = """
import resource, psutil, torch
from tutti import host_memory

assert host_memory.free_memory(1) > 2 * host_memory.free_memory(4) > 0
limit = psutil.Process().memory_info().data + (400 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
limited = host_memory.free_memory(1)
taken = torch.ones(100 << 18)
print(limited >> 20, (limited - host_memory.free_memory(1)) / taken.nbytes)
"""


def test_free_memory_knows_of_the_process_limit() -> None:
    done = subprocess.run([sys.executable, "-c", _LIMITED], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    limited, taken = map(float, done.stdout.split())
    assert 300 < limited <= 400
    assert 0.9 <= taken <= 1.3
