"""Layers of which this rank holds a slice. Each keeps the names and the parameters of the plain one, cut down.

A layer becomes one by getting a subclass of its class: hooks, copies and the model around it stay as they were.
Shoeybi et al. 2019, arXiv 1909.08053.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from tutti.laws.shares import share


class Ranks(Protocol):
    """The ranks that hold the other slices: ``tutti.comm.differentiable.Ranks``."""

    rank: int
    size: int

    def copy(self, whole: Tensor, name: str) -> Tensor:
        """The same; backward sums over the ranks."""

    def reduce(self, part: Tensor, name: str) -> Tensor:
        """The sum over the ranks; backward passes on."""

    def gather(self, part: Tensor, dim: int, length: int, name: str) -> Tensor:
        """All shares of ``length`` along ``dim``; backward takes this rank's."""


class Slice(NamedTuple):
    """Of one layer here.

    Attributes:
        name: of the layer in the whole model.
        ranks: that hold the others.
        length: of what is divided: outputs, inputs, heads, rows of a table or features.
    """

    name: str
    ranks: Ranks
    length: int

    @property
    def mine(self) -> range:
        """This rank's share of ``length``."""
        return share(self.length, self.ranks.size, self.ranks.rank)


class Divided(nn.Module):
    """Base of all layers here: talks to other ranks in its forward, or must know its place among them."""

    tutti_slice: Slice


class Column(Divided):
    """A linear layer split by outputs: whole inputs → this rank's outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs here)."""
        result: Tensor = super().forward(self.tutti_slice.ranks.copy(input, self.tutti_slice.name))
        return result


class Row(Divided):
    """A linear layer split by inputs: this rank's inputs → whole outputs. The bias is whole on every rank."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs here) → (…, outputs)."""
        part = functional.linear(input, self.weight)
        whole = self.tutti_slice.ranks.reduce(part, self.tutti_slice.name)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class Gathered(Divided):
    """A linear or convolution layer split by outputs, which are gathered: whole inputs → whole outputs."""

    def forward(self, input: Tensor, *rest: Any, **options: Any) -> Tensor:
        """As the plain layer."""
        name, ranks, length = self.tutti_slice
        part = super().forward(ranks.copy(input, name), *rest, **options)
        dim = -1 - len(self.kernel_size) if isinstance(self, _ConvNd) else -1
        return ranks.gather(part, part.dim() + dim, length, name)


class Vocabulary(Divided):
    """An embedding split by rows: every rank looks up its own, and the sum is the whole."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        """As the plain one."""
        mine, padding = self.tutti_slice.mine, self.padding_idx
        elsewhere = (input < mine.start) | (input >= mine.stop)
        rows = (input - mine.start).masked_fill(elsewhere, 0)
        own = padding - mine.start if padding is not None and padding in mine else None
        part = functional.embedding(rows, self.weight, own).masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.tutti_slice.ranks.reduce(part, self.tutti_slice.name)


class Dropped(Divided):
    """Dropout of features of which this rank has a share: draws for all of them, as one device would."""

    p: float

    def forward(self, input: Tensor) -> Tensor:
        """(…, features here) → the same."""
        if not self.training or self.p == 0.0:
            return functional.dropout(input, self.p, False)
        return dropped(input, self.p, input.dim() - 1, self.tutti_slice)


def dropped(part: Tensor, p: float, dim: int, slice_: Slice) -> Tensor:
    """Dropout of this rank's share along ``dim``; ``length`` may count groups of it, such as heads."""
    here = len(slice_.mine)
    if p == 0.0:
        return part
    shape, each = list(part.shape), part.shape[dim] // here
    shape[dim] = each * slice_.length
    # In the order in which the numbers lie in memory, for that is the order of the draws.
    order = sorted(range(part.dim()), key=lambda d: -part.stride()[d])
    ones = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device).fill_(1)
    noise = functional.dropout(ones, p)
    return part * noise.narrow(dim, each * slice_.mine.start, part.shape[dim])


def divide(module: nn.Module, kind: type[Divided], slice_: Slice) -> None:
    """Make ``module`` the ``kind`` of layer. Its parameters are cut by the caller."""
    plain = type(module)
    module.__class__ = type(f"{kind.__name__}{plain.__name__}", (kind, plain), {"__module__": plain.__module__})
    module.tutti_slice = slice_  # type: ignore[assignment]
