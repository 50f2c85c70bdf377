"""C++ loops compiled on the machine where they run, by the compiler that is there, once; none where there is none.

A source beside the Python file that calls it is built in about a second by whichever process comes first, and kept in
the user's cache. What it computes must not depend on being there: callers fall back to PyTorch's own operations.
``TUTTI_KERNELS=off`` turns all of them off.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

_COMPILERS = ("c++", "g++", "clang++")
# No contraction: whether a product is fused into a sum would otherwise be the compiler's choice.
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_ATTEMPTS = (("-march=native", "-fopenmp"), ("-march=native",), ())
_SECONDS = 120


def library(source: Path) -> ctypes.CDLL | None:
    """The compiled ``source``, out of the cache or built now; None where it cannot be, with a warning if it should."""
    compiler = next(filter(None, map(shutil.which, _compilers())), None)
    if compiler is None or os.environ.get("TUTTI_KERNELS", "") in ("0", "off"):
        return None
    folder = _cache()
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            return _build(compiler, source, Path(own) / "kernels.so")
    path = folder / f"{source.stem}-{_digest(source)}.so"
    with (folder / "lock").open("w") as lock:
        # Whoever comes first builds; the lock falls with its holder. File systems without locks build more than once.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        return (_open(path) if path.exists() else None) or _build(compiler, source, path)


def _compilers() -> Sequence[str]:
    return (*shlex.split(os.environ.get("CXX", ""))[:1], *_COMPILERS)


def _digest(source: Path) -> str:
    """Of the source and of the processor that it is compiled for: homes are shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    said = [source.read_text(encoding="utf-8"), *_FLAGS, *map(str, _ATTEMPTS), platform.machine(), flags]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]


def _cache() -> Path | None:
    """A folder of the user's that nobody else can write to; None where there is none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tutti"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK) else None


def _build(compiler: str, source: Path, path: Path) -> ctypes.CDLL | None:
    said = ""
    for extra in _ATTEMPTS:
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                unit, made = f"{work}/kernels.o", f"{work}/kernels.so"
                # Linked without an OpenMP library: PyTorch has loaded its own, whose threads are then used.
                for command in ([*_FLAGS, *extra, "-c", str(source), "-o", unit], ["-shared", unit, "-o", made]):
                    subprocess.run([compiler, *command], capture_output=True, text=True, timeout=_SECONDS, check=True)
                os.replace(made, path)
        except subprocess.CalledProcessError as error:
            said = said or str(error.stderr).strip()
            continue
        except (OSError, subprocess.TimeoutExpired) as error:
            said = said or str(error)
            continue
        found = _open(path)
        if found is not None:
            return found
        said = said or "the library cannot be loaded"
    warnings.warn(
        f"{source.name} cannot be compiled, PyTorch's own operations are used: {compiler}: {said[-500:]}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
