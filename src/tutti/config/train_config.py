"""Options of ``tutti train``; every field is a flag, a TOML key and a Python argument. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from tutti.config.averaging import Averaging
from tutti.config.best import BestMetric
from tutti.config.bounds import check_above_zero, check_least
from tutti.config.engine_config import (
    WAIT,
    EngineConfig,
    LocalEngineConfig,
    check_devices,
    parse_device_range,
    parse_engine,
    parse_seconds,
)
from tutti.config.gradient_noise import MultiplicativeNoise, check_noise
from tutti.config.growth import BatchGrowth
from tutti.config.init_map import InitMap
from tutti.config.logger_config import LoggerOptions, parse_loggers
from tutti.config.loss_scale_config import LossScaleConfig, choose_loss_scale
from tutti.config.lr_rule import NoRule, check_growth, check_rule
from tutti.config.metric_direction import Direction, Metric
from tutti.config.module_config import (
    BatchNormConfig,
    Checkpointing,
    CompileChoice,
    check_batch_norm,
    check_checkpointing,
    check_compile,
)
from tutti.config.named_changes import NamedChanges
from tutti.config.optimizer_config import ConstantSchedule, ImportedOptimizerConfig, OptimizerChoice, check_schedule
from tutti.config.slowness import Slowness
from tutti.config.spec import Duration
from tutti.config.strategy_choice import StrategyChoice, parse_strategy
from tutti.config.training_target import TrainingTarget, split_target
from tutti.config.watchdog_limits import TIMEOUT, WatchdogLimits, check_timeout
from tutti.errors import UsageError, counted


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Options of one training run; each attribute is the option of ``tutti train`` with the same name.

    The constructor raises UsageError for a number out of range and for options that exclude each other. Texts such as
    ``name:key=value`` are parsed by properties, ``optimizer_choice`` for ``optimizer``: most of them raise UsageError
    for a malformed text only when they are read.

    Attributes:
        data: folder, file or hub name that the task reads.
        model: model of the task, ``name:key=value``; default: the first.
        augment: random crops and flips, if the task has them.
        batch_norm: statistics over a worker; or ``ghost:size=32``, or sync.
        data_workers: loader processes of each device.
        strategy: how devices share the work: ddp, fsdp, tp, pp …
        optimizer: ``name:key=value``.
        schedule: learning-rate schedule, ``name:key=value``.
        lr_scale: learning-rate rule for this batch: linear, sqrt or adam_sqrt, ``linear:base_batch=256``; or adascale.
        workers: shares of a batch, which decide the result; default: devices.
        devices: processes or GPUs: a number, 2:8 or auto (all GPUs).
        on: engine: local, ``ssh:hosts=a:2+b:2`` or -H, ray, slurm.
        wait: time to wait for another device when one is lost.
        batch_size: samples in one *global* batch, over all workers.
        batch_growth: grow the batch, not lower the rate: ``milestones=9ep,factor=5``.
        micro_batch: most samples in one forward; default: no limit.
        identical_batches: mistake on purpose: every worker draws worker 0's samples.
        epochs, steps, samples: length, at most one of them; default: 3 epochs.
        duration: length of training as 3ep, 500st or 20000sa.
        until: held-out value that ends the run: accuracy=0.93, loss<=0.2.
        patience: evaluations without a better value that end the run.
        regime_batch: update as often as with this batch; milestones, warm-up too.
        precision: fp32, bf16, fp16 or fp8 (fp32 weights), or fp64.
        loss_scale: a number, or ``dynamic:init=65536``; default: dynamic for fp16.
        channels_last: memory layout of images; default: on for image tasks.
        compile: mode of torch.compile; alone: default.
        activation_checkpointing: recompute activations: blocks or selective.
        clip: scale the whole gradient down to this norm, if it is larger.
        gradient_noise: smaller batch's noise: ``multiplicative:base_batch=512``.
        noise_every: steps between measurements of gradient noise; alone: 50.
        ema: decay of the weights' average: 0.999 or 0.999:warmup.
        eval_every: interval of evaluations: 1ep, 100st …; none: at the end.
        checkpoint_every: interval of saves: 1ep, 100st …; none: if preempted.
        keep: number of newest checkpoints to keep.
        keep_best: also keep the best by loss, accuracy, NAME:min or NAME:max.
        init_from: warm start from a run, a checkpoint or .safetensors files.
        init_map: allowed differences of these weights: new=head.*,unused=lm_*.
        resume: run to continue; alone: the newest one of this configuration.
        change: changes in a resume: lr, batch_size, data, seed, schedule.
        max_restarts: restarts from the last checkpoint after a failure.
        seed: seed of all random numbers.
        reproducible: bit-identical weights on any number of devices.
        slow: delay ranks or workers on purpose: rank=1,factor=3.
        threads: CPU threads a process; default: cores ÷ local processes.
        device: auto, cpu or an accelerator such as cuda.
        max_nonfinite: steps skipped in a row that end the run.
        timeout: seconds that ranks wait for each other.
        start_timeout, step_timeout, save_timeout: seconds without progress that end a rank, 0 for never; default: 1800,
            TIMEOUT, 1800.
        runs: folder of run directories.
        out: this run's directory; default: ``RUNS/TASK-TIME``.
        overwrite: allow ``out`` to hold an older run, which it replaces.
        log_every: steps between lines without a terminal.
        tensorboard: write TensorBoard events into the run directory.
        logger: also log to wandb, mlflow, trackio: wandb:project=NAME.
        profile: time STEPS steps from FIRST on, FIRST:STEPS; alone: 10:5.
        trace: draw a timeline of all devices, FIRST:STEPS; alone: 10:3.
        machine: file of tutti bench, for MFU.
    """

    data: str | None = None
    model: str | None = None
    augment: bool = False
    batch_norm: str = "worker"
    data_workers: int = 0
    strategy: str = "mirrored"
    optimizer: str = "adam:lr=0.001"
    schedule: str = "constant"
    lr_scale: str = "none"
    workers: int | None = None
    devices: str = "auto"
    on: str | None = None
    wait: str = f"{WAIT:g}s"
    batch_size: int = 64
    batch_growth: str | None = None
    micro_batch: int | None = None
    identical_batches: bool = False
    epochs: float | None = None
    steps: int | None = None
    samples: int | None = None
    duration: str | None = None
    until: str | None = None
    patience: int | None = None
    regime_batch: int | None = None
    precision: Literal["fp32", "bf16", "fp16", "fp64", "fp8"] = "fp32"
    loss_scale: str | None = None
    channels_last: bool | None = None
    compile: str = "none"
    activation_checkpointing: str = "none"
    clip: float | None = None
    gradient_noise: str = "none"
    noise_every: int | None = None
    ema: str | None = None
    eval_every: str = "1ep"
    checkpoint_every: str = "1ep"
    keep: int = 2
    keep_best: str | None = None
    init_from: str | None = None
    init_map: str | None = None
    resume: str | None = None
    change: str | None = None
    max_restarts: int = 0
    seed: int = 0
    reproducible: bool = False
    slow: str | None = None
    threads: int | None = None
    device: str = "auto"
    max_nonfinite: int = 10
    timeout: float = TIMEOUT
    start_timeout: float | None = None
    step_timeout: float | None = None
    save_timeout: float | None = None
    runs: str = "runs"
    out: str | None = None
    overwrite: bool = False
    log_every: int = 50
    tensorboard: bool = False
    logger: str | None = None
    profile: str | None = None
    trace: str | None = None
    machine: str | None = None

    def __post_init__(self) -> None:
        check_least(
            {
                "--workers": self.workers,
                "--batch-size": self.batch_size,
                "--micro-batch": self.micro_batch,
                "--steps": self.steps,
                "--samples": self.samples,
                "--patience": self.patience,
                "--regime-batch": self.regime_batch,
                "--noise-every": self.noise_every,
                "--threads": self.threads,
                "--max-nonfinite": self.max_nonfinite,
                "--log-every": self.log_every,
            }
        )
        check_least(
            {"--seed": self.seed, "--max-restarts": self.max_restarts, "--data-workers": self.data_workers}, least=0
        )
        check_above_zero({"--epochs": self.epochs, "--clip": self.clip})
        check_timeout(self.timeout, "--timeout")
        self._check_engine()
        if self.reproducible and self.threads not in (None, 1):
            raise UsageError(
                f"--reproducible cannot be combined with --threads {self.threads}",
                why="the order of a sum inside one operation depends on the number of threads",
                remedy="leave out one of the two",
            )
        if self.regime_batch is not None and self.length.unit == "st":
            raise UsageError(
                "--regime-batch changes nothing in a run whose length is in steps",
                remedy="give --epochs or --samples, or leave it out",
            )
        if self.regime_batch is not None and self.lr_rule.adaptive:
            raise UsageError(
                "--regime-batch cannot be combined with --lr-scale adascale",
                why="adascale counts the run's length in steps of one worker's batch",
                remedy="leave out one of the two",
            )
        self._check_windows()
        for option in ("limits", "length", "eval_interval", "checkpoint_interval", "averaging", "growth", "slowness"):
            getattr(self, option)
        _ = self.loggers
        _ = self.initial_map
        if self.change is not None and self.resume is None:
            raise UsageError("--change needs --resume", remedy="add --resume, or leave --change out")
        _ = self.changes
        if self.target_text is not None:
            split_target(self.target_text)
        plateau = self.schedule.partition(":")[0].strip() == "plateau"
        for name, given in (
            ("until", self.target_text is not None),
            ("patience", self.patience is not None),
            ("schedule plateau", plateau),
        ):
            if given and self.eval_interval is None:
                raise UsageError(
                    f"--{name} needs evaluations during the run, and --eval-every is none",
                    remedy="give --eval-every, such as 1ep or 100st, or leave one of the two out",
                )

    @property
    def device_range(self) -> tuple[int, int] | None:
        """Least and most devices, from a range such as ``--devices 2:8``; None for a plain number or ``auto``.

        Raises UsageError if the range is malformed.
        """
        return parse_device_range(self.devices)

    def engine(self) -> EngineConfig | None:
        """Return the options of the engine that starts the ranks, from ``--on``.

        Returns:
            A ``LocalEngineConfig`` (processes of this node), ``SshEngineConfig``, ``RayEngineConfig`` or
            ``SlurmEngineConfig``. Without ``--on``, or for ``none``: a ``LocalEngineConfig`` for a range of devices,
            such as ``2:8``, which needs an engine, else None.

        Raises:
            UsageError: the text of ``--on``, or the range of devices, is malformed.
        """
        if self.on is None or self.on == "none":
            return None if self.device_range is None else LocalEngineConfig()
        return parse_engine(self.on)

    def _check_engine(self) -> None:
        """Raise UsageError if ``--on``, ``--wait`` and a range of devices are malformed or do not go together."""
        check_devices(self.devices, "--devices")
        engine = self.engine()
        parse_seconds(self.wait, "--wait")
        if engine is not None and self.devices == "auto":
            raise UsageError(f"--on {self.on} needs --devices", remedy="say how many, such as --devices 4")
        if self.device_range is not None and self.workers is None and self.resume is None:
            raise UsageError(
                f"--devices {self.devices} needs --workers",
                why="the number of workers is part of the result, and by default it is the number of devices",
                remedy=f"add --workers, such as --workers {self.device_range[1]}",
            )

    @cached_property
    def strategy_choice(self) -> StrategyChoice:
        """The strategy with its options, from ``--strategy``.

        A ``StrategyChoice``: ``name`` of the strategy, ``row`` (its capabilities), ``layout`` and ``sync`` (options of
        the model layout and of gradient synchronisation). A configuration that is sent to another process takes the
        object with it. Raises UsageError for an unknown strategy, option or value.
        """
        return parse_strategy(self.strategy)

    @cached_property
    def lr_rule(self) -> NoRule:
        """The rule by which the learning rate follows the batch size, from ``--lr-scale``.

        ``NoRule`` is the base class of all rules, and itself the rule ``none``; the rule's method ``factor`` returns
        the factor on the learning rate. Raises UsageError if the text is malformed.
        """
        return check_rule(self.lr_scale)

    @cached_property
    def optimizer_choice(self) -> OptimizerChoice:
        """The optimizer from ``--optimizer``, or its default: the attributes ``text`` and ``options``.

        ``text`` is ``name:key=value,…``; ``options`` is parsed from it, a dataclass such as ``AdamWConfig``. Raises
        UsageError if the text is malformed.
        """
        return OptimizerChoice.parse(self.optimizer)

    @cached_property
    def lr_schedule(self) -> ConstantSchedule:
        """The options of the learning-rate schedule, from ``--schedule``, such as a ``CosineSchedule``.

        ``ConstantSchedule`` is the base class of all schedules, and itself ``constant``. Raises UsageError if the text
        is malformed.
        """
        return check_schedule(self.schedule)

    @cached_property
    def batch_norm_options(self) -> BatchNormConfig:
        """The samples over which batch norm takes its statistics, from ``--batch-norm``.

        A ``WorkerBatchNormConfig`` (one micro-batch), a ``GhostBatchNormConfig`` (``size`` samples) or a
        ``SyncBatchNormConfig`` (the global batch). Raises UsageError if the text is malformed.
        """
        return check_batch_norm(self.batch_norm)

    @cached_property
    def compile_choice(self) -> CompileChoice | None:
        """Mode and options of ``torch.compile``, from ``--compile``; None without it, and for ``none``.

        A ``CompileChoice``: ``mode``, such as ``default``, and ``options``, whose attribute ``backend`` names the
        compiler backend.

        Raises UsageError if the text is malformed, or combined with ``--reproducible``.
        """
        return check_compile(self.compile, self.reproducible)

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """The modules whose activations are recomputed in backward, from ``--activation-checkpointing``.

        ``Blocks`` with the interval ``every`` of the blocks to recompute, its subclass ``Selective``, which keeps
        results of expensive operators, or None for none. Raises UsageError if the text is malformed or conflicts with
        ``--compile``.
        """
        return check_checkpointing(self.activation_checkpointing, compiled=self.compile_choice is not None)

    @cached_property
    def loss_scale_options(self) -> LossScaleConfig | None:
        """The options of the loss scale: from ``--loss-scale``, else dynamic for fp16, else None for no loss scale.

        A ``ConstantLossScale`` with its ``value``, or a ``DynamicLossScale``, as of ``torch.amp.GradScaler``. Raises
        UsageError if the text is malformed, or given with a precision other than fp16.
        """
        return choose_loss_scale(self.loss_scale, self.precision)

    @cached_property
    def noise(self) -> MultiplicativeNoise | None:
        """The noise that is put into the gradient, from ``--gradient-noise``; None without it, and for ``none``.

        A ``MultiplicativeNoise`` object: random weights of the samples' losses make the gradient as noisy as the
        gradient of a batch of ``base_batch`` samples. Raises UsageError if the text is malformed, or conflicts with the
        batch size or ``--lr-scale adascale``.
        """
        return check_noise(self.gradient_noise, self.batch_size, self.lr_rule.adaptive)

    @cached_property
    def limits(self) -> WatchdogLimits:
        """Seconds without progress after which the watchdog ends a rank, from three options of ``tutti train``.

        ``start`` (``--start-timeout``, default 1800) holds until the first step is done, in one batch of an evaluation
        and at the end of the run; ``step`` (``--step-timeout``, default None: the collectives' timeout) in the rank's
        own work of a step; ``save`` (``--save-timeout``, default 1800) while a checkpoint or a record is written. 0
        stands for no limit. Raises UsageError for a limit that is neither 0 nor at least 1.
        """
        return WatchdogLimits.make(self.start_timeout, self.step_timeout, self.save_timeout)

    @property
    def watched(self) -> bool:
        """Whether ``--start-timeout``, ``--step-timeout`` or ``--save-timeout`` sets a limit above 0.

        Then even a run of a single process gets a watchdog, which ends a rank that makes no progress for longer than a
        limit.
        """
        return any((self.start_timeout, self.step_timeout, self.save_timeout))

    @cached_property
    def length(self) -> Duration:
        """The length of training, from ``--duration``, ``--steps``, ``--samples`` or ``--epochs``.

        A ``Duration`` with ``value`` (a number) and ``unit`` (``ep`` epochs, ``st`` steps or ``sa`` samples); default:
        3 epochs. Raises UsageError if more than one of these options is given, or the given one is malformed.
        """
        given = [name for name in ("epochs", "steps", "samples", "duration") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(map(_flag, given))} exclude each other", remedy="give one of them")
        if self.duration is not None:
            duration = Duration.parse(self.duration, "--duration")
            if duration.value <= 0:
                raise UsageError(f"--duration is {self.duration}", remedy="give more than 0")
            return duration
        if self.steps is not None:
            return Duration(self.steps, "st")
        if self.samples is not None:
            return Duration(self.samples, "sa")
        return Duration(self.epochs if self.epochs is not None else 3.0, "ep")

    @cached_property
    def windows(self) -> Mapping[str, tuple[int, int]]:
        """The training steps to record, from ``--profile`` and ``--trace``: first step, from 1, and number of steps.

        A mapping with the keys ``profile`` and ``trace`` to such pairs; an option that is not given has no entry.
        Raises UsageError if a value is not ``FIRST:STEPS``.
        """
        given = {"profile": self.profile, "trace": self.trace}
        return {name: _window(name, text) for name, text in given.items() if text is not None}

    def _check_windows(self) -> None:
        """Raise UsageError if steps to profile or trace lie beyond the end of the run."""
        windows = self.windows
        # A resumed run may be nearly over, and adascale counts steps of another batch.
        if self.length.unit != "st" or self.resume or self.lr_rule.adaptive:
            return
        for name, (first, steps) in windows.items():
            needed = first + steps - 1
            if needed > self.length.value:
                raise UsageError(
                    f"--{name} {getattr(self, name)} needs {counted(needed, 'step')}, and the run has "
                    f"{self.length.value:g}",
                    remedy=f"write --{name} FIRST:STEPS within the run",
                )

    @cached_property
    def eval_interval(self) -> Duration | None:
        """The interval between evaluations on held-out data, from ``--eval-every``; None for ``none``.

        A ``Duration`` with ``value`` (a number) and ``unit`` (``ep`` epochs, ``st`` steps or ``sa`` samples). Raises
        UsageError if the option is malformed.
        """
        return _interval("--eval-every", self.eval_every)

    @cached_property
    def checkpoint_interval(self) -> Duration | None:
        """The interval between checkpoints, from ``--checkpoint-every``; None for ``none``.

        A ``Duration`` with ``value`` (a number) and ``unit`` (``ep`` epochs, ``st`` steps or ``sa`` samples). Raises
        UsageError if the option is malformed.
        """
        return _interval("--checkpoint-every", self.checkpoint_every)

    @cached_property
    def averaging(self) -> Averaging | None:
        """Decay and warm-up of the weights' moving average, from ``--ema``; None without it or for ``none``.

        An ``Averaging``: ``decay`` is between 0 and 1; ``warmup`` says whether the decay rises from a smaller value at
        first. Raises UsageError if the text is malformed.
        """
        return None if self.ema is None or self.ema == "none" else Averaging.parse(self.ema)

    @cached_property
    def initial_map(self) -> InitMap | None:
        """Renames and allowed differences of initial weights of another model, from ``--init-map``; None without it.

        An ``InitMap`` with tuples of texts: ``rename`` (items ``OLD:NEW``, beginnings of names), and patterns of names
        of tensors that may be ``new``, ``unused`` or ``reshaped``.

        Raises UsageError if ``--init-map`` is malformed, or there is no ``--init-from``.
        """
        return None if self.init_map is None else InitMap.of(self.init_map, self.init_from, "--init-map")

    @cached_property
    def changes(self) -> NamedChanges:
        """Names of settings in which a resumed run may differ from its checkpoint, from ``--change``.

        ``names`` is a frozenset of texts, such as ``lr`` and ``batch_size``; empty without the option. Raises
        UsageError if a setting does not exist or cannot be changed (``NamedChanges.check``).
        """
        named = NamedChanges.parse(self.change)
        chosen = self.optimizer_choice.options if named.names else None
        if isinstance(chosen, ImportedOptimizerConfig):
            named.check({"lr", *chosen.options}, "--change")
        elif chosen is not None:
            named.check({option.name for option in fields(chosen)}, "--change")
        return named

    @cached_property
    def growth(self) -> BatchGrowth | None:
        """The schedule by which the global batch grows, from ``--batch-growth``; None without it.

        A ``BatchGrowth`` has the epochs at whose start the batch grows (``milestones``), the ``factor`` by which it is
        multiplied, and the ``largest`` batch in samples.

        Raises:
            UsageError: the option is malformed, or conflicts with the batch size, ``--lr-scale``, ``--gradient-noise``,
                ``--regime-batch`` or the schedule's milestones.
        """
        if self.batch_growth is None or self.batch_growth == "none":
            return None
        growth = BatchGrowth.parse(self.batch_growth)
        growth.most(self.batch_size, None)
        check_growth(self.lr_rule, self.noise)
        if self.regime_batch is not None:
            raise UsageError(
                "--batch-growth cannot be combined with --regime-batch",
                why="one is for fewer updates, the other for as many as with a small batch",
                remedy="leave out one of the two",
            )
        for duration in self.lr_schedule.drops:
            if duration.unit == "ep" and duration.value in growth.epochs:
                raise UsageError(
                    f"at {duration} the batch grows and the schedule lowers the rate",
                    why="the larger batch replaces a lower rate: the noise would fall twice",
                    remedy="take --schedule constant, or other milestones",
                )
        return growth

    @cached_property
    def slowness(self) -> tuple[Slowness, ...]:
        """The simulated delays of ranks or logical workers, from ``--slow``; empty without it.

        A logical worker is a fixed share of the global batch. Each ``Slowness`` has the numbers of the delayed ranks
        (``rank``) or logical workers (``worker``), ``factor`` (on the seconds of their computing) and ``ms``
        (milliseconds added in each step). Raises UsageError if the text is malformed.
        """
        return () if self.slow is None or self.slow == "none" else Slowness.parse(self.slow)

    @cached_property
    def loggers(self) -> tuple[LoggerOptions, ...]:
        """The services and files that get the run's metrics besides the run directory, from ``--logger``.

        Options such as a ``WandbOptions``; empty without the option. Raises UsageError if the text is malformed.
        """
        return () if self.logger is None or self.logger == "none" else parse_loggers(self.logger)

    def best(self, declared: Mapping[str, Direction] | None = None) -> BestMetric | None:
        """Return the metric that selects the best checkpoint, and its direction; None without ``--keep-best``.

        Args:
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; None: the
                task declares nothing.

        Returns:
            A ``BestMetric``: ``metric``, the name, and ``more``, whether a higher value is better.

        Raises:
            UsageError: the option is malformed, or neither the option, ``declared`` nor the metric's name decides the
                direction.
        """
        if self.keep_best is None or self.keep_best == "none":
            return None
        return BestMetric.parse(self.keep_best, declared=declared)

    def target(self, declared: Mapping[str, Direction] | None = None) -> TrainingTarget | None:
        """Return the metric, its direction and the held-out value at which training ends; None without ``--until``.

        Args:
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; None: the
                task declares nothing.

        Returns:
            A ``TrainingTarget``: ``metric``, which has a ``name`` and ``higher``, whether a higher value is better; and
            ``value``, the float to reach.

        Raises:
            UsageError: the option is malformed, neither the option, ``declared`` nor the metric's name decides the
                direction, or ``<=`` or ``>=`` in the option contradicts ``declared`` or the name.
        """
        return None if self.target_text is None else TrainingTarget.parse(self.target_text, declared=declared)

    @property
    def target_text(self) -> str | None:
        """The target of ``--until`` as text, such as ``accuracy=0.93``; None without the option, and for ``none``."""
        return None if self.until == "none" else self.until

    def watched_metric(self, declared: Mapping[str, Direction] | None = None) -> Metric | None:
        """Return the held-out metric that may end the run; None if neither ``--until`` nor ``--patience`` is given.

        It is the metric of ``--until``; with ``--patience`` alone that of ``--keep-best``, else the held-out loss.

        Args:
            declared: name of a metric → ``lower`` or ``higher``, the better values as the task declares them; None: the
                task declares nothing.

        Returns:
            A ``Metric``: ``name``, and ``higher``, whether a higher value is better.

        Raises:
            UsageError: the option that names the metric is malformed, or neither the option, ``declared`` nor the
                metric's name decides the direction.
        """
        target, best = self.target(declared), self.best(declared)
        if target is not None:
            return target.metric
        if self.patience is None:
            return None
        return Metric("loss", higher=False) if best is None else Metric(best.metric, best.more)


def _window(name: str, text: str) -> tuple[int, int]:
    """Parse ``FIRST:STEPS``. Raises UsageError."""
    first, colon, steps = text.partition(":")
    if not (colon and first.isdecimal() and steps.isdecimal() and int(first) and int(steps)):
        raise UsageError(
            f"--{name} is '{text}'", remedy="write FIRST:STEPS, such as 10:5 for 5 steps from the tenth on"
        )
    return int(first), int(steps)


def _interval(flag: str, text: str) -> Duration | None:
    """Parse an interval, or ``none``. Raises UsageError."""
    if text == "none":
        return None
    duration = Duration.parse(text, flag)
    if duration.value <= 0:
        raise UsageError(f"{flag} is 0", remedy="give 1ep, 100st …, or none")
    return duration


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
