"""A prepared training run: what ``tutti.prepare`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutti.comm.gather import Gathered, GatheredParts, GatheredRows
from tutti.data.adapt import adapt
from tutti.data.feed import evaluation, evaluation_blocks
from tutti.data.reader import Position
from tutti.data.source import Source
from tutti.errors import UsageError
from tutti.spec import Duration
from tutti.state.fingerprint import weights_sha256
from tutti.state.write import step_name
from tutti.training import keeping
from tutti.training.own_loop import OwnLoop
from tutti.training.profile import profiled
from tutti.training.stopping import Reason, stopping
from tutti.training.trace import traced
from tutti.types import LossFn, Totals
from tutti.world import heartbeat
from tutti.world.heartbeat import Phase


@dataclass(frozen=True)
class Evaluation:
    """Means over every held-out sample, each counted once; ``averaged``: of the weights' average."""

    loss: float
    metrics: dict[str, float]
    samples: int
    averaged: bool = False

    @property
    def values(self) -> dict[str, float]:
        """``{"loss": …, "accuracy": …}``."""
        return {"loss": self.loss, **self.metrics}


class Run(OwnLoop):
    """One model in training on all ranks alike. How it takes steps, and what it knows of itself: see ``Steps``."""

    def stopping(self) -> AbstractContextManager[Reason]:
        """Within the block SIGTERM, SIGUSR1 and the first Ctrl-C call ``ask_to_stop``; a second signal ends at once.

        The block is given a ``Reason``, whose ``exit_code`` says how to leave: 75, or 130 after Ctrl-C.
        """
        return stopping(self)

    def epochs(self, number: int) -> range:
        """Those of epochs 0 … number-1 that are left: all, or after ``restore`` from the one that it was saved in."""
        if self.feed.contract.dataset is not None:
            self.checks.planned(self.feed.epochs.steps(Duration(number, "ep")))
        return range(self.at.epoch if self.within is None else self.within, number)

    # --- everything else -------------------------------------------------------------------------------------------

    def evaluate(
        self, source: Any, batch: int = 512, loss: LossFn | None = None, averaged: bool | None = None
    ) -> Evaluation:
        """Loss and metrics over all samples of ``source``, each once, on the workers' merged model. Collective.

        ``averaged``: with the average of the weights, or with those in training; default: the average where one is
        kept. Raises UsageError where there is none.
        """
        averaged = self.average is not None if averaged is None else averaged
        chosen = loss or self._loss
        if chosen is None:
            raise UsageError("run.evaluate needs a loss function", remedy="give one here or to tutti.prepare")
        source = adapt(source)
        self.together(f"evaluation of {len(source)} samples" + " on the average" * averaged)
        with heartbeat.training.during(Phase.EVALUATE):
            self.checks.held_out(source, loss)
        comm = self.setting.comms.replica
        with (
            self.checks.aside(),
            heartbeat.training.during(Phase.EVALUATE),
            self.replica.evaluating(self._merged(averaged, as_trained=True)),
        ):
            there: Sequence[int] | None = None
            # A rank that is lost on the way had a part of the samples.
            while there != comm.there:
                there = comm.there
                names, table = self._totals_of(source, batch, chosen)
        value, count, *sums = table.sum(dim=0).tolist()
        metrics = {n: s / count for n, s in zip(names, sums, strict=True)}
        return Evaluation(value / count, metrics, len(source), averaged)

    def _totals_of(self, source: Source, batch: int, loss: LossFn) -> tuple[Sequence[str], Tensor]:
        """Names of the metrics, and each block's sums, shared out over the data ranks. Collective."""
        comms = self.setting.comms
        there = comms.replica.there
        rank, ranks = there.index(comms.replica.rank), len(there)
        blocks = evaluation(
            *(source, ranks, rank, batch, self.feed.place, self.feed.prefetch), even=bool(self.replica.sharded)
        )
        parts: dict[int, Totals] = {}
        for number, cell in blocks:
            heartbeat.training.beat()
            part = self.replica.run([cell], loss, None)
            if cell.samples:
                parts[number] = part
        names = comms.world.broadcast_json(parts[0].names if rank == 0 else (), 0, "names of the metrics")
        table = torch.zeros(len(evaluation_blocks(len(source), batch)), 2 + len(names), dtype=torch.float64)
        for number, part in parts.items():
            table[number] = part.lanes.double().cpu()
        comms.replica.all_reduce(table, "totals of the evaluation")
        return names, table

    @contextmanager
    def profile(self, folder: str | Path) -> Iterator[None]:
        """Profile the steps within the block on every rank: ``rank{N}.json`` for ui.perfetto.dev, a table from rank 0.

        Raises DiskError where ``folder`` cannot be written.
        """
        with profiled(self, Path(folder)):
            yield

    @contextmanager
    def trace(self, folder: str | Path) -> Iterator[None]:
        """Draw what every device does within the block: ``timeline.svg``, ``trace.json``, ``shares.txt``. Collective.

        Raises DiskError where rank 0 cannot write ``folder``.
        """
        with traced(self, Path(folder)):
            yield

    def state(self, averaged: bool = False) -> dict[str, Tensor]:
        """All parameters and persistent buffers as one plain model's, on every rank. Collective.

        ``averaged``: the average of the weights, with the model's own buffers. Raises as ``evaluate``.
        """
        self.together("reading the whole state" + " with the average" * averaged)
        return self._gathered(averaged).all()

    def weights_sha256(self, averaged: bool = False) -> str:
        """Hash of ``state``; equal hashes mean bit-identical models. Collective."""
        self.together("reading the whole state" + " with the average" * averaged)
        # What is shared out may fit into no device: one tensor at a time.
        return weights_sha256(self._gathered(averaged))

    def _gathered(self, averaged: bool) -> Gathered:
        """The plain model's tensors. Collective."""
        replica, comms, merged = self.replica, self.setting.comms, self._merged(averaged)
        if replica.sharded and comms.model.size == 1:
            return GatheredRows(merged, replica.sharded, replica.specs, comms.axis("shard"))
        if not replica.sharded:
            return GatheredParts(merged, replica.specs, replica.borrowed, comms.model)
        # Rows of slices; what is not cut into rows is the same on all shards.
        borrowed = set(replica.borrowed)
        if self.setting.grid.at("shard"):
            borrowed |= merged.keys() - replica.sharded.keys()
        return GatheredParts(merged, replica.specs, borrowed, comms.axis("shard", "stage", "tensor"))

    def _merged(self, averaged: bool, as_trained: bool = False) -> dict[str, Tensor]:
        """What lives here as one model; ``as_trained``: the average in the data types of the weights."""
        merged = self.exchange.merged()
        if not averaged:
            return merged
        if self.average is None:
            raise UsageError("no average of the weights is kept", remedy="call tutti.prepare with ema=0.999")
        within = self.average.within(merged)
        return {name: t.to(merged[name].dtype) for name, t in within.items()} if as_trained else within

    def position(self) -> dict[str, Any]:
        """Where in the data the run is, as a JSON value for ``seek``."""
        return {**self.place._asdict(), "samples": self.samples, "state": self.feed.reader.state()}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Go on where ``position`` was: ``epoch(at.epoch)`` gives the batch that comes next."""
        self.at = self._resumed = Position(position["epoch"], position["batch"])
        self.samples = position["samples"]
        self.feed.reader.load(self.at, position["state"])

    # --- what outlives the process ---------------------------------------------------------------------------------

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None, keep: int = 2) -> Path:
        """Write everything that continuing needs to ``folder/step-N``; returns when it is on disk. Collective.

        That is the model, the optimizer with its settings, each worker's own state, and where the run is in its data.
        It can be continued on any number of devices and under any strategy, with the same workers.

        Args:
            folder: of this run's checkpoints alone, on a file system that all ranks share.
            extra: what the script keeps besides, such as ``{"scheduler": scheduler.state_dict()}``: numbers, texts,
                lists, tuples and dicts of them, the same on every rank.
            keep: how many of the newest checkpoints stay.

        Raises:
            UsageError: in the middle of a global batch, or ``extra`` has something else.
            CheckpointError: the ranks do not share ``folder``.
            DiskError: it could not be written; what was saved before is intact.
        """
        if self._begun:
            raise UsageError(
                "a run cannot be saved in the middle of a global batch",
                remedy="save where run.stepped is true after optimizer.step(), or after the loop over run.cells()",
            )
        saver = keeping.saver(self, Path(folder), keep)
        saver.save(keeping.facts(self, extra or {}))
        saver.wait()
        return saver.folder / step_name(self.clock)

    def restore(self, folder: str | Path) -> dict[str, Any] | None:
        """Become the newest good checkpoint of ``folder``: what ``save`` was given as ``extra``. Collective.

        None where there is no checkpoint, and nothing has changed. Afterwards ``epochs``, ``epoch`` and ``cells``
        continue where the run was saved.

        Raises:
            CheckpointError: it is of another model, data set, batch size, seed or number of workers.
        """
        facts = keeping.saver(self, Path(folder)).restore()
        return None if facts is None else keeping.become(self, facts)

    def together(self, call: str) -> None:
        """Wait for all ranks, and compare what comes now before any message of it could meet one of a step."""
        self.setting.comms.world.agree(
            [f"{call} after step {self.clock}"],
            "the call under way",
            "make every rank take the same steps and evaluations",
        )
