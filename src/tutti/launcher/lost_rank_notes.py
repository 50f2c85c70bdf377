"""Files beside the job's store that mark expendable and lost ranks. No torch.

A rank marks itself expendable. If it is killed, the launcher does not end the run, but marks the rank lost once its
process is gone: the rank writes nothing more after that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_SPARE, _LOST, _MEETINGS = "spare", "lost", "meetings"


class LostRankNotes:
    """The marker files of one job.

    Args:
        folder: folder of the launcher that all ranks see.

    Attributes:
        meetings: folder for the messages of ``comm.file_all_gather``.
    """

    def __init__(self, folder: Path) -> None:
        self._spare, self._lost, self.meetings = (folder / name for name in (_SPARE, _LOST, _MEETINGS))

    def clear(self) -> None:
        """In the launcher, before an attempt: remove all marks."""
        for folder in (self._spare, self._lost, self.meetings):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def mark_expendable(self, rank: int) -> None:
        """In the rank: declare that the run can continue without it from now on."""
        (self._spare / str(rank)).touch()

    def is_expendable(self, rank: int) -> bool:
        """Whether the run can continue without ``rank``."""
        return (self._spare / str(rank)).exists()

    def mark_lost(self, rank: int, how: str) -> None:
        """In the launcher: mark ``rank`` as lost; ``how`` describes its end."""
        write_whole(self._lost / str(rank), how.encode())

    def lost(self) -> Mapping[int, str]:
        """Return the lost ranks, and how each ended."""
        # Usually an empty folder, which is fast to list.
        ranks = sorted(int(name) for name in os.listdir(self._lost) if name.isdecimal())
        return {rank: (self._lost / str(rank)).read_text(encoding="utf-8") for rank in ranks}


def lost_rank_notes() -> LostRankNotes | None:
    """Return the marker files of this rank's launcher; None under a launcher that does not tolerate lost ranks."""
    store = os.environ.get("TUTTI_STORE")
    found = LostRankNotes(Path(store).parent) if store else None
    return found if found is not None and found.meetings.is_dir() else None


def write_whole(path: Path, raw: bytes) -> None:
    """Write a file atomically: even if the writer is killed, the file is complete or absent."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)
