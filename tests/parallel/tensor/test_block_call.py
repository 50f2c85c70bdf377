"""Blocks with several arguments, such as attention with a mask and rotary tables, are split by heads where proved."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.shapes import Transposed
from tutti.errors import UsageError
from tutti.parallel.tensor.block_call import BlockArguments, form_of, record_calls
from tutti.parallel.tensor.linear_layer import is_linear, matrix
from tutti.parallel.tensor.local_shape import HeadParallelBlock, LocalForward, run_within
from tutti.parallel.tensor.tp_plan import PlanFinder, blocks_with_arguments
from tutti.parallel.tensor.tp_verify import TensorCut, find_block_split

WIDTH, EACH = 24, 4


class Grouped(nn.Module):
    """Grouped-query attention with rotary tables and a mask; six heads of queries, three of keys and values."""

    leak = by_kernel = False

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.merge = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)

    def forward(
        self, hidden: Tensor, tables: tuple[Tensor, Tensor], mask: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden.shape[:-1], -1, EACH)
        q, k, v = (m(hidden).view(shape).transpose(1, 2) for m in (self.queries, self.keys, self.values))
        q, k = (x * tables[0] + x.flip(-1) * tables[1] for x in (q, k))
        grouped = self.by_kernel and mask is None
        k, v = (x if grouped else x.repeat_interleave(2, 1) for x in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        if self.leak:
            out = out - out.mean(1, keepdim=True)
        return self.merge(out.transpose(1, 2).reshape(*hidden.shape[:-1], -1)), None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList(Grouped() for _ in range(2))
        self.up, self.down = Transposed(48, WIDTH), Transposed(WIDTH, 48)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        tables = torch.randn(words.shape[1], EACH), torch.randn(words.shape[1], EACH)
        for block in self.blocks:
            hidden = hidden + block(hidden, tables, mask=None, training=True)[0]
        return self.down(self.up(hidden).relu())


def call(mask: Tensor | None = None) -> BlockArguments:
    tables = torch.randn(5, EACH), torch.randn(5, EACH)
    return BlockArguments((torch.randn(2, 5, WIDTH), tables), {"mask": mask}, (True, False, False, False))


def test_grouped_queries_are_split_by_groups_with_any_mask() -> None:
    found = find_block_split(Grouped(), 2, None, call())
    assert found is not None
    assert found.columns == {name: TensorCut(0, 3) for name in ("queries", "keys", "values")}
    assert (found.row, found.units, len(found.local.forms)) == ("merge", 3, 3)
    assert find_block_split(Grouped(), 4, None, call()) is None


def test_whole_queries_meet_this_ranks_keys_with_any_mask() -> None:
    """As by DoRA: an adapter reads the weight of the queries' layer, which stays whole."""
    block = Grouped()
    block.by_kernel = True
    found = find_block_split(block, 2, {"keys", "values", "merge"}, call(torch.zeros(2, 1, 5, 5)))
    assert found is not None and set(found.columns) == {"keys", "values"}
    assert (found.units, len(found.local.forms)) == (3, 3)


def test_what_mixes_heads_is_not_split() -> None:
    leaking = Grouped()
    leaking.leak = True
    assert find_block_split(leaking, 2, None, call()) is None


def test_a_bias_for_each_head_is_sliced_where_it_meets_the_heads() -> None:
    found = find_block_split(Grouped(), 2, None, call(torch.randn(1, 6, 5, 5)))
    assert found is not None and (found.units, found.local.takes) == (3, 1)


def test_calls_of_a_model_are_recorded_and_its_blocks_are_split() -> None:
    torch.manual_seed(0)
    model, words = Model(), torch.randint(0, 11, (4, 5))
    calls = record_calls(
        model, blocks_with_arguments(model), lambda model, size: model(words[:size]).sum(), torch.device("cpu")
    )
    assert list(calls) == ["blocks.0", "blocks.1"]
    plan = {entry.name: entry for entry in PlanFinder(model, 2, 1, [], True, calls).find()}
    assert plan["blocks.1"].role == "within" and plan["blocks.1.keys"].role == "column"
    assert calls["blocks.0"].form in plan["blocks.0"].local.forms
    without = {entry.name: entry.role for entry in PlanFinder(model, 2, 1, [], True).find()}
    assert without["blocks.1.keys"] == "gathered" and "blocks.1" not in without


def test_a_transposed_layer_is_a_linear_layer() -> None:
    layer = Transposed(3, 2)
    assert is_linear(layer) and matrix(layer).shape == (3, 2)
    layer.register_buffer("scale", torch.ones(1))
    assert not is_linear(layer) and not is_linear(nn.LayerNorm(3))
    block = nn.Sequential(Transposed(48, WIDTH), nn.ReLU(), Transposed(WIDTH, 48))
    plan = {entry.name: entry for entry in PlanFinder(block, 2, 1, [], True).find()}
    assert plan["0"].role == "column" and plan["0"].cuts == {"weight": TensorCut(1, 48), "bias": TensorCut(0, 48)}
    assert plan["2"].role == "row" and plan["2"].cuts == {"weight": TensorCut(0, 48)}


class Shifted(nn.Module):
    """A feed-forward block that takes numbers; ``shift`` mixes features unless it is 0, ``scale`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, shift: int = 0, scale: float = 1.0, positions: int = 5) -> Tensor:
        result: Tensor = self.last(self.first(x.view(2, positions, 8)).relu().roll(shift, -1) * scale)
        return result


@pytest.mark.parametrize(
    ("numbers", "split", "others"),
    [
        ({"shift": 0}, True, {"shift": 1}),
        ({"shift": 3}, False, {}),
        ({"scale": 0.0}, True, None),
        ({"positions": 5}, True, None),
    ],
)
def test_numbers_among_the_arguments(numbers: dict[str, Any], split: bool, others: dict[str, Any] | None) -> None:
    """A split that holds for the recorded number alone is accepted with that number alone."""
    recorded = BlockArguments((torch.zeros(2, 5, 8),), numbers, (True, False))
    found = find_block_split(Shifted(), 2, None, recorded)
    assert (found is not None) == split
    if found is not None:
        wanted = recorded.form if others else recorded.form_for_any_number
        assert found.local.forms == [wanted] and (others is None or form_of(recorded.args, others) != wanted)


def test_a_call_of_another_form_is_refused() -> None:
    class Split(HeadParallelBlock, Grouped):
        pass

    split = Split()
    split.tutti_slice = type("Slice", (), {"name": "block", "length": 3, "mine": range(3)})()  # type: ignore[assignment]
    args = (torch.randn(2, 5, WIDTH), (torch.randn(5, EACH), torch.randn(5, EACH)))
    run_within(split, LocalForward(WIDTH, draws=[0], forms=[form_of(args, {"mask": None})]))
    split(*args, mask=None)
    learned = args[0].clone().requires_grad_(), args[1]
    run_within(split, LocalForward(WIDTH, draws=[0], forms=[form_of(learned, {"mask": None})]))
    split(*learned, mask=None)
    with torch.no_grad():
        split(*learned, mask=None)
    with pytest.raises(UsageError, match="whole=block"):
        split(*args, mask=torch.randn(1, 6, 5, 5))
    for one_number in (True, False):
        forms = [form_of(args, {"mask": None, "more": 1}, values=one_number)]
        run_within(split, LocalForward(WIDTH, draws=[0], forms=forms))
        split(*args, mask=None, more=1)
        with pytest.raises(UsageError, match="None 2") if one_number else nullcontext():
            split(*args, mask=None, more=2)
