"""Ranks that a run can do without, and those that it has lost: notes in a folder beside the job's store. No torch.

A rank leaves one that the others can do without it. Where such a rank is killed the launcher does not end the others,
but leaves a note of its own once the process is gone: what the rank has written by then is all that it ever will have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_SPARE, _LOST, _MEETINGS = "spare", "lost", "meetings"


class Notes:
    """Of one job.

    Args:
        folder: the launcher's, which all ranks see.
    """

    def __init__(self, folder: Path) -> None:
        self._spare, self._lost, self.meetings = (folder / name for name in (_SPARE, _LOST, _MEETINGS))

    def clear(self) -> None:
        """In the launcher, before an attempt: nobody is spare, and nobody lost."""
        for folder in (self._spare, self._lost, self.meetings):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def offer(self, rank: int) -> None:
        """The others can do without this rank from now on."""
        (self._spare / str(rank)).touch()

    def is_spare(self, rank: int) -> bool:
        """Whether the others can do without ``rank``."""
        return (self._spare / str(rank)).exists()

    def lose(self, rank: int, how: str) -> None:
        """In the launcher: ``rank`` has ended, and this is how."""
        write(self._lost / str(rank), how.encode())

    def lost(self) -> Mapping[int, str]:
        """Ranks that have been lost, and how each ended."""
        # Mostly there is none: a look at an empty folder.
        ranks = sorted(int(name) for name in os.listdir(self._lost) if name.isdecimal())
        return {rank: (self._lost / str(rank)).read_text(encoding="utf-8") for rank in ranks}


def notes() -> Notes | None:
    """Where this rank's launcher looks; None under a launcher that ends all ranks with the first."""
    store = os.environ.get("TUTTI_STORE")
    found = Notes(Path(store).parent) if store else None
    return found if found is not None and found.meetings.is_dir() else None


def write(path: Path, raw: bytes) -> None:
    """A file that is there whole or not at all, whenever its writer ends."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)
