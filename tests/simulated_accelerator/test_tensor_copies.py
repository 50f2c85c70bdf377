"""Parameters that all tensor ranks hold whole stay equal, though a backend rounds their gradients' sums differently."""

from __future__ import annotations

import pytest
import torch

import tutti
from tests import worlds
from tests.contract.table import MODELS
from tests.simulated_accelerator.build import DEVICE
from tutti.nn.swap import parameters

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
        named = {name: p for name, p in parameters(run.replica.parts) if p.grad is not None}
        bits = {
            name: [float(x).hex() for x in p.grad.flatten().tolist()]  # type: ignore[union-attr]
            for name, p in named.items()
            if tuple(p.shape) == tuple(run.replica.specs[name].shape)
        }
        optimizer.step()
        if run.stepped:
            found.append(bits)
    return found


@pytest.mark.parametrize("strategy", ["tensor:tensor=2,least=1", "hybrid:tensor=2,least=1,sequence=true"])
def test_tensor_ranks_have_the_same_gradients_of_whole_tensors(strategy: str) -> None:
    first, *others = worlds.run_on(DEVICE, 8, whole_gradients, strategy=strategy)
    assert len(first) == 3 and all(map(len, first)) and all(found == first for found in others)
