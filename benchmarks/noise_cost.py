"""What ``--noise-every`` costs: steps that measure the gradient noise against steps that do not, in turn, in one run.

    python benchmarks/noise_cost.py --out benchmarks/results/YYYY-MM-DD-noise-cost.json

A step that measures squares the gradient of each micro-batch before it is added, and sends nothing during backward.
Each round times one of both; the cost at an interval of N steps is (ratio - 1) / N of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tutti
from benchmarks.paired import paired_ratio

INTERVAL = 50
BATCH, FEATURES = 256, 256


def mean_loss(net: Any, batch: Any) -> Any:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def seconds(launches: int, rounds: int, workers: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return seconds of a plain and a measured step: [2, launches, rounds]."""
    found = np.empty((2, launches, rounds))
    for launch in range(launches):
        torch.manual_seed(launch)
        net = nn.Sequential(nn.Linear(FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
        count = BATCH * (2 * rounds + 8)
        data = torch.utils.data.TensorDataset(torch.randn(count, FEATURES), torch.randint(0, 10, (count,)))
        run = tutti.prepare(net, "adam:lr=0.001", data, mean_loss, workers=workers, batch_size=BATCH, noise_every=2)
        for step, batch in enumerate(run.epoch(0)):
            start = time.perf_counter()
            run.step(batch)
            took = time.perf_counter() - start
            place = (step - 8) // 2
            if 0 <= place < rounds:
                # Steps 0, 2, 4 … are measured.
                found[1 - step % 2, launch, place] = took
    return found


def main() -> None:
    """Measure, print and write the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, measured = seconds(options.launches, options.rounds, options.workers)
    ratio = paired_ratio(measured, plain)
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "workers": options.workers,
        "batch": BATCH,
        "parameters": 1324042,
        "optimizer": "adam",
        "plain_ms": float(np.median(plain)) * 1e3,
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "interval": INTERVAL,
        "cost": (ratio.median - 1) / INTERVAL,
        "cost_high": (ratio.high - 1) / INTERVAL,
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
