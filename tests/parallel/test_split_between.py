"""What is split besides layers: scores up to the loss, positions between layers, rows of slices and of stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.contract.table import OPTIMIZERS, largest_difference
from tests.covering import in_turn
from tests.parallel.shapes import BLOCK, SHAPES, WIDTH, build, data
from tests.parallel.splitting import SEQUENCE, SPLIT, TOLERANCE, check, few_large, prepare, train
from tutti.nn.swap import parameters
from tutti.parallel.pipeline import stage_messages

TEXTS = [shape for shape in SHAPES if "no dropout" not in shape and shape not in ("convolutions", "unet")]


@pytest.mark.parametrize(("shape", "devices"), in_turn(TEXTS, [2, 3, 4]))
def test_positions_split_between_layers(shape: str, devices: int) -> None:
    """Eight positions on three devices are 3, 3 and 2."""
    adam = "adamw:lr=0.01" if shape not in ("encoder", "translating", "nano", "inline") else OPTIMIZERS["sgd momentum"]
    if devices < 4 or "3 heads" not in shape:
        check(shape, SEQUENCE, devices, clip=0.5, optimizer=adam)


SPLIT_POSITIONS = [
    ("gpt, dropout", "hybrid:tensor=2,replicas=2,least=1,sequence=true", 4, "lamb"),
    ("nano", "hybrid:stages=2,tensor=2,least=1,sequence=true", 4, "lars"),
    # Three slices of positions are below, with shards, and stages of them above.
    pytest.param(
        *("gpt, dropout", "hybrid:stages=2,tensor=3,least=1,sequence=true,schedule=zero_bubble", 6, "sgd momentum"),
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("shape", "strategy", "devices", "optimizer"), SPLIT_POSITIONS)
def test_positions_split_in_replicas_and_stages(shape: str, strategy: str, devices: int, optimizer: str) -> None:
    check(shape, strategy, devices, workers=2, clip=0.1, optimizer=OPTIMIZERS[optimizer])


def crossing() -> set[str]:
    """Types of what goes from stage to stage."""
    run, seen = prepare("nano", "hybrid:stages=2,tensor=2,least=1,sequence=true", workers=2), set()
    before = stage_messages.message_form
    stage_messages.message_form = lambda value: seen.add(type(value).__name__) or before(value)  # type: ignore[func-returns-value]
    try:
        run.step(next(iter(run.epoch(0))))
    finally:
        stage_messages.message_form = before
    return seen


def test_what_goes_from_stage_to_stage_is_whole() -> None:
    assert worlds.run(4, crossing) == [{"Tensor"}] * 4


def narrow(strategy: str) -> Any:
    run = prepare("gpt, dropout", strategy, "sgd:lr=0.1", precision="bf16", ema=None)
    train(run, 3)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def test_positions_split_in_bfloat16() -> None:
    want = worlds.alone(narrow, strategy="single")
    for strategy in (SPLIT, SEQUENCE):
        for got in worlds.run(3, narrow, strategy=strategy):
            assert largest_difference(got, want) <= 5e-3


def test_positions_split_and_activations_computed_again() -> None:
    check("gpt, dropout", SEQUENCE, 2, activation_checkpointing="blocks")
    check("gpt, dropout", SEQUENCE, 2, activation_checkpointing="selective")
    check("inline", SEQUENCE, 2, activation_checkpointing="blocks", optimizer=OPTIMIZERS["sgd momentum"])


def sent(strategy: str) -> Any:
    """Names and sizes of what is summed or gathered, with autograd, in one step; and how many numbers norms keep."""
    run, said, kept = prepare("gpt, dropout", strategy, micro_batch=8), [], []
    ranks = run.model.head.tutti_slice.ranks

    def noting(method: Any) -> Any:
        def noted(tensor: torch.Tensor, *rest: Any) -> Any:
            said.append((rest[-1], tensor.numel()))
            return method(tensor, *rest)

        return noted

    for name in ("all_reduce_detached", "all_gather_detached", "reduce_scatter_detached"):
        setattr(ranks, name, noting(getattr(ranks, name)))
    run.model.block1.norm1.register_forward_hook(lambda m, args, out: kept.append(getattr(args[0], "part", args[0])))
    run.step(next(iter(run.epoch(0))))
    return dict(said), kept[0].numel(), [p for p in run.replica.summary["split"].split(", ") if "scores" in p]


def test_scores_are_never_whole_and_positions_are_split() -> None:
    tokens = 8 * BLOCK
    for strategy, places in ((SPLIT, tokens), (SEQUENCE, tokens // 2)):
        for said, kept, scores in worlds.run(2, sent, strategy=strategy):
            assert not any("output of head" in name for name in said), "scores were gathered"
            assert said["output of loss of head"] == 2 * tokens
            assert kept == places * WIDTH
            assert scores == ["1 scores (head)"]


def looked_at(strategy: str) -> Any:
    """Scores that a loss function looks at in a way of its own, and what an own forward gives."""
    run = tutti.prepare(build("gpt"), "sgd:lr=0.1", data("gpt"), _own_loss, strategy=strategy, batch_size=8)
    for batch in run.epoch(0):
        run.step(batch)
    out = run.model(data("gpt")[0][:3])
    assert type(out) is torch.Tensor
    return {"out": out.detach().numpy().copy()}, dict(run.replica.summary)


def _own_loss(model: Any, batch: Any) -> Any:
    scores = model(batch[0])
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten()) + 1e-3 * scores.square().mean()


def test_other_losses_have_whole_scores() -> None:
    want, _ = worlds.alone(looked_at, strategy="single")
    for strategy in (SPLIT, SEQUENCE):
        for got, said in worlds.run(3, looked_at, strategy=strategy):
            assert "1 gathered (head)" in said["split"] or "head" in said["split"].split("gathered")[1]
            assert largest_difference(got, want) <= TOLERANCE


FULLY = "hybrid:shards=2,stage=3,tensor=2,least=1"
SHARDS = [
    ("gpt, dropout", "hybrid:shards=2,tensor=2,least=1", 4, "lamb"),
    ("gpt", "hybrid:shards=2,tensor=2,least=1", 4, "muon"),
    ("gpt", "hybrid:shards=2,tensor=3,least=1,sequence=true", 6, "novograd"),
    ("nano", "hybrid:shards=3,tensor=2,least=1", 6, "lars"),
    ("nano", "hybrid:replicas=2,shards=2,tensor=2,least=1", 8, "sgd momentum"),
    ("gpt, dropout", "hybrid:shards=2,stages=2,schedule=zero_bubble", 4, "adamw"),
    ("gpt", "hybrid:shards=2,stages=2,tensor=2,least=1,schedule=interleaved", 8, "lamb"),
    ("unet", "hybrid:shards=3", 3, "sgd momentum"),
    ("gpt, dropout", FULLY, 4, "lamb"),
    ("gpt", "hybrid:shards=2,stage=2,tensor=3,least=1,sequence=true", 6, "muon"),
    ("nano", "hybrid:shards=3,stage=3,tensor=2,least=1,sequence=true,units=Linear", 6, "lars"),
    ("nano", "hybrid:replicas=2,shards=2,stage=3,tensor=2,least=1", 8, "sgd momentum"),
    ("convolutions", FULLY, 4, "novograd"),
]


TRANSLATING = pytest.param("translating", FULLY, 4, "sgd momentum", marks=pytest.mark.full)


@pytest.mark.parametrize(("shape", "strategy", "devices", "optimizer"), [*few_large(SHARDS), TRANSLATING])
def test_rows_of_split_layers(shape: str, strategy: str, devices: int, optimizer: str) -> None:
    """What slices and stages keep shared out over replicas."""
    text = OPTIMIZERS[optimizer].format(last="*embed*+*head*")
    check(shape, strategy, devices, workers=4, clip=0.1, optimizer=text)


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "selective"},
        # Shards that are compiled, and slices, are in the contract and in tests/parallel/tensor/test_tensor_layout.py.
        pytest.param({"compile": "default:backend=eager"}, marks=pytest.mark.full),
        pytest.param({"activation_checkpointing": "blocks"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows_of_slices_with_other_forwards(options: dict[str, Any]) -> None:
    """Weights are gathered once more, or for what has been compiled."""
    sequence = "" if "compile" in options else ",sequence=true"
    check("gpt", FULLY + sequence, 4, workers=2, clip=0.1, optimizer=OPTIMIZERS["sgd momentum"], **options)


def remembered(strategy: str) -> int:
    run = prepare("gpt", strategy, "adamw:lr=0.01", workers=2)
    train(run, 1)
    return sum(t.numel() for o in run.gradient_sync.optimizers for s in o.state.values() for t in s.values() if t.dim())


def test_every_rank_has_its_part_of_the_optimizer() -> None:
    whole = worlds.alone(remembered, strategy="single")
    parts = worlds.run(4, remembered, strategy="hybrid:shards=2,tensor=2,least=1")
    assert max(parts) <= 0.3 * whole
    slices = worlds.run(2, remembered, strategy="tensor:least=1")
    assert sum(parts) == sum(slices)


def kept(strategy: str) -> int:
    """Parameters and optimizer state that are here between steps, in numbers."""
    run = prepare("gpt", strategy, "adamw:lr=0.01", workers=2, ema=None)
    train(run, 1)
    rows = run.replica.sharded
    whole = [p for name, p in parameters(run.replica.parts) if name not in rows]
    state = [t for o in run.gradient_sync.optimizers for s in o.state.values() for t in s.values() if t.dim()]
    here = [p.to_local() for part in run.replica.parts for p in part.parameters() if hasattr(p, "to_local")]
    with run.replica.model_code():  # the script would be given the sizes of whole parameters
        assert sum(p.numel() for p in here) == sum(p.numel() for p in rows.values())
        return sum(t.numel() for t in [*whole, *rows.values(), *state])


def test_every_rank_has_its_part_of_everything() -> None:
    whole = worlds.alone(kept, strategy="single")
    parts = worlds.run(4, kept, strategy=FULLY)
    assert max(parts) <= 0.3 * whole
    assert sum(parts) == sum(worlds.run(2, kept, strategy="tensor:least=1"))


def overflowing(strategy: str) -> Any:
    scale = "dynamic:init=1073741824,max=1073741824,backoff_factor=9.5367431640625e-07,growth_interval=2"
    run = prepare("gpt", strategy, "sgd:lr=0.1", precision="fp16", loss_scale=scale, ema=None, workers=2)
    skipped = []
    for batch in run.epoch(0):
        run.step(batch)
        skipped.append(bool(run.updated and run.updated.skipped))
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, skipped


@pytest.mark.parametrize("strategy", ["hybrid:shards=2,tensor=2,least=1", "hybrid:shards=2,stages=2", FULLY])
def test_an_overflow_of_one_part_is_all_parts(strategy: str) -> None:
    want, told = worlds.alone(overflowing, strategy="single")
    for got, skipped in worlds.run(4, overflowing, strategy=strategy):
        assert skipped == told and True in skipped
        assert largest_difference(got, want) <= 2e-3
