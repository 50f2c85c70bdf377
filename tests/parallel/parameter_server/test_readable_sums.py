"""Custom loops read and edit the gradients that synchronous servers have summed; loops that do not send no more."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from tests import worlds
from tests.contract.table import largest_difference
from tests.covering import table

DATA = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
Edit = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def untouched(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def logged_on_one_rank(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if tutti.rank() == 0:
        norms = [p.grad.data.norm().item() for p in model.parameters() if p.grad is not None]
        assert min(norms) > 0


def edited_on_one_rank(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if tutti.rank() == 0 and step == 1:
        clipped(model, optimizer, step)


def edited_through_data(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-0.01, 0.01)


def edited_through_views(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        before = parameter.grad
        parameter.grad += parameter.detach()
        parameter.grad.view(-1)[0] = 0.5
        before[-1:] *= 2
        assert float(before.sum()) == float(parameter.grad.sum())


def zeroed_and_set(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
        if step % 2:
            parameter.grad.add_(0.1)


def applied_twice(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    clipped(model, optimizer, step)
    optimizer.step()


def applied_unread(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.step()


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        *(untouched, clipped, logged_on_one_rank, edited_on_one_rank, edited_through_data, edited_through_views),
        *(zeroed_and_set, applied_twice, applied_unread),
    )
}


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def trained(name: str, strategy: str, **options: Any) -> Any:
    """The weights after two epochs, and what is sent to servers and received from them, or what refuses the script."""
    model, optimizer = built()
    try:
        run = tutti.prepare(
            model, optimizer, DATA, strategy=strategy, workers=tutti.size(), batch_size=8, shuffle=False, **options
        )
        for epoch in range(2):
            for [inputs] in run.microbatches(epoch):
                optimizer.zero_grad()
                run.backward(loss_of(model, inputs))
                EDITS[name](model, optimizer, run.global_step)
                optimizer.step()
        link = getattr(run.gradient_sync, "_link", None)
        traffic = {} if link is None else dict(link.client.traffic)
        return {key: value.numpy().copy() for key, value in run.state().items()}, traffic
    except tutti.errors.TuttiError as error:
        return str(error)


ALLOWED = ["untouched", "clipped", "logged_on_one_rank", "edited_through_data", "edited_through_views"]
ALLOWED += ["zeroed_and_set", "applied_twice"]
SERVERS = ["parameter_server", "parameter_server:servers=2,transport=tcp"]


@pytest.mark.parametrize(("name", "ranks", "strategy"), table(ALLOWED, [1, 2, 3], SERVERS))
def test_loops_equal_those_of_all_reduce(name: str, ranks: int, strategy: str) -> None:
    want, _ = worlds.alone(trained, name=name, strategy="single")
    for got, _ in worlds.run(ranks, trained, name=name, strategy=strategy):
        assert largest_difference(got, want) <= 1e-10


def test_edits_of_one_rank_alone_are_refused_before_the_update() -> None:
    pool = worlds.Pool(2)
    try:
        for said in pool.run(trained, name="edited_on_one_rank", strategy="parameter_server"):
            assert isinstance(said, str) and "digests of edited gradients in step 2" in said, said
    finally:
        pool.close()


def test_a_gradient_that_an_update_has_used_is_refused_for_another() -> None:
    for said in worlds.run(2, trained, name="applied_unread", strategy="parameter_server"):
        assert isinstance(said, str) and said.startswith("gradients that are not cleared after an update"), said


def read_late() -> list[float]:
    """The largest difference, in each step, of what rank 0 reads while the other waits in its update."""
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, DATA, strategy="parameter_server", workers=2, batch_size=8, shuffle=False)
    found = []
    for [inputs] in run.microbatches(0):
        optimizer.zero_grad()
        run.backward(loss_of(model, inputs))
        if tutti.rank() == 0:
            time.sleep(0.2)
            plain, start = copy.deepcopy(model), 8 * run.global_step
            wants = torch.autograd.grad(loss_of(plain, DATA.tensors[0][start : start + 8]), list(plain.parameters()))
            pairs = zip(model.parameters(), wants, strict=True)
            found.append(max(float((p.grad - want).abs().max()) for p, want in pairs if p.grad is not None))
        optimizer.step()
    return found


def test_a_rank_may_read_while_another_waits_in_its_update() -> None:
    found, _ = worlds.run(2, read_late)
    assert len(found) == 3 and max(found) <= 1e-10


def stepped_first(strategy: str) -> dict[str, Any]:
    """A loop whose update is ahead of its backward, so that the first one has no gradient; rank 0 comes last."""
    model, optimizer = built()
    run = tutti.prepare(
        model, optimizer, DATA, strategy=strategy, workers=tutti.size(), batch_size=5, shuffle=False, precision="fp64"
    )
    for [inputs] in run.microbatches(0):
        if tutti.rank() == 0:
            time.sleep(0.1)
        optimizer.step()
        optimizer.zero_grad()
        run.backward(loss_of(model, inputs))
    return {key: value.numpy().copy() for key, value in run.state().items()}


def test_an_update_before_the_first_gradient_changes_nothing() -> None:
    want = worlds.alone(stepped_first, strategy="single")
    for got in worlds.run(2, stepped_first, strategy="parameter_server"):
        assert largest_difference(got, want) <= 1e-10


def server_killed() -> str:
    model, optimizer = built()
    run = tutti.prepare(model, optimizer, DATA, strategy="parameter_server", workers=2, batch_size=8)
    try:
        for [inputs] in run.microbatches(0):
            optimizer.zero_grad()
            run.backward(loss_of(model, inputs))
            for pid in run.gradient_sync._link.pids().values():  # type: ignore[attr-defined]
                os.kill(pid, signal.SIGKILL)
            clipped(model, optimizer, 0)
            optimizer.step()
    except tutti.errors.TuttiError as error:
        return f"{type(error).__name__}, {run.local_step} updates"
    return "not refused"


def test_a_server_that_dies_before_a_read_ends_the_run() -> None:
    pool = worlds.Pool(2, timeout=5.0)
    try:
        assert pool.run(server_killed) == ["PeerError, 0 updates"] * 2
    finally:
        pool.close()


def sent(name: str) -> tuple[list[int], int, int]:
    """Requests of each rank, and bytes that two ranks send to a server and receive, in two epochs of 3 steps."""
    results = worlds.run(2, trained, name=name, strategy="parameter_server:transport=tcp")
    traffic = [list(flows.values()) for _, flows in results]
    each = traffic[0] + traffic[1]
    requests = [sum(flow.requests for flow in flows) for flows in traffic]
    return requests, sum(flow.sent for flow in each), sum(flow.received for flow in each)


def test_loops_that_do_not_look_at_gradients_send_no_more() -> None:
    """A rank that reads receives the gradients once a step; edited gradients go to each server once."""
    requests, out, back = sent("untouched")
    assert requests == [1 + 3 * 6] * 2
    tensors = sum(p.nbytes for p in built()[0].parameters())
    read, edited = sent("logged_on_one_rank"), sent("clipped")
    assert read[0] == [requests[0] + 6, requests[1]] and edited[0] == [requests[0] + 12, requests[1] + 6]
    assert 6 * tensors <= read[2] - back and 12 * tensors <= edited[2] - back and 6 * tensors <= edited[1] - out


def saved_and_resumed(directory: str) -> dict[str, Any]:
    """Training that accumulates by hand over two batches, stopped after the first epoch, and resumed in another run."""
    for epochs, resume in ((1, False), (2, True)):
        model, optimizer = built()
        run = tutti.prepare(
            *(model, optimizer, DATA), strategy="parameter_server", workers=2, batch_size=5, shuffle=False
        )
        if resume:
            run.restore(directory)
        for epoch in run.epochs(epochs):
            for [inputs] in run.microbatches(epoch):
                run.backward(loss_of(model, inputs) / 2)
                if run.global_step % 2:
                    clipped(model, optimizer, 0)
                    optimizer.step()
                    optimizer.zero_grad()
        if not resume:
            run.save(directory)
    return {key: value.numpy().copy() for key, value in run.state().items()}


def test_accumulation_by_hand_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    model, optimizer = built()
    for _ in range(2):
        for number, inputs in enumerate(DATA.tensors[0].split(5)):
            (loss_of(model, inputs) / 2).backward()
            if number % 2:
                clipped(model, optimizer, 0)
                optimizer.step()
                optimizer.zero_grad()
    want = {key: value.numpy() for key, value in model.state_dict().items()}
    for got in worlds.run(2, saved_and_resumed, directory=str(tmp_path / "checkpoint")):
        assert largest_difference(got, want) <= 1e-10
