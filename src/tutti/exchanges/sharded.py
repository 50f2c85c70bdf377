"""Devices share out what they would otherwise all hold: optimizer state, gradients, parameters.

ZeRO: Rajbhandari et al. 2019, arXiv 1910.02054. Every parameter is cut into blocks of rows, one for each of the ranks
that share a copy (``shards``); the optimizer of a rank has its rows. Elementwise optimizers need no more; layer-wise
ones are given the norms of whole layers. Where there are several copies (HSDP) the rows' gradients are summed over
them.

Stage 1 is ours (``rows.Sliced``), stages 2 and 3 are PyTorch's FSDP2 (``fully_sharded``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.exchanges.across import across_model
from tutti.exchanges.allreduce import culprits, step
from tutti.exchanges.buckets import Sums, Tail
from tutti.exchanges.config import RowsConfig
from tutti.exchanges.counting import Counting, clipped, share_of_batch
from tutti.exchanges.reducers import layout_key, refuse, scale_all, squares_of
from tutti.exchanges.rows import Engine, RowNorms, Sliced, WholeRows, load_optimizer_rows, optimizer_pieces
from tutti.exchanges.saved import mine_of, read, written
from tutti.exchanges.split import Split, complete
from tutti.exchanges.verify import agree_on_state, spread_state
from tutti.exchanges.workers import WorkerBuffers
from tutti.nn.swap import parameters
from tutti.types import (
    Agreed,
    GradSink,
    OptimizerFactory,
    Piece,
    Replica,
    SavedState,
    Setting,
    ShardSpec,
    Tick,
    Totals,
    Update,
)


class Sharded:
    """The exchange of ``sharded``. Also its own gradient sink."""

    gradient_over: Literal["step", "worker"] = "step"

    def __init__(self, config: RowsConfig, setting: Setting) -> None:
        self._config, self._setting = config, setting
        self._shards, self._copies = setting.comms.axis("shard"), setting.comms.axis("replica")
        self._counting = Counting()

    def attach(self, replica: Replica, make_optimizer: OptimizerFactory) -> GradSink:
        comm = self._setting.comms.replica
        agree_on_state(comm, replica.parts)
        spread_state(comm, replica.parts)
        self._buffers = WorkerBuffers(replica.parts, self._setting, replica.borrowed)
        named = parameters(replica.parts)
        for _, parameter in named:
            # FSDP2 takes no other layout of memory, and rows of gradients come in this one.
            parameter.data = parameter.data.contiguous()
        trainable = [(name, p) for name, p in named if p.requires_grad]
        self._tail = Tail(len(trainable), layout_key(trainable))
        slices = replica.specs
        self._engines = self._share_out(replica, named)
        self._rows = [rows for engine in self._engines for rows in engine.rows]
        self._trained = [rows for rows in self._rows if rows.parameter.requires_grad]
        cut = {rows.name for rows in self._rows}
        self._fixed = {name: p for name, p in parameters(replica.parts) if name not in cut}
        self._replica = replica
        leaves = {rows.name: rows.parameter for rows in self._rows}
        self._named = [(name, leaves.get(name, p)) for name, p in named]
        self._optimizer = made = make_optimizer(self._named)
        if made is not None:
            self._complete(made, slices)
        self.optimizers: Sequence[Optimizer] = (self._optimizer,) if self._optimizer else ()
        return self

    def _complete(self, optimizer: Any, slices: Mapping[str, ShardSpec]) -> None:
        """Give it what it asks for of tensors of which rows, or slices, or rows of slices, are here."""
        norms, wholes = None, None
        if hasattr(optimizer, "norms") and self._shards.size > 1:
            optimizer.norms = norms = RowNorms(self._shards)
        if hasattr(optimizer, "wholes") and self._shards.size > 1:
            optimizer.wholes = wholes = WholeRows(self._shards, self._rows)
        if self._setting.grid.tensor > 1:
            found = {r.parameter: Split.of(slices[r.name], r.local) for r in self._rows}
            split: dict[Tensor, Split] = {p: part for p, part in found.items() if part is not None}
            complete(optimizer, split, self._setting.comms.axis("tensor"), norms, wholes)

    def _share_out(self, replica: Replica, named: Sequence[tuple[str, nn.Parameter]]) -> list[Engine]:
        """Cut the parameters into rows, those that FSDP2 does not take as in stage 1."""
        if self._config.stage == 1 or self._shards.size == 1:
            trained = [(n, p) for n, p in named if p.requires_grad]
            sliced = Sliced(trained, replica.parts, replica.specs, self._shards)
            replica.replaced(sliced.replaced)
            return [sliced]
        from tutti.exchanges.fully_sharded import FullySharded

        counts: Counter[torch.dtype] = Counter()
        for _, parameter in named:
            counts[parameter.dtype] += parameter.numel() * parameter.requires_grad
        usual = counts.most_common(1)[0][0]
        [model] = replica.parts
        whole = {p for _, p in named if not p.dim() or p.dtype != usual}
        if self._config.param_dtype is not None:
            # Batch norm takes narrow activations, but not with narrow weights.
            norms = [module for module in model.modules() if hasattr(module, "running_mean")]
            whole |= {p for module in norms for p in module.parameters()}
        for parameter in whole:
            # Its rows' device, which FSDP2 moves the others to; and out of a file, if it was built in one.
            parameter.data = parameter.data.to(self._shards.device, copy=True)
        engine = FullySharded(model, replica.specs, whole, self._config, self._shards)
        replica.sharded = {rows.name: rows.parameter.data for rows in engine.rows}
        replica.specs = {**replica.specs, **{rows.name: rows.spec for rows in engine.rows}}
        replica.holding = engine.holding
        rest = [(n, p) for n, p in named if p in whole and p.requires_grad]
        return [engine, Sliced(rest, replica.parts, replica.specs, self._shards)] if rest else [engine]

    def arm(self, part: Totals | None) -> None:
        """Nothing to do: FSDP2 sends by itself, and stage 1 when all is there."""

    def ready(self, parameter: Tensor) -> None:
        """Nothing to do."""

    def enter(self, worker: int, tick: Tick) -> None:
        self._buffers.enter(worker)

    def leave(self, worker: int, part: Totals | None) -> None:
        self._counting.add(part)

    def finish(self, tick: Tick) -> Agreed:
        used = [flag for engine in self._engines for flag in engine.used()]
        for engine in self._engines:
            engine.collect(tick.clock + 1)
        self._sum_over_copies(tick)
        sums, square = self._agree(tick, self._counting.take(), used)
        square, stop = across_model(self._setting.comms.model, square, sums.stop, tick)
        for rows, flag in zip(self._trained, sums.used, strict=True):
            if not flag:
                rows.parameter.grad = None
        factor = share_of_batch(sums, tick) / tick.loss_scale
        if factor != 1.0:
            scale_all(self._gradients(), factor)
        norm = math.sqrt(square) * factor
        return self._counting.agreed(sums, norm, self._finite(norm), stop)

    def update(self, agreed: Agreed, tick: Tick) -> Update:
        nonfinite: tuple[str, ...] = ()
        if agreed.finite:
            factor, norm = clipped(agreed.grad_norm, self._setting.clip)
            if factor != 1.0:
                scale_all(self._gradients(), factor)
            for optimizer in self.optimizers:
                step(optimizer, tick.lr_factor, norm)
            for engine in self._engines:
                engine.publish()
        else:
            trained = [(rows.name, rows.parameter) for rows in self._trained]
            nonfinite = tuple(dict.fromkeys(culprits(self._setting.comms.world, trained)))
        for engine in self._engines:
            engine.clear()
        return Update(int(agreed.finite), skipped=not agreed.finite, nonfinite=nonfinite)

    def merged(self) -> dict[str, Tensor]:
        """Parameters as this rank holds them: whole, or rows of those in ``Replica.sharded``; and merged buffers."""
        named = {name: p.data for name, p in parameters(self._replica.parts)}
        return {**named, **self._replica.sharded, **self._buffers.merged()}

    def state(self) -> Mapping[str, Mapping[str, Tensor | Piece]]:
        comm, copies = self._setting.comms.replica, self._copies
        buffers = self._buffers.merged()
        fixed = {name: p.data for name, p in self._fixed.items()}
        whole = written({**fixed, **buffers}, self._replica, comm)
        # All ranks that have the same rows choose among the same names.
        chosen = mine_of({rows.name: rows.parameter.data for rows in self._rows}, copies.rank, copies.size)
        mine = [rows for rows in self._rows if rows.name in chosen and rows.name not in self._replica.borrowed]
        pieces = {rows.name: rows.piece(rows.parameter.data) for rows in mine}
        model = {**whole, **{name: piece for name, piece in pieces.items() if piece is not None}}
        optim = optimizer_pieces(self._optimizer, mine, self._shards.rank == 0) if self._optimizer else {}
        return {"model": model, "optim": optim, "workers": self._buffers.state()}

    def load(self, saved: SavedState) -> None:
        for rows in self._rows:
            rows.parameter.data.copy_(rows.read(saved, "model", rows.known(saved.names("model"))))
        for name, parameter in self._fixed.items():
            parameter.data.copy_(read(saved, "model", name, self._replica, parameter.shape))
        for engine in self._engines:
            engine.publish()
        self._buffers.load(saved)
        if self._optimizer:
            load_optimizer_rows(self._optimizer, self._trained, saved)

    def facts(self) -> dict[str, object]:
        """None."""
        return {}

    def _gradients(self) -> list[Tensor]:
        return [rows.parameter.grad for rows in self._trained if rows.parameter.grad is not None]

    def _counted(self) -> list[Tensor]:
        """Gradients that are not another rank's of this replica to count."""
        counted = [rows.parameter for rows in self._trained if rows.name not in self._replica.borrowed]
        return [p.grad for p in counted if p.grad is not None]

    def _sum_over_copies(self, tick: Tick) -> None:
        """Sum the rows' gradients over the ranks that hold the same rows: one all-reduce for each data type."""
        if self._copies.size == 1:
            return
        for rows in self._trained:
            if rows.parameter.grad is None:
                rows.parameter.grad = torch.zeros_like(rows.parameter)
        for dtype in sorted({rows.parameter.dtype for rows in self._trained}, key=str):
            gradients = [g for g in self._gradients() if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in gradients])
            self._copies.start_all_reduce(flat, f"sum of gradients over copies in step {tick.clock + 1}").wait()
            views = [v.view_as(g) for v, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
            torch._foreach_copy_(gradients, views)

    def _agree(self, tick: Tick, lanes: Tensor | None, used: Sequence[bool]) -> tuple[Sums, float]:
        """Totals of all ranks and the square of the gradient's norm; whether all are in the same step. Collective."""
        comm = self._setting.comms.replica
        # Copies have the same gradient: the first one's counts.
        square = sum(squares_of(self._counted())) if self._copies.rank == 0 else 0.0
        message = torch.zeros(self._tail.size + 1, dtype=torch.float64, device=comm.device)
        self._tail.fill(message[:-1], tick, lanes, used)
        message[-1] = square
        comm.start_all_reduce(message, f"all_reduce of totals in step {tick.clock + 1}").wait()
        numbers = message.tolist()
        if not self._tail.same(numbers, tick, comm.size):
            refuse(comm, tick)
        return self._tail.read(numbers[: self._tail.size]), numbers[-1]

    def _finite(self, norm: float) -> bool:
        """Whether all gradients are finite: where the norm is not, only their elements tell. Collective then."""
        if math.isfinite(norm) or self._setting.comms.model.size > 1:
            return math.isfinite(norm)
        bad = torch.zeros(1, device=self._setting.comms.replica.device)
        bad += sum(not bool(torch.isfinite(g).all()) for g in self._gradients())
        self._setting.comms.replica.start_all_reduce(bad, "all_reduce of what is not finite").wait()
        return not bool(bad)
