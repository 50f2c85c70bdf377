"""The process group of an accelerator: bound to its device while it connects, and not while others are made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.launcher.test_context import apart
from tests.simulated_accelerator import build
from tutti.launcher import context

pytestmark = pytest.mark.timeout(600)


def join(rank: int, path: str, device: str) -> list[Any]:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", TUTTI_STORE=path)
    if device == build.DEVICE:
        build.load(2)
    with patch("torch.distributed.init_process_group", wraps=dist.init_process_group) as init:
        world = context.init(device, timeout=30)
    given = init.call_args
    # A new group of the host that has one of the ranks: with a bound device the other would split NCCL's group alone.
    dist.new_group([0], backend="gloo")
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total)
    assert dist.group.WORLD is not None
    return [given.args[0], str(given.kwargs["device_id"]), dist.group.WORLD.bound_device_id, total.item()]


def test_the_group_is_bound_to_the_device_only_while_it_connects(tmp_path: Path) -> None:
    build.require()
    found = apart(2, join, str(tmp_path / "store"), build.DEVICE)
    assert found == [[f"cpu:gloo,{build.DEVICE}:simccl", f"{build.DEVICE}:{rank}", None, 2.0] for rank in range(2)]


def test_the_group_of_the_host_has_no_device(tmp_path: Path) -> None:
    assert apart(2, join, str(tmp_path / "store"), "cpu") == [["gloo", "None", None, 2.0]] * 2
