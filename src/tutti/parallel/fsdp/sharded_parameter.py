"""Parameters sharded by rows: the rows that an optimizer updates, ZeRO stage 1, and optimizer state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import number_tensor
from tutti.comm.communicator import Communicator
from tutti.comm.partition import block
from tutti.nn.gradient_hooks import share_gradient_hooks
from tutti.nn.incomplete_gradient import after_clearing, clear_gradient, conceal
from tutti.parallel.ddp.buckets import plan_buckets
from tutti.parallel.whole_tensors import GatheredTensor, Region
from tutti.torch_compat import chunk_cat, module_parameters
from tutti.types import SavedState, ShardSpec, TensorSlice

_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """This rank's rows of one parameter.

    Attributes:
        name: in the plain model.
        parameter: the rows, as a plain leaf: the object that was the model's own, so that an optimizer that was made
            of it fits.
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
        """Return a tensor of these rows, such as optimizer state, with its place in the full tensor, for a checkpoint.

        Args:
            tensor: of the shape of ``parameter``.

        Returns:
            The ``TensorSlice``; the tensor itself, 0-d, for a 0-d parameter; None where this rank has no rows.
        """
        if not tensor.numel():
            return None
        if not self.spec.shape:
            return tensor.view(())
        return TensorSlice(tensor, self.spec.shape, self.spec.offset, self.spec.blocks, self.spec.rows)

    def read(self, saved: SavedState, group: str, name: str) -> Tensor:
        """Read this rank's rows of a tensor in a checkpoint, on the CPU; empty where the rank has no rows.

        Not collective.

        Args:
            saved: the checkpoint.
            group: group of tensors in the checkpoint, ``model``, ``ema`` or ``optim``.
            name: name of the tensor in the group, which has the parameter's global shape.
        """
        if not self.parameter.numel():
            return self.parameter.detach().cpu().clone()
        if not self.spec.shape:
            return saved.get(group, name).view(self.parameter.shape)
        parts = [saved.part(group, name, *region) for region in self.spec.regions(self.parameter.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def known(self, names: Collection[str]) -> str:
        """Return the name under which ``names``, such as those in a checkpoint, hold this parameter.

        The first of its own and its tied names that is in ``names``; its own name if none is.
        """
        return next((name for name in (self.name, *self.spec.tied) if name in names), self.name)


class ShardingEngine(Protocol):
    """Shards parameters by rows: this rank updates ``rows``, and forwards compute with unsharded parameters."""

    @property
    def rows(self) -> Sequence[ShardedParameter]:
        """This rank's rows of all parameters that the engine shards, frozen ones included."""

    @property
    def trained(self) -> Sequence[ShardedParameter]:
        """This rank's rows of the parameters that are or were trainable; a script may freeze and unfreeze them."""

    def train(self, names: Collection[str]) -> None:
        """Also train the parameters of these names from now on, which the script has thawed. Collective.

        Args:
            names: names in the plain model; those that this engine does not shard are ignored.
        """

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map each parameter object of the script's model to this rank's rows of it, which the optimizer updates."""

    def used(self) -> list[bool]:
        """Return for each parameter of ``trained`` whether it had a gradient on this rank in this step."""

    def reduce_scatter_gradients(self, step: int) -> None:
        """Set the ``.grad`` of all trained rows to the sum over the ranks that share one copy of the model. Collective.

        Args:
            step: number of the step from 1, for error messages.
        """

    def all_gather_parameters(self) -> None:
        """Make the next forward use the rows' updated values. Called on all ranks.

        By an all-gather now (stage 1) or in that forward (FSDP2).
        """

    def clear(self) -> None:
        """Set the ``.grad`` of rows and of the model's parameters to None."""

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the trained parameters as the script's model has them, in the order of ``trained``.

        Full parameters in stage 1, DTensors with FSDP2.
        """

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Take the gradients that the script has not cleared out of the trained rows; ``.grad`` is None afterwards.

        Returns:
            Clones of this rank's rows of the gradients, by the rows' parameter.
        """

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier reductions to the rows' gradients, and show the sums to the script or conceal them.

        A concealed gradient raises where the script reads it.

        Args:
            held: result of ``pop_gradients``, by the rows' parameter.
        """

    def pop_reached(self) -> list[bool]:
        """Return, and reset, for each parameter of ``trained`` whether a gradient-reducing backward has reached it.

        All False where backward itself reduces no gradients (stage 1).
        """

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Count parameters as reached by a backward in the coming reduction.

        Args:
            used: for each parameter of ``trained`` whether it was reached.
        """

    def begin_custom_loop(self) -> None:
        """Prepare for a custom training loop: notice from now on what a script does to ``.grad`` before backward.

        For FSDP2, where the model has other parameter objects between a forward and its backward.
        """

    def apply_clearing(self) -> None:
        """Clear gradients of trained rows that the script has cleared on unsharded parameters (FSDP2, after a forward).

        One engine's part of ``CustomLoopSync.apply_clearing``.
        """

    def show_gradients(self) -> None:
        """Set a placeholder as the ``.grad`` of unsharded parameters, which records what the script clears (FSDP2).

        ``apply_clearing`` reads it. One engine's part of ``CustomLoopSync.show_gradients``.
        """

    def on_zero_grad(self, members: Collection[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients that the script sees of these rows, after ``zero_grad`` of their optimizer.

        Args:
            members: parameters of the optimizer; those that are no rows of this engine are ignored.
            set_to_none: set gradients to None, else to zeros in place.
        """

    def apply_edits(self) -> None:
        """Set the rows' gradients, which the update uses, to the ``.grad`` that the script has left on the model."""

    def gradient_meter(self) -> Callable[[], float] | None:
        """Return a function that measures this rank's gradients before backward itself reduces them (FSDP2).

        It returns and resets the sum of their squares, which counts from the first call of ``gradient_meter`` on.

        Returns:
            The function; None where backward leaves this rank's gradient in the ``.grad`` of ``script_parameters``.
        """


def along_rows(rows: Sequence[ShardedParameter], comm: Communicator) -> list[GatheredTensor]:
    """Describe parameters sharded by rows as tensors to gather: for each its full shape and each rank's region.

    For optimizers that need whole tensors; nothing is gathered here.

    Args:
        rows: this rank's rows of each parameter.
        comm: the ranks that each hold a contiguous block of rows (of the first dimension).
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
    """Describe this rank's block of rows of a tensor, for optimizer and checkpoint; no memory is allocated or copied.

    Args:
        name: name of the parameter in the plain model.
        parameter: the rows, already cut.
        spec: global shape and offset of the tensor that the rows are cut from.
        local: shape of that tensor, which is a tensor slice under tensor parallelism.
        comm: the ranks that share its rows.
    """
    leads = not any(spec.offset)
    if local:
        spec = spec.cut(local, block(local[0], comm.size, comm.rank).start)
    return ShardedParameter(name, parameter, spec, tuple(local), leads)


class ZeroSharding:
    """ZeRO stage 1: parameters unsharded on every rank; gradients reduce-scattered into rows, updates all-gathered.

    Rajbhandari et al. 2019, arXiv 1910.02054, §5.1. A step sends as many bytes as data parallelism: a reduce-scatter of
    the gradients and an all-gather of the parameters, in messages of 25 MB.

    Args:
        named: the parameters to shard; with several ranks each becomes this rank's rows, for the optimizer.
        parts: modules in which new parameters (``replaced``) take their place.
        specs: global shape and offset of each parameter, by name.
        comm: the ranks that share one copy.
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
        self._aside: dict[nn.Parameter, Tensor] = {}
        self._buckets = plan_buckets([(whole.nbytes, str(whole.dtype)) for whole in self._whole], _BUCKET_BYTES)

    @property
    def replaced(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map the model's former parameters, which are the optimizer's rows now, to the full parameters in their place.

        Empty with one rank, whose rows are the full parameters.
        """
        pairs = zip(self.rows, self._whole, strict=True)
        return {rows.parameter: whole for rows, whole in pairs if rows.parameter is not whole}

    @property
    def trained(self) -> Sequence[ShardedParameter]:
        """This rank's rows of all parameters of the engine."""
        return self.rows

    def train(self, names: Collection[str]) -> None:
        """Do nothing: stage 1 shards trained parameters only. See ``ShardingEngine.train``."""

    def owners(self) -> dict[nn.Parameter, nn.Parameter]:
        """Map each full parameter of the script's model to this rank's rows of it, which the optimizer updates."""
        return {whole: rows.parameter for whole, rows in zip(self._whole, self.rows, strict=True)}

    def used(self) -> list[bool]:
        """Return for each parameter of ``trained`` whether its full ``.grad`` is not None on this rank."""
        return [whole.grad is not None for whole in self._whole]

    def reduce_scatter_gradients(self, step: int) -> None:
        """Reduce-scatter the full gradients bucket by bucket into the ``.grad`` of this rank's rows. Collective.

        A missing gradient counts as zeros. Full parameters have no ``.grad`` afterwards. One rank does nothing.

        Args:
            step: number of the step from 1, for error messages.
        """
        if self._comm.size == 1:
            return
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

    def all_gather_parameters(self) -> None:
        """All-gather the updated rows into the full parameters, bucket by bucket. Collective."""
        if self._comm.size == 1:
            return
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

    def clear(self) -> None:
        """Set the gradients of full parameters and of rows to None."""
        self._aside.clear()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            whole.grad = rows.parameter.grad = None

    def script_parameters(self) -> Sequence[nn.Parameter]:
        """Return the full parameters, which the script's model has, in the order of ``trained``."""
        return self._whole

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Take the gradients that the script has not cleared out of the rows; ``.grad`` is None afterwards.

        Returns:
            Clones of this rank's rows of the gradients, by the rows' parameter.
        """
        held = {}
        self._reveal()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            gradient = rows.parameter.grad
            left = None if gradient is None else after_clearing(gradient, whole.grad)
            if left is not None:
                held[rows.parameter] = left.clone()
            whole.grad = rows.parameter.grad = None
        return held

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Add gradients of earlier reductions to the rows' gradients, and conceal the sums with several ranks.

        The script cannot read a concealed gradient, of which a rank has its rows only.

        Args:
            held: result of ``pop_gradients``, by the rows' parameter.
        """
        for rows in self.rows:
            parameter, before = rows.parameter, held.get(rows.parameter)
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        if self._comm.size > 1:
            there = [(whole, r.parameter) for whole, r in zip(self._whole, self.rows, strict=True)]
            there = [(whole, own) for whole, own in there if own.grad is not None]
            self._aside = {own: own.grad for _, own in there if own.grad is not None}
            # Conceal the optimizer's ``.grad`` too: their norm would cover this rank's rows only.
            conceal([p for pair in there for p in pair], "in rows over the ranks (sharded:stage=1)")

    def _reveal(self) -> None:
        """Restore the rows' gradients that ``add_gradients`` concealed, cleared where the script has cleared them."""
        for parameter, gradient in self._aside.items():
            parameter.grad = after_clearing(gradient, parameter.grad)
        self._aside = {}

    def pop_reached(self) -> list[bool]:
        """Return False for each parameter: backward itself reduces no gradients in stage 1."""
        return [False] * len(self._whole)

    def mark_reached(self, used: Sequence[bool]) -> None:
        """Ignore ``used``: a parameter counts as reached by backward where its ``.grad`` is not None."""

    def begin_custom_loop(self) -> None:
        """Do nothing: the model has the same full parameter objects during and outside a forward."""

    def apply_clearing(self) -> None:
        """Do nothing: the script clears the ``.grad`` of full parameters itself.

        See ``ShardingEngine.apply_clearing``.
        """

    def show_gradients(self) -> None:
        """Do nothing: no placeholders are needed, as in ``apply_clearing``. See ``ShardingEngine.show_gradients``."""

    def on_zero_grad(self, members: Collection[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients of an optimizer's rows and of the full parameters that they belong to.

        Args:
            members: parameters of the optimizer; those that are no rows of this engine are ignored.
            set_to_none: set gradients to None, else to zeros in place.
        """
        for whole, rows in zip(self._whole, self.rows, strict=True):
            if rows.parameter in members and rows.parameter is not whole:
                clear_gradient(whole, set_to_none)
                clear_gradient(rows.parameter, set_to_none)

    def gradient_meter(self) -> None:
        """Return None: backward leaves this rank's gradients in the ``.grad`` of the full parameters."""

    def apply_edits(self) -> None:
        """Clear the gradients of rows whose full parameter's ``.grad`` the script has cleared, before the update.

        To None or to zeros, as the script did; it can make no other edits. One rank's rows are the full parameters, and
        nothing is to do.
        """
        self._reveal()
        for whole, rows in zip(self._whole, self.rows, strict=True):
            gradient = rows.parameter.grad
            if whole is not rows.parameter and gradient is not None:
                rows.parameter.grad = after_clearing(gradient, whole.grad)

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


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _block(tensor: Tensor, parts: int, index: int) -> Tensor:
    """Return the rows of one rank as a view."""
    rows = _as_rows(tensor)
    place = block(len(rows), parts, index)
    return rows[place.start : place.stop]


class RowNormReducer:
    """All-reduces squared norms of rows to the norms of whole layers. See ``tutti.types.NormReducer``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, squares: Tensor) -> Tensor:
        """Return the squared norms of full tensors from those of this rank's rows. Collective: one all-reduce."""
        whole = squares.to(self._comm.device)
        self._comm.start_all_reduce(whole, "all_reduce of the norms of layers").wait()
        return whole.cpu()


class RowGatherer:
    """All-gathers whole tensors from rows. See ``tutti.types.FullTensorGatherer``."""

    def __init__(self, comm: Communicator, rows: Iterable[ShardedParameter]) -> None:
        self._comm, self._of = comm, {each.parameter: each for each in rows}

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the full tensors of which ``tensors`` are this rank's rows.

        Collective: one all-gather for each tensor.

        Args:
            parameter: the rows of the parameter, whose full shape the results have.
            tensors: this rank's rows of a value, a gradient or a state of that parameter.
        """
        shape = self._of[parameter].local  # type: ignore[index]
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
        """Return this rank's rows of a full tensor, as a view. Not collective.

        Args:
            parameter: unused; see ``FullTensorGatherer.mine``.
            whole: the full tensor.
        """
        place = block(len(whole), self._comm.size, self._comm.rank)
        return whole[place.start : place.stop]


def optimizer_pieces(
    optimizer: Optimizer, rows: Iterable[ShardedParameter], scalars: bool
) -> dict[str, Tensor | TensorSlice]:
    """Return the optimizer's state of these rows as ``{parameter}/{key}``, for a checkpoint. Not collective.

    Args:
        optimizer: the optimizer over the rows.
        rows: the rows that this rank writes.
        scalars: whether this rank also writes 0-d state, such as step counters, which all ranks hold alike.

    Returns:
        ``TensorSlice`` of each state tensor with its place in the full tensor; 0-d tensors as they are.
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

    Reads only this rank's rows, of a checkpoint of any number of ranks. Not collective.

    Args:
        optimizer: the optimizer over the rows; its ``state`` is written.
        rows: the rows on this rank.
        saved: the checkpoint, whose group ``optim`` has entries ``{parameter}/{key}``.
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


def _state(rows: ShardedParameter, saved: SavedState, entry: str, key: str) -> Tensor:
    shape = saved.shape("optim", entry)
    # A 0-d parameter's state has its shape () throughout; ``step`` is the optimizer's scalar and not a row of it.
    if shape != rows.spec.shape or key == "step":
        return saved.get("optim", entry).clone()
    tensor = rows.read(saved, "optim", entry)
    return torch.empty_like(rows.parameter, dtype=tensor.dtype).copy_(tensor)
