"""Ways to split a GPT and a ViT over processes, written by hand on PyTorch's API as its tutorials and torchtitan do.

Each function builds a contestant of ``split_step.py`` on every rank: a part of a workload's model and a step that
trains it on the batch of this rank's replica. Ranks are counted as tutti counts them: those of one replica are
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from contestants import Contestant
from models import Batch, Patches, Workload, adamw, labelled, mean_loss, text
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

MICRO_BATCHES = 4
WIDTH = 256


class Attention(nn.Module):
    """Attention that works for any number of heads that its linear layers give."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head, self.causal = width // heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [m(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in (self.query, self.key, self.value)]
        seen = functional.scaled_dot_product_attention(*parts, is_causal=self.causal)
        mixed: Tensor = self.mix(seen.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.feed(self.norm2(x))
        return x


class Mean(nn.Module):
    """Mean over an image's patches: [samples, patches, width] to [samples, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _blocks(causal: bool) -> list[nn.Module]:
    return [*(Block(WIDTH, 4, causal) for _ in range(4)), nn.LayerNorm(WIDTH)]


def build_gpt() -> nn.Module:
    """[samples, 128] tokens to [samples, 128, 1024] logits."""
    return nn.Sequential(nn.Embedding(1024, WIDTH), *_blocks(causal=True), nn.Linear(WIDTH, 1024, bias=False))


def build_vit() -> nn.Module:
    """[samples, 3, 32, 32] images to [samples, 10] logits."""
    return nn.Sequential(Patches(WIDTH), *_blocks(causal=False), Mean(), nn.Linear(WIDTH, 10))


GPT = Workload("split gpt", build_gpt, text, adamw, samples=8, launches=4, rounds=20, steps=1, lead=0)
VIT = Workload("split vit", build_vit, labelled((3, 32, 32)), adamw, samples=16, launches=4, rounds=20, steps=1, lead=0)


@dataclass(frozen=True)
class Place:
    """Where a process is on a grid of replicas of ``inside`` processes each."""

    mesh: DeviceMesh

    @classmethod
    def make(cls, inside: int) -> Place:
        """Collective."""
        outside = dist.get_world_size() // inside
        return cls(dist.init_device_mesh("cpu", (outside, inside), mesh_dim_names=("data", "inside")))

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """The replicas' mean gradients, all in one all-reduce."""
        if self.mesh["data"].size() == 1:
            return
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in local])
        dist.all_reduce(flat, group=self.mesh.get_group("data"))
        flat /= self.mesh["data"].size()
        parts = flat.split([gradient.numel() for gradient in local])
        torch._foreach_copy_(local, [part.view_as(own) for part, own in zip(parts, local, strict=True)])


def layers(cut: int, work: Workload) -> Contestant:
    """Two stages in turn: activations are sent on, gradients are sent back."""
    torch.manual_seed(0)
    children, rank = list(work.build().children()), dist.get_rank()
    part = nn.Sequential(*(children[cut:] if rank else children[:cut]))
    optimizer = work.optimizer(part.parameters())
    with torch.no_grad():
        crossing = nn.Sequential(*children[:cut])(work.batch(work.samples, torch.Generator())[0])

    def first(inputs: Tensor) -> None:
        sent = part(inputs)
        dist.send(sent.detach(), 1)
        dist.recv(crossing, 1)
        sent.backward(crossing)

    def last(labels: Tensor) -> None:
        dist.recv(crossing, 0)
        entered = crossing.detach().requires_grad_()
        mean_loss(part, (entered, labels)).backward()  # type: ignore[no-untyped-call]
        assert entered.grad is not None
        dist.send(entered.grad, 0)

    def step(batch: Batch) -> None:
        last(batch[1]) if rank else first(batch[0])
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(part, step)


SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def pipelining(schedule: str, cuts: tuple[int, ...], work: Workload) -> Contestant:
    """``torch.distributed.pipelining`` over two processes a replica; replicas average their gradients after it."""
    torch.manual_seed(0)
    children, place = list(work.build().children()), Place.make(2)
    group, rank = place.mesh.get_group("inside"), place.mesh.get_local_rank("inside")
    ends = (0, *cuts, len(children))
    # Stages go round the two: interleaved has two each.
    mine = range(rank, len(cuts) + 1, 2)
    parts = [nn.Sequential(*children[ends[i] : ends[i + 1]]) for i in mine]
    stages = [
        PipelineStage(part, i, len(cuts) + 1, torch.device("cpu"), group=group)
        for i, part in zip(mine, parts, strict=True)
    ]

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, -2), labels.flatten())

    single = schedule in ("gpipe", "1f1b")
    engine = SCHEDULES[schedule](stages[0] if single else stages, MICRO_BATCHES, loss_fn=loss)  # type: ignore[arg-type]
    held = nn.ModuleList(parts)
    optimizer = work.optimizer(held.parameters())

    def step(batch: Batch) -> None:
        inputs, labels = batch
        if rank:
            engine.step(target=labels)
        else:
            engine.step(inputs)
        place.average(held.parameters())
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(held, step)


def _columns_and_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    columns = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan = {**columns, "attention.mix": RowwiseParallel(), "feed.0": ColwiseParallel(), "feed.2": RowwiseParallel()}
    for block in model.children():
        if isinstance(block, Block):
            parallelize_module(block, mesh, plan)


def _trained(
    model: nn.Module, work: Workload, groups: list[list[nn.Parameter]], average: Callable[[], None]
) -> Contestant:
    # A fused optimizer does not take plain and distributed tensors, nor those of two grids, together.
    optimizers = [work.optimizer(group) for group in groups if group]

    def step(batch: Batch) -> None:
        mean_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        average()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return Contestant(model, step)


def dtensor(work: Workload) -> Contestant:
    """DTensor, from PyTorch's tutorial on tensor parallelism; replicas average their gradients after the backward."""
    torch.manual_seed(0)
    model, place = work.build(), Place.make(2)
    _columns_and_rows(model, place.mesh["inside"])
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) is split] for split in (True, False)]
    return _trained(model, work, groups, lambda: place.average(model.parameters()))


def shards_of_dtensors(work: Workload) -> Contestant:
    """FSDP2 over DTensor, as torchtitan combines them."""
    torch.manual_seed(0)
    model, place = work.build(), Place.make(2)
    _columns_and_rows(model, place.mesh["inside"])
    for unit in [*(child for child in model.children() if isinstance(child, Block)), model]:
        fully_shard(unit, mesh=place.mesh["data"])
    groups: dict[int, list[nn.Parameter]] = {1: [], 2: []}
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        groups[parameter.device_mesh.ndim].append(parameter)
    return _trained(model, work, list(groups.values()), lambda: None)
