"""One copy of parameters and optimizer state in the shared memory of a node; all its ranks compute from it.

The parameters of every process are views of one block of shared memory. Each rank owns whole tensors, evenly by size:
it sums their gradients, keeps their optimizer state and writes them. Memory a node: parameters and optimizer state
once, gradients once a rank. Three barriers a step; the last one follows all writes, so that no rank reads a partly
updated parameter. Sharded optimizer state: Rajbhandari et al. 2020, arXiv 1910.02054, §5.1.

On accelerators each rank computes with a copy on its device: gradients are copied to shared memory, the owners update
the parameters on the host, and every rank copies them back (``HostParameters``). The device needs memory for the
parameters and for the gradients of backward, and none for optimizer state and average.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import load_optimizer, mine_of, optimizer_tensors, read_local
from tutti.comm.broadcast import broadcast_tensors
from tutti.comm.partition import owners
from tutti.comm.shared_memory import SharedMemorySegment, attach
from tutti.config.averaging import Averaging
from tutti.config.sync_config import AllReduceConfig, CentralConfig
from tutti.device import is_accelerator
from tutti.errors import UsageError, script_line
from tutti.launcher.malloc_tuning import give_back
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.script_edits import EditWatch
from tutti.nn.script_mode import ScriptMode
from tutti.nn.swap import buffers, parameters
from tutti.optim.mixing import needs_closure
from tutti.optim.mixing_rules import agreed_mixing, refuse_exchanges, refuse_parts
from tutti.parallel.ddp.allreduce import AllReduceSync
from tutti.parallel.ddp.host_parameters import HostParameters
from tutti.parallel.ddp.optimizer_step import gather_nonfinite_names
from tutti.parallel.ddp.reducers import OverlappedReducer, Reducer, TreeReducer
from tutti.parallel.ddp.shared_memory_reducer import SharedReducer, attach_shared
from tutti.parallel.ddp.sync_module_states import agree_on_state
from tutti.parallel.ddp.write_guard import WriteGuard
from tutti.parallel.parameter_average import ParameterAverage, wide_type
from tutti.parallel.whole_tensors import WholeTensors
from tutti.types.gradient_sync import OwnGradients, UpdatedSlice
from tutti.types.optimizer_protocols import NamedParameters, OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice
from tutti.types.step_records import StepContext, StepStats, UpdateResult

_ALIGN = 64


class CentralStorageSync(AllReduceSync):
    """Data parallelism with one copy of the parameters, in the shared memory of a node (strategy ``central_storage``).

    Every rank computes from this copy. Each rank owns whole tensors, evenly by size: it sums their gradients, keeps
    their optimizer state and updates them. On accelerators each rank computes with a copy on its device, and the update
    is made in host memory. The object is also the hook that autograd calls for each complete gradient.

    Args:
        config: options of the strategy, of which there are none.
        run_context: communicators and settings of the run.

    Attributes:
        gradient_ready: called with a parameter whose gradient backward has completed: starts to copy it to shared
            memory. Set by ``attach``, and anew by ``begin_custom_loop``.
        shares_parameters: whether other ranks write into the memory of this rank's parameters: True after ``attach`` on
            several CPU ranks.
    """

    _updates_on_device = False

    def __init__(self, config: CentralConfig, run_context: RunContext) -> None:
        super().__init__(AllReduceConfig(), run_context)
        self._guard = WriteGuard(
            "all ranks compute from one copy of the parameters, and each of them has made the script's change to it"
        )
        self._received: dict[nn.Parameter, Tensor] | None = None

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Move all parameters into the node's shared memory, and build an optimizer of those owned by this rank.

        All ranks compute from this one copy, which starts with data rank 0's values. Every tensor has one owner, the
        rank that updates it; ownership is even by size. On accelerators each rank computes with a copy on its device.
        Collective over all ranks: they all-gather host names and digests of their models, allocate the shared memory
        together, and receive data rank 0's buffers by broadcast.

        Args:
            replica: runs forward and backward of the model on this rank; its parameters are moved in place.
            make_optimizer: called with a list of (name, parameter) of the parameters that this rank owns, which are in
                host memory meanwhile; returns the optimizer, or None where there is nothing to train.

        Returns:
            This object itself, which is also the gradient-ready hook. With several ranks, ``attach`` has registered its
            ``gradient_ready`` as post-accumulate-grad hook of the parameters, to copy gradients to shared memory during
            backward. There is no such hook where the gradients of logical workers (fixed shares of the global batch)
            are summed in a fixed order, because this sum begins after backward.

        Raises:
            UsageError: the ranks are on several hosts or cannot share memory; the optimizer needs tensors of several
                owners together; a trial step of the optimizer draws from PyTorch's global random generator; or, on
                accelerators, the optimizer needs a closure.
            MismatchError: ranks hold models with different parameters or buffers.
            PeerError: a rank is lost, or does not take part within the timeout.
        """

        def make(named: NamedParameters) -> Optimizer | None:
            with self._updating():
                return make_optimizer(self._owned)

        grad_hook = super().attach(replica, make)
        self.shares_parameters = self._host is None and self._run_context.comms.replica.size > 1
        self._guard.note(self._guarded)
        if self.shares_parameters and not has_compiled_code(replica.parts, self._run_context):
            # Writes of several ranks to the one copy may undo each other, and leave no trace in it.
            mode = ScriptMode(watch := EditWatch())
            mode.leave_forwards(replica.parts)
            watch.edits.cover(dict(parameters(replica.parts)))
            replica.script_code, replica.model_code, replica.edits = mode.script_code, mode.model_code, watch.edits
        return grad_hook

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Sum the ranks' gradients and loss sums, and divide the gradients by the global count of samples or tokens.

        All ranks of the node share one copy of the parameters, each of which one rank owns (updates). Each rank
        receives the summed gradients of the parameters that it owns, and all sparse gradients. In a custom training
        loop, and where the gradients of logical workers (fixed shares of the global batch) are summed in a fixed order,
        each rank receives the summed gradients of all parameters. Collective over the data ranks, by barriers around
        sums in shared memory (for the fixed order by all-to-alls and all-gathers); blocks until all of them call it.

        Args:
            step_context: the step under way: its loss scale, by which the gradients are divided, and its number, batch
                size and settings, which the ranks compare.

        Returns:
            A ``StepStats``, equal on all ranks, with the attributes ``loss`` and ``metrics`` (by name), means over the
            global batch; ``count`` (samples or tokens); ``grad_norm``, the L2 norm of the whole gradient before
            clipping; ``finite``, whether the gradient is finite; and ``stop``, whether a rank asks to stop.

        Raises:
            UsageError: in one of three cases. There are several ranks, and the script has written parameters since the
                last update, has assigned their ``.data``, or has edited gradients on some ranks only. This rank
                computes several logical workers, each with buffers of its own, on an accelerator, and the script has
                written a buffer that forwards write too, other than by a reset to zeros, or to ones for a variance. Or
                a gradient is sparse, and no module that holds the parameter has an attribute ``sparse`` that is True.
            MismatchError: ranks are in different steps, hold different parameters, or differ in batch size or settings.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        written: Sequence[str] | None = None
        if self._host is None or not isinstance(self._reducer, SharedReducer):
            stats = super().reduce_gradients(step_context)
        else:
            # Before the host's tensors take the place of what the script may have assigned to ``.data``.
            written = self._guard.written(self._guarded)
            with self._host.receiving() as received:
                stats = super().reduce_gradients(step_context)
            self._received = None if self._has_custom_loop else received
            for parameter, gradient in received.items() if self._has_custom_loop else ():
                parameter.grad = gradient.to(parameter.device)
        if self._run_context.comms.replica.size > 1:
            # In shared memory other ranks may have written until the exchange.
            found = self._guard.written(self._guarded) if written is None else written
            self._guard.refuse_written(found, self._guarded, f"step {step_context.local_step + 1}")
        if self.shares_parameters:
            self._check_homes(step_context.local_step + 1)
        return stats

    def _check_homes(self, step: int) -> None:
        """Raise UsageError if a parameter is no longer in the memory that all ranks share."""
        for name, parameter in self._named:
            if parameter.numel() and parameter.data_ptr() != self._homes[name].data_ptr():
                raise UsageError(
                    f"the script has assigned the .data of {name}",
                    where=f"step {step}",
                    why="all ranks compute from one copy of the parameters, and this rank would not see its updates",
                    remedy="restore the former .data before the next step, as after the evaluation of an average; put a"
                    " lasting change into the loss or the optimizer; or take strategy='mirrored'",
                )

    def _release(self) -> None:
        if self._host is None or not self._has_custom_loop:
            # Of sums on the host each rank makes copies on its device in a custom loop.
            super()._release()

    def _complete(self, optimizer: Optimizer | None) -> WholeTensors | None:
        """Return None: no tensor is split.

        Raises:
            UsageError: the optimizer needs all tensors on one rank, or a closure, which computes on the device; or its
                step calls collectives.
        """
        mixing = agreed_mixing(optimizer, self._run_context)
        refuse_exchanges(optimizer, mixing)
        if self._host is not None and optimizer is not None and needs_closure(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} needs a closure, which central_storage cannot give it on accelerators",
                why="the parameters are in host memory during an update, and a forward needs them on the device",
                remedy="take strategy='mirrored', or the device cpu",
            )
        refuse_parts(optimizer, mixing, self._run_context.comms.replica.size, "ranks that own tensors")
        return None

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Clip the gradients, step the optimizer on the parameters that this rank owns, and wait for all ranks.

        All ranks of a node share one copy of the parameters in the node's memory; every parameter has one owner, the
        rank that updates it. Gradients are scaled so that the norm of the whole gradient is at most the run's clipping
        norm, if the run has one. Then each rank steps its optimizer, on accelerators in host memory. Collective over
        the data ranks: after a barrier all ranks see the updates of all owners; on accelerators each rank then copies
        all parameters to its device. Where the gradient is not finite no rank updates, and the ranks all-gather the
        names of the parameters concerned.

        Args:
            stats: result of ``reduce_gradients`` in this step: norm of the gradient, and whether the gradient is
                finite.
            step_context: the step under way, with the factor on the initial learning rate.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 if the gradient was not finite; then ``skipped`` is True, and
            ``nonfinite`` has the names of parameters whose gradient is not finite (at most three from each rank).

        Raises:
            UsageError: in a custom training loop on several ranks, the script has written parameters since its
                backward; or the optimizer does not take sparse gradients.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        if self._has_custom_loop and self._run_context.comms.replica.size > 1:
            self._guard.check_update(self._guarded, f"step {step_context.local_step + 1}")
        updated = super().optimizer_step(stats, step_context)
        if self._host is None:
            self._guard.note(self._guarded)
        self._segment.barrier(f"update of the parameters in step {step_context.local_step + 1}")
        self._fetch()
        return updated

    def _updating(self) -> AbstractContextManager[None]:
        """Return a context in which this rank's own parameters and their gradients are in host memory."""
        if self._host is None:
            return nullcontext()
        own = [p for _, p in self._owned]
        if self._run_context.comms.replica.size == 1:
            # The script may have written to them; on several ranks such a write is refused.
            self._host.send(own)
        return self._host.on_host(own, self._received)

    def _fetch(self) -> None:
        """Copy the updated parameters to the device, once all ranks have written them."""
        if self._host is not None:
            self._host.fetch()
            self._guard.note(self._guarded)

    @property
    def _guarded(self) -> NamedParameters:
        """Parameters whose writes by the script are noticed: on a device every rank has a copy of all of them."""
        return self._owned if self._host is None else self._named

    def clear(self) -> None:
        """Set the ``.grad`` of all trained parameters on this rank to None, after an update. Not collective.

        On accelerators also drop the summed gradients that ``reduce_gradients`` has left in host memory.
        """
        super().clear()
        self._received = None

    def adopt(self, optimizer: Optimizer) -> None:
        """Raise UsageError in a run of several ranks, because the script has changed an optimizer's parameters.

        Called after the script has added parameters to the optimizer's groups or taken some out. With one rank this
        does nothing, and the optimizer keeps the change. With several ranks each one's optimizer has a fixed part of
        the parameters, so that the change cannot be made.

        Args:
            optimizer: the script's optimizer; unused.

        Raises:
            UsageError: there are several ranks.
        """
        if self._run_context.comms.replica.size > 1:
            raise UsageError(
                "the script has changed which parameters the optimizer has",
                why="ranks share out the optimizer's parameters in tutti.prepare",
                remedy="add or take away parameters before tutti.prepare; to stop training one freeze it"
                " (requires_grad_(False)), or take strategy='mirrored'",
            )

    def own_gradients(self) -> OwnGradients:
        """Return the parameters whose ``.grad`` holds this rank's gradients before they are summed over the ranks.

        The gradient noise scale is measured with these gradients. Not collective.

        Returns:
            An ``OwnGradients``, whose ``parameters`` is a list of the trained parameters. On CPUs ``optimizers`` has
            the optimizer that updates these parameters, and on several ranks ``slices`` returns the parameters that
            this rank owns. On accelerators, whose optimizer state is in host memory, ``optimizers`` is empty.
        """
        if self._host is not None:
            return OwnGradients(self._counted())
        if self._run_context.comms.replica.size == 1:
            return OwnGradients(self._counted(), optimizers=self.optimizers)
        names = {p: name for name, p in self._named}
        counted = self._counted()
        return OwnGradients(
            counted, optimizers=self.optimizers, names=[names[p] for p in counted], slices=self._updated_slices
        )

    def _updated_slices(self) -> list[UpdatedSlice]:
        return [UpdatedSlice(name, p, lambda tensor: tensor) for name, p in self._owned if p.requires_grad]

    def begin_custom_loop(self) -> None:
        """Let ``reduce_gradients`` give every rank the summed gradients of all parameters from now on.

        Every parameter has one owner, the rank that updates it; without this call a rank receives only the gradients of
        the parameters that it owns. Called before the first step of a script's own training loop, which may read all
        gradients. The first call is collective over the data ranks, which allocate shared memory for another reducer of
        gradients. Later calls are not collective; ranks receive all gradients also after ``leave_custom_loop``.

        Each call also changes the rule for module buffers that the script writes (``AllReduceSync.begin_custom_loop``):
        until ``leave_custom_loop`` the value becomes that of the rank's last logical worker alone, and not of all.

        Raises:
            UsageError: the shared memory has no room.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        begun = self._has_custom_loop
        super().begin_custom_loop()
        if not begun:
            self._reducer = self._new_reducer()
            self.gradient_ready = self._reducer.gradient_ready
            if self._reducer.listens:
                self._replica.connect(self)

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer.step()`` on this rank updates all of the optimizer's parameters.

        True only on a single CPU rank, where the update needs nothing but the optimizer's own step. With several ranks
        each updates the parameters that it owns; on accelerators the update is made in host memory.

        Args:
            optimizer: any optimizer; the result is False for one that this strategy has not built.
        """
        return self._host is None and self._run_context.comms.replica.size == 1 and super().steps_whole(optimizer)

    def state(self) -> dict[str, Mapping[str, Tensor | TensorSlice]]:
        """Return this rank's part of a checkpoint by group: ``model``, ``optim`` and ``workers``.

        All ranks of the node share one copy of the parameters; every parameter has one owner, the rank that updates it.
        Collective over the data ranks: an all-gather of the buffers of all logical workers.

        Returns:
            Three groups, each a mapping from names to tensors: ``model`` has the parameters that this rank owns and
            some of the merged buffers, which are shared out over the ranks, by names in the model; ``optim`` has the
            optimizer state of the owned parameters under ``"{parameter name}/{state key}"``; ``workers`` has the
            buffers of each logical worker (share of the global batch with its own buffers) on this rank under ``"{index
            of the worker}/{buffer name}"``, and is empty for a single worker. Parameters and optimizer state are not
            copied: this rank changes them in its next ``optimizer_step``.

        Raises:
            UsageError: this rank computes several logical workers, and the script has written a buffer that forwards
                write too, other than by a reset to zeros, or to ones for a variance: each worker has its own value of
                it.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm = self._run_context.comms.replica
        with self._updating():
            own = {name: p.data for name, p in self._owned}
        return {
            "model": {**own, **mine_of(self._buffers.merged(), comm.rank, comm.size)},
            "optim": optimizer_tensors(self._optimizer, self._owned) if self._optimizer else {},
            "workers": self._buffers.state(),
        }

    def merged(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the trained model, merged over logical workers, for an evaluation.

        All ranks of the node share one copy of the parameters. Of the buffers, which each logical worker (fixed share
        of the global batch) has for itself, batch-norm statistics are pooled over all workers, other floating-point
        buffers averaged, and of integers the largest is taken. Collective over the data ranks: with several CPU ranks a
        barrier and an all-gather of the names of parameters that the script has written, and with several workers an
        all-gather of their buffers for each dtype.

        Returns:
            A dict from names in the model to tensors. Parameters share memory with the model's own, which the next
            update changes. Buffers are new tensors, or for a single worker the model's own.

        Raises:
            UsageError: with several CPU ranks, the script has written parameters in place since the last update, for
                example with averages of the weights, to evaluate them; or this rank computes several workers, and the
                script has written a buffer that forwards write too, other than by a reset to zeros, or to ones for a
                variance.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        comm = self._run_context.comms.replica
        if self.shares_parameters:
            # What a script has assigned to ``.data`` is memory of this rank alone.
            self._segment.barrier("the script's writes of parameters")
            mine = self._guard.written([(name, self._homes[name]) for name, _ in self._owned])[:1]
            written = next(filter(None, comm.all_gather_strings("".join(mine), "parameters that a script wrote")), None)
            if written is not None:
                raise UsageError(
                    f"the script has written the parameter {written} outside of optimizer.step()",
                    where=script_line(),
                    why="all ranks share one copy of the parameters, and each reads and writes it at its own time: one"
                    " may have read what another had written",
                    remedy="to evaluate an average, give tutti.prepare ema=…, or assign p.data, which is this rank's"
                    " own (p.data = average; later p.data = kept); or take strategy='mirrored'",
                )
        return super().merged()

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of the model of which all ranks must see the same values. Not collective.

        The caller compares digests of the tensors over ranks.

        Returns:
            A mapping from names to the model's own tensors: all parameters, and the buffers if the run has a single
            logical worker (share of the global batch with its own buffers); never None under central storage.

        Raises:
            UsageError: there are several ranks, and the script has written parameters since the last update.
        """
        if self._run_context.comms.replica.size > 1:
            self._guard.check(self._guarded, "after the last step")
        return super().replicated()

    def load(self, saved: SavedState) -> None:
        """Restore parameters, optimizer state and buffers from a checkpoint, in place.

        All ranks of the node compute from one copy of the parameters. Each rank restores the parameters that it owns,
        with their optimizer state, and the buffers of its logical workers (fixed shares of the global batch).
        Collective over the data ranks: a barrier after the writes, after which all ranks read all restored parameters;
        on accelerators each rank copies them to its device.

        Args:
            saved: the checkpoint, with the groups ``model``, ``optim`` and ``workers``.

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it differs from its manifest.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        with self._updating():
            for name, parameter in self._owned:
                parameter.data.copy_(read_local(saved, "model", name, self._replica, parameter.shape))
            if self._optimizer:
                load_optimizer(self._optimizer, self._owned, saved, "optim", specs=self._replica.specs)
        self._buffers.load(saved)
        if self._host is None:
            self._guard.note(self._guarded)
        self._segment.barrier("taking over of the saved state")
        self._fetch()

    def average(self, averaging: Averaging) -> ParameterAverage:
        """Create the moving average (EMA) of the trained parameters in shared memory, once for all ranks.

        Collective over the data ranks, which allocate the memory together.

        Args:
            averaging: decay and warm-up of the average.

        Returns:
            The average (a ``CentralAverage``, an object whose ``update()`` is to be called after each update of the
            parameters), which starts at the present values; each rank updates the averages of the parameters that it
            owns, whose optimizer state it has.

        Raises:
            UsageError: the shared memory has no room for another copy of the trained parameters (float32 for 16-bit
                ones); raised on all ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        trained = [(name, p) for name, p in self._named if p.requires_grad]
        segment, places = self._memory([(p, wide_type(p.dtype)) for _, p in trained])
        values = {name: place for (name, _), place in zip(trained, places, strict=True)}
        with self._updating():
            homes = {name: p.data for name, p in self._owned} if self._host is not None else {}
        return CentralAverage(self._replica, averaging, self._run_context, segment, values, self._owned, homes)

    def _unite(self, replica: ReplicaRunner, named: NamedParameters) -> None:
        """Move all parameters into shared memory with the first rank's values, and assign their owners. Collective."""
        comm = self._run_context.comms.replica
        agree_on_state(comm, replica.parts)
        self._segment, homes = self._memory([(p, p.dtype) for _, p in named])
        self._host: HostParameters | None = None
        for home, (_, parameter) in zip(homes, named, strict=True):
            if comm.rank == 0:
                home.copy_(parameter.data)
            if not is_accelerator(comm.device):
                parameter.data = home
        self._segment.barrier("the initial parameters")
        self._homes = {name: home for home, (name, _) in zip(homes, named, strict=True)}
        if is_accelerator(comm.device):
            self._host = HostParameters({p: home for home, (_, p) in zip(homes, named, strict=True)})
        give_back()
        broadcast_tensors(comm, [slot.get() for slot in buffers(replica.parts)], "initial buffers")
        # Frozen parameters cost no update (size 0), but need an owner that saves them.
        self._owner = owners([p.nbytes * p.requires_grad for _, p in named], comm.size)
        self._owned = [entry for entry, rank in zip(named, self._owner, strict=True) if rank == comm.rank]

    def _memory(self, wanted: Sequence[tuple[Tensor, torch.dtype]]) -> tuple[SharedMemorySegment, list[Tensor]]:
        """Allocate tensors in shared memory, each like a given tensor but of the given dtype. Collective.

        Raises:
            UsageError: on all ranks, where they are on several nodes or cannot share memory.
        """
        comm = self._run_context.comms.replica
        hosts = dict.fromkeys(comm.all_gather_strings(socket.gethostname(), "names of the hosts"))
        if len(hosts) > 1:
            raise UsageError(
                f"central_storage is for one node, and these ranks are on {', '.join(hosts)}",
                why="all devices compute from one copy of the parameters in its memory",
                remedy="take strategy='mirrored', or the devices of one node",
            )
        starts = [0]
        for tensor, dtype in wanted:
            starts.append(starts[-1] + -(-tensor.numel() * dtype.itemsize // _ALIGN) * _ALIGN)
        segment = attach(comm, -(-starts[-1] // comm.size))
        if segment is None:
            raise _no_memory(starts[-1])
        placed = zip(starts, wanted, strict=False)
        return segment, [_like(segment.part(start, t.numel(), dtype), t) for start, (t, dtype) in placed]

    def _make_reducer(self, named: NamedParameters) -> Reducer:
        run_context = self._run_context
        if run_context.reproducible or run_context.gradient_variance:
            return TreeReducer(named, run_context)
        if run_context.comms.replica.size == 1:
            return OverlappedReducer(named, run_context, "fp32", 1)
        if not any(p.requires_grad for _, p in named):
            return OverlappedReducer(named, run_context, "fp32", 1)
        owner = {name: rank for (name, _), rank in zip(self._named, self._owner, strict=True)}
        mine = [owner[name] for name, p in named if p.requires_grad]
        shared = attach_shared(named, run_context, owners=None if self._has_custom_loop else mine, of_devices=True)
        if shared is None:
            raise _no_memory(run_context.comms.replica.size * sum(p.nbytes for _, p in named if p.requires_grad))
        return shared

    def _all_finite(self) -> bool:
        """Return whether the gradients of all owners are finite.

        Collective: an all-reduce. Every rank calls it, because all have the same norm.
        """
        finite = torch.tensor([float(super()._all_finite())])
        comm = self._run_context.comms.replica
        comm.all_reduce(finite, "whose slice of the gradient is finite")
        return int(finite) == comm.size

    def _nonfinite_names(self) -> tuple[str, ...]:
        with self._updating():
            return gather_nonfinite_names(self._run_context.comms.replica, self._named)


class CentralAverage(ParameterAverage):
    """Moving average (EMA) of the weights in a node's shared memory; each rank averages the parameters that it owns.

    Args:
        replica: the model on this rank, with its runner.
        averaging: decay and warm-up of the average.
        run_context: communicators and settings of the run.
        segment: the shared memory.
        values: tensors in it for the average of every trained parameter, by name.
        owned: (name, parameter) of the parameters that this rank owns.
        homes: tensors of these parameters in host memory, by name, where replicas compute on accelerators; else empty.
    """

    def __init__(
        self,
        replica: ReplicaRunner,
        averaging: Averaging,
        run_context: RunContext,
        segment: SharedMemorySegment,
        values: Mapping[str, Tensor],
        owned: NamedParameters,
        homes: Mapping[str, Tensor],
    ) -> None:
        super().__init__(replica, averaging, run_context, {name for name, p in owned if p.requires_grad})
        self._segment, self._whole, self._on_all_ranks = segment, values, values
        for name, begun in zip(self._names, self._values, strict=True):
            values[name].copy_(begun)
        self._values = [values[name] for name in self._names]
        self._parameters = [homes.get(name, p) for name, p in zip(self._names, self._parameters, strict=True)]

    def adopt(self, names: Collection[str]) -> None:
        """Raise UsageError: parameters that were frozen at the start cannot join the moving average later.

        The average (EMA) of the weights lies in the node's shared memory, which has no room for further parameters.

        Args:
            names: names of the parameters that the script has unfrozen, at least one.

        Raises:
            UsageError: always.
        """
        self._refuse(f"{next(iter(names))} is unfrozen after tutti.prepare, which")

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        self._refuse(f"the checkpoint has an average of {name}, which is frozen now. This")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} cannot be combined with ema= under central_storage",
            why="the average lives in shared memory, which was laid out for the parameters that were trained then",
            remedy="freeze after tutti.prepare, leave out ema, or take strategy='mirrored'",
        )

    def within(self, merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of ``merged`` in which all trained parameters are replaced by their moving averages.

        The averages of the weights (EMA) lie in the node's shared memory; each rank updates the averages of the
        parameters that it owns. Collective over the data ranks: a barrier, after which every rank has written its
        averages. Buffers and frozen parameters stay.

        Args:
            merged: parameters and buffers of the model by name.

        Returns:
            A new dict with the same names. An average is a copy on this rank's accelerator, or on the CPU the tensor in
            shared memory itself; all other tensors are those of ``merged``, not copied.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self._segment.barrier("the average of the weights")
        device = self._run_context.comms.world.device
        return {**merged, **{name: value.to(device) for name, value in self._whole.items()}}

    def state(self) -> dict[str, dict[str, Tensor | TensorSlice]]:
        """Return the moving averages of the weights (EMA) that this rank writes into a checkpoint.

        These are the averages of the parameters that this rank owns: each parameter has one rank that updates it. Not
        collective.

        Returns:
            ``{"ema": {name: tensor}}``, by the parameter's name in the model; the tensors are those in shared memory,
            not copies.
        """
        return {"ema": dict(zip(self._names, self._values, strict=True))}


def _like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return ``flat`` in the parameter's shape, and with its strides where these are dense."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return flat.as_strided(parameter.shape, parameter.stride()) if dense else flat.view(parameter.shape)


def _no_memory(size: int) -> UsageError:
    return UsageError(
        f"these ranks cannot share {size / 2**20:.0f} MiB of memory",
        why="/dev/shm has too little room or is not there, or the processor is not x86-64",
        remedy="make /dev/shm larger (docker run --shm-size), or take strategy='mirrored'",
    )
