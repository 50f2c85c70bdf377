"""The checkpoint with the best held-out value stays, beside the newest; it is found by what manifests say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tutti.checkpoint.folder import best_checkpoint, newest_checkpoint, scan
from tutti.checkpoint.read import TensorReader, load_manifest
from tutti.config.best import BestMetric
from tutti.data.adapt import adapt
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.metrics.listener import Listeners, RunHeader
from tutti.train.loop import train_loop
from tutti.train.run_checkpoints import Checkpoints
from tutti.train.train_plan import TrainPlan

RATE = 0.25


class Counting(nn.Module):
    """Its only weight is ``RATE`` · the steps taken: the loss pulls it up by a gradient of -1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight.expand(len(batch))


def loss(net: Any, batch: Tensor) -> Any:
    """``distance`` is smallest, and ``height`` highest, after three steps; ``nothing`` is never a number."""
    reached = net(batch)
    distance = (reached.detach() / RATE - 3).abs().sum()
    return (
        -reached.sum(),
        len(batch),
        {"distance": distance.sum(), "height": -distance.sum(), "nan": distance * torch.nan},
    )


def trained(folder: str, text: str | None, total: int, evaluate: int | None, save: int | None, ema: Any = None) -> Any:
    run = tutti.prepare(Counting(), f"sgd:lr={RATE}", torch.zeros(64, 1), loss, workers=4, batch_size=8, ema=ema)
    facts = {"workers": 4, "config_sha256": "0" * 64}
    chosen = None if text is None else BestMetric.parse(text)
    saver = Checkpoints(run, Path(folder), context.current(), facts, keep=1, warn=print, best=chosen)
    saver.restore()
    held_out, header = adapt(torch.zeros(5, 1)), RunHeader("", {}, total, 8)
    return train_loop(run, TrainPlan(total, evaluate, save), held_out, header, Listeners(()), saver)


def steps(folder: Path) -> dict[int, bool]:
    """The checkpoints, and whether each holds the evaluation of its very step."""
    found = {}
    for manifest in scan(folder):
        [(_, weight)] = TensorReader(manifest).read("model")
        assert float(weight) == manifest.step * RATE
        values = manifest.facts.get("eval")
        found[manifest.step] = values is not None
        assert values is None or values["distance"] == abs(manifest.step - 3)
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    ("ranks", "text", "kept"),
    [
        (1, "distance:min", [3, 6]),
        (3, "height:max", [3, 6]),
        (4, "height:min", [6]),
        (1, "loss", [6]),
        (3, "loss:max", [1, 6]),
        (1, None, [6]),
    ],
)
def test_the_best_stays_beside_the_newest(ranks: int, text: str | None, kept: list[int], tmp_path: Path) -> None:
    for summary in worlds.run(ranks, trained, folder=str(tmp_path), text=text, total=6, evaluate=1, save=2):
        assert summary.get("best", {"step": 6})["step"] == kept[0] and ("best" in summary) == (text is not None)
    assert steps(tmp_path) == dict.fromkeys(kept, True)


def test_what_is_evaluated_is_saved_too(tmp_path: Path) -> None:
    """Or the best might be a step that nobody kept."""
    worlds.run(1, trained, folder=str(tmp_path / "a"), text="height:max", total=8, evaluate=3, save=None)
    assert steps(tmp_path / "a") == {3: True, 8: True}
    # A save at a step without an evaluation is never the best.
    worlds.run(1, trained, folder=str(tmp_path / "b"), text="loss", total=7, evaluate=5, save=2)
    assert steps(tmp_path / "b") == {7: True}
    worlds.run(1, trained, folder=str(tmp_path / "c"), text=None, total=7, evaluate=5, save=6)
    assert steps(tmp_path / "c") == {7: True}


def test_it_survives_a_resume_and_is_verified_before_others_go(tmp_path: Path) -> None:
    worlds.run(1, trained, folder=str(tmp_path), text="height:max", total=4, evaluate=1, save=1)
    assert steps(tmp_path) == {3: True, 4: True}
    worlds.run(3, trained, folder=str(tmp_path), text="height:max", total=6, evaluate=1, save=1)
    assert steps(tmp_path) == {3: True, 6: True}
    found, broken = best_checkpoint(tmp_path, BestMetric.parse("height:max").score)
    assert found is not None and (found.step, broken) == (3, [])
    # Damaged, it counts for nothing: what is next best stays too.
    [file] = (tmp_path / "step-00000003" / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    worlds.run(1, trained, folder=str(tmp_path), text="height:max", total=8, evaluate=1, save=1)
    assert steps_there(tmp_path) == [3, 6, 8]
    found, broken = best_checkpoint(tmp_path, BestMetric.parse("height:max").score)
    assert found is not None and found.step == 6 and "step-00000003" in broken[0]
    assert newest_checkpoint(tmp_path)[0] == load_manifest(tmp_path / "step-00000008")


def steps_there(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_values_that_are_no_numbers_are_no_best(tmp_path: Path) -> None:
    [summary] = worlds.run(1, trained, folder=str(tmp_path), text="nan:max", total=3, evaluate=1, save=1)
    assert summary["best"] is None and steps_there(tmp_path) == [3]
    facts = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())["facts"]
    assert facts["eval"]["nan"] is None and facts["eval"]["height"] == 0


def test_an_average_is_judged_where_one_is_kept(tmp_path: Path) -> None:
    """Of decay ½ it is a step behind: after three steps at 17/8 and after four at 49/16."""
    for name, text in (("average", "height:max"), ("weights", "raw_height:max")):
        folder = tmp_path / name
        [summary] = worlds.run(1, trained, folder=str(folder), text=text, total=6, evaluate=1, save=1, ema=0.5)
        assert summary["best"]["step"] == {"average": 4, "weights": 3}[name]
        assert summary["eval"]["raw_distance"] == 3 and summary["eval_weights"] == "ema"


def unknown(folder: str) -> str:
    try:
        trained(folder, "hight:max", 3, 1, 1)
    except UsageError as error:
        return str(error)
    return "nothing was raised"


def test_a_value_that_the_evaluation_has_not_is_refused_on_every_rank(tmp_path: Path) -> None:
    for text in worlds.run(3, unknown, folder=str(tmp_path)):
        assert "the evaluation has no 'hight'" in text and "Did you mean 'height'?" in text


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("loss", False),
        ("accuracy", True),
        ("raw_loss", False),
        ("dice", True),
        ("x:min", False),
        ("accuracy:min", False),
    ],
)
def test_which_way_is_better(text: str, more: bool) -> None:
    assert BestMetric.parse(text) == BestMetric(text.partition(":")[0], more)


@pytest.mark.parametrize("text", ["", ":max", "x", "loss:", "loss:down", "loss:max:min"])
def test_what_does_not_say_which_way_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r":min or"):
        BestMetric.parse(text)
