"""A GPT whose training does not fit into one process's memory, and does when it is split.

    python benchmarks/too_big.py            # about five minutes
    python benchmarks/too_big.py --quick    # a smaller model and fewer steps
    python benchmarks/too_big.py --save     # keeps results/DATE-too-big.json

First every way trains without a limit, and the largest private memory of any of its processes (``VmData``) is noted.
Then all get the same limit (``RLIMIT_DATA``, which counts just that), half-way between the largest split way and
one device: one device must fail, and the split ways must train. Linux alone. Exit codes: 0, 2 usage, 9 where it did not
come out so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from step_tax import hardware

from tutti.errors import ExitCode

# name: strategy, devices
WAYS = {
    "one device": ("single", 1),
    "data parallel": ("mirrored", 4),
    "sharded": ("sharded:stage=3", 4),
    "pipeline": ("pipeline:micro_batches=4", 4),
    "tensor": ("tensor", 4),
    "tensor × pipeline": ("hybrid:stages=2,tensor=2,micro_batches=2", 4),
}
SPLIT = tuple(WAYS)[2:]
# Those that share the batch out as well.
BATCH = ("data parallel", "sharded")
_POLL = 0.05
# Gathered layers leave holes in the heap: here large blocks are given back when they are freed (docs/sharded.md).
_GIVEN_BACK = {"sharded": {"MALLOC_MMAP_THRESHOLD_": "1000000"}}


def train(name: str, given: argparse.Namespace, limit: int | None) -> dict[str, Any]:
    """Train in one way; exit code, loss and the largest memory of a process, in bytes."""
    strategy, devices = WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = [sys.executable, "-m", "tutti", "train", "text", "--model", given.model, "--strategy", strategy]
        words += ["--devices", str(devices), "--workers", str(devices if name in BATCH else 1)]
        words += ["--batch-size", "8", "--steps", str(given.steps), "--threads", "1", "--optimizer", "adam:lr=0.0003"]
        # A short text: all of what is held out is evaluated at the end.
        words += ["--data", string.__file__, "--eval-every", "none", "--checkpoint-every", "none", "--out", str(out)]
        limited = None if limit is None else partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit))
        environ = os.environ | _GIVEN_BACK.get(name, {})
        process = subprocess.Popen(
            words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limited
        )
        most = 0
        while process.poll() is None:
            most = max([most, *map(private, family(process.pid))])
            time.sleep(_POLL)
        said = process.stderr.read() if process.stderr else ""
        summary = json.loads((out / "summary.json").read_text()) if process.returncode == 0 else {}
    said = [line for line in said.splitlines() if "memory" in line.lower()][-1:]
    return {
        "exit_code": process.returncode, "bytes": most, "said": said,
        "loss": summary.get("train", {}).get("loss"), "samples_per_second": summary.get("samples_per_second"),
    }  # fmt: skip


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, ahead = [], [root]
    while ahead:
        found.append(ahead.pop())
        ahead += parents.get(found[-1], [])
    return found


def private(pid: int) -> int:
    """Bytes of private, writable memory that a process has asked for; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("VmData:")), "VmData: 0 kB")
    return 1024 * int(line.split()[1])


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="A GPT that trains only when it is split.")
    add = parser.add_argument
    add("--model", default="gpt:layers=8,width=1024,heads=16,block=32", help="default: 101 million parameters")
    add("--steps", type=int, default=2)
    add("--quick", action="store_true", help="a smaller model")
    add("--save", action="store_true", help="write benchmarks/results/DATE-too-big.json")
    given = parser.parse_args(argv)
    if given.quick:
        given.model = "gpt:layers=8,width=256,heads=8,block=32"
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit code."""
    given, now = arguments(argv), datetime.now(UTC)
    free = {name: train(name, given, None) for name in WAYS}
    largest = max(free[name]["bytes"] for name in SPLIT)
    limit = (largest + free["one device"]["bytes"]) // 2
    print(f"{'':<20}{'MiB':>8}{'loss':>10}   with at most {limit >> 20} MiB")
    limited = {}
    for name in WAYS:
        limited[name] = train(name, given, limit)
        code, loss = limited[name]["exit_code"], limited[name]["loss"]
        said = f"loss {loss:.4f}" if code == 0 else f"exit code {code}"
        print(f"{name:<20}{free[name]['bytes'] >> 20:>8}{free[name]['loss'] or float('nan'):>10.4f}   {said}")
    fits = all(limited[name]["exit_code"] == 0 for name in SPLIT)
    if given.save:
        result = {
            "benchmark": "too-big", "date": now.isoformat(timespec="seconds"), "hardware": hardware(),
            "model": given.model, "limit": limit, "free": free, "limited": limited,
        }  # fmt: skip
        path = Path(__file__).parent / "results" / f"{now.date()}-too-big.json"
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(ExitCode.DONE if fits and limited["one device"]["exit_code"] else ExitCode.THRESHOLD)


if __name__ == "__main__":
    sys.exit(main())
