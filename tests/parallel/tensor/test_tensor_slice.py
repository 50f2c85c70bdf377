"""Slices of tensor-parallel layers in trials on one rank."""

from __future__ import annotations

from types import FunctionType

import pytest

from tutti.comm.differentiable import TensorRanks
from tutti.parallel.tensor.tensor_slice import LayerSlice, SilentRanks

COLLECTIVES = [name for name, value in vars(TensorRanks).items() if isinstance(value, FunctionType) and name[0] != "_"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_trial_on_one_rank_communicates_with_none(name: str) -> None:
    assert [*LayerSlice("", SilentRanks(1, 2), 5).mine] == [3, 4]
    with pytest.raises(RuntimeError, match="no other ranks"):
        getattr(SilentRanks(1, 2), name)()
