"""Asynchronous parameter servers: every push of a logical worker's gradient is one update, without a barrier.

Downpour: Dean et al., NIPS 2012, §4.1, where a worker computes with the parameters of its last read. Bounded staleness,
in which a worker also waits for the slowest: Ho et al., NIPS 2013, §3. The reply to a push brings the parameters, so
that with N equally fast workers each gradient is N - 1 updates old, also where one device plays all workers in turn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import read_local
from tutti.comm.partition import even_share
from tutti.config.sync_config import ParameterServerConfig
from tutti.launcher import context, lost_rank_notes
from tutti.nn.swap import parameters
from tutti.parallel.ddp.gradient_arithmetic import scale_all, squares_of
from tutti.parallel.ddp.sync_module_states import agree_on_state, broadcast_state
from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.parallel.ddp.write_guard import WriteGuard
from tutti.parallel.loss_stats import LossCounter
from tutti.parallel.normalisation import clip_norm, finite_by_norm, nonfinite_names, own_mean
from tutti.parallel.parameter_server.client import Reply
from tutti.parallel.parameter_server.flat_views import write_gradients
from tutti.parallel.parameter_server.parameter_shard import ParameterShard
from tutti.parallel.parameter_server.remote_gradients import RemoteGradients
from tutti.parallel.parameter_server.request_handlers import NONE, AsyncHandler, AsyncProgress
from tutti.parallel.parameter_server.server_flows import async_floats
from tutti.parallel.parameter_server.server_session import ServerSession
from tutti.parallel.parameter_server.server_wire import BACK, PULL, PUSH, READ, SKIP, WAIT
from tutti.parallel.parameter_server.staleness import StalenessTracker
from tutti.torch_compat import foreach_copy_
from tutti.types.gradient_sync import OwnGradients
from tutti.types.micro_batch import LossSums
from tutti.types.optimizer_protocols import OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner, SilentHook
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice
from tutti.types.step_records import StepContext, StepStats, UpdateResult


class AsynchronousServerSync(RemoteGradients):
    """Gradient synchronisation with asynchronous parameter servers, which update on every push without a barrier.

    Used for ``parameter_server:mode=async`` and, where a worker also waits if it is too many steps ahead of the slowest
    one, ``mode=bounded``. Each logical worker (a fixed share of the global batch; one rank can compute several in turn)
    computes with the parameters of its own last read.

    Args:
        config: options of the ``parameter_server`` strategy.
        run_context: communicators and settings of the run.

    Attributes:
        loss_normalisation: "worker": each worker's loss is divided by its own count of samples or tokens.
        shares_parameters: whether other ranks write into the memory of this rank's parameters; False here.
        by_worker: True: each logical worker's gradients are pushed by themselves.
        optimizers: after ``attach``, one optimizer that holds the hyperparameters and is never stepped.
    """

    loss_normalisation: Literal["step", "worker"] = "worker"
    shares_parameters: bool = False
    by_worker = True

    def __init__(self, config: ParameterServerConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context
        self._counting = LossCounter()
        self._loss = 0.0
        self._norms: list[float] = []
        self._nonfinite: list[str] = []
        self._stale: list[float] = []
        self._stop_at: float | None = None
        self._updates = self._version = self._clock = 0

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Compare the model over the data ranks, broadcast rank 0's values, and start or join the parameter servers.

        Collective over the data ranks; blocks until every server has answered. Each server process builds an optimizer
        over its part of the parameters; on every rank, too, ``make_optimizer`` builds one, which holds the
        hyperparameters and is never stepped. Where the servers share memory with a CPU rank of one logical worker, the
        ``.data`` of the trained parameters becomes the receive buffer.

        Args:
            replica: this rank's copy of the model, with its runner.
            make_optimizer: builds the run's optimizer from a list of (name, parameter).

        Returns:
            A gradient-ready hook that does nothing: ``end_worker`` pushes the gradients after backward.

        Raises:
            MismatchError: ranks hold models with different parameters or buffers.
            UsageError: the optimizer cannot step on servers, because its step needs a closure, draws from a global
                random generator, changes its parameter groups, or (with several servers) combines several tensors;
                there are several optimizers; or the transport asked for is not available.
            PeerError: a server does not answer, or has ended.
            ValueError: no parameter is trained.
        """
        run_context = self._run_context
        agree_on_state(run_context.comms.replica, replica.parts)
        broadcast_state(run_context.comms.replica, replica.parts)
        self._replica, self._named = replica, parameters(replica.parts)
        self._trained = [(name, p) for name, p in self._named if p.requires_grad]
        self._buffers = WorkerBuffers(replica.parts, run_context, replica.not_owned)
        handle = make_optimizer(self._named)
        if handle is None:
            raise ValueError("nothing is trained")
        self.optimizers: tuple[Optimizer, ...] = (handle,)
        self._link = ServerSession(
            self._config, run_context, self._trained, make_optimizer, handle, self._make_handler, self._extras
        )
        self._alone = self._link.home and len(run_context.mine) == 1
        first = self._link.values if self._alone else [p.data for _, p in self._trained]
        mine = run_context.mine
        self._copies = {w: first if w == mine[0] else [t.clone() for t in first] for w in mine}
        self._seen = {w: [0] * self._config.servers for w in mine}
        self._allowed = dict.fromkeys(mine, True)
        self._guards = self._new_guards()
        self._accrued: dict[int, list[Tensor | None]] = {w: [None] * len(self._trained) for w in mine}
        self._put(mine[0])
        return SilentHook()

    def _put(self, worker: int) -> None:
        """Put a worker's parameters into the model."""
        self._loaded_worker = worker
        for (_, parameter), copy in zip(self._trained, self._copies[worker], strict=True):
            parameter.data = copy

    def _refuse_assigned(self, where: str) -> None:
        """Refuse ``.data`` that a forward or the script has assigned with other values, which the worker would lose.

        Equal values are fine: recurrent layers move theirs on GPUs (``flatten_parameters``). The worker's own tensors
        come back in their place.

        Args:
            where: place in the run for the error message.
        """
        worker = self._loaded_worker
        pairs = zip(self._trained, self._copies[worker], strict=True)
        if any(parameter.data_ptr() != copy.data_ptr() for (_, parameter), copy in pairs):
            self._guards[worker].check(self._trained, where)
            self._put(worker)

    def _new_guards(self) -> dict[int, WriteGuard]:
        return {w: WriteGuard("the servers' parameters replace those of every worker") for w in self._run_context.mine}

    def _make_handler(self, shard: ParameterShard) -> AsyncHandler:
        """Make the request handler, in a server's process."""
        lease = (self._config.lease or context.current().timeout) if self._config.mode == "bounded" else math.inf
        together = self._config.steps == "all"
        core = StalenessTracker(
            self._run_context.workers, self._config.staleness, lease, gone=self._gone, together=together
        )
        return AsyncHandler(shard, core, len(shard.keys), self._config.over_staleness)

    def _gone(self) -> Collection[int]:
        """Return the workers of lost ranks, in a server's process."""
        ranks, workers, notes = (
            self._run_context.comms.replica.size,
            self._run_context.workers,
            lost_rank_notes.lost_rank_notes(),
        )
        return (
            [worker for rank in notes.lost() for worker in even_share(workers, ranks, rank)]
            if notes is not None
            else []
        )

    def _extras(self, settings: int) -> Mapping[int, int]:
        return async_floats(len(self._trained), settings)

    def begin_worker(self, worker: int, step_context: StepContext) -> None:
        """Make the model compute with the parameters that logical worker ``worker`` read last from the servers.

        The worker, one of N fixed shares of the global batch, also gets its own buffers (batch-norm statistics). With
        mode ``bounded`` the call blocks while the worker is more steps ahead of the slowest worker than the bound
        allows, and then reads the parameters anew; a worker from which the servers have received no request for the
        lease time (an option) does not count as slowest. Otherwise nothing is sent. Not collective.

        Args:
            worker: index of the logical worker, one of those that this rank computes.
            step_context: the step under way, with its number and loss scale; kept for ``end_worker``.

        Raises:
            UsageError: since the worker's last step the script has written a parameter; or since the last step of the
                rank it has written a buffer that forwards write too, such as batch-norm statistics, and this rank
                computes several workers, each with its own value of the buffer; on an accelerator ``end_worker`` raises
                this. Of such writes to buffers, resets to zeros (ones for a variance) and writes in a custom loop are
                allowed.
            PeerError: a server does not reply in time, or has ended.
        """
        self._step_context = step_context
        where = f"step {step_context.local_step + 1}"
        self._refuse_assigned(where)
        self._buffers.enter(worker)
        self._put(worker)
        self._guards[worker].check(self._trained, where)
        if not self._allowed[worker]:
            text = f"waiting for the slowest worker in step {step_context.local_step + 1}"
            self._link.client.send(PULL, worker, step_context.local_step, flags=WAIT, seen=self._seen[worker])
            # No other rank is waited for here: the servers drop workers whose lease has run out.
            self._take(worker, self._link.client.wait(text, (self._link.comm.global_rank,), patient=True))

    def end_worker(self, worker: int, part: LossSums | None) -> None:
        """Push a logical worker's gradient to the servers every ``push`` steps; read parameters every ``fetch`` steps.

        A logical worker is one of N fixed shares of the global batch. ``push`` and ``fetch`` are options of the
        strategy ``parameter_server``. The gradient is the mean over the worker's own samples or tokens, clipped; with
        ``push`` above 1 the servers receive the sum of the gradients since the last push. A non-finite gradient makes
        no update, and is left out of the sum. Sets every ``.grad`` to None. Each step makes a request to all servers,
        also one that transfers no tensors, and waits for their replies, not for other ranks. Parameters that come with
        the replies become the worker's parameters.

        Args:
            worker: index of the logical worker, the one given to ``begin_worker`` before.
            part: the worker's sums of loss, count and metrics in this step; None if the worker had no samples.

        Raises:
            PeerError: a server does not reply in time, or has ended.
            UsageError: the script has changed an option of the optimizer that servers do not follow (they follow floats
                such as weight decay, not ``nesterov``); a forward has assigned other values to a parameter's ``.data``;
                or, on an accelerator, the script has written a buffer in the way that ``begin_worker`` refuses on a
                CPU.
        """
        self._refuse_assigned(f"step {self._step_context.local_step + 1}")
        gradients: list[Tensor | None] = [p.grad for _, p in self._trained]
        if part is None or not self._prepare(part, gradients):
            gradients = [None] * len(gradients)
        if self._config.push > 1:
            gradients = self._add(worker, gradients)
        due = (self._step_context.local_step + 1) % self._config.push == 0 and any(g is not None for g in gradients)
        used = write_gradients(self._link.gradients, gradients) if due else []
        back = (self._step_context.local_step + 1) % self._config.fetch == 0
        norm = math.sqrt(sum(squares_of([g for g in gradients if g is not None]))) if used else 0.0
        settings = self._link.settings(self._step_context.lr_factor)
        replies = self._link.client.ask(
            PUSH,
            worker,
            self._step_context.local_step,
            f"push of gradients in step {self._step_context.local_step + 1}",
            (self._link.comm.global_rank,),
            flags=(0 if used else SKIP) | (BACK if back else 0),
            extras=[*settings, *(used or [False] * len(self._trained)), norm, float(self._step_context.stop)],
            seen=self._seen[worker],
        )
        if used:
            self._accrued[worker] = [None] * len(self._trained)
            self._stale.append(AsyncProgress(*replies[0].extras).staleness)
        for _, parameter in self._trained:
            parameter.grad = None
        self._take(worker, replies, read=back)
        self._guards[worker].note(self._trained)
        self._counting.add(part)

    def _prepare(self, part: LossSums, gradients: list[Tensor | None]) -> bool:
        """Divide the gradients by the count of their loss and clip them, in place; False where they are non-finite."""
        there = [g for g in gradients if g is not None]
        norm = own_mean(there, part, self._step_context.loss_scale)
        self._buffers.verify()
        if not finite_by_norm(norm):
            self._nonfinite += nonfinite_names(zip([name for name, _ in self._trained], gradients, strict=True))
            return False
        clip_norm(norm, self._run_context.clip, partial(scale_all, there))
        self._norms.append(norm)
        return True

    def _add(self, worker: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Add to ``worker``'s gradients that have not been pushed yet; return the sums."""
        accrued = self._accrued[worker]
        for index, gradient in enumerate(gradients):
            before = accrued[index]
            if gradient is not None:
                accrued[index] = gradient.clone() if before is None else before.add_(gradient)
        return accrued

    def _take(self, worker: int, replies: list[Reply], read: bool = True) -> None:
        """Record the servers' replies: versions, steps, stop; and copy the parameters if they were ``read``.

        The first server alone decides after which step all workers stop: servers hear of the request at different
        clocks, and a worker that completes a step has its reply, but maybe not the one of a server that decides later.
        """
        progress = [AsyncProgress(*reply.extras) for reply in replies]
        self._stop_at = self._stop_at if progress[0].stop_at == NONE else progress[0].stop_at
        self._clock = max(self._clock, int(progress[0].clock))
        self._allowed[worker] = all(each.may_proceed for each in progress)
        self._version = replies[0].header.seen
        if read:
            self._seen[worker] = [reply.header.seen for reply in replies]
            if not self._alone:
                foreach_copy_(self._copies[worker], self._link.values)

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Return the step's statistics of this rank's own logical workers; nothing is reduced or sent. Not collective.

        A logical worker is one of N fixed shares of the global batch; asynchronous servers update on the push of each.

        Args:
            step_context: the step under way, whose number decides whether the run is to stop.

        Returns:
            A ``StepStats``: ``count``, the number of samples or tokens of these workers; ``loss`` and ``metrics``,
            means over them (without any, the loss of this rank's previous step); among the metrics ``staleness``, the
            mean number of updates that the first server made between a worker's read and its push; ``grad_norm``, the
            mean of the gradients' L2 norms before clipping; ``finite``, False if one of the gradients was not finite;
            ``stop``, True from the step after which the first server has told all workers to stop.

        Raises:
            UsageError: the script has written a buffer that forwards write too, such as batch-norm statistics, and this
                rank computes several workers, each with its own value of the buffer.
        """
        self._buffers.finish()
        loss_sums = self._counting.take()
        loss, count, *metrics = [self._loss, 0.0] if loss_sums is None else loss_sums.tolist()
        self._loss = loss / count if count else self._loss
        named = self._counting.means(metrics, count) if count else {}
        if self._stale:
            named["staleness"] = sum(self._stale) / len(self._stale)
        norm = sum(self._norms) / len(self._norms) if self._norms else 0.0
        clock = self._clock if self._config.steps == "all" else step_context.local_step + 1
        stop = self._stop_at is not None and clock >= self._stop_at
        self._norms, self._stale = [], []
        return StepStats(self._loss, count, named, norm, finite=not self._nonfinite, stop=stop)

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Report the updates that the servers have made for all workers since this rank's last step. Not collective.

        Workers are logical workers, fixed shares of the global batch. No parameter is written and nothing is sent here:
        ``end_worker`` has pushed the gradients and fetched the parameters already.

        Args:
            stats: result of ``reduce_gradients`` in this step, of which ``finite`` is read.
            step_context: unused.

        Returns:
            An ``UpdateResult``: ``updates``, the number of these updates on the first server; ``skipped``, True if the
            gradient of one of this rank's workers was not finite and so made no update, and then ``nonfinite`` has the
            names of its non-finite parameters; ``in_sync`` is False, as each worker has parameters of its own last
            read; ``global_step``, the steps of all workers divided by their number where the run counts the workers'
            steps together, else None.
        """
        made, self._updates = self._version - self._updates, self._version
        nonfinite, self._nonfinite = tuple(dict.fromkeys(self._nonfinite)), []
        clock = self._clock if self._config.steps == "all" else None
        return UpdateResult(max(made, 0), not stats.finite, nonfinite, in_sync=False, global_step=clock)

    def clear(self) -> None:
        """Do nothing: ``end_worker`` has set every ``.grad`` to None after its push to the parameter servers."""

    def merged(self) -> dict[str, Tensor]:
        """Return one model for all workers: the servers' current parameters, frozen parameters, and merged buffers.

        Workers are logical workers, fixed shares of the global batch with buffers of their own. Batch-norm statistics
        are pooled over all workers, other floating buffers averaged, and of integers the largest is taken. Collective
        over the data ranks: barriers before and after the read, so that all ranks return the same model, and an
        all-gather of the buffers for each dtype.

        Returns:
            A dict from names of all parameters and buffers in the model to whole tensors on this rank's device. On a
            CPU the trained parameters are views of the receive buffer, which the next reply of the servers overwrites;
            frozen parameters are the model's own tensors.

        Raises:
            UsageError: since the last step the script has written a parameter; or it has written a buffer that forwards
                write too, such as batch-norm statistics, and this rank computes several workers, each with its own
                value of the buffer.
            PeerError: a server does not reply in time, or has ended.
        """
        self._read()
        self._link.barrier("the parameters are read")
        return self._whole()

    def _read(self) -> None:
        """Read the servers' parameters after a barrier over all ranks. Collective.

        Raises:
            UsageError: the script has written parameters since the last step.
        """
        last = self._run_context.mine[-1]
        self._guards[last].check(self._trained, "after the last step")
        self._link.barrier("reading the parameters")
        replies = self._link.ask(READ, "reading the parameters")
        if self._alone:
            self._seen[last] = [reply.header.seen for reply in replies]
            self._guards[last].note(self._trained)

    def _whole(self) -> dict[str, Tensor]:
        fixed = {name: p.data for name, p in self._named if not p.requires_grad}
        read = {name: value for (name, _), value in zip(self._trained, self._link.values, strict=True)}
        return {**fixed, **{name: value.to(self._link.comm.device) for name, value in read.items()}} | (
            self._buffers.merged()
        )

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return None: with asynchronous parameter servers no tensors are equal on all ranks.

        Ranks compute with parameters that they have read at different times. Other strategies return the tensors whose
        digests the caller compares over ranks.
        """
        return None

    def state(self) -> dict[str, Mapping[str, Tensor | TensorSlice]]:
        """Return the whole checkpoint by group on rank 0, and an empty dict on all other ranks.

        Rank 0 writes everything, because another rank could be lost before it has written its part. Collective over the
        data ranks: two barriers around the read of the servers, and all-gathers of the buffers. On a CPU the parameters
        are views of the receive buffer, which the next reply of the servers overwrites.

        Returns:
            On rank 0 three groups, each a mapping from names to tensors: ``model`` has the servers' parameters, frozen
            parameters and merged buffers by names in the model; ``optim`` has the servers' optimizer state under
            ``"{parameter name}/{state key}"``; ``workers`` has the buffers of every logical worker (share of the global
            batch with its own buffers) under ``"{index of the worker}/{buffer name}"``.

        Raises:
            UsageError: since the last step the script has written a parameter; or it has written a buffer that forwards
                write too, such as batch-norm statistics, and this rank computes several workers, each with its own
                value of the buffer.
            PeerError: a server does not reply in time, or has ended.
        """
        self._read()
        optim = self._link.optimizer_state()
        self._link.barrier("the parameters and the optimizer are read")
        model, workers = self._whole(), self._buffers.of_all()
        return {"model": model, "optim": optim, "workers": workers} if self._link.comm.rank == 0 else {}

    def load(self, saved: SavedState) -> None:
        """Load a checkpoint into the parameter servers, and start all logical workers from its parameters.

        A logical worker is one of N fixed shares of the global batch. Every rank reads parameters and buffers from the
        checkpoint; rank 0 sends parameters and optimizer state to the servers. Collective over the data ranks: rank 0
        broadcasts whether the servers have loaded them, for which all ranks wait. Gradients that had not been pushed
        when the checkpoint was saved are lost.

        Args:
            saved: the checkpoint, whose groups ``model``, ``optim`` and ``workers`` are read.

        Raises:
            CheckpointError: the checkpoint lacks a parameter or buffer, or a file of it differs from its manifest.
            UsageError: the saved optimizer state is larger than a server accepts.
            PeerError: a server does not reply in time, or has ended.
        """
        for name, parameter in self._named:
            parameter.data.copy_(read_local(saved, "model", name, self._replica, parameter.shape))
        self._buffers.load(saved)
        versions = self._link.restore(saved, {name: p.data for name, p in self._named}, self._replica.specs)
        for worker, copies in self._copies.items():
            for (name, _), copy in zip(self._trained, copies, strict=True):
                copy.copy_(read_local(saved, "model", name, self._replica, copy.shape))
            self._seen[worker], self._allowed[worker] = list(versions), True
            self._accrued[worker] = [None] * len(self._trained)
        self._updates = self._version = versions[0]
        self._guards = self._new_guards()
        self._stop_at, self._clock = None, 0

    def own_gradients(self) -> OwnGradients:
        """Return the parameters in whose ``.grad`` backward leaves a logical worker's gradient, before the push.

        The gradient noise scale is measured with these gradients. Each worker (share of the global batch) computes with
        the parameters of its own last read. Not collective.

        Returns:
            An ``OwnGradients``, whose ``parameters`` is a list of the trained parameters on this rank. It names no
            optimizers, because their state is on the servers.
        """
        return OwnGradients([p for _, p in self._trained])

    def facts(self) -> dict[str, object]:
        """Return the parameter servers' statistics for ``summary.json``. Not collective: rank 0 alone asks the servers.

        Returns:
            On rank 0 ``{"servers": [{"at": endpoint, …}]}`` with one entry for each server: its ZeroMQ address
            (``at``), number of updates (``updates``), list of the number of pushes of each logical worker (``steps``),
            a dict from a staleness (text), the number of updates between a read of parameters and the push, to the
            number of updates with it (``staleness``), updates that crashed server processes had made after their newest
            snapshot (``lost``), pushes dropped as too stale (``stale``) and as not finite (``refused``), numbers of
            refused messages (``malformed``) and connections (``keys_refused``), bytes of tensors sent and received
            (``bytes``), and, after a push, ``updates_per_second``. An empty dict on all other ranks.

        Raises:
            PeerError: on rank 0, a server does not reply in time, or has ended.
        """
        return self._link.facts()
