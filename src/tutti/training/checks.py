"""Looks for the classic mistakes where a run begins and where it is evaluated, and at nothing in between.

Whether workers train on the same samples, have statistics of their own or are given different held-out samples takes a
small message each; everything else is seen by rank 0 alone. No check changes a weight, a statistic or a random draw.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tutti.data.batches import cut, length, map_tensors
from tutti.data.digest import digest
from tutti.data.draws import own_generators
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.laws import suspicion
from tutti.nn.swap import buffers, mode
from tutti.training.diagnoses import Diagnoses
from tutti.types import Batch, Cell, LossFn

if TYPE_CHECKING:
    from tutti.training.steps import Steps

Work: TypeAlias = Sequence[tuple[int, Sequence[Cell]]]
"""Each worker of this rank with its micro-batches of one step."""

_STEPS = 8
"""Steps in which samples are collected, where a worker's share is small."""
_SAMPLES = 8
_FEW = 4
_BEGINNING = range(16, 33)
"""Samples at the beginning of a held-out set that are compared with its end; with fewer, equality may be chance."""

# Hooks of the models that are watched: a model that is prepared again is the new run's.
_WATCHED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


class Rate(NamedTuple):
    """Of a parameter group: its optimizer's name, the highest rate that is known, momentum."""

    kind: str
    peak: float
    momentum: float


class Checks:
    """Of one run.

    Attributes:
        diagnoses: what was found.
        looking: whether ``look`` wants to see the next step: where ranks do not keep step, only the first.
        ended: to be called after the next global batch of an own loop.
    """

    def __init__(self, run: Steps) -> None:
        self._run, self._steps = run, 0
        self._speaks = run.setting.grid.rank == 0
        self.diagnoses = Diagnoses(run.setting.grid.rank)
        self.looking = True
        self.ended: Callable[[], None] | None = None
        self._first: dict[int, list[str]] = {worker: [] for worker in run.setting.mine}
        self._rates = rates(run.exchange.optimizers)
        self._evaluated = self._aside = False
        for hook in _WATCHED.pop(run.model, ()):
            hook.remove()

    # --- the first steps -------------------------------------------------------------------------------------------

    def look(self, batch: Batch, work: Work, loss: LossFn | None, given: bool) -> None:
        """A step begins, on ``work``, cut from ``batch``. Collective where there are several workers.

        Args:
            loss: None in an own loop.
            given: whether the batch is the caller's own.
        """
        self._steps += 1
        several = self._run.setting.workers > 1
        if self._steps == 1 and self._speaks:
            cells = sum(len(cells) for _, cells in work)
            if several or cells > 1:
                self._denominator(loss, batch, max((cell.samples for _, cells in work for cell in cells), default=2))
            if several:
                self._rate()
            if cells > 1 and self._run.optimizer is not None:
                self.ended = self._schedules(self._run.optimizer, cells)
        if several and self._steps == 2:
            self._statistics()
        if self._first:
            self._collect(work)
            # At powers of two: few messages, whether shares are large or small.
            if several and self._steps & (self._steps - 1) == 0 and self._same_data(given):
                self._first = {}
        more = self._steps < 2 or (bool(self._first) and self._steps < _STEPS)
        self.looking = several and self._run.setting.in_step and more

    def _collect(self, work: Work) -> None:
        for worker, cells in work:
            seen = self._first[worker]
            for cell in cells:
                seen += _digests(cell.batch, min(_SAMPLES - len(seen), cell.samples))

    def _same_data(self, given: bool) -> bool:
        """Compare the first samples of all workers; whether enough were seen. Collective."""
        contract, comm = self._run.feed.contract, self._run.setting.comms.replica
        table = torch.zeros(len(contract.mine(0)), 2, dtype=torch.int64)
        for row, seen in zip(table, self._first.values(), strict=False):
            key = _number(digest(seen)) if suspicion.tells(seen, _SAMPLES) else 0
            row.copy_(torch.tensor([len(seen) >= _SAMPLES, key]))
        enough, keys, where = True, [], []
        tables = comm.all_gather(table, "digests of the first samples")
        for rank, rows in zip(comm.there, tables, strict=True):
            for whole, key in rows[: len(contract.mine(rank))].tolist():
                enough = enough and bool(whole)
                keys.append(key or None)
                where.append(comm.ranks[rank])
        for one, other in suspicion.equal_pairs(keys)[:1]:
            said = f"workers {one} (rank {where[one]}) and {other} (rank {where[other]}) train on the same samples"
            self.diagnoses.report("same-data", said, self._run.clock + 1, self._remedy(given))
        return enough

    def _remedy(self, given: bool) -> str:
        """How workers come to samples of their own."""
        if given:
            return "give tutti.prepare the data set and loop over run.epoch, or shard your loader (DistributedSampler)"
        if self._run.feed.contract.identical:
            return "leave identical_batches out"
        if isinstance(self._run.feed.source, Stream):
            return "shard by rank inside the data set, or leave tutti.data.Sharded out"
        return "let __getitem__ depend on its index, and draw from the global generators, which are keyed by it"

    def _denominator(self, loss: LossFn | None, batch: Batch, micro: int = 2 * _FEW) -> None:
        """Give a loss the same few samples once and twice over, no more than a micro-batch has."""
        setting = self._run.setting
        # Other shapes would be compiled anew; of a model that is split the other ranks would be needed.
        split = setting.comms.model.size > 1 or bool(self._run.replica.sharded)
        if loss is None or setting.compile != "none" or split:
            return
        try:
            few = cut(batch, 0, min(_FEW, length(batch), max(micro // 2, 1)))
            with self._untouched():
                once = self._value(loss, few)
                twice = self._value(loss, map_tensors(few, lambda tensor: torch.cat([tensor, tensor])))
        except Exception:
            # It may need batches of one size, or gradients; the step itself will tell what is really wrong.
            return
        values = f"{length(few)} samples give {once:.4g}, the same twice over {twice:.4g}"
        if suspicion.is_sum(once, twice):
            said = f"the loss is a sum, or a sum with a count that does not grow with the samples: {values}"
            self.diagnoses.report("loss-denominator", said, self._run.clock + 1)
        elif suspicion.is_sum(twice, once):
            said = f"the loss is divided by the number of samples twice: {values}"
            self.diagnoses.report("loss-denominator", said, self._run.clock + 1)

    def _value(self, loss: LossFn, batch: Batch) -> float:
        """The mean over a batch, as training would count it."""
        cell = Cell(0, 0, batch, length(batch), 1.0, 0, True)
        total, count = self._run.replica.run([cell], loss, None).lanes[:2].tolist()
        return float(total / count)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Forwards in the block evaluate, and leave buffers and random draws as they were."""
        parts = self._run.replica.parts
        kept = [(slot, slot.get()) for slot in buffers(parts, persistent=False)]
        try:
            for slot, tensor in kept:
                slot.put(tensor.clone())
            with own_generators(), torch.no_grad(), mode(parts, training=False), self.aside():
                yield
        finally:
            for slot, tensor in kept:
                slot.put(tensor)

    def _update_batch(self) -> int:
        """Samples that one update is made of."""
        contract = self._run.feed.contract
        return contract.batch if self._run.exchange.gradient_over == "step" else contract.batch // contract.workers

    def _rate(self) -> None:
        """Compare the highest rate that is known with a rule of thumb."""
        batch = self._update_batch()
        for prepared, now in zip(self._rates, rates(self._run.exchange.optimizers), strict=False):
            peak = max(prepared.peak, now.peak)
            usual = suspicion.far_from_usual(now.kind, peak, batch, now.momentum)
            if usual is not None:
                said = (
                    f"the learning rate is {peak:g} for a batch of {batch}, where {usual:.2g} is usual for {now.kind}"
                )
                self.diagnoses.report("far-rate", said, self._run.clock + 1)

    def _schedules(self, optimizer: Optimizer, cells: int) -> Callable[[], None]:
        """Note where the optimizer's schedules are; what is returned looks how far they came."""
        found = [
            item
            for item in gc.get_objects()
            if issubclass(type(item), LRScheduler) and getattr(item, "optimizer", None) is optimizer
        ]
        before = [getattr(scheduler, "last_epoch", 0) for scheduler in found]

        def look() -> None:
            self.ended = None
            for scheduler, then in zip(found, before, strict=True):
                steps = getattr(scheduler, "last_epoch", 0) - then
                if steps > 1:
                    name = type(scheduler).__name__
                    said = f"{name} took {steps} steps in one global batch, which has {cells} micro-batches here"
                    self.diagnoses.report("fast-schedule", said, self._run.clock)

        return look

    def planned(self, steps: int) -> None:
        """The whole run is to be so many steps long."""
        contract, batch = self._run.feed.contract, self._update_batch()
        if contract.dataset is not None and suspicion.too_few_updates(steps, contract.dataset, batch, contract.workers):
            part = f"{batch / contract.dataset:.0%} of the data"
            self.diagnoses.report("few-updates", f"{steps} updates in the whole run, in batches of {batch}, {part}")

    # --- the model by itself ---------------------------------------------------------------------------------------

    def _statistics(self) -> None:
        """Watch the model where workers' statistics differ and a script could use one's by itself. Collective."""
        run = self._run
        slots = [slot for slot in buffers(run.replica.parts) if slot.key.startswith("running_")]
        own_script = self.diagnoses.tell is None and run.setting.comms.model.size == 1
        if not slots or not own_script or run.exchange.gradient_over != "step":
            return
        merged = run.exchange.merged()
        if self._speaks and any(not torch.allclose(slot.get(), merged[slot.name]) for slot in slots):
            _WATCHED[run.model] = [
                run.model.register_forward_pre_hook(Hook(self._evaluates)),
                run.model.register_state_dict_post_hook(Hook(self._saves)),
            ]

    def _evaluates(self, model: nn.Module) -> None:
        # Within a batch a worker has its turn, and uses what is its own.
        if not (model.training or self._aside or self._run.within_batch):
            _WATCHED[model][0].remove()
            self.diagnoses.report("one-rank-statistics", "the model is evaluated by itself", self._run.clock)

    def _saves(self, model: nn.Module) -> None:
        self.diagnoses.report("one-rank-statistics", "the model's state_dict() is read", self._run.clock)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forwards in the block are not the caller's."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    # --- evaluation ------------------------------------------------------------------------------------------------

    def held_out(self, source: Source, loss: LossFn | None) -> None:
        """The first evaluation begins; ``loss``: one of its own. Collective."""
        if self._evaluated:
            return
        self._evaluated = True
        self._same_source(source)
        if not self._speaks:
            return
        if repeated := _repeated(source):
            said = f"the last {repeated} of {len(source)} held-out samples are the first {repeated} again"
            self.diagnoses.report("padded-evaluation", said, self._run.clock)
        if loss is not None and self._run.setting.workers > 1:
            self._denominator(loss, self._run.feed.place(source.fetch(np.arange(min(_FEW, len(source))), None)))

    def _same_source(self, source: Source) -> None:
        """Every rank must have been given the same samples. Collective."""
        comm = self._run.setting.comms.world
        if comm.size == 1:
            return
        ends = (0, len(source) - 1)
        seen = [_samples(source, end, end + 1) for end in ends]
        # A sample that is another one each time says nothing.
        key = _number(digest(seen)) if seen == [_samples(source, end, end + 1) for end in ends] else 0
        keys = [int(row) for row in comm.all_gather(torch.tensor([key]), "digests of held-out samples")]
        other = next((rank for rank, key in zip(comm.there, keys, strict=True) if key != keys[0]), None)
        if all(keys) and other is not None:
            said = f"rank {other} was given other held-out samples than rank 0, a part of them for each"
            self.diagnoses.report("padded-evaluation", said, self._run.clock)


class Hook:
    """A hook of the model that no copy of the model has, in memory or in a file."""

    def __init__(self, look: Callable[[nn.Module], None]) -> None:
        self._look = look

    def __call__(self, model: nn.Module, *rest: Any) -> None:
        self._look(model)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(model: nn.Module) -> None:
    """What a hook does in a copy."""


def rates(optimizers: Sequence[Optimizer]) -> list[Rate]:
    """Of each group of the first optimizer; of the others they are the same."""
    return [
        Rate(
            getattr(type(optimizer), "_ungated", type(optimizer)).__name__.lower(),
            max(float(group.get(name, 0.0)) for name in ("lr", "initial_lr", "max_lr")),
            float(group.get("momentum", 0.0)),
        )
        for optimizer in optimizers[:1]
        for group in optimizer.param_groups
    ]


def _number(text: str) -> int:
    """A digest as a positive number of 63 bits; 0 is kept for none."""
    return (int(text, 16) >> 1) or 1


def _digests(batch: Batch, count: int) -> list[str]:
    """The first samples of a batch in a few characters each."""
    return [digest(cut(batch, place, place + 1)) for place in range(count)]


def _samples(source: Source, first: int, end: int) -> list[str]:
    """Held-out samples in a few characters each."""
    return _digests(source.fetch(np.arange(first, end), None), end - first)


def _repeated(source: Source) -> int:
    """How many samples at the end are those of the beginning again, as a distributed sampler's padding is."""
    total = len(source)
    count = min(_BEGINNING[-1], total // 2)
    if count not in _BEGINNING:
        return 0
    first, last = _samples(source, 0, count), _samples(source, total - 1, total)
    if len(set(first)) < count or last[0] not in first:
        return 0
    repeated = first.index(last[0]) + 1
    return repeated if _samples(source, total - repeated, total) == first[:repeated] else 0
