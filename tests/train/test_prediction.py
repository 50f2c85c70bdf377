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


def refused(kind: str, strategy: str = "mirrored") -> str:
    functions: dict[str, Any] = {
        "mean": lambda model, batch: model(batch[0]).mean(),
        "text": lambda model, batch: "text",
        "shapes": lambda model, batch: torch.zeros(len(batch[0]), len(batch[0])),
        "split": outputs,
    }
    data = TensorDataset(INPUTS)
    run = tutti.prepare(built(), "sgd", data, lambda m, b: m(b[0]).sum(), batch_size=6, strategy=strategy, workers=1)
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


def test_a_split_model_is_refused() -> None:
    for text in worlds.run(2, refused, kind="split", strategy="pipeline"):
        assert text.startswith("run.predict cannot be combined with a model that is split"), text


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
