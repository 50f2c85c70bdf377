"""``tutti bench strategies``: seconds of the strategies' Python code, from tiny runs in real processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests import worlds
from tutti.launcher import context
from tutti.launcher.context import World
from tutti.planning import bench_strategies
from tutti.workload.bench_timing import Findings


def measured_on_a_rank(names: tuple[str, ...]) -> dict[str, float]:
    subjects = tuple(each for each in bench_strategies._SUBJECTS if each.name in names)
    found = Findings(show=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_strategies, "_SUBJECTS", subjects)
        # The fewest runs and steps that have four figures: what the seconds are, no test can say.
        few = {"_WARM": 1, "_STEPS": 2, "_ROUNDS": 1, "_LAYERS": (2, 3), "_MICRO_BATCHES": (1, 2), "_SAMPLES": 4}
        for name, value in few.items():
            patch.setattr(bench_strategies, name, value)
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


RUNS = [(layers, parts) for layers in bench_strategies._LAYERS for parts in bench_strategies._MICRO_BATCHES]


def subject(name: str) -> bench_strategies._Subject:
    return next(each for each in bench_strategies._SUBJECTS if each.name == name)


@pytest.mark.parametrize(("name", "share"), [("mirrored", 1.0), ("sharded-3", 1.0), ("pipeline", 0.5)])
def test_the_excess_of_four_runs_is_cut_by_cause(name: str, share: float) -> None:
    want = {"step": 1.0, "tensor": 0.1, "micro_batch": 10.0, "unit": 5.0}
    held = {layers: share * len([*bench_strategies._model(layers).parameters()]) for layers, _ in RUNS}
    units = {layers: layers if name == "sharded-3" else held[layers] for layers, _ in RUNS}
    by_hand = {(layers, parts): 100.0 * layers * parts for layers, parts in RUNS}
    whole = {
        run: by_hand[run] + want["step"] + want["tensor"] * held[run[0]] + run[1] * (10.0 + 5.0 * units[run[0]])
        for run in RUNS
    }
    assert bench_strategies._fitted(whole, by_hand, subject(name)) == pytest.approx(want)


def test_no_cause_is_negative_and_small_runs_count_most() -> None:
    by_hand = dict.fromkeys(RUNS, 1.0)
    faster = bench_strategies._fitted(dict.fromkeys(RUNS, 0.5), by_hand, subject("mirrored"))
    assert set(faster.values()) == {0.0}
    # More layers seem to take less: the excess of the small run stays what was measured, up to a few percent.
    whole = {(2, 1): 2.0, (2, 4): 2.0, (6, 1): 1.9, (6, 4): 1.9}
    found = bench_strategies._fitted(whole, by_hand, subject("mirrored"))
    assert min(found.values()) >= 0 and found["step"] == pytest.approx(0.95, abs=0.03)


def test_the_faster_of_two_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 7.0, 3.0, 7.0, 5.0, 1.0, 5.0, 1.0])
    monkeypatch.setattr(bench_strategies, "_by_hand", lambda layers, parts: (0.0, 0.0))
    monkeypatch.setattr(bench_strategies, "_trained", lambda *_: next(seconds))
    given: dict[bench_strategies._Run, float] = {}

    def kept(whole: dict[bench_strategies._Run, float], *_: object) -> dict[str, float]:
        given.update(whole)
        return {}

    monkeypatch.setattr(bench_strategies, "_fitted", kept)
    monkeypatch.setattr(bench_strategies, "Communicators", Alone)
    world = SimpleNamespace(identity=SimpleNamespace(size=1, rank=0))
    bench_strategies.bench_strategies(cast(World, world), Findings(show=False))
    assert given == dict(zip(RUNS, [2.0, 1.0, 3.0, 1.0], strict=True))


class Alone:
    """Communicators of one rank."""

    def __init__(self, *_: object) -> None:
        self.world = self

    def all_gather(self, mine: torch.Tensor, text: str) -> list[torch.Tensor]:
        return [mine]
