"""Options of optimizers and learning-rate schedules. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from tutti.config.metric_direction import Direction, Metric
from tutti.config.spec import Duration, Spec, read_options
from tutti.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Options of stochastic gradient descent, ``torch.optim.SGD``.

    The fields are arguments of that class with the same names.

    Raises:
        UsageError: ``lr``, ``momentum`` or ``weight_decay`` is below 0.
        ValueError: ``nesterov`` without momentum, or with dampening.
    """

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
class AdamConfig:
    """Options of ``torch.optim.Adam``; weight decay is added to the gradient.

    The fields are arguments of that class with the same names; ``beta1`` and ``beta2`` are its ``betas``.

    Raises:
        UsageError: a number is below 0, or ``beta1`` or ``beta2`` not below 1.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("lr", "eps", "weight_decay"), below_one=("beta1", "beta2"))


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(AdamConfig):
    """Options of ``torch.optim.AdamW``; weight decay is decoupled (Loshchilov & Hutter 2019, arXiv 1711.05101)."""

    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True)
class LayerWiseConfig:
    """Options that the layer-wise optimizers LARS, LARC, LAMB and NovoGrad have in common.

    Attributes:
        adapt_1d, decay_1d: whether tensors of at most one dimension get layer-wise adaptation and weight decay.
        exclude: name patterns of parameters that get neither, such as ``exclude=embed.*+head.*``.
        fused: whether to use compiled loops on the CPU: ``true`` requires them; none: if they are available.
    """

    adapt_1d: bool = False
    decay_1d: bool = False
    exclude: tuple[str, ...] = ()
    fused: bool | None = None


@dataclass(frozen=True, kw_only=True)
class LARSConfig(LayerWiseConfig):
    """Options of ``tutti.optim.LARS`` (You et al. 2017, arXiv 1708.03888).

    The fields are arguments of that class with the same names.

    Raises:
        UsageError: ``lr``, ``momentum``, ``weight_decay``, ``trust`` or ``eps`` is below 0, or ``momentum`` 1 or more.
        ValueError: ``nesterov`` or ``momentum_correction`` without momentum, or ``momentum_correction`` without
            ``lr_in_momentum``.
    """

    lr: float = 1.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.001
    eps: float = 0.0
    nesterov: bool = False
    denominator: Literal["sum_of_norms", "norm_of_sum"] = "sum_of_norms"
    lr_in_momentum: bool = True
    momentum_correction: bool = False
    cap: bool = False

    def __post_init__(self) -> None:
        _check_momentum(self)
        if self.momentum_correction and (self.momentum <= 0 or not self.lr_in_momentum):
            raise ValueError("momentum_correction needs momentum above 0 and the rate inside it, lr_in_momentum=true")


@dataclass(frozen=True, kw_only=True)
class LARCConfig(LayerWiseConfig):
    """Options of ``tutti.optim.LARC``: SGD with each layer's learning rate capped; ``cap=false`` scales it instead.

    The fields are arguments of that class with the same names.

    Raises:
        UsageError: ``lr``, ``momentum``, ``weight_decay``, ``trust`` or ``eps`` is below 0, or ``momentum`` 1 or more.
        ValueError: ``nesterov`` without momentum.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 0.02
    eps: float = 1e-8
    nesterov: bool = False
    cap: bool = True

    def __post_init__(self) -> None:
        _check_momentum(self)


@dataclass(frozen=True, kw_only=True)
class LAMBConfig(LayerWiseConfig):
    """Options of ``tutti.optim.LAMB`` (You et al. 2020, arXiv 1904.00962).

    The fields are arguments of that class with the same names; ``beta1`` and ``beta2`` are its ``betas``.

    Raises:
        UsageError: ``lr``, ``eps``, ``weight_decay``, ``phi_min`` or a beta is below 0, a beta not below 1, or
            ``phi_max``, ``trust_clip`` or ``max_grad_norm`` neither None nor above 0.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    grad_averaging: bool = True
    phi_min: float = 0.0
    phi_max: float | None = None
    trust_clip: float | None = None
    decoupled_decay: bool = False
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("lr", "eps", "weight_decay", "phi_min"), below_one=("beta1", "beta2"))
        for name in ("phi_max", "trust_clip", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}", remedy="give a number above 0, or none")


@dataclass(frozen=True, kw_only=True)
class NovoGradConfig(LayerWiseConfig):
    """Options of ``tutti.optim.NovoGrad`` (Ginsburg et al. 2019, arXiv 1905.11286).

    The fields are arguments of that class with the same names; ``beta1`` and ``beta2`` are its ``betas``.

    Raises:
        UsageError: ``lr``, ``eps``, ``weight_decay`` or a beta is below 0, or a beta not below 1.
    """

    lr: float = 0.01
    beta1: float = 0.95
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_averaging: bool = False
    bias_correction: bool = False
    normalize: Literal["gradient", "moment"] = "gradient"
    decay: Literal["moment", "step"] = "moment"
    init: Literal["first_norm", "zero"] = "first_norm"

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("lr", "eps", "weight_decay"), below_one=("beta1", "beta2"))


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Options of ``tutti.optim.Muon``: orthogonal steps for matrices, AdamW for the rest.

    The fields are arguments of that class with the same names; ``adam_beta1`` and ``adam_beta2`` are its
    ``adam_betas``, and ``adam`` is its ``adam_names``.

    Attributes:
        adam: name patterns of matrices that AdamW updates; ``adam=none``: no matrix.

    Raises:
        UsageError: a rate, decay, eps, momentum or beta is below 0, the momentum or a beta not below 1, or ``ns_steps``
            not from 1 to 99.
    """

    lr: float = 0.02
    weight_decay: float = 0.0
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    adam_lr: float = 1e-3
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    adam_weight_decay: float = 0.0
    adam: tuple[str, ...] = ("*embed*", "*head*", "*token*", "*position*")

    def __post_init__(self) -> None:
        rates = ("lr", "weight_decay", "adam_lr", "adam_eps", "adam_weight_decay")
        _check(self, at_least_zero=rates, below_one=("momentum", "adam_beta1", "adam_beta2"))
        if not 1 <= self.ns_steps < 100:
            raise UsageError(f"ns_steps is {self.ns_steps}", remedy="give 1 to 99")


@dataclass(frozen=True, kw_only=True)
class ImportedOptimizerConfig:
    """Options of an optimizer class of another package, ``package.module:Class:lr=0.001,key=value``.

    Attributes:
        module: dotted name of the module.
        name: name of the class in this module.
        lr: learning rate.
        options: the other keyword arguments of the class, with their values converted from text.
    """

    module: str
    name: str
    lr: float
    options: Mapping[str, Any]


BuiltInOptimizerConfig: TypeAlias = (
    SGDConfig | AdamConfig | LARSConfig | LARCConfig | LAMBConfig | NovoGradConfig | MuonConfig
)
OptimizerConfig: TypeAlias = BuiltInOptimizerConfig | ImportedOptimizerConfig

Betas: TypeAlias = AdamConfig | LAMBConfig | NovoGradConfig
"""Options with the moments' decay rates ``beta1`` and ``beta2``, and ``eps``."""

OPTIMIZERS: Mapping[str, type[BuiltInOptimizerConfig]] = {
    "sgd": SGDConfig,
    "adam": AdamConfig,
    "adamw": AdamWConfig,
    "lars": LARSConfig,
    "larc": LARCConfig,
    "lamb": LAMBConfig,
    "novograd": NovoGradConfig,
    "muon": MuonConfig,
}


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule:
    """Learning-rate schedule that keeps the initial rate after the warm-up; base class of all schedules.

    Attributes:
        warmup: length of the linear warm-up (``5ep``, ``500st``, ``20000sa``).
        warmup_from: fraction of the initial rate at which the warm-up starts; default: the rate before ``--lr-scale``,
            0 without ``--lr-scale``. The initial rate is that of the optimizer, after ``--lr-scale``.

    Raises:
        UsageError: ``warmup`` is malformed, or ``warmup_from`` below 0.
    """

    warmup: str = "0st"
    warmup_from: float | None = None

    def __post_init__(self) -> None:
        _ = self.warmup_length
        if self.warmup_from is not None:
            _check(self, at_least_zero=("warmup_from",))

    @cached_property
    def warmup_length(self) -> Duration:
        """Length of the learning rate's warm-up, from the option ``warmup`` of the schedule; zero steps without one.

        A ``Duration`` has a ``value`` and a ``unit``: epochs, steps or samples. Raises UsageError if the option is
        malformed.
        """
        return Duration.parse(self.warmup, "warmup")

    @property
    def drops(self) -> tuple[Duration, ...]:
        """Durations from the start of the run after which the schedule drops the learning rate at once.

        A ``Duration`` has a ``value`` and a ``unit``: epochs, steps or samples. Empty here and for all schedules but
        ``StepSchedule``, which returns its milestones.
        """
        return ()


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(ConstantSchedule):
    """Learning-rate schedule: half a cosine from the initial rate to ``final`` times the initial rate.

    The cosine begins after the warm-up and ends with the run. Loshchilov & Hutter 2017, arXiv 1608.03983.

    Attributes:
        final: rate at the end of the run, as a fraction of the initial rate.

    Raises:
        UsageError: ``final`` is below 0, or an option of the warm-up is invalid.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("final",))


@dataclass(frozen=True, kw_only=True)
class LinearSchedule(ConstantSchedule):
    """Learning-rate schedule: a straight line from the initial rate to ``final`` times the initial rate.

    The line begins after the warm-up and ends with the run.

    Attributes:
        final: rate at the end of the run, as a fraction of the initial rate.

    Raises:
        UsageError: ``final`` is below 0, or an option of the warm-up is invalid.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("final",))


@dataclass(frozen=True, kw_only=True)
class StepSchedule(ConstantSchedule):
    """Learning-rate schedule: multiply the rate by ``gamma`` at each milestone, such as ``milestones=30ep+60ep``.

    Attributes:
        milestones: durations from the start of the run; at least one must be given.
        gamma: factor on the rate.

    Raises:
        UsageError: a milestone is malformed, or as ``ConstantSchedule`` raises it.
        ValueError: there are no milestones.
    """

    milestones: tuple[str, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.milestones:
            raise ValueError("step needs milestones=30ep+60ep")
        _ = self.drops

    @cached_property
    def drops(self) -> tuple[Duration, ...]:
        """Durations from the start of the run after each of which the learning rate is multiplied by ``gamma``.

        A ``Duration`` has a ``value`` and a ``unit``: epochs, steps or samples. Raises UsageError if a milestone is
        malformed.
        """
        return tuple(Duration.parse(milestone, "milestones") for milestone in self.milestones)


@dataclass(frozen=True, kw_only=True)
class PolynomialSchedule(ConstantSchedule):
    """Learning-rate schedule: the initial rate times final + (1 - final) · (1 - progress)^power.

    ``progress`` rises from 0 after the warm-up to 1 at the end of the run. With ``final=0`` as
    ``torch.optim.lr_scheduler.PolynomialLR``.

    Attributes:
        power: the exponent; 1 is a line.
        final: rate at the end of the run, as a fraction of the initial rate.

    Raises:
        UsageError: ``power`` or ``final`` is below 0, or as ``ConstantSchedule`` raises it.
    """

    power: float = 2.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("power", "final"))


@dataclass(frozen=True, kw_only=True)
class ExponentialSchedule(ConstantSchedule):
    """Learning-rate schedule: multiply the rate by ``gamma`` after each duration ``every``, such as ``1ep``.

    Attributes:
        gamma: factor on the rate.
        every: the duration; durations count from the start of the run, warm-up included.

    Raises:
        UsageError: ``gamma`` is below 0, ``every`` is malformed, or as ``ConstantSchedule`` raises it.
        ValueError: ``every`` is 0.
    """

    gamma: float = 0.95
    every: str = "1ep"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("gamma",))
        if not self.interval.value > 0:
            raise ValueError("every is 0: give 1ep or 500st")

    @cached_property
    def interval(self) -> Duration:
        """The interval between multiplications of the learning rate by ``gamma``, counted from the start of the run.

        The interval is the option ``every``, as a ``Duration`` with a ``value`` and a ``unit``: epochs, steps or
        samples. Raises UsageError if this option is malformed.
        """
        return Duration.parse(self.every, "every")


@dataclass(frozen=True, kw_only=True)
class WSDSchedule(ConstantSchedule):
    """Warm-up, stable rate, decay: constant until the last ``decay`` of the run, then down to ``final`` times the rate.

    Hu et al. 2024, arXiv 2404.06395, §4.2; Hägele et al. 2024, arXiv 2405.18392, for the shapes.

    Attributes:
        decay: fraction of the run in which the rate falls.
        shape: ``linear``, or ``sqrt``: the rate falls with the square root of the fraction of the decay that has
            passed.
        final: rate at the end, as a fraction of the initial rate.

    Raises:
        UsageError: ``final`` is below 0, or as ``ConstantSchedule`` raises it.
        ValueError: ``decay`` is not above 0 and at most 1.
    """

    decay: float = 0.2
    shape: Literal["linear", "sqrt"] = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("final",))
        if not 0 < self.decay <= 1:
            raise ValueError("decay is a fraction of the run: give a number above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class OneCycleSchedule(ConstantSchedule):
    """Learning-rate schedule: half a cosine up from ``start`` times the rate, then half a cosine down to ``final``.

    Smith & Topin 2018, arXiv 1708.07120; the rates of ``torch.optim.lr_scheduler.OneCycleLR``, whose ``max_lr`` is the
    optimizer's rate here, ``start`` 1 / div_factor and ``final`` start / final_div_factor. The momentum stays.

    Attributes:
        rise: fraction of the run in which the rate rises.
        start: rate of the first step, as a fraction of the optimizer's.
        final: rate of the last step, as a fraction of the optimizer's.

    Raises:
        UsageError: ``start`` or ``final`` is below 0, or as ``ConstantSchedule`` raises it.
        ValueError: a ``warmup`` is given, or ``rise`` is not between 0 and 1.
    """

    rise: float = 0.3
    start: float = 0.04
    final: float = 4e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("start", "final"))
        if self.warmup_length.value:
            raise ValueError("onecycle has a warm-up of its own: give rise=0.3 in place of warmup")
        if not 0 < self.rise < 1:
            raise ValueError("rise is a fraction of the run: give a number between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class PlateauSchedule(ConstantSchedule):
    """Learning-rate schedule: multiply the rate by ``factor`` once evaluations no longer improve a metric.

    The rule and the defaults of ``torch.optim.lr_scheduler.ReduceLROnPlateau``, stepped by each evaluation during the
    run. ``min`` and ``eps`` are multiples of the optimizer's rate, so that they hold for every parameter group;
    PyTorch's ``min_lr`` and ``eps`` are rates, and its ``eps`` is 1e-8 by default.

    Attributes:
        metric: ``loss``, or a held-out metric of the task.
        mode: ``min`` or ``max``, whether lower or higher values are better; ``auto``: as the task declares, else by the
            metric's name.
        factor: factor on the rate at each reduction.
        patience: number of evaluations in a row without a better value that the rate survives; the next one lowers it.
        threshold: least improvement that counts as a better value.
        threshold_mode: ``rel``: ``threshold`` is a fraction of the best value; ``abs``: it is a difference.
        cooldown: number of evaluations after a reduction whose values are not counted.
        min: least rate, as a multiple of the optimizer's.
        eps: least difference between two rates, as a multiple of the optimizer's: a reduction by no more is left out.

    Raises:
        UsageError: ``factor``, ``patience``, ``threshold``, ``cooldown`` or ``min`` is below 0, or as
            ``ConstantSchedule`` raises it.
        ValueError: ``factor`` is not below 1.
    """

    metric: str = "loss"
    mode: Literal["auto", "min", "max"] = "auto"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min: float = 0.0
    eps: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, at_least_zero=("factor", "patience", "threshold", "cooldown", "min", "eps"))
        if self.factor >= 1:
            raise ValueError("factor multiplies the rate: give a number below 1")

    def measured(self, declared: Mapping[str, Direction] | None = None) -> Metric:
        """Return the held-out metric that the plateau schedule follows, and whether higher values of it are better.

        Args:
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; None: the
                task declares nothing.

        Raises:
            UsageError: none of ``mode``, ``declared`` and the metric's name tells which values are better.
        """
        text = self.metric if self.mode == "auto" else f"{self.metric}:{self.mode}"
        return Metric.parse(text, "--schedule plateau", declared)


SCHEDULES: Mapping[str, type[ConstantSchedule]] = {
    "constant": ConstantSchedule,
    "cosine": CosineSchedule,
    "linear": LinearSchedule,
    "step": StepSchedule,
    "polynomial": PolynomialSchedule,
    "exponential": ExponentialSchedule,
    "wsd": WSDSchedule,
    "onecycle": OneCycleSchedule,
    "plateau": PlateauSchedule,
}

WHOLE_RUN = (CosineSchedule, LinearSchedule, PolynomialSchedule, WSDSchedule, OneCycleSchedule)
"""Schedules that decrease over the whole run, whose length they must know."""


def check_optimizer(text: str) -> OptimizerConfig:
    """Parse ``--optimizer``, ``name:key=value,…`` or ``package.module:Class:key=value,…``, to a dataclass of options.

    The first form names ``sgd``, ``adam``, ``adamw``, ``lars``, ``larc``, ``lamb``, ``novograd`` or ``muon``, as in
    ``sgd:lr=0.1,momentum=0.9``. The second is a class of another package, such as ``package.module:Class:lr=0.001``;
    its module is not imported here.

    Args:
        text: value of the option.

    Returns:
        The options: ``SGDConfig``, ``AdamConfig``, ``AdamWConfig``, ``LARSConfig``, ``LARCConfig``, ``LAMBConfig``,
        ``NovoGradConfig`` or ``MuonConfig`` by the name, ``ImportedOptimizerConfig`` for a class of another package.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), a value has the wrong type or
            is out of range, or an imported class has no learning rate of at least 0.
    """
    module, _, rest = text.strip().partition(":")
    name, _, options = rest.partition(":")
    if "." in module or (name.isidentifier() and "=" not in name):
        return _imported(text, module.strip(), name.strip(), options)
    spec = Spec.parse(text, "--optimizer")
    return spec.build(spec.choose(OPTIMIZERS, "optimizer"), "--optimizer")


def _imported(text: str, module: str, name: str, options: str) -> ImportedOptimizerConfig:
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(
            f"cannot read '{text}'", where="--optimizer", remedy="write package.module:Class:lr=0.001,key=value"
        )
    values = {key: _value(value) for key, value in read_options(options, "--optimizer", "lr=0.001,key=value").items()}
    rate = values.pop("lr", None)
    if not isinstance(rate, int | float) or not rate >= 0:
        raise UsageError(
            f"{name} is given no learning rate",
            where=f"--optimizer {text}",
            remedy=f"write {module}:{name}:lr=0.001",
        )
    return ImportedOptimizerConfig(module=module, name=name, lr=float(rate), options=values)


def _value(text: str) -> Any:
    """Return the number, truth value, None, text, or tuple of these (``0.9+0.99``) that ``text`` states."""
    named: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return tuple(map(_value, text.split("+"))) if "+" in text else text


@dataclass(frozen=True)
class OptimizerChoice:
    """Optimizer of a run: the text of ``--optimizer`` and the options parsed from it.

    Attributes:
        text: ``--optimizer`` as the user wrote it.
        options: options parsed from ``text``.
    """

    text: str
    options: OptimizerConfig = field(hash=False)

    @property
    def name(self) -> str:
        """Name of the optimizer as ``--optimizer`` has it, such as ``adam``; of another package, the class's name.

        >>> OptimizerChoice.parse("adam:lr=0.1").name, OptimizerChoice.parse("torch.optim:RMSprop:lr=0.1").name
        ('adam', 'RMSprop')
        """
        if isinstance(self.options, ImportedOptimizerConfig):
            return self.options.name
        return next(name for name, kind in OPTIMIZERS.items() if kind is type(self.options))

    @classmethod
    def parse(cls, text: str) -> OptimizerChoice:
        """Parse ``--optimizer``, such as ``sgd:lr=0.1,momentum=0.9``, and return its options together with the text.

        Args:
            text: ``sgd``, ``adam``, ``adamw``, ``lars``, ``larc``, ``lamb``, ``novograd`` or ``muon`` with options, or
                ``package.module:Class:lr=0.001,key=value`` for a class of another package.

        Returns:
            An ``OptimizerChoice``: ``text`` as given, and the parsed ``options``, a dataclass such as ``AdamWConfig``,
            or ``ImportedOptimizerConfig`` for a class of another package.

        Raises:
            UsageError: the text is malformed, a name or key is unknown (naming the nearest), a value has the wrong type
                or is out of range, or an imported class has no learning rate of at least 0.
        """
        return cls(text, check_optimizer(text))


def check_schedule(text: str) -> ConstantSchedule:
    """Parse ``--schedule``, the learning-rate schedule: ``name:key=value,…``, such as ``cosine:warmup=5ep``.

    Args:
        text: ``constant``, ``cosine``, ``linear``, ``step``, ``polynomial``, ``exponential``, ``wsd``, ``onecycle`` or
            ``plateau``, with options.

    Returns:
        The schedule's options, a frozen dataclass such as ``CosineSchedule`` with a field for each key (all have
        ``warmup``); ``ConstantSchedule`` is the base class of all schedules, and itself ``constant``.

    Raises:
        UsageError: the text is malformed, a name or key is unknown (naming the nearest), or a value has the wrong type
            or is out of range.
    """
    spec = Spec.parse(text, "--schedule")
    return spec.build(spec.choose(SCHEDULES, "schedule"), "--schedule")


def _check(config: Any, at_least_zero: tuple[str, ...] = (), below_one: tuple[str, ...] = ()) -> None:
    for name in (*at_least_zero, *below_one):
        value = getattr(config, name)
        if not value >= 0 or (name in below_one and not value < 1):
            raise UsageError(
                f"{name} is {value}", remedy=f"give 0 or more{' and below 1' if name in below_one else ''}"
            )


def _check_momentum(config: LARSConfig | LARCConfig) -> None:
    _check(config, at_least_zero=("lr", "weight_decay", "trust", "eps"), below_one=("momentum",))
    if config.nesterov and config.momentum <= 0:
        raise ValueError("nesterov=true needs momentum above 0")
