"""Parameters, gradients and references that the tests of optimizers share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tutti.optim import LAMB, LARC, LARS, NovoGrad

Array = NDArray[np.float64]

SHAPES = ((5, 3), (4,), (2, 3, 2, 2), (1, 1), (7, 11), (0, 4), (1,))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lars": (LARS, {"lr": 2.0, "weight_decay": 0.01, "trust": 0.01}),
    "lars nesterov": (LARS, {"lr": 2.0, "nesterov": True, "denominator": "norm_of_sum", "weight_decay": 0.1}),
    "lars without momentum": (LARS, {"lr": 2.0, "momentum": 0.0, "weight_decay": 0.01}),
    "larc": (LARC, {"lr": 0.1, "weight_decay": 0.01}),
    "lamb": (LAMB, {"lr": 0.01}),
    "lamb, everything": (
        LAMB,
        {
            "lr": 0.01,
            "weight_decay": 0.1,
            "decoupled_decay": True,
            "max_grad_norm": 0.5,
            "phi_min": 0.5,
            "phi_max": 2.0,
            "trust_clip": 3.0,
            "grad_averaging": False,
        },
    ),
    "novograd": (NovoGrad, {"lr": 0.01, "weight_decay": 0.01}),
    "novograd, apex": (
        NovoGrad,
        {
            "weight_decay": 0.1,
            "grad_averaging": True,
            "bias_correction": True,
            "normalize": "moment",
            "decay": "step",
            "init": "zero",
        },
    ),
}


def parameters(dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    """The same ones every time; the kernel of four dimensions is channels-last."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [nn.Parameter(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t) for t in made]


def gradients(params: Sequence[torch.Tensor], steps: int) -> Iterator[list[torch.Tensor]]:
    """A gradient a parameter, for each step."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for p in params]


def feed(optimizer: Any, params: Sequence[nn.Parameter], steps: Iterable[Sequence[torch.Tensor]]) -> None:
    """A step with each list of gradients."""
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()


def recorded_run(make: Callable[[list[nn.Parameter]], Any]) -> list[list[float]]:
    """100 steps in float64 with gradients that any program can make; the weights, a list a tensor."""
    weights, steps = recorded_inputs()
    params = [nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
    feed(make(params), params, [[torch.from_numpy(grad) for grad in grads] for grads in steps])
    return [p.detach().flatten().tolist() for p in params]


def recorded_inputs() -> tuple[list[Array], list[list[Array]]]:
    """Three tensors and 100 gradients of each, from MT19937, whose numbers never change."""
    draws = np.random.RandomState(0)
    shapes = ((3, 4), (5,), (2, 3, 2))
    weights = [draws.standard_normal(shape) for shape in shapes]
    return weights, [[draws.standard_normal(shape) * 10.0**-i for i, shape in enumerate(shapes)] for _ in range(100)]
