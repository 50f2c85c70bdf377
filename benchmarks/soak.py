"""One run that meets a hundred random faults, and must end with the weights of a run that meets none.

    python benchmarks/soak.py                                # about ten minutes on two cores
    python benchmarks/soak.py --faults 10 --steps 400        # a short one
    python benchmarks/soak.py --strategy local_sgd:period=4 --seed 7 --save

What it does is ``tutti chaos soak`` on the task digits: four workers on three devices, resumed on two, three or four; a
checkpoint every ten steps, the weights compared bit by bit. Where mounting is allowed the run lives on a small tmpfs,
so that a full disk can be among the faults. Exit codes: those of ``tutti chaos soak``; 9 where the run did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

DISK = "32m"


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Whether ``folder`` could be made a small file system of its own, which it then is within the block."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def command(given: argparse.Namespace, folder: Path) -> list[str]:
    """The command line of the soak, its run in ``folder``."""
    devices = [] if given.strategy.startswith("model_parallel") else ["--devices", "2,3,4"]
    return [
        *(sys.executable, "-m", "tutti", "chaos", "soak", "--faults", str(given.faults), "--seed", str(given.seed)),
        *(*devices, "--json", "--", "tutti", "train", "digits", "--strategy", given.strategy, "--reproducible"),
        *("--devices", "3", "--workers", "4", "--batch-size", "32", "--steps", str(given.steps)),
        *("--checkpoint-every", "10st", "--eval-every", "none", "--max-restarts", "1000", "--timeout", "60"),
        *("--out", str(folder / "run")),
    ]


def hardware() -> dict[str, Any]:
    """What this ran on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "versions": versions,
    }


def summary(report: dict[str, Any]) -> str:
    """The result in a few lines."""
    return (
        f"{len(report['outcomes'])} of {report['planned']} faults in {report['seconds']:.0f} s: weights "
        f"{report['verdict']}, goodput {report['steps']} ÷ {report['executed']} = {report['goodput']:.3f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the soak and returns its exit code."""
    parser = argparse.ArgumentParser(description="One run that meets many random faults.")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="mirrored")
    parser.add_argument("--save", action="store_true", help="keep results/DATE-soak-STRATEGY.json")
    given = parser.parse_args(argv)
    now, machine = datetime.now(UTC), hardware()
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder)) as mounted:
        words = command(given, Path(folder))
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        return done.returncode
    report = json.loads(done.stdout)
    print(summary(report))
    for problem in report["problems"]:
        print(problem, file=sys.stderr)
    if given.save:
        name = f"{now.date()}-soak-{given.strategy.partition(':')[0]}.json"
        # Where the run was is of no interest to anybody else.
        head = {"benchmark": "soak", "date": now.isoformat(timespec="seconds"), "hardware": machine}
        shown = " ".join(["tutti", *words[3:-1], "run"])
        kept = {key: value for key, value in report.items() if key != "directory"}
        result = {**head, "small_disk": mounted, "command": shown, **kept}
        (Path(__file__).parent / "results" / name).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
