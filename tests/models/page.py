"""``docs/models.md``: models of other libraries under every strategy.

``python -m tests.models.page RECORD`` writes it from the record of a run of ``make models``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.models import harness, zoo

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "results"
HEAD = """# Models of other libraries

This page says with which models of transformers, timm and peft each strategy gives the result of plain PyTorch. The
models are tiny and built from configurations, in float64, without dropout. Each trains for one epoch in batches with
uneven micro-batches, by its own loss (`model(**batch).loss`) or a loss function, without and with padding. `=` means
the parameters of plain PyTorch on the global batches to 1e-10 (for batch norm and contrastive losses, and for
`local_sgd`, those of a loop that plays the logical workers one after the other).

The models are in `tests/models/`; `make models` runs all cases and writes this page. It needs `transformers`, `timm`
and `peft`.
"""
SIGNS = {"equal": "=", "refused": "refused", "wrong": "**wrong**"}


def newest() -> Path:
    """The record of the newest run."""
    return max(RESULTS.glob("*-models.jsonl"))


def table(record: Path) -> str:
    """The page's text from a record: a row for each model, with the worst outcome of its forms and devices."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    day = record.name.removesuffix("-models.jsonl")
    whole = len(harness.whole())
    text = [HEAD, f"{len(lines)} of {whole} cases, run on {day}. An empty cell has not been run.", ""]
    text += ["| model | " + " | ".join(harness.STRATEGIES) + " |", "|---" * (len(harness.STRATEGIES) + 1) + "|"]
    order = list(SIGNS)
    for model in zoo.MODELS:
        cells = []
        for strategy in harness.STRATEGIES:
            kinds = {line["kind"] for line in lines if (line["model"], line["strategy"]) == (model, strategy)}
            cells.append(SIGNS[max(kinds, key=order.index)] if kinds else "")
        text.append(f"| {model} | " + " | ".join(cells) + " |")
    text += ["", "Refused:", ""]
    text += [f"- {model} under {strategies}: {why}." for model, _, strategies, why in harness.REFUSED]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(table(Path(sys.argv[1])), encoding="utf-8")
