"""Build the simulated accelerator when a test first needs it, into the user's cache, as tutti builds its C++ loops.

``folder()`` is what a process needs on its path to have the device: the library, ``simgpu.py``, and the entry point by
which ``import torch`` loads it. ``environment()`` is that for processes that a test starts.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from tutti.native.native_library import cache_folder, find_compiler

DEVICE = "simgpu"
MOST = 8
"""Devices of the simulated machine: as many as the largest world of the tests has ranks."""

_HERE = Path(__file__).parent
_SOURCE, _MODULE, _HEADER = _HERE / "simgpu.cpp", _HERE / "simgpu.py", _HERE / "host_collectives.hpp"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
_SECONDS = 540.0
"""A minute on a machine of its own; many where other work has the processors."""


def environment(devices: int = MOST) -> dict[str, str]:
    """Environment variables with which ``import torch`` loads the device, also in child processes."""
    path = os.pathsep.join(filter(None, (str(folder()), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SIMGPU_DEVICES": str(devices)}


def require() -> Path:
    """Skip the test if the device cannot be built here; else return its folder."""
    if find_compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler: install g++")
    return folder()


def load(devices: int = MOST) -> None:
    """Register the device in this process, which has loaded torch without it."""
    os.environ["SIMGPU_DEVICES"] = str(devices)
    spec = importlib.util.spec_from_file_location("simgpu", folder() / "simgpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()


@cache
def folder() -> Path:
    """The built device's folder; built by the first process that needs it, in a minute."""
    return build_once("simgpu", (_SOURCE, _HEADER, _MODULE), _build)


def build_once(name: str, sources: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """The folder that ``build`` has filled from ``sources``; the first process that needs it calls ``build``."""
    cached = cache_folder()
    if cached is None or find_compiler() is None:
        raise RuntimeError(f"{name} needs a C++ compiler and a cache folder of the user's own")
    made = cached / f"{name}-{_digest(sources)}"
    if not made.exists():
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                work = made.with_name(f"{made.name}.{os.getpid()}")
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                build(work)
                work.rename(made)
    return made


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    # Environments that link to one folder of packages share one build.
    return Path(spec.origin).resolve().parent


def _digest(sources: Sequence[Path]) -> str:
    version = (_torch() / "version.py").read_text(encoding="utf-8")
    parts = [*(source.read_text(encoding="utf-8") for source in sources), *_FLAGS, version]
    return hashlib.sha256("\n".join([*parts, str(_torch()), sys.version]).encode()).hexdigest()[:16]


def compile_extension(source: Path, target: Path) -> None:
    """Compile a C++ file to a Python extension module of PyTorch, whose name is that of ``target``."""
    torch, compiler = _torch(), find_compiler()
    assert compiler is not None
    includes = (_HERE, torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    libraries = ("torch", "torch_cpu", "c10", "torch_python")
    command = [compiler, *_FLAGS, f"-DTORCH_EXTENSION_NAME={target.stem}", *(f"-I{path}" for path in includes)]
    command += [str(source), "-o", str(target), f"-L{torch / 'lib'}", *(f"-l{name}" for name in libraries)]
    _run([*command, f"-Wl,-rpath,{torch / 'lib'}"])


def _build(work: Path) -> None:
    facts = work / "simgpu-0.1.dist-info"
    facts.mkdir()
    compile_extension(_SOURCE, work / "_simgpu.so")
    shutil.copy(_MODULE, work)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: simgpu\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(f"[torch.backends]\n{DEVICE} = simgpu:install\n")


def _run(command: list[str]) -> None:
    """Run a compiler, and end it with the programs that it has started where it takes too long."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            code = process.wait(_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)
