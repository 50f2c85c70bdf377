"""A save lasts as long as any rank makes progress in it; without progress it fails, and nothing waits for ever."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutti.checkpoint import manager
from tutti.checkpoint.manager import CheckpointManager
from tutti.errors import DiskError, PeerError
from tutti.launcher import heartbeat
from tutti.launcher.context import World
from tutti.process_context import Identity

STATE = {"model": {"weight": torch.zeros(2)}}


def saver(
    folder: Path, store: dist.Store, timeout: float, rank: int = 0, size: int = 1, most_failures: int = 1
) -> CheckpointManager:
    comm: Any = SimpleNamespace(
        rank=rank,
        broadcast_json=lambda value, root, text: value if text.startswith("folder") else ["token", str(folder)],
        all_gather_strings=lambda value, text: [value],
        lost_ranks=dict,
    )
    world = World(Identity(rank, size), torch.device("cpu"), store, timeout, owned=False)
    return CheckpointManager(comm, folder, world, keep=1, warn=lambda text: None, most_failures=most_failures)


def test_a_long_write_outlasts_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, finish, written, seen = [0], threading.Event(), manager.write_part, heartbeat.saving.seen

    def look() -> Any:
        looks[0] += 1
        if looks[0] > 4:
            finish.set()
        return seen()

    monkeypatch.setattr(manager, "write_part", lambda *given: (finish.wait(60), written(*given))[1])
    monkeypatch.setattr(heartbeat.saving, "seen", look)
    saves = saver(tmp_path, dist.HashStore(), 0.05)
    saves.write(1, STATE, {"config_sha256": "0" * 64})
    saves.wait()
    assert (tmp_path / "step-00000001").is_dir()


@pytest.mark.parametrize("progress", [True, False])
def test_a_rank_that_waits_for_a_slow_one(progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 writes for 50 limits, on a clock that rank 0's polls move, with or without progress."""
    monkeypatch.setattr(manager.watchdog, "save_limit", lambda: 20)
    written, finish, polls, clock = manager.write_part, threading.Event(), iter(range(100)), [0.0]
    reports: list[Callable[[], None]] = []

    def slow(folder: Path, group: str, rank: int, slices: Any, report: Callable[[], None]) -> Any:
        if rank == 1:
            reports.append(report)
            finish.wait(60)
        return written(folder, group, rank, slices, report)

    def poll(seconds: float) -> None:
        if reports:
            clock[0] += 10
            if progress:
                reports[0]()
            if next(polls, None) is None:
                finish.set()
        time.sleep(0)

    monkeypatch.setattr(manager, "write_part", slow)
    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=poll))
    store = dist.HashStore()
    first, second = (saver(tmp_path, store, 10, rank, 2) for rank in (0, 1))
    first.write(1, STATE, {"config_sha256": "0" * 64})
    second.write(1, {"model": {}}, {})
    for saves in (first, second):
        if progress:
            saves.wait()
        else:
            with pytest.raises(DiskError, match=r"no progress for 20 s \(rank 0, which waits for rank 1"):
                saves.wait()
        finish.set()
    assert (tmp_path / "step-00000001").is_dir() == progress


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_whose_disk_is_full(rank: int, tmp_path: Path) -> None:
    """At the first failure, and as a full disk: the other ranks would wait in vain, and name a host that is silent."""

    class Store(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistStoreError("No space left on device")

    store = Store()
    # By which rank 0 lets rank 1 write.
    dist.HashStore.set(store, "save/token/1/open", json.dumps([str(tmp_path), ""]))
    saves = saver(tmp_path, store, 10, rank, 2, most_failures=3)
    saves.write(1, STATE, {"config_sha256": "0" * 64})
    with pytest.raises(DiskError, match="key-value store cannot be written: No space left"):
        saves.wait()


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    silent = threading.Event()

    class Store(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            silent.wait(60)
            return super().check(keys)

    saves = saver(tmp_path, Store(), 0.05)
    saves.write(1, STATE, {"config_sha256": "0" * 64})
    with pytest.raises(PeerError, match="rank 0's host does not answer"):
        saves.wait()
    silent.set()
