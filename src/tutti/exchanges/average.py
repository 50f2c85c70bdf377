"""An exponential moving average of the weights, kept where they live: every rank averages its own parts.

One fused operation an update; no communication. Ranks that hold the same parts hold the same average, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tutti.exchanges.saved import mine_of, read, written
from tutti.laws.averaging import Averaging
from tutti.nn.swap import parameters
from tutti.types import Piece, Replica, SavedState, Setting

_NARROW = (torch.float16, torch.bfloat16)


class Average:
    """The average of the trained parameters of this rank's parts; it begins as what they are now.

    Memory: one copy of them, in float32 where they are narrower, since 1 - d is below what those resolve. ``only``: of
    these names alone.

    Attributes:
        updates: updates that have gone into it.
    """

    def __init__(
        self, replica: Replica, averaging: Averaging, setting: Setting, only: Collection[str] | None = None
    ) -> None:
        self._replica, self._averaging, self._setting = replica, averaging, setting
        chosen = [(name, p) for name, p in parameters(replica.parts) if only is None or name in only]
        trained = {name: p for name, p in chosen if p.requires_grad}
        self._rows = {name: rows for name, rows in replica.sharded.items() if name in trained}
        self._names = list(trained)
        self._parameters = [self._rows.get(name, p) for name, p in trained.items()]
        self._values = [_wide(p.data).clone() for p in self._parameters]
        self.updates = 0

    def update(self) -> None:
        """Take in the parameters as they are after an update."""
        if self._values:
            share = self._averaging.share(self.updates)
            torch._foreach_lerp_(self._values, [_wide(p.data) for p in self._parameters], share)
        self.updates += 1

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The merged model with the average for its trained parameters, and its own buffers."""
        return {**merged, **dict(zip(self._names, self._values, strict=True))}

    def state(self) -> dict[str, dict[str, Tensor | Piece]]:
        """What this rank writes of it into a checkpoint; see ``Exchange.state``."""
        named = dict(zip(self._names, self._values, strict=True))
        found: dict[str, Tensor | Piece] = {}
        if self._rows:
            copies = self._setting.comms.axis("replica")
            rows = {name: named.pop(name) for name in self._rows}
            cut = {name: value for name, value in rows.items() if name not in self._replica.borrowed}
            for name, value in mine_of(cut, copies.rank, copies.size).items():
                spec = self._replica.specs[name]
                if value.numel():
                    found[name] = Piece(value, spec.shape, spec.offset, spec.blocks, spec.rows)
        return {"ema": {**written(named, self._replica, self._setting.comms.replica), **found}}

    def load(self, saved: SavedState, updates: int) -> None:
        """Become the average in ``saved``, of so many updates; where it has none, begin anew at its weights."""
        names = saved.names("ema")
        for name, value in zip(self._names, self._values, strict=True):
            known = any(n in names for n in (name, *self._replica.specs[name].tied))
            if value.numel():
                value.copy_(read(saved, "ema" if known else "model", name, self._replica, value.shape))
        self.updates = updates


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """In which type parameters of this one are averaged."""
    return torch.float32 if dtype in _NARROW else dtype


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_type(tensor.dtype))
