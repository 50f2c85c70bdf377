"""Write a plan: the options of ``tutti train`` (``plan.toml``), a JSON value, the headline and a figure."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti.config.lr_rule import usual_rule
from tutti.config.train_config import TrainConfig
from tutti.config.training_target import TrainingTarget
from tutti.distribution import pip_install
from tutti.errors import DiskError, UsageError, counted
from tutti.host_memory import format_bytes
from tutti.launcher.encoding import strict_json
from tutti.metrics.records import config_toml
from tutti.planning.device_plan import WORTH, DevicePlan, LostReason, draw_ends, find_knee, last_gain
from tutti.planning.plan_candidates import plan_config_of
from tutti.planning.planned_run import PlannedRun
from tutti.planning.run_evidence import TRAINING_OPTIONS, RunEvidence

_ROOM = 2.0
"""Length of the planned run over the samples that the target needs: the run ends there even without the target."""


def model_run(plan: DevicePlan, runs: Sequence[RunEvidence]) -> RunEvidence | None:
    """Return the finished run from which the planned run takes learning rate, schedule and length.

    Runs that reached their target come first; among them runs of the plan's batch size and strategy, then runs of its
    batch size, then runs of the largest batch size. Among several runs of equal rank the result is the run with the
    median number of samples to its target.

    Args:
        plan: devices, batch and strategy of the planned run.
        runs: evidence of the finished runs; None is returned if it is empty.
    """
    able = [run for run in runs if run.target is not None and run.target["reached"]] or [*runs]
    same = [run for run in able if run.config.batch_size == plan.step.batch]
    largest = max((run.config.batch_size for run in able), default=0)
    found = [run for run in same if run.config.strategy == plan.step.strategy] or same
    found = found or [run for run in able if run.config.batch_size == largest]
    ordered = sorted(found, key=lambda run: float((run.target or {}).get("samples") or math.inf))
    return ordered[len(ordered) // 2] if ordered else None


def plan_config(plan: DevicePlan, base: PlannedRun, target: TrainingTarget, near: RunEvidence | None) -> TrainConfig:
    """Return the configuration of the planned run, which trains until the target is reached or its length ends.

    Args:
        plan: devices, batch and strategy of the run.
        base: configuration with all further options.
        target: metric and level at which the run ends.
        near: evidence of a finished run, as ``model_run`` chooses it. The planned run takes ``optimizer``,
            ``schedule``, ``lr_scale``, ``clip``, ``ema`` and ``gradient_noise`` from it, and all other options from
            ``base``. None: all are those of ``base``.

            If the run has another batch size than the plan, and no learning-rate rule (``--lr-scale``) of its own, the
            planned run gets the usual rule of the optimizer (``usual_rule``), with the run's batch size as base batch.

            The length of a run that reached its target is kept where it is at least 1.2 times the samples that the plan
            needs, because the schedule depends on it; otherwise, and for None, the length is twice these samples.

    Returns:
        Options of ``tutti train``: those of ``base`` with the plan's choice, ``until`` set to the target and the length
        in samples; without output directory, ``resume``, ``overwrite``, ``machine``, profile and trace, and with the
        default of ``wait`` (time to wait for another device), as the number of devices is fixed.
    """
    if near is not None:
        taken: dict[str, Any] = {name: getattr(near.config, name) for name in TRAINING_OPTIONS}
        if taken["lr_scale"] == "none" and near.config.batch_size != plan.step.batch:
            taken["lr_scale"] = (
                f"{usual_rule(near.config.optimizer_choice.options)}:base_batch={near.config.batch_size}"
            )
        base = replace(base, **taken)
    most = math.ceil(_ROOM * plan.data.samples)
    length: dict[str, Any] = {"epochs": None, "steps": None, "duration": None, "samples": most}
    if near is not None and near.target is not None and near.target["reached"]:
        kept = near.config.length
        epoch = near.target["samples"] / near.target["epochs"]
        samples = kept.value * {"ep": epoch, "sa": 1, "st": near.config.batch_size}[kept.unit]
        if samples >= 1.2 * plan.data.samples:
            length["samples"] = math.ceil(samples)
    return replace(
        plan_config_of(plan.step, base),
        until=f"{target.metric.name}{'>=' if target.metric.higher else '<='}{target.value:.17g}",
        out=None,
        resume=None,
        overwrite=False,
        machine=None,
        wait=TrainConfig.wait,
        profile=None,
        trace=None,
        **length,
    )


def rate_words(config: TrainConfig, near: RunEvidence | None) -> str:
    """Describe the learning rate of a planned run in words: value, scaling rule, and whether a run has tried it.

    Args:
        config: options of the planned run, of ``plan_config``.
        near: the finished run from which the planned run takes its optimizer; None without one.

    Returns:
        One line of text without a full stop, such as ``0.008 = 0.004 × 2 by sqrt:base_batch=128, …``.
    """
    given, batch = config.optimizer_choice.options.lr, config.batch_size
    if near is None:
        return f"{given:g} of --optimizer {config.optimizer}, an assumption: no run has tried it; tune it"
    factor = config.lr_rule.factor(batch)
    rate = f"{given * factor:g}"
    if config.lr_scale != "none":
        rate += f" = {given:g} × {factor:.3g} by {config.lr_scale}"
    if near.config.batch_size == batch:
        return f"{rate}, that of {near.path} at this batch"
    own = "the rule of the run" if near.config.lr_scale != "none" else "the usual rule of such an optimizer"
    return (
        f"{rate}, {own} at batch {near.config.batch_size} ({near.path}); an assumption: no run of batch {batch} has "
        f"tried it, and the plan's samples hold for a tuned rate"
    )


def write_plan(config: TrainConfig, task: str, facts: Mapping[str, Any], path: Path) -> None:
    """Write ``plan.toml``, the options of a planned run as ``tutti train --config`` reads them.

    Comments state headline, learning rate, memory and runners-up. The last line is a comment with ``facts``, which
    ``tutti report`` reads.

    Args:
        config: options of the planned run.
        task: name of the run's task.
        facts: JSON object of ``tutti plan --json`` with the chosen plan and its runners-up: ``format``, the first key,
            ``headline`` (the plan in one sentence), ``plans``, ``chosen`` (index of the chosen plan),
            ``learning_rate`` and so on.
        path: the file to write.

    Raises:
        DiskError: the file cannot be written.
    """
    try:
        chosen = facts["plans"][facts["chosen"]]
        memory = "" if chosen["memory"] is None else f"# memory of a device: {memory_words(chosen['memory'])}\n"
        text = f"# {facts['headline']}\n# learning rate {facts['learning_rate']['text']}\n{memory}"
        text += f"{config_toml(config, task)}\n"
        text += f"# For tutti report --plan: this plan and its runners-up.\n# {strict_json(facts)}\n"
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DiskError("cannot write the plan", where=str(path), why=error.strerror) from error


def memory_words(memory: Mapping[str, float]) -> str:
    """Return the predicted bytes on a plan's fullest device in words, the largest kind first.

    Args:
        memory: bytes by kind, and their ``total``.

    >>> memory_words({"parameters": 2.0**30, "activations": 3 * 2.0**30, "total": 2.0**32})
    '4 GiB (activations 3 GiB, parameters 1 GiB)'
    """
    kinds = sorted((item for item in memory.items() if item[0] != "total"), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds)
    return f"{format_bytes(memory['total'])} ({parts})"


def plan_seconds(seconds: float) -> str:
    """Format a duration with three significant digits, in the largest of d, h, min and s of which it has at least two.

    Below two minutes the unit is s.

    Args:
        seconds: the duration.

    >>> plan_seconds(0.0123), plan_seconds(90), plan_seconds(6000), plan_seconds(36000), plan_seconds(1e6)
    ('0.0123 s', '90 s', '100 min', '10 h', '11.6 d')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def headline(best: Sequence[DevicePlan], target: TrainingTarget | str, chosen: DevicePlan | None = None) -> str:
    """Return the answer of ``tutti plan`` in one sentence.

    It states devices, time to the target, the 90 % band of this time (or that there is none), batch and strategy: ``4
    devices are worth it: accuracy >= 0.93 after 12 s (90 % band 9 s–16 s), at batch 128, mirrored; 8 devices are 1.20 ×
    as fast``.

    Args:
        best: the fastest plan for each number of devices, at least one, sorted by number of devices.
        target: metric and value to which the plans train, or the length of training in words.
        chosen: the plan within deadline and budget, which the line names. None: the line names ``find_knee(best)``, the
            plan with the most devices for which the last doubling made training at least 1.5 × as fast, or the only
            plan in ``best``, and then says that no other number of devices was planned.

    Returns:
        One line of text without a full stop. Where ``best`` has an entry after the plan, the line ends with that
        entry's speedup over the plan.
    """
    knee = find_knee(best)
    answer = chosen or knee or best[0]
    count = counted(answer.devices, "device")
    band = (
        "no band" if answer.band is None else f"90 % band {plan_seconds(answer.band[0])}–{plan_seconds(answer.band[1])}"
    )
    verb = ("is" if answer.devices == 1 else "are") + " worth it"
    if chosen is not None and chosen is not knee:
        verb = ("meets" if answer.devices == 1 else "meet") + " what was asked"
    said = f"{count}, the only number planned" if len(best) == 1 and chosen is None else f"{count} {verb}"
    text = (
        f"{said}: {target} after {plan_seconds(answer.seconds)}{_counted_words(answer)} ({band}), "
        f"at batch {answer.step.batch}, {answer.step.label}"
    )
    place = best.index(answer) if answer in best else None
    if place is not None and place + 1 < len(best):
        gain = last_gain(best, place + 1)
        text += f"; {best[place + 1].devices} devices are {gain:.2f} × as fast"
    return text


def _counted_words(plan: DevicePlan) -> str:
    """Say what the seconds of a plan are of."""
    return " with start, evaluations and saves" if plan.other else " of training"


def plan_json(
    plans: Sequence[DevicePlan], reasons: Mapping[int, LostReason], marks: Mapping[int, Sequence[str]]
) -> list[dict[str, Any]]:
    """Return plans (choices of devices, batch and strategy) of training to a target as JSON objects, in their order.

    Args:
        plans: the plans.
        reasons: for plans that take longer than the fastest, the cause and size of the gap, by index in ``plans``.
        marks: names of distinctions of a plan, by index in ``plans``, such as ``cheapest`` (fewest device-seconds) and
            ``knee`` (most devices that still pay, ``find_knee``).

    Returns:
        One object for each plan. Its choice: ``devices``, ``batch`` (samples), ``strategy``, ``options``; ``marks``;
        ``evaluated`` (False if ``step_seconds`` is only a lower bound). Then ``step_seconds``, ``step_terms`` (the same
        by cause, such as ``compute``), ``memory`` (bytes on the fullest device by kind, with ``total``), ``samples``
        and ``steps`` to the target, ``seconds`` to it, of these ``training_seconds`` and ``other_seconds`` (by cause:
        ``start``, ``evaluation`` and ``save``, as far as runs have measured them), and ``cost``; with 90 % bands
        (``step_band``, ``samples_band``, ``band``, ``cost_band``), quantiles 0.05 and 0.95 over Monte Carlo draws
        (``step_draws``, ``draws``, ``cost_draws``), and words on their sources (``step_basis``, ``samples_basis``,
        ``band_text``). ``lost`` is an object with ``gap_seconds``, ``term`` (the cause, None for a tie),
        ``closes_seconds`` (part of the gap that the cause explains), ``tie`` and ``text``, or None without a reason.
        Unknown numbers are None.
    """
    found = []
    for place, plan in enumerate(plans):
        reason = reasons.get(place)
        found.append(
            {
                "devices": plan.devices,
                "batch": plan.step.batch,
                "strategy": plan.step.strategy,
                "options": dict(plan.step.options),
                "marks": list(marks.get(place, ())),
                "evaluated": not plan.step.least,
                "step_seconds": plan.step.seconds,
                "step_draws": draw_ends(plan.step.draws),
                "step_band": plan.step.band,
                "step_basis": plan.step.basis,
                "step_terms": dict(plan.step.terms),
                "memory": None if plan.step.memory is None else dict(plan.step.memory),
                "samples": plan.data.samples,
                "samples_band": plan.data.band,
                "samples_basis": plan.data.text,
                "steps": plan.steps,
                "seconds": plan.seconds,
                "training_seconds": plan.training_seconds,
                "other_seconds": dict(plan.other),
                "draws": draw_ends(plan.draws),
                "band": plan.band,
                "band_text": plan.band_text,
                "cost": plan.cost,
                "cost_draws": plan.cost_ends,
                "cost_band": plan.cost_band,
                "lost": None
                if reason is None
                else {
                    "gap_seconds": reason.gap,
                    "term": reason.term or None,
                    "closes_seconds": reason.closes,
                    "tie": reason.tie,
                    "text": reason.text,
                },
            }
        )
    return found


def write_plan_figure(best: Sequence[DevicePlan], title: str, path: Path) -> None:
    """Draw training time to the target, and cost or device-hours, over the number of devices, into an image file.

    Args:
        best: the fastest plan for each number of devices, at least one, sorted by number of devices.
        title: text above the figure.
        path: the file to write, ``.svg`` or ``.png``.

    Raises:
        UsageError: matplotlib is not installed, or the file's name does not end in ``.svg`` or ``.png``.
        DiskError: the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--figure needs the package matplotlib", remedy=f"run {pip_install('plot')}, or leave it out")
    if path.suffix not in (".svg", ".png"):
        raise UsageError(
            f"the figure cannot be written as '{path.suffix}'", where=str(path), remedy="take .svg or .png"
        )
    from matplotlib.figure import Figure as Canvas

    devices = [plan.devices for plan in best]
    seconds = [plan.seconds for plan in best]
    canvas = Canvas(figsize=(12, 4.6), layout="constrained")
    canvas.suptitle(title)
    times, money = canvas.subplots(1, 2)
    linear = [seconds[0] * devices[0] / count for count in devices]
    times.plot(devices, linear, "--", color="#888888", label="linear")
    times.plot(devices, seconds, "o-", label="fastest plan")
    banded = [plan for plan in best if plan.band is not None]
    for plan in banded:
        low, high = plan.band or (plan.seconds, plan.seconds)
        times.plot([plan.devices] * 2, [low, high], color="#4477AA", alpha=0.4, linewidth=6, solid_capstyle="butt")
    if not banded:
        times.text(0.98, 0.95, "no band: not checked", transform=times.transAxes, ha="right", fontsize="small")
    if (knee := find_knee(best)) is not None:
        label = f"knee: the last doubling bought {WORTH:g} ×"
        times.plot([knee.devices], [knee.seconds], "o", markersize=14, fillstyle="none", color="#CC3311", label=label)
    for plan in best:
        times.annotate(f"{plan.step.batch}", (plan.devices, plan.seconds), xytext=(0, 8), textcoords="offset points")
    times.set(xscale="log", yscale="log", xlabel="devices", ylabel="s", title="time to the target (labels: batch)")
    times.legend(fontsize="small", loc="lower left")
    priced = all(plan.cost is not None for plan in best)
    heights = [plan.cost if plan.cost is not None else plan.devices * plan.seconds / 3600 for plan in best]
    money.bar([str(count) for count in devices], heights, color="#4477AA")
    money.set(xlabel="devices", ylabel="cost" if priced else "device-hours", title="what it costs")
    times.set_xticks(devices, [str(count) for count in devices])
    times.minorticks_off()
    try:
        canvas.savefig(path)
    except OSError as error:
        raise DiskError("cannot write the figure", where=str(path), why=error.strerror) from error
