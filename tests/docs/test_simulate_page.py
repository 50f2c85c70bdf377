"""The examples of ``docs/simulate.md`` run, and their output says what they rest on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.faults.commands import tutti

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"


def examples() -> list[list[str]]:
    block = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)[0]
    return [shlex.split(line)[1:] for line in block.splitlines()]


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, sweep, pipeline = examples()
    shown = tutti(tmp_path, *one)
    assert shown.code == 0, shown.err
    assert re.search(r"^16 +65536 ", shown.out, re.M)
    assert "no band: nothing like this was checked" in shown.out and "rests on  published rows of A100" in shown.out
    drawn = tutti(tmp_path, *sweep, "--json")
    assert drawn.code == 0, drawn.err
    found = json.loads(drawn.out)
    assert [step["devices"] for step in found["steps"]] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert all(step["band"] is None and sum(step["shares"].values()) == pytest.approx(1) for step in found["steps"])
    assert found["guesses"] and "</svg>" in (tmp_path / "sweep.svg").read_text(encoding="utf-8")
    staged = tutti(tmp_path, *pipeline)
    assert staged.code == 0, staged.err
    assert "bubble" in staged.out
    picture = (tmp_path / "step.svg").read_text(encoding="utf-8")
    assert "device 1" in picture and "F3 of stage 1" in picture


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strategy", "parameter_server:backup=1"), "backup workers cannot be simulated"),
        (("--sweep", "devices=8"), "write devices=8..1024"),
        (("--network", "alpha=1"), "seconds a message"),
        (("--machine", "old.json"), "has version 0"),
        (("--batch-size", "8", "--device-batch", "8"), "leave out one"),
        (("--batch-size", "0"), "--batch-size is 0"),
        (("--devices", "3", "--strategy", "pipeline:stages=2"), "multiple of 2"),
    ],
)
def test_what_cannot_be_predicted_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"format": "tutti machine", "version": 0}', encoding="utf-8")
    machine = () if "--machine" in words else ("--machine", "a100x8")
    refused = tutti(tmp_path, "simulate", "digits", *machine, "--precision", "bf16", *words)
    assert refused.code == 2 and message.lower() in refused.err.lower(), refused.err
