"""A round of workers with one or several micro-batches each, of which backward divides by different numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tutti.optim.noise_scale import noise_estimate
from tutti.train.noise_parts import MeasuredRound
from tutti.types.gradient_sync import OwnGradients
from tutti.types.micro_batch import LossSums
from tutti.types.run_context import RunContext
from tutti.types.step_records import StepContext, StepStats

SCALE = 1024.0
# Of each micro-batch its samples and the count of its losses, such as tokens.
WORKERS = (((4, 11), (3, 5)), ((6, 10),), ((2, 9), (2, 1), (1, 8)), ((5, 12),))


def alone() -> RunContext:
    comm = SimpleNamespace(device="cpu", all_reduce=lambda message, name: None)
    return cast(RunContext, SimpleNamespace(comms=SimpleNamespace(replica=comm)))


def measured(scale: float, finite: bool = True) -> tuple[Any, list[tuple[Tensor, int]]]:
    """The estimates, and of each micro-batch the gradient of its sum of losses with the count of that sum."""
    generator = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    samples = sum(size for worker in WORKERS for size, _ in worker)
    found = MeasuredRound(OwnGradients([parameter]), StepContext(0, samples, loss_scale=scale))
    known = []
    for index, worker in enumerate(WORKERS):
        own, whole = sum(size for size, _ in worker), len(worker) == 1
        parameter.grad, total = None, LossSums(torch.zeros(2))
        for size, count in worker:
            gradient = torch.randn(5, generator=generator, dtype=torch.float64) + 0.5 * count
            known.append((gradient, count))

            def backward(size: int = size, count: int = count, gradient: Tensor = gradient) -> LossSums:
                parameter.grad = gradient * scale / (count if whole else own)  # noqa: B023
                return LossSums(torch.tensor([0.0, count]), (), size)

            total = total + found.measure(backward, index, size)
        total.whole = whole
        found.end_worker(index, total)
    stats = StepStats(0.0, 1.0, {}, 1.0, finite)
    return found.estimates(stats, alone()), known


@pytest.mark.parametrize("scale", [1.0, SCALE])
def test_a_round_compares_the_means_of_micro_batches_with_the_mean_of_the_batch(scale: float) -> None:
    noise, known = measured(scale)
    total = sum(count for _, count in known)
    squares = sum(count / total * float((gradient / count).square().sum()) for gradient, count in known)
    whole = float((torch.stack([gradient for gradient, _ in known]).sum(0) / total).square().sum())
    samples = sum(size for worker in WORKERS for size, _ in worker)
    assert noise.simple == pytest.approx(noise_estimate(squares, whole, len(known), samples), rel=1e-12)
    assert noise.scaled is None


def test_a_round_with_a_gradient_that_is_not_finite_says_nothing() -> None:
    assert measured(1.0, finite=False)[0].simple is None
