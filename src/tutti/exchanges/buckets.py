"""Gradients as a few flat vectors, laid out once from the order of the parameters and never again.

Stock DDP rebuilds its buckets after the first step, in the order in which gradients arrived; the order of summation
then depends on history, and a resumed run differs. Here the layout is a function of names and shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutti.laws.keys import mix
from tutti.types import Tick

METRICS = 6
DIGESTS, _TOTALS = 4, 3 + METRICS
FIRST_BYTES = 1 << 20


class Sums(NamedTuple):
    """What rode along with the gradients: totals over the global batch, whether a rank asks to stop, who was used.

    ``own``: of each parameter Σ ‖G‖²/c over the workers, G a worker's gradient without loss scale and c its count; then
    how many workers had a count. Empty where it is not measured.
    """

    loss: float
    samples: float
    metrics: list[float]
    stop: bool
    used: list[bool]
    own: Sequence[float] = ()


def plan(sizes: Sequence[tuple[int, str]], largest: int, first: int = FIRST_BYTES) -> list[list[int]]:
    """Which parameters share a bucket: last parameter first (backward produces it first), one dtype a bucket.

    Args:
        sizes: (bytes, dtype) of each parameter, in the model's order.
        largest: bytes of a bucket; a larger parameter has one to itself.
        first: bytes of the first bucket, so that the exchange starts early.

    >>> plan([(40, "f"), (40, "f"), (40, "f"), (8, "f")], largest=80, first=16)
    [[3], [2, 1], [0]]
    """
    buckets: list[list[int]] = []
    filled, dtype = 0, ""
    for index in reversed(range(len(sizes))):
        size, kind = sizes[index]
        limit = first if len(buckets) <= 1 else largest
        if not buckets or kind != dtype or filled + size > limit:
            buckets.append([])
            filled, dtype = 0, kind
        buckets[-1].append(index)
        filled += size
    return buckets


class Bucket:
    """Gradients of several parameters as views of one flat vector, perhaps with a tail of other numbers behind them.

    Attributes:
        parameters: whose gradients, in the order of the vector.
        flat: (elements + tail,), what travels.
        gradients: (elements,), the part that is gradients.
        tail: (tail,), the part that is not.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        tail: int,
        flat: Tensor | None = None,
    ) -> None:
        self.parameters = list(parameters)
        elements = sum(p.numel() for p in parameters)
        self._elements, self._tail = elements, tail
        self.use(torch.zeros(elements + tail, dtype=dtype, device=device) if flat is None else flat)

    def use(self, flat: Tensor) -> None:
        """Lay the views over ``flat`` (elements + tail,) from now on."""
        self.flat = flat
        self.gradients, self.tail = flat.split([self._elements, self._tail])
        self._views = []
        start = 0
        for parameter in self.parameters:
            piece = flat[start : start + parameter.numel()]
            start += parameter.numel()
            # The parameter's own strides, so that fused optimizers walk both alike (channels-last weights).
            dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
            self._views.append(
                piece.as_strided(parameter.shape, parameter.stride()) if dense else piece.view_as(parameter)
            )

    def pack(self) -> list[bool]:
        """Copy every ``.grad`` into the vector, zeros where there is none; which parameters had one."""
        used = [p.grad is not None for p in self.parameters]
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if len(gradients) == len(used):
            if gradients:
                torch._foreach_copy_(self._views, gradients)
        else:
            for view, parameter in zip(self._views, self.parameters, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
        return used

    def expose(self, used: Sequence[bool]) -> None:
        """Make the views the parameters' gradients; None for a parameter that no rank used, as on one device."""
        for view, parameter, flag in zip(self._views, self.parameters, used, strict=True):
            parameter.grad = view if flag else None


class Tail:
    """The numbers that ride behind the gradients: digests of the step, totals, and a flag a parameter.

    A digest d rides as d and d²: the sums over n contributions tell whether all n were equal, since
    n · Σd² = (Σd)² only then (Cauchy-Schwarz).
    """

    def __init__(self, flags: int, layout_key: int) -> None:
        self.size = DIGESTS + _TOTALS + flags
        self._key = layout_key

    def fill(self, tail: Tensor, tick: Tick, lanes: Tensor | None, used: Sequence[bool]) -> None:
        """Write one contribution into ``tail`` (size,)."""
        tail[:DIGESTS].copy_(torch.tensor(digests(tick, self._key), dtype=tail.dtype))
        totals = tail[DIGESTS : DIGESTS + _TOTALS]
        totals.zero_()
        if lanes is not None:
            totals[: len(lanes)].copy_(lanes)
        if tick.stop:
            totals[-1] = 1
        flags = tail[DIGESTS + _TOTALS :]
        if all(used):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(used, dtype=tail.dtype))

    def read(self, tail: Sequence[float]) -> Sums:
        """The sums in a reduced tail."""
        return read_sums(tail[DIGESTS:])

    def same(self, tail: Sequence[float], tick: Tick, contributions: int) -> bool:
        """Whether all ``contributions`` came from the same step of the same layout."""
        return agreed(tail, digests(tick, self._key), contributions)


def digests(tick: Tick, key: int = 0) -> list[int]:
    """What rides along with every sum: the step (so that neighbours always differ), and the layout with the batch."""
    a, b = tick.clock % 251, mix(key, tick.samples) % 251
    return [a, a * a, b, b * b]


def agreed(sums: Sequence[float], expected: Sequence[int], contributions: int) -> bool:
    """Whether sums of ``digests`` are those of ``contributions`` equal ones."""
    pairs = zip(sums, expected, strict=False)
    return all(abs(got - contributions * want) <= 1e-6 * contributions * max(want, 1) for got, want in pairs)


def read_sums(numbers: Sequence[float]) -> Sums:
    """Sums out of ``[loss, samples, *metrics, stop, *flags]``."""
    loss, samples, *metrics = numbers[: _TOTALS - 1]
    return Sums(loss, samples, metrics, numbers[_TOTALS - 1] > 0, [flag > 0 for flag in numbers[_TOTALS:]])
