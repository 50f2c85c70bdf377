"""Options of changes to the model: batch norm, ``torch.compile``, activation checkpointing, 8-bit floats. No torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tutti.config.spec import Spec
from tutti.distribution import pip_install
from tutti.errors import UsageError, did_you_mean

_COMPILE, _CHECKPOINTING = "--compile", "--activation-checkpointing"


@dataclass(frozen=True, kw_only=True)
class WorkerBatchNormConfig:
    """Options of ``--batch-norm worker``: the model's own batch norm is kept; there are none.

    Its statistics are those of one micro-batch of a logical worker, a fixed share of the global batch.
    """


@dataclass(frozen=True, kw_only=True)
class GhostBatchNormConfig:
    """Options of ghost batch norm: each ``size`` consecutive samples are normalised by their own mean and variance.

    Hoffer et al. 2017, arXiv 1705.08741.

    Attributes:
        size: samples that are normalised together, whatever the size of the batch.

    Raises:
        ValueError: ``size`` is below 1.
    """

    size: int = 32

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size is {self.size} and should be at least 1")


@dataclass(frozen=True, kw_only=True)
class SyncBatchNormConfig:
    """Options of ``--batch-norm sync``: statistics of the global batch, over all ranks; there are none.

    A device computes the samples of all its logical workers (shares of the global batch) as one batch.
    """


BatchNormConfig: TypeAlias = WorkerBatchNormConfig | GhostBatchNormConfig | SyncBatchNormConfig

BATCH_NORMS: Mapping[str, type[BatchNormConfig]] = {
    "worker": WorkerBatchNormConfig,
    "ghost": GhostBatchNormConfig,
    "sync": SyncBatchNormConfig,
}


def check_batch_norm(text: str) -> BatchNormConfig:
    """Parse ``--batch-norm``, the group of samples over which batch norm takes its statistics.

    Args:
        text: ``worker``: one micro-batch of a logical worker (share of the global batch); ``ghost:size=32``: 32 samples
            of a logical worker; ``sync``: the global batch.

    Returns:
        The options: a ``WorkerBatchNormConfig``, a ``GhostBatchNormConfig`` with the integer ``size``, or a
        ``SyncBatchNormConfig``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), or ``size`` is no whole number
            of at least 1.
    """
    spec = Spec.parse(text, "--batch-norm")
    return spec.build(spec.choose(BATCH_NORMS, "batch norm"), "--batch-norm")


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of ``torch.compile``.

    Attributes:
        backend: compiler backend; ``inductor`` needs a C++ compiler on the CPU.
    """

    backend: str = "inductor"


@dataclass(frozen=True)
class CompileChoice:
    """A mode of ``torch.compile`` with its other options.

    Attributes:
        mode: the mode, such as ``default``.
        options: the other options, such as the backend.
    """

    mode: str
    options: CompileOptions

    @property
    def records_graphs(self) -> bool:
        """Whether the mode records CUDA graphs of forward and backward, which each step then replays."""
        return self.mode in GRAPH_MODES


GRAPH_MODES: Mapping[str, str] = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Modes of ``torch.compile`` that record CUDA graphs; for each the mode that does the same without graphs."""

MODES: Mapping[str, type[Any]] = dict.fromkeys(
    ("none", "default", "max-autotune-no-cudagraphs", *GRAPH_MODES), CompileOptions
)


def check_compile(text: str, reproducible: bool = False) -> CompileChoice | None:
    """Parse ``--compile``, a mode of ``torch.compile`` with options: ``mode:key=value,…``.

    Args:
        text: ``none``, ``default`` (as in ``default:backend=inductor``) or ``max-autotune-no-cudagraphs``; or
            ``reduce-overhead`` or ``max-autotune``, which record CUDA graphs and so work with the strategies
            ``mirrored`` and ``single`` only (``check_strategy`` refuses the others). The key is ``backend``.
        reproducible: whether the run uses ``--reproducible``.

    Returns:
        A ``CompileChoice``: ``mode``, a text, and ``options`` with the text ``backend``; None for ``none``.

    Raises:
        UsageError: the text is malformed, a mode or key is unknown (naming the nearest), or the run is reproducible,
            which compiled code is not.
    """
    spec = Spec.parse(text, _COMPILE)
    options = spec.build(spec.choose(MODES, "mode of torch.compile"), _COMPILE)
    if spec.name == "none":
        return None
    if reproducible:
        raise UsageError(
            f"--reproducible cannot be combined with {_COMPILE}",
            why="compiled code rounds differently for different shapes and stages of a model",
            remedy="leave out one of the two",
        )
    return CompileChoice(spec.name, options)


def check_compiler(options: CompileOptions) -> None:
    """Raise UsageError if this machine lacks the C++ compiler or Python's headers, which inductor needs on the CPU.

    Only the existence of both files is checked. The compiler (the variable ``CXX``, else ``g++`` or on macOS
    ``clang++``) is not run, so that a compilation may still fail.

    Args:
        options: options of ``--compile``; with another backend of ``torch.compile`` than ``inductor`` nothing is
            checked.
    """
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


def check_float8_package() -> None:
    """Raise UsageError if torchao, whose layers multiply in 8-bit floats, is not installed; loads no torch."""
    if importlib.util.find_spec("torchao") is None:
        raise UsageError(
            "precision=fp8 needs the package torchao",
            remedy=f"run {pip_install('float8')}, or take precision=bf16",
        )


def check_float8(processor: bool, split: bool) -> None:
    """Raise UsageError if ``--precision fp8`` cannot work: on CPUs, with tensor parallelism, or without torchao.

    Args:
        processor: whether the run computes on CPUs.
        split: whether layers are split by tensor parallelism.
    """
    if processor:
        raise UsageError(
            "precision=fp8 cannot run here",
            why="CPUs have no matrix products of 8-bit floats with their scales",
            remedy="take precision=bf16, or a GPU of compute capability 8.9",
        )
    if split:
        raise UsageError(
            "precision=fp8 cannot be combined with tensor parallelism",
            why="each device would scale its slice of a tensor by its own largest value, so that the result depended on"
            " the number of slices",
            remedy="take --strategy sharded or pipeline, or precision=bf16",
        )
    check_float8_package()


@dataclass(frozen=True, kw_only=True)
class NoCheckpointing:
    """No activation checkpointing: every activation is kept for backward; there are no options."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Options of activation checkpointing that recomputes blocks of the model in backward.

    A block is a submodule with parameters and children of its own, such as a layer of a transformer; a long
    ``nn.Sequential`` of plain layers is cut into blocks of √n layers (Chen et al. 2016, arXiv 1604.06174).

    Attributes:
        every: recompute the first of every ``every`` neighbouring blocks.

    Raises:
        ValueError: ``every`` is below 1.
    """

    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every} and should be at least 1")


@dataclass(frozen=True, kw_only=True)
class Selective(Blocks):
    """Selective activation checkpointing: as ``Blocks``, but results of expensive operators are kept.

    Expensive are products with weights, convolutions, and fused attention without dropout; backward recomputes
    everything else in a block. Korthikanti et al. 2022, arXiv 2205.05198, section 5.
    """


CHECKPOINTING: Mapping[str, type[Any]] = {"none": NoCheckpointing, "blocks": Blocks, "selective": Selective}


Checkpointing: TypeAlias = Blocks | Sequence[Any] | None
"""Options of activation checkpointing by structure, names and classes of modules, or None for none."""


def check_checkpointing(choice: str | Checkpointing, compiled: bool = False) -> Checkpointing:
    """Parse ``--activation-checkpointing``, the modules whose activations are dropped and recomputed in backward.

    Args:
        choice: ``none``; ``blocks:every=K``: the first of every K neighbouring blocks of the model (K is 1 by default);
            ``selective``: the same, but results of products with weights, convolutions and fused attention are kept.
            Parsed options, or a list of names or classes of modules, are returned as they are.
        compiled: whether the run uses ``--compile``.

    Returns:
        The parsed options, a ``Blocks`` or its subclass ``Selective``, each with the integer ``every``; or the list;
        None for ``none``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), ``every`` is no whole number
            of at least 1, or ``selective`` is combined with ``--compile``.
    """
    options: Any = choice
    if isinstance(choice, str):
        spec = Spec.parse(choice, _CHECKPOINTING)
        if spec.name not in CHECKPOINTING:
            raise UsageError(
                f"unknown activation checkpointing '{choice}'",
                remedy=f"{did_you_mean(spec.name, CHECKPOINTING)}; in Python also a list of modules' names or classes",
            )
        options = spec.build(CHECKPOINTING[spec.name], _CHECKPOINTING)
    if compiled and isinstance(options, Selective):
        raise UsageError(
            f"{_CHECKPOINTING} selective cannot be combined with {_COMPILE}",
            why="selective checkpointing cannot see the operations inside compiled code",
            remedy=f"take {_CHECKPOINTING} blocks, blocks:every=2, or leave out {_COMPILE}",
        )
    return None if isinstance(options, NoCheckpointing) else options
