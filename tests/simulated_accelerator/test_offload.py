"""Offload to the host's memory: of parameters and optimizer state, or of the state alone, changes no bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import tutti
from tests import worlds
from tests.contract import test_state
from tests.contract.table import OPTIMIZERS, STRATEGIES, largest_difference, named, train
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_mistakes import loss, prepare
from tutti.errors import UsageError
from tutti.parallel.fsdp.sharded import ShardedSync

pytestmark = pytest.mark.timeout(600)


def offloaded(strategy: str, without_wait: bool = False) -> dict[str, Any]:
    run = prepare(strategy)
    sync = run.gradient_sync
    assert isinstance(sync, ShardedSync)
    mistake = patch("tutti.parallel.ddp.host_parameters.synchronize", lambda _: None)
    with mistake if without_wait else nullcontext():
        for batch in run.epoch(0):
            run.step(batch)
    states = [tensor for each in sync.optimizers for state in each.state.values() for tensor in state.values()]
    return {
        "weights": run.weights_sha256(),
        "state": {t.device.type for t in states if isinstance(t, torch.Tensor) and t.dim()},
        "rows": {rows.parameter.device.type for rows in sync._rows},
    }


@cache
def on_the_cpu(stage: int) -> Any:
    return worlds.run_on("cpu", 2, offloaded, strategy=f"sharded:stage={stage}")


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ("stage=1,offload=optimizer", DEVICE),
        pytest.param("stage=2,offload=optimizer", DEVICE, marks=pytest.mark.full),
        ("stage=3,offload=optimizer", DEVICE),
        ("stage=2,offload=true", "cpu"),
        ("stage=3,offload=true", "cpu"),
    ],
)
def test_offload_keeps_the_state_on_the_host_and_gives_the_weights_of_the_cpu(options: str, rows: str) -> None:
    stage = int(options[6])
    found = worlds.run_on(DEVICE, 2, offloaded, strategy=f"sharded:{options}")
    for own, there in zip(on_the_cpu(stage), found, strict=True):
        assert there == {"weights": own["weights"], "state": {"cpu"}, "rows": {rows}}


def test_an_update_that_does_not_wait_for_its_copies_is_noticed() -> None:
    found = worlds.run_on(DEVICE, 2, offloaded, strategy="sharded:stage=3,offload=optimizer", without_wait=True)
    assert all(there["weights"] != own["weights"] for there, own in zip(found, on_the_cpu(3), strict=True))


CASES = [
    # strategy of the contract's table, ranks, optimizer, largest difference: the CPU's compiled loops add otherwise
    ("sharded", 2, "adamw", 0.0),
    ("sharded, stage 1", 1, "sgd momentum", 0.0),
    ("sharded, stage 2", 2, "muon", 0.0),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("sharded × 2", 4, "torch adafactor", 0.0),
            ("sharded", 2, "lamb", 1e-10),
            ("hybrid, shards", 4, "torch muon", 0.0),
        )
    ),
]


@pytest.mark.parametrize(("strategy", "ranks", "optimizer", "most"), CASES)
def test_offloaded_state_gives_what_state_on_the_device_gives(
    strategy: str, ranks: int, optimizer: str, most: float
) -> None:
    """With batch norm, dropout, a frozen layer, several workers a rank and an average of the weights."""
    chosen = named(STRATEGIES[strategy][0], "odd")
    arguments = {"optimizer": OPTIMIZERS[optimizer], "workers": 4, "steps": 3, "clip": 0.5}
    kept = worlds.run_on(DEVICE, ranks, train, strategy=chosen, **arguments)
    sent = worlds.run_on(DEVICE, ranks, train, strategy=f"{chosen},offload=optimizer", **arguments)
    for (want, losses, digest), (got, own, hashed) in zip(kept, sent, strict=True):
        assert largest_difference(got, want) <= most and own == pytest.approx(losses, rel=1e-9 if most else 0)
        assert most or hashed == digest


PLACES = {"device": "sharded:units=Linear", "host": "sharded:units=Linear,offload=optimizer"}


@pytest.mark.parametrize(("first", "second"), [("device", "host"), ("host", "device")])
def test_offloaded_state_is_saved_and_resumed_both_ways(first: str, second: str, tmp_path: Path) -> None:
    arguments = {"optimizer": OPTIMIZERS["adamw"], "workers": 4, "reproducible": False}
    [(want, digest), _] = worlds.run_on(DEVICE, 2, test_state.whole, strategy=PLACES["device"], **arguments)
    worlds.run_on(DEVICE, 2, test_state.save, strategy=PLACES[first], folder=str(tmp_path), **arguments)
    for got, own in worlds.run_on(
        DEVICE, 2, test_state.resume, strategy=PLACES[second], folder=str(tmp_path), **arguments
    ):
        assert (largest_difference(got, want), own) == (0, digest)


def by_hand(strategy: str, kind: str = "AdamW", **options: Any) -> str:
    """A custom loop that clips and reads gradients on the device, with two optimizers that step alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(48, 5, generator=draw), torch.randint(0, 3, (48,), generator=draw)
    optimizers = [getattr(torch.optim, kind)(part.parameters(), lr=0.01, **options) for part in (model[0], model[2])]
    try:
        run = tutti.prepare(model, optimizers, data, strategy=strategy, workers=2, batch_size=8)
        for batch in run.microbatches(0):
            run.backward(loss(model, batch))
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    except UsageError as error:
        return str(error)
    return run.weights_sha256()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_custom_loops_with_offloaded_state(ranks: int, kind: str) -> None:
    stage = 3 if ranks > 1 else 1
    kept = worlds.run_on(DEVICE, ranks, by_hand, strategy=f"sharded:stage={stage}", kind=kind)
    assert worlds.run_on(DEVICE, ranks, by_hand, strategy=f"sharded:stage={stage},offload=optimizer", kind=kind) == kept
    assert len(kept[0]) == 64


@pytest.mark.parametrize(
    ("strategy", "kind", "options", "words"),
    [
        ("sharded:stage=1,offload=optimizer", "AdamW", {"capturable": True}, "cannot be combined with capturable=True"),
        ("sharded:stage=1,offload=optimizer", "LBFGS", {}, "LBFGS, which needs a closure"),
        ("sharded:stage=1,offload=true", "AdamW", {}, "offload=optimizer is for all stages"),
        ("sharded:offload=optimiser", "AdamW", {}, "Did you mean 'optimizer'"),
        ("hybrid:tensor=1,offload=optimizer", "AdamW", {}, "does nothing without shards=2"),
        ("sharded:offload=true", "AdamW", {}, "offload=true does nothing where one device has a whole copy"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(strategy: str, kind: str, options: dict[str, Any], words: str) -> None:
    [said] = worlds.run_on(DEVICE, 1, by_hand, strategy=strategy, kind=kind, **options)
    assert words in said
