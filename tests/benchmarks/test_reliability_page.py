"""benchmarks/reliability.py: what it makes of results, and that docs/reliability.md is what the kept ones say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = {"cores": 2, "python": "3.11.7", "load_average": 1.25, "versions": {"torch": "2.13.0+cpu"}}
FIGURE = {"n": 3, "min": 0.5, "p50": 0.71234, "p95": 2.0, "max": 2.5}


@pytest.fixture(scope="module")
def reliability() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return __import__("reliability")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def row(number: int, **changes: Any) -> dict[str, Any]:
    usual = {"row": number, "runs": 3, "failures": 0, "skipped": 0, "files": [], "failed": [], "figures": {}}
    return usual | changes


def suite(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"date": "2026-11-20T10:00:00+00:00", "seconds": 600, "hardware": HARDWARE, "rows": list(rows)}


def cells(text: str, first: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_a_failure_is_told(reliability: Any) -> None:
    bad = row(5, failures=1, skipped=2, failed=["tests/faults/test_stuck.py::test_a[seed1]"])
    text = reliability.suite(suite(row(1, figures={"recovery, s": FIGURE, "max|Δ|": FIGURE | {"p50": 2.5}}), bad))
    assert cells(text, "1")[3:] == ["3", "0", "recovery 0.712, at most 2.5 s; max\\|Δ\\| 2.5"]
    assert cells(text, "5")[3:] == ["3 (2 skipped)", "1", "–"]
    assert cells(text, "6")[3:] == ["0", "–", "not played"]
    assert "6 runs, 1 failures" in text and "Failed: `test_a[seed1]`." in text and "load average 1.2" in text
    assert "Failed: none." in reliability.suite(suite(row(1)))
    assert "0 failures. Cut short." in reliability.suite(suite(row(1)) | {"note": "Cut short."})


def test_every_row_of_a_test_has_a_name(reliability: Any) -> None:
    texts = [file.read_text() for file in (ROOT / "tests" / "faults").glob("test_*.py")]
    marked = {
        int(number) for text in texts for rows in re.findall(r"mark\.row\((.*?)\)", text) for number in rows.split(",")
    }
    assert marked == reliability.ROWS.keys() - {0}


def test_what_loads_wrong_in_silence_stands_out(reliability: Any) -> None:
    flips = {"tutti": {"refused": 1000}, "DCP": {"wrong": 980, "refused": 12, "old": 8}}
    kills = {"tutti": {"new": 1, "old": 9}, "DCP": {"refused": 10}}
    faults = {"one bit flipped": flips, "kill -9 in a save": kills}
    text = reliability.files({"date": "2026-11-20", "hardware": HARDWARE, "faults": faults})
    assert cells(text, "tutti")[1:] == ["1,000 refused", "1 new one whole, 9 old one whole"]
    assert cells(text, "DCP")[1:] == ["12 refused, 8 harmless, 980 **loaded wrong**", "10 **nothing left**"]


def test_others_stand_beside_our_own_row(reliability: Any) -> None:
    found = {"came_to": {"finished, equal weights": 9, "hung": 1}, "figures": {"recovery, s": [1.0, 3.0]}}
    report = {"date": "2026-11-20", "hardware": HARDWARE, "faults": {"kill -9 of a rank": found}}
    text = reliability.jobs(report, suite(row(1, runs=60)))
    theirs, ours = cells(text, "kill -9 of a rank")[1:]
    assert theirs == "9 finished, equal weights, 1 hung; recovery 2, at most 3 s"
    assert ours.endswith("(row 1: 60 runs, 0 failures)")
    assert "row" not in cells(reliability.jobs(report, None), "kill -9 of a rank")[2]


def test_a_soak_that_did_not_survive_says_why(reliability: Any) -> None:
    outcomes = [{"stood_still_seconds": seconds} for seconds in (0.5, 1.0, 9.0)]
    report = {"date": "2026-11-20", "planned": 3, "steps": 90, "executed": 100, "goodput": 0.9, "seconds": 120}
    report |= {"command": "tutti … --strategy local_sgd:period=4 …", "outcomes": outcomes}
    good = reliability.soaks([report | {"verdict": "equal bits", "problems": []}])
    assert cells(good, "local_sgd:period=4")[2:] == [
        *["3 of 3", "90", "100", "0.900", "equal bits", "1 s, at most 9 s", "2 min", "0"]
    ]
    bad = reliability.soaks([report | {"verdict": "different", "problems": ["the weights are not …"]}])
    assert "- local_sgd:period=4: the weights are not …" in bad and "Promises broken:" not in good


def test_a_save_stands_beside_none(reliability: Any) -> None:
    block = {"ms": 51.26, "ratio": 1.012, "low": 0.99, "high": 1.03, "cpu_ms": 50.0, "cpu_ratio": 1.004}
    block |= {"cpu_low": 1.001, "cpu_high": 1.007}
    workloads = {"cnn": {"checkpoint_bytes": 2**20, "blocks": {"without": block, "save": block | {"ratio": 1.5}}}}
    text = reliability.saving(
        {"date": "2026-11-20", "hardware": HARDWARE, "steps_per_save": 50, "workloads": workloads}
    )
    assert cells(text, "cnn, checkpoint of 1.0 MiB")[1:3] == ["without", "51.3"]
    assert text.splitlines()[-1] == "|  | save | 51.3 | 1.500 [0.990–1.030] | 50.0 | 1.004 [1.001–1.007] |"


def test_the_newest_result_of_each_kind_is_taken(reliability: Any, tmp_path: Path) -> None:
    for date, runs in (("2026-11-20", 7), ("2026-11-19", 3)):
        (tmp_path / f"{date}-faults.json").write_text(json.dumps(suite(row(1, runs=runs))))
    made = reliability.blocks(tmp_path)
    assert made.keys() == {"suite"} and cells(made["suite"], "1")[3] == "7"
    page = reliability.fill("a\n<!-- suite -->\nold\n<!-- end -->\nb\n<!-- soak -->\nkept\n<!-- end -->\n", made)
    assert page == f"a\n<!-- suite -->\n{made['suite']}\n<!-- end -->\nb\n<!-- soak -->\nkept\n<!-- end -->\n"
    with pytest.raises(ValueError, match="0 places for 'suite'"):
        reliability.fill("a", made)


def test_the_page_is_what_the_results_say(reliability: Any) -> None:
    assert reliability.main(["--check"]) == 0, "run make reliability"
