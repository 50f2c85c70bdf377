"""Models whose forward ``torch.fx`` cannot follow, over stages: every stage runs the model's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

import tutti
from tests import worlds
from tests.contract.table import OPTIMIZERS, largest_difference
from tests.covering import in_turn
from tutti.errors import UsageError
from tutti.parallel.pipeline.stage_partition import find_stage_partition
from tutti.torch_compat import FunctionModesDisabled

WORDS, WIDTH = 11, 12


@dataclass
class Output:
    """What a model returns, as libraries of models do."""

    scores: Tensor
    loss: Tensor | None = None


class Rotary(nn.Module):
    """Cosines and sines of the positions, which every block takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("rates", 10.0 ** -torch.arange(0, width, 2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].to(x.dtype) * self.rates.to(x.dtype)
        return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


class Attention(nn.Module):
    """Three heads of queries over one head of keys, rotated by position, with a mask and dropout by functions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.query, self.key, self.value = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.out = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, rotation: Any = None) -> Tensor:
        q = self.query(x).unflatten(-1, (3, 4)).transpose(1, 2)
        k, v = self.key(memory)[:, None], self.value(memory)[:, None]
        if rotation is not None:
            cos, sin = rotation
            q, k = (t * cos + t.roll(2, -1) * sin for t in (q, k))
        scores = (q @ k.transpose(-1, -2) / 2).softmax(-1) if mask is None else None
        if scores is None:
            scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out(functional.dropout(scores, self.dropout, self.training).matmul(v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float, cross: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(dropout)
        self.cross = Attention(dropout) if cross else None
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, rotation: Any = None, memory: Tensor | None = None
    ) -> tuple[Tensor, None]:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, mask, rotation)
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(x, memory, None)
        return x + self.mlp(x), None


class Body(nn.Module):
    """Embedding, rotation and mask from the shape of the input, blocks in a list."""

    def __init__(self, blocks: int, dropout: float) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(WORDS, WIDTH), Rotary(4)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor, *, causal: bool = True) -> Tensor:
        t = words.shape[1]
        mask = torch.ones(t, t, device=words.device).tril().bool() if causal and t > 1 else None
        x = self.embed(words)
        rotation = self.rotary(x, torch.arange(t, device=words.device))
        for block in self.blocks:
            x, *_ = block(x, mask=mask, rotation=rotation)
        return self.norm(x)


class Decoder(nn.Module):
    """A language model with weights tied between embedding and head, which computes its own loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.head = Body(3, dropout), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.body.embed.weight

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        scores = self.head(self.body(words, **options))
        if labels is None:
            return Output(scores)
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Translator(nn.Module):
    """An encoder whose output every block of the decoder takes; both share one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Body(2, 0.0)
        self.decoder = nn.ModuleList(Block(0.0, cross=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor) -> Output:
        memory = self.encoder(words, causal=False)
        x = self.encoder.embed(functional.pad(labels[:, :-1], (1, 0)))
        for block in self.decoder:
            x, _ = block(x, memory=memory, mask=torch.ones(x.shape[1], x.shape[1]).tril().bool())
        scores = self.head(x)
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class FusedBlock(nn.Module):
    """A block with fused attention, which keeps the length of its input, as blocks with shifted windows do."""

    length = 0

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        self.length = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=mask is not None and self.length > 1)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Direct(Decoder):
    """Calls the parts of its body without calling the body, and adds a buffer behind all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks = nn.ModuleList(FusedBlock() for _ in range(3))
        self.register_buffer("shift", torch.linspace(-1, 1, WORDS, dtype=torch.float64))
        self.register_buffer("factor", torch.full((), 0.5, dtype=torch.float64), persistent=False)

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        x = self.body.embed(words)
        mask = torch.ones(words.shape[1], words.shape[1]).tril().bool() if words.shape[1] > 1 else None
        for block in self.body.blocks:
            x = block(x, mask)
        scores = self.factor * self.head(self.body.norm(x)) + self.shift
        if labels is None:
            return Output(scores)
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class InPlace(Direct):
    """Writes its input and what its blocks return, in place."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        mask = torch.ones(words.shape[1], words.shape[1]).tril().bool() if words.shape[1] > 1 else None
        words.sub_(5).abs_()
        x = self.body.embed(words)
        for block in self.body.blocks:
            h = block(x, mask)
            h += x
            x = h.mul_(0.5)
        scores = self.head(self.body.norm(x))
        scores[..., 0] = 1.0
        assert labels is not None
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Relative(Block):
    """A block that is given a table with a row for each distance of two positions, and a vector to add."""

    def forward(self, x: Tensor, *, table: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(x.shape[1])
        return x + self.mlp(x + shift + table[(positions[:, None] - positions).abs()].mean(1))


class Handing(Decoder):
    """Hands blocks a parameter and a buffer of modules above them, as DeBERTa does, and computes nothing with them."""

    class Body(Body):
        def __init__(self) -> None:
            super().__init__(0, 0.0)
            self.blocks, self.table = nn.ModuleList(Relative(0.0) for _ in range(3)), nn.Embedding(8, WIDTH)

        def forward(self, words: Tensor, *, shift: Tensor) -> Tensor:  # type: ignore[override]
            x, table = self.embed(words), self.table.weight
            for block in self.blocks:
                x = block(x, table=table, shift=shift)
            return self.norm(x)

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Body()
        self.head.weight = self.body.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH, dtype=torch.float64))

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        return super().forward(words[:, : min(words.shape[1], 6)], labels, shift=self.shift)


class Collecting(Decoder):
    """Adds the outputs of all blocks, which hooks keep, as models of transformers collect hidden states."""

    class Body(Body):
        def forward(self, words: Tensor, *, causal: bool = True) -> Tensor:
            KEPT.clear()
            x = super().forward(words, causal=causal)
            for kept in KEPT:
                x = x + kept
            KEPT.clear()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Body(3, 0.0)
        self.head.weight = self.body.embed.weight
        for block in self.body.blocks:
            block.register_forward_hook(lambda block, args, output: KEPT.append(output[0]))


KEPT: list[Tensor] = []


class Experts(Block):
    """A mixture of experts, which reads the values of its input to find each expert's positions."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, None]:
        x, _ = super().forward(x, **options)
        share, chosen = self.router(x).softmax(-1).max(-1)
        found = x.clone()
        for number in chosen.unique().tolist():
            here = (chosen == number).nonzero(as_tuple=True)
            found[here] = x[here] + share[here][:, None] * (x[here] @ self.experts[number])
        return found, None


class Scaled(Decoder):
    """Experts in the blocks, and scores by a factor of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.4))

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        scores = self.head(self.body(words, **options)) * self.scale.exp()
        return Output(scores, None if labels is None else functional.cross_entropy(scores.mT, labels))


class Transcribing(Decoder):
    """Reads values after its last block: a check of a distribution, a CTC loss, and a check of the loss."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        scores = self.head(self.body(words, **options))
        if labels is None:
            return Output(scores)
        torch.distributions.Categorical(logits=scores, validate_args=True)
        found = transcribed(scores, labels)
        if torch.isnan(found).any():
            raise ArithmeticError("the loss is not a number")
        return Output(scores, found)


def transcribed(scores: Tensor, labels: Tensor) -> Tensor:
    lengths = torch.full((len(scores),), scores.shape[1])
    targets = labels[:, :2] % (WORDS - 1) + 1
    return functional.ctc_loss(scores.log_softmax(-1).transpose(0, 1), targets, lengths, torch.full_like(lengths, 2))


class Wide(Block):
    """A layer of another class than its neighbours, as hybrid models have them."""


class Seeing(nn.Module):
    """A model of images and text: its inner model calls the text model's embedding, reads values and returns an object.

    Parts of an image, here of the labels, stand in the place of one word.
    """

    class Inner(nn.Module):
        class Text(Body):
            def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
                rotation = self.rotary(x, torch.arange(x.shape[1]))
                for block in self.blocks:
                    x, *_ = block(x, rotation=rotation)
                if not torch.is_tensor(x):
                    x = x * 2
                return self.norm(x)

        def __init__(self) -> None:
            super().__init__()
            self.look, self.text = nn.Embedding(WORDS, WIDTH), self.Text(0, 0.0)
            self.text.blocks = nn.ModuleList([Block(0.0), Wide(0.0), Experts(), Wide(0.0)])

        def forward(self, words: Tensor, labels: Tensor) -> Output:
            marked, x = words == 3, self.text.embed(words)
            parts = self.look(labels[marked])
            if int(marked.sum()) * x.shape[-1] != parts.numel():
                raise ValueError("not as many words as parts")
            return Output(self.text(x.masked_scatter(marked[..., None], parts)))

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = self.Inner(), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Output:
        assert labels is not None
        scores = self.head(self.inner(words, labels).scores)
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Assigning(Decoder):
    """Assigns its scores to the labels by NumPy, behind its last block, as detectors assign boxes."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        scores = self.head(self.body(words, **options))
        assert labels is not None
        order = torch.from_numpy(scores.detach()[..., 0].numpy().argsort(1))
        return Output(scores, functional.cross_entropy(scores.mT, labels.gather(1, order)))


class Querying(Decoder):
    """Hands blocks a parameter of its own and one of a module that it does not call, and adds both to its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks = nn.ModuleList(Relative(0.0) for _ in range(3))
        self.queries, self.places = nn.Parameter(torch.randn(2, WIDTH)), nn.Embedding(8, WIDTH)
        self.floor = nn.Parameter(torch.tensor(0.3))

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        x = self.body.embed(words[:, :6])
        for block in self.body.blocks:
            if self.floor.item() > -9.0:
                x = block(x, table=self.places.weight, shift=self.queries.mean(0))
        scores = self.head(self.body.norm(x)) + self.queries.sum() * self.floor + self.head.weight.square().sum()
        if labels is None:
            return Output(scores)
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Criterion(nn.Module):
    """Assigns scores to labels by NumPy, as the losses of segmenters do; reads values of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, WORDS, dtype=torch.float64))

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        if not labels.any():
            raise ValueError("labels of zeros")
        order = torch.from_numpy(scores.detach()[..., 0].numpy().argsort(1))
        return functional.cross_entropy(scores.mT, labels.gather(1, order), self.weights, reduction="sum")


class Judging(Decoder):
    """Its criterion is a module, called behind a check of values, and so is what averages the result."""

    def __init__(self, checked: bool) -> None:
        super().__init__()
        self.checked, self.criterion, self.same = checked, Criterion(), nn.Identity()

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        scores = self.head(self.body(words, **options))
        assert labels is not None
        if self.checked and not scores.detach().isfinite().all():
            raise ArithmeticError("a score is not a number")
        return Output(scores, self.same(self.criterion(scores, labels)) / labels.numel())


class Measured(Block):
    """Attends within parts of a sequence, whose lengths it reads."""

    def forward(self, x: Tensor, *, lengths: Tensor) -> Tensor:  # type: ignore[override]
        parts = x.split(lengths.tolist(), 1)
        return torch.cat([super(Measured, self).forward(part)[0] for part in parts], 1)


class Measuring(Decoder):
    """Hands blocks the lengths of parts, as models of images of several sizes do, and keeps them as an attribute."""

    lengths: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.body.blocks = nn.ModuleList(Measured(0.0) for _ in range(3))

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        first = 2 if self.training else 4
        x, lengths = self.body.embed(words), torch.tensor([first, words.shape[1] - first])
        self.lengths, self.seen = lengths, (first, None)
        for block in self.body.blocks:
            x = block(x, lengths=lengths)
        scores = self.head(self.body.norm(x))
        return Output(scores, None if labels is None else functional.cross_entropy(scores.mT, labels))


class Cache:
    """Holds a memory for each block."""

    def __init__(self, memories: Sequence[Tensor]) -> None:
        self.memories = list(memories)


class Prefixed(Decoder):
    """Hands blocks a cache with memories, which one module makes, as tuned prefixes are."""

    class Reader(Block):
        def __init__(self, number: int) -> None:
            super().__init__(0.0, cross=True)
            self.number = number

        def forward(self, x: Tensor, *, cache: Cache) -> Tensor:  # type: ignore[override]
            return super().forward(x, memory=cache.memories[self.number])[0]

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Linear(3, 3 * 2 * WIDTH)
        self.body.blocks = nn.ModuleList(self.Reader(number) for number in range(3))

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        made = self.prefix(words[:, :3].to(self.head.weight.dtype) / WORDS).unflatten(-1, (3, 2, WIDTH))
        x, cache = self.body.embed(words), Cache(made.unbind(1))
        for block in self.body.blocks:
            x = block(x, cache=cache)
        scores = self.head(self.body.norm(x))
        return Output(scores, None if labels is None else functional.cross_entropy(scores.mT, labels))


class Marking(Decoder):
    """Adds to the places of some words between blocks, and hands its head the embedding whose weight that takes."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(WORDS))

        def forward(self, x: Tensor, embed: nn.Module) -> Tensor:
            return x @ embed.weight.T + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.head, self.marks = self.Head(), nn.Embedding(WORDS, WIDTH)  # type: ignore[assignment]

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        x, marked = self.body.embed(words), words.argsort(1).argsort(1) < 3
        marks = self.marks(words[marked])
        for block in self.body.blocks:
            x = x.clone()
            x[marked, :] = x[marked, :] + marks
            x, _ = block(x)
        scores = self.head(self.body.norm(x), self.body.embed)
        return Output(scores, None if labels is None else functional.cross_entropy(scores.mT, labels))


class Reading(Decoder):
    """Reads the weight of a block for its loss."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        output = super().forward(words, labels)
        assert output.loss is not None
        return Output(output.scores, output.loss + self.head.weight.square().sum())


MODELS = {
    "querying": Querying,
    "reading": Reading,
    "judging": partial(Judging, False),
    "judging, checked": partial(Judging, True),
    "measuring": Measuring,
    "marking": Marking,
    "prefixed": Prefixed,
    "seeing": Seeing,
    "assigning": Assigning,
    "transcribing": Transcribing,
    "scaled": Scaled,
    "collecting": Collecting,
    "handing": Handing,
    "direct": Direct,
    "in place": InPlace,
    "decoder": Decoder,
    "decoder with dropout": lambda: Decoder(0.2),
    "translator": Translator,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def data() -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (26, 7), generator=torch.Generator().manual_seed(1))
    return words[:, :-1], words[:, 1:]


def loss(model: Any, batch: Any) -> Any:
    return model(batch[0], labels=batch[1]).loss


def train(name: str, strategy: str, optimizer: str = OPTIMIZERS["adamw"], **options: Any) -> Any:
    """Batches of 15 and 11 samples over two workers, in micro-batches of at most 2: 4, 4, 3 and 3 of them.

    An epoch; two of the decoder, whose second one has no new shapes.
    """
    arguments = {"workers": 2, "batch_size": 15, "clip": 0.01, "ema": "0.8:warmup", "precision": "fp64", **options}
    run = tutti.prepare(build(name), optimizer, data(), loss, strategy=strategy, **arguments)
    losses = [run.step(batch) for epoch in range(1 + (name == "decoder")) for batch in run.epoch(epoch)]
    losses.append(run.evaluate(run.feed.source, batch=7).loss)
    return {key: value.cpu().numpy().copy() for key, value in run.state().items()}, losses, run.weights_sha256()


@cache
def on_one_device(name: str, reproducible: bool) -> Any:
    return worlds.run(1, train, strategy="single", micro_batch=2, name=name, reproducible=reproducible)[0]


PLACES = [
    ("querying", 2, "pipeline:micro_batches=4", False),
    ("reading", 2, "pipeline:micro_batches=4", True),
    ("querying", 3, "pipeline:schedule=zero_bubble,micro_batches=4", False),
    ("querying", 4, "hybrid:stages=2,shards=2,micro_batches=4", False),
    ("judging", 2, "pipeline:micro_batches=4", True),
    ("judging, checked", 3, "pipeline:micro_batches=4", True),
    ("measuring", 2, "pipeline:micro_batches=4", True),
    ("marking", 2, "pipeline:micro_batches=4", True),
    ("prefixed", 2, "pipeline:micro_batches=4", True),
    ("in place", 2, "pipeline:schedule=interleaved,micro_batches=4", False),
    ("transcribing", 2, "pipeline:micro_batches=4", True),
    ("seeing", 2, "pipeline:micro_batches=4", True),
    ("assigning", 3, "pipeline:micro_batches=4", True),
    ("scaled", 2, "pipeline:micro_batches=4", True),
    ("direct", 2, "pipeline:micro_batches=4", False),
    ("handing", 2, "pipeline:micro_batches=4", True),
    ("collecting", 2, "pipeline:micro_batches=4", False),
    ("direct", 3, "pipeline:micro_batches=4", True),
    ("decoder", 2, "model_parallel", True),
    ("decoder", 3, "pipeline:schedule=zero_bubble,micro_batches=4", False),
    ("decoder", 2, "pipeline:cuts=body.blocks.2,micro_batches=4", True),
    ("decoder", 2, "pipeline:stages=body.embed+body.blocks.0/body.blocks.1+body.blocks.2+body.norm+head", True),
    ("decoder with dropout", 2, "pipeline:micro_batches=4", True),
    ("translator", 3, "pipeline:micro_batches=4", True),
    *(
        pytest.param(*place, marks=pytest.mark.full)
        for place in (
            *((name, 3, "pipeline:micro_batches=4", False) for name in ("measuring", "marking", "prefixed")),
            *((name, 3, "pipeline:micro_batches=4", False) for name in ("seeing", "scaled")),
            ("translator", 4, "hybrid:stages=2,micro_batches=4", False),
            ("direct", 2, "model_parallel", True),
            ("decoder", 3, "pipeline:micro_batches=4", True),
            ("decoder", 2, "pipeline:schedule=interleaved,micro_batches=4", False),
        )
    ),
]


@pytest.mark.parametrize(("name", "devices", "strategy", "reproducible"), PLACES)
def test_recorded_stages_equal_one_device(name: str, devices: int, strategy: str, reproducible: bool) -> None:
    want = on_one_device(name, reproducible)
    own = {} if "micro_batches" in strategy else {"micro_batch": 2}
    for got in worlds.run(devices, train, strategy=strategy, name=name, reproducible=reproducible, **own):
        assert largest_difference(got[0], want[0]) <= (0 if reproducible else 1e-10)
        assert got[1] == pytest.approx(want[1], rel=0 if reproducible else 1e-9, abs=0)
        assert not reproducible or got[2] == want[2]


@pytest.mark.parametrize("name", ["handing", pytest.param("decoder", marks=pytest.mark.full)])
def test_recorded_stages_on_an_accelerator_equal_one_device(name: str) -> None:
    """The whole model is still in host memory when its forward is recorded with a micro-batch on the device."""
    want = on_one_device(name, True)
    options = {"strategy": "pipeline:micro_batches=4", "name": name, "reproducible": True}
    for got in worlds.run_on(worlds.ACCELERATOR, 2, train, **options):
        assert largest_difference(got[0], want[0]) <= 1e-10


class ScaledInEvaluation(nn.Module):
    """Has a graph in each mode, but not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, *args: Tensor) -> Tensor:
        hidden = args[0]
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden if self.training else functional.softmax(hidden, 1)


class SkippedInEvaluation(ScaledInEvaluation):
    """Leaves one of its layers out in evaluation, whose output all later ones read."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self.skipped = skipped

    def forward(self, *args: Tensor) -> Tensor:
        hidden = args[0]
        for number, layer in enumerate(self.layers):
            if self.training or number != self.skipped:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class KeptInEvaluation(ScaledInEvaluation):
    """Has layers that return a second tensor in evaluation only, as a state that is kept, which all later ones add."""

    class Keeping(nn.Linear):
        def forward(self, x: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
            y = torch.tanh(super().forward(x))
            return y, None if self.training else y if kept is None else 0.5 * y + kept

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Keeping(4, 4) for _ in range(4))

    def forward(self, *args: Tensor) -> Tensor:
        hidden, kept = args[0], None
        for layer in self.layers:
            hidden, kept = layer(hidden, kept)
        return hidden if kept is None else hidden + kept


class AuxiliaryHead(ScaledInEvaluation):
    """Has a second head, of an inner layer, in training only; ``last`` calls it behind all other layers."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(4, 4), last

    def forward(self, *args: Tensor) -> Tensor:
        first = torch.tanh(self.layers[1](torch.tanh(self.layers[0](args[0]))))
        auxiliary = self.head(first) if self.training and not self.last else None
        hidden = torch.tanh(self.layers[3](torch.tanh(self.layers[2](first))))
        if self.training and self.last:
            auxiliary = self.head(first)
        return hidden if auxiliary is None else hidden + 0.3 * auxiliary


KINDS: dict[str, Callable[[], nn.Module]] = {
    "scaled": ScaledInEvaluation,
    **{f"without layer {number}": partial(SkippedInEvaluation, number) for number in range(4)},
    "kept": KeptInEvaluation,
    "auxiliary": partial(AuxiliaryHead, False),
    "auxiliary, last": partial(AuxiliaryHead, True),
}


def trained_and_evaluated(strategy: str, kind: str) -> dict[str, Any]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    samples = torch.utils.data.TensorDataset(torch.randn(12, 4, generator=draw, dtype=torch.float64))
    run = tutti.prepare(
        KINDS[kind]().double(),
        "adam:lr=0.01",
        samples,
        lambda model, batch: model(*batch).square().mean(),
        strategy=strategy,
        batch_size=4,
        precision="fp64",
    )
    losses = []
    for batch in run.epoch(0):
        run.step(batch)
        losses.append(run.evaluate(samples, batch=5).loss)
    return {**run.state(), "held out": torch.tensor(losses, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("kind", "place"), in_turn(list(KINDS), [(2, "pipeline:micro_batches=2"), (3, "model_parallel")]), ids=str
)
def test_forwards_that_differ_in_evaluation_equal_one_device(kind: str, place: tuple[int, str]) -> None:
    devices, strategy = place
    wanted = worlds.alone(trained_and_evaluated, strategy="single", kind=kind)
    for found in worlds.run(devices, trained_and_evaluated, strategy=strategy, kind=kind):
        assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) <= 1e-10


class Paired(ScaledInEvaluation):
    """Has two blocks, of which the first returns two tensors."""

    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Pair(4, 4), nn.Linear(4, 4)])

    def forward(self, *args: Tensor) -> Tensor:
        one, other = self.layers[0](args[0])
        return torch.tanh(self.layers[1](one + other))


def told_of_too_few() -> str:
    data = torch.utils.data.TensorDataset(torch.ones(4, 4))
    with pytest.raises(UsageError) as caught:
        tutti.prepare(Paired(), "sgd", data, lambda m, b: m(*b).mean(), strategy="pipeline", batch_size=2)
    return str(caught.value)


def test_tensors_of_one_call_are_no_blocks_to_cut_between() -> None:
    for told in worlds.run(3, told_of_too_few):
        assert "a model of 2 blocks cannot be cut into 3 stages" in told and "stages=2" in told


class Drawing(Decoder):
    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        if words.shape[1] > 100:
            return Output(words)
        output = super().forward(words, labels)
        assert output.loss is not None
        return Output(output.scores, output.loss * (1 + functional.dropout(torch.ones(1), 0.5).mean()))


class Overwriting(Querying):
    """Writes a parameter that it hands to several blocks."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        self.queries.data.clamp_(-0.5, 0.5)
        return super().forward(words, labels)


class Counting(Measuring):
    """Counts its forwards, of which a stage runs more than one device does."""

    seen: Any = 0

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        count = self.seen + 1
        output = super().forward(words, labels)
        self.seen = count
        return output


class Sharing(InPlace):
    """Writes what a block returns of its argument's memory, and reads the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        x = self.body.embed(words)
        same = self.same(x)
        same *= 2
        scores = self.head(self.body.norm(x))
        assert labels is not None and words.shape[1] < 100
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Turning(Decoder):
    """Leaves a block out for some batches, as the values of the batch say."""

    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Output:
        x = self.body.embed(words)
        for block in self.body.blocks[int(words[0, 0]) % 2 :]:
            x, _ = block(x)
        scores = self.head(x)
        assert labels is not None
        return Output(scores, functional.cross_entropy(scores.flatten(0, 1), labels.flatten()))


class Spilling(Block):
    """Keeps a figure of its output as an attribute, which the loss reads."""

    figure: Any = 0.0

    def forward(self, x: Tensor, **options: Any) -> Any:
        result = super().forward(x, **options)
        self.figure = result[0].square().mean()
        return result


class Writing(Block):
    """Writes into its input."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        x.mul_(2)
        return super().forward(x.clone(), **options)


def with_blocks(kind: type[Block]) -> Decoder:
    model = Decoder()
    model.body.blocks = nn.ModuleList(kind(0.0) for _ in range(3))
    return model


def spilled(model: Any, batch: Any) -> Any:
    return loss(model, batch) + sum(block.figure for block in model.body.blocks)


@dataclass
class Early:
    """An output whose tensors the recording cannot see."""

    loss: Tensor
    early: Tensor


class Telling(Decoder):
    def forward(self, words: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        if words.shape[1] > 100:
            return Early(words, words)
        early = self.body.embed(words)
        output = super().forward(words, labels)
        assert output.loss is not None
        return Early(output.loss, early)


def later(model: Any, batch: Any) -> Any:
    """The loss asks for the embedding's output after the first micro-batch was tried."""
    output = model(batch[0], labels=batch[1])
    return output.loss + output.early.square().mean() if ASKED else output.loss


ASKED: list[bool] = []


def penalised(model: Any, batch: Any) -> Any:
    return loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


WRONG = {
    "draws": (Drawing, loss, "draws random numbers"),
    "overwrites": (Overwriting, loss, "its own forward writes queries"),
    "counts": (Counting, loss, "its forward writes seen, which every stage would write"),
    "writes": (lambda: with_blocks(Writing), loss, "writes its arguments in place"),
    "shares": (Sharing, loss, "writes in place what same returns or was given"),
    "spills": (lambda: with_blocks(Spilling), spilled, "body.blocks.0.figure, which this rank does not have"),
    "asks later": (Telling, later, "the loss depends on a value of another stage that the stages do not send"),
    "penalises": (Decoder, penalised, "which this rank does not have"),
    "calls a layer of a chain": (
        lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)),
        lambda model, batch: model(batch[0]).square().mean() + model[1](model[0](batch[0])).square().mean(),
        "which this rank does not have",
    ),
    "calls parts of a chain": (
        lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)),
        lambda model, batch: model[1:](model[:1](batch[0])).square().mean(),
        "which this rank does not have",
    ),
    "penalises a chain": (
        lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)),
        lambda model, batch: model(batch[0]).square().mean() + sum(p.square().sum() for p in model.parameters()),
        "which this rank does not have",
    ),
}


class Samples(IterableDataset[Any]):
    """The samples as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return zip(*data(), strict=True)


def refused(case: str) -> str:
    make, lost, _ = WRONG[case.removesuffix(" on a stream")]
    ASKED.clear()
    torch.manual_seed(0)
    model = make().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        strategy = "pipeline:micro_batches=2" + ",cuts=body.blocks.1" * (case == "writes")
        samples = Samples() if case.endswith("stream") else data()
        run = tutti.prepare(model, "sgd:lr=1", samples, lost, strategy=strategy, batch_size=13)
        ASKED.append(True)
        for batch in run.epoch(0):
            run.step(batch)
    except tutti.errors.UsageError as error:
        present = [(n, p) for n, p in model.named_parameters() if type(p) is nn.Parameter]
        with FunctionModesDisabled():  # each rank looks at parameters of its own
            here = [n for n, p in present if not torch.equal(p, before[n])]
        return f"{error} updated: {here}"
    return "nothing was raised"


@pytest.mark.parametrize("case", [*WRONG, "spills on a stream"])
def test_what_stages_cannot_compute_is_refused_before_any_update(case: str) -> None:
    try:
        for said in worlds.run(2, refused, case=case):
            assert WRONG[case.removesuffix(" on a stream")][2] in said and said.endswith("updated: []")
    finally:
        # Messages of the refused step are under way.
        worlds.forget(2)


def test_another_order_of_blocks_is_refused() -> None:
    model = Turning().double()
    words = torch.zeros(2, 6, dtype=torch.long)
    found = find_stage_partition(model, 2, (), trial=lambda called: called(words, labels=words).loss)
    assert found.record is not None
    stage = found.record.stage(found.stages[0], [], [found.stages[0][-1]])
    assert len(stage((words,), {"labels": words})) == 1
    with pytest.raises(tutti.errors.UsageError, match="than when it was cut into stages"):
        stage((words + 1,), {"labels": words})


class Choosing(Block):
    """Returns as many samples as the values of its input say."""

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, None]:
        return super().forward(x[: 1 if BOUND[0] < float(x.detach().mean()) else 2], **options)


BOUND = {0: 0.5}


def test_a_block_whose_shapes_depend_on_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_blocks(Choosing).double()
    words = torch.zeros(2, 6, dtype=torch.long)

    def trial(called: Any) -> Any:
        return called(words, labels=words).loss

    with pytest.raises(tutti.errors.UsageError, match=r"blocks\.0 returns tensors whose shapes depend on values"):
        find_stage_partition(model, 2, ("body.blocks.1",), trial=trial)
    # Both kinds of made numbers are below it, and the values of the batch are not.
    monkeypatch.setitem(BOUND, 0, 10.0)
    found = find_stage_partition(model, 2, ("body.blocks.1",), trial=trial)
    assert found.record is not None
    stage = found.record.stage(found.stages[0], [], [found.stages[0][-1]])
    monkeypatch.setitem(BOUND, 0, -10.0)
    with pytest.raises(tutti.errors.UsageError, match=r"blocks\.0 returns tensors whose shapes depend on values"):
        stage((words,), {"labels": words})


def test_a_loss_function_that_reads_values_is_computed_on_the_last_stage() -> None:
    words, labels = (part[:2] for part in data())

    def trial(model: Any) -> Tensor:
        found = transcribed(model(words).scores, labels)
        assert found.item() > 0 and not found.isnan()
        return found

    model = Transcribing().double()
    found = find_stage_partition(model, 2, (), trial=trial)
    assert found.record is not None and len(found.stages) == 2


class Routed(nn.Module):
    """Gives an expert the positions that it chooses by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.expert, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words).flatten(0, 1)
        chosen = (x.sum(-1) > 0).nonzero()[:, 0]
        if len(chosen) < len(x):
            x = x.index_add(0, chosen, self.expert(x[chosen]))
        found: Tensor = self.head(x)
        return found


def test_a_forward_that_reads_values_is_refused_by_the_error_of_its_recording() -> None:
    words = torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(tutti.errors.UsageError, match="a Routed cannot be cut into stages") as caught:
        find_stage_partition(Routed(), 2, (), trial=lambda called: called(words).sum())
    said = str(caught.value)
    assert "cannot be recorded without the values of its tensors" in said and "aten.nonzero" in said, said
    assert f"{__file__}:" in said and "torch.fx" not in said and "take strategy='mirrored'" in said, said


class Asking(nn.Module):
    """Doubles what is no tensor: a traced value is none, and its stages would double tensors."""

    def __init__(self, asked: str) -> None:
        super().__init__()
        self.asked, self.layers = asked, nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.asked == "is_tensor" and not torch.is_tensor(x):
            x = x * 2
        if self.asked == "isinstance" and not isinstance(x, Tensor):
            x = x * 2
        if self.asked == "mapping" and not isinstance(x, Mapping):
            x = x * 2
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("asked", "recorded"), [("is_tensor", 1), ("isinstance", 1), ("mapping", 1), ("nothing", 0)])
def test_a_forward_that_asks_for_the_type_of_a_value_is_recorded_and_not_traced(asked: str, recorded: int) -> None:
    model, x = Asking(asked), torch.randn(2, 4)
    want = model(x)
    found = find_stage_partition(model, 2, (), trial=lambda called: called(x).sum())
    assert (found.record is not None) == bool(recorded)
    if found.record is not None:
        first, second = found.stages
        stages = found.record.stage(first, [], [first[-1]]), found.record.stage(second, [first[-1]], [])
        assert torch.equal(stages[1]((x,), {}, *stages[0]((x,), {})), want)


class Optional(nn.Module):
    """torch.fx can follow its forward, and would leave the loss out: targets are optional."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 9)

    def forward(self, words: Any, targets: Any = None) -> Any:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        scores = self.head(hidden)
        if targets is None:
            return scores, None
        return scores, nn.functional.cross_entropy(scores.view(-1, 9), targets.view(-1))


def with_targets(strategy: str, loop: bool, given: bool = True) -> Any:
    torch.manual_seed(0)
    model = Optional().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    words = torch.randint(0, 9, (24, 5))

    def loss(net: Any, batch: Any) -> Any:
        return net(batch[0], batch[1])[1]

    options: dict[str, Any] = {"strategy": strategy, "workers": 2, "batch_size": 8, "precision": "fp64"}
    run = tutti.prepare(model, optimizer, (words, (words + 1) % 9), loss if given else None, **options)
    try:
        for batch in run.microbatches(0) if loop else run.epoch(0):
            if not loop:
                run.step(batch)
                continue
            run.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    except tutti.errors.UsageError as error:
        return str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("loop", [False, True])
def test_an_optional_argument_that_the_loss_function_gives(loop: bool) -> None:
    [want] = worlds.run(1, with_targets, strategy="mirrored", loop=loop)
    for got in worlds.run(2, with_targets, strategy="pipeline", loop=loop):
        assert largest_difference(got, want) <= 1e-10


def test_an_optional_argument_that_a_loop_alone_gives_is_refused_with_the_way_out() -> None:
    for said in worlds.run(2, with_targets, strategy="pipeline", loop=True, given=False):
        assert "'targets', whose default" in said and "give tutti.prepare a loss_fn" in said.lower()
