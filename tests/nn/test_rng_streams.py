"""Random draws inside a model: functions of (cell, module, call), not of who computes or what was drawn before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tutti.nn.rng_streams import RngStreams

CPU = torch.device("cpu")


class Noise(nn.Module):
    """Draws by a function."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * torch.rand_like(inputs) if self.training else inputs


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.5), nn.Identity(), Noise(), nn.Dropout(0.5), nn.Dropout(0.5), Noise())


def test_a_part_draws_what_the_whole_would() -> None:
    whole, part = sequential(), sequential()[2:]
    first, second = RngStreams(whole, CPU), RngStreams(part, CPU)
    ones = torch.ones(3, 5)
    first.enter(77)
    middle = whole[1](whole[0](ones))
    want = middle
    for block in whole[2:]:
        want = block(want)
    second.enter(77)
    torch.rand(13)  # somebody else's draws in between
    assert torch.equal(part(middle), want)


def test_modules_calls_and_cells_draw_differently_and_again_alike() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    draws, ones = RngStreams(model, CPU), torch.ones(64)

    def masks(key: int) -> list[list[bool]]:
        draws.enter(key)
        return [(block(ones) > 0).tolist() for block in (model[0], model[0], model[1], model[1])]

    first = masks(1)
    assert len({tuple(m) for m in first}) == 4
    assert masks(2) != first
    assert masks(1) == first
    assert masks(1 + 2**63)[0] != masks(2)[0]


class Drawing(nn.Module):
    """Dropout twice in a call, and a draw by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(self.second(self.first(inputs) + 1) + 1) * torch.rand_like(inputs)


def test_a_seed_of_the_script_decides_on_the_draws_of_modules() -> None:
    """As in plain PyTorch: two forwards after one seed draw alike, in any micro-batch, and go on where they were."""
    model, ones = Drawing(), torch.ones(64)
    draws, found = RngStreams(model, CPU), []
    for key in (1, 2):
        draws.enter(key)
        assert draws.script_seed is None
        found.append(model(ones))
        torch.manual_seed(5)
        found += model(ones), model(ones)
        assert draws.script_seed == 5
        with torch.random.fork_rng():
            torch.manual_seed(6)
            found.append(model(ones))
            torch.manual_seed(5)
            found.append(model(ones))
        found.append(model(ones))
    own, again = found[:6], found[6:]
    assert torch.equal(own[1], own[4]) and len({tuple(each.tolist()) for each in own}) == 5
    assert not torch.equal(own[0], again[0]) and all(map(torch.equal, own[1:], again[1:]))


def test_states_that_the_script_sets_again_repeat_the_draws_of_modules() -> None:
    """As GradCache does (arXiv 2101.06983): a second forward of each part of a batch, with the first one's draws."""
    model, parts = Drawing(), [torch.ones(16), torch.ones(32), torch.ones(16)]
    draws, first, states = RngStreams(model, CPU), [], []
    draws.enter(3)
    for part in parts:
        states.append(torch.get_rng_state())
        first.append(model(part))
    after = torch.get_rng_state()
    for number in (1, 0, 2):
        torch.set_rng_state(states[number])
        assert torch.equal(model(parts[number]), first[number])
    torch.set_rng_state(after)
    fourth = model(parts[0])
    draws.enter(3)
    assert torch.equal([*map(model, parts), model(parts[0])][3], fourth)
    assert not any(torch.equal(fourth, each) for each in first)


def test_a_snapshot_has_the_micro_batch_and_a_seed_of_the_script() -> None:
    """Of a block that is computed again, or around an evaluation; the script's seed comes right before it."""
    model, ones = Drawing(), torch.ones(64)
    draws = RngStreams(model, CPU)
    draws.enter(3 + 2**63)
    begun, first = torch.get_rng_state(), model(ones)
    torch.manual_seed(5)
    then, state = draws.moment, draws.state
    seeded = model(ones)
    for replaying in (True, False):
        draws.moment, draws.state = then._replace(replaying=replaying), state
        assert torch.equal(model(ones), seeded) and draws.script_seed == 5
    torch.set_rng_state(begun)
    assert torch.equal(model(ones), first) and draws.script_seed is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_modules_that_the_script_recomputes_draw_what_they_drew(reentrant: bool) -> None:
    """By checkpoints of its own; the modules are called several times."""
    model, weight = Drawing(), torch.ones(64, requires_grad=True)
    draws = RngStreams(model, CPU)

    def gradient(again: bool) -> Tensor:
        draws.enter(3)
        out = weight * 2
        for _ in range(3):
            out = checkpoint(model, out, use_reentrant=reentrant) if again else model(out)
        out = out.sum() + model(weight).sum()
        return torch.autograd.grad(out, weight)[0] if not reentrant else backward(out)

    def backward(out: Tensor) -> Tensor:
        weight.grad = None
        out.backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(again=True), gradient(again=False))


def test_evaluation_draws_nothing() -> None:
    model = sequential().eval()
    draws, ones = RngStreams(model, CPU), torch.ones(4)
    draws.enter(5)
    before = torch.get_rng_state()
    assert torch.equal(model(ones), ones)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_kind_of_module_that_draws_is_keyed() -> None:
    """What was drawn before must not matter to any of them."""
    kinds: dict[str, tuple[nn.Module, Tensor]] = {
        "Dropout": (nn.Dropout(0.5), torch.ones(8, 8)),
        "Dropout2d": (nn.Dropout2d(0.5), torch.ones(2, 8, 3, 3)),
        "AlphaDropout": (nn.AlphaDropout(0.5), torch.ones(8, 8)),
        "RReLU": (nn.RReLU(), -torch.ones(8, 8)),
        "FractionalMaxPool2d": (nn.FractionalMaxPool2d(2, 7), torch.arange(256.0).view(1, 1, 16, 16)),
        "LSTM": (nn.LSTM(4, 4, 2, dropout=0.5), torch.ones(5, 2, 4)),
        "MultiheadAttention": (nn.MultiheadAttention(4, 2, dropout=0.5), torch.ones(5, 2, 4)),
        "TransformerEncoderLayer": (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5), torch.ones(5, 2, 4)),
        "own block": (nn.Sequential(Noise()), torch.ones(8, 8)),
        "own block inside": (nn.Sequential(nn.Sequential(nn.Identity(), Noise())), torch.ones(8, 8)),
    }
    for name, (module, inputs) in kinds.items():
        draws = RngStreams(module, CPU)
        arguments = (inputs,) * (3 if name == "MultiheadAttention" else 1)
        found = []
        for key, disturb in ((1, 0), (1, 7), (2, 0)):
            draws.enter(key)
            torch.rand(disturb)
            result = module(*arguments)
            found.append(result[0] if isinstance(result, tuple) else result)
        assert torch.equal(found[0], found[1]), name
        assert not torch.equal(found[0], found[2]), name


class Recorder(nn.Module):
    """Writes down what each sample looks like when it comes by."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, inputs: Tensor) -> Tensor:
        for sample, row in zip(NOW, inputs.detach().tolist(), strict=True):
            SEEN.append((sample, self.name, self.training, row))
        return inputs


NOW: list[int] = []
SEEN: list[tuple[int, str, bool, list[float]]] = []


def masks(strategy: str, workers: int) -> list[tuple[int, str, bool, list[float]]]:
    """What reaches three places of a model with dropout, sample by sample, on this rank: training and evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 6),
        nn.Dropout(0.5),
        Recorder("a"),
        nn.Linear(6, 6),
        nn.Dropout(0.5),
        Recorder("b"),
        nn.Linear(6, 1),
    ).double()
    generator = torch.Generator().manual_seed(1)
    data = (torch.arange(22), torch.randn(22, 3, generator=generator, dtype=torch.float64))

    def loss(called: Any, batch: Any) -> Any:
        NOW[:] = batch[0].tolist()
        return called(batch[1]).sum(), len(batch[0])

    run = tutti.prepare(model, "sgd:lr=0", data, loss, strategy=strategy, workers=workers, batch_size=12, micro_batch=2)
    # A model is cut into stages after a trial of its forward, which is no training either.
    SEEN.clear()
    for batch in run.epoch(0):
        run.step(batch)
    # What the checks of the first step looked at is no training.
    SEEN[:] = [entry for entry in SEEN if entry[2]]
    run.evaluate(run.feed.source, batch=5)
    return list(SEEN)


PLACES = [
    *((3, "mirrored"), (4, "mirrored")),
    *((3, "model_parallel"), (4, "model_parallel"), (4, "model_parallel:stages=2")),
]


@pytest.mark.parametrize(
    ("workers", "places"),
    [
        *((4, PLACES[::2]), (5, PLACES[1::2])),
        *(pytest.param(workers, PLACES, marks=pytest.mark.full) for workers in (4, 5)),
    ],
)
def test_masks_depend_neither_on_rank_nor_on_stage(workers: int, places: list[tuple[int, str]]) -> None:
    [want] = worlds.run(1, masks, strategy="single", workers=workers)
    train = [entry for entry in want if entry[2]]
    assert len({tuple(x != 0 for x in row) for _, _, _, row in train}) > 8, "the masks should differ"
    assert all(0.0 not in row for _, _, training, row in want if not training)
    for devices, strategy in places:
        parts = worlds.run(devices, masks, strategy=strategy, workers=workers)
        assert sorted(entry for part in parts for entry in part) == sorted(want), (devices, strategy)


def draws_of_script(form: str, strategy: str = "") -> list[float]:
    """Train by two workers, or not at all without a strategy, and return what the script draws after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    if not strategy:
        return [*(float(torch.rand(())) for _ in range(3)), float(nn.Linear(2, 2).weight.sum())]
    run = tutti.prepare(
        model,
        optimizer,
        data,
        lambda m, b: functional.cross_entropy(m(b[0]), b[1]),
        strategy=strategy,
        workers=2,
        batch_size=8,
    )
    found = []
    if form == "step":
        for batch in run.epoch(0):
            run.step(batch)
            found.append(float(torch.rand(())))
    else:
        for x, y in run.microbatches(0):
            run.backward(functional.cross_entropy(run.model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if run.stepped:
                found.append(float(torch.rand(())))
    return [*found, float(nn.Linear(2, 2).weight.sum())]


STRATEGIES = ["mirrored", "sharded", "central_storage", "local_sgd", "pipeline", "tensor", "parameter_server"]


@pytest.mark.parametrize(
    ("form", "strategy", "ranks"), [*table(["step", "loop"], STRATEGIES, [2]), ("step", "mirrored", 1)]
)
def test_what_the_script_draws_after_a_step_is_what_it_draws_without_training(
    form: str, strategy: str, ranks: int
) -> None:
    want = worlds.alone(draws_of_script, form=form)
    assert len(set(want)) == 4
    for got in worlds.run(ranks, draws_of_script, form=form, strategy=strategy):
        assert got == want
