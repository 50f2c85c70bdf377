"""The verdict says what the numbers say: causes by their share, nothing that the seeds alone could make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.compare.test_ladder import OWN, read
from tutti.compare import convergence_table, verdict
from tutti.compare.ladder import Ladder
from tutti.compare.verdict import RungResult, RunOutcome
from tutti.config.metric_direction import Metric
from tutti.launcher.encoding import strict_json

LOSS = Metric("loss", higher=False)


def outcome(seed: int, held_out: float) -> RunOutcome:
    return RunOutcome(seed, held_out, 0.9, 144, 600_000, 60.0, 10_000.0, ((1.0, 0.3), (12.0, held_out)))


def rows(ladder: Ladder, values: dict[str, list[float]]) -> dict[str, RungResult]:
    return {
        name: RungResult(name, ladder.rung(name).cause, ladder.rung(name).parent, tuple(map(outcome, range(9), found)))
        for name, found in values.items()
    }


def test_a_rung_without_a_finished_run_has_no_result() -> None:
    with pytest.raises(ValueError, match="no run of a has finished"):
        RungResult("a", "the rate", None, ())


@pytest.fixture
def ladder(tmp_path: Path) -> Ladder:
    return read(tmp_path, OWN)


def test_causes_with_their_share_and_noise_without(ladder: Ladder) -> None:
    found = rows(ladder, {"a": [0.70, 0.72], "b": [0.50, 0.52], "c": [0.505, 0.525], "d": [0.66, 0.66]})
    said = verdict.verdict(ladder, found)
    assert said[0].startswith(
        "'b' against 'a': held-out accuracy 71.0% → 51.0%, -20.0 points; seeds alone differ by 2.0"
    )
    assert said[1] == "D brings 15.0 points, 75% of the drop ('d' over 'b')."
    assert said[2] == "No difference beyond the seeds: the rate."
    assert said[3] == "The best recipe, 'd' (66.0%), does not reach 'a' (71.0%)."
    assert not verdict.recipe_holds(ladder, found)


def test_no_drop_no_shares(ladder: Ladder) -> None:
    said = verdict.verdict(ladder, rows(ladder, {"a": [0.70, 0.74], "b": [0.70, 0.72], "d": [0.60, 0.61]}))
    assert said[1] == "That is not a drop beyond the difference between seeds."
    assert said[2] == "D costs 10.5 points ('d' over 'b')."
    assert "of the drop" not in "".join(said)


def test_one_seed_has_no_error_bar_and_nothing_is_too_little(ladder: Ladder) -> None:
    assert "one seed" in verdict.verdict(ladder, rows(ladder, {"a": [0.7], "b": [0.5]}))[0]
    assert verdict.verdict(ladder, rows(ladder, {"a": [0.7]})) == ["Not enough runs have finished for a verdict."]
    assert verdict.recipe_holds(ladder, rows(ladder, {"a": [0.7], "b": [0.5], "d": [0.7]}))


def test_the_table_has_every_rung(ladder: Ladder) -> None:
    found = rows(ladder, {"a": [0.70, 0.72], "b": [0.5]})
    lines = convergence_table.plain_table(ladder, found).splitlines()
    assert [line.split()[0] for line in lines] == ["rung", "a", "b", "c", "d"]
    assert "± 1.0%" in lines[1] and "one seed" in lines[2] and "–" in lines[3]
    text = convergence_table.markdown(ladder, found, ["So it is."], "tutti compare digits")
    assert "`lr_scale = linear:base_batch=512`" in text and "- So it is." in text
    assert len(convergence_table.as_csv(ladder, found).splitlines()) == 4


def test_golden_verdict_of_a_loss(ladder: Ladder) -> None:
    """``linear`` and ``text`` are judged by their loss: the lowest is the best, and what lowers it brings something."""
    found = rows(ladder, {"a": [0.30, 0.32], "b": [0.50, 0.52], "c": [0.60, 0.62], "d": [0.34, 0.36]})
    assert verdict.verdict(ladder, found, LOSS) == [
        "'b' against 'a': held-out loss 0.3100 → 0.5100, +0.2000 (lower is better); seeds alone differ by 0.0200.",
        "D brings 0.1600, 80% of the drop ('d' over 'b').",
        "The rate costs 0.1000, -50% of the drop ('c' over 'b').",
        "The best recipe, 'd' (0.3500), does not reach 'a' (0.3100).",
    ]
    assert not verdict.recipe_holds(ladder, found, LOSS)
    assert verdict.as_json(ladder, found, LOSS)["better"] == "lower"
    better = rows(ladder, {"a": [0.30, 0.32], "b": [0.50, 0.52], "d": [0.28, 0.30]})
    assert verdict.verdict(ladder, better, LOSS)[-1] == "The best recipe, 'd' (0.2900), reaches 'a' (0.3100)."
    assert verdict.recipe_holds(ladder, better, LOSS)


def test_a_loss_that_falls_is_no_drop(ladder: Ladder) -> None:
    said = verdict.verdict(ladder, rows(ladder, {"a": [0.50, 0.52], "b": [0.30, 0.32]}), LOSS)
    assert said[1] == "That is not a drop beyond the difference between seeds."


def test_a_loss_is_never_written_in_per_cent(ladder: Ladder) -> None:
    found = rows(ladder, {"a": [0.70, 0.72], "b": [1.5, 1.7]})
    lines = convergence_table.plain_table(ladder, found, LOSS).splitlines()
    assert "0.7100" in lines[1] and "± 0.0100" in lines[1] and "1.6000" in lines[2]
    assert "%" not in "".join(lines)


def test_a_run_that_ends_without_a_number_is_not_ranked(ladder: Ladder) -> None:
    for metric in (LOSS, verdict.ACCURACY):
        found = rows(ladder, {"a": [0.5, 0.5], "b": [0.6, 0.6], "d": [0.1, float("nan")], "c": [0.55, 0.55]})
        said = verdict.verdict(ladder, found, metric)
        assert said[0] == "'d' ended without a number in 1 of 2 runs, and is not compared."
        assert "'d'" not in "".join(said[1:])
        written = json.loads(strict_json(verdict.as_json(ladder, found, metric)))
        assert written["rungs"][3]["runs"][1]["held_out"] is written["rungs"][3]["runs"][1]["curve"][1][1] is None
        assert "–" in convergence_table.plain_table(ladder, found, metric).splitlines()[-1]
