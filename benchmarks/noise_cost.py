"""What ``--noise-every`` costs: steps that measure the gradient noise against steps that do not, in turn, in one run.

    python benchmarks/noise_cost.py --out benchmarks/results/YYYY-MM-DD-noise-cost.json

A step that measures squares the gradient of each micro-batch before it is added, and sends nothing during backward.
Each round times one of both, in seconds and in CPU seconds of the process; the cost at an interval of N steps is
(ratio - 1) / N of a step. Two sizes: shares of 64 samples, and of 8, where the squares weigh the most.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import paired_ratio
from result_file import machine_facts, write_result
from torch import nn

import tutti

INTERVAL = 50
FEATURES = 256
SIZES = {"4 workers of 64 samples": (4, 256), "8 workers of 8 samples": (8, 64)}
"""Workers and global batch."""


def mean_loss(net: Any, batch: Any) -> Any:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def seconds(launches: int, rounds: int, workers: int, batch_size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return elapsed and CPU seconds of a plain and a measured step: [2 clocks, 2, launches, rounds]."""
    clocks = (time.perf_counter, time.process_time)
    found = np.empty((2, 2, launches, rounds))
    for launch in range(launches):
        torch.manual_seed(launch)
        count = batch_size * (2 * rounds + 8)
        data = torch.utils.data.TensorDataset(torch.randn(count, FEATURES), torch.randint(0, 10, (count,)))
        options = {"workers": workers, "batch_size": batch_size, "noise_every": 2}
        run = tutti.prepare(network(), "adam:lr=0.001", data, mean_loss, **options)
        for step, batch in enumerate(run.epoch(0)):
            start = [clock() for clock in clocks]
            run.step(batch)
            took = [clock() - began for clock, began in zip(clocks, start, strict=True)]
            place = (step - 8) // 2
            if 0 <= place < rounds:
                # Steps 0, 2, 4 … are measured.
                found[:, 1 - step % 2, launch, place] = took
    return found


def main() -> None:
    """Measure, print and write the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        **machine_facts(),
        "parameters": sum(p.numel() for p in network().parameters()),
        "optimizer": "adam",
        "interval": INTERVAL,
        "sizes": {},
    }
    for name, (workers, batch_size) in SIZES.items():
        found = seconds(options.launches, options.rounds, workers, batch_size)
        row: dict[str, Any] = {"workers": workers, "batch": batch_size}
        for clock, (plain, measured) in zip(("elapsed", "cpu"), found, strict=True):
            ratio = paired_ratio(measured, plain)
            row[clock] = {
                "plain_ms": float(np.median(plain)) * 1e3,
                "ratio": ratio.median,
                "low": ratio.low,
                "high": ratio.high,
                "cost": (ratio.median - 1) / INTERVAL,
                "cost_high": (ratio.high - 1) / INTERVAL,
            }
        result["sizes"][name] = row
    print(json.dumps(result, indent=1))
    write_result(result, options.out)


if __name__ == "__main__":
    main()
