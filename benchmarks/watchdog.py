"""What a watchdog costs, how soon it notices, and how often it errs: ``python benchmarks/watchdog.py [--runs 10]``.

Prints the time of one beat and of a step's beats, of a fork, the memory that a watchdog has for itself, the time from
the last progress of a stuck rank to its failure record in units of the limit, and false alarms beside a rank whose
steps take five times as long as the others', with steps of a tenth of the limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from tutti.config.watchdog_limits import WatchdogLimits
from tutti.launcher import failure, heartbeat, watchdog
from tutti.launcher.heartbeat import Phase
from tutti.launcher.launch import launch

LIMIT = 2.0
RANKS = 3


def beats() -> None:
    """The beats of a step of ``tutti train`` that waits for nobody."""
    lane = heartbeat.training
    lane.enter(Phase.DATA, 17)
    lane.enter(Phase.IDLE)
    lane.enter(Phase.COMPUTE, 17)
    lane.enter(Phase.IDLE)
    lane.enter(Phase.REPORT)
    lane.enter(Phase.IDLE)


def fastest(call: Callable[[], object]) -> float:
    """Seconds a call, least of many short rounds: whatever else runs here only adds to it."""
    return min(timeit.repeat(call, number=200, repeat=2000)) / 200


def private(pid: int) -> float:
    """Megabytes that no other process shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def cost(note: str) -> None:
    """In a rank: fork, beat, and memory."""
    import torch

    torch.ones(1)
    start = time.perf_counter()
    watchdog.stop_watchdog()
    watchdog.start_watchdog(0, WatchdogLimits())
    forked = time.perf_counter() - start
    time.sleep(3)
    guards = [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    beat = fastest(lambda: heartbeat.training.enter(Phase.COMPUTE, 17))
    values = [beat * 1e9, fastest(beats) * 1e6, forked * 1e3, private(guards[-1])]
    Path(note).write_text(" ".join(str(value) for value in values))


def stuck(note: str, stopped: bool) -> None:
    """In a rank: stop moving, in one rank, after a second of steps."""
    end = time.monotonic() + 1
    while time.monotonic() < end or int(os.environ["RANK"]) != 1:
        heartbeat.training.enter(Phase.COMPUTE, 1)
        time.sleep(0.01)
    Path(note).write_text(str(time.time()))
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


def slow() -> None:
    """In a rank: five times as slow as the others, in one rank, for four times the limit."""
    end = time.monotonic() + 4 * LIMIT
    while time.monotonic() < end:
        heartbeat.training.enter(Phase.COMPUTE, 1)
        time.sleep(LIMIT / 10 * (5 if os.environ["RANK"] == "1" else 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        logs, note, limits = Path(folder), f"{folder}/note", WatchdogLimits(step=LIMIT)
        launch(cost, (note,), processes=1, logs=logs)
        beat, step, forked, megabytes = map(float, Path(note).read_text().split())
        print(f"a beat {beat:.0f} ns, the beats of a step {step:.2f} µs")
        print(f"a fork {forked:.1f} ms, {megabytes:.1f} MB that no other process shares")
        for name, stopped in (("endless loop", False), ("SIGSTOP", True)):
            delays = []
            for _ in range(runs):
                launch(stuck, (note, stopped), processes=RANKS, logs=logs, limits=limits)
                found = failure.read_failure(logs, 1)
                delays.append((found.time - float(Path(note).read_text())) / LIMIT if found else float("inf"))
            print(
                f"{name}: noticed after {statistics.median(delays):.2f} × limit (most {max(delays):.2f}), {runs} runs"
            )
        alarms = sum(launch(slow, (), processes=RANKS, logs=logs, limits=limits) != 0 for _ in range(runs))
        print(f"5 × slow rank: {alarms} false alarms in {runs} runs of {4 * LIMIT:g} s")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
