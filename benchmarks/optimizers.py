"""How far is an optimizer's step from the time that its bytes need? Ours, others' and PyTorch's, in one process.

    python benchmarks/optimizers.py                        # 1 and 2 threads, about five minutes
    python benchmarks/optimizers.py --quick                # does it run? its times mean nothing
    python benchmarks/optimizers.py --optimizers lamb --threads 1
    python benchmarks/optimizers.py --save                 # keeps results/DATE-optimizers.json

The tensors are ResNet-50's, 161 with 25.6 million float32. Every round measures ``a += b`` over 256 MiB, which gives
the memory's speed at that moment, and then every contestant, in random order. The limit of an optimizer is the floats
that it must read and write at that speed. Exit codes: 0, 2 usage, 9 where the 95 % interval of one of ours lies
wholly above ``--limit`` times that. Packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import order, paired_ratio
from step_tax import hardware, listed
from torch import nn

from tutti.errors import ExitCode
from tutti.native import compiled_passes

Make = Callable[[Any, list[nn.Parameter]], torch.optim.Optimizer]
LIMIT = 1.5
ELEMENTS = 64 << 20
RATE = 1e-6
DECAY = 1e-4


@dataclass(frozen=True)
class Contestant:
    """One implementation of an optimizer.

    Attributes:
        family: what it is an implementation of.
        module: where it is imported from; another package's may be missing.
        make: from the module and the parameters.
        ours: whether it is judged.
    """

    family: str
    module: str
    make: Make
    ours: bool = False


# Floats a parameter that must move: norms need a first pass over what they are taken of.
FLOATS = {"lars": 7, "lamb": 10, "novograd": 6, "adam": 7}


def _ours(family: str, name: str, **options: Any) -> Contestant:
    def make(module: Any, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(module, name)(params, lr=RATE, weight_decay=DECAY, **options)
        return made

    return Contestant(family, "tutti.optim", make, ours=options.get("fused") is not False)


CONTESTANTS: dict[str, Contestant] = {
    "tutti LARS": _ours("lars", "LARS"),
    "tutti LARS, not compiled": _ours("lars", "LARS", fused=False),
    "timm Lars": Contestant("lars", "timm.optim", lambda m, p: m.Lars(p, lr=RATE, momentum=0.9, weight_decay=DECAY)),
    "pytorch-optimizer LARS": Contestant(
        "lars", "pytorch_optimizer", lambda m, p: m.LARS(p, lr=RATE, momentum=0.9, weight_decay=DECAY)
    ),
    "torch-optimizer LARS": Contestant(
        "lars", "torch_optimizer", lambda m, p: m.LARS(p, lr=RATE, momentum=0.9, weight_decay=DECAY)
    ),
    "tutti LAMB": _ours("lamb", "LAMB"),
    "tutti LAMB, not compiled": _ours("lamb", "LAMB", fused=False),
    "timm Lamb": Contestant(
        "lamb", "timm.optim", lambda m, p: m.Lamb(p, lr=RATE, weight_decay=DECAY, max_grad_norm=None)
    ),
    "pytorch-optimizer Lamb": Contestant(
        "lamb", "pytorch_optimizer", lambda m, p: m.Lamb(p, lr=RATE, weight_decay=DECAY, max_grad_norm=0.0)
    ),
    "torch-optimizer Lamb": Contestant(
        "lamb", "torch_optimizer", lambda m, p: m.Lamb(p, lr=RATE, weight_decay=DECAY, debias=True)
    ),
    "tutti NovoGrad": _ours("novograd", "NovoGrad"),
    "tutti NovoGrad, not compiled": _ours("novograd", "NovoGrad", fused=False),
    "timm NvNovoGrad": Contestant("novograd", "timm.optim", lambda m, p: m.NvNovoGrad(p, lr=RATE, weight_decay=DECAY)),
    "pytorch-optimizer NovoGrad": Contestant(
        "novograd", "pytorch_optimizer", lambda m, p: m.NovoGrad(p, lr=RATE, weight_decay=DECAY)
    ),
    "torch-optimizer NovoGrad": Contestant(
        "novograd", "torch_optimizer", lambda m, p: m.NovoGrad(p, lr=RATE, betas=(0.95, 0.98), weight_decay=DECAY)
    ),
    "torch Adam, fused": Contestant("adam", "torch.optim", lambda m, p: m.Adam(p, lr=RATE, fused=True)),
    "torch Adam, foreach": Contestant("adam", "torch.optim", lambda m, p: m.Adam(p, lr=RATE, foreach=True)),
    "torch Adam": Contestant("adam", "torch.optim", lambda m, p: m.Adam(p, lr=RATE, foreach=False)),
}


def shapes(quick: bool = False) -> list[tuple[int, ...]]:
    """ResNet-50's parameters in order: convolutions, scales and shifts of norms, the classifier (1512.03385)."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels = [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            kernels += [(4 * width, inputs, 1, 1)] if block == 0 else []
            found += [shape for kernel in kernels for shape in (kernel, kernel[:1], kernel[:1])]
            inputs = 4 * width
    found += [(1000, 2048), (1000,)]
    return [tuple(max(1, size // 16) for size in shape) for shape in found] if quick else found


def parameters(quick: bool) -> list[nn.Parameter]:
    """One set for all contestants, with gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter(0.01 * torch.randn(shape)) for shape in shapes(quick)]
    for parameter in made:
        parameter.grad = 0.01 * torch.randn_like(parameter)
    return made


def installed(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Contestants that can be imported, and why the others cannot."""
    able, unable = [], {}
    for name in names:
        try:
            import_module(CONTESTANTS[name].module)
            able.append(name)
        except Exception as error:
            unable[name] = f"{type(error).__name__}: {error}"
    return able, unable


def measure(names: Sequence[str], threads: int, rounds: int, seed: int, launch: int, quick: bool) -> list[list[float]]:
    """Seconds, [rounds, contestants + 1]: a step of each, and a += b. Runs in a process of its own."""
    torch.set_num_threads(threads)
    params = parameters(quick)
    makers = [CONTESTANTS[name] for name in names]
    # Their states are made in random order too: who comes first has another place in memory.
    team = {i: makers[i].make(import_module(makers[i].module), params) for i in order(len(names), seed, launch, rounds)}
    one, other = torch.zeros(ELEMENTS >> (8 * quick)), torch.ones(ELEMENTS >> (8 * quick))
    actions = [*(team[i].step for i in range(len(names))), lambda: one.add_(other)]
    for action in actions:
        action()
        action()
    gc.collect()
    gc.freeze()
    times = [[0.0] * len(actions) for _ in range(rounds)]
    for turn in range(rounds):
        for index in order(len(actions), seed, launch, turn):
            began = time.perf_counter()
            actions[index]()
            times[turn][index] = time.perf_counter() - began
    return times


def judged(names: Sequence[str], times: np.ndarray[Any, Any], moved: int, seed: int) -> dict[str, Any]:
    """A row a contestant: milliseconds, time ÷ limit, and for ours time ÷ that of the fastest other.

    Args:
        times: [launches, rounds, contestants + 1] seconds.
        moved: bytes that a += b moves.
    """
    elements = sum(int(np.prod(shape)) for shape in shapes())
    a_float = 4 * elements * times[:, :, -1] / moved
    rows: dict[str, Any] = {}
    for index, name in enumerate(names):
        made = CONTESTANTS[name]
        ratio = paired_ratio(times[:, :, index], FLOATS[made.family] * a_float, seed)
        rows[name] = {
            "family": made.family, "ours": made.ours, "ms": 1e3 * float(np.median(times[:, :, index])),
            "of_limit": ratio.median, "low": ratio.low, "high": ratio.high,
        }  # fmt: skip
        others = [i for i, n in enumerate(names) if CONTESTANTS[n].family == made.family and "tutti" not in n]
        if made.ours and others:
            best = min(others, key=lambda i: float(np.median(times[:, :, i])))
            against = paired_ratio(times[:, :, index], times[:, :, best], seed)
            rows[name] |= {"fastest_other": names[best], "of_fastest_other": against.median}
            rows[name] |= {"of_fastest_low": against.low, "of_fastest_high": against.high}
    return rows


def failures(results: Mapping[str, Mapping[str, Any]], limit: float | None) -> list[str]:
    """Which of ours are too far from the memory's limit: a sentence each. ``limit`` None: times are not judged."""
    return [
        f"{name}, {threads} threads: {row['low']:.2f} to {row['high']:.2f} times the memory's limit"
        for threads, rows in results.items()
        for name, row in rows.items()
        if limit is not None and row["ours"] and row["low"] > limit
    ]


def table(threads: int, bandwidth: float, rows: Mapping[str, Any]) -> str:
    """The rows as text."""
    lines = [
        f"{threads} thread{'s' * (threads > 1)}, a += b at {bandwidth / 1e9:.1f} GB/s",
        f"  {'':29} {'ms':>7}  time ÷ limit          time ÷ fastest other",
    ]
    for name, row in rows.items():
        text = f"  {name:29} {row['ms']:7.2f}  {row['of_limit']:5.2f} [{row['low']:.2f} - {row['high']:.2f}]"
        if "fastest_other" in row:
            text += f"   {row['of_fastest_other']:5.2f} [{row['of_fastest_low']:.2f} - {row['of_fastest_high']:.2f}]"
            text += f" {row['fastest_other']}"
        lines.append(text)
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="Time of an optimizer's step over the time that its bytes need.")
    add = parser.add_argument
    families = list(FLOATS)
    add("--optimizers", type=lambda t: listed(families, t), default=families, help=f"some of {','.join(families)}")
    add("--threads", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2], help="default: 1,2")
    add("--launches", type=int, default=3, help="processes to measure in (default: 3)")
    add("--rounds", type=int, default=15, help="rounds of a launch, at least 2 (default: 15)")
    add("--limit", type=float, default=LIMIT, help=f"largest allowed lower end of ours (default: {LIMIT})")
    add("--seed", type=int, default=0, help="of the order and the resampling")
    add("--quick", action="store_true", help="small tensors, one launch, two rounds; times are not judged")
    add("--json", type=Path, help="write the report there")
    add("--save", action="store_true", help="write it to benchmarks/results/DATE-optimizers.json as well")
    given = parser.parse_args(argv)
    if given.rounds < 2 or given.launches < 1 or min(given.threads) < 1:
        parser.error("--rounds is at least 2, --launches and --threads at least 1")
    if given.save and given.quick:
        parser.error("--save keeps results, and those of --quick mean nothing")
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json {given.json}: there is no folder {given.json.parent}")
    if given.quick:
        given.launches, given.rounds = 1, 2
    return given


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Runs the benchmark and returns its exit code."""
    given = arguments(argv)
    names, unable = installed([name for name, made in CONTESTANTS.items() if made.family in given.optimizers])
    for name, why in unable.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    compiled = compiled_passes.load_kernels() is not None
    if not compiled:
        print("there is no C++ compiler: tutti's own are not compiled", file=sys.stderr)
    now = datetime.now(UTC)
    report: dict[str, Any] = {
        "benchmark": "optimizers", "date": now.isoformat(timespec="seconds"), "quick": given.quick, "seed": given.seed,
        "limit": given.limit, "launches": given.launches, "rounds": given.rounds, "compiled": compiled,
        "tensors": len(shapes()), "elements": sum(int(np.prod(shape)) for shape in shapes()),
        "hardware": hardware(), "left_out": unable, "threads": {},
    }  # fmt: skip
    moved = 12 * (ELEMENTS >> (8 * given.quick))
    for threads in given.threads:
        launches = []
        for launch in range(given.launches):
            with mp.get_context("spawn").Pool(1) as process:
                task = (names, threads, given.rounds, given.seed, launch, given.quick)
                launches.append(process.apply(measure, task))
        times = np.array(launches)
        rows = judged(names, times, moved, given.seed)
        bandwidth = moved / float(np.median(times[:, :, -1]))
        report["threads"][threads] = {"bytes_per_second": round(bandwidth), "contestants": rows}
        print(table(threads, bandwidth, rows), flush=True)
    results = {str(n): part["contestants"] for n, part in report["threads"].items()}
    report["failures"] = failures(results, None if given.quick else given.limit)
    text = json.dumps(report, indent=2) + "\n"
    if given.json:
        given.json.write_text(text)
    if given.save:
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{now.date()}-optimizers.json").write_text(text)
    for line in report["failures"]:
        print(line, file=sys.stderr)
    return ExitCode.THRESHOLD if report["failures"] else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
