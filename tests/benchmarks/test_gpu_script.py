"""What benchmarks/gpu.py takes for a failure, and that it refuses what is not here; ``make gpu`` runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests import worlds
from tests.simulated_accelerator import build

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return __import__("gpu")
    finally:
        sys.path.remove(str(BENCHMARKS))


GOOD = {
    "tests": {"passed": 3, "failed": [], "skipped": {"no second GPU": 1}},
    "contract": {"against the CPU": {"passed": 1, "failed": [], "skipped": {}}},
    "step_tax": {"2": {"failures": ["tutti-step takes 1.3 of ddp's time"]}},
    "mfu": {},
}


@pytest.mark.parametrize(
    ("changed", "judged", "found"),
    [
        ({}, False, []),
        ({}, True, ["step tax on 2: tutti-step takes 1.3 of ddp's time"]),
        ({"tests": {"passed": 0, "failed": ["a::b"], "skipped": {}}}, False, ["failed: a::b"]),
        ({"contract": {"x": {"passed": 0, "failed": ["c"], "skipped": {}}}}, False, ["failed: c"]),
        (
            {"mfu": {"error": "it ended with 1"}, "step_tax": {"error": "so"}},
            True,
            ["step_tax: so", "mfu: it ended with 1"],
        ),
    ],
)
def test_what_is_a_failure(gpu: Any, changed: dict[str, Any], judged: bool, found: list[str]) -> None:
    assert gpu.failures({**GOOD, **changed}, judged) == found


@pytest.mark.parametrize("words", ["--parts mfx", "--devices 0", "--json gone/out.json"])
def test_usage_errors(gpu: Any, words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.arguments(words.split())
    assert ended.value.code == 2


def test_outcomes_are_read_from_the_tests_report(gpu: Any) -> None:
    given = gpu.arguments(["--device", build.DEVICE, "--quick"])
    found = gpu.outcomes(given, "tests/test_errors.py", "-k", "fragmented_memory")
    assert found["passed"] > 0 and not found["failed"]


def test_a_world_of_more_ranks_than_devices_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="1000 devices of type xpu are needed"):
        worlds.require_devices("xpu", 1000)
