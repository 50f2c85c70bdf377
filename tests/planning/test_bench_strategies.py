"""``tutti bench strategies``: seconds of the strategies' Python code, from tiny runs in real processes."""

from __future__ import annotations

import pytest

from tests import worlds
from tutti.launcher import context
from tutti.planning import bench_strategies
from tutti.workload.bench_timing import Findings


def measured_on_a_rank(names: tuple[str, ...]) -> dict[str, float]:
    subjects = tuple(each for each in bench_strategies._SUBJECTS if each.name in names)
    found = Findings(show=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_strategies, "_SUBJECTS", subjects)
        patch.setattr(bench_strategies, "_STEPS", 2)
        bench_strategies.bench_strategies(context.init("cpu"), found)
    return {name: figure.value for name, figure in found.figures.items()}


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, ("single",)), (2, ("mirrored", "sharded-3", "central_storage", "pipeline"))]
)
def test_every_strategy_has_figures_on_every_rank(ranks: int, names: tuple[str, ...]) -> None:
    found = worlds.run(ranks, measured_on_a_rank, names=names)
    parts = ("step", "tensor", "micro_batch", "unit")
    assert {*found[0]} == {f"strategy/{name}/{part}" for name in names for part in parts}
    assert all(rank == found[0] for rank in found) and all(value >= 0 for value in found[0].values())


def test_the_excess_of_four_runs_is_cut_by_cause() -> None:
    number = 11
    step, held, micro, unit = 1.0, 0.1, 10.0, 5.0
    excess = {
        (layers, parts): step + held * number * layers + parts * (micro + unit * layers)
        for layers in bench_strategies._LAYERS
        for parts in bench_strategies._MICRO_BATCHES
    }
    found = bench_strategies._fitted(excess, wrapped=True)
    assert found == pytest.approx({"step": step, "micro_batch": micro, "tensor": held, "unit": unit})
    assert bench_strategies._fitted(excess, wrapped=False)["unit"] == pytest.approx(unit / number)
    assert set(bench_strategies._fitted({key: -1.0 for key in excess}, wrapped=True).values()) == {0.0}
