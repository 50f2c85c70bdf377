"""Every script under every strategy equals its oracle, or is refused for a reason under review. No third state."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from tests import worlds
from tests.scripts import expected, harness, page, table
from tests.scripts.oracle import SYNCHRONOUS
from tests.scripts.table import STRATEGIES, Case
from tests.simulated_accelerator import build

PART, RECORD = os.environ.get("SCRIPTS_PART"), os.environ.get("SCRIPTS_RECORD")
FLOORS = {
    **dict.fromkeys(("single", "mirrored", "mirrored, native", "local_sgd", "diloco"), 0.95),
    "central_storage": 0.80,
    "sharded, stage 1": 0.80,
    "sharded, stage 2": 0.80,
    "sharded": 0.80,
    "tensor": 0.90,
    **dict.fromkeys(("pipeline", "model_parallel", "hybrid, stages"), 0.85),
}


def part(text: str) -> list[Case]:
    """``2/30``: the second of thirty parts of all cases, each with something of everything."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"SCRIPTS_PART (make scripts PART=…) is '{text}': write 2/30, the second of thirty")
    chosen = random.Random(0).sample(table.whole(), len(table.whole()))[int(number) - 1 :: int(of)]
    return sorted(chosen, key=lambda case: case.devices)


def check(case: Case) -> None:
    if worlds.DEVICE not in ("cpu", build.DEVICE) and getattr(harness.load(case.script), "RANDOM", False):
        pytest.skip("the oracle draws the random numbers of a CPU")
    if worlds.DEVICE not in ("cpu", build.DEVICE) and case.script == "script_muon":
        pytest.skip("its products in bfloat16 round otherwise than the oracle's, on a CPU")
    if worlds.DEVICE not in ("cpu", build.DEVICE) and case.script == "script_weight_norm":
        pytest.skip("CUDA's kernel of weight norm rounds to single precision in float64, and the oracle is a CPU's")
    verdict, refusal = harness.check(case), expected.refusal(case)
    missing = re.search(r"NotImplementedError: Could not run '(aten::\w+)'", verdict.text)
    if missing and worlds.DEVICE == build.DEVICE:
        pytest.skip(f"the simulated accelerator has no kernel {missing[1]}")
    if RECORD:
        line = json.dumps({"case": str(case), "kind": verdict.kind, "text": verdict.text})
        with Path(RECORD).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    kind = expected.ended(case, verdict.kind, verdict.text)
    assert kind != "wrong", verdict.text
    if kind == "refused":
        assert refusal is not None, f"a new refusal, which is not in refused.toml: {verdict.text}"
    else:
        assert refusal is None, f"works, but refused.toml says that it is refused: {refusal}"


@pytest.mark.parametrize("case", table.pairwise(), ids=str)
def test_equal_or_refused(case: Case) -> None:
    check(case)


@pytest.mark.scripts
@pytest.mark.parametrize("case", part(PART) if PART else [], ids=str)
def test_equal_or_refused_all(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("script", table.scripts())
def test_the_oracle_with_one_worker_is_plain_pytorch(script: str) -> None:
    if getattr(harness.load(script), "RANDOM", False):
        pytest.skip("it draws random numbers, from other streams than plain PyTorch")
    [plain] = worlds.run(1, harness.play_plain, name=script)
    [played] = worlds.run(1, harness.play_oracle, name=script, workers=1, algorithm=SYNCHRONOUS, micro=0)
    assert harness.difference(played.results[0], plain) <= 1e-12


def test_there_are_enough_scripts_of_both_forms() -> None:
    forms = [table.form(script) for script in table.scripts()]
    assert len(forms) >= 45 and forms.count("step") >= 26 and forms.count("loop") >= 15


def test_the_covering_table_is_the_committed_one() -> None:
    """Every script is there once, every strategy and number of devices; write it again with ``table.py`` as module."""
    chosen = table.pairwise()
    assert chosen == table.covering()
    assert [case.script for case in sorted(chosen, key=lambda case: case.script)] == table.scripts()
    grid = {(name, devices) for name, row in STRATEGIES.items() for devices in row.grid}
    assert {(case.strategy, case.devices) for case in chosen} == grid


@pytest.mark.parametrize("device", ["cpu", build.DEVICE])
def test_every_entry_of_the_reviewed_list_holds_somewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "DEVICE", device)
    first = {expected.refusal(case) for case in table.whole()}
    here = [entry for entry in expected.refusals() if device != "cpu" or not entry.accelerators]
    assert [entry for entry in here if entry not in first] == []


@pytest.mark.parametrize("strategy", FLOORS)
def test_refusing_is_no_way_out(strategy: str) -> None:
    """At least so many scripts are equal with as many logical workers as data ranks, on all numbers of devices."""
    equal = [page.cell(script, strategy).equal for script in table.scripts()]
    assert sum(equal) / len(equal) >= FLOORS[strategy]


def test_the_page_shows_the_suite() -> None:
    """Write it again with ``make scripts``."""
    assert page.tables() in page.PAGE.read_text(encoding="utf-8")


# --- the harness can fail -------------------------------------------------------------------------------------------


def outcome(kind: str = "ended", value: float = 0.0, **more: object) -> harness.Outcome:
    return harness.Outcome(kind, {"weight": harness.np.array([value])}, **more)  # type: ignore[arg-type]


WANT = harness.Reference(
    [{"weight": harness.np.array([1.0])}] * 2,
    [{"weight": harness.np.array([0.0])}, {"weight": harness.np.array([1.0])}],
)
USAGE = {"text": "UsageError: no", "remedy": "do this", "code": 2}


@pytest.mark.parametrize(
    ("outcomes", "kind", "why"),
    [
        ([outcome(value=1.0), outcome(value=1.0)], "equal", ""),
        ([outcome(value=1.0), outcome(value=1.0 + 1e-9)], "wrong", "rank 1"),
        ([outcome(value=1.0), outcome("raw", text="ValueError")], "wrong", "not tutti's"),
        ([outcome(value=1.0), outcome("refused", **USAGE)], "wrong", "1 of 2 ranks refused"),
        ([outcome("refused", **USAGE), outcome("refused", **USAGE)], "refused", "no"),
        ([outcome("refused", **USAGE, value=0.5, updates=1)], "wrong", "after a wrong update"),
        ([outcome("refused", **USAGE, value=1.0, updates=1)], "refused", "no"),
        ([outcome("refused", **{**USAGE, "remedy": None})], "wrong", "without a remedy"),
        ([outcome("refused", **{**USAGE, "code": 5})], "wrong", "exit code 5"),
    ],
)
def test_judging(outcomes: list[harness.Outcome], kind: str, why: str) -> None:
    verdict = harness.judge(outcomes, WANT)
    assert verdict.kind == kind and why in verdict.text
