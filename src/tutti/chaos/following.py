"""Follow the progress of a run by reading its ``metrics.jsonl``, and list its checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Follow the progress of a run in its ``metrics.jsonl``, over restarts, which replace the file.

    Args:
        directory: the run directory.

    Attributes:
        step: the last step of the current attempt.
        made: steps since the last resume; 0 while the attempt is starting.
        resumes: every resume so far.
        warnings: texts of the run's warnings.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.jsonl"
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self._position = self.step = self.made = 0
        self.resumes: list[Resume] = []
        self.warnings: list[str] = []

    @property
    def mark(self) -> tuple[int, int]:
        """The run's progress as (number of resumes, last step), which changes with every step and every resume.

        Two equal values mean that the run made no progress between them.
        """
        return len(self.resumes), self.step

    @property
    def lost(self) -> int:
        """Number of training steps that the run had to repeat, summed over all its resumes."""
        return sum(resume.lost for resume in self.resumes)

    def poll(self) -> None:
        """Read the lines that the run has added to ``metrics.jsonl`` and update the attributes. Does not wait.

        A last line without its end is left for the next call: on a full disk half a line may be written and taken back.
        A replaced or truncated file is read anew; a missing file is no error.
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
    """Return the directories of all complete checkpoints of a run directory, newest first.

    A checkpoint is complete if it has a manifest; the bytes of its files are not verified.
    """
    return sorted((path.parent for path in directory.glob("checkpoints/step-????????/manifest.json")), reverse=True)


def unfinished(directory: Path) -> list[Path]:
    """Return the temporary directories (``*.tmp-*``) of checkpoint saves that were not completed, sorted by name.

    A save that is under way has one, too.
    """
    return sorted(directory.glob("checkpoints/*.tmp-*"))
