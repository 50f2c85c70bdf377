"""Small checkpoints for tests: three ranks that hold rows, columns and whole tensors, and what they must read as."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.read import TensorReader
from tutti.checkpoint.write import WritableSlice, abandon, begin, commit, write_part
from tutti.errors import TuttiError

RANKS = 3
FACTS = {"epoch": 2, "loss": 0.1, "note": "π"}
Groups = Mapping[str, Mapping[str, Tensor]]


def contents(step: int) -> dict[str, dict[str, Tensor]]:
    """Group → name → value of ``step``'s checkpoint; other steps have other values."""
    generator = torch.Generator().manual_seed(step)
    rows, columns = torch.randn(7, 4, generator=generator), torch.randn(2, 8, generator=generator)
    return {
        "model": {"rows": rows, "columns": columns.bfloat16(), "scale": torch.tensor(float(step))},
        "optim": {"rows.exp_avg": rows * 0.5, "step": torch.tensor(step)},
        "rng": {"torch": torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8)},
    }


def pieces(tensor: Tensor, ranks: int, axis: int) -> list[tuple[Tensor, tuple[int, ...]]]:
    """``tensor`` in uneven parts along ``axis``, each with its offset."""
    start, found = 0, []
    for part in tensor.tensor_split(ranks, dim=axis):
        found.append((part, tuple(start if d == axis else 0 for d in range(tensor.dim()))))
        start += part.shape[axis]
    return found


def held(groups: Groups, rank: int) -> Iterator[tuple[str, list[WritableSlice]]]:
    """What ``rank`` writes of each group: its part of every matrix, and rank 0 everything else."""
    for group, tensors in groups.items():
        slices = []
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                part, offset = pieces(tensor, RANKS, axis=int(name == "columns"))[rank]
                slices.append(WritableSlice(name, part, tuple(tensor.shape), offset))
            elif rank == 0:
                slices.append(WritableSlice.whole(name, tensor))
        yield group, slices


def save(folder: Path, step: int, facts: Mapping[str, Any] = FACTS) -> Manifest:
    """A checkpoint of ``contents(step)``, written by three ranks in turn; abandoned where one fails."""
    temporary = begin(folder, step, attempt=0)
    groups = contents(step)
    try:
        records = [
            record
            for rank in range(RANKS)
            for group, slices in held(groups, rank)
            for record in write_part(temporary, group, rank, slices)
        ]
    except TuttiError:
        abandon(temporary)
        raise
    return commit(temporary, records, step=step, config_sha256="c0ffee", facts=facts)


def same(manifest: Manifest) -> bool:
    """Whether a checkpoint reads as what its step wrote, to the bit."""
    reader = TensorReader(manifest)
    for group, tensors in contents(manifest.step).items():
        read = dict(reader.read(group))
        if read.keys() != tensors.keys() or not all(torch.equal(read[name], tensors[name]) for name in tensors):
            return False
    return True


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


def forge(path: Path, change: Any) -> None:
    """Rewrite a manifest as an attacker would, its own hash included; ``change`` is given the document to alter."""
    file = path / "manifest.json"
    document = json.loads(file.read_text())
    del document["sha256"]
    document = change(document) or document
    body = json.dumps(document)[:-1].encode()
    file.write_bytes(body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode())


def own(document: dict[str, Any], path: Path, group: str = "model", rank: int = 0) -> dict[str, Any]:
    """The document's entry of a file, its size and hash brought up to date with what lies there."""
    entry: dict[str, Any] = next(e for e in document["files"] if (e["group"], e["rank"]) == (group, rank))
    data = (path / group / f"rank{rank}.safetensors").read_bytes()
    entry["sha256"], entry["size"] = hashlib.sha256(data).hexdigest(), len(data)
    return entry
