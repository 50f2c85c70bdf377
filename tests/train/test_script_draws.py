"""Draws by Python's and NumPy's global generators in models, losses and loops: one device's, on any number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import tutti
from tests import worlds
from tests.covering import in_turn
from tests.scripts.oracle import global_batches
from tutti.comm.random_keys import mix
from tutti.errors import MismatchError

WORKERS, BATCH, EPOCHS = 6, 12, 2


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 4, generator=draw, dtype=torch.float64), torch.arange(48) % 3)


class Block(nn.Module):
    """A residual block, scaled at random as in shake-shake (arXiv 1705.07485)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        scale = np.random.rand() * random.uniform(0.5, 1) if self.training else 0.5
        return inputs + torch.tanh(scale * self.inner(inputs))


class Listed(nn.Module):
    """Blocks that no sequence calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.last(hidden)
        return out


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "listed":
        return Listed().double()
    blocks = [Block() for _ in range(3)] if kind == "blocks" else [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    return nn.Sequential(nn.Linear(4, 6), *blocks, nn.Linear(6, 3)).double()


def mixup(model: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    share, order = np.random.beta(0.4, 0.4), torch.from_numpy(np.random.permutation(len(inputs)))
    if random.random() < 0.3:
        share, order = 1.0, torch.arange(len(inputs))
    outputs = model(share * inputs + (1 - share) * inputs[order])
    one, other = (functional.cross_entropy(outputs, each) for each in (targets, targets[order]))
    return share * one + (1 - share) * other + random.gauss(0, 1) * outputs.square().mean()


def plain(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def late(model: Any, batch: Any) -> Tensor:
    """Draws in the second half of an epoch alone, on some samples."""
    scale = np.random.rand() if late.run.global_step % 12 > 8 and batch[1][0] == 1 else 1  # type: ignore[attr-defined]
    return scale * plain(model, batch)


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mixup": mixup, "plain": plain, "late": late}


def train(kind: str, loss: str, loop: bool, strategy: str, workers: int = WORKERS, **options: Any) -> Any:
    """Return the weights, and what the script draws after the first step and after training."""
    model, function = network(kind), LOSSES[loss]
    data = dataset()
    if loss == "late":
        data = TensorDataset(*(torch.cat([each] * 3) for each in data.tensors))
    options |= {"strategy": strategy, "workers": workers, "batch_size": BATCH, "seed": 0}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = tutti.prepare(model, optimizer, data, None if loop else function, **options)
    late.run = run  # type: ignore[attr-defined]
    random.seed(5), np.random.seed(5)
    drawn: list[float] = []

    def stepped() -> None:
        if run.global_step == 1:
            drawn.extend((random.gauss(0, 1), np.random.standard_normal()))

    for epoch in range(EPOCHS):
        if loop:
            for batch in run.microbatches(epoch):
                run.backward(function(model, batch))
                optimizer.step()
                optimizer.zero_grad()
                if run.stepped:
                    stepped()
        else:
            for batch in run.epoch(epoch):
                run.step(batch)
                stepped()
    run.evaluate(data, loss=mixup if loss == "mixup" else plain, batch=5)
    drawn += random.gauss(0, 1), np.random.rand()
    return {name: tensor.clone() for name, tensor in run.state().items()}, drawn


def by_hand(loss: Callable[[Any, Any], Tensor]) -> dict[str, Tensor]:
    """Play the workers one after the other in plain PyTorch."""
    model, step = network("plain"), 0
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(EPOCHS):
        for inputs, targets in global_batches(dataset(), BATCH, epoch):
            optimizer.zero_grad()
            for worker, part in enumerate(zip(inputs.chunk(WORKERS), targets.chunk(WORKERS), strict=True)):
                key = mix(0, step, worker, 0)
                random.seed(key), np.random.seed(key & 0xFFFFFFFF)
                (loss(model, part) / WORKERS).backward()
            optimizer.step()
            step += 1
    return dict(model.named_parameters())


def same(found: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return all(torch.allclose(found[name], want[name], rtol=0, atol=1e-10) for name in want)


def test_one_device_draws_by_the_keys_of_its_workers() -> None:
    want = by_hand(mixup)
    for loop in (False, True):
        assert same(worlds.alone(train, kind="plain", loss="mixup", loop=loop, strategy="single")[0], want)


CASES = [
    *((kind, loss, loop) for kind, loss in (("plain", "mixup"), ("blocks", "plain")) for loop in (False, True)),
    ("blocks", "mixup", False),
    ("plain", "late", False),
]
PLACES = [(2, "mirrored"), (3, "sharded"), (2, "pipeline"), (3, "mirrored"), (2, "tensor"), (3, "pipeline")]


@pytest.mark.filterwarnings("ignore:unkeyed-draws")
@pytest.mark.parametrize(("case", "place"), in_turn(CASES, PLACES))
def test_ranks_draw_what_one_device_would(case: tuple[str, str, bool], place: tuple[int, str]) -> None:
    (kind, loss, loop), (ranks, strategy) = case, place
    if loss == "late":
        # Ranks that compute one micro-batch together are seeded for each.
        strategy = "mirrored"
    weights, drawn = worlds.alone(train, kind=kind, loss=loss, loop=loop, strategy="single")
    for found, own in worlds.run(ranks, train, kind=kind, loss=loss, loop=loop, strategy=strategy):
        assert same(found, weights)
        assert own == drawn


def cached(again: bool, loop: bool) -> dict[str, Tensor]:
    """Train with dropout on parts of each batch; or compute the outputs first, and each part again for its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model: Any, batch: Any) -> Tensor:
        parts, targets = batch[0].chunk(2), batch[1]
        if not again:
            return functional.cross_entropy(torch.cat([*map(model, parts)]), targets)
        outputs, states = [], []
        with torch.no_grad():
            for part in parts:
                states.append(torch.get_rng_state())
                outputs.append(model(part))
        leaf = torch.cat(outputs).requires_grad_()
        (gradient,) = torch.autograd.grad(functional.cross_entropy(leaf, targets), leaf)
        rows = []
        for part, state, each in zip(parts, states, gradient.chunk(2), strict=True):
            torch.set_rng_state(state)
            rows.append((model(part) * each * len(targets)).sum(1))
        return torch.cat(rows).mean()

    options: dict[str, Any] = {"workers": WORKERS, "batch_size": BATCH}
    run = tutti.prepare(model, optimizer, dataset(), None if loop else loss, **options)
    for batch in run.microbatches(0) if loop else run.epoch(0):
        if loop:
            run.backward(loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        else:
            run.step(batch)
    return {name: tensor.clone() for name, tensor in run.state().items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("ranks", "loop"), [(1, True), (3, False)])
def test_a_second_forward_after_a_saved_state_repeats_dropout(ranks: int, loop: bool) -> None:
    """As in GradCache (arXiv 2101.06983)."""
    want = worlds.alone(cached, again=False, loop=loop)
    for found in worlds.run(ranks, cached, again=True, loop=loop):
        assert same(found, want)


class Rows(Dataset[Any]):
    """Samples in a list, and whose data set it is."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.rows = list(zip(inputs, targets, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return *self.rows[index], f"/of/rank/{tutti.rank()}"


def shuffled(seeded: bool, kind: str) -> tuple[str, int]:
    """Train on samples that the script has shuffled; return the error and the number of updates."""
    order = list(range(48))
    random.Random(0 if seeded else tutti.rank()).shuffle(order)
    columns = [column[order] for column in dataset().tensors]
    data = TensorDataset(*columns) if kind == "tensors" else Rows(*columns)
    model = network("plain")
    options = {"strategy": "mirrored", "workers": 6, "batch_size": BATCH}
    run = tutti.prepare(model, "sgd:lr=0.1", data, plain, **options)  # type: ignore[arg-type]
    try:
        for batch in run.epoch(0):
            run.step(batch)
    except MismatchError as error:
        return str(error), run.updates
    return "", run.updates


@pytest.mark.parametrize("kind", ["tensors", "items"])
def test_data_that_each_rank_has_shuffled_otherwise_is_refused(kind: str) -> None:
    for error, updates in worlds.run(3, shuffled, seeded=False, kind=kind):
        assert "the samples of the data set" in error and "random.seed" in error and updates == 0
    worlds.forget(3)
    assert worlds.run(2, shuffled, seeded=True, kind=kind) == [("", 4)] * 2


def test_recomputed_blocks_draw_again_what_they_drew() -> None:
    want = worlds.alone(train, kind="listed", loss="mixup", loop=False, strategy="single")
    again = worlds.alone(
        train, kind="listed", loss="mixup", loop=False, strategy="single", activation_checkpointing="blocks"
    )
    assert same(again[0], want[0]) and again[1] == want[1]
