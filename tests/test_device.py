"""Options of vendors' collectives, with stand-ins for their libraries; all else is in ``simulated_accelerator``."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutti.cli.config_checks import refuse_config
from tutti.comm.process_groups import process_groups
from tutti.config.train_config import TrainConfig
from tutti.device import (
    VISIBLE_DEVICES,
    choose,
    collective_backend,
    collective_options,
    describe_products,
    peak_memory,
    set_collective_defaults,
)
from tutti.errors import UsageError
from tutti.launcher import context

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
VARIABLE, OLD = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"


def test_the_backend_of_collectives_is_of_the_device() -> None:
    assert [collective_backend(device) for device in (GPU, CPU, torch.device("mps"))] == ["nccl", None, "gloo"]


@pytest.mark.parametrize(
    ("device", "environ", "want"),
    [
        (GPU, {}, {VARIABLE: "3"}),
        (GPU, {VARIABLE: "1"}, {VARIABLE: "1"}),
        (GPU, {OLD: "0"}, {OLD: "0"}),
        (CPU, {}, {}),
    ],
)
def test_variables_of_collectives_are_set_unless_the_user_has(
    device: torch.device, environ: dict[str, str], want: dict[str, str]
) -> None:
    assert set_collective_defaults(device, environ) == [name for name in want if want[name] == "3"]
    assert environ == want


class Options:
    """A stand-in for ``ProcessGroupNCCL.Options``, which builds for CPUs do not have."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(0)


def test_groups_of_gpus_have_a_stream_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    limit = timedelta(seconds=3)
    options = collective_options(GPU, limit)
    assert (options.is_high_priority_stream, options._timeout) == (True, limit)
    assert collective_options(CPU, limit) is None

    monkeypatch.setattr("tutti.comm.process_groups._cache", {})
    made: list[tuple[Any, Any]] = []
    world = SimpleNamespace(timeout=5.0, device=GPU)
    monkeypatch.setattr(context, "current", lambda: world)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **given: made.append((given.get("backend"), given)))
    process_groups((0, 1), "high priority")
    fast = [given for backend, given in made if backend is None]
    assert fast and all(given["pg_options"]._timeout == given["timeout"] for given in fast)
    assert all(given["pg_options"].is_high_priority_stream for given in fast)
    assert all("pg_options" not in given for backend, given in made if backend == "gloo")


@pytest.fixture
def as_before() -> Iterator[None]:
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.usefixtures("as_before")
def test_a_run_says_how_products_of_float32_are_rounded() -> None:
    assert describe_products(GPU, "fp32") == "matrix products in full float32, convolutions in TF32"
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False
    assert describe_products(GPU, "fp32") == "matrix products in TF32, convolutions in full float32"
    assert [describe_products(*given) for given in ((GPU, "bf16"), (CPU, "fp32"))] == [None, None]


@pytest.mark.parametrize("devices", ["2", "8"])
def test_several_processes_on_mps_are_refused_before_they_start(devices: str) -> None:
    with pytest.raises(UsageError, match=rf"MPS computes in 1 process, not in {devices}.*no collectives"):
        refuse_config("digits", TrainConfig(device="mps", devices=devices))


def test_mps_is_refused_where_pytorch_sees_none() -> None:
    if torch.backends.mps.is_available():
        pytest.skip("there is one here")
    with pytest.raises(UsageError, match="MPS was asked for, but PyTorch sees no GPU"):
        choose("mps", 0, 1, "rank 0")


def test_a_process_that_sees_one_gpu_of_its_host_says_which_variable_hides_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a stand-in for the driver, as under Slurm's --gpus-per-task: each process sees one GPU, as number 0."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for name in VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError) as plain:
        choose("cuda", 1, 2, "rank 1")
    assert "sees no others" not in str(plain.value) and "Slurm" not in str(plain.value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UsageError, match=r"sees no others, because of CUDA_VISIBLE_DEVICES=3.*--gpus-per-node, not"):
        choose("cuda", 1, 2, "rank 1")


def test_mps_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for an Apple GPU."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    assert choose("auto", 0, 1, "rank 0") == choose("mps", 0, 1, "rank 0") == torch.device("mps", 0)
    with pytest.raises(UsageError, match="2 processes on this host share 1 GPU "):
        choose("mps", 1, 2, "rank 1")
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TUTTI_PROCESS_SETUP", "off")
    # Another test of this process may have initialised the context.
    monkeypatch.setattr(context, "_world", None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(UsageError, match="MPS computes in 1 process, not in 2"):
        context.init("mps")
    assert peak_memory(torch.device("mps")) is None
