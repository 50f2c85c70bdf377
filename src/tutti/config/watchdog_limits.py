"""Limits on time without progress, after which the watchdog ends a rank. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.errors import UsageError

START, SAVE = 1800.0, 1800.0


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds without progress after which a rank counts as stuck; 0: never.

    Attributes:
        start: until the first step is done, in one block of an evaluation, and at the end.
        step: in one step's own work, without waiting; None: the collectives' timeout.
        save: while a checkpoint or a record is written.
    """

    start: float = START
    step: float | None = None
    save: float = SAVE

    def __post_init__(self) -> None:
        for name in ("start", "step", "save"):
            value = getattr(self, name)
            if value is not None and value != 0 and not 1 <= value < math.inf:
                raise UsageError(f"--{name}-timeout is {value:g}", remedy="give seconds, at least 1, or 0 for no limit")

    @classmethod
    def make(cls, start: float | None, step: float | None, save: float | None) -> WatchdogLimits:
        """Make the limits on time without progress, with the default for each argument that is None.

        Args:
            start: seconds until the first step is done, in one batch of an evaluation, and at the end; 0 for no limit.
            step: seconds in one step's own work, without waiting; 0 for no limit.
            save: seconds while a checkpoint or a record is written; 0 for no limit.

        Raises:
            UsageError: a limit is neither 0 nor a finite number of at least 1.
        """
        return cls(START if start is None else start, step, SAVE if save is None else save)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WatchdogLimits:
        """Parse ``TUTTI_START_TIMEOUT``, ``TUTTI_STEP_TIMEOUT`` and ``TUTTI_SAVE_TIMEOUT``: seconds, or 0 for no limit.

        Args:
            environ: environment variables; a missing one gives the default.

        Raises:
            UsageError: a value is no number, or is neither 0 nor finite and at least 1.
        """
        found = {}
        for name in ("start", "step", "save"):
            text = environ.get(variable := f"TUTTI_{name.upper()}_TIMEOUT")
            try:
                found[name] = None if text is None else float(text)
            except ValueError:
                raise UsageError(f"{variable} is '{text}'", remedy="give seconds, or 0 for no limit") from None
        return cls.make(**found)

    @property
    def never(self) -> bool:
        """Whether all limits are off, so that no watchdog is needed."""
        return self.start == self.step == self.save == 0
