"""Check the installed software: versions, GPUs as torch sees them, other modules ``tutti``, kernels and extras."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tutti.device import describe_toolkit
from tutti.distribution import DISTRIBUTION, VERSION, pip_install
from tutti.doctor.finding import Finding
from tutti.errors import ExitCode
from tutti.host_memory import format_bytes
from tutti.launcher import isolated
from tutti.native.native_library import kernels

TIMEOUT = 20.0
"""Seconds that torch and nvidia-smi may take to answer."""

EXTRAS = {
    "data": ("pyarrow", "pillow"),
    "demo": ("scikit-learn",),
    "planning": ("scipy",),
    "plot": ("matplotlib",),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "models": ("diffusers", "peft", "scipy", "timm", "transformers"),
    "trackio": ("trackio",),
    "report": ("jinja2", "matplotlib"),
    "server": ("pyzmq",),
    "tensorboard": ("tensorboard",),
    "float8": ("torchao",),
    "bench": ("accelerate", "lightning-fabric", "pytorch-optimizer", "torch-optimizer"),
}
"""Packages of each extra that pyproject.toml declares for users."""

_SMI_FIELDS = ("name", "memory.total", "memory.free", "driver_version")


def software() -> Iterator[Finding]:
    """Report versions of tutti, Python and torch, GPUs and their driver, and collective backends.

    Imports torch in a process of its own, and asks ``nvidia-smi`` for GPUs.

    Yields:
        Four lines of the report of ``tutti doctor``, each a ``Finding``: ``versions``, ``cuda``, ``gpus`` and
        ``backends``. ``versions`` is a problem, and the only line, if the import fails; ``gpus`` is a problem if torch
        sees no GPU although it is built with CUDA and ``nvidia-smi`` lists some, or if torch sees no GPU and
        ``nvidia-smi`` fails, and a note if ``nvidia-smi`` lists GPUs and torch is built without CUDA; ``backends`` is a
        problem if torch has no Gloo.

    Raises:
        subprocess.TimeoutExpired: the import or ``nvidia-smi`` took longer than ``TIMEOUT`` (20) seconds.
    """
    versions = {"tutti": VERSION, "python": platform.python_version()}
    ended = isolated.run_module("tutti.launcher.torch_facts", (), TIMEOUT)
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
    name, text, values = describe_toolkit(torch, driver)
    yield Finding(name, "ok", text, values)
    values = {"gpus": torch["gpus"] or seen, "usable_by_torch": torch["available"]}
    if torch["gpus"]:
        yield Finding("gpus", "ok", _listed(torch["gpus"]), values)
    elif complaint:
        remedy = "Reload or reinstall the NVIDIA driver; nvidia-smi must work first."
        yield Finding("gpus", "problem", f"nvidia-smi fails: {complaint}", values, remedy)
    elif seen and torch["toolkit"]:
        why = torch["complaint"] or "it does not say why"
        remedy = "Check CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA."
        yield Finding("gpus", "problem", f"{_listed(seen)}, but torch cannot use them: {why}", values, remedy)
    elif seen:
        remedy = "To use them, install a PyTorch with CUDA (pytorch.org, Get started)."
        yield Finding("gpus", "note", f"{_listed(seen)}, unused: torch is built without CUDA", values, remedy)
    else:
        yield Finding("gpus", "ok", "none: training runs on the CPU", values)


def _nvidia_smi() -> tuple[list[dict[str, Any]], str | None, str]:
    """Return GPUs, driver version and error message from nvidia-smi; no GPUs if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None, ""
    query = [program, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    ended = isolated.run_isolated(query, TIMEOUT)
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
    # nvidia-smi prints "[N/A]" for devices that share the memory of their host.
    return int(text) << 20 if text.isdecimal() else None


def _listed(gpus: Sequence[dict[str, Any]]) -> str:
    """Format GPUs, equal ones grouped: ``8 × NVIDIA H200, 139 GiB``."""
    kinds = Counter((gpu["name"], gpu["memory_bytes"]) for gpu in gpus)
    return "; ".join(
        f"{count} × {name}" + (f", {format_bytes(memory)}" if memory else "") for (name, memory), count in kinds.items()
    )


def module() -> Iterator[Finding]:
    """Check that no other module ``tutti``, of a distribution or in a file, shadows or overwrites this package.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``module``: a problem for another project's
        module, a note for another copy of this package, else ok. Values: ``path`` of this package, ``distribution``
        (its name on PyPI), and lists of texts ``foreign`` (other projects' modules) and ``copies`` (folders).
    """
    package = Path(__file__).resolve().parents[1]
    copies, foreign = [], [*foreign_distributions(package)]
    if getattr(importlib.import_module("tutti"), "__version__", None) != VERSION:
        foreign.append(f"{package / '__init__.py'} is another project's")
    for path in other_modules(package):
        if (path.parent / "cli" / "app.py").is_file() and path.name == "__init__.py":
            copies.append(str(path.parent))
        else:
            foreign.append(str(path))
    values = {"path": str(package), "distribution": DISTRIBUTION, "foreign": foreign, "copies": copies}
    if foreign:
        remedy = "Rename a file of your own; for a package: pip uninstall tutti, then "
        remedy += "pip install --force-reinstall . in a checkout of tutti."
        yield Finding("module", "problem", f"a module tutti that is not ours: {'; '.join(foreign)}", values, remedy)
    elif copies:
        remedy = "Remove all but one, or see to it that the right one comes first on PYTHONPATH."
        yield Finding("module", "note", f"{package} is used, another copy is in {'; '.join(copies)}", values, remedy)
    else:
        yield Finding("module", "ok", str(package), values)


def foreign_distributions(package: Path) -> Iterator[str]:
    """Find distributions of other projects that have installed a module or folder ``tutti``.

    Args:
        package: folder of this package.

    Yields:
        A text for each: name and version of the distribution, and in words the folder that holds its ``tutti``.
    """
    for found in importlib.metadata.distributions():
        # A regular expression, not a parser: the RECORD of torch alone has thousands of lines.
        lines = f"\n{found.read_text('RECORD') or ''}"
        name = str(found.metadata["Name"])
        if re.sub(r"[-_.]+", "-", name).lower() == DISTRIBUTION or not re.search(r"\ntutti(?:/|\.py,)", lines):
            continue
        place = Path(str(found.locate_file("tutti"))).resolve()
        where = "in this folder, over each other's files" if place == package else f"in {place.parent}"
        yield f"{name} {found.version} {where}"


def other_modules(package: Path) -> Iterator[Path]:
    """Find files that ``import tutti`` could load instead of this package, on the search path or in the working folder.

    Args:
        package: folder of this package.

    Yields:
        Path of each such file, once.
    """
    seen = {package / "__init__.py"}
    for entry in dict.fromkeys([*sys.path, os.getcwd()]):
        found = PathFinder.find_spec("tutti", [entry or os.getcwd()])
        if found is not None and found.origin is not None and (path := Path(found.origin).resolve()) not in seen:
            seen.add(path)
            yield path


def compiled_loops() -> Iterator[Finding]:
    """Check whether layer-wise optimizers and ghost batch norm run as compiled loops on this machine's CPUs.

    Looks for a C++ compiler, and compiles nothing: a compiler that fails shows only in a run.

    Yields:
        One line of the report of ``tutti doctor``, a ``Finding`` named ``kernels``: a note if there is no C++ compiler
        or ``TUTTI_KERNELS`` is off, as the results are then the same and only slower. Values: ``compiled`` (bool).
    """
    found = kernels()
    compiled = found.startswith("compiled")
    remedy = "" if compiled else "The same bits, several times slower: install g++, or unset TUTTI_KERNELS."
    yield Finding("kernels", "ok" if compiled else "note", found, {"compiled": compiled}, remedy)


def extras() -> Iterator[Finding]:
    """Report which optional packages are installed, for all extras of this package together.

    Yields:
        One ``Finding`` in all, a line of the report of ``tutti doctor``, named ``extras``. Its text lists for each
        extra the versions of its packages, ``part`` if only some are installed, or ``none``. Its mark is ``note`` if an
        extra other than ``bench`` lacks a package, with the ``pip install`` command as remedy, otherwise ``ok``. Its
        measured values are the version of each package by extra, None for a missing one.
    """
    found = {extra: {package: installed(package) for package in packages} for extra, packages in EXTRAS.items()}
    shown = []
    for extra, packages in found.items():
        versions = ", ".join(f"{name} {number}" for name, number in packages.items() if number)
        shown.append(f"{extra}: {versions or 'none'}" if all(packages.values()) or not versions else f"{extra}: part")
    missing = [extra for extra, packages in found.items() if extra != "bench" and not all(packages.values())]
    remedy = f"If you need one of the missing extras: {pip_install(*missing)}." if missing else ""
    yield Finding("extras", "note" if missing else "ok", " · ".join(shown), found, remedy)


def installed(package: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed.

    Args:
        package: name of the distribution, as on PyPI.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
