"""Parse and check the arguments of ``tutti chaos`` before a run starts. Loads no torch."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cyclopts import App

from tutti.chaos.command import Command
from tutti.chaos.faults import LAUNCHER, SOAK
from tutti.cli.config_checks import count_devices, refuse_config
from tutti.cli.train_command import bare_options, resolved, run_directory, train
from tutti.errors import UsageError, did_you_mean

SMALL = 2**26
"""Largest file system, in bytes, that a soak fills."""


def read_command(words: Sequence[str]) -> Command:
    """Parse and check the ``tutti train`` command line into which ``tutti chaos`` injects faults.

    Args:
        words: the command, with or without a first word ``tutti``.

    Returns:
        A ``Command``: ``words`` of the command, ``task``, ``config`` (resolved, with a number of devices) and
        ``directory``, the run directory, which is made unless the command resumes a run.

    Raises:
        UsageError: ``words`` are no ``train`` command, or a value of an option is malformed.
        CycloptsError: an option is unknown, or its value is of another type.
        TuttiError: the configuration is refused, as by ``tutti train``, or the run directory cannot be made.
    """
    given = list(words[1:] if words[:1] == ("tutti",) else words)
    if given[:1] != ["train"]:
        remedy = "write the command after --, as in tutti chaos kill -- tutti train digits --devices 3"
        raise UsageError("no tutti train command is given", remedy=remedy)
    app = App(name="tutti")
    app.command(train)
    _, bound, _ = app.parse_args(bare_options(given), print_error=False, exit_on_error=False)
    found = bound.arguments
    task, config = resolved(
        found.get("task"), found.get("flags", {}), found.get("config", ()), found.get("changes", ())
    )
    config = dataclasses.replace(config, devices=str(count_devices(config, None)))
    refuse_config(task, config)
    return Command(tuple(given), task, config, run_directory(config, task))


def read_kinds(text: str | None, directory: Path) -> list[str]:
    """Parse ``tutti chaos soak --kinds``, the kinds of faults to inject into a run.

    Args:
        text: ``kill``, ``launcher``, ``stop``, ``slow``, ``terminate``, ``corrupt`` and ``fill``, some of them, joined
            by commas; None for all that are possible for the run.
        directory: the run directory; ``fill`` fills its disk, which must be of at most 64 MiB.

    Returns:
        The names of the kinds, in the order given. For None ``fill`` is missing if the disk is larger, and a line on
        stderr says so.

    Raises:
        UsageError: unknown kind (naming the nearest), or ``fill`` is asked for on a larger disk.
    """
    names = list(SOAK) if text is None else text.split(",")
    for name in names:
        if name not in SOAK:
            raise UsageError(f"there is no fault '{name}'", remedy=did_you_mean(name, SOAK))
    found = os.statvfs(directory)
    if "fill" in names and found.f_blocks * found.f_frsize > SMALL:
        if text is not None:
            remedy = "give the run an --out on a small file system, such as a tmpfs of 1 MiB"
            raise UsageError(f"the disk of {directory} is too large to fill", remedy=remedy)
        print("fill is left out: the run directory is not on a small disk", file=sys.stderr)
        names.remove("fill")
    return names


def read_step(text: str) -> int | Literal["random"]:
    """Parse ``tutti chaos --at-step``, the training step after which a fault happens.

    Args:
        text: a number of at least 1; ``random``; or ``saved``, for the first checkpoint.

    Returns:
        The number; ``"random"``; 0 for ``saved``.

    Raises:
        UsageError: any other text.
    """
    if text in ("random", "saved"):
        return 0 if text == "saved" else "random"
    return _number("--at-step", text, "a whole number of at least 1, random, or saved")


def read_rank(text: str) -> int | Literal["random"]:
    """Parse ``tutti chaos --rank``, the process that a fault hits.

    Args:
        text: a rank; ``random``; or ``launcher``, for the process that started the ranks.

    Returns:
        The rank; ``"random"``; -1 (``tutti.chaos.faults.LAUNCHER``) for ``launcher``.

    Raises:
        UsageError: any other text.
    """
    if text in ("random", "launcher"):
        return LAUNCHER if text == "launcher" else "random"
    return _number("--rank", text, "a rank, random, or launcher", least=0)


def read_devices(text: str | None, command: Command) -> list[int]:
    """Parse ``tutti chaos soak --devices``, numbers of devices to resume on, and check that the run can use each.

    Args:
        text: the numbers, such as ``2,3,4``; None for an empty list.
        command: the ``tutti train`` command that is resumed after a fault: its words, task and configuration.

    Returns:
        The numbers, in the order given.

    Raises:
        UsageError: the text is malformed, the run is without ``--reproducible``, or it cannot use a number of devices.
        DataError: the task's data are missing, or a package that reads them is.
        CheckpointError: the weights of ``--init-from`` cannot be loaded.
    """
    found = [_number("--devices", word, "whole numbers, such as 2,3,4") for word in (text or "").split(",") if word]
    if found and not command.config.reproducible:
        why = "the bits of another run depend on the number of devices"
        raise UsageError("--devices needs a run with --reproducible", why=why, remedy="add it, or leave --devices out")
    for devices in found:
        refuse_config(command.task, dataclasses.replace(command.config, devices=str(devices)))
    return found


def read_bytes(text: str) -> int:
    """Parse a size, a number alone or with ``KiB``, ``MiB`` or ``GiB``, and return it in bytes.

    Args:
        text: the size, such as ``64KiB``; a fraction of a byte is cut off.

    Raises:
        UsageError: the text is no such size.

    >>> read_bytes("4096"), read_bytes("64KiB"), read_bytes("1.5 MiB")
    (4096, 65536, 1572864)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]iB)?", text)
    if found is None:
        raise UsageError(f"'{text}' is not a size", remedy="write 4096, 64KiB or 1MiB")
    return int(float(found[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}.get(found[2], 1))


def above(option: str, value: float | None, least: float = 0) -> float | None:
    """Check that an option's number is above ``least``, and return the number; None for an option that is not given.

    Args:
        option: name of the option, for the error, such as ``--for``.
        value: the number; None if the option is not given.
        least: largest number that is refused.

    Raises:
        UsageError: the number is not above ``least``.
    """
    if value is not None and not value > least:
        raise UsageError(f"{option} is {value:g}", remedy=f"give a number above {least:g}")
    return value


def _number(option: str, text: str, wanted: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{option} is '{text}'", remedy=f"give {wanted}")
    return int(text)
