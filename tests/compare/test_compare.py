"""``tutti compare`` as a user runs it: real runs, interrupted and gone on with; what is wrong is said before."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.faults.commands import starting, tutti, write_task
from tests.launching import until

LADDER = """
naive = "many"
[base]
epochs = "{epochs}"
optimizer = "sgd:lr=0.02"
checkpoint_every = "4st"
[[rung]]
name = "one"
workers = 1
batch_size = "{worker_batch}"
[[rung]]
name = "many"
workers = "{workers}"
batch_size = "{batch_size}"
[[rung]]
name = "rule"
lr_scale = "linear:base_batch={worker_batch}"
"""
BODY = """
def loss(model, batch):
    inputs, labels = batch
    time.sleep({pause})
    logits = model(inputs)
    correct = (logits.argmax(1) == labels).sum()
    return nn.functional.cross_entropy(logits, labels, reduction="sum"), len(labels), {{"accuracy": correct}}

def task():
    return Task(name="own", model=model, loss=loss, train=Samples(), eval=Samples())
"""
# A name with two dots, which names files beside the run directories.
TASK = "own.v1.py"
WORDS = ("compare", f"{TASK}:task", "--ladder", "own.toml", "--workers", "3", "--batch-size", "12", "--epochs", "2")


def prepare(folder: Path, pause: float, task: str = TASK) -> None:
    write_task(folder)
    source = (folder / "own.py").read_text()
    cut = source.index("def task():")
    (folder / task).write_text(source[:cut] + BODY.format(pause=pause))
    (folder / "own.toml").write_text(LADDER)


def test_a_ladder_that_is_stopped_goes_on(tmp_path: Path) -> None:
    prepare(tmp_path, 0.05)
    pool = tmp_path / "runs" / "ladders"
    with starting(tmp_path, *WORDS, "--seeds", "1") as running:
        until(lambda: any(pool.glob("*/checkpoints/step-*/manifest.json")) or running.launcher.poll() is not None)
        running.launcher.send_signal(signal.SIGTERM)
        result = running.finish()
    assert result.code == 75, result.err
    assert "The same command continues it" in result.err
    prepare(tmp_path, 0.0)
    result = tutti(tmp_path, *WORDS, "--seeds", "1", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [[run["updates"] for run in rung["runs"]] for rung in found["rungs"]] == [[24], [8], [8]]
    assert len(found["verdict"]) >= 2 and found["effects"][1]["rung"] == "rule"
    names = {path.name for path in (tmp_path / "runs" / "compare-own.v1-own").iterdir()}
    assert {"table.md", "runs.csv", "compare.json"} <= names
    before = {path: path.stat().st_mtime_ns for path in pool.glob("*/summary.json")}
    assert len(before) == 3
    for ending in ("log", "toml"):
        assert {path.name for path in pool.glob(f"*.{ending}")} == {f"{path.parent.name}.{ending}" for path in before}
    assert tutti(tmp_path, *WORDS, "--seeds", "1").code == 0
    assert before == {path: path.stat().st_mtime_ns for path in pool.glob("*/summary.json")}, "a run was made again"


def test_what_is_wrong_is_said_before_any_run(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0)
    for words, code, said in (
        (("--only", "rul"), 2, "there is no rung 'rul'"),
        (("--seeds", "0"), 2, "--seeds is 0"),
        (("--optimizer", "lbfgs"), 2, "unknown optimizer 'lbfgs'"),
        (("--devices", "4"), 2, "rung 'one'"),
        (("--seed", "3"), 2, "--seed"),
    ):
        result = tutti(tmp_path, *WORDS, *words)
        assert (result.code, said in result.err) == (code, True), result.err
    assert not (tmp_path / "runs").exists()
    listed = tutti(tmp_path, *WORDS, "--dry-run")
    assert listed.code == 0 and "9 runs, 0 of them finished" in listed.out


@pytest.mark.full
def test_a_setting_of_the_environment_does_not_undo_what_a_rung_changes(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0)
    words = [word for word in WORDS if word not in ("--batch-size", "12")]
    result = tutti(tmp_path, *words, "--seeds", "1", "--json", TUTTI_BATCH_SIZE="12")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert [[run["updates"] for run in rung["runs"]] for rung in found["rungs"]] == [[24], [8], [8]]


def test_a_metric_that_the_task_does_not_report(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0)
    result = tutti(tmp_path, *WORDS, "--seeds", "1", "--metric", "bleu")
    assert result.code == 2 and "no held-out 'bleu'" in result.err and "accuracy" in result.err


@pytest.mark.full
def test_a_threshold_that_is_not_met(tmp_path: Path) -> None:
    """The figure compared is how far the last bias has moved: not at all where the rate is 0."""
    prepare(tmp_path, 0.0)
    own = (tmp_path / TASK).read_text()
    own = own.replace(
        "correct = (logits.argmax(1) == labels).sum()", "correct = model[-1].bias.abs().sum() * len(labels)"
    )
    own = own.replace("nn.Linear(6, 3))", "nn.Linear(6, 3, bias=True)).apply(flat)")
    own = own.replace(
        "def model():",
        "def flat(module):\n    if isinstance(module, nn.Linear):\n        nn.init.zeros_(module.bias)\n\ndef model():",
    )
    (tmp_path / TASK).write_text(own)
    ladder = (tmp_path / "own.toml").read_text()
    still = ladder.replace('workers = "{workers}"', 'workers = "{workers}"\noptimizer = "sgd:lr=0"')
    for text, code in ((still, 9), (still.replace("workers = 1", 'workers = 1\noptimizer = "sgd:lr=0"'), 0)):
        (tmp_path / "own.toml").write_text(text)
        result = tutti(tmp_path, *WORDS, "--seeds", "1", "--require-held")
        assert result.code == code, result.err + result.out


LINEAR = """
naive = "many"
[base]
epochs = 2
eval_every = "none"
checkpoint_every = "none"
optimizer = "sgd:lr=0.2"
[[rung]]
name = "one"
workers = 1
batch_size = 8
[[rung]]
name = "many"
workers = 4
batch_size = 32
optimizer = "sgd:lr=0.0005"
[[rung]]
name = "faster"
cause = "a faster rate"
optimizer = "sgd:lr=0.005"
"""


@pytest.mark.full
def test_golden_verdict_of_a_task_that_is_judged_by_its_loss(tmp_path: Path) -> None:
    """The one worker's loss is lowest, and the faster of the two slow recipes loses less: nobody asks for ``loss``."""
    (tmp_path / "own.toml").write_text(LINEAR)
    words = ("compare", "linear", "--ladder", "own.toml", "--seeds", "1", "--require-held")
    result = tutti(tmp_path, *words, "--json")
    assert result.code == 9, result.err + result.out
    found = json.loads(result.out)
    one, many, faster = (rung["runs"][0]["held_out"] for rung in found["rungs"])
    assert one < faster < many, "the runs are not what the ladder is for"
    assert (found["metric"], found["better"], found["held"]) == ("loss", "lower", False)
    gains = {effect["rung"]: effect["gain"] for effect in found["effects"]}
    assert gains["many"] == pytest.approx(one - many) and gains["faster"] == pytest.approx(many - faster)
    said = found["verdict"]
    assert f"held-out loss {one:.4f} → {many:.4f}, +{many - one:.4f} (lower is better)" in said[0]
    assert said[1].startswith(f"A faster rate brings {many - faster:.4f}, ")
    assert said[2] == f"The best recipe, 'faster' ({faster:.4f}), does not reach 'one' ({one:.4f})."
    turned = tutti(tmp_path, *words, "--metric", "loss:higher")
    assert turned.code == 0, "as it is asked for"
    assert f"The best recipe, 'many' ({many:.4f}), reaches 'one' ({one:.4f})." in turned.out


@pytest.mark.full
def test_golden_verdict_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(LINEAR.replace("epochs = 2", "epochs = 1").replace("sgd:lr=0.2", "adam:lr=0.01"))
    (tmp_path / "words.txt").write_text("all players together " * 60)
    model = ("--data", "words.txt", "--model", "gpt:layers=1,heads=1,width=8,block=8")
    result = tutti(tmp_path, "compare", "text", *model, "--ladder", "own.toml", "--seeds", "1", "--json")
    assert result.code == 0, result.err + result.out
    found = json.loads(result.out)
    one, many, faster = (rung["runs"][0]["held_out"] for rung in found["rungs"])
    assert one < faster < many, "the runs are not what the ladder is for"
    assert found["metric"] == "loss" and not found["held"]
    assert found["verdict"][-1].startswith(f"The best recipe, 'faster' ({faster:.4f}), ")


@pytest.mark.full
def test_a_metric_whose_direction_nobody_knows(tmp_path: Path) -> None:
    """The task may declare it, which its first run tells; else it is refused, and no run is lost."""
    prepare(tmp_path, 0.0)
    own = (tmp_path / TASK).read_text().replace('"accuracy": correct', '"distance": correct')
    (tmp_path / TASK).write_text(own)
    words = (*WORDS, "--seeds", "1", "--json")
    result = tutti(tmp_path, *words, "--metric", "distance")
    assert result.code == 2 and "distance:min or distance:max" in result.err, result.err
    assert len(list((tmp_path / "runs" / "ladders").glob("*/summary.json"))) == 1, "it was said too late, or too early"
    lower = tutti(tmp_path, *words, "--metric", "distance:lower")
    higher = tutti(tmp_path, *words, "--metric", "distance:higher")
    assert lower.code == higher.code == 0, lower.err + higher.err
    gains = [[effect["gain"] for effect in json.loads(each.out)["effects"]] for each in (lower, higher)]
    assert gains[0] == [-gain for gain in gains[1]] and any(gains[0])
    for summary in (tmp_path / "runs" / "ladders").glob("*/summary.json"):
        assert "directions" not in json.loads(summary.read_text())
    (tmp_path / TASK).write_text(own.replace('name="own"', 'name="own", directions={"distance": "lower"}'))
    result = tutti(tmp_path, *words, "--metric", "distance", "--runs", "others")
    assert result.code == 0, result.err
    assert json.loads(result.out)["better"] == "lower"
    built_in = tutti(tmp_path, "compare", "digits", "--metric", "distance", "--runs", "third")
    assert built_in.code == 2 and "distance:min" in built_in.err and not (tmp_path / "third").exists()


def test_a_ladder_in_which_nothing_can_hold_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path, 0.0)
    two = LADDER.replace('name = "many"', 'name = "many"\noptimizer = "adam:lr=0.001"')
    (tmp_path / "own.toml").write_text(two)
    result = tutti(tmp_path, *WORDS, "--require-held")
    assert result.code == 2 and "no rung of this ladder can be compared with another" in result.err
    assert not (tmp_path / "runs").exists()
