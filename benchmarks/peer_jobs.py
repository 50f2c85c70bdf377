"""Faults of processes, played on stock DDP under torchrun, and mismatches played on bare Gloo."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

RANKS = 3
GROUP_TIMEOUT = 10
LONGEST = 150
"""Seconds after which a job that has not ended is called hung."""
ORPHANED = 5
"""Seconds after the end of torchrun after which a worker that lives is an orphan."""


@dataclass
class Tally:
    """How often something came to what, and what was measured on the way."""

    came_to: Counter[str] = field(default_factory=Counter)
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def as_json(self) -> dict[str, Any]:
        return {"came_to": dict(self.came_to), "figures": self.figures}


class Job:
    """``torchrun`` with the script of ``peer_training.py``, in ``folder``."""

    def __init__(self, folder: Path, fault: dict[str, Any], *flags: str, timeout: float = 1800) -> None:
        self.folder = folder
        outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._log = (folder / "log").open("w")
        words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *flags)
        self.process = subprocess.Popen(
            [sys.executable, *words, str(Path(__file__).with_name("peer_training.py")), str(folder)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=outer
            | {"FAULT": json.dumps(fault), "GROUP_TIMEOUT": str(timeout), "OMP_NUM_THREADS": "1"}
            | {"GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.workers():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
        self._log.close()

    def workers(self) -> list[psutil.Process]:
        """All processes that torchrun has started and that live, remembered beyond its own end."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self._seen if process.is_running() and _status(process) != psutil.STATUS_ZOMBIE]

    def code(self, seconds: float = LONGEST) -> int | None:
        """Its exit code; None where it has not ended after ``seconds``."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            self.workers()
            time.sleep(0.05)
        return self.process.poll()

    def steps(self) -> list[tuple[int, int, float]]:
        """Attempt, step and time of every step on record."""
        file = self.folder / "steps"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(attempt), int(step), float(when)) for attempt, step, when in lines]

    def until(self, step: int) -> bool:
        """Whether it comes to ``step`` before its end."""
        end = time.monotonic() + LONGEST
        while self.process.poll() is None and time.monotonic() < end:
            self.workers()
            if any(made >= step for _, made, _ in self.steps()):
                return True
            time.sleep(0.02)
        return False

    def struck(self) -> float:
        """When the fault was played."""
        return float((self.folder / "struck").read_text())

    def end(self) -> dict[str, Any]:
        """What rank 0 said of its weights at the end; nothing where it did not get there."""
        file = self.folder / "end"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def said(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def reference() -> str:
    """The weights of a run without faults."""
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), {}) as job:
        if job.code() != 0:
            raise RuntimeError(job.said())
        return str(job.end()["weights"])


def kill_a_rank(folder: Path, dice: random.Random, want: str, tally: Tally) -> None:
    # With the default timeout: a machine that is slow to start must not look like one that fails.
    fault = {"kind": "kill", "rank": dice.randrange(RANKS), "step": dice.randrange(11, 50)}
    with Job(folder, fault, "--max-restarts", "3") as job:
        code = job.code()
        attempts = [(attempt, when) for attempt, _, when in job.steps() if attempt]
        if attempts:
            tally.note("recovery, s", attempts[0][1] - job.struck())
            tally.note("restarts until it trained", attempts[0][0])
            again = [step for attempt, step, _ in job.steps() if attempt == attempts[0][0]]
            tally.note("steps lost", max(step for attempt, step, _ in job.steps() if not attempt) - again[0] + 1)
        said = re.findall(r"Connection refused|Connection closed by peer|[Tt]imed out", job.said())
    failed = "gave up after 3 restarts" + (f" (“{said[-1]}”)" if said else "")
    finished = "finished" if code == 0 else "hung" if code is None else failed
    bits = "" if code != 0 else ", equal weights" if job.end().get("weights") == want else ", other weights"
    tally.came_to[finished + bits] += 1


def stop_a_rank(folder: Path, dice: random.Random, want: str, tally: Tally) -> None:
    rank = dice.randrange(RANKS)
    fault = {"kind": "stop", "rank": rank, "step": dice.randrange(11, 50)}
    with Job(folder, fault, timeout=GROUP_TIMEOUT) as job:
        code = job.code()
        if code is not None:
            tally.note(f"ended after, s, with a limit of {GROUP_TIMEOUT} s", time.time() - job.struck())
        named = re.search(r"Root Cause.*?rank\s*: (\d+)", job.said(), re.DOTALL)
    which = "nobody" if named is None else "the stopped rank" if int(named[1]) == rank else "another rank"
    tally.came_to["hung" if code is None else f"ended, blaming {which}"] += 1


def kill_the_launcher(folder: Path, dice: random.Random, want: str, tally: Tally) -> None:
    with Job(folder, {"pause": 0.2}) as job:
        job.until(dice.randrange(5, 20))
        job.process.kill()
        job.process.wait()
        time.sleep(ORPHANED)
        orphans = len(job.workers())
        tally.note("orphans", orphans)
        tally.came_to[f"workers live on after {ORPHANED} s" if orphans else "nothing is left"] += 1


def terminate(folder: Path, dice: random.Random, want: str, tally: Tally) -> None:
    with Job(folder, {"pause": 0.05}) as job:
        job.until(dice.randrange(11, 40))
        job.process.send_signal(signal.SIGTERM)
        code = job.code()
        made = max((step for _, step, _ in job.steps()), default=0)
        saved = int(torch.load(folder / "checkpoint.pt")["step"]) if (folder / "checkpoint.pt").exists() else 0
        tally.note("steps lost", made - saved)
    tally.came_to[f"exit code {code}"] += 1


def nan_on_one_rank(folder: Path, dice: random.Random, want: str, tally: Tally) -> None:
    with Job(folder, {"kind": "nan", "rank": dice.randrange(RANKS), "step": dice.randrange(11, 50)}) as job:
        code = job.code()
    finite = "" if code != 0 else ", finite weights" if job.end()["finite"] else ", all weights NaN and saved"
    tally.came_to[f"exit code {code}{finite}"] += 1


def uneven_batches(folder: Path, dice: random.Random, want: str, tally: Tally) -> None:
    with Job(folder, {"kind": "uneven", "rank": dice.randrange(RANKS)}, timeout=GROUP_TIMEOUT) as job:
        code = job.code()
        told = re.search(r"(Detected mismatch|Connection closed by peer|Timed out|timed out|op\.preamble)", job.said())
    said = f", said “{told[1]}”" if told else ""
    tally.came_to[("hung" if code is None else f"exit code {code}") + said] += 1


Fault = Callable[[Path, random.Random, str, Tally], None]
FAULTS: dict[str, Fault] = {
    "SIGSTOP of a rank": stop_a_rank,
    "kill -9 of the launcher": kill_the_launcher,
    "SIGTERM to the launcher": terminate,
    "NaN gradient on one rank": nan_on_one_rank,
    "a batch less on one rank": uneven_batches,
    "kill -9 of a rank": kill_a_rank,
}


def mismatch(rank: int, folder: str, case: str) -> None:
    """One of two ranks that do not do the same; writes what its collective left it with."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", store, rank=rank, world_size=2, timeout=timedelta(seconds=GROUP_TIMEOUT))
    tensor, other = torch.full((4,), float(rank + 1)), torch.full((4,), 10.0 * (rank + 1))
    if case == "shape":
        dist.all_reduce(tensor[: 3 + rank])
    elif case == "dtype":
        dist.all_reduce(tensor.to(torch.int32) if rank else tensor)
    elif case == "order":
        for each in (other, tensor) if rank else (tensor, other):
            dist.all_reduce(each)
    elif case == "operation":
        dist.broadcast(tensor, 0) if rank else dist.all_reduce(tensor)
    else:
        for _ in range(1 + rank):
            dist.all_reduce(tensor)
    Path(folder, f"done{rank}").touch()


def play_mismatch(case: str, tally: Tally) -> None:
    """Silent where both ranks went on as if nothing were wrong."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        try:
            start_processes(mismatch, (folder, case), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
            told = "silent"
        except Exception as error:
            told = "aborted (SIGABRT)" if "SIGABRT" in str(error) else "an exception"
            tally.note("until it failed, s", time.monotonic() - began)
        tally.came_to[told] += 1


def play(runs: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every fault ``runs`` times: how often it came to what, and figures."""
    for case in ("shape", "dtype", "order", "operation", "count"):
        tally = Tally()
        for _ in range(runs):
            play_mismatch(case, tally)
        yield f"another {case} on one rank", tally.as_json()
    want = reference()
    for name, act in FAULTS.items():
        tally, dice = Tally(), random.Random(f"{seed} {name}")
        for _ in range(runs):
            with tempfile.TemporaryDirectory() as folder:
                act(Path(folder), dice, want, tally)
        yield name, tally.as_json()
