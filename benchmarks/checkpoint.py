"""What does it cost to save safely? Write, hash and fsync, beside ``torch.save`` and plain safetensors, in one run.

``python benchmarks/checkpoint.py [--mib 256] [--rounds 9] [--folder DIR] [--threads 1]``
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tutti.checkpoint.read import TensorReader, verify
from tutti.checkpoint.write import WritableSlice, begin, commit, write_part

Tensors = dict[str, Tensor]


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def tutti(tensors: Tensors, folder: Path) -> None:
    temporary = begin(folder, 1, attempt=0)
    records = write_part(temporary, "model", 0, (WritableSlice.whole(name, tensor) for name, tensor in tensors.items()))
    commit(temporary, records, step=1, config_sha256="", facts={})


def torch_save(tensors: Tensors, folder: Path) -> None:
    torch.save(tensors, folder / "state.pt")


def torch_save_fsync(tensors: Tensors, folder: Path) -> None:
    torch_save(tensors, folder)
    sync(folder / "state.pt")


def safetensors(tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / "state.safetensors")


def safetensors_fsync(tensors: Tensors, folder: Path) -> None:
    safetensors(tensors, folder)
    sync(folder / "state.safetensors")


CONTESTANTS: dict[str, Callable[[Tensors, Path], None]] = {
    "tutti: write, hash, fsync, rename": tutti,
    "torch.save": torch_save,
    "torch.save, fsync": torch_save_fsync,
    "safetensors": safetensors,
    "safetensors, fsync": safetensors_fsync,
}


def timed(save: Callable[[Tensors, Path], None], tensors: Tensors, parent: Path) -> float:
    """Seconds of one save into an empty folder, with nothing of an earlier one left to be written back."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    os.sync()
    start = time.perf_counter()
    save(tensors, folder)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder)
    return seconds


def reading(tensors: Tensors, parent: Path) -> tuple[float, float]:
    """Seconds to verify, and to read everything, from the page cache."""
    folder = Path(tempfile.mkdtemp(dir=parent))
    tutti(tensors, folder)
    start = time.perf_counter()
    manifest = verify(folder / "step-00000001")
    middle = time.perf_counter()
    for name, tensor in TensorReader(manifest).read("model"):
        if not torch.equal(tensor, tensors[name]):
            raise RuntimeError(f"{name} did not come back")
    end = time.perf_counter()
    shutil.rmtree(folder)
    return middle - start, end - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--threads", type=int, default=1)
    words = parser.parse_args()
    torch.set_num_threads(words.threads)
    tensors = {f"layer{index}.weight": torch.randn(1024, 1024) for index in range(words.mib // 4)}
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(dir=words.folder) as parent:
        for turn in range(words.rounds + 1):
            for name in random.Random(turn).sample(list(CONTESTANTS), len(CONTESTANTS)):
                seconds = timed(CONTESTANTS[name], tensors, Path(parent))
                # The first round warms caches up.
                times[name] += [seconds] if turn else []
        check, read = reading(tensors, Path(parent))
    first = times[next(iter(CONTESTANTS))]
    print(f"{words.mib} MiB, {words.rounds} rounds, load {os.getloadavg()[0]:.1f}: medians; ratios within rounds")
    for name, seconds in times.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(first, seconds, strict=True))
        median = statistics.median(seconds)
        print(f"{name:34} {median * 1e3:8.0f} ms {words.mib / median:7.0f} MiB/s   tutti takes {ratio:5.2f} × as long")
    print(f"verify {words.mib / check:.0f} MiB/s, read and compare {words.mib / read:.0f} MiB/s, from the page cache")


if __name__ == "__main__":
    main()
