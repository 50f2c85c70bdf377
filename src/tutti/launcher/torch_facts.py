"""Print facts about torch as JSON. Run as a module in a process of its own: loading CUDA must not affect the caller.

Needs torch; no module imports this one.
"""

from __future__ import annotations

import json
import time
import warnings
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Return versions, backends and GPUs. Keys end with their unit."""
    begin = time.perf_counter()
    import torch

    imported = time.perf_counter() - begin
    distributed = torch.distributed
    present = distributed.is_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())] if available else []
    return {
        "torch": torch.__version__,
        "import_seconds": round(imported, 3),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
        "cuda_available": available,
        "cuda_complaint": str(caught[0].message).splitlines()[0] if caught else None,
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "backends": {
            "gloo": present and distributed.is_gloo_available(),
            "nccl": present and distributed.is_nccl_available(),
            "mpi": present and distributed.is_mpi_available(),
        },
    }


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
