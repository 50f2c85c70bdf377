"""Count GPUs for ``--devices auto``, without torch and without a driver library."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path

DEVICE_FILES = Path("/dev")


def count_gpus(environ: Mapping[str, str]) -> int:
    """Count the NVIDIA GPUs that torch would see: the driver's device files, limited by ``CUDA_VISIBLE_DEVICES``.

    0 if torch is built without CUDA. Under the Windows subsystem for Linux the driver makes no such files: there,
    state ``--devices``.
    """
    if _torch_version().endswith("+cpu"):
        return 0
    present = sum(1 for path in DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA ignores everything from the first invalid entry on; "-1" is the usual way to hide all.
    named = visible.partition("-1")[0].split(",")
    return min(present, sum(1 for name in named if name.strip()))


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "+cpu"
