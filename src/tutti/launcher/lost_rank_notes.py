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
    """Marker files in which a job records its expendable and its lost ranks.

    A rank marks itself expendable if the run can go on without it. If an expendable rank is killed, the launcher does
    not end the run, but marks this rank lost, which the remaining ranks read.

    Args:
        folder: folder of the launcher that all ranks see.

    Attributes:
        meetings: folder for the messages of ``comm.file_all_gather``.
    """

    def __init__(self, folder: Path) -> None:
        self._spare, self._lost, self.meetings = (folder / name for name in (_SPARE, _LOST, _MEETINGS))

    def clear(self) -> None:
        """Delete all records of expendable and lost ranks of this job, and all messages of ``comm.file_all_gather``.

        Leaves three empty folders for new records and messages. Called in the launcher.
        """
        for folder in (self._spare, self._lost, self.meetings):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def mark_expendable(self, rank: int) -> None:
        """Record that the run can go on if ``rank`` is killed from now on. Called in that rank."""
        (self._spare / str(rank)).touch()

    def is_expendable(self, rank: int) -> bool:
        """Return whether ``rank`` has recorded that the run can go on without it."""
        return (self._spare / str(rank)).exists()

    def mark_lost(self, rank: int, how: str) -> None:
        """Record for all ranks that ``rank`` was killed while the run goes on.

        Called in the launcher, once the process of the rank is gone.

        Args:
            rank: the rank.
            how: description of its end, for messages.
        """
        write_whole(self._lost / str(rank), how.encode())

    def lost(self) -> Mapping[int, str]:
        """Return the ranks that were killed while the run goes on without them: rank → description of the rank's end.

        The mapping is in rank order; empty if no rank was lost.
        """
        # Usually an empty folder, which is fast to list.
        ranks = sorted(int(name) for name in os.listdir(self._lost) if name.isdecimal())
        return {rank: (self._lost / str(rank)).read_text(encoding="utf-8") for rank in ranks}


def lost_rank_notes() -> LostRankNotes | None:
    """Return the marker files by which this job's ranks and launcher record lost ranks; None under another launcher.

    The files lie in the directory of the job's store, whose path is in the environment variable ``TUTTI_STORE``. A
    launcher without such files, such as torchrun, ends all ranks when one fails.
    """
    store = os.environ.get("TUTTI_STORE")
    found = LostRankNotes(Path(store).parent) if store else None
    return found if found is not None and found.meetings.is_dir() else None


def write_whole(path: Path, raw: bytes) -> None:
    """Write the bytes ``raw`` to the file ``path`` atomically.

    A reader finds the new content as a whole, the former content, or no file, and never a part of the new content.
    """
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)
