"""Collectives and Horovod's interface with tensors of the device: each gives what CPU tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti.horovod.torch as hvd
from tests import worlds
from tests.covering import in_turn
from tests.simulated_accelerator.build import DEVICE
from tests.simulated_accelerator.test_daily_use import same
from tutti.launcher import context

pytestmark = pytest.mark.timeout(600)


def here() -> torch.device:
    return context.current().device


def home(value: Any) -> Any:
    """The value with tensors on the host; tensors that are elsewhere than this rank's device are marked."""
    if isinstance(value, Tensor):
        # Adam's step counter stays on the host.
        at_home = value.device.type == here().type or not value.dim()
        return value.detach().cpu() if at_home else f"on {value.device}"
    if isinstance(value, dict):
        return [(name, home(each)) for name, each in value.items()]
    return [home(each) for each in value] if isinstance(value, list | tuple) else value


def with_horovod(inside: Callable[..., Any], **given: Any) -> Any:
    hvd.init()
    try:
        return home(inside(**given))
    finally:
        hvd.shutdown()


def collectives() -> Any:
    rank, size, place = hvd.rank(), hvd.size(), here()
    mine = torch.tensor([1.0, -2.0], device=place) * (rank + 1)
    found: list[Any] = [hvd.allreduce(mine, op=op) for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)]
    found.append(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0))
    found.append(hvd.allreduce(torch.tensor([rank, 3], device=place)))
    found.append(hvd.allreduce(mine.half(), compression=hvd.Compression.fp16))
    found.append(hvd.allreduce(mine.bfloat16(), op=hvd.Adasum))
    handles = [hvd.allreduce_async(mine * n, name=f"n{n}") for n in range(3)]
    found += [hvd.synchronize(handle) for handle in handles]
    hvd.allreduce_(mine)
    found += [mine, *hvd.grouped_allreduce([mine, mine[:1] + rank])]
    found.append(hvd.allgather(torch.full((rank + 1, 2), float(rank), device=place)))
    found += hvd.grouped_allgather([mine, mine[:1]])
    found.append(hvd.broadcast(torch.full((3,), rank, device=place), root_rank=size - 1))
    there = torch.full((2, 2), float(rank), device=place).t()
    hvd.broadcast_(there, root_rank=0)
    found.append(there)
    splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
    sent = torch.arange(size * (rank + 1), device=place, dtype=torch.float64)
    received, counts = hvd.alltoall(sent, splits=splits)
    found += [received, counts.cpu().tolist()]
    found.append(hvd.reducescatter(torch.arange(5.0, device=place) * (rank + 1), op=hvd.Sum))
    found += hvd.grouped_reducescatter([torch.arange(4.0, device=place), torch.ones(3, 2, device=place)])
    found += [hvd.broadcast_object({"rank": rank}, root_rank=0), hvd.allgather_object(rank)]
    if rank == 0:
        found.append(hvd.allreduce(torch.ones(2, device=place), op=hvd.Sum))
    found.append(hvd.join(-1 if place.type == "cpu" else place.index))
    hvd.barrier()
    return found


def differentiated() -> Any:
    mine = (torch.ones(3, device=here()) * (hvd.rank() + 1)).requires_grad_()
    weights = torch.arange(3.0, device=here())
    value = (hvd.allreduce(mine, op=hvd.Sum) * weights).sum() + (hvd.allgather(mine * 2) ** 2).sum()
    value = value + (hvd.broadcast(mine, 0) * weights).sum()
    value.backward()
    return mine.grad


def model() -> nn.Sequential:
    torch.manual_seed(hvd.rank())
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def train(kind: str, options: dict[str, Any]) -> Any:
    """A Horovod script of the usual form, with the model on the device."""
    options = {"compression": getattr(hvd.Compression, options.pop("compression", "none")), **options}
    passes = options.get("backward_passes_per_step", 1)
    net = model().to(here())
    inner: Any = torch.optim.Adam if kind == "adam" else torch.optim.SGD
    given = {"lr": 0.01} if kind == "adam" else {"lr": 0.1, "momentum": 0.9}
    optimizer = hvd.DistributedOptimizer(inner(net.parameters(), **given), net.named_parameters(), **options)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(hvd.size(), 5, 4, generator=draw), torch.randn(hvd.size(), 5, 3, generator=draw)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(passes):
            value = nn.functional.mse_loss(net(x[hvd.rank()].to(here())), y[hvd.rank()].to(here()))
            value.backward()
        if step == 1 and options.get("op") is not hvd.Adasum:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        losses.append(hvd.allreduce(value.detach(), name="loss"))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()["state"]
    return losses, list(net.parameters()), [list(state[key].values()) for key in sorted(state)]


def normalised() -> Any:
    layer = hvd.SyncBatchNorm(3).to(here())
    values = (torch.arange(12.0, device=here()).view(4, 3) * (hvd.rank() + 1)).requires_grad_()
    (layer(values) ** 3).sum().backward()
    return values.grad, layer.weight.grad, layer.running_mean, layer.running_var


def kept() -> Any:
    state = hvd.elastic.TorchState(model=model().to(here()), optimizer=None, batch=0)
    before = [p.clone() for p in state.model.parameters()]
    state.batch = 3
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.add_(1)
    state.restore()
    changed = [bool((p != q).any()) for p, q in zip(state.model.parameters(), before, strict=True)]
    state.sync()
    return changed, state.batch, list(state.model.parameters())


ACTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "collectives": (collectives, {}),
    "differentiated": (differentiated, {}),
    "sgd": (train, {"kind": "sgd", "options": {}}),
    "adam": (train, {"kind": "adam", "options": {}}),
    "sum of passes": (train, {"kind": "sgd", "options": {"op": hvd.Sum, "backward_passes_per_step": 2}}),
    "adasum": (train, {"kind": "sgd", "options": {"op": hvd.Adasum}}),
    "fp16": (train, {"kind": "sgd", "options": {"compression": "fp16"}}),
    "predivided": (train, {"kind": "sgd", "options": {"gradient_predivide_factor": 2.0}}),
    "sync batch norm": (normalised, {}),
    "elastic state": (kept, {}),
}


@pytest.mark.parametrize(("name", "ranks"), in_turn(list(ACTIONS), [2, 1]))
def test_an_action_gives_what_it_gives_on_the_cpu(name: str, ranks: int) -> None:
    action, arguments = ACTIONS[name]
    want = worlds.run_on("cpu", ranks, with_horovod, inside=action, **arguments)
    got = worlds.run_on(DEVICE, ranks, with_horovod, inside=action, **arguments)
    assert same(got, want), (got, want)
