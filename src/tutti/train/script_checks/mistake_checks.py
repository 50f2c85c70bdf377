"""Check a run for common mistakes in its first steps and at its first evaluation, and report them as warnings.

Three checks take a small collective each: logical workers with the same samples, workers with batch-norm statistics of
their own, and ranks with different held-out samples. All others need rank 0 alone. No check changes a weight, a buffer
or an RNG stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tutti.config.variables import is_off
from tutti.data.batches import CollatedBatch, length, map_tensors, slice_batch
from tutti.data.digest import digest
from tutti.data.item_source import CollatedSource
from tutti.data.source import Source
from tutti.data.stream import Stream
from tutti.errors import UsageError, counted
from tutti.metrics import suspicion
from tutti.metrics.diagnoses import Diagnoses
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.owned_hooks import OwnedHook
from tutti.nn.swap import buffers, training_mode
from tutti.train.script_checks.cancelling_numbers import lines_of_cancelling
from tutti.train.script_checks.inner_gradients import check_inner_gradients
from tutti.train.script_checks.iterator_watch import iterators_unread
from tutti.train.script_checks.loss_calls import LossCalls
from tutti.train.script_checks.metric_objects import metric_objects
from tutti.train.script_checks.python_state import numbers, python_state, trial_call
from tutti.train.script_checks.sample_mixing import MixingProbe, mixed_data
from tutti.train.script_checks.sample_places import check_places
from tutti.types.micro_batch import Batch, LossFn, MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run

Work: TypeAlias = Sequence[tuple[int, Sequence[MicroBatch]]]
"""Each logical worker of this rank with its micro-batches of one step."""

_STEPS = 8
"""Largest number of steps in which samples are collected, for workers with small shares."""
_SAMPLES = 8
_FEW = 4
_BEGINNING = range(16, 33)
"""Numbers of samples at the start of a held-out set to compare with its end; with fewer, equality may be chance."""

# Hooks by model; a second run of the same model removes those of the first.
_WATCHED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


class Rate(NamedTuple):
    """Learning rate and momentum of a parameter group.

    Attributes:
        kind: name of the optimizer's class, in lower case.
        peak: largest of the group's ``lr``, ``initial_lr`` and ``max_lr``.
        momentum: momentum, 0 without.
    """

    kind: str
    peak: float
    momentum: float


class _Probes(NamedTuple):
    """Probes of the loss of one micro-batch; ``mixing`` on rank 0 alone."""

    mixing: MixingProbe | None
    calls: LossCalls

    def close(self) -> None:
        for probe in (self.mixing, self.calls):
            if probe is not None:
                probe.close()


class Checks:
    """Checks a run for common mistakes in its first steps and at its first evaluation; reports them as warnings.

    Args:
        run: the run.
        warn: receives a finding's text; None for Python's ``warnings``, as in a script of the user's own.

    Attributes:
        diagnoses: the findings.
        cancelling: lines of the script whose Python numbers cancel in the loss of the first step.
        looking: whether ``look`` must be called in the next step. With several logical workers that do not step
            together (asynchronous parameter servers) only in the first step.
    """

    def __init__(self, run: Run, warn: Callable[[str], None] | None) -> None:
        self._run, self._steps, self._warn = run, 0, warn
        self._reports = run.context.mesh.rank == 0
        self.diagnoses = Diagnoses(run.context.mesh.rank, warn)
        self._enabled = self.looking = not is_off("DIAGNOSTICS", os.environ)
        self._first: dict[int, list[str]] = {worker: [] for worker in run.context.mine}
        self._rates = group_rates(run.gradient_sync.optimizers)
        self._evaluated = self._aside = self._mixing_due = self._in_parts = False
        self.cancelling = frozenset[str]()
        self._probes: _Probes | None = None
        self._numbers: dict[str, float] = {}
        for hook in _WATCHED.pop(run.model, ()):
            hook.remove()

    # --- the first steps -------------------------------------------------------------------------------------------

    def look(self, batch: Batch, work: Work, loss: LossFn | None, given: bool) -> None:
        """Check batches, loss function and learning rate of the first steps for classic mistakes.

        Mistakes are logical workers that train on the same samples, a loss that is a sum or mixes the samples of a
        batch, embeddings with ``scale_grad_by_freq``, an unusual learning rate, and Python counters of the model that
        grow with each micro-batch. Rank 0 reports findings as warnings. To be called before a step while
        ``looking`` is True. Nothing is raised. On rank 0 the first call may compute the loss of a few samples in eval
        mode.

        With a single logical data-parallel worker (fixed share of the global batch) the call is not collective. With
        several it is, over the data ranks, in these calls:

        - The first, second, fourth and eighth: an all-gather of digests of samples, until each worker has seen eight
          samples. None for batches that the script's own ``collate`` has made, whose samples are not compared.
        - The second, if the model of a script has batch-norm statistics: all-gathers that merge the workers' buffers
          (under local SGD parameters, too).

        Args:
            batch: this rank's batch of the step that begins.
            work: pairs (index of a logical worker, its micro-batches), one for each logical worker of this rank.
            loss: the loss function; None in a custom loop.
            given: whether the script made the batch by itself, and not the run.
        """
        self._steps += 1
        several = self._run.context.workers > 1
        micro_batches = [micro_batch for _, micro_batches in work for micro_batch in micro_batches]
        if self._steps == 1:
            self._mixing_due = several or len(micro_batches) > 1
            self._in_parts = not all(micro_batch.whole for micro_batch in micro_batches)
            # The first dimension of what a script's own function makes may be another than that of the samples.
            self._in_parts &= not isinstance(batch, CollatedBatch)
        if self._steps == 1 and self._reports:
            if self._mixing_due:
                self._check_denominator(
                    loss, batch, max((micro_batch.samples for micro_batch in micro_batches), default=2)
                )
                self._check_frequencies()
            if several:
                self._check_rates()
        if several and self._steps == 2:
            self._check_statistics()
        if self._reports:
            self._check_counters(len(micro_batches))
        if isinstance(batch, CollatedBatch):
            # Batches of the script's own function may hold anything, and cannot be divided into samples.
            self._first = {}
        if self._first:
            self._collect(work)
            # In steps 1, 2, 4 and 8: few collectives, for large and small shares.
            if several and self._steps & (self._steps - 1) == 0 and self._same_data(given):
                self._first = {}
        more = self._steps < 2 or (bool(self._first) and self._steps < _STEPS)
        self.looking = (several and self._run.context.synchronous and more) or (not several and bool(self._numbers))

    def report_late_draws(self) -> None:
        """Warn once that the code for a step has begun to draw from Python's or NumPy's unseeded global generator.

        tutti seeds both for each micro-batch in the first steps and where epochs begin, and later for micro-batches
        whose code has drawn before. The warning's name is ``unkeyed-draws``.
        """
        if self._enabled:
            seen = "the code for a step draws from the global generator of NumPy or Python, and has not done so before"
            self.diagnoses.report("unkeyed-draws", seen, self._run.global_step)

    def repeated(self, epoch: int) -> None:
        """Warn that the script trains on an epoch a second time, a common mistake. Not collective.

        The warning is reported once in a run, on rank 0.

        Args:
            epoch: the epoch, from 0.
        """
        if self._enabled:
            self.diagnoses.report("repeated-epoch", f"epoch {epoch} is trained on again", self._run.global_step)

    def _check_counters(self, micro_batches: int) -> None:
        """Report a number that the model keeps in Python, and changes with every micro-batch. Called in two steps."""
        before, self._numbers = self._numbers, {}
        if self._steps == 1 and micro_batches > 1:
            self._numbers = numbers(self._run.replica.parts)
        now = numbers(self._run.replica.parts) if before else {}
        for name, value in before.items():
            if isinstance(value, int) and now.get(name, value) - value >= micro_batches > 1:
                finding = f"the model's {name} grew by {now[name] - value} in a step of {micro_batches} micro-batches"
                self.diagnoses.report("counted-forwards", finding, self._run.global_step)
                return

    def _collect(self, work: Work) -> None:
        for worker, micro_batches in work:
            seen = self._first[worker]
            for micro_batch in micro_batches:
                seen += _digests(micro_batch.batch, min(_SAMPLES - len(seen), micro_batch.samples))

    def _same_data(self, given: bool) -> bool:
        """Warn if two workers have the same first samples. Collective: an all-gather.

        Returns whether each worker has seen enough samples for the comparison.
        """
        contract, comm = self._run.feed.contract, self._run.context.comms.replica
        table = torch.zeros(len(contract.mine(0)), 2, dtype=torch.int64)
        for row, seen in zip(table, self._first.values(), strict=False):
            key = _number(digest(seen)) if suspicion.rules_out_coincidence(seen, _SAMPLES) else 0
            row.copy_(torch.tensor([len(seen) >= _SAMPLES, key]))
        enough, keys, where = True, [], []
        tables = comm.all_gather(table, "digests of the first samples")
        for rank, rows in zip(comm.alive_ranks, tables, strict=True):
            for whole, key in rows[: len(contract.mine(rank))].tolist():
                enough = enough and bool(whole)
                keys.append(key or None)
                where.append(comm.ranks[rank])
        for one, other in suspicion.equal_pairs(keys)[:1]:
            finding = f"workers {one} (rank {where[one]}) and {other} (rank {where[other]}) train on the same samples"
            self.diagnoses.report("same-data", finding, self._run.global_step + 1, self._remedy(given))
        return enough

    def _remedy(self, given: bool) -> str:
        """Return how to give each worker samples of its own."""
        if given:
            return "give tutti.prepare the data set and loop over run.epoch, or shard your loader (DistributedSampler)"
        if self._run.feed.contract.identical:
            return "leave identical_batches out"
        if isinstance(self._run.feed.source, Stream):
            return "shard by rank inside the data set, or leave tutti.data.Sharded out"
        return "let __getitem__ depend on its index, and draw from the global generators, which are keyed by it"

    def _check_denominator(self, loss: LossFn | None, batch: Batch, micro: int = 2 * _FEW) -> None:
        """Compare the loss of a few samples with that of the same samples twice, and with those of their two halves.

        The first shows a sum without a mean, and the second a loss that mixes samples, such as in-batch negatives.

        Args:
            loss: the loss function; None for no check.
            batch: a batch of which to take the samples.
            micro: samples of a micro-batch, the most to evaluate.
        """
        setting = self._run.context
        # Another shape would recompile; the forward of a split model would need the other ranks.
        split = setting.comms.model.size > 1 or bool(self._run.replica.sharded)
        # A metric object that the loss function updates would count these samples besides.
        if loss is None or setting.compile is not None or split or metric_objects(loss):
            return
        try:
            few = slice_batch(batch, 0, min(_FEW, length(batch), max(micro // 2, 1)))
            with self._untouched(), python_state(self._run.replica.parts, loss), iterators_unread(loss):
                once = self._value(loss, few)
                twice = self._value(loss, map_tensors(few, lambda tensor: torch.cat([tensor, tensor])))
                summed = suspicion.is_sum(once, twice) or suspicion.is_sum(twice, once)
                halves = None if summed else self._halves(loss, slice_batch(batch, 0, min(_FEW, length(batch), micro)))
        except Exception:
            # The model may need a fixed batch size, or gradients; the step itself will raise real errors.
            return
        values = f"{length(few)} samples give {once:.4g}, the same twice over {twice:.4g}"
        if suspicion.is_sum(once, twice):
            finding = f"the loss is a sum, or a sum with a count that does not grow with the samples: {values}"
            self.diagnoses.report("loss-denominator", finding, self._run.global_step + 1)
        elif suspicion.is_sum(twice, once):
            finding = f"the loss is divided by the number of samples twice: {values}"
            self.diagnoses.report("loss-denominator", finding, self._run.global_step + 1)
        elif halves is not None and suspicion.mixes_samples(*halves):
            finding = (
                f"the loss mixes samples: {halves[0]:.4g} for a few at once, {halves[1]:.4g} as mean of their halves"
            )
            self.diagnoses.report("mixed-samples", finding, self._run.global_step + 1)

    def _halves(self, loss: LossFn, few: Batch) -> tuple[float, float] | None:
        """Return the mean loss of a few samples, computed at once and in two halves; None if there is no difference."""
        half = length(few) // 2
        parts = (few, slice_batch(few, 0, half), slice_batch(few, half, length(few))) if half else ()
        values = _whole_and_parts([self._sums(loss, part) for part in parts])
        if values is None or not suspicion.mixes_samples(*values):
            return None
        # A mean over targets is told from a mean over samples by its graph. The step refuses some other losses.
        sums = list[tuple[float, float]]()
        with suppress(UsageError), torch.enable_grad():
            sums += [self._sums(loss, part, key) for key, part in enumerate((few, *parts))]
        again = sums[:1] == sums[1:2]
        return _whole_and_parts(sums[1:]) if again else None  # It may draw, or count its calls.

    def _value(self, loss: LossFn, batch: Batch) -> float:
        """Return the mean loss over a batch, by the loss function's own count."""
        total, count = self._sums(loss, batch)
        return total / count

    def _sums(self, loss: LossFn, batch: Batch, key: int = 0) -> tuple[float, float]:
        """Return the sum of the loss over a batch, and the loss function's own count; ``key``: of its RNG streams."""
        # A copy: the forward may write its input in place.
        copied = map_tensors(batch, torch.clone)
        micro_batch = MicroBatch(0, 0, copied, length(batch), 1.0, key, True)
        total, count = self._run.replica.run([micro_batch], loss, None).sums[:2].tolist()
        return float(total), float(count)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Within the block forwards run in eval mode, and do not change buffers or RNG streams.

        A forward that writes a parameter, as one that averages a teacher, ends with an error before the write, and so
        does a collective, which rank 0 would call alone.
        """
        parts = self._run.replica.parts
        with trial_call(parts), training_mode(parts, training=False), self.aside():
            yield

    def _update_batch(self) -> int:
        """Return the number of samples of one update: the global batch, or a worker's share of it."""
        contract = self._run.feed.contract
        return (
            contract.batch
            if self._run.gradient_sync.loss_normalisation == "step"
            else contract.batch // contract.workers
        )

    def _make_probes(self, model: nn.Module, micro_batch: MicroBatch) -> _Probes | None:
        """Return probes of the loss of the first step; None where none is due, or code is compiled."""
        run, samples = self._run, micro_batch.samples
        split = run.context.comms.model.size > 1
        if split or samples < 1 or has_compiled_code([model], run.context):
            return None
        # The hooks of the second one record the views of the first.
        mixing = MixingProbe(model, samples) if self._reports and samples > 1 else None
        return _Probes(mixing, LossCalls(model, micro_batch, self._update_batch()))

    def begin_body(self, micro_batch: MicroBatch) -> None:
        """Begin to find out, for one micro-batch of a custom training loop, whether its loss mixes samples.

        A loss mixes samples if the gradient of one sample depends on the model's outputs for others, or on their
        targets. Only the rank's first micro-batch is examined, which also must not take samples by their places;
        ``end_body`` reports the finding. Does nothing for a micro-batch that is the whole batch, and for a compiled
        model or one that is split over ranks. Not collective.

        Args:
            micro_batch: the micro-batch on which the body of the script's loop is about to run.
        """
        due, self._mixing_due = self._mixing_due, False
        if due and not micro_batch.whole:
            self._probes = self._make_probes(self._run.model, micro_batch)

    def end_body(self, loss: Any = None) -> None:
        """Warn on rank 0 if the loss of the micro-batch that was given to ``begin_body`` mixes samples. Not collective.

        A loss mixes samples if the gradient of one sample depends on the model's outputs for others, or on their
        targets. Does nothing for micro-batches that are not examined.

        Args:
            loss: the loss that the script passes to ``run.backward``; None, at the end of the body, only ends the
                examination.

        Raises:
            UsageError: the loss takes samples by their places in the micro-batch, or depends on gradients of the
                micro-batch's own.
        """
        probes = self._probes
        if probes is not None and loss is not None:
            self._examine(probes, loss)
        if probes is not None and loss is None:
            probes.close()
            self._probes = None

    def probed(self, loss: LossFn) -> LossFn:
        """Return the loss function for a step, in the first step wrapped to check whether the loss mixes samples.

        A loss mixes samples if the gradient of one sample depends on the model's outputs for others, or on their
        targets. The wrapped function examines its first call and reports a finding as a warning; for a loss that takes
        samples by their places in a micro-batch it raises UsageError. Not collective.

        Args:
            loss: the loss function of ``run.step``.

        Returns:
            The wrapped function, with the arguments and the result of ``loss``; ``loss`` itself after the first step,
            where the whole global batch is one micro-batch, and under pipeline or tensor parallelism.
        """
        due, self._mixing_due = self._mixing_due, False
        # Stages know a loss function as an object.
        return self._with_probe(loss) if due and self._run.context.comms.model.size == 1 else loss

    def _with_probe(self, loss: LossFn) -> LossFn:
        """Return the loss function with a probe of its first call."""
        left = [True]

        def look(model: Any, batch: Batch) -> Any:
            probes = None
            # A batch of the script's own kind may have no length.
            with suppress(Exception):
                micro_batch = MicroBatch(0, 0, batch, length(batch), 1.0, 0, True)
                probes = self._make_probes(model, micro_batch) if left and isinstance(model, nn.Module) else None
            left.clear()
            try:
                result = loss(model, batch)
                if probes is not None:
                    self._examine(probes, result)
            finally:
                if probes is not None:
                    probes.close()
            return result

        return look

    def _examine(self, probes: _Probes, loss: Any) -> None:
        """Report a loss that mixes samples, and refuse one that takes them by their places in the micro-batch."""
        try:
            # What the probes compute anew needs no second look.
            with self._run.lifecycle.values.updating():
                probes.calls.finish()
                if self._in_parts:
                    check_inner_gradients(probes.calls, loss)
                    check_places(probes.calls, loss)
                    self.cancelling |= lines_of_cancelling(probes.calls, loss)
                by_targets = mixed_data(probes.calls, loss) if probes.mixing is not None else ""
                mixes = (probes.mixing is not None and probes.mixing.mixes(loss)) or by_targets
        finally:
            probes.close()
        if mixes:
            what = by_targets or "model's outputs for"
            finding = f"the loss mixes samples: the gradient of one depends on the {what} others"
            self.diagnoses.report("mixed-samples", finding, self._run.global_step + 1)

    def _check_frequencies(self) -> None:
        """Report embeddings whose gradient is divided by how often a row occurs in the micro-batch."""
        for part in self._run.replica.parts:
            for name, module in part.named_modules():
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
                    finding = f"{name or 'the model'} has scale_grad_by_freq, which counts rows of a micro-batch"
                    self.diagnoses.report("mixed-samples", finding, self._run.global_step + 1)

    def _check_rates(self) -> None:
        """Compare each group's largest known learning rate with a rule of thumb."""
        batch = self._update_batch()
        for prepared, now in zip(self._rates, group_rates(self._run.gradient_sync.optimizers), strict=False):
            peak = max(prepared.peak, now.peak)
            usual = suspicion.far_from_usual(now.kind, peak, batch, now.momentum)
            if usual is not None:
                finding = (
                    f"the learning rate is {peak:g} for a batch of {batch}, where {usual:.2g} is usual for {now.kind}"
                )
                self.diagnoses.report("far-rate", finding, self._run.global_step + 1)

    def planned(self, steps: int) -> None:
        """Warn if a run makes too few updates for its data because its batch is very large, a common mistake.

        The warning is reported on rank 0, if all of this holds: there are fewer than 200 updates; a batch has at least
        a twentieth of an epoch's samples; and batches of the size of one logical worker's share would give 100 updates
        or more. A logical worker is a fixed share of the global batch. Not collective.

        Args:
            steps: steps of the whole run.
        """
        if not self._enabled:
            return
        contract, batch = self._run.feed.contract, self._update_batch()
        if contract.dataset is not None and suspicion.too_few_updates(steps, contract.dataset, batch, contract.workers):
            part = f"{batch / contract.dataset:.0%} of the data"
            self.diagnoses.report(
                "few-updates", f"{counted(steps, 'update')} in the whole run, in batches of {batch}, {part}"
            )

    # --- the script's own use of the model -------------------------------------------------------------------------

    def _check_statistics(self) -> None:
        """Hook the model if workers' batch-norm statistics differ, to report a script that uses one worker's alone.

        Collective: merges buffers over workers.
        """
        run = self._run
        slots = [slot for slot in buffers(run.replica.parts) if slot.key.startswith("running_")]
        own_script = self._warn is None and run.context.comms.model.size == 1
        if not slots or not own_script or run.gradient_sync.loss_normalisation != "step":
            return
        merged = run.gradient_sync.merged()
        if self._reports and any(not torch.allclose(slot.get(), merged[slot.name]) for slot in slots):
            _WATCHED[run.model] = [
                run.model.register_forward_pre_hook(OwnedHook(self._evaluates)),
                run.model.register_state_dict_post_hook(OwnedHook(self._saves)),
            ]

    def _evaluates(self, model: nn.Module, *_: Any) -> None:
        # Within a global batch a worker uses its own statistics, as it should.
        if not (model.training or self._aside or self._run.within_batch):
            _WATCHED[model][0].remove()
            self.diagnoses.report("one-rank-statistics", "the model is evaluated by itself", self._run.global_step)

    def _saves(self, *_: Any) -> None:
        self.diagnoses.report("one-rank-statistics", "the model's state_dict() is read", self._run.global_step)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Return a context manager for tutti's own evaluations, within which a check of the script's forwards is off.

        The check warns if a script itself runs the model in eval mode while logical workers (fixed shares of the global
        batch) have different batch-norm statistics, of which the script would use one worker's alone.
        """
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    # --- evaluation ------------------------------------------------------------------------------------------------

    def held_out(self, source: Source, loss: LossFn | None) -> None:
        """Check the samples of the first evaluation for classic mistakes, and report findings as warnings on rank 0.

        Mistakes are: ranks were given different held-out samples, of which ``run.evaluate`` gives each rank a part; the
        last samples repeat the first ones, as ``DistributedSampler`` pads; and, in a run of several logical workers
        (fixed shares of the global batch), a loss that is a sum and not a mean. Nothing is raised. Collective over all
        ranks in the first call: an all-gather of a digest. Later calls do nothing.

        Args:
            source: all held-out samples; must be the same on every rank.
            loss: a loss function of this evaluation alone, which is tried on a few samples to tell a sum from a mean;
                None for the loss function of training, which has been checked in training.
        """
        if self._evaluated or not self._enabled:
            return
        self._evaluated = True
        self._check_same_source(source)
        if not self._reports:
            return
        if repeated := _repeated(source):
            finding = f"the last {repeated} of {len(source)} held-out samples are the first {repeated} again"
            self.diagnoses.report("padded-evaluation", finding, self._run.global_step)
        if loss is not None and self._run.context.workers > 1 and not isinstance(source, CollatedSource):
            self._check_denominator(loss, self._run.feed.place(source.fetch(np.arange(min(_FEW, len(source))), None)))

    def _check_same_source(self, source: Source) -> None:
        """Report ranks with other held-out samples than rank 0, by the first and the last one. Collective."""
        comm = self._run.context.comms.world
        if comm.size == 1:
            return
        ends = (0, len(source) - 1)
        seen = [_samples(source, end, end + 1) for end in ends]
        # Samples that differ between two reads (augmentation) cannot be compared.
        key = _number(digest(seen)) if seen == [_samples(source, end, end + 1) for end in ends] else 0
        keys = [int(row) for row in comm.all_gather(torch.tensor([key]), "digests of held-out samples")]
        other = next((rank for rank, key in zip(comm.alive_ranks, keys, strict=True) if key != keys[0]), None)
        if all(keys) and other is not None:
            finding = f"rank {other} was given other held-out samples than rank 0, a part of them for each"
            self.diagnoses.report("padded-evaluation", finding, self._run.global_step)


def group_rates(optimizers: Sequence[Optimizer]) -> list[Rate]:
    """Return optimizer class, learning rate and momentum of each parameter group of the first optimizer.

    Args:
        optimizers: the optimizers of this rank; with local SGD one for each logical worker (share of the global batch),
            all with the same rates.

    Returns:
        A ``Rate`` for each parameter group: ``kind`` (class name in lower case), ``peak`` (the largest of the group's
        ``lr``, ``initial_lr`` and ``max_lr``) and ``momentum``, 0 where the group has none. Empty without optimizers.
    """
    return [
        Rate(
            type(optimizer).__name__.lower(),
            max(float(group.get(name, 0.0)) for name in ("lr", "initial_lr", "max_lr")),
            float(group.get("momentum", 0.0)),
        )
        for optimizer in optimizers[:1]
        for group in optimizer.param_groups
    ]


def _whole_and_parts(sums: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the mean of the first (sum, count) pair, and the mean of all later pairs together.

    None if there are no later pairs.
    """
    if len(sums) < 2:
        return None
    (total, count), *parts = sums
    return total / count, sum(part for part, _ in parts) / sum(counted for _, counted in parts)


def _number(text: str) -> int:
    """Convert a hexadecimal digest to a positive number of 63 bits; 0 stands for no digest."""
    return (int(text, 16) >> 1) or 1


def _digests(batch: Batch, count: int) -> list[str]:
    """Return digests of the first ``count`` samples of a batch."""
    return [digest(slice_batch(batch, place, place + 1)) for place in range(count)]


def _samples(source: Source, first: int, end: int) -> list[str]:
    """Return digests of held-out samples ``first`` to ``end - 1``."""
    if isinstance(source, CollatedSource):
        return [digest(source.fetch(np.arange(number, number + 1), None)) for number in range(first, end)]
    return _digests(source.fetch(np.arange(first, end), None), end - first)


def _repeated(source: Source) -> int:
    """Return how many samples at the end repeat those at the start, like the padding of DistributedSampler."""
    total = len(source)
    count = min(_BEGINNING[-1], total // 2)
    if count not in _BEGINNING:
        return 0
    first, last = _samples(source, 0, count), _samples(source, total - 1, total)
    if len(set(first)) < count or last[0] not in first:
        return 0
    repeated = first.index(last[0]) + 1
    return repeated if _samples(source, total - repeated, total) == first[:repeated] else 0
