"""The back-test's page is made from its result file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_its_result_says() -> None:
    spec = importlib.util.spec_from_file_location("backtest_script", ROOT / "benchmarks" / "backtest.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    newest = max((ROOT / "benchmarks" / "results").glob("*-backtest.json"))
    stored = json.loads(newest.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "backtest.md").read_text(encoding="utf-8")
    assert page == script.page(stored, newest.relative_to(ROOT).as_posix())
