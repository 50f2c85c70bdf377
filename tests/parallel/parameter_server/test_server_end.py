"""Parameter servers end when the run is dropped, but not before the other ranks have finished with them."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import torch

import tutti
from tests import worlds
from tests.launching import until
from tests.parallel.mixers import prepared
from tests.servers import served
from tutti.launcher import context
from tutti.parallel.parameter_server import server_wire
from tutti.parallel.parameter_server.server_session import ServerSession


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def outlive(strategy: str) -> tuple[bool, bool]:
    """Rank 0 drops the run that owns the servers; the other ranks ask the servers later, and drop theirs."""
    run = prepared(strategy, "adamw")
    for batch in run.epoch(0):
        run.step(batch)
    sync: Any = run.gradient_sync
    session = next(value for value in vars(sync).values() if isinstance(value, ServerSession))
    pids = [int(pid) for pid in tutti.broadcast(torch.tensor(list(session.pids().values()) or [0, 0]), 0)]
    first = context.rank() == 0
    if first:
        del run, sync, session, batch
        gc.collect()
    tutti.barrier()
    answers = 2 if first else len(session.ask(server_wire.FACTS, "asking the servers"))
    tutti.barrier()
    there = all(map(is_alive, pids))
    tutti.barrier()
    if not first:
        del run, sync, session, batch
        gc.collect()
    end = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return answers == 2 and there, any(map(is_alive, pids))


def test_servers_answer_other_ranks_after_their_own_rank_has_dropped_the_run() -> None:
    for strategy in ("parameter_server:servers=2", "parameter_server:servers=2,mode=async"):
        assert worlds.run(3, outlive, strategy=strategy) == [(True, False)] * 3


def retired_early(folder: str) -> None:
    """A server's rank drops it before it answers requests."""
    go = Path(folder) / "go"

    def begin() -> None:
        while not go.exists():
            time.sleep(0.01)

    with served(begin=begin) as one:
        pid = one.pid()
        one.host._collected()
        status = Path(f"/proc/{pid}/status")
        until(lambda: int(re.findall(r"ShdPnd:\s*(\w+)", status.read_text())[0], 16) & 1 << signal.SIGTERM - 1)
        go.touch()
        until(lambda: not is_alive(pid))


def test_a_server_that_is_told_to_end_while_it_starts_ends(tmp_path: Path) -> None:
    worlds.run(1, retired_early, folder=str(tmp_path))
