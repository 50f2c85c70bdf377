"""TP plans by hand: they train as on one device, split what they name and nothing else, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import tutti
from tests import worlds
from tests.parallel.shapes import Gated, Separate, build, data, loss
from tests.parallel.splitting import TOLERANCE, check, outcome, train
from tutti.config.strategy_choice import parse_strategy
from tutti.errors import UsageError
from tutti.parallel.tensor.tp_plan import PlanFinder
from tutti.parallel.tensor.tp_plan_by_hand import check_asked, roles_asked

GPT = {
    "block*.attention.queries_keys_values": "colwise",
    "block*.attention.merge": "rowwise",
    "block*.feed_forward.widen": "colwise",
    "block*.feed_forward.shrink": "rowwise",
}


def found(model: nn.Module, styles: dict[str, str], ranks: int = 2) -> dict[str, str]:
    asked = roles_asked(model, styles)
    plan = PlanFinder(model, ranks, 16384, (), drops=True, asked=asked).find()
    check_asked(plan, asked)
    return {entry.name: entry.role for entry in plan}


def gated(**styles: str) -> dict[str, str]:
    return found(nn.Sequential(Gated()), {f"0.{name}": style for name, style in styles.items()})


def test_it_splits_what_it_names_and_nothing_else() -> None:
    model = build("gpt")
    roles = found(model, {"block1.feed_forward.widen": "colwise", "block1.feed_forward.shrink": "rowwise"})
    assert roles == {"block1.feed_forward.widen": "column", "block1.feed_forward.shrink": "row"}
    assert found(model, {"head": "gathered", "embed.character": "vocabulary"}) == {
        "head": "gathered",
        "embed.character": "vocabulary",
    }
    assert gated(gate="colwise", up="colwise", down="rowwise") == {
        "0": "within",
        "0.gate": "column",
        "0.up": "column",
        "0.down": "row",
    }


def test_the_last_pattern_that_matches_counts() -> None:
    roles = found(build("gpt"), {**GPT, "block2.*.*": "whole"})
    assert {name.partition(".")[0] for name in roles} == {"block1"}


@pytest.mark.parametrize("shape", ["gpt", "gpt, dropout"])
def test_equals_one_device(shape: str) -> None:
    plan = "+".join(f"{pattern}:{style}" for pattern, style in GPT.items())
    whole, *here = check(shape, f"tensor:plan={plan}", 2)
    assert max(here) < 0.75 * whole, "nothing was split"


def test_split_keys_meet_their_part_of_whole_queries_and_values() -> None:
    assert found(nn.Sequential(Separate(kv=2)), {"0.k": "colwise", "0.o": "rowwise"})["0.k"] == "column"
    check("few keys", "tensor:plan=*.k:colwise+*.o:rowwise", 2)


def by_dictionary(given: dict[str, str] | None) -> Any:
    strategy = "single" if given is None else tutti.strategy("tensor", plan=given)
    arguments = {"strategy": strategy, "workers": 1, "batch_size": 8, "precision": "fp64", "ema": 0.8}
    run = tutti.prepare(build("gpt"), "adamw:lr=0.01", data("gpt"), loss("gpt"), **arguments)  # type: ignore[arg-type]
    train(run, 2)
    return outcome(run), run.replica.summary["split"] if given else ""


def refused(plan: dict[str, str]) -> str:
    strategy = tutti.strategy("tensor", plan=plan)
    with pytest.raises(UsageError) as caught:
        tutti.prepare(build("gpt"), "sgd:lr=0.1", data("gpt"), loss("gpt"), strategy=strategy, workers=1, batch_size=8)
    return str(caught.value)


def test_a_plan_that_cannot_be_carried_out_is_refused_on_every_rank() -> None:
    for said in worlds.run(2, refused, plan={"block7.*": "colwise"}):
        assert said.startswith("the model has no module 'block7.*'")


def test_from_python() -> None:
    [(want, _)] = worlds.run(1, by_dictionary, given=None)
    plan = {"block1.feed_forward.widen": "colwise", "block1.feed_forward.shrink": "rowwise"}
    for got, said in worlds.run(2, by_dictionary, given=plan):
        assert max(abs(got[name] - want[name]).max() for name in want) <= TOLERANCE
        assert "1 column (block1.feed_forward.widen), 1 row (block1.feed_forward.shrink)" in said


@pytest.mark.parametrize(
    ("styles", "words"),
    [
        ({"gate": "colwise", "up": "colwise"}, "0.gate cannot be colwise"),
        ({"up": "colwise", "down": "rowwise"}, "0.up cannot be colwise"),
        ({"gate": "rowwise", "up": "rowwise", "down": "colwise"}, "in a trial it is colwise"),
        ({"dwon": "rowwise"}, "the model has no module '0.dwon'"),
        ({"down": "vocabulary"}, "it is a Linear, and vocabulary is for embeddings"),
        ({"down": "heads"}, "heads is for nn.MultiheadAttention"),
    ],
)
def test_nonsense_is_refused_by_name(styles: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        gated(**styles)
    assert words in str(caught.value)


def test_a_split_that_computes_another_result_is_refused() -> None:
    # Keys alone, whose products with the values no rowwise layer adds up.
    with pytest.raises(UsageError, match=r"0\.k cannot be colwise"):
        found(nn.Sequential(Separate(kv=2)), {"0.k": "colwise"})
    mixed = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    with pytest.raises(UsageError, match="no trial of a block"):
        found(mixed, {"0": "colwise", "2": "rowwise"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plan=a:colwise+a:rowwise", "plan names a pattern twice"),
        ("plan=a:columnwise", "'a:columnwise', whose style is unknown; did you mean 'colwise'?"),
        ("plan=a", "must be pattern:style"),
        ("plan=a:colwise,whole=b", "leave out whole"),
    ],
)
def test_malformed_plans_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_strategy(f"tensor:{text}")
    assert words in str(caught.value)
