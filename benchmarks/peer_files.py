"""Faults of files, played on tutti's checkpoints and on those of others: the same state, the same damage.

Every save and every load is a process of its own, so that one which crashes is counted like any other.
"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from soak import small_disk
from torch import Tensor
from torch.distributed import checkpoint as dcp

from tutti.checkpoint.folder import newest_checkpoint
from tutti.checkpoint.read import TensorReader
from tutti.checkpoint.write import WritableSlice, begin, commit, write_part
from tutti.errors import CheckpointError

Tensors = dict[str, Tensor]
# What a load may come to; the position is the exit code of the process that loads.
OUTCOMES = ("old", "new", "wrong", "refused")
LOAD_SECONDS, MOST_MEMORY = 60, 16 << 30


def contents(step: int, mib: float) -> Tensors:
    """The state of ``step``: four matrices of ``mib`` together; other steps have other values."""
    generator = torch.Generator().manual_seed(step)
    rows = max(1, int(mib * 2**20 / 4 / 4 / 64))
    return {f"layer{index}.weight": torch.randn(rows, 64, generator=generator) for index in range(4)}


@dataclass(frozen=True)
class Format:
    """A way to keep one checkpoint in a folder, as its documentation shows it.

    Attributes:
        save: the tensors of a step into the folder, where the step before has been saved too.
        load: the newest there, given tensors of its shapes. Raises where it refuses.
        forged: what a program that loads reads first.
    """

    save: Callable[[Tensors, int, Path], object]
    load: Callable[[Path, Tensors], Tensors]
    forged: str


def _torch_save(tensors: Tensors, step: int, folder: Path) -> None:
    torch.save(tensors, folder / "state.pt")


def _torch_replace(tensors: Tensors, step: int, folder: Path) -> None:
    torch.save(tensors, folder / "state.pt.tmp")
    os.replace(folder / "state.pt.tmp", folder / "state.pt")


def _torch_load(folder: Path, like: Tensors) -> Tensors:
    found: Tensors = torch.load(folder / "state.pt")
    return found


def _safetensors(tensors: Tensors, step: int, folder: Path) -> None:
    save_file(tensors, folder / "state.safetensors")


def _dcp_load(folder: Path, like: Tensors) -> Tensors:
    dcp.load(like, checkpoint_id=folder / "state")
    return like


def _dcp_newest(folder: Path, like: Tensors) -> Tensors:
    dcp.load(like, checkpoint_id=max(path.parent for path in folder.glob("step-*/.metadata")))
    return like


def _tutti(tensors: Tensors, step: int, folder: Path) -> None:
    temporary = begin(folder, step, attempt=0)
    records = write_part(temporary, "model", 0, (WritableSlice.whole(name, tensor) for name, tensor in tensors.items()))
    commit(temporary, records, step=step, config_sha256="", facts={})


def _tutti_load(folder: Path, like: Tensors) -> Tensors:
    found, broken = newest_checkpoint(folder)
    if found is None:
        raise CheckpointError(f"nothing can be loaded: {broken}")
    return dict(TensorReader(found).read("model"))


FORMATS = {
    "tutti": Format(_tutti, _tutti_load, "manifest.json"),
    "torch.save": Format(_torch_save, _torch_load, "state.pt"),
    "torch.save, os.replace": Format(_torch_replace, _torch_load, "state.pt"),
    "safetensors": Format(_safetensors, lambda folder, _: load_file(folder / "state.safetensors"), "state.safetensors"),
    "DCP": Format(lambda t, _, folder: dcp.save(t, checkpoint_id=folder / "state"), _dcp_load, ".metadata"),
    "DCP, a folder a step": Format(
        lambda t, step, folder: dcp.save(t, checkpoint_id=folder / f"step-{step}"), _dcp_newest, ".metadata"
    ),
}


def saved(form: Format, folder: Path, step: int, mib: float) -> bool:
    """Save ``step`` in a process of its own; whether the save said that it has."""
    child = os.fork()
    if not child:
        warnings.simplefilter("ignore")
        try:
            form.save(contents(step, mib), step, folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def judged(form: Format, folder: Path, mib: float) -> int:
    """Which of ``OUTCOMES`` a program that loads the folder gets."""
    try:
        found = form.load(folder, {name: torch.zeros_like(tensor) for name, tensor in contents(1, mib).items()})
    except BaseException:  # DCP's CheckpointException is one
        return OUTCOMES.index("refused")
    for code, step in enumerate((1, 2)):
        want = contents(step, mib)
        if found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want):
            return code
    return OUTCOMES.index("wrong")


def outcomes(form: Format, folder: Path, mib: float, changes: Sequence[Callable[[], object]]) -> Counter[str]:
    """What each change to the folder's files comes to. A process that dies of one is counted, and replaced."""
    found: list[str] = []
    while len(found) < len(changes):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            warnings.simplefilter("ignore")
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            for change in changes[len(found) :]:
                signal.alarm(LOAD_SECONDS)
                change()
                os.write(writer, bytes([judged(form, folder, mib)]))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as stream:
            found += [OUTCOMES[code] for code in stream.read()]
        if os.waitpid(child, 0)[1]:
            found.append("crashed")
    return Counter(found)


def outcome(form: Format, folder: Path, mib: float) -> str:
    """What a program that loads the folder gets."""
    [found] = outcomes(form, folder, mib, [lambda: None])
    return found


def files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def kill_in_a_save(form: Format, folder: Path, runs: int, dice: random.Random, mib: float = 32) -> Counter[str]:
    """kill -9 at a random moment of a save, with the checkpoint before it in place. A save that was over counts not."""
    found: Counter[str] = Counter()
    saved(form, folder, 1, mib)
    began = time.perf_counter()
    saved(form, folder / _made(folder, "warm"), 2, mib)
    longest = time.perf_counter() - began
    for _ in range(20 * runs):
        if found.total() == runs:
            break
        work = folder / _made(folder, "work")
        saved(form, work, 1, mib)
        state = contents(2, mib)
        child = os.fork()
        if not child:
            warnings.simplefilter("ignore")
            try:
                form.save(state, 2, work)
            finally:
                os._exit(0)
        time.sleep(dice.random() * longest)
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            found[outcome(form, work, mib)] += 1
        shutil.rmtree(work)
    return found


def _made(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    return name


def flip_bits(form: Format, folder: Path, runs: int, dice: random.Random, mib: float = 0.125) -> Counter[str]:
    """One random bit of all bytes of a checkpoint, a hundred times ``runs``. ``old`` means that nothing was changed."""
    saved(form, folder, 1, mib)
    content = {file: file.read_bytes() for file in files(folder)}

    def flip(file: Path, bit: int) -> None:
        restore(content)
        flipped = bytearray(content[file])
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)

    chosen = dice.choices(list(content), [len(data) for data in content.values()], k=100 * runs)
    bits = [(file, dice.randrange(8 * len(content[file]))) for file in chosen]
    return outcomes(form, folder, mib, [partial(flip, file, bit) for file, bit in bits])


def cut_off(form: Format, folder: Path, runs: int, dice: random.Random, mib: float = 0.125) -> Counter[str]:
    """Every file of a checkpoint cut off at ``runs`` random places."""
    saved(form, folder, 1, mib)
    content = {file: file.read_bytes() for file in files(folder)}

    def cut(file: Path, place: int) -> None:
        restore(content)
        os.truncate(file, place)

    places = [(file, dice.randrange(len(data))) for file, data in content.items() for _ in range(runs)]
    return outcomes(form, folder, mib, [partial(cut, file, place) for file, place in places])


def restore(content: Mapping[Path, bytes]) -> None:
    for file, data in content.items():
        file.write_bytes(data)


def fill_the_disk(form: Format, folder: Path, runs: int, dice: random.Random, mib: float = 1.0) -> Counter[str]:
    """A save of more than there is room for, even in place of the old; then somebody makes room, and all is loaded."""
    found: Counter[str] = Counter()
    for _ in range(runs):
        disk = folder / _made(folder, "disk")
        with small_disk(disk) as mounted:
            if not mounted:
                return found
            saved(form, disk, 1, mib)
            page = os.statvfs(disk).f_bsize
            room = dice.randrange(int(mib * 2**20 / page))
            (disk / "filler").write_bytes(bytes(page * (os.statvfs(disk).f_bavail - room)))
            silent = saved(form, disk, 2, 2.5 * mib)
            (disk / "filler").unlink()
            found["failed save not told" if silent else outcome(form, disk, mib)] += 1
        disk.rmdir()
    return found


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.path), "w")


def forge(form: Format, folder: Path, runs: int, dice: random.Random, mib: float = 0.125) -> Counter[str]:
    """A pickle in place of what is read first: was it executed?"""
    saved(form, folder, 1, mib)
    found: Counter[str] = Counter()
    [target] = [file for file in files(folder) if file.name == form.forged]
    canary = folder.with_name("canary")
    for _ in range(runs):
        target.write_bytes(pickle.dumps(Canary(canary)))
        told = outcome(form, folder, mib)
        found["executed" if canary.exists() else told] += 1
        canary.unlink(missing_ok=True)
    return found


FAULTS: dict[str, Callable[[Format, Path, int, random.Random], Counter[str]]] = {
    "kill -9 in a save": kill_in_a_save,
    "one bit flipped": flip_bits,
    "a file cut off": cut_off,
    "disk full in a save": fill_the_disk,
    "a forged file": forge,
}


def play(runs: int, seed: int) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """Every fault on every format: how often it came to what."""
    torch.set_num_threads(1)
    for fault, act in FAULTS.items():
        by_format = {}
        for name, form in FORMATS.items():
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / _made(Path(place), "checkpoints")
                by_format[name] = dict(act(form, folder, runs, random.Random(f"{seed} {fault}")))
        yield fault, by_format
