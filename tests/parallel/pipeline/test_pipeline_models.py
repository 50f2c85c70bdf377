"""Models that are no chain of layers, over stages: skip connections, tied weights, all at once on 3 and 4 devices."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import OPTIMIZERS, largest_difference
from tests.covering import Continuations, in_turn, marked, shared_out
from tutti.config.task_config import GptConfig, UnetConfig
from tutti.tasks.gpt import Block, Embedding, gpt
from tutti.tasks.unet import unet

WORDS = 11


class Tied(nn.Module):
    """A GPT of the user's own: modules in a list, the embedding's weights used again by its own forward."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.embed = Embedding(config, WORDS)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.register_buffer("shift", torch.tensor(0.25))

    def forward(self, characters: Tensor, *, temperature: float = 2.0) -> Tensor:
        samples, positions = characters.shape
        x = self.embed(characters) * self.scale
        for block in self.blocks:
            x = block(x)
        x = self.norm(x).view(samples * positions, -1) + self.shift
        return (x @ self.embed.character.weight.T).view(samples, positions, WORDS) / temperature


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = GptConfig(layers=3, width=8, heads=2, block=6, dropout=0.0)
    if name == "unet":
        return unet(UnetConfig(width=2, depth=2, batch_norm=True)).double()
    if name == "tied":
        return Tied(config).double()
    model = gpt(GptConfig(layers=3, width=8, heads=2, block=6, dropout=0.1 * (name == "gpt")), WORDS).double()
    if name == "tied gpt":
        model.head.weight = model.embed.character.weight
    return model


def data(name: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "unet":
        images = torch.randn(26, 1, 8, 8, generator=generator, dtype=torch.float64)
        return images, (images > 0.3).double()
    characters = torch.randint(0, WORDS, (26, 7), generator=generator)
    return characters[:, :-1], characters[:, 1:]


def loss(model: Any, batch: Any) -> Any:
    inputs, targets = batch
    scores = model(inputs)
    if targets.is_floating_point():
        return nn.functional.binary_cross_entropy_with_logits(scores, targets)
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def train(name: str, strategy: str, optimizer: str = OPTIMIZERS["adamw"], epochs: int = 1, **options: Any) -> Any:
    """Batches of 15 and 11 samples over two workers, in micro-batches of at most 2: 4, 4, 3 and 3 of them."""
    arguments = {"workers": 2, "batch_size": 15, "clip": 0.01, "ema": "0.8:warmup", "precision": "fp64", **options}
    run = tutti.prepare(build(name), optimizer, data(name), loss, strategy=strategy, **arguments)
    losses = [run.step(batch) for epoch in range(epochs) for batch in run.epoch(epoch)]
    evaluation = run.evaluate(run.feed.source, batch=15)
    state = {key: value.numpy().copy() for key, value in run.state().items()}
    state |= {f"average of {k}": value.numpy().copy() for k, value in run.state(averaged=True).items()}
    return state, [*losses, evaluation.loss], run.weights_sha256() + run.weights_sha256(averaged=True)


def resumed(name: str, strategy: str, folder: str, first: bool) -> Any:
    """Two epochs, saved and left after the first and gone on with by another strategy."""
    arguments = {"workers": 2, "batch_size": 15, "clip": 0.01, "ema": "0.8:warmup", "precision": "fp64"}
    arguments |= {"micro_batch": 2, "reproducible": True}
    run = tutti.prepare(build(name), OPTIMIZERS["adamw"], data(name), loss, strategy=strategy, **arguments)
    if not first:
        run.restore(folder)
    for epoch in run.epochs(1 if first else 2):
        for batch in run.epoch(epoch):
            run.step(batch)
    if first:
        run.save(folder)
    return run.weights_sha256() + run.weights_sha256(averaged=True)


@pytest.mark.parametrize(("name", "continuations"), shared_out("tied gpt", "tied", "unet"))
def test_saved_by_one_and_continued_by_another(name: str, continuations: Continuations, tmp_path: Path) -> None:
    """Weights that two stages hold are in a checkpoint once, under their first name."""
    want = worlds.alone(train, name=name, strategy="single", micro_batch=2, reproducible=True, epochs=2)
    places = [(1, "single"), (3, "pipeline"), (4, "pipeline:stages=2,schedule=interleaved"), (2, "mirrored")]
    for (devices, strategy), after in continuations(places, -1, -2):
        folder = str(tmp_path / strategy)
        worlds.run(devices, resumed, name=name, strategy=strategy, folder=folder, first=True)
        for others, other in after:
            for got in worlds.run(others, resumed, name=name, strategy=other, folder=folder, first=False):
                assert got == want[2], (strategy, other)


PLACES = [
    (3, "model_parallel"),
    (3, "pipeline:micro_batches=4"),
    (4, "pipeline:stages=2,schedule=gpipe,micro_batches=4"),
    (3, "pipeline:schedule=zero_bubble,micro_batches=4"),
    (2, "pipeline:schedule=interleaved,micro_batches=4"),
    (4, "pipeline:stages=2,schedule=interleaved,virtual=3,micro_batches=4"),
]


STAGED = [
    (name, place, reproducible)
    for name in ("unet", "gpt", "tied gpt", "tied")
    for reproducible in (False, True)
    for place in (PLACES if reproducible else PLACES[2:5])
]


@cache
def on_one_device(name: str, reproducible: bool) -> Any:
    return worlds.run(1, train, strategy="single", micro_batch=2, name=name, reproducible=reproducible)[0]


@pytest.mark.parametrize(("name", "place", "reproducible"), marked(STAGED, 1), ids=str)
def test_stages_equal_one_device(name: str, place: tuple[int, str], reproducible: bool) -> None:
    want, (devices, strategy) = on_one_device(name, reproducible), place
    own = {} if "micro_batches" in strategy else {"micro_batch": 2}
    for got in worlds.run(devices, train, strategy=strategy, name=name, reproducible=reproducible, **own):
        assert largest_difference(got[0], want[0]) <= (0 if reproducible else 1e-10)
        assert got[1] == pytest.approx(want[1], rel=0 if reproducible else 1e-9, abs=0)
        assert not reproducible or got[2] == want[2]


@pytest.mark.parametrize("optimizer", ["lamb", "lars", "muon"])
def test_optimizers_that_look_at_whole_tensors(optimizer: str) -> None:
    """Weights that two stages hold count once in the gradient's norm."""
    text = OPTIMIZERS[optimizer].format(last="*embed*")
    arguments = {"name": "tied gpt", "optimizer": text, "reproducible": True}
    want = worlds.alone(train, strategy="single", micro_batch=2, **arguments)
    for got in worlds.run(3, train, strategy="pipeline:micro_batches=4", **arguments):
        assert (largest_difference(got[0], want[0]), got[2]) == (0, want[2])


@pytest.mark.parametrize(
    ("name", "options"),
    in_turn(["unet", "tied gpt"], [{"activation_checkpointing": "blocks"}, {"compile": "default:backend=eager"}]),
)
def test_what_is_done_to_the_forward_changes_nothing(name: str, options: dict[str, Any]) -> None:
    want = worlds.alone(train, name=name, strategy="single", micro_batch=2)
    # Compiling is refused with zero_bubble; tests/contract/test_equivalence.py compiles stages under 1f1b.
    for schedule in ("interleaved",) if "compile" in options else ("1f1b", "interleaved", "zero_bubble"):
        strategy = f"pipeline:schedule={schedule},micro_batches=4"
        for got in worlds.run(2, train, name=name, strategy=strategy, **options):
            assert largest_difference(got[0], want[0]) <= 1e-10, (name, schedule)


def few(strategy: str, micro_batch: int | None = None) -> Any:
    """Fewer samples than micro-batches: shares of 3, 2 and, in the last batch, of none."""
    images, labels = data("unet")
    arguments = {"workers": 2, "batch_size": 5, "micro_batch": micro_batch, "reproducible": True}
    run = tutti.prepare(build("unet"), "sgd:lr=0.1", (images[:11], labels[:11]), loss, strategy=strategy, **arguments)
    losses = [run.step(batch) for batch in run.epoch(0)]
    return losses, run.weights_sha256()


def test_fewer_samples_than_micro_batches() -> None:
    want = worlds.alone(few, strategy="single", micro_batch=1)
    assert worlds.run(3, few, strategy="pipeline:micro_batches=8") == [want] * 3
    assert worlds.run(4, few, strategy="pipeline:stages=2,schedule=zero_bubble,micro_batches=8") == [want] * 4


def told(**arguments: Any) -> str:
    try:
        train(**arguments)
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "pipeline:micro_batches=4", "micro_batch": 2}, "both say how a worker's share is cut"),
        (
            {"strategy": "pipeline:schedule=zero_bubble", "compile": "default:backend=eager"},
            "cannot be combined with compile",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    for said in worlds.run(2, told, name="gpt", **options):
        assert words in said


@pytest.mark.parametrize(("name", "schedule"), in_turn(["unet", "gpt", "tied gpt"], ["1f1b", "zero_bubble"]))
def test_stages_whose_layers_are_split(name: str, schedule: str) -> None:
    want = worlds.alone(train, name=name, strategy="single", micro_batch=2)
    strategy = f"hybrid:stages=2,tensor=2,least=1,schedule={schedule},micro_batches=4"
    for got in worlds.run(4, train, name=name, strategy=strategy):
        assert largest_difference(got[0], want[0]) <= 1e-10
        assert got[1] == pytest.approx(want[1], rel=1e-9)
