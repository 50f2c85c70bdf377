"""The header of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tutti.config.train_config import TrainConfig
from tutti.launcher import context
from tutti.train.header import derived, run_identity


def devices_line(cores: int | None) -> str:
    config, world = TrainConfig(), context.current()
    data = torch.zeros(8, 1), torch.zeros(8, 1)
    run = tutti.prepare(nn.Linear(1, 1), "sgd", data, lambda model, batch: model(batch[0]).mean(), batch_size=8)
    facts = run_identity("lines", config, run, world, 1, 1)
    task: Any = SimpleNamespace(describe="lines", directions={})
    with patch("os.cpu_count", lambda: cores):
        return derived(task, config, run, world, None, facts)["devices"]


@pytest.mark.parametrize(("cores", "more"), [(3, ""), (2, "; more processes than the 2 cores of this machine")])
def test_the_header_tells_of_more_processes_than_cores(cores: int, more: str) -> None:
    assert worlds.run_on("cpu", 3, devices_line, cores=cores) == [f"3 (3 data; cpu, 1 thread each{more})"] * 3
