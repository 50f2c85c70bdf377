"""Split layers train as on one device: models of several shapes, uneven shares, dropout, every optimizer, one state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests import worlds
from tests.contract.table import KINDS, OPTIMIZERS, largest_difference
from tests.covering import Continuations, in_turn, shared_out, table
from tests.parallel.shapes import SHAPES, build, data, loss
from tests.parallel.splitting import SEQUENCE, SPLIT, TOLERANCE, check, few_large, outcome, prepare, train, trained
from tutti.errors import UsageError


@pytest.mark.parametrize(
    ("shape", "devices"), in_turn([shape for shape in SHAPES if "no dropout" not in shape], [2, 3])
)
def test_equals_one_device(shape: str, devices: int) -> None:
    # A bias of keys has a gradient that is zero by construction, of whose noise Adam makes full steps.
    optimizer = (
        "adamw:lr=0.01" if shape not in ("encoder", "translating", "nano", "inline") else OPTIMIZERS["sgd momentum"]
    )
    whole, *here = check(shape, SPLIT, devices, clip=0.5, optimizer=optimizer)
    assert max(here) < 0.75 * whole, "nothing was split"


HEADS = [
    ("packed", SPLIT, 3, "lamb", {}),
    ("packed", SPLIT, 4, "muon", {"activation_checkpointing": "blocks"}),
    ("packed", SEQUENCE, 2, "sgd momentum", {}),
    ("packed", "hybrid:stages=2,tensor=2,least=1,schedule=zero_bubble", 4, "sgd momentum", {"workers": 2}),
    ("packed", "hybrid:shards=2,stage=3,tensor=2,least=1", 4, "sgd momentum", {"workers": 2}),
    ("all heads", "hybrid:shards=2,stage=3,tensor=2,least=1", 4, "sgd momentum", {"workers": 2}),
    ("mixture", "hybrid:stages=2,tensor=2,least=1", 4, "lamb", {"workers": 2}),
    pytest.param(
        *("mixture", "hybrid:shards=2,stage=3,tensor=2,least=1", 4, "sgd momentum", {"workers": 2}),
        marks=pytest.mark.full,
    ),
    ("related", SPLIT, 4, "adamw", {"activation_checkpointing": "blocks"}),
    ("related", SEQUENCE, 2, "adamw", {}),
    ("related", "hybrid:stages=2,tensor=2,least=1", 4, "adamw", {"workers": 2}),
    ("related", "hybrid:shards=2,stage=3,tensor=2,least=1", 4, "adamw", {"workers": 2}),
    ("related", SPLIT, 2, "sgd momentum", {"compile": "default:backend=eager", "steps": 2}),
]


@pytest.mark.parametrize(("shape", "strategy", "devices", "optimizer", "options"), HEADS)
def test_attention_of_several_forms(
    shape: str, strategy: str, devices: int, optimizer: str, options: dict[str, Any]
) -> None:
    """One matrix for queries, keys and values, norms within heads, a bias for each head, and weights by heads."""
    text = OPTIMIZERS[optimizer].format(last="*0*")
    check(shape, strategy, devices, **{"clip": 0.5, "optimizer": text, **options})


ADAPTED = {"novograd, every tensor": "novograd:lr=0.01,adapt_1d=true,decay_1d=true"}
ELSEWHERE = ("lamb", "muon", "novograd", "torch adafactor")
"""Of which ordinary runs have split layers in the tables beside, and in ``tests/parallel/test_whole_tensors.py``."""


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=pytest.mark.full) if KINDS.get(name) == "elementwise" or name in ELSEWHERE else name
        for name in [*OPTIMIZERS, *ADAPTED]
    ],
)
def test_every_optimizer(optimizer: str) -> None:
    """Norms of layers are those of whole ones, and what ranks hold alike counts once in them."""
    text = {**OPTIMIZERS, **ADAPTED}[optimizer].format(last="*embed*+*head*")
    check("gpt", SPLIT, 3, optimizer=text, clip=0.5)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("tensor:tensor=2,least=1", 4), ("hybrid:tensor=2,replicas=2,least=1,algorithm=native", 4)],
)
def test_replicas_of_split_layers(strategy: str, devices: int) -> None:
    for optimizer in ("lamb", "sgd momentum"):
        check("gpt, dropout", strategy, devices, workers=2, clip=0.1, optimizer=OPTIMIZERS[optimizer])


STAGES = [
    ("nano", "hybrid:stages=2,tensor=2,least=1", 4, "lars"),
    ("nano", "hybrid:replicas=2,stages=2,tensor=2,least=1", 8, "adamw"),
    ("gpt, dropout", "hybrid:stages=2,tensor=2,least=1,schedule=zero_bubble", 4, "adamw"),
    ("gpt", "hybrid:stages=2,tensor=2,least=1,schedule=interleaved", 4, "novograd"),
    ("gpt, dropout", "hybrid:stages=2,tensor=3,least=1", 6, "lamb"),
    ("unet", "hybrid:stages=3,tensor=2,least=1", 6, "sgd momentum"),
]


@pytest.mark.parametrize(("shape", "strategy", "devices", "optimizer"), few_large(STAGES))
def test_stages_of_split_layers(shape: str, strategy: str, devices: int, optimizer: str) -> None:
    """Weights tied over stages and split, skip connections, dropout."""
    check(shape, strategy, devices, workers=2, clip=0.1, optimizer=OPTIMIZERS[optimizer])


def test_activations_computed_again() -> None:
    check("gpt, dropout", SPLIT, 2, activation_checkpointing="blocks")
    check("nano", SPLIT, 2, activation_checkpointing="blocks")
    check("gpt, dropout", SPLIT, 2, activation_checkpointing="selective")


def test_compiled() -> None:
    """Split layers and blocks stay out of the graphs; what is between them is compiled."""
    for shape in ("gpt, dropout", "encoder"):
        optimizer = OPTIMIZERS["sgd momentum"]
        check(shape, SPLIT, 2, compile="default:backend=eager", optimizer=optimizer, steps=2)


@pytest.mark.parametrize("batch_norm", ["sync", "ghost:size=2"])
def test_other_batch_norms(batch_norm: str) -> None:
    shape, options = "convolutions, no dropout", {"workers": 2, "batch_norm": batch_norm, "micro_batch": None}
    check(shape, "tensor:tensor=2,least=1", 4, optimizer=OPTIMIZERS["sgd momentum"], **options)


@pytest.mark.parametrize("options", [{"channels_last": True}, {"lr_scale": "adascale", "workers": 2}])
def test_memory_formats_and_gains(options: dict[str, Any]) -> None:
    check("convolutions", SPLIT, 3, optimizer=OPTIMIZERS["sgd momentum"], **options)


def test_every_rank_begins_as_the_first() -> None:
    for other in worlds.run(3, differently, strategy=SPLIT):
        assert other == worlds.run(1, differently, strategy="single")[0]


def differently(strategy: str) -> Any:
    model = build("gpt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(tutti.rank())
    run = tutti.prepare(model, "sgd", data("gpt"), loss("gpt"), strategy=strategy, batch_size=8)
    return run.weights_sha256()


def custom_loop(strategy: str, workers: int) -> Any:
    model = build("gpt, dropout")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = tutti.prepare(model, optimizer, data("gpt"), strategy=strategy, batch_size=8, workers=workers, micro_batch=3)
    function = loss("gpt")
    for batch in run.microbatches(0):
        total, count, _ = function(run.model, batch)
        run.backward((total.sum(), count))
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [(SPLIT, 3), ("hybrid:tensor=2,least=1", 2), ("hybrid:shards=2,stage=3,tensor=2,least=1", 4)],
)
def test_custom_loops_and_optimizers(strategy: str, devices: int) -> None:
    workers = 2 if "shards" in strategy else 1
    want = worlds.alone(custom_loop, strategy="single", workers=workers)
    for got in worlds.run(devices, custom_loop, strategy=strategy, workers=workers):
        assert largest_difference(got, want) <= TOLERANCE


# One state.

PLACES = [("single", 1), (SPLIT, 3), ("mirrored", 2), (SPLIT, 2), ("hybrid:tensor=2,replicas=2,least=1", 4)]
PLACES += [("hybrid:shards=2,stage=3,tensor=2,least=1", 4)]
PLACES += [("hybrid:shards=2,tensor=2,least=1", 4), ("hybrid:shards=2,stages=2", 4), (SEQUENCE, 2)]


def save(strategy: str, folder: str, shape: str, optimizer: str) -> None:
    run = prepare(shape, strategy, optimizer, workers=2)
    train(run, 2)
    run.save(folder)


def resume(strategy: str, folder: str, shape: str, optimizer: str) -> Any:
    run = prepare(shape, strategy, optimizer, workers=2)
    run.restore(folder)
    assert run.global_step == 2
    train(run, 2)
    return outcome(run)


@pytest.mark.parametrize(("optimizer", "continuations"), shared_out("adamw", "novograd", "muon"))
def test_a_checkpoint_goes_on_anywhere(optimizer: str, continuations: Continuations, tmp_path: Path) -> None:
    # The second has parts of matrices along both dimensions.
    shape, last = ("packed", "*0*+*5*") if optimizer == "muon" else ("gpt", "*embed*+*head*")
    arguments = {"shape": shape, "optimizer": OPTIMIZERS[optimizer].format(last=last)}
    want, *_ = worlds.alone(trained, strategy="single", workers=2, steps=4, **arguments)
    for (strategy, devices), after in continuations(PLACES, -1, 1):
        folder = str(tmp_path / f"{devices} {strategy}")
        worlds.run(devices, save, strategy=strategy, folder=folder, **arguments)
        for other, ranks in after:
            for got in worlds.run(ranks, resume, strategy=other, folder=folder, **arguments):
                assert largest_difference(got, want) <= TOLERANCE, (strategy, devices, other, ranks)


def written(folder: str) -> Any:
    run = prepare("gpt", SPLIT, workers=1)
    train(run, 1)
    state = run.gradient_sync.state()
    names = {group: sorted(tensors) for group, tensors in state.items()}
    return names, {
        group: sum(getattr(t, "tensor", t).nbytes for t in tensors.values()) for group, tensors in state.items()
    }


def test_what_ranks_hold_alike_is_written_once() -> None:
    answers = worlds.run(3, written, folder="")
    whole = sum(p.numel() for p in build("gpt").parameters()) * 8
    assert sum(sizes["model"] for _, sizes in answers) == whole
    first, *others = [names for names, _ in answers]
    assert "norm.weight" in first["model"] and "norm.weight/step" in first["optim"]
    assert all("norm.weight" not in names["model"] for names in others)
    assert all(not any(entry.endswith("/step") for entry in names["optim"]) for names in others)


def begin(strategy: str, source: str) -> Any:
    run = prepare("gpt", strategy, init_from=source)
    return outcome(run)


def test_weights_from_elsewhere(tmp_path: Path) -> None:
    worlds.run(2, save, strategy=SPLIT, folder=str(tmp_path), shape="gpt", optimizer="sgd")
    [source] = map(str, tmp_path.iterdir())
    want = worlds.alone(begin, strategy="single", source=source)
    for got in worlds.run(3, begin, strategy=SPLIT, source=source):
        assert largest_difference(got, want) == 0


# Reduced precision, overflow, refusals.


def test_float16_skips_the_same_steps() -> None:
    scale = "dynamic:init=1073741824,max=1073741824,backoff_factor=9.5367431640625e-07,growth_interval=2"
    options = {"precision": "fp16", "loss_scale": scale, "optimizer": "sgd:lr=0.1", "ema": None}
    want = worlds.run(1, halves, strategy="single", **options)[0]
    for got, skipped in worlds.run(3, halves, strategy=SPLIT, **options):
        assert skipped == want[1] and True in skipped
        assert largest_difference(got, want[0]) <= 2e-3


def halves(strategy: str, **options: Any) -> Any:
    run = prepare("gpt", strategy, **options)
    skipped = []
    for batch in run.epoch(0):
        run.step(batch)
        skipped.append(bool(run.updated and run.updated.skipped))
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, skipped


def refused(kind: str) -> str:
    model, strategy = build("gpt"), SEQUENCE if kind in ("compiled", "hooked") else SPLIT
    options: dict[str, Any] = {"reproducible": True} if kind == "exact" else {}
    if kind == "compiled":
        options["compile"] = "default:backend=eager"
    elif kind == "hooked":
        model.block1.register_full_backward_hook(lambda *_: None)  # type: ignore[operator,union-attr]
    try:
        for _ in range(2):
            tutti.prepare(model, "sgd", data("gpt"), loss("gpt"), strategy=strategy, **options)
    except UsageError as error:
        return str(error)
    return ""


REFUSED = {
    "twice": "given to an earlier tutti.prepare with strategy tensor",
    "exact": "not reproducible",
    "compiled": "sequence=true cannot be combined with compile",
    "hooked": "cannot be combined with hooks on the gradients of modules",
}


@pytest.mark.parametrize(("kind", "words"), REFUSED.items())
def test_refusals(kind: str, words: str) -> None:
    assert all(words in said for said in worlds.run(2, refused, kind=kind))


SHARED = nn.Tanh()
"""As modules of libraries keep activations, one for all models."""


def two_models(strategy: str) -> list[int]:
    found = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 8), SHARED, nn.Linear(8, 8), nn.Linear(8, 4)).double()
        run = tutti.prepare(
            model,
            "sgd:lr=0.1",
            torch.utils.data.TensorDataset(torch.ones(8, 4, dtype=torch.float64)),
            lambda called, batch: called(*batch).square().mean(),
            strategy=strategy,
            batch_size=4,
        )
        for batch in run.epoch(0):
            run.step(batch)
        found.append(run.updates)
    return found


@pytest.mark.parametrize("strategy", [SPLIT, "pipeline", "sharded"])
def test_a_later_model_may_share_an_activation_with_a_split_one(strategy: str) -> None:
    assert worlds.run(2, two_models, strategy=strategy) == [[2, 2]] * 2


def header() -> dict[str, str]:
    run = tutti.prepare(build("gpt"), "sgd", data("gpt"), loss("gpt"), strategy=SPLIT)
    assert isinstance(run.model, nn.Module)
    return dict(run.replica.summary)


def test_the_header_says_what_is_split() -> None:
    [said, *_] = worlds.run(2, header)
    assert said["split"].startswith("over 2: 4 column (block1.attention.queries_keys_values block1.feed_forward.widen")
    assert "5 whole (block1.norm1" in said["split"]
    assert said["split"].endswith("of the parameters and 0% of the FLOP stay whole")


def header_of_whole_layers() -> dict[str, str]:
    strategy = tutti.strategy(
        "tensor", plan={"block1.feed_forward.widen": "colwise", "block1.feed_forward.shrink": "rowwise"}
    )
    run = tutti.prepare(build("gpt"), "sgd", data("gpt"), loss("gpt"), strategy=strategy)
    return dict(run.replica.summary)


def test_the_header_warns_of_operations_that_every_device_computes() -> None:
    [said, *_] = worlds.run(2, header_of_whole_layers)
    share = float(said["split"].partition("of the parameters and ")[2].partition("%")[0]) / 100
    # Of 12 matrices of width² in each of two blocks one block's 8 are split; attention and the last layer are whole.
    assert 2 / 3 <= share < 0.8 and "warning: every device holds and computes this part" in said["split"]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4)).double()


def penalised(strategy: str, own: bool, only: str) -> str:
    model = small()
    inputs = torch.randn(8, 4, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]

    def loss(called: Any, batch: Any) -> Any:
        penalty = sum(p.square().sum() for name, p in called.named_parameters() if name.startswith(only))
        return called(batch[0]).square().mean() + penalty

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        run = tutti.prepare(
            model, optimizer, (inputs, inputs), None if own else loss, strategy=strategy, batch_size=4, precision="fp64"
        )
        if not own:
            run.step(next(iter(run.epoch(0))))
        for batch in run.microbatches(0) if own else ():
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
    except tutti.errors.UsageError as error:
        return f"{error} {all(map(torch.equal, before, model.parameters()))}" if only else str(error)
    return ""


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("strategy", ["tensor:least=1", "hybrid:tensor=2,least=1"])
def test_penalties_on_slices_and_on_whole_parameters_run(strategy: str, own: bool) -> None:
    """``tests/contract/test_weight_penalties.py`` compares them with one device."""
    for only in ("", "3."):
        assert worlds.run(2, penalised, strategy=strategy, own=own, only=only) == ["", ""]


class Figured(nn.Module):
    """A block that is split where it keeps nothing; its figure is read outside of it."""

    figure: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        self.figure = hidden.square().mean()
        return self.second(hidden)


def figured(strategy: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Figured(), nn.Linear(4, 2)).double()
    inputs = torch.randn(12, 4, dtype=torch.float64)
    run = tutti.prepare(
        model, "sgd:lr=0.1", inputs, lambda called, batch: called(batch).square().mean() + model[0].figure,
        strategy=strategy, batch_size=4, precision="fp64",
    )  # fmt: skip
    return [run.step(batch) for batch in run.epoch(0)]


def test_an_attribute_of_a_block_is_that_of_the_whole_block() -> None:
    want = worlds.alone(figured, strategy="single")
    for got in worlds.run(2, figured, strategy="tensor:least=1"):
        assert got == pytest.approx(want, rel=1e-12)


class Biased(nn.Module):
    """Attention with a learned bias between positions, for all heads or for each."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.bias, self.heads = nn.Parameter(torch.randn(heads, 25)), heads

    def forward(self, x: Tensor) -> Tensor:
        mask = self.bias.view(self.heads, 5, 5)
        mask = mask[0] if self.heads == 1 else mask.repeat(len(x), 1, 1)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


def biased(strategy: str, heads: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Biased(heads), nn.Linear(8, 8)).double()
    inputs = torch.randn(12, 5, 8, dtype=torch.float64)
    run = tutti.prepare(
        model, "sgd:lr=0.5", inputs, lambda called, batch: called(batch).square().mean(),
        strategy=strategy, batch_size=4, precision="fp64",
    )  # fmt: skip
    for batch in run.epoch(0):
        run.step(batch)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize("heads", [1, 4])
def test_a_learned_bias_of_attention_gets_the_gradient_of_all_heads(heads: int) -> None:
    want = worlds.alone(biased, strategy="single", heads=heads)
    for devices in (2, 3):
        for got in worlds.run(devices, biased, strategy="tensor:least=1", heads=heads):
            assert largest_difference(got, want) <= TOLERANCE


KEPT: list[Any] = []


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.square().sum()


FIGURES: dict[str, Any] = {
    "of an own function": Square.apply,
    "norm": lambda weight: weight.norm(),
    "of data": lambda weight: weight.data.abs().max(),
    "of a result": lambda weight: (weight.detach() * 2).sum(),
    "of a product": lambda weight: weight @ torch.ones(weight.shape[-1], dtype=weight.dtype),
    "of many": lambda weight: torch._foreach_norm([weight, weight])[0],
    "as a list": lambda weight: torch.tensor(weight.tolist()),
    "draws": lambda weight: weight.normal_(),
    "none": lambda weight: torch.zeros(weight.shape),
}
MOMENTS = ["loss", "body", "after backward", "after step"]


def told(strategy: str, figure: str, place: str, layer: str = "0") -> str:
    """Compute a figure of a layer's weight somewhere in a script."""
    model = small()
    inputs = torch.randn(8, 4, dtype=torch.float64)
    weight = model.get_submodule(layer).weight

    @torch.no_grad()
    def tell(now: str) -> None:
        if now == place:
            KEPT.append(FIGURES[figure](weight))

    def loss(called: Any, batch: Any) -> Any:
        tell("loss")
        return called(batch[0]).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = place != "loss"
    try:
        run = tutti.prepare(
            model, optimizer, (inputs, inputs), None if own else loss, strategy=strategy, batch_size=4, precision="fp64"
        )
        if not own:
            run.step(next(iter(run.epoch(0))))
        for batch in run.microbatches(0) if own else ():
            tell("body")
            optimizer.zero_grad()
            run.backward(model(batch[0]).square().mean())
            tell("after backward")
            optimizer.step()
            tell("after step")
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("figure", "place"), in_turn(list(FIGURES), MOMENTS, each=2))
def test_a_figure_of_a_slice_is_that_of_the_whole_or_refused(place: str, figure: str) -> None:
    for said in worlds.run(2, told, strategy="tensor:least=1", figure=figure, place=place):
        assert (" 0.weight, of which each tensor rank has a slice" in said) == (figure == "draws"), said
    assert worlds.run(2, told, strategy="tensor:least=1", figure=figure, place=place, layer="3") == ["", ""]


def test_a_figure_of_a_slice_is_refused_in_stages() -> None:
    try:
        for said in worlds.run(
            4, told, strategy="hybrid:tensor=2,stages=2,least=1", figure="norm", place="loss", layer="2"
        ):
            assert "of which each tensor rank has a slice" in said or "which this rank does not have" in said
    finally:
        worlds.forget(4)


@pytest.mark.parametrize(("stage", "place"), in_turn([1, 2, 3], ["loss", "body", "after step"]))
def test_a_figure_of_a_slice_is_refused_where_its_state_is_sharded(stage: int, place: str) -> None:
    """Sharding puts other parameter objects into the model than those that were split."""
    strategy = f"hybrid:tensor=2,shards=2,stage={stage},least=1"
    for said in worlds.run(4, told, strategy=strategy, figure="norm", place=place):
        assert " 0.weight, of which each tensor rank has a slice" in said


def smoothed(strategy: str) -> list[Any]:
    """An average of the weights by hand, whose tensors were made before the model was split."""
    model = small()
    inputs = torch.randn(24, 4, dtype=torch.float64)
    averages = [p.detach().clone() for p in model.parameters()]
    run = tutti.prepare(
        *(model, torch.optim.AdamW(model.parameters(), 0.1), (inputs, inputs)),
        lambda called, batch: called(batch[0]).square().mean(), strategy=strategy, batch_size=8, precision="fp64",
    )  # fmt: skip
    for batch in run.epoch(0):
        run.step(batch)
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                average.mul_(0.5).add_(p.detach(), alpha=0.5)
    return [tensor.numpy().copy() for tensor in averages]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_of_slices_whose_state_is_sharded_is_whole(stage: int) -> None:
    want = worlds.alone(smoothed, strategy="single")
    for got in worlds.run(4, smoothed, strategy=f"hybrid:tensor=2,shards=2,stage={stage},least=1"):
        assert all(abs(mine - one).max() <= 1e-12 for mine, one in zip(got, want, strict=True))


def subtracted(strategy: str, only: int) -> str:
    """A pull to the first weights, which are whole, while the model has rows of slices."""
    model = small()
    inputs = torch.randn(8, 4, dtype=torch.float64)
    first = [p.detach().clone() for p in model.parameters()]
    tutti.prepare(model, "sgd:lr=0.1", (inputs, inputs), strategy=strategy, batch_size=8, precision="fp64")
    try:
        with torch.no_grad():
            for before, p in list(zip(first, model.parameters(), strict=True))[-only:]:
                p.add_(before - p, alpha=0.1)
    except tutti.errors.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("only", [6, 1])
def test_a_whole_tensor_with_rows_of_a_slice_is_refused(only: int) -> None:
    """The last parameter is not split."""
    for said in worlds.run(4, subtracted, strategy="hybrid:tensor=2,shards=2,stage=3,least=1", only=only):
        assert "together with " in said and "plain tensor" in said and "test_tensor_layout.py:" in said


def averaged(strategy: str) -> list[Any]:
    """Average and clamp weights by hand, and evaluate a layer by itself."""
    model = small()
    inputs = torch.randn(24, 4, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, (inputs, inputs), strategy=strategy, batch_size=8, precision="fp64")
    averages = [p.detach().clone() for p in model.parameters()]
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        loss = model(batch[0]).square().mean()
        run.backward(loss)
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                average.mul_(0.5).add_(p, alpha=0.5)
            torch._foreach_lerp_(averages, list(model.parameters()), 0.25)
            model[0].weight.clamp_(-0.3, 0.3)
            for p, average in zip(model[2].parameters(), averages[2:], strict=False):
                p.copy_(average)
    return [tensor.double().numpy().copy() for tensor in run.state().values()]


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_weights_changed_element_by_element(devices: int) -> None:
    want = worlds.alone(averaged, strategy="single")
    for got in worlds.run(devices, averaged, strategy="tensor:least=1"):
        for mine, one in zip(got, want, strict=True):
            assert abs(mine - one).max() <= 1e-12


class Elsewhere(nn.Module):
    """Reads the weights of its layers in its own forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.wide, self.narrow = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8) if kind == "normed" else nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.narrow(self.wide(x).tanh())
        if self.kind == "norm":
            return x * self.wide.weight.norm()
        if self.kind == "layer's own":
            return x
        if self.kind == "normed":
            return x + self.norm(self.embed.weight).square().mean(0)
        if self.kind == "scaled":
            return x * (self.narrow.weight * 2).mean()
        return nn.functional.linear(x, self.embed.weight)


def elsewhere(strategy: str, kind: str, own: bool) -> Any:
    torch.manual_seed(0)
    model = Elsewhere(kind).double()
    words = torch.randint(0, 12, (12, 3), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(called: Any, batch: Any) -> Any:
        return called(batch).square().mean()

    try:
        run = tutti.prepare(
            model, optimizer, words, None if own else loss, strategy=strategy, batch_size=4, precision="fp64"
        )
        for batch in () if own else run.epoch(0):
            run.step(batch)
        for batch in run.microbatches(0) if own else ():
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
    except tutti.errors.UsageError as error:
        return str(error)
    return {name: value.numpy().copy() for name, value in run.state().items()}


@pytest.mark.parametrize(
    ("kind", "own", "devices"),
    table(["norm", "normed", "scaled", "tied by hand", "layer's own"], [False, True], [2, 3]),
)
def test_layers_whose_weights_the_forward_reads_stay_whole(kind: str, own: bool, devices: int) -> None:
    want = worlds.alone(elsewhere, strategy="single", kind=kind, own=own)
    for got in worlds.run(devices, elsewhere, strategy="tensor:least=1", kind=kind, own=own):
        if own and kind != "layer's own":
            assert "the script reads " in got and "tensor:whole=" in got
        else:
            assert largest_difference(got, want) <= TOLERANCE


def sharing_a_softmax(strategy: str) -> list[float]:
    torch.manual_seed(0)
    softmax = nn.Softmax(-1)
    model = nn.Sequential(softmax, nn.Linear(8, 16), softmax, nn.Linear(16, 8), nn.Linear(8, 3))
    inputs, targets = torch.randn(32, 8).double(), torch.randint(0, 3, (32,))

    def loss(net: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    options: dict[str, Any] = {"batch_size": 8, "workers": 1, "precision": "fp64"}
    run = tutti.prepare(model, "sgd:lr=0.5", (inputs, targets), loss, strategy=strategy, **options)
    return [run.step(batch) for batch in run.epoch(0)]


def test_a_layer_that_a_sequence_calls_twice_is_not_left_out_between_split_layers() -> None:
    [alone] = worlds.run(1, sharing_a_softmax, strategy="mirrored")
    for losses in worlds.run(2, sharing_a_softmax, strategy="tensor:least=1"):
        assert losses == pytest.approx(alone, rel=TOLERANCE)
