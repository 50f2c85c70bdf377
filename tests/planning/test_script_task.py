"""Training scripts as people write them are simulated as the task with the same model and loss would be."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.faults.commands import tutti
from tutti.cli.plan_answer import PlanAnswer, PlanLimits
from tutti.cli.plan_verification import PlanVerifier
from tutti.config.spec import Duration
from tutti.errors import UsageError
from tutti.planning.cluster_network import Network
from tutti.planning.conformal_band import shipped_residuals
from tutti.planning.device_plan import MeasuredTarget, PlannedStep, TargetData, device_plans
from tutti.planning.measured_costs import MeasuredCosts
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.plan_candidates import PlanCandidates
from tutti.planning.planned_run import PlannedRun
from tutti.planning.published_costs import PublishedCosts
from tutti.planning.script_task import copy_model, load_script
from tutti.planning.step_prediction import ModelSizes, gather_sizes, predict_step
from tutti.planning.task_or_script import TaskOrScript
from tutti.torch_compat import FakeTensorMode, is_fake
from tutti.workload.machine_file import Machine

HEAD = """\
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import tutti


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(50, 16), nn.ModuleList(Block(16) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        hidden = self.words(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


print("noise of the script")
text = torch.randint(0, 50, (100, 9))
model = Net()
"""
# The loss is given, data come from a loader, and the run's options are stated.
STEPS = """
def loss_fn(model, words):
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(text, batch_size=32, shuffle=True)
run = tutti.prepare(model, optimizer, loader, loss_fn, strategy="sharded", precision="bf16", micro_batch=4)
for epoch in range(2):
    for batch in run.epoch(epoch):
        run.step(batch)
"""
# A loop of its own, whose loss exists only in its body.
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
blocks = list(model.blocks)
run = tutti.prepare(model, optimizer, text, batch_size=32)
saved = run.restore("checkpoints")
with run.stopping() as reason:
    for epoch in run.epochs(2):
        for words in run.microbatches(epoch):
            hidden = model.words(words[:, :-1])
            for block in blocks:
                hidden = block(hidden)
            loss = functional.cross_entropy(model.head(hidden).flatten(0, 1), words[:, 1:].flatten())
            run.backward(loss)
            optimizer.step()
            print(run.stats.loss, loss.item())
"""


def script(folder: Path, body: str, head: str = HEAD) -> str:
    path = folder / "train.py"
    path.write_text(head + body, encoding="utf-8")
    return str(path)


def sizes(folder: Path, body: str, strategy: str, devices: int = 4) -> ModelSizes:
    config = PlannedRun(strategy=strategy, devices=str(devices), batch_size=32, micro_batch=4)
    return gather_sizes(load_script(script(folder, body)).task, config)


def test_options_are_those_that_the_script_states(tmp_path: Path) -> None:
    found = load_script(script(tmp_path, STEPS)).options
    assert found == {
        "strategy": "sharded",
        "batch_size": 32,
        "micro_batch": 4,
        "precision": "bf16",
        "optimizer": "sgd:lr=0.1,momentum=0.9",
    }
    loop = load_script(script(tmp_path, LOOP)).options
    assert loop == {"strategy": "mirrored", "batch_size": 32, "optimizer": "adamw:lr=0.001"}


@pytest.mark.parametrize("strategy", ["mirrored", "sharded:stage=3"])
def test_a_loop_of_its_own_is_traced_as_the_same_loss(strategy: str, tmp_path: Path) -> None:
    given, own = (sizes(tmp_path, body, strategy) for body in (STEPS, LOOP))
    assert given.memory == own.memory and given.memory.parameters == 50 * 16 + 4 * (2 * 64 * 16 + 64 + 3 * 16)
    assert given.step.tensors == own.step.tensors

    def flop(found: ModelSizes) -> dict[str, Any]:
        groups = found.step.workload.groups
        return {g.name: (g.parameters, g.backward, g.ready) for g in groups if g.name.startswith("blocks")}

    assert flop(given) == flop(own) and len(flop(given)) == 4
    assert found_flop(given) == pytest.approx(found_flop(own)) and found_flop(own) > 0


def found_flop(found: ModelSizes) -> float:
    return found.step.workload.model_flop(1) - found.step.workload.model_flop(0)


def test_tied_weights_are_one_parameter_and_the_scripts_model_stays(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.BatchNorm1d(3), layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = copy_model(model)
    assert made[0].weight is made[2].weight and all(map(is_fake, (*made.parameters(), *made.buffers())))
    real = copy_model(model)
    with torch.no_grad():
        real[0].weight.zero_()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("strategy", ["pipeline:micro_batches=2", "tensor"])
def test_scripts_are_cut_and_split_as_tasks_are(strategy: str, tmp_path: Path) -> None:
    loaded = load_script(script(tmp_path, STEPS))
    config = PlannedRun(strategy=strategy, devices="2", batch_size=32)
    costs = PublishedCosts("a100", "bf16", Network(8))
    found, times = predict_step(loaded.task, gather_sizes(loaded.task, config), config, costs, shipped_residuals())
    assert found.seconds > 0 and len(times.seconds) == 256 and found.memory["total"] > 0
    assert sum(found.shares.values()) == pytest.approx(1)


REFUSED = {
    "ends without tutti.prepare": "print(model)",
    "line 38: raise ValueError": "\nraise ValueError('no data')",
    "exits with 3 before tutti.prepare": "sys.exit(3)",
    "prepares several models": "tutti.prepare([model, Net()], 'adam', text)",
}


@pytest.mark.parametrize(("message", "body"), REFUSED.items())
def test_scripts_that_cannot_be_read_are_refused_with_their_line(message: str, body: str, tmp_path: Path) -> None:
    argv, path = sys.argv, list(sys.path)
    with pytest.raises(UsageError) as caught:
        load_script(script(tmp_path, body))
    assert message in str(caught.value) and "train.py" in str(caught.value) and caught.value.remedy
    assert (sys.argv, sys.path) == (argv, path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            LOOP.partition("            optimizer.step")[0].replace("run.backward(loss)", "pass"),
            "ends without run.backward(loss)",
        ),
        (LOOP.replace("run.backward(loss)", "run.step(words)"), "uses run.step before its first backward"),
        (LOOP.replace("run.backward(loss)", "run.backward(1.0)"), "run.backward got a float"),
        (LOOP.replace("loss = func", "scale = float(hidden.sum())\n            loss = func"), "float(hidden.sum())"),
    ],
    ids=["no backward", "another call", "no tensor", "reads values"],
)
def test_loops_that_cannot_be_followed_are_refused(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        sizes(tmp_path, body, "mirrored")
    assert message in str(caught.value) and "train.py" in str(caught.value) and caught.value.remedy


def test_a_script_is_planned_with_its_arguments(tmp_path: Path) -> None:
    recipe = {"format": 1, "target": {"metric": "loss", "value": 0.5}, "samples_min": 6400, "critical_batch": 64}
    (tmp_path / "recipe.json").write_text(json.dumps({**recipe, "draws": [[6400, 64]], "basis": "stated"}))
    path = script(tmp_path, LOOP, HEAD.replace("range(4)", "range(int(sys.argv[1]))"))
    machine = ("--recipe", "recipe.json", "--machine", "a100x8", "--precision", "bf16", "--max-devices", "2")
    words = ("plan", path, *machine, "--batch-size", "64", "--strategy", "mirrored", "pipeline:stages=2,schedule=1f1b")
    shown = tutti(tmp_path, *words, "--", "6")
    assert shown.code == 0, shown.err
    assert "pipeline: a custom training loop cannot run in pipeline stages" in shown.out
    assert f"then tutti run -np 1 {path} 6\n" in shown.out or f"then tutti run -np 2 {path} 6\n" in shown.out
    assert "tutti.prepare(…, strategy='mirrored', batch_size=64" in shown.out
    refused = tutti(tmp_path, *words, "--verify", "1", "--", "6")
    assert refused.code == 2 and "--verify trains here, and the plan is for another machine" in refused.err, refused.err


ROUNDS = LOOP.replace("run.epochs(2)", "run.epochs(9)").replace("print(run.stats.loss, loss.item())", "pass")
ROUNDS = ROUNDS.replace("        for words", "        run.save('checkpoints')\n        for words")
"""36 steps, in each epoch a checkpoint."""


@pytest.mark.parametrize(
    ("body", "devices", "options", "words"),
    [
        (ROUNDS, "3", {"strategy": "sharded:stage=1", "workers": None, "micro_batch": 4}, ""),
        (ROUNDS.replace("batch_size=32", "batch_size=10"), "1", {"strategy": "mirrored", "batch_size": 32}, ""),
        (LOOP, "1", {"strategy": "mirrored"}, "the script has trained 8 steps, too few to time"),
        (ROUNDS.replace("run.backward", "1 / 0, run.backward"), "2", {"strategy": "mirrored"}, "the script raises"),
    ],
    ids=["3 ranks", "another batch", "too short", "raises"],
)
def test_a_script_is_timed_with_the_options_of_a_plan(
    body: str, devices: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    module = ("-m", "tutti.planning.script_timing", "steps.json", json.dumps(options))
    done = tutti(tmp_path, "run", "-np", devices, *module, script(tmp_path, body))
    assert (done.code == 0) == (not words) and words in done.err, done.err
    assert (tmp_path / "steps.json").exists() == (not words) and not (tmp_path / "checkpoints").exists()
    if not words:
        found = json.loads((tmp_path / "steps.json").read_text())
        assert (found["steps"], found["devices"], found["device"]) == (20, int(devices), "cpu")
        assert 0 < found["seconds"] < 60 and found["spread"] >= 0


def test_verify_trains_a_script_and_plans_again(tmp_path: Path) -> None:
    """A loop of its own, and a plan that the script cannot train: its note says why, and the other one is measured."""
    path = script(tmp_path, ROUNDS)
    named = TaskOrScript(path, ())
    base, data = PlannedRun(batch_size=32), TargetData([MeasuredTarget(32, 900, 0)], None, {}, "train.py")
    steps = [
        PlannedStep(1, 32, "mirrored", 0.5, np.full(DRAWS, 0.5), {}, "predicted", options=options)
        for options in ((("micro_batch", 8),), (("micro_batch", -1),))
    ]
    asked = PlanLimits.check(1, (), None, None, None, 2, None)
    goal, found = Duration(9, "ep"), PlanCandidates(steps)
    answer = PlanAnswer(named, goal, device_plans(steps, data, None), found, [], data, asked, load_script(path))
    machine = Machine(host={"name": platform.node()}, device={"type": "cpu"}, parts=(), figures={}, curves={})
    costs = MeasuredCosts(machine, "fp32", Network(1))
    verifier = PlanVerifier(answer, base, (), costs, answer.loaded)
    verifier.check()
    measured = verifier.verify()
    [each] = measured
    assert each.options == (("micro_batch", 8),)
    assert each.measured and each.seconds != 0.5 and each.basis == "measured by --verify"
    note, failed, before = answer.notes
    assert f"{each.seconds * 1e3:.3g} ms a step (20 steps), {each.seconds / 0.5:.2f} × the plan's" in note
    assert "micro_batch=-1 failed: micro_batch is -1" in failed and "the fastest plan was 1 device" in before


def test_a_script_is_planned_for_its_own_epochs_without_a_recipe(tmp_path: Path) -> None:
    """100 samples in batches of 32: an epoch is 3.125 of them, and the last one is smaller."""
    path = script(tmp_path, LOOP)
    words = ("plan", path, "--machine", "a100x8", "--precision", "bf16", "--max-devices", "2", "--strategy", "mirrored")

    def planned(*more: str) -> dict[str, Any]:
        done = tutti(tmp_path, *words, *more, "--json")
        assert done.code == 0, done.err
        found: dict[str, Any] = json.loads(done.out)
        return found

    own, stated = planned(), planned("--length", "500st", "--batch-size", "16")
    assert (own["target"], own["length"], stated["length"]) == (None, "2ep", "500st")
    assert {(each["batch"], each["samples"], each["steps"]) for each in own["plans"]} == {(32, 200, 7)}
    assert {(each["batch"], each["samples"], each["steps"]) for each in stated["plans"]} == {(16, 8000, 500)}
    assert {each["devices"] for each in own["plans"]} == {1, 2} and "2 epochs after" in own["headline"]
    assert all("as stated" in each["samples_basis"] for each in own["plans"])
    shown = tutti(tmp_path, *words, "--deadline", "1h")
    assert shown.code == 0 and "2 epochs after" in shown.out and "batch_size=32), then tutti run" in shown.out
    late = tutti(tmp_path, *words, "--length", "1000000000sa", "--deadline", "1s")
    assert late.code == 9 and "No plan trains 1e+09 samples within 1 s" in late.out, late.err


@pytest.mark.parametrize(
    ("body", "words", "message"),
    [
        (STEPS, (), "the script uses run.epoch before run.epochs(number)"),
        (LOOP.replace("run.epochs(2)", "run.epochs(0)"), (), "run.epochs got 0"),
        (LOOP.partition("with run")[0], (), "the script ends without run.epochs(number)"),
        (LOOP, ("--length", "2 weeks"), "cannot read '2 weeks' as a duration"),
        (LOOP, ("--length", "0st"), "--length is 0st"),
        (LOOP, ("--length", "2ep", "--batch-size", "16", "32"), "without a recipe one batch is planned"),
        (LOOP, ("--target", "loss=1"), "--target needs the samples that it takes"),
        (LOOP, ("--length", "2ep", "--recipe", "recipe.json"), "both say when training ends"),
    ],
)
def test_a_script_whose_length_is_not_known_is_refused(
    body: str, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = tutti(tmp_path, "plan", script(tmp_path, body), "--machine", "a100x8", "--precision", "bf16", *words)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done.err
    if not words:
        assert "--length 10ep" in done.err


def test_the_command_predicts_a_script_with_its_arguments(tmp_path: Path) -> None:
    head = HEAD.replace("range(4)", "range(int(sys.argv[1]))")
    path = script(tmp_path, STEPS, head)
    shown = tutti(tmp_path, "simulate", path, "--machine", "a100x8", "--devices", "2", "--", "6")
    assert "no step of it was run" in shown.out
    assert shown.code == 0, shown.err
    assert shown.out.startswith("sharded on a100") and "noise of the script" not in shown.out
    for words, message in ((("--devices", "2"), "list index out of range"), (("--model", "gpt"), "Leave out --data")):
        refused = tutti(tmp_path, "simulate", path, "--machine", "a100x8", *words)
        assert refused.code == 2 and message in refused.err and "Traceback" not in refused.err, refused.err
    looping = script(tmp_path, LOOP)
    words = ("--machine", "a100x8", "--precision", "bf16", "--strategy", "pipeline", "--devices", "2")
    staged = tutti(tmp_path, "simulate", looping, *words)
    assert staged.code == 2 and "custom training loop" in staged.err
