"""What a resumed run may do otherwise than its checkpoint: settings that the user names. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tutti.errors import UsageError, did_you_mean

BETWEEN_EPOCHS = ("batch_size", "data", "seed")
"""Settings on which the order of an epoch's samples and its global batches depend."""

CHANGEABLE = (*BETWEEN_EPOCHS, "schedule", "clip", "lr_scale")
"""Settings that may be named, beside every option of the optimizer, such as ``lr``."""


@dataclass(frozen=True)
class NamedChanges:
    """Settings that may differ between a checkpoint and the run that resumes it.

    Attributes:
        names: their names, such as ``lr`` and ``batch_size``.
    """

    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, given: str | Sequence[str] | None) -> NamedChanges:
        """Parse ``lr,batch_size``, or names in a sequence; dashes become underscores.

        >>> sorted(NamedChanges.parse("lr, batch-size").names)
        ['batch_size', 'lr']
        """
        words = given.split(",") if isinstance(given, str) else list(given or ())
        return cls(frozenset(word.strip().replace("-", "_") for word in words if word.strip()))

    def check(self, options: Collection[str], where: str) -> None:
        """Raise UsageError for a name that is neither in ``CHANGEABLE`` nor an option of the optimizer.

        Args:
            options: names of the optimizer's options.
            where: the option or argument, for the error.
        """
        for name in sorted(self.names):
            if name not in CHANGEABLE and name not in options:
                raise UsageError(
                    f"'{name}' cannot be changed in a resume",
                    where=where,
                    remedy=did_you_mean(name, {*CHANGEABLE, *options}),
                )

    def covers(self, name: str) -> bool:
        """Return whether a setting may differ; ``lr`` covers ``initial_lr``, which schedulers derive from it."""
        return name in self.names or (name == "initial_lr" and "lr" in self.names)


@dataclass(frozen=True)
class SettingDifference:
    """One setting in which a run differs from its checkpoint.

    Attributes:
        name: as it is named in ``--change``.
        saved, now: its values.
    """

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.saved}, not {self.now}"
