"""Every error that tutti raises on purpose, with the exit code that the command line returns for it.

An error says *what* happened, *where* (rank, step), *why*, and what to *do*. Exit codes are those of
``docs/architecture.md``: 0 done, 1 unexpected, 2 usage or configuration, 3 data, 4 checkpoint, 5 peer or collective,
6 non-finite, 7 authentication, 8 disk, 9 a stated threshold was not met, 75 preempted, 130/143 signals.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Process exit codes of every ``tutti`` command."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    DATA = 3
    CHECKPOINT = 4
    PEER = 5
    NON_FINITE = 6
    AUTHENTICATION = 7
    DISK = 8
    THRESHOLD = 9
    PREEMPTED = 75
    INTERRUPTED = 130
    TERMINATED = 143


class TuttiError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: what happened, in one sentence.
        where: rank, step, file or option concerned.
        why: the cause, where it is known.
        remedy: what the user can do.

    >>> print(TuttiError("the run stopped", where="rank 1, step 7", remedy="raise --timeout"))
    the run stopped (rank 1, step 7). Raise --timeout.
    """

    exit_code = ExitCode.UNEXPECTED

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, remedy: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.remedy = what, where, why, remedy
        super().__init__(self._text())

    def _text(self) -> str:
        text = self.what.rstrip(".")
        if self.where:
            text += f" ({self.where})"
        if self.why:
            text += f": {self.why.rstrip('.')}"
        text += "."
        if self.remedy:
            text += f" {self.remedy[0].upper()}{self.remedy[1:].rstrip('.')}."
        return text


class UsageError(TuttiError):
    """A flag, file or combination that cannot be run. Raised before any process starts wherever possible."""

    exit_code = ExitCode.USAGE


class NotEnoughMemory(UsageError):
    """An allocation failed: what was to be run does not fit. Starting it again would change nothing."""


# What PyTorch's messages say where the system has no thread for them.
_NO_THREAD = "Resource temporarily unavailable"


def no_memory(error: BaseException) -> NotEnoughMemory | None:
    """What to tell of an error that says that an allocation failed, PyTorch's or Python's; None for any other."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RuntimeError) and ("can't start new thread" in said or said == _NO_THREAD):
        return NotEnoughMemory(
            "a thread could not be started",
            why=said,
            remedy="raise the limits on memory (ulimit -d, -v) or on processes (ulimit -u); "
            "ulimit -s 1024 makes the stack of every thread smaller",
        )
    if not (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in said):
        return None
    step = getattr(error, "step", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    places = [f"step {step}"] if step is not None else []
    places += [f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] if frames else []
    return NotEnoughMemory(
        "there is not enough memory",
        where=", ".join(places) or None,
        why=said,
        remedy="add --dry-run to see what each device needs; --strategy sharded, tensor or pipeline, a smaller "
        "--micro-batch and --activation-checkpointing blocks need less",
    )


class DataError(TuttiError):
    """Data that is missing, unreadable, out of range or empty."""

    exit_code = ExitCode.DATA


class LoaderError(DataError):
    """A process that fetches samples has died or hangs; unlike with other data errors, a new attempt may do better."""


class CheckpointError(TuttiError):
    """A checkpoint that is missing, incomplete, damaged or of another kind."""

    exit_code = ExitCode.CHECKPOINT


class PeerError(TuttiError):
    """Another rank died, hung or never arrived."""

    exit_code = ExitCode.PEER


class MismatchError(PeerError):
    """Ranks disagree about what they are about to exchange; raised before any arithmetic, on every rank."""


class NonFiniteError(TuttiError):
    """Too many steps in a row had a NaN or infinite gradient."""

    exit_code = ExitCode.NON_FINITE


class AuthenticationError(TuttiError):
    """A parameter server does not let this process in."""

    exit_code = ExitCode.AUTHENTICATION


class DiskError(TuttiError):
    """The run directory cannot be written."""

    exit_code = ExitCode.DISK


class Preempted(TuttiError):
    """The run was asked to end (SIGTERM, SIGUSR1), has saved its state and can be resumed."""

    exit_code = ExitCode.PREEMPTED


class Interrupted(TuttiError):
    """The run was interrupted (Ctrl-C), has saved its state and can be resumed."""

    exit_code = ExitCode.INTERRUPTED


_LISTED = 20  # choices that a remedy names


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A remedy that names the nearest choice, or all of them where none is near.

    >>> did_you_mean("miror", ["single", "mirrored"])
    "did you mean 'mirrored'? Choices: mirrored, single"
    >>> did_you_mean("zzz", ["sgd", "adam"])
    'choices: adam, sgd'
    >>> did_you_mean("zzz", map(str, range(100)))[-23:]
    '25, 26, … (100 of them)'
    """
    known = sorted(choices)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = ", ".join(known[:_LISTED]) + f", … ({len(known)} of them)" * (len(known) > _LISTED)
    return f"did you mean '{near[0]}'? Choices: {listed}" if near else f"choices: {listed}"
