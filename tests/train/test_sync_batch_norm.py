"""``batch_norm="sync"``: the whole run is that of one plain model on whole batches, for any number of devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import thinned
from tests.parity.loops import numbers
from tutti.data.order import permutation

# Batches of 12, 12 and 2 samples: of four workers the last two have none of the last one.
BATCH, COUNT, EPOCHS = 12, 26, 2
ALL: dict[str, Any] = {"batch_norm": "sync", "workers": 4, "batch_size": BATCH}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    # Two samples are normalised to ±1 whatever they are: gradients below are almost zero, and not to be divided by.
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, eps=1e-4),
}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(COUNT, 2, 4, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(0, 3, (COUNT,), generator=generator))


def made(last: nn.Module | None = None) -> nn.Sequential:
    """Four, five and two dimensions; every option of batch norm; no parameter whose gradient is structurally zero."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Unflatten(1, (2, 2)),
        nn.BatchNorm3d(2, momentum=None),
        nn.Flatten(),
        nn.Linear(16, 6, bias=False),
        nn.BatchNorm1d(6, affine=False),
        last or nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


def loss(model: Any, batch: Any) -> Any:
    images, labels = batch
    scores = model(images)
    correct = (scores.argmax(1) == labels).sum()
    return nn.functional.cross_entropy(scores, labels, reduction="sum"), len(labels), {"accuracy": correct}


def by_hand(optimizer: str) -> tuple[dict[str, Any], list[float], float]:
    """One plain model, the whole batch at once, PyTorch alone: weights and statistics, losses, held-out loss."""
    model, losses, samples = made(), [], data()
    own = OPTIMIZERS[optimizer](model.parameters())
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(0, epoch, COUNT))
        for rows in order.split(BATCH):
            own.zero_grad()
            value = loss(model, samples[rows])[0] / len(rows)
            value.backward()
            own.step()
            losses.append(float(value.detach()))
    with torch.no_grad():
        held_out = loss(model.eval(), samples.tensors)[0] / COUNT
    return numbers(model), losses, float(held_out)


def trained(
    optimizer: str, custom_loop: bool = False, **options: Any
) -> tuple[dict[str, Any], list[float], float, bool]:
    """The same by tutti; and whether this rank's own statistics are the run's."""
    model = made()
    own = OPTIMIZERS[optimizer](model.parameters())
    run = tutti.prepare(model, own, data(), loss, **{**ALL, **options})
    losses = []
    for epoch in range(EPOCHS):
        if not custom_loop:
            losses += [run.step(batch) for batch in run.epoch(epoch)]
            continue
        for batch in run.microbatches(epoch):
            own.zero_grad()
            run.backward(loss(run.model, batch)[:2])
            own.step()
            assert run.stats is not None
            losses.append(run.stats.loss)
    held_out = run.evaluate(data(), batch=5).loss
    state = run.state()
    # Other stages have the buffers of their own layers.
    here = {name: buffer for part in run.replica.parts for name, buffer in part.named_buffers()}
    same = all(torch.equal(state[name], buffer) for name, buffer in here.items() if name in state)
    return {name: tensor.numpy().copy() for name, tensor in state.items()}, losses, held_out, same


AGAIN: dict[str, Any] = {"activation_checkpointing": ["1", "4", "7"], "micro_batch": 12}
SMALL_BUCKETS: dict[str, Any] = {"channels_last": True, "strategy": "mirrored:algorithm=native,bucket_mb=0.0001"}
WAYS: dict[int, list[dict[str, Any]]] = {
    1: [AGAIN, {"strategy": "model_parallel"}],
    2: [SMALL_BUCKETS, {"compile": "default:backend=eager"}],
    3: [SMALL_BUCKETS, AGAIN, {"strategy": "model_parallel"}],
    4: [SMALL_BUCKETS, {"strategy": "model_parallel:stages=2"}],
}


def ways(optimizer: str) -> list[Any]:
    """In a loop of run.step, in a custom loop, and all that is done to a forward or to gradients besides."""
    more = WAYS[tutti.size()] if optimizer == "sgd" else []
    return [trained(optimizer, **way) for way in ({}, {"custom_loop": True}, *more)]


@pytest.mark.parametrize(
    ("optimizer", "ranks"), [*(("sgd", ranks) for ranks in WAYS), *thinned([("adam", ranks) for ranks in WAYS], 2, 1)]
)
def test_a_run_is_that_of_plain_batch_norm_on_whole_batches(ranks: int, optimizer: str) -> None:
    want, losses, held_out = by_hand(optimizer)
    for told in worlds.run(ranks, ways, optimizer=optimizer):
        for way, (got, own_losses, own_held_out, same) in enumerate(told):
            assert largest_difference(got, want) <= 1e-10, way
            assert own_losses == pytest.approx(losses, rel=1e-10), way
            assert own_held_out == pytest.approx(held_out, rel=1e-10), way
            assert same, way


def restored(folder: str) -> dict[str, Any]:
    """Three steps, saved; then other workers' statistics before three more."""
    options = {"strategy": "mirrored", **ALL}
    for epochs in (1, EPOCHS):
        model = made()
        run = tutti.prepare(model, OPTIMIZERS["sgd"](model.parameters()), data(), loss, **options)
        run.restore(folder)
        for epoch in run.epochs(epochs):
            for batch in run.epoch(epoch):
                run.step(batch)
        run.save(folder)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_saved_and_goes_on(ranks: int, tmp_path: Any) -> None:
    want = by_hand("sgd")[0]
    for got in worlds.run(ranks, restored, folder=str(tmp_path)):
        assert largest_difference(got, want) <= 1e-10


def in_bfloat16() -> list[float]:
    model = made().float()
    run = tutti.prepare(model, "sgd:lr=0.05", data(), loss, **ALL, precision="bf16")
    return [run.step(batch) for epoch in range(EPOCHS) for batch in run.epoch(epoch)]


def test_autocast_stays_close() -> None:
    [want] = worlds.run(1, in_bfloat16)
    for got in worlds.run(3, in_bfloat16):
        assert got == pytest.approx(want, rel=0.03)


def prepared_anew() -> list[str]:
    model, told = made(), []
    for batch_norm in ("sync", "worker", "ghost:size=2", "sync"):
        run = tutti.prepare(model, "sgd:lr=0.05", data(), loss, **{**ALL, "batch_norm": batch_norm})
        run.step(next(run.epoch(0)))
        told.append(type(run.model[1]).__name__)
    return told


def test_a_model_may_be_prepared_again_with_another() -> None:
    for told in worlds.run(2, prepared_anew):
        assert told == ["SyncBatchNorm", "BatchNorm2d", "GhostBatchNorm", "SyncBatchNorm"]


class Noisy(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(inputs, 0.1, self.training)


REFUSED: list[tuple[dict[str, Any], nn.Module | None, str]] = [
    ({"strategy": "local_sgd:period=2"}, None, "hold different weights"),
    ({"reproducible": True}, None, "not reproducible on several devices"),
    ({"identical_batches": True}, None, "cannot be combined with identical batches"),
    ({"micro_batch": 5}, None, "take micro_batch=6 or leave it out"),
    ({}, nn.Dropout(0.2), "cannot be combined with 8, which draws random numbers"),
    ({}, Noisy(), "by a function such as dropout"),
]


def refusals() -> list[str]:
    told = []
    for options, last, _ in REFUSED:
        try:
            run = tutti.prepare(made(last), "sgd:lr=0.05", data(), loss, **{**ALL, **options})
            run.step(next(run.epoch(0)))
            told.append("")
        except Exception as error:
            told.append(f"{getattr(error, 'exit_code', 1)} {error}")
    return told


def test_what_it_contradicts_is_refused_on_every_rank() -> None:
    for told in worlds.run(2, refusals):
        for text, (_, _, words) in zip(told, REFUSED, strict=True):
            assert text.startswith("2 ") and words in text.replace("Take", "take"), text


def with_draws() -> tuple[list[float], list[float]]:
    """As many workers as devices: each draws from its own stream, by modules and by functions."""
    losses = []
    for last in (nn.Dropout(0.2), Noisy()):
        options = {**ALL, "workers": None}
        run = tutti.prepare(copy.deepcopy(made(last)), "sgd:lr=0.05", data(), loss, **options)
        losses.append([run.step(batch) for batch in run.epoch(0)])
    return losses[0], losses[1]


def test_a_device_that_plays_one_worker_may_draw() -> None:
    first, second = worlds.run(2, with_draws), worlds.run(2, with_draws)
    assert first == second and first[0] == first[1]


def reproduced() -> str:
    run = tutti.prepare(made(), "sgd:lr=0.05", data(), loss, **ALL, reproducible=True)
    for batch in run.epoch(0):
        run.step(batch)
    return run.weights_sha256()


def test_on_one_device_it_is_reproducible() -> None:
    assert worlds.run(1, reproduced) == worlds.run(1, reproduced)


def own_batches() -> list[Any]:
    """Ranks bring different numbers of samples; none is too few."""
    images, labels = data().tensors
    run = tutti.prepare(made(), "sgd:lr=0.05", data(), loss, **ALL)
    rank = tutti.rank()
    rows = slice(0, 7) if rank == 0 else slice(7, 9)
    told: list[Any] = [run.step((images[rows], labels[rows]))]
    told.append(float(run.state()["1.running_mean"][0]))
    try:
        run.lifecycle.dummy_micro_batch(0)
    except Exception as error:
        told.append(str(error))
    return told


def test_batches_of_the_callers_own() -> None:
    samples, model = data(), made()
    value = float(loss(model, samples[torch.arange(9)])[0].detach()) / 9
    for told in worlds.run(2, own_batches):
        assert told[:2] == [pytest.approx(value, rel=1e-12), pytest.approx(float(model[1].running_mean[0]), rel=1e-12)]
        assert "bring at least one sample on every rank" in told[2].replace("Bring", "bring")
