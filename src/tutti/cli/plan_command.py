"""``tutti plan``: say how many devices are worth it for a target, at which batch, time and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from tutti.cli.output_checks import check_writable
from tutti.cli.plan_answer import PlanAnswer, PlanLimits
from tutti.cli.plan_verification import PlanVerifier
from tutti.cli.simulate_command import parse_link
from tutti.config.settings import OptionalWholeNumber, WholeNumber
from tutti.config.spec import Duration
from tutti.config.strategy_choice import parse_strategy
from tutti.config.training_target import TrainingTarget, check_metric
from tutti.errors import UsageError, counted
from tutti.planning.planned_run import PlannedRun
from tutti.planning.task_or_script import SCRIPT_TRACED, TaskOrScript
from tutti.tasks import task_registry, user

if TYPE_CHECKING:
    from tutti.planning.device_plan import MeasuredTarget, PlannedStep, TargetData
    from tutti.planning.plan_candidates import PlanCandidates
    from tutti.planning.run_evidence import RunEvidence
    from tutti.planning.script_task import ScriptTask
    from tutti.planning.step_costs import StepCosts
    from tutti.tasks.task import Task

_Precision = Literal["fp32", "bf16", "fp16", "fp64"]
_MANY = Parameter(consume_multiple=True, negative="", show_default=False)


def plan_devices(
    task: Annotated[str | None, Parameter(show=False)] = None,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    law: Annotated[tuple[Path, ...], _MANY] = (),
    runs: Annotated[tuple[Path, ...], _MANY] = (),
    recipe: Annotated[Path | None, Parameter(show_default=False)] = None,
    machine: Annotated[str | None, Parameter(show_default=False)] = None,
    target: Annotated[str | None, Parameter(show_default=False)] = None,
    length: Annotated[str | None, Parameter(show_default=False)] = None,
    max_devices: WholeNumber = 64,
    batch_size: Annotated[tuple[int, ...], _MANY] = (),
    strategy: Annotated[tuple[str, ...], _MANY] = (),
    deadline: Annotated[str | None, Parameter(show_default=False)] = None,
    budget: Annotated[float | None, Parameter(show_default=False)] = None,
    price: Annotated[str | None, Parameter(show_default=False)] = None,
    device_memory: Annotated[float | None, Parameter(show_default=False)] = None,
    devices_per_node: Annotated[OptionalWholeNumber, Parameter(show_default=False)] = None,
    network: Annotated[str | None, Parameter(show_default=False)] = None,
    precision: Annotated[_Precision | None, Parameter(show_default=False)] = None,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
    figure: Annotated[Path | None, Parameter(show_default=False)] = None,
    verify: Annotated[WholeNumber, Parameter(show_default=False)] = 0,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Say how many devices are worth it to train to a target.

    Example: tutti plan digits --runs runs --machine machine.json

    TASK is a task of tutti train, or with --machine a script that calls
    tutti.prepare; its own arguments follow --.

    Parameters
    ----------
    law:
        fit loss over model size and data to these runs, and stop
    runs:
        runs of tutti train --until, at two batch sizes at least, or folders of them
    recipe:
        recipe.json of tutti noise, in place of a second batch
    machine:
        as in tutti simulate; default: only the steps of the runs
    target:
        held-out value: accuracy=0.93; default: the runs' own
    length:
        of a script's training without a target: 10ep, 500st or 20000sa;
        default: the epochs that it gives to run.epochs
    max_devices:
        most devices; each doubling from 1 on is planned
    batch_size:
        batches to plan; default: measured ones and doublings
    strategy:
        strategies to plan; default: mirrored, sharded, pipeline, tensor, hybrid
    deadline:
        8h, 30m, 90s: most time of training
    budget:
        most money; exit with 9 unless a plan is within it
    price:
        of one device for an hour, with its date: 2.10@2026-11-27
    device_memory:
        GiB of a device; plans that need more are refused
    devices_per_node:
        as in tutti simulate
    network:
        as in tutti simulate
    precision:
        as in tutti simulate; default: that of the runs or the script
    out:
        write the plan here, for tutti train --config
    figure:
        draw time and cost into FILE.svg or FILE.png
    verify:
        train so many of the best plans for 25 steps here
    as_json:
        print JSON, with the reason of every loser

    Returns
    -------
    int
        Exit code. 0: a plan is chosen and printed. 9 (``THRESHOLD``): no plan is within ``deadline`` and ``budget``, or
        (as TargetError) no run has reached the target. With ``law``: 0, after the constants of the loss law have been
        printed.

    Notes
    -----
    The answer is printed: a table with the fastest plan of each number of devices, and a sentence. Without limits the
    chosen number of devices is the largest whose last doubling still makes training 1.5 times as fast ("worth it");
    with ``deadline`` or ``budget`` the fastest plan within them is chosen. ``machine`` is the path of a
    ``machine.json`` of ``tutti bench``, or CHIPxN, such as ``a100x8``: a chip and the devices of a node.
    ``devices_per_node`` is the number of devices of a node, by default as many as were measured together or as CHIPxN
    says. ``network`` is the link between nodes: ``alpha=SECONDS,beta=BYTES`` (seconds a message, bytes a second), or
    the path of a ``machine.json`` that was measured with one rank a node. ``precision`` is fp32, bf16, fp16 or fp64. A
    wrong option raises UsageError, which ``tutti`` turns into exit code 2.
    """
    if law:
        if task is not None or runs:
            raise UsageError("--law fits a law and makes no plan", remedy="leave out the task and --runs, or --law")
        from tutti.cli.loss_law_command import fit_law_of_runs

        return fit_law_of_runs(law, as_json)
    if task is None:
        raise UsageError("no task is given", remedy="write tutti plan TASK --runs DIR, or tutti plan --law RUN…")
    named = TaskOrScript.of(task, arguments)
    if named.script:
        _check_options(task, runs, out)
    elif not user.is_own(task):
        # Raises for an unknown task.
        task_registry.held_out_values(task)
    check_writable(out, "the plan")
    check_writable(figure, "the figure", (".svg", ".png"))
    asked = PlanLimits.check(max_devices, batch_size, deadline, budget, price, verify, device_memory)
    known = None if target is None else TrainingTarget.parse(target, "--target")
    if known is not None:
        _check_known(known, "--target", task)
    stated_length = _stated_length(length, named, recipe, known)
    _check_sources(named, runs, recipe, machine)

    from tutti.planning.device_plan import device_plans
    from tutti.planning.run_evidence import find_runs, other_time, read_evidence, usable_runs

    evidence, notes = usable_runs([read_evidence(path) for path in find_runs(runs)], task)
    goal, asked, data, loaded = _goal(named, evidence, recipe, known, stated_length, asked, notes)
    base = _base(evidence, precision, None if loaded is None else loaded.options)
    batches = _batches(data, asked.batches)
    until = f"{goal.metric.name}={goal.value:g}" if isinstance(goal, TrainingTarget) else "NAME=VALUE"
    steps = _steps_of_runs(evidence, strategy, batches, max_devices, f"tutti train {task} --until {until}")
    search: Callable[[list[PlannedStep]], PlanCandidates] = _planned_alone
    costs, here = None, evidence
    if machine is None:
        notes.append("only the devices and batches of the runs are planned without --machine")
    else:
        costs = _costs(machine, base, devices_per_node, network, loaded)
        here, steps = _on_machine(evidence, steps, costs, base, notes)
    data = data.with_other(other_time(here, base))
    if costs is not None:
        search = _searcher(loaded.task if loaded else task, base, costs, data, asked, batches, strategy, steps)
        if asked.device_memory is None:
            notes.append("memory is not checked, and recomputation not tried, without --device-memory")

    def answered(known: list[PlannedStep]) -> PlanAnswer:
        found = search(known)
        _check_found(found)
        return PlanAnswer(named, goal, device_plans(found.steps, data, asked.price), found, notes, data, asked, loaded)

    answer = answered(steps)
    if verify:
        verifier = PlanVerifier(answer, base, evidence, costs, loaded)
        verifier.check()
        answer = answered(_replaced(steps, verifier.verify()))
    return answer.show(base, evidence, out, figure, as_json)


def _goal(
    named: TaskOrScript,
    evidence: Sequence[RunEvidence],
    recipe: Path | None,
    known: TrainingTarget | None,
    length: Duration | None,
    asked: PlanLimits,
    notes: list[str],
) -> tuple[TrainingTarget | Duration, PlanLimits, TargetData, ScriptTask | None]:
    """Return when training ends, the limits of the plans, the samples until then, and the script; None for a task.

    Args:
        named: the task or script.
        evidence: the runs.
        recipe: file of ``tutti noise``; None for none.
        known: the target of ``--target``.
        length: of ``--length``, for a script; None for the epochs that it trains.
        asked: limits of the plans.
        notes: appended to.
    """
    loaded = named.load_script() if recipe is None else None
    if loaded is not None:
        end = length or Duration(named.script_epochs(), "ep")
        return end, *_to_length(end, loaded, asked, notes), loaded
    goal, data = _to_target(evidence, recipe, known, named.text, notes)
    if recipe is not None and known is None and not named.script:
        _check_known(goal, f"--recipe {recipe}", named.text)
    return goal, asked, data, named.load_script()


def _costs(
    machine: str, base: PlannedRun, devices_per_node: int | None, network: str | None, loaded: ScriptTask | None
) -> StepCosts:
    """Return the prices of the machine of ``--machine``."""
    from tutti.planning.machine_choice import open_machine

    costs = open_machine(machine, base.precision, devices_per_node, parse_link(network))
    if loaded is not None:
        costs.rests.append(SCRIPT_TRACED)
    return costs


def _on_machine(
    evidence: Sequence[RunEvidence],
    steps: list[PlannedStep],
    costs: StepCosts,
    base: PlannedRun,
    notes: list[str],
) -> tuple[list[RunEvidence], list[PlannedStep]]:
    """Return the runs that were trained on the planned machine, and those of the measured steps that are theirs."""
    from tutti.planning.plan_candidates import measured_steps, step_key

    here = _of_machine(evidence, costs, base.precision)
    if len(here) == len(evidence):
        return here, steps
    others = counted(len(evidence) - len(here), "run")
    notes.append(f"steps of {others} are not used, trained on another machine or precision")
    kept = {step_key(s) for s in measured_steps(here)}
    return here, [s for s in steps if step_key(s) in kept]


def _replaced(steps: Sequence[PlannedStep], newer: Sequence[PlannedStep]) -> list[PlannedStep]:
    """Return measured steps, of each plan the newer one."""
    from tutti.planning.plan_candidates import step_key

    return list({step_key(step): step for step in (*steps, *newer)}.values())


def _check_known(target: TrainingTarget, option: str, task: str) -> None:
    """Raise UsageError if a built-in task does not report the metric of a target that ``option`` states."""
    if not user.is_own(task):
        check_metric(target.metric.name, option, task_registry.held_out_values(task), averaged=True)


def _stated_length(
    text: str | None, named: TaskOrScript, recipe: Path | None, target: TrainingTarget | None
) -> Duration | None:
    """Return the length of ``--length``; raise UsageError where training ends at a target, or no script is planned."""
    if named.script and target is not None and recipe is None:
        raise UsageError("--target needs the samples that it takes", remedy="give --recipe, or leave out --target")
    if text is None:
        return None
    if not named.script:
        raise UsageError("--length is of a script", remedy="leave it out and give --runs or --recipe, with a target")
    if recipe is not None:
        raise UsageError("--length and --recipe both say when training ends", remedy="leave out one")
    found = Duration.parse(text, "--length")
    if found.value <= 0:
        raise UsageError(f"--length is {text}", remedy="give more than 0")
    return found


def _to_length(
    length: Duration, loaded: ScriptTask, asked: PlanLimits, notes: list[str]
) -> tuple[PlanLimits, TargetData]:
    """Return the limits with the one batch that is planned, and the samples of a script's stated length.

    Args:
        length: length of training.
        loaded: the script.
        asked: limits of the plans.
        notes: appended to.

    Raises:
        UsageError: no batch or several are given, or the script reads a stream.
    """
    from tutti.planning.conformal_band import shipped_residuals
    from tutti.planning.device_plan import MeasuredTarget, TargetData

    batches = asked.batches or (loaded.options["batch_size"],)
    if len(batches) != 1:
        raise UsageError(
            "without a recipe one batch is planned, that of the script",
            why="how many samples training needs with another batch is not known",
            remedy="give one --batch-size, or --recipe of tutti noise",
        )
    (batch,) = batches
    dataset = loaded.samples()
    samples = length.value * {"ep": dataset, "st": batch, "sa": 1}[length.unit]
    notes.append(f"without --recipe only batch {batch} is planned: samples of other batches are not known")
    data = TargetData([MeasuredTarget(batch, samples, 0)], None, shipped_residuals(), loaded.task.name)
    return replace(asked, batches=batches), data


def _check_sources(named: TaskOrScript, runs: Sequence[Path], recipe: Path | None, machine: str | None) -> None:
    """Raise UsageError if no option gives the samples to the target, or none the seconds of a step."""
    if not runs and recipe is None and not named.script:
        raise UsageError(
            "nothing says how many samples the target needs",
            remedy=f"give --runs: two runs of tutti train {named.text} --until NAME=VALUE with different --batch-size, "
            "or --recipe",
        )
    if not runs and machine is None:
        remedy = "give --machine" if named.script else "give --machine, or --runs"
        raise UsageError("nothing says how long a step takes", remedy=remedy)


def _check_found(found: PlanCandidates) -> None:
    """Raise UsageError, with the reasons of all refusals, if no plan is left."""
    if found.steps:
        return
    why = "; ".join(found.refusal_lines())
    remedy = "give other --strategy or --batch-size" if found.searched else "give --machine, or longer runs"
    if found.lacking:
        remedy = "give more --device-memory or --max-devices, or other --strategy or --batch-size"
    elif len(found.remedies) == 1:
        (remedy,) = found.remedies
    raise UsageError(
        "no choice of devices and batch can be planned", why=why or "no run has ten recorded steps", remedy=remedy
    )


def _to_target(
    evidence: Sequence[RunEvidence], recipe: Path | None, asked: TrainingTarget | None, task: str, notes: list[str]
) -> tuple[TrainingTarget, TargetData]:
    """Return the target of training, and what runs and recipe say of the samples that it takes.

    Args:
        evidence: the runs.
        recipe: file of ``tutti noise``; None for none.
        asked: the target of ``--target``; None for that of the runs or of the recipe.
        task: name of the task, for messages.
        notes: what is not used, and why, is appended.

    Raises:
        UsageError: nothing names a target, or recipe and ``--target`` name two.
    """
    from tutti.planning.conformal_band import shipped_residuals
    from tutti.planning.device_plan import TargetData
    from tutti.planning.plan_candidates import is_single_update
    from tutti.planning.recipe import read_recipe
    from tutti.planning.run_evidence import measured_targets

    posterior, known = None if recipe is None else read_recipe(recipe), asked
    if posterior is not None:
        wanted = TrainingTarget.parse(f"{posterior.metric}={posterior.value:.17g}", "--recipe")
        if known is not None and (known.metric.name, known.value) != (wanted.metric.name, wanted.value):
            raise UsageError(
                f"the recipe is for {wanted}, and not {known}", where=str(recipe), remedy="give one target"
            )
        known = wanted
    same = [run for run in evidence if is_single_update(run.config.strategy)]
    measured: Sequence[MeasuredTarget] = ()
    if any(run.target is not None for run in same) or posterior is None:
        known, measured, more = measured_targets(same, known, task)
        notes += more
    if known is None:
        raise UsageError("no target is given", remedy="give --target, such as accuracy=0.93")
    return known, TargetData(measured, posterior, shipped_residuals(), task)


def _steps_of_runs(
    evidence: Sequence[RunEvidence], strategies: Sequence[str], batches: Sequence[int], max_devices: int, command: str
) -> list[PlannedStep]:
    """Return the measured steps of the runs that are among the plans asked for.

    Args:
        evidence: the runs.
        strategies: of ``--strategy``; empty for all.
        batches: global batches of the plans, in samples.
        max_devices: most devices.
        command: a command that measures samples to the target, for messages.

    Raises:
        UsageError: an algorithm other than one update a global batch is asked for, and no run has measured it.
    """
    from tutti.planning.plan_candidates import check_measured_algorithms, measured_steps
    from tutti.planning.plan_search import STRATEGIES

    steps = measured_steps(evidence)
    check_measured_algorithms(strategies or STRATEGIES, steps, command)
    steps = [s for s in steps if s.devices <= max_devices and (s.samples is not None or s.batch in batches)]
    families = {parse_strategy(text).name for text in strategies if ":" not in text}
    return [s for s in steps if not strategies or s.strategy in strategies or s.family in families]


def _check_options(script: str, runs: Sequence[Path], out: Path | None) -> None:
    """Raise UsageError for options that need runs of ``tutti train``, where a script is planned."""
    for flag, given in (("--runs", runs), ("--out", out)):
        if given:
            raise UsageError(
                f"{flag} is of tutti train, which trains no script",
                where=script,
                remedy="leave it out and plan from --machine, and --recipe for a target, or plan a task "
                "file.py:function with the script's model, loss and data",
            )


def _batches(data: TargetData, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batches to plan: the given ones, or the measured ones and doublings up to four times the largest.

    Without a measured batch they are doublings around the critical batch.
    """
    if asked:
        for batch in asked:
            data.at(batch)
        return tuple(sorted(set(asked)))
    known = sorted(data.measured)
    if data.critical_batch is None:
        # Raises: one batch alone says nothing of others.
        data.at(2 * known[0])
    if known:
        first, last = known[0], 4 * known[-1]
    elif data.critical_batch is not None:
        last = int(4 * data.critical_batch[0])
        first = max(1, last // 64)
        first = 1 << (first - 1).bit_length()
    found = set(known)
    while first <= max(last, 1):
        found.add(first)
        first *= 2
    return tuple(sorted(found))


def _counts(most: int) -> list[int]:
    """Return the doublings from 1 on, and the largest number of devices.

    >>> _counts(6)
    [1, 2, 4, 6]
    """
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return counts if counts[-1] == most else [*counts, most]


def _planned_alone(steps: list[PlannedStep]) -> PlanCandidates:
    """Return the measured steps as the only candidates."""
    from tutti.planning.plan_candidates import PlanCandidates

    return PlanCandidates(steps)


def _searcher(
    task: str | Task,
    base: PlannedRun,
    costs: StepCosts,
    data: TargetData,
    asked: PlanLimits,
    batches: Sequence[int],
    strategies: Sequence[str],
    measured: Sequence[PlannedStep],
) -> Callable[[list[PlannedStep]], PlanCandidates]:
    """Return a search over all plans of a machine, given the measured steps.

    Args:
        task: the task, or its name.
        base: options of the run besides those of a plan.
        costs: prices of the machine.
        data: to the target.
        asked: limits of the plan.
        batches: global batches to plan, in samples.
        strategies: to plan; empty for those that a plan searches by itself.
        measured: steps of runs, whose activation checkpointing is traced too.
    """
    from tutti.planning.plan_candidates import PlanCandidates, is_single_update
    from tutti.planning.plan_search import STRATEGIES, StepPricer, calibrate, plan_choices, search_plans
    from tutti.planning.step_prediction import TaskSizes

    own = base.activation_checkpointing
    # Recomputation saves memory alone: without a limit no plan with it can win.
    recomputing = asked.device_memory is not None and base.compile_choice is None
    tried = [own, *(str(dict(step.options).get("activation_checkpointing", own)) for step in measured)]
    pricer = StepPricer(TaskSizes(task, base, [*tried, *(("blocks", "selective") if recomputing else ())]), base, costs)
    checkpointing = pricer.checkpointing() if asked.device_memory is not None else (own,)
    searched = [s for s in strategies or STRATEGIES if is_single_update(s)]

    def search(steps: list[PlannedStep]) -> PlanCandidates:
        found = PlanCandidates()
        choices = plan_choices(_counts(asked.max_devices), batches, searched, checkpointing)
        calibrate(steps, pricer, found)
        search_plans(choices, steps, pricer, data, asked.device_memory, found)
        return found

    return search


def _base(
    evidence: Sequence[RunEvidence], precision: _Precision | None, stated: Mapping[str, Any] | None
) -> PlannedRun:
    """Return the options of all plans besides those of a plan.

    Args:
        evidence: the runs; of these that with the largest batch counts.
        precision: of ``--precision``; None for that of run or script.
        stated: options that a script gives to ``tutti.prepare``; None for a task.
    """
    reached = [run for run in evidence if run.target is not None and run.target["reached"]]
    near = max(reached or evidence, key=lambda run: run.config.batch_size, default=None)
    kept = {name: value for name, value in (stated or {}).items() if name not in ("strategy", "workers", "batch_size")}
    config = PlannedRun(**kept) if near is None else PlannedRun.of(near.config)
    return replace(config, precision=precision) if precision is not None else config


def _of_machine(evidence: Sequence[RunEvidence], costs: StepCosts, precision: str) -> list[RunEvidence]:
    """Return the runs that were trained on the machine of the plan in its precision."""
    from tutti.planning.measured_costs import MeasuredCosts

    if not isinstance(costs, MeasuredCosts):
        return []
    kind = "cpu" if costs.machine.device.get("type") == "cpu" else "accelerator"
    host = f"{costs.machine.host.get('name', '')} {kind}"
    return [run for run in evidence if run.host == host and run.config.precision == precision]
