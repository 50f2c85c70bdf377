"""Judge a finished ladder: the gain or loss of each change, and whether it exceeds the spread over seeds.

In every function ``rows`` are the results by rung name, of rungs with finished runs only. The scale of a rung is its
number of logical workers (fixed shares of the global batch) and its batch size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tutti.compare.ladder import Ladder, Rung
from tutti.compare.like_with_like import baselines, other_causes, recipes
from tutti.config.metric_direction import Metric
from tutti.errors import counted

ACCURACY = Metric("accuracy", higher=True)


@dataclass(frozen=True)
class RunOutcome:
    """Results of one finished run of a comparison.

    Attributes:
        seed: seed of the run.
        held_out: the compared metric on held-out samples; NaN if its last value is not finite.
        training: the metric on training samples, over the last epoch.
        updates, samples, seconds: optimizer updates, training samples and seconds of the whole run.
        samples_per_second: throughput of all devices.
        curve: (epoch, held-out value) after each evaluation.
        weights_sha256: hash of the final weights; empty if unknown.
        reached: whether the run has reached the target of ``--until``; None without one.
        steps_to_target, samples_to_target, seconds_to_target: steps, samples and seconds until the evaluation that
            reached the target; None if none did.
    """

    seed: int
    held_out: float
    training: float
    updates: int
    samples: int
    seconds: float
    samples_per_second: float
    curve: tuple[tuple[float, float], ...] = ()
    weights_sha256: str = ""
    reached: bool | None = None
    steps_to_target: int | None = None
    samples_to_target: int | None = None
    seconds_to_target: float | None = None

    @property
    def finite(self) -> bool:
        """Whether the run's held-out value is neither NaN nor infinite; a diverged run's is not."""
        return math.isfinite(self.held_out)


@dataclass(frozen=True)
class RungResult:
    """Results of one training configuration (rung) of a comparison over its seeds.

    Attributes:
        name: name of the rung.
        cause: the cause that the rung's change of options isolates, in words.
        parent: name of the rung whose configuration it changes; None for the first.
        outcomes: results of the finished runs, one for each seed.

    Raises:
        ValueError: there are no outcomes.
    """

    name: str
    cause: str
    parent: str | None
    outcomes: tuple[RunOutcome, ...]

    def __post_init__(self) -> None:
        if not self.outcomes:
            raise ValueError(f"no run of {self.name} has finished")

    @property
    def mean(self) -> float:
        """Mean over the seeds of the final held-out metric of this training configuration's finished runs.

        Not finite if the metric of one of the runs is not.
        """
        return sum(outcome.held_out for outcome in self.outcomes) / len(self.outcomes)

    @property
    def spread(self) -> float:
        """Largest minus smallest final held-out metric over the seeds of one training configuration.

        0 for one seed, which says nothing of the differences between seeds.
        """
        values = [outcome.held_out for outcome in self.outcomes]
        return max(values) - min(values)

    @property
    def finite(self) -> bool:
        """Whether the held-out metric is finite at the end of the configuration's run with every seed.

        A configuration for which this is False is named in the verdict, and not compared.
        """
        return all(outcome.finite for outcome in self.outcomes)

    def average(self, name: str) -> float:
        """Return the mean over a configuration's seeds of one result of its runs.

        Args:
            name: a field of ``RunOutcome`` that holds a number, such as ``updates`` or ``seconds``.
        """
        return sum(float(getattr(outcome, name)) for outcome in self.outcomes) / len(self.outcomes)

    @property
    def reached(self) -> int | None:
        """Number of a configuration's seeds that reached the target of ``--until``; None without a target."""
        told = [outcome.reached for outcome in self.outcomes if outcome.reached is not None]
        return sum(told) if told else None

    def to_target(self, name: str) -> float:
        """Return the median over a configuration's seeds of the steps, samples or seconds to the target of ``--until``.

        A seed whose run misses the target counts as infinite: the median is infinite if half of the seeds or more miss
        the target, or if the configuration has no target.

        Args:
            name: unit of the result: ``steps``, ``samples`` or ``seconds`` of training.
        """
        values = [getattr(outcome, f"{name}_to_target") for outcome in self.outcomes]
        return statistics.median(math.inf if value is None else float(value) for value in values)


@dataclass(frozen=True)
class Effect:
    """Effect of one change of options: a training configuration (rung) compared with its parent, which it changes.

    Attributes:
        name: name of the rung.
        cause: the cause that the change isolates, in words.
        parent: name of the parent.
        gain: difference to the parent's mean of the metric over the seeds; positive if better, negative if worse.
        noise: difference that seeds alone make: the larger spread of the two rungs.
        share: gain ÷ drop of the metric from the first to the naive rung; None without a drop, for the naive rung, and
            for rungs that are no recipes (``like_with_like.recipes``: rungs at another scale than the first).
    """

    name: str
    cause: str
    parent: str
    gain: float
    noise: float
    share: float | None

    @property
    def clear(self) -> bool:
        """Whether the change of options changes the metric by more than a change of the seed does.

        It does if the gain or loss of the mean exceeds ``noise``, the larger spread (largest minus smallest metric over
        the seeds) of the two compared configurations.
        """
        return abs(self.gain) > self.noise


def effects(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> list[Effect]:
    """Return for each rung the gain in the held-out metric, mean over the seeds, over the rung that it changes.

    A rung without a finished run, or whose parent has none, is left out.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name, of rungs with finished runs.
        metric: the metric that is compared.

    Returns:
        One ``Effect`` for each rung, in the ladder's order, with ``name``, ``cause``, ``parent``, ``gain`` (positive if
        better than the parent), ``noise`` (the larger of both rungs' ranges over seeds) and ``share``: the gain divided
        by the drop of the metric from the first to the naive rung, which loses accuracy. ``share`` is a number for
        recipes alone, and None if there is no drop. Recipes are here all rungs but the naive one at another number of
        logical workers or batch size than the first; if all rungs have one scale, all but the naive and the first.
    """
    drop = _drop(ladder, rows, metric)
    asked = {rung.name for rung in recipes(ladder)} - {ladder.naive}
    found = []
    for rung in ladder.rungs:
        row, parent = rows.get(rung.name), rows.get(rung.parent or "")
        if row is None or parent is None:
            continue
        gain = metric.gain(parent.mean, row.mean)
        share = gain / drop if drop is not None and rung.name in asked else None
        found.append(Effect(rung.name, rung.cause, parent.name, gain, max(row.spread, parent.spread), share))
    return found


def verdict(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> list[str]:
    """Return the verdict on a ladder in sentences: the drop of the metric, its causes by share, and the best recipe.

    The drop is the loss of the metric from the first rung to the naive one (``ladder.naive``). A recipe is a rung at
    another scale (logical workers, batch size) than the first, or any rung but the first if all have one scale. It is
    judged only against a baseline at the first rung's scale with otherwise equal options
    (``like_with_like.baselines``), so that a difference has one cause.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name. Rungs with a non-finite held-out value are named and not compared; rungs without a
            result are left out.
        metric: the metric that is compared.

    Returns:
        The sentences in the order of reading, one a paragraph; at least one. If the first or the naive rung has no
        result, they state only the best recipe, or that not enough runs have finished. Sentences on targets
        (``--until``) come last, as ``to_target`` returns them.
    """
    first, naive = ladder.rungs[0].name, ladder.naive
    sentences, rows = _without_numbers(ladder, rows)
    fraction = is_fraction(rows, metric)
    if first not in rows or naive not in rows:
        known = _holding(ladder, rows, metric, fraction) if first in rows else []
        none = ["Not enough runs have finished for a verdict."]
        return [*sentences, *(known or none), *to_target(ladder, rows)]
    sentences = [*sentences, *_drop_told(ladder, rows, metric, fraction)]
    lost, noise = metric.gain(rows[naive].mean, rows[first].mean), max(rows[first].spread, rows[naive].spread)
    others = [e for e in effects(ladder, rows, metric) if e.name != naive]
    for effect in sorted((e for e in others if e.clear), key=lambda e: -e.gain):
        share = f", {effect.share:.0%} of the drop" if effect.share is not None and lost > noise else ""
        verb = "brings" if effect.gain > 0 else "costs"
        size = difference(abs(effect.gain), fraction, sign=False)
        sentences.append(f"{_capital(effect.cause)} {verb} {size}{share} ('{effect.name}' over '{effect.parent}').")
    unclear = [e.cause for e in others if not e.clear]
    if unclear:
        sentences.append(f"No difference beyond the seeds: {', '.join(unclear)}.")
    return [*sentences, *_holding(ladder, rows, metric, fraction), *to_target(ladder, rows)]


def to_target(ladder: Ladder, rows: Mapping[str, RungResult]) -> list[str]:
    """Return sentences with the steps, samples and seconds after which each rung reached its target (``--until``).

    A rung is a training configuration. The numbers are medians over the seeds; each is also given as a multiple of the
    first rung's, if that has the same target.

    Args:
        ladder: the ladder, a series of rungs.
        rows: results by rung name, of rungs with finished runs.

    Returns:
        One sentence for each rung with a target and finished runs, in the ladder's order. If half of the seeds or more
        missed the target, the sentence states the number of seeds that reached it instead.
    """
    sentences = []
    first = rows.get(ladder.rungs[0].name)
    for rung in ladder.rungs:
        row = rows.get(rung.name)
        if row is None or row.reached is None:
            continue
        seeds, target = len(row.outcomes), rung.config.until
        if not math.isfinite(row.to_target("steps")):
            sentences.append(f"'{row.name}' reached {target} with {row.reached} of {counted(seeds, 'seed')}.")
            continue
        parts = []
        for name, unit, form in (("steps", "steps", ",.0f"), ("samples", "samples", ",.0f"), ("seconds", "s", ",.1f")):
            value = row.to_target(name)
            text = f"{value:{form}} {unit}"
            # The first rung may have another target in a ladder that changes it.
            alike = first is not None and first is not row and ladder.rungs[0].config.until == target
            if alike and first is not None and 0 < first.to_target(name) < math.inf:
                text += f" (× {value / first.to_target(name):.2f})"
            parts.append(text)
        sentences.append(
            f"'{row.name}' reached {target} with {row.reached} of {counted(seeds, 'seed')}, after {', '.join(parts)} "
            f"({'median' if seeds > 1 else 'one seed'})."
        )
    return sentences


def recipe_holds(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric = ACCURACY) -> bool:
    """Return whether a recipe of the ladder is at least as good as its baseline and as the first rung.

    A recipe (``like_with_like.recipes``) is a rung at another scale (logical workers, batch size) than the first; its
    baseline (``baseline``) has otherwise equal options at the first rung's scale. If all rungs have one scale, recipes
    are all rungs but the first; the first is then the baseline of those that differ from it in at most one option, and
    others have none. The means of the metric over the seeds are compared, without a tolerance and in the metric's
    direction.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name, of rungs with finished runs; rungs with a non-finite held-out value are left out.
        metric: the metric that is compared.

    Returns:
        True if at least one recipe is as good; False also if no recipe with finished runs has a baseline with finished
        runs.
    """
    _, rows = _without_numbers(ladder, rows)
    return any(_holds(ladder, rung, rows, metric) for rung in recipes(ladder))


def baseline(
    ladder: Ladder, rung: Rung, rows: Mapping[str, RungResult], metric: Metric = ACCURACY
) -> RungResult | None:
    """Return the results of the best baseline of a training configuration (rung), with which the rung is compared.

    Baselines have the first rung's number of logical workers and batch size, and but for the learning rate the rung's
    options (``like_with_like.baselines``). The best one has the best mean of the metric over the seeds.

    Args:
        ladder: the ladder, a series of rungs.
        rung: the rung to compare.
        rows: results by rung name, of rungs with finished runs.
        metric: the metric by whose mean over the seeds the best is chosen.

    Returns:
        The baseline's results: mean, spread and target over the seeds, and the results of each seed (``outcomes``).
        None if no baseline has finished runs.
    """
    found = [rows[other.name] for other in baselines(ladder, rung) if other.name in rows]
    return max(found, key=lambda row: metric.gain(0.0, row.mean), default=None)


def _holds(ladder: Ladder, rung: Rung, rows: Mapping[str, RungResult], metric: Metric) -> bool:
    row, first, reference = rows.get(rung.name), rows.get(ladder.rungs[0].name), baseline(ladder, rung, rows, metric)
    if row is None or first is None or reference is None:
        return False
    return min(metric.gain(first.mean, row.mean), metric.gain(reference.mean, row.mean)) >= 0


def _drop_told(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric, fraction: bool) -> list[str]:
    """Return sentences on the drop of the naive rung, and whether it exceeds the noise of seeds."""
    reference, dropped = rows[ladder.rungs[0].name], rows[ladder.naive]
    lost, noise = metric.gain(dropped.mean, reference.mean), max(reference.spread, dropped.spread)
    change = f"{format_metric(reference.mean, fraction)} → {format_metric(dropped.mean, fraction)}"
    moved = difference(dropped.mean - reference.mean, fraction)
    sentence = f"'{dropped.name}' against '{reference.name}': held-out {metric.name} {change}, {moved}"
    if not metric.higher:
        sentence += " (lower is better)"
    one = any(len(row.outcomes) < 2 for row in rows.values())
    bar = f"; seeds alone differ by {difference(noise, fraction, sign=False)}."
    sentences = [sentence + (" (one seed: no error bar)." if one else bar)]
    if lost <= noise:
        sentences.append("That is not a drop beyond the difference between seeds.")
    return sentences


def _holding(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric, fraction: bool) -> list[str]:
    """Return sentences on the best recipe and, if it does not hold, on every recipe that does."""
    finished = [rung for rung in recipes(ladder) if rung.name in rows]
    if not finished:
        return []
    best = max(finished, key=lambda rung: metric.gain(0.0, rows[rung.name].mean))
    sentences = [_reached(ladder, best, rows, metric, fraction)]
    if _holds(ladder, best, rows, metric):
        return sentences
    for rung in finished:
        reference = baseline(ladder, rung, rows, metric)
        if rung != best and reference is not None and _holds(ladder, rung, rows, metric):
            ours, theirs = (format_metric(row.mean, fraction) for row in (rows[rung.name], reference))
            sentences.append(f"'{rung.name}' ({ours}) reaches '{reference.name}' ({theirs}), like with like.")
    return sentences


def _reached(ladder: Ladder, rung: Rung, rows: Mapping[str, RungResult], metric: Metric, fraction: bool) -> str:
    first, row = ladder.rungs[0], rows[rung.name]

    def against(other: RungResult) -> str:
        word = "reaches" if metric.gain(other.mean, row.mean) >= 0 else "does not reach"
        return f"{word} '{other.name}' ({format_metric(other.mean, fraction)})"

    sentence = f"The best recipe, '{rung.name}' ({format_metric(row.mean, fraction)}), "
    reference = baseline(ladder, rung, rows, metric)
    if reference is not None and reference.name == first.name:
        return f"{sentence}{against(reference)}."
    causes = ", ".join(other_causes(rung.config, first.config)).replace("_", " ")
    if reference is not None:
        also = f"It {against(rows[first.name])}, from which it differs in {causes} as well."
        return f"{sentence}{against(reference)}, its like at that scale. {also}"
    side = "better than" if metric.gain(rows[first.name].mean, row.mean) >= 0 else "worse than"
    missing = baselines(ladder, rung)
    remedy = (
        f"that needs '{missing[0].name}', which has not finished"
        if missing
        else f"that needs a rung like '{rung.name}' with workers = {first.config.workers} and "
        f"batch_size = {first.config.batch_size}"
    )
    across = f"'{first.name}' ({format_metric(rows[first.name].mean, fraction)})"
    differs = f"{sentence}is {side} {across}, but differs from it in {causes} as well."
    return f"{differs} Whether it held is not known: {remedy}."


def _without_numbers(ladder: Ladder, rows: Mapping[str, RungResult]) -> tuple[list[str], dict[str, RungResult]]:
    """Return a sentence for each rung with a non-finite held-out value, and the rows of the other rungs."""
    sentences = [
        f"'{rung.name}' ended without a number in {sum(not o.finite for o in rows[rung.name].outcomes)} of "
        f"{len(rows[rung.name].outcomes)} runs, and is not compared."
        for rung in ladder.rungs
        if rung.name in rows and not rows[rung.name].finite
    ]
    return sentences, {name: row for name, row in rows.items() if row.finite}


def as_json(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric) -> dict[str, Any]:
    """Return the results of a ladder and the verdict as a dict, the content of ``compare.json``.

    Non-finite values stay floats in the dict; the file has null for them.

    Args:
        ladder: the ladder, a series of training configurations (rungs).
        rows: results by rung name, of rungs with finished runs.
        metric: the metric that is compared.

    Returns:
        ``ladder`` (its name), ``summary``, ``metric`` (its name), ``better`` (``lower`` or ``higher``); ``rungs``, each
        with ``name``, ``from`` (its parent), ``cause``, ``changes``, ``baselines`` and ``runs`` (the fields of
        ``RunOutcome``); ``effects`` (gain of each rung over its parent, without rungs with a non-finite value);
        ``verdict``, a list of sentences; and ``held``, the result of ``recipe_holds``: whether a rung at another number
        of logical workers or batch size is as good as its baseline and the first rung.
    """
    _, finite = _without_numbers(ladder, rows)
    return {
        "ladder": ladder.name,
        "summary": ladder.summary,
        "metric": metric.name,
        "better": metric.direction,
        "rungs": [
            {
                "name": rung.name,
                "from": rung.parent,
                "cause": rung.cause,
                "changes": dict(rung.changes),
                "baselines": [other.name for other in baselines(ladder, rung)],
                "runs": [asdict(outcome) for outcome in rows[rung.name].outcomes] if rung.name in rows else [],
            }
            for rung in ladder.rungs
        ],
        "effects": [
            {"rung": e.name, "from": e.parent, "gain": e.gain, "noise": e.noise, "share": e.share, "clear": e.clear}
            for e in effects(ladder, finite, metric)
        ],
        "verdict": verdict(ladder, rows, metric),
        "held": recipe_holds(ladder, rows, metric),
    }


def _drop(ladder: Ladder, rows: Mapping[str, RungResult], metric: Metric) -> float | None:
    first, naive = rows.get(ladder.rungs[0].name), rows.get(ladder.naive)
    if first is None or naive is None or metric.gain(naive.mean, first.mean) <= 0:
        return None
    return metric.gain(naive.mean, first.mean)


def is_fraction(rows: Mapping[str, RungResult], metric: Metric) -> bool:
    """Return whether a metric is shown in per cent: higher is better, and all its finite values lie between 0 and 1.

    True also for a metric of which higher is better and that has no finite value.

    Args:
        rows: results by name of the training configuration.
        metric: the metric.
    """
    return metric.higher and all(0 <= o.held_out <= 1 for row in rows.values() for o in row.outcomes if o.finite)


def format_metric(value: float, fraction: bool = True) -> str:
    """Format a value of a metric: fractions in per cent, other values with four decimals, non-finite values as a dash.

    Args:
        value: the value.
        fraction: whether the metric is shown in per cent.

    >>> format_metric(0.4567), format_metric(27.5, fraction=False), format_metric(0.4567, fraction=False)
    ('45.7%', '27.5000', '0.4567')
    """
    if not math.isfinite(value):
        return "–"
    return f"{value:.1%}" if fraction else f"{value:.4f}"


def difference(value: float, fraction: bool = True, sign: bool = True) -> str:
    """Format a difference of two values of a metric: in percentage points for fractions, else with four decimals.

    Args:
        value: the difference.
        fraction: whether the values are fractions.
        sign: whether a difference that is not negative has a plus sign.

    >>> difference(-0.123), difference(0.05, sign=False), difference(1.5, fraction=False)
    ('-12.3 points', '5.0 points', '+1.5000')
    """
    return f"{100 * value:{'+' if sign else ''}.1f} points" if fraction else f"{value:{'+' if sign else ''}.4f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
