"""What others do under the faults of tutti's own suite: torch.save, DCP, safetensors, torchrun, stock DDP, bare Gloo.

    python benchmarks/faults_peers.py                  # every fault ten times, a thousand bit flips; half an hour
    python benchmarks/faults_peers.py --runs 1         # does it run?
    python benchmarks/faults_peers.py --only jobs      # processes; or files
    python benchmarks/faults_peers.py --save           # keeps results/DATE-peers-files.json and DATE-peers-jobs.json

Files are played in ``peer_files.py``, with tutti's own format in the same test; processes in ``peer_jobs.py``, beside
which stand the rows of ``make faults``. ``reliability.py`` makes the tables of docs/reliability.md from the result.
Real processes, real signals; what others do is counted, and nothing is judged: the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peer_files
import peer_jobs
from soak import hardware

HALVES = {"files": peer_files.play, "jobs": peer_jobs.play}


def main(argv: Sequence[str] | None = None) -> int:
    """Plays everything and keeps it."""
    parser = argparse.ArgumentParser(description="What others do under the same faults.")
    parser.add_argument(
        "--runs", type=int, default=10, help="times each fault is played; a hundred bits are flipped each"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=tuple(HALVES), help="one half")
    parser.add_argument(
        "--save", action="store_true", help="keep results/DATE-peers-files.json and DATE-peers-jobs.json"
    )
    given = parser.parse_args(argv)
    if given.runs < 1:
        parser.error("--runs is below 1")
    # DCP tells of every file that it cannot read.
    warnings.simplefilter("ignore")
    logging.disable()
    for half in [given.only] if given.only else HALVES:
        now, machine = datetime.now(UTC), hardware()
        report: dict[str, Any] = {
            "benchmark": f"peers-{half}", "date": now.isoformat(timespec="seconds"), "runs": given.runs,
            "seed": given.seed, "hardware": machine, "faults": {},
        }  # fmt: skip
        for fault, found in HALVES[half](given.runs, given.seed):
            report["faults"][fault] = found
            print(f"{fault}: {json.dumps(found, ensure_ascii=False)}", flush=True)
            if not given.save:
                continue
            # After each, so that a run that is cut short leaves what it has found.
            file = Path(__file__).parent / "results" / f"{now.date()}-peers-{half}.json"
            file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
