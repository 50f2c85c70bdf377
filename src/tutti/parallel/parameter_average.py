"""Exponential moving average (EMA) of the weights: every rank averages the parameters that it holds.

One fused operation an update; no communication. Ranks that hold the same parameters hold the same average, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tutti.checkpoint.state_shards import mine_of, read_local, written
from tutti.config.averaging import Averaging
from tutti.errors import UsageError
from tutti.nn.swap import parameters
from tutti.torch_compat import foreach_lerp_
from tutti.types.gradient_sync import GradientSync
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice
from tutti.types.weight_average import Average

_NARROW = (torch.float16, torch.bfloat16)


class ParameterAverage:
    """Moving average (EMA) of the trained parameters that this rank holds; it starts from their current values.

    Not collective: ranks that hold the same parameters compute the same average. Memory: one copy of the parameters, in
    float32 for narrower dtypes, since 1 - d is below their resolution.

    Args:
        replica: this rank's part of the model, with its runner.
        averaging: decay d and warm-up.
        run_context: communicators and settings of the run.
        only: names of the parameters to average; None for all trained ones.

    Attributes:
        updates: number of updates averaged so far.
    """

    def __init__(
        self, replica: ReplicaRunner, averaging: Averaging, run_context: RunContext, only: Collection[str] | None = None
    ) -> None:
        self._replica, self._averaging, self._run_context = replica, averaging, run_context
        chosen = [(name, p) for name, p in parameters(replica.parts) if only is None or name in only]
        trained = {name: p for name, p in chosen if p.requires_grad}
        self._rows = {name: rows for name, rows in replica.sharded.items() if name in trained}
        self._names = list(trained)
        self._parameters = [self._rows.get(name, p) for name, p in trained.items()]
        self._values = [_wide(p.data).clone() for p in self._parameters]
        self._on_all_ranks: Collection[str] = self._names
        self.updates = 0

    def adopt(self, names: Collection[str]) -> None:
        """Add parameters that were frozen (``requires_grad`` False) to the moving average, from their current values.

        A frozen parameter is constant, so that its average so far is its value. Not collective.

        Args:
            names: names in the model of parameters that the script now trains; parameters averaged already are left
                out.

        Raises:
            UsageError: the run shards parameters, and one of the named ones is not sharded yet, because the script has
                unfrozen this parameter between a forward and its backward.
        """
        new = {n: p for n, p in parameters(self._replica.parts) if n in names and n not in self._names}
        for name, parameter in new.items():
            if name not in self._replica.sharded and self._run_context.shards_parameters:
                raise UsageError(
                    f"{name} is unfrozen between a forward and its backward, which cannot be combined with ema= here",
                    why="the average is sharded, and this parameter is sharded only after the step",
                    remedy="set requires_grad before the forward, or leave out ema",
                )
            self._add(name, parameter)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        rows = self._replica.sharded.get(name)
        if rows is not None:
            self._rows[name] = rows
        self._names.append(name)
        self._parameters.append(parameter if rows is None else rows)
        self._values.append(_wide(self._parameters[-1].data).clone())

    def update(self) -> None:
        """Update the moving average of this rank's weights: average ← d · average + (1 - d) · parameter.

        d is the constructor's decay; with a warm-up, in update number t + 1, at most (1 + t) / (10 + t). Called once
        after each update of the parameters; increments the attribute ``updates``. Not collective.
        """
        if any(p.shape != value.shape for p, value in zip(self._parameters, self._values, strict=True)):
            # ZeRO stage 1 has sharded an unfrozen parameter, and the model has another object in its place.
            now = dict(parameters(self._replica.parts))
            self._parameters = [self._rows.get(name, now[name]) for name in self._names]
        if self._values:
            share = self._averaging.share(self.updates)
            foreach_lerp_(self._values, [_wide(p.data) for p in self._parameters], share)
        self.updates += 1

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a dict like ``merged``, with the moving average (EMA) in place of each averaged parameter.

        No tensor is copied: the averages are those that the next ``update`` changes in place. Averages of float16 and
        bfloat16 parameters are in float32. Buffers and frozen parameters stay. Not collective.

        Args:
            merged: this rank's parameters and buffers by name, the result of ``GradientSync.merged``.
        """
        return {**merged, **dict(zip(self._names, self._values, strict=True))}

    def state(self) -> dict[str, dict[str, Tensor | TensorSlice]]:
        """Return this rank's part of the moving average of the weights for a checkpoint. Not collective.

        Returns:
            ``{"ema": {parameter name: tensor}}``. Of a tensor with several equal copies only one rank returns it; a
            slice of a sharded tensor comes as a ``TensorSlice`` with its position in the whole tensor. The tensors are
            not copied: the next ``update`` changes them in place.
        """
        named = dict(zip(self._names, self._values, strict=True))
        found: dict[str, Tensor | TensorSlice] = {}
        if self._rows:
            copies = self._run_context.comms.axis("replica")
            rows = {name: named.pop(name) for name in self._rows}
            cut = {name: value for name, value in rows.items() if name not in self._replica.not_owned}
            for name, value in mine_of(cut, copies.rank, copies.size).items():
                spec = self._replica.specs[name]
                if value.numel():
                    found[name] = TensorSlice(value, spec.shape, spec.offset, spec.dim, spec.ranges)
        return {"ema": {**written(named, self._replica, self._run_context.comms.replica), **found}}

    def load(self, saved: SavedState, updates: int) -> None:
        """Restore the moving average (EMA) of this rank's weights from a checkpoint. Not collective.

        Args:
            saved: the checkpoint. The averages are read from its group ``ema``, also those of parameters that are
                frozen now; a parameter without an average there starts from its own value in the group ``model``.
            updates: number of updates averaged before the checkpoint was saved, which the warm-up of the decay depends
                on.

        Raises:
            CheckpointError: the checkpoint lacks a parameter, or a file of it differs from its manifest.
        """
        names, specs = saved.names("ema"), self._replica.specs
        named = dict(parameters(self._replica.parts))
        known = [name for name in named if any(n in names for n in (name, *specs[name].tied))]
        for name in known:
            if name not in self._on_all_ranks:
                self._add(name, named[name])
        for name, value in zip(self._names, self._values, strict=True):
            if value.numel():
                value.copy_(read_local(saved, "ema" if name in known else "model", name, self._replica, value.shape))
        self.updates = updates


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the moving average of the weights keeps parameters of a dtype.

    This is float32 for float16 and bfloat16, whose resolution is too low for small changes; else the same dtype.

    Args:
        dtype: dtype of a parameter.
    """
    return torch.float32 if dtype in _NARROW else dtype


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_type(tensor.dtype))


@runtime_checkable
class KeepsAverage(Protocol):
    """Protocol of a gradient synchronisation that has its own moving average (EMA) of the weights.

    The function ``make_average`` makes a ``ParameterAverage`` for all other synchronisations.
    """

    def average(self, averaging: Averaging) -> Average:
        """Create a moving average (EMA) of the model's weights that starts from their current values.

        A gradient synchronisation has this method if it keeps the weights, and so their average, in a place of its own,
        such as memory that all ranks of a node share (``CentralStorageSync``). Called once on every rank, after
        ``attach``; collective over the data ranks, which allocate the memory of the average together.

        Args:
            averaging: decay and warm-up of the average.

        Returns:
            An ``Average``. The run calls its ``update()`` after each update of the parameters. Its ``within(merged)``
            takes the result of ``GradientSync.merged``, a dict of this rank's parameters and buffers by name, and
            returns a new dict with the same names, in which the averages replace the trained parameters.

        Raises:
            UsageError: shared memory has no room for the average.
            PeerError: a rank is lost, or does not take part within the timeout.
        """


def make_average(replica: ReplicaRunner, sync: GradientSync, run_context: RunContext) -> Average | None:
    """Create the moving average (EMA) of the weights that the run asks for; called on all ranks.

    Collective under the strategy ``central_storage``, whose ranks allocate and share one average in memory; under all
    other strategies each rank averages the parameters that it holds, without communication.

    Args:
        replica: the model on this rank, with its runner, after ``sync.attach``.
        sync: the gradient synchronisation; if it has a method ``average`` (``KeepsAverage``), this makes the average.
        run_context: settings of the run; ``averaging`` in it has decay and warm-up, or is None.

    Returns:
        An ``Average``, an object whose ``update()`` is to be called after each update of the parameters;
        ``within(merged)`` returns a dict of the model's tensors with the averages in place of the weights. None where
        ``averaging`` is None.

    Raises:
        UsageError: under ``central_storage``, the shared memory has no room for the average.
        PeerError: a rank is lost, or does not take part within the timeout.
    """
    if run_context.averaging is None:
        return None
    if isinstance(sync, KeepsAverage):
        return sync.average(run_context.averaging)
    return ParameterAverage(replica, run_context.averaging, run_context)
