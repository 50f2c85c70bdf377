"""The measurement of a slow device ends in minutes: no call is followed by a larger one once it takes long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tutti.workload import bench_device
from tutti.workload.bench_timing import Findings, curve_point, fastest
from tutti.workload.machine_file import peak_name


@pytest.mark.parametrize(("seconds", "sizes"), [(1e-3, 6), (2.0, 2)])
def test_no_larger_call_follows_a_long_one(seconds: float, sizes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Callable[[], object], *_: object, **__: object) -> list[float]:
        return [seconds] * 5

    monkeypatch.setattr(bench_device, "time_calls", timed)
    # No call is made, but its tensors are: matrix products alone have all their sizes.
    small = replace(bench_device._ON_CPUS, bytes=range(12, 15, 2), parameters=(10, 12), convolution=(1, 2))
    monkeypatch.setattr(bench_device, "_ON_CPUS", small)
    found = Findings(show=False)
    bench_device.bench_device(torch.device("cpu"), found)
    assert len(found.curves["device/matmul/fp32"].points) == sizes
    assert found.figures[peak_name("fp32", 1)].value > 0


def test_of_several_rounds_the_fastest_counts_at_each_size() -> None:
    rounds = [Findings(show=False) for _ in range(2)]
    for each, seconds in zip(rounds, ((1.0, 9.0), (5.0, 2.0)), strict=True):
        each.add_curve(
            "device/copy", "byte", [curve_point(size, [s] * 3) for size, s in zip((1, 4), seconds, strict=True)]
        )
        each.add("device/operation/seconds", "s", [seconds[0]])
    found = Findings(show=False)
    fastest(rounds, lambda name: f"shared/{name}/2", found)
    assert [point.seconds for point in found.curves["shared/device/copy/2"].points] == [1.0, 2.0]
    assert found.figures["shared/device/operation/seconds/2"].value == 1.0


def test_a_device_with_little_memory_is_measured_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 3

    def timed(call: Callable[[], object], *_: object, **__: object) -> list[float]:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("out of memory")
        return [1e-3] * 5

    monkeypatch.setattr(bench_device, "time_calls", timed)
    found = Findings(show=False)
    works = [lambda: (1.0, lambda: None), lambda: (2.0, lambda: None)] * 2
    bench_device._draw("device/matmul/fp32", works, torch.device("cpu"), found)
    assert len(found.curves["device/matmul/fp32"].points) == 3
    with pytest.raises(torch.OutOfMemoryError):
        bench_device._draw("device/matmul/fp32", works, torch.device("cpu"), found)
