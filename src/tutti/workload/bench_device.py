"""Measure one device: rates by class of operator, memory, the fixed cost of an operation, optimizers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tutti.config.optimizer_config import check_optimizer
from tutti.device import is_accelerator
from tutti.optim.factory import from_config
from tutti.workload.bench_timing import Findings, curve_point, time_calls
from tutti.workload.machine_file import CurvePoint, peak_name

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS = ("sgd:lr=0.1,momentum=0.9", "adam:lr=0.001")


@dataclass(frozen=True)
class _Shapes:
    """Shapes of measured calls, in increasing size.

    Attributes:
        products: sides of square matrices.
        attention: (samples, tokens) of a call.
        heads: heads of attention, and the width of each.
        convolution: samples of a call.
        channels: channels of a convolution.
        pixels: side of its images.
        bytes: exponents of two of the bytes that copies and elementwise operators read.
        parameters: exponents of two of an optimizer's parameters.
    """

    products: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    convolution: tuple[int, ...]
    channels: int
    pixels: int
    bytes: range
    parameters: tuple[int, ...]


# On CPUs the rate of attention depends on the length and hardly on the batch, which is what grows in training.
_ON_CPUS = _Shapes(
    products=(32, 64, 128, 256, 512, 1024),
    attention=((1, 128), (4, 128), (16, 128), (64, 128)),
    heads=(4, 32),
    convolution=(1, 4, 16, 64),
    channels=32,
    pixels=32,
    bytes=range(12, 27, 2),
    parameters=(14, 17, 20, 22),
)
# Large enough to occupy a GPU, whose second-level cache holds 60 MB: shapes of a GPT and of a residual network.
_ON_ACCELERATORS = _Shapes(
    products=(256, 512, 1024, 2048, 4096, 8192),
    attention=((1, 128), (2, 256), (4, 512), (8, 1024), (16, 2048)),
    heads=(12, 64),
    convolution=(1, 4, 16, 64, 256, 1024),
    channels=128,
    pixels=28,
    bytes=range(12, 31, 2),
    parameters=(14, 17, 20, 23, 26),
)
_KEPT = 16
"""Results that a measurement of elementwise operators keeps: a guess at a forward's activations."""
_LONG = 0.5
"""Seconds of a call beyond which no larger call is measured, so that a slow device does not take an hour (a guess)."""


def bench_device(device: torch.device, found: Findings) -> None:
    """Measure how many seconds operators take on a device, by size and precision. Not collective.

    Measured are matrix products, attention, convolutions, copies, elementwise operators, normalisation, and a minimal
    operation, whose seconds are the fixed cost of a call.

    Args:
        device: the device.
        found: receives the curves of median seconds over FLOP or bytes, and figures; their names begin with
            ``device/``.
    """
    shapes = _shapes(device)
    for precision in ("fp32", "bf16", "fp16") if is_accelerator(device) else ("fp32", "bf16"):
        dtype = _TYPES[precision]
        _products(device, precision, found)
        attention = (partial(_attention, *size, shapes.heads, dtype, device) for size in shapes.attention)
        _draw(f"device/attention/{precision}", attention, device, found)
        convolution = (
            partial(_convolution, n, shapes.channels, shapes.pixels, dtype, device) for n in shapes.convolution
        )
        _draw(f"device/convolution/{precision}", convolution, device, found)
    _draw("device/copy", (partial(_copy, 2**power, device) for power in shapes.bytes), device, found, "byte")
    _elementwise(device, shapes.bytes, found)
    one = torch.zeros(1, device=device)
    found.add("device/operation/seconds", "s", time_calls(lambda: one.add_(1), device, calls=100))


def _shapes(device: torch.device) -> _Shapes:
    return _ON_ACCELERATORS if is_accelerator(device) else _ON_CPUS


def _elementwise(device: torch.device, powers: range, found: Findings) -> None:
    """Measure operators whose seconds depend on their bytes, read and written, into new memory.

    Each measurement keeps several results until its end, as a forward keeps activations: memory that was just freed is
    faster than new memory.
    """
    width = 128

    def draw(name: str, call: Callable[[Tensor, Tensor], Tensor], tensors: int) -> None:
        works = (partial(_kept, call, tensors, 2**power // 4 // width, width, device) for power in powers[:-1])
        _draw(f"device/{name}", works, device, found, "byte", results=_KEPT)

    draw("elementwise", torch.add, 3)
    draw("transcendental", lambda one, _: functional.gelu(one), 2)
    draw("normalisation", lambda one, _: functional.layer_norm(one, (width,)), 2)


def _kept(call: Callable[[Tensor, Tensor], Tensor], tensors: int, rows: int, width: int, device: torch.device) -> _Work:
    """Return ``_KEPT`` calls whose results live together; each call moves so many tensors (rows, width)."""
    one, other = (torch.randn(rows, width, device=device) for _ in range(2))
    return float(tensors * one.nbytes), lambda: [call(one, other) for _ in range(_KEPT)]


def _copy(size: int, device: torch.device) -> _Work:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * size, partial(target.copy_, source)


def bench_optimizer(device: torch.device, found: Findings) -> None:
    """Measure the seconds of a step of SGD with momentum and of Adam, over the number of parameters. Not collective.

    Args:
        device: device of the parameters.
        found: receives the curves ``optimizer/sgd`` and ``optimizer/adam`` of median seconds over parameters.
    """
    for text in _OPTIMIZERS:
        points = []
        for power in _shapes(device).parameters:
            parameter = torch.nn.Parameter(torch.ones(2**power, device=device))
            parameter.grad = torch.ones_like(parameter)
            optimizer = from_config(check_optimizer(text))([("weight", parameter)])
            if optimizer is None:
                continue
            points.append(curve_point(2**power, time_calls(optimizer.step, device)))
        found.draw(f"optimizer/{text.partition(':')[0]}", "parameter", points)


_Work = tuple[float, Callable[[], object]]
"""Size of a call, in FLOP or bytes, and the call."""


def _products(device: torch.device, precision: str, found: Findings) -> None:
    """Measure square matrix products, and the best rate at one and at all CPU threads."""
    works = [partial(_product, n, _TYPES[precision], device) for n in _shapes(device).products]
    works = works[: _draw(f"device/matmul/{precision}", works, device, found)]
    threads = torch.get_num_threads()
    counts = [None] if is_accelerator(device) else sorted({1, threads})
    for count in counts:
        if count is not None:
            torch.set_num_threads(count)
        largest = [make() for make in works[-3:]]
        rates = [[flop / s for s in time_calls(call, device)] for flop, call in largest]
        found.add(peak_name(precision, count), "FLOP/s", max(rates, key=statistics.median))
    torch.set_num_threads(threads)


def _draw(
    name: str,
    works: Iterable[Callable[[], _Work]],
    device: torch.device,
    found: Findings,
    unit: str = "FLOP",
    results: int = 1,
) -> int:
    """Measure calls in increasing size, two at least and up to one of ``_LONG`` seconds or that memory cannot hold.

    Each call has ``results`` results, and the curve has the seconds of one. Returns the number of points.
    """
    points: list[CurvePoint] = []
    for make in works:
        if len(points) > 1 and points[-1].seconds * results > _LONG:
            break
        try:
            size, call = make()
            seconds = time_calls(call, device)
        except torch.OutOfMemoryError:
            if len(points) < 2:
                raise
            break
        points.append(curve_point(size, [each / results for each in seconds]))
    found.draw(name, unit, points)
    return len(points)


def _product(n: int, dtype: torch.dtype, device: torch.device) -> _Work:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3, lambda: left @ right


def _convolution(batch: int, channels: int, pixels: int, dtype: torch.dtype, device: torch.device) -> _Work:
    images = torch.randn(batch, channels, pixels, pixels, device=device).to(dtype)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
    return 2.0 * 9 * channels**2 * pixels**2 * batch, lambda: functional.conv2d(images, weight, padding=1)


def _attention(batch: int, length: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> _Work:
    """Return attention over the parts of one projection, which are strided as in a model."""
    projected = torch.randn(batch, length, 3, *heads, device=device).to(dtype)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    flop = 4.0 * batch * math.prod(heads) * length**2
    return flop, lambda: functional.scaled_dot_product_attention(query, key, value)
