"""The measurement of a slow device ends in minutes: no call is followed by a larger one once it takes long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tutti.workload import bench_device
from tutti.workload.bench_timing import Findings
from tutti.workload.machine_file import peak_name


@pytest.mark.parametrize(("seconds", "sizes"), [(1e-3, 6), (2.0, 2)])
def test_no_larger_call_follows_a_long_one(seconds: float, sizes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Callable[[], object], *_: object, **__: object) -> list[float]:
        return [seconds] * 5

    monkeypatch.setattr(bench_device, "time_calls", timed)
    found = Findings(show=False)
    bench_device.bench_device(torch.device("cpu"), found)
    assert len(found.curves["device/matmul/fp32"].points) == sizes
    assert found.figures[peak_name("fp32", 1)].value > 0


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
    assert bench_device._draw("device/copy", works, torch.device("cpu"), found) == 3
    with pytest.raises(torch.OutOfMemoryError):
        bench_device._draw("device/copy", works, torch.device("cpu"), found)
