"""Search the plans of each number of devices: batch, strategy, device mesh, micro-batch, schedule and recomputation.

Every plan has a lower bound in closed form (`step_floor`). Plans are evaluated as programs in the order of their
bounds, until no bound is below the fastest plan found: no plan that was not evaluated can be faster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tutti.config.layout_config import HybridConfig, PipelineConfig, TensorConfig
from tutti.config.spec import Spec
from tutti.config.strategy_choice import parse_strategy
from tutti.config.sync_config import ShardedConfig
from tutti.errors import UsageError, counted
from tutti.parallel import check_strategy
from tutti.planning.conformal_band import NO_BAND, Residuals, shipped_residuals
from tutti.planning.device_plan import DevicePlan, PlannedStep, TargetData, device_plans, may_tie
from tutti.planning.memory_plan import memory_rows
from tutti.planning.monte_carlo import DRAWS, median_draw
from tutti.planning.pass_prices import PassPrices
from tutti.planning.plan_candidates import PlanCandidates, plan_config_of, step_key
from tutti.planning.planned_run import PlannedRun
from tutti.planning.scaling_laws import Array
from tutti.planning.step_builders import build_step, rank_micro_batches
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_facts import StepFacts
from tutti.planning.step_floor import step_floor
from tutti.planning.step_prediction import TaskSizes, step_band, step_shares
from tutti.planning.step_program import evaluate_program

STRATEGIES = ("mirrored", "sharded", "pipeline", "tensor", "hybrid")
"""Strategies that a plan tries where none is given."""
_HYBRID = parse_strategy("hybrid")
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
_MOST_MICRO_BATCHES = 64
_MOST_STAGES = 64
_MOST_TENSOR = 8
"""Tensor ranks of the largest plan: their messages block every layer, and few nodes have more devices."""
_RUNNERS_UP = 6
_MOST_EVALUATED = 48


def plan_choices(
    counts: Sequence[int], batches: Sequence[int], strategies: Sequence[str], checkpointing: Sequence[str]
) -> Iterator[PlannedStep]:
    """Yield every combination of devices, batch, strategy, micro-batch and checkpointing that a search may choose.

    Micro-batches are 1, 1/2, 1/4, … 1/64 of a data rank's samples, unless the strategy fixes their number. A batch must
    have at least one sample for each data rank. On one device only ``mirrored``, ``single`` and the first of
    ``strategies`` are yielded. ``hybrid`` without options needs at least four devices, unless it is the only strategy.
    For pipeline stages that are split over tensor ranks, only the first element of ``checkpointing`` is yielded.

    Args:
        counts: numbers of devices.
        batches: global batch sizes, in samples.
        strategies: texts of ``--strategy``; options that they leave open are searched (``open_options``).
        checkpointing: values of ``--activation-checkpointing``, such as ``none``, ``blocks`` or ``selective``.

    Yields:
        Planned steps with devices, batch, text of the strategy and options. Their seconds are 0 and their draws empty:
        both are to be predicted (``StepPricer``).

    Raises:
        UsageError: an unknown strategy or option, or a number of devices that does not fit the strategy; raised while
            the iterator runs, not by the call.
    """
    for devices in counts:
        # One device alone has nothing to shard or cut.
        named = [s for s in strategies if devices > 1 or s == strategies[0] or parse_strategy(s).row.own_copies]
        # Two devices are one stage or one tensor rank each, which other strategies are.
        named = [s for s in named if devices > 3 or parse_strategy(s) != _HYBRID or len(strategies) == 1]
        for text in (text for name in named for text in open_options(name, devices)):
            choice = parse_strategy(text)
            ranks, shape = choice.data_ranks(devices), choice.shape(devices)
            # The simulator knows no recomputation in pipeline stages that are split over tensor ranks.
            recomputing = checkpointing[:1] if shape["stage"] > 1 and shape["tensor"] > 1 else checkpointing
            fixed = isinstance(choice.layout, PipelineConfig) and choice.layout.micro_batches is not None
            for batch in (batch for batch in batches if batch >= ranks):
                share = math.ceil(batch / ranks)
                for micro_batch in [None] if fixed else _micro_batches(share):
                    for recomputed in recomputing:
                        options = (
                            *([("micro_batch", micro_batch)] if micro_batch is not None else []),
                            *([("activation_checkpointing", recomputed)] if recomputed != "none" else []),
                        )
                        yield PlannedStep(devices, batch, text, 0.0, np.zeros(0), {}, "", False, options)


def open_options(text: str, devices: int) -> list[str]:
    """Return texts of ``--strategy`` with every combination of the options to search that ``text`` leaves open.

    The options to search are the ZeRO stage of ``sharded``; the number of stages and the schedule of ``pipeline``; the
    number of tensor ranks of ``tensor``; and for ``hybrid`` the numbers of stages and of tensor ranks, and the
    schedule. Numbers are powers of two from 2 that divide the number of devices, up to 64 stages and 8 tensor ranks; 1
    if no power divides it. For ``hybrid``, stages × tensor ranks must divide the number of devices, too; if no pair
    does, the one text has one stage and the largest number of tensor ranks.

    Args:
        text: value of ``--strategy``, whose options are kept.
        devices: number of devices of the plan.

    Returns:
        One text for each combination; ``[text]``, with its options in normal form, where nothing is to be searched.

    Raises:
        UsageError: an unknown strategy or option.

    >>> open_options("hybrid:schedule=1f1b", 8)
    ['hybrid:schedule=1f1b,stages=2,tensor=2', 'hybrid:schedule=1f1b,stages=2,tensor=4', \
'hybrid:schedule=1f1b,stages=4,tensor=2']
    >>> open_options("sharded", 4), open_options("pipeline:schedule=gpipe", 4), open_options("mirrored", 4)
    (['sharded:stage=1', 'sharded:stage=2', 'sharded:stage=3'], ['pipeline:schedule=gpipe,stages=2', \
'pipeline:schedule=gpipe,stages=4'], ['mirrored'])
    """
    given, choice = Spec.parse(text, "--strategy"), parse_strategy(text)
    layout, sync = choice.layout, choice.sync
    extents = [str(1 << power) for power in range(1, _MOST_STAGES.bit_length()) if devices % (1 << power) == 0]
    several = [extent for extent in extents if int(extent) <= _MOST_TENSOR] or ("1",)
    searched: dict[str, Sequence[str]] = {}
    if isinstance(sync, ShardedConfig):
        searched["stage"] = ("1", "2", "3")
    if isinstance(layout, PipelineConfig):
        searched["stages"] = extents or ("1",)
    if isinstance(layout, TensorConfig):
        searched["tensor"] = several
    if isinstance(layout, PipelineConfig):
        searched["schedule"] = _SCHEDULES
    found = [dict(given.options)]
    for option, values in searched.items():
        if option not in given.options:
            found = [{**each, option: value} for each in found for value in values]
    if isinstance(layout, HybridConfig) and "/" not in given.options.get("stages", ""):
        fitting = [each for each in found if devices % (int(each["stages"]) * int(each["tensor"])) == 0]
        alone = {"stages": "1", "tensor": several[-1], **given.options}
        found = fitting or [alone]
    return [str(Spec(given.name, each)) for each in found]


def _micro_batches(share: int) -> list[int | None]:
    """Return the sizes of micro-batches that cut a share into 1, 2, 4 … parts; None for the whole share."""
    found: dict[int | None, None] = {None: None}
    number = 2
    while number <= min(share, _MOST_MICRO_BATCHES):
        found[math.ceil(share / number)] = None
        number *= 2
    return list(found)


@dataclass
class StepPricer:
    """Predicts the seconds and memory of planned training steps on a machine, with a cache over similar plans.

    Attributes:
        sizes: traces of the task's model and loss, made once for each partition of the model.
        base: configuration with the options of the run besides those of a plan; a task's own optimizer takes the place
            of its ``optimizer``.
        costs: durations of computing and communication on the machine.
        factors: pairs by name of the strategy, and under "" for all strategies: measured ÷ predicted seconds of earlier
            steps, by which predictions are multiplied, and the number of these steps.
        residuals: scores of checked predictions (errors over the stated uncertainty, by class and source) from which 90
            % bands of predicted steps are derived.
    """

    sizes: TaskSizes
    base: PlannedRun
    costs: StepCosts
    factors: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    residuals: Residuals = field(default_factory=shipped_residuals)
    _prices: dict[tuple[int, int], PassPrices] = field(default_factory=dict)
    _checked: dict[tuple[str, int], UsageError | None] = field(default_factory=dict)
    _facts: dict[tuple[str, int, str], StepFacts] = field(default_factory=dict)
    _meshes: dict[tuple[str, int], PlannedRun] = field(default_factory=dict)

    def floor(self, step: PlannedStep) -> PlannedStep:
        """Compute a lower bound of the seconds of a planned training step, which is much cheaper than a simulation.

        A strategy without such a bound gets its simulated seconds, as from ``evaluate``. The bound is multiplied by the
        factor that ``calibrate`` has found (measured ÷ predicted seconds of earlier steps), if there is one. The call
        sets the number of devices in ``costs`` to that of ``step`` (``share_node``).

        Args:
            step: devices, batch, strategy and options; its seconds are not read.

        Returns:
            A copy of ``step`` with ``seconds`` (median of the bound), ``draws`` (array of shape (256,), Monte Carlo
            draws of the bound), ``terms`` (its seconds by cause), ``basis`` in words, and ``least``: True for a bound,
            False where the step was simulated.

        Raises:
            UsageError: the batch is larger than the data set; or the step cannot be simulated: its strategy or options
                are unknown or refused (``check_strategy``, ``check_buildable``), the model cannot be traced or cut into
                stages, or the data on the machine lack something that the step needs.
        """
        config, facts, prices = self._open(step)
        bound = step_floor(facts, config, self.costs, prices)
        if bound is None:
            return self.evaluate(step)
        return self._made(step, bound.seconds, self._terms(bound.terms, config, prices), least=True)

    def evaluate(self, step: PlannedStep) -> PlannedStep:
        """Predict the seconds of a planned training step by simulating all its computation and messages.

        The prediction is multiplied by the factor that ``calibrate`` has found (measured ÷ predicted seconds of earlier
        steps), if there is one. The call sets the number of devices in ``costs`` to that of ``step`` (``share_node``).

        Args:
            step: devices, batch, strategy and options; its seconds are not read.

        Returns:
            A copy of ``step`` with ``seconds`` (median), ``draws`` (array of shape (256,), Monte Carlo draws of the
            seconds), ``terms`` (seconds by cause, such as ``compute``), ``basis`` in words, and ``least`` False: the
            seconds are no lower bound.

        Raises:
            UsageError: the batch is larger than the data set; or the step cannot be simulated: its strategy or options
                are unknown or refused (``check_strategy``, ``check_buildable``), the model cannot be traced or cut into
                stages, or the data on the machine lack something that the step needs.
        """
        config, facts, prices = self._open(step)
        program, slow = build_step(facts, config, self.costs, prices)
        times = evaluate_program(program, DRAWS)
        shares, middle = step_shares(times, slow, program.devices > 1), median_draw(times.seconds)
        terms = {name: share * middle for name, share in shares.items()}
        return self._made(step, times.seconds, self._terms(terms, config, prices), least=False)

    def memory(self, step: PlannedStep) -> Mapping[str, float]:
        """Return the predicted bytes on a plan's fullest device by kind, such as ``activations``, and their ``total``.

        Args:
            step: the plan: devices, batch, strategy and options.

        Raises:
            UsageError: the devices do not fit the strategy, or the model of a pipeline plan cannot be cut into stages.
            DataError: a sample of the task's data cannot be read.
        """
        return memory_rows(self.sizes.device_memory(self._config(step)))

    def sized(self, step: PlannedStep) -> PlannedStep:
        """Return a copy of a plan with its predicted memory.

        ``step`` itself is returned if its seconds are only a lower bound, or its memory cannot be predicted.

        Args:
            step: the plan: devices, batch, strategy and options.

        Raises:
            DataError: a sample of the task's data cannot be read.
        """
        if step.least:
            return step
        try:
            return replace(step, memory=self.memory(step))
        except UsageError:
            return step

    def checkpointing(self) -> tuple[str, ...]:
        """Return the values of ``--activation-checkpointing`` that find something to recompute in the task's model.

        Returns:
            ``none`` first, then the other choices with something to recompute, such as ``blocks`` and ``selective``.
            Only choices that ``sizes``, the traces of the model, were created for are tried.

        Raises:
            UsageError: the model cannot be traced.
        """
        return self.sizes.step(
            replace(self.base, strategy="mirrored", devices="1", workers=None)
        ).workload.checkpointing()

    def _open(self, step: PlannedStep) -> tuple[PlannedRun, StepFacts, PassPrices]:
        if step.batch > self.sizes.samples:
            raise UsageError(
                f"a batch of {step.batch:,} is larger than the data set of {counted(self.sizes.samples, 'sample')}"
            )
        self._check(step)
        config = self._config(step)
        key = step.strategy, step.devices, config.activation_checkpointing
        if key not in self._facts:
            self._facts[key] = self.sizes.step(config)
        facts = self._facts[key]
        self.costs.share_node(step.devices)
        known = id(facts.workload), min(step.devices, self.costs.network.per_node)
        if known not in self._prices:
            self._prices[known] = PassPrices(facts.workload, self.costs)
        return config, facts, self._prices[known]

    def _check(self, step: PlannedStep) -> None:
        """Raise UsageError where the strategy of a plan cannot run on its devices; found once a device mesh."""
        key = step.strategy, step.devices
        if key not in self._checked:
            compiled = self.base.compile_choice
            graphs = compiled is not None and compiled.records_graphs
            try:
                check_strategy(step.choice, step.devices, workers=None, compiled=compiled is not None, graphs=graphs)
                self._checked[key] = None
            except UsageError as error:
                self._checked[key] = error.with_traceback(None)
        if (refusal := self._checked[key]) is not None:
            raise UsageError(refusal.what, why=refusal.why, remedy=refusal.remedy)

    def _config(self, step: PlannedStep) -> PlannedRun:
        """Return the configuration of a plan, as ``plan_config_of`` does; options are parsed once a device mesh."""
        key, options = (step.strategy, step.devices), dict(step.options)
        if key not in self._meshes:
            self._meshes[key] = replace(plan_config_of(step, self.base), optimizer=self.sizes.optimizer)
        given: Any = options.get("micro_batch"), options.get("activation_checkpointing", "none")
        return self._meshes[key].sized(step.batch, *given)

    def _made(self, step: PlannedStep, seconds: Array, terms: Mapping[str, float], least: bool) -> PlannedStep:
        factor, number = self.factors.get(step.family, self.factors.get("", (1.0, 0)))
        draws = seconds * factor
        band, why = (None, NO_BAND) if least else step_band(draws, self.costs, step.devices, self.residuals, number > 0)
        basis = f"predicted for {self.costs.name}; {why if band is None else f'90 % band: {why}'}"
        if number:
            basis += f"; scaled × {factor:.2f} by {counted(number, 'measured step')}"
        scaled = {name: value * factor for name, value in terms.items()}
        middle = median_draw(draws)
        return replace(step, seconds=middle, draws=draws, terms=scaled, basis=basis, least=least, band=band)

    def _terms(self, terms: Mapping[str, float], config: PlannedRun, prices: PassPrices) -> dict[str, float]:
        """Return the terms with recomputation apart from the rest of computing."""
        choice = config.activation_checkpointing
        if choice == "none":
            return dict(terms)
        stages = config.shape["stage"]
        again = sum(
            median_draw(prices.total("backward", samples, choice) - prices.total("backward", samples, "none"))
            for worker in rank_micro_batches(config)
            for samples in worker
        )
        again = min(again / stages, terms["compute"])
        return {**terms, "compute": terms["compute"] - again, "recomputation": again}


def calibrate(measured: Sequence[PlannedStep], pricer: StepPricer, found: PlanCandidates) -> None:
    """Compare measured steps with their predictions, and set the factors that multiply later predictions.

    A factor is the geometric mean of measured ÷ predicted seconds, by strategy and over all strategies. Steps that
    cannot be simulated are skipped; where none is left, there are no factors, and predictions stay as they are.

    Args:
        measured: steps that runs have measured.
        pricer: predicts the steps, and receives ``factors``: a dict from the name of a strategy, and from "" for all
            strategies, to a pair of the factor and the number of steps behind it. Factors set before are discarded.
        found: receives a line in words on the factors in its list ``rests``.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    pricer.factors = {}
    for step in measured:
        try:
            logs[step.family].append(math.log(step.seconds / pricer.evaluate(step).seconds))
        except UsageError:
            continue
    every = [value for values in logs.values() for value in values]
    if not every:
        return
    pricer.factors = {name: (math.exp(float(np.mean(v))), len(v)) for name, v in {**logs, "": every}.items()}
    factor, spread = pricer.factors[""][0], math.exp(float(np.std(every)))
    number = counted(len(every), "measured step")
    found.rests.append(f"{number}: ÷ predicted {factor:.2f} (× ÷ {spread:.2f}), which scales predictions")


def search_plans(
    choices: Iterator[PlannedStep],
    measured: Sequence[PlannedStep],
    pricer: StepPricer,
    data: TargetData,
    memory: float | None,
    found: PlanCandidates,
) -> None:
    """Find the fastest plan for each number of devices, and write the steps of all plans into ``found``.

    Plans are ordered by a lower bound of their time, and only plans that may be the fastest are simulated, besides a
    few runners-up.

    Args:
        choices: plans to search, without seconds: devices, batch, strategy and options, as from ``plan_choices``.
        measured: steps that runs have measured, which replace predictions of the same plan.
        pricer: predicts all other steps.
        data: number of training samples to the target at any batch size.
        memory: bytes of a device's memory; None where memory is not to be checked.
        found: receives ``steps`` (measured and simulated steps with their memory, and steps that have only a lower
            bound of their seconds, without memory), ``refused`` (number of plans by reason), ``lacking`` (plans that do
            not fit into memory, by strategy), and in the lists ``rests`` and ``guesses`` lines on sources and guesses.
            Its ``searched`` grows by the number of plans that ``choices`` yielded, and ``evaluated`` by the number of
            simulated plans.

    Raises:
        UsageError: the data to the target are unknown at the batch of a measured step. A plan whose seconds or memory
            cannot be predicted raises nothing and is counted in ``refused``.
    """
    known = {step_key(step) for step in measured}
    rows: dict[int, list[DevicePlan]] = defaultdict(list)
    for step in choices:
        found.searched += 1
        try:
            if step_key(step) not in known:
                rows[step.devices] += device_plans([pricer.floor(step)], data, None)
        except UsageError as error:
            found.refuse(step.family, error)
    steps = [*measured]
    for devices, plans in rows.items():
        own = [step for step in measured if step.devices == devices]
        best = min(device_plans(own, data, None), key=lambda plan: plan.seconds, default=None)
        evaluated, families = 0, set[str]()
        for plan in sorted(plans, key=lambda plan: plan.seconds):
            if best is not None and plan.seconds >= best.seconds and plan.step.family in families:
                near = evaluated < _MOST_EVALUATED and may_tie(plan, best)
                if evaluated >= _RUNNERS_UP and not near:
                    steps.append(plan.step)
                    continue
            try:
                if memory is not None and (held := pricer.memory(plan.step))["total"] > memory:
                    found.lack(plan.step.family, held, memory)
                    continue
                (exact,) = device_plans([pricer.evaluate(plan.step)], data, None)
            except UsageError as error:
                found.refuse(plan.step.family, error)
                continue
            evaluated += 1
            families.add(plan.step.family)
            steps.append(exact.step)
            best = exact if best is None or exact.seconds < best.seconds else best
    # Steps without a bound were simulated at once.
    found.evaluated += sum(not step.least for step in steps[len(measured) :])
    found.steps = [pricer.sized(step) for step in steps]
    found.rests += [text for text in pricer.costs.rests if text not in found.rests]
    found.guesses += [text for text in pricer.costs.guesses if text not in found.guesses]
