"""Measure one device: rates by class of operator, memory, the fixed cost of an operation, optimizers."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.config.optimizer_config import check_optimizer
from tutti.device import is_accelerator
from tutti.optim.factory import from_config
from tutti.workload.bench_timing import Findings, curve_point, fastest, time_calls
from tutti.workload.flop_formulas import CAUSAL
from tutti.workload.machine_file import CurvePoint, peak_name
from tutti.workload.workload_trace import TracedModel, trace_workload

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS = ("sgd:lr=0.1,momentum=0.9", "adam:lr=0.001")


@dataclass(frozen=True)
class _Shapes:
    """Shapes of measured calls, in increasing size.

    Attributes:
        products: sides of square matrices.
        layers: features of linear layers with as many inputs as outputs.
        rows: inputs of such a layer over its features.
        attention: (samples, tokens) of a call.
        heads: heads of attention, and the width of each.
        convolution: samples of a call.
        channels: channels of a convolution.
        pixels: side of its images.
        bytes: exponents of two of the bytes that copies and elementwise operators read.
        parameters: exponents of two of an optimizer's parameters.
    """

    products: tuple[int, ...]
    layers: tuple[int, ...]
    rows: int
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
    layers=(16, 32, 64, 128, 256, 512),
    rows=16,
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
    layers=(256, 512, 1024, 2048, 4096, 8192),
    rows=1,
    attention=((1, 128), (2, 256), (4, 512), (8, 1024), (16, 2048)),
    heads=(12, 64),
    convolution=(1, 4, 16, 64, 256, 1024),
    channels=128,
    pixels=28,
    bytes=range(12, 31, 2),
    parameters=(14, 17, 20, 23, 26),
)
_KEPT, _MOST_KEPT, _BEYOND_CACHES = 16, 256, 1 << 26
"""Results that a measurement of elementwise operators keeps, fewest and most, and their bytes: guesses at a forward's
activations."""
ROUNDS = 2
"""Rounds in which all sizes of all operators are measured in turn."""
_SECONDS = 0.15 / ROUNDS
"""Seconds to spend on each size of a call in a round."""
_TINY, _DEPTH = 8, 4
"""Features and depth of the layers whose kernels take next to no time."""
_TENSORS = 33
_LONG = 0.5
"""Seconds of a call beyond which no larger call is measured, so that a slow device does not take an hour (a guess)."""


def bench_device(device: torch.device, found: Findings) -> None:
    """Measure how many seconds operators take on a device, by size and precision. Not collective.

    The operators are matrix products, attention, convolutions, copies, elementwise operators and normalisation; and a
    minimal operation, whose seconds are the fixed cost of a call.

    Args:
        device: the device.
        found: receives the curves of median seconds over FLOP or bytes, the seconds of an operation, and the FLOP/s of
            the fastest matrix product in each precision (``peak_name``); their names begin with ``device/``.
    """
    rounds = [Findings(show=False) for _ in range(ROUNDS)]
    for each in rounds:
        bench_operators(device, each)
    fastest(rounds, str, found)
    for precision in _precisions(device):
        _peaks(device, precision, found)


def bench_operators(
    device: torch.device, found: Findings, seconds: float = _SECONDS, begin: Callable[[], object] = lambda: None
) -> None:
    """Measure how many seconds calls of each class of operator take on a device, by size and precision.

    Not collective by itself.

    Args:
        device: the device.
        found: receives the curves of median seconds over FLOP or bytes, and the seconds of an operation; their names
            begin with ``device/``.
        seconds: time to spend on each size.
        begin: called without arguments before each group of curves, such as the two of matrix products (forward and
            backward), equally often on all devices of one kind, so that ranks can begin together.
    """
    shapes = _shapes(device)
    draw = partial(_draw, device=device, found=found, seconds=seconds)
    begin()
    # First: an allocator that has freed large tensors keeps memory for the next ones, which training does not see.
    _elementwise(device, shapes.bytes, found, seconds)
    for precision in _precisions(device):
        dtype = _TYPES[precision]
        begin()
        for backward in (False, True):
            # Backward has two products, of as many FLOP each.
            layers = [partial(_layer, n, shapes.rows * n, dtype, device, backward) for n in shapes.layers]
            draw(f"device/matmul/{precision}{'/backward' * backward}", layers, results=1 + backward)
        for backward in (False, True):
            ending = "/backward" * backward
            for causal in (False, True):
                attention = [
                    partial(_attention, *size, shapes.heads, dtype, device, causal, backward)
                    for size in shapes.attention
                ]
                begin()
                draw(f"device/attention/{precision}{'/causal' * causal}{ending}", attention)
            convolution = [
                partial(_convolution, n, shapes.channels, shapes.pixels, dtype, device, backward)
                for n in shapes.convolution
            ]
            begin()
            draw(f"device/convolution/{precision}{ending}", convolution)
    begin()
    _copies(device, shapes.bytes, found, seconds)
    one = torch.zeros(1, device=device)
    found.add("device/operation/seconds", "s", time_calls(lambda: one.add_(1), device, seconds, calls=100))
    if not is_accelerator(device):
        begin()
        found.add("device/operation/training", "s", _operation_in_training(device, seconds))


def _precisions(device: torch.device) -> tuple[str, ...]:
    return ("fp32", "bf16", "fp16") if is_accelerator(device) else ("fp32", "bf16")


def _operation_in_training(device: torch.device, seconds: float) -> list[float]:
    """Return the seconds of an operator in forward and backward of tiny layers: calls of modules, autograd, the kernel.

    Accelerators compute while the host goes on; on CPUs nothing hides this time.
    """
    layers = [nn.LayerNorm(_TINY), nn.Linear(_TINY, _TINY), nn.GELU(), nn.Linear(_TINY, _TINY)]
    sample = torch.ones(1, _TINY)

    def build() -> nn.Module:
        return nn.Sequential(*(copy.deepcopy(layer) for _ in range(_DEPTH) for layer in layers))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.as_tensor(model(batch)).square().mean()

    traced = trace_workload(TracedModel(name="tiny", build=build, loss=loss, sample=sample, groups=lambda model: []))
    calls = sum(w.calls.at(1) for group in traced.groups for p in (group.forward, group.backward) for w in p.values())
    model, batch = build().to(device), sample.to(device)

    def step() -> None:
        loss(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return [each / calls for each in time_calls(step, device, seconds)]


def _shapes(device: torch.device) -> _Shapes:
    return _ON_ACCELERATORS if is_accelerator(device) else _ON_CPUS


def _elementwise(device: torch.device, powers: range, found: Findings, seconds: float) -> None:
    """Measure operators whose seconds depend on their bytes, read and written, into new memory.

    Each measurement keeps several results until its end, as a forward keeps activations: memory that was just freed is
    faster than new memory. The operators are measured by turns, in increasing size: an allocator that has freed larger
    tensors before gives new memory seldom.
    """
    width = 128
    calls: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
        "elementwise": (torch.add, 3),
        "transcendental": (lambda one, _: functional.gelu(one), 2),
        "normalisation": (lambda one, _: functional.layer_norm(one, (width,)), 2),
    }
    points: dict[str, list[CurvePoint]] = {name: [] for name in calls}
    # First: measurements that keep results leave an allocator memory to reuse.
    if not is_accelerator(device):
        points |= {f"{name}/reused": [] for name in calls}
        for power, (name, (call, tensors)) in product(powers[:-1], calls.items()):
            make = partial(_reused, call, tensors, 2**power // 4 // width, width)
            _add_point(points[f"{name}/reused"], make, device, seconds / 2, 1)
    for power, (name, (call, tensors)) in product(powers[:-1], calls.items()):
        results = _results(2**power, device)
        make = partial(_kept, call, tensors, 2**power // 4 // width, width, results, device)
        _add_point(points[name], make, device, seconds, results)
    for name, measured in points.items():
        found.add_curve(f"device/{name}", "byte", measured)


def _copies(device: torch.device, powers: range, found: Findings, seconds: float) -> None:
    """Measure copies between tensors that, on CPUs, are together more than caches hold."""
    points: list[CurvePoint] = []
    for power in powers:
        results = 1 if is_accelerator(device) else max(1, min(_BEYOND_CACHES >> power, _MOST_KEPT))
        if not _add_point(points, partial(_copy, 2**power, results, device), device, seconds, results):
            break
    found.add_curve("device/copy", "byte", points)


def _kept(
    call: Callable[[Tensor, Tensor], Tensor], tensors: int, rows: int, width: int, results: int, device: torch.device
) -> _Work:
    """Return calls whose results live together; each call moves so many tensors (rows, width).

    On CPUs each call reads inputs of its own, as a backward reads activations.
    """
    inputs = [torch.randn(rows, width, device=device) for _ in range(1 if is_accelerator(device) else results)]
    other = torch.randn(rows, width, device=device)
    pairs = [(inputs[number % len(inputs)], other) for number in range(results)]
    return float(tensors * other.nbytes), lambda: [call(*pair) for pair in pairs]


def _reused(call: Callable[[Tensor, Tensor], Tensor], tensors: int, rows: int, width: int) -> _Work:
    """Return a call on tensors (rows, width) that it has just used, and whose result takes the memory of the last one.

    Activations of a small micro-batch stay in a CPU's caches like this, as far as caches hold them.
    """
    one, other = torch.randn(rows, width), torch.randn(rows, width)
    return float(tensors * other.nbytes), lambda: call(one, other)


def _results(size: int, device: torch.device) -> int:
    """Return the number of results of so many bytes that a measurement keeps: on CPUs more than caches hold."""
    return _KEPT if is_accelerator(device) else min(max(_KEPT, _BEYOND_CACHES // size), _MOST_KEPT)


def _copy(size: int, results: int, device: torch.device) -> _Work:
    pairs = [[torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)] for _ in range(results)]
    return 2.0 * size, lambda: [target.copy_(source) for source, target in pairs]


def bench_optimizer(
    device: torch.device, found: Findings, seconds: float = _SECONDS, begin: Callable[[], object] = lambda: None
) -> None:
    """Measure the seconds of a step of SGD with momentum and of Adam, over the number of parameters. Not collective.

    Args:
        device: device of the parameters.
        found: receives the curves ``optimizer/sgd`` and ``optimizer/adam`` of median seconds over the parameters of one
            tensor, and the seconds of each further tensor, ``optimizer/sgd/tensor`` and ``optimizer/adam/tensor``.
        seconds: time to spend on each size.
        begin: called without arguments before the steps of each optimizer in each of the two rounds, so that ranks can
            begin together.
    """
    rounds = [Findings(show=False) for _ in range(ROUNDS)]
    for each in rounds:
        _updates(device, each, seconds, begin)
    fastest(rounds, str, found)


def _updates(device: torch.device, found: Findings, seconds: float, begin: Callable[[], object]) -> None:
    for text in _OPTIMIZERS:
        name = f"optimizer/{text.partition(':')[0]}"
        begin()
        sizes = _shapes(device).parameters
        points = [curve_point(2**p, time_calls(_update(text, 1, 2**p, device), device, seconds)) for p in sizes]
        found.add_curve(name, "parameter", points)
        one, many = (statistics.median(time_calls(_update(text, n, 1, device), device, seconds)) for n in (1, _TENSORS))
        found.add(f"{name}/tensor", "s", [max(0.0, many - one) / (_TENSORS - 1)])


def _update(text: str, tensors: int, elements: int, device: torch.device) -> Callable[[], object]:
    """Return a step of an optimizer on so many tensors of so many elements each."""
    named = [(f"weight{number}", nn.Parameter(torch.ones(elements, device=device))) for number in range(tensors)]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    made = from_config(check_optimizer(text))(named)
    return made.step if made is not None else lambda: None


_Work = tuple[float, Callable[[], object]]
"""Size of a call, in FLOP or bytes, and the call."""


def _peaks(device: torch.device, precision: str, found: Findings) -> None:
    """Measure the best rate of square matrix products at one and at all CPU threads."""
    threads = torch.get_num_threads()
    counts = [None] if is_accelerator(device) else sorted({1, threads})
    measured = len(found.curves[f"device/matmul/{precision}"].points)
    for count in counts:
        if count is not None:
            torch.set_num_threads(count)
        largest = [_product(n, _TYPES[precision], device) for n in _shapes(device).products[:measured][-3:]]
        rates = [[flop / s for s in time_calls(call, device)] for flop, call in largest]
        found.add(peak_name(precision, count), "FLOP/s", max(rates, key=statistics.median))
    torch.set_num_threads(threads)


def _draw(
    name: str,
    works: Iterable[Callable[[], _Work]],
    device: torch.device,
    found: Findings,
    results: int = 1,
    seconds: float = _SECONDS,
) -> None:
    """Measure calls in increasing size, two at least and up to one of ``_LONG`` seconds or that memory cannot hold.

    Each call has ``results`` results, and the curve, over FLOP, has the seconds of one.
    """
    points: list[CurvePoint] = []
    for make in works:
        if not _add_point(points, make, device, seconds, results):
            break
    found.add_curve(name, "FLOP", points)


def _add_point(
    points: list[CurvePoint], make: Callable[[], _Work], device: torch.device, seconds: float, results: int
) -> bool:
    """Measure a call and append it to a curve; return False where the curve is to end before it."""
    if len(points) > 1 and points[-1].seconds * results > _LONG:
        return False
    try:
        size, call = make()
        measured = time_calls(call, device, seconds)
    except torch.OutOfMemoryError:
        if len(points) < 2:
            raise
        return False
    points.append(curve_point(size, [each / results for each in measured]))
    return True


def _product(n: int, dtype: torch.dtype, device: torch.device) -> _Work:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3, lambda: left @ right


def _layer(features: int, rows: int, dtype: torch.dtype, device: torch.device, backward: bool) -> _Work:
    """Return a linear layer's product, of many inputs and few features as in a model; or its backward, of two."""
    inputs, weight = (
        torch.randn(number, features, device=device).to(dtype).requires_grad_(backward) for number in (rows, features)
    )
    flop = 2.0 * rows * features**2
    _, call = _passed(flop, lambda: functional.linear(inputs, weight), (inputs, weight), backward)
    return flop, call


def _convolution(
    batch: int, channels: int, pixels: int, dtype: torch.dtype, device: torch.device, backward: bool
) -> _Work:
    images, weight = (
        torch.randn(*shape, device=device).to(dtype).requires_grad_(backward)
        for shape in ((batch, channels, pixels, pixels), (channels, channels, 3, 3))
    )
    flop = 2.0 * 9 * channels**2 * pixels**2 * batch
    return _passed(flop, lambda: functional.conv2d(images, weight, padding=1), (images, weight), backward)


def _attention(
    batch: int,
    length: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    backward: bool,
) -> _Work:
    """Return attention over the parts of one projection, which are strided as in a model.

    Scores that causal attention masks are no FLOP, whether or not the kernel computes them.
    """
    projected = torch.randn(batch, length, 3, *heads, device=device).to(dtype).requires_grad_(backward)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
    flop = 4.0 * batch * math.prod(heads) * length**2 * (CAUSAL if causal else 1.0)
    parts = (query, key, value)
    return _passed(flop, lambda: functional.scaled_dot_product_attention(*parts, is_causal=causal), parts, backward)


def _passed(flop: float, forward: Callable[[], Tensor], inputs: Sequence[Tensor], backward: bool) -> _Work:
    """Return the forward with its FLOP, or its backward with twice as many."""
    if not backward:
        return flop, forward
    result = forward()
    gradient = torch.ones_like(result)
    return 2 * flop, lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
