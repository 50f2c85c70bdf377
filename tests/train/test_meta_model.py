"""Models on the meta device: the values of a model that was built with values, in less memory; or a refusal."""

from __future__ import annotations

import copy
import ctypes
import json
import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import tutti
from tests import worlds
from tests.covering import in_turn
from tutti.checkpoint.export_folder import export_hf_folder
from tutti.checkpoint.plain import PlainFile
from tutti.errors import TuttiError, UsageError
from tutti.nn.init_on_disk import spilled

HALF = ("embed.weight", "blocks.0.0.bias", "head.bias")


class Rotary(nn.Module):
    """A buffer that no file has, under two names, as in transformers."""

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__()
        self.config, self.kind = config, "default"
        self.register_buffer("freq", config.base ** -(torch.arange(config.width) / config.width), persistent=False)
        self.original = self.freq

    def forward(self, x: Tensor) -> Tensor:
        return x * self.freq + self.original


class Net(nn.Module):
    """Tied weights, a batch norm with buffers in the file, and a table that is not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(12, 8), Rotary(SimpleNamespace(width=8, base=3.0))
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 12)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.rotary(self.embed(numbers)))))


def made(seed: int, tied: bool, meta: bool = False, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    with torch.device("meta") if meta else nullcontext():
        return Net(tied).to(dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Shards of a few tensors, of which some have another dtype than the model."""
    where = tmp_path_factory.mktemp("weights")
    state = {name: value.clone() for name, value in made(7, True).state_dict().items() if name != "head.weight"}
    state |= {name: state[name].float() for name in HALF}
    save_file(state, where / "all.safetensors")
    export_hf_folder(PlainFile(where / "all.safetensors"), where / "hf", {}, most=3000)
    assert len(list((where / "hf").glob("*.safetensors"))) > 2
    return str(where / "hf")


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    numbers, labels = batch
    return functional.cross_entropy(model(numbers), labels)


def trained(strategy: str, init_from: str | None, meta: bool, tied: bool = True, **options: Any) -> Any:
    """Hash of the weights after two steps, the buffer that no file has, and whether ties and the optimizer hold."""
    numbers = torch.arange(24)
    workers = 3 if strategy == "sharded:stage=2" else 2
    # Initial values are drawn in the dtype that the model has.
    model = made(3, tied, meta, torch.float32 if init_from is None else torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(3)
    run = tutti.prepare(
        *(model, optimizer, (numbers % 12, numbers % 5), loss),
        **{
            "strategy": strategy,
            "workers": workers,
            "batch_size": 12,
            "init_from": init_from,
            **options,
        },
    )
    for batch in run.epoch(0):
        run.step(batch)
    parts = nn.ModuleList(run.replica.parts)
    left = [name for name, tensor in [*parts.named_parameters(), *parts.named_buffers()] if spilled(tensor)]
    state = run.state()
    equal = torch.equal(state["head.weight"], state["embed.weight"])
    whole = not any(value.is_meta for value in state.values())
    return run.weights_sha256(), left, whole, equal, model.rotary.freq.tolist(), model.rotary.original.tolist()


STRATEGIES = {
    "single": 1,
    "mirrored": 2,
    "sharded:stage=1": 2,
    "sharded:stage=2": 3,
    "sharded": 2,
    "tensor:least=1": 2,
    "pipeline": 3,
    "model_parallel": 2,
    "hybrid:stages=2,tensor=2,least=1": 4,
    "hybrid:tensor=2,shards=2,stage=3,least=1": 4,
    "central_storage": 2,
    "parameter_server": 2,
    "local_sgd": 2,
}


@pytest.mark.parametrize(("strategy", "more"), in_turn([*STRATEGIES], ["", "fp32", "ema"]))
def test_weights_of_files_are_those_that_a_built_model_loads(strategy: str, more: str, folder: str) -> None:
    options = {"": {}, "fp32": {"precision": "fp32"}, "ema": {"ema": 0.5}}[more]
    if strategy == "local_sgd" or (more == "ema" and "parameter_server" in strategy):
        options = {}
    arguments = {"strategy": strategy, "init_from": folder, **options}
    want = worlds.run(STRATEGIES[strategy], trained, meta=False, **arguments)
    for found, plain in zip(worlds.run(STRATEGIES[strategy], trained, meta=True, **arguments), want, strict=True):
        assert found == plain
        assert not found[1] and found[2] and found[3]


@pytest.mark.parametrize("strategy", ["single", "mirrored", "sharded", "tensor:least=1", "pipeline"])
def test_without_files_the_values_are_those_of_the_constructor(strategy: str) -> None:
    arguments = {"strategy": strategy, "init_from": None, "tied": False}
    want = worlds.run(STRATEGIES[strategy], trained, meta=False, **arguments)
    for found, plain in zip(worlds.run(STRATEGIES[strategy], trained, meta=True, **arguments), want, strict=True):
        assert (found[0], found[4]) == (plain[0], plain[4])


def test_new_tensors_are_initialised_and_all_others_read(folder: str) -> None:
    def begun(**more: str) -> dict[str, Tensor]:
        model = made(3, False, meta=True)
        torch.manual_seed(3)
        data = (torch.arange(4), torch.arange(4))
        run = tutti.prepare(model, "sgd", data, loss, strategy="single", init_from=folder, batch_size=4, **more)
        return {name: value.clone() for name, value in run.state().items()}

    found, saved = begun(init_map="new=head.weight"), made(7, True)
    torch.manual_seed(3)
    head = nn.Linear(8, 12, dtype=torch.float64)
    assert torch.equal(found["head.weight"], head.weight)
    assert torch.equal(found["head.bias"], saved.head.bias.float().double())
    assert torch.equal(found["blocks.2.0.weight"], saved.blocks[2][0].weight)
    with pytest.raises(TuttiError, match=r"missing: head\.weight"):
        begun()


class WithInit(nn.Module):
    """Initialises all of its parameters by a method, which transformers leaves out on the meta device."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.scale = nn.Parameter(torch.zeros(8))
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(8), persistent=False)
        if calls:
            self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        nn.init.normal_(self.embed.weight, std=std)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
        nn.init.ones_(self.scale)
        with torch.no_grad():
            self.table.copy_(torch.arange(8.0))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.embed(numbers) * self.scale + self.table)


@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("from_file", [False, True])
def test_the_models_own_method_initialises_it(calls: bool, from_file: bool, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = WithInit(calls)
    torch.manual_seed(4)
    saved = {"embed.weight": torch.randn(12, 8), "scale": torch.randn(8)}
    save_file(saved, tmp_path / "x.safetensors")
    numbers = torch.arange(4)
    init_from = tmp_path / "x.safetensors" if from_file else None
    tutti.prepare(model, "sgd", (numbers, numbers), loss, strategy="single", batch_size=4, init_from=init_from)
    if from_file:
        assert torch.equal(model.scale, saved["scale"]) and torch.equal(model.head.weight, saved["embed.weight"])
    else:
        assert torch.equal(model.scale, torch.ones(8)) and 0.01 < float(model.embed.weight.std()) < 0.03
    assert model.head.weight is model.embed.weight and torch.equal(model.table, torch.arange(8.0))


def changed_after(calls: bool) -> nn.Module:
    model = WithInit(calls)
    nn.init.zeros_(model.scale)
    return model


def with_a_copy() -> nn.Module:
    """The copy may have been given other values, as adapters are, and counts no writes."""
    model = WithInit(False)
    model.adapter = copy.deepcopy(nn.Linear(8, 8, bias=False))
    return model


class OwnInit(nn.Sequential):
    """Initialises its layers by itself after their constructors."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in self:
            nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]


class Delegating(nn.Module):
    """Its method of initialisation calls those of its layers, as in PyTorch's FSDP2 example, or is one of its own."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.inner, self.norm, self.own = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.LayerNorm(4), own

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.inner(inputs))

    def reset_parameters(self) -> None:
        for layer in (*self.inner, self.norm):
            layer.reset_parameters()
        if self.own:
            nn.init.normal_(self.inner[1].weight, std=0.02)


class Scaled(nn.Module):
    """A parameter that no ``reset_parameters`` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Forgetful(nn.Module):
    """A buffer of an argument that the module does not keep, beside a layer."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("table", base ** torch.arange(4.0), persistent=False)


class Halved(Forgetful):
    """The module keeps another number under the argument's name, so that a second constructor computes another table.

    The second one keeps another number, too, by which it is found.
    """

    def __init__(self, base: float) -> None:
        super().__init__(base)
        self.base = base / 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (OwnInit, "the initial values of 2 parameters cannot be computed (0.weight, 1.weight)"),
        (lambda: Delegating(True), "cannot be computed (inner.0.weight, inner.0.bias, inner.1.weight)"),
        (Scaled, "the initial values of 1 parameter cannot be computed (weight)"),
        (lambda: Net(True), "(embed.weight)"),
        (lambda: changed_after(False), "(scale)"),
        (lambda: changed_after(True), "(scale)"),
        (with_a_copy, "(adapter.weight)"),
        (lambda: Forgetful(2.0), "the values of 1 tensor of the model cannot be computed (table)"),
        (lambda: Halved(2.0), "the constructor of Halved cannot be called again"),
    ],
)
def test_values_that_cannot_be_computed_are_refused(make: Callable[[], nn.Module], words: str) -> None:
    with torch.device("meta"):
        model = make()
    with pytest.raises(UsageError) as caught:
        tutti.prepare(model, "sgd", torch.zeros(4, 4), lambda m, b: m(b).sum(), strategy="single", batch_size=4)
    assert words in str(caught.value) and "tutti.spilling()" in str(caught.value)


def test_state_that_an_optimizer_has_made_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(UsageError, match="the state of Adagrad has no numbers"):
        tutti.prepare(model, optimizer, torch.zeros(4, 4), lambda m, b: m(b).sum(), strategy="single", batch_size=4)


@pytest.mark.parametrize("part", [lambda: nn.TransformerEncoderLayer(4, 2, 8), Delegating], ids=["attention", "own"])
def test_layers_within_others_are_initialised_as_by_the_constructor(part: Callable[[], nn.Module]) -> None:
    def run(meta: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        with torch.device("meta") if meta else nullcontext():
            model = nn.Sequential(nn.Linear(4, 4), part())
        torch.manual_seed(0)
        made = tutti.prepare(model, "sgd", torch.zeros(4, 4), lambda m, b: m(b).sum(), strategy="single", batch_size=4)
        return {name: value.clone() for name, value in made.state().items()}

    plain, found = run(False), run(True)
    assert all(torch.equal(plain[name], found[name]) for name in plain)


# --- memory ----------------------------------------------------------------------------------------------------------

WIDTH, BLOCKS = 1024, 12


def deep(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks))
    )


def private_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])


def begun_within(strategy: str, folder: str, extra: int, meta: bool) -> str:
    """Start with ``extra`` bytes more than this rank takes after a small run: a hash of the weights, or the error."""

    def start(width: int, blocks: int, **more: Any) -> Any:
        with torch.device("meta") if meta and more else nullcontext():
            model = deep(width, blocks)
        options = {"strategy": strategy, "workers": 2 if strategy == "sharded" else 1, "batch_size": 4, **more}
        return tutti.prepare(model, "sgd", torch.zeros(8, width), lambda m, b: m(b).square().mean(), **options)

    start(16, BLOCKS)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + extra, before[1]))
    try:
        run = start(WIDTH, BLOCKS, init_from=folder)
    except (RuntimeError, MemoryError, TuttiError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return str(run.weights_sha256())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    where = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        shapes = deep(WIDTH, BLOCKS).state_dict()
    state = {name: torch.full(value.shape, number / 1e5) for number, (name, value) in enumerate(shapes.items())}
    size = sum(value.nbytes for value in state.values())
    names = sorted(state)
    (where / "hf").mkdir()
    places = {name: f"model-{index % 4}.safetensors" for index, name in enumerate(names)}
    for file in sorted({*places.values()}):
        save_file({name: state[name] for name in names if places[name] == file}, where / "hf" / file)
    (where / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return str(where / "hf"), size


@pytest.mark.parametrize(
    # Pipelines and model parallelism build one layout.
    "strategy",
    ["sharded", "tensor", "pipeline", pytest.param("model_parallel", marks=pytest.mark.full)],
)
def test_no_rank_holds_the_whole_model(strategy: str, large: tuple[str, int]) -> None:
    folder, size = large
    extra = int(0.8 * size)
    hashes = worlds.run(2, begun_within, strategy=strategy, folder=folder, extra=extra, meta=True)
    assert len({*hashes}) == 1 and len(hashes[0]) == 64, hashes
    if strategy == "sharded":
        found = worlds.run(2, begun_within, strategy=strategy, folder=folder, extra=extra, meta=False)
        assert all("alloc" in text for text in found), found
