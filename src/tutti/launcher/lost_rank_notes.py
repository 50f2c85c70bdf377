"""Files beside the job's store that mark expendable and lost ranks. No torch.

A rank marks itself expendable. If it is killed, the launcher does not end the run, but marks the rank lost once its
process is gone: the rank writes nothing more after that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_SPARE, _LOST, _MESSAGES = "spare", "lost", "messages"


class LostRankNotes:
    """Marker files in which a job records its expendable and its lost ranks.

    A rank marks itself expendable if the run can go on without it. If an expendable rank is killed, the launcher does
    not end the run, but marks this rank lost, which the remaining ranks read.

    Args:
        folder: folder of the launcher that all ranks see.

    Attributes:
        messages: folder for the messages of ``comm.file_all_gather``, files by which the remaining ranks exchange data
            after a rank was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._spare, self._lost, self.messages = (folder / name for name in (_SPARE, _LOST, _MESSAGES))

    def clear(self) -> None:
        """Delete all records of expendable and lost ranks of this job, and all messages of ``comm.file_all_gather``.

        Expendable ranks are those without which the run can go on. Leaves three empty folders for new records and
        messages. Called in the launcher.
        """
        for folder in (self._spare, self._lost, self.messages):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def mark_expendable(self, rank: int) -> None:
        """Record that the run can go on if the process of ``rank`` is killed from now on.

        Writes a marker file that the launcher reads when the process ends. The rank itself calls this method.
        """
        (self._spare / str(rank)).touch()

    def is_expendable(self, rank: int) -> bool:
        """Return whether ``rank`` has recorded, by ``mark_expendable``, that the run can go on without it."""
        return (self._spare / str(rank)).exists()

    def mark_lost(self, rank: int, how: str) -> None:
        """Record for all ranks of a job that the process of ``rank`` was killed while the run goes on without it.

        Writes a marker file ``lost/RANK`` in the folder that all ranks see; the remaining ranks read it by ``lost``.
        The launcher calls this method once the process is gone.

        Args:
            rank: the killed rank.
            how: text for messages that says how the process ended, such as ``was killed by SIGKILL``; the content of
                the file.
        """
        write_whole(self._lost / str(rank), how.encode())

    def lost(self) -> Mapping[int, str]:
        """Return the ranks that were killed while the run goes on without them, each with a text on how it ended.

        The mapping is rank → text, in rank order; it is empty if no rank was lost. It is read from marker files that
        the launcher writes.
        """
        # Usually an empty folder, which is fast to list.
        ranks = sorted(int(name) for name in os.listdir(self._lost) if name.isdecimal())
        return {rank: (self._lost / str(rank)).read_text(encoding="utf-8") for rank in ranks}


def lost_rank_notes() -> LostRankNotes | None:
    """Return the marker files by which this job's ranks and launcher record lost ranks; None under another launcher.

    The files lie in the directory of the job's key-value store, whose path is in the environment variable
    ``TUTTI_STORE``. A launcher without such files, such as torchrun, ends all ranks when one fails.

    Returns:
        An object with which a rank marks itself expendable (the run can go on without it) and reads which ranks were
        killed. None if ``TUTTI_STORE`` is not set, or if its directory has no such files.
    """
    store = os.environ.get("TUTTI_STORE")
    found = LostRankNotes(Path(store).parent) if store else None
    return found if found is not None and found.messages.is_dir() else None


def write_whole(path: Path, raw: bytes) -> None:
    """Write the bytes ``raw`` to the file ``path`` atomically.

    A reader finds the new content as a whole, the former content, or no file, and never a part of the new content. The
    new content is first written to ``path`` with the suffix ``.tmp`` in place of its own, so that only one process may
    write a path at a time.
    """
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)
