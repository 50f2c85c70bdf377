"""``tutti plan --verify``: train the best plans for some steps on this machine, and say what changed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.cli.plan_answer import PlanAnswer, choice_in_words, plan_in_words
from tutti.config.training_target import TrainingTarget
from tutti.config.variables import without_settings
from tutti.errors import UsageError, counted
from tutti.planning.planned_run import PlannedRun

if TYPE_CHECKING:
    from tutti.planning.device_plan import DevicePlan, PlannedStep
    from tutti.planning.run_evidence import RunEvidence
    from tutti.planning.script_task import ScriptTask
    from tutti.planning.step_costs import StepCosts

_STEPS = 25
"""Steps of a task that are trained, of which the first fifth is not timed."""


class _PlanFailedError(Exception):
    """A plan could not be trained; the message says why."""


@dataclass(frozen=True)
class PlanVerifier:
    """Trains plans of one task or script on this machine for a few steps.

    Attributes:
        answer: the plans; lines on the measurements are appended to its ``notes``.
        base: options that all plans share.
        runs: evidence of the runs, from which the plans of a task take learning rate and schedule.
        costs: prices of the planned machine; None where all steps are those of runs.
        loaded: the script; None for a task.
    """

    answer: PlanAnswer
    base: PlannedRun
    runs: Sequence[RunEvidence]
    costs: StepCosts | None
    loaded: ScriptTask | None

    def check(self) -> None:
        """Raise UsageError if the plan is for another machine than this one."""
        from tutti.planning.measured_costs import MeasuredCosts

        host = platform.node()
        if isinstance(self.costs, MeasuredCosts):
            planned = {str(self.costs.machine.host.get("name"))}
        elif self.costs is not None:
            planned = {self.costs.name}
        else:
            planned = {run.host.rpartition(" ")[0] for run in self.runs}
        if planned != {host}:
            raise UsageError(
                "--verify trains here, and the plan is for another machine",
                why=f"this is {host}, the plan is for {', '.join(sorted(planned))}",
                remedy="leave out --verify, or plan with --machine of tutti bench from here",
            )

    def verify(self) -> list[PlannedStep]:
        """Train the best plans on this machine for a few steps each, and return their measured steps.

        Of the plans that need at most as many devices as this machine has, the ``--verify`` plans with the shortest
        predicted training are trained. For each plan, ``answer.notes`` gets a line with the measured and the predicted
        time of a step; a plan whose training fails gets a line with the reason, and has no measured step.

        Raises:
            UsageError: this machine has devices for none of the plans.
        """
        from tutti.launcher.devices import count_accelerators
        from tutti.planning.device_plan import best_by_devices

        here = count_accelerators(self.base.device, os.environ) or os.cpu_count() or 1
        ranked = sorted(self.answer.plans, key=lambda plan: plan.seconds)
        able = [p for p in ranked if p.devices <= here and p.step.samples is None and not p.step.least]
        able = able[: self.answer.asked.verify]
        if not able:
            why = f"this machine has {counted(here, 'device')}"
            raise UsageError("no plan can be verified", why=why, remedy="leave out --verify")
        found, notes = [], self.answer.notes
        for plan in able:
            label = choice_in_words(plan)
            try:
                step, number = self._trained(plan)
            except _PlanFailedError as error:
                notes.append(f"verify: {label} failed: {error}")
                continue
            ratio = step.seconds / plan.step.seconds
            took = f"{step.seconds * 1e3:.3g} ms a step ({number} steps)"
            notes.append(f"verify: {label}: {took}, {ratio:.2f} × the plan's")
            found.append(step)
        before = min(best_by_devices(self.answer.plans), key=lambda plan: plan.seconds)
        notes.append(f"verify: before it, the fastest plan was {plan_in_words(before)}")
        return found

    def _trained(self, plan: DevicePlan) -> tuple[PlannedStep, int]:
        """Return the measured step of a plan, and the number of steps that were trained."""
        with tempfile.TemporaryDirectory() as folder:
            step, number = (self._task_step if self.loaded is None else self._script_step)(plan, Path(folder))
        return replace(step, basis="measured by --verify"), number

    def _task_step(self, plan: DevicePlan, folder: Path) -> tuple[PlannedStep, int]:
        from tutti.metrics.records import config_toml
        from tutti.planning.plan_candidates import measured_steps
        from tutti.planning.plan_file import model_run, plan_config
        from tutti.planning.run_evidence import read_evidence

        if not isinstance(self.answer.target, TrainingTarget):
            raise TypeError("a task is planned to a target")
        directory, file = folder / "run", folder / "plan.toml"
        config = replace(
            plan_config(plan, self.base, self.answer.target, model_run(plan, self.runs)),
            until=None,
            patience=None,
            samples=None,
            steps=_STEPS,
            eval_every="none",
            checkpoint_every="none",
            keep_best=None,
            out=str(directory),
        )
        file.write_text(config_toml(config, self.answer.subject.text), encoding="utf-8")
        _run_command("train", "--config", str(file))
        (step,) = measured_steps([read_evidence(directory)])
        return step, _STEPS

    def _script_step(self, plan: DevicePlan, folder: Path) -> tuple[PlannedStep, int]:
        from tutti.planning.plan_candidates import drawn_seconds

        result, subject, step = folder / "steps.json", self.answer.subject, plan.step
        module = ("-m", "tutti.planning.script_timing", str(result), json.dumps(self._script_options(step)))
        job = ("-np", str(plan.devices), "--logs", str(folder / "logs"))
        _run_command("run", *job, *module, subject.text, *subject.arguments)
        found = json.loads(result.read_text(encoding="utf-8"))
        if found["devices"] != plan.devices:
            raise _PlanFailedError(f"the script trains on {counted(found['devices'], 'device')}")
        kind = self._device_type()
        if found["device"] != kind:
            raise _PlanFailedError(f"the script trains on {found['device']}, and the plan is for {kind}")
        seconds = float(found["seconds"])
        draws = drawn_seconds(seconds, float(found["spread"]), (plan.devices, step.batch, step.strategy, step.options))
        measured = replace(step, seconds=seconds, draws=draws, terms={}, measured=True, band=None)
        return measured, int(found["steps"])

    def _device_type(self) -> str:
        from tutti.planning.measured_costs import MeasuredCosts

        return str(self.costs.machine.device.get("type")) if isinstance(self.costs, MeasuredCosts) else ""

    def _script_options(self, step: PlannedStep) -> dict[str, Any]:
        """Return the options of a plan that take the place of those that a script gives to ``tutti.prepare``."""
        own = {} if self.loaded is None else self.loaded.options
        chosen = {"micro_batch": None, "activation_checkpointing": "none", **dict(step.options)}
        options = {"strategy": step.strategy, "workers": None, **chosen}
        if step.batch != own.get("batch_size"):
            options["batch_size"] = step.batch
        if self.base.precision != own.get("precision", PlannedRun.precision):
            options["precision"] = self.base.precision
        return options


def _run_command(*words: str) -> None:
    """Run a command of tutti; raise _PlanFailedError with its message where it fails."""
    command = [sys.executable, "-m", "tutti", *words]
    done = subprocess.run(command, env=without_settings(os.environ), capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        ours = [line for line in said if line.startswith("tutti: ")]
        raise _PlanFailedError((ours or said or [f"exit code {done.returncode}"])[-1].removeprefix("tutti: "))
