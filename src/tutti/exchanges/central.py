"""One copy of the parameters and of the optimizer's state on a host, whose devices all compute from it.

The parameters of every process are views of one block of shared memory. Each rank owns whole tensors, evenly by size:
it sums their gradients, keeps their optimizer state and writes them. Memory a host: parameters and optimizer state
once, gradients once a rank. Three meetings a step; the last one is after all slices are written, so that nobody reads
a parameter that is half old. Slices of optimizer state: Rajbhandari et al. 2020, arXiv 1910.02054, §5.1.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutti.comm.segment import Segment, attach
from tutti.comm.spread import spread
from tutti.errors import UsageError
from tutti.exchanges.allreduce import AllReduce, culprits
from tutti.exchanges.average import Average, wide_type
from tutti.exchanges.config import AllReduceConfig, CentralConfig
from tutti.exchanges.reducers import Named, OverlappedReducer, Reducer, TreeReducer
from tutti.exchanges.saved import load_optimizer, mine_of, optimizer_tensors, read
from tutti.exchanges.shared import attach_shared
from tutti.exchanges.verify import agree_on_state
from tutti.laws.averaging import Averaging
from tutti.laws.shares import owners
from tutti.nn.swap import buffers
from tutti.types import Agreed, GradSink, OptimizerFactory, Piece, Replica, SavedState, Setting, Tick, Update
from tutti.world.allocator import give_back

_ALIGN = 64


class Central(AllReduce):
    """The exchange of ``central_storage``. Also its own gradient sink."""

    def __init__(self, config: CentralConfig, setting: Setting) -> None:
        super().__init__(AllReduceConfig(), setting)

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        """As ``AllReduce.attach``. Raises UsageError where the ranks have no memory in common."""
        return super().attach(replica, lambda named: make_optimizer(self._owned))

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        """Each rank writes its slice; returns when all are written."""
        updated = super().update(agreed, tick)
        self._segment.meet(f"update of the parameters in step {tick.clock + 1}")
        return updated

    def state(self) -> dict[str, Mapping[str, Tensor | Piece]]:
        comm = self._setting.comms.replica
        own = {name: p.data for name, p in self._owned}
        return {
            "model": {**own, **mine_of(self._buffers.merged(), comm.rank, comm.size)},
            "optim": optimizer_tensors(self._optimizer, self._owned) if self._optimizer else {},
            "workers": self._buffers.state(),
        }

    def load(self, saved: SavedState) -> None:
        for name, parameter in self._owned:
            parameter.data.copy_(read(saved, "model", name, self._replica, parameter.shape))
        self._buffers.load(saved)
        if self._optimizer:
            load_optimizer(self._optimizer, self._owned, saved, "optim", specs=self._replica.specs)
        self._segment.meet("taking over of the saved state")

    def average(self, averaging: Averaging) -> Average:
        """An average of the weights of which there is one copy, too. Collective."""
        trained = [(name, p) for name, p in self._named if p.requires_grad]
        segment, homes = self._memory([(p, wide_type(p.dtype)) for _, p in trained])
        values = {name: home for (name, _), home in zip(trained, homes, strict=True)}
        return CentralAverage(self._replica, averaging, self._setting, segment, values, self._owned)

    def _unite(self, replica: Replica, named: Named) -> None:
        """Move all parameters into the central memory, with the first rank's values."""
        comm = self._setting.comms.replica
        agree_on_state(comm, replica.parts)
        self._segment, homes = self._memory([(p, p.dtype) for _, p in named])
        for home, (_, parameter) in zip(homes, named, strict=True):
            if comm.rank == 0:
                home.copy_(parameter.data)
            parameter.data = home
        self._segment.meet("the initial parameters")
        give_back()
        spread(comm, [slot.get() for slot in buffers(replica.parts)], "initial buffers")
        # What is not trained costs no update, but must be somebody's to save.
        owner = owners([p.nbytes * p.requires_grad for _, p in named], comm.size)
        self._owned = [entry for entry, rank in zip(named, owner, strict=True) if rank == comm.rank]
        self._owners = [rank for (_, p), rank in zip(named, owner, strict=True) if p.requires_grad]

    def _memory(self, wanted: Sequence[tuple[Tensor, torch.dtype]]) -> tuple[Segment, list[Tensor]]:
        """Tensors like these, of these types, in shared memory. Raises UsageError on all ranks where it cannot be had.

        Collective.
        """
        comm = self._setting.comms.replica
        hosts = dict.fromkeys(comm.texts(socket.gethostname(), "names of the hosts"))
        if len(hosts) > 1:
            raise UsageError(
                f"central_storage is for one host, and these ranks are on {', '.join(hosts)}",
                why="all devices compute from one copy of the parameters in its memory",
                remedy="take --strategy mirrored, or the devices of one host",
            )
        starts = [0]
        for tensor, dtype in wanted:
            starts.append(starts[-1] + -(-tensor.numel() * dtype.itemsize // _ALIGN) * _ALIGN)
        segment = attach(comm, -(-starts[-1] // comm.size))
        if segment is None:
            raise _no_memory(starts[-1])
        placed = zip(starts, wanted, strict=False)
        return segment, [_like(segment.part(start, t.numel(), dtype), t) for start, (t, dtype) in placed]

    def _make_reducer(self, named: Named) -> Reducer:
        setting = self._setting
        if setting.reproducible or setting.spread:
            return TreeReducer(named, setting)
        if setting.comms.replica.size == 1:
            return OverlappedReducer(named, setting, "fp32", 1)
        shared = attach_shared(named, setting, owners=self._owners)
        if shared is None:
            raise _no_memory(setting.comms.replica.size * sum(p.nbytes for _, p in named if p.requires_grad))
        return shared

    def _all_finite(self) -> bool:
        """Of all slices; the norm is the same on every rank, so that all come here or none."""
        finite = torch.tensor([float(super()._all_finite())])
        comm = self._setting.comms.replica
        comm.all_reduce(finite, "whose slice of the gradient is finite")
        return int(finite) == comm.size

    def _culprits(self) -> tuple[str, ...]:
        return culprits(self._setting.comms.replica, self._named)


class CentralAverage(Average):
    """The average of the weights in central memory; each rank takes in its own slice.

    Args:
        segment: the memory.
        values: the average of every trained parameter, in it.
        owned: this rank's parameters.
    """

    def __init__(
        self,
        replica: Replica,
        averaging: Averaging,
        setting: Setting,
        segment: Segment,
        values: Mapping[str, Tensor],
        owned: Named,
    ) -> None:
        super().__init__(replica, averaging, setting, {name for name, p in owned if p.requires_grad})
        self._segment, self._whole = segment, values
        for name, begun in zip(self._names, self._values, strict=True):
            values[name].copy_(begun)
        self._values = [values[name] for name in self._names]

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As ``Average.within``. Collective: all slices must have been written."""
        self._segment.meet("the average of the weights")
        return {**merged, **self._whole}

    def state(self) -> dict[str, dict[str, Tensor | Piece]]:
        return {"ema": dict(zip(self._names, self._values, strict=True))}


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """``flat`` in the shape of the parameter, and in its layout where that leaves no gaps."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return flat.as_strided(parameter.shape, parameter.stride()) if dense else flat.view(parameter.shape)


def _no_memory(size: int) -> UsageError:
    return UsageError(
        f"these ranks cannot share {size / 2**20:.0f} MiB of memory",
        why="/dev/shm has too little room or is not there, or the processor is not x86-64",
        remedy="make /dev/shm larger (docker run --shm-size), or take --strategy mirrored",
    )
