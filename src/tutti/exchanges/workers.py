"""What is a worker's own though several workers share a device: its buffers, such as batch-norm statistics."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.laws.shares import share
from tutti.nn.swap import Slot, buffers
from tutti.types import SavedState, Setting


class WorkerBuffers:
    """Each local worker's buffers, one of which is in the model at a time. Swapping moves pointers, not numbers.

    Those named in ``borrowed`` are another rank's to save.
    """

    def __init__(self, parts: Sequence[nn.Module], setting: Setting, borrowed: Collection[str] = ()) -> None:
        self._comm, self._setting, self._borrowed = setting.comms.replica, setting, borrowed
        self._slots = buffers(parts)
        self._own = {w: [slot.get().clone() for slot in self._slots] for w in setting.mine[1:]}
        if len(setting.mine):
            self._own[setting.mine[0]] = [slot.get() for slot in self._slots]
        self._inside = setting.mine[0] if len(setting.mine) else -1

    def enter(self, worker: int) -> None:
        """Put ``worker``'s buffers into the model."""
        if worker != self._inside and self._slots:
            self._take_out()
            for slot, tensor in zip(self._slots, self._own[worker], strict=True):
                slot.put(tensor)
            self._inside = worker

    def state(self) -> dict[str, Tensor]:
        """``{worker}/{buffer}`` of this rank's workers; nothing where one worker's buffers are the model's."""
        if self._setting.workers == 1 or not self._slots:
            return {}
        self._take_out()
        rows = [
            (f"{w}/", slot.name, t) for w, row in self._own.items() for slot, t in zip(self._slots, row, strict=True)
        ]
        return {worker + name: t for worker, name, t in rows if name not in self._borrowed}

    def load(self, saved: SavedState) -> None:
        """Each worker's own buffers where there are as many workers as were saved, the merged model's elsewhere."""
        self._take_out()
        names = saved.names("workers")
        same = self._slots and f"{self._setting.workers - 1}/{self._slots[0].name}" in names
        same = same and f"{self._setting.workers}/{self._slots[0].name}" not in names
        for worker, row in self._own.items():
            for slot, tensor in zip(self._slots, row, strict=True):
                source = ("workers", f"{worker}/{slot.name}") if same else ("model", slot.name)
                tensor.copy_(saved.get(*source))

    def _take_out(self) -> None:
        """Note the tensors that are in the model now: a module may have put in new ones."""
        if self._inside >= 0:
            self._own[self._inside] = [slot.get() for slot in self._slots]

    def of_all(self) -> dict[str, Tensor]:
        """``state`` of every worker; of those whose rank is lost the merged model's. Collective, as ``merged``."""
        if self._setting.workers == 1 or not self._slots:
            return {}
        self._take_out()
        table = self._gather()
        rows = dict(zip(_present(self._comm, self._setting.workers), zip(*table, strict=True), strict=True))
        lost = list(self._merge(table).values())
        return {
            f"{worker}/{slot.name}": tensor
            for worker in range(self._setting.workers)
            for slot, tensor in zip(self._slots, rows.get(worker, lost), strict=True)
        }

    def merged(self) -> dict[str, Tensor]:
        """All N workers' buffers as one model's, the same bits on every rank and for any number of ranks.

        Batch-norm statistics are pooled in worker order in float64: mean of means; mean of variances plus the
        variance of the means (so that they are the moments of all workers' samples together). Other floating buffers
        are averaged; integers take the largest. One all-gather of everybody's buffers, by data type.
        """
        if not self._slots:
            return {}
        if self._setting.workers == 1:
            return {slot.name: slot.get() for slot in self._slots}
        self._take_out()
        return self._merge(self._gather())

    def _merge(self, table: Sequence[Tensor]) -> dict[str, Tensor]:
        by_name = {slot.name: rows for slot, rows in zip(self._slots, table, strict=True)}
        return {slot.name: _merge(slot, by_name) for slot in self._slots}

    def _gather(self) -> list[Tensor]:
        """For each slot a tensor (N, *shape) of all workers that are there, in worker order."""
        slots = range(len(self._slots))
        dtypes = sorted({slot.get().dtype for slot in self._slots}, key=str)
        table: list[Tensor] = [torch.empty(0)] * len(self._slots)
        there = self._comm.there
        for dtype in dtypes:
            members = [i for i in slots if self._slots[i].get().dtype == dtype]
            rows = [torch.cat([self._own[w][i].reshape(-1) for i in members]) for w in self._setting.mine]
            everyone = _gather_rows(rows, self._comm, self._setting.workers)
            start = 0
            for i in members:
                shape = self._slots[i].get().shape
                table[i] = everyone[:, start : start + shape.numel()].reshape(-1, *shape)
                start += shape.numel()
        # One that was lost on the way is in some of them.
        return table if self._comm.there == there else self._gather()


def _gather_rows(rows: Sequence[Tensor], comm: Communicator, workers: int) -> Tensor:
    """(N, width) from each rank's own rows; ranks with fewer workers pad one row."""
    most = len(share(workers, comm.size, 0))
    mine = torch.stack(list(rows))
    padded = mine.new_zeros(most, mine.shape[1])
    padded[: len(rows)] = mine
    parts = comm.all_gather(padded, "buffers of all workers")
    return torch.cat([p[: len(share(workers, comm.size, r))] for r, p in zip(comm.there, parts, strict=True)])


def _present(comm: Communicator, workers: int) -> list[int]:
    """The workers of the ranks that took part in the last call."""
    return [worker for rank in comm.there for worker in share(workers, comm.size, rank)]


def _merge(slot: Slot, table: dict[str, Tensor]) -> Tensor:
    values = table[slot.name]
    if not values.is_floating_point():
        return values.amax(dim=0)
    mean = _mean(values)
    prefix = slot.name.removesuffix(slot.key)
    if slot.key == "running_var" and f"{prefix}running_mean" in table:
        means = table[f"{prefix}running_mean"]
        mean = mean + _mean((means.double() - _mean(means)) ** 2)
    return mean.to(values.dtype)


def _mean(values: Tensor) -> Tensor:
    """Mean over the first axis in float64, added in order."""
    total = values[0].double()
    for value in values[1:]:
        total = total + value
    return total / len(values)
