"""The simulated accelerator notices what a GPU would: a missing wait, a tensor on the wrong device."""

from __future__ import annotations

import contextlib
import copy
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tutti
from tests import worlds
from tests.simulated_accelerator import build
from tests.simulated_accelerator.build import DEVICE

pytestmark = pytest.mark.timeout(600)  # the first one builds the device


def place() -> torch.device:
    return torch.device(DEVICE, tutti.local_rank())


def counts() -> dict[str, int]:
    return dict(torch.get_device_module(DEVICE).counts())


@contextlib.contextmanager
def syncs() -> Iterator[list[int]]:
    """How often the host waits for the device within the block."""
    found, before = [0], counts()["syncs"]
    yield found
    found[0] = counts()["syncs"] - before


def refused(action: Any) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def arithmetic() -> dict[str, Any]:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten())
    layers.append(torch.nn.Linear(48, 5))
    input, target = torch.randn(4, 2, 6, 6), torch.tensor([0, 1, 2, 4])
    results = []
    for device in (torch.device("cpu"), place()):
        model = copy.deepcopy(layers).to(device)
        torch.nn.functional.cross_entropy(model(input.to(device)), target.to(device)).backward()
        results.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    return {
        "equal": all(map(torch.equal, *results)) and len(results[0]) == 6,
        "parameter": model[0].weight.device.type,
        "draws": draws(),
    }


def draws() -> tuple[bool, bool]:
    """Whether the device draws the CPU's numbers from the same seed, and leaves the CPU's generator alone."""
    torch.manual_seed(7)
    here = torch.randn(5)
    state = torch.default_generator.get_state()
    there = torch.randn(5, device=place())
    return torch.equal(here, there.cpu()), torch.equal(state, torch.default_generator.get_state())


def test_its_arithmetic_and_its_draws_are_those_of_the_cpu() -> None:
    assert worlds.run_on(DEVICE, 1, arithmetic) == [{"equal": True, "parameter": DEVICE, "draws": (True, True)}]


def second_derivatives() -> list[Any]:
    """Of a sum with absolute values, and the sum of a view of such a tensor of zeros with another tensor."""
    found = []
    for device in (torch.device("cpu"), place()):
        values = torch.tensor([1.0, -2.0], device=device, requires_grad=True)
        [first] = torch.autograd.grad((values.abs() + values**3).sum(), values, create_graph=True)
        found.append(torch.autograd.grad((first * first.detach()).sum(), values)[0].tolist())
        zeros = torch._efficientzerotensor((2,), device=device)
        found.append((zeros.view(2, 1) + values).tolist())
    return found


def test_derivatives_that_are_zero_everywhere_have_no_memory() -> None:
    [(first, zeros, *there)] = worlds.run_on(DEVICE, 1, second_derivatives)
    assert there == [first, zeros] and zeros == [[1.0, -2.0], [1.0, -2.0]]


def misplaced() -> list[str]:
    device, host = torch.ones(3, device=place()), torch.ones(3)
    return [
        refused(lambda: device + host),
        refused(lambda: torch.nn.functional.linear(device, torch.ones(2, 3))),
        refused(lambda: torch.randn(3, device=place(), generator=torch.Generator())),
        refused(lambda: device.add_(host)),
    ]


def test_tensors_of_two_devices_are_refused() -> None:
    [said] = worlds.run_on(DEVICE, 1, misplaced)
    assert "same device" in said[0] and "same device" in said[1] and "same device" in said[3]
    assert "generator" in said[2]


def deferred() -> list[Any]:
    side, found = torch.Stream(place()), []
    pinned = torch.arange(3.0).pin_memory()
    with side:
        there = pinned.to(place(), non_blocking=True)
        event = side.record_event()
    found.append(there.isnan().all().item())
    torch.accelerator.current_stream().wait_event(event)
    found.append(there.tolist())
    back = torch.empty(3).pin_memory()
    back.copy_(there + 1, non_blocking=True)
    early = back.isnan().all().item()
    torch.accelerator.synchronize()
    return [*found, early, back.tolist()]


def test_a_copy_is_there_once_something_has_waited_for_it() -> None:
    assert worlds.run_on(DEVICE, 1, deferred) == [[True, [0.0, 1.0, 2.0], True, [1.0, 2.0, 3.0]]]


def copied_again() -> list[Any]:
    """Copies into memory that has been copied to before, and into memory that a copy under way reads."""
    kept, ones = torch.zeros(3).pin_memory(), torch.ones(3).pin_memory()
    there = torch.zeros(3, device=place())
    kept.copy_(there, non_blocking=True)
    there.copy_(ones, non_blocking=True)
    torch.accelerator.synchronize()
    found = [kept.tolist(), there.tolist()]
    kept.copy_(there, non_blocking=True)
    early = kept.isnan().all().item()
    torch.accelerator.synchronize()
    return [*found, early, kept.tolist()]


def test_memory_that_is_copied_to_again_has_not_its_old_content() -> None:
    """A program that forgets to wait in later steps alone gets no gradients of the step before."""
    [found] = worlds.run_on(DEVICE, 1, copied_again)
    assert found == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], True, [1.0, 1.0, 1.0]]


def waits() -> list[int]:
    tensor, found = torch.ones(3, device=place()), []
    for action in (lambda: tensor + 1, lambda: tensor.sum().item(), lambda: tensor.cpu(), lambda: bool(tensor[0] > 0)):
        with syncs() as counted:
            action()
        found.append(counted[0])
    return found


def test_waits_of_the_host_are_counted() -> None:
    assert worlds.run_on(DEVICE, 1, waits) == [[0, 1, 1, 1]]


def collectives() -> list[Any]:
    rank, size = tutti.rank(), tutti.size()
    mine = torch.full((size,), float(rank + 1), device=place())
    work = dist.all_reduce(mine, async_op=True)
    early = mine.tolist()
    work.wait()
    found: list[Any] = [early == [rank + 1.0] * size, mine.tolist()]
    mean = torch.full((1,), float(rank), device=place())
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    whole = torch.empty(size, device=place())
    dist.all_gather_into_tensor(whole, torch.full((1,), float(rank), device=place()))
    row = torch.empty(1, device=place())
    dist.reduce_scatter_tensor(row, torch.arange(float(size), device=place()))
    across = torch.empty(size, device=place())
    dist.all_to_all_single(across, torch.arange(float(size), device=place()) + 10 * rank)
    group = dist.new_group(backend="gloo")
    said = refused(lambda: dist.all_reduce(torch.ones(1, device=place()), group=group))
    return [*found, mean.item(), whole.tolist(), row.item(), across.tolist(), "simgpu" in said]


def test_collectives_give_their_result_to_who_waits() -> None:
    for rank, answer in enumerate(worlds.run_on(DEVICE, 2, collectives)):
        assert answer == [True, [3.0, 3.0], 0.5, [0.0, 1.0], 2.0 * rank, [float(rank), 10.0 + rank], True]


def test_a_build_that_takes_too_long_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, told = tmp_path / "compiler", tmp_path / "child"
    os.mkfifo(told)
    # The child keeps the pipe open for as long as it lives, as g++ starts a compiler proper.
    compiler.write_text(f"#!/bin/sh\nsleep 60 > {told} &\nwait\n", encoding="utf-8")
    compiler.chmod(0o700)
    monkeypatch.setattr(build, "_SECONDS", 0.5)
    monkeypatch.setattr(build, "find_compiler", lambda: str(compiler))
    reader = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        build.compile_extension(tmp_path / "source.cpp", tmp_path / "made.so")
    [ended, *_], *_ = select.select([reader], [], [], 20.0)
    assert os.read(ended, 1) == b""
    os.close(reader)
