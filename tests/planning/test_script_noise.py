"""``tutti noise train.py``: the gradient noise of a training script, while it trains as it does alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.faults.commands import tutti
from tutti.cli.app import main
from tutti.optim.noise_scale import NoiseEstimate, mean_noise

SCRIPT = """
import sys, json
import torch, tutti
from torch import nn

torch.manual_seed(0)
data = torch.randn(480, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def loss(model, batch):
    return (model(batch) - batch[:, :1]).square().mean()

OWN = "own" in sys.argv
run = tutti.prepare(model, optimizer, data, None if OWN else loss, batch_size=24)
for epoch in range(int(sys.argv[1])):
    for batch in run.microbatches(epoch) if OWN else run.epoch(epoch):
        if OWN:
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
        else:
            run.step(batch)
        if not OWN or run.stepped:
            print("VALUES", json.dumps(dict(run.noise_probe.values()) if run.noise_probe else {}), flush=True)
print("trained", run.global_step)
"""


@pytest.mark.parametrize("loop", ["own", "step"])
def test_a_script_is_measured_as_it_trains(loop: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("noise", "train.py", "--noise-every", "2", "--adam", "--json", "--", "2", loop)
    done = tutti(tmp_path, *words)
    assert done.code == 0, done.err
    said = json.loads(done.out)
    printed = [line.removeprefix("VALUES ") for line in done.err.splitlines() if line.startswith("VALUES")]
    values = [found for line in printed if (found := json.loads(line))]
    assert "trained 40" in done.err and len(printed) == 40 and len(values) == 20
    for key, name in (("noise", "noise"), ("adam", "noise/adam")):
        there = [each for each in values if f"{name}/trace" in each]
        kept = there[-math.ceil(len(there) / 2) :]
        band = mean_noise(NoiseEstimate(each[f"{name}/trace"], each[f"{name}/square"]) for each in kept).band()
        assert said[key]["scale"] == pytest.approx(band.scale) and said[key]["low"] == pytest.approx(band.low)
    assert said["critical_batch"] == said["adam"]["scale"] and said["basis"] == "gradient noise alone"


def test_steps_end_the_script_and_a_micro_batch_makes_parts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("noise", "train.py", "--noise-every", "1", "--micro-batch", "6", "--steps", "12", "--", "100", "own")
    done = tutti(tmp_path, *words)
    assert done.code == 0, done.err
    assert done.err.count("VALUES") == 12 and "trained" not in done.err
    assert done.out.startswith("critical batch ") and "6 measured steps" in done.out


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        (SCRIPT, ("--batches", "8", "16"), "--batches trains a task"),
        (SCRIPT, ("--branch", "2"), "--branch continues a checkpoint"),
        (SCRIPT, ("--optimizer", "sgd:lr=1"), "--optimizer is an option of tutti train, and a script has its own"),
        (SCRIPT, ("--steps", "0"), "--steps is 0"),
        ("print(1)", (), "the script has trained no step"),
        ("print(1)\n1 / 0", (), "train.py, line 2: 1 / 0"),
        ("raise SystemExit(3)", (), "the script exits with 3"),
    ],
)
def test_what_a_script_cannot_have(
    script: str, words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(script)
    assert main(["noise", str(tmp_path / "train.py"), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_script_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["noise", "gone.py"]) == 2
    assert "gone.py" in capsys.readouterr().err
