"""Custom training loops under local SGD and DiLoCo, one logical worker a rank, against plain loops played in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.covering import table
from tests.scripts.oracle import global_batches
from tutti.comm.partition import even_share
from tutti.errors import PeerError, UsageError

BATCH, PERIOD, EPOCHS = 24, 3, 3
STRATEGIES = {"local_sgd": f"local_sgd:period={PERIOD}", "diloco": f"diloco:period={PERIOD}"}
LR, MOMENTUM = 0.7, 0.9
"""Those of DiLoCo's outer optimizer by default."""

Body = Callable[["Script", Callable[..., None], Any], None]


def dataset() -> TensorDataset:
    """The last of four batches has a single sample: all workers but the first have none."""
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(73, 4, generator=draw, dtype=torch.float64), torch.randint(0, 3, (73,), generator=draw)
    )


class Script:
    """A model with its optimizers and loss scaler, as a script has them; one of each for each worker."""

    def __init__(self, body: str) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, momentum=0.2), nn.Tanh(), nn.Linear(6, 3)
        ).double()
        first, last = list(self.net[:2].parameters()), list(self.net[2:].parameters())
        self.optimizers: list[Optimizer] = {
            "closure": lambda: [torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=4, tolerance_change=0.02)],
            "two_optimizers": lambda: [torch.optim.Adam(first, lr=0.01), torch.optim.SGD(last, 0.05, momentum=0.9)],
        }.get(body, lambda: [torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)])()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.8)
        self.bodies = 0

    def tick(self) -> None:
        """Do what the script does once a global batch, whether its worker has samples or not."""
        self.bodies += 1
        self.scheduler.step()


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    # Batch norm needs two samples to train on.
    net.train(len(inputs) > 1)
    return functional.cross_entropy(net(inputs), targets)


def clipped(script: Script, backward: Callable[..., None], batch: Any) -> None:
    script.optimizers[0].zero_grad()
    backward(loss_of(script.net, batch))
    nn.utils.clip_grad_norm_(script.net.parameters(), 0.2)
    script.optimizers[0].step()


def two_backwards(script: Script, backward: Callable[..., None], batch: Any) -> None:
    script.optimizers[0].zero_grad(set_to_none=False)
    loss = loss_of(script.net, batch)
    backward(loss, retain_graph=True)
    backward(0.3 * loss.square())
    script.optimizers[0].step()


def skipped(script: Script, backward: Callable[..., None], batch: Any) -> None:
    """A worker leaves out batches by their content."""
    if not script.bodies or float(batch[0][0, 0]) < 0.4:
        two_backwards(script, backward, batch)


def two_optimizers(script: Script, backward: Callable[..., None], batch: Any) -> None:
    for optimizer, weight in zip(script.optimizers, (1.0, 0.5), strict=True):
        script.net.zero_grad()
        loss = loss_of(script.net, batch)
        backward(weight * loss)
        # Ranks make different numbers of updates.
        if loss > 1.0 or optimizer is script.optimizers[1]:
            optimizer.step()


def accumulated(script: Script, backward: Callable[..., None], batch: Any) -> None:
    backward(loss_of(script.net, batch) / 2)
    if script.bodies % 2:
        script.optimizers[0].step()
        script.optimizers[0].zero_grad()


def counted(script: Script, backward: Callable[..., None], batch: Any) -> None:
    """A loss over two of three classes, which is zero over zero for some shares but for the guard."""
    inputs, targets = batch
    script.net.train(len(inputs) > 1)
    weights = (targets > 0).double() + 0.25
    losses = functional.cross_entropy(script.net(inputs), targets, reduction="none") * weights
    script.optimizers[0].zero_grad()
    if backward is plain_backward:
        backward(losses.sum() / weights.sum())
    else:
        backward((losses.sum(), weights.sum()))
    script.optimizers[0].step()


def closure(script: Script, backward: Callable[..., None], batch: Any) -> None:
    def evaluate() -> Tensor:
        script.optimizers[0].zero_grad()
        loss = loss_of(script.net, batch) + 0.05 * sum(p.square().sum() for p in script.net.parameters())
        backward(loss)
        return loss

    script.optimizers[0].step(evaluate)


def scaled(script: Script, backward: Callable[..., None], batch: Any) -> None:
    """One worker's gradient overflows: its scaler skips the update, and the others' do not."""
    optimizer, scaler = script.optimizers[0], script.scaler
    optimizer.zero_grad()
    loss = loss_of(script.net, batch)
    backward(scaler.scale(loss * (math.inf if float(batch[0][0, 0]) > 1.8 else 1.0)))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(script.net.parameters(), 0.3)
    scaler.step(optimizer)
    scaler.update()


def by_hand(script: Script, backward: Callable[..., None], batch: Any) -> None:
    """Plain ``loss.backward()``, and a term added to ``.grad``."""
    script.optimizers[0].zero_grad()
    loss_of(script.net, batch).backward()
    for parameter in script.net.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach(), alpha=0.01)
    script.optimizers[0].step()


def clamped(script: Script, backward: Callable[..., None], batch: Any) -> None:
    """Weights that the script writes after the update."""
    clipped(script, backward, batch)
    with torch.no_grad():
        script.net[3].weight.clamp_(-0.2, 0.2)


SEVERAL: Sequence[Body] = (two_backwards, skipped, two_optimizers, accumulated, closure)
BODIES: dict[str, Body] = {f.__name__: f for f in (clipped, *SEVERAL, counted, scaled, by_hand, clamped)}


def plain_backward(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)


class Outer:
    """The average of workers, or DiLoCo's outer optimizer."""

    def __init__(self, nets: Sequence[nn.Module], diloco: bool) -> None:
        self.nets, self.diloco = nets, diloco
        self.theta = [p.detach().clone() for p in nets[0].parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.theta]

    @torch.no_grad()
    def __call__(self) -> None:
        for theta, velocity, *own in zip(
            self.theta, self.velocity, *(net.parameters() for net in self.nets), strict=True
        ):
            change = theta - sum(own) / len(own)
            velocity.mul_(MOMENTUM).add_(change)
            theta.sub_(LR * (change + MOMENTUM * velocity) if self.diloco else change)
            for parameter in own:
                parameter.copy_(theta)


def played(workers: int, body: str, diloco: bool) -> list[nn.Module]:
    """The workers' models after plain loops, one of which runs after the other."""
    scripts = [Script(body) for _ in range(workers)]
    nets, taken = [script.net for script in scripts], 0
    outer = Outer(nets, diloco)
    for epoch in range(EPOCHS):
        for inputs, targets in global_batches(dataset(), BATCH, epoch):
            for worker, script in enumerate(scripts):
                if rows := even_share(len(inputs), workers, worker):
                    share = slice(rows.start, rows.stop)
                    BODIES[body](script, plain_backward, (inputs[share], targets[share]))
                script.tick()
            taken += 1
            if taken % PERIOD == 0:
                outer()
    return nets


def mean_of(nets: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {
        name: torch.stack([net.get_parameter(name).detach() for net in nets]).mean(0)
        for name, _ in nets[0].named_parameters()
    }


def trained(strategy: str, body: str, **options: Any) -> Any:
    script = Script(body)
    options = {"batch_size": BATCH, "strategy": strategy, "seed": 0, **options}
    run = tutti.prepare(script.net, script.optimizers, dataset(), **options)
    try:
        for epoch in range(EPOCHS):
            for batch in run.microbatches(epoch):
                BODIES[body](script, run.backward, batch)
                script.tick()
    except UsageError as error:
        return run.updates, str(error)
    own = {name: p.detach().clone().numpy() for name, p in script.net.named_parameters()}
    buffers = {name: b.clone().numpy() for name, b in script.net.named_buffers()}
    return own, buffers, {name: t.numpy() for name, t in run.state().items()}, run.global_step


def farthest(got: dict[str, Any], want: dict[str, Tensor]) -> float:
    return max(float(abs(got[name] - tensor.numpy()).max()) for name, tensor in want.items())


@pytest.mark.parametrize(("kind", "body", "ranks"), table(list(STRATEGIES), list(BODIES), [2, 3]))
def test_a_loop_trains_each_rank_s_worker_as_plain_loops_do(kind: str, body: str, ranks: int) -> None:
    nets = played(ranks, body, kind == "diloco")
    for rank, found in enumerate(worlds.run(ranks, trained, strategy=STRATEGIES[kind], body=body)):
        own, buffers, state, clock = found
        assert clock == 4 * EPOCHS
        assert farthest(own, {name: p.detach() for name, p in nets[rank].named_parameters()}) <= 1e-10
        assert farthest(buffers, {name: b for name, b in nets[rank].named_buffers()}) <= 1e-10
        assert farthest(state, mean_of(nets)) <= 1e-10


def shrunk(strategy: str) -> Any:
    script = Script("clipped")
    run = tutti.prepare(script.net, script.optimizers, dataset(), strategy=strategy, batch_size=BATCH, seed=0)
    try:
        for batch in run.microbatches(0):
            clipped(script, run.backward, batch)
            with torch.no_grad():
                script.net[3].weight.mul_(0.99)
    except UsageError as error:
        return run.global_step, str(error)
    except PeerError:
        return run.global_step, ""
    return run.global_step, "it ended"


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_write_in_a_body_whose_worker_has_no_samples_is_refused(kind: str) -> None:
    """It would be made by the workers that have samples alone."""
    (_, waited), (clock, said) = worlds.run_within(8, 2, shrunk, strategy=STRATEGIES[kind])
    worlds.forget(2)
    assert clock == 4 and waited in ("", "it ended")
    assert "writes the parameter 3.weight in a step in which this rank's worker has no samples (step 4)" in said


def with_more_workers(how: str) -> str:
    script = Script("clipped")
    run = tutti.prepare(script.net, script.optimizers, dataset(), strategy=STRATEGIES[how], workers=3, batch_size=BATCH)
    try:
        for batch in run.microbatches(0):
            clipped(script, run.backward, batch)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", STRATEGIES)
def test_several_workers_a_rank_are_refused(kind: str) -> None:
    for said in worlds.run(2, with_more_workers, how=kind):
        assert "3 workers on 2 data ranks" in said and "as many workers as data ranks (2)" in said


def held_out(net: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(net(batch[0]), batch[1])


def stopped(strategy: str, folder: str | None, how: str) -> Any:
    """Two epochs; with a folder, a save in the body of a step and another run that resumes from it."""
    run: Any = None

    def prepared() -> tuple[Script, Any]:
        script = Script("two_optimizers")
        options = {"batch_size": BATCH, "strategy": strategy, "seed": 0, "ema": 0.9}
        return script, tutti.prepare(script.net, script.optimizers, dataset(), **options)

    script, run = prepared()
    seen = []
    for epoch in range(2):
        for batch in run.microbatches(epoch):
            two_optimizers(script, run.backward, batch)
            seen.append((run.stats.loss, run.updated.in_sync))
            if folder is not None and run.global_step in (4, 5, 6):
                run.save(Path(folder) / how, {"clock": run.global_step})
                if how == "late" and run.global_step == 6:
                    try:
                        script.optimizers[0].step()
                    except UsageError as error:
                        return str(error)
                if how == f"resumed at {run.global_step}":
                    script, run = prepared()
                    assert run.restore(Path(folder) / how) == {"clock": int(how[-1])}
                    for later in run.microbatches(1):
                        two_optimizers(script, run.backward, later)
                        seen.append((run.stats.loss, run.updated.in_sync))
                    break
    state = {name: t.clone().numpy() for name, t in run.state().items()}
    average = {name: t.clone().numpy() for name, t in run.state(averaged=True).items()}
    return seen, state, average, run.evaluate(dataset(), loss=held_out).loss


@pytest.mark.parametrize("kind", STRATEGIES)
def test_saves_in_the_body_and_resumes_change_nothing(kind: str, tmp_path: Path) -> None:
    """At step 4 a rank has no samples, step 5 is within a period, and step 6 ends with an average, made before."""
    [want, *_] = worlds.run(2, stopped, strategy=STRATEGIES[kind], folder=None, how="")
    for how in ("saved", "resumed at 5", "resumed at 6"):
        for seen, state, average, loss in worlds.run(
            2, stopped, strategy=STRATEGIES[kind], folder=str(tmp_path), how=how
        ):
            assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in want[0]], abs=1e-12)
            assert farthest(state, {n: torch.as_tensor(t) for n, t in want[1].items()}) <= 1e-12
            assert farthest(average, {n: torch.as_tensor(t) for n, t in want[2].items()}) <= 1e-12
            assert loss == pytest.approx(want[3], abs=1e-12)
    for said in worlds.run(2, stopped, strategy=STRATEGIES[kind], folder=str(tmp_path), how="late"):
        assert "an update in the body of a loop after run.save" in said and "step 6" in said


def stepped(strategy: str, loop: bool, optimizer: str, stop: int | None = None, **options: Any) -> Any:
    """The same training by ``run.step`` or by a loop, until a ``break`` at step ``stop``: losses, state, average."""
    script = Script("clipped")
    given: Any = optimizer or script.optimizers
    options = {"batch_size": BATCH, "strategy": strategy, "seed": 0, "ema": 0.9, **options}
    run = tutti.prepare(script.net, given, dataset(), loss_of, **options)
    losses = []
    for epoch in range(2):
        script.net[3].bias.requires_grad_(not epoch)
        for batch in run.microbatches(epoch) if loop else run.epoch(epoch):
            if not loop:
                losses.append(run.step(batch))
            else:
                script.net.zero_grad()
                run.backward(loss_of(script.net, batch))
                if optimizer:
                    run.gated_step()
                else:
                    script.optimizers[0].step()
                if run.stepped:
                    assert run.stats is not None
                    losses.append(run.stats.loss)
            if run.global_step == stop:
                break
    state = {name: t.clone().numpy() for name, t in run.state().items()}
    return losses, state, {name: t.clone().numpy() for name, t in run.state(averaged=True).items()}, run.updates


@pytest.mark.parametrize(
    ("strategy", "optimizer", "options"),
    [
        ("local_sgd:period=3,post=2", "", {"clip": 0.2}),
        ("diloco:period=2,post=3", "", {}),
        ("diloco:period=3,post=5", "adam:lr=0.01", {"clip": 0.1}),
        ("local_sgd:period=2", "", {"micro_batch": 5}),
        ("diloco:period=2", "sgd:lr=0.1,momentum=0.9", {"micro_batch": 5, "clip": 0.1}),
        # Three micro-batches on one rank and two on the other.
        ("local_sgd:period=2", "", {"micro_batch": 3, "batch_size": 13}),
        ("diloco:period=1", "", {}),
        ("diloco:period=3", "", {"stop": 6}),
        ("local_sgd:period=2", "", {"stop": 8}),
    ],
)
def test_a_loop_is_run_step(strategy: str, optimizer: str, options: dict[str, Any]) -> None:
    arguments = {"strategy": strategy, "optimizer": optimizer, **options}
    want = worlds.run(2, stepped, loop=False, **arguments)
    found = worlds.run(2, stepped, loop=True, **arguments)
    for got, (losses, state, average, updates) in zip(found, want, strict=True):
        assert got[0] == pytest.approx(losses, rel=1e-12)
        assert farthest(got[1], {n: torch.as_tensor(t) for n, t in state.items()}) <= 1e-12
        assert farthest(got[2], {n: torch.as_tensor(t) for n, t in average.items()}) <= 1e-12
        assert got[3] == updates
