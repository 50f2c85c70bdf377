"""Follow the progress of a run by reading its ``metrics.jsonl``, and list its checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.metrics.metrics_file import METRICS


@dataclass(frozen=True)
class Resume:
    """One resume of a run from a checkpoint.

    Attributes:
        step: step of the checkpoint.
        lost: number of steps after it that had been made before, and are repeated.
    """

    step: int
    lost: int


class Follower:
    """Follows the progress of a run in its ``metrics.jsonl``, over restarts of its ranks, which replace the file.

    The attributes are those of the last ``poll``, which ``FaultInjection`` calls every 10 ms.

    Args:
        directory: the run directory.

    Attributes:
        step: the last step that the run has made; after a restart at first the step of the checkpoint.
        made: number of steps since the last restart; 0 while the ranks are starting.
        resumes: every resume from a checkpoint so far.
        warnings: texts of the run's warnings.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / METRICS
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self._position = self.step = self.made = 0
        self.resumes: list[Resume] = []
        self.warnings: list[str] = []

    @property
    def mark(self) -> tuple[int, int]:
        """Progress of the followed training run at the last ``poll``: (number of resumes from a checkpoint, step).

        The step is the attribute ``step``, the last one that the run has made. The pair changes with every step and
        every resume: if it is equal after two calls of ``poll``, the run made no progress between these calls.
        """
        return len(self.resumes), self.step

    @property
    def lost(self) -> int:
        """Number of training steps that the followed run had to repeat, over all resumes that ``poll`` has read so far.

        The steps of one resume are those that the run had made after the checkpoint from which it was resumed.
        """
        return sum(resume.lost for resume in self.resumes)

    def poll(self) -> None:
        """Read the lines that the training run has added to its ``metrics.jsonl`` since the last call. Does not wait.

        Updates ``step`` (last step made), ``made`` (steps since the last restart), ``resumes`` and ``warnings``. A last
        line without its end is left for the next call: on a full disk the run may write half a line and truncate it. A
        replaced or truncated file is read from its start, and the attributes begin anew; a missing file changes
        nothing.
        """
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._position:
                    self._inode = found.st_ino
                    self._forget()
                file.seek(self._position)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._position += len(whole) + len(newline)
        for line in whole.splitlines():
            self._take(json.loads(line))

    def _take(self, record: dict[str, Any]) -> None:
        if record["group"] == "train":
            self.step = record["step"]
            self.made += 1
        elif record["group"] == "resume":
            self.resumes.append(Resume(record["from"], record["lost"]))
            self.step, self.made = record["from"], 0
        elif record["group"] == "warning":
            self.warnings.append(record["text"])


def checkpoints(directory: Path) -> list[Path]:
    """Return the directories of all complete checkpoints of a run.

    A checkpoint is complete if it has a manifest; the bytes of its files are not verified.

    Args:
        directory: the run directory.

    Returns:
        Paths ``checkpoints/step-NNNNNNNN`` in it, newest first; empty if there are none.
    """
    return complete_in(directory / "checkpoints")


def complete_in(folder: Path) -> list[Path]:
    """Return the directories ``step-NNNNNNNN`` in a folder that have a manifest, those of later steps first.

    Args:
        folder: folder ``checkpoints`` of a run; it need not exist, and the list is then empty.
    """
    found = (path.parent for path in folder.glob("step-*/manifest.json"))
    return sorted((path for path in found if path.name[5:].isdecimal()), key=saved_step, reverse=True)


def saved_step(checkpoint: Path) -> int:
    """Return the step of a checkpoint by the name of its directory, which has eight digits or more.

    Args:
        checkpoint: path of the directory, which need not exist.

    Raises:
        ValueError: the name is not ``step-`` and digits.

    >>> saved_step(Path("checkpoints/step-00000120"))
    120
    """
    return int(checkpoint.name[5:])


def unfinished(directory: Path) -> list[Path]:
    """Return the temporary directories (``*.tmp-*``) of a run's checkpoint saves that were not completed.

    A save that is under way has one, too.

    Args:
        directory: the run directory.

    Returns:
        Paths in its folder ``checkpoints``, sorted by name; empty if there are none.
    """
    return sorted(directory.glob("checkpoints/*.tmp-*"))
