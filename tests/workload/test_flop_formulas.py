"""FLOP of operators: PaLM's worked example, attention on the CPU and causal, convolutions, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.torch_compat import TorchDispatchMode
from tutti.workload.flop_formulas import OperatorFlop, count_flop, decoder_flop_per_token, lacks_formula


class Counter(TorchDispatchMode):
    """Collects what each operator with a formula costs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[OperatorFlop] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cost = count_flop(func, args, kwargs or {}, result)
        if cost is not None:
            self.found.append(cost)
        return result


def counted(function: Callable[[], Tensor]) -> tuple[list[OperatorFlop], list[OperatorFlop]]:
    """Costs of a forward and of its backward."""
    with Counter() as forward:
        result = function()
    with Counter() as backward:
        result.sum().backward()
    return forward.found, backward.found


def test_palm_worked_example() -> None:
    per_token = decoder_flop_per_token(1.3e9, 24, 2048, 2048)
    assert per_token == 9.007959552e9
    assert 1e4 * per_token / 312e12 == pytest.approx(0.288717, abs=1e-6)
    # Full recomputation adds a forward, a third of it: 8N + 16LHQT.
    assert 1e4 * per_token * 4 / 3 / 312e12 == pytest.approx(0.384955, abs=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_the_cpu(causal: bool) -> None:
    query, key, value = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    forward, backward = counted(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=causal))
    whole = 2 * 2 * (2 * 3) * 8 * 8 * 4
    part = 0.5 if causal else 1.0
    assert forward == [OperatorFlop("attention", part * whole, 0.0, (1 - part) * whole)]
    # Gradients of value, scores, query and key; the kernel computes the scores once more.
    assert backward == [OperatorFlop("attention", part * 2 * whole, part * whole / 2, (1 - part) * 2 * whole)]


def test_grouped_products_of_experts() -> None:
    rows, experts = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    forward, backward = counted(lambda: functional.grouped_mm(rows, experts, offs=ends).square())
    assert forward == [OperatorFlop("matmul", 2.0 * 6 * 8 * 16)] and backward == 2 * forward


def test_attention_of_other_lengths_and_sizes() -> None:
    shapes = (1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4)
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    forward, _ = counted(lambda: functional.scaled_dot_product_attention(query, key, value))
    assert [cost.flop for cost in forward] == [2 * 2 * 5 * 7 * (4 + 4)]


def test_convolution_of_a_residual_network() -> None:
    layer = nn.Conv2d(64, 128, 3, stride=2, padding=1, bias=False)
    images = torch.randn(1, 64, 56, 56, requires_grad=True)
    forward, backward = counted(lambda: layer(images))
    assert [(cost.kind, cost.flop) for cost in forward] == [("convolution", 115_605_504)]
    assert sum(cost.flop for cost in forward + backward) == 346_816_512


def test_recurrent_layers_are_counted() -> None:
    layer = nn.LSTM(3, 5, batch_first=True)
    steps = torch.randn(2, 7, 3)
    forward, backward = counted(lambda: layer(steps)[0])
    expected = 2 * 2 * 7 * 4 * 5 * (3 + 5)
    assert sum(cost.flop for cost in forward) == expected
    assert sum(cost.flop for cost in backward) == 2 * expected


def test_products_without_formula_are_told_from_cheap_operators() -> None:
    aten = torch.ops.aten
    assert lacks_formula(aten.linalg_inv_ex.default) and lacks_formula(aten._fft_r2c.default)
    assert not any(map(lacks_formula, (aten.add.Tensor, aten.native_layer_norm.default, aten.gelu.default)))
