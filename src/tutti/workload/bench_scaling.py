"""Measure how the throughput of a training task grows with the number of devices."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tutti.config.verbosity import is_quiet
from tutti.errors import ExitCode, TuttiError, UsageError
from tutti.metrics.metrics_file import metric_records
from tutti.workload.machine_file import Figure

STEPS = 60
"""Training steps of a measured run."""
ROUNDS = 3
"""Runs of each number of devices."""
_OURS = (
    "--devices",
    "--steps",
    "--epochs",
    "--out",
    "--runs",
    "--resume",
    "--eval-every",
    "--checkpoint-every",
    "--json",
)
_FIXED = ("--eval-every", "none", "--checkpoint-every", "none", "--quiet")


def refuse_own_flags(words: Sequence[str]) -> None:
    """Raise UsageError if ``bench_scaling`` sets one of the given flags for ``tutti train`` itself.

    These are ``--devices``, ``--steps``, ``--epochs``, ``--out``, ``--runs``, ``--resume``, ``--eval-every``,
    ``--checkpoint-every`` and ``--json``.

    Args:
        words: the flags with their values, such as ``["--batch-size", "512"]``.
    """
    for word in words:
        if word.partition("=")[0] in _OURS:
            raise UsageError(
                f"tutti bench scaling sets {word.partition('=')[0]} itself",
                why="it trains for the same few steps on each number of devices",
                remedy="leave it out; --ranks 1,2,4 gives the numbers of devices, --device cpu before -- their kind",
            )


def bench_scaling(task: str, words: Sequence[str], counts: Sequence[int], device: str) -> dict[str, Figure]:
    """Train a task for 60 steps on each number of devices, three times in turn, and return its throughput.

    The global batch and the number of logical workers (shares of the batch) are the same on all numbers of devices, so
    that all compute the same updates; workers are the largest number of devices unless ``words`` say otherwise. Each
    run is a ``tutti train`` of its own. The first step of a run, which warms it up, does not count.

    Args:
        task: name of a task, or ``FILE.py:FUNCTION``.
        words: further flags of ``tutti train``, such as ``["--batch-size", "512", "--strategy", "sharded"]``.
        counts: numbers of devices.
        device: ``auto``, ``cpu`` or the name of an accelerator.

    Returns:
        One entry for each N of ``counts``: the key ``scaling/TASK/N``, where TASK is the name of the task or the file
        name in its path, and samples a second on N devices, with ``value`` (median of three runs) and ``spread``
        (interquartile range).

    Raises:
        TuttiError: a run failed; the error has its exit code, and its own message is printed before.
    """
    fixed = [*words, *_FIXED, "--steps", str(STEPS), "--device", device]
    if not any(word.partition("=")[0] == "--workers" for word in words):
        fixed += ["--workers", str(max(counts))]
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(ROUNDS):
        for count in counts if turn % 2 == 0 else reversed(counts):
            if not is_quiet(os.environ):
                print(f"[{turn + 1}/{ROUNDS}] {task} on {count} device(s)", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="tutti-bench-") as scratch:
                rates[count].append(_rate(["train", task, *fixed, "--devices", str(count)], Path(scratch, "run")))
    name = re.sub(r"[^\w.:-]+", "-", Path(task).name)
    return {f"scaling/{name}/{count}": _figure(values) for count, values in rates.items()}


def _rate(words: Sequence[str], folder: Path) -> float:
    """Run ``tutti`` with ``words`` and return the samples a second between its first and its last training record."""
    done = subprocess.run([sys.executable, "-m", "tutti", *words, "--out", str(folder)], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise _RunFailed(done.returncode)
    records = [record for record in metric_records(folder) if record.get("group") == "train"]
    first, last = records[0], records[-1]
    return float((last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"]))


def _figure(values: Sequence[float]) -> Figure:
    """Return median and interquartile range of the rates of several runs."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(round(statistics.median(values), 3), "sample/s", len(values), round(high - low, 3))


class _RunFailed(TuttiError):
    """A training run of the measurement failed."""

    def __init__(self, code: int) -> None:
        super().__init__("measuring scaling failed", remedy="see the message of the run above")
        self.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED


def scaling_rows(figures: Mapping[str, Figure]) -> dict[str, list[tuple[int, Figure, float]]]:
    """Return the measured throughputs of each task by growing number of devices, with their efficiency.

    Args:
        figures: figures of a machine, of which those named ``scaling/TASK/N`` count.

    Returns:
        By task a list of (devices, throughput, efficiency). The throughput is a ``Figure``, whose ``value`` is samples
        a second and ``spread`` the interquartile range of the runs. The efficiency is the throughput of a device,
        divided by the throughput of a device at the fewest devices; 1 is linear scaling.
    """
    found: dict[str, list[tuple[int, Figure]]] = {}
    for name, figure in figures.items():
        part, _, rest = name.partition("/")
        if part == "scaling":
            task, _, count = rest.rpartition("/")
            found.setdefault(task, []).append((int(count), figure))
    rows = {}
    for task, measured in found.items():
        measured.sort()
        fewest, first = measured[0]
        linear = first.value / fewest
        rows[task] = [(count, figure, figure.value / (linear * count)) for count, figure in measured]
    return rows
