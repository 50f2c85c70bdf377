"""``machine.json`` and what is measured for it: lines, files, refusals, and one real measurement of ranks."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.faults.commands import tutti
from tutti.errors import UsageError
from tutti.workload.bench_timing import fit_line, fit_link
from tutti.workload.machine_figure import write_machine_figure
from tutti.workload.machine_file import Curve, CurvePoint, Figure, Machine, machine_json, read_machine, write_machine

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"
CURVE = Curve("byte", (CurvePoint(8.0, 1e-6, 1e-8, 5), CurvePoint(800.0, 2e-6, 1e-8, 5)), 1e9, 1e-6, 0.1)
MACHINE = Machine(
    {"name": "lab"},
    {"type": "cpu", "name": "Z80"},
    ("links",),
    {"start/2": Figure(3.0, "s", 1, None)},
    {"links/0-1": CURVE},
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_machine(MACHINE, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == MACHINE


def test_a_number_that_was_not_measured_is_refused_with_its_command() -> None:
    assert MACHINE.figure("start/2").value == 3.0 and MACHINE.curve("links/0-1").seconds(1000) == pytest.approx(2e-6)
    for ask in (MACHINE.figure, MACHINE.curve):
        with pytest.raises(UsageError, match="Measure it with tutti bench device"):
            ask("device/copy")  # type: ignore[operator]


@pytest.mark.parametrize("change", [{"version": 0}, {"version": None}, {"format": "nccl"}, {"curves": {"a": {}}}])
def test_other_files_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps({**machine_json(MACHINE), **change}))
    with pytest.raises(UsageError) as caught:
        read_machine(tmp_path / "machine.json")
    assert caught.value.exit_code == 2 and "tutti bench" in str(caught.value)


def changed(name: str, **values: object) -> dict[str, object]:
    """Return the content of a machine file with a changed figure or curve, or with another one of this name."""
    content = machine_json(MACHINE)
    kind = "figures" if name.startswith(("start", "jitter")) else "curves"
    [known] = content[kind].values()
    return {**content, kind: {name: {**known, **values}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed("start/2", value="fast"), "value of start/2 is 'fast', no number of at least 0"),
        (changed("start/2", value=float("nan")), "value of start/2 is nan"),
        (changed("jitter/time/two"), "jitter/time/two names no ranks"),
        (changed("links/a-b"), "links/a-b names no ranks"),
        (changed("device/copy", rate=0), "rate of device/copy is 0, no number above 0"),
        (changed("device/copy", fixed=-1e-6), "fixed of device/copy is -1e-06"),
        (changed("device/copy", points=[asdict(CurvePoint(8.0, 0.0, 0.0, 1))]), "seconds of device/copy is 0.0"),
        ({**machine_json(MACHINE), "host": None}, "host is None, no object"),
        ({**machine_json(MACHINE), "device": "cpu"}, "device is 'cpu', no object"),
        ({**machine_json(MACHINE), "device": {"type": "cpu", "threads": "two"}}, "threads of device is 'two'"),
        ({**machine_json(MACHINE), "parts": [None]}, "no names"),
        ({**machine_json(MACHINE), "measured": None}, "measured is None, no date"),
    ],
)
def test_a_number_that_nothing_measures_is_refused(content: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="this machine file is damaged") as caught:
        read_machine(tmp_path / "machine.json")
    assert message in str(caught.value) and "Make it with tutti bench -o FILE" in str(caught.value)


def test_a_line_has_the_least_relative_errors() -> None:
    """Noise of 1 % on large sizes must not hide the fixed cost of small ones."""
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    points = [CurvePoint(s, (2e-5 + s / 5e9) * (1 + 0.01 * (-1) ** i), 0.0, 9) for i, s in enumerate(sizes)]
    line = fit_line("byte", points)
    assert line.fixed == pytest.approx(2e-5, rel=0.02) and line.rate == pytest.approx(5e9, rel=0.02)
    assert 0.005 < line.error < 0.02


def test_the_rate_of_a_link_is_that_of_large_messages() -> None:
    """A token bucket lets a burst of 64 KiB through at once, after which a link has 10 MB/s."""
    sizes = [2**power for power in range(10, 26, 2)]
    points = [CurvePoint(s, 2e-4 + s / 1e9 + max(0, s - 2**16) / 1e7, 0.0, 9) for s in sizes]
    link = fit_link(points)
    assert link.rate == pytest.approx(1e7, rel=0.02) and 0 <= link.fixed < 2e-4
    assert len(link.points) == 8
    # Large messages that are a little slow do not hide the latency.
    plain = [CurvePoint(s, 2e-4 + s / 1e9 * (1.02 if s > 2**20 else 1), 0.0, 9) for s in sizes]
    assert fit_link(plain).fixed == pytest.approx(2e-4, rel=0.01)
    assert fit_link(plain[:2]).rate == pytest.approx(1e9, rel=0.01)


def test_a_line_never_has_a_negative_fixed_cost() -> None:
    line = fit_line("FLOP", [CurvePoint(1e3, 1e-6, 0.0, 5), CurvePoint(1e6, 2e-3, 0.0, 5)])
    assert line.fixed == 0.0 and line.rate > 0


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_machine_figure(MACHINE, tmp_path / "machine.svg")
    assert "</svg>" in (tmp_path / "machine.svg").read_text(encoding="utf-8")


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    block = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)[0]
    first, second = (shlex.split(line)[1:] for line in block.splitlines())
    measured = tutti(tmp_path, *first, "--ranks", "2")
    assert measured.code == 0, measured.err
    assert "links/0-1" in measured.out and "start/2: " in measured.err
    found = read_machine(tmp_path / "machine.json")
    assert set(found.curves) == {"links/0-1", "one_way/0-1", "optimizer/sgd", "optimizer/adam"}
    assert set(found.figures) == {"start/2", "optimizer/sgd/tensor", "optimizer/adam/tensor"}
    link = found.curve("links/0-1")
    assert [point.size for point in link.points] == sorted(2.0**power for power in range(10, 26, 2))
    assert all(point.n >= 5 for point in link.points)
    assert tutti(tmp_path, *second).code == 0


@pytest.mark.parametrize(
    ("words", "message"), [(("disks",), "Did you mean 'disk'"), (("links", "--ranks", "1"), "numbers of at least 2")]
)
def test_unknown_parts_and_too_few_ranks_are_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    refused = tutti(tmp_path, "bench", *words)
    assert refused.code == 2 and message in refused.err
