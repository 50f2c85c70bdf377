"""What is done to a model: other batch norms, its forward compiled, or computed again in backward. No torch."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti.errors import UsageError, did_you_mean
from tutti.spec import Spec

_COMPILE, _CHECKPOINTING = "--compile", "--activation-checkpointing"


@dataclass(frozen=True, kw_only=True)
class OfTheWorker:
    """Statistics of each worker's micro-batch, as the model's own batch norm takes them."""


@dataclass(frozen=True, kw_only=True)
class Ghost:
    """Statistics of few samples, whatever the batch (Hoffer et al. 2017, arXiv 1705.08741).

    Attributes:
        size: samples that are normalised together.
    """

    size: int = 32

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size} and should be at least 1")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Statistics of the whole global batch, over all devices; a device's workers are computed as one batch."""


BATCH_NORMS: Mapping[str, type[Any]] = {"worker": OfTheWorker, "ghost": Ghost, "sync": Sync}


def check_batch_norm(text: str) -> Any:
    """The options of ``--batch-norm``. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--batch-norm")
    return spec.build(spec.choose(BATCH_NORMS, "batch norm"), "--batch-norm")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Options of ``torch.compile``.

    Attributes:
        backend: what makes code of the graphs; ``inductor`` needs a C++ compiler.
    """

    backend: str = "inductor"


MODES: Mapping[str, type[Any]] = {"none": Compile, "default": Compile, "max-autotune-no-cudagraphs": Compile}
_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


def check_compile(text: str, reproducible: bool = False) -> tuple[str, Compile] | None:
    """The mode and options of ``--compile``; None for none. Raises UsageError, naming the nearest mode or key."""
    spec = Spec.parse(text, _COMPILE)
    if spec.name in _CUDA_GRAPHS:
        raise UsageError(
            f"{_COMPILE} {spec.name} records CUDA graphs",
            why="they hold tensors by address, and workers that share a device are swapped by address",
            remedy="take default or max-autotune-no-cudagraphs",
        )
    options = spec.build(spec.choose(MODES, "mode of torch.compile"), _COMPILE)
    if spec.name == "none":
        return None
    if reproducible:
        raise UsageError(
            f"--reproducible does not go with {_COMPILE}",
            why="code that is made for one shape, or for one stage of a model, rounds differently than for another",
            remedy="leave out one of the two",
        )
    return spec.name, options


def check_compiler(options: Compile) -> None:
    """Raise UsageError where ``torch.compile`` would not find what it makes code for the CPU with."""
    if options.backend != "inductor":
        return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise UsageError(
            f"{_COMPILE} needs a C++ compiler, and there is no {compiler}",
            remedy=f"install one (apt install g++), name one in the variable CXX, or leave out {_COMPILE}",
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise UsageError(
            f"{_COMPILE} needs Python's headers",
            where=str(header),
            remedy=f"install them (apt install python3-dev), or leave out {_COMPILE}",
        )


@dataclass(frozen=True, kw_only=True)
class Nothing:
    """Every activation is kept."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of the model are computed again in backward (Chen et al. 2016, arXiv 1604.06174).

    Attributes:
        every: of so many neighbours the first alone.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every} and should be at least 1")


@dataclass(frozen=True, kw_only=True)
class Selective(Blocks):
    """The same, without what is expensive in them: products with weights, convolutions and fused attention are kept.

    Korthikanti et al. 2022, arXiv 2205.05198, section 5.
    """


CHECKPOINTING: Mapping[str, type[Any]] = {"none": Nothing, "blocks": Blocks, "selective": Selective}


def check_checkpointing(choice: str | Sequence[Any], compiled: bool = False) -> Blocks | None:
    """The options of ``--activation-checkpointing``; None for none and for modules that are named.

    Raises UsageError, naming the nearest name or key, or where it does not go with ``--compile``.
    """
    if not isinstance(choice, str):
        return None
    spec = Spec.parse(choice, _CHECKPOINTING)
    if spec.name not in CHECKPOINTING:
        raise UsageError(
            f"unknown activation checkpointing '{choice}'",
            remedy=f"{did_you_mean(spec.name, CHECKPOINTING)}; in Python also a list of modules' names or classes",
        )
    options = spec.build(CHECKPOINTING[spec.name], _CHECKPOINTING)
    if compiled and isinstance(options, Selective):
        raise UsageError(
            f"{_CHECKPOINTING} selective does not go with {_COMPILE}",
            why="code that is compiled is one whole, whose products cannot be kept apart",
            remedy=f"take {_CHECKPOINTING} blocks, blocks:every=2, or leave out {_COMPILE}",
        )
    return options if isinstance(options, Blocks) else None
