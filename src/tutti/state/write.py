"""Writing a checkpoint so that at every moment it is either complete or not there.

Rank 0 calls ``begin``; every rank calls ``write_part`` and reports its records to rank 0; rank 0 calls ``commit``, or
``abandon`` where any rank failed. Everything is on disk before the one rename that makes it a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.errors import CheckpointError
from tutti.state.disk import discard, on_disk, sync, write_new
from tutti.state.dtypes import DTYPE_NAMES
from tutti.state.manifest import GROUPS, MANIFEST, MOST_METADATA, FileRecord, Manifest
from tutti.state.tensorfile import SliceRecord, file_layout


@dataclass(frozen=True)
class Slice:
    """A tensor's part that this rank holds.

    Attributes:
        name: the tensor's name, the same on every rank.
        tensor: the part's values, on any device.
        shape: of the whole tensor.
        offset: index of the part's first element in the whole tensor, all zeros where it is whole.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Slice:
        """The slice that is all of ``tensor``."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def record(self) -> SliceRecord:
        """What the manifest keeps of it. Raises CheckpointError where it cannot be stored."""
        tensor = self.tensor
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
            kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            remedy = f"make it a dense tensor of one of {', '.join(str(dtype)[6:] for dtype in DTYPE_NAMES)}"
            raise CheckpointError(f"{self.name!r} cannot be saved", why=f"it is {kind}", remedy=remedy)
        try:
            part = tuple(tensor.shape)
            return SliceRecord(self.name, DTYPE_NAMES[tensor.dtype], tuple(self.shape), tuple(self.offset), part)
        except ValueError as error:
            raise CheckpointError(f"{self.name!r} cannot be saved", why=str(error)) from error


def step_name(step: int) -> str:
    """The directory of a step's checkpoint.

    >>> step_name(123)
    'step-00000123'
    """
    return f"step-{step:08d}"


def begin(folder: Path, step: int, attempt: int) -> Path:
    """An empty directory to write ``step``'s checkpoint in. Rank 0 only, and before any rank's ``write_part``.

    Args:
        folder: the run's ``checkpoints``; made where it does not exist.
        attempt: how often the run was restarted, so that what a dead attempt still writes goes elsewhere.

    Raises:
        DiskError: it cannot be made.
    """
    temporary = folder / f"{step_name(step)}.tmp-{attempt}"
    with on_disk(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    return temporary


def write_part(
    temporary: Path, group: str, rank: int, slices: Iterable[Slice], progress: Callable[[], object] = lambda: None
) -> list[FileRecord]:
    """Write one rank's slices of one group as ``GROUP/rank{N}.safetensors`` and fsync it.

    The hash is of the bytes as they leave memory, so that whatever the disk makes of them is noticed. Tensors must not
    change meanwhile: give it a snapshot. Empty parts of tensors that are not empty are left out. ``progress`` is called
    after every mebibyte.

    Returns:
        The records to report to rank 0: one, or none where there is nothing to write (no file is made).

    Raises:
        CheckpointError: a tensor that the format does not know, or a slice outside its tensor.
        DiskError: the file cannot be written. This rank's part of it is removed, the rest is for ``abandon``.
    """
    if group not in GROUPS:
        raise ValueError(f"there is no group {group!r}")
    pairs = [(item.record(), item.tensor) for item in slices if item.tensor.numel() or 0 in item.shape]
    if not pairs:
        return []
    # Wide elements first, as in safetensors: every tensor then starts at a multiple of its element's size.
    pairs.sort(key=lambda pair: -pair[0].itemsize)
    records = tuple(record for record, _ in pairs)
    layout = file_layout(records)
    path = temporary / group / f"rank{rank}.safetensors"
    with on_disk(path, remove=path):
        path.parent.mkdir(exist_ok=True)
        sha256 = write_new(path, _buffers(layout.header, (tensor for _, tensor in pairs)), progress)
    return [FileRecord(group, rank, layout.size, sha256, records)]


def commit(
    temporary: Path, records: Iterable[FileRecord], *, step: int, config_sha256: str, facts: Mapping[str, Any]
) -> Manifest:
    """Make what lies in ``temporary`` the checkpoint of ``step``, in one rename. Rank 0 only, after all ranks reported.

    Where the step has a checkpoint already, that one stays loadable until the new one is in its place.

    Args:
        temporary: what ``begin`` gave.
        records: all that all ranks' ``write_part`` gave.
        step: steps taken.
        config_sha256: hash of the run's configuration.
        facts: everything else that the run keeps, as JSON without NaN.

    Raises:
        CheckpointError: slices that do not make whole tensors, files missing, or facts that are no JSON.
        DiskError: it cannot be written. In either case ``temporary`` is removed.
    """
    final = temporary.parent / step_name(step)
    try:
        manifest = _manifest(temporary, final, tuple(records), step, config_sha256, facts)
        with on_disk(final):
            _settle(temporary, manifest)
            _replace(temporary, final)
    except BaseException:
        abandon(temporary)
        raise
    return manifest


def abandon(temporary: Path) -> None:
    """Remove an unfinished checkpoint. Rank 0 only, once no rank writes to it any more."""
    shutil.rmtree(temporary, ignore_errors=True)


def _manifest(
    temporary: Path, final: Path, records: tuple[FileRecord, ...], step: int, config: str, facts: Mapping[str, Any]
) -> Manifest:
    for record in records:
        path = temporary / record.group / record.name
        if not path.is_file() or path.stat().st_size != record.size:
            why = "rank 0 does not see the file as its rank wrote it"
            remedy = "check that all ranks share one file system"
            raise CheckpointError("the checkpoint is incomplete", where=str(path), why=why, remedy=remedy)
    try:
        return Manifest(final, step, config, facts, records)
    except ValueError as error:
        raise CheckpointError("the checkpoint cannot be completed", where=str(temporary), why=str(error)) from error


def _settle(temporary: Path, manifest: Manifest) -> None:
    """Everything on disk, names included, but for the rename."""
    data = manifest.encode()
    if len(data) > MOST_METADATA:
        raise CheckpointError("the manifest is too large", why=f"{len(data)} bytes of at most {MOST_METADATA}")
    write_new(temporary / MANIFEST, [memoryview(data)])
    for directory in sorted({temporary / record.group for record in manifest.files}):
        sync(directory)
    sync(temporary)


def _replace(temporary: Path, final: Path) -> None:
    # A directory cannot replace one that is not empty. The earlier one keeps a name by which it is found meanwhile.
    earlier = final.with_name(f"{final.name}.old")
    if final.exists():
        if earlier.exists():
            discard(earlier)
        os.replace(final, earlier)
        sync(final.parent)
    os.replace(temporary, final)
    sync(final.parent)
    if earlier.exists():
        discard(earlier)


def _buffers(header: bytes, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # No bytes means no address, which a memoryview cannot do without.
        if dense.numel():
            yield dense.reshape(-1).view(torch.uint8).numpy().data
