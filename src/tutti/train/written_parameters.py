"""Find parameters that the script writes between updates, and refuse values that differ between data ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from tutti.checkpoint.fingerprint import tensor_digest
from tutti.comm.random_keys import mix
from tutti.errors import UsageError, script_line
from tutti.nn.swap import parameters
from tutti.torch_compat import tensor_version
from tutti.train.replicas import differing_copies
from tutti.types import CustomLoopSync

if TYPE_CHECKING:
    from tutti.train.run import Run

_ALL = 4
"""Writes up to this number are all compared, later ones if their number is a power of two (a guess): a script that
clamps its weights after every update reads them once more for each comparison."""


class WrittenParameters:
    """Finds parameters that the script has written since the last update, where every data rank has all of them.

    The versions of the tensors tell; a write through ``parameter.data`` has none and is found when the run compares the
    copies, such as by ``run.state()``.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._count = run, 0
        sync = run.gradient_sync
        together = run.context.comms.replica.size > 1 and sync.loss_normalisation == "step"
        self._watched = together and cast(CustomLoopSync, sync).gradient_at in ("rank", "rows")
        self.watch()

    def watch(self) -> None:
        """Begin to watch the parameters that the model has now for writes by the script; record their version counters.

        To be called again when the model gets other parameter objects. Not collective.
        """
        self._parameters = [p for _, p in parameters(self._run.replica.parts)] if self._watched else []
        self.note()

    def note(self) -> None:
        """Record the version counters of the watched parameters, after each update; later writes are the script's."""
        self._versions = [tensor_version(p) for p in self._parameters]

    def digest(self) -> int:
        """Return a positive digest of all parameters' bytes if the script has written any since ``note``; otherwise 0.

        Not collective. After four calls that found a write, only those calls whose number is a power of two return a
        digest, and the others 0, because a digest reads every parameter.
        """
        if [tensor_version(p) for p in self._parameters] == self._versions:
            return 0
        self._count += 1
        if self._count > _ALL and self._count & (self._count - 1):
            return 0
        digests = torch.stack([tensor_digest(p.data) for p in self._parameters]).tolist()
        return (mix(*digests) >> 1) or 1

    def compare(self) -> None:
        """Raise UsageError, on every rank, if the script has written other values into a parameter on each rank.

        Collective: two small all-gathers of digests of the copies.
        """
        run = self._run
        found = differing_copies(run, f"step {run.clock + 1}")
        if found is None:
            return
        names, sides = found
        raise UsageError(
            f"the script has written other values into {names} on each rank: {sides}",
            where=f"before step {run.clock + 1}, {script_line()}",
            why="random draws between steps come from each rank's own generator (reset_parameters, torch.randn), and"
            " numbers of a rank's own samples are its own, too",
            remedy="call torch.manual_seed with the same number on every rank right before the draw, or compute the"
            " values from what is the same everywhere, such as run.stats or run.state()",
        )
