"""The back-test between network namespaces: its pure parts, and its model of slept layers. Nothing here needs root."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import backtest_net

    return backtest_net


@pytest.fixture
def layers(script: Any) -> Any:
    return sys.modules["slept_layers"]


def machine() -> dict[str, Any]:
    """A machine whose link has 1 ms and 5 MB/s, and whose copies and updates take nearly nothing."""

    def curve(rate: float, fixed: float = 0.0) -> dict[str, Any]:
        points = [{"size": 2**k, "seconds": fixed + 2**k / rate, "spread": 0.0, "n": 5} for k in range(10, 25)]
        return {"unit": "byte", "points": points, "rate": rate, "fixed": fixed, "error": 0.0}

    names = ("device/copy", "device/elementwise", "device/matmul/fp32", "optimizer/sgd")
    return {
        "host": {"name": "lab", "cores": 2},
        "device": {"type": "cpu", "threads": 1},
        "parts": ["links"],
        "figures": {"device/operation/seconds": {"value": 0.0, "unit": "s", "n": 1, "spread": None}},
        "curves": {"links/0-1": curve(5e6, 1e-3), **{name: curve(1e15) for name in names}},
    }


def test_cases_have_their_own_keys_and_strategies_of_tutti(script: Any) -> None:
    cases = script.all_cases()
    assert len({case.key for case in cases}) == len(cases)
    assert {case.protocol for case in cases} == {*script.BARS, "calibration"}
    assert max(case.ranks for case in cases) == 16
    for case in cases:
        assert case.config().batch_size == case.samples * (case.workers or case.ranks)


def test_layers_sleep_as_they_say_and_weights_get_gradients(layers: Any) -> None:
    slept = layers.Slept(layers=3, ms=4, kb=1, width=2)
    model, batch = layers.SleptModel(slept), torch.ones(2, 2)
    begin = time.perf_counter()
    loss = layers.loss(model, batch)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    assert middle - begin >= 3 * slept.seconds("forward", 2) and end - middle >= 3 * slept.seconds("backward", 2)
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert model.blocks[0].layer.weight.nbytes == 1024


def test_a_record_goes_on_where_it_stopped(script: Any, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "record.jsonl"
    script.Record(path).keep({"case": "a", "seconds": [1.0, 2.0]})
    first = script.Record(path)
    first.keep({"machine": machine()})
    again = script.Record(path)
    assert again.seconds == {"a": [1.0, 2.0]} and again.machine == machine()


def test_predictions_follow_from_a_link_and_one_step(script: Any, tmp_path: Path) -> None:
    record = script.Record(tmp_path / "record.jsonl")
    record.keep({"machine": machine()})
    cases = [case for case in script.all_cases() if case.protocol == "calibration"]
    for case in cases:
        # 1 ms for each of a layer's calls, beside its sleep; stages also send.
        record.keep({"case": case.key, "seconds": [case.slept.layers * (3 * case.slept.ms + 2) / 1e3] * 2})
    predictor = script.predictor_of(record, cases)
    assert predictor.calls[script.WIDE] == pytest.approx(1e-3, rel=0.01)
    assert script.predictor_of(record, cases).spread == 0
    ring = script.Case("measured size", "ring", "mirrored:algorithm=ring", 4)
    half = script.Case("uneven", "ring", "mirrored:algorithm=ring", 4, slow_node=0.5)
    size = 2 * 4096 * 1024
    # Six rounds of a quarter of each of two vectors.
    want = 0.244 + 1.5 * size / 5e6 + 12e-3
    assert predictor.seconds(ring) == pytest.approx(want, rel=0.01)
    assert predictor.seconds(half) - predictor.seconds(ring) == pytest.approx(want - 0.244, rel=0.01)
    server = script.Case("measured size", "servers=1", "parameter_server:servers=1", 4)
    assert predictor.seconds(server) == pytest.approx(0.244 + 6 * size / 5e6, rel=0.02)


def test_the_cost_of_a_pass_is_told_from_that_of_its_layers(script: Any, tmp_path: Path) -> None:
    record, wanted = script.Record(tmp_path / "record.jsonl"), {}
    record.keep({"machine": machine()})
    cases = [case for case in script.all_cases() if case.protocol == "calibration"]
    for case in cases:
        # 1 ms for each of a layer's calls; in pipelines 3 ms for each pass of a stage, and messages.
        sent = (2 * (case.virtual - 1) + 2) * (1e-3 + 4 * case.slept.width / 5e6) if case.virtual > 1 else 0.0
        passes = 2 * case.virtual * 3e-3 if case.virtual > 1 else 0.0
        wanted[case] = case.slept.layers * (3 * case.slept.ms + 2) / 1e3 + passes + sent
        record.keep({"case": case.key, "seconds": [wanted[case]] * 2})
    predictor = script.predictor_of(record, cases)
    assert predictor.passes[script.WIDE] == 0
    assert predictor.passes[script.STAGED] == pytest.approx(3e-3, rel=0.1)
    assert predictor.calls[script.STAGED] == pytest.approx(1e-3, rel=0.2)
    for case in cases:
        assert predictor.seconds(case) == pytest.approx(wanted[case], rel=0.01)


def test_stages_of_slept_layers_are_cut_where_the_strategy_says(script: Any, tmp_path: Path) -> None:
    record = script.Record(tmp_path / "record.jsonl")
    record.keep({"machine": machine()})
    cases = [case for case in script.all_cases() if case.protocol == "calibration"]
    for case in cases:
        record.keep({"case": case.key, "seconds": [3 * case.slept.layers * case.slept.ms / 1e3] * 2})
    predictor = script.predictor_of(record, cases)
    for schedule in ("gpipe", "1f1b", "zero_bubble", "interleaved"):
        found = predictor.seconds(script.pipeline("pipeline", schedule, 4, 4))
        # Four micro-batches of 12 ms a layer on a quarter of 16 layers, and at most a bubble as long as three of them.
        assert 4 * 0.048 < found < 7 * 0.048 + 0.05


def test_the_page_has_every_case_and_every_bar(script: Any) -> None:
    case = script.pipeline("pipeline", "gpipe", 2, 1)
    row = script.row_of(case, 1.1, [0.9, 1.0, 1.2])
    assert row["error"] == pytest.approx(10) and (row["low"], row["high"]) == (0.9, 1.2)
    content = {
        "settings": {"mbit": 50.0},
        "load": 0.5,
        "summary": script.summarise([row]),
        "rows": [row],
        "failed": [{"case": "x", "why": "y"}],
    }
    text = script.page(content, "results/a.json")
    assert "| pipeline | 1 | 10.0 | 10.0 | 10.0 | 5.0 | 0 of 1 | **no** |" in text
    assert "| `pipeline:schedule=gpipe,micro_batches=1, 2 nodes` | 1.100 | 1.000 | +10.0 |" in text
    assert "- `x`: y" in text


def test_it_is_skipped_with_a_reason_without_root(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert script.main(["--out", str(tmp_path)]) == 0
    assert "skipped: making network namespaces needs root" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_newest_result_is_what_its_page_says(script: Any) -> None:
    results = sorted((BENCHMARKS / "results").glob("*-backtest-net.json"))
    if not results:
        pytest.skip("it was not measured yet")
    stored = json.loads(results[-1].read_text(encoding="utf-8"))
    source = results[-1].relative_to(BENCHMARKS.parent).as_posix()
    assert script.PAGE.read_text(encoding="utf-8") == script.page(stored, source)
