"""Forwards replaced from outside: the same numbers, names, draws, statistics and copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import in_turn
from tutti.config.module_config import GRAPH_MODES, Blocks, check_checkpointing, check_compile
from tutti.config.task_config import CnnConfig, GptConfig, LineConfig, Resnet18Config, UnetConfig
from tutti.errors import UsageError
from tutti.nn.ac_and_compile import apply_ac_and_compile
from tutti.nn.ac_policy import check_units, find_units
from tutti.nn.rng_streams import RngStreams
from tutti.nn.swap import describe_tensors
from tutti.tasks.gpt import gpt
from tutti.tasks.models import cnn, line_model, resnet18
from tutti.tasks.unet import unet
from tutti.types.run_context import RunContext

CPU = torch.device("cpu")
BACKEND = "default:backend=aot_eager"


class Own(nn.Module):
    """Draws by modules and by functions, moves statistics, keeps a buffer that it replaces and reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(spectral_norm(nn.Linear(width, width)), nn.Dropout(0.2), nn.Linear(width, width))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.register_buffer("seen", torch.ones(1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.inner(inputs))) * self.seen
        self.seen = self.seen * 1.5
        return inputs + nn.functional.dropout(out, 0.1, self.training)


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), *(Own(6) for _ in range(3)), nn.Dropout(0.2), nn.Linear(6, 2))


def shared_layers() -> nn.Sequential:
    """A long sequence in which one activation and one dropout stand after every layer."""
    activation, drop = nn.Tanh(), nn.Dropout(0.2)
    layers = [layer for _ in range(6) for layer in (nn.Linear(6, 6), activation, drop)]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(6, 2))


def characters(count: int = 20) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 9, (count, 13), generator=torch.Generator().manual_seed(1))
    return drawn[:, :-1], drawn[:, 1:]


def grey(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make(count: int = 20) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(count, 1, size, size, generator=generator), torch.randint(
            0, 4, (count,), generator=generator
        )

    return make


def vectors(count: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 2, (count,), generator=generator)


def loss(net: Any, batch: Any) -> Tensor:
    scores = net(batch[0])
    if scores.dim() == 4:
        return scores.square().mean()
    return nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), batch[1].reshape(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "own blocks": (blocks, vectors),
    "shared layers": (shared_layers, vectors),
    "cnn": (lambda: cnn(CnnConfig(batch_norm=True, dropout=0.3), 4), grey(8)),
    "gpt": (lambda: gpt(GptConfig(layers=3, heads=2, width=8, block=12, dropout=0.2), 9), characters),
    "unet": (lambda: unet(UnetConfig(depth=2, width=2, batch_norm=True)), grey(8)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]()


@contextmanager
def counting(kept: list[int]) -> Iterator[None]:
    """Count the bytes that autograd keeps of a forward, each tensor once."""
    places: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        places[tensor.data_ptr()] = max(places.get(tensor.data_ptr(), 0), tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    kept.append(sum(places.values()))


def train(name: str, epochs: int, **options: Any) -> tuple[dict[str, Any], list[float], list[int], list[int]]:
    """State and losses of a few epochs of three workers; bytes kept in each cell; graphs compiled until each epoch."""
    from torch._dynamo.utils import counters

    counters.clear()
    kept: list[int] = []

    def counted(net: Any, batch: Any) -> Tensor:
        with counting(kept):
            return loss(net, batch)

    model = made(name)
    arguments: dict[str, Any] = {"workers": 3, "batch_size": 12, **options}
    run = tutti.prepare(model, "adam:lr=0.01", MODELS[name][1](), counted, **arguments)
    assert describe_tensors([model]) == describe_tensors([made(name).to(next(model.parameters()).dtype)])
    losses: list[float] = []
    graphs = []
    for epoch in range(epochs):
        losses += [run.step(batch) for batch in run.epoch(epoch)]
        graphs.append(counters["stats"]["unique_graphs"])
    return {n: t.numpy().copy() for n, t in run.state().items()}, losses, kept, graphs


# --- computed again in backward ----------------------------------------------------------------------------------


def compared(names: Sequence[str], ways: Sequence[dict[str, Any]], epochs: int = 2) -> list[Any]:
    """For each model and way: difference of states and of losses, part of the bytes kept, graphs."""
    told = []
    for name in names:
        precisions = {way.get("precision", "fp32") for way in ways}
        alone = {precision: train(name, epochs, precision=precision) for precision in precisions}
        for way in ways:
            precision = way.get("precision", "fp32")
            plain = alone[precision]
            other = train(name, epochs, **{"precision": precision, **way})
            apart = max(abs(a - b) for a, b in zip(other[1], plain[1], strict=True))
            part = sum(other[2]) / sum(plain[2])
            told.append((name, largest_difference(other[0], plain[0]), apart, part, other[3]))
    return told


@pytest.mark.parametrize(("name", "precision"), in_turn(list(MODELS), ["fp32", "bf16"]))
def test_checkpointing_changes_no_bit_and_keeps_less(name: str, precision: str) -> None:
    """Dropout by modules and functions, batch norm, power iterations, a replaced buffer; also under autocast."""
    choices = ("blocks", {"fp32": "selective:every=2", "bf16": "selective"}[precision])
    ways = [{"activation_checkpointing": choice, "precision": precision} for choice in choices]
    [told] = worlds.run(1, compared, names=[name], ways=ways, epochs=1)
    assert [(apart, losses) for _, apart, losses, *_ in told] == [(0, 0)] * len(choices)
    most = {"own blocks": 0.3, "shared layers": 0.6, "cnn": 0.2, "gpt": 0.2, "unet": 0.4}
    assert told[0][3] < most[name], told


class Cached(nn.Module):
    """Takes its keys from a cache that it has filled before, as the cross-attention of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: Tensor, cache: dict[Any, Tensor] | None) -> Tensor:
        if cache is None:
            keys = self.key(inputs).tanh()
        else:
            keys = cache[self] = cache[self].detach() if self in cache else self.key(inputs).tanh()
        return inputs + self.query(inputs) * keys


class Decoder(nn.Module):
    """Makes a cache if its own configuration says so."""

    def __init__(self, use_cache: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=use_cache)
        self.layers = nn.ModuleList(Cached() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        cache: dict[Any, Tensor] | None = {} if self.config.use_cache else None
        for layer in self.layers:
            inputs = layer(inputs, cache)
        return inputs


def train_cached(use_cache: bool, **options: Any) -> tuple[dict[str, Any], bool, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(Decoder(use_cache), nn.Linear(6, 2)).double()
    run = tutti.prepare(model, "sgd:lr=0.1", vectors(), loss, workers=2, batch_size=8, precision="fp64", **options)
    for batch in run.epoch(0):
        run.step(batch)
    state = {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    return state, run.settings.uncached, cast(Decoder, model[0]).config.use_cache


def test_models_make_no_cache_that_recomputation_would_read() -> None:
    """The configurations say so afterwards, and so do the run's settings."""
    [(want, changed, left)] = worlds.run(1, train_cached, use_cache=True)
    assert left and not changed
    [(got, changed, left)] = worlds.run(1, train_cached, use_cache=True, activation_checkpointing="blocks")
    assert largest_difference(got, want) == 0 and changed and not left
    [(_, changed, _)] = worlds.run(1, train_cached, use_cache=False, activation_checkpointing="blocks")
    assert not changed


def test_units_may_be_named() -> None:
    """One inside another, too: what is computed again computes again."""
    ways: list[dict[str, Any]] = [
        {"activation_checkpointing": choice} for choice in (["1", "2.inner"], [Own], [Own, nn.Sequential, "2.norm"])
    ]
    [told] = worlds.run(1, compared, names=["own blocks"], ways=ways)
    assert [(apart, losses) for _, apart, losses, *_ in told] == [(0, 0)] * 3
    assert told[1][3] < told[0][3] < 1


def unit_names(model: nn.Module) -> list[Any]:
    units, names = find_units(model, Blocks()), {module: name for name, module in model.named_modules()}
    return [names[m] for m in units.whole] + [(names[m], runs) for m, runs in units.runs.items()]


class Plain(nn.Module):
    """Blocks in a list, below another module, as libraries write them."""

    def __init__(self, blocks: int, features: nn.Module | None = None) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(50, 4)
        self.body.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks))
        self.features, self.head = features or nn.Identity(), nn.Linear(4, 4)


def test_units_follow_the_models_structure() -> None:
    assert unit_names(gpt(GptConfig(layers=3), 9)) == ["embed", "block1", "block2", "block3"]
    assert unit_names(resnet18(Resnet18Config(), 10))[:3] == ["stem", "block1a", "block1b"]
    scales = ["scales.down", "scales.below.down", "scales.below.join", "scales.join"]
    assert unit_names(unet(UnetConfig(depth=2))) == ["stem", *scales]
    assert unit_names(cnn(CnnConfig(), 10)) == [
        ("", [("conv1", "relu1", "conv2", "relu2"), ("pool", "conv3", "relu3", "flatten"), ("fc1", "relu4", "fc2")])
    ]
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(9)))
    assert unit_names(Plain(2, layers)) == [
        "body.h.0",
        "body.h.1",
        ("features", [("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8")]),
    ]


WRONG: list[tuple[nn.Module, Any, str]] = [
    (gpt(GptConfig(layers=1), 9), ["blok1"], "no module 'blok1'. Did you mean 'block1'"),
    (gpt(GptConfig(layers=1), 9), "blok", "Did you mean 'blocks'"),
    (gpt(GptConfig(layers=1), 9), [nn.LSTM], "finds nothing"),
    (line_model(LineConfig()), "blocks", "finds nothing"),
    (nn.LSTM(2, 2), "blocks", "finds nothing"),
]


@pytest.mark.parametrize(("model", "choice", "words"), WRONG, ids=[str(choice) for _, choice, _ in WRONG])
def test_what_would_compute_nothing_again_is_refused(model: nn.Module, choice: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_units(model, check_checkpointing(choice))
    assert words in str(caught.value)


def copied(compile: str) -> list[Any]:
    """A copy of a prepared model computes with its own weights; prepared anew, a model has its own classes back."""
    model, data = made("gpt"), characters()
    options: dict[str, Any] = {"activation_checkpointing": "blocks", "compile": compile}
    tutti.prepare(model, "sgd", data, loss, batch_size=8, **options)
    other, kinds = copy.deepcopy(model).eval(), [type(m) for m in model.modules()]
    before = model.eval()(data[0])
    for parameter in other.parameters():
        parameter.data.zero_()
    other(data[0]).sum().backward()
    trained = [any(p.grad is not None for p in each.parameters()) for each in (model, other)]
    told = [torch.equal(model(data[0]), before), bool(other(data[0]).any()), *trained]
    tutti.prepare(model, "sgd", data, loss, batch_size=8)
    plain = [type(m) for m in made("gpt").modules()]
    return [
        *told,
        [k.__name__ for k in kinds] == [k.__name__ for k in plain],
        [type(m) for m in model.modules()] == plain,
    ]


def test_a_copy_is_its_own_and_classes_come_back() -> None:
    for compile in ("none", BACKEND):
        assert worlds.run(1, copied, compile=compile) == [[True, False, False, True, True, True]]


class OwnCheckpoint(nn.Module):
    """Calls a module that draws, and has it computed again by itself."""

    def __init__(self, calls: int, again: bool, preserve: bool = True) -> None:
        super().__init__()
        self.drop, self.calls, self.again, self.preserve = nn.Dropout(0.5), calls, again, preserve
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(self.calls):
            options = {"use_reentrant": False, "preserve_rng_state": self.preserve}
            inputs = checkpoint(self.once, inputs, **options) if self.again else self.once(inputs)
        return inputs

    def once(self, inputs: Tensor) -> Tensor:
        return self.drop(inputs * self.weight).exp() * self.weight


def test_a_models_own_checkpoint_draws_the_same_again_or_is_refused() -> None:
    for calls in (1, 3):
        gradients = []
        for again, preserve in ((False, True), (True, True), (True, False)):
            model = OwnCheckpoint(calls, again, preserve or calls > 1)
            streams = RngStreams(model, CPU)
            streams.enter(3)
            model(torch.ones(5, 4)).sum().backward()
            gradients.append(model.weight.grad)
        assert all(each is not None and torch.equal(each, gradients[0]) for each in gradients)
    # Without the states of the generator it cannot be known which call is computed again.
    model = OwnCheckpoint(2, again=True, preserve=False)
    streams = RngStreams(model, CPU)
    streams.enter(3)
    with pytest.raises(UsageError, match="called 2 times"):
        model(torch.ones(5, 4)).sum().backward()


# --- compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_only_training_records_graphs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: Callable[..., Any], backend: str, options: dict[str, Any]) -> Callable[..., Any]:
        return lambda module, inputs: (function(module, inputs), options.get("triton.cudagraphs", False))

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("tutti.nn.ac_and_compile.check_compiler", lambda options: None)
    model, world = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), SimpleNamespace(device=CPU)
    comms = SimpleNamespace(world=world, replica=SimpleNamespace(size=1))
    facts = SimpleNamespace(activation_checkpointing=None, compile=check_compile(mode), comms=comms, workers=1)
    apply_ac_and_compile(model, RngStreams(model, CPU), cast(RunContext, facts))
    assert model(torch.ones(1, 2))[1] is True
    with torch.no_grad():
        assert model(torch.ones(1, 2))[1] is False


def test_compiling_changes_nothing_and_ends() -> None:
    """Draws, statistics of workers that share a device, smaller last batches; alone and with checkpointing."""
    alone, both = ({"compile": BACKEND, "precision": "fp64", "activation_checkpointing": c} for c in ("none", "blocks"))
    [own] = worlds.run(1, compared, names=["own blocks"], ways=[both], epochs=3)
    [told] = worlds.run(1, compared, names=["gpt"], ways=[alone, both], epochs=3)
    for name, apart, losses, _, made in own + told:
        assert max(apart, losses) <= 1e-10, name
        assert made[0] == 0, "checks see the two global batches of the first epoch uncompiled"
        assert made[1] and made[1:] == [made[1]] * len(made[1:]), "later epochs have no new shapes"
    assert told[0][3] > 5 * told[1][3], "checkpointing was lost"
