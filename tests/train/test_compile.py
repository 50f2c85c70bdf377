"""``--compile`` as a user meets it: code for the processor, shared by the ranks of a host; compiling is no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.faults.commands import tutti as command
from tests.faults.commands import write_task
from tests.train.test_run import data, loss
from tutti.config.module_config import CompileOptions, check_compiler
from tutti.errors import UsageError
from tutti.tasks import task_registry
from tutti.train.loop_meters import Speed

FLAGS = ("--devices", "2", "--batch-size", "12", "--steps", "3", "--optimizer", "sgd:lr=0.1", "--out", "run")


SMALLEST = """
class Smallest(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, inputs):
        return self.narrow(nn.functional.dropout(self.wide(inputs).tanh(), 0.5, self.training))

model = Smallest
"""
"""Few kernels, because the C++ compiler is what takes long; and draws, which inductor by itself makes otherwise."""


def compiler() -> str:
    try:
        check_compiler(CompileOptions())
    except UsageError as error:
        return str(error)
    return ""


def uncompiled(task: str) -> list[float]:
    """The losses of the same training."""
    torch.manual_seed(0)
    own = task_registry.load_task(task, data=None, model=None, augment=False)
    run = tutti.prepare(own.model(), "sgd:lr=0.1", own.train, own.loss, workers=2, batch_size=12)
    return [run.step(batch) for _, batch in zip(range(3), run.epoch(0), strict=False)]


@pytest.mark.full
@pytest.mark.skipif(bool(compiler()), reason=compiler())
def test_ranks_train_with_compiled_code_that_they_share(tmp_path: Path) -> None:
    own, cache = write_task(tmp_path, SMALLEST), tmp_path / "cache"
    # Whether the processor can do what it says it can is not asked: that takes a compilation each.
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    # Nor are there processes that compile beside the ranks: each of them imports torch for two small kernels.
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    result = command(tmp_path, "train", own, *FLAGS, "--compile", **environ)
    assert result.code == 0, result.err
    assert "compiled (default)" in result.err
    [losses] = worlds.run(1, uncompiled, task=f"{tmp_path}/{own}")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["loss"] for r in records if r["group"] == "train"] == pytest.approx(losses, rel=1e-5)
    assert cache.is_dir() and len(list(cache.rglob("*.py"))) <= 2, "code for forward and for backward, once"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["startup_seconds"] < summary["seconds"]


def test_the_first_step_of_a_compiled_model_is_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled, rate, startup in ((False, 40 / 108, 0), (True, 30 / 8, 100)):
        seconds = iter([0.0, 100.0, 104.0, 106.0, 108.0])
        monkeypatch.setattr("tutti.train.loop_meters.time.perf_counter", lambda seconds=seconds: next(seconds))
        speed = Speed(40, 0, compiled)
        paces = [speed.mark(samples) for samples in (10, 20, 30, 40)]
        assert speed.overall() == {"samples_per_second": rate, "seconds": 108, "startup_seconds": startup}
        assert paces[0].samples_per_second == 0.1
        assert paces[1].samples_per_second == (2.5 if compiled else 20 / 104)
        assert [pace.elapsed for pace in paces] == [100, 104, 106, 108]


def test_the_seconds_of_a_run_that_goes_on_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr("tutti.train.loop_meters.time.perf_counter", lambda: next(seconds))
    speed = Speed(40, 20, spent=100.0)
    assert [speed.mark(30).elapsed, speed.mark(40).elapsed] == [101, 102]
    assert speed.overall() == {"samples_per_second": 10, "seconds": 102, "startup_seconds": 0}
    assert speed.elapsed() == 104


def asked(ways: list[Any]) -> list[str]:
    told = []
    for way in ways:
        try:
            tutti.prepare(nn.Linear(3, 1), "sgd", data(), loss, batch_size=6, **way)
            told.append("")
        except UsageError as error:
            told.append(str(error))
    return told


def test_from_python_true_means_the_default_and_what_cannot_be_is_refused_on_every_rank() -> None:
    ways = [
        {"compile": False},
        {"compile": "default:backend=eager"},
        {"compile": "default:backed=eager"},
        {"compile": "max-autotune", "strategy": "sharded"},
        {"compile": True, "reproducible": True},
        {"activation_checkpointing": "blocks"},
    ]
    words = ["", "", "Did you mean 'backend'", "CUDA graphs", "reproducible cannot be combined", "finds nothing"]
    for told in worlds.run(3, asked, ways=ways):
        assert [word in text and bool(word) == bool(text) for word, text in zip(words, told, strict=True)] == [True] * 6
