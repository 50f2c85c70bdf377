"""``tutti noise``: how large a batch is worth it, from noise, branches or samples to a target. Loads no torch."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tutti import process_context
from tutti.cli.console_tables import print_table
from tutti.cli.output_checks import check_writable
from tutti.config.bounds import check_least
from tutti.config.settings import OptionalWholeNumber, WholeNumber, flag_table, resolve_config
from tutti.errors import ExitCode, UsageError, counted
from tutti.launcher.encoding import json_text
from tutti.optim.noise_scale import NoiseBand
from tutti.planning.critical_batch import CriticalBatch, NoiseEvidence, critical_batch, noise_evidence
from tutti.planning.recipe import write_recipe
from tutti.planning.task_or_script import is_script

if TYPE_CHECKING:
    from tutti.compare.runs import Trial
    from tutti.compare.tuned_batches import TunedBatch
    from tutti.planning.branch_fit import BranchFit

Flags = flag_table(without=("batch_size", "out", "overwrite", "resume", "change", "lr_scale"))
_MANY = Parameter(consume_multiple=True, negative="", show_default=False)
_QUIET = Parameter(show_default=False)


def noise(
    *runs: Annotated[str, Parameter(show=False)],
    flags: Annotated[Flags, Parameter(name="*", show=False, show_env_var=False)] = {},  # type: ignore[valid-type]  # noqa: B006
    adam: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    last: float = 0.5,
    branch: Annotated[tuple[int, ...], _MANY] = (),
    step: Annotated[OptionalWholeNumber, _QUIET] = None,
    window: WholeNumber = 1,
    rule: Annotated[Literal["sqrt", "linear", "none"] | None, _QUIET] = None,
    tolerance: float = 0.01,
    batches: Annotated[tuple[int, ...], _MANY] = (),
    seeds: WholeNumber = 3,
    recipe: Annotated[Path | None, _QUIET] = None,
    svg: Annotated[Path | None, _QUIET] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Say up to which size a larger batch pays, in three ways.

    Example: tutti noise runs/digits-20261123-101500 --branch 2 4 8

    RUNS: of tutti train --noise-every N; TASK with --batches, and options of train;
    or a script that calls tutti.prepare, which trains here. It takes --noise-every,
    --workers, --micro-batch and --steps; its own arguments follow --.

    Parameters
    ----------
    adam:
        take the noise of Adam's preconditioned gradient instead of the plain gradient's
    last:
        share of the measured steps that count, from the end
    branch:
        train the first run's checkpoint further at these multiples of its batch
    step:
        checkpoint to branch; default: the newest at an epoch's end
    window:
        epochs of a branch
    rule:
        learning rate of a branch; default: linear for SGD, else sqrt
    tolerance:
        loss that a branch may lose
    batches:
        train TASK to --until with these batch sizes, tuning the rate at each
    seeds:
        runs of each branch or batch size
    recipe:
        where to write recipe.json, for tutti plan
    svg:
        where to draw the figure
    as_json:
        print JSON instead of tables

    Returns
    -------
    int
        Exit code. 0: the critical batch size is printed. A wrong option, or runs that do not determine it, raise
        UsageError, which ``tutti`` turns into exit code 2; a run or branch that diverged raises NonFiniteError, exit
        code 6. A training run of ``branch`` or ``batches`` that fails raises a TuttiError with its exit code.

    Notes
    -----
    The critical batch size is the global batch at which training needs twice the least data to a target. It is
    estimated from the gradient noise of ``runs``, from losses of branches (a checkpoint trained further at larger
    batches), and from the samples that runs at several batch sizes needed to a target. A training script, the first of
    ``runs``, is trained with its gradient noise measured; the other ``runs`` are then its arguments. ``flags`` holds
    options of ``tutti train`` by field of ``TrainConfig``, as given by flags or ``TUTTI_*`` variables.
    """
    if not runs:
        raise UsageError("no run is given", remedy="write tutti noise RUN, with the directory of a run")
    if not 0 < last <= 1:
        raise UsageError(f"--last is {last:g}", remedy="give a share above 0 and up to 1")
    check_least({"--seeds": seeds, "--window": window})
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance is {tolerance:g}", remedy="give a loss of at least 0")
    check_writable(recipe, "the recipe")
    check_writable(svg, "the figure")
    script = is_script(runs[0])
    if branch or batches or script:
        process_context.check_own_processes("tutti noise", os.environ)
    options: dict[str, Any] = dict(flags)
    tuned: list[TunedBatch] = []
    directories: list[Path] = []
    evidence: list[NoiseEvidence] = []
    if script:
        evidence = [_measure_script(runs, options, branch, batches, last)]
    elif batches:
        if len(runs) > 1 or branch:
            raise UsageError("--batches trains one TASK", remedy="leave out --branch and other runs, or --batches")
        tuned = _train_batches(runs[0], options, batches, seeds)
        directories = [run for each in tuned for run in each.runs]
    else:
        directories = [Path(run) for run in runs]
        if options:
            name = min(options).replace("_", "-")
            raise UsageError(f"--{name} is an option of training", remedy="give a TASK with --batches, or leave it out")
    for run in directories:
        if not run.is_dir():
            raise UsageError(
                f"there is no run directory {run}",
                remedy="train one first, such as tutti train digits --workers 8 --noise-every 10 --until accuracy=0.9",
            )
    evidence += [noise_evidence(run, last) for run in directories]
    fitted = _branches(directories[0], branch, step, window, rule, tolerance, seeds) if branch else None
    found = critical_batch(evidence, adam, fitted)
    if recipe is not None:
        if found.recipe is None:
            raise UsageError(
                "noise and branches alone fix no number of samples to a target, and a recipe needs it",
                remedy="train with --until METRIC=VALUE too, or leave out --recipe",
            )
        write_recipe(found.recipe, recipe)
    if svg is not None:
        from tutti.planning.noise_figure import write_noise_figure

        write_noise_figure(evidence, found, svg)
    if as_json:
        print(json_text(_plain(found, tuned), sys.stdout))
    else:
        _show(found, evidence, tuned)
    return ExitCode.DONE


def _measure_script(
    words: Sequence[str], options: Mapping[str, Any], branch: Sequence[int], batches: Sequence[int], last: float
) -> NoiseEvidence:
    """Train a script with its gradient noise measured.

    Args:
        words: its path and its arguments.
        options: options of ``tutti train`` by field.
        branch, batches: options of the command that a script has not.
        last: share of the measured steps that count.
    """
    if batches:
        raise UsageError(
            f"--batches trains a task with the batch sizes and rates of tutti, and {words[0]} has its own",
            remedy="give a task file.py:function with the script's model, loss and data",
        )
    if branch:
        raise UsageError("--branch continues a checkpoint of tutti train", remedy="give the directory of such a run")
    fields = {"noise_every": "every", "workers": "workers", "micro_batch": "micro_batch", "steps": "steps"}
    for name in options:
        if name not in fields:
            raise UsageError(
                f"--{name.replace('_', '-')} is an option of tutti train, and a script has its own",
                remedy="leave it out, or change it in the script",
            )
    check_least({f"--{name.replace('_', '-')}": value for name, value in options.items()})
    from tutti.planning.script_noise import ScriptMeasurement, script_noise

    given = {fields[name]: value for name, value in options.items()}
    return script_noise(words[0], words[1:], ScriptMeasurement(**given), last)


def _train_batches(task: str, options: Mapping[str, Any], batches: Sequence[int], seeds: int) -> list[TunedBatch]:
    """Train the missing runs of the task at each batch size, and return the runs with the best rates."""
    from tutti.cli.config_checks import refuse_trial
    from tutti.compare.tuned_batches import check_batches, tuned_batches

    _, base = resolve_config({**options, "batch_size": max(min(batches), 1)}, (), task)
    check_batches(base, batches)
    for batch in batches:
        refuse_trial(task, dataclasses.replace(base, batch_size=batch))
    pool = Path(base.runs) / "batches"
    return list(tuned_batches(task, base, batches, seeds, pool, _Announcer()))


class _Announcer:
    """Prints a line on standard error for each run that begins."""

    def __init__(self) -> None:
        self._now: Trial | None = None

    def __call__(self, trial: Trial, progress: object) -> None:
        if trial != self._now:
            self._now = trial
            print(f"{trial.rung}, seed {trial.seed}", file=sys.stderr, flush=True)


def _branches(
    run: Path,
    multiples: Sequence[int],
    step: int | None,
    window: int,
    rule: Literal["sqrt", "linear", "none"] | None,
    tolerance: float,
    seeds: int,
) -> BranchFit:
    """Train the missing branches of a run's checkpoint, and return the fit to all."""
    from tutti.compare.branches import branch_loss, branch_point, branch_trials, prepare_branch
    from tutti.compare.runs import finished, run_trial
    from tutti.planning.branch_fit import Branch, fit_branches

    point = branch_point(run, step)
    trials = branch_trials(point, multiples, seeds, window, rule)
    announce = _Announcer()
    for trial in trials:
        if not finished(trial):
            prepare_branch(point, trial)
            run_trial(trial, point.task, lambda progress, trial=trial: announce(trial, progress))  # type: ignore[misc]
    size = point.config.batch_size
    found = [Branch(trial.config.batch_size // size, trial.seed, branch_loss(trial)) for trial in trials]
    return fit_branches(size, point.loss, found, tolerance)


def _show(found: CriticalBatch, evidence: Sequence[NoiseEvidence], tuned: Sequence[TunedBatch]) -> None:
    print(f"critical batch {found.critical_batch:,.0f} samples [{_ends(*found.band)}], from {found.basis}")
    if len(found.ways) > 1:
        print_table(
            ("way", "critical batch", "90 % band"),
            [(way.basis, f"{way.critical_batch:,.0f}", _ends(way.low, way.high)) for way in found.ways],
        )
    steps = sum(len(run.estimates) for run in evidence)
    bands = [("gradient noise", found.noise), ("of Adam's preconditioned gradient", found.scaled)]
    rows = [(name, f"{band.scale:,.1f}", _ends(band.low, band.high)) for name, band in bands if band is not None]
    if rows:
        print_table((f"noise scale, {counted(steps, 'measured step')}", "samples", "90 % band"), rows)
    fit = found.branches
    if fit is not None:
        counts = {k: sum(b.multiple == k for b in fit.branches) for k in fit.means()}
        print_table(
            ("branch", "batch", "loss", "fitted", "runs"),
            [
                (f"{k} ×", f"{k * fit.batch:,}", f"{loss:.4f}", f"{fit.loss_at(k):.4f}", str(counts[k]))
                for k, loss in fit.means().items()
            ],
        )
        print(f"the loss stays within {fit.tolerance:g} of that at batch {fit.batch:,} up to {fit.within} × the batch")
    for each in tuned:
        edge = ", at the edge of the grid" if each.edge else ""
        rates = ", ".join(f"{rate:.3g}: {samples:,.0f}" for rate, samples in each.tuned)
        print(f"batch {each.batch:,}: rate {each.rate:.3g}{edge} (samples by rate: {rates})")
    if found.recipe is not None:
        shown = [
            (f"{b.batch:,}", f"{b.samples:,.0f}", f"{found.recipe.samples_at(b.batch):,.0f}", str(b.runs))
            for b in found.batches
        ]
        print_table(("batch", f"samples to {found.recipe.metric} {found.recipe.value:g}", "fitted", "runs"), shown)


def _ends(low: float, high: float) -> str:
    return f"{low:,.0f} to " + (f"{high:,.0f}" if math.isfinite(high) else "no upper end")


def _plain(found: CriticalBatch, tuned: Sequence[TunedBatch]) -> dict[str, Any]:
    """Return a critical batch for JSON; an end that the data do not bound is infinite, which becomes null."""

    def band(value: NoiseBand | None) -> dict[str, float] | None:
        return None if value is None else value._asdict()

    recipe, fit = found.recipe, found.branches
    return {
        "critical_batch": found.critical_batch,
        "band": found.band,
        "basis": found.basis,
        "ways": [way.as_json() for way in found.ways],
        "noise": band(found.noise),
        "adam": band(found.scaled),
        "branches": None
        if fit is None
        else {
            "batch": fit.batch,
            "start": fit.start,
            "within": fit.within,
            "tolerance": fit.tolerance,
            "losses": [dataclasses.asdict(each) for each in fit.branches],
        },
        "tuned": [
            {
                "batch": each.batch,
                "rate": each.rate,
                "edge": each.edge,
                "grid": each.tuned,
            }
            for each in tuned
        ],
        "samples_min": None if recipe is None else recipe.samples_min,
        "target": None if recipe is None else {"metric": recipe.metric, "value": recipe.value},
        "batches": [{"batch": b.batch, "samples": b.samples, "runs": b.runs} for b in found.batches],
    }
