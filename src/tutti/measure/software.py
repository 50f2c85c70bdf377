"""Checks of what is installed: versions, GPUs and their driver, backends, extras."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tutti.errors import ExitCode
from tutti.measure import isolated
from tutti.measure.finding import Finding, size

TIMEOUT = 20.0
"""Seconds that torch and nvidia-smi may take to answer."""

EXTRAS = {
    "data": ("pyarrow", "pillow"),
    "demo": ("scikit-learn",),
    "plot": ("matplotlib",),
    "server": ("pyzmq",),
    "tensorboard": ("tensorboard",),
    "bench": ("accelerate", "lightning-fabric", "pytorch-optimizer", "torch-optimizer"),
}
"""Packages of each extra that pyproject.toml declares for users."""

_SMI_FIELDS = ("name", "memory.total", "memory.free", "driver_version")


def software() -> Iterator[Finding]:
    """Versions of tutti, Python and torch, of CUDA, NCCL and the driver; GPUs; backends."""
    versions = {"tutti": installed("tutti") or "from source", "python": platform.python_version()}
    ended = isolated.run_module("tutti.measure.torch_facts", (), TIMEOUT)
    shown = f"tutti {versions['tutti']} · Python {versions['python']}"
    if ended.code:
        text = f"{shown} · torch {installed('torch') or 'is not installed'}: {ended.complaint}"
        yield Finding("versions", "problem", text, versions, "Reinstall PyTorch: pip install --force-reinstall torch.")
        return
    torch = json.loads(ended.out.splitlines()[-1])
    seconds = torch["import_seconds"]
    text = f"{shown} · torch {torch['torch']}, loaded in {seconds:.1f} s"
    yield Finding("versions", "ok", text, {**versions, "torch": torch["torch"], "torch_import_seconds": seconds})
    yield from _gpus(torch)
    missing = not torch["backends"]["gloo"]
    names = ", ".join(name for name, there in torch["backends"].items() if there) or "none"
    remedy = "Install a PyTorch that is built with Gloo, such as the one from pytorch.org." if missing else ""
    yield Finding("backends", "problem" if missing else "ok", names, torch["backends"], remedy, ExitCode.PEER)


def _gpus(torch: dict[str, Any]) -> Iterator[Finding]:
    seen, driver, complaint = _nvidia_smi()
    values = {"cuda": torch["cuda"], "nccl": torch["nccl"], "driver": driver}
    built = f"CUDA {torch['cuda']} · NCCL {torch['nccl']}" if torch["cuda"] else "torch is built without CUDA"
    yield Finding("cuda", "ok", f"{built} · driver {driver or 'not found'}", values)
    values = {"gpus": torch["gpus"] or seen, "usable_by_torch": torch["cuda_available"]}
    if torch["gpus"]:
        yield Finding("gpus", "ok", _listed(torch["gpus"]), values)
    elif complaint:
        remedy = "Reload or reinstall the NVIDIA driver; nvidia-smi must work first."
        yield Finding("gpus", "problem", f"nvidia-smi fails: {complaint}", values, remedy)
    elif seen and torch["cuda"]:
        why = torch["cuda_complaint"] or "it does not say why"
        remedy = "Check CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA."
        yield Finding("gpus", "problem", f"{_listed(seen)}, but torch cannot use them: {why}", values, remedy)
    elif seen:
        remedy = "To use them, install a PyTorch with CUDA (pytorch.org, Get started)."
        yield Finding("gpus", "note", f"{_listed(seen)}, unused: torch is built without CUDA", values, remedy)
    else:
        yield Finding("gpus", "ok", "none: training runs on the CPU", values)


def _nvidia_smi() -> tuple[list[dict[str, Any]], str | None, str]:
    """GPUs and driver version as the driver sees them, and its complaint where it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None, ""
    query = [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    ended = isolated.run(query, TIMEOUT)
    if ended.code:
        # nvidia-smi complains on standard output.
        return [], None, next(iter(ended.out.strip().splitlines()), ended.complaint)
    rows = [[cell.strip() for cell in line.split(",")] for line in ended.out.splitlines() if line.count(",") == 3]
    gpus = [
        {"name": name, "memory_bytes": _mebibytes(total), "free_bytes": _mebibytes(free)}
        for name, total, free, _ in rows
    ]
    return gpus, rows[0][3] if rows else None, ""


def _mebibytes(text: str) -> int | None:
    # Devices with memory of their host's say "[N/A]".
    return int(text) << 20 if text.isdecimal() else None


def _listed(gpus: Sequence[dict[str, Any]]) -> str:
    """Equal GPUs together: ``8 × NVIDIA H200, 139 GiB``."""
    kinds = Counter((gpu["name"], gpu["memory_bytes"]) for gpu in gpus)
    return "; ".join(
        f"{count} × {name}" + (f", {size(memory)}" if memory else "") for (name, memory), count in kinds.items()
    )


def extras() -> Iterator[Finding]:
    """Which optional packages are here."""
    found = {extra: {package: installed(package) for package in packages} for extra, packages in EXTRAS.items()}
    shown = []
    for extra, packages in found.items():
        versions = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
        shown.append(f"{extra}: {versions or 'none'}" if all(packages.values()) or not versions else f"{extra}: part")
    missing = [extra for extra, packages in found.items() if extra != "bench" and not all(packages.values())]
    remedy = f"For images, demos or figures: pip install 'tutti[{','.join(missing)}]'." if missing else ""
    yield Finding("extras", "note" if missing else "ok", " · ".join(shown), found, remedy)


def installed(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
