"""Writes to parameters are seen through any view."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.nn.written_tensors import parameters_unwritten
from tutti.parallel.pipeline.stage_parameters import StageParameters

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda p: p[0].zero_(),
    "data": lambda p: p.data.zero_(),
    "transposed": lambda p: p.T.zero_(),
    "unsqueezed": lambda p: p.unsqueeze(0).zero_(),
    "chunk": lambda p: p.chunk(2)[0].zero_(),
    "rows": lambda p: [row.zero_() for row in p],
    "detached": lambda p: p.detach().fill_(0),
    "out": lambda p: torch.ones(2, out=p.view(-1)[1:3]),
    "list": lambda p: torch._foreach_zero_([p]),
    "quotient": lambda p: operator.ifloordiv(p, 2),
    "remainder": lambda p: operator.imod(p, 0.1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_through_views(write: Callable[[Tensor], Any]) -> None:
    layer = nn.Linear(2, 2, bias=False)
    before = layer.weight.detach().clone()
    writes = StageParameters({layer.weight: ("weight", 0)}, None)
    with torch.no_grad(), writes:
        write(layer.weight)
    assert not torch.equal(layer.weight, before)
    writes.undo()
    assert torch.equal(layer.weight, before)
    with torch.no_grad(), parameters_unwritten([layer]), pytest.raises(RuntimeError, match="writes a parameter"):
        write(layer.weight)
    assert torch.equal(layer.weight, before)


def test_reads_and_other_tensors_are_no_writes() -> None:
    both = torch.ones(4)
    layer = nn.Linear(2, 1, bias=False)
    layer.weight = nn.Parameter(both[:2].view(1, 2))
    writes = StageParameters({layer.weight: ("weight", 0)}, None)
    with torch.no_grad(), writes, parameters_unwritten([layer]):
        (layer.weight * 2).add_(1)
        both[2:].add_(1)
    writes.undo()
    assert both.tolist() == [1, 1, 2, 2]
