"""The gradient noise scale in a run: equal on any devices, of the right size, without effect on the weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tutti.errors import UsageError

COUNT, BATCH, WORKERS, STEPS = 66, 13, 4, 5


def data() -> Tensor:
    return torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def loss(net: Any, batch: Tensor) -> Any:
    values = (net(batch) - batch[:, :1]).square().flatten()
    return values.sum(), 3 * len(values), {}


def train(every: int | None = 2, optimizer: str = "adam:lr=0.01", **options: Any) -> tuple[Any, list[Any]]:
    options = {"workers": WORKERS, "batch_size": BATCH, **options}
    run = tutti.prepare(model(), optimizer, data(), loss, noise_every=every, **options)
    found = []
    while run.clock < STEPS:
        for batch in run.epoch(*run.at):
            run.step(batch)
            found.append({} if run.noise_probe is None else dict(run.noise_probe.values()))
            if run.clock == STEPS:
                break
    return {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}, found


def by_hand(micro: int | None, scaled: bool = False) -> list[tuple[float, float]]:
    """(tr Σ, |G|²) of the steps 0, 2, 4 by two loops: over the parts, and over the batch."""
    from tutti.comm.partition import chunks, even_share
    from tutti.data.order import permutation

    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    found = []
    for clock in range(STEPS):
        rows = permutation(0, 0, COUNT)[BATCH * clock : BATCH * (clock + 1)]
        weights = []
        if scaled and clock:
            for p in net.parameters():
                state = optimizer.state[p]
                weights.append(1 / ((state["exp_avg_sq"] / (1 - 0.999**clock)).sqrt() + 1e-8))
        weights = weights or [torch.ones_like(p) for p in net.parameters()]
        total, squares, parts = [torch.zeros_like(p) for p in net.parameters()], 0.0, 0
        for worker in range(WORKERS):
            mine = rows[slice((share := even_share(len(rows), WORKERS, worker)).start, share.stop)]
            for piece in chunks(len(mine), micro):
                own = data()[mine[piece.start : piece.stop]]
                sums, count, _ = loss(net, own)
                gradient = torch.autograd.grad(sums / count, list(net.parameters()))
                share_of_batch = len(own) / BATCH
                squares += share_of_batch * sum(float((w * g**2).sum()) for w, g in zip(weights, gradient, strict=True))
                total = [t + share_of_batch * g for t, g in zip(total, gradient, strict=True)]
                parts += 1
        whole = sum(float((w * g**2).sum()) for w, g in zip(weights, total, strict=True))
        if clock % 2 == 0 and not (scaled and clock == 0):
            spread = (squares - whole) / (parts - 1)
            found.append((BATCH * spread, whole - spread))
        for p, g in zip(net.parameters(), total, strict=True):
            p.grad = g
        optimizer.step()
    return found


def check(found: list[Any], micro: int | None, adam: bool) -> None:
    assert [bool(values) for values in found] == [True, False, True, False, True]
    got = [(values["noise/trace"], values["noise/square"]) for values in found if values]
    for mine, theirs in zip(got, by_hand(micro), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    got = [(v["noise/adam/trace"], v["noise/adam/square"]) for v in found if "noise/adam/trace" in v]
    assert bool(got) == adam
    for mine, theirs in zip(got, by_hand(micro, scaled=True) if adam else [], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8)


# Whether the ranks have Adam's second moments of their own gradients.
CASES = [
    ("single", 1, True, {}),
    ("mirrored", 2, True, {}),
    ("mirrored", 3, True, {"reproducible": True}),
    ("sharded:stage=1", 2, False, {}),
    ("sharded:stage=3", 3, False, {}),
    ("central_storage", 3, False, {}),
    ("tensor:least=1", 2, True, {}),
    pytest.param("parameter_server", 2, False, {}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("micro", [2, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.parametrize(("strategy", "devices", "adam", "options"), CASES)
def test_equal_to_two_plain_loops(
    strategy: str, devices: int, adam: bool, options: dict[str, Any], micro: int | None
) -> None:
    for _, found in worlds.run(devices, train, strategy=strategy, micro_batch=micro, **options):
        check(found, micro, adam)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("sharded:stage=2", 2), ("sharded:stage=3,units=Linear", 3), ("sharded:offload=true", 2), ("sharded", 1)],
)
def test_gradients_that_backward_reduces_on_an_accelerator(strategy: str, devices: int) -> None:
    for _, found in worlds.run_on(worlds.ACCELERATOR, devices, train, strategy=strategy, micro_batch=2):
        check(found, 2, adam=False)


@pytest.mark.parametrize("strategy", ["pipeline:micro_batches=2", "model_parallel"])
def test_pipelines_compare_whole_workers(strategy: str) -> None:
    for devices in (1, 2, 3) if strategy == "model_parallel" else (2,):
        for _, found in worlds.run(devices, train, strategy=strategy):
            check(found, None, adam=True)


def test_the_weights_are_those_without_it() -> None:
    for strategy in ("mirrored", "pipeline:micro_batches=2"):
        options = {"strategy": strategy, "micro_batch": None if "pipeline" in strategy else 2}
        with_it = worlds.run(2, train, every=2, **options)
        without = worlds.run(2, train, every=None, **options)
        for (got, _), (want, _) in zip(with_it, without, strict=True):
            # A pipeline's worker is added as a whole, and not micro-batch by micro-batch.
            assert largest_difference(got, want) <= (1e-14 if "pipeline" in strategy else 0)


def test_loss_scale_and_clipping_do_not_count() -> None:
    [(_, plain)] = worlds.run(1, train, optimizer="sgd:lr=0")
    [(_, scaled)] = worlds.run(1, train, optimizer="sgd:lr=0", loss_scale="1024", clip=1e-6)
    assert [set(one) for one in plain] == [set(other) for other in scaled]
    assert not any("noise/adam/trace" in values for values in plain)
    for one, other in zip(plain, scaled, strict=True):
        assert all(one[name] == pytest.approx(other[name], rel=1e-9) for name in one if math.isfinite(one[name]))


def refusal(**options: Any) -> tuple[str, str]:
    try:
        train(**options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 1}, "Take workers=4 or micro_batch=3"),
        ({"workers": 1, "strategy": "pipeline:micro_batches=2"}, "with one worker there is a single gradient"),
        ({"strategy": "local_sgd:period=2"}, "cannot be combined with strategy 'local_sgd'"),
        ({"strategy": "parameter_server:mode=async"}, "cannot be combined with strategy 'parameter_server'"),
        ({"strategy": "parameter_server:backup=1"}, "cannot be combined with backup workers"),
        ({"strategy": "mirrored:wire=bf16"}, "cannot be combined with a compressed wire"),
        ({"gradient_noise": "multiplicative:base_batch=4"}, "cannot be combined with gradient_noise"),
        ({"batch_norm": "sync"}, "batch_norm sync cannot be combined with noise_every"),
        ({"every": 0}, "noise_every is 0"),
    ],
)
def test_refused_before_the_first_step(options: dict[str, Any], words: str) -> None:
    [(kind, said)] = worlds.run(1, refusal, **options)
    assert kind == UsageError.__name__ and words in said, said


def custom() -> str:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, data(), workers=2, batch_size=8, noise_every=1)
    try:
        next(iter(run.microbatches(0)))
    except UsageError as error:
        return str(error)
    return ""


def test_custom_loops_are_refused() -> None:
    [said] = worlds.run(1, custom)
    assert "noise_every cannot be combined with a custom training loop" in said
