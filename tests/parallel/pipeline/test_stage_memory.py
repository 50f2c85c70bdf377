"""What devices of a pipeline will hold, before there are any."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tutti import parallel
from tutti.errors import UsageError
from tutti.planning import memory_plan, pipeline_memory, step_prediction
from tutti.planning.planned_run import PlannedRun
from tutti.workload.memory_formula import Memory

BASE = {"batch_size": 32, "device": "cpu", "devices": "2", "optimizer": "adam"}
TEXT = {**BASE, "model": "gpt:layers=4,width=32,block=16", "data": __file__}


def config(strategy: str, **options: object) -> PlannedRun:
    return PlannedRun(**{**TEXT, "strategy": strategy, **options})  # type: ignore[arg-type]


def test_parameters_are_those_of_the_stages() -> None:
    asked = config("pipeline:cuts=block2,micro_batches=4")
    ahead, found = pipeline_memory.observe_stages("text", asked, {}), memory_plan.model_facts("text", asked)
    first, last = pipeline_memory.plan_stage_memory(found, ahead, asked)
    from tutti.tasks import task_registry

    model = task_registry.load_task("text", data=__file__, model=TEXT["model"]).model()
    sizes = [sum(p.nbytes for p in child.parameters()) for child in model]
    names = [name for name, _ in model.named_children()]
    assert first.parameters == sum(sizes[: names.index("block2")]) and last.parameters == sum(sizes) - first.parameters
    assert (first.optimizer, first.gradients) == (2 * first.parameters, first.parameters)
    assert ahead.names == ("block2",) and abs(sum(ahead.shares) - 1) < 1e-9


def test_what_a_grid_shares_out_is_divided() -> None:
    whole, split = config("pipeline:cuts=block2"), config("hybrid:stages=2,shards=2,tensor=2,cuts=block2", devices="8")
    found, ahead = memory_plan.model_facts("text", whole), pipeline_memory.observe_stages("text", whole, {})
    for one, part in zip(
        pipeline_memory.plan_stage_memory(found, ahead, whole),
        pipeline_memory.plan_stage_memory(found, ahead, split),
        strict=True,
    ):
        assert part.parameters == one.parameters / 2 and part.optimizer == one.optimizer / 4


def test_activations_follow_the_order() -> None:
    """gpipe keeps all micro-batches, 1f1b as many as there are stages to come, model_parallel one."""
    kept = {}
    for name in ("gpipe", "1f1b", "zero_bubble"):
        asked = config(f"pipeline:schedule={name},cuts=block2,micro_batches=8")
        found = memory_plan.model_facts("text", asked)
        kept[name] = [
            plan.activations
            for plan in pipeline_memory.plan_stage_memory(
                found, pipeline_memory.observe_stages("text", asked, {}), asked
            )
        ]
    assert kept["gpipe"][0] > 2 * kept["1f1b"][0]
    assert kept["1f1b"][1] < kept["gpipe"][1] / 3
    assert kept["zero_bubble"][0] >= kept["1f1b"][0]


def test_recomputing_keeps_less() -> None:
    less, more = (
        pipeline_memory.observe_stages("text", config("pipeline:cuts=block2", activation_checkpointing=kind), {})
        for kind in ("blocks", "none")
    )
    assert sum(b.kept for b in less.blocks) < 0.7 * sum(b.kept for b in more.blocks)


def test_samples_and_activations_are_in_proportion() -> None:
    small, large = (
        pipeline_memory.observe_stages("text", config("pipeline", micro_batch=micro), {}) for micro in (4, 8)
    )
    assert sum(b.kept for b in large.blocks) == pytest.approx(2 * sum(b.kept for b in small.blocks), rel=0.05)


def test_skip_connections_enter_every_stage_that_they_pass() -> None:
    ahead = pipeline_memory.observe_stages(f"{__file__}:skip", PlannedRun(**{**BASE, "strategy": "pipeline"}), {})
    entering = {block.name: block.entering for block in ahead.blocks}
    assert entering["up"] == 2 * entering["down"]


def skip() -> object:
    """A model that adds what came in to what went out."""
    from torch import Tensor, nn

    from tutti.tasks.task import Task

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, inputs: Tensor) -> Tensor:
            x = self.first(inputs)
            return self.up(self.down(x)) + x

    return Task(
        name="skip", model=Skip, train=torch.randn(64, 8), loss=lambda model, batch: model(batch).square().mean()
    )


def test_partitions_of_one_graph_share_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of each partition is that of a run of its own, however its stages are cut."""
    cuts = {"block2": "2", "block3": "2", "block2+block3": "3"}
    plans = [config(f"pipeline:cuts={at},schedule=gpipe", devices=n, micro_batch=8) for at, n in cuts.items()]
    sizes, found = step_prediction.TaskSizes("text", plans[0]), memory_plan.model_facts("text", plans[0])
    alone = [
        max(pipeline_memory.plan_stage_memory(found, pipeline_memory.observe_stages("text", plan, {}), plan), key=total)
        for plan in plans
    ]
    ran: list[object] = []
    run_graph = step_prediction.run_graph
    monkeypatch.setattr(step_prediction, "run_graph", lambda *given: ran.append(given) or run_graph(*given))
    assert [sizes.device_memory(plan) for plan in plans] == alone and len(ran) == 1
    assert len({plan.activations for plan in alone}) == 2


def total(memory: Memory) -> float:
    return memory.total


def test_a_cut_by_memory_fits_where_that_by_time_does_not() -> None:
    """All the time is in the first block, most parameters in the rest."""
    asked = config("pipeline")
    names = ["embed", *(f"block{n}" for n in range(1, 5)), "norm", "head"]
    took = {name: 1.0 if name == "embed" else 1e-3 for name in names}
    ahead, found = pipeline_memory.observe_stages("text", asked, took), memory_plan.model_facts("text", asked)
    most = max(plan.total for plan in pipeline_memory.plan_stage_memory(found, ahead, asked))
    better = pipeline_memory.fitting_stage_plan(found, ahead, asked, 0.8 * most)
    assert better is not None and better.names != ahead.names
    assert max(plan.total for plan in pipeline_memory.plan_stage_memory(found, better, asked)) <= 0.8 * most
    chosen = pipeline_memory.with_cuts(asked, better)
    again = pipeline_memory.observe_stages("text", chosen, {})
    assert again.names == better.names
    assert [p.parameters for p in pipeline_memory.plan_stage_memory(found, again, chosen)] == [
        p.parameters for p in pipeline_memory.plan_stage_memory(found, better, asked)
    ]


def test_the_nearest_plan_fits() -> None:
    asked = config("pipeline:micro_batches=2")
    ahead, found = pipeline_memory.observe_stages("text", asked, {}), memory_plan.model_facts("text", asked)
    total = max(plan.total for plan in pipeline_memory.plan_stage_memory(found, ahead, asked))
    state = max(plan.state for plan in pipeline_memory.plan_stage_memory(found, ahead, asked))
    for room in (0.9 * total, 0.9 * state):
        other = pipeline_memory.nearest_stage_plan(found, ahead, asked, room)
        assert other is not None
        again = pipeline_memory.observe_stages("text", other, {})
        assert max(plan.total for plan in pipeline_memory.plan_stage_memory(found, again, other)) <= 1.02 * room
        parallel.check_strategy(other.strategy_choice, int(other.devices))
    assert int(other.devices) > 2, "smaller micro-batches cannot make the state smaller"
    assert pipeline_memory.nearest_stage_plan(found, ahead, asked, 1000) is None


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="no module 'nowhere'"):
        pipeline_memory.observe_stages("text", config("pipeline:cuts=nowhere"), {})


def test_blocks_are_whole_and_in_order() -> None:
    ahead = pipeline_memory.observe_stages(
        "digits", PlannedRun(**{**BASE, "strategy": "pipeline:schedule=interleaved"}), {}
    )
    assert len(ahead.bounds) == 5 and all(a < b for a, b in pairwise(ahead.bounds))
    assert ahead.bounds[-1] == len(ahead.blocks) and Path(__file__).is_file()
