"""How models of other libraries are built: tiny, from configurations, with data of a kind.

No weights are downloaded.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import Tensor, nn

WORDS, LENGTH, CLASSES, SAMPLES = 40, 8, 5, 13
IMAGE = 3
"""The token in whose place a model of images and text reads a part of an image; no word of a text."""
SIZES = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": WORDS,
    "max_position_embeddings": 16,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, "num_key_value_heads": 3, **TOKENS}
FEW = ("mirrored", "sharded", "tensor", "pipeline, 1f1b")
"""Strategies of a further architecture."""
LEFT_OUT = "left out"
"""Value of an option of ``SIZES`` that a configuration does not take."""


@dataclass(frozen=True)
class Entry:
    """A model of the table.

    Attributes:
        package: that it comes from.
        build: makes it; parameters follow from PyTorch's seed.
        data: kind of its samples, of those of ``zoo.Samples``.
        by_batch: its loss depends on which samples share a micro-batch (batch norm, contrastive losses), so that a
            plain loop over logical workers, which weights samples equally, is its reference.
        strategies: under which it runs, in one form of loss; none for all strategies and forms.
        loss: its loss function, where the loss is not ``model(**batch).loss``.
    """

    package: str
    build: Callable[[], nn.Module]
    data: str
    by_batch: bool = False
    strategies: tuple[str, ...] = ()
    loss: Callable[[Any, Mapping[str, Tensor]], Any] | None = None

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None

    @property
    def forms(self) -> tuple[str, ...]:
        """How its loss may be computed: see ``loss_fn``."""
        text = self.data in ("causal", "masked", "sequences", "looks", "frames", "patches")
        if self.strategies:
            return ("mean",) if self.package == "timm" else ("padded",) if text and not self.by_batch else ("own",)
        if self.package == "timm":
            return ("mean", "counted")
        return ("own", "padded", "counted") if text else ("own",)


def hf(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        # ``DEFAULTS``, where given, are the parts of a composed configuration.
        return getattr(transformers, model)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return build


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with without_torchvision():
            from timm import create_model

        return create_model(name, num_classes=CLASSES, **options)  # type: ignore[no-any-return]

    return build


def causal(model: str, **options: Any) -> Entry:
    config = model.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
    return entry(model, options.pop("config", config), "causal", **options)


def masked(name: str, **options: Any) -> Entry:
    given = {**SIZES, **TOKENS, **options}
    return entry(f"{name}ForMaskedLM", f"{name}Config", "masked", **{k: v for k, v in given.items() if v != LEFT_OUT})


def sequences(name: str, **options: Any) -> Entry:
    return entry(f"{name}ForConditionalGeneration", f"{name}Config", "sequences", **options)


def images(name: str, data: str = "images", *, by_batch: bool = False, **options: Any) -> Entry:
    return entry(f"{name}ForImageClassification", f"{name}Config", data, by_batch=by_batch, **options)


def entry(model: str, config: str, data: str, *, by_batch: bool = False, **options: Any) -> Entry:
    return Entry("transformers", hf(model, config, **options), data, by_batch, FEW)


def timm_entry(name: str, data: str = "photos", *, by_batch: bool = False, **options: Any) -> Entry:
    return Entry("timm", timm(name, **options), data, by_batch, FEW)


def timm_class(module: str, name: str, *, by_batch: bool = False, **options: Any) -> Entry:
    def build() -> nn.Module:
        with without_torchvision():
            models = importlib.import_module(f"timm.models.{module}")
        return getattr(models, name)(num_classes=CLASSES, **options)  # type: ignore[no-any-return]

    return Entry("timm", build, "photos", by_batch, FEW)


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Within the block, modules of torchvision that is not installed can be imported: any name is an empty class.

    timm imports it for data sets, image transforms and a frozen batch norm, none of which its models here use.
    """
    if find_spec("torchvision") is not None:
        yield
        return

    class Finder(MetaPathFinder, Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

        def create_module(self, spec: ModuleSpec) -> ModuleType:
            return StandIn(spec.name)

        def exec_module(self, module: ModuleType) -> None:
            module.__path__ = []

    class StandIn(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            vars(self)[name] = type(
                name, (), {"NEAREST": 0, "BILINEAR": 2, "BICUBIC": 3, "BOX": 4, "HAMMING": 5, "LANCZOS": 1}
            )
            return vars(self)[name]

    finder = Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
