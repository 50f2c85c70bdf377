"""Parameters sharded by rows: the rows that an optimizer updates, ZeRO stage 1, and optimizer state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import number_tensor, place_step_counters
from tutti.comm.communicator import Communicator
from tutti.comm.partition import block
from tutti.nn.gradient_hooks import share_gradient_hooks
from tutti.nn.incomplete_gradient import IncompleteGradient, after_clearing, clear_gradient, conceal
from tutti.nn.partial_gradient import GradientParts, GradientSplit
from tutti.parallel.ddp.buckets import plan_buckets
from tutti.parallel.whole_tensors import GatheredTensor, Region
from tutti.torch_compat import chunk_cat, module_parameters, tensor_version
from tutti.types import SavedState, ShardSpec, TensorSlice

_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """This rank's rows (a block of the first dimension) of one parameter that is sharded by ZeRO or FSDP2.

    Attributes:
        name: the parameter's name in the unsharded model.
        parameter: the rows, as a plain leaf tensor. It is the parameter object that the model had before the sharding,
            so that an optimizer built from the model's parameters updates the rows.
        spec: global shape and offset of the rows. A 0-d parameter is one row.
        local: shape of the tensor that the rows are cut from: a tensor slice under tensor parallelism.
        leads: whether that slice is at offset 0; only its ranks write optimizer scalars into a checkpoint.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    local: tuple[int, ...]
    leads: bool = True

    def piece(self, tensor: Tensor) -> Tensor | TensorSlice | None:
        """Return a tensor of the shape of this rank's rows, such as optimizer state, with its place in the full tensor.

        The object describes one parameter that ZeRO or FSDP2 shards: this rank's rows, a block of the first dimension.
        The result is what this rank writes into a checkpoint; it shares memory with ``tensor``.

        Args:
            tensor: of the shape of this rank's rows of the parameter.

        Returns:
            A ``TensorSlice``, which holds the tensor, the parameter's global shape and the offset of the rows in it; a
            0-d view of ``tensor`` for a 0-d parameter; None where this rank has no rows.
        """
        if not tensor.numel():
            return None
        if not self.spec.shape:
            return tensor.view(())
        return TensorSlice(tensor, self.spec.shape, self.spec.offset, self.spec.blocks, self.spec.rows)

    def read(self, saved: SavedState, group: str, name: str) -> Tensor:
        """Read this rank's rows of one sharded parameter, or of its optimizer state, from a checkpoint.

        The rows are this rank's block of the parameter's first dimension. Only their bytes are read. Not collective.

        Args:
            saved: the checkpoint.
            group: group of tensors in the checkpoint: ``model``, ``ema`` (moving average of the weights) or ``optim``.
            name: name of the tensor in the group, which has the parameter's global shape.

        Returns:
            A tensor on the CPU of the shape of this rank's rows, in the dtype of the checkpoint; where the rank has no
            rows, an empty tensor in the parameter's dtype. It may be a view of memory that ``saved`` keeps: the caller
            copies it before writing to it.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or one of its files is damaged.
        """
        if not self.parameter.numel():
            return self.parameter.detach().cpu().clone()
        if not self.spec.shape:
            return saved.get(group, name).view(self.parameter.shape)
        parts = [saved.part(group, name, *region) for region in self.spec.regions(self.parameter.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def known(self, names: Collection[str]) -> str:
        """Return the one of this sharded parameter's names that is in ``names``.

        A parameter that several modules share (tied weights) has one name in each; a checkpoint may have any of them.

        Args:
            names: names of parameters, such as those in a checkpoint.

        Returns:
            The parameter's own name if it is in ``names``, else the first of its tied names that is in ``names``; its
            own name if none of them is.
        """
        return next((name for name in (self.name, *self.spec.tied) if name in names), self.name)


class ShardingEngine(Protocol):
    """Shards a model's parameters by rows over the shard ranks (protocol): ZeRO stage 1 or FSDP2.

    The shard ranks hold one copy of the parameters together. Each holds a block of the first dimension of every
    parameter, its rows, and its optimizer updates these; forwards compute with unsharded parameters.
    """

    @property
    def rows(self) -> Sequence[ShardedParameter]:
        """This rank's rows of all parameters that the engine shards (ZeRO stage 1 or FSDP2), frozen ones included.

        One ``ShardedParameter`` for each: name in the unsharded model, row tensor, and place of the rows in the full
        tensor.
        """

    @property
    def trained(self) -> Sequence[ShardedParameter]:
        """This rank's rows of each sharded parameter (ZeRO stage 1 or FSDP2) that is or was trainable.

        One ``ShardedParameter`` for each: name, row tensor and place in the full tensor. The optimizer updates the row
        tensors, and their gradients are reduced. A parameter that is frozen later stays in the list.
        """

    def train(self, names: Collection[str]) -> None:
        """Add parameters that the script has unfrozen to ``trained``, so that their gradients are reduced from now on.

        The engine shards a model's parameters by rows (ZeRO stage 1 or FSDP2); ``trained`` holds this rank's rows of
        each parameter that is or was trainable. Called after the script has set their ``requires_grad`` to True, on all
        shard ranks (those that share one copy of the parameters): FSDP2 may all-gather parameters in the call. ZeRO
        stage 1 does nothing.

        Args:
            names: names in the unsharded model; names of parameters that are not sharded here are ignored.
        """

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a dictionary from each parameter object of the user's model to this rank's rows of that parameter.

        Called after the script has added parameters to an optimizer, whose groups must have the rows. The engine shards
        the model by rows (ZeRO stage 1 or FSDP2). Both keys and values are ``nn.Parameter`` objects; a value is the
        tensor of rows that the optimizer has as its parameter. With FSDP2 several objects of the model (the DTensor and
        the unsharded parameter) map to the same rows.
        """

    def used(self) -> list[bool]:
        """Return for each trained parameter whether backward on this rank has given it a gradient in this step.

        The parameters are those that the engine shards by rows (ZeRO stage 1 or FSDP2). Called once a step, before the
        gradients are reduced; with FSDP2 the call clears the record, which ``pop_reached`` reads too. Not collective.

        Returns:
            One bool for each parameter that is or was trainable, in the order of the attribute ``trained``; False where
            this rank's forward did not use the parameter.
        """

    def reduce_scatter_gradients(self, step: int) -> None:
        """Set the ``.grad`` of this rank's rows of each trained parameter to the gradient summed over the shard ranks.

        Each shard rank holds some rows of every parameter; together they hold one copy. Called on all of them, after
        the step's last backward: ZeRO stage 1 reduce-scatters in this call, and the full parameters' ``.grad`` is None
        afterwards; FSDP2 has reduce-scattered in backward, and the call sends nothing.

        Args:
            step: number of the step from 1, named in the ``PeerError`` if a rank dies or is in another collective.

        Raises:
            UsageError: the script has written an unsharded parameter between a forward and its backward (FSDP2).
        """

    def all_gather_parameters(self) -> None:
        """Make the next forward use the values that the optimizer has written to each rank's rows.

        Each shard rank holds and updates some rows of every parameter; together they hold one copy. Called on all of
        them after an update, and after a checkpoint was loaded into the rows. ZeRO stage 1 all-gathers the full
        parameters now; FSDP2 frees the unsharded parameters and all-gathers them in the next forward.
        """

    def rows_written(self) -> bool:
        """Return whether the rows that this rank holds have been written since the parameters were last all-gathered.

        The record starts at the previous ``all_gather_parameters``, or at construction. Called at the beginning of a
        step, before gradients are reduced and before the model is read, since a script may write the rows in its
        optimizer's groups: then the full parameters that the ranks compute with are stale. Writes are found by the
        version counters of the row tensors; a write through ``.data`` does not count. Always False with FSDP2, whose
        rows may share the counter with the model's DTensors.
        """

    def clear(self) -> None:
        """Set the ``.grad`` of all parameters that the engine shards (ZeRO stage 1 or FSDP2) to None.

        Called after an update. This holds for both objects of a parameter: this rank's rows, which the optimizer has,
        and the model's parameter.
        """

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters that the engine shards (ZeRO stage 1, FSDP2) as the model has them.

        Called where gradients are shown to the script, cleared or clipped, which the script does with the model's
        objects.

        Returns:
            Full parameters in ZeRO stage 1, DTensors with FSDP2: one for each parameter that is or was trainable, in
            the order of the attribute ``trained``.
        """

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the reduced gradients of this rank's rows of the trained parameters, and set their ``.grad`` to None.

        Called before a further backward of a custom training loop, so that its gradients are reduced alone. Each rank
        holds some rows of every parameter (ZeRO stage 1 or FSDP2). The ``.grad`` of the model's parameters is None
        afterwards, too. Not collective.

        Returns:
            Clones of the gradients of this rank's rows; the key is the optimizer's parameter, that is the tensor of
            rows. Rows without a gradient, also where the script has set the gradient to None, have no entry.
        """

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier backwards to this rank's rows of the gradients just reduced (gradient accumulation).

        Called after each reduction of a custom training loop. Each rank holds some rows of every parameter. Not
        collective. With FSDP2 the script can read the sums in the ``.grad`` of the model's DTensors; in ZeRO stage 1 on
        several ranks the ``.grad`` of the model's parameters are placeholders from then on, with which the script
        computes as with the whole gradient, by all-gathers. Reading the ``.grad`` of a parameter of which the tensor
        ranks have slices raises UsageError.

        Args:
            held: the earlier gradients as ``pop_gradients`` returned them: the key is the optimizer's parameter (the
                tensor of rows), the value its gradient. May be empty.
        """

    def pop_reached(self) -> list[bool]:
        """Return for each trained parameter whether a backward on this rank gave it a gradient, and clear this record.

        Called when a custom training loop sets the gradients of a micro-batch aside, and keeps the flags with them for
        ``mark_reached``. The record of the row-sharding engine (FSDP2) covers the backwards since the previous call of
        this method or of ``used``. Not collective.

        Returns:
            One bool for each parameter that is or was trainable, in the order of the attribute ``trained``. ZeRO stage
            1 keeps no record and returns False for all: with ZeRO stage 1 backward has given a parameter a gradient if
            the ``.grad`` of the model's full parameter is not None.
        """

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Record that a backward on this rank gave parameters a gradient, for the next reduction to count them.

        Called when a custom training loop puts gradients back that it had set aside, with the flags of ``pop_reached``.
        For FSDP2; ZeRO stage 1 does nothing. Not collective.

        Args:
            used: for each parameter that is or was trainable, in the order of the attribute ``trained``, True to record
                that it had a gradient; False leaves its record as it is.
        """

    def begin_custom_loop(self) -> None:
        """Let the script's own training loop clear ``.grad`` of FSDP2's unsharded parameters from now on.

        Called once, before the first step of the loop. Between a forward and its backward, FSDP2's model has unsharded
        parameters in place of the DTensors. After this call, clearing their ``.grad`` also clears the sharded gradient.
        ZeRO stage 1 does nothing.
        """

    def apply_clearing(self) -> None:
        """Clear the sharded gradients of parameters whose ``.grad`` the script has cleared after a forward.

        Called before the sharded gradients are read or added to. For FSDP2, where the script sees unsharded parameters
        between a forward and its backward. Their ``.grad`` are placeholders, put there by ``show_gradients``. A sharded
        gradient becomes None or zeros, as the script has made the placeholder; all placeholders are removed. ZeRO stage
        1 does nothing.
        """

    def show_gradients(self) -> None:
        """Put placeholders into the ``.grad`` of FSDP2's unsharded parameters whose sharded gradient is not None.

        Called after each forward and backward of a custom training loop. The unsharded parameters are in the model
        between a forward and its backward. A placeholder raises UsageError when the script reads it; the script can
        clear it, which ``apply_clearing`` carries over to the sharded gradient. ZeRO stage 1 does nothing.
        """

    def on_zero_grad(self, members: Collection[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients of an optimizer's rows and of the model's parameters that the rows belong to.

        Called after the optimizer's ``zero_grad``, which clears only the optimizer's own parameters: this rank's rows.

        Args:
            members: parameters of the optimizer, each this rank's rows of one parameter; parameters that are not
                sharded here are ignored.
            set_to_none: True sets gradients to None, False zeroes them in place.
        """

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Set the ``.grad`` of this rank's rows to the gradients that the script has left in the model's parameters.

        Called before the optimizer step, which uses the rows' ``.grad``. Not collective.

        Args:
            edited: the model's parameters whose ``.grad`` the script has edited, or replaced by another tensor.
        """

    def gradient_meter(self) -> Callable[[], float] | None:
        """Start to measure this rank's own gradients before backward itself reduces them (FSDP2).

        Called to estimate the gradient noise scale, which compares the norms of the ranks' own gradients with that of
        their sum. Not collective.

        Returns:
            A function without arguments that returns the sum of the squares of the gradients' elements since its last
            call, and resets the sum to 0; None in ZeRO stage 1, where backward leaves this rank's own gradient in the
            ``.grad`` of the model's full parameters.
        """


def along_rows(rows: Sequence[ShardedParameter], comm: Communicator) -> list[GatheredTensor]:
    """Return, for each parameter sharded by rows, the shape before sharding and the region that each rank holds.

    Optimizers that need whole tensors, such as those with matrix preconditioners, gather tensors by these descriptions.
    Nothing is gathered here.

    Args:
        rows: this rank's rows of each parameter.
        comm: the ranks that each hold a contiguous block of rows (of the first dimension).

    Returns:
        One ``GatheredTensor`` for each of ``rows``, in order: ``parameter``, the row tensor; ``local``, the shape of
        the row tensor; ``shape``, the shape of the tensor that the rows are cut from (under tensor parallelism this
        rank's slice); and ``regions``, for each rank a list of the regions of that tensor that the rank holds: a single
        tuple with one ``slice`` for each dimension, or an empty list for a rank without rows.
    """
    found = []
    for sharded in rows:
        shape = sharded.local
        regions: list[list[Region]] = []
        for rank in range(comm.size):
            rows_here = block(shape[0] if shape else 1, comm.size, rank)
            other_dims = tuple(slice(0, size) for size in shape)
            regions.append(
                [(slice(rows_here.start, rows_here.stop), *other_dims[1:]) if shape else ()] if len(rows_here) else []
            )
        found.append(GatheredTensor(sharded.parameter, tuple(sharded.parameter.shape), shape, regions))
    return found


def local_rows(
    name: str, parameter: nn.Parameter, spec: ShardSpec, local: Sequence[int], comm: Communicator
) -> ShardedParameter:
    """Describe this rank's rows of a parameter: the parameter's name, the rows' shape and offset in the parameter.

    Nothing is cut or copied here. The ranks of ``comm`` hold contiguous blocks of the first dimension.

    Args:
        name: name of the parameter in the unsharded model.
        parameter: this rank's rows, already cut.
        spec: global shape and offset of the tensor that the rows are cut from.
        local: shape of that tensor, which is a tensor slice under tensor parallelism; () for a 0-d parameter.
        comm: the ranks that share the rows of the parameter.

    Returns:
        A ``ShardedParameter`` for optimizers and checkpoints: ``name``, ``parameter``, the offset of the rows in the
        global tensor, ``local``, and whether the tensor that the rows are cut from is at offset 0.
    """
    leads = not any(spec.offset)
    if local:
        spec = spec.cut(local, block(local[0], comm.size, comm.rank).start)
    return ShardedParameter(name, parameter, spec, tuple(local), leads)


class ZeroSharding:
    """ZeRO stage 1: parameters unsharded on every rank; gradients reduce-scattered into rows, updates all-gathered.

    Rajbhandari et al. 2019, arXiv 1910.02054, §5.1. A step sends as many bytes as data parallelism: a reduce-scatter of
    the gradients and an all-gather of the parameters, in messages of up to 25 MiB. With one rank nothing is cut or
    sent.

    Args:
        named: the parameters to shard; with several ranks each becomes this rank's rows, for the optimizer.
        parts: modules in which new parameters (``replaced``) take their place.
        specs: global shape and offset of each parameter, by name.
        comm: the shard ranks, which share one copy of the parameters.

    Attributes:
        rows: this rank's rows of each parameter in ``named``, in order: views of the full parameters.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        parts: Sequence[nn.Module],
        specs: Mapping[str, ShardSpec],
        comm: Communicator,
    ) -> None:
        self._comm = comm
        self._whole = [_stand_in(parameter, parts, comm) for _, parameter in named]
        self.rows = [
            _cut(name, p, whole, specs[name], comm) for (name, p), whole in zip(named, self._whole, strict=True)
        ]
        self._places = [whole.data_ptr() for whole in self._whole]
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._buckets = plan_buckets([(whole.nbytes, str(whole.dtype)) for whole in self._whole], _BUCKET_BYTES)
        self._versions = self._versions_now()

    @property
    def replaced(self) -> dict[nn.Parameter, nn.Parameter]:
        """A dictionary from the model's original parameter objects to the full parameters that have replaced them.

        ZeRO stage 1 lets the original objects, which the optimizer has, hold this rank's rows, and puts new full
        parameters into the model's modules. Empty with one rank, whose rows are the full parameters.
        """
        pairs = zip(self.rows, self._whole, strict=True)
        return {rows.parameter: whole for rows, whole in pairs if rows.parameter is not whole}

    @property
    def trained(self) -> Sequence[ShardedParameter]:
        """This rank's rows of all parameters that ZeRO stage 1 shards, the same list as the attribute ``rows``.

        One ``ShardedParameter`` for each: name, row tensor and place in the full tensor. ZeRO stage 1 shards only
        parameters that were trainable at construction, so that all of them are trained.
        """
        return self.rows

    def train(self, names: Collection[str]) -> None:
        """Do nothing: ZeRO stage 1 shards only parameters that were trainable at construction, and adds none later.

        Args:
            names: unused; names of parameters that the script has unfrozen.
        """

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a dictionary from the model's full parameters to the rows that the optimizer updates (ZeRO stage 1).

        Keys and values are ``nn.Parameter`` objects; with one rank, whose rows are the full parameters, both are the
        same.
        """
        return {whole: rows.parameter for whole, rows in zip(self._whole, self.rows, strict=True)}

    def used(self) -> list[bool]:
        """Return for each parameter that ZeRO stage 1 shards whether its full ``.grad`` is not None on this rank.

        Returns:
            One bool for each parameter, in the order of the attributes ``rows`` and ``trained``; False where this
            rank's backward did not reach the parameter.
        """
        return [whole.grad is not None for whole in self._whole]

    def reduce_scatter_gradients(self, step: int) -> None:
        """Reduce-scatter the model's full gradients into ``.grad`` of this rank's rows, summed over the shard ranks.

        ZeRO stage 1: each shard rank updates a block of rows of every parameter. Collective over the shard ranks, one
        reduce-scatter for each bucket of up to 25 MiB. A missing gradient counts as zeros. Full parameters have no
        ``.grad`` afterwards. One rank does nothing.

        Args:
            step: number of the step from 1, named in the ``PeerError`` if a rank dies or is in another collective.
        """
        if self._comm.size == 1:
            return
        self._follow_data()
        for number, members in enumerate(self._buckets):
            whole = [self._whole[i] for i in members]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
            send = whole[0].new_empty(self._comm.size, sum(map(self._width, whole)))
            chunk_cat([_as_rows(g) for g in gradients], 0, self._comm.size, out=send)
            for parameter in whole:
                parameter.grad = None
            mine = send.new_empty(send.shape[1])
            self._comm.scatter_sum(mine, send.view(-1), f"sum of gradients {number} in step {step}")
            for index, piece in zip(members, mine.split([self._width(p) for p in whole]), strict=True):
                rows = self.rows[index].parameter
                rows.grad = piece[: rows.numel()].view_as(rows)

    def _follow_data(self) -> None:
        """Cut the rows anew out of full parameters whose ``.data`` the script has assigned."""
        for index, (whole, rows) in enumerate(zip(self._whole, self.rows, strict=True)):
            if whole.data_ptr() != self._places[index]:
                whole.data = whole.data.contiguous()
                self._places[index] = whole.data_ptr()
                rows.parameter.data = _block(whole.data, self._comm.size, self._comm.rank)

    def _follow_assigned_rows(self) -> None:
        """Copy rows whose ``.data`` the script has assigned into the full parameters, and make them views again."""
        for index, (whole, rows) in enumerate(zip(self._whole, self.rows, strict=True)):
            own = _block(whole.data, self._comm.size, self._comm.rank)
            if own.numel() and own.data_ptr() != rows.parameter.data_ptr():
                own.copy_(rows.parameter.data)
                rows.parameter.data, self._places[index] = own, whole.data_ptr()

    def all_gather_parameters(self) -> None:
        """All-gather the rows that each rank's optimizer has updated into the model's full parameters (ZeRO stage 1).

        Collective over the shard ranks, each of which updates a block of rows of every parameter: one all-gather for
        each bucket of up to 25 MiB. One rank does nothing.
        """
        if self._comm.size == 1:
            return
        self._follow_assigned_rows()
        for members in self._buckets:
            whole = [self._whole[i] for i in members]
            widths = [self._width(p) for p in whole]
            table = whole[0].new_empty(self._comm.size, sum(widths))
            with torch.no_grad():
                mine = table[self._comm.rank].split(widths)
                for index, piece in zip(members, mine, strict=True):
                    rows = self.rows[index].parameter
                    piece[: rows.numel()].view_as(rows).copy_(rows)
                self._comm.gather_into(table.view(-1), table[self._comm.rank], "rows after the update")
                for rank in filter(lambda rank: rank != self._comm.rank, range(self._comm.size)):
                    for parameter, piece in zip(whole, table[rank].split(widths), strict=True):
                        target = _block(parameter.data, self._comm.size, rank)
                        target.copy_(piece[: target.numel()].view_as(target))
        self._versions = self._versions_now()

    def rows_written(self) -> bool:
        """Return whether the rows that this rank updates have been written since the last ``all_gather_parameters``.

        ZeRO stage 1: a rank updates its rows of every parameter and then all-gathers the full parameters. Writes are
        found by the version counters of the row tensors; a write through ``.data`` does not count. Where the script has
        assigned the ``.data`` of a full parameter, the call first makes the rows views of the new tensor. False with
        one rank, whose rows are the full parameters. Not collective.
        """
        if self._comm.size == 1:
            return False
        self._follow_data()
        return self._versions_now() != self._versions

    def _versions_now(self) -> list[int]:
        return [tensor_version(rows.parameter) for rows in self.rows]

    def clear(self) -> None:
        """Set the ``.grad`` of the model's full parameters and of this rank's rows of them to None (ZeRO stage 1)."""
        self._aside.clear()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            whole.grad = rows.parameter.grad = None

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the full parameters of the model that ZeRO stage 1 shards; all of them are trained.

        There is one for each entry of the attribute ``rows`` (this rank's rows of the parameters), in the same order.
        """
        return self._whole

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the reduced gradients of this rank's rows (ZeRO stage 1), and set their ``.grad`` to None.

        Not collective. The ``.grad`` of the model's full parameters is None afterwards, too.

        Returns:
            Clones of the gradients of this rank's rows; the key is the optimizer's parameter, that is the tensor of
            rows. Rows without a gradient, also where the script has set the full parameter's ``.grad`` to None, have no
            entry.
        """
        held = {}
        self._reveal()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            gradient = rows.parameter.grad
            left = None if gradient is None else self._as_left(gradient, whole)
            if left is not None:
                held[rows.parameter] = left.clone()
            whole.grad = rows.parameter.grad = None
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier backwards to this rank's rows of the gradients just reduced (gradient accumulation).

        ZeRO stage 1: each rank holds the reduced gradients of its rows only. With several ranks, the ``.grad`` of the
        model's parameters and of the rows are therefore placeholders from then on. What the script computes with the
        ``.grad`` of a model's parameter, it computes with the whole gradient, by all-gathers over the shard ranks. With
        that of the rows it can take norms, scale and clamp; other reads raise UsageError. For a parameter of which the
        tensor ranks have slices every read raises UsageError. The call itself is not collective.

        Args:
            held: the earlier gradients as ``pop_gradients`` returned them: the key is the optimizer's parameter (the
                tensor of rows), the value its gradient. May be empty.
        """
        for rows in self.rows:
            parameter, before = rows.parameter, held.get(rows.parameter)
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        if self._comm.size > 1:
            # Conceal the optimizer's ``.grad`` too: their norm would cover this rank's rows only.
            parts, place = GradientParts(self._comm), "in rows over the ranks (sharded:stage=1)"
            for whole, rows in zip(self._whole, self.rows, strict=True):
                own = rows.parameter
                if own.grad is not None:
                    self._aside[own] = gradient = own.grad
                    if rows.local == rows.spec.shape:
                        gatherer = RowGatherer(self._comm, {gradient: tuple(_as_rows(whole).shape)})
                        split = GradientSplit(gatherer, gradient, tuple(whole.shape))
                        parts.conceal([whole, own], place, partial(_identity, gradient), split=split)
                    else:
                        # Rows of a tensor slice: tensor ranks hold the others.
                        conceal([whole, own], place)

    def _reveal(self) -> None:
        """Restore the rows' gradients that ``add_gradients`` concealed, cleared where the script has cleared them."""
        for parameter, gradient in self._aside.items():
            parameter.grad = after_clearing(gradient, parameter.grad)
        self._aside = {}

    def pop_reached(self) -> list[bool]:
        """Return a list of False, one for each sharded parameter: ZeRO stage 1 keeps no record of backward.

        FSDP2's counterpart returns which parameters backward has given a gradient. In ZeRO stage 1 the full parameter's
        ``.grad``, None or not, says so.
        """
        return [False] * len(self._whole)

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Do nothing: ZeRO stage 1 keeps no record of the parameters that backward gave gradients.

        A parameter counts as used where its full ``.grad`` is not None.

        Args:
            used: unused; one flag for each trained parameter.
        """

    def begin_custom_loop(self) -> None:
        """Do nothing: under ZeRO stage 1 the model has the same full parameter objects during and outside a forward.

        With FSDP2 this prepares the unsharded parameters for a script that clears ``.grad`` after a forward.
        """

    def apply_clearing(self) -> None:
        """Do nothing: in ZeRO stage 1 the script clears the ``.grad`` of the full parameters directly, at any time.

        With FSDP2 this carries a clearing of unsharded parameters' ``.grad`` over to the sharded gradients.
        """

    def show_gradients(self) -> None:
        """Do nothing: in ZeRO stage 1 the model has the same parameters during a forward, without placeholders.

        With FSDP2 this puts placeholders for the sharded gradients into the ``.grad`` of the unsharded parameters.
        """

    def on_zero_grad(self, members: Collection[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients of an optimizer's rows and of the full parameters that the rows belong to (ZeRO stage 1).

        Called after the optimizer's ``zero_grad``, which clears only the optimizer's own parameters: this rank's rows.

        Args:
            members: parameters of the optimizer, each this rank's rows of one parameter; parameters that are not
                sharded here are ignored.
            set_to_none: True sets gradients to None, False zeroes them in place.
        """
        for whole, rows in zip(self._whole, self.rows, strict=True):
            if rows.parameter in members and rows.parameter is not whole:
                clear_gradient(whole, set_to_none)
                clear_gradient(rows.parameter, set_to_none)

    def gradient_meter(self) -> None:
        """Return None: ZeRO stage 1 needs no measurement of this rank's own gradients during backward.

        Backward leaves these gradients, unreduced, in the ``.grad`` of the full parameters, where the caller can read
        them.
        """

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Clear or replace the gradients of this rank's rows as the script has done with those of full parameters.

        Called before the optimizer step (ZeRO stage 1). A row gradient becomes None or zeros, as the script has made
        the full gradient, or the rows of a tensor that the script has assigned. Where the script has assigned the
        ``.data`` of a full parameter since backward, the rows become views of the new tensor. With one rank the rows
        are the full parameters, and this does nothing to their gradients.

        Args:
            edited: full parameters whose ``.grad`` the script has edited, or replaced by another tensor.
        """
        self._reveal()
        if self._comm.size > 1:
            self._follow_data()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            gradient = rows.parameter.grad
            if whole is not rows.parameter and (gradient is not None or whole in edited):
                rows.parameter.grad = self._as_left(gradient, whole)

    def _as_left(self, gradient: Tensor | None, whole: nn.Parameter) -> Tensor | None:
        """Return the gradient of this rank's rows as the script has left the ``.grad`` of the full parameter."""
        shown = whole.grad
        if shown is None or isinstance(shown, IncompleteGradient):
            return None if gradient is None else after_clearing(gradient, shown)
        # The only rank has the parameter itself, whose gradient may be sparse, and cannot be sliced.
        return shown.detach() if self._comm.size == 1 else _block(shown.detach(), self._comm.size, self._comm.rank)

    def _width(self, whole: Tensor) -> int:
        """Return the number of elements of the largest block of rows."""
        return _block(whole, self._comm.size, 0).numel()


def _stand_in(parameter: nn.Parameter, parts: Sequence[nn.Module], comm: Communicator) -> nn.Parameter:
    """Replace ``parameter``, which becomes the optimizer's rows, by a new parameter in all modules; return that.

    One rank keeps ``parameter`` itself.
    """
    if comm.size == 1:
        return parameter
    whole = nn.Parameter(parameter.data)
    share_gradient_hooks(parameter, whole)
    for part in parts:
        for module in part.modules():
            for key, own in list(module_parameters(module).items()):
                if own is parameter:
                    setattr(module, key, whole)
    return whole


def _cut(
    name: str, parameter: nn.Parameter, whole: nn.Parameter, spec: ShardSpec, comm: Communicator
) -> ShardedParameter:
    if comm.size > 1:
        parameter.data = _block(whole.data, comm.size, comm.rank)
    return local_rows(name, parameter, spec, whole.shape, comm)


def _identity(gradient: Tensor) -> Tensor:
    return gradient


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _block(tensor: Tensor, parts: int, index: int) -> Tensor:
    """Return the rows of one rank as a view."""
    rows = _as_rows(tensor)
    place = block(len(rows), parts, index)
    return rows[place.start : place.stop]


class RowNormReducer:
    """Sums squared norms of sharded parameters over the shard ranks, for layer-wise optimizers such as LARS.

    Args:
        comm: the ranks that each hold some rows (of the first dimension) of every parameter.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, squares: Tensor) -> Tensor:
        """Sum squared norms of this rank's rows over the shard ranks. Collective: one all-reduce.

        Args:
            squares: 1-d tensor with the squared norm of this rank's rows of each parameter; it may be overwritten.

        Returns:
            A 1-d tensor on the CPU with the squared norms of the full tensors, in the same order.
        """
        whole = squares.to(self._comm.device)
        self._comm.start_all_reduce(whole, "all_reduce of the norms of layers").wait()
        return whole.cpu()


class RowGatherer:
    """All-gathers full tensors of which each shard rank holds some rows, for optimizers that need whole tensors.

    Args:
        comm: the ranks that each hold some rows (of the first dimension) of every parameter.
        shapes: for each parameter, as the optimizer has it, the shape of the tensor that its rows are cut from.
    """

    def __init__(self, comm: Communicator, shapes: Mapping[Tensor, tuple[int, ...]]) -> None:
        self._comm, self._shapes = comm, shapes

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All-gather the full tensors of which ``tensors`` are this rank's rows.

        Collective over the ranks that share the rows: one all-gather for each tensor.

        Args:
            parameter: the tensor of this rank's rows of the parameter, as the optimizer has it; it gives the full
                shape.
            tensors: this rank's rows of a value, a gradient or a state of that parameter, each of the shape of
                ``parameter``.

        Returns:
            One new tensor for each of ``tensors``, of the parameter's shape before it was cut into rows: its full
            shape, or that of this rank's slice under tensor parallelism.
        """
        shape = self._shapes[parameter]
        most, here = len(block(shape[0], self._comm.size, 0)), self._comm.rank
        found = []
        for rows in tensors:
            table = rows.new_empty(self._comm.size * most, *shape[1:])
            send = table[here * most : (here + 1) * most]
            send[: len(rows)].copy_(rows)
            self._comm.gather_into(table.view(-1), send.view(-1), "all_gather of a matrix")
            found.append(table[: shape[0]])
        return found

    def mine(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's rows of a full tensor, as a view of it. Not collective.

        Each shard rank has a contiguous block of the first dimension of every parameter, its rows. The inverse of
        ``gather``.

        Args:
            parameter: unused here; classes with other layouts than rows look up the parameter's split by it.
            whole: the full tensor, such as one that ``gather`` has returned.
        """
        place = block(len(whole), self._comm.size, self._comm.rank)
        return whole[place.start : place.stop]


def optimizer_pieces(
    optimizer: Optimizer, rows: Iterable[ShardedParameter], scalars: bool
) -> dict[str, Tensor | TensorSlice]:
    """Return the optimizer state of this rank's rows, as the rank writes it into a checkpoint. Not collective.

    The rows are this rank's block of the first dimension of each parameter that ZeRO or FSDP2 shards.

    Args:
        optimizer: the optimizer whose parameters are the rows.
        rows: this rank's rows of each parameter whose state this rank writes.
        scalars: whether this rank also writes 0-d state, such as step counters, which all ranks hold alike. Even then
            0-d state is left out for a parameter whose tensor slice is not at offset 0.

    Returns:
        A dict with keys ``"{parameter name}/{state key}"``, such as ``"head.weight/exp_avg"``. A value is a
        ``TensorSlice``, the state tensor with its place in the full tensor; 0-d state is the plain tensor. State that
        is None and rows of size 0 have no entry. Tensors are not copied: they share memory with ``optimizer.state``,
        which the next step changes.
    """
    found: dict[str, Tensor | TensorSlice] = {}
    for each in rows:
        for key, value in optimizer.state.get(each.parameter, {}).items():
            if value is None:
                continue
            tensor = number_tensor(value)
            piece = each.piece(tensor) if tensor.dim() else (tensor if scalars and each.leads else None)
            if piece is not None:
                found[f"{each.name}/{key}"] = piece
    return found


def load_optimizer_rows(optimizer: Optimizer, rows: Iterable[ShardedParameter], saved: SavedState) -> None:
    """Load the optimizer's state of these rows from a checkpoint; rows without saved state keep the state they have.

    The rows are this rank's block of the first dimension of each parameter that ZeRO or FSDP2 shards; only their bytes
    are read, of a checkpoint of any number of ranks. Not collective.

    Args:
        optimizer: the optimizer whose parameters are the rows; its ``state`` is written.
        rows: this rank's rows of each parameter.
        saved: the checkpoint, whose group ``optim`` has entries ``"{parameter name}/{state key}"``, such as
            ``"head.weight/exp_avg"``, of the full parameter's shape or 0-d.

    Raises:
        CheckpointError: a file of the checkpoint is damaged.
    """
    keys: dict[str, list[str]] = {}
    for entry in saved.names("optim"):
        owner, _, key = entry.rpartition("/")
        keys.setdefault(owner, []).append(key)
    for each in rows:
        name = each.known(keys)
        if name in keys:
            entries = {key: f"{name}/{key}" for key in sorted(keys[name])}
            optimizer.state[each.parameter] = {key: _state(each, saved, entry, key) for key, entry in entries.items()}
    place_step_counters(optimizer)


def _state(rows: ShardedParameter, saved: SavedState, entry: str, key: str) -> Tensor:
    shape = saved.shape("optim", entry)
    # A 0-d parameter's state has its shape () throughout; ``step`` is the optimizer's scalar and not a row of it.
    if shape != rows.spec.shape or key == "step":
        return saved.get("optim", entry).to(rows.parameter.device, copy=True)
    tensor = rows.read(saved, "optim", entry)
    return torch.empty_like(rows.parameter, dtype=tensor.dtype).copy_(tensor)
