"""A model that is too big for one process while it is built: large tensors lie in files until ranks have their parts.

A process that builds a whole model and then keeps a part of it needs, for a moment, the memory of all of it. Here the
numbers are written into mapped files, whose pages the kernel takes out of memory whenever it needs room. They are the
same numbers: every operation runs as it would.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tutti.errors import DiskError
from tutti.nn.swap import buffers
from tutti.nn.swap import parameters as named

_LARGE = 1 << 20
_EMPTY = torch.ops.aten.empty.memory_format


@contextmanager
def spilling(folder: str | Path | None = None, above: int = 0) -> Iterator[None]:
    """Within the block CPU tensors of a mebibyte or more lie in files without names, gone with the process.

    For a model that several ranks will share out and none can hold: ``with tutti.spilling(): model = GPT()``.
    ``tutti.prepare`` takes into memory what this rank keeps.

    Args:
        folder: on a disk; default: the first of ``TMPDIR``, ``/var/tmp`` and the current one that is not in memory.
        above: bytes of such tensors that stay in memory, those that are made first.

    Raises:
        DiskError: there is no room on the disk.
    """
    with _Spilling(_folder() if folder is None else Path(folder), above):
        yield


def as_built(model: nn.Module) -> AbstractContextManager[None]:
    """``spilling`` where some of the model lies in files, for what makes other tensors of it."""
    return spilling() if any(map(spilled, model.parameters())) else nullcontext()


def spilled(tensor: Tensor) -> bool:
    """Whether its numbers lie in a file."""
    return not hasattr(tensor, "to_local") and tensor.untyped_storage().filename is not None


def settle(parts: Sequence[nn.Module], trained: bool = True) -> None:
    """Take the buffers of modules, and with ``trained`` their parameters, out of files into this process's memory."""
    for _, parameter in named(parts) if trained else ():
        if spilled(parameter):
            parameter.data = parameter.data.clone()
    copies: dict[int, Tensor] = {}
    for slot in buffers(parts, persistent=False):
        # One that several modules have stays one.
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
            # What an initializer fills; memory for it is not even asked for.
            form = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            return self._in_file(form) if self._takes(form.untyped_storage().nbytes()) else func(*args, **kwargs)
        result = func(*args, **kwargs)
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        return tree_map(lambda leaf: self._moved(leaf, given), result)

    def _moved(self, leaf: Any, given: set[int]) -> Any:
        """A new tensor's copy in a file; anything else as it is."""
        if not _is_plain(leaf) or leaf.is_conj() or leaf.is_neg() or leaf.untyped_storage()._cdata in given:
            return leaf
        if spilled(leaf) or not self._takes(leaf.untyped_storage().nbytes()):
            return leaf
        copy = self._in_file(leaf)
        copy.untyped_storage().copy_(leaf.untyped_storage())
        return copy

    def _takes(self, size: int) -> bool:
        """Whether a tensor of so many bytes goes into a file."""
        if size < _LARGE:
            return False
        self._left -= size
        return self._left < 0

    def _in_file(self, form: Tensor) -> Tensor:
        """An empty tensor like ``form``."""
        size = form.untyped_storage().nbytes()
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                # A page of a file that the disk has no room for would end the process without a word.
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
    """Where temporary files go, unless that is memory and there is another place."""
    places = [Path(place) for place in (tempfile.gettempdir(), "/var/tmp", ".")]
    usable = [place for place in places if os.access(place, os.W_OK) and not _in_memory(place)]
    return usable[0] if usable else places[0]


def _in_memory(folder: Path) -> bool:
    """Whether what is written there takes memory; False where nobody can tell."""
    with suppress(OSError):
        device = folder.stat().st_dev
        here = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            mount, _, system = line.partition(" - ")
            if mount.split()[2] == here:
                return system.split()[0] in ("tmpfs", "ramfs")
    return False
