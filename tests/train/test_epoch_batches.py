"""The iterators over an epoch have the length of the loader that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import tutti
from tutti.errors import UsageError


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(10, 1))


def test_the_length_is_the_number_of_global_batches() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(model, optimizer, TensorDataset(torch.zeros(22, 1)), workers=2, batch_size=4)
    bodies = run.microbatches(0)
    assert len(bodies) == len(run.epoch(0)) == 6
    seen = 0
    for (inputs,) in bodies:
        seen += 1
        run.backward(model(inputs).mean())
        optimizer.step()
    assert seen == 12 and len(bodies) == run.global_step == 6


@pytest.mark.parametrize("number", [[1, 2], "0", 0.5, -1, None])
def test_an_epoch_that_is_no_number_is_refused(number: Any) -> None:
    run = tutti.prepare(nn.Linear(1, 1), "sgd", TensorDataset(torch.zeros(4, 1)), batch_size=4)
    for call in (run.epoch, run.microbatches):
        with pytest.raises(UsageError, match=rf"number of the epoch is .*run\.{call.__name__}\(epoch\)"):
            call(number)
        assert len(call(torch.tensor(1))) == 1  # type: ignore[arg-type]


def test_a_stream_of_unknown_length_has_none() -> None:
    model = nn.Linear(1, 1)
    run = tutti.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Stream(), batch_size=4)
    with pytest.raises(TypeError, match="stream"):
        len(run.microbatches(0))
