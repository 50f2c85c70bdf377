"""What ``tutti plan`` was asked for, and its answer: tables, JSON, plan file and figure."""

from __future__ import annotations

import datetime
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.cli.console_tables import print_table
from tutti.config.bounds import check_above_zero, check_least
from tutti.config.spec import Duration
from tutti.config.training_target import TrainingTarget
from tutti.errors import ExitCode, UsageError, counted
from tutti.host_memory import format_bytes
from tutti.launcher.encoding import json_text
from tutti.planning.planned_run import PlannedRun
from tutti.planning.task_or_script import TaskOrScript

if TYPE_CHECKING:
    from tutti.config.train_config import TrainConfig
    from tutti.planning.device_plan import DevicePlan, LostReason, TargetData
    from tutti.planning.plan_candidates import PlanCandidates
    from tutti.planning.run_evidence import RunEvidence
    from tutti.planning.script_task import ScriptTask

_SHOWN = 3
_LAW_DRAWS = 64
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class PlanLimits:
    """Limits of the plans of ``tutti plan``, and the number of plans to verify.

    Attributes:
        max_devices: most devices of a plan.
        batches: global batch sizes to plan, in samples; empty for batches chosen from the measured ones.
        deadline: most seconds of training; None for no limit.
        budget: most money; None for no limit.
        price: price of one device for an hour; None where it is not stated.
        price_date: day on which the price was valid, as the user stated it; None without a price.
        verify: number of plans to train for a few steps on this machine.
        device_memory: bytes of a device; None: memory is not checked.
    """

    max_devices: int
    batches: tuple[int, ...]
    deadline: float | None
    budget: float | None
    price: float | None
    price_date: datetime.date | None
    verify: int
    device_memory: float | None

    @classmethod
    def check(
        cls,
        max_devices: int,
        batches: tuple[int, ...],
        deadline: str | None,
        budget: float | None,
        price: str | None,
        verify: int,
        device_memory: float | None,
    ) -> PlanLimits:
        """Check the values of the options of ``tutti plan`` that limit plans, and return them as an object.

        Args:
            max_devices: ``--max-devices``, the largest number of devices of a plan.
            batches: ``--batch-size``, global batch sizes in samples; empty if not given.
            deadline: ``--deadline``, longest training time as a text such as ``8h``; None for none.
            budget: ``--budget``, largest cost of the training, in the currency of ``price``; None for none.
            price: ``--price``, of one device for an hour and its date, as ``2.10@2026-11-27``; None if not given.
            verify: ``--verify``, number of plans to train for a few steps on this machine.
            device_memory: ``--device-memory``, in GiB; None if not given.

        Returns:
            A ``PlanLimits`` with the same attributes, but ``deadline`` in seconds, ``device_memory`` in bytes, and the
            text ``price`` parted into a number, ``price``, and a ``datetime.date``, ``price_date``.

        Raises:
            UsageError: ``max_devices`` or a batch is below 1, ``verify`` is below 0, the budget, price or memory is not
                finite and above 0, the price has no date, the deadline is no time above 0 (in s, min or m, h or d), or
                there is a budget and no price.
        """
        check_least({"--max-devices": max_devices, "--batch-size": min(batches, default=None)})
        amount, date = (None, None) if price is None else _dated_price(price)
        check_above_zero({"--budget": budget, "--price": amount, "--device-memory": device_memory})
        if budget is not None and price is None:
            raise UsageError(
                "--budget needs a price",
                remedy="give --price, of one device for an hour, with its date; tutti knows no prices",
            )
        if verify < 0:
            raise UsageError(f"--verify is {verify}", remedy="give a number of plans, such as 3")
        seconds = None if deadline is None else _deadline(deadline)
        room = None if device_memory is None else device_memory * (1 << 30)
        return cls(max_devices, batches, seconds, budget, amount, date, verify, room)


def _dated_price(text: str) -> tuple[float, datetime.date]:
    """Return price and date of a text such as 2.10@2026-11-27.

    >>> _dated_price("2.10@2026-11-27")
    (2.1, datetime.date(2026, 11, 27))
    """
    amount, _, date = text.partition("@")
    remedy = f"write --price {amount or '2.10'}@YEAR-MONTH-DAY, with the day on which the price was valid"
    try:
        price = float(amount)
    except ValueError as error:
        raise UsageError(f"cannot read the price '{text}'", where="--price", remedy=remedy) from error
    if not date:
        raise UsageError("a price needs its date", where="--price", why="prices of devices change", remedy=remedy)
    try:
        return price, datetime.date.fromisoformat(date)
    except ValueError as error:
        raise UsageError(f"cannot read the date '{date}'", where="--price", remedy=remedy) from error


def _deadline(text: str) -> float:
    """Return the seconds of a time such as 8h.

    >>> _deadline("8h"), _deadline("1.5min"), _deadline("90s")
    (28800.0, 90.0, 90.0)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*(s|m|min|h|d)\s*", text)
    try:
        seconds = float(match[1]) * _UNITS[match[2]] if match else None
    except ValueError:
        seconds = None
    if seconds is None:
        raise UsageError(f"cannot read '{text}'", where="--deadline", remedy="write 8h, 30m or 90s")
    if seconds <= 0:
        raise UsageError(f"--deadline is {text}", remedy="give more than 0, such as 8h")
    return seconds


@dataclass(frozen=True)
class PlanAnswer:
    """The plans that ``tutti plan`` has found for a target, and the evidence that they rest on.

    Attributes:
        subject: the task or script to plan.
        target: metric and value at which training ends, or the length of training of a script.
        plans: all plans, each a choice of devices, batch and strategy with its predicted seconds and cost.
        found: the candidates of the search: refused choices, and assumptions of the predictions.
        notes: lines to print below the tables.
        data: samples that training needs to reach the target, by batch size.
        asked: limits of the plans.
        loaded: the script; None for a task.
    """

    subject: TaskOrScript
    target: TrainingTarget | Duration
    plans: list[DevicePlan]
    found: PlanCandidates
    notes: list[str]
    data: TargetData
    asked: PlanLimits
    loaded: ScriptTask | None = None

    def show(
        self, base: PlannedRun, runs: Sequence[RunEvidence], out: Path | None, figure: Path | None, as_json: bool
    ) -> int:
        """Print the answer of ``tutti plan``, write plan file and figure, and return the exit code.

        Args:
            base: configuration with the options that all plans share.
            runs: evidence of the runs, from which the plan file takes learning rate, schedule and length.
            out: plan file, written only if a plan is chosen; None for none.
            figure: SVG or PNG to write; None for none.
            as_json: print JSON in place of tables.

        Returns:
            0 if a plan is chosen; 9 (``THRESHOLD``) if no plan is within deadline and budget.

        Raises:
            DiskError: plan file or figure cannot be written.
            UsageError: a figure is asked for, and matplotlib is not installed, or the file's name does not end in
                ``.svg`` or ``.png``.
        """
        from tutti.planning.device_plan import best_by_devices, find_knee, lost_reason, within_limits
        from tutti.planning.plan_file import headline, plan_json, write_plan_figure

        best = best_by_devices(self.plans)
        rows = {plan.devices: plan for plan in best}
        limited = self.asked.deadline is not None or self.asked.budget is not None
        able = [p for p in self.plans if within_limits(p, self.asked.deadline, self.asked.budget)]
        fastest = min(able, key=lambda plan: plan.seconds, default=None)
        place = {id(plan): number for number, plan in enumerate(self.plans)}
        marks = self._marks(best, fastest, place)
        losers = [plan for row in _runners_up(self.plans, best) for plan in row]
        shown = self.plans if as_json else losers
        reasons = {place[id(p)]: lost_reason(p, rows[p.devices]) for p in shown if p is not rows[p.devices]}
        chosen = fastest if limited else find_knee(best) or best[0]
        text = headline(best, self._aim(), fastest if limited else None) if chosen is not None else self._missed(best)
        rate: dict[str, Any] | None = None
        if chosen is not None and isinstance(self.target, TrainingTarget) and not self.subject.script:
            config, rate = _planned_rate(chosen, base, self.target, runs)
            if out is not None:
                few = sorted({place[id(plan)] for plan in (*best, *losers)} | marks.keys())
                self._write(config, text, rate, few, place[id(chosen)], reasons, marks, out)
        if figure is not None:
            write_plan_figure(best, f"{self.subject.text}: {self._aim()}", figure)
        if as_json:
            picked = None if chosen is None else place[id(chosen)]
            found = self._json(text, plan_json(self.plans, reasons, marks), picked)
            print(json_text({**found, "learning_rate": rate}, sys.stdout))
        else:
            self._print(text, best, marks, place, reasons)
            if rate is not None:
                print(f"rate      {rate['text']}")
            if chosen is not None and self.loaded is not None:
                print("rate      the script's own, which tutti does not scale to the plan's batch")
                print(f"to run it: {_script_run(chosen, self.subject, self.loaded)}")
            for path in (out if chosen is not None else None, figure):
                if path is not None:
                    print(f"wrote {path}")
        return ExitCode.DONE if chosen is not None else ExitCode.THRESHOLD

    def _marks(
        self, best: Sequence[DevicePlan], fastest: DevicePlan | None, place: dict[int, int]
    ) -> dict[int, list[str]]:
        """Return words such as ``knee`` and ``cheapest`` by a plan's index in ``plans``.

        Args:
            best: the fastest plan of each number of devices.
            fastest: the fastest plan within the limits; None for none.
            place: index by the plan's id.
        """
        from tutti.planning.device_plan import cheapest_plan, find_knee

        limited = self.asked.deadline is not None or self.asked.budget is not None
        name = "fastest within the limits" if limited else "fastest"
        marks: dict[int, list[str]] = {}
        for word, plan in {"knee": find_knee(best), "cheapest": cheapest_plan(self.plans), name: fastest}.items():
            if plan is not None:
                marks.setdefault(place[id(plan)], []).append(word)
        return marks

    def _write(
        self,
        config: TrainConfig,
        text: str,
        rate: dict[str, Any],
        few: Sequence[int],
        chosen: int,
        reasons: dict[int, LostReason],
        marks: dict[int, list[str]],
        out: Path,
    ) -> None:
        """Write the plan file, with a few of the plans: the chosen one and its runners-up.

        Args:
            config: options of the planned run.
            text: the headline.
            rate: its learning rate, and the rule in words.
            few: indices of the plans in the file, rising.
            chosen: index of the chosen plan; as those of ``reasons`` and ``marks`` in ``plans``.
            reasons: why plans lost.
            marks: words such as ``knee``.
            out: the file.
        """
        from tutti.planning.plan_file import plan_json, write_plan

        at = {number: row for row, number in enumerate(few)}
        rendered = plan_json(
            [self.plans[number] for number in few],
            {at[number]: reason for number, reason in reasons.items() if number in at},
            {at[number]: names for number, names in marks.items()},
        )
        facts = {**self._json(text, rendered, at[chosen]), "learning_rate": rate}
        write_plan(config, self.subject.text, facts, out)

    def _aim(self) -> str:
        """Return the target, or the length of training, in words."""
        if isinstance(self.target, TrainingTarget):
            return str(self.target)
        name, value = {"ep": "epoch", "st": "step", "sa": "sample"}[self.target.unit], self.target.value
        return f"{value:,.6g} {name}{'' if value == 1 else 's'}"

    def _missed(self, best: Sequence[DevicePlan]) -> str:
        from tutti.planning.plan_file import plan_seconds

        limits = [f"{plan_seconds(self.asked.deadline)}"] if self.asked.deadline is not None else []
        limits += [f"a budget of {self.asked.budget:g}"] if self.asked.budget is not None else []
        quickest = min(best, key=lambda plan: plan.seconds)
        judged = "by the point figures: there is no band" if quickest.band is None else "by the slow end of the band"
        cost = "" if quickest.cost is None else f", cost {_money(quickest.cost)}"
        within = " and ".join(limits)
        verb = "reaches" if isinstance(self.target, TrainingTarget) else "trains"
        return f"no plan {verb} {self._aim()} within {within} ({judged}); the fastest: {plan_in_words(quickest)}{cost}"

    def _facts(self) -> dict[str, Any]:
        critical = self.data.critical_batch
        return {
            "measured": [
                {"batch": each.batch, "samples": each.samples, "runs": each.runs}
                for each in self.data.measured.values()
            ],
            "critical_batch": None if critical is None else dict(zip(("median", "low", "high"), critical, strict=True)),
            "law_draws": [[float(f"{value:.6g}") for value in draw] for draw in self.data.law_draws[:_LAW_DRAWS]],
        }

    def _searched(self) -> list[str]:
        if not self.found.searched:
            return []
        ruled = sum(plan.step.least for plan in self.plans)
        full = f"{counted(self.found.searched, 'plan')}: {self.found.evaluated:,} evaluated in full"
        return [f"{full}, {ruled:,} ruled out by a lower bound of their time"]

    def _json(self, text: str, plans: list[dict[str, Any]], chosen: int | None) -> dict[str, Any]:
        return {
            "format": "tutti plan",
            "version": 1,
            "task": self.subject.text,
            "target": {"metric": self.target.metric.name, "value": self.target.value}
            if isinstance(self.target, TrainingTarget)
            else None,
            "length": None if isinstance(self.target, TrainingTarget) else str(self.target),
            "headline": text,
            "chosen": chosen,
            "price": None
            if self.asked.price is None
            else {"device_hour": self.asked.price, "date": str(self.asked.price_date)},
            "data": self._facts(),
            "plans": plans,
            "searched": self.found.searched,
            "evaluated": self.found.evaluated,
            "refused": self.found.refusals(),
            "rests_on": self.found.rests,
            "guesses": self.found.guesses,
            "notes": self.notes,
            "back_test": "docs/backtest.md",
        }

    def _print(
        self,
        text: str,
        best: Sequence[DevicePlan],
        marks: dict[int, list[str]],
        place: dict[int, int],
        reasons: dict[int, LostReason],
    ) -> None:
        from tutti.planning.device_plan import draw_ends, last_gain
        from tutti.planning.plan_file import plan_seconds

        print(f"{text[0].upper()}{text[1:]}.\n")
        besides = any(plan.other for plan in best)
        goal = "time to target" if isinstance(self.target, TrainingTarget) else "time"
        times = [goal, *(["besides training"] if besides else []), "draws 5–95 %", "band 90 %"]
        step = ["step (5–95 %) [band]", "memory", "samples"]
        heads = ["devices", "batch", *step, *times, "gain", "cost (5–95 %) [band]", "plan"]
        rows = []
        for number, plan in enumerate(best):
            low, high = draw_ends(plan.draws)
            gain = last_gain(best, number)
            rows.append(
                [
                    str(plan.devices),
                    str(plan.step.batch),
                    _step_text(plan),
                    "unknown" if plan.step.memory is None else format_bytes(plan.step.memory["total"]),
                    f"{plan.data.samples:,.0f}",
                    plan_seconds(plan.seconds),
                    *([plan_seconds(sum(plan.other.values()))] if besides else []),
                    f"{plan_seconds(low)}–{plan_seconds(high)}",
                    "no band" if plan.band is None else "–".join(map(plan_seconds, plan.band)),
                    "" if gain is None else f"{gain:.2f} ×",
                    _cost_text(plan),
                    ", ".join([plan.step.label, *marks.get(place[id(plan)], ())]),
                ]
            )
        print_table(heads, rows)
        print()
        inside = {id(plan) for plan in best}
        for number, names in marks.items():
            if id(self.plans[number]) not in inside:
                print(f"{', '.join(names)}: {plan_in_words(self.plans[number])}")
        for plan, losers in zip(best, _runners_up(self.plans, best), strict=True):
            if losers:
                print(f"why not at {plan.devices}:")
            for p in losers:
                print(f"  {p.step.label}, batch {p.step.batch}: {reasons[place[id(p)]].text}")
        critical = self.data.critical_batch
        if critical is not None:
            print(f"critical batch {critical[0]:,.0f} samples (draws 5–95 %: {critical[1]:,.0f}–{critical[2]:,.0f})")
        for label, line in (
            *(("step", line) for line in dict.fromkeys(plan.step.basis for plan in best)),
            *(("data", line) for line in dict.fromkeys(plan.data.text for plan in best)),
            *(("band", line) for line in dict.fromkeys(plan.band_text for plan in best)),
            *(("searched", line) for line in self._searched()),
            *(("rests on", line) for line in self.found.rests),
            *(("GUESSED", line) for line in self.found.guesses),
            *(("refused", line) for line in self.found.refusal_lines()),
            *(("way out", line) for line in self.found.remedies),
            *(("note", line) for line in self.notes),
        ):
            print(f"{label:<9} {line}")
        if self.asked.price is not None:
            print(f"price     {self.asked.price:g} a device and hour, stated for {self.asked.price_date}")
        print(f"time      {_time_words(best)}")


def _planned_rate(
    plan: DevicePlan, base: PlannedRun, target: TrainingTarget, runs: Sequence[RunEvidence]
) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the configuration of a plan's run, and its learning rate with the rule in words."""
    from tutti.planning.plan_file import model_run, plan_config, rate_words

    near = model_run(plan, runs)
    config = plan_config(plan, base, target, near)
    value = config.optimizer_choice.options.lr * config.lr_rule.factor(config.batch_size)
    return config, {"value": value, "lr_scale": config.lr_scale, "text": rate_words(config, near)}


def _time_words(best: Sequence[DevicePlan]) -> str:
    """Say which seconds the times to the target include, by the plans of the table."""
    from tutti.planning.plan_file import plan_seconds

    known = next((plan for plan in best if plan.other), None)
    if known is None:
        return "of training alone: start, evaluations, saves and failures come on top (tutti goodput)"
    parts = ", ".join(f"{name} {plan_seconds(seconds)}" for name, seconds in known.other.items())
    missing = [name for name in ("start", "evaluation", "save") if name not in known.other]
    return (
        f"with what runs have measured besides training, at {counted(known.devices, 'device')}: {parts}; "
        f"{', '.join([*missing, 'failures'])} come on top"
    )


def _runners_up(plans: Sequence[DevicePlan], best: Sequence[DevicePlan]) -> list[list[DevicePlan]]:
    """Return for each number of devices the fastest losers: one of each strategy, then the next of any."""
    found = []
    for winner in best:
        losers = [p for p in plans if p.devices == winner.devices and p is not winner]
        firsts = {p.step.family: p for p in reversed(losers)}
        heads = sorted(firsts.values(), key=lambda plan: plan.seconds)
        others = [p for p in losers if p not in heads]
        found.append(sorted([*heads, *others[: max(0, _SHOWN - len(heads))]], key=lambda plan: plan.seconds))
    return found


def _script_run(plan: DevicePlan, named: TaskOrScript, loaded: ScriptTask) -> str:
    """Return what to change in a script for a plan, and the command that starts it."""
    options: dict[str, Any] = {"strategy": plan.step.strategy, "batch_size": plan.step.batch, **dict(plan.step.options)}
    loader = ""
    if loaded.has_loader and plan.step.batch != loaded.options["batch_size"]:
        # Beside a loader, tutti.prepare takes no other batch.
        loader = f"DataLoader(…, batch_size={options.pop('batch_size')}), "
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    command = shlex.join(["tutti", "run", "-np", str(plan.devices), named.text, *named.arguments])
    return f"{loader}tutti.prepare(…, {given}), then {command}"


def plan_in_words(plan: DevicePlan) -> str:
    """Return a plan's devices, batch, strategy and time in words: ``4 devices, batch 256, mirrored, 3 min``.

    Args:
        plan: the plan.
    """
    from tutti.planning.plan_file import plan_seconds

    return f"{choice_in_words(plan)}, {plan_seconds(plan.seconds)}"


def choice_in_words(plan: DevicePlan) -> str:
    """Return a plan's devices, batch and strategy in words: ``4 devices, batch 256, mirrored``.

    Args:
        plan: the plan.
    """
    count = counted(plan.devices, "device")
    return f"{count}, batch {plan.step.batch}, {plan.step.label}"


def _step_text(plan: DevicePlan) -> str:
    """Return a plan's step time, the quantiles of its draws in parentheses, and its band, if any, in brackets."""
    from tutti.planning.device_plan import draw_ends
    from tutti.planning.plan_file import plan_seconds

    step = plan.step
    band = "" if step.band is None else f" [{'–'.join(map(plan_seconds, step.band))}]"
    return f"{plan_seconds(step.seconds)} ({'–'.join(map(plan_seconds, draw_ends(step.draws)))}){band}"


def _cost_text(plan: DevicePlan) -> str:
    """Return a plan's cost, the quantiles of its draws in parentheses, and its band, if it has one, in brackets."""
    if plan.cost is None or plan.cost_ends is None:
        return "no price"
    band = "" if plan.cost_band is None else f" [{'–'.join(map(_money, plan.cost_band))}]"
    return f"{_money(plan.cost)} ({'–'.join(map(_money, plan.cost_ends))}){band}"


def _money(cost: float) -> str:
    """Format a cost.

    >>> _money(1234.5), _money(0.001234)
    ('1,234.50', '0.0012')
    """
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}"
