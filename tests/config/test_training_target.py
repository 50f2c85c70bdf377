"""``--until``: which texts are a target, in which direction, and when a value reaches it."""

from __future__ import annotations

import math

import pytest

from tutti.config.train_config import TrainConfig
from tutti.config.training_target import TrainingTarget, check_metric
from tutti.errors import UsageError


@pytest.mark.parametrize(
    ("text", "name", "higher", "value"),
    [
        ("accuracy=0.93", "accuracy", True, 0.93),
        (" accuracy >= .5 ", "accuracy", True, 0.5),
        ("val_loss=1e-3", "val_loss", False, 0.001),
        ("distance<=2", "distance", False, 2.0),
        ("distance>=-2", "distance", True, -2.0),
        ("height=3", "height", True, 3.0),
    ],
)
def test_targets(text: str, name: str, higher: bool, value: float) -> None:
    found = TrainingTarget.parse(text, declared={"height": "higher"})
    assert (found.metric.name, found.metric.higher, found.value) == (name, higher, value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("accuracy", "cannot read 'accuracy'"),
        ("accuracy=", "cannot read"),
        ("accuracy=high", "cannot read"),
        ("accuracy=nan", "cannot read"),
        ("accuracy<0.9", "cannot read"),
        ("=0.9", "cannot read"),
        ("distance=2", "write distance<=2 or distance>=2"),
        ("accuracy<=0.9", "a higher accuracy is better"),
        ("loss>=0.9", "a lower loss is better"),
    ],
)
def test_what_is_no_target_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        TrainingTarget.parse(text)
    assert said.lower() in str(caught.value).lower()


def test_a_value_as_good_as_the_target_reaches_it() -> None:
    higher, lower = TrainingTarget.parse("accuracy=0.9"), TrainingTarget.parse("loss=0.9")
    assert [higher.reached(v) for v in (0.89, 0.9, 0.91, math.nan, math.inf)] == [False, True, True, False, False]
    assert [lower.reached(v) for v in (0.91, 0.9, 0.89, math.nan, -math.inf)] == [False, True, True, False, False]


def test_the_nearest_metric_is_named() -> None:
    check_metric("raw_accuracy", "--until", ["loss", "accuracy"], averaged=True)
    with pytest.raises(UsageError, match="Did you mean 'accuracy'"):
        check_metric("acuracy", "--until", ["loss", "accuracy"], averaged=False)
    with pytest.raises(UsageError, match="no held-out 'raw_accuracy'"):
        check_metric("raw_accuracy", "--until", ["loss", "accuracy"], averaged=False)


@pytest.mark.parametrize("options", [{"until": "accuracy=0.9"}, {"patience": 2}])
def test_a_run_without_evaluations_on_its_way_cannot_end_at_one(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="--eval-every is none"):
        TrainConfig(eval_every="none", **options)  # type: ignore[arg-type]


def test_the_metric_of_patience() -> None:
    def watched(**options: object) -> object:
        return TrainConfig(**options).watched_metric()  # type: ignore[arg-type]

    assert watched() is None and watched(keep_best="accuracy") is None
    assert str(watched(patience=2)) == "Metric(name='loss', higher=False)"
    assert str(watched(patience=2, keep_best="accuracy")) == "Metric(name='accuracy', higher=True)"
    assert str(watched(patience=2, keep_best="accuracy", until="loss=1")) == "Metric(name='loss', higher=False)"
