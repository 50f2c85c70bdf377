"""The search finds the plan that an evaluation of all plans finds, and says why plans are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.planning.test_step_prediction import TASK, costs
from tutti.comm.collective_schedules import LinkCost
from tutti.errors import UsageError
from tutti.planning.conformal_band import CellScores
from tutti.planning.device_plan import MeasuredTarget, PlannedStep, TargetData, best_by_devices, device_plans
from tutti.planning.machine_choice import open_machine
from tutti.planning.memory_plan import model_facts
from tutti.planning.monte_carlo import DRAWS
from tutti.planning.plan_candidates import PlanCandidates, plan_config_of, step_key
from tutti.planning.plan_search import STRATEGIES, StepPricer, calibrate, plan_choices, search_plans
from tutti.planning.planned_run import PlannedRun
from tutti.planning.step_costs import StepCosts
from tutti.planning.step_prediction import TaskSizes, step_basis

DATA = TargetData([MeasuredTarget(8, 1600, 1), MeasuredTarget(64, 3200, 1)], None, {}, "digits")
BATCHES = (8, 16)
SLOW = LinkCost(1e-5, 1e6)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("own")
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    return f"{folder / 'task.py'}:own"


def pricer_of(task: str, prices: StepCosts, precision: str = "fp32") -> StepPricer:
    base = PlannedRun(precision=precision, optimizer="sgd:lr=0.1")
    return StepPricer(TaskSizes(task, base, ("blocks", "selective")), base, prices)


def searched(
    pricer: StepPricer, counts: tuple[int, ...], memory: float | None = None, measured: tuple[PlannedStep, ...] = ()
) -> PlanCandidates:
    found = PlanCandidates()
    choices = plan_choices(counts, BATCHES, STRATEGIES, pricer.checkpointing())
    calibrate(measured, pricer, found)
    search_plans(choices, measured, pricer, DATA, memory, found)
    return found


@pytest.mark.parametrize("machine", ["lab", "published"])
def test_the_search_finds_what_an_evaluation_of_all_plans_finds(machine: str, own: str) -> None:
    lab = machine == "lab"
    prices: StepCosts = costs(between=SLOW) if lab else open_machine("a100x2", "bf16", None, SLOW)
    pricer = pricer_of(own, prices, "fp32" if lab else "bf16")
    found = searched(pricer, (1, 2, 4))
    best = best_by_devices(device_plans(found.steps, DATA, None))
    assert [plan.devices for plan in best] == [1, 2, 4] and not any(plan.step.least for plan in best)
    every = [pricer.evaluate(step) for step in plan_choices((1, 2, 4), BATCHES, STRATEGIES, ("none",)) if fits(step)]
    whole = best_by_devices(device_plans(every, DATA, None))
    assert [plan.seconds for plan in best] == [plan.seconds for plan in whole]
    assert found.searched == len(found.steps) + sum(found.refused.values()) and found.evaluated < len(found.steps)
    assert any(step.least for step in found.steps)
    assert {step.family for step in every if step.devices == 4} >= {"tensor", "hybrid", "pipeline", "sharded"}
    assert {step.family for step in found.steps if step.devices == 4} >= {"tensor", "hybrid"}


def test_plans_that_share_prices_have_the_bounds_of_plans_alone(own: str) -> None:
    pricer = pricer_of(own, costs(between=SLOW))
    for step in plan_choices((1, 2, 4), BATCHES, STRATEGIES, pricer.checkpointing()):
        if fits(step):
            alone = StepPricer(pricer.sizes, pricer.base, pricer.costs).floor(step)
            shared = pricer.floor(step)
            assert np.array_equal(shared.draws, alone.draws) and shared.terms == alone.terms, step.label


def fits(step: PlannedStep) -> bool:
    """Five modules cannot be cut into eight stages."""
    return not ("interleaved" in step.strategy and step.devices == 4 and "stages=4" in step.strategy)


def test_memory_refuses_plans_and_makes_micro_batches_worth_it() -> None:
    prices = open_machine("a100x8", "bf16", None, None)
    base = PlannedRun(precision="bf16", optimizer="adam:lr=0.1", model="gpt:layers=2")
    pricer = StepPricer(TaskSizes("text", base, ("blocks",)), base, prices)
    assert pricer.checkpointing() == ("none", "blocks")
    whole = PlannedStep(2, 64, "mirrored", 0.0, np.zeros(0), {}, "")
    held = pricer.memory(whole)
    assert held["total"] == pricer.sizes.device_memory(plan_config_of(whole, base)).total
    room = 0.9 * held["total"]
    free, tight = (searched_text(pricer, memory) for memory in (None, room))
    (best,), (small,) = (best_by_devices(device_plans(found.steps, DATA, None)) for found in (free, tight))
    assert not best.step.options and small.step.label == "mirrored activation_checkpointing=blocks"
    assert small.seconds > best.seconds
    assert best.step.memory == held and small.step.memory is not None and small.step.memory["total"] <= room
    # The kind of bytes that takes most is named: a model this small holds little besides activations.
    assert max((size, kind) for kind, size in held.items() if kind != "total")[1] == "activations"
    (text,) = tight.refusals()
    (least, number, kept) = tight.lacking["mirrored"]
    assert number == sum(tight.refusals().values()) and least == kept["total"] - room
    assert text.startswith("mirrored: ") and "GiB short at the least, where activations takes most, " in text
    again = [step for step in tight.steps if "blocks" in step.label]
    assert again and all(step.terms["recomputation"] > 0 for step in again)


def test_a_plan_whose_memory_cannot_be_predicted_is_refused_alone(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pricer = pricer_of(own, costs(between=SLOW))
    known = StepPricer.memory

    def memory(self: StepPricer, step: PlannedStep) -> Mapping[str, float]:
        if step.family == "sharded":
            raise UsageError("the memory cannot be predicted")
        return known(self, step)

    monkeypatch.setattr(StepPricer, "memory", memory)
    found = searched(pricer, (2,), memory=1e12)
    assert any("the memory cannot be predicted" in text for text in found.refusals())
    assert any(step.family == "mirrored" for step in found.steps)
    # Without a limit such a plan is made, and its memory is unknown.
    free = {step.family: step.memory for step in searched(pricer, (2,)).steps if not step.least}
    assert free["sharded"] is None and free["mirrored"] is not None


def test_every_plan_of_a_refused_strategy_names_the_way_out(own: str) -> None:
    pricer = pricer_of(own, costs(between=SLOW))
    compiled = StepPricer(pricer.sizes, replace(pricer.base, compile="default"), pricer.costs)
    step = PlannedStep(2, 8, "pipeline:schedule=zero_bubble,stages=2", 0.0, np.zeros(0), {}, "")
    found = PlanCandidates()
    search_plans(iter((step, replace(step, batch=16))), (), compiled, DATA, None, found)
    assert sum(found.refused.values()) == 2 and list(found.remedies) == ["take schedule=1f1b, or leave out --compile"]


def test_every_evaluated_plan_has_the_memory_of_its_strategy(own: str) -> None:
    pricer = pricer_of(own, costs(between=SLOW))
    found = searched(pricer, (2,))
    for step in found.steps:
        if step.least:
            assert step.memory is None
        else:
            held = pricer.sizes.device_memory(plan_config_of(step, pricer.base))
            assert step.memory is not None and step.memory["total"] == held.total
            assert step.memory["parameters"] == held.parameters > 0
    whole, stages = (
        pricer.memory(made(2, 16, text, 0.0))["parameters"] for text in ("mirrored", "pipeline:stages=2,schedule=1f1b")
    )
    assert 0 < stages < whole


def searched_text(pricer: StepPricer, memory: float | None) -> PlanCandidates:
    found = PlanCandidates()
    choices = plan_choices((2,), (64,), ("mirrored",), pricer.checkpointing())
    search_plans(choices, (), pricer, DATA, memory, found)
    return found


def made(devices: int, batch: int, strategy: str, seconds: float) -> PlannedStep:
    return PlannedStep(devices, batch, strategy, seconds, np.full(DRAWS, seconds), {}, "made by hand", True)


def test_measured_steps_win_and_scale_the_others(own: str) -> None:
    pricer = pricer_of(own, costs())
    plain = pricer.evaluate(made(2, 16, "mirrored", 0.0))
    slower = made(2, 16, "ddp", 3 * plain.seconds)
    found = searched(pricer, (1, 2), measured=(slower,))
    (mine,) = (step for step in found.steps if step_key(step) == step_key(slower))
    assert (mine.seconds, mine.strategy, mine.basis) == (slower.seconds, "ddp", slower.basis)
    assert mine.memory == pricer.memory(slower)
    rest = [step for step in found.steps if step is not mine]
    assert rest and all("scaled × 3.00 by 1 measured step" in step.basis for step in rest)
    again = pricer.evaluate(made(2, 16, "mirrored", 0.0))
    assert again.seconds == pytest.approx(3 * plain.seconds)
    assert again.draws == pytest.approx(3 * plain.draws) and again.terms["compute"] == pytest.approx(
        3 * plain.terms["compute"]
    )
    assert "÷ predicted 3.00" in found.rests[0]
    calibrate((), pricer, found)
    assert pricer.evaluate(made(2, 16, "mirrored", 0.0)).seconds == pytest.approx(plain.seconds)


def test_a_simulated_step_has_a_band_where_steps_like_it_were_checked(own: str) -> None:
    pricer, step = pricer_of(own, costs()), made(2, 8, "mirrored", 0.0)
    pricer.residuals = {}
    assert pricer.evaluate(step).band is None and "no band" in pricer.evaluate(step).basis
    sets = {kind: CellScores((1.0,), 10) for kind in ("mlp", "cnn", "gpt")}
    pricer.residuals = {f"{step_basis(pricer.costs, 2)}, at most 2 ×": sets}
    found = pricer.evaluate(step)
    assert found.band is not None and found.band[0] < found.seconds < found.band[1]
    assert "30 series of 3 kinds" in found.basis
    # A lower bound has none, and neither has a prediction that a measured step scales: others were checked.
    assert pricer.floor(step).band is None
    pricer.factors = {"": (1.5, 1)}
    assert pricer.evaluate(step).band is None


def test_stages_and_tensor_ranks_of_hybrid_divide_the_devices() -> None:
    def meshes(devices: int, *strategies: str) -> set[str]:
        steps = plan_choices((devices,), (64,), strategies, ("none",))
        return {step.strategy.replace(",schedule=1f1b", "") for step in steps if "hybrid" in step.strategy}

    both = ("mirrored", "hybrid:schedule=1f1b")
    assert meshes(8, *both) == {f"hybrid:schedule=1f1b,stages={s},tensor={t}" for s, t in ((2, 2), (2, 4), (4, 2))}
    assert not meshes(2, "mirrored", "hybrid") and meshes(2, "hybrid") == {"hybrid:stages=1,tensor=2"}
    fixed = meshes(8, "hybrid:tensor=2,schedule=gpipe")
    assert fixed == {f"hybrid:tensor=2,schedule=gpipe,stages={stages}" for stages in (2, 4)}


def test_options_that_a_strategy_leaves_open_are_searched(tmp_path: Path) -> None:
    steps = list(plan_choices((4,), (64,), ("pipeline:stages=2",), ("none", "blocks")))
    assert {step.strategy for step in steps} == {
        f"pipeline:stages=2,schedule={name}" for name in ("1f1b", "gpipe", "interleaved", "zero_bubble")
    }
    # A share of 32 samples in 1, 2, 4 … 32 micro-batches, with and without recomputation.
    assert len(steps) == 4 * 6 * 2 and len({step_key(step) for step in steps}) == len(steps)
    fixed = list(plan_choices((4,), (64,), ("pipeline:stages=2,schedule=gpipe,micro_batches=4",), ("none",)))
    assert [step.label for step in fixed] == ["pipeline:stages=2,schedule=gpipe,micro_batches=4"]
    alone = {step.strategy for step in plan_choices((1,), (64,), STRATEGIES, ("none",))}
    assert alone == {"mirrored"}
    alone = {step.strategy for step in plan_choices((1,), (64,), ("tensor", "ddp", "sharded:stage=1"), ("none",))}
    assert alone == {"tensor:tensor=1", "ddp"}
    two = {step.strategy.partition(":")[0] for step in plan_choices((2,), (64,), ("ddp", "hybrid"), ("none",))}
    assert two == {"ddp"}
    assert not list(plan_choices((8,), (4,), ("mirrored",), ("none",)))


def test_memory_does_not_depend_on_the_strategy_that_was_sized_before(own: str) -> None:
    wrapped = PlannedRun(strategy="sharded:stage=3,units=2", devices="4")
    shared = TaskSizes(own, wrapped)
    assert shared.memory(replace(wrapped, strategy="mirrored")).unit == 0
    found = shared.memory(wrapped)
    assert (found.unit, found.rest) == (4 * 71 * 41, 4 * (5 * 70 + 42)) and found == model_facts(own, wrapped)
