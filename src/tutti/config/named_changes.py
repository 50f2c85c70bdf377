"""Settings in which a resumed run may differ from its checkpoint, because the user names them. No torch."""

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
    """Settings in which a resumed run may differ from its checkpoint, from ``--change``.

    Attributes:
        names: names of these settings, such as ``lr`` and ``batch_size``.
    """

    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, given: str | Sequence[str] | None) -> NamedChanges:
        """Parse ``--change``, the settings that a resumed run may change: ``lr,batch_size``, or a sequence of names.

        Dashes become underscores; None stands for no setting. Whether the names exist is not checked here.

        Args:
            given: names joined by commas, or a sequence of names; None for no setting.

        Returns:
            A ``NamedChanges``, whose ``names`` is the frozenset of the names; empty for None.

        >>> sorted(NamedChanges.parse("lr, batch-size").names)
        ['batch_size', 'lr']
        """
        words = given.split(",") if isinstance(given, str) else list(given or ())
        return cls(frozenset(word.strip().replace("-", "_") for word in words if word.strip()))

    def check(self, options: Collection[str], where: str) -> None:
        """Raise UsageError, naming the nearest, if ``--change`` names a setting that a resume cannot change.

        Possible are ``batch_size``, ``data``, ``seed``, ``schedule``, ``clip``, ``lr_scale`` and every option of the
        optimizer.

        Args:
            options: names of the optimizer's options.
            where: the option or argument that gives the settings, which the UsageError states.
        """
        for name in sorted(self.names):
            if name not in CHANGEABLE and name not in options:
                raise UsageError(
                    f"'{name}' cannot be changed in a resume",
                    where=where,
                    remedy=did_you_mean(name, {*CHANGEABLE, *options}),
                )

    def covers(self, name: str) -> bool:
        """Return whether ``--change`` lets a resumed run have another value of a setting than its checkpoint has.

        Args:
            name: the setting, such as ``batch_size`` or an option of the optimizer. ``initial_lr``, which schedulers
                derive from the learning rate, may change with ``lr``.
        """
        return name in self.names or (name == "initial_lr" and "lr" in self.names)


@dataclass(frozen=True)
class SettingDifference:
    """One setting in which a run differs from the checkpoint that it resumes.

    Attributes:
        name: name of the setting, as in ``--change``.
        saved: value of the setting in the checkpoint.
        now: value of the setting in the run.
    """

    name: str
    saved: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} {self.saved}, not {self.now}"
