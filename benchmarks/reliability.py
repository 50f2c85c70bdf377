"""The tables of docs/reliability.md, from the newest results of every kind.

    python benchmarks/reliability.py             # rewrites what lies between the marks of the page
    python benchmarks/reliability.py --check     # exit code 9 where the page is not what the results say

Results are ``results/DATE-KIND.json``: ``faults`` (``make faults``), ``peers-files`` and ``peers-jobs``
(``faults_peers.py --save``), ``soak-STRATEGY`` (``soak.py --save``), ``saving`` (``saving.py --save``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.errors import ExitCode

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reliability.md"
Report = Mapping[str, Any]

# Number of a row: the fault, and what must come of it.
ROWS = {
    1: ("kill -9 of a rank, later of the launcher", "goes on from the last save; the same bits"),
    2: ("kill -9 at every system call of a save", "the old checkpoint or the new one is whole"),
    3: ("kill -9 of the launcher; how runs end", "no process, port or shared memory stays"),
    4: ("SIGTERM, SIGUSR1, Ctrl-C, in a step and in a save", "step finished, state saved, nothing lost"),
    5: ("a rank is stopped, or stuck anywhere", "named with step and line, ended, restarted; the same bits"),
    6: ("a rank is five times slower", "waited for, never ended"),
    7: ("kill -9 of a parameter server", "restored, at most a snapshot's updates lost and told; synchronous: 5"),
    8: ("a client of a server is killed in a push", "all of it or nothing; the others go on"),
    9: ("pushes repeated and reordered", "each counts once"),
    10: ("a link between hosts is down", "goes on, or ends with 5 after the timeout"),
    11: ("a link between hosts is slow", "the same bits"),
    12: ("the disk is full", "all ranks agree, the old checkpoint stays, 8 after three saves"),
    13: ("files cut off, missing, of two steps", "refused; the newest whole one is taken"),
    14: ("1,000 random bits flipped", "every one detected"),
    15: ("hostile checkpoints: pickles, lying headers, links", "refused; nothing runs"),
    16: ("a checkpoint of another model or optimizer", "4 before the first step, keys named"),
    17: ("resumed 1→2→4→2→1 and over strategies", "the same samples in order; reproducible: the same bits"),
    18: ("resumed several times in one epoch", "the same bits, no sample twice"),
    19: ("NaN or infinity on one rank", "all ranks skip that step; 6 after too many"),
    20: ("uneven, tiny, empty shares", "no hang; the result of one device"),
    21: ("ranks that do not do the same", "5 on every rank before any arithmetic, both sides shown"),
    22: ("port taken, rank absent, address wrong", "ends within the timeout, named"),
    23: ("clients without a key, with a wrong one, of another run", "never reach the server's numbers"),
    24: ("malformed messages, 100,000 of them", "refused by their lengths; the server goes on"),
    25: ("1,000 idle connections", "the others work on"),
    26: ("mistakes in the configuration", "2 before any process starts, nearest name suggested"),
    27: ("image folders with links, broken files, pickles", "3; nothing outside is read"),
    28: ("exceptions, loader processes killed, small or stale shared memory", "the cause first, with its rank"),
    0: ("`tutti chaos` itself", "tells what survived from what did not"),
}
# A fault of peers-jobs: what tutti does, and the row that shows it.
OURS = {
    "another shape on one rank": ("exit code 5 on every rank, both sides shown", 21),
    "another dtype on one rank": ("the same", 21),
    "another order on one rank": ("the same", 21),
    "another operation on one rank": ("the same", 21),
    "another count on one rank": ("the same", 21),
    "kill -9 of a rank": ("restarted, equal weights", 1),
    "SIGSTOP of a rank": ("the stopped rank named, restarted, equal weights", 5),
    "kill -9 of the launcher": ("all its ranks end", 3),
    "SIGTERM to the launcher": ("exit code 75, no step lost", 4),
    "NaN gradient on one rank": ("all ranks skip the step, parameter named", 19),
    "a batch less on one rank": ("shares may be uneven: the result of one device", 20),
}
# Outcomes of a file that was damaged, and of a save that did not succeed.
DAMAGE = {
    "refused": "refused",
    "old": "harmless",
    "wrong": "**loaded wrong**",
    "crashed": "crashed",
    "executed": "**ran**",
}
SAVE = {"new": "new one whole", "old": "old one whole", "refused": "**nothing left**", "wrong": "**mixed**"}
SAVES = ("kill -9 in a save", "disk full in a save")


def newest(results: Path, kind: str) -> Report | None:
    """The result of this kind with the latest date; None where there is none."""
    found = sorted(results.glob(f"????-??-??-{kind}.json"))
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def number(value: float) -> str:
    """Three digits are enough."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.3g}"


def figure(name: str, p50: float, most: float) -> str:
    """One figure in words: its median, and its largest value where that is another."""
    name, unit = (name.removesuffix(", s"), " s") if name.endswith(", s") else (name, "")
    told = number(p50) if p50 == most else f"{number(p50)}, at most {number(most)}"
    return f"{name} {told}{unit}"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and largest."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return (ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2), ordered[-1]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; a bar within a cell, as in max|Δ|, is no border."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def machine(report: Report) -> str:
    """When and on what, in one sentence."""
    found = report["hardware"]
    return (
        f"{report['date'][:10]}, {found['cores']} cores, Python {found['python']}, torch {found['versions']['torch']}, "
        f"load average {found['load_average']:.1f} at the start"
    )


def suite(report: Report) -> str:
    """Every row of the fault suite: runs, failures, what was measured."""
    found = {entry["row"]: entry for entry in report["rows"]}
    rows = []
    for row, (fault, promise) in ROWS.items():
        entry = found.get(row)
        if entry is None:
            rows.append([str(row), fault, promise, "0", "–", "not played"])
            continue
        figures = [figure(name, f["p50"], f["max"]) for name, f in entry["figures"].items()]
        runs = f"{entry['runs']}" + (f" ({entry['skipped']} skipped)" if entry["skipped"] else "")
        rows.append([str(row or "–"), fault, promise, runs, str(entry["failures"]), "; ".join(figures) or "–"])
    runs, failures = (sum(entry[key] for entry in found.values()) for key in ("runs", "failures"))
    failed = sorted({name for entry in found.values() for name in entry["failed"]})
    lines = [
        f"{machine(report)}; {report['seconds'] / 60:.0f} minutes. {runs} runs, {failures} failures."
        + (f" {report['note']}" if "note" in report else ""),
        "",
        table(["#", "fault", "what must come of it", "runs", "failures", "figures: median"], rows),
        "",
        "Failed: " + (", ".join(f"`{name.partition('::')[2]}`" for name in failed) or "none") + ".",
    ]
    return "\n".join(lines)


def counts(found: Mapping[str, int], words: Mapping[str, str]) -> str:
    """How often what, the words' order first."""
    known = [*[key for key in words if key in found], *[key for key in found if key not in words]]
    return ", ".join(f"{found[key]:,} {words.get(key, key)}" for key in known) or "–"


def files(report: Report) -> str:
    """What became of a checkpoint, by fault and format."""
    faults = report["faults"]
    formats = list(next(iter(faults.values())))
    rows = [
        [
            name,
            *(
                counts(by_format.get(name, {}), SAVE if fault in SAVES else DAMAGE)
                for fault, by_format in faults.items()
            ),
        ]
        for name in formats
    ]
    return f"{machine(report)}.\n\n" + table(["", *faults], rows)


def jobs(report: Report, ours: Report | None) -> str:
    """What torchrun, DDP and Gloo do, and what tutti's own suite saw."""
    runs = {entry["row"]: entry for entry in ours["rows"]} if ours else {}
    rows = []
    for fault, found in report["faults"].items():
        figures = [figure(name, *spread(values)) for name, values in found["figures"].items()]
        text, row = OURS[fault]
        entry = runs.get(row)
        seen = f" (row {row}: {entry['runs']} runs, {entry['failures']} failures)" if entry else ""
        rows.append([fault, "; ".join([counts(found["came_to"], {}), *figures]), text + seen])
    return f"{machine(report)}.\n\n" + table(["fault", "torchrun, DDP, Gloo; figures: median", "tutti"], rows)


def soaks(reports: Sequence[Report]) -> str:
    """One row a soak."""
    rows, told = [], []
    for report in reports:
        found = re.search(r"--strategy (\S+)", report["command"])
        name = found[1] if found else "mirrored"
        still = [outcome["stood_still_seconds"] for outcome in report["outcomes"]]
        rows.append([
            name, report["date"][:10], f"{len(report['outcomes'])} of {report['planned']}", str(report["steps"]),
            str(report["executed"]), f"{report['goodput']:.3f}", report["verdict"],
            f"{number(spread(still)[0])} s, at most {number(spread(still)[1])} s", f"{report['seconds'] / 60:.0f} min",
            str(len(report["problems"])),
        ])  # fmt: skip
        told += [f"- {name}: {problem}" for problem in report["problems"]]
    heads = [
        "strategy",
        "date",
        "faults",
        "steps",
        "made",
        "goodput",
        "weights",
        "stood still",
        "took",
        "promises broken",
    ]
    return "\n".join([table(heads, rows), *["", "Promises broken:", "", *told] * bool(told)])


def saving(report: Report) -> str:
    """What a save costs, by workload."""
    rows = []
    for name, part in report["workloads"].items():
        for block, row in part["blocks"].items():
            cells = [f"{row[p + 'ratio']:.3f} [{row[p + 'low']:.3f}–{row[p + 'high']:.3f}]" for p in ("", "cpu_")]
            rows.append(["", block, f"{row['ms']:.1f}", cells[0], f"{row['cpu_ms']:.1f}", cells[1]])
        rows[-len(part["blocks"])][0] = f"{name}, checkpoint of {part['checkpoint_bytes'] / 2**20:.1f} MiB"
    head = f"{machine(report)}; one save in {report['steps_per_save']} steps."
    return f"{head}\n\n" + table(
        ["", "block", "ms a step", "ratio [95 % interval]", "ms of the processor", "ratio"], rows
    )


def blocks(results: Path) -> dict[str, str]:
    """Name of a mark → what stands there; a kind without a result stays as it is."""
    ours, theirs, processes, cost = (
        newest(results, kind) for kind in ("faults", "peers-files", "peers-jobs", "saving")
    )
    kinds = sorted(
        {file.stem[11:] for file in results.glob("????-??-??-soak-*.json")},
        key=lambda kind: (kind != "soak-mirrored", kind),
    )
    soaked = [found for kind in kinds if (found := newest(results, kind)) is not None]
    made = {
        "suite": ours and suite(ours),
        "files": theirs and files(theirs),
        "jobs": processes and jobs(processes, ours),
        "soak": soaked and soaks(soaked),
        "saving": cost and saving(cost),
    }
    return {name: text for name, text in made.items() if text}


def fill(page: str, made: Mapping[str, str]) -> str:
    """The page, what is between ``<!-- NAME -->`` and ``<!-- end -->`` replaced. Raises ValueError: no such mark."""
    for name, text in made.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, replaced = pattern.subn(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)
        if replaced != 1:
            raise ValueError(f"the page has {replaced} places for '{name}'")
    return page


def main(argv: Sequence[str] | None = None) -> ExitCode:
    """Rewrites or checks the page."""
    parser = argparse.ArgumentParser(description="The tables of docs/reliability.md from the newest results.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 9 where the page is another")
    given = parser.parse_args(argv)
    page = PAGE.read_text(encoding="utf-8")
    new = fill(page, blocks(RESULTS))
    if given.check:
        return ExitCode.DONE if new == page else ExitCode.THRESHOLD
    PAGE.write_text(new, encoding="utf-8")
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
