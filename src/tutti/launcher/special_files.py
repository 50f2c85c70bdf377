"""Named pipes, sockets and devices in a folder that is to be copied: reading one of them blocks or fails. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress

_OF_PATTERNS = re.compile(r"([*?\[\]\\!# ])")


def special_files(folder: str, skipped: Collection[str]) -> Iterator[str]:
    """Yield patterns, as ``.gitignore`` has them, for all named pipes, sockets and devices below a folder.

    They let a program that copies the folder leave these files out, because reading one blocks or fails. Symbolic links
    count as their targets; links to folders are not followed.

    Args:
        folder: the folder to search; what cannot be read is left out.
        skipped: names of folders that are not searched.

    Yields:
        For each such file its path below ``folder`` with a leading slash, and backslashes before special characters.
    """
    waiting = [folder]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting += [entry.path] * (entry.name not in skipped)
                elif entry.is_file() or entry.is_dir() or not os.path.exists(entry.path):
                    continue
                else:
                    yield "/" + _OF_PATTERNS.sub(r"\\\1", os.path.relpath(entry.path, folder))
