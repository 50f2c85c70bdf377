"""What every layout's replica has in common: modules on this rank whose gradients are reported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from tutti.nn.draws import Draws, keyed
from tutti.nn.forwards import restore, transform
from tutti.nn.spill import settle
from tutti.nn.swap import Slot, buffers, mode, other_names, parameters, swapped
from tutti.nn.sync import SyncBatchNorm, peers_of
from tutti.types import Cell, GradSink, Setting, ShardSpec


class Part:
    """The modules of one replica that live on this rank, each tensor of them whole.

    Attributes:
        parts: the modules.
        specs: where each parameter and persistent buffer sits in the plain model.
        borrowed: names of those that another rank of this replica accounts for.
        sharded: rows of those of which an exchange leaves no more here.
        holding: how other values are put in for a while.
        draws: the random streams of these modules.
        peers: what batch norms over several devices share; None where there are none.
        said: what the run's header says of how the replica lives here.
    """

    def __init__(
        self, module: nn.Module, setting: Setting, *, others: Sequence[nn.Module] = (), plain: nn.Module | None = None
    ) -> None:
        """``others``: further parts; ``plain``: the whole model, where the parts are not all of it."""
        device = setting.comms.world.device
        restore(module)
        self.parts: Sequence[nn.Module] = (module, *others)
        for part in self.parts:
            _move(part, device, parameters=not setting.rows)
        settle(self.parts, trained=not setting.rows)
        tied = other_names(self.parts if plain is None else [plain])
        state = {name: p.data for name, p in parameters(self.parts)}
        state |= {slot.name: slot.get() for slot in buffers(self.parts)}
        self.specs: Mapping[str, ShardSpec] = {
            name: ShardSpec(tuple(tensor.shape), (0,) * tensor.dim(), tied.get(name, ()))
            for name, tensor in state.items()
        }
        self.borrowed: Collection[str] = ()
        self.sharded: Mapping[str, Tensor] = {}
        self.holding: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
        self.holding = lambda values: swapped(self.parts, values)
        here = {inner for part in self.parts for inner in part.modules()}
        chosen = {name: inner for name, inner in keyed(plain or module).items() if inner in here}
        self.draws = Draws(module, device, setting.draws, chosen)
        self.peers = next((found for part in self.parts if (found := peers_of(part)) is not None), None)
        self.said: Mapping[str, str] = {}
        self._kept: list[tuple[Slot, Tensor]] = []
        for part in self.parts:
            transform(part, self.draws, setting)

    def enter(self, cell: Cell, before: Mapping[str, int] | None = None) -> None:
        """Enter a cell's random stream; ``before``: calls of modules in it that other parts have made."""
        self.draws.enter(cell.key, before)
        if self.peers is not None:
            self.peers.counts = cell.samples > 0
        if not cell.samples:
            own = [slot for slot in buffers(self.parts) if not isinstance(slot.owner, SyncBatchNorm)]
            self._kept = [(slot, slot.get().clone()) for slot in own]

    def forget(self) -> None:
        """A stand-in leaves no trace: no gradient, and no buffer but what all ranks' batch norms have in common."""
        for slot, tensor in self._kept:
            slot.put(tensor)
        # Where forwards gather weights a stand-in is one of several cells, and its gradient is zero.
        if not self.sharded:
            for _, parameter in parameters(self.parts):
                parameter.grad = None

    def connect(self, sink: GradSink) -> None:
        """Autograd reports each parameter's gradient when it has been accumulated."""
        for _, parameter in parameters(self.parts):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(sink.ready)

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Nothing here knows parameters by their objects."""

    @contextmanager
    def evaluating(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the modules hold ``values``, do not train and record nothing."""
        with torch.no_grad(), mode(self.parts, training=False), self.holding(values):
            yield


def _move(part: nn.Module, device: torch.device, parameters: bool) -> None:
    """Its buffers, and ``parameters``, to the device."""
    if parameters:
        part.to(device)
        return
    for slot in buffers([part], persistent=False):
        slot.put(slot.get().to(device))
