"""Check before minutes or hours of computing that the results can be written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tutti.errors import DiskError, UsageError


def check_writable(path: Path | None, what: str, suffixes: Sequence[str] = ()) -> None:
    """Check that a file can be written later, before a command spends minutes or hours on its content.

    Args:
        path: the file; None for no file, for which nothing is checked.
        what: name of the content for the error's message, such as ``the recipe``.
        suffixes: permitted endings of the file's name, such as ``.svg``; empty to permit every name.

    Raises:
        UsageError: the file's name has none of ``suffixes``.
        DiskError: the path is a folder, the folder around it does not exist, or there is no permission to write.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise UsageError(
            f"{what} cannot be written as '{path.suffix}'", where=str(path), remedy=f"take {' or '.join(suffixes)}"
        )
    if path.is_dir():
        why, remedy = "it is a folder", "give a file"
    elif not path.parent.is_dir():
        why, remedy = f"there is no folder {path.parent}", "make the folder first"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why, remedy = "there is no permission to write", "give a file in a folder of yours"
    else:
        return
    raise DiskError(f"cannot write {what}", where=str(path), why=why, remedy=remedy)


def make_writable(folder: Path, what: str) -> None:
    """Make the folder of results, with its parents, before a command spends minutes or hours on them.

    Args:
        folder: the folder; may exist.
        what: name of the results for the error's message, such as ``the landscape``.

    Raises:
        DiskError: the folder cannot be made, or there is no permission to write into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "there is no permission to write")
    except OSError as error:
        raise DiskError(
            f"cannot write {what}", where=str(folder), why=error.strerror, remedy="give a folder of yours"
        ) from error
