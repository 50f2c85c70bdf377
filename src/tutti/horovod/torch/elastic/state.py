"""The state of a PyTorch script: models, optimizers, samplers, schedulers and plain attributes."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tutti.horovod.common.elastic import ObjectState
from tutti.horovod.torch import job, mpi_ops
from tutti.horovod.torch.elastic.sampler import ElasticSampler
from tutti.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from tutti.horovod.torch.optimizer import check_between_steps, trust_parameters


@runtime_checkable
class Stateful(Protocol):
    """Protocol of objects with ``state_dict`` and ``load_state_dict``, such as a scheduler or a ``GradScaler``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state as a dict of plain values and tensors, as PyTorch's ``state_dict`` methods do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the object's state from a dict that ``state_dict`` returned, on this or another rank."""


class StateHandler:
    """Saves, restores and synchronises one object of the state of an elastic job by the object's ``state_dict``.

    A ``TorchState`` has a handler for each such object.

    Args:
        value: object with ``state_dict`` and ``load_state_dict``, whose state is saved at once.
    """

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def set_value(self, value: Any) -> None:
        """Replace the object whose state this handler saves, restores and synchronises; save the new object's state.

        Args:
            value: the new object, with ``state_dict`` and ``load_state_dict``.
        """
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a deep copy of the ``state_dict`` of this handler's object, such as a scheduler, on this rank."""
        self._saved: Any = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the ``state_dict`` that the last ``save`` has copied into this handler's object, on this rank."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load rank 0's ``state_dict`` into this handler's object, such as a scheduler, on every rank.

        Collective over all ranks: a broadcast of the ``state_dict``; blocks. The copy of the last ``save`` stays.

        Raises:
            ValueError: rank 0's ``state_dict`` has a part that cannot be sent; every rank's error names its type.
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def skip_sync(self) -> None:
        """Exchange the parts of this handler's object that differ between ranks, after hosts were merely removed.

        ``TorchState.skip_sync`` calls this method, in place of ``sync``. Does nothing here: the state of models,
        optimizers and schedulers is equal on all ranks. A handler overrides it if its object's state differs between
        ranks, as that of a sampler does.
        """


class ModelStateHandler(StateHandler):
    """Saves, restores and synchronises a model's parameters and persistent buffers in the state of an elastic job."""

    def sync(self) -> None:
        """Broadcast the parameters and persistent buffers of this handler's model, in place, from rank 0.

        Collective over all ranks: one broadcast for each device type; blocks. The copy of the last ``save`` stays.

        Raises:
            HorovodInternalError: names, shapes or dtypes differ between ranks, or a rank is lost.
        """
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Saves, restores and synchronises the state and options of an optimizer in the state of an elastic job.

    Gradients are no part of the state: ``restore`` clears them.
    """

    def set_value(self, value: Any) -> None:
        """Replace the optimizer whose state this handler saves, restores and synchronises; save the new one's state.

        Args:
            value: the new optimizer, wrapped by ``DistributedOptimizer`` or not.
        """
        trust_parameters(value)
        super().set_value(value)

    def restore(self) -> None:
        """Load the copy of the last ``save`` into this handler's optimizer, and clear the gradients of the failed step.

        Reductions of gradients that are under way are dropped.
        """
        super().restore()
        self.value.zero_grad()

    def sync(self) -> None:
        """Load rank 0's state and options into this handler's optimizer on every rank.

        Collective over all ranks: broadcasts the ``state_dict`` of rank 0; blocks. If the optimizer has no state yet,
        gradients that are None become zeros, as in Horovod. The copy of the last ``save`` stays.

        Raises:
            ValueError: the optimizer is L-BFGS, or rank 0's state of it holds objects that cannot be sent.
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Saves, restores and synchronises the epoch and processed samples of an ``ElasticSampler`` of an elastic job."""

    _restored = False

    def save(self) -> None:
        """Keep a copy of an elastic sampler's epoch and processed samples in memory, on this rank."""
        self._saved, self._whole = self.value.snapshot(), not self.value.unshared()
        self._restored = False

    def restore(self) -> None:
        """Set an elastic sampler's epoch and processed samples back to the last ``save``, on this rank.

        The remaining samples are divided anew over the ranks at the next ``sync``.
        """
        self.value.return_to(self._saved)
        self._restored = True

    def gather(self) -> None:
        """All-gather the ranks' new records of processed samples, so that each rank has the records of all ranks.

        If a rank is lost later, its records are then not lost with it. Records of ranks in another epoch than this rank
        are left out. Collective over all ranks: one all-gather; blocks.

        Raises:
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        sampler: ElasticSampler = self.value
        found = allgather_object([sampler.epoch, sampler.unshared()])
        sampler.share(itertools.chain.from_iterable(done for epoch, done in found if epoch == sampler.epoch))

    def sync(self) -> None:
        """Merge the ranks' records of processed samples, take rank 0's epoch, and divide the remaining samples anew.

        Collective over all ranks: all-gathers the ranks' epochs, then their records; blocks. Ranks in another epoch
        than rank 0 add no records. If rank 0 has restored a copy of the last commit, only its records count, because
        the commit has merged the records of all ranks.

        Raises:
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        sampler: ElasticSampler = self.value
        found = allgather_object([sampler.epoch, self._restored and self._whole])
        epoch, alone = found[0]
        counts = sampler.epoch == epoch and (not alone or job.rank() == 0)
        mine = list(sampler.processed_indices) if counts else []
        done = mpi_ops.allgather(torch.tensor(mine, dtype=torch.int64))
        sampler.load_state_dict({"epoch": epoch, "processed_indices": done.tolist()})

    def skip_sync(self) -> None:
        """Merge the ranks' records of processed samples and divide the rest anew, after hosts were merely removed.

        Unlike models and optimizers, which are then equal on all ranks, each rank's sampler knows only the samples of
        its own rank. Collective over all ranks: all-gathers the ranks' epochs, then their records; blocks.

        Raises:
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        self.sync()


def get_handler(value: Any) -> StateHandler | None:
    """Return a new handler that saves, restores and synchronises ``value`` in the state of an elastic job.

    The type of ``value`` chooses the handler: there are handlers for modules, optimizers, ``ElasticSampler``, and other
    objects with ``state_dict`` and ``load_state_dict``. None for all others, such as numbers.
    """
    if isinstance(value, nn.Module):
        return ModelStateHandler(value)
    if isinstance(value, torch.optim.Optimizer):
        return OptimizerStateHandler(value)
    if isinstance(value, ElasticSampler):
        return SamplerStateHandler(value)
    return StateHandler(value) if isinstance(value, Stateful) else None


class TorchState(ObjectState):
    """State of a PyTorch script in an elastic job, as Horovod's: models, optimizers, samplers and plain values.

    ``commit`` keeps a copy in the memory of every rank, ``restore`` returns to it, and ``sync`` gives all ranks the
    state of rank 0. Each value is an attribute of this object. The constructor saves a copy of all values, without
    communication.

    Args:
        model: model, which becomes the attribute ``model``; it may be None.
        optimizer: optimizer, which becomes the attribute ``optimizer``; it may be None.
        kwargs: further attributes: models, optimizers, an ``ElasticSampler``, objects with a ``state_dict``, and plain
            values, such as numbers and texts.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in {**given, **kwargs}.items():
            handler = get_handler(value)
            if handler is None:
                plain[name] = value
            else:
                handlers[name] = handler
        self._handlers = handlers
        for name, handler in handlers.items():
            super().__setattr__(name, handler.value)
        super().__init__(broadcast_object, job.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_handlers" and (handler := self._handlers.get(name)) is not None and handler.value is not value:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Keep a copy of this elastic state's models, optimizers, samplers and other values in memory, on this rank.

        No communication, so that ranks that call this method at different steps keep copies of different steps;
        ``commit`` saves on all ranks or on none.
        """
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Set this elastic state's models, optimizers, samplers and other values back to this rank's last saved copy.

        The copy is the last one that ``save``, ``commit`` or ``sync`` made, or the constructor. No communication.
        """
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give all ranks of an elastic job rank 0's state, and samplers all ranks' records; then save the whole state.

        Collective over all ranks: broadcasts from rank 0 for each model, optimizer and other object with a
        ``state_dict``, two all-gathers for each sampler, then one broadcast of all plain values; blocks. Samplers
        divide their remaining samples anew.

        Raises:
            ValueError: a value of rank 0 has a type that cannot be sent; every rank's error names the type. Or the
                optimizer is L-BFGS.
            HorovodInternalError: the ranks' calls differ, or a rank is lost; the saved state is then still that of the
                last commit.
        """
        # The copies are made at the end: a collective that fails here leaves those of the last commit.
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def skip_sync(self) -> None:
        """Merge the ranks' records of processed samples, after hosts were merely removed; other state is equal already.

        Called in place of ``sync``. Collective over all ranks: two all-gathers for each sampler (epochs, records);
        blocks. Samplers divide their remaining samples anew. Nothing is saved.

        Raises:
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
        """
        for handler in self._handlers.values():
            handler.skip_sync()

    def commit(self) -> None:
        """Save an elastic job's whole state in memory on all ranks, or on none, then check for changed hosts.

        After a later failed collective the ranks restore this state. Collective over all ranks: an all-gather of each
        sampler's records of processed samples; a broadcast from rank 0, for which each rank waits before it saves; then
        a broadcast of rank 0's records of changed hosts. Blocks.

        Raises:
            ValueError: the call comes between a backward and its ``optimizer.step``; gradients are no part of the
                state.
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
            HostsUpdatedInterrupt: hosts have changed; on all ranks, after the state was saved.
        """
        self._check_between_steps()
        self._gather()
        self._bcast_object(None)
        self.save()
        self._commits += 1
        super().check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 has recorded a change of hosts since the last check.

        Collective over all ranks: an all-gather of each sampler's records of processed samples, then a broadcast of
        rank 0's records of changed hosts; blocks.

        Raises:
            HostsUpdatedInterrupt: hosts have changed; on all ranks.
            HorovodInternalError: the ranks' calls differ, or a rank is lost.
            ValueError: the call comes between a backward and its ``optimizer.step``.
        """
        self._check_between_steps()
        self._gather()
        super().check_host_updates()

    def _gather(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.gather()

    def _check_between_steps(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler, OptimizerStateHandler):
                check_between_steps(handler.value)
