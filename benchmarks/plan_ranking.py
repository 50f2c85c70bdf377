"""Whether ``tutti simulate`` ranks plans as real runs do: a dozen strategies of one model on eight nodes.

    sudo python benchmarks/plan_ranking.py            # some five minutes on two idle cores; goes on where it stopped
    sudo python benchmarks/plan_ranking.py --save     # also keep results/DATE-plan-ranking.json

Nodes, runs and calibration are those of ``backtest_net.py``, whose record it shares. Printed are Kendall's τ between
predicted and measured step times, and the regret: how much longer a step of the plan predicted fastest takes than one
of the plan measured fastest. Two plans are tied where their measured medians differ by less than the spread of steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from backtest_net import ROOT, WIDE, Case, Record, all_cases, import_all, measure, predictor_of, row_of, unable

from tutti.device import cpu_model, usable_cores
from tutti.distribution import VERSION
from tutti.errors import ExitCode

NODES = 8
PLANS = (
    *(f"mirrored:algorithm={name}" for name in ("ring", "halving", "tree", "central", "native")),
    "mirrored:algorithm=native,bucket_mb=0.5",
    *(f"sharded:stage={stage}" for stage in (1, 2, 3)),
    "sharded:stage=3,shards=4",
    *(f"parameter_server:servers={count}" for count in (1, 2, 4)),
)
LEAST_TAU, MOST_REGRET = 0.8, 5.0


def kendall_tau(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return Kendall's τ-a of predicted and measured seconds, over the pairs that the measurement tells apart.

    >>> rows = [{"predicted": p, "measured": m, "low": m, "high": m} for p, m in ((1, 1), (2, 3), (3, 2), (4, 4))]
    >>> round(kendall_tau(rows), 3)
    0.667
    """
    agree = []
    for one, other in combinations(rows, 2):
        if one["high"] >= other["low"] and other["high"] >= one["low"]:
            continue
        agree.append((one["predicted"] < other["predicted"]) == (one["measured"] < other["measured"]))
    return (2 * sum(agree) - len(agree)) / len(agree)


def regret(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return how much longer, in %, a step of the plan predicted fastest takes than of the plan measured fastest.

    >>> regret([{"predicted": 1, "measured": 2.1}, {"predicted": 2, "measured": 2.0}])
    5.0
    """
    chosen = min(rows, key=lambda row: float(row["predicted"]))
    return round(100 * (chosen["measured"] / min(row["measured"] for row in rows) - 1), 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and rank the plans, and return the exit code: 9 where a bar is missed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description="Compare the ranking of plans by tutti simulate with real runs.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "backtest-net", help="folder of the record")
    parser.add_argument("--save", action="store_true", help="keep results/DATE-plan-ranking.json")
    given = parser.parse_args(argv)
    if why := unable():
        print(f"plan-ranking: skipped: {why}")
        return int(ExitCode.DONE)
    ranked = [Case("ranking", text, text, NODES, slept=WIDE) for text in PLANS]
    cases = [*(case for case in all_cases() if case.protocol == "calibration"), *ranked]
    record = Record(given.out / "record.jsonl")
    import_all()
    failed = measure(cases, record, given.out)
    predictor = predictor_of(record, cases)
    rows = [row_of(case, predictor.seconds(case), record.seconds[case.key]) for case in ranked]
    rows.sort(key=lambda row: float(row["measured"]))
    tau, lost = kendall_tau(rows), regret(rows)
    for row in rows:
        print(f"{row['case']:60} measured {row['measured']:.3f} s, predicted {row['predicted']:.3f} s")
    errors = statistics.median(abs(row["error"]) for row in rows)
    print(f"{len(rows)} plans: tau {tau:.2f} (bar {LEAST_TAU}), regret {lost:.1f} % (bar {MOST_REGRET:g} %)", end="")
    print(f", median error of a step {errors:.1f} %")
    if given.save:
        content = {
            "date": datetime.now(UTC).date().isoformat(),
            "host": {"cpu": cpu_model(), "cores": usable_cores(), "python": platform.python_version()},
            "versions": {"tutti": VERSION},
            "nodes": NODES,
            "tau": tau,
            "regret_percent": lost,
            "rows": rows,
        }
        path = ROOT / "benchmarks" / "results" / f"{content['date']}-plan-ranking.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"kept {path.name}")
    return int(ExitCode.THRESHOLD if failed or tau < LEAST_TAU or lost > MOST_REGRET else ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
