"""The options of ``tutti.prepare`` in one object, each parsed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import nn
from torch.optim import Optimizer

from tutti.config.averaging import Averaging
from tutti.config.bounds import check_least
from tutti.config.gradient_noise import MultiplicativeNoise
from tutti.config.growth import BatchGrowth
from tutti.config.init_map import InitMap
from tutti.config.loss_scale_config import LossScaleConfig
from tutti.config.lr_rule import NoRule, check_rule
from tutti.config.module_config import (
    BatchNormConfig,
    Checkpointing,
    CompileChoice,
    check_batch_norm,
    check_checkpointing,
    check_compile,
)
from tutti.config.slowness import Slowness
from tutti.config.strategy_choice import StrategyChoice
from tutti.errors import UsageError
from tutti.train.schedulers import Given
from tutti.train.strategy_spec import StrategySpec

Models: TypeAlias = "nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]"
Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer]"

DEFAULT_BATCH_SIZE = 128
"""Samples of a global batch where neither the script nor its DataLoader states a batch size."""

_TEXTS = {
    "batch_norm": "'sync' or 'ghost:size=32'",
    "lr_scale": "'linear:base_batch=256'",
    "gradient_noise": "'multiplicative:base_batch=512'",
    "activation_checkpointing": "'blocks' or 'selective', or a list of modules' names and classes",
}
"""Options that no number can be, nor a switch, and what may be given."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The keyword options of ``tutti.prepare`` in one object; the docstring of ``tutti.prepare`` explains each.

    Options may be given as text; the properties return them parsed. Raises UsageError for numbers out of bounds or of
    another type.
    """

    strategy: StrategyChoice | str | StrategySpec = "mirrored"
    workers: int | None = None
    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    shuffle: bool | None = None
    drop_last: bool = False
    batch_growth: BatchGrowth | str | None = None
    micro_batch: int | None = None
    precision: str | None = None
    loss_scale: LossScaleConfig | str | None = None
    channels_last: bool = False
    lr_scale: NoRule | str = "none"
    batch_norm: BatchNormConfig | str = "worker"
    identical_batches: bool = False
    clip: float | None = None
    gradient_noise: MultiplicativeNoise | str | None = "none"
    noise_every: int | None = None
    ema: Averaging | str | float | None = None
    init_from: str | Path | None = None
    init_map: str | None = None
    reproducible: bool = False
    activation_checkpointing: str | Checkpointing = "none"
    compile: CompileChoice | str | bool | None = "none"
    seed: int = 0
    max_nonfinite: int = 10
    data_workers: int | None = None
    slow: Sequence[Slowness] | str = ()
    scheduler: Given = None
    scheduler_every: str = "update"
    callbacks: Sequence[Any] = ()

    def __post_init__(self) -> None:
        check_least(
            {
                "workers": self.workers,
                "batch_size": self.batch_size,
                "micro_batch": self.micro_batch,
                "noise_every": self.noise_every,
                "max_nonfinite": self.max_nonfinite,
            }
        )
        check_least({"data_workers": self.data_workers}, least=0)
        # Arguments of a script, such as those of argparse without a type, may be texts.
        seed: object = self.seed
        if not isinstance(seed, Integral):
            raise UsageError(f"seed is {seed!r}", remedy="give a whole number")
        # Infinity measures the norm and clips nothing, as in PyTorch.
        clip: object = self.clip
        if clip is not None and (clip is True or not isinstance(clip, Real) or not float(clip) > 0):
            shown = repr(clip) if clip is True or not isinstance(clip, Real) else f"{clip:g}"
            raise UsageError(f"clip is {shown}", remedy="give a number above 0, or None")
        # "no" and "false" would count as true.
        for name in ("shuffle", "drop_last", "channels_last", "identical_batches", "reproducible"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Integral | np.bool_) and int(value) in (0, 1)):
                raise UsageError(f"{name} is {getattr(self, name)!r}", remedy="give True or False")
        for name, example in _TEXTS.items():
            if isinstance(getattr(self, name), Real):
                remedy = f"give text such as {example}; without it the default is {getattr(type(self), name)!r}"
                raise UsageError(f"{name} is {getattr(self, name)!r}", remedy=remedy)

    @cached_property
    def lr_rule(self) -> NoRule:
        """The rule that scales the learning rate with the batch size, from the argument ``lr_scale``.

        ``NoRule`` is the base class of all rules, and itself the rule ``none``; the rule's method ``factor`` returns
        the factor on the learning rate. Raises UsageError if the text is malformed.
        """
        return check_rule(self.lr_scale) if isinstance(self.lr_scale, str) else self.lr_scale

    @cached_property
    def batch_norm_options(self) -> BatchNormConfig:
        """The samples over which batch norm takes its statistics, from the argument ``batch_norm``.

        A ``WorkerBatchNormConfig`` (one micro-batch), a ``GhostBatchNormConfig`` (``size`` samples) or a
        ``SyncBatchNormConfig`` (the global batch). Raises UsageError if the text is malformed.
        """
        return check_batch_norm(self.batch_norm) if isinstance(self.batch_norm, str) else self.batch_norm

    @cached_property
    def compile_choice(self) -> CompileChoice | None:
        """Mode and options of ``torch.compile``, from the argument ``compile`` of ``tutti.prepare``; None without it.

        A ``CompileChoice``: ``mode``, such as ``default``, and ``options``, whose attribute ``backend`` names the
        compiler backend. Raises UsageError if the text is malformed, or the run is ``reproducible``.
        """
        given = self.compile
        if given is None or isinstance(given, CompileChoice):
            return given
        return check_compile(given if isinstance(given, str) else "default" if given else "none", self.reproducible)

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """The modules whose activations are recomputed in backward, from ``activation_checkpointing``.

        If the argument of ``tutti.prepare`` is text, a ``Blocks`` (with ``every`` = k, the first of each k neighbouring
        blocks is recomputed) or its subclass ``Selective``, or None for ``none``; a sequence of names and classes of
        modules is returned as it was given. Raises UsageError if the text is malformed.
        """
        return check_checkpointing(self.activation_checkpointing)

    @cached_property
    def averaging(self) -> Averaging | None:
        """Decay and warm-up of the weights' moving average, from the argument ``ema``; None without it.

        An ``Averaging``: ``decay`` is between 0 and 1; ``warmup`` says whether the decay rises from a smaller value at
        first. Raises UsageError if the text is malformed.
        """
        given = self.ema
        return given if given is None or isinstance(given, Averaging) else Averaging.parse(str(given), "ema")

    @cached_property
    def initial_map(self) -> InitMap | None:
        """Renames and allowed differences of tensors for a warm start from another model; None without ``init_map``.

        An ``InitMap`` with tuples of texts: ``rename`` (items ``OLD:NEW``, beginnings of names), and patterns of names
        of tensors that may be ``new``, ``unused`` or ``reshaped``.

        Raises UsageError if ``init_map`` is malformed, or ``init_from`` is missing.
        """
        return None if self.init_map is None else InitMap.of(self.init_map, self.init_from, "init_map")

    @cached_property
    def slowness(self) -> Sequence[Slowness]:
        """The simulated delays of ranks or logical workers, from the argument ``slow``; empty without one.

        Each ``Slowness`` has the numbers of the delayed ranks (``rank``) or logical workers (``worker``), ``factor``
        (how many times as long they compute) and ``ms`` (milliseconds added in each step). Raises UsageError if the
        text is malformed.
        """
        if isinstance(self.slow, str):
            return Slowness.parse(self.slow, "slow") if self.slow else ()
        return self.slow

    @cached_property
    def growth(self) -> BatchGrowth | None:
        """The schedule by which the batch size grows, from the argument ``batch_growth``; None without it.

        A ``BatchGrowth`` has the epochs at whose start the batch grows (``milestones``), the ``factor`` by which it is
        multiplied, and the ``largest`` batch in samples. Raises UsageError if the text is malformed.
        """
        text = self.batch_growth
        return BatchGrowth.parse(text, "batch_growth") if isinstance(text, str) else text
