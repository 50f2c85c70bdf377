"""What a finished ladder says: which one thing cost or brought how much, and whether the seeds allow to say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutti.compare.ladder import Ladder


@dataclass(frozen=True)
class Outcome:
    """One finished run. Accuracies are fractions.

    Attributes:
        held_out: on samples that were not trained on.
        training: over the last epoch.
        curve: (epoch, held out) after each evaluation.
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


@dataclass(frozen=True)
class Row:
    """All seeds of one rung."""

    name: str
    cause: str
    parent: str | None
    outcomes: tuple[Outcome, ...] = field(default_factory=tuple)

    @property
    def mean(self) -> float:
        """Mean held-out accuracy over the seeds."""
        return sum(outcome.held_out for outcome in self.outcomes) / len(self.outcomes)

    @property
    def spread(self) -> float:
        """Largest minus smallest held-out accuracy over the seeds; 0 for one seed, which says nothing."""
        values = [outcome.held_out for outcome in self.outcomes]
        return max(values) - min(values)

    def average(self, name: str) -> float:
        """Mean of one figure over the seeds."""
        return sum(float(getattr(outcome, name)) for outcome in self.outcomes) / len(self.outcomes)


@dataclass(frozen=True)
class Effect:
    """What one change brought over the rung that it was made to.

    Attributes:
        gain: difference of the means.
        noise: by how much seeds alone differ: the larger spread of the two rungs.
        share: of the naive rung's drop; None where there is no drop.
    """

    name: str
    cause: str
    parent: str
    gain: float
    noise: float
    share: float | None

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than what the seeds alone make."""
        return abs(self.gain) > self.noise


def effects(ladder: Ladder, rows: Mapping[str, Row]) -> list[Effect]:
    """Every rung against the one that it comes from, where both have finished runs."""
    drop = _drop(ladder, rows)
    found = []
    for rung in ladder.rungs:
        row, parent = rows.get(rung.name), rows.get(rung.parent or "")
        if row is None or parent is None:
            continue
        gain = row.mean - parent.mean
        share = gain / drop if drop is not None and rung.name != ladder.naive else None
        found.append(Effect(rung.name, rung.cause, parent.name, gain, max(row.spread, parent.spread), share))
    return found


def verdict(ladder: Ladder, rows: Mapping[str, Row], unit: str = "accuracy") -> list[str]:
    """Plain sentences: the drop, what explains it in the order of its share, what does not, the best recipe."""
    first, naive = ladder.rungs[0].name, ladder.naive
    if first not in rows or naive not in rows:
        return ["Not enough runs have finished for a verdict."]
    reference, dropped = rows[first], rows[naive]
    noise = max(reference.spread, dropped.spread)
    lost, fraction = reference.mean - dropped.mean, 0 <= reference.mean <= 1
    change = f"{number(reference.mean)} → {number(dropped.mean)}"
    said = f"'{naive}' against '{first}': held-out {unit} {change}, {difference(-lost, fraction)}"
    one = any(len(row.outcomes) < 2 for row in rows.values())
    sentences = [
        f"{said}; seeds alone differ by {difference(noise, fraction, sign=False)}."
        if not one
        else f"{said} (one seed: no error bar)."
    ]
    if lost <= noise:
        sentences.append("That is no drop beyond what the seeds alone make.")
    others = [e for e in effects(ladder, rows) if e.name != naive]
    for effect in sorted((e for e in others if e.clear), key=lambda e: -e.gain):
        share = f", {effect.share:.0%} of the drop" if effect.share is not None and lost > noise else ""
        verb = "brings" if effect.gain > 0 else "costs"
        size = difference(abs(effect.gain), fraction, sign=False)
        sentences.append(f"{_capital(effect.cause)} {verb} {size}{share} ('{effect.name}' over '{effect.parent}').")
    unclear = [e.cause for e in others if not e.clear]
    if unclear:
        sentences.append(f"No difference beyond the seeds: {', '.join(unclear)}.")
    best = max((row for row in rows.values() if row.name != first), key=lambda row: row.mean)
    held = "reaches" if best.mean >= reference.mean else "does not reach"
    sentences.append(
        f"The best recipe, '{best.name}' ({number(best.mean)}), {held} '{first}' ({number(reference.mean)})."
    )
    return sentences


def held(ladder: Ladder, rows: Mapping[str, Row]) -> bool:
    """Whether any other rung reaches the first one's held-out accuracy."""
    first = ladder.rungs[0].name
    return first in rows and any(row.mean >= rows[first].mean for row in rows.values() if row.name != first)


def as_json(ladder: Ladder, rows: Mapping[str, Row], unit: str) -> dict[str, Any]:
    """Everything, for ``compare.json``."""
    return {
        "ladder": ladder.name,
        "summary": ladder.summary,
        "metric": unit,
        "rungs": [
            {
                "name": rung.name,
                "from": rung.parent,
                "cause": rung.cause,
                "changes": dict(rung.changes),
                "runs": [_plain(outcome) for outcome in rows[rung.name].outcomes] if rung.name in rows else [],
            }
            for rung in ladder.rungs
        ],
        "effects": [
            {"rung": e.name, "from": e.parent, "gain": e.gain, "noise": e.noise, "share": e.share, "clear": e.clear}
            for e in effects(ladder, rows)
        ],
        "verdict": verdict(ladder, rows, unit),
        "held": held(ladder, rows),
    }


def _drop(ladder: Ladder, rows: Mapping[str, Row]) -> float | None:
    first, naive = rows.get(ladder.rungs[0].name), rows.get(ladder.naive)
    if first is None or naive is None or first.mean - naive.mean <= 0:
        return None
    return first.mean - naive.mean


def _plain(outcome: Outcome) -> dict[str, Any]:
    names: Sequence[str] = tuple(outcome.__dataclass_fields__)
    return {name: getattr(outcome, name) for name in names}


def number(value: float) -> str:
    """An accuracy in per cent; what is no fraction as it is.

    >>> number(0.4567), number(27.5)
    ('45.7%', '27.5000')
    """
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.4f}"


def difference(value: float, fraction: bool = True, sign: bool = True) -> str:
    """A difference of two accuracies in points of a hundred; of what is no fraction as it is.

    >>> difference(-0.123), difference(0.05, sign=False), difference(1.5, fraction=False)
    ('-12.3 points', '5.0 points', '+1.5000')
    """
    return f"{100 * value:{'+' if sign else ''}.1f} points" if fraction else f"{value:{'+' if sign else ''}.4f}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
