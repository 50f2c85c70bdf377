"""Damaging copies of a checkpoint as disks and hands do, and asking the loader what it makes of it."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tutti.errors import CheckpointError, DiskError


@dataclass
class Damage:
    """One way of damaging a checkpoint.

    Attributes:
        name: what was done.
        tried: how often.
        detected: how often the loader refused what came of it.
        missed: where it did not.
    """

    name: str
    tried: int = 0
    detected: int = 0
    missed: list[str] = field(default_factory=list)

    def judge(self, damaged: Path, where: str) -> None:
        """Have the loader verify the checkpoint at ``damaged``, and count its answer."""
        from tutti.state.read import verify

        self.tried += 1
        try:
            verify(damaged)
        except CheckpointError:
            self.detected += 1
        else:
            self.missed.append(where)


def corrupt(path: Path, *, flips: int = 1000, truncate: int = 16, drop: bool = True, seed: int = 0) -> list[Damage]:
    """Damage copies of a checkpoint, one thing at a time, and verify each as a run that resumes does.

    Args:
        path: the checkpoint, or a run directory, of which the newest is taken; never written to.
        flips: single bits to flip, anywhere in any of its files.
        truncate: places at which to cut each file off.
        drop: whether to leave each file out too.
        seed: which bits.

    Returns:
        Bits, lengths, absences, and files exchanged with those of another step, where the run has one.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged already.
        DiskError: there is no room for two copies.
    """
    from tutti.state.read import verify

    chosen = find(path)
    verify(chosen)
    with _copies(chosen) as (copy, other):
        damages = [_flip(copy, flips, random.Random(seed)), _truncate(copy, truncate)]
        damages += [_drop(copy)] if drop else []
        damages += [_exchange(copy, other)] if other else []
        verify(copy)
    return [damage for damage in damages if damage.tried]


def find(path: Path) -> Path:
    """The checkpoint at ``path``, or the newest of the run directory there. Raises CheckpointError."""
    for pattern in ("manifest.json", "step-????????/manifest.json", "checkpoints/step-????????/manifest.json"):
        if found := sorted(path.glob(pattern)):
            return found[-1].parent
    raise CheckpointError(
        "there is no checkpoint", where=str(path), remedy="give a run directory or a checkpoint in it"
    )


def files(path: Path) -> list[Path]:
    """Every file of a checkpoint."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def flip(file: Path, bit: int) -> None:
    """Turn one bit of a file over, in place."""
    with file.open("r+b", buffering=0) as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ (1 << bit % 8)]))


def flip_any(path: Path, dice: random.Random) -> str:
    """Turn one bit of a checkpoint over, every bit as likely as any other; which one."""
    found = files(path)
    file = dice.choices(found, [file.stat().st_size for file in found])[0]
    bit = dice.randrange(file.stat().st_size * 8)
    flip(file, bit)
    return f"bit {bit} of {path.name}/{file.relative_to(path)}"


@contextmanager
def _copies(path: Path) -> Iterator[tuple[Path, Path | None]]:
    """Copies of a checkpoint and of one of another step beside it, None where there is none; removed at the end."""
    others = [step.parent for step in path.parent.glob("step-????????/manifest.json") if step.parent != path]
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
        for place in range(places):
            # From the end: all but one byte must not be enough.
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
    """Files that say the same in both steps are no damage, and left out."""
    damage, aside = Damage("a file of another step"), copy.with_name("aside")
    for file in files(copy):
        twin = other / file.relative_to(copy)
        if not twin.is_file() or twin.read_bytes() == file.read_bytes():
            continue
        file.rename(aside)
        # The sealed manifest of another step is whole in itself: it is what it says of the files that cannot be true.
        shutil.copyfile(twin, file)
        damage.judge(copy, f"{file.relative_to(copy)} of {other.name}")
        aside.replace(file)
    return damage
