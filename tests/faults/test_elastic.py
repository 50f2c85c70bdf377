"""Faults 17 and 18: a run that is resumed again and again, on other devices and under other strategies.

Seventy samples in batches of 23 over five workers: an epoch is 23, 23, 23 and 1 sample, and nothing divides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.models import loss, model, samples
from tests.contract.table import largest_difference
from tutti.data.order import permutation
from tutti.launcher import context
from tutti.train.run_checkpoints import Checkpoints

pytestmark = pytest.mark.faults
Record = Callable[[str, object], None]
Place = tuple[str, int]

COUNT, BATCH, WORKERS, STEPS = 70, 23, 5, 12
OPTIMIZERS = ["adamw:lr=0.01,weight_decay=0.1", "sgd:lr=0.05,momentum=0.9"]


def told(net: Any, batch: Any) -> Any:
    return loss(net, batch[:2])


def leg(strategy: str, folder: str, until: int, optimizer: str, **settings: Any) -> dict[str, Any]:
    """Become the newest checkpoint in ``folder``, train to step ``until`` and save; what this rank saw and has."""
    run = tutti.prepare(
        model(),
        optimizer,
        (*samples(COUNT), torch.arange(COUNT)),
        told,
        strategy=strategy,
        workers=WORKERS,
        batch_size=BATCH,
        precision="fp64",
        **settings,
    )
    warnings: list[str] = []
    facts = {"workers": WORKERS, "seed": 0, "optimizer": optimizer, "config_sha256": "0" * 64}
    checkpoints = Checkpoints(run, Path(folder), context.current(), facts, keep=1, warn=warnings.append)
    checkpoints.restore()
    ids, losses = {}, {}
    while run.global_step < until:
        for batch in run.epoch(*run.data_position):
            losses[run.global_step] = run.step(batch)
            ids[run.global_step - 1] = batch[2].tolist()
            if run.global_step == until:
                break
    checkpoints.save({})
    checkpoints.wait()
    state = {name: tensor.numpy().copy() for name, tensor in run.state().items()}
    return {"part": run.context.mesh.data_rank, "ids": ids, "losses": losses, "state": state, "warnings": warnings}


def chain(folder: Path, places: Sequence[Place], stops: Sequence[int], **settings: Any) -> Any:
    """One run through ``places``, leaving each at its stop: the ids of every global batch, losses, state, warnings."""
    ids: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    warnings: list[str] = []
    for (strategy, devices), until in zip(places, stops, strict=True):
        answers = worlds.run(devices, leg, strategy=strategy, folder=str(folder), until=until, **settings)
        losses |= answers[0]["losses"]
        warnings += answers[0]["warnings"]
        parts = {answer["part"]: answer["ids"] for answer in answers}
        for step in answers[0]["ids"]:
            assert step not in ids, "a step was made twice"
            ids[step] = [number for part in sorted(parts) for number in parts[part][step]]
    assert list(ids) == list(range(STEPS))
    return ids, losses, answers[0]["state"], warnings


def mismatches(ids: dict[int, list[int]]) -> int:
    """Global batches that do not hold the samples of the one global order, in order."""
    orders = [permutation(0, epoch, COUNT).tolist() for epoch in range(STEPS * BATCH // COUNT + 1)]
    want = [order[start : start + BATCH] for order in orders for start in range(0, COUNT, BATCH)]
    return sum(ids[step] != want[step] for step in range(STEPS))


def drawn_stops(draw: random.Random, legs: int) -> list[int]:
    return [*sorted(draw.sample(range(1, STEPS), legs - 1)), STEPS]


CHAINS: dict[str, list[Place]] = {
    "1-2-4-2-1": [("single", 1), ("mirrored", 2), ("mirrored", 4), ("mirrored", 2), ("single", 1)],
    "strategies": [
        *[("model_parallel", 3), ("mirrored", 4), ("single", 1), ("mirrored:algorithm=native", 3)],
        *[("model_parallel", 4), ("central_storage", 3), ("mirrored", 2)],
    ],
    "local_sgd": [("local_sgd:period=3", devices) for devices in (1, 3, 4, 2, 1)],
}


@pytest.mark.row(17)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", CHAINS)
def test_other_devices_and_strategies(
    name: str, exact: bool, tmp_path: Path, seed: int, record_property: Record
) -> None:
    places, draw = CHAINS[name], random.Random(f"{name} {exact} {seed}")
    settings = {
        "optimizer": draw.choice(OPTIMIZERS),
        "micro_batch": draw.choice([None, 2]),
        "data_workers": 2 * (seed % 2),
    }
    alone = "single" if name != "local_sgd" else places[0][0]
    _, losses, want, _ = chain(tmp_path / "alone", [(alone, 1)], [STEPS], reproducible=True, **settings)
    stops = drawn_stops(draw, len(places))
    ids, own, state, warnings = chain(tmp_path / "chain", places, stops, reproducible=exact, **settings)
    record_property("batches with other samples", mismatches(ids))
    assert mismatches(ids) == 0 and warnings == []
    difference = largest_difference(state, want)
    record_property(f"max|Δ| {'reproducible' if exact else 'by default, float64'}", difference)
    assert difference <= (0 if exact else 1e-10)
    assert own == losses if exact else own == pytest.approx(losses, rel=1e-9)


@pytest.mark.row(17)
def test_workers_that_trained_alone_are_merged_with_a_message(tmp_path: Path) -> None:
    places = [("mirrored", 3), ("local_sgd:period=3", 4), ("model_parallel", 3)]
    settings: dict[str, Any] = {"optimizer": OPTIMIZERS[0], "reproducible": True}
    ids, _, _, warnings = chain(tmp_path, places, [3, 8, STEPS], **settings)
    assert mismatches(ids) == 0
    assert len(warnings) == 1 and "parameters of the saved workers are averaged" in warnings[0]


SAME: list[str] = ["single", "mirrored", "mirrored:algorithm=native", "model_parallel", "local_sgd:period=3"]
SAME += ["central_storage", "diloco:period=3"]


@pytest.mark.row(18)
@pytest.mark.parametrize("strategy", SAME)
def test_several_resumes_in_one_epoch(strategy: str, tmp_path: Path, seed: int, record_property: Record) -> None:
    """Within an epoch, at its end, with accumulation: the bits of a run that was left alone, on the same devices."""
    turn = seed + SAME.index(strategy)
    place = strategy, 1 if strategy == "single" else 3 + turn % 2
    later = random.Random(f"{strategy} {seed}").sample(range(5, STEPS), 1)
    stops = [3, 4, *later, STEPS]
    settings = {"optimizer": OPTIMIZERS[turn % 2], "micro_batch": 2, "data_workers": 2 * (turn % 2)}
    _, losses, want, _ = chain(tmp_path / "alone", [place], [STEPS], **settings)
    ids, own, state, _ = chain(tmp_path / "stopped", [place] * len(stops), stops, **settings)
    seen = [number for step in range(4) for number in ids[step]]
    record_property("samples twice or missing in an epoch", len(seen) - len(set(seen)) + COUNT - len(set(seen)))
    record_property("batches with other samples", mismatches(ids))
    record_property("max|Δ|", largest_difference(state, want))
    assert mismatches(ids) == 0 and sorted(seen) == list(range(COUNT))
    assert (own, largest_difference(state, want)) == (losses, 0)
