"""``HOROVOD_AUTOTUNE``: try bucket sizes in turn during the first steps of a training, and keep the fastest."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

from tutti.comm import collectives
from tutti.comm.collective_call import ReduceOperation
from tutti.comm.process_set import ProcessSet
from tutti.horovod.common.exceptions import translated
from tutti.horovod.torch import job
from tutti.launcher.membership import current_membership

log = logging.getLogger("tutti.collectives")

BUCKET_BYTES = 25 << 20
"""Size of a bucket without autotuning, and the first that is tried."""
CANDIDATES = (BUCKET_BYTES, 1 << 20, 4 << 20, 64 << 20, 128 << 20)


class BucketAutotune:
    """Tuner of the size of gradient buckets: times optimizer steps with each size of ``CANDIDATES``, keeps the fastest.

    Stands for Horovod's ``HOROVOD_AUTOTUNE``. The ranks add up their times by an all-reduce, so that all ranks choose
    the same size; a rank that has called ``hvd.join`` adds nothing.

    Args:
        name: suffix of the collective's name, unique among optimizers.
        process_set: ranks that take part.
        steps: number of optimizer steps with each size, at least 2; the first step is not timed.
        warmup: number of rounds of ``steps`` steps each, with the first size, before this size is timed.
        path: CSV file that rank 0 creates here, and to which it adds a line for each size: columns
            ``tensor_fusion_threshold`` (bytes) and ``seconds_per_step``. None: no file.
    """

    def __init__(self, name: str, process_set: ProcessSet, steps: int, warmup: int, path: Path | None) -> None:
        self._name, self._process_set = f"autotune.{name}", process_set
        self._steps, self._warmup = max(2, steps), warmup
        self._path = path if job.rank() == 0 else None
        self._seconds: list[float] = []
        self._count, self._began = 0, 0.0
        if self._path is not None:
            self._path.write_text("tensor_fusion_threshold,seconds_per_step\n")

    def after_step(self) -> int | None:
        """Count an optimizer step, and decide whether the gradient buckets get another size.

        To be called after every step on every rank of the process set. Collective over the process set at the last
        timed step of each size: an all-reduce of one number adds up the ranks' times; blocks. Other calls, and all
        after the last candidate, send nothing.

        Returns:
            The new bucket size in bytes: the next candidate or, after the last one, the candidate with the least mean
            time a step; None: keep the present size.

        Raises:
            HorovodInternalError: the ranks' steps differ in number, or a rank has ended.
        """
        if len(self._seconds) == len(CANDIDATES):
            return None
        self._count += 1
        if self._count == 1:
            self._began = time.perf_counter()
        if self._count < self._steps:
            return None
        self._count = 0
        if self._warmup > 0:
            self._warmup -= 1
            return None
        taken = torch.tensor([time.perf_counter() - self._began], dtype=torch.float64)
        total = translated(collectives.allreduce)(taken, ReduceOperation.SUM, self._name, process_set=self._process_set)
        self._seconds.append(total.item() / (self._steps - 1) / self._process_set.size())
        if self._path is not None:
            with self._path.open("a") as file:
                print(f"{CANDIDATES[len(self._seconds) - 1]},{self._seconds[-1]:.6f}", file=file)
        if len(self._seconds) < len(CANDIDATES):
            return CANDIDATES[len(self._seconds)]
        best = CANDIDATES[self._seconds.index(min(self._seconds))]
        log.info("autotuning chose buckets of %d MB", best >> 20)
        return best


def make_autotune(name: str, process_set: ProcessSet) -> BucketAutotune | None:
    """Return the tuner of gradient bucket sizes that ``HOROVOD_AUTOTUNE`` and its related variables ask for, or None.

    The related variables are ``HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE`` (optimizer steps with each size; default 10),
    ``HOROVOD_AUTOTUNE_WARMUP_SAMPLES`` (rounds of so many steps before the first size is timed; default 3) and
    ``HOROVOD_AUTOTUNE_LOG`` (CSV file for the times; default: none).

    Args:
        name: suffix of the name of the collective that adds up the times, unique among optimizers.
        process_set: ranks that take part.

    Returns:
        The tuner, whose ``after_step`` is to be called after every optimizer step. None if ``HOROVOD_AUTOTUNE`` is not
        set or 0, and in elastic jobs, in which ranks that join later would try other sizes than earlier ranks at the
        same time.

    Raises:
        ValueError: a variable is not a whole number.
    """
    if os.environ.get("HOROVOD_AUTOTUNE", "0") in ("", "0"):
        return None
    if current_membership() is not None:
        log.warning("HOROVOD_AUTOTUNE has no effect on ranks that join and leave")
        return None

    def number(variable: str, default: int) -> int:
        text = os.environ.get(variable, "") or str(default)
        if not text.isdecimal():
            raise ValueError(f"{variable} is '{text}'; it must be a whole number")
        return int(text)

    path = os.environ.get("HOROVOD_AUTOTUNE_LOG", "")
    steps = number("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10)
    warmup = number("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3)
    return BucketAutotune(name, process_set, steps, warmup, Path(path) if path else None)
