"""ZeRO stages 2 and 3 by PyTorch's FSDP2: parameters sharded by rows and all-gathered one wrapped module at a time.

Zhao et al. 2023, arXiv 2304.11277; ``torch.distributed.fsdp.fully_shard``. Its settings here, and why: gradients are
summed and not averaged, because a micro-batch's weight already makes the sum the mean; every backward ends in
reduce-scatters, so that at most one wrapped module's gradient is unsharded at a time; a parameter that a rank did not
use has a gradient of zeros there, because all ranks must send messages of one size. On CPUs its collectives go through
``Communicator``, which names missing ranks.

FSDP2 keeps three objects for one parameter: the rows that the optimizer has, the ``DTensor`` over them that is in the
model between steps, and the unsharded parameter that is in the model around a forward. A script may set
``requires_grad`` on any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tutti.comm.communicator import Communicator
from tutti.config.sync_config import RowsConfig
from tutti.errors import UsageError, script_line
from tutti.nn.gradient_hooks import ScriptHook, share_gradient_hooks, wrap_hooks
from tutti.nn.incomplete_gradient import after_clearing, clear_gradient, conceal
from tutti.nn.partial_gradient import GradientParts, agree_on_operand
from tutti.nn.script_edits import ScriptEdits
from tutti.nn.swap import parameters, swapped
from tutti.parallel.fsdp.fsdp_collectives import FirstStepCheck, GradientMeter, set_collectives
from tutti.parallel.fsdp.fsdp_refusals import (
    refuse_assigned_data,
    refuse_gathered_write,
    refuse_replaced,
    watch_forwards,
)
from tutti.parallel.fsdp.fsdp_wrap_policy import root_modules, wrapped_modules
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter, local_rows
from tutti.parallel.fsdp.whole_reads import WholeReads
from tutti.torch_compat import (
    gradient_hooks,
    hooks_registered,
    is_dtensor,
    local_tensor,
    module_parameters,
    reduce_unused_parameters,
    storage_key,
    tensor_version,
    tree_leaves,
)
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.shard_spec import ShardSpec

Pairs = Sequence[tuple[ShardedParameter, nn.Parameter]]

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FullySharded:
    """Shards all parameters of one model except ``whole`` by PyTorch's FSDP2 (ZeRO stages 2 and 3).

    Each parameter has up to three objects: this rank's rows, a plain tensor that the optimizer updates; the ``DTensor``
    over them, which the model has between steps; and the unsharded parameter, which the model has around a forward.

    Args:
        model: wrapped in place by ``fully_shard``; the data of its parameters become this rank's rows.
        specs: global shape, offset and tied names of the model's tensors, by name in ``model``.
        whole: parameters that FSDP2 ignores (``ignored_params``); every rank keeps them unsharded.
        config: stage, wrap policy, CPU offload and dtype.
        comm: the ranks that share one copy of the parameters, at least two.
        replica: the replica of which the model is a part, with a context around FSDP2's registration of its hooks.

    Attributes:
        rows: this rank's rows of each sharded parameter, frozen ones included, in the order of the model's parameters.
        edits: records of the script's edits of rows, in which edits of all objects of a parameter count together; None
            for no records. Set by ``ShardedReads.guard``.
        reads: a ``WholeReads``, which all-gathers parameters that the script reads outside of the model's forward.

    Raises:
        UsageError: ``fully_shard`` has been applied to the model already, or the wrap policy names a module or class
            that the model does not have, or a container without a forward.
        ValueError: ``comm`` has one rank only.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[str, ShardSpec],
        whole: set[nn.Parameter],
        config: RowsConfig,
        comm: Communicator,
        replica: ReplicaRunner,
    ) -> None:
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UsageError("the model is sharded already", remedy="build it anew for another run")
        self._model, self._comm = model, comm
        self.edits: ScriptEdits | None = None
        named = [(name, p) for name, p in parameters([model]) if p not in whole]
        shapes = [p.shape for _, p in named]
        self._first_step, self._meter = FirstStepCheck(comm), GradientMeter()
        # Parameters whose gradients another rank of the replica counts in norms.
        self._lent = frozenset(replica.not_owned)
        self._units = _shard(model, whole, config, comm, self._first_step, self._meter, replica.around_fsdp_hooks)
        own = dict(parameters([model]))
        self._gathered = [own[name] for name, _ in named]
        self.rows = [
            local_rows(name, _become(p, rows), specs[name], shape, comm)
            for (name, p), rows, shape in zip(named, self._gathered, shapes, strict=True)
        ]
        self._pairs = list(zip(self.rows, self._gathered, strict=True))
        self._training = [(each, g) for each, g in self._pairs if each.parameter.requires_grad]
        self._used: set[str] = set()
        self._twins = {each.name: [each.parameter, gathered] for each, gathered in self._pairs}
        self._also_seen = replica.also_seen
        self._also_seen(self.owners())
        self._flags = {each.name: each.parameter.requires_grad for each in self.rows}
        self._storages = {each.name: storage_key(gathered) for each, gathered in self._pairs}
        self._watched: set[str] = set()
        # Number of hooks registered in this process when ``adapt_hooks`` looked last.
        self._registered = -1
        self._versions: dict[str, tuple[nn.Parameter, int]] = {}
        self._concealed: set[nn.Parameter] = set()
        self.reads = WholeReads(comm, {gathered: each for each, gathered in self._pairs}, self._reached)
        # Unsharded parameters by name, whose .grad is a placeholder for the rows' gradient.
        self._standing: dict[str, nn.Parameter] = {}
        # In custom loops: the module and attribute of each parameter.
        self._slots: dict[str, tuple[nn.Module, str]] = {}
        # Weak: a hook of a parameter must not keep the replica, and so the model, in memory.
        dummy, script_code = partial(_is_dummy, ref(replica)), replica.script_code
        self._wrap_hook = partial(ScriptHook, is_dummy=dummy, script_code=script_code)
        for each, gathered in self._pairs:
            share_gradient_hooks(each.parameter, gathered)
        for unit in self._units:
            self._watch(unit)
            watch_forwards(cast(nn.Module, unit))
        for root in root_modules(model):
            self._clear_with(root)
            root.register_forward_pre_hook(lambda *_: self.unify_flags(), prepend=True)
            root.register_forward_hook(lambda *_: self._check_writes())

    def _clear_with(self, root: nn.Module) -> None:
        """Make ``root.zero_grad()`` also clear the sharded gradients between a forward and its backward.

        At that point ``root.parameters()`` are the unsharded parameters; backward accumulates in the ``.grad`` of the
        sharded ones.
        """
        pairs, plain = self._pairs_of(root), type(root).zero_grad

        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            plain(module, set_to_none)
            for each, gathered in pairs if module is root else ():
                self._clear(each, gathered, set_to_none)

        root.zero_grad = MethodType(zero_grad, root)  # type: ignore[method-assign]

    def _pairs_of(self, root: nn.Module) -> Pairs:
        names = {name for name, module in self._model.named_modules() if module is root}
        prefixes = tuple(f"{name}." if name else "" for name in names)
        return [(each, g) for each, g in self._pairs if each.name.startswith(prefixes)]

    def _clear(self, each: ShardedParameter, gathered: nn.Parameter, set_to_none: bool) -> None:
        objects = (gathered, each.parameter, self._standing.get(each.name))
        for parameter in filter(lambda p: p is not None, objects):
            clear_gradient(cast(nn.Parameter, parameter), set_to_none)

    @property
    def trained(self) -> Sequence[ShardedParameter]:
        """This rank's rows of each FSDP2-sharded parameter that was trainable at construction or added by ``train``.

        One ``ShardedParameter`` for each: name, row tensor and place of the rows in the full tensor. A parameter that
        is frozen later stays in the list. The order is that of the model's parameters; those that ``train`` added come
        last.
        """
        return [each for each, _ in self._training]

    def train(self, names: Collection[str]) -> None:
        """Let FSDP2 reduce the gradients of sharded parameters that were frozen until now; adds them to ``trained``.

        Called after the script has set ``requires_grad`` of these parameters to True. Before the model's first forward
        nothing is communicated. Afterwards the call is collective over the ranks that share one copy of the parameters:
        every wrapped module is all-gathered once, because FSDP2 reads the dtypes of trainable parameters when it
        unshards.

        Args:
            names: names of the parameters in the unsharded model; names of parameters that are in ``trained`` already,
                or that FSDP2 does not shard, are ignored.
        """
        known = {each.name for each in self.trained}
        self._training += [(each, g) for each, g in self._pairs if each.name in names and each.name not in known]
        # FSDP2 reads the dtypes of a wrapped module's trainable parameters at its first forward and when it unshards.
        for unit in self._units if self._watched else ():
            before = self._unsharded()
            unit.unshard()
            if self._unsharded() != before:
                unit.reshard()

    def unify_flags(self) -> None:
        """Copy a ``requires_grad`` that the script has changed on one object of a parameter to its other objects.

        The objects of an FSDP2-sharded parameter are the optimizer's plain rows, FSDP2's DTensor, which the model has,
        and after the first forward the unsharded parameter, which the model has between a forward and its backward.
        Runs before every forward of the model, too. Not collective.

        Raises:
            UsageError: the script has assigned the ``.data`` of a DTensor parameter, which FSDP2 would not use; or in a
                custom loop it has put another object in the place of a trained parameter.
        """
        for name, (module, key) in self._slots.items():
            if all(module_parameters(module).get(key) is not twin for twin in self._twins[name]):
                refuse_replaced(name)
        for name, twins in self._twins.items():
            if storage_key(twins[1]) != self._storages[name]:
                refuse_assigned_data(name)
            before = self._flags[name]
            if [p for p in twins if p.requires_grad != before]:
                self._flags[name] = not before
                for parameter in twins:
                    parameter.requires_grad_(not before)

    def replaced_name(self) -> str | None:
        """Return the name of the first sharded parameter that the script has replaced by another object; None for none.

        FSDP2's own objects of a parameter, the DTensor and after the first forward the unsharded parameter, do not
        count as other objects. Not collective.
        """
        here = ((name, p) for name, p in parameters([self._model]) if name in self._twins)
        return next((name for name, p in here if all(p is not twin for twin in self._twins[name])), None)

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a dictionary from each parameter object of the FSDP2-sharded model to this rank's rows of it.

        A value is the plain tensor of rows that the optimizer has as its parameter. Keys are these rows themselves,
        FSDP2's DTensors, and after the first forward the unsharded parameters.
        """
        return {twin: each.parameter for each in self.rows for twin in self._twins[each.name]}

    def used(self) -> list[bool]:
        """Return for each trained parameter whether a backward on this rank gave it a gradient, and clear this record.

        FSDP2 sets gradients of zeros for parameters that a rank did not use, so that ``.grad`` does not show it. The
        record covers the backwards since the previous call of ``used`` or ``pop_reached``. Not collective.

        Returns:
            One bool for each parameter that FSDP2 shards and that is or was trainable, in the order of the attribute
            ``trained``.
        """
        used = self._used.copy()
        self._used.clear()
        return [each.name in used for each in self.trained]

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters as the FSDP2-sharded model has them between steps: DTensor parameters.

        There is one for each parameter that is or was trainable, in the same order as this rank's rows in the attribute
        ``trained``.
        """
        return [gathered for _, gathered in self._training]

    def agree_on_call(self, text: str) -> None:
        """Check that all shard ranks pass the same ``text``. Collective over the shard ranks: an all-gather; blocks.

        Args:
            text: describes the script's call that comes next, which all shard ranks must make; also for the error.

        Raises:
            MismatchError: the ranks' texts differ, or a rank is in another collective.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        self._comm.all_gather(torch.zeros(1), text)

    def agree_on_operand(self, tensor: Tensor) -> None:
        """Check that a whole tensor that the script combines with sharded ones is the same on all shard ranks.

        Collective over the shard ranks: an all-gather of three numbers computed from the tensor's values.

        Args:
            tensor: the tensor.

        Raises:
            MismatchError: it differs over ranks.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        agree_on_operand(self._comm, tensor, "the script computes with sharded parameters and a tensor")

    def _reached(self, name: str) -> None:
        """Prepare for a gradient of a parameter that the script has read outside of the model's forward."""
        if self._meter.on:
            raise UsageError(
                f"noise_every cannot be combined with a loss that reads {name} outside of the model's forward",
                why="the noise is measured in gradients that FSDP2 reduces, which are those of the forward alone",
                remedy="leave out noise_every, or take strategy='sharded:stage=1' or 'mirrored'",
            )
        self.apply_clearing()
        self._used.add(name)

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients of this rank's rows of all trained parameters, and set every sharded ``.grad`` to None.

        Both FSDP2's DTensors and the optimizer's rows have a sharded ``.grad``; the next backward then starts from
        None. Not collective. A gradient that the script has zeroed is returned as zeros.

        Returns:
            Clones of the gradients of this rank's rows; the key is the optimizer's parameter, that is the tensor of
            rows. No entry for a parameter without gradient, also where the script has set the gradient to None.
        """
        held = {}
        self._take_cleared()
        for each, gathered in self._training:
            if gathered.grad is not None:
                held[each.parameter] = _local(gathered.grad).clone()
            gathered.grad = each.parameter.grad = None
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier backwards to this rank's rows of the gradients just reduced (gradient accumulation).

        The sums are in the ``.grad`` of the FSDP2-sharded model's parameters: DTensors, which the script may read and
        edit. The ``.grad`` of the optimizer's rows become placeholders. A norm of a placeholder is the norm of all
        ranks' rows together, and scaling or clamping a placeholder in place acts on the DTensor; other reads raise
        UsageError. A placeholder of a parameter of which each tensor-parallel rank has a slice can only be cleared. Not
        collective.

        Args:
            held: the earlier gradients as ``pop_gradients`` returned them: the key is the optimizer's parameter (the
                tensor of rows), the value its gradient. May be empty.
        """
        for each, gathered in self._training:
            before = held.get(each.parameter)
            if before is None:
                continue
            if gathered.grad is None:
                gathered.grad = torch.zeros_like(gathered)
            if each.parameter.grad is None:
                each.parameter.grad = _local(gathered.grad)
            each.parameter.grad.add_(before)
        self._conceal_rows()

    def _conceal_rows(self) -> None:
        """Put placeholders into the ``.grad`` of the rows, of which the optimizer has some on each rank.

        The script reads and edits the model's DTensors; a norm of the optimizer's tensors would cover some rows only.
        """
        place = "in rows over the ranks, and its DTensor in the .grad of model.parameters()"
        parts = GradientParts(self._comm)
        for each, gathered in self._training:
            if gathered.grad is None:
                continue
            self._concealed.add(each.parameter)
            if each.local != each.spec.shape:
                # Rows of a tensor slice: tensor ranks hold the others.
                conceal([each.parameter], place)
                continue
            own, on_edit = partial(_local_gradient, gathered), partial(_mark_written, gathered)
            parts.conceal([each.parameter], place, own, on_edit=on_edit)
            if self.edits is not None and each.parameter.grad is not None:
                self.edits.alias(each.parameter.grad, gathered.grad)

    def pop_reached(self) -> list[bool]:
        """Return for each trained parameter whether a backward on this rank gave it a gradient, and clear this record.

        The same as ``used()``, under the name by which custom training loops call it: a loop that sets the gradients of
        a micro-batch aside keeps these flags with them, for ``mark_reached``. The record covers the backwards since the
        previous call of either. ``.grad`` does not show whether there was one: FSDP2 sets zeros for parameters that
        this rank did not use. Not collective.

        Returns:
            One bool for each FSDP2-sharded parameter that is or was trainable, in the order of the attribute
            ``trained``.
        """
        return self.used()

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Record that a backward on this rank gave parameters a gradient, for the next reduction to count them.

        Called when a custom training loop puts gradients back that it had set aside, with the flags of ``pop_reached``.
        The reduction sets ``.grad`` to None for each parameter that no rank has recorded. Not collective.

        Args:
            used: for each FSDP2-sharded parameter that is or was trainable, in the order of the attribute ``trained``,
                True to record that it had a gradient; False leaves its record as it is.
        """
        self._used |= {each.name for each, flag in zip(self.trained, used, strict=True) if flag}

    def begin_custom_loop(self) -> None:
        """Register forward hooks that let a script's own loop clear ``.grad`` between a forward and its backward.

        In that time ``model.parameters()`` are FSDP2's unsharded parameters, and FSDP2 accumulates gradients elsewhere
        than in their ``.grad``. The hooks put a placeholder into each ``.grad``. The placeholder records that the
        script clears it, for ``apply_clearing``, and raises UsageError when the script reads it. A second call does
        nothing. Not collective.
        """
        if self._slots:
            return
        modules = dict(self._model.named_modules())
        for each, _ in self._pairs:
            place, _, key = each.name.rpartition(".")
            self._slots[each.name] = modules[place], key
        for root in root_modules(self._model):
            root.register_forward_hook(partial(self._follow, self._pairs_of(root)))

    def _follow(self, pairs: Pairs, module: nn.Module, args: Any, output: Any) -> None:
        """Set placeholders after a root's forward, and remove them when its backward begins.

        After a forward without gradients the model gets its DTensors back, if these have gradients.
        """
        if not torch.is_grad_enabled():
            if any(gathered.grad is not None for _, gathered in pairs):
                # No backward frees the unsharded parameters, whose .grad the script would take for the gradients.
                self.all_gather_parameters()
            return
        self.apply_clearing()
        self.show_gradients()
        for value in tree_leaves(output) if self._standing else ():
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(lambda _: self.apply_clearing(pairs))

    def apply_clearing(self, pairs: Pairs | None = None) -> None:
        """Clear the sharded gradients of parameters whose ``.grad`` the script has cleared after a forward.

        Between a forward and its backward the script sees FSDP2's unsharded parameters, with placeholders from
        ``show_gradients`` as ``.grad``. If the script set a placeholder to None, the sharded gradient becomes None; if
        it zeroed the placeholder in place, the sharded gradient becomes zeros; if it did neither, the sharded gradient
        stays. Then the placeholders are removed. Not collective.

        Args:
            pairs: (``ShardedParameter`` of this rank's rows, DTensor parameter) of the parameters concerned; None for
                all that FSDP2 shards.
        """
        for each, gathered in (self._pairs if pairs is None else pairs) if self._standing else ():
            unsharded = self._standing.pop(each.name, None)
            if unsharded is not None:
                if gathered.grad is not None:
                    gathered.grad = after_clearing(gathered.grad, unsharded.grad)
                unsharded.grad = None

    def show_gradients(self) -> None:
        """Put a placeholder into the ``.grad`` of each FSDP2-unsharded parameter whose sharded gradient is not None.

        Unsharded parameters are in the model between a forward and its backward. The script can clear a placeholder,
        which ``apply_clearing`` carries over to the sharded gradient; reading a placeholder raises UsageError. Does
        nothing before ``begin_custom_loop``.
        """
        for each, gathered in self._training if self._slots else ():
            if gathered.grad is not None and each.name not in self._standing:
                module, key = self._slots[each.name]
                unsharded = module_parameters(module)[key]
                if unsharded is not None and unsharded is not gathered:
                    conceal([unsharded], "in rows over the ranks until the backward of this forward")
                    self._standing[each.name] = unsharded

    def on_zero_grad(self, members: Collection[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients of an optimizer's rows, and of the FSDP2 model's parameters that the rows belong to.

        Called after the optimizer's own ``zero_grad``. Not collective.

        Args:
            members: parameters of the optimizer, each this rank's rows of one parameter; parameters that FSDP2 does not
                shard are ignored.
            set_to_none: True sets gradients to None, False zeroes them in place.
        """
        for each, gathered in self._pairs:
            if each.parameter in members:
                self._clear(each, gathered, set_to_none)

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Set the ``.grad`` of this rank's rows, which the optimizer has, to the local part of FSDP2's DTensor grads.

        Called before the optimizer step, so that the step uses the script's edits of gradients: edits and clearing of
        the ``.grad`` of the model's DTensor parameters, and clearing of the ``.grad`` of the rows. Collective where
        PyTorch has divided a gradient that the script has computed along another dimension than the parameter, as it
        does with dimensions of one element: the gradient is redistributed over the ranks that share the parameter.

        Args:
            edited: unused; the model's parameters whose ``.grad`` the script has edited.
        """
        self._take_cleared()
        for each, gathered in self._training:
            own = gathered.grad
            if isinstance(own, DTensor) and isinstance(gathered, DTensor) and own.placements != gathered.placements:
                own = own.redistribute(gathered.device_mesh, gathered.placements)
            each.parameter.grad = None if own is None else _local(own)

    def _take_cleared(self) -> None:
        """Clear the model's ``.grad`` where the script has cleared the ``.grad`` of the optimizer's rows."""
        for each, gathered in self._training:
            if each.parameter in self._concealed and gathered.grad is not None:
                gathered.grad = after_clearing(gathered.grad, each.parameter.grad)
        self._concealed.clear()

    def reduce_scatter_gradients(self, step: int) -> None:
        """Set the ``.grad`` of this rank's rows, which the optimizer updates, to the gradients that FSDP2 has reduced.

        FSDP2's backward has reduce-scattered them already, so this call is not collective. The new ``.grad`` tensors
        share memory with the gradients of the model's DTensors; ``.grad`` is None where a parameter has no gradient.
        Called once a step, after its last backward; also ends the step's measurement by ``gradient_meter`` and, in the
        first step, the comparison of FSDP2's collectives over ranks.

        Args:
            step: unused here; ZeRO stage 1 names it in errors.

        Raises:
            UsageError: the script has written an unsharded parameter between the forward and its backward.
        """
        self._check_writes()
        self._first_step.over, self._meter.on = True, False
        for each, gathered in self._pairs:
            gradient = gathered.grad
            each.parameter.grad = None if gradient is None else _local(gradient)

    def gradient_meter(self) -> Callable[[], float]:
        """Start to measure this rank's own gradients, before FSDP2's backward reduce-scatters them. Not collective.

        Gradients that another rank of the replica counts in norms are left out. The measurement stops in the step's
        ``reduce_scatter_gradients``; each call of the returned function starts it again.

        Returns:
            A function without arguments that returns, as a float, the sum of squares of the elements of the gradients
            measured since its last call, and resets the sum to 0.
        """
        self._meter.take()
        return self._meter.take

    def all_gather_parameters(self) -> None:
        """Free the unsharded parameters of all wrapped modules, so that the next forward all-gathers the updated rows.

        The all-gathers of FSDP2 happen in that forward; this call is not collective.
        """
        for unit in self._units:
            unit.reshard()

    def rows_written(self) -> bool:
        """Return False: with FSDP2 this method finds no writes of rows. Not collective.

        ZeRO stage 1 returns True if the script has written this rank's rows of a parameter, the plain tensors that the
        optimizer has, since the last all-gather; the caller then raises UsageError or all-gathers the rows. With FSDP2
        such a write cannot be detected: a row tensor may share its version counter with the model's ``DTensor``, which
        the script may write.
        """
        return False

    def clear(self) -> None:
        """Set the ``.grad`` of the model's parameters (DTensors) and of the optimizer's (this rank's rows) to None.

        Not collective.
        """
        for each, gathered in self._pairs:
            gathered.grad = each.parameter.grad = None

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the FSDP2-sharded model has other values, such as averaged weights.

        Entering copies rows on this rank and is not collective; the forward within the context all-gathers the new
        rows. On exit the previous values come back.

        Args:
            values: tensors by name of parameter or buffer in the model; for a sharded parameter this rank's rows.
                Parameters and buffers without an entry keep their values.
        """
        kept = []
        others = dict(values)
        for each in self.rows:
            value, rows = others.pop(each.name, None), each.parameter.data
            if value is not None and value.data_ptr() != rows.data_ptr():
                kept.append((rows, rows.clone()))
                rows.copy_(value)
        self.all_gather_parameters()
        try:
            with swapped([self._model], others):
                yield
        finally:
            for rows, own in kept:
                rows.copy_(own)
            self.all_gather_parameters()

    def adapt_hooks(self) -> list[str]:
        """Let autograd call the hooks of ``register_hook`` on sharded parameters, with unsharded gradients.

        The unsharded parameters share the hooks of the model's ``DTensor``s from their first forward on. Hooks are not
        called for dummy micro-batches. Not collective.

        Returns:
            Names of the parameters of which this call has adapted a hook; a hook that an earlier call has adapted does
            not count.

        Raises:
            UsageError: a parameter with a hook has another dtype when it is unsharded (option ``param_dtype``), so that
                the hook would get gradients of that dtype.
        """
        registered = hooks_registered()
        if registered == self._registered:
            return []
        for name, (_, gathered, *unsharded) in self._twins.items():
            for other in unsharded:
                if not gradient_hooks(gathered):
                    share_gradient_hooks(other, gathered)
                share_gradient_hooks(gathered, other)
                if gradient_hooks(gathered) and other.dtype != gathered.dtype:
                    raise UsageError(
                        f"param_dtype cannot be combined with the hook on the gradient of {name}",
                        why=f"the hook would be given a gradient in {other.dtype}",
                        remedy="leave out one of the two, or take strategy='sharded:stage=1' or 'mirrored'",
                    )
        own = {name: twins[1] for name, twins in self._twins.items()}
        found = wrap_hooks({**dict(parameters([self._model])), **own}.items(), self._wrap_hook)
        self._registered = registered
        return found

    def _watch(self, unit: FSDPModule) -> None:
        """Register hooks that note which parameters of a wrapped module receive a gradient, frozen ones included.

        The hooks are put on the unsharded parameters in the module's first forward.
        """

        def watch(module: nn.Module, args: Any) -> None:
            handle.remove()
            for name, parameter in self._unsharded().items():
                if parameter.is_inference():
                    raise UsageError(
                        "the first forward of sharded parameters is one under torch.inference_mode()",
                        where=script_line(),
                        why="FSDP2 makes the tensors there into which it gathers them, and no backward may use these",
                        remedy="call it under torch.no_grad(), or after the first backward; or take strategy="
                        "'sharded:stage=1' or 'mirrored'",
                    )
                if name not in self._watched:
                    self._watched.add(name)
                    self._also_seen({parameter: self._twins[name][0]})
                    self._twins[name].append(parameter)
                    self._versions[name] = parameter, tensor_version(parameter)
                    if self.edits is not None:
                        self.edits.ids.add(id(parameter))
                    trained = parameter.requires_grad
                    # PyTorch refuses a hook on a frozen parameter, but keeps the hook of one that is frozen later.
                    parameter.requires_grad_(True).register_post_accumulate_grad_hook(
                        partial(_note, self._used, name, self._meter if name in self._lent else None)
                    )
                    parameter.requires_grad_(trained)
            self.adapt_hooks()

        handle = cast(nn.Module, unit).register_forward_pre_hook(watch)

    def gathered_name(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter of which ``tensor`` is FSDP2's unsharded parameter object; else None.

        FSDP2 all-gathers the rows into that object before a forward, and frees its values after the forward or the
        backward. Objects are compared by identity; before the first forward there are none.

        Args:
            tensor: any tensor.
        """
        return next((name for name, (parameter, _) in self._versions.items() if parameter is tensor), None)

    def rows_of(self, name: str) -> nn.Parameter:
        """Return this rank's rows of a sharded parameter, the tensor that the optimizer updates.

        Args:
            name: the parameter's name in the model.
        """
        return self._twins[name][0]

    def accept_write(self, tensor: Tensor) -> None:
        """Accept a write to FSDP2's unsharded parameter, whose values the caller has written to this rank's rows, too.

        A later check finds writes to the unsharded parameter, which FSDP2 would lose, by the parameter's version
        counter; it compares with the counter at this call. Does nothing for any other tensor. Not collective.

        Args:
            tensor: the unsharded parameter, or a tensor that shares its memory and version counter.
        """
        if (name := self.gathered_name(tensor)) is not None:
            self._versions[name] = self._versions[name][0], tensor_version(tensor)

    def _check_writes(self) -> None:
        """Raise UsageError where the script has written an unsharded parameter in place, whose values will be freed."""
        for name, (parameter, version) in self._versions.items():
            if tensor_version(parameter) != version:
                refuse_gathered_write(name)

    def _unsharded(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are unsharded now, by name."""
        here = parameters([self._model])
        return {name: p for name, p in here if name in self._twins and not is_dtensor(p)}


def _is_dummy(replica: Callable[[], ReplicaRunner | None]) -> bool:
    found = replica()
    return found is not None and found.is_dummy


def _note(used: set[str], name: str, meter: GradientMeter | None, parameter: Tensor) -> None:
    """Add a parameter's name to a set, and leave its gradient out of a meter.

    The garbage collector cannot follow what a hook of a parameter refers to.
    """
    used.add(name)
    if meter is not None:
        meter.leave_out(parameter.grad)


def _shard(
    model: nn.Module,
    whole: set[nn.Parameter],
    config: RowsConfig,
    comm: Communicator,
    check: FirstStepCheck,
    meter: GradientMeter,
    around_hooks: Callable[[nn.Module], AbstractContextManager[None]],
) -> list[FSDPModule]:
    """Apply ``fully_shard`` to the modules of the wrap policy, then to the roots for all remaining parameters."""
    if comm.gradient_group is None:
        raise ValueError("one rank has nothing to shard")
    device = comm.device.type
    dtype = _NARROW.get(config.param_dtype or "")
    offload: OffloadPolicy = CPUOffloadPolicy() if config.offload is True else OffloadPolicy()
    mesh, made = DeviceMesh.from_group(comm.gradient_group, device), list[FSDPModule]()
    names = {module: name for name, module in model.named_modules()}
    tops = root_modules(model)
    below = [unit for unit in wrapped_modules(model, config.units) if unit not in tops]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # Where a forward finds other weights than the last one, it moves them into one buffer for cuDNN, and FSDP2
            # would gather the next step's weights into memory that the forward no longer reads.
            module.flatten_parameters = _leave_in_place  # type: ignore[method-assign]
    for unit in [*below, *tops]:
        root = unit in tops
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=None if dtype is None else torch.float32,
            output_dtype=torch.float32 if root and dtype is not None else None,
        )
        # The root's own parameters stay gathered: backward begins as its forward ends and needs them again.
        reshard = config.stage == 3 and not root
        with around_hooks(unit):
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=whole,
            )
        if not isinstance(unit, FSDPModule):
            raise TypeError(f"fully_shard left {type(unit).__name__} as it was")
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        reduce_unused_parameters(unit)
        set_collectives(unit, names[unit] or "the model", comm, check, meter)
        made.append(unit)
    return made


def _leave_in_place() -> None:
    """Do nothing, in place of ``nn.RNNBase.flatten_parameters``; cuDNN then copies the weights in each forward."""


def _become(parameter: nn.Parameter, rows: nn.Parameter) -> nn.Parameter:
    """Make the model's original parameter a view of the rows that replaced it, and return it."""
    parameter.data = _local(rows)
    return parameter


@torch.no_grad()
def _local_gradient(gathered: nn.Parameter) -> Tensor | None:
    """Return this rank's rows of the gradient of one of the model's DTensors; None if it has none."""
    return None if gathered.grad is None else _local(gathered.grad)


def _mark_written(gathered: nn.Parameter) -> None:
    """Increment the version counter of a DTensor's gradient, whose rows have been written below autograd."""
    if gathered.grad is not None:
        torch.autograd.graph.increment_version(gathered.grad)


def _local(tensor: Tensor) -> Tensor:
    return local_tensor(tensor).detach()
