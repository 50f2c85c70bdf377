"""Which checkpoint is the best: a held-out value, and whether less of it or more is better. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tutti.errors import UsageError, did_you_mean
from tutti.state.manifest import Manifest

RAW = "raw_"
"""Before the name of a held-out value: of the weights in training, where the others are of their average."""

_LESS = {"loss", "error", "perplexity", "bits_per_byte", "mae", "mse", "rmse", "cross_entropy", "nll"}
_MORE = {"accuracy", "top1", "top5", "auc", "f1", "precision", "recall", "dice", "iou", "bleu", "r2", "psnr", "ssim"}


@dataclass(frozen=True)
class Best:
    """What ``--keep-best`` names.

    Attributes:
        metric: a value of the evaluation: ``loss``, or a metric of the loss function's.
        more: whether a higher value is better.
    """

    metric: str
    more: bool

    @classmethod
    def parse(cls, text: str, option: str = "--keep-best") -> Best:
        """Read ``NAME``, ``NAME:min`` or ``NAME:max``.

        >>> Best.parse("accuracy"), Best.parse("distance:min")
        (Best(metric='accuracy', more=True), Best(metric='distance', more=False))

        Raises UsageError where a name alone does not tell whether less or more is better.
        """
        name, colon, direction = text.strip().partition(":")
        if not name or (colon and direction not in ("min", "max")):
            raise UsageError(f"cannot read '{text}'", where=option, remedy="write NAME, NAME:min or NAME:max")
        known = name.removeprefix(RAW)
        if not colon and known not in _LESS | _MORE:
            raise UsageError(
                f"nobody knows whether a lower or a higher '{name}' is better",
                where=option,
                remedy=f"write {name}:min or {name}:max",
            )
        return cls(name, direction == "max" if colon else known in _MORE)

    def check(self, values: Mapping[str, float]) -> None:
        """Raise UsageError where the evaluation does not have this value."""
        if self.metric not in values:
            raise UsageError(
                f"the evaluation has no '{self.metric}' to keep the best by",
                where="--keep-best",
                remedy=did_you_mean(self.metric, values),
            )

    def score(self, manifest: Manifest) -> float | None:
        """The higher the better; None for a checkpoint that was not evaluated at its very step."""
        values = manifest.facts.get("eval")
        value = values.get(self.metric) if isinstance(values, dict) else None
        if not isinstance(value, int | float):
            return None
        return value if self.more else -value
