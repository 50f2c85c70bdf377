"""Measure one device: rates by class of operator, memory, the fixed cost of an operation, optimizers."""

from __future__ import annotations

import statistics
from collections.abc import Callable
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
_CHANNELS, _PIXELS, _HEADS, _HEAD = 32, 32, 4, 32
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
    accelerator = is_accelerator(device)
    precisions = ("fp32", "bf16", "fp16") if accelerator else ("fp32", "bf16")
    for precision in precisions:
        dtype = _TYPES[precision]
        _products(device, precision, found)
        # On CPUs the rate depends on the length and hardly on the batch, which is what grows in training.
        shapes = [(1, n) for n in (64, 128, 256, 512)] if accelerator else [(n, 128) for n in (1, 4, 16, 64)]
        works = [_attention(batch, length, dtype, device) for batch, length in shapes]
        _draw(f"device/attention/{precision}", works, device, found)
        batches = (1, 4, 16, 64, 256) if accelerator else (1, 4, 16, 64)
        _draw(f"device/convolution/{precision}", [_convolution(n, dtype, device) for n in batches], device, found)
    top = 28 if accelerator else 26
    points = []
    for power in range(12, top + 1, 2):
        source = torch.ones(2**power, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        points.append(curve_point(2 * 2**power, time_calls(partial(target.copy_, source), device)))
    found.draw("device/copy", "byte", points)
    _elementwise(device, top, found)
    one = torch.zeros(1, device=device)
    found.add("device/operation/seconds", "s", time_calls(lambda: one.add_(1), device, calls=100))


def _elementwise(device: torch.device, top: int, found: Findings) -> None:
    """Measure operators whose seconds depend on their bytes, read and written, into new memory.

    Each measurement keeps several results until its end, as a forward keeps activations: memory that was just freed is
    faster than new memory.
    """
    width = 128

    def draw(name: str, call: Callable[[Tensor, Tensor], Tensor], tensors: int) -> None:
        points = []
        for power in range(12, top, 2):
            one, other = (torch.randn(2**power // 4 // width, width, device=device) for _ in range(2))
            seconds = time_calls(partial(_keep_results, call, one, other), device)
            points.append(curve_point(tensors * one.nbytes, [each / _KEPT for each in seconds]))
        found.draw(f"device/{name}", "byte", points)

    draw("elementwise", torch.add, 3)
    draw("transcendental", lambda one, _: functional.gelu(one), 2)
    draw("normalisation", lambda one, _: functional.layer_norm(one, (width,)), 2)


def _keep_results(call: Callable[[Tensor, Tensor], Tensor], one: Tensor, other: Tensor) -> list[Tensor]:
    return [call(one, other) for _ in range(_KEPT)]


def bench_optimizer(device: torch.device, found: Findings) -> None:
    """Measure the seconds of a step of SGD with momentum and of Adam, over the number of parameters. Not collective.

    Args:
        device: device of the parameters.
        found: receives the curves ``optimizer/sgd`` and ``optimizer/adam`` of median seconds over parameters.
    """
    for text in _OPTIMIZERS:
        points = []
        for power in (14, 17, 20, 22):
            parameter = torch.nn.Parameter(torch.ones(2**power, device=device))
            parameter.grad = torch.ones_like(parameter)
            optimizer = from_config(check_optimizer(text))([("weight", parameter)])
            if optimizer is None:
                continue
            points.append(curve_point(2**power, time_calls(optimizer.step, device)))
        found.draw(f"optimizer/{text.partition(':')[0]}", "parameter", points)


_Work = tuple[float, Callable[[], Tensor]]
"""FLOP of a call, and the call."""


def _products(device: torch.device, precision: str, found: Findings) -> None:
    """Measure square matrix products, and the best rate at one and at all CPU threads."""
    sizes = (256, 512, 1024, 2048, 4096, 8192) if is_accelerator(device) else (32, 64, 128, 256, 512, 1024)
    works = [_product(n, _TYPES[precision], device) for n in sizes]
    works = works[: _draw(f"device/matmul/{precision}", works, device, found)]
    threads = torch.get_num_threads()
    counts = [None] if is_accelerator(device) else sorted({1, threads})
    for count in counts:
        if count is not None:
            torch.set_num_threads(count)
        rates = [[flop / s for s in time_calls(call, device)] for flop, call in works[-3:]]
        found.add(peak_name(precision, count), "FLOP/s", max(rates, key=statistics.median))
    torch.set_num_threads(threads)


def _draw(name: str, works: list[_Work], device: torch.device, found: Findings) -> int:
    """Measure calls in increasing size, two at least and up to one of ``_LONG`` seconds; return how many."""
    points: list[CurvePoint] = []
    for flop, call in works:
        points.append(curve_point(flop, time_calls(call, device)))
        if len(points) > 1 and points[-1].seconds > _LONG:
            break
    found.draw(name, "FLOP", points)
    return len(points)


def _product(n: int, dtype: torch.dtype, device: torch.device) -> _Work:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3, lambda: left @ right


def _convolution(batch: int, dtype: torch.dtype, device: torch.device) -> _Work:
    images = torch.randn(batch, _CHANNELS, _PIXELS, _PIXELS, device=device).to(dtype)
    weight = torch.randn(_CHANNELS, _CHANNELS, 3, 3, device=device).to(dtype)
    return 2.0 * 9 * _CHANNELS**2 * _PIXELS**2 * batch, lambda: functional.conv2d(images, weight, padding=1)


def _attention(batch: int, length: int, dtype: torch.dtype, device: torch.device) -> _Work:
    """Return attention over the parts of one projection, which are strided as in a model."""
    projected = torch.randn(batch, length, 3, _HEADS, _HEAD, device=device).to(dtype)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    flop = 4.0 * batch * _HEADS * _HEAD * length**2
    return flop, lambda: functional.scaled_dot_product_attention(query, key, value)
