"""The steps that a plan may take: measured in runs, predicted, or refused with the reason."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tutti.config.layout_config import PipelineConfig
from tutti.config.strategy_choice import parse_strategy
from tutti.errors import UsageError, counted
from tutti.planning.device_plan import PlannedStep
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.planned_run import PlannedRun, mesh_extents
from tutti.planning.run_evidence import RunEvidence, target_interval
from tutti.planning.scaling_laws import Array

_OPTIONS = ("micro_batch", "activation_checkpointing")
"""Options of a run that are part of a plan, besides devices, batch and strategy."""


@dataclass
class PlanCandidates:
    """Training steps that ``tutti plan`` compares, and counts of the plans that it has left out.

    Attributes:
        steps: measured and predicted steps.
        refused: number of plans that cannot be made, by the reason in words.
        remedies: ways out of these reasons, each once, as keys.
        lacking: name of a strategy → (fewest bytes that a device lacks, number of plans, bytes by kind of the plan that
            lacks fewest), over its plans that do not fit into memory.
        rests: sources of the steps' seconds, one line of text each.
        guesses: guessed numbers, one line of text each.
        searched: number of plans that were looked at.
        evaluated: number of them whose step was simulated; a lower bound rules the others out.
    """

    steps: list[PlannedStep] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    remedies: dict[str, None] = field(default_factory=dict)
    lacking: dict[str, tuple[float, int, Mapping[str, float]]] = field(default_factory=dict)
    rests: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)
    searched: int = 0
    evaluated: int = 0

    def lack(self, strategy: str, memory: Mapping[str, float], room: float) -> None:
        """Count a plan that the search leaves out because it does not fit into the memory of a device.

        Args:
            strategy: name of the plan's strategy, under which it is counted in the attribute ``lacking``.
            memory: bytes on the fullest device of the plan by kind, with ``total``.
            room: bytes of a device.
        """
        short = memory["total"] - room
        least, number, kept = self.lacking.get(strategy, (math.inf, 0, memory))
        self.lacking[strategy] = min(least, short), number + 1, memory if short < least else kept

    def refusals(self) -> dict[str, int]:
        """Return the reasons for which the search left plans out, each with the number of these plans.

        Returns:
            Text → number of plans. A text begins with the strategy's name, as in ``pipeline: REASON``. Plans that do
            not fit into a device's memory are one text for each strategy, which states the fewest GiB that a device
            lacks, and of that plan the kind of bytes that takes most.
        """
        short = {_short_words(name, least, memory): n for name, (least, n, memory) in self.lacking.items()}
        return {**self.refused, **short}

    def refusal_lines(self) -> list[str]:
        """Return one line for each reason: the strategies of the plans that it rules out, the reason, their number.

        >>> PlanCandidates(refused={"tensor: no link": 2, "mirrored: no link": 3}).refusal_lines()
        ['tensor, mirrored: no link (5 choices)']
        """
        by_reason: dict[str, dict[str, int]] = {}
        for text, number in self.refusals().items():
            strategy, _, reason = text.partition(": ")
            by_reason.setdefault(reason, {})[strategy] = number
        return [
            f"{', '.join(numbers)}: {reason} ({counted(sum(numbers.values()), 'choice')})"
            for reason, numbers in by_reason.items()
        ]

    def refuse(self, strategy: str, error: UsageError) -> None:
        """Count a plan that the search leaves out because its strategy or options cannot be carried out or simulated.

        Adds 1 to the entry of ``refused`` whose key is the text ``STRATEGY: REASON``, and the way out to ``remedies``.

        Args:
            strategy: name of the plan's strategy.
            error: the refusal; plans of one strategy and reason are counted together.
        """
        text = f"{strategy}: {error.what}"
        self.refused[text] = self.refused.get(text, 0) + 1
        self.remedies |= {error.remedy: None} if error.remedy else {}


def _short_words(strategy: str, least: float, memory: Mapping[str, float]) -> str:
    """Say how much memory a device lacks, and which kind of bytes takes most of it.

    >>> _short_words("mirrored", 2.0**30, {"optimizer": 6.0 * 2**30, "activations": 2.0**30, "total": 7.0 * 2**30})
    'mirrored: 1 GiB short at the least, where optimizer takes most, 6 of 7 GiB'
    """
    kind, most = max(((name, size) for name, size in memory.items() if name != "total"), key=lambda item: item[1])
    least, most, total = (size / (1 << 30) for size in (least, most, memory["total"]))
    return f"{strategy}: {least:.2g} GiB short at the least, where {kind} takes most, {most:.2g} of {total:.2g} GiB"


def is_single_update(strategy: str) -> bool:
    """Return whether all logical workers of a strategy make one update a step together, from their summed gradients.

    Only then does E(B), the samples to the target at a global batch of B samples, depend on the batch alone and not on
    the number of workers, which are fixed shares of the global batch.

    Args:
        strategy: text of ``--strategy``; UsageError for an unknown strategy or option.

    >>> is_single_update("mirrored"), is_single_update("local_sgd:period=4")
    (True, False)
    """
    return parse_strategy(strategy).row.single_update


def measured_steps(runs: Sequence[RunEvidence]) -> list[PlannedStep]:
    """Return the step times that runs measured, one entry for each combination of devices, batch, strategy and options.

    Runs without ``step_seconds``, such as runs of fewer than ten recorded steps, are left out. Micro-batch and
    activation checkpointing are the only options by which entries are distinguished. For strategies whose logical
    workers do not make one common update a step, such as ``local_sgd``, an entry is left out if none of its runs
    reached its target.

    Args:
        runs: finished runs of one task.

    Returns:
        Entries sorted by devices, batch and strategy. Each has ``seconds``, the seconds of a step (median over its
        runs); ``draws``, an array of shape (256,) of random draws of these seconds from their measured spread; and for
        strategies such as ``local_sgd`` the median samples to the target (``samples``, else None).

    Raises:
        UsageError: a run has an unknown strategy or option of one.
    """
    grouped: dict[tuple[int, int, str, tuple[tuple[str, object], ...]], list[RunEvidence]] = {}
    for run in runs:
        if run.step_seconds is not None:
            given = ((name, getattr(run.config, name)) for name in _OPTIONS)
            options = tuple((name, value) for name, value in given if value not in (None, "none"))
            grouped.setdefault((run.devices, run.config.batch_size, run.config.strategy, options), []).append(run)
    found = []
    for (devices, batch, strategy, options), same in sorted(grouped.items(), key=lambda item: (item[0][:3], str(item))):
        seconds = [run.step_seconds for run in same if run.step_seconds is not None]
        middle = float(np.median(seconds))
        spread = max(run.step_spread for run in same)
        if len(seconds) > 1:
            spread = max(spread, float(np.std(np.log(seconds), ddof=1)) / math.sqrt(len(seconds)))
        draws = drawn_seconds(middle, spread, (devices, batch, strategy, options))
        samples = None
        if not is_single_update(strategy):
            middles = [float(np.mean(target_interval(run.target))) for run in same if run.target is not None]
            reached = [middle for middle in middles if math.isfinite(middle)]
            if not reached:
                continue
            samples = float(np.median(reached))
        basis = f"measured in {counted(len(seconds), 'run')}"
        found.append(PlannedStep(devices, batch, strategy, middle, draws, {}, basis, True, options, samples))
    return found


def drawn_seconds(middle: float, spread: float, choice: object) -> Array:
    """Return (256,) Monte Carlo draws of the measured seconds of a step, whose logarithm has a normal error.

    Args:
        middle: measured seconds.
        spread: standard error of their natural logarithm.
        choice: devices, batch, strategy and options of the step, which seed the draws: equal choices give equal draws,
            and different ones independent draws.
    """
    seed = zlib.crc32(repr(choice).encode())
    return np.asarray(middle * np.exp(spread * np.random.default_rng(seed).standard_normal(DRAWS)))


def check_measured_algorithms(strategies: Sequence[str], measured: Sequence[PlannedStep], command: str) -> None:
    """Check that strategies such as ``local_sgd`` have been measured, because E(B) does not hold for them.

    E(B), the samples to the target at batch B, holds for strategies whose logical workers (fixed shares of the global
    batch) make one common update a step; these pass the check. All others need a run to the target of their own.

    Args:
        strategies: strategies to plan with, as texts of ``--strategy``.
        measured: steps of runs that have reached the target.
        command: ``tutti train`` with task and target, to which the error's remedy adds the options of the missing run.

    Raises:
        UsageError: a strategy to which E(B) does not apply has no measured step.
    """
    for strategy in strategies:
        choice = parse_strategy(strategy)
        if not choice.row.single_update and not any(step.choice == choice for step in measured):
            raise UsageError(
                f"the data that {choice.name} needs to the target are not known",
                where=f"--strategy {strategy}",
                why="its workers do not make one update of the global batch, and E(B) holds for such updates alone",
                remedy=f"measure it and give the run to --runs: {command} --strategy {strategy} "
                "--workers N --devices N --batch-size B",
            )


def plan_config_of(step: PlannedStep, base: PlannedRun) -> PlannedRun:
    """Return the configuration of a run with the devices, batch, strategy and further options of a planned step.

    Args:
        step: the planned step: a choice of devices, batch and strategy.
        base: configuration with all other options.

    Returns:
        ``base`` with the devices, batch, strategy and options of ``step``. ``workers`` is None, so that the run takes
        its default; micro-batch and activation checkpointing are off unless ``step.options`` has them.
    """
    chosen: dict[str, Any] = {"micro_batch": None, "activation_checkpointing": "none", **dict(step.options)}
    return replace(
        base, strategy=step.strategy, devices=str(step.devices), batch_size=step.batch, workers=None, **chosen
    )


def step_key(step: PlannedStep) -> tuple[object, ...]:
    """Return a hashable key that is equal for planned steps of the same plan, however their options are written.

    Plans are the same if devices, batch, device mesh, pipeline schedule, gradient synchronisation, micro-batch and
    activation checkpointing are the same. The elements of the key mean nothing by themselves.

    Args:
        step: the planned step, a choice of devices, batch, strategy and options.

    Raises:
        UsageError: an unknown strategy or option, or the devices do not fit the strategy.

    >>> def made(text, **options):
    ...     return PlannedStep(4, 64, text, 1.0, np.ones(1), {}, "", options=tuple(options.items()))
    >>> step_key(made("pipeline:micro_batches=4")) == step_key(made("pp:stages=4,schedule=1f1b", micro_batch=16))
    True
    """
    choice, options = step.choice, dict(step.options)
    shape = mesh_extents(step.strategy, step.devices)
    ranks = shape["replica"] * shape["shard"]
    given: Any = options.pop("micro_batch", None)
    share = math.ceil(step.batch / ranks)
    micro = choice.micro_batch(given, step.batch, ranks) or share
    layout = choice.layout
    if isinstance(layout, PipelineConfig):
        layout = replace(layout, micro_batches=None, stages=shape["stage"])
    extents = tuple(shape.values())
    return step.devices, step.batch, choice.name, layout, choice.sync, extents, min(micro, share), *options.items()
