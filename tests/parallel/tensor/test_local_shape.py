"""Code that names sizes of the whole computes on this rank's heads, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import UsageError
from tutti.parallel.tensor.local_shape import LocalForward, LocalShapeMode, local_counts
from tutti.parallel.tensor.tensor_slice import LayerSlice, SilentRanks, mark_local

SECTIONS = (12, 6, 6)
"""Six heads of queries and three of keys and values, of two features each."""
HERE = LayerSlice("block", SilentRanks(1, 2), 3)
"""The second of two ranks has one of three heads of keys, and two of queries."""


def outputs() -> Tensor:
    """This rank's outputs of a fused layer, as many as the number of their section: 0, 1 or 2."""
    local = torch.tensor([0.0] * 4 + [1.0] * 2 + [2.0] * 2).expand(2, 5, 8)
    mark_local(local, SECTIONS)
    return local


PARTS: dict[str, Any] = {
    "split by sizes": lambda x: x.split([12, 6, 6], dim=-1),
    "by keyword": lambda x: torch.split(x, dim=2, split_size_or_sections=[12, 6, 6]),
    "ranges": lambda x: (x[..., :12], x[..., 12:18], x[:, :, -6:]),
    "after functions of single features": lambda x: (x.clamp(-9, 9) * 1.0).split([12, 6, 6], -1),
}


@pytest.mark.parametrize("how", PARTS)
def test_queries_keys_and_values_are_cut_where_they_meet_on_this_rank(how: str) -> None:
    with LocalShapeMode(HERE, LocalForward(12)):
        parts = PARTS[how](outputs())
    assert [part.shape[-1] for part in parts] == [4, 2, 2]
    assert all(bool((part == number).all()) for number, part in enumerate(parts))


@pytest.mark.parametrize(
    "cut", [lambda x: x[..., :6], lambda x: x[..., ::2], lambda x: x.split(6, -1), lambda x: x[:, :, 3]]
)
def test_a_cut_within_a_section_is_refused(cut: Any) -> None:
    with pytest.raises(UsageError, match="whole=block"), LocalShapeMode(HERE, LocalForward(12)):
        cut(outputs())


def test_other_tensors_of_the_same_sizes_are_cut_as_they_are() -> None:
    with LocalShapeMode(HERE, LocalForward(12)):
        assert torch.zeros(2, 5, 8)[..., :6].shape[-1] == 6
        assert [part.shape[0] for part in outputs().split(1)] == [1, 1] and outputs()[1].shape == (5, 8)


class Taking(LocalShapeMode):
    def take(self, whole: Tensor, dim: int) -> Tensor:
        return whole.narrow(dim, self.slice_.mine.start, len(self.slice_.mine))


def test_whole_tensors_give_the_heads_of_this_rank_where_they_meet_a_slice() -> None:
    """Also where this rank has one head, which would broadcast, and where samples and heads are one dimension."""
    scores, bias = torch.zeros(2, 1, 4, 4), torch.arange(3.0).view(1, 3, 1, 1)
    mark_local(scores)
    with Taking(HERE, LocalForward(12, takes=1)) as mode:
        found = scores + bias
        found += bias.expand(1, 3, 4, 4)
        merged = (bias.repeat(2, 1, 1, 1) + 0).view(6, 1, 1) * found.view(2, 4, 4)
        assert (bias + bias).shape[1] == 3 and mode.taken == 3
    assert found.shape == scores.shape and bool((found == 4).all()) and bool((merged == 8).all())
    with pytest.raises(UsageError, match="3 operations of heads with a whole tensor, not 1"):
        mode.check()


def test_attributes_that_count_heads_are_those_of_this_rank_for_a_while() -> None:
    module = nn.Module()
    module.inner, module.heads = nn.Module(), 6
    module.inner.heads = 3  # type: ignore[union-attr,assignment]
    with pytest.raises(ValueError, match="ends"), local_counts(module, ["heads", "inner.heads"], HERE):
        assert (module.heads, module.inner.heads) == (2, 1)
        raise ValueError("ends")
    assert (module.heads, module.inner.heads) == (6, 3)
