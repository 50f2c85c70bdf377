"""Read and write ``recipe.json``: a posterior over the data to a target, E(B) = E_min(1 + B/B_crit)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import DiskError, UsageError

RECIPE_FORMAT = 1
"""Version of the recipe file."""
_MOST_SAMPLES = 1e30
"""Beyond it a number of samples, or below its inverse, is a mistake; products of two such numbers stay finite."""


@dataclass(frozen=True)
class CriticalBatchWay:
    """The critical batch size B_crit as estimated by one way of measuring it alone.

    B_crit is the batch at which training needs twice the least data to a target.

    Attributes:
        name: ``noise`` (gradient noise), ``branches`` (trainings that continue a checkpoint at larger batches) or
            ``target`` (samples to the target at several batches).
        critical_batch: B_crit, in samples.
        low, high: ends of the 90 % band of B_crit; 0 and ∞ where the data do not bound it.
        basis: the measurements, in words.
    """

    name: str
    critical_batch: float
    low: float
    high: float
    basis: str

    def as_json(self) -> dict[str, Any]:
        """Return the critical batch size as one method of measuring estimates it, as a JSON object for ``recipe.json``.

        Returns:
            The keys ``name`` (the method: ``noise`` by gradient noise, ``branches`` by trainings that continue a
            checkpoint at larger batches, ``target`` by samples to the target), ``critical_batch`` (samples), ``band``
            (list of the low and the high end in samples; null for an unbounded high end) and ``basis`` (the
            measurements, in words).
        """
        band = [self.low, self.high if math.isfinite(self.high) else None]
        return {"name": self.name, "critical_batch": self.critical_batch, "band": band, "basis": self.basis}


@dataclass(frozen=True)
class TrainingRecipe:
    """Constants of E(B) = E_min(1 + B/B_crit), the samples that training at global batch B needs to a target.

    The law is that of McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11.

    Attributes:
        metric: name of the held-out metric of the target.
        value: value of the metric at the target.
        samples_min: E_min, samples to the target at small batches, in the median.
        critical_batch: B_crit, samples, in the median.
        draws: draws of (E_min, B_crit) from their posterior.
        basis: the measurements from which the constants were fitted, in words.
        ways: the critical batch size by each way alone that was measured.
    """

    metric: str
    value: float
    samples_min: float
    critical_batch: float
    draws: tuple[tuple[float, float], ...]
    basis: str
    ways: tuple[CriticalBatchWay, ...] = ()

    def samples_at(self, batch: float) -> float:
        """Return the median number of samples that training needs to the target at a batch size, E_min(1 + B/B_crit).

        Args:
            batch: B, samples of a global batch.

        >>> TrainingRecipe("loss", 1.0, 64000.0, 64.0, ((64000.0, 64.0),), "T14").samples_at(256)
        320000.0
        """
        return self.samples_min * (1 + batch / self.critical_batch)


def recipe_text(recipe: TrainingRecipe) -> str:
    """Return the text of ``recipe.json``: how many samples training needs to a target metric, at any global batch B.

    The samples are E(B) = E_min(1 + B/B_crit). The JSON object has the keys ``format`` (1), ``target`` (``metric`` and
    ``value``), ``samples_min`` (E_min) and ``critical_batch`` (B_crit), both in samples, ``draws`` (a list of pairs
    [E_min, B_crit], drawn from their posterior), ``basis`` (their measurements, in words) and ``ways`` (a list
    of objects: B_crit as estimated by each method of measuring it alone, such as gradient noise).

    Args:
        recipe: the target and the constants.
    """
    value = {
        "format": RECIPE_FORMAT,
        "target": {"metric": recipe.metric, "value": recipe.value},
        "samples_min": recipe.samples_min,
        "critical_batch": recipe.critical_batch,
        "draws": [list(draw) for draw in recipe.draws],
        "basis": recipe.basis,
        "ways": [way.as_json() for way in recipe.ways],
    }
    return json.dumps(value, indent=1) + "\n"


def write_recipe(recipe: TrainingRecipe, path: Path) -> None:
    """Write to ``recipe.json`` how many samples training needs to a target metric, at any global batch B.

    The file has the JSON object of ``recipe_text``: the target, and E_min and B_crit of E(B) = E_min(1 + B/B_crit) with
    draws from their posterior.

    Args:
        recipe: the target and the constants.
        path: the file.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        path.write_text(recipe_text(recipe), encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the recipe", where=str(path), why=error.strerror) from error


def read_recipe(path: Path) -> TrainingRecipe:
    """Read the posterior of the samples that training needs to a target, E(B) = E_min(1 + B/B_crit), from a file.

    Args:
        path: the file.

    Returns:
        A ``TrainingRecipe``: ``metric`` and ``value`` of the target; ``samples_min`` (E_min) and ``critical_batch``
        (B_crit), medians in samples; ``draws``, pairs (E_min, B_crit) from their posterior; ``basis``, their
        measurements in words; and ``ways``, a tuple of ``CriticalBatchWay``, B_crit as estimated by each method of
        measuring it alone.

    Raises:
        UsageError: the file is missing, no JSON or of another format, or one of its entries is missing or invalid, such
            as a number of samples that is not finite and above 0.
    """
    remedy = "write it with tutti noise"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("cannot read the recipe", where=str(path), why=error.strerror, remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("the recipe is not JSON", where=str(path), why=str(error), remedy=remedy) from error
    if not isinstance(stored, dict) or stored.get("format") != RECIPE_FORMAT:
        found = stored.get("format") if isinstance(stored, dict) else None
        raise UsageError(f"the recipe has format {found}, and not {RECIPE_FORMAT}", where=str(path), remedy=remedy)
    try:
        target = stored["target"]
        if not isinstance(target, dict):
            raise ValueError('target is not {"metric": …, "value": …}')
        return TrainingRecipe(
            metric=str(target["metric"]),
            value=_finite_number(target["value"], "target.value"),
            samples_min=_positive(stored["samples_min"], "samples_min"),
            critical_batch=_positive(stored["critical_batch"], "critical_batch"),
            draws=_draws(stored["draws"]),
            basis=str(stored["basis"]),
            ways=tuple(_way(each) for each in stored.get("ways", ())),
        )
    except KeyError as error:
        raise UsageError(f"the recipe has no {error}", where=str(path), remedy=remedy) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError("the recipe is invalid", where=str(path), why=str(error), remedy=remedy) from error


def _draws(stored: Any) -> tuple[tuple[float, float], ...]:
    if not isinstance(stored, list) or not all(isinstance(draw, list) and len(draw) == 2 for draw in stored):
        raise ValueError("draws is no list of pairs [E_min, B_crit]")
    return tuple((_positive(least, "draws"), _positive(batch, "draws")) for least, batch in stored)


def _way(stored: Any) -> CriticalBatchWay:
    low, high = stored["band"]
    return CriticalBatchWay(
        name=str(stored["name"]),
        critical_batch=_positive(stored["critical_batch"], "critical_batch of a way"),
        low=_finite_number(low, "band of a way"),
        high=math.inf if high is None else _positive(high, "band of a way"),
        basis=str(stored["basis"]),
    )


def _finite_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {json.dumps(value)}, and no number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{name} is {value}")
    return number


def _positive(value: Any, name: str) -> float:
    number = _finite_number(value, name)
    if number <= 0:
        raise ValueError(f"{name} is {value}, and not above 0")
    if not 1 / _MOST_SAMPLES < number < _MOST_SAMPLES:
        raise ValueError(f"{name} is {value}, and no number of samples")
    return number
