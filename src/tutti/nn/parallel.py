"""Layers of which this rank holds a slice. Each keeps the names and the parameters of the plain one, cut down.

A layer becomes one by getting a subclass of its class: hooks, copies and the model around it stay as they were.
Shoeybi et al. 2019, arXiv 1909.08053; by positions between them: Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from tutti.nn.parted import Parted, copied, summed
from tutti.nn.slices import Slice, dropped


class Divided(nn.Module):
    """Base of all layers here: talks to other ranks in its forward, or must know its place among them."""

    tutti_slice: Slice


class Column(Divided):
    """A linear layer split by outputs: whole inputs → this rank's outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs here)."""
        result: Tensor = super().forward(copied(input, self.tutti_slice))
        return result


class Row(Divided):
    """A linear layer split by inputs: this rank's inputs → whole outputs. The bias is whole on every rank."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs here) → (…, outputs)."""
        part = functional.linear(input, self.weight)
        whole = summed(part, self.tutti_slice)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class Gathered(Divided):
    """A linear or convolution layer split by outputs, which are gathered: whole inputs → whole outputs."""

    def forward(self, input: Tensor, *rest: Any, **options: Any) -> Tensor:
        """As the plain layer."""
        name, ranks, length, _ = self.tutti_slice
        part = super().forward(copied(input, self.tutti_slice), *rest, **options)
        dim = -1 - len(self.kernel_size) if isinstance(self, _ConvNd) else -1
        return ranks.gather(part, part.dim() + dim, length, name)


class Scores(Divided):
    """The last linear layer, split by outputs that stay so: whole inputs → scores of some classes here."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs) → (…, classes), a ``Parted``."""
        return Parted.of(super().forward(copied(input, self.tutti_slice)), -1, self.tutti_slice)


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
        return summed(part, self.tutti_slice)


class Dropped(Divided):
    """Dropout of features of which this rank has a share: draws for all of them, as one device would."""

    p: float

    def forward(self, input: Tensor) -> Tensor:
        """(…, features here) → the same."""
        if not self.training or self.p == 0.0:
            return functional.dropout(input, self.p, False)
        return dropped(input, self.p, input.dim() - 1, self.tutti_slice)


def divide(module: nn.Module, kind: type[Divided], slice_: Slice) -> None:
    """Make ``module`` the ``kind`` of layer. Its parameters are cut by the caller."""
    plain = type(module)
    body = {"__module__": plain.__module__, "_whole": plain}
    module.__class__ = type(f"{kind.__name__}{plain.__name__}", (kind, plain), body)
    module.tutti_slice = slice_  # type: ignore[assignment]
