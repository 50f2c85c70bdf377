"""Joining a job: calling twice, leaving, an adopted process group, and what cannot be."""

from __future__ import annotations

import multiprocessing as mp
import os
import runpy
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import tutti
from tests import worlds
from tutti.errors import UsageError
from tutti.launcher import context


def apart(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` in ``size`` fresh processes that belong to no job yet."""
    started = mp.get_context("forkserver")
    lines = [started.Pipe() for _ in range(size)]
    processes = [
        started.Process(target=_answer, args=(there, function, rank, *arguments), daemon=True)
        for rank, (_, there) in enumerate(lines)
    ]
    for process in processes:
        process.start()
    try:
        assert all(here.poll(60) for here, _ in lines), "a process did not answer"
        return [here.recv() for here, _ in lines]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        pipe.send(function(*arguments))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


def alone(rank: int) -> list[Any]:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    said = []
    for function in (context.current, context.rank, context.size):
        try:
            function()
        except UsageError as error:
            said.append(str(error))
    first = context.init("cpu")
    again = context.init("auto", timeout=1)
    numbers = [context.rank(), context.size(), context.local_rank(), context.local_size()]
    numbers += [context.cross_rank(), context.cross_size()]
    first.store.set("note", "written")
    kept = first.store.get("note")
    context.shutdown()
    context.shutdown()
    after = context.is_initialized()
    return [said, first is again, again.timeout, numbers, kept, after, context.init("cpu") is not first]


def test_a_world_of_one() -> None:
    [[said, same, timeout, numbers, kept, after, anew]] = apart(1, alone)
    assert len(said) == 3 and all("Call tutti.init() first" in text for text in said)
    assert (same, timeout, numbers, kept, after, anew) == (True, 300.0, [0, 1, 0, 1, 0, 1], b"written", False, True)


def failing_at_the_end(rank: int) -> list[Any]:
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    called, error = [], ""
    context.init("cpu")

    def fails() -> None:
        called.append("fails")
        raise OSError("disk full")

    context.before_shutdown(fails)
    context.before_shutdown(lambda: called.append("last"))
    try:
        context.shutdown()
    except OSError as raised:
        error = str(raised)
    return [called, error, context.is_initialized(), dist.is_initialized()]


def test_shutdown_leaves_the_job_though_a_registered_function_fails() -> None:
    assert apart(1, failing_at_the_end) == [[["fails", "last"], "disk full", False, False]]


def adopted(rank: int, path: str) -> list[Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.FileStore(path, 3), rank=rank, world_size=3, timeout=timedelta(seconds=30)
    )
    world = context.init("cpu")
    total = torch.tensor([rank])
    dist.all_reduce(total)
    context.shutdown()
    return [world.identity.rank, world.identity.size, world.owned, int(total), dist.is_initialized()]


def imported_anew(rank: int, path: str, job: bool) -> Any:
    """Call ``tutti.init`` at the top of a script that a child of multiprocessing imports."""
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} if job else {})
    return runpy.run_path(path, run_name="__mp_main__")["size"]


def test_a_child_that_imports_the_script_does_not_join_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tutti\n\ntutti.init('cpu', timeout=2)\nsize = tutti.size()\n")
    [said] = apart(1, imported_anew, str(script), True)
    assert "runs the script once more (rank 0" in said and f"{script}:3" in said and "__name__" in said
    assert apart(1, imported_anew, str(script), False) == [1]


def test_a_process_group_that_exists_is_adopted_and_left_alone(tmp_path: Path) -> None:
    assert apart(3, adopted, str(tmp_path / "store")) == [[rank, 3, False, 3, True] for rank in range(3)]


def absent(rank: int, path: str) -> None:
    os.environ.update(RANK=str(2 * rank), WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", TUTTI_STORE=path)
    context.init("cpu", timeout=5)


def test_ranks_that_do_not_arrive_are_named(tmp_path: Path) -> None:
    for rank, text in enumerate(apart(2, absent, str(tmp_path / "store"))):
        assert text.startswith("PeerError: rank 1, 3 of 4 did not arrive within 5 s")
        assert f"rank {2 * rank}" in text


def who() -> list[int]:
    world = tutti.init()
    return [world.identity.rank, tutti.rank(), tutti.size()]


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_know_themselves(size: int) -> None:
    assert worlds.run(size, who) == [[rank, rank, size] for rank in range(size)]


def devices(rank: int) -> list[str]:
    os.environ.pop("RANK", None)
    said = []
    for choice in ("tpu", "cuda"):
        try:
            context.init(choice)
        except UsageError as error:
            said.append(str(error))
    return [*said, context.init("auto").device.type]


def test_devices_that_cannot_be_are_refused() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    [[unknown, missing, kind]] = apart(1, devices)
    assert "unknown device 'tpu'" in unknown and "auto, cpu, cuda" in unknown
    assert "sees no GPU" in missing and "--device cpu" in missing
    assert kind == "cpu"
