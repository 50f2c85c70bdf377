"""ZeRO stage 1: full parameters on every rank, of which each rank's optimizer updates some rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.comm.partition import block
from tutti.nn.gradient_hooks import share_gradient_hooks
from tutti.nn.incomplete_gradient import IncompleteGradient, after_clearing, clear_gradient, conceal
from tutti.nn.partial_gradient import GradientParts, GradientSplit
from tutti.parallel.ddp.buckets import plan_buckets
from tutti.parallel.ddp.gradient_arithmetic import accumulated
from tutti.parallel.fsdp.row_collectives import RowGatherer
from tutti.parallel.fsdp.sharded_parameter import ShardedParameter, local_rows
from tutti.torch_compat import chunk_cat, module_parameters, tensor_version
from tutti.types.shard_spec import ShardSpec

_BUCKET_BYTES = 25 << 20


class ZeroSharding:
    """ZeRO stage 1: parameters unsharded on every rank; gradients reduce-scattered into rows, updates all-gathered.

    Rajbhandari et al. 2019, arXiv 1910.02054, §5.1. A step sends as many bytes as data parallelism: a reduce-scatter of
    the gradients and an all-gather of the parameters, in messages of up to 25 MiB. With one rank nothing is cut or
    sent. The constructor is not collective.

    Args:
        named: (name, parameter) pairs to shard. With several ranks each of these parameter objects becomes this rank's
            rows, a block of the first dimension, so that an optimizer that has the objects updates the rows.
        parts: modules of this rank, which with several ranks get a new full parameter in place of each of these
            objects; the property ``replaced`` maps the old objects to the new ones.
        specs: global shape and offset of each parameter, by name.
        comm: the shard ranks, which share one copy of the parameters.

    Attributes:
        rows: a ``ShardedParameter`` for each parameter in ``named``, in order: its name, this rank's rows
            (``parameter``, a view of the full parameter; with one rank the full parameter itself) and their place in
            the full tensor.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        parts: Sequence[nn.Module],
        specs: Mapping[str, ShardSpec],
        comm: Communicator,
    ) -> None:
        self._comm = comm
        self._whole = [_new_parameter(parameter, parts, comm) for _, parameter in named]
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
        ``.grad`` afterwards. With one rank the call does nothing.

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
        each bucket of up to 25 MiB. With one rank the call does nothing.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
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
            The gradients of this rank's rows, not copied; the key is the optimizer's parameter, that is the tensor of
            rows. Rows without a gradient, also where the script has set the full parameter's ``.grad`` to None, have no
            entry.
        """
        held = {}
        self._reveal()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            gradient = rows.parameter.grad
            left = None if gradient is None else self._as_left(gradient, whole)
            if left is not None:
                held[rows.parameter] = left
            whole.grad = rows.parameter.grad = None
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier backwards to this rank's rows of the gradients just reduced (gradient accumulation).

        ZeRO stage 1: each rank holds the reduced gradients of its rows only. With several ranks the call therefore puts
        placeholders into the ``.grad`` of the model's full parameters and of the rows; ``apply_edits`` and
        ``pop_gradients`` take the gradients out again. What the script can do with a placeholder depends on where it
        is:

        - In a full parameter: everything. Norms and other computations are with the whole gradient, by all-gathers over
          the shard ranks, so that all of these must make them.
        - In the rows, which the optimizer has: norms, scaling and clamping in place; other reads raise UsageError.
        - In either, of a parameter of which each tensor-parallel rank has a slice: clearing alone; every read raises
          UsageError.

        The call itself is not collective.

        Args:
            held: the earlier gradients as ``pop_gradients`` returned them: the key is the optimizer's parameter (the
                tensor of rows), the value its gradient. May be empty.
        """
        for rows in self.rows:
            parameter, before = rows.parameter, held.get(rows.parameter)
            if before is not None:
                parameter.grad = accumulated(before, parameter.grad)
        if self._comm.size > 1:
            parts = GradientParts(self._comm)
            for whole, rows in zip(self._whole, self.rows, strict=True):
                if rows.parameter.grad is not None:
                    self._conceal(whole, rows, rows.parameter.grad, parts)

    def _conceal(self, whole: nn.Parameter, rows: ShardedParameter, gradient: Tensor, parts: GradientParts) -> None:
        """Set the gradient of a parameter's rows aside; put placeholders into the ``.grad`` of model and optimizer.

        Into the optimizer's, too, because its norm would be that of this rank's rows only.
        """
        self._aside[rows.parameter] = gradient
        objects, place = [whole, rows.parameter], "in rows over the ranks (sharded:stage=1)"
        if rows.local == rows.spec.shape:
            gatherer = RowGatherer(self._comm, {gradient: tuple(_as_rows(whole).shape)})
            split = GradientSplit(gatherer, gradient, tuple(whole.shape))
            parts.conceal(objects, place, lambda: gradient, split=split)
        else:
            # Rows of a tensor slice: tensor ranks hold the others.
            conceal(objects, place)

    def _reveal(self) -> None:
        """Restore the rows' gradients that ``add_gradients`` concealed, cleared where the script has cleared them."""
        for parameter, gradient in self._aside.items():
            parameter.grad = after_clearing(gradient, parameter.grad)
        self._aside = {}

    def pop_reached(self) -> list[bool]:
        """Return a list of False, one for each sharded parameter, because ZeRO stage 1 needs no such record.

        Stages 2 and 3 record which parameters have received a gradient in backward, and this method returns the record
        and clears it. Stage 1 keeps full parameters: a parameter has received a gradient if its ``.grad`` is not None.
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
        Not collective.

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
        """Set the ``.grad`` of this rank's rows from the ``.grad`` of the full parameters, as the script has left them.

        Called before the optimizer step (ZeRO stage 1), which uses the rows. Not collective. With one rank the rows are
        the full parameters, and nothing is changed. With several ranks the new row gradient depends on the present
        ``.grad`` of the full parameter:

        - None: the row gradient becomes None.
        - A placeholder of ``add_gradients``: the row gradient becomes zeros if the script has zeroed the placeholder,
          and else stays. Edits of a placeholder have changed the row gradient already.
        - A plain tensor, which the script has assigned or edited: the row gradient becomes a view of this rank's rows
          of the tensor. A row gradient of None stays None unless the parameter is in ``edited``.

        Before that, a placeholder in the ``.grad`` of rows is replaced by their gradient, which is cleared, too, if the
        script has cleared the placeholder. Where the script has assigned the ``.data`` of a full parameter since
        backward, the rows also become views of the new tensor.

        Args:
            edited: full parameters whose ``.grad`` the script has edited, or replaced by another tensor; parameters
                whose ``.grad`` it has only cleared need not be among them.
        """
        self._reveal()
        if self._comm.size > 1:
            self._follow_data()
        # A list would compare tensors by their elements.
        assigned = set(edited)
        for whole, rows in zip(self._whole, self.rows, strict=True):
            gradient = rows.parameter.grad
            if whole is not rows.parameter and (gradient is not None or whole in assigned):
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


def _new_parameter(parameter: nn.Parameter, parts: Sequence[nn.Module], comm: Communicator) -> nn.Parameter:
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


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _block(tensor: Tensor, parts: int, index: int) -> Tensor:
    """Return the rows of one rank as a view."""
    rows = _as_rows(tensor)
    place = block(len(rows), parts, index)
    return rows[place.start : place.stop]
