"""A rung holds against its like at the first rung's scale, and never across two causes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.compare.test_ladder import VARIABLES, read
from tests.compare.test_verdict import rows
from tutti.compare import ladder, verdict
from tutti.compare.like_with_like import baselines, other_causes, recipes

OTHER = """
naive = "many"
[base]
optimizer = "adam:lr=0.003"
schedule = "cosine"
[[rung]]
name = "one"
workers = 1
batch_size = "{worker_batch}"
[[rung]]
name = "many"
workers = "{workers}"
batch_size = "{batch_size}"
[[rung]]
name = "Muon"
optimizer = "muon:lr=0.02"
"""
CONTROL = (
    OTHER
    + """
[[rung]]
name = "Muon, one"
workers = 1
batch_size = "{worker_batch}"
optimizer = "muon:lr=0.01,adam_lr=0.002"
"""
)


def test_every_recipe_of_the_shipped_ladders_has_its_like() -> None:
    """The course's has none where its scripts changed the model or the optimizer as well."""
    for name in ladder.shipped():
        found = ladder.load_ladder(name, VARIABLES, {})
        alike = {rung.name: [other.name for other in baselines(found, rung)] for rung in recipes(found)}
        without = {name for name, others in alike.items() if not others}
        assert without == ({rung.name for rung in found.rungs[2:]} if name == "course" else set())
        if name == "corrected":
            assert alike["Muon"] == ["Muon, one worker"] and alike["LAMB"] == ["LAMB, one worker"]
            assert alike["+ warm-up"] == alike["N workers, naive"] == ["one worker"]
            assert "Muon, one worker" not in alike


def test_two_causes_are_no_comparison(tmp_path: Path) -> None:
    own = read(tmp_path, OTHER)
    found = rows(own, {"one": [0.70, 0.71], "many": [0.50, 0.51], "Muon": [0.75, 0.76]})
    assert verdict.verdict(own, found)[-1] == (
        "The best recipe, 'Muon' (75.5%), is better than 'one' (70.5%), but differs from it in optimizer as well. "
        "Whether it held is not known: that needs a rung like 'Muon' with workers = 1 and batch_size = 512."
    )
    assert not verdict.recipe_holds(own, found)
    lost = rows(own, {"one": [0.70, 0.71], "many": [0.50, 0.51], "Muon": [0.65, 0.66]})
    assert "is worse than 'one' (70.5%), but differs" in verdict.verdict(own, lost)[-1]


@pytest.mark.parametrize(
    ("control", "said", "held"),
    [
        (
            [0.78, 0.79],
            "does not reach 'Muon, one' (78.5%), its like at that scale. It reaches 'one' (70.5%)",
            False,
        ),
        ([0.72, 0.73], "reaches 'Muon, one' (72.5%), its like at that scale. It reaches 'one' (70.5%)", True),
        (
            [],
            "in optimizer as well. Whether it held is not known: that needs 'Muon, one', which",
            False,
        ),
    ],
)
def test_the_like_decides(control: list[float], said: str, held: bool, tmp_path: Path) -> None:
    own = read(tmp_path, CONTROL)
    values = {"one": [0.70, 0.71], "many": [0.50, 0.51], "Muon": [0.75, 0.76], "Muon, one": control}
    found = rows(own, {name: seeds for name, seeds in values.items() if seeds})
    last = verdict.verdict(own, found)[-1]
    assert said in last and last.startswith("The best recipe, 'Muon' (75.5%), ")
    assert verdict.recipe_holds(own, found) is held


def test_a_bad_optimizer_does_not_hold_because_it_is_as_bad_at_one_worker(tmp_path: Path) -> None:
    own = read(tmp_path, CONTROL)
    found = rows(own, {"one": [0.7], "many": [0.5], "Muon": [0.6], "Muon, one": [0.55]})
    assert not verdict.recipe_holds(own, found)
    assert "reaches 'Muon, one' (55.0%)" in verdict.verdict(own, found)[-1]
    assert "It does not reach 'one' (70.0%)" in verdict.verdict(own, found)[-1]


def test_the_best_of_several_likes_is_the_baseline(tmp_path: Path) -> None:
    own = read(tmp_path, CONTROL + '[[rung]]\nname = "Muon, one, slow"\noptimizer = "muon:lr=0.001"\n')
    found = rows(own, {"one": [0.7], "many": [0.5], "Muon": [0.75], "Muon, one": [0.74], "Muon, one, slow": [0.76]})
    assert "does not reach 'Muon, one, slow' (76.0%)" in verdict.verdict(own, found)[-1]


def test_another_recipe_may_hold_where_the_best_does_not(tmp_path: Path) -> None:
    own = read(tmp_path, CONTROL)
    found = rows(own, {"one": [0.70], "many": [0.71], "Muon": [0.75], "Muon, one": [0.76]})
    assert verdict.verdict(own, found)[-1] == "'many' (71.0%) reaches 'one' (70.0%), like with like."
    assert verdict.recipe_holds(own, found)


def test_what_held_is_said_without_the_naive_rung(tmp_path: Path) -> None:
    own = read(tmp_path, CONTROL)
    found = rows(own, {"one": [0.70], "Muon": [0.75], "Muon, one": [0.76]})
    [said] = verdict.verdict(own, found)
    assert said.startswith("The best recipe, 'Muon' (75.0%), does not reach 'Muon, one' (76.0%)")


def test_controls_explain_no_part_of_the_drop(tmp_path: Path) -> None:
    own = read(tmp_path, CONTROL)
    found = rows(own, {"one": [0.70], "many": [0.50], "Muon": [0.65], "Muon, one": [0.75]})
    shares = {effect.name: effect.share for effect in verdict.effects(own, found)}
    assert shares["Muon, one"] is None and shares["Muon"] is not None


def test_a_ladder_at_one_scale_compares_with_its_first_rung(tmp_path: Path) -> None:
    """Nothing is asked of the number of workers: one option is one cause."""
    scale = 'workers = "{workers}"\nbatch_size = "{batch_size}"'
    text = OTHER.replace(f'name = "many"\n{scale}', 'name = "many"\nclip = 1.0')
    text = text.replace('workers = 1\nbatch_size = "{worker_batch}"', scale)
    own = read(tmp_path, text)
    one, many, muon = own.rungs
    assert recipes(own) == (many, muon) and baselines(own, many) == (one,)
    assert baselines(own, muon) == (), "clip and optimizer are two causes"


def test_what_changes_nothing_at_one_worker_is_no_cause(tmp_path: Path) -> None:
    own = read(tmp_path, OTHER)
    one, many, _ = (rung.config for rung in own.rungs)

    def causes(**changes: Any) -> list[str]:
        return other_causes(replace(many, **changes), one)

    assert causes() == causes(lr_scale="sqrt:base_batch=512", schedule="cosine:warmup=1ep") == []
    assert causes(regime_batch=512, batch_norm="sync", identical_batches=True, seed=7, devices="8", keep=4) == []
    assert causes(gradient_noise="multiplicative:base_batch=512", optimizer="adam:lr=0.1") == []
    assert causes(regime_batch=256, batch_norm="ghost:size=32") == ["batch_norm", "regime_batch"]
    assert causes(gradient_noise="multiplicative:base_batch=256") == ["gradient_noise"]
    assert causes(schedule="constant", optimizer="adam:lr=0.003,beta2=0.9") == ["optimizer", "schedule"]
    assert causes(epochs=24.0, clip=1.0, model="resnet18", augment=True) == ["augment", "clip", "epochs", "model"]
