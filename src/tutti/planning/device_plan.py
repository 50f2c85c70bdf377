"""Choose devices, batch and strategy for a target: time and cost of each, the knee, and why each alternative lost.

Pure functions of steps, measured or predicted, and of the data that a batch needs to the target,
E(B) = E_min(1 + B/B_crit) (McCandlish et al. 2018, arXiv 1812.06162). Uncertain quantities are arrays of ``DRAWS``
draws; draws of the same place belong together, so that the difference of two plans keeps what they share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from tutti.config.strategy_choice import StrategyChoice, parse_strategy
from tutti.errors import UsageError, counted
from tutti.planning.conformal_band import Residuals, band_factor, band_unit, distance_class
from tutti.planning.law_fit import fit_target
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.other_time import OtherTime
from tutti.planning.planned_run import mesh_extents
from tutti.planning.recipe import TrainingRecipe
from tutti.planning.scaling_laws import Array

WORTH = 1.5
"""A doubling of the devices is worth it if the time falls by this factor."""
DATA_BASIS = "data to the target at smaller batches"
"""Basis of the back-test's cells for data to a target."""
_EVEN = 0.01
"""Two plans whose times differ by less than this are the same, whatever their draws say."""


@dataclass(frozen=True)
class MeasuredTarget:
    """Number of training samples until a target metric was reached, measured by runs at one global batch size.

    Attributes:
        batch: samples in a global batch.
        samples: training samples until a run reached the target, of several runs their median or geometric mean.
        runs: number of runs; 0 where the user states the samples.
        spread: standard deviation of the natural logarithm of ``samples``: the target was reached somewhere between two
            evaluations (``interval_spread``).
    """

    batch: int
    samples: float
    runs: int
    spread: float = 0.0


@dataclass(frozen=True, eq=False)
class DataDemand:
    """Number of samples that training to a target metric needs at one batch size.

    Attributes:
        samples: number of samples, in the median.
        draws: (256,) Monte Carlo draws of this number.
        band: low and high end of its 90 % band, in samples; None for a measured number, and where such predictions were
            not tested.
        text: source of the number and of its band, or the reason why there is no band, in words.
    """

    samples: float
    draws: Array
    band: tuple[float, float] | None
    text: str


class TargetData:
    """Predicts the number of training samples to a target metric at any batch size.

    At a batch size at which runs have reached the target, the number is the measured one; elsewhere it is that of the
    law E(B) = E_min(1 + B/B_crit).

    Args:
        measured: measured samples to the target, one entry for each batch size.
        recipe: a posterior over E_min and B_crit, from ``tutti noise``, which replaces the fit of the law to
            ``measured``; None fits the law.
        residuals: scores of checked predictions from which bands are derived (``shipped_residuals``).
        task: name of the task, for the command in messages.

    Attributes:
        measured: ``measured`` by batch size, in rising order.
        spread: standard deviation of the natural logarithm of the samples to the target between runs, by the fitted
            law; 0 where no law was fitted.

    Raises:
        UsageError: neither a measured batch nor a recipe is known.
    """

    def __init__(
        self, measured: Sequence[MeasuredTarget], recipe: TrainingRecipe | None, residuals: Residuals, task: str
    ) -> None:
        if not measured and recipe is None:
            raise UsageError("nothing says how many samples the target needs", remedy="give --runs or --recipe")
        self.measured = {each.batch: each for each in sorted(measured, key=lambda each: each.batch)}
        self.other = OtherTime()
        self._recipe, self._residuals, self._task = recipe, residuals, task
        generator = np.random.default_rng(0)
        self._normal = generator.standard_normal(DRAWS)
        self.spread = 0.0
        self._least = self._critical = np.zeros(0)
        if recipe is not None:
            pairs = np.resize(np.array(recipe.draws or [(recipe.samples_min, recipe.critical_batch)]), (DRAWS, 2))
            self._least, self._critical = pairs[:, 0], pairs[:, 1]
        elif len(self.measured) > 1:
            batches = np.array([float(batch) for batch in self.measured])
            data = np.array([each.samples for each in self.measured.values()])
            runs = np.array([float(each.runs) for each in self.measured.values()])
            spreads = np.array([each.spread for each in self.measured.values()])
            self._posterior = fit_target(batches, data, runs, spreads)
            chosen = generator.choice(len(self._posterior.weights), size=DRAWS, p=self._posterior.weights)
            self._least = np.exp(self._posterior.log_least[chosen])
            self._critical = np.exp(self._posterior.log_critical[chosen])
            self.spread = self._posterior.seed
        self._known: dict[int, DataDemand] = {}

    def with_other(self, other: OtherTime) -> TargetData:
        """Return a copy of this object with a predictor of seconds besides training: start, evaluations and saves.

        ``device_plans`` adds these seconds to the training time of each plan.

        Args:
            other: the predictor, from runs that were measured.
        """
        made = copy.copy(self)
        made.other = other
        return made

    @property
    def critical_batch(self) -> tuple[float, float, float] | None:
        """Critical batch size B_crit: the global batch at which training to the target needs twice the least data.

        A tuple of three floats in samples: the median, the 5 % quantile and the 95 % quantile over Monte Carlo draws of
        the law E(B) = E_min(1 + B/B_crit) of the samples to the target. None where one batch alone was measured and
        ``tutti plan`` was given no ``--recipe`` (a file of ``tutti noise`` with draws of E_min and B_crit), because
        B_crit cannot be estimated from one batch.
        """
        if not len(self._critical):
            return None
        low, middle, high = np.quantile(self._critical, [0.05, 0.5, 0.95])
        return float(middle), float(low), float(high)

    @property
    def law_draws(self) -> list[tuple[float, float]]:
        """Monte Carlo draws of the law E(B) = E_min(1 + B/B_crit): pairs (E_min, B_crit), both in samples.

        Empty where one batch alone was measured and no recipe was given.
        """
        return list(zip(self._least.tolist(), self._critical.tolist(), strict=True))

    def at(self, batch: int) -> DataDemand:
        """Return how many samples training needs to reach the target metric, at a global batch size.

        Measured where runs have reached the target at this batch; otherwise from the recipe or the fitted law E(B) =
        E_min(1 + B/B_crit).

        Args:
            batch: samples in a global batch.

        Returns:
            A ``DataDemand``: ``samples``, the number of samples to the target (median); ``draws``, an array of shape
            (256,) with Monte Carlo draws of this number; ``band``, low and high end of its 90 % band (None where
            unknown); and ``text``, its source in words. Calls for the same batch return one object.

        Raises:
            UsageError: no run has reached the target at this batch, and only one other batch was measured, from which
                no law can be fitted.
        """
        if batch not in self._known:
            self._known[batch] = self._demand(batch)
        return self._known[batch]

    def _demand(self, batch: int) -> DataDemand:
        known = self.measured.get(batch)
        if known is not None and not known.runs:
            ends = (known.samples, known.samples)
            return DataDemand(known.samples, np.full(DRAWS, known.samples), ends, "as stated: the length of training")
        if known is not None:
            spread = math.hypot(self.spread / math.sqrt(known.runs), known.spread)
            draws = known.samples * np.exp(spread * self._normal)
            runs = counted(known.runs, "run")
            return DataDemand(known.samples, draws, None, f"measured in {runs}; no band: runs of other seeds differ")
        if not len(self._least):
            raise UsageError(
                f"the data to the target at a batch of {batch} are unknown",
                why="one measured batch cannot give the two constants of E(B) = E_min(1 + B/B_crit)",
                remedy=f"train to the target with a second batch (tutti train {self._task} --batch-size B --until …), "
                "or give --recipe, or plan for the measured batch alone with --batch-size",
            )
        draws = self._least * (1 + batch / self._critical) * np.exp(self.spread * self._normal)
        if self._recipe is not None:
            samples = self._recipe.samples_at(batch)
            return DataDemand(samples, draws, None, f"of the recipe ({self._recipe.basis}); no band: never checked")
        samples, sigma = self._posterior.predict(float(batch))
        far = batch / max(self.measured)
        basis = f"of E(B) through {len(self.measured)} measured batches"
        if far < 2:
            return DataDemand(
                samples, draws, None, f"{basis}; no band: the back-test asks for twice the batch and more"
            )
        # As in the back-test, whose two near distances are one cell.
        cell = f"{DATA_BASIS}, {distance_class(max(far, 4.0))}"
        factor = band_factor(self._residuals, cell, "")
        if factor is None:
            return DataDemand(samples, draws, None, f"{basis}; no band: nothing so far ({far:.3g} ×) was checked")
        wide = math.exp(factor * band_unit(sigma))
        text = f"{basis}; band: 90 % of checked predictions like this were within it ({cell})"
        return DataDemand(samples, draws, (samples / wide, samples * wide), text)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A choice of devices, batch and strategy, with the measured or predicted seconds of its training step.

    Attributes:
        devices, batch, strategy: the choice; ``batch`` in samples, ``strategy`` as text of ``--strategy``.
        options: further options of ``tutti train`` that belong to the choice, as pairs of name and value.
        seconds: median seconds of the step.
        draws: (256,) Monte Carlo draws of the seconds; empty, with 0 ``seconds``, before the step is predicted.
        terms: the step's seconds by cause (compute, communication, bubble, idling); empty for a measured step.
        basis: source of the seconds, in words.
        measured: whether the seconds were measured; otherwise they are predicted.
        samples: training samples to the target, measured with this very strategy; None where they depend on the batch
            alone, as for any synchronous strategy.
        least: whether ``seconds``, ``draws`` and ``terms`` are only a lower bound: even with the bound another plan is
            faster, so that the step was not simulated.
        band: low and high end of the 90 % band of predicted ``seconds``; None for a measured step, and where
            predictions like this were not checked.
        memory: predicted bytes on the fullest device by kind, with ``total``; None where not predicted.
    """

    devices: int
    batch: int
    strategy: str
    seconds: float
    draws: Array
    terms: Mapping[str, float]
    basis: str
    measured: bool = False
    options: tuple[tuple[str, object], ...] = ()
    samples: float | None = None
    least: bool = False
    band: tuple[float, float] | None = None
    memory: Mapping[str, float] | None = None

    @cached_property
    def choice(self) -> StrategyChoice:
        """Parallel strategy of the planned training step, with its options, parsed from the text ``strategy``.

        A ``StrategyChoice``: ``name`` of the strategy, ``layout`` and ``sync`` (options of the model layout and of
        gradient synchronisation), and the method ``shape(devices)``, ranks by axis of the device mesh. The property
        raises UsageError for an unknown strategy or option.
        """
        return parse_strategy(self.strategy)

    @property
    def family(self) -> str:
        """Name of the step's parallel strategy, without its options and never an alias.

        >>> PlannedStep(2, 64, "pp:stages=2", 0.1, np.ones(1), {}, "").family
        'pipeline'
        """
        return self.choice.name

    @property
    def label(self) -> str:
        """Text of the step's strategy followed by further options as ``name=value``, for tables.

        >>> PlannedStep(2, 64, "mirrored", 0.1, np.ones(1), {}, "", options=(("micro_batch", 8),)).label
        'mirrored micro_batch=8'
        """
        return " ".join([self.strategy, *(f"{name}={value}" for name, value in self.options)])


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """One choice of devices, batch and strategy, with its training time to the target.

    Attributes:
        step: the choice and the time of its training step.
        data: training samples to the target at the choice's batch size.
        steps: whole number of training steps to the target.
        seconds: time to the target: training, and start, evaluations and saves as far as they are known (``other``).
        draws: (256,) Monte Carlo draws of the seconds.
        band: low and high end of a 90 % band of the seconds; None where ``data``, or a predicted step, has no band.
        cost: devices · hours · price of a device for an hour, in the price's currency; None without a price.
        other: seconds besides training by cause: ``start``, ``evaluation`` and ``save``; empty where none is known.
    """

    step: PlannedStep
    data: DataDemand
    steps: int
    seconds: float
    draws: Array
    band: tuple[float, float] | None
    cost: float | None
    other: Mapping[str, float] = field(default_factory=dict)

    @property
    def training_seconds(self) -> float:
        """Seconds of the plan's training steps to the target, without start, evaluations, saves and failures."""
        return self.seconds - sum(self.other.values())

    @property
    def devices(self) -> int:
        """Number of devices on which this plan, a choice of devices, batch size and strategy, trains to the target."""
        return self.step.devices

    @property
    def band_text(self) -> str:
        """Source of the 90 % band of the plan's training time in words, or the reason why the plan has no band.

        A plan is a choice of devices, batch size and strategy. Its training time has a band only if the samples to the
        target have one, and if its step time was measured or has a band too. Both need tested predictions of the same
        kind.
        """
        if self.data.band == (self.data.samples, self.data.samples):
            if self.band is None and self.step.measured:
                return "no band: the step was measured, and the samples are stated"
            if self.band is None:
                return "no band: predicted steps like this were not checked"
            return "90 % band of the step; the samples are stated"
        if self.band is not None and self.step.measured:
            return "90 % band of the data to the target; the step was measured"
        if self.band is not None:
            return "90 % bands of the data to the target and of the step, their errors taken as independent"
        if self.data.band is not None:
            return "no band: only the data have one, and predicted steps like this were not checked"
        return "no band: times to a target like this were not checked"

    @property
    def cost_band(self) -> tuple[float, float] | None:
        """Low and high end of a 90 % band of the plan's cost of training to the target, in the currency of the price.

        A plan is a choice of devices, batch size and strategy; the price is for one device and hour. The band is that
        of the training time in hours × the number of devices × the price. None without a price, or where the training
        time has no band.
        """
        if self.cost is None or self.band is None:
            return None
        low, high = (self.cost * end / self.seconds for end in self.band)
        return low, high

    @property
    def cost_ends(self) -> tuple[float, float] | None:
        """5 % and 95 % quantile of the plan's cost of training over Monte Carlo draws, in the currency of the price.

        A plan is a choice of devices, batch size and strategy; the price is for one device and hour. The draws are of
        the training time to the target. None without a price.
        """
        if self.cost is None:
            return None
        low, high = (self.cost * end / self.seconds for end in draw_ends(self.draws))
        return low, high

    def slow_end(self) -> float:
        """Return the seconds of training to compare with a deadline: the high end of the plan's 90 % band.

        The seconds are those of training to the target. A plan is a choice of devices, batch size and strategy. For a
        plan without a band, return its predicted seconds.
        """
        return self.seconds if self.band is None else self.band[1]

    def high_cost(self) -> float | None:
        """Return the plan's cost of training to the target at the high end of its 90 % band of seconds.

        The cost is in the currency of the price of a device for an hour. Without a band, return the cost of the
        predicted seconds. None where no price was given.
        """
        return None if self.cost is None else self.cost * self.slow_end() / self.seconds


def draw_ends(draws: Array) -> tuple[float, float]:
    """Return the 5 % and the 95 % quantile of Monte Carlo draws, in this order, as ``numpy.quantile`` does.

    Takes an eighth of the time of ``numpy.quantile``.

    Args:
        draws: (n,) random draws of a quantity, n at least 1; the quantiles are in the unit of this quantity.

    >>> draw_ends(np.arange(21.0))
    (1.0, 19.0)
    """
    ordered = np.sort(draws)
    return _quantile(ordered, 0.05), _quantile(ordered, 0.95)


def _quantile(ordered: Array, share: float) -> float:
    """Return a quantile of sorted numbers by linear interpolation, rounded as ``numpy.quantile`` rounds it."""
    place = share * (len(ordered) - 1)
    first = int(place)
    low, high = float(ordered[first]), float(ordered[min(first + 1, len(ordered) - 1)])
    part = place - first
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)


def device_plans(steps: Sequence[PlannedStep], data: TargetData, price: float | None) -> list[DevicePlan]:
    """Compute for each choice of devices, batch and strategy the steps, seconds and cost of training to a target.

    Args:
        steps: measured or predicted training steps, each with devices, batch and strategy.
        data: number of training samples to the target at any batch size.
        price: price of one device for an hour, in any currency; None for no costs.

    Returns:
        A plan for every step, sorted by number of devices and then by seconds of training. A plan has the number of
        steps to the target (``steps``), the ``seconds`` to it (median), Monte Carlo ``draws`` of these seconds, an
        array of shape (256,), their 90 % ``band`` (None where unknown), and the ``cost`` (None without a price). The
        seconds include start, evaluations and saves, as far as ``data`` predicts them (``TargetData.with_other``).

    Raises:
        UsageError: the data to the target at a step's batch are unknown.
    """
    plans = []
    for step in steps:
        if step.samples is None:
            demand = data.at(step.batch)
        else:
            text = "measured with this algorithm; no band: runs of other seeds differ"
            demand = DataDemand(step.samples, np.full(DRAWS, step.samples), None, text)
        number = math.ceil(demand.samples / step.batch)
        other = _other_seconds(step, data, demand.samples)
        besides, training = sum(other.values()), number * step.seconds
        seconds = training + besides
        draws = demand.draws / step.batch * step.draws + besides
        band = None
        stated = demand.band == (demand.samples, demand.samples)
        # A measured step of stated samples has the error of its measurement alone, which the draws show.
        if demand.band is not None and (step.band is not None or (step.measured and not stated)):
            known = step.seconds if step.band is None else step.band[1]
            wide = math.exp(math.hypot(math.log(demand.band[1] / demand.samples), math.log(known / step.seconds)))
            band = (training / wide + besides, training * wide + besides)
        cost = None if price is None else price * step.devices * seconds / 3600
        plans.append(DevicePlan(step, demand, number, seconds, draws, band, cost, other))
    return sorted(plans, key=lambda plan: (plan.devices, plan.seconds))


def _other_seconds(step: PlannedStep, data: TargetData, samples: float) -> dict[str, float]:
    """Return the seconds of start, evaluations and saves until the target; empty where none was measured."""
    if not data.other.measured:
        return {}
    mesh = mesh_extents(step.strategy, step.devices)
    return data.other.seconds(step.devices, mesh["replica"] * mesh["shard"], step.batch, samples)


def best_by_devices(plans: Sequence[DevicePlan]) -> list[DevicePlan]:
    """Return the plan with the shortest training time for each number of devices.

    Args:
        plans: plans of training to one target, each with devices, batch, strategy and seconds, in any order.

    Returns:
        One of ``plans`` for each number of devices that occurs, sorted by number of devices; of equally fast plans the
        first.
    """
    best: dict[int, DevicePlan] = {}
    for plan in plans:
        if plan.devices not in best or plan.seconds < best[plan.devices].seconds:
            best[plan.devices] = plan
    return [best[devices] for devices in sorted(best)]


def find_knee(best: Sequence[DevicePlan]) -> DevicePlan | None:
    """Return the plan with the most devices at which a doubling of the devices made training at least 1.5 × as fast.

    A plan is a choice of devices, batch size and strategy, with its training time. An entry of N devices counts if it
    trains faster than the fastest entry with fewer devices by at least the factor 1.5 (``WORTH``) to the power of
    log₂(N/N′), where N′ is the number of devices of the entry before it.

    Args:
        best: the fastest plan for each number of devices, sorted by number of devices.

    Returns:
        The entry with the most devices that counts, even if an earlier entry does not; the first entry if none counts.
        None for fewer than two entries.
    """
    if len(best) < 2:
        return None
    found, fastest = best[0], best[0].seconds
    for before, after in pairwise(best):
        if fastest / after.seconds >= WORTH ** math.log2(after.devices / before.devices):
            found = after
        fastest = min(fastest, after.seconds)
    return found


def last_gain(best: Sequence[DevicePlan], place: int) -> float | None:
    """Return the speedup of a plan over the fastest plan on fewer devices; None for the first plan.

    The speedup is the training time of the fastest plan on fewer devices divided by the time of this plan: below 1 if
    this plan is slower.

    Args:
        best: the fastest plan for each number of devices, sorted by number of devices.
        place: index of the plan in ``best``.
    """
    return None if place == 0 else min(plan.seconds for plan in best[:place]) / best[place].seconds


def within_limits(plan: DevicePlan, deadline: float | None, budget: float | None) -> bool:
    """Return whether a plan meets a deadline and a budget even at the slow end of its predicted training time.

    The slow end is the high end of the plan's 90 % band of seconds, and the budget is compared with the cost of these
    seconds. A plan without a band is judged by its predicted time. Equality meets a limit.

    Args:
        plan: the plan.
        deadline: seconds of training; None for none.
        budget: largest cost, in the currency of the plan's price of a device for an hour; None for none.

    Raises:
        UsageError: a budget is given, and the plan has no price; not raised for a plan that misses the deadline.
    """
    if deadline is not None and plan.slow_end() > deadline:
        return False
    if budget is None:
        return True
    cost = plan.high_cost()
    if cost is None:
        raise UsageError("--budget needs a price", remedy="give --price, of one device for an hour")
    return cost <= budget


def cheapest_plan(plans: Sequence[DevicePlan]) -> DevicePlan:
    """Return the plan with the fewest device-seconds (number of devices · seconds of training to the target).

    Args:
        plans: plans of training to one target; at least one.

    Returns:
        One of ``plans``; of several with equally many device-seconds the one with the shortest training.
    """
    return min(plans, key=lambda plan: (plan.devices * plan.seconds, plan.seconds))


@dataclass(frozen=True)
class LostReason:
    """Cause of a plan's longer training time, compared with a faster plan, the winner.

    Attributes:
        gap: seconds of the plan minus seconds of the winner; may be negative for a tie.
        term: cause that closes most of the gap if its seconds are replaced by the winner's, such as ``communication``;
            empty for a tie.
        closes: seconds of the gap that this replacement closes.
        text: the reason in words.
    """

    gap: float
    term: str
    closes: float
    text: str

    @property
    def tie(self) -> bool:
        """Whether the training times of the two compared plans are too close to call one faster.

        A plan is a choice of devices, batch size and strategy. True if the loser takes at most 1 % longer than the
        winner, or if the loser is as fast in at least 5 % of the paired Monte Carlo draws; False for a loser whose
        seconds are only a lower bound. Then ``term`` is empty and ``closes`` is 0.
        """
        return not self.term


def may_tie(loser: DevicePlan, winner: DevicePlan) -> bool:
    """Return whether the training times of two plans are too close to call one faster.

    A plan is a choice of devices, batch size and strategy, with its training time to a target. True if ``loser`` takes
    at most 1 % longer than ``winner``, or if ``loser`` is at least as fast in at least 5 % of the paired Monte Carlo
    draws of both times.
    """
    if loser.seconds - winner.seconds <= _EVEN * winner.seconds:
        return True
    return bool(np.mean(loser.draws <= winner.draws) >= 0.05)


def lost_reason(loser: DevicePlan, winner: DevicePlan) -> LostReason:
    """Explain why ``loser`` takes longer than ``winner``: name the one cause that explains most of the gap.

    The loser's terms (samples to the target; compute, communication and so on for each sample; start, evaluations and
    saves) are replaced by the winner's, one at a time; the cause is the term that closes most of the gap. Two plans are
    a tie if they differ by at most 1 %, or if the loser is as fast in at least 5 % of the paired Monte Carlo draws. A
    loser whose step was not simulated, so that its seconds are only a lower bound (``step.least``), is never a tie.

    Args:
        loser: the plan (a choice of devices, batch size and strategy, with its training time) that takes longer.
        winner: the plan with which it is compared, for the same target.

    Returns:
        A ``LostReason``: ``gap`` in seconds; ``term``, the cause, such as ``communication`` (empty for a tie);
        ``closes``, the seconds of the gap that the cause explains (0 for a tie); and ``text``, all of it in words.
    """
    gap = loser.seconds - winner.seconds
    if may_tie(loser, winner) and not loser.step.least:
        return LostReason(gap, "", 0.0, f"the same within the draws ({gap:+,.3g} s)")
    a, b = loser.step, winner.step
    closed = {"data to the target": (loser.data.samples - winner.data.samples) / a.batch * a.seconds}
    if a.terms and b.terms:
        for name in sorted({*a.terms, *b.terms}):
            each = a.terms.get(name, 0.0) / a.batch - b.terms.get(name, 0.0) / b.batch
            closed[name] = each * loser.data.samples
    else:
        closed["time of a sample"] = (a.seconds / a.batch - b.seconds / b.batch) * loser.data.samples
    for name in {**loser.other, **winner.other}:
        closed[name] = loser.other.get(name, 0.0) - winner.other.get(name, 0.0)
    term, seconds = max(closed.items(), key=lambda item: item[1])
    why = f" ({loser.data.samples / winner.data.samples:.2f} × the winner's)" if term == "data to the target" else ""
    least = "at least " if a.least else ""
    return LostReason(gap, term, seconds, f"{least}{gap:,.3g} s longer: {seconds:,.3g} s by {term}{why}")
