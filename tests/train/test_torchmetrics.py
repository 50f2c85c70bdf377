"""The recipes of docs/python.md for torchmetrics: exact over ranks that have unequal numbers of samples."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds

pytestmark = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")
PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
RECIPES = [code for code in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL) if "torchmetrics." in code]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(43, 4, generator=draw), torch.randint(0, 3, (43,), generator=draw)


def printed(recipe: int, strategy: str = "mirrored", devices_workers: int = 3) -> float:
    """What the recipe prints on this rank, for a model with fixed weights."""
    import torchmetrics

    torch.manual_seed(0)
    inputs, labels = samples()
    run = tutti.prepare(
        nn.Linear(4, 3),
        "sgd:lr=0.1",
        (inputs, labels),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        batch_size=6,
        workers=devices_workers,
        strategy=strategy,
    )
    told: list[Any] = []
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=8)
    exec(
        RECIPES[recipe], {"torchmetrics": torchmetrics, "nn": nn, "run": run, "held_out": loader, "print": told.append}
    )
    return float(told[0])


@pytest.mark.parametrize("recipe", [0, 1])
def test_a_metric_that_is_no_sum_is_that_of_all_samples(recipe: int) -> None:
    from torchmetrics.functional.classification import multiclass_auroc, multiclass_f1_score

    torch.manual_seed(0)
    inputs, labels = samples()
    scores = nn.Linear(4, 3)(inputs).detach()
    known = [multiclass_auroc(scores.softmax(dim=1), labels, 3), multiclass_f1_score(scores, labels, 3)]
    for devices in (1, 2, 3):
        found = worlds.run(devices, printed, recipe=recipe)
        assert found == pytest.approx([float(known[recipe])] * devices, abs=1e-6)


def test_there_are_two_recipes() -> None:
    assert len(RECIPES) == 2
