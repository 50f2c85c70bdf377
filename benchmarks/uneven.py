"""What one slow machine costs each strategy: samples a second, and held-out accuracy against time.

    python benchmarks/uneven.py --out uneven             # about ten minutes
    python benchmarks/uneven.py --out uneven --quick     # does it run? its numbers mean nothing

Four devices, real processes, train the digits. Every worker's step takes ``--ms`` milliseconds longer than it needs, in
which its core is free: machines of which the step is mostly their own. On the uneven cluster one of them takes
``--factor`` times as long. An evaluation waits for all ranks, and the time is counted; there is one every
``--eval-every`` epochs. Writes ``uneven.json``, ``uneven.md`` and, with the extra ``plot``, ``uneven.svg`` into
``--out``; a run that is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figure import begin, keep

from tutti.config.strategy_table import TABLE
from tutti.distribution import pip_install

DEVICES, BATCH = 4, 64
STRATEGIES = {
    "mirrored": "mirrored",
    "local SGD, H = 8": "local_sgd:period=8",
    "local SGD after 1 epoch": "local_sgd:period=8,post=1ep",
    "DiLoCo, H = 8": "diloco:period=8",
    "server, synchronous": "parameter_server:mode=sync",
    "server, one backup": "parameter_server:mode=sync,backup=1",
    "server, bounded s = 0": "parameter_server:mode=bounded,staleness=0",
    "server, bounded s = 2": "parameter_server:mode=bounded,staleness=2",
    "server, bounded s = 8": "parameter_server:mode=bounded,staleness=8",
    "server, asynchronous": "parameter_server:mode=async",
    "server, asynchronous, steps=all": "parameter_server:mode=async,steps=all",
}
_COLOURS = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
    "#F0E442",
    "#7F3C8D",
    "#A50F15",
)


@dataclass(frozen=True)
class Cluster:
    """How slow the devices are: milliseconds a step of each but the last, and of that one."""

    name: str
    others: float
    last: float

    @property
    def slow(self) -> str:
        first = "+".join(str(rank) for rank in range(DEVICES - 1))
        return f"rank={first},ms={self.others:g};rank={DEVICES - 1},ms={self.last:g}"


def available() -> dict[str, str]:
    """Those strategies that this version has."""
    return {name: text for name, text in STRATEGIES.items() if text.partition(":")[0] in TABLE}


def train(folder: Path, strategy: str, cluster: Cluster, epochs: int, every: int, seed: int) -> dict[str, Any]:
    """One run; what it came to, and its curve of (seconds, accuracy)."""
    summary = folder / "summary.json"
    if not summary.exists() or json.loads(summary.read_text()).get("exit_code") != 0:
        words = ["train", "digits", "--devices", str(DEVICES), "--workers", str(DEVICES), "--strategy", strategy]
        words += ["--batch-size", str(BATCH), "--epochs", str(epochs), "--eval-every", f"{every}ep"]
        words += ["--optimizer", "adam:lr=0.002", "--seed", str(seed)]
        words += ["--slow", cluster.slow, "--out", str(folder), "--overwrite", "--checkpoint-every", "none"]
        done = subprocess.run([sys.executable, "-m", "tutti", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{strategy}: {done.stderr[-2000:]}")
    found = json.loads(summary.read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["seconds"], line["accuracy"]) for line in lines if line["group"] == "eval"]
    rate = samples_per_second([line for line in lines if line["group"] == "train"], strategy)
    return {"samples_per_second": rate, "accuracy": found["eval"]["accuracy"], "curve": curve}


def samples_per_second(steps: Sequence[Mapping[str, Any]], strategy: str) -> float:
    """Of all workers, while all work: rank 0's clock, and the updates that all had made by then.

    Where every push is an update, it is of one worker's share of the batch.
    """
    each = BATCH / DEVICES if "mode=async" in strategy or "mode=bounded" in strategy else BATCH
    first, last = steps[0], steps[-1]
    return float(each * (last["updates"] - first["updates"]) / (last["seconds"] - first["seconds"]))


def table(rows: Mapping[str, Mapping[str, Any]], clusters: Sequence[Cluster]) -> str:
    """Markdown: samples a second on both clusters, their ratio; when the last evaluation came, and the accuracies."""
    heads = ["samples/s", "s to the end", "accuracy"]
    names = [f"{cluster.name}, {head}" for head in heads for cluster in clusters]
    names.insert(2, "ratio")
    lines = [f"| strategy | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
    for name, row in rows.items():
        found = [row[cluster.name] for cluster in clusters]
        even, uneven = (one["samples_per_second"] for one in found)
        cells = [f"{even:,.0f}", f"{uneven:,.0f}", f"{uneven / even:.2f}"]
        cells += [f"{one['curve'][-1][0]:.1f}" for one in found] + [f"{one['accuracy']:.1%}" for one in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Mapping[str, Mapping[str, Any]], clusters: Sequence[Cluster], caption: str, path: Path) -> None:
    """Held-out accuracy against time, a panel a cluster."""
    figure, panels = begin().subplots(1, len(clusters), figsize=(11, 4.5), sharey=True)
    for panel, cluster in zip(panels, clusters, strict=True):
        for colour, (name, row) in zip(_COLOURS, rows.items(), strict=False):
            panel.plot(
                *zip(*row[cluster.name]["curve"], strict=True), color=colour, marker="o", markersize=3, label=name
            )
        panel.set_title(f"{cluster.name} cluster")
        panel.set_xlabel("seconds of training")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy")
    panels[-1].legend(fontsize=7)
    keep(figure, caption, path)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with 2 on a usage error."""
    parser = argparse.ArgumentParser(description="What one slow machine costs each strategy.")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for runs, table and figure")
    add("--strategies", default="", help="names or parts of them, with + in between; default: all that there are")
    add("--epochs", type=int, default=20)
    add("--eval-every", type=int, default=5, help="epochs")
    add("--ms", type=float, default=20.0, help="milliseconds that a step of every device takes longer")
    add("--factor", type=float, default=3.0, help="of the slow device")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="two epochs: does it run?")
    given = parser.parse_args(argv)
    if given.quick:
        given.epochs, given.eval_every = 2, 1
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study and returns its exit code."""
    given = arguments(argv)
    clusters = [Cluster("even", given.ms, given.ms), Cluster("uneven", given.ms, given.factor * given.ms)]
    wanted = given.strategies.split("+")
    chosen = {name: text for name, text in available().items() if any(part in name for part in wanted)}
    rows: dict[str, dict[str, Any]] = {}
    for name, strategy in chosen.items():
        row = {}
        for cluster in clusters:
            words = (
                cluster.name,
                strategy,
                str(given.epochs),
                str(given.eval_every),
                f"{given.ms:g}",
                f"{given.factor:g}",
                str(given.seed),
            )
            folder = given.out / "runs" / "-".join(words).replace(":", "-").replace(",", "-")
            row[cluster.name] = train(folder, strategy, cluster, given.epochs, given.eval_every, given.seed)
        rows[name] = row
        print(table({name: row}, clusters).splitlines()[-1], flush=True)
    text = table(rows, clusters)
    (given.out / "uneven.md").write_text(text)
    settings = {key: getattr(given, key) for key in ("epochs", "eval_every", "ms", "factor", "seed")}
    (given.out / "uneven.json").write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")
    caption = f"digits, {DEVICES} devices, batch 64, {given.ms:g} ms a step, the slow one {given.factor:g} times that"
    try:
        draw(rows, clusters, caption, given.out / "uneven.svg")
    except ImportError:
        print(f"no figure: {pip_install('plot')}", file=sys.stderr)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
