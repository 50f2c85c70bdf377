"""Which process is which rank, and what is done to it: with real processes that hold the files of a run open."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.launching import until
from tutti.chaos.processes import StoppedProcess, find_processes, frozen, send

_RUN = """
import os, sys, time
def rank(number):
    log = open(f"logs/rank{number}.log", "a")
    # What a rank starts has its log open too.
    if not os.fork():
        time.sleep(600)
    time.sleep(600)
for number in range(int(sys.argv[1])):
    open(f"logs/rank{number}.log", "w").close()
    if not os.fork():
        rank(number)
# A launcher that shows its ranks' output reads their logs.
shown = [open(f"logs/rank{number}.log") for number in range(int(sys.argv[1]))]
metrics = open("metrics.jsonl", "a") if sys.argv[1] == "0" else None
print("ready", flush=True)
time.sleep(600)
"""
_COUNT = """
import time
number = 0
while True:
    number += 1
    print(number, flush=True)
    time.sleep(0.001)
"""


@contextmanager
def running(folder: Path, code: str, *words: str) -> Iterator[psutil.Process]:
    """A Python program, ended at last with all that it started; its output goes to ``out``."""
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "out").open("w") as out:
        started = subprocess.Popen([sys.executable, "-c", code, *words], stdout=out, cwd=folder)
    process = psutil.Process(started.pid)
    try:
        yield process
    finally:
        # Orphans of a rank that was killed have no tie to it any more, but its log.
        family = [*process.children(recursive=True), process, *find_processes(folder).ranks.values()]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        started.wait()


def said(folder: Path) -> list[str]:
    return (folder / "out").read_text().splitlines()


@pytest.mark.parametrize("whose", ["ours", "somebody else's"])
def test_ranks_are_those_that_write_their_logs(tmp_path: Path, whose: str) -> None:
    with running(tmp_path, _RUN, "3") as launcher:
        until(
            lambda: len(find_processes(tmp_path, launcher).ranks) == 3 and len(launcher.children(recursive=True)) == 6
        )
        found = find_processes(tmp_path, launcher if whose == "ours" else None)
        assert found.launcher == launcher and found.living() == [0, 1, 2]
        assert {process.ppid() for process in found.ranks.values()} == {launcher.pid}
        send(found.ranks[1], signal.SIGKILL)
        until(lambda: found.living() == [0, 2])
        # What it had started still has the log open, and is no rank.
        assert list(find_processes(tmp_path, launcher).ranks) == [0, 2]
    until(lambda: find_processes(tmp_path).ranks == {})


def test_a_run_in_one_process_is_its_own_launcher(tmp_path: Path) -> None:
    with running(tmp_path, _RUN, "0") as process:
        until(lambda: find_processes(tmp_path).ranks)
        found = find_processes(tmp_path)
        assert found.launcher == process and found.ranks == {0: process}


def test_nobody_else_is_found(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").touch()
    assert find_processes(tmp_path).ranks == {} and find_processes(tmp_path).launcher is None


def test_frozen_processes_stand_still(tmp_path: Path) -> None:
    with running(tmp_path, _COUNT) as process:
        until(lambda: said(tmp_path))
        with frozen([process]):
            before = said(tmp_path)
            assert process.status() == psutil.STATUS_STOPPED
            time.sleep(0.05)
            assert said(tmp_path) == before
        until(lambda: len(said(tmp_path)) > len(before))


@pytest.mark.parametrize("factor", [None, 5.0])
def test_what_is_held_is_let_go(tmp_path: Path, factor: float | None) -> None:
    with running(tmp_path, _COUNT) as process:
        until(lambda: said(tmp_path))
        held = StoppedProcess(process, factor)
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        if factor:
            before = len(said(tmp_path))
            until(lambda: len(said(tmp_path)) > before)
        held.release()
        until(lambda: process.status() != psutil.STATUS_STOPPED)
        before = len(said(tmp_path))
        until(lambda: len(said(tmp_path)) > before)
        process.kill()
        held.release()
