"""What CUDA alone has: NCCL's options, devices that are hidden, the allocator's settings, TF32, compiled code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tutti
from tests import worlds
from tests.gpu.test_any_gpu import DEVICE, command, train
from tests.launcher.test_context import apart
from tutti.comm.process_groups import process_groups
from tutti.device import (
    collective_library_version,
    convolves_in_tf32,
    count_by_driver,
    describe_products,
    multiplies_in_tf32,
    reason_against_float8,
)
from tutti.launcher import context

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if DEVICE != "cuda":
        pytest.skip(f"it is about CUDA, and TEST_DEVICE is {DEVICE}")
    worlds.require_devices("cuda", 1)


def join(rank: int, path: str, size: int) -> dict[str, Any]:
    os.environ.pop(HANDLING, None)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), TUTTI_STORE=path
    )
    with patch("torch.distributed.init_process_group", wraps=dist.init_process_group) as init:
        world = context.init("cuda", timeout=60)
    assert dist.group.WORLD is not None
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total)
    found = {
        "backend": init.call_args.args[0],
        "device_id": str(init.call_args.kwargs["device_id"]),
        "bound": dist.group.WORLD.bound_device_id,
        "current": torch.cuda.current_device(),
        "total": total.item(),
        "handling": os.environ.get(HANDLING),
        "nccl": collective_library_version() > 20000,
    }
    if size > 1:
        _, fast = process_groups(tuple(range(size)), "gradients")
        options: Any = fast._get_backend(world.device).options  # type: ignore[union-attr]
        found["high"] = options.is_high_priority_stream
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_is_bound_to_the_device_of_the_local_rank(size: int, tmp_path: Path) -> None:
    worlds.require_devices("cuda", size, own=True)
    for rank, found in enumerate(apart(size, join, str(tmp_path / "store"), size)):
        assert found == {
            "backend": "cpu:gloo,cuda:nccl",
            "device_id": f"cuda:{rank}",
            "bound": None,
            "current": rank,
            "total": float(size),
            "handling": "3",
            "nccl": True,
            **({"high": True} if size > 1 else {}),
        }


def seen(rank: int, visible: str) -> list[Any]:
    os.environ.update(CUDA_VISIBLE_DEVICES=visible)
    return [torch.cuda.device_count(), count_by_driver(os.environ)]


@pytest.mark.parametrize("visible", ["", "-1", "0"])
def test_devices_are_counted_without_the_driver_as_cuda_counts_them(visible: str) -> None:
    [[torch_counts, driver_counts]] = apart(1, seen, visible)
    assert torch_counts == driver_counts == (visible == "0")


def test_a_hidden_gpu_is_not_used(tmp_path: Path) -> None:
    words = ("train", "digits", "--device", "cuda", "--devices", "1", "--steps", "2")
    done = command(tmp_path, *words, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "sees no GPU" in done.stderr


def test_a_share_of_the_memory_is_enough_or_refused_with_advice(tmp_path: Path) -> None:
    """PyTorch's allocator keeps the limit; tutti says what needs less."""
    words = ("train", "text", "--device", "cuda", "--devices", "1", "--steps", "1", "--batch-size", "4096")
    words = (*words, "--model", "gpt:layers=12,width=768,heads=12,block=1024")
    done = command(tmp_path, *words, PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.05")
    assert done.returncode == 2 and "there is not enough memory" in done.stderr
    assert "smaller micro-batch" in done.stderr


def products() -> list[Any]:
    """What the settings say, beside how far products and convolutions in float32 are from those in float64."""
    place = context.current().device
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=draw, dtype=torch.float64) for _ in range(2))
    found: list[Any] = []
    for choice in ("highest", "high"):
        torch.set_float32_matmul_precision(choice)
        got = (a.float().to(place) @ b.float().to(place)).double().cpu()
        error = float((got - a @ b).abs().max() / (a @ b).abs().max())
        found.append((multiplies_in_tf32(place), error, describe_products(place, "fp32")))
    torch.set_float32_matmul_precision("highest")
    return [*found, convolves_in_tf32(place)]


def test_tf32_is_what_the_header_says() -> None:
    [[(plain, small, said), (rounded, large, told), convolutions]] = worlds.run_on("cuda", 1, products)
    assert (plain, rounded, convolutions) == (False, True, True)
    assert "products in full float32" in said and "products in TF32" in told
    assert small < 1e-5
    if torch.cuda.get_device_capability()[0] >= 8:
        assert large > 1e-5, "a device with tensor cores of this kind rounds to 10 bits"


def test_compiled_code_trains_as_eager_code() -> None:
    [eager] = worlds.run_on("cuda", 1, train, precision="fp32")
    [compiled] = worlds.run_on("cuda", 1, train, precision="fp32", compile="default")
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-4)


def train_with_graphs(**options: Any) -> tuple[dict[str, Any], int, int]:
    """Six steps of several micro-batches: warm-up, recording, replays; with numbers of inputs and of skipped graphs."""
    from torch._dynamo.utils import counters

    counters.clear()
    found = train(precision="fp32", micro_batch=2, **options)
    counted = counters["inductor"]
    return found, counted["cudagraph_recorded_non_static_inputs"], counted["cudagraph_skips"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_graphs_train_as_eager_code(mode: str, ranks: int) -> None:
    [(eager, recorded, _)] = worlds.run_on("cuda", 1, train_with_graphs)
    assert recorded == 0
    for found, recorded, skipped in worlds.run_on("cuda", ranks, train_with_graphs, compile=mode):
        assert found["losses"] == pytest.approx(eager["losses"], rel=1e-4)
        assert recorded > 0 and skipped == 0


def train_in_8_bits(precision: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 3))
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(90, 64, generator=draw), torch.randint(0, 3, (90,), generator=draw)

    def loss(net: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(net(batch[0]), batch[1])

    run = tutti.prepare(model, "adamw:lr=0.01", data, loss, batch_size=16, precision=precision)
    return [run.step(batch) for batch in run.epoch(0)]


def test_8_bit_floats_train_nearly_as_bfloat16() -> None:
    """The last batch has 10 samples, which is no multiple of 16."""
    pytest.importorskip("torchao")
    if (why := reason_against_float8(torch.device("cuda", 0))) is not None:
        pytest.skip(why)
    [wide] = worlds.run_on("cuda", 1, train_in_8_bits, precision="bf16")
    [narrow] = worlds.run_on("cuda", 1, train_in_8_bits, precision="fp8")
    assert narrow != wide and narrow == pytest.approx(wide, rel=0.1)
