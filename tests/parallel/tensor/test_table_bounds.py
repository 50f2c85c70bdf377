"""An embedding whose rows are split over tensor ranks refuses the indices that the whole table refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def looked_up(index: int) -> str:
    """What a look-up of an index ends with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 1))
    run = tutti.prepare(model, "sgd:lr=0.1", torch.arange(8).view(4, 2) % 7, loss, strategy="tensor:least=1")
    try:
        run.step(torch.tensor([[0, index], [1, 2]]))
    except IndexError:
        return "refused"
    return ""


@pytest.mark.skipif(worlds.DEVICE != "cpu", reason="on accelerators an assertion of the kernel ends the process")
@pytest.mark.parametrize(("index", "ending"), [(6, ""), (7, "refused"), (-1, "refused"), (9, "refused")])
def test_an_index_outside_of_a_split_table_is_refused(index: int, ending: str) -> None:
    assert worlds.run(2, looked_up, index=index) == [ending] * 2
