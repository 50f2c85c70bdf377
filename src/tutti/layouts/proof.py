"""Whether a block may be split over ranks, found by computing: in double precision, on a few random numbers.

The block is run as it is; then every rank's part of it is run, one after the other, with the sums over ranks that the
real ones would make. Where outputs and the gradient of the input are the same, the split is right; where anything
else happens (an error, another call of a random generator, a difference) the block is not split.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.laws.shares import share
from tutti.nn.local import ATTENTION, DROPOUTS, Local
from tutti.nn.slices import Ranks, Slice

_MOST_LINEAR = 8
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29)


class Cut(NamedTuple):
    """What is divided of a tensor: its dimension, into how many units, in how many blocks of the first dimension."""

    dim: int
    units: int
    blocks: int = 1

    def take(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's slice; not copied unless there are several blocks."""
        mine = share(self.units, ranks, rank)
        step = tensor.shape[self.dim] // self.blocks
        each = step // self.units
        parts = [tensor.narrow(self.dim, b * step + each * mine.start, each * len(mine)) for b in range(self.blocks)]
        return parts[0] if self.blocks == 1 else torch.cat(parts, self.dim)

    def offset(self, tensor: Tensor, rank: int, ranks: int) -> tuple[int, ...]:
        """Where in the first block a rank's slice begins."""
        each = tensor.shape[self.dim] // self.blocks // self.units
        begin = each * share(self.units, ranks, rank).start
        return tuple(begin if dim == self.dim else 0 for dim in range(tensor.dim()))


@dataclass(frozen=True)
class Region:
    """How a block is split: linear layers that take its input by outputs, the one behind them by inputs.

    Attributes:
        columns: how each of the first is cut, by name.
        row: the name of the last.
        units: heads, or features, that are divided.
        width: inputs of the last.
        sizes, draws: see ``tutti.nn.local.Local``.
        dropout: whether attention drops by itself.
    """

    columns: Mapping[str, Cut]
    row: str
    units: int
    width: int
    sizes: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    dropout: bool = False


def examine(block: nn.Module, ranks: int, linears: Collection[str] | None = None) -> Region | None:
    """How ``block`` may be split over ``ranks``; None where it may not.

    ``linears``: names of the linear layers in it that may be split; default: all. Everything else stays as it is.
    """
    chosen = {
        name for name, m in block.named_modules() if type(m) is nn.Linear and (linears is None or name in linears)
    }
    if not 2 <= len(chosen) <= _MOST_LINEAR or not _takes_one(block):
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return _examine(copy.deepcopy(block).cpu().double().requires_grad_(False).train(), chosen, ranks)
    except Exception:
        # The block may need another input, or other shapes than those that a part has.
        return None


def _examine(block: nn.Module, linears: Collection[str], ranks: int) -> Region | None:
    trial = _Trial(block, linears, ranks)
    reference = trial.reference()
    if reference is None:
        return None
    ways = product(reference.groups, ((True, False), (False, False), (True, True), (False, True)))
    for group, (fused, prefer_last) in ways:
        try:
            region = trial.split(reference, group, fused=fused, prefer_last=prefer_last)
        except Exception:
            # Shapes that do not fit: another way of cutting may.
            continue
        if region is not None:
            return region
    return None


def _takes_one(block: nn.Module) -> bool:
    """Whether the forward takes its input and nothing else, such as a mask that a later call may give."""
    names = list(inspect.signature(block.forward).parameters.values())
    return len(names) == 1 and names[0].kind in (names[0].POSITIONAL_ONLY, names[0].POSITIONAL_OR_KEYWORD)


class _Group(NamedTuple):
    """Layers that are given the same, the one that comes next, and how many heads are seen between them."""

    firsts: list[str]
    last: str
    heads: int | None


class _Whole(NamedTuple):
    """The block as it is.

    Attributes:
        x, out: input and output.
        direction: the output's gradient.
        gradients: of the input and of all parameters but the layers'.
        groups: of layers that may be split together.
        draws: shapes of what is dropped from.
        dropout: whether attention drops by itself.
    """

    x: Tensor
    out: Tensor
    direction: Tensor
    gradients: list[Tensor | None]
    groups: list[_Group]
    draws: list[torch.Size]
    dropout: bool


class _Watch(TorchFunctionMode):
    """Sees how many heads there are and what is dropped, and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Size] = []
        self.dropout = False
        self.events: list[tuple[str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            self.draws.append(args[0].shape)
            return args[0]
        if func is ATTENTION:
            self.draws.append(args[0].shape)
            self.events.append(("", args[0]))
            self.dropout = self.dropout or (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func in _SOFTMAX and args[0].dim() > 3:
            self.events.append(("", args[0]))
        return func(*args, **kwargs)

    def groups(self) -> list[_Group]:
        """Layers that are given the same tensor, the layer that is called next, and the heads between them."""
        calls = [i for i, (name, _) in enumerate(self.events) if name]
        names = [self.events[i][0] for i in calls]
        given = [self.events[i][1].data_ptr() for i in calls]
        found, start = [], 0
        while start < len(calls):
            end = next((i for i in range(start, len(calls)) if given[i] != given[start]), None)
            if end is None:
                break
            between = self.events[calls[start] : calls[end]]
            heads = next((tensor.shape[-3] for name, tensor in between if not name and tensor.dim() > 3), None)
            found.append(_Group(names[start:end], names[end], heads))
            start = end + 1
        return found


class _Probe(Local):
    """A part's forward, in which the places to cut are chosen for the first time, and nothing is dropped."""

    drops = False

    def __init__(self, slice_: Slice, width: int, draws: list[torch.Size], prefer_last: bool) -> None:
        super().__init__(slice_, width, [], [])
        self._whole, self._prefer_last = draws, prefer_last

    def cut(self, have: int, sizes: list[int]) -> int:
        whole = math.prod(sizes)
        able = [i for i, size in enumerate(sizes) if size * have % whole == 0]
        named = [i for wanted in (self.slice_.length, self.width) for i in able if sizes[i] == wanted] or able
        self.sizes.append(named[-1 if self._prefer_last else 0])
        return self.sizes[-1]

    def dim(self, tensor: Tensor) -> int:
        whole = self._whole[self.drawn]
        differ = [d - tensor.dim() for d in range(tensor.dim()) if tensor.shape[d] != whole[d]]
        if len(differ) > 1:
            raise ValueError("split in several dimensions")
        self.draws.append(differ[0] if differ else 0)
        return self.draws[-1]


class _Tap(torch.autograd.Function):
    """The input of a column: its gradient is told, and perhaps replaced by the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, told: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.told = told
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.told(gradients[0]), None


class _Trial:
    """One block, on which ways to split it are tried."""

    def __init__(self, block: nn.Module, linears: Collection[str], ranks: int) -> None:
        self.block, self.ranks = block, ranks
        self.linears = {name: m for name, m in block.named_modules() if name in linears and isinstance(m, nn.Linear)}
        own = {id(p) for m in self.linears.values() for p in m.parameters()}
        self.others = [p.requires_grad_() for p in block.parameters() if id(p) not in own]

    def reference(self) -> _Whole | None:
        """The block as it is; None where it draws in a way of its own, or its output is not made place by place."""
        sizes = {n for m in self.linears.values() for n in (m.in_features, m.out_features)}
        samples, positions = [p for p in _PRIMES if all(size % p for size in sizes)][:2]
        generator = torch.Generator().manual_seed(0)
        first = next(iter(self.linears.values())).in_features
        x = torch.randn(samples, positions, first, generator=generator, dtype=torch.float64).requires_grad_()
        before, watch = torch.get_rng_state(), _Watch()
        handles = [
            m.register_forward_pre_hook(lambda m, args, name=name: watch.events.append((name, args[0])))
            for name, m in self.linears.items()
        ]
        with watch:
            out = self.block(x)
        for handle in handles:
            handle.remove()
        drew = not torch.equal(before, torch.get_rng_state())
        order = [name for name, _ in watch.events if name]
        if drew or not isinstance(out, Tensor) or out.shape[:-1] != x.shape[:-1] or len(set(order)) < len(order):
            return None
        direction = torch.randn(out.shape, generator=generator, dtype=out.dtype)
        gradients: list[Tensor | None] = []
        gradients += torch.autograd.grad(out, [x, *self.others], direction, allow_unused=True)
        groups, dropout = watch.groups(), watch.dropout
        return _Whole(x.detach(), out.detach(), direction, gradients, groups, watch.draws, dropout)

    def split(self, whole: _Whole, group: _Group, *, fused: bool, prefer_last: bool) -> Region | None:
        """The region if it is right to split the group so. Raises whatever parts of it raise."""
        width = self.linears[group.last].in_features
        units = group.heads or width
        columns = {name: self._cut(self.linears[name].out_features, width, units, fused) for name in group.firsts}
        if width % units or units < self.ranks or None in columns.values():
            return None
        dropout = whole.dropout and group.heads is not None
        region = Region({n: c for n, c in columns.items() if c}, group.last, units, width, dropout=dropout)
        return self._prove(region, whole, prefer_last)

    def _cut(self, outputs: int, width: int, units: int, fused: bool) -> Cut | None:
        """How outputs of one layer are divided: multiples of the width or, with fewer heads for keys, parts of it."""
        each = width // units
        if outputs % width == 0:
            times = outputs // width
            return Cut(0, units, times) if fused else Cut(0, units)
        if outputs % each == 0 and units % self.ranks == 0 and (outputs // each) % self.ranks == 0:
            return Cut(0, outputs // each)
        return None

    def _prove(self, region: Region, whole: _Whole, prefer_last: bool) -> Region | None:
        runs = [_Run(self, region, rank, whole, prefer_last) for rank in range(self.ranks)]
        for run in runs:
            run.forward(None)
        total = torch.stack([run.part for run in runs]).sum(0)
        for run in runs:
            run.backward(total, None)
        sums = {name: torch.stack([run.gradients[name] for run in runs]).sum(0) for name in region.columns}
        for run in runs:
            out, gradients = run.backward(total, sums)
            if not (_same(out, whole.out) and all(map(_same, gradients, whole.gradients))):
                return None
        found = runs[0].mode
        if any((run.mode.sizes, run.mode.draws) != (found.sizes, found.draws) for run in runs):
            return None
        return Region(region.columns, region.row, region.units, region.width, found.sizes, found.draws, region.dropout)


class _Run:
    """One rank's part of a block."""

    def __init__(self, trial: _Trial, region: Region, rank: int, whole: _Whole, prefer_last: bool) -> None:
        self._trial, self._region, self._rank, self._whole = trial, region, rank, whole
        self._prefer_last = prefer_last
        self.part = torch.empty(0)
        self.gradients: dict[str, Tensor] = {}
        self.mode: _Probe

    def forward(self, total: Tensor | None, sums: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The part's output and its input; ``total``: what the last layer gives on all ranks together."""
        region, ranks, linears = self._region, self._trial.ranks, self._trial.linears
        x = self._whole.x.clone().requires_grad_()
        for name, cut in region.columns.items():
            linears[name].forward = self._column(name, cut, sums)  # type: ignore[method-assign,assignment]
        last, cut = linears[region.row], Cut(1, region.units)

        def row(inputs: Tensor) -> Tensor:
            self.part = part = functional.linear(inputs, cut.take(last.weight, self._rank, ranks))
            out = part if total is None else part + (total - part).detach()
            return out if last.bias is None else out + last.bias

        last.forward = row  # type: ignore[method-assign,assignment]
        slice_ = Slice("", cast(Ranks, _Nobody(self._rank, ranks)), region.units)
        self.mode = _Probe(slice_, region.width, self._whole.draws, self._prefer_last)
        try:
            with self.mode:
                out = self._trial.block(x)
        finally:
            for linear in linears.values():
                vars(linear).pop("forward", None)
        self.part = self.part.detach()
        return out, x

    def backward(self, total: Tensor, sums: Mapping[str, Tensor] | None) -> tuple[Tensor, list[Tensor | None]]:
        """Output and gradients as of ``_Whole``; ``sums``: of the columns' inputs' gradients, over all ranks."""
        out, x = self.forward(total, sums)
        wanted = [x, *self._trial.others]
        return out.detach(), list(torch.autograd.grad(out, wanted, self._whole.direction, allow_unused=True))

    def _column(self, name: str, cut: Cut, sums: Mapping[str, Tensor] | None) -> Callable[[Tensor], Tensor]:
        linear, ranks = self._trial.linears[name], self._trial.ranks

        def told(gradient: Tensor) -> Tensor:
            self.gradients[name] = gradient
            return gradient if sums is None else sums[name]

        def column(inputs: Tensor) -> Tensor:
            bias = None if linear.bias is None else cut.take(linear.bias, self._rank, ranks)
            tapped: Tensor = _Tap.apply(inputs, told)  # type: ignore[no-untyped-call]
            return functional.linear(tapped, cut.take(linear.weight, self._rank, ranks), bias)

        return column


class _Nobody(NamedTuple):
    """A rank among others that are not there."""

    rank: int
    size: int


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    scale = float(other.abs().max()) if other.numel() else 1.0
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-9, atol=1e-9 * scale))
