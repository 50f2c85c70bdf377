"""Copies of a parameter within a replica stay equal, though a backend rounds their gradients' sums differently.

Copies are whole tensors on tensor ranks and tied weights on pipeline stages.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.table import MODELS
from tests.simulated_accelerator.build import DEVICE
from tutti.nn.swap import parameters
from tutti.parallel.ddp.reducers import OverlappedReducer
from tutti.parallel.fsdp.sharded import ShardedSync
from tutti.types.step_records import StepContext

pytestmark = pytest.mark.timeout(600)


def whole_gradients(strategy: str) -> list[dict[str, list[str]]]:
    """The gradients, to the bit, of the parameters that are not split, in each step of a custom loop."""
    chosen = MODELS["odd"]
    model = chosen.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(
        model, optimizer, chosen.samples(70), strategy=strategy, workers=8, batch_size=25, precision="fp64"
    )
    found = []
    for batch in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(chosen.loss(run.model, batch))
        with run.replica.model_code():  # the script would be given the sizes of whole parameters
            bits = {
                name: [float(x).hex() for x in p.grad.flatten().tolist()]
                for name, p in parameters(run.replica.parts)
                if p.grad is not None and tuple(p.shape) == tuple(run.replica.specs[name].shape)
            }
        optimizer.step()
        if run.stepped:
            found.append(bits)
    return found


@pytest.mark.parametrize("strategy", ["tensor:tensor=2,least=1", "hybrid:tensor=2,least=1,sequence=true"])
def test_tensor_ranks_have_the_same_gradients_of_whole_tensors(strategy: str) -> None:
    first, *others = worlds.run_on(DEVICE, 8, whole_gradients, strategy=strategy)
    assert len(first) == 3 and all(map(len, first)) and all(found == first for found in others)


def sharded_copies(stage: int, options: str) -> tuple[int, dict[str, list[str]]]:
    """The shard, and the bits of its rows of parameters that are not split, where tensor rank 1 sums otherwise."""
    reduced = ShardedSync._sum_over_copies

    def rounded(sync: ShardedSync, step_context: StepContext) -> None:
        reduced(sync, step_context)
        for rows in sync._trained if tutti.rank() % 2 else ():
            if rows.parameter.grad is not None:
                rows.parameter.grad.mul_(1 + 2**-50)

    chosen = MODELS["odd"]
    model = chosen.build()
    strategy = f"hybrid:shards=2,stage={stage},tensor=2,least=1{options}"
    with patch.object(ShardedSync, "_sum_over_copies", rounded):
        run = tutti.prepare(
            *(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen.samples(70), chosen.loss),
            **{"strategy": strategy, "workers": 4, "batch_size": 25, "precision": "fp64"},
        )
        for batch in run.epoch(0):
            run.step(batch)
    sync, specs = run.gradient_sync, run.replica.specs
    assert isinstance(sync, ShardedSync) and run.context.mesh.tensor == 2
    whole = [rows for rows in sync._rows if tuple(rows.local) == tuple(specs[rows.name].shape)]
    bits = {rows.name: [float(x).hex() for x in rows.parameter.detach().flatten().tolist()] for rows in whole}
    return run.context.mesh.data_rank, bits


@pytest.mark.parametrize(("stage", "options"), [(1, ""), (2, ""), (3, ",units=Linear"), (3, ",offload=true")])
def test_tensor_ranks_have_the_same_rows_of_whole_tensors(stage: int, options: str) -> None:
    found = worlds.run_on(DEVICE, 4, sharded_copies, stage=stage, options=options)
    assert sorted(shard for shard, _ in found) == [0, 0, 1, 1] and sum(map(len, found[0][1].values()))
    for shard in (0, 1):
        one, other = (bits for own, bits in found if own == shard)
        assert one == other


def tied_bits(strategy: str) -> dict[str, list[str]]:
    """The bits of this rank's copies of weights that several stages use, after an epoch whose sums round apart.

    On odd stages the sums over the data ranks are larger by a rounding.
    """
    finish, reduced = OverlappedReducer.finish, ShardedSync._sum_over_copies

    def rounded(reducer: OverlappedReducer, *arguments: Any) -> Any:
        found = finish(reducer, *arguments)
        if run.context.mesh.at("stage") % 2:
            reducer.scale(1 + 2**-50)
        return found

    def rounded_rows(sync: ShardedSync, step_context: StepContext) -> None:
        reduced(sync, step_context)
        for rows in sync._trained if run.context.mesh.at("stage") % 2 else ():
            if rows.parameter.grad is not None:
                rows.parameter.grad.mul_(1 + 2**-50)

    chosen = MODELS["gpt"]
    model = chosen.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tutti.prepare(
        *(model, optimizer, chosen.samples(40), chosen.loss),
        **{"strategy": strategy, "workers": 4, "batch_size": 12, "precision": "fp64", "reproducible": False},
    )

    with (
        patch.object(OverlappedReducer, "finish", rounded),
        patch.object(ShardedSync, "_sum_over_copies", rounded_rows),
    ):
        for batch in run.epoch(0):
            run.step(batch)
    assert run.replica.stage_copies
    with run.replica.model_code():
        # This rank's own copy, and not that of the stage that has the parameter first.
        return {
            name: [float(x).hex() for x in p.detach().flatten().tolist()]
            for name, p in parameters(run.replica.parts)
            if any(p is copy for _, copies in run.replica.stage_copies for copy in copies)
        }


@pytest.mark.parametrize(
    "strategy", ["hybrid:stages=2", pytest.param("hybrid:stages=2,shards=1,stage=1", marks=pytest.mark.full)]
)
def test_stages_have_the_same_tied_weights(strategy: str) -> None:
    first, *others = worlds.run_on(DEVICE, 8, tied_bits, strategy=strategy)
    assert first and all(found == first for found in others)
