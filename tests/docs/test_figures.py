"""Every measured figure in README and docs is what its result file says, or is listed here with a reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.docs import figures
from tests.docs.figures import ROOT, Block, blocks, check, evaluate, without_source

PAGES = [
    *(ROOT / name for name in ("README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "studies").glob("*.md")),
]

# Pages whose figures another test or program holds, or which keep what was measured once and dropped.
ELSEWHERE = {
    "docs/reliability.md": "its tables are made from the results: tests/benchmarks/test_reliability_page.py",
    "docs/log.md": "what was tried and lost; most of it is no longer in the tree, and its results are not kept",
    "docs/backtest.md": "it is made from its result: tests/docs/test_backtest_page.py",
    "docs/backtest-net.md": "it is made from its result: tests/benchmarks/test_backtest_net.py",
    "docs/models.md": "it is made from its record: tests/models/test_models.py",
    "docs/what-works.md": "it is made from the scripts' run: tests/scripts/test_scripts.py",
}

PUBLISHED = "published by the course"
SETTING = "a setting or a size, and no measurement"
THEORY = "follows from a formula"
NOT_KEPT = "measured, and the runs are not kept"

# Text around a figure without a source, by page; the text must be there.
LISTED: Mapping[str, Mapping[str, str]] = {
    "benchmarks/README.md": {"64 MiB of parameters, Adam; `results/": SETTING},
    "docs/central-storage.md": {"optimizer state (Adam: 2 × the parameters)": THEORY, "often have 64 MiB": SETTING},
    "docs/chaos.md": {"More than 1 GiB is filled": SETTING},
    "docs/collectives.md": {"a sum of 8 MB takes": SETTING},
    "docs/large-batch.md": {"rate × √(batch": THEORY, "rate × batch": THEORY},
    "docs/parameter-server.md": {"run on the same day had 30 ms, 0.32 and 3.0 for 25 MB": NOT_KEPT},
    "docs/pipeline.md": {
        "| `gpipe` | 75.0% | 60.0% | 42.9% | 27.3% | 15.8% | 8.6% |": THEORY,
        "| `1f1b` | 75.0% | 60.0% | 42.9% | 27.3% | 15.8% | 8.6% |": THEORY,
        "| `interleaved` | 75.0% | 55.6% | 27.3% | 15.8% | 8.6% | 4.5% |": THEORY,
        "| `zero_bubble` | 66.7% | 45.5% | 20.0% | 11.1% | 5.9% | 3.0% |": THEORY,
    },
    "docs/sharded.md": {
        "(on a CPU some 300 MB a process)": NOT_KEPT,
        "every block of 4 MiB and more": SETTING,
        "asks for it, from 1 MB on": SETTING,
    },
    "docs/tensor.md": {"up to 1 MiB: one of 32 KiB over two ranks": SETTING},
    "docs/survival.md": {"It takes some 4 MB of memory": "benchmarks/watchdog.py prints it and keeps nothing"},
    "docs/studies/large-batch.md": {
        "one GPU 71 %, eight GPUs 44 %": PUBLISHED,
        '"with batch norm" 64 %, "with LR scaling and warm-up" 65 %, "with LAMB" 81 %': PUBLISHED,
        "the rows of 64 % and 65 %": PUBLISHED,
        "From the row of 64 %": PUBLISHED,
        "76.8 % against 76.2 % on the seed that the rates were tuned on": NOT_KEPT,
        "0.001 → 73.9 %, 0.003 → 76.2 %": NOT_KEPT,
        "0.02 (√8-fold: 0.057) → 76.8 %, 0.01 → 76.0 %": NOT_KEPT,
        "Adam 0.001 reaches 72.6 %, and 93 % of the training images": NOT_KEPT,
    },
    "docs/noise.md": {
        "weight of the newest 5 %": SETTING,
        "its 90 % band (Fieller's)": SETTING,
        "in 90 % of 400 draws": "tests/optim/test_noise_scale.py counts them",
    },
    "docs/landscape.md": {
        "the trace with its 90 % band": SETTING,
        "in 90 % of 300 draws": "tests/planning/test_hessian_spectrum.py counts them",
    },
    "docs/plan.md": {
        "| a tested 90 % band": SETTING,
        "at which the last doubling still bought 1.5 ×": SETTING,
        "if they differ by less than 1 %": SETTING,
    },
    "docs/studies/narrow-links.md": {
        "0.75 million parameters, 3 MB": SETTING,
    },
    "docs/studies/too-big.md": {
        "gradient and two moments are 1.6 GB": THEORY,
        "more than its quarter of 1.6 GB: some 400 MB are Python": NOT_KEPT,
        "heap holds 2,746 MiB": NOT_KEPT,
        "a device's state (303 MB)": THEORY,
        "Stacks of threads are of 1 MiB": SETTING,
    },
    "docs/studies/two-devices.md": {
        "24.76 s an epoch on one device, 18.98 s (+30.5 %) with data parallelism and 23.7 s (+4.5 %) with": PUBLISHED,
        "(idle 11 %, [pipeline]": THEORY,
        "| one device | 6.14 | 1 | 1 % |": "the row of what the others are compared with",
        "| one device | 2.33 | 1 | 0 % |": "the row of what the others are compared with",
    },
    "docs/studies/uneven-machines.md": {"takes each of them 40 ms longer": SETTING, "four takes 120 ms": SETTING},
}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_are_what_their_results_say(page: Path) -> None:
    wrong, bare = [], []
    listed, used = LISTED.get(name(page), {}), set()
    for block in blocks(page.read_text(encoding="utf-8")):
        wrong += [f"{name(page)}, the text at line {block.line}: {said}" for said in check(block)]
        used |= figures.cover(block, listed)
        bare += [f"{name(page)}, the text at line {block.line}: …{figure}…" for figure in without_source(block)]
    assert not wrong, "\n".join(wrong)
    if name(page) not in ELSEWHERE:
        assert not bare, "name the result below it (tests/docs/figures.py), or list it:\n" + "\n".join(bare)
    assert used == set(listed), "listed, and not on the page any more"


def test_every_listed_page_exists_and_every_table_of_a_study_has_its_result() -> None:
    assert (LISTED.keys() | ELSEWHERE.keys()) <= {name(page) for page in PAGES}
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")) if page.parent.name == "studies" else ():
            assert not block.table or any(source.kind == "table" for source in block.sources), (name(page), block.line)


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A result file, in a root of its own."""
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.load.cache_clear()
    file = tmp_path / "results.json"
    file.write_text(
        json.dumps({"ways": {"a": {"ratio": 0.3649}, "b": {"ratio": 1.0024}}, "runs": [{"n": "x", "s": 2}]})
    )
    return file


def complaints(text: str) -> list[str]:
    return [said for block in blocks(text) for said in (*check(block), *without_source(block))]


PAGE = """A step takes 0.36 × that, with 1.002 at the end.
<!-- figures: results.json
0.36 × that = ways/a/ratio
with 1.002 = max ways/*/ratio
-->
"""


def test_a_number_that_changes_on_either_side_is_found(result: Path) -> None:
    assert complaints(PAGE) == []
    assert complaints(PAGE.replace("1.002", "1.003")) == ["'with 1.003' says 1.003, and results.json has 1.00240"]
    result.write_text(result.read_text().replace("0.3649", "0.3751"))
    figures.load.cache_clear()
    assert "has 0.3751" in complaints(PAGE)[0]


def test_what_has_no_source_or_no_place_is_found(result: Path) -> None:
    assert "0.36 ×" in complaints(PAGE.partition("<!--")[0])[0]
    assert "30 % less" in complaints("And 30 % less memory." + "\n\n" + PAGE)[0]
    assert complaints("The 95 % interval, 256×256 images and `ms=20` are no figures, nor is step-12.") == []
    assert "no ways/c/ratio" in complaints(PAGE.replace("ways/a", "ways/c"))[0]
    assert "does not stand above" in complaints(PAGE.replace("0.36 × that =", "0.36 × this ="))[0]
    assert "there is no gone.json" in complaints(PAGE.replace("results.json", "gone.json"))[0]
    assert "has 1 numbers and 2 places" in complaints(PAGE.replace("ways/a/ratio", "ways/a/ratio; ways/b/ratio"))[0]


def test_a_table_is_read_row_by_row(result: Path) -> None:
    table = """| way | ratio |
|---|---|
| `a` | 0.36 |
| second | 1.00 |
| other | 7 % |
<!-- table: results.json
second => b
other => -
2 = ways/{row}/ratio
-->
"""
    assert complaints(table.replace("7 %", "–")) == []
    assert ["| other | 7 % |" in said for said in complaints(table)] == [True]
    assert complaints(table.replace("1.00", "1.01").replace("7 %", "–")) == [
        "second: '1.01' says 1.01, and results.json has 1.0024"
    ]


def test_places(result: Path) -> None:
    assert evaluate("ways/b/ratio ÷ ways/a/ratio", "results.json") == pytest.approx(1.0024 / 0.3649)
    assert evaluate("ways/b/ratio − ways/a/ratio in %", "results.json") == pytest.approx(63.75)
    assert evaluate("ways/@1/ratio", "results.json") == evaluate("ways/{b}/ratio", "results.json") == 1.0024
    assert evaluate("runs/n=x/s in %", "results.json") == 200 and evaluate("runs/-1/s", "results.json") == 2
    assert evaluate("halfrange ways/*/ratio", "results.json") == pytest.approx((1.0024 - 0.3649) / 2)
    with pytest.raises(ValueError, match="2 values"):
        evaluate("ways/*/ratio", "results.json")


def test_blocks_know_their_line() -> None:
    found = blocks(
        "# Page\n\n```\n0.5 × in code\n```\n\nText\nof two lines.\n<!-- figures: a.json\nText = b\n-->\n\nMore.\n"
    )
    assert [(block.line, block.text) for block in found] == [(1, "# Page"), (7, "Text\nof two lines."), (13, "More.")]
    assert isinstance(found[1], Block) and found[1].sources[0].lines == ("Text = b",)
