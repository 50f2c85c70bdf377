"""Default timeouts, and limits on time without progress, after which the watchdog ends a rank. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tutti.errors import UsageError

TIMEOUT = 300.0
"""Seconds that ranks wait for each other, and for a batch of a loader process."""
ELASTIC_TIMEOUT = 20.0
"""``TIMEOUT`` of an elastic job: a rank that dies while the others connect costs this time."""
START, SAVE = 1800.0, 1800.0
"""Seconds without progress at the start and in a save, see ``WatchdogLimits``."""


def check_timeout(seconds: float, option: str) -> float:
    """Return the timeout of collectives, in seconds; raise UsageError unless it is finite and above 0.

    Args:
        seconds: seconds that ranks wait for each other.
        option: name of the option or variable, which the error states.
    """
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option} is {seconds:g}", remedy="give seconds, a number above 0")
    return seconds


def read_timeout(environ: Mapping[str, str]) -> float:
    """Return the timeout of collectives in seconds: ``TUTTI_TIMEOUT``, or 300 without the variable.

    Args:
        environ: environment variables, such as ``os.environ``.

    Raises:
        UsageError: the variable is not a finite number above 0.
    """
    text = environ.get("TUTTI_TIMEOUT", f"{TIMEOUT:g}")
    try:
        return check_timeout(float(text), "TUTTI_TIMEOUT")
    except ValueError:
        raise UsageError(f"TUTTI_TIMEOUT is '{text}'", remedy="give seconds, a number above 0") from None


@dataclass(frozen=True)
class WatchdogLimits:
    """Seconds without progress after which a rank counts as stuck, and the watchdog ends it; 0: never.

    Attributes:
        start: until the first step is done, in one batch of an evaluation, and at the end of the run.
        step: in one step's own work, without waiting for other ranks; None: the collectives' timeout.
        save: while a checkpoint or a record is written.

    Raises:
        UsageError: a limit is neither 0 nor a finite number of at least 1.
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
        """Make the watchdog's limits from given values, with defaults in place of None.

        A limit is the time in seconds that a rank may spend in one phase of the run without progress, before the
        watchdog ends the rank; 0 stands for no limit.

        Args:
            start: limit before the first step is done, in one batch of an evaluation, and at the end of the run; None:
                1800.
            step: limit in one step's own work, in which the wait for other ranks does not count; None: the timeout of
                the collectives.
            save: limit while a checkpoint or a record is written; None: 1800.

        Returns:
            A ``WatchdogLimits`` with ``start``, ``step`` and ``save`` in seconds; ``step`` stays None where it is not
            given.

        Raises:
            UsageError: a limit is neither 0 nor a finite number of at least 1.
        """
        return cls(START if start is None else start, step, SAVE if save is None else save)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> WatchdogLimits:
        """Parse the watchdog's limits in ``TUTTI_START_TIMEOUT``, ``TUTTI_STEP_TIMEOUT`` and ``TUTTI_SAVE_TIMEOUT``.

        Each is the seconds without progress after which a rank is ended, or 0 for no limit.

        Args:
            environ: environment variables. Without its variable ``start`` or ``save`` is 1800 s, and ``step`` None,
                which stands for the timeout of the collectives.

        Returns:
            A ``WatchdogLimits`` with ``start``, ``step`` and ``save`` in seconds.

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
        """Whether all limits on time without progress are off, so that a rank needs no watchdog."""
        return self.start == self.step == self.save == 0
