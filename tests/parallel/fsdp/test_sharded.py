"""Rows of parameters: what FSDP2 does not do by itself, and what must hold on every rank."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.covering import in_turn, marked
from tutti.comm.stall import StallInspector
from tutti.config.task_config import GptConfig, UnetConfig
from tutti.errors import MismatchError, UsageError
from tutti.tasks.gpt import gpt
from tutti.tasks.unet import unet

STRATEGIES = ["sharded:units=Linear+Seldom", "sharded:stage=2,units=Linear", "sharded:stage=1"]


class Seldom(nn.Module):
    """Shifts where it is told to, which some batches never do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        return x * self.weight + self.shift if shifted else x * self.weight


class Odd(nn.Module):
    """A number without dimensions, a tied weight, a layer that nobody uses, one that few batches use, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.seldom = Seldom()
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.double()
        self.narrow = nn.Parameter(torch.tensor([0.5, -0.5, 1.0]))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.embed(numbers)
        for block in self.blocks:
            x = block(x)
        x = self.seldom(x, bool((numbers == 4).any()))
        return self.head(x * self.scale + self.narrow.double())


def data(count: int = 29) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(count)
    return numbers % 4 + (numbers % 7 == 3), (numbers * 3) % 5


def loss(model: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])


def trained(strategy: str, optimizer: str, **options: Any) -> dict[str, Any]:
    arguments = {"workers": 4, "batch_size": 9, "micro_batch": 2, "clip": 0.3, **options}
    run = tutti.prepare(Odd(), optimizer, data(), loss, strategy=strategy, **arguments)
    for epoch in range(2):
        for batch in run.epoch(epoch):
            run.step(batch)
    run.evaluate(data(5))
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(("strategy", "devices"), in_turn(STRATEGIES, [3, 4]))
def test_odd_parameters_are_as_on_one_device(strategy: str, devices: int) -> None:
    """Unused ones are not decayed; those that one rank alone used are updated on all."""
    want = worlds.alone(trained, strategy="single", optimizer="adamw:lr=0.1,weight_decay=0.5")
    assert (want["never.weight"] == Odd().never.weight.detach().numpy()).all()
    for got in worlds.run(devices, trained, strategy=strategy, optimizer="adamw:lr=0.1,weight_decay=0.5"):
        assert got.keys() == want.keys()
        for name in want:  # one of them is in single precision
            assert np.abs(got[name] - want[name]).max() <= 1e-6, name


def characters() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    numbers = torch.randint(0, 7, (12, 9), generator=torch.Generator().manual_seed(0))

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch.numel()

    return gpt(GptConfig(layers=3, heads=2, width=8, block=8, dropout=0.1), 7).double(), numbers, loss


def pictures() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    images = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(model: Any, batch: Any) -> Any:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), (batch[1] > 0).double())

    return unet(UnetConfig(depth=2, width=4)).double(), (images, images), loss


MODELS = {"gpt": characters, "unet": pictures}


def modelled(model: str, strategy: str) -> dict[str, Any]:
    plain, samples, own_loss = MODELS[model]()
    arguments = {"workers": 4, "batch_size": 5, "clip": 0.5, "channels_last": model == "unet"}
    run = tutti.prepare(plain, "lamb:lr=0.01", samples, own_loss, strategy=strategy, **arguments)
    for batch in run.epoch(0):
        run.step(batch)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


PLACES = [("sharded", 3), ("sharded", 4), ("sharded:stage=2", 3), ("sharded:stage=2", 4), ("sharded:shards=2", 4)]


@pytest.mark.parametrize(
    ("strategy", "devices", "model"), marked([(*place, model) for place in PLACES for model in MODELS])
)
def test_models_in_the_units_that_are_found(strategy: str, devices: int, model: str) -> None:
    want = worlds.alone(modelled, model=model, strategy="single")
    for got in worlds.run(devices, modelled, model=model, strategy=strategy):
        assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-10


def held(strategy: str) -> tuple[int, int, int]:
    """Numbers in the model's parameters between steps, in gradients' rows, in the optimizer's state."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    run = tutti.prepare(model, "adam", (torch.ones(8, 16), torch.ones(8, 16)), mean, strategy=strategy, workers=4)
    run.step(next(run.epoch(0)))
    rows = sum(t.numel() for t in run.replica.sharded.values())
    whole = sum(p.numel() for p in run.model.parameters() if not hasattr(p, "to_local"))
    [optimizer] = run.gradient_sync.optimizers
    state = sum(v.numel() for s in optimizer.state.values() for v in s.values() if v.dim())
    return rows, whole, state


def mean(model: Any, batch: Any) -> Any:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_a_rank_holds_its_part_alone() -> None:
    whole = 4 * (16 * 16 + 16)
    assert worlds.run(1, held, strategy="sharded") == [(0, whole, 2 * whole)]
    assert worlds.run(4, held, strategy="sharded:units=Linear") == [(whole // 4, 0, whole // 2)] * 4
    assert worlds.run(4, held, strategy="sharded:units=Linear,shards=2") == [(whole // 2, 0, whole)] * 4
    assert worlds.run(4, held, strategy="sharded:stage=1") == [(0, whole, whole // 2)] * 4


def custom_loop(strategy: str) -> dict[str, Any]:
    model = Odd()
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [model.scale], "lr": 0.02}], lr=0.05
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run = tutti.prepare(model, optimizer, data(), strategy=strategy, workers=4, batch_size=9, micro_batch=2)
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(nn.functional.cross_entropy(run.model(batch[0]), batch[1]))
            optimizer.step()
            if run.stepped:
                schedule.step()
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_custom_loop_with_an_own_optimizer(strategy: str) -> None:
    want = worlds.alone(custom_loop, strategy="single")
    for got in worlds.run(3, custom_loop, strategy=strategy):
        assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-6


def skipping(strategy: str) -> tuple[list[bool], tuple[str, ...], dict[str, Any]]:
    """The second batch has an infinity, on one rank alone."""
    inputs = torch.ones(12, 4, dtype=torch.float64)
    run = tutti.prepare(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(),
        "sgd:lr=0.1,momentum=0.9",
        (inputs, inputs),
        mean,
        strategy=strategy,
        workers=4,
        batch_size=4,
    )
    skipped, names = [], ()
    for number, batch in enumerate(run.epoch(0)):
        if number == 1 and run.context.mesh.data_rank == 0:
            batch[0][0, 0] = torch.inf
        run.step(batch)
        skipped.append(run.updated.skipped)
        names = names or run.updated.nonfinite
    return skipped, names, {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("strategy", ["sharded:units=Linear", *STRATEGIES[1:], "sharded:shards=2"])
def test_all_ranks_skip_what_is_not_finite(strategy: str) -> None:
    for skipped, names, state in worlds.run(4, skipping, strategy=strategy):
        assert skipped == [False, True, False] and "0.weight" in names
        assert all(np.isfinite(tensor).all() for tensor in state.values())


def given_batches(strategy: str) -> dict[str, Any]:
    """Batches of the caller's own, with other numbers of samples on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    inputs = torch.arange(48, dtype=torch.float64).view(12, 4).sin()
    run = tutti.prepare(model, "sgd:lr=0.1", (inputs, inputs), mean, strategy=strategy, workers=3, micro_batch=2)
    ranks, rank = run.context.mesh.data_ranks, run.context.mesh.data_rank
    bounds = [0, 7, 8, 12] if ranks == 3 else [0, 12]
    part = inputs[bounds[rank] : bounds[rank + 1]]
    for _ in range(3):
        run.step((part, part))
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def test_batches_of_the_callers_own() -> None:
    want = worlds.alone(given_batches, strategy="single")
    for got in worlds.run(3, given_batches, strategy="sharded:units=Linear"):
        assert max(np.abs(got[name] - want[name]).max() for name in want) <= 1e-10


class Forked(nn.Module):
    """Another way through the model on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.detour, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.detour(x) if tutti.rank() == 0 else x)


def forked() -> str:
    data = torch.ones(12, 4), torch.ones(12, 4)
    run = tutti.prepare(Forked(), "sgd", data, mean, strategy="sharded:units=Linear", workers=4, batch_size=6)
    try:
        run.step(next(run.epoch(0)))
    except MismatchError as error:
        return str(error)
    return ""


def test_models_that_go_different_ways_are_named() -> None:
    pool = worlds.Pool(3)
    try:
        said = pool.run(forked)
    finally:
        pool.close()
    assert all("all_gather of detour" in text and "all_gather of last" in text for text in said), said


def refused(options: str) -> str:
    try:
        tutti.prepare(Odd(), "adam", data(), loss, strategy=f"sharded:{options}", workers=4)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("offload=true", "offload=true does nothing here"),
        ("units=Lineer", "Did you mean 'Linear'"),
        ("units=blocks", "is never called"),
        ("shards=1,param_dtype=bf16", "take precision='bf16'"),
    ],
)
def test_what_cannot_be_is_refused(options: str, words: str) -> None:
    assert all(words in said for said in worlds.run(2, refused, options=options))


def heap(strategy: str, free: int) -> bool:
    """Whether freed memory is given back at once, with so much memory."""
    from tutti.train import model_conversion

    asked: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_conversion, "free_at_once", lambda: asked.append(True))
        patch.setattr(model_conversion, "free_memory", lambda processes: free)
        data = (torch.ones(8, 16), torch.ones(8, 16))
        model = nn.Linear(16, 16, bias=False)
        tutti.prepare(model, "adam", data, lambda model, batch: model(batch[0]).sum(), strategy=strategy, batch_size=4)
    return bool(asked)


def test_where_memory_is_short_gathered_layers_are_given_back() -> None:
    """A kibibyte of parameters in 15 or in 17."""
    ways = [("sharded", 15 << 10), ("sharded", 17 << 10), ("sharded:stage=1", 15 << 10), ("mirrored", 15 << 10)]
    found = [worlds.run(2, heap, strategy=strategy, free=free) for strategy, free in ways]
    assert found == [[True] * 2, [False] * 2, [False] * 2, [False] * 2]


def thawed_in_bf16() -> list[tuple[torch.dtype, float]]:
    """A unit of which nothing is trained at first: the dtype of its rows' gradients, and how far its weights go."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = optimizer.param_groups[0]["params"][0]
    dtypes: list[torch.dtype] = []
    optimizer.register_step_pre_hook(lambda *_: dtypes.append(rows.grad.dtype) if rows.grad is not None else None)
    inputs = torch.arange(48.0).view(12, 4).sin()
    strategy = "sharded:units=Linear,param_dtype=bf16"
    run = tutti.prepare(model, optimizer, (inputs, inputs), mean, strategy=strategy, workers=2, batch_size=6)
    begun = run.state()["0.weight"].clone()
    found = []
    for epoch in range(2):
        model[0].requires_grad_(epoch == 1)
        for batch in run.epoch(epoch):
            run.step(batch)
        moved = float((run.state()["0.weight"] - begun).abs().max())
        found.append((dtypes[-1] if dtypes else torch.bool, moved))
    return found


def test_a_unit_that_was_frozen_is_thawed_in_the_rows_dtype() -> None:
    for (none, still), (dtype, moved) in worlds.run(2, thawed_in_bf16):
        assert none == torch.bool and still == 0.0
        assert dtype == torch.float32 and moved > 0.0


def matrices(strategy: str) -> list[list[float]]:
    """Weights of Muon after three steps, where a layer is trained from the second on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    model[0].requires_grad_(False)
    optimizer = tutti.optim.Muon(model.named_parameters(), lr=0.01)
    inputs = torch.arange(72.0, dtype=torch.float64).view(18, 4).sin()
    run = tutti.prepare(model, optimizer, (inputs, inputs), mean, strategy=strategy, workers=2, batch_size=6)
    for batch in run.epoch(0):
        run.step(batch)
        model[0].requires_grad_(True)
    return [tensor.flatten().tolist() for tensor in run.state().values()]


def test_matrices_that_are_thawed_later_are_gathered() -> None:
    want = worlds.alone(matrices, strategy="single")
    for got in worlds.run(2, matrices, strategy="sharded:stage=1"):
        assert [pytest.approx(tensor, abs=1e-6) for tensor in want] == got


def scaled(strategy: str) -> tuple[float, dict[str, Any]]:
    """A ``GradScaler`` by hand, whose first scales make the last row of the gradient infinite."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    inputs = 1e4 * (2 + torch.arange(48.0).view(12, 4).sin())
    targets = torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(12, 1)
    run = tutti.prepare(model, optimizer, (inputs, targets), strategy=strategy, workers=tutti.size(), batch_size=6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**119, growth_interval=100)
    for epoch in range(4):
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(scaler.scale(mean(model, batch)))
            scaler.step(optimizer)
            scaler.update()
    return scaler.get_scale(), {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize("strategy", ["sharded:units=Linear", "sharded:stage=2"])
def test_a_scaler_skips_on_all_ranks_what_is_infinite_on_one(strategy: str) -> None:
    scale, want = worlds.alone(scaled, strategy="single")
    for own, got in worlds.run(2, scaled, strategy=strategy):
        assert own == scale < 2.0**119
        np.testing.assert_allclose(got["0.weight"], want["0.weight"], rtol=1e-5)
        assert got["0.weight"][3].all()


def waits_of_a_step(strategy: str, own: bool) -> int:
    """Messages that the third step waits for, besides those in shared memory; the first two compare settings too."""
    waits, plain = [0], StallInspector.wait

    def counted(self: StallInspector, *arguments: Any) -> None:
        waits[-1] += 1
        plain(self, *arguments)

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    dataset = torch.arange(48.0).view(12, 4).sin(), torch.ones(12, 1)
    run = tutti.prepare(net, "sgd:lr=0.1", dataset, mean, strategy=strategy, workers=2, batch_size=4)
    batches = [(dataset[0][:2], dataset[1][:2])] * 3 if own else run.epoch(0)
    StallInspector.wait = counted  # type: ignore[method-assign]
    try:
        for batch in batches:
            run.step(batch)
            waits.append(0)
    finally:
        StallInspector.wait = plain  # type: ignore[method-assign]
    return waits[2]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="shared memory needs x86-64")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("strategy", ["sharded", "sharded:stage=2", "sharded:stage=1"])
def test_a_step_of_a_small_model_waits_for_no_message(strategy: str, own: bool) -> None:
    assert worlds.run(2, waits_of_a_step, strategy=strategy, own=own) == [0, 0]


class Logged(torch.optim.SGD):
    """SGD with attributes of the script that have the names of attributes of tutti's own optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.grad_norm, self.norms, self.wholes = "", "my norms", "my wholes"

    def step(self, closure: Any = None) -> Any:
        assert (self.grad_norm, self.norms, self.wholes) == ("", "my norms", "my wholes")
        return super().step(closure)


def logged(strategy: str) -> float:
    model = nn.Linear(4, 4)
    run = tutti.prepare(
        model, Logged(model.parameters()), (torch.ones(8, 4), torch.ones(8, 4)), mean, strategy=strategy
    )
    [optimizer] = run.gradient_sync.optimizers
    before = {name: tensor.clone() for name, tensor in run.state().items()}
    run.step(next(run.epoch(0)))
    assert isinstance(optimizer, Logged)
    return max(float((tensor - before[name]).abs().max()) for name, tensor in run.state().items())


@pytest.mark.parametrize("strategy", ["mirrored", "sharded", "sharded:stage=1", "parameter_server"])
def test_attributes_of_a_script_s_optimizer_stay(strategy: str) -> None:
    """Only optimizers of ``tutti.optim`` are given norms and gatherers of tensors that are split over ranks."""
    assert all(change > 0 for change in worlds.run(2, logged, strategy=strategy))
