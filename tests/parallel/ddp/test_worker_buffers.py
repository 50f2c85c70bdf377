"""What is a worker's own: swapped in and out, and merged in worker order to the same bits on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
import tutti.errors
from tests import worlds
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.partition import even_share
from tutti.comm.rank_mesh import RankMesh
from tutti.launcher import context
from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.types.run_context import RunContext


def setting(workers: int) -> RunContext:
    mesh = RankMesh(replica=tutti.size(), rank=tutti.rank())
    mine = even_share(workers, mesh.data_ranks, mesh.data_rank)
    return RunContext(mesh, Communicators(context.current(), mesh), workers, mine)


def model() -> nn.Module:
    module = nn.Sequential(nn.BatchNorm2d(3), nn.Linear(2, 2), nn.BatchNorm1d(2).double())
    module.register_buffer("average", torch.zeros(2, dtype=torch.float16))
    module.register_buffer("flag", torch.zeros(1, dtype=torch.bool))
    module.register_buffer("empty", torch.zeros(0))  # a scale that the first forward sets, before any
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    return module


def values(worker: int, name: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(worker * 1000 + len(name) * 7 + ord(name[0]))
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    if like.dtype == torch.bool:
        return torch.tensor([worker == 2])
    if not like.is_floating_point():
        return torch.tensor(3 + worker * 5 % 7)
    return (drawn.abs() * 10 if "var" in name else drawn).to(like.dtype)


def literal(workers: int) -> dict[str, np.ndarray[Any, Any]]:
    """Pooled moments in float64: E[m], and E[v] + E[(m - E[m])²]; the average of other floats; the largest integer."""
    found = {}
    like = {name: t for name, t in model().state_dict().items() if "weight" not in name and "bias" not in name}
    for name, tensor in like.items():
        rows = [values(w, name, tensor).numpy() for w in range(workers)]
        if not tensor.is_floating_point():
            found[name] = np.max(rows, axis=0)
            continue
        mean = sum(r.astype(np.float64) for r in rows) / workers
        if name.endswith("running_var"):
            of_means = name.replace("running_var", "running_mean")
            means = [values(w, of_means, like[of_means]).numpy().astype(np.float64) for w in range(workers)]
            middle = sum(means) / workers
            mean = mean + sum((m - middle) ** 2 for m in means) / workers
        found[name] = np.asarray(mean).astype(rows[0].dtype)
    return found


def merged(workers: int) -> dict[str, np.ndarray[Any, Any]]:
    module = model()
    own = WorkerBuffers([module], setting(workers))
    mine = setting(workers).mine
    for worker in mine:
        own.enter(worker)
        for name, tensor in module.named_buffers():
            if name != "scratch":
                tensor.copy_(values(worker, name, tensor))
    own.enter(mine[0])
    first = {name: t.clone() for name, t in module.named_buffers() if name != "scratch"}
    assert all(torch.equal(t, values(mine[0], name, t)) for name, t in first.items()), "its own came back"
    assert set(own.state()) == ({f"{w}/{n}" for w in mine for n in first} if workers > 1 else set())
    return {name: t.numpy().copy() for name, t in own.merged().items()}


@pytest.mark.parametrize("workers", [4, 5, 7])
def test_merged_statistics_are_the_pooled_ones_with_the_same_bits_on_any_ranks(workers: int) -> None:
    want = literal(workers)
    for ranks in (1, 2, 3, 4):
        for got in worlds.run(ranks, merged, workers=workers):
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name].dtype == value.dtype
                assert got[name].tobytes() == value.tobytes(), (ranks, name)


def test_pooled_statistics_are_those_of_all_samples_together() -> None:
    """Two workers' batches of equal size through batch norm with momentum 1: moments of the union."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(50, 3, generator=generator) * (i + 1) + i for i in range(2)]
    merged = worlds.run(1, after_batches, halves=[h.tolist() for h in halves])[0]
    everything = torch.cat(halves).double()
    assert merged["running_mean"] == pytest.approx(everything.mean(0).tolist(), rel=1e-5)
    # Batch norm keeps n/(n-1) of each worker's own variance.
    inside = sum(h.double().var(0, correction=1) for h in halves) / 2
    between = torch.stack([h.double().mean(0) for h in halves]).var(0, correction=0)
    assert merged["running_var"] == pytest.approx((inside + between).tolist(), rel=1e-5)
    assert merged["num_batches_tracked"] == 1


def after_batches(halves: list[Any]) -> dict[str, Any]:
    norm = nn.BatchNorm1d(3, momentum=1.0)
    own = WorkerBuffers([norm], setting(2))
    for worker, half in enumerate(halves):
        own.enter(worker)
        norm(torch.tensor(half))
    return {name: t.tolist() for name, t in own.merged().items()}


class Replacing(nn.Module):
    """Puts a new tensor in place of its buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self) -> None:
        self.count = self.count + 1


def without_and_replaced() -> list[Any]:
    plain = WorkerBuffers([nn.Linear(2, 2)], setting(4))
    for worker in setting(4).mine:
        plain.enter(worker)
    module, told = Replacing(), [plain.merged(), plain.state()]
    own = WorkerBuffers([module], setting(4))
    for _ in range(2):
        for worker in setting(4).mine:
            own.enter(worker)
            for _ in range(worker + 1):
                module()
    return [*told, {name: t.tolist() for name, t in own.merged().items()}]


def test_models_without_buffers_and_modules_that_replace_them() -> None:
    for ranks in (1, 3):
        assert worlds.run(ranks, without_and_replaced) == [[{}, {}, {"count": [2 * (1 + 2 + 3 + 4) / 4]}]] * ranks


def written_between_steps(strategy: str, workers: int, steps: int = 4) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    inputs = torch.randn(24, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = tutti.prepare(
        model,
        optimizer,
        (inputs, inputs.sum(1, keepdim=True)),
        lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1]),
        strategy=strategy,
        workers=workers,
        batch_size=6,
    )
    try:
        for _, batch in zip(range(steps), run.epoch(0), strict=False):
            run.step(batch)
            for parameter in model.parameters():
                parameter.data.mul_(0.9)
        run.state()
    except tutti.errors.UsageError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("strategy", ["local_sgd:period=2", "diloco:period=2", "local_sgd:period=2,post=1"])
def test_a_script_that_writes_one_worker_of_several_is_refused(strategy: str) -> None:
    said = worlds.run(2, written_between_steps, strategy=strategy, workers=4)
    assert all("has written the parameter weight" in text and "step 2" in text for text in said), said
    assert worlds.run(2, written_between_steps, strategy=strategy, workers=2) == ["not refused"] * 2


def test_a_write_after_the_last_step_is_refused_when_the_state_is_read() -> None:
    for strategy, workers in (("local_sgd:period=2", 4), ("central_storage", 2), ("parameter_server:mode=async", 2)):
        said = worlds.run(2, written_between_steps, strategy=strategy, workers=workers, steps=1)
        assert any("has written the parameter weight" in text and "after the last step" in text for text in said), said


def test_a_write_between_asynchronous_steps_is_refused() -> None:
    said = worlds.run(2, written_between_steps, strategy="parameter_server:mode=async", workers=2)
    assert all("has written the parameter weight" in text and "step 2" in text for text in said), said
