"""Options of optimizers and schedules. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti.errors import UsageError
from tutti.spec import Duration, Spec


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent, ``torch.optim.SGD``."""

    lr: float = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("lr", "momentum", "weight_decay"))
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise ValueError("nesterov=true needs momentum above 0 and dampening=0")


@dataclass(frozen=True, kw_only=True)
class Adam:
    """``torch.optim.Adam``; weight decay is added to the gradient."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("lr", "eps", "weight_decay"), below_one=("beta1", "beta2"))


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """``torch.optim.AdamW``; weight decay is decoupled (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    weight_decay: float = 0.01


OPTIMIZERS: Mapping[str, type[Any]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The initial rate throughout, after the warm-up.

    Attributes:
        warmup: length of the linear warm-up (``5ep``, ``500st``, ``20000sa``).
        warmup_from: factor at which it starts; default: the rate before ``--lr-scale``, 0 without one.
    """

    warmup: str = "0st"
    warmup_from: float | None = None

    def __post_init__(self) -> None:
        Duration.parse(self.warmup, "warmup")
        if self.warmup_from is not None:
            _check(self, at_least_zero=("warmup_from",))


@dataclass(frozen=True, kw_only=True)
class Cosine(Constant):
    """Half a cosine from the initial rate to ``final`` times it (Loshchilov & Hutter 2017, arXiv 1608.03983)."""

    final: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Linear(Constant):
    """A straight line from the initial rate to ``final`` times it."""

    final: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step(Constant):
    """The rate times ``gamma`` at each milestone, such as ``milestones=30ep+60ep``."""

    milestones: tuple[str, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.milestones:
            raise ValueError("step needs milestones=30ep+60ep")
        for milestone in self.milestones:
            Duration.parse(milestone, "milestones")


SCHEDULES: Mapping[str, type[Any]] = {"constant": Constant, "cosine": Cosine, "linear": Linear, "step": Step}


def check_optimizer(text: str) -> Any:
    """The options of ``--optimizer``. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--optimizer")
    return spec.build(spec.choose(OPTIMIZERS, "optimizer"), "--optimizer")


def check_schedule(text: str) -> Any:
    """The options of ``--schedule``. Raises UsageError, naming the nearest name or key."""
    spec = Spec.parse(text, "--schedule")
    return spec.build(spec.choose(SCHEDULES, "schedule"), "--schedule")


def _check(config: Any, at_least_zero: tuple[str, ...] = (), below_one: tuple[str, ...] = ()) -> None:
    for name in (*at_least_zero, *below_one):
        value = getattr(config, name)
        if not value >= 0 or (name in below_one and not value < 1):
            raise UsageError(
                f"{name} is {value}", remedy=f"give 0 or more{' and below 1' if name in below_one else ''}"
            )
