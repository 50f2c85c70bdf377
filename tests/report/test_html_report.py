"""The report shows what a run directory holds, says what it lacks, and is one file without scripts of others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutti.cli.app import main
from tutti.cli.report_command import recipe_law
from tutti.errors import UsageError

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from tests.covering import in_turn
from tutti.planning.device_plan import MeasuredTarget, PlannedStep, TargetData, device_plans
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.plan_file import plan_json
from tutti.report import report_charts
from tutti.report.html_report import write_report
from tutti.report.landscape_section import landscape_section
from tutti.report.report_charts import PARTS, page_colours, thinned
from tutti.report.run_record import read_run
from tutti.report.target_law import TargetLaw

EVIL = "<script>alert(1)</script>"
STEPS = 12
ENDS = ("scale", "low", "high")
NOISES: dict[str, tuple[Any, ...]] = {"noise": (10.0, 8.0, 12.0), "noise/adam": (2.0, 1.0, None)}
"""Noise scale and ends of its band, at the n-th step n times these."""


def write_run(path: Path, devices: int = 1, step: float = 0.5, **summary: Any) -> Path:
    """A run directory of 12 steps of 64 samples and three evaluations; its clock begins at 1000."""
    path.mkdir()
    options = {"task": "digits", "strategy": "mirrored", "devices": str(devices), "batch_size": 64}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    (path / "config.toml").write_text(text, encoding="utf-8")
    environment = {"launched": 1000.0, "started": 1001.0, "host": "node", "versions": {"tutti": "0.1"}}
    (path / "env.json").write_text(json.dumps(environment))
    lines = []
    for number in range(1, STEPS + 1):
        at = {"step": number, "seconds": step * number, "time": 1002 + step * number}
        train = {"group": "train", **at, "samples": 64 * number, "loss": 2 / number, "data_seconds": step / 10}
        noise = {
            f"{of}/{end}": size and size * number
            for of, sizes in NOISES.items()
            for end, size in zip(ENDS, sizes, strict=True)
        }
        lines.append(train | noise)
        if number % 4 == 0:
            lines.append({"group": "eval", **at, "samples": 359, "loss": 2.5 / number, "accuracy": number / 20})
    write_lines(path, lines)
    target = {"metric": "accuracy", "value": 0.4, "reached": True, "steps": 8, "samples": 512, "seconds": 8 * step}
    target |= {"samples_before": 448, "epochs": 0.4}
    known = {"task": "digits", "devices": devices, "strategy": "mirrored", "steps": STEPS, "samples": 64 * STEPS}
    known |= {"seconds": step * STEPS, "global_batch_size": 64, "exit_code": 0, "ended": 1010.0, "target": target}
    known["peak_memory"] = [{"rank": 0, "resident": 2**28, "device": None}]
    (path / "summary.json").write_text(json.dumps({**known, **summary}))
    return path


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


class Page(HTMLParser):
    """Elements, ids, links and headings of a page, and the text of its tables by caption."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[str] = []
        self._within = ""
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._within = tag
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        if self._within == "h2" and data.strip():
            self.headings.append(data)

    def cells(self, caption: str) -> list[list[str]]:
        body = self.text.split(f"<caption>{caption}")[1].split("</table>")[0]
        rows = re.findall(r"<tr>(.*?)</tr>", body.split("<tbody>")[1], re.DOTALL)
        return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def report(*runs: Path, **options: Path) -> Page:
    target = runs[0].parent / "page.html"
    law = recipe_law(options["recipe"]) if "recipe" in options else None
    assert write_report(runs, options.get("plan"), target, law) == target
    return Page(target)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are empty: to draw them takes nearly all of a report's time, and the test reads words and tables alone."""
    monkeypatch.setattr(report_charts, "_svg", lambda draw, caption, *size: f'<svg aria-label="{caption}"></svg>')


@pytest.fixture(scope="module")
def page_of_one(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(write_run(tmp_path_factory.mktemp("report") / "one"))


@pytest.fixture(scope="module")
def page_of_two(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("report")
    return report(write_run(folder / "one"), write_run(folder / "two", devices=2, step=0.3))


def test_one_run(page_of_one: Page) -> None:
    page = page_of_one
    assert "digits trained to accuracy 0.4 on 1 device for 12 steps (768 samples)" in page.text
    assert page.cells("To the target of --until")[0][1:6] == ["accuracy 0.4", "yes", "8", "512", "4 s"]
    assert page.cells("Duration of a step")[0][1:] == ["500 ms", "500 ms–500 ms", "50 ms", "11"]
    assert {"Convergence", "Gradient noise", "Memory", "Environment"} <= set(page.headings)
    assert not {"Scaling", "Timeline", "What changed between the runs"} & set(page.headings)
    missing = page.text.split('id="missing"')[1]
    law = "steps to a target over the batch"
    for name in ("scaling over devices", "a timeline", "a plan", "the loss landscape", law):
        assert f"<strong>{name}</strong>" in missing
    assert not any(
        f"<strong>{name}</strong>" in missing for name in ("gradient noise", "memory of a device", "goodput")
    )
    assert page.cells("Peak memory of each rank") == [["A", "0", "256.0 MiB", "–"]]


def test_the_noise_scale_has_one_chart_with_its_band_and_the_batch(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", global_batch_size=128)
    page = report(one, two)
    for kind in ("noise scale", "noise scale by Adam&#39;s preconditioner"):
        chart = page.text.split(f'aria-label="{kind} over samples, with its 90 % band"')[1].split("</svg>")[0]
        assert "batch of A" in chart and "batch of B" in chart and "fill-opacity" in chart
    assert page.text.count(" over samples, with its 90 % band</figcaption>") == 2
    rows = page.cells("At the last measured step")
    assert rows[0] == ["A", "noise scale", "120", "96–144", "64", "0.533"] and len(rows) == 4
    assert rows[3][2:4] == ["24", "12–∞"]


@pytest.mark.usefixtures("undrawn")
def test_without_noise_the_option_that_measures_it_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run, [{name: value for name, value in line.items() if "noise" not in name} for line in lines])
    assert "train with --noise-every" in report(run).text.split("<strong>gradient noise</strong>")[1][:80]


def write_recipe(path: Path, value: float = 0.4) -> Path:
    """E(B) = 256(1 + B/64) in the median."""
    draws = [[256 * factor, 64] for factor in (0.9, 1.0, 1.1)]
    recipe = {"format": 1, "target": {"metric": "accuracy", "value": value}, "samples_min": 256, "critical_batch": 64}
    path.write_text(json.dumps({**recipe, "draws": draws, "basis": "stated"}))
    return path


def test_steps_to_the_target_are_drawn_with_the_hyperbola_of_a_recipe(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", global_batch_size=256)]
    page = report(*runs, recipe=write_recipe(tmp_path / "recipe.json"))
    for unit in ("steps", "samples"):
        chart = page.text.split(f'aria-label="{unit} to accuracy 0.4 over the batch"')[1].split("</svg>")[0]
        assert "B_crit" in chart and "var(--series0)" in chart and "var(--series1)" in chart and "fill-opacity" in chart
    rows = page.cells("To accuracy 0.4")
    assert rows == [["A", "64", "8", "512", "512", "1.00"], ["B", "256", "8", "512", "1,280", "0.40"]]
    assert "The law rests on: stated." in page.text and "<strong>steps to a target" not in page.text
    other = report(*runs, recipe=write_recipe(tmp_path / "recipe.json", value=0.5))
    assert "A is not shown: it was trained to accuracy 0.4." in other.text


def test_steps_to_the_target_without_a_law(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one"), write_run(tmp_path / "two", global_batch_size=256)]
    page = report(*runs)
    assert page.cells("To accuracy 0.4") == [["A", "64", "8", "512"], ["B", "256", "8", "512"]]
    assert "No law is drawn: give --recipe" in page.text


def test_the_law_of_a_recipe() -> None:
    law = TargetLaw("loss", 1.0, [(100.0, 10.0), (200.0, 10.0), (300.0, 10.0)], (), "recipe.json", "")
    assert law.critical_batch == 10 and law.samples_at(10) == 400 and law.samples_at(10, 0.25) == 300
    line = law.line([5.0, 80.0])
    assert line[0] == pytest.approx((1.25, 225, 123.75, 326.25)) and line[-1][0] == pytest.approx(320)


def landscape_of(step: int = 12) -> dict[str, Any]:
    """Content of ``landscape.json`` with every part."""
    curve = {"eigenvalues": [-1.0, 0.0, 9.0], "density": [0.0, 1.0, 1e-3]}
    values = {"loss": [2.0, 1.0, None], "accuracy": [0.5, 0.9, 0.4]}
    line = {"offsets": [-1.0, 0.0, 1.0], "training": values, "held-out": values}
    rows = [[3, 2, 3], [2, 1, 2], [3, 2, 3]]
    plane = {"offsets": [-1.0, 0.0, 1.0], "levels": [1.5, 2.5], "training": {"loss": rows, "accuracy": rows}}
    return {
        "step": step,
        "training": {"loss": 0.25},
        "held-out": {"loss": 0.5, "accuracy": 0.875},
        "eigenvalues": [{"value": 8.75, "residual": 1e-6}],
        "trace": {"value": 30.5},
        "sharpness": {"epsilon_sharpness_percent": 12.5, "sam_sharpness": 0.0625},
        "density": {"curve": curve},
        "line": line,
        "plane": plane,
        "between": line,
    }


def test_a_landscape_is_shown_where_there_is_one(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    (one / "landscape.json").write_text(json.dumps(landscape_of(step=8)))
    page = report(one, two)
    measured = ["A", "8", "0.25", "8.75", "30.5", "12.5 %", "0.0625"]
    assert page.cells("Around the checkpoint") == [[*measured, "0.5", "0.875"]]
    assert re.findall(r">(held-out \w+)<span", page.text)[-2:] == ["held-out loss", "held-out accuracy"]
    for caption in ("density over eigenvalue", "training loss of A in a plane", "training accuracy of A in a plane"):
        assert f'aria-label="{caption}' in page.text
    for value in ("loss", "accuracy"):
        assert f'aria-label="training and, thin, held-out {value} over distance' in page.text
    assert ">0.0001<" in page.text and "mathdefault" not in page.text
    assert "A: the checkpoint is of step 8" in page.text and "the loss landscape" not in page.text


PARTS_OF_IT = ["training", "eigenvalues", "trace", "sharpness", "density", "line", "between", "plane"]


@pytest.mark.parametrize(("cut", "damaged"), in_turn(PARTS_OF_IT, [False, True]))
def test_a_landscape_without_a_part_or_with_a_damaged_one_is_shown_as_far_as_it_goes(
    tmp_path: Path, cut: str, damaged: bool
) -> None:
    run = write_run(tmp_path / "one")
    # A part is missing, or damaged in one way: each part in another.
    ways: tuple[Any, ...] = (None, ["x"], {"offsets": 3})
    damage = {cut: ways[len(cut) % 3]} if damaged else {}
    found = {name: value for name, value in landscape_of().items() if name != cut} | damage
    (run / "landscape.json").write_text(json.dumps(found))
    section = landscape_section([read_run(run)])
    assert section is not None and section.tables
    assert len(section.charts) == 7 - (cut == "density") - 2 * (cut in ("line", "plane", "between"))


@pytest.mark.usefixtures("undrawn")
def test_the_devices_over_time(tmp_path: Path) -> None:
    first = {"devices": 3, "nodes": {"a": 2, "b": 1}, "started": 1000.0, "seconds": 90.0, "first_step": 0}
    attempts = [{**first, "ending": f"rank 2 {EVIL}"}, {**first, "devices": 2, "first_step": 40, "ending": "done"}]
    page = report(write_run(tmp_path / "one", attempts=attempts))
    rows = page.cells("Attempts of each run")
    assert [row[1:6] for row in rows] == [["1", "3", "a: 2, b: 1", "0", "90 s"], ["2", "2", "a: 2, b: 1", "40", "90 s"]]
    assert rows[1][6] == "done" and EVIL not in page.text
    broken = report(write_run(tmp_path / "two", attempts=[7, {"nodes": 3}]))
    assert [row[2] for row in broken.cells("Attempts of each run")] == ["0", "0"]


@pytest.mark.usefixtures("undrawn")
def test_goodput_is_that_of_the_command(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    goodput = read_run(run).goodput
    assert goodput is not None and 0 < goodput.fraction < 1
    shares = {row[1]: row[3] for row in report(run).cells("Where the time went")}
    assert shares["productive"] == f"{goodput.fraction:.1%}" and shares["start"] == f"{goodput.lost['start'] / 10:.1%}"


def test_several_runs_are_compared(page_of_two: Page) -> None:
    page = page_of_two
    assert "B was the first of 2: 2.4 s of training" in page.text
    assert [row[1:] for row in page.cells("Against A")] == [["1", "128", "100%"], ["2", "213", "83%"]]
    assert ["devices", "option", "1", "2"] in page.cells("Only what differs")
    assert page.cells("To held-out accuracy 0.6")[1] == ["B", "12", "768", "3.6 s"]


def test_nothing_is_asked_of_a_network(page_of_two: Page) -> None:
    page = page_of_two
    assert page.links and all(link.startswith(("#", "data:")) for link in page.links)
    assert "http://" not in page.text and "https://" not in page.text and "@import" not in page.text
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", page.text))
    assert not {"link", "iframe", "img", "object", "embed"} & set(page.tags) - {"link"}
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_charts_take_the_colours_of_the_page(page_of_one: Page) -> None:
    page = page_of_one
    assert "currentColor" in page.text and "var(--series0)" in page.text and "prefers-color-scheme: dark" in page.text
    assert not [drawn for drawn, _ in page_colours() if drawn in page.text]
    assert all(f"--part-{name.replace(' ', '-')}:" in page.text for name in PARTS)


def test_what_a_user_wrote_is_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / EVIL.replace("/", "∕"), task=EVIL, diagnoses=[EVIL], strategy=EVIL)
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run, [{**line, "accuracy": 0.1, EVIL: 1.0} for line in lines])
    plan = tmp_path / "plan.json"
    lost = {"text": EVIL}
    plans = [{EVIL: EVIL, "options": {EVIL: EVIL}, "lost": lost, "marks": [EVIL], "strategy": EVIL}]
    plan.write_text(json.dumps({EVIL: EVIL, "format": "tutti plan", "headline": EVIL, "plans": plans}))
    (run / "trace").mkdir()
    event = {"ph": "X", "tid": 0, "ts": 0, "dur": 5, "name": EVIL}
    (run / "trace" / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    page = report(run, plan=plan, recipe=write_recipe(tmp_path / f"{EVIL.replace('/', '∕')}.json"))
    assert page.tags.count("script") == 1 and "<script>alert" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text and {"Timeline", "Memory", "The plan"} <= set(page.headings)


def test_formulas_in_names_are_not_typeset(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    write_lines(run, [{**line, r"$\frac{1}$": 1.0} for line in lines])
    assert r"held-out $\frac{1}$" in report(run).text


FILES = ("config.toml", "env.json", "metrics.jsonl", "summary.json")


@pytest.mark.parametrize("file", FILES)
def test_an_incomplete_run_is_reported(tmp_path: Path, file: str) -> None:
    run = write_run(tmp_path / "one")
    (run / file).unlink()
    page = report(run)
    trouble = page.text.split("What went wrong, or is missing</h2>")[1].split("</section>")[0]
    assert f"{file} is missing" in trouble


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", ["", "[1", "5\n[]\n", '{"group": "train"}', "\x00\udcff"])
def test_an_unreadable_part_is_a_problem(tmp_path: Path, file: str, content: str) -> None:
    run = write_run(tmp_path / "one")
    (run / file).write_bytes(content.encode(errors="surrogateescape"))
    assert read_run(run).problems


@pytest.mark.usefixtures("undrawn")
def test_a_name_with_an_invalid_byte_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    (run / "env.json").write_bytes(b'{"launched": 1000.0, "host": "no\xffde"}')
    assert not read_run(run).problems
    assert "no\ufffdde" in report(run).text


def test_records_of_other_types_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", target={"metric": 3}, eval=[1], devices="many", diagnoses=7, exit_code="x")
    odd = [{"group": "train", "step": [], "seconds": "x", "samples": {}, "loss": 10**400, "time": None}]
    write_lines(run, [*odd * 3, {"group": "eval", "accuracy": True}, {"group": 5}])
    assert "no end is recorded" in report(run).text


@pytest.mark.usefixtures("undrawn")
def test_a_crashed_run_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", exit_code=5)
    (run / "logs").mkdir()
    failure = {"rank": 1, "step": 7, "message": "the peer closed the connection"}
    (run / "logs" / "failure-rank1.json").write_text(json.dumps(failure))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"group": "tr')
    page = report(run)
    for text in ("exit code 5: peer", "rank 1, step 7: the peer closed the connection", "1 line of metrics.jsonl"):
        assert text in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_prediction_stands_beside_the_measurement(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one")
    plan = tmp_path / "simulated.json"
    rows = [{"devices": d, "batch": 64, "strategy": "mirrored", "seconds": 0.4, "band": [0.3, 0.6]} for d in (1, 2)]
    plan.write_text(json.dumps({"format": "tutti simulation", "steps": rows}))
    [row] = report(run, plan=plan).cells("Predicted beside measured")
    assert row[1:] == ["step", "1", "400 ms", "300 ms–600 ms", "500 ms", "1.25", "yes"]
    toml = tmp_path / "plan.toml"
    toml.write_text('strategy = "sharded"\nbatch_size = 64\n')
    assert ["strategy", "sharded", "mirrored"] in report(run, plan=toml).cells("Planned options")


@pytest.mark.usefixtures("undrawn")
def test_the_time_to_a_target_is_no_step(tmp_path: Path) -> None:
    """In ``tutti plan --json`` the ``seconds`` and the ``band`` are of the time to the target."""
    step = PlannedStep(1, 64, "mirrored", 0.4, np.full(DRAWS, 0.4), {"compute": 0.4}, "measured")
    measured = [MeasuredTarget(64, 512.0, 1), MeasuredTarget(128, 600.0, 1)]
    other = replace(step, options=(("micro_batch", 8),))
    plans = device_plans([step, other], TargetData(measured, None, {}, "digits"), None)
    values = plan_json(plans, {}, {})
    assert values[0]["seconds"] == pytest.approx(3.2)
    for value in values:
        value["band"] = [3.0, 3.5]
    plan = tmp_path / "plan.json"
    target = {"metric": "accuracy", "value": 0.4}
    plan.write_text(json.dumps({"format": "tutti plan", "version": 1, "target": target, "plans": values}))
    rows = report(write_run(tmp_path / "one"), plan=plan).cells("Predicted beside measured")
    assert [row[1:] for row in rows] == [
        ["step", "1", "400 ms", "no band", "500 ms", "1.25", "no band"],
        ["samples to the target", "1", "512", "no band", "512", "1.00", "no band"],
        ["time to the target", "1", "3.2 s", "3 s–3.5 s", "4 s", "1.25", "no"],
    ]


def test_a_plan_file_shows_its_runners_up_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for batch in (64, 128):
        run = write_run(tmp_path / f"of{batch}", global_batch_size=batch)
        (run / "config.toml").write_text(
            f'task = "digits"\ndevices = "1"\nbatch_size = {batch}\nuntil = "accuracy=0.4"\n'
        )
    words = ["--target", "accuracy=0.4", "--batch-size", "64", "128", "--out", str(tmp_path / "plan.toml")]
    assert main(["plan", "digits", "--runs", str(tmp_path / "of64"), str(tmp_path / "of128"), *words]) == 0
    assert main(["train", "--config", str(tmp_path / "plan.toml"), "--print-config"]) == 0
    capsys.readouterr()
    page = report(tmp_path / "of64", tmp_path / "of128", plan=tmp_path / "plan.toml")
    rows = page.cells("Plans, and why they lost")
    assert len(rows) == 2 and rows[0][9].startswith("chosen") and rows[1][10] not in ("", "–")
    assert {row[1] for row in page.cells("Predicted beside measured")} >= {"step", "time to the target"}
    assert "Steps to the target over the batch" in page.headings and "E_min(1 + B/B_crit) of plan.toml" in page.text
    assert page.cells("Planned options")


@pytest.mark.usefixtures("undrawn")
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, empty = write_run(tmp_path / "one"), tmp_path / "empty"
    empty.mkdir()
    bad = tmp_path / "plan.toml"
    bad.write_text("= 3")
    for words, said in (
        ([str(empty)], "this directory is no run"),
        ([str(tmp_path / "nothing")], "there is no run"),
        ([], "no run is given"),
        ([str(run), str(run)], "given twice"),
        ([str(run), "--out", str(empty)], "--out is a directory"),
        ([str(run), "--out", str(run / "metrics.jsonl")], "is no HTML page"),
        ([str(run), "--plan", str(bad)], "this is no plan"),
        ([str(run), "--plan", str(empty / "x.toml")], "there is no plan"),
        ([str(run), "--recipe", str(bad)], "the recipe is not JSON"),
        ([str(run), "--recipe", str(run / "summary.json")], "the recipe has format"),
        ([str(run), "--recipe", str(empty / "x.json")], "cannot read the recipe"),
    ):
        assert main(["report", *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(empty / "deeper" / "r.html")]) == 8
    assert main(["report", str(run)]) == 0 and main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(run / "report.html")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.report.html_report.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"jinja2.*tutti-train\[report\]"):
        write_report([write_run(tmp_path / "one")], None, None)


def test_long_curves_are_thinned() -> None:
    points = thinned([(float(x), 1.0) for x in range(100_001)])
    assert len(points) == 400 and points[0][0] < points[-1][0]
