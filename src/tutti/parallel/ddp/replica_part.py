"""Base class of replica runners: a replica's modules on this rank, their RNG streams, batch norm and gradient hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.nn.ac_and_compile import apply_ac_and_compile, restore_forwards
from tutti.nn.gradient_hooks import add_accumulation_hook
from tutti.nn.init_on_disk import load_spilled
from tutti.nn.rng_streams import RngStreams, keyed_modules
from tutti.nn.script_mode import modes_aside, modes_resumed
from tutti.nn.swap import BufferRef, buffers, other_names, parameters, swapped, training_mode
from tutti.nn.sync import SyncBatchNorm, peers_of
from tutti.parallel.ddp import loss_output
from tutti.torch_compat import engine_backward, function_modes_active
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.replica_runner import EditRecords, GradientReadyHook
from tutti.types.run_context import RunContext
from tutti.types.shard_spec import ShardSpec


class ReplicaPart:
    """The modules of one replica of the model that live on this rank, moved to its device, with unsplit tensors.

    Base class of replica runners, which run forward and backward. A model layout or gradient synchronisation that
    splits or shards parameters replaces those attributes that are functions; the functions for split and sharded
    parameters do nothing here.

    Attributes:
        parts: the modules.
        specs: global shape, offset and tied names of each parameter and persistent buffer, by its name in the plain
            model.
        not_owned: names of tensors that another rank of this replica saves and counts in norms.
        sharded: this rank's rows of parameters that FSDP2 shards, as plain tensors, by name; empty without FSDP2.
        swap_values: ``swap_values(values)`` returns a context in which parameters and buffers hold the tensors of
            ``values``, a mapping by name; the previous values come back on exit.
        around_fsdp_hooks: ``around_fsdp_hooks(module)`` returns a context for FSDP2's registration of its hooks on a
            module; it unwraps tensor subclasses that these hooks do not support.
        unify_flags: called without arguments; copies ``requires_grad``, as the script has set it on one of a
            parameter's objects, to all of them.
        replaced_name: called without arguments; returns the name of a sharded parameter that the script has replaced by
            another object, or None.
        plain: the module that a custom training loop calls: the whole model, also where this rank has a part of it.
        own_backward: whether ``run`` calls ``backward`` for each micro-batch: True.
        slice_name: ``slice_name(tensor)`` returns the name of the parameter from whose tensor-parallel slice the script
            has made the tensor, or None.
        also_seen: ``also_seen(objects)`` makes further tensors known to ``slice_name``; ``objects`` maps each to the
            parameter for which it stands.
        asks_sizes: called without arguments; returns whether a forward has asked for the size of a parameter of which
            this rank has a slice.
        adapt_hooks: called without arguments; makes hooks on the gradients of parameters of which this rank has a part
            receive whole gradients, and returns the names of the parameters whose hooks received partial gradients
            before the call.
        is_dummy: whether the micro-batch of the most recent ``enter`` is a dummy, without samples.
        passes: for each model that is cut into pipeline stages, its ``StagePasses``, which pass calls of the model
            through the stages; otherwise empty.
        split_backwards: one ``SplitBackward`` for each virtual stage of a zero-bubble pipeline schedule; empty for all
            other layouts.
        bubble: idle fraction, 0 to 1, of the pipeline schedule of the last training step; None without pipeline stages,
            and before the first step.
        around_stage: ``around_stage(stage, given)`` returns a context for the forward of a virtual pipeline stage with
            the tensors ``given``. The context's value is a function, which is called with the stage's results and may
            raise UsageError.
        draws: the RNG streams (``RngStreams``) of these modules.
        peers: state shared by the ``SyncBatchNorm`` modules; None without such modules or on a single device.
        script_code: called without arguments; returns a context for code of the script, in which reads and writes that
            would give each rank another result raise UsageError.
        model_code: called without arguments; returns a context for code of the model within ``script_code``, in which
            nothing is checked.
        run_backward: ``run_backward(objective, start, retain_graph)`` runs autograd from a loss tensor with a start
            gradient of the same shape; here PyTorch's engine without further checks.
        edits: records of the script's edits of parameters and gradients of which each rank has a part, or None.
        summary: entries for the run's header about this replica's layout, text by label.
    """

    own_backward = True

    def __init__(
        self,
        module: nn.Module,
        run_context: RunContext,
        *,
        others: Sequence[nn.Module] = (),
        plain: nn.Module | None = None,
    ) -> None:
        """Move the modules to the device, and apply activation checkpointing and ``torch.compile`` to them.

        Args:
            module: the first of the modules on this rank.
            run_context: communicators and settings of the run.
            others: further modules on this rank.
            plain: the whole model, where this rank holds only a part of it; None where it holds all.
        """
        device = run_context.comms.world.device
        restore_forwards(module)
        self.parts: Sequence[nn.Module] = (module, *others)
        self.plain = module if plain is None else plain
        for part in self.parts:
            _move(part, device, parameters=not run_context.shards_parameters)
        load_spilled(self.parts, trained=not run_context.shards_parameters)
        tied = other_names(self.parts if plain is None else [plain])
        state = {name: p.data for name, p in parameters(self.parts)}
        state |= {slot.name: slot.get() for slot in buffers(self.parts)}
        self.specs: Mapping[str, ShardSpec] = {
            name: ShardSpec(tuple(tensor.shape), (0,) * tensor.dim(), tied.get(name, ()))
            for name, tensor in state.items()
        }
        self.not_owned: Collection[str] = ()
        self.sharded: Mapping[str, Tensor] = {}
        self.swap_values: Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
        self.swap_values = lambda values: swapped(self.parts, values)
        self.around_fsdp_hooks: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: nullcontext()
        self.unify_flags: Callable[[], None] = lambda: None
        self.replaced_name: Callable[[], str | None] = lambda: None
        self.slice_name: Callable[[Tensor], str | None] = lambda tensor: None
        self.also_seen: Callable[[Mapping[nn.Parameter, nn.Parameter]], None] = lambda objects: None
        self.asks_sizes: Callable[[], bool] = lambda: False
        self.adapt_hooks: Callable[[], Sequence[str]] = lambda: ()
        self.passes: Sequence[Any] = ()
        self.split_backwards: Sequence[Any] = ()
        self.bubble: float | None = None
        self.around_stage: Callable[[int, Any], AbstractContextManager[Callable[[Any], None]]]
        self.around_stage = lambda stage, given: nullcontext(lambda result: None)
        here = {inner for part in self.parts for inner in part.modules()}
        chosen = {name: inner for name, inner in keyed_modules(plain or module).items() if inner in here}
        self.draws = RngStreams(module, device, run_context.draws, chosen, parted=run_context.comms.model.size > 1)
        self.peers = next((found for part in self.parts if (found := peers_of(part)) is not None), None)
        self.script_code: Callable[[], AbstractContextManager[None]] = modes_resumed
        self.model_code: Callable[[], AbstractContextManager[None]] = modes_aside
        self.run_backward = engine_backward
        self.edits: EditRecords | None = None
        self.summary: Mapping[str, str] = {}
        self.is_dummy = False
        self._kept: list[tuple[BufferRef, Tensor]] = []
        self._connected: list[Any] = []
        for part in self.parts:
            apply_ac_and_compile(part, self.draws, run_context)

    @property
    def stage_copies(self) -> Sequence[tuple[Communicator, Sequence[nn.Parameter]]]:
        """Trained parameters that several pipeline stages use, with the ranks that hold copies of them.

        Empty in this class; subclasses with pipeline stages return (communicator of these ranks, parameters) pairs.
        """
        return ()

    def enter(self, micro_batch: MicroBatch, before: Mapping[str, int] | None = None) -> None:
        """Seed the random number streams (dropout) of this rank's modules for one micro-batch, before its forward.

        For a dummy micro-batch (of no samples, which a rank computes because the forward is collective), the model has
        copies of its buffers until ``forget``.

        Args:
            micro_batch: the micro-batch; its key, a hash of seed, step, logical worker (share of the global batch) and
                micro-batch, seeds the streams.
            before: number of earlier calls of each module, by its name, in this micro-batch on other pipeline stages;
                None for none.
        """
        # Forwards that belong to no step, as of an evaluation, have key 0.
        slot = (micro_batch.worker, micro_batch.micro) if micro_batch.key else None
        self.draws.enter(micro_batch.key, before, slot)
        self.is_dummy = not micro_batch.samples
        if self.peers is not None:
            self.peers.counts = micro_batch.samples > 0
        if self.is_dummy:
            own = [buffer for buffer in buffers(self.parts) if not isinstance(buffer.owner, SyncBatchNorm)]
            self._kept = [(buffer, buffer.get()) for buffer in own]
            for buffer, tensor in self._kept:
                buffer.put(tensor.clone())

    def forget(self) -> None:
        """Undo a dummy micro-batch after its backward: restore the modules' buffers, and set gradients to None.

        A rank that has no samples of a global batch computes a single, dummy micro-batch, only to keep collectives
        aligned, so that no gradient of samples is lost. Buffers get the values that they had before the dummy's
        forward; buffers of ``SyncBatchNorm`` keep their new values, which are the same on all ranks. With FSDP2 the
        gradients stay: there a dummy micro-batch may follow others, to whose gradients it adds zero.
        """
        for slot, tensor in self._kept:
            slot.put(tensor)
        # With FSDP2 ``.grad`` also holds the gradients of other micro-batches, and a dummy micro-batch adds zero.
        if not self.sharded:
            for _, parameter in parameters(self.parts):
                parameter.grad = None

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run forward and, with a gradient-ready hook, backward of one logical worker's micro-batches.

        A logical worker is one of N fixed shares of the global batch. The loss function calls the whole model.
        Gradients are accumulated in ``.grad``. The call itself sends nothing, but forwards and backwards are
        collective: over the shard ranks with FSDP2, over the data ranks with ``SyncBatchNorm``.

        Args:
            micro_batches: the worker's micro-batches, in order; at least one.
            loss: the user's loss function ``loss_fn(model, batch)``, which returns a mean, ``(sum, count)`` or ``(sum,
                count, metric_sums)``.
            grad_hook: gradient-ready hook, whose ``prepare_for_backward`` is called before the worker's last backward;
                None for forwards only.

        Returns:
            A ``LossSums`` over the worker's micro-batches: the float tensor ``sums`` holds loss sum, count and metric
            sums in this order, ``names`` the names of the metrics, ``samples`` the number of samples.

        Raises:
            UsageError: the loss has an unknown form, requires no gradient although ``grad_hook`` is given, or cannot be
                added up over micro-batches.
            ValueError: ``micro_batches`` is empty.
        """
        total = None
        for micro_batch in micro_batches:
            self.begin(micro_batch)
            with self.script_code():
                result = loss(self.plain, micro_batch.batch)
            if grad_hook is not None:
                total = self.backward(result, micro_batch, total, grad_hook)
            else:
                part = loss_output.read_loss(result, micro_batch)[2]
                total = part if total is None else total + part
        if total is None:
            raise ValueError("run needs at least one micro-batch")
        return total

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seed the model's random number streams (dropout) for one micro-batch, before its forward.

        Custom training loops, in which the script itself calls the model, make this call before the script's forward.
        For a dummy micro-batch (of no samples, which a rank computes only to keep collectives aligned) the model has
        copies of its buffers until ``forget``, except those of ``SyncBatchNorm``.

        Args:
            micro_batch: the micro-batch; its key, a hash of seed, step, logical worker (share of the global batch) and
                micro-batch, seeds the streams.
        """
        self.enter(micro_batch)

    def backward(
        self,
        result: Any,
        micro_batch: MicroBatch,
        before: LossSums | None,
        grad_hook: GradientReadyHook,
        retain_graph: bool = False,
    ) -> LossSums:
        """Run backward of one micro-batch and accumulate its gradients in ``.grad``.

        A dummy micro-batch (without samples, which a rank computes only to keep collectives aligned) adds no gradient;
        its buffers are restored (``forget``). The call itself sends nothing, but backward is collective over the shard
        ranks with FSDP2 and over the data ranks with ``SyncBatchNorm``.

        Args:
            result: the loss function's result: a mean, ``(sum, count)`` or ``(sum, count, metric_sums)``.
            micro_batch: the micro-batch of the forward.
            before: loss sums of earlier micro-batches of the same logical worker (share of the global batch); None for
                the first.
            grad_hook: gradient-ready hook; its ``prepare_for_backward`` is called with the loss sums so far if this is
                the worker's last micro-batch.
            retain_graph: keep the autograd graph for another backward, as in ``Tensor.backward``.

        Returns:
            A ``LossSums`` of the worker so far, this micro-batch included; its float tensor ``sums`` holds loss sum,
            count and metric sums in this order.

        Raises:
            UsageError: the loss has an unknown form, requires no gradient, or cannot be added up over micro-batches; or
                the model has drawn random numbers where it must not (``SyncBatchNorm`` with several logical workers a
                rank).
        """
        self.draws.check()
        objective, start, part = self.read_loss(result, micro_batch)
        loss_output.check_trains(objective)
        total = part if before is None else before + part
        # A dummy micro-batch runs backward only where that has collectives (SyncBatchNorm, FSDP2), with zero gradient.
        if micro_batch.samples and micro_batch.last:
            grad_hook.prepare_for_backward(total)
        if micro_batch.samples or self.peers is not None or self.sharded:
            if type(objective) is Tensor and not function_modes_active():
                self.run_backward(objective, start, retain_graph)
            else:
                objective.backward(start, retain_graph=retain_graph)
        if not micro_batch.samples:
            self.forget()
        return total

    def read_loss(self, result: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, LossSums]:
        """Parse the result of the user's loss function for a micro-batch, before its backward. Not collective.

        Args:
            result: a scalar mean, ``(sum, count)`` or ``(sum, count, metric_sums)`` with a mapping of metrics by name;
                in place of the mean or the sum a tensor (samples,) of one loss a sample is allowed.
            micro_batch: the micro-batch that the loss was computed on.

        Returns:
            The tensor to call ``backward`` on; the gradient to pass to that ``backward``, scaled so that the gradients
            of all micro-batches add up to that of the mean; and the ``LossSums`` of the micro-batch (loss, count,
            metrics).

        Raises:
            UsageError: the result has another form, or the loss is a scalar of a part of the global batch, and such
                losses do not add up to the loss of the whole batch.
        """
        return loss_output.read_loss(result, micro_batch)

    def connect(self, grad_hook: GradientReadyHook) -> None:
        """Register ``grad_hook.gradient_ready`` as post-accumulate-grad hook of all trainable parameters on this rank.

        Called by gradient synchronisations that use gradients during backward, before the first step and after the
        script has unfrozen parameters. Replaces the hook of an earlier call.

        Args:
            grad_hook: the receiver of complete gradients; autograd calls its method with the parameter.
        """
        for handle in self._connected:
            handle.remove()
        trained = [parameter for _, parameter in parameters(self.parts) if parameter.requires_grad]
        self._connected = [add_accumulation_hook(parameter, grad_hook.gradient_ready) for parameter in trained]

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Do nothing when parameters in this rank's modules have been replaced by other objects, as ZeRO stage 1 does.

        This class keeps no list of parameters, and looks them up in the modules each time; subclasses that keep a list
        override the method.

        Args:
            by: unused; a mapping from each old parameter to the new one in its place.
        """

    @contextmanager
    def evaluating(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which this rank's modules hold other values and are in eval mode without autograd.

        For evaluation with averaged weights, for example. On exit the previous values and training modes come back.

        Args:
            values: tensors to put in place of parameters and buffers, by name in the model; all other parameters and
                buffers keep their values. For a parameter that FSDP2 shards, this rank's rows.
        """
        with torch.no_grad(), training_mode(self.parts, training=False), self.swap_values(values):
            yield


def _move(part: nn.Module, device: torch.device, parameters: bool) -> None:
    """Move all buffers of a module to the device, and its parameters where ``parameters`` is true."""
    if parameters:
        part.to(device)
        return
    for slot in buffers([part], persistent=False):
        slot.put(slot.get().to(device))
