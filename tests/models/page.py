"""``docs/models.md``: models of other libraries under every strategy.

``python -m tests.models.page`` writes it from the records of runs of ``make models``, of which the newest counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.models import harness, zoo
from tests.models.builders import FEW

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "results"
HEAD = """# Models of other libraries

This page says with which models of transformers, timm, peft and diffusers each strategy gives the result of plain
PyTorch. The models are tiny and built from configurations, in float64, without dropout. Each trains for one epoch in
batches with uneven micro-batches, by its own loss (`model(**batch).loss`) or a loss function, without and with padding.
`=` means the parameters of plain PyTorch on the global batches to 1e-10 (for batch norm and contrastive losses, and for
`local_sgd`, those of a loop that plays the logical workers one after the other).

An example, with a model built from a configuration:

```python
import torch
import transformers

import tutti

torch.manual_seed(0)
config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=16, n_positions=8)
model = transformers.GPT2LMHeadModel(config)
tokens = (torch.arange(8) + torch.arange(256)[:, None]) % 16  # each token follows from the one before
dataset = [{"input_ids": row, "labels": row} for row in tokens]


def loss_fn(model, batch):
    return model(**batch).loss


run = tutti.prepare(model, "adam:lr=0.01", dataset, loss_fn, strategy="sharded", batch_size=32)
for epoch in range(4):
    for batch in run.epoch(epoch):
        run.step(batch)
    if tutti.rank() == 0:
        print(f"epoch {epoch}: loss {run.stats.loss:.3f}")
```

The models are in `tests/models/`; `make models` runs all cases and writes this page. It needs `transformers`, `timm`,
`peft` and `diffusers`, which the extra `models` installs, with `scipy` for the losses of detectors. timm brings
torchvision along. Where PyTorch is the build for CPUs, install the torchvision of the same build first, or leave it out
(`pip install --no-deps timm`): the build for GPUs does not load there, and `import transformers` then fails.
"""
SIGNS = {"equal": "=", "refused": "refused", "wrong": "**wrong**"}


def records() -> list[Path]:
    """The records of all runs, the oldest first."""
    return sorted(RESULTS.glob("*-models.jsonl"))


def table(records: Sequence[Path]) -> str:
    """The page's text from records: rows for models, with the worst outcome of their forms and devices.

    Of a case that was run several times the newest outcome counts.
    """
    outcomes, days = {}, {}
    for record in records:
        for text_line in record.read_text(encoding="utf-8").splitlines():
            line = json.loads(text_line)
            case = tuple(line[key] for key in ("model", "form", "strategy", "devices"))
            outcomes[case], days[case] = line, record.name.removesuffix("-models.jsonl")
    lines, whole = list(outcomes.values()), len(harness.whole())
    first, last = min(days.values()), max(days.values())
    day = f"on {last}" if first == last else f"from {first} to {last}"
    text = [HEAD, f"{len(lines)} of {whole} cases, run {day}. An empty cell has not been run.", ""]
    text += _rows([name for name, entry in zoo.MODELS.items() if not entry.strategies], list(harness.STRATEGIES), lines)
    text += ["", "Further architectures, in one form of loss; `tensor` and `pipeline` on two and three devices:", ""]
    text += _rows([name for name, entry in zoo.MODELS.items() if entry.strategies], list(FEW), lines)
    text += ["", "Refused:", ""] if harness.REFUSED else []
    text += [f"- {model} under {strategies}: {why}." for model, _, strategies, why in harness.REFUSED]
    versions = sorted({line["version"] for line in lines if "version" in line})
    return "\n".join([*text, "", f"Tried with {', '.join(versions)}."]) + "\n"


def _rows(models: Sequence[str], strategies: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = ["| model | " + " | ".join(strategies) + " |", "|---" * (len(strategies) + 1) + "|"]
    order = list(SIGNS)
    for model in models:
        cells = []
        for strategy in strategies:
            kinds = {line["kind"] for line in lines if (line["model"], line["strategy"]) == (model, strategy)}
            cells.append(SIGNS[max(kinds, key=order.index)] if kinds else "")
        rows.append(f"| {model} | " + " | ".join(cells) + " |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(table(records()), encoding="utf-8")
