"""Plans of models of several shapes: what is split how, and what must not be."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.shapes import (
    SHAPES,
    Counted,
    Disentangled,
    Gated,
    GroupedPacked,
    Latent,
    Leaking,
    Nano,
    Normed,
    NormedHeads,
    Packed,
    Product,
    Residual,
    Separate,
    StackedExperts,
    build,
    decoder,
    tied_gpt,
)  # fmt: skip
from tutti.parallel.tensor import tp_plan
from tutti.parallel.tensor.block_call import BlockArguments
from tutti.parallel.tensor.stacked_experts import find_expert_cuts
from tutti.parallel.tensor.tp_plan import PlanEntry, PlanFinder, summary
from tutti.parallel.tensor.tp_verify import TensorCut, find_block_split


def plan(
    model: nn.Module, ranks: int = 2, least: int = 1, whole: tuple[str, ...] = (), drops: bool = True
) -> list[PlanEntry]:
    return PlanFinder(model, ranks, least, whole, drops).find()


def roles(model: nn.Module, ranks: int = 2, **options: object) -> dict[str, str]:
    return {entry.name: entry.role for entry in plan(model, ranks, **options)}  # type: ignore[arg-type]


def test_gpt() -> None:
    found = roles(tied_gpt(0.1))
    assert found == {
        "embed.character": "vocabulary",
        "embed.position": "vocabulary",
        "head": "gathered",
        **{
            f"block{n}.{name}": role
            for n in (1, 2)
            for name, role in {
                "attention": "within",
                "attention.queries_keys_values": "column",
                "attention.merge": "row",
                "feed_forward.widen": "column",
                "feed_forward.shrink": "row",
            }.items()
        },
    }
    entries = {entry.name: entry for entry in plan(tied_gpt())}
    assert entries["block1.attention.queries_keys_values"].cuts == {"weight": TensorCut(0, 4, (12, 12, 12))}
    assert entries["block1.attention.merge"].cuts == {"weight": TensorCut(1, 4)}
    assert entries["block1.feed_forward.widen"].cuts == {"weight": TensorCut(0, 48), "bias": TensorCut(0, 48)}
    assert entries["head"].cuts == entries["embed.character"].cuts == {"weight": TensorCut(0, 11)}


def test_what_stays_whole_is_named() -> None:
    model = tied_gpt()
    found = summary(model, plan(model))
    assert found["whole"] == [*(f"block{n}.norm{i}" for n in (1, 2) for i in (1, 2)), "norm"]


def test_too_few_heads_are_gathered() -> None:
    found = roles(tied_gpt(heads=3), ranks=4)
    assert found["block1.attention.queries_keys_values"] == "gathered"
    assert found["block1.feed_forward.widen"] == "column"
    assert roles(tied_gpt(heads=3), ranks=3)["block1.attention"] == "within"


def test_attention_that_drops_in_a_fused_kernel_is_gathered() -> None:
    assert roles(tied_gpt(0.1), drops=False)["block1.attention.merge"] == "gathered"
    assert roles(tied_gpt(0.0), drops=False)["block1.attention.merge"] == "row"
    layer = nn.TransformerEncoderLayer(12, 4, 20, dropout=0.1)
    assert roles(layer, drops=False) == {"linear1": "column", "dropout": "dropout", "linear2": "row", "": "slow"}


def test_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 20, dropout=0.1)
    assert roles(layer) == {
        "": "slow",
        "self_attn": "heads",
        "self_attn.out_proj": "row",
        "linear1": "column",
        "dropout": "dropout",
        "linear2": "row",
    }
    entries = {entry.name: entry for entry in plan(layer)}
    assert entries["self_attn"].cuts == dict.fromkeys(("in_proj_weight", "in_proj_bias"), TensorCut(0, 4, (12, 12, 12)))


def test_layers_in_a_sequence() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    assert roles(model) == {"1": "column", "3": "dropout", "4": "row", "6": "gathered"}
    assert roles(model, least=50) == {"1": "column", "3": "dropout", "4": "row"}
    assert roles(model, whole=("1",)) == {"4": "column", "6": "row"}
    assert roles(model, ranks=9) == {}


@pytest.mark.parametrize(
    "between", [nn.Softmax(-1), nn.LayerNorm(8), nn.RReLU(), nn.AlphaDropout(), Residual(nn.Identity()), nn.Flatten()]
)
def test_what_mixes_features_does_not_stand_between(between: nn.Module) -> None:
    found = roles(nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4)))
    assert (found["0"], found["2"]) == ("gathered", "gathered")


@pytest.mark.parametrize(
    ("place", "want"),
    [
        ("0", {"2": "column", "4": "row"}),
        ("2", {"0": "gathered", "4": "gathered"}),
        ("4", {"0": "column", "2": "row"}),
        ("", {"0": "gathered", "2": "gathered", "4": "gathered"}),
    ],
)
def test_what_has_a_forward_set_by_the_script_stays_whole(place: str, want: dict[str, str]) -> None:
    """The function may read the weight otherwise than the class does, as a normalised one."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    module = model.get_submodule(place)
    module.forward = MethodType(type(module).forward, module)
    assert roles(model) == want


class Damped(nn.TransformerEncoderLayer):
    """Divides the hidden features by their mean."""

    def _ff_block(self, x: Tensor) -> Tensor:
        hidden = self.linear1(x).relu()
        result: Tensor = self.linear2(hidden / (1 + hidden.mean(-1, keepdim=True)))
        return result


def test_the_feed_forward_of_an_encoder_layer_that_computes_otherwise_is_gathered() -> None:
    patched = nn.TransformerEncoderLayer(12, 4, 20)
    patched._ff_block = MethodType(Damped._ff_block, patched)  # type: ignore[method-assign]
    mixing = nn.TransformerEncoderLayer(12, 4, 20, activation=lambda hidden: hidden.softmax(-1))
    # Each rank would have the gradient of its own features.
    learned = nn.TransformerEncoderLayer(12, 4, 20, activation=nn.PReLU())
    for layer in (Damped(12, 4, 20), patched, mixing, learned):
        found = roles(layer)
        assert (found["linear1"], found["linear2"], found["self_attn"]) == ("gathered", "gathered", "heads")
    usual = nn.TransformerEncoderLayer(12, 4, 20, activation=lambda hidden: hidden.square())
    assert (roles(usual)["linear1"], roles(usual)["linear2"]) == ("column", "row")


def test_convolutions() -> None:
    assert roles(build("convolutions")) == {
        "0": "gathered",
        "3": "gathered",
        "5": "column",
        "7": "dropout",
        "8": "row",
    }
    unet = summary(build("unet"), plan(build("unet")))
    assert set(unet) == {"gathered", "whole"} and "scales.up" in unet["gathered"] and unet["whole"] == ["head"]
    assert {entry.name: entry for entry in plan(build("unet"))}["scales.up"].cuts["weight"] == TensorCut(1, 4)
    assert roles(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))) == {}


@pytest.mark.parametrize(
    ("block", "sections"), [(Nano(), {3}), (Separate(), {0}), (Separate(kv=2), {0}), (Gated(), {0}), (Nano(9, 3), {3})]
)
def test_blocks_of_any_code_are_split_where_that_is_shown_to_be_right(block: nn.Module, sections: set[int]) -> None:
    region = find_block_split(block, 2 if not isinstance(block, Nano) or block.n_head == 4 else 3)
    assert region is not None
    assert {len(cut.sections) for cut in region.columns.values()} == sections


def test_one_matrix_of_queries_keys_and_values_is_split_by_heads() -> None:
    """(inputs, outputs), with fewer keys and values, and where code names the number of heads alone."""
    found = {entry.name: entry for entry in plan(decoder(Packed(), GroupedPacked(), Counted()), 3)}
    assert found["1.block.c_attn"].cuts["weight"] == TensorCut(1, 4, (12, 12, 12))
    assert found["2.block.qkv"].cuts == {"weight": TensorCut(0, 3, (12, 6, 6))}
    assert found["2.block"].local.summed == ("q_norm.weight", "k_norm.weight")
    assert found["3.block.to_qkv"].role == "column" and found["3.block"].local.counts == ("heads",)


def test_blocks_are_cut_by_head_where_heads_are_outermost() -> None:
    class ByHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 4, 3, 3).permute(3, 0, 2, 1, 4)
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            result: Tensor = self.out(out.transpose(1, 2).reshape(*x.shape[:2], 12))
            return result

    torch.manual_seed(0)
    region = find_block_split(ByHead(), 2)
    assert region is not None and region.columns == {"qkv": TensorCut(0, 4)}


class Mixing(nn.Module):
    """A feed-forward block that mixes features where ``mixes`` says so; its last layer may be zeros."""

    def __init__(self, mixes: Any, zeros: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("turn", mixes.pop() if isinstance(mixes, list) else None)
        self.mixes = mixes
        if zeros:
            nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        mixes = not self.training if self.mixes == "in evaluation" else self.turn is not None and bool(self.turn)
        if mixes or self.mixes == (True,):
            h = h / (1 + h.norm(dim=-1, keepdim=True))
        result: Tensor = self.last(h)
        return result


WRONG = [Normed(), Leaking(), Separate(kv=1), Nano(heads=1), Mixing((True,), zeros=True), Mixing("in evaluation")]


@pytest.mark.parametrize("block", WRONG)
def test_what_would_be_wrong_is_not_split(block: nn.Module) -> None:
    assert find_block_split(block, 2) is None


@pytest.mark.parametrize("both", [((False,), (True,)), ([torch.tensor(0)], [torch.tensor(1)])])
def test_a_block_is_not_split_because_another_is(both: tuple[Any, Any]) -> None:
    """Blocks that differ in a tuple or in a buffer alone are tried one by one; equal ones once."""
    right, wrong, other = (Mixing(copy.deepcopy(mixes)) for mixes in (*both, both[0]))
    found = roles(nn.ModuleList([wrong, right, other]))
    assert [found.get(str(number)) for number in range(3)] == [None, "within", "within"]


def test_equal_blocks_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList(Mixing([torch.tensor(0)]) for _ in range(3))
    state, tried = torch.get_rng_state(), list[Any]()
    monkeypatch.setattr(tp_plan, "find_block_split", lambda *rest: tried.append(rest) or find_block_split(*rest))
    found = roles(model)
    assert len(tried) == 1 and found["2"] == "within" and torch.equal(torch.get_rng_state(), state)


def test_blocks_that_hold_more_than_what_is_split() -> None:
    found = summary(model := build("inline"), plan(model))
    assert found["column"] == [
        *("1.block.qkv", "1.block.feed.0"),
        *("2.block.attention.c_attn", "2.block.fc1"),
    ]
    assert found["row"] == ["1.block.mix", "1.block.feed.3", "2.block.attention.c_proj", "2.block.fc2"]
    assert {"1.block", "2.block", "2.block.attention"} <= {e.name for e in plan(model) if e.role == "within"}


def test_the_gradient_of_a_norm_within_heads_is_summed() -> None:
    """Also that of the norm's bias, which is zero but for rounding, of which Adam makes full steps."""

    class Normal(Separate):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(self.head)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (m(x).view(*x.shape[:-1], -1, self.head).transpose(1, 2) for m in (self.q, self.k, self.v))
            out = nn.functional.scaled_dot_product_attention(q, self.norm(k), v)
            result: Tensor = self.o(out.transpose(1, 2).flatten(2))
            return result

    found = find_block_split(Normal(), 2)
    assert found is not None and found.local.summed == ("norm.weight", "norm.bias")


def test_norms_over_all_heads_get_the_features_of_all_ranks() -> None:
    found = find_block_split(NormedHeads(single=True).double(), 3)
    assert found is not None and found.units == 3 and found.local.widened == ("q_norm", "k_norm")
    assert found.local.summed == ("q_norm.weight", "k_norm.weight")
    named = roles(decoder(NormedHeads()))
    assert {key: named[f"1.block.{key}"] for key in ("q", "kv.0", "kv.1", "o", "q_norm", "k_norm")} == {
        "q": "column", "kv.0": "column", "kv.1": "column", "o": "row", "q_norm": "widened", "k_norm": "widened"
    }  # fmt: skip


def test_a_layer_of_two_inputs_and_views_that_name_the_heads_alone_are_split() -> None:
    found = find_block_split(Disentangled().double(), 2)
    assert found is not None and found.local.opened and found.local.takes and sorted(found.columns) == [
        "key", "query", "value"
    ]  # fmt: skip


def test_latent_attention_is_split_by_heads() -> None:
    found = find_block_split(Latent().double(), 2)
    assert found is not None and found.local.shares and (sorted(found.columns), found.row) == (["kv_up", "q_up"], "o")


class Coupled(StackedExperts):
    """Experts whose hidden features cannot be divided."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights).softmax(-1)


def test_stacked_experts_are_split_by_their_hidden_features() -> None:
    tokens, chosen = torch.randn(4, 12), torch.tensor([[0, 1]] * 4)
    call = BlockArguments((tokens, chosen, torch.rand(4, 2)), {}, (True, False, True))

    def cuts(kind: type[StackedExperts], *, apart: bool) -> Any:
        return find_expert_cuts(kind(3, 10, apart=apart), 3, call)

    assert cuts(StackedExperts, apart=True) == {"gate_up": TensorCut(2, 10, (10, 10)), "down": TensorCut(1, 10)}
    assert cuts(StackedExperts, apart=False) == {
        "gate_up": TensorCut(2, 10), "gate_up_bias": TensorCut(1, 10), "down": TensorCut(1, 10)
    }  # fmt: skip
    assert cuts(Coupled, apart=True) is None


class Twice(Product):
    """Computes something else than a linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Noisy(Product):
    """Computes something else than a linear layer in training."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + (torch.rand(()) if self.training else 0.0)


def test_a_class_that_computes_a_linear_layer_is_one() -> None:
    assert roles(nn.Sequential(Product(6, 6), nn.Tanh(), Product(6, 6, bias=False))) == {"0": "column", "2": "row"}
    assert roles(nn.Sequential(Product(6, 6))) == {"0": "gathered"}
    assert roles(nn.Sequential(Twice(6, 6), nn.Tanh(), Noisy(6, 6))) == {}


def test_a_block_that_may_be_given_a_mask_is_not_split() -> None:
    class Masked(Gated):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x)

    assert roles(Masked())["up"] == "gathered"
    assert roles(decoder(Masked()))["1.block.up"] == "column", "the block around it never gives one"


def test_a_layer_used_twice_is_gathered() -> None:
    again = nn.Linear(6, 6)
    assert roles(nn.Sequential(again, nn.Tanh(), nn.Linear(6, 6), again)) == {"0": "gathered", "2": "gathered"}


def test_tied_layers_that_cannot_be_split_alike_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(6, 6, max_norm=1.0), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    assert roles(model) == {}


def test_blocks_that_are_built_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []

    def counted(block: nn.Module, *rest: Any) -> Any:
        tried.append(block)
        return find_block_split(block, *rest)

    monkeypatch.setattr("tutti.parallel.tensor.tp_plan.find_block_split", counted)
    found = roles(decoder(Nano(), Nano(), Nano(heads=3), Nano()))
    assert len(tried) == 2 and [found[f"{n}.block"] for n in (1, 2, 3, 4)] == ["within"] * 4


def test_plans_travel() -> None:
    for shape in SHAPES:
        for entry in plan(build(shape)):
            assert PlanEntry.from_json(entry.as_json()) == entry or entry.role == "within"
