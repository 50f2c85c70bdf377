"""Measure what feeds and saves training: the loader by its processes, and the disk of checkpoints."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from tutti.checkpoint.disk import on_disk
from tutti.data.arrays import ArraySource
from tutti.data.loader import Prefetch
from tutti.workload.bench_timing import Findings

_SAMPLES, _BATCH, _BATCHES = 2048, 128, 48
_BYTES, _ROUNDS = 64 << 20, 3


def bench_data(found: Findings) -> None:
    """Measure the samples a second of tutti's data loader in this process, and with one and with two loader processes.

    Args:
        found: receives the figures ``data/loader/N`` in samples a second, N being the number of loader processes (0:
            this process loads), for batches of 128 colour images of 32×32 pixels in memory.
    """
    draws = np.random.default_rng(0)
    images = draws.random((_SAMPLES, 3, 32, 32), dtype=np.float32)
    source = ArraySource(images, np.zeros(_SAMPLES, dtype=np.int64))
    for workers in (0, 1, 2):
        rates = []
        for _ in range(_ROUNDS):
            tasks = [(draws.integers(0, _SAMPLES, _BATCH), None) for _ in range(_BATCHES)]
            batches = Prefetch(workers).batches(source, tasks)
            next(batches)
            begin = time.perf_counter()
            count = sum(1 for _ in batches)
            rates.append(count * _BATCH / (time.perf_counter() - begin))
        found.add(f"data/loader/{workers}", "sample/s", rates)


def bench_disk(folder: Path, found: Findings) -> None:
    """Measure the speed of writing a file of 64 MiB until it is on the disk, and of reading it from there.

    Args:
        folder: a folder on the disk to measure; the file is temporary.
        found: receives the figures ``disk/write`` and ``disk/read``, in bytes a second (median of 3).

    Raises:
        DiskError: the file cannot be written.
    """
    data = np.random.default_rng(0).bytes(_BYTES)
    written, read = [], []
    for _ in range(_ROUNDS):
        with on_disk(folder, "a file to measure the disk"), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            # The cache of the disk's pages must not serve the reads. macOS has no posix_fadvise.
            if (uncached := getattr(fcntl, "F_NOCACHE", None)) is not None:
                fcntl.fcntl(file.fileno(), uncached, 1)
            begin = time.perf_counter()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
            os.fsync(file.fileno())
            written.append(_BYTES / (time.perf_counter() - begin))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            begin = time.perf_counter()
            while os.read(file.fileno(), 4 << 20):
                pass
            read.append(_BYTES / (time.perf_counter() - begin))
    found.add("disk/write", "byte/s", written)
    found.add("disk/read", "byte/s", read)
