"""The verdict says what the numbers say: causes by their share, nothing that the seeds alone could make."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare.test_ladder import OWN, read
from tutti.compare import table, verdict
from tutti.compare.ladder import Ladder
from tutti.compare.verdict import Outcome, Row


def outcome(seed: int, held_out: float) -> Outcome:
    return Outcome(seed, held_out, 0.9, 144, 600_000, 60.0, 10_000.0, ((1.0, 0.3), (12.0, held_out)))


def rows(ladder: Ladder, values: dict[str, list[float]]) -> dict[str, Row]:
    return {
        name: Row(name, ladder.rung(name).cause, ladder.rung(name).parent, tuple(map(outcome, range(9), found)))
        for name, found in values.items()
    }


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
    assert not verdict.held(ladder, found)


def test_no_drop_no_shares(ladder: Ladder) -> None:
    said = verdict.verdict(ladder, rows(ladder, {"a": [0.70, 0.74], "b": [0.70, 0.72], "d": [0.60, 0.61]}))
    assert said[1] == "That is no drop beyond what the seeds alone make."
    assert said[2] == "D costs 10.5 points ('d' over 'b')."
    assert "of the drop" not in "".join(said)


def test_one_seed_has_no_error_bar_and_nothing_is_too_little(ladder: Ladder) -> None:
    assert "one seed" in verdict.verdict(ladder, rows(ladder, {"a": [0.7], "b": [0.5]}))[0]
    assert verdict.verdict(ladder, rows(ladder, {"a": [0.7]})) == ["Not enough runs have finished for a verdict."]
    assert verdict.held(ladder, rows(ladder, {"a": [0.7], "b": [0.5], "d": [0.7]}))


def test_the_table_has_every_rung(ladder: Ladder) -> None:
    found = rows(ladder, {"a": [0.70, 0.72], "b": [0.5]})
    lines = table.plain(ladder, found).splitlines()
    assert [line.split()[0] for line in lines] == ["rung", "a", "b", "c", "d"]
    assert "± 1.0%" in lines[1] and "one seed" in lines[2] and "–" in lines[3]
    text = table.markdown(ladder, found, ["So it is."], "tutti compare digits")
    assert "`lr_scale = linear:base_batch=512`" in text and "- So it is." in text
    assert len(table.as_csv(ladder, found).splitlines()) == 4
