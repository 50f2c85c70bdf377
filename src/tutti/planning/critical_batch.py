"""Critical batch size from the metrics of runs: from their gradient noise, and from their samples to a target.

Three ways, dearer and surer: gradient noise (McCandlish et al. 2018, arXiv 1812.06162), branches of a checkpoint at
multiples of its batch (Merrill et al. 2025, arXiv 2505.23971), and samples to a target at several batch sizes (Shallue
et al. 2018, arXiv 1811.03600). Noise and branches are the prior, samples to the target decide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from tutti.errors import ExitCode, NonFiniteError, UsageError, counted
from tutti.metrics.metrics_file import METRICS, metric_records
from tutti.optim.noise_scale import NoiseBand, NoiseEstimate, mean_noise
from tutti.planning.branch_fit import BranchFit
from tutti.planning.device_plan import MeasuredTarget
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.recipe import CriticalBatchWay, TrainingRecipe
from tutti.planning.run_evidence import interval_spread, target_interval

_ENDED = "give the directory of a run that has ended, such as runs/digits-…; --resume ends an interrupted one"
_NOISE_SPREAD = 0.7
_BRANCH_SPREAD = 0.35
"""Standard deviation of log B_crit given the noise scale, from the back-test, and given branches: half of it, a
guess."""


@dataclass(frozen=True)
class NoiseEvidence:
    """Measurements of one training run, or of a script, from which the critical batch size is estimated.

    Attributes:
        path: the run directory; of a script its file.
        task: name of the run's task; of a script its file name.
        batch: samples in a global batch.
        estimates: a ``NoiseEstimate`` (estimates of tr Σ and of |G|², whose ratio is the noise scale) for each of the
            last measured steps, in order; empty where none was recorded.
        scaled: the same for Adam's preconditioned gradient.
        target: metric and value of ``--until``; None without that option, and for a script.
        samples: training samples until the target was reached; None if the run did not reach it, and for a script.
        spread: standard deviation of the natural logarithm of ``samples``: the target was reached somewhere between two
            evaluations (``interval_spread``).
    """

    path: Path
    task: str
    batch: int
    estimates: tuple[NoiseEstimate, ...]
    scaled: tuple[NoiseEstimate, ...]
    target: tuple[str, float] | None
    samples: float | None
    spread: float = 0.0


@dataclass(frozen=True)
class CriticalBatch:
    """A critical batch size (at which training needs twice the least data to the target), with its band and basis.

    Attributes:
        noise: simple noise scale over all runs; None if none was measured.
        scaled: noise scale of Adam's preconditioned gradient; None if none was measured.
        batches: measured samples to the target by rising batch size; geometric mean over the runs of a batch size.
        recipe: posterior of samples to the target; None without a run that reached a target.
        band: low and high end of the 90 % band of the critical batch, in samples; 0 or ∞ at an end that is not bounded.
        critical_batch: the estimate in samples.
        basis: the measurements from which the estimate was made, in words.
        ways: the estimate by each method that was measured, alone: gradient noise, branches, samples to a target.
        branches: the fit to trainings that continue a checkpoint at multiples of its batch; None without such
            trainings.
    """

    noise: NoiseBand | None
    scaled: NoiseBand | None
    batches: tuple[MeasuredTarget, ...]
    recipe: TrainingRecipe | None
    band: tuple[float, float]
    critical_batch: float
    basis: str
    ways: tuple[CriticalBatchWay, ...] = ()
    branches: BranchFit | None = None


def noise_evidence(path: Path, last: float = 0.5) -> NoiseEvidence:
    """Read gradient noise, batch size and samples to the target from a run directory of ``tutti train``.

    Args:
        path: the run directory, with ``summary.json`` and ``metrics.jsonl``.
        last: fraction of the measured steps, counted from the end, whose noise is kept; rounded up, and at least one
            step.

    Returns:
        A ``NoiseEvidence``: ``task`` and ``batch`` (samples of a global batch); ``estimates`` and ``scaled``, noise
        estimates of the gradient and of Adam's preconditioned gradient, one for each kept step (empty where none was
        recorded); ``target`` (metric and value; None without ``--until``); the ``samples`` to it, the middle of
        ``target_interval`` (None where it was not reached), and their ``spread``.

    Raises:
        UsageError: ``summary.json`` or ``metrics.jsonl`` cannot be read, as before the end of a run, or the summary has
            no ``global_batch_size``; or the run has made no step.
        NonFiniteError: the run diverged: its last step has no finite loss or was skipped.
    """
    summary = _summary(path / "summary.json")
    diverged = summary.get("exit_code") == ExitCode.NON_FINITE
    if not isinstance(summary.get("global_batch_size"), int) and not diverged:
        failed = f"the run ended with exit code {summary['exit_code']}" if summary.get("exit_code") else None
        raise UsageError(
            "the summary has no global_batch_size", where=str(path / "summary.json"), why=failed, remedy=_ENDED
        )
    try:
        steps = [record for record in metric_records(path) if record.get("group") == "train"]
    except OSError as error:
        raise UsageError("cannot read the run's metrics", where=str(path), why=error.strerror) from error
    if not steps and not diverged:
        raise UsageError(
            "no step of the run can be read",
            where=str(path / METRICS),
            remedy="give the directory of a run that has trained, with its metrics.jsonl",
        )
    if diverged or steps[-1].get("loss") is None or steps[-1].get("skipped"):
        raise NonFiniteError(
            "the run diverged",
            where=str(path),
            why="the loss of its last step is not finite, and its gradients' noise says nothing",
            remedy="lower the learning rate or clip the gradient, and train again",
        )
    return NoiseEvidence(
        path,
        str(summary["task"]),
        int(summary["global_batch_size"]),
        last_estimates(steps, "noise", last),
        last_estimates(steps, "noise/adam", last),
        *_reached(summary),
    )


def critical_batch(
    runs: Sequence[NoiseEvidence], optimizer_noise: bool = False, branches: BranchFit | None = None
) -> CriticalBatch:
    """Estimate the critical batch size, at which training needs twice the least data, from runs of one task.

    Where a run reached a target metric, the estimate is the median of the posterior of B_crit in E(B) = E_min(1 +
    B/B_crit), fitted to the samples to the target, with gradient noise and branches as prior. Without such a run, the
    estimate is the one of the branches, or without branches the gradient noise scale.

    Args:
        runs: evidence of one or more runs (``noise_evidence``).
        optimizer_noise: take the noise scale of Adam's preconditioned gradient instead of the simple one.
        branches: critical batch fitted to trainings that continue a checkpoint of one of the runs at multiples of its
            batch (``fit_branches``); None without.

    Returns:
        A ``CriticalBatch``: ``critical_batch`` in samples; ``band``, low and high end of its 90 % band, 0 or ∞ where
        not bounded; ``basis``, its measurements in words; ``ways``, a tuple with the estimate by each measured method
        alone (``noise``, ``branches``, ``target``); ``recipe``, the posterior of E_min and B_crit (None without a run
        that reached a target); ``noise`` and ``scaled``, the noise scales of the gradient and of Adam's preconditioned
        gradient with their bands (None where not measured); ``batches``, the samples to the target (geometric mean over
        runs) and number of runs of each batch; and ``branches`` as given.

    Raises:
        UsageError: nothing was measured (no gradient noise, no branches, no run to a target); one batch size with a
            target is the only measurement; no run had a target, and the noise scale is not finite and above 0, or noise
            or branches bound the critical batch on neither side; the runs have different targets; a run missed its
            target; or ``optimizer_noise`` is set and no run has that noise scale.
    """
    noise = _band([estimate for run in runs for estimate in run.estimates])
    scaled = _band([estimate for run in runs for estimate in run.scaled])
    prior = scaled if optimizer_noise else noise
    if optimizer_noise and scaled is None:
        raise UsageError(
            "no run has the noise of Adam's preconditioned gradient",
            why="it needs --noise-every, Adam or another optimizer with second moments, and a strategy that keeps them"
            " with the gradients",
            remedy="leave out --adam",
        )
    known = prior is not None and math.isfinite(prior.scale) and prior.scale > 0
    batches = _batches(runs)
    where = ", ".join(str(run.path) for run in runs)
    if not batches and prior is None and branches is None:
        raise UsageError(
            "no run has recorded gradient noise",
            where=where,
            remedy=f"train again with --noise-every, such as tutti train {runs[0].task} --workers 8 --noise-every 10",
        )
    ways = []
    if prior is not None and known:
        ways.append(CriticalBatchWay("noise", prior.scale, prior.low, prior.high, "gradient noise alone"))
    if branches is not None:
        largest = max(branch.multiple for branch in branches.branches)
        words = f"branches at up to {largest} × the batch alone"
        ways.append(CriticalBatchWay("branches", branches.critical_batch, branches.low, branches.high, words))
    if not batches:
        if not ways and prior is not None:
            _refuse_noise(prior)
        best = ways[-1]
        if best.low <= 0 and math.isinf(best.high):
            raise UsageError(
                f"{best.basis} bound the critical batch neither from below nor from above",
                where=where,
                remedy="measure more steps (a smaller --noise-every), or branch at larger multiples with more --seeds",
            )
        band = (best.low, best.high)
        return CriticalBatch(noise, scaled, (), None, band, best.critical_batch, best.basis, tuple(ways), branches)
    if len(batches) + known + (branches is not None) < 2:
        raise UsageError(
            "one batch size with a target does not fix the two constants E_min and B_crit",
            where=where,
            remedy="add a run at another --batch-size, or one with --noise-every",
        )
    return _from_target(runs, CriticalBatch(noise, scaled, batches, None, (0, 0), 0, "", tuple(ways), branches))


def _refuse_noise(noise: NoiseBand) -> None:
    """Raise UsageError: the noise scale is neither finite nor above 0."""
    raise UsageError(
        "the gradient is lost in its noise, or has none: its noise scale is neither finite nor above 0",
        why=f"its 90 % band is {noise.low:.3g} to {noise.high:.3g}",
        remedy="measure more steps (a smaller --noise-every, a longer run), or larger batches",
    )


def _prior(known: CriticalBatch) -> tuple[float, float] | None:
    """Return mean and standard deviation of log B_crit by noise and branches together; None without either."""
    found = []
    for way in known.ways:
        if way.name == "noise":
            found.append((math.log(way.critical_batch), _NOISE_SPREAD))
        elif known.branches is not None:
            found.append((known.branches.centre, math.hypot(known.branches.spread, _BRANCH_SPREAD)))
    if not found:
        return None
    precision = sum(spread**-2 for _, spread in found)
    return sum(mean * spread**-2 for mean, spread in found) / precision, precision**-0.5


def _from_target(runs: Sequence[NoiseEvidence], known: CriticalBatch) -> CriticalBatch:
    """Return the posterior from samples to the target, with what is known by other ways as prior."""
    import numpy as np

    from tutti.planning.law_fit import fit_target

    rows = [astuple(each) for each in known.batches]
    sizes, samples, counts, spreads = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    alone = fit_target(sizes, samples, counts, spreads)
    prior = _prior(known)
    posterior = alone
    if prior is not None:
        posterior = fit_target(sizes, samples, counts, spreads, math.exp(prior[0]), prior[1])
    ways = list(known.ways)
    words = f"samples to the target at {counted(len(sizes), 'batch size')}"
    if len(sizes) > 1:
        ends = np.exp(np.interp((0.05, 0.5, 0.95), np.cumsum(alone.weights), alone.log_critical)).tolist()
        ways.append(CriticalBatchWay("target", ends[1], ends[0], ends[2], words + " alone"))
    generator = np.random.default_rng(0)
    chosen = generator.choice(len(posterior.weights), size=DRAWS, p=posterior.weights)
    least = posterior.log_least[chosen] + posterior.seed * generator.standard_normal(DRAWS)
    critical = np.exp(posterior.log_critical[chosen])
    draws = tuple(zip(np.exp(least).tolist(), critical.tolist(), strict=True))
    target = next(run.target for run in runs if run.target is not None)
    low, middle, high = np.quantile(critical, (0.05, 0.5, 0.95)).tolist()
    named = {"noise": "gradient noise", "branches": "branches of a checkpoint"}
    basis = ", and ".join([words, *(named[way.name] for way in known.ways)])
    recipe = TrainingRecipe(*target, float(np.median(np.exp(least))), middle, draws, basis, tuple(ways))
    return replace(known, recipe=recipe, band=(low, high), critical_batch=middle, basis=basis, ways=tuple(ways))


def _batches(runs: Sequence[NoiseEvidence]) -> tuple[MeasuredTarget, ...]:
    """Return the geometric mean of samples to the target by batch. Raises UsageError where targets differ."""
    targets = {run.target for run in runs if run.target is not None}
    if len(targets) > 1:
        raise UsageError(
            "the runs have different targets",
            where=", ".join(f"{metric}={value:g}" for metric, value in sorted(targets)),
            remedy="give runs with one --until",
        )
    missed = [run for run in runs if run.target is not None and run.samples is None]
    if missed:
        raise UsageError(
            "a run did not reach its target",
            where=str(missed[0].path),
            why="its samples to the target are unknown, and leaving it out would favour its batch size",
            remedy="train it longer, with another learning rate, or to a lower target",
        )
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        if run.samples is not None:
            found.setdefault(run.batch, []).append((run.samples, run.spread))
    return tuple(
        MeasuredTarget(batch, geometric_mean(s for s, _ in same), len(same), fmean(spread for _, spread in same))
        for batch, same in sorted(found.items())
    )


def _band(estimates: Sequence[NoiseEstimate]) -> NoiseBand | None:
    return mean_noise(estimates).band() if estimates else None


def last_estimates(steps: Sequence[Mapping[str, Any]], name: str, last: float) -> tuple[NoiseEstimate, ...]:
    """Return the estimates of gradient noise from the last measured steps, in order; empty where no step was measured.

    Args:
        steps: values of each step by name, such as records of ``metrics.jsonl``. A measured step has ``{name}/trace``
            and ``{name}/square``.
        name: ``noise``, or ``noise/adam`` for the preconditioned gradient.
        last: fraction of the measured steps, counted from the end; rounded up, and at least one step.
    """
    found = [
        NoiseEstimate(float(line[f"{name}/trace"]), float(line[f"{name}/square"]))
        for line in steps
        if line.get(f"{name}/trace") is not None and line.get(f"{name}/square") is not None
    ]
    return tuple(found[-max(math.ceil(len(found) * last), 1) :]) if found else ()


def _reached(summary: dict[str, Any]) -> tuple[tuple[str, float] | None, float | None, float]:
    """Return target, samples to it, and the standard deviation of their logarithm."""
    target = summary.get("target")
    if not isinstance(target, dict) or target.get("value") is None:
        return None, None, 0.0
    interval = target_interval(target)
    wanted = str(target["metric"]), float(target["value"])
    return (wanted, None, 0.0) if math.isinf(interval[1]) else (wanted, fmean(interval), interval_spread(interval))


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        here = (path.parent / "config.toml").is_file()
        what = "the run has not ended, or was interrupted" if here else "cannot read the run"
        raise UsageError(what, where=str(path), why=error.strerror, remedy=_ENDED) from error
    except OSError as error:
        raise UsageError("cannot read the run", where=str(path), why=error.strerror, remedy=_ENDED) from error
    except ValueError as error:
        raise UsageError("the run's summary is not JSON", where=str(path), why=str(error), remedy=_ENDED) from error
    return found if isinstance(found, dict) else {}
