"""Exceptions that tutti raises on purpose, each with the exit code of the command line.

A message says *what* happened, *where* (rank, step), *why*, and what to *do*. Exit codes are those of
``docs/environment.md``: 0 done, 1 unexpected, 2 usage or configuration, 3 data, 4 checkpoint, 5 peer or collective,
6 non-finite, 7 authentication, 8 disk, 9 a stated threshold was not met, 75 preempted, 130/143 signals.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import cache
from pathlib import Path


class ExitCode(IntEnum):
    """Process exit codes of every ``tutti`` command.

    Attributes:
        DONE: all went well.
        UNEXPECTED: an exception that tutti does not raise on purpose.
        USAGE: invalid options or configuration, or too little memory.
        DATA: data are missing or unreadable, or a loader process failed.
        CHECKPOINT: a checkpoint cannot be loaded, or does not fit the run.
        PEER: another rank or a collective failed, ranks disagree, or Ray or Slurm does not answer.
        NON_FINITE: too many steps in a row had NaN or infinite gradients, or a run to be read has diverged.
        AUTHENTICATION: a parameter server or a Ray cluster refused this process.
        DISK: a file cannot be written.
        THRESHOLD: the run ended as planned, and missed a target that the user stated.
        PREEMPTED: SIGTERM, SIGUSR1 or SIGUSR2 ended the run, which can be resumed.
        INTERRUPTED: Ctrl-C ended the run, which can be resumed.
        TERMINATED: 128 + SIGTERM, of a process that the signal ended.
    """

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


FINISHED = frozenset({ExitCode.DONE, ExitCode.THRESHOLD})
"""Exit codes of runs that ended as planned; with ``THRESHOLD`` the target of ``--until`` was not reached."""


class TuttiError(Exception):
    """Base class of all exceptions that tutti raises on purpose.

    Args:
        what: what happened, in one sentence.
        where: rank, step, file or option concerned.
        why: the cause, where it is known.
        remedy: what the user can do.

    Attributes:
        what, where, why, remedy: the arguments, until ``reword``; ``str(error)`` joins them in sentences.
        exit_code: the ``ExitCode`` of a command that ends on this exception, a constant of the class.

    >>> print(TuttiError("the run stopped", where="rank 1, step 7", remedy="raise --timeout"))
    the run stopped (rank 1, step 7). Raise --timeout.
    """

    exit_code = ExitCode.UNEXPECTED

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, remedy: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.remedy = what, where, why, remedy
        super().__init__(self._text())

    def reword(self, words: Callable[[str], str]) -> None:
        """Rewrite the attributes ``what``, ``where``, ``why`` and ``remedy``, and thereby the message, in place.

        For example to name options as the caller of a Python function writes them and not as the command line does.

        Args:
            words: called with the text of each attribute that is not None; returns the new text.
        """
        self.what = words(self.what)
        self.where, self.why, self.remedy = (part and words(part) for part in (self.where, self.why, self.remedy))
        self.args = (self._text(),)

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
    """Raised for a flag, file or combination that cannot run, wherever possible before any process starts."""

    exit_code = ExitCode.USAGE


class TargetError(TuttiError):
    """Raised where runs were trained to a target metric and none reached it."""

    exit_code = ExitCode.THRESHOLD


class NotEnoughMemory(UsageError):
    """Raised where an allocation or the start of a thread failed: the run does not fit into memory.

    A restart would fail again.
    """


# PyTorch's allocator tells of memory that it holds and cannot use.
_FRAGMENTED = "; PYTORCH_ALLOC_CONF=expandable_segments:True helps where reserved memory is fragmented"
# Text of PyTorch's error where the system refuses another thread (EAGAIN).
_NO_THREAD = "Resource temporarily unavailable"


def no_memory(error: BaseException) -> NotEnoughMemory | None:
    """Return the error to raise in place of an exception that reports a failed allocation or start of a thread.

    Recognises MemoryError, PyTorch's OutOfMemoryError, exceptions whose text says ``can't allocate``, and RuntimeErrors
    of a thread that could not be started.

    Args:
        error: any exception.

    Returns:
        ``NotEnoughMemory``, a usage error that names the step and line if known, and options that need less memory;
        None for all other exceptions.
    """
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RuntimeError) and ("can't start new thread" in text or text == _NO_THREAD):
        return NotEnoughMemory(
            "a thread could not be started",
            why=text,
            remedy="raise the limits on memory (ulimit -d, -v) or on processes (ulimit -u); "
            "ulimit -s 1024 makes the stack of every thread smaller",
        )
    if not (isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "can't allocate" in text):
        return None
    step = getattr(error, "step", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    places = [f"step {step}"] if step is not None else []
    # A function mode of tutti may pass on the script's call.
    frames = [f for f in frames if is_script_file(f.filename)] or frames
    places += [f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] if frames else []
    return NotEnoughMemory(
        "there is not enough memory",
        where=", ".join(places) or None,
        why=text,
        remedy="the strategies sharded, tensor and pipeline, a smaller micro-batch and activation checkpointing need "
        "less; tutti train --dry-run shows what each device needs"
        + _FRAGMENTED
        * ("is reserved by PyTorch" in str(error)),
    )


class DataError(TuttiError):
    """Raised for data that are missing, unreadable, out of range or empty."""

    exit_code = ExitCode.DATA


class LoaderError(DataError):
    """Raised where a process of the data loader has died or hangs.

    Unlike with other data errors, a restart may succeed.
    """


class CheckpointError(TuttiError):
    """Raised for a checkpoint that is missing, incomplete or damaged, or does not fit the run."""

    exit_code = ExitCode.CHECKPOINT


class PeerError(TuttiError):
    """Raised where another rank died, hung or never arrived at a collective, or where Ray or Slurm does not answer."""

    exit_code = ExitCode.PEER


class MismatchError(PeerError):
    """Raised on every rank where ranks disagree about a collective, their settings or their copies of a tensor.

    Ranks compare descriptions of their next collective before any arithmetic.
    """


class NonFiniteError(TuttiError):
    """Raised where too many training steps in a row had a NaN or infinite gradient, or a run given to read diverged."""

    exit_code = ExitCode.NON_FINITE


class AuthenticationError(TuttiError):
    """Raised where a parameter server or a Ray cluster refused this process."""

    exit_code = ExitCode.AUTHENTICATION


class DiskError(TuttiError):
    """Raised where a file cannot be written, such as those of the run directory."""

    exit_code = ExitCode.DISK


class Preempted(TuttiError):
    """Raised where a run ends on SIGTERM, SIGUSR1 or SIGUSR2; it can be resumed.

    The run has written a checkpoint before, if it has a run directory.
    """

    exit_code = ExitCode.PREEMPTED


class Interrupted(TuttiError):
    """Raised where a run ends on Ctrl-C; it can be resumed.

    The run has written a checkpoint before, if it has a run directory.
    """

    exit_code = ExitCode.INTERRUPTED


_LISTED = 20  # choices that a remedy names


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return an error's remedy for an unknown word: the nearest choice, if any is near, and the choices, sorted.

    At most 20 choices are listed.

    Args:
        word: the unknown word.
        choices: the words that are allowed.

    >>> did_you_mean("miror", ["single", "mirrored"])
    "did you mean 'mirrored'? Choices: mirrored, single"
    >>> did_you_mean("DDP", ["ddp", "Linear"])
    "did you mean 'ddp'? Choices: Linear, ddp"
    >>> did_you_mean("zzz", ["sgd", "adam"])
    'choices: adam, sgd'
    >>> did_you_mean("zzz", map(str, range(100)))[-23:]
    '25, 26, … (100 of them)'
    """
    known = sorted(choices)
    by_lower = {each.lower(): each for each in known}
    near = [by_lower[each] for each in difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)]
    listed = ", ".join(known[:_LISTED]) + f", … ({len(known)} of them)" * (len(known) > _LISTED)
    return f"did you mean '{near[0]}'? Choices: {listed}" if near else f"choices: {listed}"


def counted(number: int, noun: str) -> str:
    """Return a number of things in words for a message: ``1 device``, ``2 devices``, ``10,000 micro-batches``.

    Args:
        number: how many.
        noun: the thing in the singular; its plural is regular.

    >>> counted(1, "data rank"), counted(0, "process"), counted(10_000, "micro-batch")
    ('1 data rank', '0 processes', '10,000 micro-batches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def kind_of(value: object) -> str:
    """Return the type of a value in words for a message, with an article; for a class, the name of the class itself.

    Args:
        value: any object.

    >>> kind_of([]), kind_of(3), kind_of(int), kind_of(None)
    ('a list', 'an int', 'the class int and no instance', 'None')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} and no instance"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def script_line_of(error: BaseException) -> str:
    """Return the place in the user's code at which an exception arose, as ``FILE:LINE``.

    The place is the traceback's innermost frame in a file of the user: outside of the packages torch and tutti, and
    neither ``contextlib.py`` nor tqdm's ``std.py``. Without such a frame the result is ``the script``.

    Args:
        error: an exception that was raised.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_script_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return "the script"


def own_line_of(error: BaseException) -> str | None:
    """Return the place in the user's own code at which an exception arose, as ``FILE:LINE``; else None.

    The place is the traceback's innermost frame in a file that belongs neither to tutti, torch or another installed
    package, nor to Python's library.

    Args:
        error: an exception that was raised.
    """
    folders = tuple(f"{sysconfig.get_path(each)}{os.sep}" for each in ("stdlib", "purelib", "platlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == "<string>" and frame.name.startswith("__"):
            continue  # a method that dataclasses has made
        if is_script_file(frame.filename) and not frame.filename.startswith((*folders, "<frozen ")):
            return f"{frame.filename}:{frame.lineno}"
    return None


def script_line() -> str:
    """Return the place in the user's code that is being run now, as ``FILE:LINE``, for messages.

    The place is the innermost stack frame in a file of the user (``is_script_file``); ``the script`` if there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if is_script_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "the script"


def is_script_file(file: str) -> bool:
    """Return whether a source file counts as the user's: it is outside of the packages torch and tutti.

    ``contextlib.py`` does not count, because its decorators call functions of both packages, nor does tqdm's
    ``std.py``, whose iterator scripts write around their loops. A folder named ``torch`` or ``tutti`` elsewhere does
    not matter.

    Args:
        file: path of the file, as a stack frame or traceback has it.
    """
    packages = tuple(sys.modules[name].__file__ for name in ("torch", "tutti") if name in sys.modules)
    return not file.startswith(_folders(packages)) and not file.endswith(("/contextlib.py", "/tqdm/std.py"))


@cache
def _folders(packages: tuple[str | None, ...]) -> tuple[str, ...]:
    """Return the folders of packages, given by their ``__init__.py``, each with a separator at its end."""
    return tuple(f"{Path(each).parent}{os.sep}" for each in packages if each)
