"""A batch norm that gets the single sample of a worker: PyTorch's error, with a note of the worker's share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.forkserver import run as start

WORDS = "4 samples ÷ 2 workers ÷ 2 micro-batches = 1"


def stepped(strategy: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    data = torch.randn(8, 3)
    options: dict[str, Any] = {"workers": 2, "batch_size": 4, "micro_batch": 1, "strategy": strategy}
    run = tutti.prepare(model, "sgd:lr=0.1", data, lambda model, batch: model(batch).square().mean(), **options)
    try:
        run.step(next(iter(run.epoch(0))))
    except ValueError as error:
        return type(error), str(error), error.__notes__
    return None


@pytest.mark.parametrize(("devices", "strategy"), [(1, "mirrored"), (2, "mirrored")])
def test_a_step_names_the_share_of_a_worker(devices: int, strategy: str) -> None:
    for kind, text, notes in worlds.run(devices, stepped, strategy=strategy):
        assert kind is ValueError and text.startswith("Expected more than 1 value per channel")
        assert WORDS in notes[0] and "batch_norm='sync'" in notes[0] and len(notes) == 1


SCRIPT = """
import torch, tutti
from torch import nn
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = tutti.prepare(model, optimizer, torch.randn(8, 3), workers=2, batch_size=4, micro_batch=1)
for batch in run.microbatches(0):
    run.backward(model(batch).square().mean())
"""


def test_so_does_an_error_that_ends_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = start(["script.py"], tmp_path, os.environ, 100)
    assert done.returncode == 1 and "ValueError: Expected more than 1 value per channel" in done.stderr
    assert WORDS in done.stderr
