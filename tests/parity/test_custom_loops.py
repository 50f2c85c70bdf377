"""The gated optimizer stays the user's own, and what a custom loop gets wrong is refused."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.parity.loops import numbers
from tutti.errors import UsageError

INPUTS = torch.randn(48, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
DATA = TensorDataset(INPUTS, INPUTS.sum(dim=1, keepdim=True))


def loss(model: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def made() -> tuple[nn.Sequential, torch.optim.Adam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, workers: int, epochs: range = range(1), looks: bool = False
) -> tutti.Run:
    run = tutti.prepare(model, optimizer, DATA, workers=workers, batch_size=16)
    if looks:
        assert next(iter(run.microbatches(0)))[0].shape[1:] == (4,)
        for inputs, _ in run.microbatches(0):
            assert inputs.shape[1:] == (4,)
            break
    for epoch in epochs:
        for batch in run.microbatches(epoch):
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
    return run


def on_every_size(function: Any) -> None:
    for size in (1, 2):
        worlds.run(size, function)


def the_optimizer_stays_itself() -> None:
    model, optimizer = made()
    plain_keys = list(model.state_dict())
    train(model, optimizer, workers=4)
    assert isinstance(optimizer, torch.optim.Adam)
    assert list(model.state_dict()) == plain_keys
    saved = optimizer.state_dict()
    assert [entry["step"].item() for entry in saved["state"].values()] == [3] * 5


def test_the_optimizer_stays_itself() -> None:
    on_every_size(the_optimizer_stays_itself)


def a_saved_optimizer_continues() -> None:
    model, optimizer = made()
    train(model, optimizer, workers=4)
    weights, saved = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    straight, other = made(), made()
    straight[0].load_state_dict(weights)
    straight[1].load_state_dict(deepcopy(saved))
    train(*straight, workers=4, epochs=range(1, 3))
    # Loaded after prepare, too.
    other[0].load_state_dict(weights)
    run = tutti.prepare(*other, DATA, loss, workers=4, batch_size=16)
    other[1].load_state_dict(deepcopy(saved))
    for epoch in (1, 2):
        for batch in run.epoch(epoch):
            run.step(batch)
    parameters = [dict(pair[0].named_parameters()) for pair in (straight, other)]
    assert all(torch.allclose(parameters[0][n], p, atol=1e-12, rtol=0) for n, p in parameters[1].items())
    assert other[1].state_dict()["state"][0]["step"].item() == 9


def test_a_saved_optimizer_continues() -> None:
    on_every_size(a_saved_optimizer_continues)


def merged_statistics(workers: int, looks: bool = False) -> dict[str, Any]:
    model, optimizer = made()
    run = train(model, optimizer, workers, looks=looks)
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def by_hand(workers: int) -> dict[str, Any]:
    """N copies of the buffers, each with its share of the batch; statistics merged as moments of all samples."""
    from tutti.comm.partition import even_share
    from tutti.data.order import permutation

    model, optimizer = made()
    norm = model[1]
    own = [{n: b.clone() for n, b in norm.named_buffers()} for _ in range(workers)]
    order = permutation(0, 0, len(DATA))
    for start in range(0, len(DATA), 16):
        optimizer.zero_grad()
        for worker in range(workers):
            rows = order[start : start + 16][slice((part := even_share(16, workers, worker)).start, part.stop)]
            norm.load_state_dict(own[worker], strict=False)
            (loss(model, DATA[rows]) * len(part) / 16).backward()
            own[worker] = {n: b.clone() for n, b in norm.named_buffers()}
        optimizer.step()
    means = torch.stack([buffers["running_mean"] for buffers in own])
    variances = torch.stack([buffers["running_var"] for buffers in own])
    norm.running_mean.copy_(means.mean(0))
    norm.running_var.copy_(variances.mean(0) + means.var(0, unbiased=False))
    return numbers(model)


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batch_norm_of_every_worker_is_merged(ranks: int, workers: int) -> None:
    want = by_hand(workers)
    for got in worlds.run(ranks, merged_statistics, workers=workers):
        assert largest_difference(got, want) <= 1e-10


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_look_at_the_first_batch_takes_nothing(ranks: int) -> None:
    for got in worlds.run(ranks, merged_statistics, workers=3, looks=True):
        assert largest_difference(got, by_hand(3)) <= 1e-10


def a_scheduler_fits(before: bool) -> None:
    model, optimizer = made()
    scheduler = StepLR(optimizer, 1, 0.5) if before else None
    run = tutti.prepare(model, optimizer, DATA, workers=4, batch_size=16)
    scheduler = scheduler or StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
            if run.stepped:
                scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 2**3
    assert run.global_step == 3


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_scheduler_steps_once_a_global_batch(ranks: int, before: bool) -> None:
    worlds.run(ranks, a_scheduler_fits, before=before)


def prepared_twice() -> None:
    model, optimizer = made()
    train(model, optimizer, workers=4)
    before = numbers(model)
    train(model, optimizer, workers=2, epochs=range(1, 2))
    assert largest_difference(numbers(model), before) > 1e-3
    assert optimizer.state_dict()["state"][0]["step"].item() == 6


def test_an_optimizer_may_be_prepared_again() -> None:
    on_every_size(prepared_twice)


def state_of_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].weight = model[0].weight
    run = tutti.prepare(model, "sgd:lr=0.1", TensorDataset(INPUTS, INPUTS), loss, batch_size=16)
    assert run.state().keys() == model.state_dict().keys()
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).load_state_dict(run.state())


def test_the_state_holds_every_name_of_a_tied_parameter() -> None:
    on_every_size(state_of_tied_parameters)


def evaluated() -> float:
    model, optimizer = made()
    run = tutti.prepare(model, optimizer, DATA, loss, batch_size=16)
    return run.evaluate(DATA).loss


def test_evaluation_takes_what_prepare_takes() -> None:
    model = made()[0].eval()
    want = loss(model, DATA.tensors).item()
    for size in (1, 2):
        assert worlds.run(size, evaluated) == [pytest.approx(want, rel=1e-12)] * size


def left_in_the_middle() -> None:
    model, optimizer = made()
    run = tutti.prepare(model, optimizer, DATA, workers=4, batch_size=16)
    for batch in run.microbatches(0):
        run.model.zero_grad()
        run.backward(loss(model, batch))
        optimizer.step()
        break
    for _ in run.microbatches(1):
        raise AssertionError("half a batch would be added to the next one")


def without_microbatches() -> None:
    model, optimizer = made()
    tutti.prepare(model, optimizer, DATA, batch_size=16)
    loss(model, DATA.tensors).backward()
    optimizer.step()


def in_half_precision() -> None:
    tutti.prepare(*made(), DATA, batch_size=16, precision="bf16")


def of_strange_parameters() -> None:
    model, _ = made()
    tutti.prepare(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))]), DATA, batch_size=16)


def over_periods() -> None:
    model, optimizer = made()
    run = tutti.prepare(model, optimizer, DATA, batch_size=16, strategy="local_sgd:period=2", workers=2)
    for batch in run.microbatches(0):
        run.model.zero_grad()
        run.backward(loss(model, batch))
        optimizer.step()


REFUSED = {
    left_in_the_middle: "left in the middle of a global batch",
    without_microbatches: r"loop over run\.microbatches",
    in_half_precision: r"loss_fn",
    of_strange_parameters: "parameters that the model does not have",
    over_periods: r"loop of 2 workers on 1 data rank.*as many workers as data ranks \(1\); or call run\.step",
}


def refusal(wrong: str) -> tuple[str, int, str]:
    """Caught on the rank: a rank that fails costs a new pool."""
    try:
        globals()[wrong]()
    except Exception as error:
        return type(error).__name__, getattr(error, "exit_code", 1), str(error)
    return "", 0, ""


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda f: f.__name__)
def test_what_would_train_wrongly_is_refused(wrong: Any) -> None:
    kind, code, text = worlds.run(1, refusal, wrong=wrong.__name__)[0]
    assert (kind, code) == (UsageError.__name__, 2)
    assert re.search(REFUSED[wrong], text, re.IGNORECASE), text


def with_ranks_without_samples() -> tuple[dict[str, Any], list[int]]:
    """33 samples in batches of 16: the last goes to the first worker alone, the other ranks' bodies run once too."""
    torch.manual_seed(0)
    # Batch norm over pairs of numbers, so that one sample has a variance.
    model = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = TensorDataset(*(tensor[:33] for tensor in DATA.tensors))
    run = tutti.prepare(model, optimizer, data, workers=4, batch_size=16)
    turns = []
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            turns.append(len(batch[0]))
            run.model.zero_grad()
            run.backward(loss(model, batch))
            optimizer.step()
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}, turns


def test_a_stand_in_counts_for_nothing_and_leaves_no_trace() -> None:
    [(want, turns)] = worlds.run(1, with_ranks_without_samples)
    assert turns == [*[4] * 8, 1] * 2
    for ranks in (2, 3, 4):
        got = worlds.run(ranks, with_ranks_without_samples)
        assert [turns[-1] for _, turns in got] == [1] * ranks
        assert max(largest_difference(state, want) for state, _ in got) <= 1e-10
