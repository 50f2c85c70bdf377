"""AdaScale in a run: its gain against workers' own gradients, on any devices, resumed, and what a run says of it."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract import models
from tests.contract.table import largest_difference
from tests.covering import marked
from tutti.comm.partition import even_share
from tutti.config.train_config import TrainConfig
from tutti.data.order import permutation
from tutti.errors import UsageError
from tutti.optim.noise_formulas import adascale_gain
from tutti.train.main import train_rank

COUNT, BATCH, WORKERS, STEPS = 32, 12, 4, 7
PLACES = [(2, "mirrored"), (3, "mirrored"), (4, "mirrored"), (3, "model_parallel"), (4, "model_parallel:stages=2")]


def data() -> Tensor:
    return torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def mean(net: Any, batch: Tensor) -> Tensor:
    return (net(batch).flatten() - batch[:, 0]).square().mean()


def tokens(net: Any, batch: Tensor) -> Any:
    """A sample counts one to three, so that workers of as many samples do not weigh the same."""
    counts = 1 + (batch[:, 1] > 0) + (batch[:, 2] > 0)
    return ((net(batch).flatten() - batch[:, 0]).square() * counts).sum(), counts.sum()


def falling(step: int) -> float:
    """A schedule that shows what it is asked."""
    return 1 / (1 + step)


def trained(run: tutti.Run, until: int) -> list[dict[str, float]]:
    """Train on to step ``until``; what AdaScale said after each."""
    said = []
    while run.global_step < until:
        for batch in run.epoch(*run.data_position):
            run.step(batch)
            said.append(run.adascale.values() if run.adascale else {})
            if run.global_step == until:
                break
    return said


def in_a_loop(run: tutti.Run, loss: Any, until: int, how: str) -> list[dict[str, float]]:
    """The same in a custom loop with ``run.backward``, called ``twice`` a batch, or with a ``plain`` backward."""
    said: list[dict[str, float]] = []
    while run.global_step < until:
        for batch in run.microbatches(*run.data_position):
            for _ in range(1 + (how == "twice")):
                found = loss(run.model, batch)
                found.backward() if how == "plain" else run.backward(found)
            if run.gated_step():
                said.append(run.adascale.values() if run.adascale else {})
            for parameter in run.model.parameters():
                parameter.grad = None
            if run.global_step == until:
                break
    return said


def train(loss: Any, strategy: str, loop: str = "", **options: Any) -> Any:
    run = tutti.prepare(
        *(model(), "sgd:lr=0.3,momentum=0.5", data(), loss),
        strategy=strategy,
        workers=WORKERS,
        batch_size=BATCH,
        lr_scale="adascale",
        **options,
    )
    run.lr_schedule = falling
    said = in_a_loop(run, loss, STEPS, loop) if loop else trained(run, STEPS)
    return {name: tensor.cpu().numpy().copy() for name, tensor in run.state().items()}, said, run.weights_sha256()


def by_hand(loss: Any, clip: float | None) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    """One gradient a worker; shares of 12 samples are 3 each, of the last 8 of an epoch 2 each."""
    net = model()
    named = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    theta, tau, said = 1 - WORKERS / 1000, 0.0, []
    variance = square = weight = 0.0
    for clock in range(STEPS):
        epoch, step = divmod(clock, 3)
        rows = permutation(0, epoch, COUNT)[BATCH * step : BATCH * (step + 1)]
        gradients, counts = [], []
        for worker in range(WORKERS):
            part = even_share(len(rows), WORKERS, worker)
            found = loss(net, data()[rows[part.start : part.stop]])
            total, count = found if isinstance(found, tuple) else (found * len(part), len(part))
            pieces = torch.autograd.grad(total / count, list(named.values()))
            gradients.append(torch.cat([piece.flatten() for piece in pieces]))
            counts.append(float(count))
        parts = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        together, whole = torch.stack(gradients), parts @ torch.stack(gradients)
        between = float(parts @ together.square().sum(1) - whole.square().sum()) / (WORKERS - 1)
        shares = len(rows) / (BATCH / WORKERS)
        variance = theta * variance + (1 - theta) * shares * between
        square = theta * square + (1 - theta) * float(whole.square().sum() - between)
        weight = theta * weight + 1 - theta
        gain = adascale_gain(variance / weight, square / weight, shares)
        norm = float(whole.norm())
        whole *= clip / (norm + 1e-6) if clip is not None and norm > clip else 1.0
        for parameter, piece in zip(named.values(), whole.split([p.numel() for p in named.values()]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        optimizer.param_groups[0]["lr"] = 0.3 * gain * falling(int(tau))
        optimizer.step()
        tau += gain
        said.append((gain, tau))
    return {name: tensor.detach().numpy().copy() for name, tensor in named.items()}, said


WAYS = [(1, "single", ""), *((*place, "") for place in PLACES)]
WAYS += [
    (devices, "mirrored", loop) for devices, loop in ((1, "run"), (2, "run"), (4, "run"), (1, "plain"), (3, "plain"))
]
LOSSES = {"mean": mean, "tokens": tokens}


GAINS = [
    (at, loss, clip)
    for (at, (*_, loop)), loss, clip in product(enumerate(WAYS), LOSSES, (None, 0.1))
    if (loop, loss) != ("plain", "tokens")
]


@pytest.mark.parametrize(("at", "loss", "clip"), marked(GAINS))
def test_the_gain_is_that_of_the_workers_own_gradients(at: int, loss: str, clip: float | None) -> None:
    want, gains = by_hand(LOSSES[loss], clip)
    assert gains[-1][1] - STEPS > 0.5, "it gains something"
    devices, strategy, loop = WAYS[at]
    options = {"loss": LOSSES[loss], "clip": clip, "loss_scale": clip and "1024", "micro_batch": 2}
    for got, said, _ in worlds.run(devices, train, strategy=strategy, loop=loop, **options):
        assert largest_difference(got, want) <= 1e-10
        assert [(s["gain"], s["tau"]) for s in said] == [pytest.approx(g, rel=1e-9) for g in gains]


def test_a_gain_of_two_gradients_in_an_update_is_refused() -> None:
    with pytest.raises(worlds.RankError, match="lr_scale='adascale' with 2 reductions of gradients in an update"):
        worlds.run(1, train, loss=mean, strategy="mirrored", loop="twice")


def prepare(strategy: str, **options: Any) -> tutti.Run:
    """The contract's model: batch norm, dropout, a frozen layer; batches of 25, 25, 20 for four workers."""
    run = tutti.prepare(
        *(models.model(), "sgd:lr=0.05,momentum=0.9", models.samples(), models.loss),
        **{"strategy": strategy, "workers": 4, "batch_size": 25, "lr_scale": "adascale", "reproducible": True}
        | options,
    )
    run.lr_schedule = falling
    return run


def whole(strategy: str, folder: str | None, **options: Any) -> Any:
    """All steps, saved after the second where there is a folder."""
    run = prepare(strategy, **options)
    said = trained(run, 2)
    if folder is not None:
        run.save(folder)
    said += trained(run, 5)
    return said[2:], run.weights_sha256()


def resumed(strategy: str, folder: str, **options: Any) -> Any:
    run = prepare(strategy, **options)
    try:
        run.restore(folder)
    except tutti.errors.TuttiError as error:
        return str(error)
    return trained(run, 5), run.weights_sha256()


def test_the_same_bits_on_any_devices_and_resumed_on_others(tmp_path: Path) -> None:
    [want] = worlds.run(1, whole, strategy="single", folder=None)
    for number, (devices, strategy) in enumerate(PLACES):
        folder = str(tmp_path / f"{strategy[:4]}{devices}")
        assert worlds.run(devices, whole, strategy=strategy, folder=folder) == [want] * devices
        others, other = ((1, "single"), (3, "mirrored"))[number % 2]
        assert worlds.run(others, resumed, strategy=other, folder=folder) == [want] * others
    for said in worlds.run(2, resumed, strategy="mirrored", folder=folder, lr_scale="none"):
        assert "the checkpoint was made with lr_scale='adascale'" in said
    worlds.run(1, whole, strategy="single", folder=str(tmp_path / "plain"), lr_scale="none")
    for said in worlds.run(2, resumed, strategy="mirrored", folder=str(tmp_path / "plain")):
        assert "the checkpoint was made without lr_scale='adascale'" in said


def weight() -> nn.Linear:
    """Its gradient for a sample is the sample."""
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


def extreme(kind: str) -> list[float]:
    half = data()[:8]
    samples = half[:1].expand(16, 3).clone() if kind == "equal" else torch.cat([half, -half])
    run = tutti.prepare(
        *(weight(), "sgd:lr=0.1", samples, lambda net, batch: net(batch).mean()),
        workers=4,
        batch_size=16,
        lr_scale="adascale",
    )
    return [values["gain"] for values in trained(run, 3)]


@pytest.mark.parametrize(("kind", "gain"), [("equal", 1.0), ("noise", 4.0)])
def test_no_noise_gains_nothing_and_nothing_but_noise_all(kind: str, gain: float) -> None:
    for devices in (1, 3):
        assert worlds.run(devices, extreme, kind=kind) == [[pytest.approx(gain, rel=1e-9)] * 3] * devices


def finished(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    fields = {"batch_size": 64, "workers": 4, "optimizer": "sgd:lr=0.05", "lr_scale": "adascale", "eval_every": "none"}
    folder.mkdir()
    assert train_rank("linear", TrainConfig(**{**fields, "out": str(folder), **options}), str(folder)) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["group"] == "train"], json.loads((folder / "summary.json").read_text())


def test_a_run_ends_and_falls_where_its_gains_add_up_to_one_workers_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 points are 32 steps of one worker's 16 samples; the rate falls after one epoch of them."""
    schedule = "step:milestones=1ep,gamma=0.1"
    lines, summary = finished(tmp_path / "run", epochs=2, schedule=schedule, tensorboard=False)
    taus = [0.0, *(line["tau"] for line in lines)]
    assert taus[-2] < 64 <= taus[-1] and 16 <= len(lines) < 64
    for before, line in zip(taus, lines, strict=False):
        assert line["tau"] == before + line["gain"] and 1 <= line["gain"] <= 4
        assert line["lr"] == pytest.approx(0.05 * line["gain"] * (0.1 if before >= 32 else 1.0))
        assert line["noise_scale"] is None or line["noise_scale"] >= 0
    assert summary["steps"] == len(lines)
    assert summary["adascale"]["tau"] == taus[-1]
    assert summary["adascale"]["gain"] == pytest.approx(taus[-1] / len(lines))
    said = capsys.readouterr().err
    assert "64 scale-invariant steps = 2ep of one worker alone" in said
    assert "0.05 × each step's gain (adascale, 1 to 4)" in said


def test_a_step_that_is_skipped_leaves_it_alone() -> None:
    samples = torch.cat([data()[:8], data()[:8]])
    samples[0] = float("nan")
    run = tutti.prepare(
        *(weight(), "sgd:lr=0.1", samples, lambda net, batch: net(batch).square().mean()),
        **{"strategy": "single", "workers": 2, "batch_size": 4, "lr_scale": "adascale"},
    )
    before, skipped = {"tau": 0.0}, 0
    for batch in run.epoch(0):
        run.step(batch)
        assert run.updated is not None and run.adascale is not None
        if run.updated.skipped:
            skipped += 1
            now = run.adascale.values()
            assert now == {name: before[name] for name in now} and "gain" not in now
        before = run.adascale.values()
    assert skipped == 1


def test_what_contradicts_it_is_refused() -> None:
    make = partial(tutti.prepare, weight(), "sgd:lr=0.1", data(), mean, lr_scale="adascale", batch_size=12)
    with pytest.raises(UsageError, match="at least 2 workers"):
        make(workers=1)
    with pytest.raises(UsageError, match="updates of their own"):
        make(workers=2, strategy="local_sgd")
    with pytest.raises(UsageError, match="adascale would measure the added noise"):
        make(workers=2, gradient_noise="multiplicative:base_batch=3")
    net = weight()
    with pytest.raises(UsageError, match="for an optimizer given as text"):
        tutti.prepare(net, torch.optim.SGD(net.parameters()), data(), mean, workers=2, lr_scale="adascale")
