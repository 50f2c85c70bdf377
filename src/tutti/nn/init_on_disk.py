"""Build a model that does not fit into memory: large tensors live in memory-mapped files until they are sharded.

A process that builds a whole model and then keeps a part of it needs, for a moment, memory for all of it. Here tensors
are backed by mapped files, whose pages the kernel evicts whenever it needs room. Values are unchanged: every operation
runs as usual. The files are temporary ones (``spilling``), or hold the weights with which a run begins (``mapped``).
"""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, nn

from tutti.errors import DiskError
from tutti.nn.swap import buffers
from tutti.nn.swap import parameters as named
from tutti.torch_compat import TorchDispatchMode, is_dtensor, storage_key, tree_leaves, tree_map

_LARGE = 1 << 20
_EMPTY = torch.ops.aten.empty.memory_format
_mapped: set[int] = set()
"""Addresses of the storages that are views of mapped files of weights."""


@contextmanager
def spilling(folder: str | Path | None = None, above: int = 0) -> Iterator[None]:
    """Return a context in which new CPU tensors of 1 MiB or more are backed by files, which vanish with the process.

    For a model that is sharded over ranks and that no rank can hold whole: ``with tutti.spilling(): model = GPT()``.
    ``tutti.prepare`` loads the tensors that this rank keeps into memory.

    Args:
        folder: a folder on a disk; default: the first writable one of ``TMPDIR``, ``/var/tmp`` and the current folder
            that is not on a memory file system; without any such folder ``TMPDIR``.
        above: bytes of such tensors that stay in memory, in the order of their creation, before files are used.

    Raises:
        DiskError: within the context, the file of a new tensor cannot be made, such as on a full disk.
    """
    with _Spilling(_folder() if folder is None else Path(folder), above):
        yield


def as_built(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which new tensors are backed by files if a parameter of ``model`` is backed by a file.

    For code that makes further tensors of the model's size, such as copies of it. With a parameter in a file the
    context is ``spilling()``: new CPU tensors of 1 MiB or more are backed by files in the default folder, which vanish
    with the process. Otherwise the context does nothing, and new tensors are in memory.

    Args:
        model: the model; its parameters are only looked at.
    """
    return spilling() if any(map(spilled, model.parameters())) else nullcontext()


def spilled(tensor: Tensor) -> bool:
    """Return whether a tensor's storage is backed by a file: made in ``spilling``, or by ``map_weights``.

    False for a tensor in memory, and for a ``DTensor``.

    Args:
        tensor: any dense tensor.
    """
    return not is_dtensor(tensor) and (tensor.untyped_storage().filename is not None or mapped(tensor))


def map_weights(numbers: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a tensor on a read-only view of a file of weights. A write into the tensor ends the process.

    For parameters until this rank's part of them is copied into memory, which is done before any code of the script may
    write them. The kernel reads the pages that are accessed, and evicts them whenever it needs room.

    Args:
        numbers: the view: unsigned integers as wide as ``dtype``, contiguous and aligned, at least one.
        dtype: dtype of the tensor.
    """
    address = numbers.ctypes.data
    _mapped.add(address)
    weakref.finalize(numbers, _mapped.discard, address).atexit = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(numbers).view(dtype)


def mapped(tensor: Tensor) -> bool:
    """Return whether a tensor is a read-only view of a file of weights, as ``map_weights`` makes it.

    Args:
        tensor: any dense tensor.
    """
    return tensor.untyped_storage().data_ptr() in _mapped


def load_spilled(parts: Sequence[nn.Module], trained: bool = True) -> None:
    """Copy a model's tensors that are backed by files (``spilling``) into this process's memory, in place.

    A parameter stays the same object; a buffer is replaced, in all modules that share it.

    Args:
        parts: the modules on this rank.
        trained: whether to load parameters, too; False: only buffers.
    """
    for _, parameter in named(parts) if trained else ():
        if spilled(parameter):
            parameter.data = parameter.data.clone()
    copies: dict[int, Tensor] = {}
    for slot in buffers(parts, persistent=False):
        # A buffer that several modules share stays shared.
        if spilled(tensor := slot.get()):
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
            slot.put(copies[id(tensor)])


class _Spilling(TorchDispatchMode):
    def __init__(self, folder: Path, above: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder, self._left = folder, above

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _EMPTY and kwargs.get("device") in (None, torch.device("cpu")) and not kwargs.get("pin_memory"):
            # An initializer fills it: allocate it in the file at once, without memory for it first.
            form = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            return self._in_file(form) if self._takes(form.untyped_storage().nbytes()) else func(*args, **kwargs)
        result = func(*args, **kwargs)
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        return tree_map(lambda leaf: self._moved(leaf, given), result)

    def _moved(self, leaf: Any, given: set[int]) -> Any:
        """Return a file-backed copy of a new, large tensor; anything else as it is."""
        if not _is_plain(leaf) or leaf.is_conj() or leaf.is_neg() or storage_key(leaf) in given:
            return leaf
        if spilled(leaf) or not self._takes(leaf.untyped_storage().nbytes()):
            return leaf
        copy = self._in_file(leaf)
        copy.untyped_storage().copy_(leaf.untyped_storage())
        return copy

    def _takes(self, size: int) -> bool:
        """Whether a tensor of ``size`` bytes goes into a file; counts it against ``above``."""
        if size < _LARGE:
            return False
        self._left -= size
        return self._left < 0

    def _in_file(self, form: Tensor) -> Tensor:
        """Return an uninitialised file-backed tensor with the dtype, shape and strides of ``form``."""
        size = form.untyped_storage().nbytes()
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                # Reserve the space now: writing to a mapped page without disk space ends the process by SIGBUS.
                reserve = getattr(os, "posix_fallocate", lambda descriptor, _, length: os.truncate(descriptor, length))
                reserve(file.fileno(), 0, size)
                storage = UntypedStorage.from_file(file.name, True, size)
        except OSError as error:
            raise DiskError(
                "a part of the model could not be put into a file while it is built",
                where=str(self._folder),
                why=error.strerror,
                remedy="choose a folder with room for the model once a process: TMPDIR, or tutti.spilling(folder)",
            ) from error
        empty = torch.empty(0, dtype=form.dtype)
        return empty.set_(storage, form.storage_offset(), form.shape, form.stride())  # type: ignore[arg-type]


def _is_plain(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == "cpu" and leaf.layout is torch.strided


def _folder() -> Path:
    """Return the first writable temporary folder that is not on a memory file system, else the default one."""
    places = [Path(place) for place in (tempfile.gettempdir(), "/var/tmp", ".")]
    usable = [place for place in places if os.access(place, os.W_OK) and not _in_memory(place)]
    return usable[0] if usable else places[0]


def _in_memory(folder: Path) -> bool:
    """Whether ``folder`` is on a memory file system (tmpfs, ramfs); False where that is unknown."""
    with suppress(OSError):
        device = folder.stat().st_dev
        here = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == here:
                return system.split()[0] in ("tmpfs", "ramfs")
    return False
