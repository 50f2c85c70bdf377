"""What a run has done so far, read from the lines that it leaves in its directory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Resume:
    """The run went on from ``step``; the ``lost`` steps after it had been made, and are made again."""

    step: int
    lost: int


class Follower:
    """Follows ``metrics.jsonl`` of the run directory ``directory``, over restarts, which replace the file.

    Attributes:
        step: the last step made, in the attempt that goes on now.
        made: steps seen since the last resume; 0 while that is still starting.
        resumes: every resume there was.
        warnings: what the run has warned of.
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
        """Another one after every step."""
        return len(self.resumes), self.step

    @property
    def lost(self) -> int:
        """Steps that were made and then lost, over all resumes."""
        return sum(resume.lost for resume in self.resumes)

    def poll(self) -> None:
        """Read what is new. Only whole lines count: a full disk may take half of one and give it back."""
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
    """Complete checkpoints of a run directory by what their names say, newest first; not verified."""
    return sorted((path.parent for path in directory.glob("checkpoints/step-????????/manifest.json")), reverse=True)


def unfinished(directory: Path) -> list[Path]:
    """What saves that did not succeed have left in a run directory."""
    return sorted(directory.glob("checkpoints/*.tmp-*"))
