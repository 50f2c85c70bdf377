"""Back-test ``tutti simulate`` on real runs between network namespaces.

    sudo make backtest-net                                  # about an hour on two idle cores; goes on where it stopped
    sudo python benchmarks/backtest_net.py --only pipeline  # cases whose name contains the text
    sudo python benchmarks/backtest_net.py --save           # also keep results/DATE-backtest-net.json, and the page

Every node is a network namespace with a link of limited rate (``limited_links.cluster``). Runs are real ``tutti
train`` jobs with real sockets; only computing is slept (``slept_layers``), so that two cores carry sixteen ranks.
Calibrated are the machine (``tutti bench`` of one device, of two ranks of a node, of the link between two nodes, and of
the backend's collectives over four), and the cost of a layer's call beside its sleep, from one step: of one device, or
for pipelines of two stages at one micro-batch. Everything else is predicted. Needs Linux, root and iproute2; elsewhere
it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limited_links import cluster
from namespace_ranks import run_ranks, tutti_command
from slept_layers import Slept

from tutti.comm.collective_schedules import LinkCost
from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.errors import ExitCode
from tutti.planning.planned_run import PlannedRun

if TYPE_CHECKING:
    from tutti.workload.machine_file import Curve, Machine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "backtest-net.md"
TASK = str(Path(__file__).with_name("slept_layers.py")) + ":task"
OPTIMIZER = "sgd:lr=0.01"
MBIT = 50.0
TCP = ("net.ipv4.tcp_congestion_control=reno",)
"""Known to every kernel, and without losses only a window. BBR takes the pauses of a step for a slower link."""
SEGMENTS = 3
"""Packets that a socket hands to its link at once: at this rate the kernel's usual 64 KiB block it for 10 ms."""
WARM = 3
"""Steps of a run that do not count: they meet cold connections and allocate memory."""

SMALL = 4
"""Nodes of the measured size, on which the backend's collectives are benched."""
WIDE, NARROW = Slept(2, 40, 4096), Slept(2, 40, 512)
STAGED = Slept(16, 4, 16, 2048)
"""Models of 8 MiB, for what shares links out, and of 1 MiB, for what sends all to one node; layers of pipelines."""

BARS = {"measured size": 3.0, "two times": None, "four times": 5.0, "pipeline": 5.0, "uneven": 10.0}
"""Bars on the mean error by protocol, in %."""


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        protocol: what is asked for: a key of ``BARS``, or ``calibration``.
        name: of the way to share work, in tables.
        strategy: of ``tutti train``.
        nodes: number of namespaces.
        each: ranks of a node.
        slept: sizes of the model.
        samples: of a rank's logical worker in a step.
        workers: logical workers; one for pipelines.
        slow: ``--slow``.
        slow_node: share of the even rate that the last node's link has.
        steps: that count.
    """

    protocol: str
    name: str
    strategy: str
    nodes: int
    each: int = 1
    slept: Slept = WIDE
    samples: int = 1
    workers: int | None = None
    slow: str | None = None
    slow_node: float | None = None
    steps: int = 5

    @property
    def key(self) -> str:
        """Names the run in the record: all that its seconds depend on."""
        return json.dumps(
            {"mbit": MBIT, "tcp": TCP, "segments": SEGMENTS, "warm": WARM, **asdict(self), "protocol": "", "name": ""},
            sort_keys=True,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.each

    @property
    def virtual(self) -> int:
        """Number of virtual stages; 1 of a run without stages."""
        return self.strategy.count("blocks.") + 1

    @property
    def title(self) -> str:
        """The run in words."""
        parts = [f"{self.nodes} nodes" if self.nodes > 1 else "1 node", f"{self.each} ranks each" * (self.each > 1)]
        parts += [
            f"slow: {self.slow}" if self.slow else "",
            f"one link at {self.slow_node:g} ×" if self.slow_node else "",
        ]
        return f"{self.strategy}, {', '.join(filter(None, parts))}"

    def config(self) -> PlannedRun:
        """The run as ``tutti train`` and the simulator take it."""
        return PlannedRun(
            strategy=self.strategy,
            devices=str(self.ranks),
            batch_size=self.samples * (self.workers or self.ranks),
            workers=self.workers,
            optimizer=OPTIMIZER,
            slow=self.slow,
            data=str(self.slept),
        )


def all_cases() -> list[Case]:
    """Return every run, calibrations first."""
    cases = [Case("calibration", "single", "single", 1, slept=slept) for slept in (WIDE, NARROW)]
    # The same layers in two and in four passes a micro-batch: what a pass costs, and what a layer.
    cases += [pipeline("calibration", schedule, 2, 1) for schedule in ("gpipe", "interleaved")]
    shared = [("ring", "mirrored:algorithm=ring"), ("halving", "mirrored:algorithm=halving")]
    shared += [("backend", "mirrored:algorithm=native"), *((f"sharded {n}", f"sharded:stage={n}") for n in (1, 2, 3))]
    one = [("tree", "mirrored:algorithm=tree"), ("central", "mirrored:algorithm=central")]
    one += [(f"servers={n}", f"parameter_server:servers={n}") for n in (1, 2)]
    sizes = {"measured size": 4, "two times": 8, "four times": 16}
    for protocol, nodes in sizes.items():
        cases += [Case(protocol, name, text, nodes) for name, text in shared]
        cases += [Case(protocol, name, text, nodes, slept=NARROW) for name, text in one]
        cases.append(Case(protocol, "hierarchical", "mirrored:algorithm=hierarchical", nodes // 2, each=2))
        cases.append(Case(protocol, "central storage", "central_storage", 1, each=nodes // 2))
    late = "rank=1,ms=300"
    for name, text in [*shared[:3], shared[-1]]:
        cases.append(Case("uneven", name, text, 4, slow=late))
    cases += [Case("uneven", name, text, 4, slept=NARROW, slow=late) for name, text in one]
    cases += [Case("uneven", name, text, 4, slow_node=0.5) for name, text in [shared[0], shared[2], shared[-1]]]
    cases.append(pipeline("uneven", "1f1b", 4, 4, slow="rank=1,ms=100"))
    for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        for stages in (2, 4, 8):
            cases += [pipeline("pipeline", schedule, stages, micro) for micro in (1, 4, 16)]
    # What was calibrated with is not predicted.
    known = {case.key for case in cases if case.protocol == "calibration"}
    return [case for case in cases if case.protocol == "calibration" or case.key not in known]


def pipeline(protocol: str, schedule: str, stages: int, micro: int, slow: str | None = None) -> Case:
    """Return a pipeline of one rank a node, with stages of as many layers and micro-batches of one sample.

    >>> pipeline("pipeline", "interleaved", 4, 2).strategy
    'pipeline:schedule=interleaved,micro_batches=2,cuts=blocks.2+blocks.4+blocks.6+blocks.8+blocks.10+blocks.12+blocks.14'
    """
    virtual = stages * (2 if schedule == "interleaved" else 1)
    cuts = "+".join(f"blocks.{place * STAGED.layers // virtual}" for place in range(1, virtual))
    text = f"pipeline:schedule={schedule},micro_batches={micro},cuts={cuts}"
    steps = 4 if micro == 16 else 5
    return Case(protocol, schedule, text, stages, 1, STAGED, micro, 1, slow, steps=steps)


# --- measure ------------------------------------------------------------------------------------------------------


class Record:
    """Lines of JSON that keep what was measured, so that a measurement goes on where it stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, list[float]] = {}
        self.machine: Mapping[str, Any] | None = None
        self.loads: dict[str, float] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            self._take(json.loads(line))

    def _take(self, line: Mapping[str, Any]) -> None:
        if "machine" in line:
            self.machine = line["machine"]
        else:
            self.seconds[line["case"]] = line["seconds"]
            self.loads[line["case"]] = line["load"]

    def keep(self, line: Mapping[str, Any]) -> None:
        """Append a measurement."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {**line, "load": round(os.getloadavg()[0], 2)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)


def measure_machine(folder: Path) -> dict[str, Any]:
    """Return the content of ``machine.json``, measured in namespaces by the means of ``tutti bench``."""
    figures: dict[str, Any] = {}
    curves: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    jobs = ((("device", "optimizer"), 1, 1), (("collectives",), 1, 2), (("links",), 2, 1))
    for parts, nodes, each in jobs:
        with (
            cluster(nodes, MBIT, "2s", settings=TCP, segments=SEGMENTS) as hosts,
            tempfile.TemporaryDirectory() as scratch,
        ):
            run_ranks(hosts, each, partial(_bench, parts, Path(scratch)), folder / parts[0], 300)
            content = json.loads((Path(scratch) / "facts.json").read_text(encoding="utf-8"))
        figures |= content["figures"]
        curves |= content["curves"]
        facts = facts or content["device"]
    with cluster(SMALL, MBIT, "2s", settings=TCP, segments=SEGMENTS) as hosts, tempfile.TemporaryDirectory() as scratch:
        run_ranks(hosts, 1, partial(_bench_over_nodes, Path(scratch)), folder / "nodes", 300)
        content = json.loads((Path(scratch) / "facts.json").read_text(encoding="utf-8"))
    curves |= {f"nodes/{name}": curve for name, curve in content["curves"].items()}
    host = {"name": "namespaces", "cpu": cpu_model(), "cores": usable_cores(), "versions": {"tutti": VERSION}}
    parts_done = [part for parts, *_ in jobs for part in parts]
    return {"host": host, "device": facts, "parts": parts_done, "figures": figures, "curves": curves}


def _bench(parts: Sequence[str], directory: Path) -> None:
    from tutti.workload.bench import bench_rank

    bench_rank(parts, "cpu", time.monotonic(), directory, directory)


def _bench_over_nodes(directory: Path) -> None:
    """Measure collectives as ``tutti bench`` does, of the sizes that the cases send."""
    from tutti.launcher import context
    from tutti.workload.bench_ranks import bench_collectives
    from tutti.workload.bench_timing import Findings

    world, found = context.init("cpu"), Findings()
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    bench_collectives(world, found, kinds, [2**power for power in (10, 12, 14, 16, 18, 20, 22)])
    if world.identity.rank == 0:
        (directory / "facts.json").write_text(json.dumps(found.content()), encoding="utf-8")
    context.shutdown()


def measure_case(case: Case, folder: Path) -> list[float]:
    """Return the seconds of each step of a real run, from the clock of rank 0, without the first ones."""
    config = case.config()
    out = folder / "run"
    words = ["train", TASK, "--data", str(config.data), "--strategy", config.strategy, "--device", "cpu"]
    words += ["--batch-size", str(config.batch_size), "--optimizer", OPTIMIZER, "--steps", str(case.steps + WARM)]
    words += ["--eval-every", "none", "--checkpoint-every", "none", "--threads", "1", "--out", str(out), "--overwrite"]
    words += ["--workers", str(case.workers)] if case.workers else []
    words += ["--slow", case.slow] if case.slow else []
    shutil.rmtree(folder, ignore_errors=True)
    uneven = {case.nodes - 1: MBIT * case.slow_node} if case.slow_node else None
    with cluster(case.nodes, MBIT, "2s", uneven, TCP, SEGMENTS) as hosts:
        run_ranks(hosts, case.each, partial(tutti_command, words), folder, 400)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock = [line["seconds"] for line in lines if line["group"] == "train"]
    return [after - before for before, after in zip(clock[WARM - 1 :], clock[WARM:], strict=False)]


def measure(cases: Sequence[Case], record: Record, folder: Path) -> dict[str, str]:
    """Measure what the record lacks; return why by the key of each case that failed."""
    if record.machine is None:
        print("measuring the machine", flush=True)
        record.keep({"machine": measure_machine(folder / "bench")})
    failed = {}
    for number, case in enumerate(cases, 1):
        if case.key in record.seconds:
            continue
        begin = time.perf_counter()
        try:
            record.keep({"case": case.key, "seconds": measure_case(case, folder / "case")})
        except (RuntimeError, OSError, ValueError) as error:
            failed[case.key] = str(error)
            print(f"[{number}/{len(cases)}] {case.title}: FAILED: {error}", flush=True)
            continue
        median = statistics.median(record.seconds[case.key])
        spent = time.perf_counter() - begin
        print(f"[{number}/{len(cases)}] {case.title}: {median:.3f} s a step ({spent:.0f} s)", flush=True)
    return failed


# --- predict ------------------------------------------------------------------------------------------------------


@dataclass
class Predictor:
    """Predictions of the simulator for slept layers, from what was measured on one or two nodes.

    Attributes:
        machine: as ``tutti bench`` measured it.
        spread: standard deviation of one device's steps over their mean: the jitter of slept computing.
        calls: by model, seconds of a layer's call beside its sleep.
        passes: by model, seconds of a stage's forward or backward of a micro-batch beside its layers: the schedule, the
            start of autograd's backward, and the hand-over of tensors.
    """

    machine: Machine
    spread: float = 0.0
    calls: dict[Slept, float] = field(default_factory=dict)
    passes: dict[Slept, float] = field(default_factory=dict)
    _sizes: dict[Any, Any] = field(default_factory=dict)

    def calibrate(self, slept: Slept, runs: Mapping[Case, Sequence[float]]) -> None:
        """Take the cost of a layer's call, and of a pass, from runs in which all passes follow each other.

        Args:
            slept: the model.
            runs: seconds of each step of one run, or of two that differ in the number of passes.
        """
        self.calls[slept] = self.passes[slept] = 0.0
        more = [statistics.median(seconds) - self.seconds(case) for case, seconds in runs.items()]
        passes = [2 * case.virtual for case in runs]
        if len(runs) > 1:
            self.passes[slept] = max(0.0, (more[1] - more[0]) / (passes[1] - passes[0]))
        self.calls[slept] = max(0.0, (more[0] - passes[0] * self.passes[slept]) / (2 * slept.layers))

    def seconds(self, case: Case) -> float:
        """Return the predicted median of a step's seconds."""
        import numpy as np

        from tutti.planning.cluster_network import Network
        from tutti.planning.measured_costs import MeasuredCosts
        from tutti.planning.monte_carlo import DRAWS
        from tutti.planning.step_builders import build_step
        from tutti.planning.step_program import evaluate_program

        config = case.config()
        # The slowest link is stated, as a user states it.
        curve = slower(self.machine.curve("links/0-1"), case.slow_node or 1.0)
        over = {
            name.removeprefix("nodes/collectives/"): slower(each, case.slow_node or 1.0)
            for name, each in self.machine.curves.items()
            if name.startswith("nodes/")
        }
        network = Network(case.each, LinkCost(curve.fixed, curve.rate), curve, over)
        costs = MeasuredCosts(self.machine, "fp32", network)
        costs.share_node(case.ranks)
        facts = self._facts(case, config)
        # The program spreads what is in no stage evenly over the stages.
        passes = self.passes[case.slept] * case.virtual
        prices = slept_prices(facts.workload, costs, case.slept, self.calls[case.slept], passes)
        program, _ = build_step(facts, config, costs, prices)
        return float(np.median(evaluate_program(program, DRAWS).seconds))

    def _facts(self, case: Case, config: PlannedRun) -> Any:
        from tutti.planning.step_prediction import TaskSizes

        if case.slept not in self._sizes:
            self._sizes[case.slept] = TaskSizes(TASK, config)
        return self._sizes[case.slept].step(config)


def slower(curve: Curve, share: float) -> Curve:
    """Return the curve of a link that has a share of another one's rate."""
    points = tuple(replace(point, seconds=point.seconds / share) for point in curve.points)
    return replace(curve, points=points, rate=curve.rate * share)


def slept_prices(workload: Any, costs: Any, slept: Slept, call: float, passes: float) -> Any:
    """Return the prices of a slept model's passes.

    Args:
        workload: the model's work by group.
        costs: of the machine.
        slept: the stated sleeps of each layer.
        call: seconds of a layer's call beside its sleep.
        passes: seconds of a micro-batch's forward, or backward, that are no layer's.
    """
    import numpy as np

    from tutti.planning.monte_carlo import DRAWS
    from tutti.planning.pass_prices import PassPrices
    from tutti.workload.workload_file import REST

    class SleptPrices(PassPrices):
        """Sleeps in place of the machine's computing."""

        def group(self, group: Any, passed: Any, samples: int, checkpointing: str) -> Any:
            """As of ``PassPrices``."""
            if group.name == REST:
                return np.full(DRAWS, passes)
            layer = group.name.startswith("blocks.")
            return np.full(DRAWS, (slept.seconds(passed, samples) + call) * layer)

    found = SleptPrices(workload, costs)
    layers = sum(group.name.startswith("blocks.") for group in workload.groups)
    if layers != slept.layers:
        raise ValueError(f"the trace has {layers} groups of {slept.layers} layers")
    return found


def predictor_of(record: Record, cases: Sequence[Case]) -> Predictor:
    """Return the predictor that the record's machine and calibrations give."""
    from tutti.workload.machine_file import Curve, CurvePoint, Figure, Machine

    content = dict(record.machine or {})
    figures = {name: Figure(**entry) for name, entry in content["figures"].items() if not name.startswith("jitter/")}
    curves = {
        name: Curve(**{**entry, "points": tuple(CurvePoint(**point) for point in entry["points"])})
        for name, entry in content["curves"].items()
    }
    alone = next(case for case in cases if case.protocol == "calibration")
    steps = record.seconds[alone.key]
    spread = statistics.pstdev(steps) / statistics.fmean(steps)
    # Of computing that sleeps; that of matrix products, which the bench measures, is another one.
    figures |= {"jitter/time/1": Figure(0.0, "ratio", 1, None), "jitter/ranks/1": Figure(spread, "ratio", 1, None)}
    machine = Machine(content["host"], content["device"], tuple(content["parts"]), figures, curves)
    found = Predictor(machine, spread)
    for slept in (WIDE, NARROW, STAGED):
        same = [case for case in cases if case.protocol == "calibration" and case.slept == slept]
        found.calibrate(slept, {case: record.seconds[case.key] for case in same})
    return found


# --- say ----------------------------------------------------------------------------------------------------------


def row_of(case: Case, foreseen: float, seconds: Sequence[float]) -> dict[str, Any]:
    """Return predicted and measured seconds of a case, and the error in % of the measured ones."""
    measured = statistics.median(seconds)
    return {
        "protocol": case.protocol,
        "name": case.name,
        "case": case.title,
        "ranks": case.ranks,
        "predicted": foreseen,
        "measured": measured,
        "low": min(seconds),
        "high": max(seconds),
        "steps": len(seconds),
        "error": 100 * (foreseen / measured - 1),
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return number, median, mean and worst of the errors by protocol, with its bar.

    >>> rows = [{"protocol": "uneven", "error": error} for error in (-1.0, 3.0, 30.0)]
    >>> [(row["median"], row["worst"], row["within"], row["met"]) for row in summarise(rows)]
    [(3.0, 30.0, 2, False)]
    """
    found = []
    for protocol, bar in BARS.items():
        errors = [abs(row["error"]) for row in rows if row["protocol"] == protocol]
        if errors:
            mean = statistics.fmean(errors)
            found.append(
                {
                    "protocol": protocol,
                    "n": len(errors),
                    "bar": bar,
                    "median": statistics.median(errors),
                    "mean": mean,
                    "worst": max(errors),
                    "within": None if bar is None else sum(error <= bar for error in errors),
                    "met": None if bar is None else mean <= bar,
                }
            )
    return found


_HEAD = """# Predictions against runs between network namespaces

This page says how far `tutti simulate`'s step times are from those of real runs on up to 16 nodes. The nodes are
network namespaces of one machine, each with a link of {mbit} Mbit/s each way to a common switch (a token bucket). The
runs are `tutti train` with real sockets; computing is slept, so that two cores carry 16 ranks. They test overlap with
communication, schedules, servers and delays, and not computing. `make backtest-net` needs root and about an hour on an
idle machine, and goes on where it was stopped. Every figure comes from `{source}`.

A prediction of the same kind, from files that `tutti bench` wrote on your own nodes:

```console
$ tutti simulate text --machine machine.json --network nodes.json --devices 16 --strategy sharded
```

Calibrated on at most four nodes are the link (`tutti bench links` between two namespaces), the backend's collectives
(`tutti bench collectives` over four), copies and updates (`tutti bench`), and the cost of a layer's call beside its
sleep, from steps of one device. Pipelines are calibrated on two nodes at one micro-batch: `gpipe` cuts the layers into
two stages and `interleaved` into four, which tells the cost of a stage's pass from that of its layers. No constant is
fitted to the runs that are predicted, but the simulator was mended with runs like these in sight. An error is
(predicted − measured) in % of the measured median step. The median load average of two cores was {load} while the cases
were measured, with the ranks of the runs in it.

## Bars

| protocol | cases | mean error % | median error % | worst error % | bar % | within the bar | mean meets the bar |
|---|---|---|---|---|---|---|---|"""
_SIZES = """*Measured size* is 4 ranks, *two times* 8 and *four times* 16; of `central_storage` half as many, on a node.
*Uneven* has a rank that is late (`--slow`), or a node whose link has half the rate, which is stated."""


def page(content: Mapping[str, Any], source: str) -> str:
    """Return the page of a result, as Markdown.

    Args:
        content: of the result file.
        source: its path from the root of the repository.
    """
    head = _HEAD.format(mbit=f"{content['settings']['mbit']:g}", source=source, load=f"{content['load']:.1f}")
    lines = head.splitlines()
    for row in content["summary"]:
        bar = "–" if row["bar"] is None else f"{row['bar']:.1f}"
        within = "–" if row["within"] is None else f"{row['within']} of {row['n']}"
        met = {None: "–", True: "yes", False: "**no**"}[row["met"]]
        figures = f"{row['mean']:.1f} | {row['median']:.1f} | {row['worst']:.1f}"
        lines.append(f"| {row['protocol']} | {row['n']} | {figures} | {bar} | {within} | {met} |")
    lines += [
        "",
        _SIZES,
    ]
    for protocol in BARS:
        rows = [row for row in content["rows"] if row["protocol"] == protocol]
        if rows:
            lines += [
                "",
                f"## {protocol.capitalize()}",
                "",
                "| case | predicted s | measured s | error % |",
                "|---|---|---|---|",
            ]
            lines += [
                f"| `{_short(row['case'])}` | {row['predicted']:.3f} | {row['measured']:.3f} | {row['error']:+.1f} |"
                for row in rows
            ]
    lines += ["", "## Not measured", ""]
    lines += [f"- `{_short(each['case'])}`: {each['why']}" for each in content["failed"]] or ["Nothing failed."]
    return "\n".join(lines) + "\n"


def _short(title: str) -> str:
    """Return a case without the names of the modules between which a pipeline is cut.

    >>> _short("pipeline:schedule=gpipe,micro_batches=1,cuts=blocks.8, 2 nodes")
    'pipeline:schedule=gpipe,micro_batches=1, 2 nodes'
    """
    before, _, after = title.partition(",cuts=")
    return before + (after[after.index(", ") :] if after else "")


def unable() -> str:
    """Return why this process cannot make network namespaces; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid():
        return "making network namespaces needs root"
    return "" if shutil.which("ip") and shutil.which("tc") else "ip and tc of iproute2 are not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the back-test and return its exit code: 9 where a mean error is above its bar."""
    # Ended from outside, it still removes its namespaces.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description="Back-test tutti simulate on runs between network namespaces.")
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "runs" / "backtest-net", help="folder of the record and the runs' output")
    add("--only", default="", help="cases whose protocol, name or strategy contains the text; + between texts")
    add("--predict", action="store_true", help="measure nothing: predict what the record has")
    add("--save", action="store_true", help="keep results/DATE-backtest-net.json and docs/backtest-net.md")
    given = parser.parse_args(argv)
    why = unable()
    if why and not given.predict:
        print(f"backtest-net: skipped: {why}")
        return int(ExitCode.DONE)
    cases, wanted = all_cases(), given.only.split("+")
    cases = [
        c for c in cases if c.protocol == "calibration" or any(w in f"{c.protocol} {c.name} {c.title}" for w in wanted)
    ]
    record = Record(given.out / "record.jsonl")
    failed = {}
    if not given.predict:
        import_all()
        failed = measure(cases, record, given.out)
    predictor = predictor_of(record, cases)
    known = [case for case in cases if case.protocol in BARS and case.key in record.seconds]
    rows = [row_of(case, predictor.seconds(case), record.seconds[case.key]) for case in known]
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "settings": {"mbit": MBIT, "warm": WARM},
        "host": {"cpu": cpu_model(), "cores": usable_cores(), "python": platform.python_version()},
        "versions": {"tutti": VERSION},
        "load": statistics.median([record.loads[case.key] for case in known] or [0.0]),
        "calibration": calibration_json(predictor),
        "summary": summarise(rows),
        "rows": rows,
        "failed": [{"case": c.title, "why": failed[c.key].splitlines()[-1][:200]} for c in cases if c.key in failed],
    }
    _show(content)
    if given.save:
        path = ROOT / "benchmarks" / "results" / f"{content['date']}-backtest-net.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(content, path.relative_to(ROOT).as_posix()), encoding="utf-8")
        print(f"kept {path.name} and {PAGE.name}")
    late = [row["protocol"] for row in content["summary"] if row["met"] is False]
    return int(ExitCode.THRESHOLD if late or failed else ExitCode.DONE)


def calibration_json(predictor: Predictor) -> dict[str, Any]:
    """Return the calibrated constants, for the result file."""
    link = predictor.machine.curve("links/0-1")
    return {
        "alpha_seconds": link.fixed,
        "beta_bytes_per_second": link.rate,
        "spread": predictor.spread,
        "call_seconds": {str(slept): seconds for slept, seconds in predictor.calls.items()},
        "pass_seconds": {str(slept): seconds for slept, seconds in predictor.passes.items()},
    }


def import_all() -> None:
    """Import what ranks need, so that it is there when they are forked."""
    import torch.distributed.fsdp

    import tutti.cli.app
    import tutti.train.main
    import tutti.workload.bench_ranks  # noqa: F401

    torch.set_num_threads(1)


def _show(content: Mapping[str, Any]) -> None:
    for row in content["rows"]:
        spread = f"{row['low']:.3f}–{row['high']:.3f}"
        title = f"{row['protocol']}: {_short(row['case'])}"
        found = f"predicted {row['predicted']:.3f} s, measured {row['measured']:.3f} [{spread}]"
        print(f"{title:90} {found}, {row['error']:+.1f} %")
    for row in content["summary"]:
        bar = "no bar" if row["bar"] is None else f"bar {row['bar']:g} %: {'met' if row['met'] else 'MISSED'}"
        figures = f"mean {row['mean']:.1f} %, median {row['median']:.1f} %, worst {row['worst']:.1f} %"
        print(f"{row['protocol']}: n = {row['n']}, {figures}; {bar}")
    print(json.dumps(content["calibration"]))


if __name__ == "__main__":
    sys.exit(main())
