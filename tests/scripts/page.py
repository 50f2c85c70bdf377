"""``docs/what-works.md``: every script under every strategy.

``python -m tests.scripts.page RECORD`` writes it from the record of a run, which ``make scripts`` makes of all cases.
Of a record of fewer cases it says how many: the table is the reviewed list, which the cases that were run confirm.
"""

from __future__ import annotations

import ast
import datetime
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.scripts import expected, table
from tests.scripts.expected import Refusal
from tests.scripts.table import HERE, STRATEGIES, Case

ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "what-works.md"
HEAD = """# What works

This page tells you whether a training script like yours runs under a strategy. Find the script in the second table: `=`
is equal to plain PyTorch, and a number is the reason, in the last table, for which tutti refuses it. To see it run:

```console
$ make scripts PART=1/100    # a hundredth of the cases below
```

Each script, written as people write them in plain PyTorch, is compared with the same script with tutti, under each
strategy on one, two and three devices, in float64. It ends in one of two ways:

- **equal**: the weights are those of the plain script to 1e-10. With several logical workers or random draws, the plain
  script plays the workers one after the other with tutti's random streams; for `local_sgd` and `diloco` it is that
  algorithm by hand.
- **refused**, on every rank, before the first update that would be wrong, with an error that says what to do. The
  reason is of **mathematics** where what the script asks for does not exist under the strategy, and **missing** where
  the strategy could do it and does not yet.

A few end with an error of PyTorch's own, in the line that asks for what does not exist; those are counted apart.
The scripts are in `tests/scripts/`; `make scripts` runs all cases and writes this page. Models of transformers,
timm and peft under each strategy are in [models](models.md).
"""


@dataclass(frozen=True)
class Cell:
    """A script under a strategy: the reason of its refusal, and the one where ranks have several micro-batches."""

    refused: Refusal | None
    spare: Refusal | None

    @property
    def equal(self) -> bool:
        """With as many logical workers as data ranks, on all numbers of devices."""
        return self.refused is None


def cell(script: str, strategy: str) -> Cell:
    """What the reviewed list says of all cases of a script and a strategy."""
    found: dict[bool, Refusal | None] = {}
    for case in table.whole():
        if case.script == script and case.strategy == strategy:
            found[case.spare] = found.get(case.spare) or expected.refusal(case)
    return Cell(found.get(False), found.get(True))


def tables() -> str:
    """Counts by strategy, all cells, and the reasons."""
    cells = {(script, name): cell(script, name) for script in table.scripts() for name in STRATEGIES}
    listed = [entry for entry in expected.refusals() if not entry.accelerators]
    reasons = {entry: number for number, entry in enumerate(listed, 1)}
    lines = [
        "| strategy | as tutti takes it | equal | refused: mathematics | refused: missing | PyTorch's own error |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in STRATEGIES.items():
        column = [cells[script, name] for script in table.scripts()]
        kinds = [each.refused.kind for each in column if each.refused is not None]
        equal = sum(each.equal for each in column)
        share = f"{equal} of {len(column)} ({equal / len(column):.0%})"
        counts = " | ".join(str(kinds.count(kind)) for kind in ("mathematics", "missing", "pytorch"))
        lines.append(f"| {name} | `{row.text}` | {share} | {counts} |")
    lines += [
        "",
        "`=` is equal; a number is the reason, below, for which it is refused; `=` with a number: equal with as",
    ]
    lines += ["many logical workers as data ranks, and refused with more.", ""]
    names = list(STRATEGIES)
    lines += ["| script | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for script in table.scripts():
        shown = [_shown(cells[script, name], reasons) for name in names]
        lines.append(f"| {title(script)} | " + " | ".join(shown) + " |")
    lines += ["", "| | refused | because | kind |", "|---|---|---|---|"]
    lines += [f"| {n} | {e.strategies} | {e.reason} | {e.kind} |" for e, n in reasons.items()]
    return "\n".join(lines) + "\n"


def _shown(found: Cell, reasons: dict[Refusal, int]) -> str:
    if found.refused is not None:
        return str(reasons[found.refused])
    return f"= ({reasons[found.spare]})" if found.spare is not None else "="


def title(script: str) -> str:
    """The first line of a script's docstring."""
    text = ast.get_docstring(ast.parse((HERE / f"{script}.py").read_text(encoding="utf-8"))) or script
    return text.splitlines()[0].rstrip(".")


def differing(record: Path) -> list[str]:
    """Cases that ended otherwise than the reviewed list says, or that were not run."""
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    cases = {Case.parse(line["case"]): line for line in lines}
    ended = {case: expected.ended(case, line["kind"], line["text"]) for case, line in cases.items()}
    want = {case: "refused" if expected.refusal(case) else "equal" for case in ended}
    return [f"{case}: {ended[case]}, not {kind}" for case, kind in want.items() if ended[case] != kind]


def main(record: str) -> None:
    """Write the page. Raises SystemExit where a case of the record did not end as listed."""
    if found := differing(Path(record)):
        raise SystemExit("\n".join(["the page is not written:", *found[:20], f"{len(found)} cases in all"]))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    ran = len({json.loads(line)["case"] for line in Path(record).read_text(encoding="utf-8").splitlines()})
    run = f"{ran} of {len(table.whole())} cases of {len(table.scripts())} scripts, run on {day} at commit {commit}; "
    run += "the tables show the reviewed list, `tests/scripts/refused.toml`, which these cases confirm.\n"
    PAGE.write_text("\n".join([HEAD, run, tables()]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
