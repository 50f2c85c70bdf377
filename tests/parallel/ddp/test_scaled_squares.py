"""Squares of gradients and of gradients times factors, by the compiled loop and by PyTorch's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tutti.native import compiled_passes
from tutti.parallel.ddp.gradient_arithmetic import scaled_squares_of


def drawn(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_hand(tensors: list[Tensor], factors: list[Tensor]) -> tuple[float, float]:
    pairs = [(g.double(), f.double()) for g, f in zip(tensors, factors, strict=True)]
    return sum(float((g**2).sum()) for g, _ in pairs), sum(float(((f * g) ** 2).sum()) for g, f in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_both_sums(dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr("tutti.parallel.ddp.gradient_arithmetic.passes", lambda tensor: None)
    elif dtype != torch.bfloat16 and compiled_passes.passes(torch.ones(1)) is None:
        pytest.skip("there are no compiled loops")
    shapes: list[tuple[int, ...]] = [(3,), (70, 500), (), (16384,), (2, 3, 4, 5)]
    tensors, factors = drawn(shapes, dtype), drawn(shapes[:], torch.float32 if dtype == torch.bfloat16 else dtype)
    factors = [f.abs() + 0.5 for f in factors]
    assert scaled_squares_of(tensors, factors) == pytest.approx(by_hand(tensors, factors), rel=1e-5)


def test_other_strides_of_the_factors_and_no_tensors() -> None:
    gradient, factor = drawn([(40, 60)], torch.float32)[0], drawn([(60, 40)], torch.float32)[0].t()
    assert scaled_squares_of([gradient], [factor]) == pytest.approx(by_hand([gradient], [factor]), rel=1e-5)
    last = gradient.view(2, 3, 20, 20)
    factor = last.abs().to(memory_format=torch.channels_last)
    assert scaled_squares_of([last], [factor]) == pytest.approx(by_hand([last], [factor]), rel=1e-5)
    assert scaled_squares_of([], []) == (0.0, 0.0)
