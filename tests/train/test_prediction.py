"""``run.predict``: outputs in the order of the samples, equal on every number of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tests import worlds
from tutti.errors import TuttiError

INPUTS = torch.arange(44.0, dtype=torch.float64).view(22, 2) / 44


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).double()


def outputs(model: Any, batch: Any) -> Any:
    scores = model(batch[0])
    return {"scores": scores, "pair": (batch[0][:, 0], scores > 0)}


def predicted(kind: str = "tensors", count: int = 22, **options: Any) -> Any:
    data = TensorDataset(INPUTS[:count])
    source = {"tensors": data, "loader": DataLoader(data, 5)}[kind]
    run = tutti.prepare(built(), "sgd", data, lambda model, batch: model(batch[0]).sum(), batch_size=6, **options)
    found = run.predict(source, outputs, batch=4)
    return found["scores"].numpy(), found["pair"][0].numpy(), found["pair"][1].numpy()


@pytest.mark.parametrize("count", [2, 22])
def test_outputs_are_those_of_the_model_in_the_samples_order(count: int) -> None:
    """Two samples are one block, so that other ranks have none."""
    with torch.no_grad():
        want = built().eval()(INPUTS[:count]).numpy()
    for devices, strategy in ((1, "single"), (2, "sharded"), (3, "mirrored")):
        for kind in ("tensors", "loader"):
            more = {"workers": devices, "strategy": strategy}
            for scores, first, positive in worlds.run(devices, predicted, kind=kind, count=count, **more):
                assert abs(scores - want).max() < 1e-12 and (first == INPUTS[:count, 0].numpy()).all()
                assert (positive == (want > 0)).all()


def refused(kind: str) -> str:
    functions: dict[str, Any] = {
        "mean": lambda model, batch: model(batch[0]).mean(),
        "text": lambda model, batch: "text",
        "shapes": lambda model, batch: torch.zeros(len(batch[0]), len(batch[0])),
    }
    data = TensorDataset(INPUTS)
    run = tutti.prepare(built(), "sgd", data, lambda m, b: m(b[0]).sum(), batch_size=6, workers=1)
    try:
        run.predict(DataLoader(data, 5), functions[kind])
    except TuttiError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [("mean", "for 5 samples has shape ()"), ("text", "holds a str"), ("shapes", "shapes (2,) and (5,)")],
)
def test_what_is_no_prediction_is_refused(kind: str, words: str) -> None:
    assert words in worlds.run(1, refused, kind=kind)[0]


class Classifier(nn.Module):
    """Scores of classes, which tensor ranks keep apart for the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Linear(2, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.norm(self.blocks(self.inner(x)))
        return {"scores": self.head(hidden), "hidden": [hidden]}


def of_classes(model: Any, batch: Any) -> Any:
    found = model(batch[0])
    return found["scores"].softmax(-1).argmax(-1), found["scores"], found["hidden"][0], batch[1]


def trained_and_predicted(strategy: str, workers: int) -> Any:
    data = TensorDataset(INPUTS, torch.arange(22) % 12)
    run = tutti.prepare(
        Classifier().double(),
        "sgd:lr=0.1",
        data,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0])["scores"], batch[1]),
        batch_size=6,
        workers=workers,
        strategy=strategy,
    )
    run.step(next(iter(run.epoch(0))))
    found = [each.numpy() for each in run.predict(data, of_classes, batch=4)]
    run.step(next(iter(run.epoch(1))))
    return found, run.predict(DataLoader(data, 5), of_classes)[1].numpy()


@pytest.mark.parametrize(
    ("strategy", "devices", "workers"),
    [
        ("tensor:least=1", 2, 1),
        ("tensor:least=1,sequence=true", 2, 1),
        ("pipeline", 2, 1),
        ("pipeline:schedule=interleaved,virtual=2", 2, 1),
        ("model_parallel", 3, 1),
        ("hybrid:stages=2,tensor=2,least=1", 4, 1),
        ("hybrid:stages=2", 4, 2),
        ("hybrid:tensor=2,shards=2,stage=3,least=1", 4, 2),
    ],
)
def test_a_split_model_predicts_as_a_whole_one(strategy: str, devices: int, workers: int) -> None:
    want, later = worlds.alone(trained_and_predicted, strategy="single", workers=workers)
    for found, then in worlds.run(devices, trained_and_predicted, strategy=strategy, workers=workers):
        assert (found[0] == want[0]).all() and (found[3] == want[3]).all()
        assert all(abs(a - b).max() < 1e-10 for a, b in zip(found, want, strict=True))
        assert abs(then - later).max() < 1e-10


def one_by_the_average() -> str:
    data = TensorDataset(INPUTS)
    run = tutti.prepare(built(), "sgd", data, lambda m, b: m(b[0]).mean(), batch_size=6, ema="0.9")
    run.step(next(iter(run.epoch(0))))
    try:
        run.predict(data, outputs, averaged=tutti.rank() == 0)
    except TuttiError as error:
        return str(error)
    return "no error"


def test_ranks_that_predict_with_other_weights_are_told_so() -> None:
    for found in worlds.run(2, one_by_the_average):
        assert "on the average" in found
