"""Let the ranks of a test share one GPU: its kernels, streams and allocator are real, the collectives are Gloo's.

NCCL refuses two ranks on one device, and tutti more processes than devices. With ``TEST_SHARE_GPU=1`` the worlds of
``TEST_DEVICE=cuda`` may nevertheless be larger than the number of GPUs: every rank computes on the first one, and
collectives send copies in the host's memory (``host_collectives.hpp``). Shows everything but NCCL itself.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from tests.simulated_accelerator import build

SHARED = os.environ.get("TEST_SHARE_GPU") == "1"
BACKEND = "sharedgpu"

_HERE = Path(__file__).parent
_SOURCE = _HERE / "gpu_collectives.cpp"
_HEADER = _HERE.parent / "simulated_accelerator" / "host_collectives.hpp"
_MODULE = "_sharedgpu"


def folder() -> Path:
    """The folder of the built collectives; the first process that needs them builds them."""
    return build.build_once(
        BACKEND, (_SOURCE, _HEADER), lambda work: build.compile_extension(_SOURCE, work / f"{_MODULE}.so")
    )


def share_first_device(device: str) -> None:
    """Give this process the first device of a type whatever its local rank, and these collectives for its tensors."""
    import torch
    import torch.distributed as dist

    from tutti import device as devices
    from tutti.launcher import context

    spec = importlib.util.spec_from_file_location(_MODULE, folder() / f"{_MODULE}.so")
    assert spec is not None and spec.loader is not None
    library: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    dist.Backend.register_backend(
        BACKEND,
        lambda store, rank, size, timeout: library.collectives(dist.ProcessGroupGloo(store, rank, size, timeout)),
        devices=[device],
    )
    dist.Backend.default_device_backend_map[device] = BACKEND

    def choose_first(choice: str, local_rank: int, local_size: int, where: str) -> torch.device:
        return devices.choose(choice, 0, local_size, where)

    context.choose = choose_first  # type: ignore[attr-defined]
