"""Protocol of the average of the weights over the updates of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor


class Average(Protocol):
    """Average of the weights over the updates of a run (protocol), such as an exponential moving average.

    Attributes:
        updates: number of updates that the average has seen.
    """

    updates: int

    def update(self) -> None:
        """Update this rank's part of the average with the present parameters; called after each optimizer update.

        Increments ``updates``. Not collective: ranks that hold the same parameters compute the same average.
        """

    def adopt(self, names: Collection[str]) -> None:
        """Include parameters that the script has newly made trainable in the average of the weights, from now on.

        The run calls this before the first step that trains them. Until then a parameter was constant, so that its
        average starts at its present value. Not collective.

        Args:
            names: names of these parameters in the unsplit model; their ``requires_grad`` has been set to True.

        Raises:
            UsageError: the strategy cannot average them: always under ``central_storage``, and with FSDP2 for a
                parameter that is sharded only after the present step.
        """

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters and buffers by name, with the averaged weights in place of the trained parameters.

        Called for evaluations, ``run.state(averaged=True)`` and hashes of the average, on every rank. Under
        ``central_storage`` it waits at a barrier of the data ranks; with other strategies nothing is sent.

        Args:
            merged: this rank's parameters and buffers by name, from ``GradientSync.merged``: those of one model, merged
                over the logical workers (fixed shares of the global batch).

        Returns:
            A new dict with the names of ``merged``. Its tensors are those of ``merged`` and of the average themselves,
            not copies: do not write to them, and expect that ``update`` changes the averages in place. Averages of
            16-bit parameters are float32.
        """

    def state(self) -> Mapping[str, Mapping[str, Tensor | TensorSlice]]:
        """Return this rank's part of the averaged weights (EMA) for a checkpoint. Not collective.

        Returns:
            ``{"ema": {name: tensor}}``, with the names of the parameters. The parts of all ranks together are the whole
            average. A tensor that is split over ranks is given as a ``TensorSlice``, with its position in the full
            tensor. The tensors are not copied: ``update`` changes them.
        """

    def load(self, saved: SavedState, updates: int) -> None:
        """Restore the average of the weights from a checkpoint, on a resume or a warm start.

        A parameter without an average in the checkpoint starts at its weights there. Not collective: each rank reads
        its part.

        Args:
            saved: the checkpoint's tensors.
            updates: number of optimizer updates that the saved average has seen; becomes the attribute ``updates``, on
                which the warm-up of the decay depends.

        Raises:
            CheckpointError: the checkpoint lacks a tensor that is needed, or a file of it is damaged.
            UsageError: the checkpoint has an average of a parameter that is frozen now, and the strategy cannot average
                it.
        """
