"""Every metric has a direction: from its name, from the task, or as it is given; never guessed."""

from __future__ import annotations

import pytest

from tutti.config.metric_direction import HIGHER, LOWER, Metric, check_directions, higher_is_better
from tutti.errors import UsageError


def test_every_known_name_has_one_direction() -> None:
    assert not LOWER & HIGHER
    assert {higher_is_better(name) for name in LOWER} == {False}
    assert {higher_is_better(name) for name in HIGHER} == {True}
    assert higher_is_better("raw_loss") is False and higher_is_better("raw_accuracy") is True


@pytest.mark.parametrize(
    ("name", "higher"),
    [
        *(("val_loss", False), ("relative_error", False), ("word_perplexity", False), ("test_rmse", False)),
        *(("top1_accuracy", True), ("mean_dice", True), ("val_f1", True)),
        *(("neg_mean_squared_error", None), ("inverse_loss", None), ("log_loss", None), ("distance", None)),
        *(("half_precision", None), ("lossless", None), ("accuracy_drop", None), ("", None)),
    ],
)
def test_longer_names_are_read_by_their_last_word_or_not_at_all(name: str, higher: bool | None) -> None:
    assert higher_is_better(name) is higher


def test_what_is_given_wins_over_the_task_and_the_task_over_the_name() -> None:
    assert Metric.parse("error", "--metric").higher is False
    assert Metric.parse("error", "--metric", {"error": "higher"}).higher is True
    assert Metric.parse("error:lower", "--metric", {"error": "higher"}).higher is False
    assert Metric.parse("raw_distance", "--keep-best", {"distance": "lower"}) == Metric("raw_distance", higher=False)


def test_an_unknown_direction_is_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match=r"--metric.*distance:min or distance:max.*directions=\{'distance'"):
        Metric.parse("distance", "--metric", {"height": "higher"})
    with pytest.raises(UsageError, match="'lower' or 'higher'"):
        check_directions({"distance": "down"})
