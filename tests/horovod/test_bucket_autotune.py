"""Autotuning changes buckets between steps, on all ranks alike, and no weight."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti.horovod.torch as hvd
from tests.horovod.test_horovod_torch import with_horovod
from tests.worlds import run
from tutti.horovod.torch.bucket_autotune import CANDIDATES


def steps_of(environ: dict[str, str], uneven: bool) -> list[Any]:
    os.environ.update(environ)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 600), nn.Linear(600, 600), nn.Linear(600, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        plans = []
        for step in range(14 if uneven and hvd.rank() else 16):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + hvd.rank())
            model(torch.randn(4, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            plans.append(len(optimizer._buckets))
        if uneven:
            hvd.join()
        return [plans, [p.detach() for p in model.parameters()]]
    finally:
        for variable in environ:
            del os.environ[variable]


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "with a join"])
def test_the_fastest_size_is_kept_and_the_weights_are_those_without(tmp_path: Path, uneven: bool) -> None:
    table = tmp_path / "autotune.csv"
    environ = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(table),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    }
    expected = run(2, with_horovod, inside=steps_of, environ={}, uneven=uneven)
    found = run(2, with_horovod, inside=steps_of, environ=environ, uneven=uneven)
    assert found[0][0][:14] == found[1][0][:14], "the ranks have other buckets"
    # 1 MB: the square weight, 1.4 MB, is a bucket of its own.
    assert found[0][0][2] == 2 and found[0][0][3] == found[0][0][4] == 3
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[0][1], expected[0][1], strict=True))
    head, *rows = table.read_text().splitlines()
    assert head == "tensor_fusion_threshold,seconds_per_step"
    sizes, seconds = zip(*((int(a), float(b)) for a, b in (row.split(",") for row in rows)), strict=True)
    assert sizes == CANDIDATES and min(seconds) > 0
    fastest = sizes[seconds.index(min(seconds))]
    assert found[0][0][-1] == (3 if fastest == 1 << 20 else 2)


def test_a_wrong_number_is_refused() -> None:
    with pytest.raises(AssertionError, match="HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE is 'x'"):
        run(
            2,
            with_horovod,
            inside=steps_of,
            environ={"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "x"},
            uneven=False,
        )
