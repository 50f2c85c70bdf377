"""Damage copies of a checkpoint and check that the loader refuses each of them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tutti.chaos.following import checkpoints, complete_in
from tutti.errors import CheckpointError, DiskError


@dataclass
class Damage:
    """Results of one way of damaging copies of a checkpoint, such as flipped bits.

    Attributes:
        name: kind of damage, for the table.
        tried: number of damaged copies.
        detected: number of damaged copies that the loader refused.
        missed: places whose damage the loader did not detect.
    """

    name: str
    tried: int = 0
    detected: int = 0
    missed: list[str] = field(default_factory=list)

    def judge(self, damaged: Path, where: str) -> None:
        """Verify a damaged copy of a checkpoint as a resuming run does, and count the copy as detected or missed.

        Increments ``tried``, and ``detected`` if the loader refuses the copy.

        Args:
            damaged: directory of the damaged copy.
            where: place of the damage in words, such as ``bit 17 of model.bin``; added to ``missed`` if the loader
                accepts the copy.
        """
        from tutti.checkpoint.read import verify

        self.tried += 1
        try:
            verify(damaged)
        except CheckpointError:
            self.detected += 1
        else:
            self.missed.append(where)


def corrupt_copies(
    path: Path, *, flips: int = 1000, truncate: int = 16, drop: bool = True, seed: int = 0
) -> list[Damage]:
    """Test that damage to a checkpoint is noticed: damage copies of it, each in one place, and verify each copy.

    A copy counts as detected if ``checkpoint.read.verify``, by which a resuming run checks a checkpoint, refuses it.
    The checkpoint itself is only read; it and another checkpoint of the run, if there is one, are copied to a temporary
    folder.

    Args:
        path: a checkpoint, or a run directory, whose newest checkpoint is taken.
        flips: number of copies in which a single bit is flipped; the bits are drawn over all bits of all files.
        truncate: number of lengths to which each file is truncated in turn, the longest one byte short.
        drop: whether to try copies in which one file is missing, for each file.
        seed: seed of the bits that are flipped.

    Returns:
        A list with one ``Damage`` for each kind of damage that was tried: flipped bits, truncated files, missing files,
        and files replaced by the same file of another step, if the run has another checkpoint. Its attributes are
        ``name`` (the kind), ``tried`` and ``detected`` (numbers of damaged copies) and ``missed`` (places, in words, of
        the damage that was not detected).

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged already.
        DiskError: the copies cannot be made, such as for lack of room.
    """
    from tutti.checkpoint.read import verify

    chosen = find_checkpoint(path)
    verify(chosen)
    with _copies(chosen) as (copy, other):
        damages = [_flip(copy, flips, random.Random(seed)), _truncate(copy, truncate)]
        damages += [_drop(copy)] if drop else []
        damages += [_exchange(copy, other)] if other else []
        verify(copy)
    return [damage for damage in damages if damage.tried]


def find_checkpoint(path: Path) -> Path:
    """Return the directory of the checkpoint at ``path``, or of the newest checkpoint below it, without verifying it.

    Args:
        path: a checkpoint (a directory with ``manifest.json``), a directory of checkpoints ``step-NNNNNNNN``, or a run
            directory with ``checkpoints/step-NNNNNNNN``.

    Raises:
        CheckpointError: there is no manifest at any of these places.
    """
    if (path / "manifest.json").exists():
        return path
    if found := complete_in(path) or checkpoints(path):
        return found[0]
    raise CheckpointError(
        "there is no checkpoint", where=str(path), remedy="give a run directory or a checkpoint in it"
    )


def files(path: Path) -> list[Path]:
    """Return the paths of all files in a checkpoint directory.

    Args:
        path: directory of the checkpoint.

    Returns:
        The files at any depth, without directories, sorted by path.
    """
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file in place; a second call with the same arguments undoes it.

    Args:
        file: the file to change.
        bit: index of the bit from the start of the file; bit 0 is the least significant bit of the first byte.

    Raises:
        IndexError: the file has no such bit.
        OSError: the file cannot be written.
    """
    with file.open("r+b", buffering=0) as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


def flip_any(path: Path, dice: random.Random) -> str:
    """Flip one bit of a checkpoint in place, drawn uniformly over all bits of all its files.

    Args:
        path: directory of the checkpoint.
        dice: source of the random numbers.

    Returns:
        Description of the bit: ``bit N of CHECKPOINT/FILE``.
    """
    found = files(path)
    file = dice.choices(found, [file.stat().st_size for file in found])[0]
    bit = dice.randrange(file.stat().st_size * 8)
    flip(file, bit)
    return f"bit {bit} of {path.name}/{file.relative_to(path)}"


@contextmanager
def _copies(path: Path) -> Iterator[tuple[Path, Path | None]]:
    """Copy a checkpoint and one of another step of the same run (None if there is none); remove both at the end."""
    others = [step for step in reversed(complete_in(path.parent)) if step != path]
    try:
        with tempfile.TemporaryDirectory(prefix="tutti-chaos-") as folder:
            copy = Path(shutil.copytree(path, Path(folder) / path.name))
            other = Path(shutil.copytree(others[0], Path(folder) / others[0].name)) if others else None
            yield copy, other
    except (OSError, shutil.Error) as error:
        remedy = "free space in the temporary directory, or set TMPDIR to another"
        raise DiskError("the checkpoint cannot be copied", where=str(path), why=str(error), remedy=remedy) from error


def _flip(copy: Path, count: int, dice: random.Random) -> Damage:
    damage, found = Damage("one bit flipped"), files(copy)
    sizes = [file.stat().st_size for file in found]
    for file in dice.choices(found, sizes, k=count):
        bit = dice.randrange(file.stat().st_size * 8)
        flip(file, bit)
        damage.judge(copy, f"bit {bit} of {file.relative_to(copy)}")
        flip(file, bit)
    return damage


def _truncate(copy: Path, places: int) -> Damage:
    damage = Damage("a file cut off")
    for file in files(copy):
        whole = file.read_bytes()
        # An empty file cannot be shorter.
        for place in range(places if whole else 0):
            # Start at the end: a file that lacks only its last byte must be refused.
            length = len(whole) - 1 - (len(whole) - 1) * place // places
            os.truncate(file, length)
            damage.judge(copy, f"{file.relative_to(copy)} cut off at byte {length}")
        file.write_bytes(whole)
    return damage


def _drop(copy: Path) -> Damage:
    damage, aside = Damage("a file missing"), copy.with_name("aside")
    for file in files(copy):
        file.rename(aside)
        damage.judge(copy, f"{file.relative_to(copy)} missing")
        aside.rename(file)
    return damage


def _exchange(copy: Path, other: Path) -> Damage:
    """Replace each file by that of another step; files with equal bytes in both steps are skipped."""
    damage, aside = Damage("a file of another step"), copy.with_name("aside")
    for file in files(copy):
        twin = other / file.relative_to(copy)
        if not twin.is_file() or twin.read_bytes() == file.read_bytes():
            continue
        file.rename(aside)
        # The manifest of another step is itself intact; only the hashes it lists do not match the files.
        shutil.copyfile(twin, file)
        damage.judge(copy, f"{file.relative_to(copy)} of {other.name}")
        aside.replace(file)
    return damage
