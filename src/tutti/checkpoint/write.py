"""Write a checkpoint atomically: at every moment it is either complete or absent.

Rank 0 calls ``begin``; every rank calls ``write_part`` and reports its records to rank 0; rank 0 calls ``commit``, or
``abandon`` where any rank failed. All files are fsynced before the one rename that makes them a checkpoint.
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

from tutti.checkpoint.disk import discard, on_disk, sync, write_new
from tutti.checkpoint.dtypes import DTYPE_NAMES
from tutti.checkpoint.manifest import GROUPS, MANIFEST, MOST_METADATA, FileRecord, Manifest
from tutti.checkpoint.tensorfile import SliceRecord, file_layout
from tutti.errors import CheckpointError


@dataclass(frozen=True)
class WritableSlice:
    """A tensor slice for this rank to write.

    Attributes:
        name: the tensor's name, the same on every rank.
        tensor: the slice's values, on any device.
        shape: shape of the whole tensor.
        offset: index of the slice's first element in the whole tensor.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> WritableSlice:
        """Return the slice that covers all of a tensor, for a tensor that is not sharded; the tensor is not copied.

        Args:
            name: the tensor's name, the same on every rank.
            tensor: the whole tensor, on any device.
        """
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def record(self) -> SliceRecord:
        """Return name, dtype, shapes and offset of a tensor slice as a ``SliceRecord``, which the manifest stores.

        Raises:
            CheckpointError: the tensor is not dense, its dtype is not in the format, or the slice leaves its tensor.
        """
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
    """Return the name of the directory of a step's checkpoint.

    Args:
        step: steps taken.

    >>> step_name(123)
    'step-00000123'
    """
    return f"step-{step:08d}"


def begin(folder: Path, step: int, attempt: int) -> Path:
    """Create an empty directory for the files of ``step``'s checkpoint, and return its path.

    To be called on rank 0 only, before any rank's ``write_part``; ``commit`` renames the directory at the end.

    Args:
        folder: the run's ``checkpoints``; created if it does not exist.
        step: steps taken.
        attempt: number of restarts of the run, so that late writes of an earlier attempt go to another directory.

    Raises:
        DiskError: the directory cannot be created.
    """
    temporary = folder / f"{step_name(step)}.tmp-{attempt}"
    with on_disk(temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    return temporary


def write_part(
    temporary: Path,
    group: str,
    rank: int,
    slices: Iterable[WritableSlice],
    progress: Callable[[], object] = lambda: None,
) -> list[FileRecord]:
    """Write one rank's tensor slices of one group of state into the file ``GROUP/rank{N}.safetensors``, and fsync it.

    The hash is of the bytes in memory, so that damage on the disk is noticed. Tensors must not change meanwhile: give a
    snapshot. Empty slices of tensors that are not empty are left out.

    Args:
        temporary: the directory from ``begin``.
        group: kind of state, one of ``GROUPS``, such as ``model`` (parameters and buffers), ``ema`` (averaged weights),
            ``optim`` (optimizer state) or ``workers`` (state of each logical worker, a fixed share of the global
            batch).
        rank: this rank.
        slices: the slices to write.
        progress: called after every mebibyte.

    Returns:
        The records to report to rank 0: a list with one ``FileRecord`` (group, rank, size, hash and slices of the
        file), or an empty list where there is nothing to write (no file is created).

    Raises:
        ValueError: an unknown group.
        CheckpointError: a tensor whose dtype or layout the format lacks, or a slice outside its tensor.
        DiskError: the file cannot be written. It is removed; ``abandon`` removes the rest.
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
    """Complete the checkpoint of ``step``: write its manifest and rename its temporary directory to the final name.

    To be called on rank 0 only, after all ranks have reported their files. An existing checkpoint of the step stays
    loadable until the new one has replaced it.

    Args:
        temporary: the directory from ``begin``.
        records: the records of all ranks' ``write_part``.
        step: steps taken.
        config_sha256: hash of the run's configuration.
        facts: the run's further state, as JSON without NaN.

    Returns:
        The checkpoint's ``Manifest``: final ``path``, ``step``, ``facts``, and records of files and tensors.

    Raises:
        CheckpointError: slices do not make whole tensors, files are missing, the facts are no JSON, or the manifest is
            too large.
        DiskError: the manifest cannot be written or the directory renamed. On any error ``temporary`` is removed.
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
    """Delete the temporary directory of an unfinished checkpoint with its files; errors are ignored.

    Rank 0 only, once no rank writes to the directory any more.

    Args:
        temporary: the directory from ``begin``.
    """
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
    """Write the manifest, and fsync it and the directories: only the rename is left to do."""
    data = manifest.encode()
    if len(data) > MOST_METADATA:
        raise CheckpointError("the manifest is too large", why=f"{len(data)} bytes of at most {MOST_METADATA}")
    write_new(temporary / MANIFEST, [memoryview(data)])
    for directory in sorted({temporary / record.group for record in manifest.files}):
        sync(directory)
    sync(temporary)


def _replace(temporary: Path, final: Path) -> None:
    # A rename cannot replace a directory that is not empty. Until then the earlier checkpoint is found as ``.old``.
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
        # An empty tensor has no address, which a memoryview needs.
        if dense.numel():
            yield dense.reshape(-1).view(torch.uint8).numpy().data
