"""What ``tutti bench`` measures in all ranks at once, in real processes, and that machine files keep its names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests import worlds
from tutti.launcher import context
from tutti.workload import bench_device, bench_ranks
from tutti.workload.bench_timing import Findings
from tutti.workload.machine_file import Machine, read_machine, write_machine

SMALL = replace(
    bench_device._ON_CPUS,
    products=(8, 16),
    layers=(8, 16),
    attention=((1, 8), (2, 8)),
    convolution=(1, 2),
    bytes=range(12, 18, 2),
    parameters=(4, 6),
)


def together_on_a_rank() -> Findings:
    world, found = context.init("cpu"), Findings(show=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_device, "_ON_CPUS", SMALL)
        patch.setattr(bench_ranks, "_SHARED", 0.0)
        patch.setattr(bench_ranks, "_SIZES", (2**10, 2**18))
        bench_ranks.bench_shared(world, found)
        bench_ranks.bench_links(world, found)
        bench_ranks.bench_collectives(world, found, ("all_reduce",), (2**10, 2**18))
    return found


def test_ranks_at_once_have_curves_of_every_class_and_update(tmp_path: Path) -> None:
    found, other = worlds.run(2, together_on_a_rank)
    curves = {"matmul/fp32", "matmul/fp32/backward", "attention/bf16/causal/backward", "convolution/fp32", "copy"}
    curves |= {"elementwise", "transcendental", "normalisation", "optimizer/sgd", "optimizer/adam"}
    curves |= {f"{name}/reused" for name in ("elementwise", "transcendental", "normalisation")}
    assert {f"shared/{name}/2" for name in curves} < set(found.curves) and list(found.curves) == list(other.curves)
    assert {"shared/operation/training/2", "shared/optimizer/adam/tensor/2"} < set(found.figures)
    assert {"links/0-1", "one_way/0-1", "collectives/all_reduce/2"} < set(found.curves)
    machine = Machine({}, {}, ("collectives",), found.figures, found.curves)
    write_machine(machine, tmp_path / "machine.json")
    assert read_machine(tmp_path / "machine.json") == machine
