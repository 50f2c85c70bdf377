"""``tutti.horovod.torch`` over real ranks: the optimizer against plain PyTorch, broadcasts, messages, second init."""

from __future__ import annotations

import inspect
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
import tutti.horovod.torch as hvd
from tests.worlds import run
from tutti.comm import posted_reduction
from tutti.horovod.torch.collective_timeline import CollectiveTimeline


def with_horovod(inside: Any, **given: Any) -> Any:
    hvd.init()
    try:
        return inside(**given)
    finally:
        hvd.shutdown()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 5, 4), torch.randn(size, 5, 3)


def train(options: dict[str, Any]) -> list[torch.Tensor]:
    net = model()
    options = {"compression": getattr(hvd.Compression, options.pop("compression", "none")), **options}
    passes = options.get("backward_passes_per_step", 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters(), **options
    )
    x, y = data(hvd.size())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(passes):
            nn.functional.mse_loss(net(x[hvd.rank()]), y[hvd.rank()]).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def plain(size: int, factor: float) -> list[torch.Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = data(size)
    for _ in range(3):
        optimizer.zero_grad()
        (factor * sum(nn.functional.mse_loss(net(x[r]), y[r]) for r in range(size))).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


OPTIONS: list[tuple[dict[str, Any], float, float]] = [
    ({}, 1 / 3, 1e-6),
    ({"op": hvd.Sum}, 1.0, 1e-6),
    ({"gradient_predivide_factor": 2.0}, 1 / 3, 1e-6),
    ({"backward_passes_per_step": 2}, 2 / 3, 1e-6),
    ({"num_groups": 2}, 1 / 3, 1e-6),
    ({"compression": "fp16"}, 1 / 3, 1e-3),
]


@pytest.mark.filterwarnings("ignore:Parameter `num_groups`")
@pytest.mark.parametrize(("options", "factor", "tolerance"), OPTIONS, ids=lambda value: str(value)[:40])
def test_the_optimizer_does_what_plain_pytorch_does(options: dict[str, Any], factor: float, tolerance: float) -> None:
    expected = plain(3, factor)
    for found in run(3, with_horovod, inside=train, options=options):
        assert all(torch.allclose(a, b, atol=tolerance) for a, b in zip(found, expected, strict=True))


def test_adasum_of_equal_gradients_is_one_rank_s_step() -> None:
    found = run(2, with_horovod, inside=train_alike)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found, strict=True))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[0], plain(1, 1.0), strict=True))


def train_alike() -> list[torch.Tensor]:
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters(), op=hvd.Adasum
    )
    x, y = data(1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[0]), y[0]).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def unequal_gradients() -> list[list[float]]:
    """A parameter that only rank 1 uses, and one that is frozen."""
    used, sometimes, frozen = (nn.Parameter(torch.ones(1)) for _ in range(3))
    named = [("used", used), ("sometimes", sometimes), ("frozen", frozen)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, sometimes, frozen], lr=1.0, weight_decay=0.5), named_parameters=named
    )
    optimizer.zero_grad()
    frozen.requires_grad_(False)
    (used + sometimes if hvd.rank() else used).sum().backward()
    optimizer.step()
    return [p.tolist() for _, p in named]


def test_missing_gradients_are_zeros_and_frozen_parameters_stay() -> None:
    assert run(2, with_horovod, inside=unequal_gradients) == [[[-0.5], [0.0], [1.0]]] * 2


def broadcasts() -> list[Any]:
    torch.manual_seed(hvd.rank())
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 1:
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(net.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert all(p.grad is not None for p in net.parameters())
    rows = nn.Embedding(4, 2, sparse=True)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(rows.parameters(), lr=1.0), rows.named_parameters())
    hvd.broadcast_parameters(rows.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0, model=rows)
    before = rows.weight.detach().clone()
    rows(torch.tensor([hvd.rank()])).sum().backward()
    assert rows.weight.grad.is_sparse
    wrapped.step()
    assert torch.allclose(rows.weight, before - torch.tensor([[1 / 3]] * 3 + [[0.0]]))
    state = optimizer.state_dict()
    averages = [entry["exp_avg"].tolist() for entry in state["state"].values()]
    return [[v.tolist() for v in net.state_dict().values()], averages, state["param_groups"]]


def test_model_and_optimizer_are_those_of_the_root() -> None:
    zero, one, two = run(3, with_horovod, inside=broadcasts)
    assert zero == one == two and len(one[1]) == 4 and one[2][0]["lr"] == 0.2


ROWS = [[[1, 1, 4], [], [2]], [[5], [1], None], [[3, 4], None, []], [None, [0], [0, 5, 5, 5]]]
"""For each step and rank the rows of the table that its loss reads; None: it does not read the table."""


def sparse_steps(kind: str, ranks: int, dense: bool, plain: bool) -> list[list[float]]:
    torch.manual_seed(0)
    rows = nn.Embedding(6, 2, sparse=True).double()
    optimizer = {
        "sgd": lambda: torch.optim.SGD(rows.parameters(), 0.5, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(rows.parameters(), 0.5),
        "sparse adam": lambda: torch.optim.SparseAdam(rows.parameters(), 0.1),
    }[kind]()
    if not plain:
        optimizer = hvd.DistributedOptimizer(optimizer, rows.named_parameters(), sparse_as_dense=dense)
    for step in ROWS:
        optimizer.zero_grad()
        for rank, read in enumerate(step[:ranks]):
            if (plain or rank == hvd.rank()) and read is not None:
                loss = rows(torch.tensor(read, dtype=torch.int64)).square().sum() * (rank + 1)
                (loss / ranks if plain else loss).backward()
        optimizer.step()
    return rows.weight.tolist()


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse adam"])
def test_sparse_gradients_of_unequal_and_of_no_rows_equal_plain_pytorch(kind: str) -> None:
    for ranks in (2, 3):
        [want] = run(1, sparse_steps, kind=kind, ranks=ranks, dense=False, plain=True)
        for dense in (False, True) if kind != "sparse adam" else (False,):
            given = {"kind": kind, "ranks": ranks, "dense": dense, "plain": False}
            for got in run(ranks, with_horovod, inside=sparse_steps, **given):
                assert np.allclose(got, want, rtol=1e-10, atol=1e-10)


def messages() -> list[str]:
    found = []
    net = model()

    def refused(call: Any, kind: type[Exception]) -> None:
        with pytest.raises(kind) as caught:
            call()
        found.append(str(caught.value))

    refused(lambda: hvd.allreduce(torch.ones(2 + hvd.rank()), name="x"), hvd.HorovodInternalError)
    handle = hvd.allreduce_async(torch.ones(1), name="y")
    refused(lambda: hvd.allreduce_async(torch.ones(1), name="y"), ValueError)
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    refused(lambda: hvd.poll(handle), ValueError)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    refused(lambda: hvd.DistributedOptimizer(sgd, [*net.named_parameters()][:1]), ValueError)
    refused(lambda: hvd.DistributedOptimizer(sgd, [("a", p) for p in net.parameters()]), ValueError)
    for options in ({"backward_passes_per_step": 0}, {"groups": 0}, {"groups": [[1]]}):
        refused(lambda options=options: hvd.DistributedOptimizer(sgd, **options), ValueError)
    refused(lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0), ValueError)
    refused(lambda: hvd.broadcast_parameters(None, 0), ValueError)
    refused(lambda: hvd.alltoall(torch.ones(3)), ValueError)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters())
    net(torch.ones(1, 4)).sum().backward()
    refused(optimizer.zero_grad, AssertionError)
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    hvd.shutdown()
    refused(hvd.rank, ValueError)
    return [*found, str(caught[0].message)]


MESSAGES = [
    "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2]",
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor",
    "was not created or has been cleared",
    "named_parameters was specified, but one or more model parameters were not named.",
    "Parameter names in named_parameters must be unique. Found duplicates: a",
    "backward_passes_per_step must be > 0",
    "groups should be a non-negative integer or a list of list of torch.Tensor.",
    "groups must consist of torch.Tensor.",
    "cannot broadcast torch.optim.LBFGS state",
    "invalid params of type: <class 'NoneType'>",
    "splits not provided, but first dimension of tensor is not an even multiple of the number of workers",
    "optimizer.zero_grad() was called after loss.backward() but before",
    "Horovod has not been initialized; use hvd.init().",
    "optimizer.step() called without optimizer.skip_synchronize()",
]


def test_messages_are_horovod_s() -> None:
    for found in run(2, with_horovod, inside=messages):
        assert len(found) == len(MESSAGES)
        assert [text for text, start in zip(found, MESSAGES, strict=True) if start not in text] == []


def scheduled(wrapped: bool) -> list[Any]:
    """A scheduler, and a state that is loaded, of the optimizer that was given to ``DistributedOptimizer``."""
    net = model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, 0)
    ranks = [hvd.rank()] if wrapped else [0, 1]
    x, y = data(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            optimizer.zero_grad()
            sum(nn.functional.mse_loss(net(x[r]), y[r]) / len(ranks) for r in ranks).backward()
            optimizer.step()
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
    return [[p.detach() for p in net.parameters()], optimizer.param_groups[0]["lr"]]


def test_a_scheduler_of_the_given_optimizer_changes_no_reduction() -> None:
    alone = scheduled(wrapped=False)
    for weights, rate in run(2, with_horovod, inside=partial(scheduled, wrapped=True)):
        assert rate == alone[1] == 0.025
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, alone[0], strict=True))


def changes_of_parameters() -> list[list[float]]:
    """Gradients of a closure, of an added parameter, and of one that was frozen."""
    used, frozen, added = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, frozen], lr=1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((used + frozen + added) * (2 * hvd.rank() + 1)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.add_param_group({"params": [added], "lr": 2.0})
    frozen.requires_grad_(True)
    for _ in range(2):
        optimizer.step(closure)
    return [p.tolist() for p in (used, frozen, added)]


def test_gradients_of_closures_and_of_parameters_that_are_added_or_unfrozen() -> None:
    assert run(2, with_horovod, inside=changes_of_parameters) == [[[-6.0], [-4.0], [-8.0]]] * 2


def orders() -> list[Any]:
    """Parameters in another order on each rank, with names and without a match."""
    given = {"a": torch.full((2,), 1.0 + hvd.rank()), "b": torch.full((2,), 10.0 + hvd.rank())}
    hvd.broadcast_parameters(dict(sorted(given.items(), reverse=hvd.rank() == 1)), 0)
    net = model()
    net[0].bias.data.fill_(hvd.rank())
    hvd.broadcast_parameters(list(net.parameters()), 1)
    found: list[Any] = [given["a"].tolist(), given["b"].tolist(), net[0].bias.tolist()]
    parameters = [(name, nn.Parameter(torch.ones(2))) for name in "abc"]
    mine = parameters if hvd.rank() else [parameters[i] for i in (0, 2, 1)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in mine], lr=0.1), mine)
    lbfgs = hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters()), net.named_parameters())

    def closure() -> torch.Tensor:
        loss = net(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    for wrong, kind in (
        (optimizer.step, hvd.HorovodInternalError),
        (lambda: hvd.broadcast_parameters({f"rank {hvd.rank()}": torch.ones(1)}, 0), hvd.HorovodInternalError),
        (lambda: lbfgs.step(closure), ValueError),
    ):
        with pytest.raises(kind) as caught:
            wrong()
        found.append(str(caught.value))
    return found


def test_names_match_parameters_in_any_order_and_other_names_are_refused() -> None:
    for found in run(2, with_horovod, inside=orders):
        assert found[:3] == [[1.0] * 2, [10.0] * 2, [1.0] * 8]
        for text, name in zip(found[3:5], ("gradients.c.3.", "parameters.rank 1.1."), strict=True):
            assert "Ranks wait for different collectives" in text and name in text
        assert "LBFGS calls the closure several times" in found[5]


def misuses() -> list[str]:
    """Messages of calls that are wrong on one rank alone."""
    net, found = model(), []
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, net.named_parameters())

    def twice() -> None:
        for _ in range(2):
            net(torch.ones(1, 4)).sum().backward()

    def with_graph() -> None:
        net(torch.ones(1, 4)).square().sum().backward(create_graph=True)

    for wrong in (
        with_graph,
        lambda: hvd.alltoall(torch.ones(3), name="x"),
        lambda: hvd.broadcast(torch.ones(1), 7, name="x"),
        lambda: hvd.reducescatter(torch.tensor(1.0), name="x"),
        lambda: hvd.allreduce(torch.ones(1).long(), name="x", op=hvd.Adasum),
        twice,
        optimizer.zero_grad,
    ):
        with pytest.raises((ValueError, AssertionError)) as caught:
            wrong()
        found.append(str(caught.value))
        if wrong is with_graph:
            sgd.zero_grad()
    with pytest.raises(AssertionError):
        optimizer.synchronize()
    return found


def test_messages_of_misuse_name_rank_and_tensor() -> None:
    for rank, found in enumerate(run(2, with_horovod, inside=misuses)):
        assert [text for text in found if f"rank {rank}" not in text] == []
        calls = ["alltoall.x'", "broadcast.x'", "reducescatter.x'", "allreduce.x'"]
        names = ["'2.bias'", *calls, "'2.bias'", "'2.bias', '2.weight'"]
        assert [text for text, name in zip(found, names, strict=True) if name not in text] == []


def exchange_without_splits() -> list[Any]:
    rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(2 * hvd.size()) + 10 * hvd.rank()))
    return [rows.tolist(), received.tolist(), received.dtype]


@pytest.mark.parametrize("size", [2, 3])
def test_an_asynchronous_alltoall_gives_the_received_splits_too(size: int) -> None:
    for rank, found in enumerate(run(size, with_horovod, inside=exchange_without_splits)):
        rows = [10 * sender + 2 * rank + i for sender in range(size) for i in range(2)]
        assert found == [rows, [2] * size, torch.int32]


def fail_in_backward() -> list[str]:
    """Messages of backward passes in which rank 0 waits while the others wait for another collective."""
    size, found = hvd.size(), []
    for name, *given in (("allreduce",), ("allgather",), ("broadcast", 0), ("alltoall",), ("reducescatter",)):
        x = torch.ones(size, requires_grad=True)
        loss = getattr(hvd, name)(x, *given, name="x").sum()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            if hvd.rank():
                hvd.allreduce(torch.ones(1), name="another")
            else:
                loss.backward()
        found.append(str(caught.value))
    loss = hvd.allreduce(torch.ones(1, requires_grad=True), op=hvd.Min)
    with pytest.raises(ValueError, match="has no gradient"):
        loss.backward()
    return found


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_collective_that_fails_in_backward_raises_horovod_s_error(size: int) -> None:
    for found in run(size, with_horovod, inside=fail_in_backward):
        names = ["allreduce.x", "allgather.x", "broadcast.x", "alltoall.x", "reducescatter.x"]
        assert [text for text, name in zip(found, names, strict=True) if f"{name}.grad" not in text] == []


def change_gradients(how: str) -> str:
    net = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    net(torch.ones(1, 4)).sum().backward()
    if how == "clipped":
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    elif how == "replaced":
        net[2].bias.grad = net[2].bias.grad * 2
    elif how == "cleared":
        net.zero_grad()
    with pytest.raises(AssertionError) as caught:
        if how == "unscaled":
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
        optimizer.step()
    assert "optimizer.skip_synchronize()" in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), model().parameters(), strict=True))
    return str(caught.value)


@pytest.mark.parametrize("how", ["clipped", "replaced", "cleared", "unscaled"])
def test_a_change_of_gradients_that_are_being_reduced_is_refused(how: str) -> None:
    for rank, text in enumerate(run(2, with_horovod, inside=partial(change_gradients, how))):
        assert "Gradients were changed" in text and f"(rank {rank}, parameter '2.bias'" in text


def scaled(fused: bool, early: bool) -> list[torch.Tensor]:
    """Three steps through a scaler; the gradients of the second are infinite on one rank."""
    net = model()
    adam = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
    optimizer = hvd.DistributedOptimizer(adam, net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = data(2)
    for step in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[hvd.rank()]), y[hvd.rank()])
        scaler.scale(loss * torch.inf if step == 1 and hvd.rank() == 1 else loss).backward()
        optimizer.synchronize()
        if early:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1000.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_gradient_scaler_after_synchronize(fused: bool, early: bool) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    x, y = data(2)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(nn.functional.mse_loss(net(x[r]), y[r]) for r in range(2)) / 2).backward()
        optimizer.step()
    for weights in run(2, with_horovod, inside=partial(scaled, fused=fused, early=early)):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights, net.parameters(), strict=True))


def shut_down_elsewhere() -> str:
    hvd.init()
    if hvd.rank() == 0:
        hvd.shutdown()
        text = ""
    else:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="alone")
        text = str(caught.value)
        hvd.shutdown()
    # A handle is pending; a process set is left over.
    hvd.init(process_sets=[[0]])
    hvd.allreduce_async(torch.ones(1), name="never everywhere" if hvd.rank() == 0 else "other")
    hvd.shutdown()
    hvd.init()
    assert hvd.add_process_set([0]).process_set_id == 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="alone").item() == hvd.size()
    hvd.shutdown()
    return text


def test_shutdown_and_init_again() -> None:
    zero, one = run(2, shut_down_elsewhere)
    assert zero == "" and "Horovod has been shut down" in one and "Rank 0 has left the job" in one


def batch_norm() -> list[Any]:
    torch.manual_seed(0)
    x = torch.randn(hvd.size(), 5, 4, 2) * 3 + 100
    if hvd.rank() == 0:
        hvd.SyncBatchNorm(4)
    whole, own = nn.BatchNorm1d(4), hvd.SyncBatchNorm(4, 1e-5, 0.1, True, True)
    a, b = x.clone().requires_grad_(), x[hvd.rank()].clone().requires_grad_()
    expected = whole(a.view(-1, 4, 2)).view_as(a)
    found = own(b)
    (expected**3).sum().backward()
    (found**3).sum().backward()
    weight = hvd.allreduce(own.weight.grad, op=hvd.Sum)
    return [
        torch.allclose(found, expected[hvd.rank()], atol=1e-5),
        torch.allclose(own.running_mean, whole.running_mean),
        torch.allclose(own.running_var, whole.running_var),
        torch.allclose(b.grad, a.grad[hvd.rank()], atol=1e-3),
        torch.allclose(weight, whole.weight.grad, rtol=1e-4),
    ]


def test_synchronised_batch_norm_is_that_of_the_whole_batch() -> None:
    assert run(3, with_horovod, inside=batch_norm) == [[True] * 5] * 3


def timeline(path: str) -> None:
    hvd.start_timeline(path, mark_cycles=True)
    hvd.allreduce(torch.ones(2), name="loss")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(2), name="after")


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    run(2, with_horovod, inside=timeline, path=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())
    names = [event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]]
    assert names == ["allreduce.loss"]
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= {event["name"] for event in events}
    empty = CollectiveTimeline(str(tmp_path / "empty.json"), mark_cycles=False)
    empty.close(), empty.close()
    assert len(json.loads((tmp_path / "empty.json").read_text())) == 1


def steady_state(shared: bool) -> list[int]:
    """Messages to the coordinator in one step of 40 tensors, once the cache knows the buckets."""
    largest = posted_reduction.LARGEST
    if not shared:
        posted_reduction.LARGEST = 0
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(20)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    from tutti.comm.collective_engine import engine

    sent: list[Any] = []
    kept = engine().send

    def counting(message: list[Any]) -> None:
        sent.append(message)
        kept(message)

    for step in range(3):
        if step == 2:
            engine().send = counting  # type: ignore[method-assign]
        optimizer.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    del engine().send
    posted_reduction.LARGEST = largest
    return [len(sent), len(json.dumps(sent))]


def test_a_step_in_the_steady_state_is_one_small_message() -> None:
    for messages, size in run(2, with_horovod, inside=partial(steady_state, shared=False)):
        assert messages == 1 and size < 30


def test_a_step_in_the_steady_state_of_one_node_is_no_message() -> None:
    # A rank that waits for longer than a moment says so.
    for messages, size in run(2, with_horovod, inside=partial(steady_state, shared=True)):
        assert messages <= 1 and size < 40


def test_a_signature_is_shown_before_init() -> None:
    assert "ProcessSet(process_set_id=0, ranks=" in str(inspect.signature(hvd.allreduce))


def queries() -> list[Any]:
    hvd.init()
    whole = hvd.global_process_set
    found = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size(), hvd.is_homogeneous()]
    found += [whole.process_set_id, whole.ranks, whole.rank(), hvd.mpi_enabled(), hvd.gloo_built()]
    hvd.shutdown()
    return [*found, hvd.is_initialized(), tutti.is_initialized()]


def test_queries() -> None:
    for rank, found in enumerate(run(2, queries)):
        assert found == [rank, 2, rank, 2, 1, True, 0, [0, 1], rank, False, True, False, True]
