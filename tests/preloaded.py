"""What the processes that fork for tests import once, so that no process that they make does so again."""

from __future__ import annotations

import ctypes
import gc
import importlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_SOURCE = Path(__file__).parents[1] / "src"
_STRATEGIES = [path.relative_to(_SOURCE).with_suffix("") for path in (_SOURCE / "tutti" / "parallel").rglob("*.py")]

MODULES = (
    *("torch._dynamo", "torch.profiler", "tutti.train.main", "tutti.cli.app", "tutti.launcher.agent"),
    *sorted(".".join(path.parts).removesuffix(".__init__") for path in _STRATEGIES),
    # What runs import when they need it: the digits, servers, files, plots.
    *("zmq", "safetensors.torch", "tomli_w"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg"),
)

COMPILING = (
    *("torch._dynamo.backends." + name for name in ("cudagraphs", "debugging", "distributed", "inductor", "onnxrt")),
    *("torch._dynamo.backends." + name for name in ("tensorrt", "torchxla", "tvm")),
    *("torch._dynamo.repro.after_dynamo", "torch._dynamo.testing"),
)
"""Most of what the first ``torch.compile`` of a process imports: 380 modules with those that these import."""

_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25


def preload(names: Iterable[str]) -> None:
    """Import modules, and lay out this process's memory so that a fork is cheap."""
    # What is imported is no garbage: to look for some takes a second.
    gc.disable()
    for name in names:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    _collapse()


def _collapse() -> None:
    """Put this process's memory into huge pages.

    A fork copies an entry for each page, 65,000 of them with torch loaded, and the child's end frees each one again:
    20 ms, and 6 ms with huge pages. A kernel before 6.1 refuses, and nothing is lost but that time.
    """
    madvise = ctypes.CDLL(None).madvise
    with open("/proc/self/maps", encoding="utf-8") as maps:
        regions = [line.split() for line in maps]
    for addresses, access, _, _, inode, *_ in regions:
        first, end = (int(address, 16) for address in addresses.split("-"))
        first, end = -(-first // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if access == "rw-p" and inode == "0" and first < end:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)
