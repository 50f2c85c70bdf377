"""What a pipeline must not get wrong: draws, backward in halves, weights read from outside of their layer, time."""

from __future__ import annotations

import time
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import tutti
from tests import worlds
from tutti.parallel.pipeline.stage_messages import shapes


class Outside(nn.Module):
    """Reads its layer's weight from outside of the layer, too, through a gate that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.layer.weight * self.gate


class Again(nn.Module):
    """Computes its layers again in backward by itself, a dropout among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers, inputs, use_reentrant=False)
        return out


class NormedAgain(Again):
    """Moves its batch norm's averages in the forward, and once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh())


class Attending(nn.Module):
    """An attention, whose output layer is not called but read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.25)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs[:, None].expand(-1, 3, -1)
        return self.attention(x, x, x, need_weights=False)[0].sum(1)


class Spectrum(nn.Linear):
    """Returns complex numbers, as conjugates that are a flag on the memory."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.fft.rfft(super().forward(inputs)).conj()


class Back(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(inputs, n=4))


class Viewed(nn.Module):
    """Writes a tensor in place after a cut, and reads a view of it that was taken before the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        flat = hidden.view(-1)
        other = self.last(inputs)
        hidden.add_(other)
        return flat.view(-1, 4) + other


class Slow(nn.Linear):
    """Takes time and has few parameters."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(inputs)


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    twice = nn.Dropout(0.5)
    middle = {
        "outside": [Outside(), Outside()],
        "again": [Again(), Again()],
        "attention": [Attending(), Attending()],
        "twice": [nn.Linear(4, 4), twice, nn.Linear(4, 4), twice, nn.Linear(4, 4), twice],
        "lstm": [nn.Linear(4, 4), Recurrent(), nn.Linear(4, 4)],
        "complex": [Spectrum(4, 4), Back(4, 4)],
    }[kind]
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 2)).double()


class Recurrent(nn.LSTM):
    """A layer whose output has several parts inside."""

    def __init__(self) -> None:
        super().__init__(4, 4, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(inputs[:, None])[0][:, 0]
        return out


def train(kind: str, strategy: str, micro_batch: int | None = None) -> Any:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(22, 4, generator=generator, dtype=torch.float64)
    arguments = {"strategy": strategy, "workers": 2, "batch_size": 15, "micro_batch": micro_batch, "clip": 0.5}
    run = tutti.prepare(build(kind), "adamw:lr=0.01", data, mean, reproducible=True, **arguments)
    return [run.step(batch) for epoch in range(2) for batch in run.epoch(epoch)], run.weights_sha256()


def mean(model: Any, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


@pytest.mark.parametrize("kind", ["outside", "again", "attention", "twice", "lstm"])
def test_layers_that_are_not_simple_are_exact(kind: str) -> None:
    want = worlds.alone(train, kind=kind, strategy="single", micro_batch=2)
    for schedule in ("1f1b", "zero_bubble", "interleaved"):
        got = worlds.run(2, train, kind=kind, strategy=f"pipeline:schedule={schedule},micro_batches=4")
        assert got == [want] * 2, schedule


def train_normed(strategy: str, own_loop: bool, micro_batch: int | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), NormedAgain(), NormedAgain(), nn.Linear(4, 2)).double()
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = None if own_loop else mean
    run = tutti.prepare(
        model, optimizer, data, loss_fn, strategy=strategy, batch_size=12, micro_batch=micro_batch, reproducible=True
    )
    for batch in run.microbatches(0) if own_loop else run.epoch(0):
        if own_loop:
            optimizer.zero_grad()
            run.backward(mean(run.model, batch))
            optimizer.step()
        else:
            run.step(batch)
    return int(run.state()["1.layers.1.num_batches_tracked"]), run.weights_sha256()


def test_a_norm_that_is_computed_again_moves_its_averages_as_on_one_device() -> None:
    want = worlds.alone(train_normed, strategy="single", own_loop=True, micro_batch=3)
    assert want[0] == 16, "eight micro-batches, twice"
    for schedule in ("1f1b", "zero_bubble"):
        strategy = f"pipeline:schedule={schedule},micro_batches=4"
        assert worlds.run(2, train_normed, strategy=strategy, own_loop=True) == [want] * 2
    for own_loop in (False, True):
        whole = worlds.alone(train_normed, strategy="single", own_loop=own_loop)
        assert worlds.run(3, train_normed, strategy="model_parallel", own_loop=own_loop) == [whole] * 3


def test_complex_numbers_cross_a_cut() -> None:
    want = worlds.alone(train, kind="complex", strategy="single", micro_batch=2)
    assert worlds.run(2, train, kind="complex", strategy="pipeline:cuts=2,micro_batches=4") == [want] * 2


def written(kind: str) -> str:
    model = Viewed() if kind == "view" else nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))
    cut = "last" if kind == "view" else "2"
    run = tutti.prepare(model, "sgd", torch.randn(8, 4), mean, strategy=f"pipeline:cuts={cut}", batch_size=8)
    try:
        run.step(next(run.epoch(0)))
    except tutti.errors.TuttiError as error:
        # Also that the other rank, which was refused, has not answered.
        return f"{error} {run.updates}"
    return "nothing was raised"


@pytest.mark.parametrize(("kind", "said"), [("view", "has taken a view"), ("input", "its argument 'input'")])
def test_writes_that_other_stages_would_not_see_are_refused(kind: str, said: str) -> None:
    try:
        got = worlds.run_within(5.0, 2, written, kind=kind)
        assert any(said in each for each in got) and all(each.endswith(" 0") for each in got), got
    finally:
        worlds.forget(2)


def slow(strategy: str) -> str:
    layers = [nn.Linear(4, 4), Slow(4, 4), Slow(4, 4), nn.Linear(4, 400), nn.Linear(400, 4)]
    model = nn.Sequential(OrderedDict((name, layer) for name, layer in zip("abcde", layers, strict=True)))
    run = tutti.prepare(model, "sgd:lr=0.1", torch.randn(8, 4), mean, strategy=strategy, batch_size=8)
    return run.replica.summary["stages"]


def test_stages_are_even_in_time_where_that_can_be_measured() -> None:
    for said in worlds.run(2, slow, strategy="pipeline"):
        assert "cut before c" in said and "of the time" in said
    for said in worlds.run(2, slow, strategy="model_parallel"):
        assert "cut before e" in said and "of the parameters" in said
    for said in worlds.run(2, slow, strategy="pipeline:cuts=b"):
        assert "cut before b" in said


def traces() -> bool:
    """Measuring leaves nothing behind: statistics, random streams, hooks, gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    run = tutti.prepare(model, "sgd:lr=0.1", torch.randn(8, 4, generator=torch.Generator()), mean, strategy="pipeline")
    same = all(torch.equal(before[name], tensor) for name, tensor in run.state().items())
    return same and torch.equal(drawn, torch.get_rng_state()) and not any(m._forward_hooks for m in model.modules())


def test_measuring_leaves_no_trace() -> None:
    assert worlds.run(2, traces) == [True] * 2


def without_a_call() -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    arguments = {"strategy": "model_parallel", "batch_size": 8}
    run = tutti.prepare(model, "sgd", torch.randn(8, 4), lambda model, batch: batch.mean(), **arguments)
    try:
        run.step(next(run.epoch(0)))
    except tutti.errors.UsageError as error:
        return str(error)
    return "nothing was raised"


def test_a_loss_that_never_calls_the_model_is_refused() -> None:
    for said in worlds.run(2, without_a_call):
        assert "did not call the model" in said


class Scaled(nn.Module):
    """Has an argument that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, scale: float | None = None) -> Tensor:
        out: Tensor = self.last(self.first(inputs))
        return out if scale is None else out * scale


def scaled(given: float | None) -> Any:
    def loss(model: Any, batch: Tensor) -> Tensor:
        out: Tensor = model(inputs=batch, scale=given).square().mean()
        return out

    torch.manual_seed(0)
    arguments = {"strategy": "pipeline" if tutti.size() > 1 else "single", "batch_size": 8, "reproducible": True}
    run = tutti.prepare(Scaled(), "sgd:lr=0.1", torch.ones(8, 4), loss, **arguments)
    try:
        return run.step(next(run.epoch(0)))
    except tutti.errors.UsageError as error:
        return str(error)


@pytest.mark.parametrize("given", [None, 2.0])
def test_an_argument_may_be_given_in_place_of_its_default(given: float | None) -> None:
    assert worlds.run(2, scaled, given=given) == pytest.approx(worlds.run(1, scaled, given=given) * 2)


def looped() -> str:
    run = tutti.prepare(Scaled(), "sgd:lr=0.1", torch.ones(8, 4), strategy="pipeline", batch_size=8)
    try:
        for batch in run.microbatches(0):
            run.backward(run.model(batch, scale=2.0).square().mean())
    except tutti.errors.UsageError as error:
        return str(error)
    return "nothing"


def test_an_argument_in_place_of_its_default_is_refused_in_a_loop_without_a_loss_function() -> None:
    for said in worlds.run(2, looped):
        assert "gives the model 'scale'" in said and "loss_fn" in said


@dataclass
class Padded:
    """A batch of sequences as an object."""

    words: Tensor


def padded(form: str) -> Any:
    def collate(samples: list[Tensor]) -> Any:
        words = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return Padded(words) if form == "object" else UserDict(words=words)

    rows = [torch.ones(1 + 3 * index % 5, 1, dtype=torch.float64) * index for index in range(12)]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(4)]).double()

    def loss(model: Any, batch: Any) -> Tensor:
        words = batch.words if form == "object" else batch["words"]
        out: Tensor = model(words).sum(1).square().mean()
        return out

    strategy = "pipeline" if tutti.size() > 1 else "single"
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    run = tutti.prepare(model, "sgd:lr=0.1", loader, loss, strategy=strategy)
    return [run.step(batch) for batch in run.epoch(0)]


def test_shapes_of_objects_that_refer_to_each_other_and_to_modules() -> None:
    nodes: list[Any] = [Padded(torch.zeros(1, width)) for width in range(20)]
    for node in nodes:
        node.others, node.library, node.kind = nodes, torch, Padded
    assert sorted(shapes(nodes[0])) == [(1, width) for width in range(20)]


@pytest.mark.parametrize("form", ["object", "mapping"])
def test_batches_that_are_objects_may_have_other_widths(form: str) -> None:
    [want] = worlds.run(1, padded, form=form)
    assert worlds.run(2, padded, form=form) == [pytest.approx(want, abs=1e-12)] * 2
