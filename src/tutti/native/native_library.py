"""Compile and load C++ loops on the machine where they run, if it has a compiler.

The first process that needs a source file builds it in about a second and stores it in the user's cache. Results do not
depend on it, to the bit: callers fall back to PyTorch's own operations in the same order. ``TUTTI_KERNELS=off`` turns
all compiled loops off.
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

from tutti.config.variables import is_off

_COMPILERS = ("c++", "g++", "clang++")
# No contraction: otherwise the compiler decides whether to fuse a product into a sum.
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_ATTEMPTS = (("-march=native", "-fopenmp"), ("-march=native",), ())
_SECONDS = 120


# Sources that could not be compiled in this process, and why.
_failed: dict[str, str] = {}


def kernels() -> str:
    """Return a text that says whether tutti's C++ loops can be used here or PyTorch's operations replace them, and why.

    The loops are those of layer-wise optimizers and ghost batch norm. The function compiles and loads nothing. The text
    is ``compiled (COMPILER)``, where a C++ compiler is found and no build has failed in this process so far, whether or
    not one was tried; else ``PyTorch's own operations (REASON)``, where the reason is ``TUTTI_KERNELS=off``, a missing
    compiler, or the C++ files whose build has failed in this process.
    """
    if _off():
        return "PyTorch's own operations (TUTTI_KERNELS=off)"
    compiler = find_compiler()
    if compiler is None:
        return "PyTorch's own operations (no C++ compiler)"
    if _failed:
        return f"PyTorch's own operations ({compiler} fails: {', '.join(_failed)})"
    return f"compiled ({compiler})"


def library(source: Path) -> ctypes.CDLL | None:
    """Load the shared library of a C++ file from the user's cache, or build it in about a second.

    The library is kept in the cache (``cache_folder``) under a digest of source, flags and processor. A file lock lets
    other processes that need the same library wait for the build. If the cache cannot be written, or another user could
    write to it, each call builds in a temporary folder.

    Args:
        source: path of the C++ file.

    Returns:
        The loaded library. None if compiled loops are switched off (``TUTTI_KERNELS=off``), if there is no C++
        compiler, or if the build fails, which also gives a RuntimeWarning.
    """
    compiler = find_compiler()
    if compiler is None or _off():
        return None
    folder = cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            return _build(compiler, source, Path(own) / "kernels.so")
    path = folder / f"{source.stem}-{_digest(source)}.so"
    with contextlib.ExitStack() as held:
        # The first process builds; the lock ends with its holder. Where no lock can be had, several build.
        with contextlib.suppress(OSError):
            lock = held.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        return (_open(path) if path.exists() else None) or _build(compiler, source, path)


def _off() -> bool:
    return is_off("KERNELS", os.environ)


def find_compiler() -> str | None:
    """Return the path of the C++ compiler with which tutti builds its compiled loops; None if there is none.

    The candidates are, in this order: the program in the environment variable ``CXX`` (its first word; flags that
    follow are ignored), ``c++``, ``g++`` and ``clang++``. The path of the first one that is found on the ``PATH`` is
    returned, as ``shutil.which`` gives it. No program is run.
    """
    return next(filter(None, map(shutil.which, _compilers())), None)


def _compilers() -> Sequence[str]:
    text = os.environ.get("CXX", "")
    try:
        words = shlex.split(text)
    except ValueError:  # an unbalanced quote
        words = text.split()
    return (*words[:1], *_COMPILERS)


def _digest(source: Path) -> str:
    """Return a digest of the source, the flags and the processor: home directories are shared between machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    parts = [source.read_text(encoding="utf-8"), *_FLAGS, *map(str, _ATTEMPTS), platform.machine(), flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def cache_folder() -> Path | None:
    """Create and return the folder that keeps compiled libraries: ``tutti`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Returns None if the folder cannot be written, or if it belongs to another user or other users could write to it.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "tutti"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if own and os.access(folder, os.W_OK) else None


def _build(compiler: str, source: Path, path: Path) -> ctypes.CDLL | None:
    reason = ""
    for extra in _ATTEMPTS:
        try:
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                unit, made = f"{work}/kernels.o", f"{work}/kernels.so"
                # Linked without an OpenMP library: PyTorch has loaded its own, whose threads are then used.
                for command in ([*_FLAGS, *extra, "-c", str(source), "-o", unit], ["-shared", unit, "-o", made]):
                    subprocess.run([compiler, *command], capture_output=True, timeout=_SECONDS, check=True)
                os.replace(made, path)
        except subprocess.CalledProcessError as error:
            reason = reason or bytes(error.stderr).decode(errors="replace").strip()
            continue
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = reason or str(error)
            continue
        found = _open(path)
        if found is not None:
            _failed.pop(source.name, None)
            return found
        reason = reason or "the library cannot be loaded"
    _failed[source.name] = reason
    warnings.warn(
        f"{source.name} cannot be compiled, PyTorch's own operations are used: {compiler}: {reason[-500:]}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
