"""Parameters without elements, such as those of a layer with no units, are trained around by every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.covering import marked
from tests.train.test_custom_loop import BATCH, DATA, batches, error_of


class Hollow(nn.Module):
    """Two layers and parameters of no rows, and of rows of nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 7).double(), nn.Linear(7, 1).double()
        self.rows = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
        self.columns = nn.Parameter(torch.zeros(5, 0, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Any:
        return self.last(torch.tanh(self.first(inputs))) + self.rows.sum() + self.columns.sum()


def through(strategy: str, workers: int, loop: bool, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights after two epochs, and of a run that was restored from its end."""
    found = []
    for resumed in (False, True):
        model = Hollow()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run = tutti.prepare(model, optimizer, DATA, error_of, strategy=strategy, workers=workers, batch_size=BATCH)
        if resumed:
            assert run.restore(folder) == {}
        for epoch in run.epochs(2) if not resumed else ():
            if not loop:
                for batch in run.epoch(epoch):
                    run.step(batch)
            else:
                for batch in run.microbatches(epoch):
                    optimizer.zero_grad()
                    run.backward(error_of(model, batch))
                    optimizer.step()
        if not resumed:
            run.save(folder)
        found.append({name: tensor.numpy().copy() for name, tensor in run.state().items()})
    return found[0], found[1]


WORLDS = [
    *((f"sharded:stage={stage}", workers) for stage in (1, 2, 3) for workers in (2, 3)),
    *(("mirrored", 2), ("central_storage", 2), ("tensor:least=1", 1), ("parameter_server", 2)),
]


@pytest.mark.parametrize(
    ("strategy", "workers", "loop"), marked([(*world, loop) for world in WORLDS for loop in (False, True)])
)
def test_parameters_without_elements(strategy: str, workers: int, loop: bool, tmp_path: Path) -> None:
    model = Hollow()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in batches(epoch):
            optimizer.zero_grad()
            error_of(model, batch).backward()
            optimizer.step()
    options = {"strategy": strategy, "workers": workers, "loop": loop, "folder": tmp_path}
    for states in worlds.run(2, through, **options):
        for got in states:
            assert got.keys() == model.state_dict().keys()
            for name, want in model.state_dict().items():
                np.testing.assert_allclose(got[name], want.numpy(), rtol=0, atol=1e-10)
