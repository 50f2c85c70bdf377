"""Decide whether a lower or a higher value of a metric is better, in one table that every ranking reads. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tutti.errors import UsageError

Direction = Literal["lower", "higher"]

RAW = "raw_"
"""Prefix of held-out values of the trained weights in a run with ``--ema``; values without it are of the average."""

LOWER = frozenset(
    {"loss", "error", "perplexity", "mae", "mse", "rmse", "cross_entropy", "nll", "wer", "cer", "bpc"}
    | {"bits_per_byte", "bits_per_character"}
)
HIGHER = frozenset(
    {"accuracy", "top1", "top5", "auc", "auroc", "f1", "precision", "recall", "dice", "iou", "bleu", "rouge"}
    | {"r2", "psnr", "ssim"}
)

_ENDINGS = ("loss", "error", "perplexity", "mae", "mse", "rmse", "accuracy", "auc", "f1", "dice", "iou")
"""Last words of names that decide the direction: ``val_loss`` is a loss. Ambiguous words (``precision``) are absent."""

_TURNING = frozenset({"neg", "negative", "minus", "inverse", "inv", "inverted", "non", "no", "not", "one", "1", "log"})
"""Words that may invert a metric, as in scikit-learn's ``neg_mean_squared_error``: such names decide nothing."""

_WORDS: Mapping[str, bool] = {"lower": False, "min": False, "higher": True, "max": True}


@dataclass(frozen=True)
class Metric:
    """A metric that is measured on held-out data, and whether higher or lower values of it are better.

    Attributes:
        name: ``loss``, or a metric that the loss function reports.
        higher: whether a higher value is better.
    """

    name: str
    higher: bool

    @classmethod
    def parse(cls, text: str, option: str, declared: Mapping[str, Direction] | None = None) -> Metric:
        """Parse a held-out metric with its better direction: ``NAME``, ``NAME:min`` or ``NAME:max``.

        ``lower`` and ``higher`` are synonyms of ``min`` and ``max``. Without a direction in the text, ``declared``
        decides, else the metric's name: one that ends in a word such as ``loss`` or ``accuracy``
        (``higher_is_better``).

        Args:
            text: the metric, with or without its direction.
            option: name of the option, which a UsageError states.
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; None: the
                task declares nothing.

        Returns:
            A ``Metric``: ``name``, and ``higher``, whether a higher value is better.

        Raises:
            UsageError: the text is malformed, or none of text, ``declared`` and the metric's name gives a direction.

        >>> Metric.parse("accuracy", "--metric"), Metric.parse("distance:lower", "--metric")
        (Metric(name='accuracy', higher=True), Metric(name='distance', higher=False))
        >>> Metric.parse("distance", "--metric", {"distance": "lower"}).higher
        False
        """
        name, stated = split_metric(text, option)
        higher = higher_is_better(name, declared) if stated is None else stated
        if higher is None:
            raise UsageError(
                f"it is not declared whether a lower or a higher '{name}' is better",
                where=option,
                remedy=f"write {name}:min or {name}:max (:lower, :higher), or declare it in a task of your own: "
                f"Task(directions={{'{name}': 'lower'}})",
            )
        return cls(name, higher)

    @property
    def direction(self) -> Direction:
        """Better direction of this held-out metric, as text: ``higher`` or ``lower``."""
        return "higher" if self.higher else "lower"

    def gain(self, before: float, after: float) -> float:
        """Return the improvement of the metric from ``before`` to ``after``; negative if ``after`` is worse.

        Args:
            before: an earlier value of the metric.
            after: a later value.

        >>> Metric("loss", higher=False).gain(0.5, 0.3)
        0.2
        """
        return after - before if self.higher else before - after


def split_metric(text: str, option: str) -> tuple[str, bool | None]:
    """Split the text ``NAME:DIRECTION`` of a metric into the name and, if stated, its better direction.

    Args:
        text: ``NAME``, ``NAME:min`` or ``NAME:max``, or with the synonyms ``lower`` and ``higher``.
        option: name of the option, which a UsageError states.

    Returns:
        A pair: the name; and True if a higher value is better, False if a lower one is, None if the text does not say.

    Raises:
        UsageError: the text is malformed.

    >>> split_metric("distance:lower", "--metric"), split_metric("accuracy", "--metric")
    (('distance', False), ('accuracy', None))
    """
    name, colon, word = text.strip().partition(":")
    if not name or (colon and word not in _WORDS):
        raise UsageError(
            f"cannot read '{text}'",
            where=option,
            remedy="write NAME, NAME:min or NAME:max (:lower, :higher)",
        )
    return name, _WORDS[word] if colon else None


def higher_is_better(name: str, declared: Mapping[str, Direction] | None = None) -> bool | None:
    """Return whether a higher value of a metric is better; None if neither ``declared`` nor the metric's name decides.

    Args:
        name: the metric. A name that ends in a word such as ``loss`` or ``accuracy`` decides by itself, unless it also
            has a word such as ``neg``; a prefix ``raw_`` has no effect.
        declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them, which take
            precedence over the name; None: the task declares nothing.

    >>> [higher_is_better(n) for n in ("val_loss", "top1_accuracy", "neg_mean_squared_error", "distance")]
    [False, True, None, None]
    """
    known = name.removeprefix(RAW)
    for key in (name, known):
        if declared and key in declared:
            return declared[key] == "higher"
    if known not in LOWER | HIGHER:
        words = known.split("_")
        if words[-1] not in _ENDINGS or _TURNING & set(words):
            return None
        known = words[-1]
    return known in HIGHER


def check_directions(directions: Mapping[str, str]) -> None:
    """Raise UsageError if a task declares for a metric a direction other than ``lower`` or ``higher``.

    Args:
        directions: name of the metric → ``lower`` or ``higher``, its better values; the argument ``directions`` of a
            ``Task``.
    """
    for name, direction in directions.items():
        if direction not in ("lower", "higher"):
            raise UsageError(
                f"the direction of '{name}' is {direction!r}",
                where="Task(directions=…)",
                remedy="say which is better: 'lower' or 'higher'",
            )
