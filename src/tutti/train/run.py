"""A prepared training run, as ``tutti.prepare`` returns it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.checkpoint import run_state
from tutti.checkpoint.fingerprint import weights_sha256
from tutti.checkpoint.gather import GatheredModel, GatheredParts, GatheredRows
from tutti.checkpoint.write import step_name
from tutti.config.spec import Duration
from tutti.data.adapt import adapt
from tutti.data.feed import evaluation, evaluation_blocks
from tutti.data.reader import Position
from tutti.data.source import Source
from tutti.errors import UsageError
from tutti.launcher import heartbeat
from tutti.launcher.heartbeat import Phase
from tutti.metrics.profile import profiled
from tutti.metrics.trace import traced
from tutti.train.preemption import StopReason, stop_on_signals
from tutti.train.replicas import check_replicas
from tutti.train.steps import Steps
from tutti.types import Batch, LossFn, LossSums, StepStats


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out samples, each counted once.

    Attributes:
        loss: mean loss.
        metrics: mean of each metric by name.
        samples: number of held-out samples.
        averaged: whether the average of the weights was evaluated.
    """

    loss: float
    metrics: dict[str, float]
    samples: int
    averaged: bool = False

    @property
    def values(self) -> dict[str, float]:
        """Loss and metrics by name: ``{"loss": …, "accuracy": …}``."""
        return {"loss": self.loss, **self.metrics}


class Run(Steps):
    """One model in training, in the same way on every rank. For its attributes and steps see ``Steps``."""

    # --- custom training loops: see ``CustomLoop`` -----------------------------------------------------------------

    def microbatches(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """Iterate over the micro-batches of this rank's logical workers in an epoch, for a custom training loop.

        The loop's body runs once for each micro-batch (once a global batch with one worker on one device), and
        ``optimizer.step()`` acts in a rank's last body of each global batch. If this rank has no sample in the last
        global batch, the body runs once on a dummy micro-batch of weight 0, so that collectives stay aligned.

        Args:
            number: the epoch, from 0.
            start: first global batch, as in ``epoch``.

        Raises:
            UsageError: the strategy has no custom training loops; the previous loop was left in the middle of a global
                batch; or the bodies of one global batch differ, or do what is undefined with several micro-batches a
                rank.
        """
        return self.custom.microbatches(number, start)

    def cells(self, number: int, start: int | None = None) -> Iterator[Batch]:
        """``microbatches`` under its former name."""
        warnings.warn("run.cells is now run.microbatches", DeprecationWarning, stacklevel=2)
        return self.microbatches(number, start)

    @property
    def agreed(self) -> StepStats | None:
        """``stats`` under its former name."""
        warnings.warn("run.agreed is now run.stats", DeprecationWarning, stacklevel=2)
        return self.stats

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Compute gradients, in place of ``loss.backward()``, and reduce them in a rank's last micro-batch.

        ``.grad`` is then the gradient of the global batch, the same on every rank. Several calls before
        ``optimizer.step()`` accumulate gradients, as in PyTorch. Collective in the last micro-batch: an all-reduce of
        the gradients, or the strategy's gradient synchronisation in its place.

        Args:
            loss: mean over the micro-batch's samples, ``(sum, count)``, or a 1-d tensor of one loss a sample in place
                of mean or sum.
            retain_graph: keep the graph for another backward, as in PyTorch.

        Raises:
            UsageError: outside of ``run.microbatches()``, or the gradient cannot be that of the global batch.
        """
        self.custom.backward(loss, retain_graph)

    def reduce_gradients(self) -> None:
        """Reduce gradients that the script has assigned to ``.grad`` over the global batch.

        For gradients made without a backward into ``.grad``: ``torch.autograd.grad``, ``torch.func``, or by formula.
        Call it once in the loop's body after the assignments. Each ``.grad`` must be a mean over the samples of the
        body's batch; in a rank's last body it is complete afterwards, and may be clipped or edited. Collective in a
        rank's last body: call it on every rank.

        Raises:
            UsageError: outside of ``run.microbatches()``, or the strategy keeps gradients where a script cannot assign
                them (``tensor``, stages 2 and 3 of ``sharded``).
        """
        self.custom.reduce_gradients()

    @property
    def stepped(self) -> bool:
        """Whether the last ``optimizer.step()`` of a custom loop was in a rank's last body and acted."""
        return self.custom.stepped

    def gated_step(self) -> bool:
        """Carry out ``optimizer.step()`` of a custom loop whose optimizer was given as options; return if it acted."""
        return self.custom.step(None)

    # ---------------------------------------------------------------------------------------------------------------

    def stopping(self) -> AbstractContextManager[StopReason]:
        """Within the block SIGTERM, SIGUSR1, SIGUSR2 and the first Ctrl-C call ``ask_to_stop``; a second ends at once.

        ``with run.stopping() as reason`` yields a ``StopReason``, whose ``exit_code`` is 75, or 130 after Ctrl-C.
        """
        return stop_on_signals(self)

    def epochs(self, number: int) -> range:
        """Return the remaining epochs of 0 … number-1: all, or after ``restore`` from the checkpoint's epoch on."""
        if self.feed.contract.dataset is not None:
            self.checks.planned(self.feed.epochs.steps(Duration(number, "ep")))
        return range(self.at.epoch if self.within is None else self.within, number)

    # --- evaluation, profiling, state ------------------------------------------------------------------------------

    def evaluate(
        self, source: Any, batch: int = 512, loss: LossFn | None = None, averaged: bool | None = None
    ) -> Evaluation:
        """Return loss and metrics over all samples of ``source``, each counted once, of the workers' merged model.

        Collective: every rank evaluates its part of the samples.

        Args:
            source: held-out samples, the same on every rank.
            batch: largest number of samples in one forward.
            loss: the loss function; default: that of ``tutti.prepare``.
            averaged: whether to evaluate the average of the weights; default: if the run keeps one.

        Raises:
            UsageError: no loss function, or ``averaged`` without an average.
            MismatchError: ranks make different calls, or have taken different numbers of steps.
        """
        averaged = self.average is not None if averaged is None else averaged
        chosen = loss or self._loss
        if chosen is None:
            raise UsageError("run.evaluate needs a loss function", remedy="give one here or to tutti.prepare")
        source = adapt(source)
        self.together(f"evaluation of {len(source)} samples" + " on the average" * averaged)
        with heartbeat.training.during(Phase.EVALUATE):
            self.checks.held_out(source, loss)
        comm = self.context.comms.replica
        with (
            self.checks.aside(),
            heartbeat.training.during(Phase.EVALUATE),
            self.replica.evaluating(self._merged(averaged, as_trained=True)),
        ):
            there: Sequence[int] | None = None
            # If a rank is killed during the evaluation, its samples are missing: evaluate again on the ranks alive.
            while there != comm.alive_ranks:
                there = comm.alive_ranks
                names, table = self._totals_of(source, batch, chosen)
        value, count, *sums = table.sum(dim=0).tolist()
        metrics = {n: s / count for n, s in zip(names, sums, strict=True)}
        return Evaluation(value / count, metrics, len(source), averaged)

    def _totals_of(self, source: Source, batch: int, loss: LossFn) -> tuple[Sequence[str], Tensor]:
        """Evaluate blocks of samples, divided over the data ranks. Collective: a broadcast and an all-reduce.

        Returns:
            Names of the metrics, and a float64 table with ``[loss_sum, count, *metric_sums]`` for each block.
        """
        comms = self.context.comms
        there = comms.replica.alive_ranks
        rank, ranks = there.index(comms.replica.rank), len(there)
        blocks = evaluation(
            *(source, ranks, rank, batch, self.feed.place, self.feed.prefetch), even=bool(self.replica.sharded)
        )
        parts: dict[int, LossSums] = {}
        for number, micro_batch in blocks:
            heartbeat.training.beat()
            part = self.replica.run([micro_batch], loss, None)
            if micro_batch.samples:
                parts[number] = part
        names = comms.world.broadcast_json(parts[0].names if rank == 0 else (), 0, "names of the metrics")
        table = torch.zeros(len(evaluation_blocks(len(source), batch)), 2 + len(names), dtype=torch.float64)
        for number, part in parts.items():
            table[number] = part.sums.double().cpu()
        comms.replica.all_reduce(table, "totals of the evaluation")
        return names, table

    @contextmanager
    def profile(self, folder: str | Path) -> Iterator[None]:
        """Profile the steps within the block on every rank: ``rank{N}.json`` for ui.perfetto.dev, a table from rank 0.

        Raises DiskError if ``folder`` cannot be written.
        """
        with profiled(self, Path(folder)):
            yield

    @contextmanager
    def trace(self, folder: str | Path) -> Iterator[None]:
        """Draw a timeline of all devices in the block: ``timeline.svg``, ``trace.json``, ``shares.txt``. Collective.

        Raises DiskError if rank 0 cannot write ``folder``.
        """
        with traced(self, Path(folder)):
            yield

    def state(self, averaged: bool = False) -> dict[str, Tensor]:
        """Return all parameters and persistent buffers of the plain model, on every rank. Collective.

        Args:
            averaged: the average of the weights, with the model's own buffers.

        Raises:
            UsageError: ``averaged`` without an average.
            MismatchError: ranks hold different copies of a parameter, or make different calls.
        """
        self._read_whole(averaged)
        return self._gathered(averaged).all()

    def weights_sha256(self, averaged: bool = False) -> str:
        """Return a hash of ``state``; equal hashes mean bit-identical models. Collective. Raises as ``state``."""
        self._read_whole(averaged)
        # A sharded model may not fit into one device: gather one tensor at a time.
        return weights_sha256(self._gathered(averaged))

    def _read_whole(self, averaged: bool) -> None:
        """Compare over ranks this call and the copies of the model. Collective."""
        self.together("reading the whole state" + " with the average" * averaged)
        check_replicas(self, "reading the whole state")

    def _gathered(self, averaged: bool) -> GatheredModel:
        """Return lazy access to the full tensors of the plain model. Collective."""
        replica, comms, merged = self.replica, self.context.comms, self._merged(averaged)
        if replica.sharded and comms.model.size == 1:
            return GatheredRows(merged, replica.sharded, replica.specs, comms.axis("shard"))
        if not replica.sharded:
            return GatheredParts(merged, replica.specs, replica.not_owned, comms.model)
        # Rows of tensor slices; tensors that are not sharded into rows are equal on all shards: the first one's count.
        borrowed = set(replica.not_owned)
        if self.context.grid.at("shard"):
            borrowed |= merged.keys() - replica.sharded.keys()
        return GatheredParts(merged, replica.specs, borrowed, comms.axis("shard", "stage", "tensor"))

    def _merged(self, averaged: bool, as_trained: bool = False) -> dict[str, Tensor]:
        """Return this rank's tensors of the merged model, or of the average. Collective.

        Args:
            averaged: the average of the weights in place of the trained parameters.
            as_trained: cast the average to the dtypes of the weights.
        """
        merged = self.exchange.merged()
        if not averaged:
            return merged
        if self.average is None:
            raise UsageError("no average of the weights is kept", remedy="call tutti.prepare with ema=0.999")
        within = self.average.within(merged)
        return {name: t.to(merged[name].dtype) for name, t in within.items()} if as_trained else within

    def position(self) -> dict[str, Any]:
        """Return the position in the data as a JSON value for ``seek``."""
        return {**self.place._asdict(), "samples": self.samples, "state": self.feed.reader.state()}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue at ``position``: ``epoch(at.epoch)`` starts with the next batch."""
        self.at = self._resumed = Position(position["epoch"], position["batch"])
        self.samples = position["samples"]
        self.feed.reader.load(self.at, position["state"])

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write a checkpoint to ``folder/step-N``, and return when it is on disk. Collective.

        It holds the model, the optimizer with its settings, each logical worker's own state and the position in the
        data. ``restore`` reads it on any number of devices and under any strategy; with another number of workers if
        ``tutti.prepare`` was given that number.

        Args:
            folder: directory for this run's checkpoints alone, on a file system that all ranks share.
            extra: state of the script, such as ``{"scheduler": scheduler.state_dict()}``: numbers, texts, lists,
                tuples and dicts of them, the same on every rank.
            keep: number of newest checkpoints to keep.

        Returns:
            The directory of the checkpoint.

        Raises:
            UsageError: in the middle of a global batch, or ``extra`` has a value of another type.
            CheckpointError: the ranks do not share ``folder``.
            MismatchError: ranks hold different copies of a parameter; nothing is written.
            DiskError: the checkpoint could not be written; earlier checkpoints are intact.
        """
        if self.custom.within_batch:
            raise UsageError(
                "a run cannot be saved in the middle of a global batch",
                remedy="save where run.stepped is true after optimizer.step(), or after run.microbatches() has ended",
            )
        saver = run_state.saver(self, Path(folder), keep)
        saver.save(run_state.run_facts(self, extra or {}))
        saver.wait()
        return saver.folder / step_name(self.clock)

    def restore(self, folder: str | Path) -> dict[str, Any] | None:
        """Restore the newest intact checkpoint of ``folder``. Collective.

        Afterwards ``epochs``, ``epoch`` and ``microbatches`` continue at the checkpoint's position in the data.

        Returns:
            ``extra`` as ``save`` was given it; None if there is no checkpoint, and the run is unchanged.

        Raises:
            CheckpointError: the checkpoint is of another model, data set, batch size or seed, or its number of workers
                differs from that of the data ranks. It may differ, with a warning, from a number of workers that
                ``tutti.prepare`` was given.
        """
        facts = run_state.saver(self, Path(folder)).restore()
        return None if facts is None else run_state.restore_run(self, facts)

    def together(self, call: str) -> None:
        """Compare over all ranks which call they make after which step, before its collectives meet those of a step.

        Collective. Raises MismatchError if the calls differ.
        """
        self.context.comms.world.agree(
            [f"{call} after step {self.clock}"],
            "the call under way",
            "make every rank take the same steps and evaluations",
        )
