"""What ghost batch norm costs beside plain batch norm: forward + backward, batch 512, ghosts of 32, paired.

    python benchmarks/ghost_batch_norm.py            # about two minutes
    python benchmarks/ghost_batch_norm.py --save     # also to benchmarks/results/DATE-ghost-batch-norm.json

Time ÷ plain batch norm with its 95 % interval, for the compiled loops, for PyTorch's own kernels a ghost at a time
(what is used without a compiler), and for the plain one against itself. Exit code 9 where the compiled one is slower
for sure.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import order, paired_ratio
from torch import Tensor, nn

from tutti.errors import ExitCode
from tutti.launcher import malloc_tuning
from tutti.nn import ghost

SHAPES = ((512, 16, 32, 32), (512, 64, 32, 32), (512, 64, 16, 16), (512, 128, 8, 8))
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZE = 32


def contestants(x: Tensor, dy: Tensor) -> dict[str, Callable[[], None]]:
    """Name → one forward and backward. The first is what the others are compared with."""
    plain = nn.BatchNorm2d(x.shape[1])
    compiled, own = (ghost.GhostBatchNorm(copy.deepcopy(plain), SIZE) for _ in range(2))

    def through(norm: nn.Module, kernels: bool = True) -> Callable[[], None]:
        def run() -> None:
            x.grad = None
            found = ghost._kernels
            if not kernels:
                ghost._kernels = lambda dtype: ()  # type: ignore[assignment]
            try:
                norm(x).backward(dy)
            finally:
                ghost._kernels = found

        return run

    return {
        "plain": through(plain),
        "plain again": through(copy.deepcopy(plain)),
        "ghost": through(compiled),
        "ghost, PyTorch's own": through(own, kernels=False),
    }


def measure(shape: tuple[int, ...], memory: str, dtype: str, rounds: int) -> dict[str, Any]:
    """Ratios of one shape, layout and precision."""
    x, dy = (torch.randn(shape).to(DTYPES[dtype]).contiguous(memory_format=FORMATS[memory]) for _ in range(2))
    runs = contestants(x.requires_grad_(), dy)
    times = {name: np.zeros((1, rounds)) for name in runs}
    for run in runs.values():
        run()
    for turn in range(rounds):
        for index in order(len(runs), 0, 0, turn):
            name = list(runs)[index]
            start = time.perf_counter()
            runs[name]()
            times[name][0, turn] = time.perf_counter() - start
    found = {name: paired_ratio(taken, times["plain"]) for name, taken in times.items() if name != "plain"}
    return {
        "plain_ms": float(np.median(times["plain"]) * 1e3),
        **{name: [ratio.median, ratio.low, ratio.high] for name, ratio in found.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Cost of ghost batch norm beside plain batch norm.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    # As in every run: without it, the kernel's hand-out of fresh pages is what is measured.
    malloc_tuning.keep_freed_memory()
    rows = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for memory in FORMATS:
                for shape in SHAPES:
                    row = {"threads": threads, "dtype": dtype, "memory": memory, "shape": shape}
                    row |= measure(shape, memory, dtype, given.rounds)
                    rows.append(row)
                    ratios = "  ".join(f"{n} {row[n][0]:.2f} [{row[n][1]:.2f}, {row[n][2]:.2f}]" for n in list(row)[5:])
                    print(f"{threads} thread(s) {dtype} {memory:13} {shape!s:20} {row['plain_ms']:7.1f} ms  {ratios}")
    slower = [row for row in rows if row["ghost"][1] > 1.0]
    print(f"{len(rows) - len(slower)} of {len(rows)} no slower than plain batch norm")
    if given.save:
        now = datetime.now(UTC)
        report = {"benchmark": "ghost_batch_norm", "date": now.isoformat(timespec="seconds"), "size": SIZE}
        report |= {"torch": torch.__version__, "machine": platform.processor() or platform.machine(), "rows": rows}
        path = Path(__file__).parent / "results" / f"{now.date()}-ghost-batch-norm.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(ExitCode.THRESHOLD if slower else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
