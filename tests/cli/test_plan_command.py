"""``tutti plan``: an answer from runs and a machine, a file that ``tutti train`` takes, exit codes and refusals."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.commands import tutti
from tests.planning.test_other_time import END, EVALUATION, SAVE, START, STEP, write_timed
from tests.planning.test_run_evidence import write_run
from tutti.cli.plan_answer import PlanLimits
from tutti.cli.plan_command import _searcher
from tutti.config.settings import read_file, resolve_config
from tutti.planning import step_prediction
from tutti.planning.device_plan import MeasuredTarget, PlannedStep, TargetData
from tutti.planning.machine_choice import open_machine
from tutti.planning.plan_file import memory_words
from tutti.planning.planned_run import PlannedRun

A100 = ("--machine", "a100x8", "--precision", "bf16")


def write_runs(folder: Path) -> Path:
    for batch, samples in ((32, 12800), (64, 13600), (128, 16000)):
        write_run(folder / "runs" / str(batch), batch, samples, step_seconds=batch / 3200)
    return folder


def planned(folder: Path, *words: str) -> dict[str, Any]:
    done = tutti(folder, "plan", "digits", "--runs", "runs", *words, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_plan_from_runs_and_published_hardware(tmp_path: Path) -> None:
    machine = ("--machine", "a100x8", "--precision", "bf16", "--max-devices", "2", "--price", "2@2026-11-27")
    found = planned(
        write_runs(tmp_path), *machine, "--strategy", "mirrored", "parameter_server", "parameter_server:backup=1"
    )
    assert {each["devices"] for each in found["plans"]} == {1, 2}
    chosen = found["plans"][found["chosen"]]
    assert "knee" in chosen["marks"] and chosen["lost"] is None
    assert all(each["lost"]["text"] for each in found["plans"] if each["lost"])
    assert all(each["step_terms"] and "predicted" in each["step_basis"] for each in found["plans"])
    # Batches 32 … 512, a share in 1, 2, 4 … 64 micro-batches: mirrored on one device and on two, servers on two.
    assert found["searched"] - sum(found["refused"].values()) == len(found["plans"]) == 98
    assert found["evaluated"] == sum(each["evaluated"] for each in found["plans"]) < 98
    assert any("micro_batch" in each["options"] for each in found["plans"])
    assert any(text.startswith("parameter_server") for text in found["refused"])
    for each in found["plans"]:
        for name, ends in (("step_seconds", "step_draws"), ("seconds", "draws"), ("cost", "cost_draws")):
            low, high = each[ends]
            assert 0 < low <= 1.01 * each[name] and each[name] <= 1.01 * high, (name, each)
        assert each["cost"] == pytest.approx(2 * each["devices"] * each["seconds"] / 3600)
    assert found["price"] == {"device_hour": 2, "date": "2026-11-27"} and found["guesses"]
    assert any("another machine" in note for note in found["notes"])
    assert all(each["band"] is None and "no band" in each["band_text"] for each in found["plans"])


def test_measured_steps_alone_and_a_file_that_train_takes(tmp_path: Path) -> None:
    write_runs(tmp_path)
    found = planned(tmp_path, "--out", "plan.toml", "--deadline", "1h")
    chosen = found["plans"][found["chosen"]]
    assert {each["batch"] for each in found["plans"]} == {32, 64, 128} and chosen["batch"] == 32
    assert any("without --machine" in note for note in found["notes"])
    assert chosen["seconds"] == pytest.approx(4.0, rel=0.02) and "measured in 1 run" in chosen["step_basis"]
    task, config = resolve_config({}, [tmp_path / "plan.toml"], None)
    assert (task, config.batch_size, config.devices) == ("digits", 32, "1")
    assert str(config.target()) == "accuracy >= 0.93" and (config.samples or 0) >= 1.2 * chosen["samples"]
    assert "optimizer" in read_file(tmp_path / "plan.toml")
    assert "at this batch" in found["learning_rate"]["text"] and config.lr_scale == "none"
    assert f"# learning rate {found['learning_rate']['text']}" in (tmp_path / "plan.toml").read_text()
    trained = tutti(tmp_path, "train", "--config", "plan.toml", "--dry-run")
    assert trained.code == 0, trained.err


def test_a_batch_that_no_run_has_trained_gets_a_scaled_rate(tmp_path: Path) -> None:
    write_runs(tmp_path)
    words = (
        "plan",
        "digits",
        "--runs",
        "runs",
        *A100,
        "--max-devices",
        "1",
        "--batch-size",
        "512",
        "--out",
        "plan.toml",
    )
    done = tutti(tmp_path, *words)
    assert done.code == 0, done.err
    (line,) = (line for line in done.out.splitlines() if line.startswith("rate "))
    assert "sqrt:base_batch=128" in line and "an assumption: no run of batch 512" in line
    _, config = resolve_config({}, [tmp_path / "plan.toml"], None)
    assert config.lr_scale == "sqrt:base_batch=128" and config.lr_rule.factor(config.batch_size) == 2


def test_limits_that_cannot_be_met_end_with_9(tmp_path: Path) -> None:
    write_runs(tmp_path)
    missed = tutti(tmp_path, "plan", "digits", "--runs", "runs", "--deadline", "1s", "--out", "plan.toml")
    assert missed.code == 9, missed.err
    assert "No plan reaches accuracy >= 0.93 within 1 s (by the point figures: there is no band)" in missed.out
    assert not (tmp_path / "plan.toml").exists()
    for batch in (32, 64, 128):
        write_run(tmp_path / "never" / str(batch), batch, None, step_seconds=0.01)
    never = tutti(tmp_path, "plan", "digits", "--runs", "never")
    assert never.code == 9 and "no run has reached accuracy >= 0.93" in never.err


def test_a_plan_that_fits_little_memory_is_one_that_train_takes(tmp_path: Path) -> None:
    write_runs(tmp_path)
    machine = ("--machine", "a100x8", "--precision", "bf16", "--max-devices", "1", "--batch-size", "512")
    free = planned(tmp_path, *machine)
    chosen = free["plans"][free["chosen"]]
    tight = planned(tmp_path, *machine, "--device-memory", "0.003", "--out", "plan.toml")
    small = tight["plans"][tight["chosen"]]
    assert not chosen["options"] and small["options"] and small["seconds"] > chosen["seconds"]
    assert any("GiB short at the least, where activations takes most" in text for text in tight["refused"])
    assert small["memory"]["total"] == pytest.approx(sum(small["memory"].values()) / 2)
    assert small["memory"]["total"] <= 0.003 * 2**30
    assert chosen["memory"]["total"] > 0.003 * 2**30
    (line,) = (line for line in (tmp_path / "plan.toml").read_text().splitlines() if "memory of a device" in line)
    assert line.startswith("# memory of a device: ") and "MiB (activations " in line
    shown = tutti(tmp_path, "plan", "digits", "--runs", "runs", *machine)
    assert memory_words(chosen["memory"]).partition(" (")[0] in shown.out and "  memory  " in shown.out
    _, config = resolve_config({}, [tmp_path / "plan.toml"], None)
    assert config.micro_batch == small["options"].get("micro_batch") and config.batch_size == small["batch"]
    trained = tutti(tmp_path, "train", "--config", "plan.toml", "--dry-run", "--precision", "fp32", "--devices", "1")
    assert trained.code == 0, trained.err


def test_the_time_has_what_runs_have_spent_besides_training(tmp_path: Path) -> None:
    runs = [write_timed(tmp_path / "runs" / str(n), n, epochs=15, eval_every="1ep") for n in (1, 2)]
    assert all(run.is_dir() for run in runs)
    found = planned(tmp_path, "--batch-size", "8")
    for plan in found["plans"]:
        other = {"start": START, "evaluation": 15 * EVALUATION, "save": END + 14 * SAVE}
        assert plan["other_seconds"] == pytest.approx(other)
        assert plan["seconds"] == pytest.approx(plan["training_seconds"] + sum(other.values()))
        assert plan["training_seconds"] == pytest.approx(60 * STEP)
    assert " with start, evaluations and saves (no band)" in found["headline"]
    shown = tutti(tmp_path, "plan", "digits", "--runs", "runs", "--batch-size", "8")
    assert shown.code == 0, shown.err
    assert "besides training" in shown.out and "evaluation 60 s, save 24 s; failures come on top" in shown.out
    # What was measured elsewhere says nothing of this machine.
    away = planned(tmp_path, *A100, "--max-devices", "1", "--batch-size", "8")
    assert not any(plan["other_seconds"] for plan in away["plans"]) and "of training (" in away["headline"]


def test_recomputation_is_searched_where_memory_is_short(tmp_path: Path) -> None:
    recipe = {"format": 1, "target": {"metric": "accuracy", "value": 0.5}, "samples_min": 600_000}
    recipe |= {"critical_batch": 512, "draws": [[600_000, 512], [610_000, 455]], "basis": "stated"}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    words = ("plan", "text", "--recipe", "recipe.json", *A100, "--batch-size", "64", "--strategy", "mirrored")
    done = tutti(tmp_path, *words, "--max-devices", "1", "--device-memory", "0.05", "--json")
    assert done.code == 0, done.err
    options = [each["options"] for each in json.loads(done.out)["plans"]]
    assert any(each.get("activation_checkpointing") == "blocks" for each in options), options


def test_verify_trains_the_best_plans_and_plans_again(tmp_path: Path) -> None:
    write_runs(tmp_path)
    for batch in (32, 64, 128):
        env = {"host": platform.node(), "devices": []}
        (tmp_path / "runs" / str(batch) / "env.json").write_text(json.dumps(env), encoding="utf-8")
    before, found = planned(tmp_path), planned(tmp_path, "--verify", "2")
    said = [note for note in found["notes"] if note.startswith("verify: ")]
    assert len(said) == 3 and "the fastest plan was 1 device, batch 32, mirrored" in said[-1], said
    old, new = ({each["batch"]: each for each in plans["plans"]} for plans in (before, found))
    # The two fastest of three plans are trained; the third keeps the step of its run.
    assert new[128] == {**old[128], "lost": new[128]["lost"], "marks": new[128]["marks"]}
    for batch, line in zip((32, 64), said, strict=False):
        assert new[batch]["step_basis"] == "measured by --verify" and "measured in 1 run" in old[batch]["step_basis"]
        ratio = new[batch]["step_seconds"] / old[batch]["step_seconds"]
        seconds = f"{new[batch]['step_seconds'] * 1e3:.3g} ms a step (25 steps), {ratio:.2f} × the plan's"
        assert line == f"verify: 1 device, batch {batch}, mirrored: {seconds}"
        assert new[batch]["samples"] == old[batch]["samples"]
        assert new[batch]["seconds"] == pytest.approx(new[batch]["steps"] * new[batch]["step_seconds"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--runs", "runs", "--budget", "5"), "give --price"),
        (("--runs", "runs", "--price", "2.10"), "a price needs its date"),
        (("--runs", "runs", "--price", "2.10@today"), "write --price 2.10@year-month-day"),
        (("--runs", "runs", "--price", "cheap@2026-11-27"), "cannot read the price"),
        (("--runs", "runs", "--price", "0@2026-11-27"), "--price is 0"),
        (("--runs", "runs", "--target", "acuracy>=0.93"), "did you mean 'accuracy'"),
        (("--runs", "runs", "--target", "accuracy=0.99"), "run tutti train digits --batch-size b --until"),
        (("--runs", "runs/32"), "second batch (tutti train digits --batch-size b --until"),
        (("--runs", "none"), "there is no run"),
        (("--machine", "a100x8"), "tutti train digits --until"),
        (("--recipe", "none.json", "--machine", "a100x8"), "cannot read the recipe"),
        (("--runs", "runs", "--deadline", "soon"), "write 8h"),
        (("--runs", "runs", "--strategy", "local_sgd"), "--strategy local_sgd --workers n"),
        (("--runs", "runs", "--verify", "1"), "for another machine"),
        (("--runs", "runs", *A100, "--devices-per-node", "0"), "at least 1"),
        (("--runs", "runs", *A100, "--network", "alpha=nan,beta=1e9"), "cannot read the link"),
        (("--runs", "runs", *A100, "--network", "alpha=5us,beta=400Gbyte"), "or with units alpha=30us"),
        (("--runs", "none", "--figure", "time.jpg"), "take .svg or .png"),
        (("--recipe", "f1.json", *A100), "reports no held-out 'f1'"),
        (
            ("--runs", "runs", *A100, "--max-devices", "1", "--strategy", "mirrored", "--batch-size", "4000"),
            "a batch of 4,000 is larger than the data set of",
        ),
    ],
)
def test_bad_input_is_refused_with_the_remedy(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    recipe = {"format": 1, "target": {"metric": "f1", "value": 0.9}, "samples_min": 9, "critical_batch": 9}
    (tmp_path / "f1.json").write_text(json.dumps({**recipe, "draws": [], "basis": "stated"}), encoding="utf-8")
    refused = tutti(write_runs(tmp_path), "plan", "digits", *words)
    assert refused.code == 2 and message in refused.err.lower().replace("--Price", "--price"), refused.err


def test_recomputation_is_traced_only_where_a_plan_may_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[set[str]] = []
    monkeypatch.setattr(step_prediction, "TaskSizes", lambda task, base, choices: traced.append(set(choices)))
    data = TargetData([MeasuredTarget(8, 1600, 1)], None, {}, "digits")
    limits = PlanLimits(2, (), None, None, None, None, 0, None)
    recomputing = (("activation_checkpointing", "selective"),)
    measured = PlannedStep(2, 8, "mirrored", 1.0, np.ones(1), {}, "", True, recomputing)
    for steps in ([], [measured]):
        _searcher("digits", PlannedRun(), open_machine(A100[1], "bf16", None, None), data, limits, (8,), (), steps)
    assert traced == [{"none"}, {"none", "selective"}]
