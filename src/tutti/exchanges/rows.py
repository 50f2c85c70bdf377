"""Parameters of which a rank updates its rows alone: what an optimizer is given, and what a checkpoint is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.communicator import Communicator
from tutti.exchanges.buckets import plan
from tutti.exchanges.saved import as_tensor
from tutti.laws.shares import block
from tutti.types import Piece, SavedState, ShardSpec

_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, eq=False)
class Rows:
    """This rank's rows of one parameter.

    Attributes:
        name: in the plain model.
        parameter: the rows, as a plain leaf: the object that was the model's own, so that an optimizer that was made
            of it fits.
        spec: the whole shape and where the rows begin. A parameter without dimensions is one row.
        local: shape of what they are rows of, which is itself a slice where a layout splits tensors.
        leads: whether that slice is the first, whose holder writes what all have alike.
    """

    name: str
    parameter: nn.Parameter
    spec: ShardSpec
    local: tuple[int, ...]
    leads: bool = True

    def piece(self, tensor: Tensor) -> Tensor | Piece | None:
        """``tensor``, which has a number for each of the rows', as a part of the whole; None where there is none."""
        if not tensor.numel():
            return None
        if not self.spec.shape:
            return tensor.view(())
        return Piece(tensor, self.spec.shape, self.spec.offset, self.spec.blocks, self.spec.rows)

    def read(self, saved: SavedState, group: str, name: str) -> Tensor:
        """The same rows of a saved tensor of the whole shape."""
        if not self.parameter.numel():
            return self.parameter.detach().cpu().clone()
        if not self.spec.shape:
            return saved.get(group, name).view(1)
        parts = [saved.part(group, name, *region) for region in self.spec.regions(self.parameter.shape)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def known(self, names: Collection[str]) -> str:
        """The name among ``names`` that a saved tensor has, which may be another one of a tied parameter's."""
        return next((name for name in (self.name, *self.spec.tied) if name in names), self.name)


class Engine(Protocol):
    """Keeps parameters so that this rank updates ``rows`` of them."""

    @property
    def rows(self) -> Sequence[Rows]:
        """Those that are here."""

    def used(self) -> list[bool]:
        """Which of the trained parameters had a gradient here in this step."""

    def collect(self, step: int) -> None:
        """Give every trained row its gradient, summed over the ranks that share a copy. Collective."""

    def publish(self) -> None:
        """Let forwards see the rows as they are now. Collective."""

    def clear(self) -> None:
        """Forget all gradients."""


def rows_of(name: str, parameter: nn.Parameter, spec: ShardSpec, local: Sequence[int], comm: Communicator) -> Rows:
    """This rank's block of the rows of a tensor of shape ``local``, of which ``spec`` says where it sits."""
    leads = not any(spec.offset)
    if local:
        spec = spec.cut(local, block(local[0], comm.size, comm.rank).start)
    return Rows(name, parameter, spec, tuple(local), leads)


class Sliced:
    """Parameters whole on every rank; gradients are summed into rows, which are updated and sent to all (ZeRO stage 1).

    Rajbhandari et al. 2019, arXiv 1910.02054, §5.1. A step sends what data parallelism sends: a reduce-scatter of the
    gradients and an all-gather of the parameters, in messages of 25 MB.
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
        self._buckets = plan([(whole.nbytes, str(whole.dtype)) for whole in self._whole], _BUCKET_BYTES)

    @property
    def replaced(self) -> dict[nn.Parameter, nn.Parameter]:
        """What the model computes with now, by the objects that were its parameters before."""
        pairs = zip(self.rows, self._whole, strict=True)
        return {rows.parameter: whole for rows, whole in pairs if rows.parameter is not whole}

    def used(self) -> list[bool]:
        return [whole.grad is not None for whole in self._whole]

    def collect(self, step: int) -> None:
        if self._comm.size == 1:
            return
        for number, members in enumerate(self._buckets):
            whole = [self._whole[i] for i in members]
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
            send = whole[0].new_empty(self._comm.size, sum(map(self._width, whole)))
            torch._chunk_cat([_as_rows(g) for g in gradients], 0, self._comm.size, out=send)
            for parameter in whole:
                parameter.grad = None
            mine = send.new_empty(send.shape[1])
            self._comm.scatter_sum(mine, send.view(-1), f"sum of gradients {number} in step {step}")
            for index, piece in zip(members, mine.split([self._width(p) for p in whole]), strict=True):
                rows = self.rows[index].parameter
                rows.grad = piece[: rows.numel()].view_as(rows)

    def publish(self) -> None:
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
        for whole, rows in zip(self._whole, self.rows, strict=True):
            whole.grad = rows.parameter.grad = None

    def _width(self, whole: Tensor) -> int:
        """Numbers of the largest block of rows."""
        return _block(whole, self._comm.size, 0).numel()


def _stand_in(parameter: nn.Parameter, parts: Sequence[nn.Module], comm: Communicator) -> nn.Parameter:
    """What the model computes with from now on, where ``parameter`` becomes the rows that the optimizer has."""
    if comm.size == 1:
        return parameter
    whole = nn.Parameter(parameter.data)
    for part in parts:
        for module in part.modules():
            for key, own in list(module._parameters.items()):
                if own is parameter:
                    setattr(module, key, whole)
    return whole


def _cut(name: str, parameter: nn.Parameter, whole: nn.Parameter, spec: ShardSpec, comm: Communicator) -> Rows:
    if comm.size > 1:
        parameter.data = _block(whole.data, comm.size, comm.rank)
    return rows_of(name, parameter, spec, whole.shape, comm)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def _block(tensor: Tensor, parts: int, index: int) -> Tensor:
    """Rows of one rank, as a view."""
    rows = _as_rows(tensor)
    place = block(len(rows), parts, index)
    return rows[place.start : place.stop]


class RowNorms:
    """Completes norms of layers from those of their rows. See ``tutti.types.Norms``."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, squares: Tensor) -> Tensor:
        whole = squares.to(self._comm.device)
        self._comm.start_all_reduce(whole, "all_reduce of the norms of layers").wait()
        return whole.cpu()


class WholeRows:
    """Makes whole tensors of rows. See ``tutti.types.Wholes``."""

    def __init__(self, comm: Communicator, rows: Iterable[Rows]) -> None:
        self._comm, self._of = comm, {each.parameter: each for each in rows}

    def gather(self, parameter: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One all-gather for each."""
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
        """No message."""
        place = block(len(whole), self._comm.size, self._comm.rank)
        return whole[place.start : place.stop]


def optimizer_pieces(optimizer: Optimizer, rows: Iterable[Rows], scalars: bool) -> dict[str, Tensor | Piece]:
    """``{parameter}/{key}`` of what an optimizer keeps for these rows; ``scalars``: this rank writes what all have."""
    found: dict[str, Tensor | Piece] = {}
    for each in rows:
        for key, value in optimizer.state.get(each.parameter, {}).items():
            if value is None:
                continue
            tensor = as_tensor(value)
            piece = each.piece(tensor) if tensor.dim() else (tensor if scalars and each.leads else None)
            if piece is not None:
                found[f"{each.name}/{key}"] = piece
    return found


def load_optimizer_rows(optimizer: Optimizer, rows: Iterable[Rows], saved: SavedState) -> None:
    """Give the optimizer what was saved of these rows; parameters without any start afresh."""
    keys: dict[str, list[str]] = {}
    for entry in saved.names("optim"):
        owner, _, key = entry.rpartition("/")
        keys.setdefault(owner, []).append(key)
    for each in rows:
        name = each.known(keys)
        if name in keys:
            entries = {key: f"{name}/{key}" for key in sorted(keys[name])}
            optimizer.state[each.parameter] = {key: _state(each, saved, entry, key) for key, entry in entries.items()}


def _state(rows: Rows, saved: SavedState, entry: str, key: str) -> Tensor:
    shape = saved.shape("optim", entry)
    # Of a parameter without dimensions everything is one number; a step counter is one of the optimizer's own.
    if shape != rows.spec.shape or key == "step":
        return saved.get("optim", entry).clone()
    tensor = rows.read(saved, "optim", entry)
    return torch.empty_like(rows.parameter, dtype=tensor.dtype).copy_(tensor)
