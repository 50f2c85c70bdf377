"""What a step costs whose gradient is a few rows of a large table: through tutti, and through DDP by hand.

    python benchmarks/sparse_rows.py                      # two workloads
    python benchmarks/sparse_rows.py --quick              # does it run? its times mean nothing
    python benchmarks/sparse_rows.py --save               # keeps results/DATE-sparse-rows.json

A table of 10⁶ × 64 with sparse gradients, 256 MB in float32, and a linear layer; a rank's batch reads 4,096 words,
drawn evenly or by Zipf's law. Both exchange indices and values by all-gather. Processes, rounds and ratios are those of
``step_tax.py``. Exit codes: 0, 2 usage, 9 where tutti's 95 % interval lies wholly above ``--limit``, or weights differ.

There is no result yet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from models import Batch, Workload
from step_tax import failures, hardware, run_workload
from torch import Tensor, nn

from tutti.errors import ExitCode

ROWS, WIDTH, WORDS, SAMPLES = 1_000_000, 64, 16, 256
NAMES = ("ddp", "ddp-again", "tutti-step", "tutti-loop")
Draw = Callable[[int, torch.Generator], Tensor]


class Bag(nn.Module):
    """[samples, words] to [samples, 10]: the mean of rows of a table, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 10)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(words).mean(1))
        return scores


def evenly(count: int, generator: torch.Generator) -> Tensor:
    """Row numbers, all alike probable."""
    return torch.randint(0, ROWS, (count,), generator=generator)


def by_zipf(count: int, generator: torch.Generator) -> Tensor:
    """Row numbers with probability about 1 ÷ (number + 1), by the inverse of its integral."""
    return (torch.exp(torch.rand(count, generator=generator) * torch.log(torch.tensor(ROWS + 1.0))) - 1).long()


def labelled(draw: Draw, samples: int, generator: torch.Generator) -> Batch:
    """A batch of words with labels."""
    words = draw(samples * WORDS, generator).view(samples, WORDS)
    return words, torch.randint(0, 10, (samples,), generator=generator)


def workloads() -> list[Workload]:
    """The two workloads."""
    sgd = partial(torch.optim.SGD, lr=0.1)
    return [
        Workload(name, Bag, partial(labelled, draw), sgd, SAMPLES, launches=3, rounds=20, steps=10, lead=2)
        for name, draw in (("even", evenly), ("zipf", by_zipf))
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one launch of two rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1.05, help="largest ratio to DDP")
    parser.add_argument("--save", action="store_true", help="keep the result, dated, in results/")
    given = parser.parse_args()
    works = workloads()
    if given.quick:
        works = [replace(work, launches=1, rounds=2, steps=1) for work in works]
    found = {work.name: run_workload(work, NAMES, given.seed) for work in works}
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "table": {"rows": ROWS, "width": WIDTH, "words_per_rank": SAMPLES * WORDS},
        "limit": given.limit,
        "workloads": found,
    }
    for name, part in found.items():
        for who, row in part["contestants"].items():
            print(f"{name:6} {who:12} {row['ms']:8.2f} ms {row['ratio']:6.2f} [{row['low']:.2f}, {row['high']:.2f}]")
    if given.save:
        folder = Path(__file__).parent / "results"
        (folder / f"{datetime.now(UTC):%Y-%m-%d}-sparse-rows.json").write_text(json.dumps(report, indent=1) + "\n")
    wrong = failures(found, None if given.quick else given.limit)
    print("\n".join(wrong), file=sys.stderr)
    return ExitCode.THRESHOLD if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
