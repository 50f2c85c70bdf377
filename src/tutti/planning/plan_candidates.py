"""Gather the steps that a plan may take: measured in runs, predicted by the simulator, or refused with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tutti import parallel
from tutti.config.train_config import TrainConfig
from tutti.errors import UsageError
from tutti.planning.conformal_band import NO_BAND
from tutti.planning.device_plan import DRAWS, PlannedStep
from tutti.planning.machine_costs import StepCosts
from tutti.planning.run_evidence import RunEvidence
from tutti.planning.step_prediction import ModelSizes, device_bytes, evaluate_step, gather_sizes

STRATEGIES = ("mirrored", "sharded:stage=1", "sharded:stage=2", "sharded:stage=3", "pipeline:stages=2")
"""Strategies that a plan tries where none is given."""


@dataclass
class PlanCandidates:
    """Steps that a plan may take.

    Attributes:
        steps: measured and predicted steps.
        refused: what cannot be planned, with the number of choices refused so.
        rests: lines on what the steps rest on.
        guesses: lines on guessed numbers.
    """

    steps: list[PlannedStep] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    rests: list[str] = field(default_factory=list)
    guesses: list[str] = field(default_factory=list)

    def refuse(self, strategy: str, why: str) -> None:
        """Count a choice that cannot be planned."""
        text = f"{strategy}: {why}"
        self.refused[text] = self.refused.get(text, 0) + 1


def is_single_update(strategy: str) -> bool:
    """Return whether all workers make one update, so that E(B) depends on the batch alone.

    >>> is_single_update("mirrored"), is_single_update("local_sgd:period=4")
    (True, False)
    """
    return parallel.parse_strategy(strategy).row.single_update


def measured_steps(runs: Sequence[RunEvidence]) -> list[PlannedStep]:
    """Return the measured step of each strategy, number of devices and batch: the median of its runs."""
    grouped: dict[tuple[int, int, str], list[RunEvidence]] = {}
    for run in runs:
        if run.step_seconds is not None:
            grouped.setdefault((run.devices, run.config.batch_size, run.config.strategy), []).append(run)
    found = []
    for (devices, batch, strategy), same in sorted(grouped.items()):
        seconds = [run.step_seconds for run in same if run.step_seconds is not None]
        middle = float(np.median(seconds))
        spread = max(run.step_spread for run in same)
        if len(seconds) > 1:
            spread = max(spread, float(np.std(np.log(seconds), ddof=1)) / math.sqrt(len(seconds)))
        seed = hash((devices, batch)) % (1 << 32)
        draws = middle * np.exp(spread * np.random.default_rng(seed).standard_normal(DRAWS))
        samples = None
        if not is_single_update(strategy):
            reached = [run.target["samples"] for run in same if run.target is not None and run.target["reached"]]
            if not reached:
                continue
            samples = float(np.median(reached))
        basis = f"measured in {len(seconds)} run" + "s" * (len(seconds) > 1)
        found.append(PlannedStep(devices, batch, strategy, middle, draws, {}, basis, True, (), samples))
    return found


def check_measured_algorithms(strategies: Sequence[str], measured: Sequence[PlannedStep], command: str) -> None:
    """Raise UsageError for a strategy without one update a step that no run has trained to the target.

    Args:
        strategies: asked for.
        measured: steps of runs.
        command: ``tutti train`` with task and target, for the remedy.
    """
    for strategy in strategies:
        if not is_single_update(strategy) and not any(step.strategy == strategy for step in measured):
            raise UsageError(
                f"the data that {strategy.partition(':')[0]} needs to the target are not known",
                where=f"--strategy {strategy}",
                why="its workers do not make one update of the global batch, and E(B) holds for such updates alone",
                remedy=f"measure it and give the run to --runs: {command} --strategy {strategy} "
                "--workers N --devices N --batch-size B",
            )


def predicted_steps(
    task: str,
    base: TrainConfig,
    choices: Sequence[tuple[int, int, str]],
    costs_of: Callable[[], StepCosts],
    memory: float | None,
    found: PlanCandidates,
) -> None:
    """Append the predicted step of each choice to ``found``; a choice that cannot be is refused by name.

    Args:
        task: name of the task.
        base: options of the run besides devices, batch and strategy.
        choices: devices, batch and strategy.
        costs_of: opens the machine.
        memory: bytes of a device; None where it is not to be checked.
        found: receives steps and refusals.
    """
    sizes: dict[str, ModelSizes | str] = {}
    costs = costs_of()
    for devices, batch, strategy in choices:
        config = replace(base, strategy=strategy, devices=str(devices), batch_size=batch, workers=None)
        try:
            parallel.check_strategy(strategy, devices, workers=None)
            shape = parallel.parse_strategy(strategy).shape(devices)
            key = f"{strategy.partition(':')[0]} {shape['stage']}"
            if key not in sizes:
                try:
                    sizes[key] = gather_sizes(task, config)
                except UsageError as error:
                    sizes[key] = error.what
            known = sizes[key]
            if isinstance(known, str):
                found.refuse(strategy, known)
                continue
            if memory is not None and (short := device_bytes(task, known, config) - memory) > 0:
                found.refuse(strategy, f"{short / (1 << 30):.1f} GiB short on {devices} devices, batch {batch}")
                continue
            costs.share_node(devices)
            seconds, shares = evaluate_step(known, config, costs)
        except UsageError as error:
            found.refuse(strategy, error.what)
            continue
        middle = float(np.median(seconds))
        terms = {name: share * middle for name, share in shares.items()}
        found.steps.append(
            PlannedStep(devices, batch, strategy, middle, seconds, terms, f"predicted for {costs.name}; {NO_BAND}")
        )
    found.rests += [text for text in costs.rests if text not in found.rests]
    found.guesses += [text for text in costs.guesses if text not in found.guesses]


def prefer_measured(found: PlanCandidates, measured: Sequence[PlannedStep]) -> None:
    """Replace predicted steps by measured ones, and scale the rest by how far the predictions were off.

    The factor is the geometric mean of measured ÷ predicted over the choices that have both, by strategy and, for a
    strategy without one, over all. Without any the predictions stay as they are.
    """
    keyed = {(step.devices, step.batch, step.strategy): step for step in measured}
    logs: dict[str, list[float]] = {}
    for step in found.steps:
        if (known := keyed.get((step.devices, step.batch, step.strategy))) is not None:
            logs.setdefault(step.strategy, []).append(math.log(known.seconds / step.seconds))
    every = [value for values in logs.values() for value in values]
    chosen: list[PlannedStep] = []
    for step in found.steps:
        key = (step.devices, step.batch, step.strategy)
        if key in keyed:
            chosen.append(keyed.pop(key))
            continue
        ratios = logs.get(step.strategy, every)
        if ratios:
            factor = math.exp(float(np.mean(ratios)))
            text = f"{step.basis}; scaled × {factor:.2f} by {len(ratios)} measured steps"
            terms = {name: value * factor for name, value in step.terms.items()}
            step = replace(step, seconds=step.seconds * factor, draws=step.draws * factor, terms=terms, basis=text)
        chosen.append(step)
    chosen += keyed.values()
    if every:
        factor = math.exp(float(np.mean(every)))
        spread = math.exp(float(np.std(every)))
        found.rests.append(
            f"{len(every)} measured steps: ÷ predicted {factor:.2f} (× ÷ {spread:.2f}), which scales predictions"
        )
    found.steps = chosen
