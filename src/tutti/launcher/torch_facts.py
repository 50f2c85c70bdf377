"""Print facts about torch as JSON. Run as a module in a process of its own: it loads the driver.

Needs torch; no module imports this one.
"""

from __future__ import annotations

import json
import time
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Import torch and return facts about it as a dict for JSON, for ``tutti doctor``.

    Keys: ``torch`` (version), ``import_seconds``, ``toolkit`` and ``collectives`` (versions of CUDA and NCCL, or None),
    ``available`` (whether there is an accelerator), ``complaint`` (torch's warning about the accelerator, or None),
    ``gpus`` (dicts with ``name`` and ``memory_bytes``) and ``backends`` (name of a backend of ``torch.distributed`` →
    whether torch has it).
    """
    begin = time.perf_counter()
    import torch

    from tutti.device import accelerator_facts

    imported = time.perf_counter() - begin
    distributed = torch.distributed
    present = distributed.is_available()
    found = accelerator_facts()
    return {
        "torch": torch.__version__,
        "import_seconds": round(imported, 3),
        **found,
        "backends": {
            "gloo": present and distributed.is_gloo_available(),
            **found["backends"],
            "mpi": present and distributed.is_mpi_available(),
        },
    }


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
