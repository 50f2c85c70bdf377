"""The same training step through several pairs of hands, each with its own copy of the model, in one process group."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from models import Batch, Workload, mean_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import tutti

WORKERS = 2


@dataclass(frozen=True)
class Contestant:
    """A way to train.

    Attributes:
        model: whose parameters are trained, in the workload's order.
        step: trains it on one batch: forward, loss, backward, update, gradients cleared.
    """

    model: nn.Module
    step: Callable[[Batch], object]


def _fresh(work: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = work.build().to(work.device)
    return model, work.optimizer(model.parameters())


def ddp(work: Workload, data: TensorDataset) -> Contestant:
    """The hand-written loop."""
    plain, optimizer = _fresh(work)
    model = DistributedDataParallel(plain)

    def step(batch: Batch) -> None:
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(plain, step)


def fully_shard(work: Workload, data: TensorDataset) -> Contestant:
    """PyTorch's FSDP2 by hand, in the units that tutti finds."""
    from torch.distributed.fsdp import fully_shard as shard

    from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_modules

    torch.manual_seed(0)
    model, mesh = work.build().to(work.device), init_device_mesh(work.device, (work.processes,))
    for unit in [*wrapped_modules(model), model]:
        shard(unit, mesh=mesh)
    optimizer = work.optimizer(model.parameters())
    if isinstance(optimizer, torch.optim.SGD):
        # There is no fused one for DTensors.
        optimizer.param_groups[0]["fused"] = False

    def step(batch: Batch) -> None:
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(model, step)


def prepared(
    work: Workload, data: TensorDataset, strategy: str = "mirrored"
) -> tuple[tutti.Run, torch.optim.Optimizer]:
    """A run of the workload, and its optimizer."""
    model, optimizer = _fresh(work)
    workers = work.processes
    size = workers * work.samples
    run = tutti.prepare(model, optimizer, data, mean_loss, strategy=strategy, workers=workers, batch_size=size)
    return run, optimizer


def tutti_sharded(work: Workload, data: TensorDataset) -> Contestant:
    """tutti with sharded weights, one call a step."""
    run, _ = prepared(work, data, "sharded")
    return Contestant(run.model, run.step)


def tutti_step(work: Workload, data: TensorDataset) -> Contestant:
    """tutti, one call a step."""
    run, _ = prepared(work, data)
    return Contestant(run.model, run.step)


def tutti_loop(work: Workload, data: TensorDataset) -> Contestant:
    """tutti in a loop that stays the user's own, fed with the others' batches, for loading is not measured."""
    run, optimizer = prepared(work, data)
    given: list[Batch] = []

    def epoch(number: int, start: int = 0) -> Iterator[Batch]:
        while True:
            yield given.pop()

    run.epoch = epoch  # type: ignore[method-assign]
    cells = run.microbatches(0)

    def step(batch: Batch) -> None:
        given.append(batch)
        loss = mean_loss(run.model, next(cells))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(run.model, step)


def horovod(work: Workload, data: TensorDataset) -> Contestant:
    """The loop of a Horovod script, on tutti's drop-in; joins the process group that is there."""
    import tutti.horovod.torch as hvd

    hvd.init()
    model, plain_optimizer = _fresh(work)
    optimizer = hvd.DistributedOptimizer(plain_optimizer, named_parameters=model.named_parameters())

    def step(batch: Batch) -> None:
        loss = mean_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(model, step)


def accelerate(work: Workload, data: TensorDataset) -> Contestant:
    """Hugging Face Accelerate; joins the process group that is there."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    plain, plain_optimizer = _fresh(work)
    accelerator = Accelerator(cpu=work.device == "cpu")
    model, optimizer = accelerator.prepare(plain, plain_optimizer)

    def step(batch: Batch) -> None:
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(plain, step)


def fabric(work: Workload, data: TensorDataset) -> Contestant:
    """Lightning Fabric; joins the process group that is there."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment

    plain, plain_optimizer = _fresh(work)
    engine = Fabric(accelerator=work.device, strategy="ddp", devices=work.processes, plugins=LightningEnvironment())
    engine.launch()
    model, optimizer = engine.setup(plain, plain_optimizer)

    def step(batch: Batch) -> None:
        loss = mean_loss(model, batch)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(plain, step)


REFERENCE = "ddp"
CONTESTANTS: dict[str, Callable[[Workload, TensorDataset], Contestant]] = {
    REFERENCE: ddp,
    "ddp-again": ddp,
    "tutti-step": tutti_step,
    "tutti-loop": tutti_loop,
    "horovod": horovod,
    "accelerate": accelerate,
    "fabric": fabric,
    "fully-shard": fully_shard,
    "tutti-sharded": tutti_sharded,
}
AGAINST = {"tutti-sharded": "fully-shard"}
"""What is compared with something else than ``REFERENCE``."""
JUDGED = ("tutti-step", "tutti-loop", "tutti-sharded", "horovod")
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}


KNOWN_DEVICES = {"accelerate": ("cpu", "cuda"), "fabric": ("cpu", "cuda")}
"""Types of devices that a package knows; all others take any."""


def missing(names: list[str], device: str = "cpu") -> dict[str, str]:
    """Those contestants that cannot run, with the reason: a package that is not installed or knows no ``device``."""
    found = {}
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            found[name] = f"the package {PACKAGES[name]} is not installed"
        elif device not in KNOWN_DEVICES.get(name, (device,)):
            found[name] = f"it knows no device {device}"
    return found
