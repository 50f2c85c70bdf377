"""Gradient noise in a run: the same on any devices, as large as this step's batch asks for, not in what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import table
from tests.parallel.models import trained
from tutti.comm.partition import chunks, even_share
from tutti.comm.random_keys import mix, name_key
from tutti.errors import UsageError

COUNT, BATCH, WORKERS = 32, 12, 4
NOISE = "multiplicative:base_batch=9"


def data() -> Tensor:
    return torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1)).double()


def losses(net: Any, batch: Tensor) -> Tensor:
    """One a sample."""
    return net(batch).square().flatten()


def tokens(net: Any, batch: Tensor) -> Any:
    """Losses that count two a sample, and a metric."""
    values = losses(net, batch)
    return values, 2 * len(values), {"loss_again": values.detach().sum()}


def train(loss: Any = losses, noise: str = NOISE, **options: Any) -> Any:
    options = {"workers": WORKERS, "batch_size": BATCH, "gradient_noise": noise, **options}
    return trained(model(), "sgd:lr=0.5,momentum=0.9", data(), loss, 4, **options)


@pytest.mark.parametrize(
    ("kind", "micro", "exact", "place"),
    table(
        *(["losses", "tokens"], [None, 2], [False, True]),
        [(2, "mirrored"), (3, "mirrored"), (4, "mirrored"), (3, "model_parallel")],
    ),
    ids=str,
)
def test_the_same_on_any_devices(kind: str, micro: int | None, exact: bool, place: tuple[int, str]) -> None:
    devices, strategy = place
    options = {"loss": globals()[kind], "micro_batch": micro, "reproducible": exact}
    want, said, digest = worlds.alone(train, strategy="single", **options)
    for got, own, own_digest in worlds.run(devices, train, strategy=strategy, **options):
        assert largest_difference(got, want) <= (0 if exact else 1e-10)
        assert [s[0] for s in own] == pytest.approx([s[0] for s in said], rel=0 if exact else 1e-9)
        assert not exact or own_digest == digest
    plain, *_ = worlds.alone(train, strategy="single", noise="none", **options)
    assert largest_difference(plain, want) > 1e-2


def test_workers_that_train_alone_have_it_too() -> None:
    options = {"strategy": "local_sgd:period=2", "reproducible": True}
    [(want, _, digest)] = worlds.run(1, train, **options)
    for devices in (3, 4):
        for _, _, own in worlds.run(devices, train, **options):
            assert own == digest
    [(plain, _, _)] = worlds.run(1, train, noise="none", **options)
    assert largest_difference(plain, want) > 1e-2


def by_hand(micro: int | None) -> tuple[dict[str, Any], list[float]]:
    """(1/M) Σ z g with z from (seed, step, worker, micro), M that of the step; the mean losses without z."""
    from tutti.data.order import permutation

    net = model()
    net[2].p = 0.0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    said = []
    for clock in range(4):
        epoch, step = divmod(clock, 3)
        rows = permutation(0, epoch, COUNT)[BATCH * step : BATCH * (step + 1)]
        sigma = (len(rows) / 9 - 1) ** 0.5 if len(rows) > 9 else 0.0
        optimizer.zero_grad()
        total = 0.0
        for worker in range(WORKERS):
            mine = rows[slice((part := even_share(len(rows), WORKERS, worker)).start, part.stop)]
            for number, piece in enumerate(chunks(len(mine), micro)):
                values = losses(net, data()[mine[piece.start : piece.stop]])
                key = mix(mix(0, clock, worker, number), name_key("gradient noise")) & ((1 << 63) - 1)
                generator = torch.Generator().manual_seed(key)
                z = 1 + sigma * torch.randn(len(values), generator=generator, dtype=torch.float64)
                (values * z / len(rows)).sum().backward()
                total += float(values.detach().sum())
        said.append(total / len(rows))
        optimizer.step()
    return {name: t.detach().numpy().copy() for name, t in net.state_dict().items()}, said


def still() -> nn.Sequential:
    net = model()
    net[2].p = 0.0
    return net


def without_dropout(micro: int | None, own: bool, scale: str | None) -> tuple[dict[str, Any], list[float]]:
    net = still()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    run = tutti.prepare(
        *(net, optimizer, data(), None if own else losses),
        workers=WORKERS,
        batch_size=BATCH,
        micro_batch=micro,
        gradient_noise=NOISE,
        loss_scale=scale,
    )
    said: list[float] = []
    while run.global_step < 4:
        for batch in (run.microbatches if own else run.epoch)(*run.data_position):
            if own:
                run.model.zero_grad()
                run.backward(losses(run.model, batch))
                optimizer.step()
            else:
                run.step(batch)
            if (not own or run.stepped) and run.stats is not None:
                said.append(run.stats.loss)
            if run.global_step == 4:
                break
    return {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}, said


@pytest.mark.parametrize(("micro", "own", "scale"), table([None, 2], [False, True], [None, "1024"]))
def test_every_loss_counts_as_its_draw_says_and_is_reported_as_it_is(micro: Any, own: bool, scale: str | None) -> None:
    want, losses_by_hand = by_hand(micro)
    for devices in (1, 3):
        for got, said in worlds.run(devices, without_dropout, micro=micro, own=own, scale=scale):
            assert largest_difference(got, want) <= 1e-10
            assert said == pytest.approx(losses_by_hand, rel=1e-9)


def mean(net: Any, batch: Tensor) -> Tensor:
    return losses(net, batch).mean()


def refusal(**options: Any) -> tuple[str, str]:
    try:
        train(**options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_it_cannot_be_added_to_is_refused() -> None:
    for strategy in ("mirrored", "local_sgd:period=2"):
        for kind, said in worlds.run(2, refusal, loss=mean, strategy=strategy):
            assert kind == UsageError.__name__ and "the loss of each sample" in said
    for devices in (1, 2):
        for kind, said in worlds.run(devices, refusal, noise="multiplicative:base_batch=13"):
            assert kind == UsageError.__name__ and "larger than the global batch of 12" in said


def loop_without_noise(workers: int, last: bool) -> str:
    """A plain ``loss.backward()`` before the update, alone or besides ``run.backward``."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = tutti.prepare(net, optimizer, data(), workers=workers, batch_size=BATCH, gradient_noise=NOISE)
    try:
        for batch in run.microbatches(0):
            if last:
                run.backward(losses(net, batch))
            losses(net, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        return f"{error} {run.updates}"
    return ""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_gradient_without_noise_is_refused(workers: int) -> None:
    [said] = worlds.run(1, loop_without_noise, workers=workers, last=False)
    assert "gradients that run.backward did not make" in said and said.endswith(" 0"), said
    [said] = worlds.run(1, loop_without_noise, workers=workers, last=True)
    assert "can no longer be told apart" in said and said.endswith(" 0"), said
