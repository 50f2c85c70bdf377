"""The exchange against one process: token counts, unused parameters, mixed types, clipping, compressed wires."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.parallel.models import NATIVE, WORLDS, Optional, trained


def close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance), name


# Tokens: what the loss counts is not what the batch counts.


def token_data() -> tuple[Tensor, Tensor]:
    """12 samples of 5 tokens; sample i has i % 5 + 1 that count, so that ranks have very different numbers of them."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5).expand(12, 5) <= (torch.arange(12) % 5).unsqueeze(1)
    return torch.randn(12, 5, 3, generator=generator, dtype=torch.float64), mask


def token_loss(called: Any, batch: Any) -> Any:
    values, mask = batch
    result = (called(values).squeeze(-1) - 1) ** 2
    return (result * mask).sum(), mask.sum(), {"kept": mask.sum()}


def token_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def tokens(strategy: str, clip: float | None = None, reproducible: bool = False) -> Any:
    return trained(
        token_model(),
        "sgd:lr=1",
        token_data(),
        token_loss,
        steps=1,
        strategy=strategy,
        workers=4,
        batch_size=12,
        clip=clip,
        reproducible=reproducible,
    )


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_gradient_is_the_mean_over_all_tokens_of_the_global_batch(clip: float | None) -> None:
    model, batch = token_model(), token_data()
    total, count, _ = token_loss(model, batch)
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    want = {name: (p - p.grad).detach().numpy() for name, p in model.named_parameters() if p.grad is not None}
    for devices, strategy, reproducible in [
        (1, "single", False),
        (3, "mirrored", True),
        *((*w, False) for w in WORLDS),
    ]:
        for got, [said], _ in worlds.run(devices, tokens, strategy=strategy, clip=clip, reproducible=reproducible):
            close(got, want)
            assert said[:3] == pytest.approx((float(total.detach() / count), float(count), float(norm)), rel=1e-12)
            assert said[3] == {"kept": pytest.approx(1.0)}


# Parameters that are not always used.


def optional(strategy: str, optimizer: str, reproducible: bool = False) -> Any:
    """``1.weight`` is used by worker 0's sample only, ``3.weight`` never."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Identity(), Optional(2), nn.Linear(2, 2), Optional(2, never=True), nn.Linear(2, 1)
    ).double()
    data = torch.rand(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    data[0] = 10
    return trained(
        model,
        optimizer,
        data,
        lambda net, batch: ((net(batch) ** 2).sum(), len(batch)),
        strategy=strategy,
        workers=4,
        batch_size=8,
        micro_batch=1,
        reproducible=reproducible,
    )


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.01,weight_decay=0.1", "adamw:lr=0.01,weight_decay=0.1"])
def test_unused_here_is_a_zero_and_unused_everywhere_is_left_alone(optimizer: str) -> None:
    want, losses, _ = worlds.alone(optional, strategy="single", optimizer=optimizer)
    assert want["3.weight"].tolist() == [0.5, 0.5], "the optimizer must not decay what has no gradient"
    assert want["1.weight"].tolist() != [0.5, 0.5]
    for devices, strategy, reproducible in [(4, "mirrored", True), *((*w, False) for w in WORLDS)]:
        for got, said, _ in worlds.run(
            devices, optional, strategy=strategy, optimizer=optimizer, reproducible=reproducible
        ):
            close(got, want, 1e-10)
            assert got["3.weight"].tolist() == [0.5, 0.5]
            assert [s[:3] for s in said] == [pytest.approx(s[:3], rel=1e-10) for s in losses]


# Several types of numbers in one model.


class Narrow(nn.Module):
    """A layer in another precision than its surroundings."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3).to(dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.to(self.inner.weight.dtype)).to(inputs.dtype)


def mixed(strategy: str, dtypes: list[torch.dtype], reproducible: bool = False) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Narrow(dtype) for dtype in dtypes))
    data = torch.randn(12, 3, generator=torch.Generator().manual_seed(2))
    return trained(
        model,
        "sgd:lr=0.1",
        data,
        lambda net, batch: (net(batch).square().sum(), len(batch)),
        strategy=strategy,
        workers=4,
        batch_size=8,
        reproducible=reproducible,
    )


MIXED = [
    ([torch.float64, torch.float32, torch.float64], 1e-6),
    ([torch.float32, torch.bfloat16, torch.float32, torch.bfloat16], 2e-2),
    ([torch.bfloat16, torch.bfloat16, torch.bfloat16], 2e-2),
]


@pytest.mark.parametrize(("dtypes", "tolerance"), MIXED)
def test_mixed_types(dtypes: list[torch.dtype], tolerance: float) -> None:
    want, losses, _ = worlds.alone(mixed, strategy="single", dtypes=dtypes)
    for devices, strategy in [(3, "mirrored"), (4, NATIVE), (3, "model_parallel"), (3, "central_storage")]:
        for got, said, _ in worlds.run(devices, mixed, strategy=strategy, dtypes=dtypes):
            close(got, want, tolerance)
            assert said[0][:2] == pytest.approx(losses[0][:2], rel=1e-5)
            assert said[0][2] == pytest.approx(losses[0][2], rel=tolerance)
    _, _, digest = worlds.alone(mixed, strategy="single", dtypes=dtypes, reproducible=True)
    for strategy in ("mirrored", "central_storage"):
        for answer in worlds.run(3, mixed, strategy=strategy, dtypes=dtypes, reproducible=True):
            assert answer[2] == digest


# Clipping.


def by_hand(clip: float | None) -> tuple[dict[str, Any], list[float]]:
    model, (values, mask) = token_model(), token_data()
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for _ in range(3):
        total, count, _ = token_loss(model, (values, mask))
        optimizer.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip)))
        optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, norms


def clipped(strategy: str, clip: float | None) -> Any:
    return trained(
        token_model(),
        "sgd:lr=0.1,momentum=0.9",
        token_data(),
        token_loss,
        strategy=strategy,
        workers=4,
        batch_size=12,
        clip=clip,
    )


@pytest.mark.parametrize("clip", [None, 0.3, 1e6])
def test_clipping_is_that_of_pytorch(clip: float | None) -> None:
    want, norms = by_hand(clip)
    for devices, strategy in [
        (1, "single"),
        (3, "mirrored"),
        (4, NATIVE),
        (3, "model_parallel"),
        (3, "central_storage"),
    ]:
        for got, said, _ in worlds.run(devices, clipped, strategy=strategy, clip=clip):
            close(got, want, 1e-10)
            assert [s[2] for s in said] == pytest.approx(norms, rel=1e-10), "the norm is that before clipping"


# Compressed wires: one step of plain SGD at rate 1 shows the gradient itself.


def on_the_wire(strategy: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
    return trained(
        model,
        "sgd:lr=1",
        data,
        lambda net, batch: (net(batch).square().sum(), len(batch)),
        steps=1,
        strategy=strategy,
        workers=4,
        batch_size=64,
    )


@pytest.mark.parametrize(("wire", "bits"), [("bf16", 8), ("fp16", 11)])
def test_a_compressed_wire_costs_no_more_than_its_rounding(wire: str, bits: int) -> None:
    """Each of R ranks rounds its own part, and so may each of R-1 additions: 2R half-units of the largest part."""
    want, losses, _ = worlds.alone(on_the_wire, strategy="single")
    for ranks in (3, 4):
        for got, said, _ in worlds.run(ranks, on_the_wire, strategy=f"mirrored:wire={wire}"):
            largest = max(float(np.abs(w).max()) for w in want.values())
            errors = [float(np.abs(got[n] - w).max()) for n, w in want.items()]
            assert 0 < max(errors) <= 2 * ranks * 2.0**-bits * max(largest, 1)
            assert said[0][:2] == pytest.approx(losses[0][:2], rel=1e-5), "totals are never compressed"


def test_options_that_exclude_each_other() -> None:
    text = worlds.run(3, refused)
    assert all("reproducible cannot be combined with a compressed wire" in t for t in text)


def refused() -> str:
    try:
        tutti.prepare(token_model(), "sgd", token_data(), token_loss, strategy="mirrored:wire=fp16", reproducible=True)
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


def many_metrics(count: int, strategy: str) -> str:
    def loss(net: Any, batch: Any) -> Any:
        return net(batch).sum(), len(batch), {f"m{i}": 1.0 * len(batch) for i in range(count)}

    try:
        _, said, _ = trained(
            *(nn.Linear(2, 1), "sgd", torch.ones(6, 2), loss), steps=1, strategy=strategy, workers=3, batch_size=6
        )
    except tutti.errors.UsageError as error:
        return str(error)
    return str(said[0][3])


@pytest.mark.parametrize(
    "strategy", ["mirrored", "local_sgd:period=2", "local_sgd:period=2,post=1", "sharded", "parameter_server"]
)
def test_metrics_up_to_six_and_no_more(strategy: str) -> None:
    six = str({f"m{i}": 1.0 for i in range(6)})
    assert worlds.run(3, many_metrics, count=6, strategy=strategy) == [six] * 3
    assert all("reports 7 metrics" in text for text in worlds.run(3, many_metrics, count=7, strategy=strategy))


def test_metrics_of_workers_that_wait_for_nobody() -> None:
    strategy = "parameter_server:mode=async"
    assert all("m5" in text and "staleness" in text for text in worlds.run(3, many_metrics, count=6, strategy=strategy))
    assert all("reports 7 metrics" in text for text in worlds.run(3, many_metrics, count=7, strategy=strategy))
