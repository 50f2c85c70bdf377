"""Plans made by hand: the knee, the reasons, ties, limits, and bands only where the back-test has a cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from tutti.config.training_target import TrainingTarget
from tutti.errors import UsageError
from tutti.planning.conformal_band import CellScores, shipped_residuals
from tutti.planning.device_plan import (
    DevicePlan,
    MeasuredTarget,
    PlannedStep,
    TargetData,
    best_by_devices,
    cheapest_plan,
    device_plans,
    draw_ends,
    find_knee,
    last_gain,
    lost_reason,
    within_limits,
)
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.plan_file import headline
from tutti.planning.recipe import TrainingRecipe

# T14 of McCandlish et al.: S_min = 1000, E_min = 64000.
LAW = TrainingRecipe("loss", 1.0, 64000.0, 64.0, (), "made by hand")
MEASURED = [MeasuredTarget(batch, LAW.samples_at(batch), 3) for batch in (16, 64, 128)]


def step(devices: int, batch: int, terms: Mapping[str, float], spread: float = 0.0) -> PlannedStep:
    seconds = sum(terms.values())
    draws = seconds * np.exp(spread * np.random.default_rng(devices * batch).standard_normal(DRAWS))
    return PlannedStep(devices, batch, "mirrored", seconds, draws, terms, "made by hand")


def plans(*steps: PlannedStep, price: float | None = None) -> list[DevicePlan]:
    return device_plans(steps, TargetData([], LAW, {}, "digits"), price)


def row(times: Mapping[int, float]) -> list[DevicePlan]:
    """Plans of 5000 steps whose time is as given."""
    return plans(*(step(devices, 16, {"compute": seconds / 5000}) for devices, seconds in times.items()))


def test_time_steps_and_cost_are_those_of_the_law() -> None:
    (found,) = plans(step(4, 256, {"compute": 0.1}), price=2.0)
    assert (found.steps, found.data.samples) == (1250, 320000)
    assert found.seconds == pytest.approx(125) and found.cost == pytest.approx(2 * 4 * 125 / 3600)
    assert np.median(found.draws) == pytest.approx(125)


def test_a_fit_through_the_laws_points_gives_the_law_back() -> None:
    data = TargetData(MEASURED, None, {}, "digits")
    assert data.at(64).samples == 128000 and "measured in 3 runs" in data.at(64).text
    assert data.at(512).samples == pytest.approx(LAW.samples_at(512), rel=0.05)
    assert np.median(data.at(512).draws) == pytest.approx(data.at(512).samples, rel=0.05)
    assert data.critical_batch is not None and data.critical_batch[0] == pytest.approx(64, rel=0.2)


def test_a_measured_step_of_stated_samples_has_no_band() -> None:
    """Its draws show the error of the measurement: a band of no width would contradict them."""
    data, made = TargetData([MeasuredTarget(16, 80_000, 0)], None, {}, "script"), step(2, 16, {"compute": 0.1})
    measured, predicted = replace(made, measured=True), replace(made, band=(0.05, 0.2))
    (known,), (found,) = device_plans([measured], data, None), device_plans([predicted], data, None)
    assert known.band is None and known.band_text == "no band: the step was measured, and the samples are stated"
    assert found.band == (250.0, 1000.0) and "the samples are stated" in found.band_text


def test_one_measured_batch_says_nothing_of_another() -> None:
    data = TargetData(MEASURED[:1], None, {}, "digits")
    assert data.at(16).samples == 80000 and data.critical_batch is None
    with pytest.raises(UsageError, match="second batch"):
        data.at(32)
    with pytest.raises(UsageError, match="--runs or --recipe"):
        TargetData([], None, {}, "digits")


def test_a_band_exists_only_where_the_back_test_has_a_cell() -> None:
    data = TargetData(MEASURED, None, shipped_residuals(), "digits")
    near, middle, far = data.at(256), data.at(192), data.at(4096)
    assert near.band is not None and near.band[0] < near.samples < near.band[1]
    assert middle.band is None and "no band" in middle.text
    assert far.band is None and "no band" in far.text
    sets = {"a": CellScores((0.3,), 20), "b": CellScores((0.3,), 20)}
    cells = {"data to the target at smaller batches, at most 4 ×": sets}
    narrow = TargetData(MEASURED, None, cells, "digits").at(256)
    assert narrow.band is not None and narrow.band[1] < near.band[1]
    predicted = device_plans([step(2, 256, {"compute": 0.1})], data, None)[0]
    assert predicted.band is None and "no band" in predicted.band_text
    # The errors of data and step are independent: their logarithms add up in squares.
    seconds = predicted.step.seconds
    for wide in (1.0001, 1.3):
        checked = replace(predicted.step, band=(seconds / wide, seconds * wide))
        (banded,) = device_plans([checked], data, None)
        assert banded.band is not None and "taken as independent" in banded.band_text
        end = np.hypot(np.log(near.band[1] / near.samples), np.log(wide))
        assert np.log(banded.band[1] / banded.seconds) == pytest.approx(end) == -np.log(banded.band[0] / banded.seconds)
        assert not within_limits(banded, banded.seconds * 1.01, None)


def test_the_knee_is_the_last_doubling_that_was_worth_it() -> None:
    assert find_knee(row({1: 100, 2: 60, 4: 38, 8: 30, 16: 29})).devices == 4  # type: ignore[union-attr]
    assert find_knee(row({1: 100, 2: 95})).devices == 1  # type: ignore[union-attr]
    # A gain over a bad number of devices is no gain: 32 devices are slower than 8.
    assert find_knee(row({4: 100, 8: 60, 16: 200, 32: 70})).devices == 8  # type: ignore[union-attr]
    # Four times the devices are two doublings, and must buy 2.25 ×.
    assert find_knee(row({1: 100, 4: 50})).devices == 1  # type: ignore[union-attr]
    assert find_knee(row({1: 100, 4: 44})).devices == 4  # type: ignore[union-attr]
    assert find_knee(row({1: 100})) is None


def test_the_first_line_calls_devices_worth_it_only_if_others_were_planned() -> None:
    target = TrainingTarget.parse("accuracy=0.93", "--target")
    assert headline(row({1: 100, 2: 60}), target).startswith("2 devices are worth it: accuracy >= 0.93 after 60 s")
    assert headline(row({2: 60}), target).startswith("2 devices, the only number planned: accuracy >= 0.93 after 60 s")


def test_the_best_of_each_number_of_devices_and_the_cheapest() -> None:
    found = plans(
        step(1, 16, {"compute": 0.1}),
        step(2, 16, {"compute": 0.09}),
        step(2, 64, {"compute": 0.1}),
        step(4, 64, {"compute": 0.06}),
    )
    best = best_by_devices(found)
    assert [(plan.devices, plan.step.batch) for plan in best] == [(1, 16), (2, 64), (4, 64)]
    assert cheapest_plan(found) is best[1]
    assert last_gain(best, 0) is None and last_gain(best, 2) == pytest.approx(0.1 / 0.06)


@pytest.mark.parametrize(
    ("winner", "loser", "term", "closes"),
    [
        ((4, 16, {"compute": 0.1}), (4, 16, {"compute": 0.1, "communication": 0.05}), "communication", 250.0),
        ((4, 16, {"compute": 0.1}), (4, 16, {"compute": 0.09, "bubble": 0.05}), "bubble", 250.0),
        ((4, 64, {"compute": 0.1}), (4, 256, {"compute": 0.4}), "data to the target", 300.0),
        ((4, 256, {"compute": 0.4}), (4, 16, {"compute": 0.2}), "compute", 5000 * (0.2 - 0.4 / 16)),
    ],
)
def test_the_reason_is_the_term_that_closes_most(
    winner: tuple[int, int, dict[str, float]], loser: tuple[int, int, dict[str, float]], term: str, closes: float
) -> None:
    first, second = plans(step(*winner))[0], plans(step(*loser))[0]
    reason = lost_reason(second, first)
    assert reason.term == term and reason.closes == pytest.approx(closes)
    assert reason.gap == pytest.approx(second.seconds - first.seconds) and not reason.tie
    assert f"s by {term}" in reason.text


def test_plans_whose_draws_overlap_are_a_tie() -> None:
    sure, also = plans(step(4, 16, {"compute": 0.100}))[0], plans(step(4, 16, {"compute": 0.110}))[0]
    assert not lost_reason(also, sure).tie
    unsure = plans(step(4, 16, {"compute": 0.110}, spread=0.2))[0]
    assert lost_reason(unsure, sure).tie and "the same within the draws" in lost_reason(unsure, sure).text
    nearly = plans(step(4, 16, {"compute": 0.1001}))[0]
    assert lost_reason(nearly, sure).tie


def test_limits_are_judged_by_the_slow_end_of_a_band_and_by_the_point_without_one() -> None:
    (point,) = plans(step(4, 16, {"compute": 0.1}), price=36.0)
    assert within_limits(point, 500.0, None) and not within_limits(point, 499.0, None)
    assert within_limits(point, None, 20.0) and not within_limits(point, None, 19.9)
    measured = PlannedStep(4, 256, "mirrored", 0.1, np.full(DRAWS, 0.1), {}, "measured", measured=True)
    (banded,) = device_plans([measured], TargetData(MEASURED, None, shipped_residuals(), "digits"), 36.0)
    assert banded.band is not None and banded.seconds < banded.slow_end() == banded.band[1]
    assert banded.cost_band == pytest.approx([36.0 * 4 * end / 3600 for end in banded.band])
    assert banded.cost_ends is not None and banded.cost_ends[0] < (banded.cost or 0) < banded.cost_ends[1]
    assert point.cost_band is None
    assert not within_limits(banded, banded.seconds * 1.001, None)
    assert not within_limits(banded, None, (banded.cost or 0) * 1.001)
    with pytest.raises(UsageError, match="--price"):
        within_limits(plans(step(4, 16, {"compute": 0.1}))[0], None, 1.0)


def test_an_algorithm_with_data_of_its_own_keeps_them() -> None:
    own = PlannedStep(4, 16, "local_sgd", 0.1, np.full(DRAWS, 0.1), {}, "measured", measured=True, samples=160000.0)
    assert plans(own)[0].seconds == pytest.approx(1000)


@pytest.mark.parametrize("count", [1, 2, 21, 256])
def test_ends_of_draws_are_the_quantiles_of_numpy_to_the_last_bit(count: int) -> None:
    generator = np.random.default_rng(count)
    for _ in range(100):
        draws = generator.lognormal(size=count) * 10.0 ** generator.uniform(-8, 8)
        assert draw_ends(draws) == tuple(map(float, np.quantile(draws, [0.05, 0.95])))
