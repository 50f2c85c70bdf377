"""Synchronous parameter servers: workers push gradients, the servers sum them and make one update a step.

Equal to ``mirrored``: gradients are summed, scaled, clipped and applied in the same order, on the servers. With backup
workers the update is made without the slowest pushes (Chen et al. 2016, arXiv 1604.00981).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.checkpoint.state_shards import read_local, written
from tutti.config.sync_config import AllReduceConfig, ParameterServerConfig
from tutti.errors import UsageError
from tutti.nn.swap import parameters
from tutti.optim.several import members_of
from tutti.parallel.ddp.allreduce import AllReduceSync
from tutti.parallel.ddp.buckets import ReducedSums, Tail
from tutti.parallel.ddp.gradient_arithmetic import own_part, squares_by
from tutti.parallel.ddp.reducers import Reducer
from tutti.parallel.ddp.step_agreement import layout_key, refuse_mismatch
from tutti.parallel.ddp.sync_module_states import agree_on_state, broadcast_state
from tutti.parallel.ddp.worker_buffers import WorkerBuffers
from tutti.parallel.ddp.write_guard import WriteGuard
from tutti.parallel.normalisation import clipped, divisor_of_backward
from tutti.parallel.parameter_server.flat_views import write_gradients
from tutti.parallel.parameter_server.parameter_shard import ParameterShard
from tutti.parallel.parameter_server.remote_gradients import RemoteGradients
from tutti.parallel.parameter_server.request_handlers import NONE, SyncHandler
from tutti.parallel.parameter_server.server_barrier import ServerBarrier
from tutti.parallel.parameter_server.server_flows import sync_floats
from tutti.parallel.parameter_server.server_session import ServerSession, workers_by_rank
from tutti.parallel.parameter_server.server_wire import APPLY, BACK, EDITED, PUSH, READ, SKIP, SUM
from tutti.torch_compat import foreach_copy_
from tutti.types.gradient_sync import OwnGradients
from tutti.types.optimizer_protocols import NamedParameters, OptimizerFactory
from tutti.types.replica_runner import GradientReadyHook, ReplicaRunner
from tutti.types.run_context import RunContext
from tutti.types.saved_state import SavedState
from tutti.types.shard_spec import TensorSlice
from tutti.types.step_records import StepContext, StepStats, UpdateResult

_SERVED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose state is, or was, on parameter servers."""


class ServerReducer(Reducer):
    """Gradient reducer of synchronous parameter servers: pushes gradients, and reads statistics of the servers' sums.

    The summed gradients themselves stay on the servers.

    Args:
        trained: (name, parameter) pairs of the trained parameters.
        run_context: communicators and settings of the run.
        link: this rank's session with the servers, through which all requests go.
        leaves: number of gradients that the servers sum in a step. If it is the number of logical workers (fixed shares
            of the global batch), each of them pushes its own gradients; otherwise each rank pushes one sum over its
            workers.
        backup: number of these gradients that the servers do not wait for.

    Attributes:
        listens: False: ``gradient_ready`` need not be registered as a hook of autograd.
        nonfinite: names of the parameters whose summed gradient was not finite in the latest step.
        used: for each trained parameter whether a rank had a gradient in the latest step.
        number: number of the sum under way, with which each request for this sum is marked. A step has one sum; in a
            custom loop a step may have several sums or none.
    """

    listens = False

    def __init__(
        self, trained: NamedParameters, run_context: RunContext, link: ServerSession, leaves: int, backup: int
    ) -> None:
        self._run_context, self._link, self._leaves, self._backup = run_context, link, leaves, backup
        self._by_worker = leaves == run_context.workers
        self._names, self._order = [name for name, _ in trained], [p for _, p in trained]
        self._tail = Tail(len(trained), layout_key(trained))
        self._measured = len(trained) + 1 if run_context.gradient_variance else 0
        self._squares: list[float] = []
        self.nonfinite: tuple[str, ...] = ()
        self.used: Sequence[bool] = ()
        self.number = 0
        self._under_way = False

    def collect(self, step_context: StepContext, worker: int, loss_sums: Tensor | None) -> None:
        """Push a logical worker's gradients to the parameter servers, if the servers sum worker by worker.

        A logical worker is one of N fixed shares of the global batch. The call waits for the servers' replies to this
        rank's previous push, copies ``.grad`` of all trained parameters into the send buffer, sets every ``.grad`` to
        None, and returns before the servers have replied. Where the servers sum one push from each rank, this call does
        nothing: autograd accumulates the gradients of the rank's workers in ``.grad``, and ``finish`` pushes their sum.
        Not collective.

        Args:
            step_context: the step under way, with its number and loss scale.
            worker: index of the logical worker.
            loss_sums: the worker's ``[loss, count, *metrics]``; None if the worker had no samples.

        Raises:
            PeerError: a server does not reply to the previous push in time, or has ended.
        """
        if self._by_worker:
            self._push(step_context, worker, loss_sums)

    def _push(self, step_context: StepContext, worker: int, loss_sums: Tensor | None) -> None:
        """Start a push of ``.grad``, after the servers have acknowledged the push before; set ``.grad`` to None."""
        self._settle(step_context)
        numbers = torch.zeros(self._tail.size + self._measured, dtype=torch.float64)
        if self._measured:
            numbers[self._tail.size :] = own_part(squares_by(self._order), step_context, loss_sums)
        used = write_gradients(self._link.gradients, [p.grad for p in self._order])
        self._tail.fill(numbers[: self._tail.size], step_context, loss_sums, used)
        for parameter in self._order:
            parameter.grad = None
        self._link.client.send(PUSH, worker, self.number, extras=numbers.tolist())
        self._under_way = True

    def _settle(self, step_context: StepContext) -> None:
        if self._under_way:
            self._under_way = False
            self._link.client.wait(
                f"push of gradients in step {step_context.local_step + 1}", (self._link.comm.global_rank,)
            )

    def finish(self, step_context: StepContext, loss_sums: Tensor | None) -> ReducedSums:
        """Push gradients that are left, and wait until the parameter servers have summed the pushes of all ranks.

        Every rank has to call ``finish``, because the servers wait for all pushes; with b backup workers the servers do
        not wait for the b latest pushes, and leave these out of the sum. The summed gradients stay on the servers.

        Args:
            step_context: the step under way, with its number and loss scale.
            loss_sums: this rank's ``[loss, count, *metrics]``, summed over its logical workers (fixed shares of the
                global batch); None if these workers had no samples. Unused where ``collect`` pushes worker by worker.

        Returns:
            A ``ReducedSums``, a named tuple of sums over all pushes that the servers have counted: floats ``loss`` and
            ``samples`` (number of samples or tokens), a list ``metrics`` of six floats (zeros after the last metric),
            and ``stop``, whether any rank asks to stop. The list ``used`` has a bool for each trained parameter, in the
            model's order: whether any rank had a gradient. The sequence ``own`` is empty unless the gradient variance
            is measured. Then ``own`` has a float for each trained parameter, Σ ‖G‖²/c over the logical workers, where G
            is a worker's gradient of the parameter, without loss scale, and c the worker's count; and as last number
            how many workers have c > 0.

        Raises:
            MismatchError: ranks are in different steps.
            PeerError: a server does not reply in time, or has ended.
        """
        if not self._by_worker:
            self._push(step_context, self._run_context.mine[0], loss_sums)
        self._settle(step_context)
        text = f"sum of gradients in step {step_context.local_step + 1}"
        worker, client = self._run_context.mine[0], self._link.client
        # With backup workers ranks may well be in different steps.
        ranks = (self._link.comm.global_rank,) if self._backup else self._link.comm.ranks
        asked, servers = [divisor_of_backward(step_context), step_context.loss_scale], list(range(self._link.servers))
        first = servers[:1] if self._backup else servers
        client.send(SUM, worker, self.number, extras=[*asked, *[NONE] * self._leaves], servers=first)
        replies = client.wait(text, ranks, patient=True)
        if self._backup and servers[1:]:
            # The first server has decided which contributions count; every push to it has gone to the others, too.
            client.send(
                SUM,
                worker,
                self.number,
                extras=[*asked, *self._counted(replies[0].extras)],
                servers=servers[1:],
            )
            replies += client.wait(text, ranks, patient=True)
        return self._read(step_context, [reply.extras for reply in replies])

    def _counted(self, extras: Sequence[float]) -> Sequence[float]:
        return extras[-self._leaves :]

    def _read(self, step_context: StepContext, answers: Sequence[Sequence[float]]) -> ReducedSums:
        size, count = self._tail.size + self._measured, len(self._order)
        tail, own = answers[0][: self._tail.size], answers[0][self._tail.size : size]
        if not self._tail.same(tail, step_context, int(sum(self._counted(answers[0])))):
            refuse_mismatch(self._link.comm, step_context)
        columns = zip(*(answer[size : size + count] for answer in answers), strict=True)
        self._squares = [sum(column) for column in columns]
        finite = zip(*(answer[size + count : size + 2 * count] for answer in answers), strict=True)
        self.nonfinite = tuple(name for name, flags in zip(self._names, finite, strict=True) if not all(flags))
        sums = self._tail.read(tail)
        self.used = sums.used
        return sums._replace(own=own)

    def read(self) -> None:
        """Read the summed gradients of the latest ``finish``, scaled to their mean, into this rank's send buffer.

        Not collective. The servers must not have been asked for the update, nor have dropped the sums.

        Raises:
            PeerError: a server does not reply in time, or has ended.
        """
        numbers = [0.0, 1.0, *[NONE] * self._leaves]
        self._link.ask(SUM, "reading the summed gradients", self.number, extras=numbers, flags=BACK)

    def send_edited(self, gradients: Sequence[Tensor | None], step_context: StepContext) -> None:
        """Push gradients that the script has edited, equal on all ranks, to the servers assigned to this rank.

        The servers take them in the coming update in place of their sums. Of N data ranks, rank r pushes to the servers
        r, r + N, …, so that each server gets its part of the gradients once. Not collective, but all data ranks have to
        call it; returns when this rank's servers have replied.

        Args:
            gradients: for each trained parameter, in the model's order, its gradient, or None.
            step_context: the step under way.

        Raises:
            PeerError: a server does not reply in time, or has ended.
        """
        comm = self._link.comm
        mine = range(comm.rank, self._link.servers, comm.size)
        if not mine:
            return
        numbers = torch.zeros(self._tail.size + self._measured, dtype=torch.float64)
        self._tail.fill(
            numbers[: self._tail.size], step_context, None, write_gradients(self._link.gradients, gradients)
        )
        text = f"push of edited gradients in step {step_context.local_step + 1}"
        self._link.ask(PUSH, text, self.number, extras=numbers.tolist(), flags=EDITED, servers=mine)

    def squares(self) -> list[float]:
        """Return the sum of squares of each trained parameter's gradient, as the parameter servers have summed it.

        The servers have computed the numbers from the gradients divided by count and loss scale. The numbers come with
        the replies in the latest ``finish`` and cover whole parameters, so that they are equal on all ranks. Not
        collective.

        Returns:
            One Python float for each trained parameter, in the model's order; an empty list before the first
            ``finish``.
        """
        return self._squares

    def scale(self, factor: float) -> None:
        """Do nothing: the gradients are on the parameter servers, which scale them themselves.

        The servers divide by count and loss scale, and multiply by the clipping factor on the update.

        Args:
            factor: unused; other reducers multiply every gradient by this factor.
        """


class SynchronousServerSync(RemoteGradients, AllReduceSync):
    """Gradient synchronisation with synchronous parameter servers (``parameter_server:mode=sync``).

    The servers sum the gradients of a step over all data ranks, make one update, and send the parameters back, so that
    the result equals that of all-reduce. With b backup workers the update is made without the b latest pushes.

    Args:
        config: options of the ``parameter_server`` strategy.
        run_context: communicators and settings of the run.

    Attributes:
        gradient_at: "servers": the summed gradients cannot be read on the ranks.
        gradient_ready: called with a parameter whose gradient backward has completed; does nothing here. Set by
            ``attach``.
        optimizers: after ``attach``, one optimizer that holds the hyperparameters and is never stepped.
    """

    _updates_on_device = False

    def __init__(self, config: ParameterServerConfig, run_context: RunContext) -> None:
        super().__init__(AllReduceConfig(), run_context)
        self.gradient_at = "servers"
        self._servers = config
        by_worker = run_context.reproducible or run_context.gradient_variance or config.backup > 0
        self._leaves = run_context.workers if by_worker else run_context.comms.replica.size

    def attach(self, replica: ReplicaRunner, make_optimizer: OptimizerFactory) -> GradientReadyHook:
        """Compare the model over the data ranks, broadcast rank 0's values, and start or join the parameter servers.

        Collective over the data ranks; blocks until every server has answered. Each server process builds an optimizer
        over its part of the parameters; on every rank, too, ``make_optimizer`` builds one, which holds the
        hyperparameters and is never stepped. Where servers and a CPU rank share memory, the ``.data`` of the trained
        parameters becomes the receive buffer.

        Args:
            replica: this rank's copy of the model, with its runner.
            make_optimizer: builds the run's optimizer from a list of (name, parameter).

        Returns:
            This object as the gradient-ready hook, which does nothing during backward: gradients are pushed after it.

        Raises:
            MismatchError: ranks hold models with different parameters or buffers.
            UsageError: the optimizer cannot step on servers, because its step needs a closure, draws from a global
                random generator, changes its parameter groups, or (with several servers) combines several tensors; it
                has stepped on servers of another run; or the transport asked for is not available.
            PeerError: a server does not answer, or has ended.
            ValueError: no parameter is trained.
        """
        comm = self._run_context.comms.replica
        self._named = parameters(replica.parts)
        agree_on_state(comm, replica.parts)
        broadcast_state(comm, replica.parts)
        trained = [(name, p) for name, p in self._named if p.requires_grad]
        self._trained = trained
        self._replica, self._parameters = replica, [p for _, p in trained]
        self._buffers = WorkerBuffers(replica.parts, self._run_context, replica.not_owned)
        self._optimizer = make_optimizer(self._named)
        if self._optimizer is None:
            raise ValueError("nothing is trained")
        if any(member in _SERVED for member in members_of(self._optimizer)):
            raise UsageError(
                "the optimizer has already stepped on parameter servers",
                why="what it keeps of the parameters was on them, and ended with that run",
                remedy="make a new optimizer for another run, or take strategy='mirrored'",
            )
        count, variance = len(trained), self._run_context.gradient_variance
        leaves, backup = self._leaves, self._servers.backup
        rows = enumerate(workers_by_rank(self._run_context))
        leaf = {w: w if leaves == self._run_context.workers else r for r, mine in rows for w in mine}

        def make_handler(shard: ParameterShard) -> SyncHandler:
            return SyncHandler(shard, ServerBarrier(leaves, backup), leaf, count, comm.size)

        def extras(settings: int) -> Mapping[int, int]:
            return sync_floats(leaves, count, settings, variance)

        self._link = ServerSession(
            self._servers, self._run_context, trained, make_optimizer, self._optimizer, make_handler, extras
        )
        self._pushes = self._reducer = ServerReducer(trained, self._run_context, self._link, leaves, backup)
        if self._link.home:
            for parameter, value in zip(self._parameters, self._link.values, strict=True):
                parameter.data = value
        self._last_worker = -1
        self._guard = WriteGuard("the servers' parameters replace those of every rank after each update")
        self._guard.note(trained)
        self.optimizers = (self._optimizer,)
        self.gradient_ready = self._reducer.gradient_ready
        return self

    def optimizer_step(self, stats: StepStats, step_context: StepContext) -> UpdateResult:
        """Have the servers clip the gradient and step their optimizers, and copy the new parameters into the model.

        A non-finite gradient makes no update. Every rank makes this request; the first one to arrive makes a server's
        update. Blocks until all servers have replied; there is no barrier over the ranks.

        Args:
            stats: result of ``reduce_gradients`` in this step: norm of the gradient, and whether the gradient is
                finite.
            step_context: the step under way, with the factor on the initial learning rate.

        Returns:
            An ``UpdateResult``: ``updates`` is 1, or 0 if the gradient was not finite; then ``skipped`` is True, and
            ``nonfinite`` has the names of parameters whose gradient is not finite.

        Raises:
            UsageError: the script has written parameters since its backward, or changed an option of the optimizer that
                servers do not follow (they follow floats such as weight decay, not ``nesterov``).
            PeerError: a server does not reply in time, or has ended.
        """
        self._guard.check_update(self._trained, f"step {step_context.local_step + 1}")
        factor, norm = clipped(stats.grad_norm, self._run_context.clip)
        settings = self._link.settings(step_context.lr_factor)
        numbers = [factor, norm, NONE, *settings] if stats.finite else [0.0] * (3 + len(settings))
        text = f"update of the parameters in step {step_context.local_step + 1}"
        self._link.ask(APPLY, text, self._pushes.number, extras=numbers, flags=0 if stats.finite else SKIP)
        self._pushes.number += 1
        if stats.finite:
            self._take_update()
        nonfinite = () if stats.finite else self._pushes.nonfinite
        return UpdateResult.joint(stats, nonfinite)

    def _take_update(self) -> None:
        """Copy the parameters of an update into the model, and note that the optimizer has stepped on servers."""
        self._take()
        _SERVED.update(members_of(self._optimizer))

    def _take(self) -> None:
        """Copy the received parameters into the model, unless they were received in place."""
        if not self._link.home:
            foreach_copy_([p.data for p in self._parameters], self._link.values)
        else:
            for parameter, value in zip(self._parameters, self._link.values, strict=True):
                # ``Module.to`` puts other memory under a parameter: ``model.double()`` to compute, and back.
                if parameter.data_ptr() != value.data_ptr():
                    parameter.data = value
        self._guard.note(self._trained)

    @property
    def by_worker(self) -> bool:
        """Whether each logical worker pushes its own gradients to the servers; otherwise each rank pushes one sum.

        A logical worker is one of N fixed shares of the global batch; a rank computes one or several. True in
        reproducible mode, with backup workers, where the variance of the workers' gradients is measured, and where
        there are as many logical workers as ranks.
        """
        return self._leaves == self._run_context.workers

    def reduce_gradients(self, step_context: StepContext) -> StepStats:
        """Wait for the servers' sums of gradients and loss sums over all ranks, and return the step's statistics.

        Pushes this rank's gradients first, where they are pushed once a rank. The summed gradients stay on the
        parameter servers, which divide them by the global count. The servers answer once they have all pushes of the
        step, one from each logical worker (fixed share of the global batch) or one from each data rank, all of which
        therefore call this method; with backup workers the servers leave out the latest pushes.

        Args:
            step_context: the step under way, with its number and the loss scale that the gradients contain.

        Returns:
            A ``StepStats`` with the attributes ``loss`` and ``metrics`` (by name), means over the global batch (over
            the summed pushes with backup workers); ``count`` (samples or tokens); ``grad_norm``, the L2 norm of the
            whole gradient before clipping; ``finite``, whether this gradient is finite; and ``stop``, whether a rank
            asks to stop.

        Raises:
            UsageError: since the last update the script has written a parameter; or, on an accelerator, it has written
                a buffer that forwards write too, such as batch-norm statistics, and this rank computes several logical
                workers, each with its own value of the buffer.
            MismatchError: ranks are in different steps.
            PeerError: a server does not reply in time, or has ended.
        """
        self._guard.check(self._trained, f"step {step_context.local_step + 1}")
        return super().reduce_gradients(step_context)

    def own_gradients(self) -> OwnGradients:
        """Return the trained parameters, whose ``.grad`` has this rank's own gradients until the push to the servers.

        The gradient noise scale is measured with these gradients. Not collective.

        Returns:
            An ``OwnGradients``, whose ``parameters`` is a list of the trained parameters on this rank. Its
            ``optimizers`` is empty, because the optimizer state is on the servers.
        """
        return OwnGradients(self._counted())

    def merged(self) -> dict[str, Tensor]:
        """Return the model's parameters, and its buffers merged over logical workers, as whole tensors.

        Logical workers are the N fixed shares of the global batch, each with buffers of its own. Batch-norm statistics
        are pooled over all workers, other floating buffers averaged, and of integers the largest is taken. Collective
        over the data ranks: with N > 1 an all-gather of the buffers for each dtype. With backup workers a rank may have
        missed the latest update, and reads the parameters from the servers first, between two barriers over the data
        ranks.

        Returns:
            A dict from names of all parameters and buffers in the model to tensors; parameters share memory with the
            model's own, and so do the buffers with N = 1.

        Raises:
            UsageError: since the last step the script has written a buffer that forwards write too, such as batch-norm
                statistics, and this rank computes several workers, each with its own value of the buffer.
            PeerError: with backup workers, a rank is lost, or a server does not reply in time.
        """
        if self._servers.backup:
            # Ranks whose pushes came late have older parameters.
            self._link.barrier("reading the parameters")
            self._link.ask(READ, "reading the parameters")
            self._take()
            self._link.barrier("the parameters are read")
        return super().merged()

    def replicated(self) -> Mapping[str, Tensor] | None:
        """Return the tensors of the model of which all ranks must hold equal copies. Not collective.

        The caller compares digests of the tensors over ranks.

        Returns:
            A mapping from names to the model's own tensors: all parameters, and the buffers if the run has a single
            logical worker (share of the global batch with its own buffers). None with backup workers, where ranks whose
            gradients came late have older parameters.
        """
        return None if self._servers.backup else super().replicated()

    def state(self) -> dict[str, Mapping[str, Tensor | TensorSlice]]:
        """Return this rank's part of a checkpoint by group: ``model``, ``optim`` and ``workers``.

        Collective over the data ranks: an all-gather of the buffers for each dtype with several logical workers; with
        backup workers also barriers around the reads of the servers. Rank 0 alone asks the servers for the optimizer
        state.

        Returns:
            Three groups, each a mapping from names to tensors: ``model`` has some of the parameters and merged buffers,
            which are shared out over the ranks, by names in the model; ``optim`` has, on rank 0, the parameter servers'
            optimizer state under ``"{parameter name}/{state key}"``, and is empty on other ranks; ``workers`` has the
            buffers of each logical worker (share of the global batch with its own buffers) on this rank under ``"{index
            of the worker}/{buffer name}"``. Parameters are the model's own tensors, not copies.

        Raises:
            UsageError: since the last step the script has written a buffer that forwards write too, such as batch-norm
                statistics, and this rank computes several workers, each with its own value of the buffer.
            PeerError: a rank is lost, or a server does not reply in time.
        """
        comm, model = self._run_context.comms.replica, self.merged()
        optim = self._link.optimizer_state()
        if self._servers.backup:
            self._link.barrier("the optimizer is read")
        return {"model": written(model, self._replica, comm), "optim": optim, "workers": self._buffers.state()}

    def load(self, saved: SavedState) -> None:
        """Restore parameters and buffers on this rank, and parameters and optimizer state on the parameter servers.

        Every rank reads the model and the buffers of its logical workers (shares of the global batch); rank 0 sends
        parameters and optimizer state to the servers. Collective over the data ranks: rank 0 broadcasts whether the
        servers have loaded them, for which all ranks wait.

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
        self._link.restore(saved, {name: p.data for name, p in self._named}, self._replica.specs)
        self._guard.note(self._trained)

    def facts(self) -> dict[str, object]:
        """Return the parameter servers' statistics for ``summary.json``. Not collective: rank 0 alone asks the servers.

        Returns:
            On rank 0 ``{"servers": [{"at": endpoint, …}]}`` with one entry for each server: its ZeroMQ address
            (``at``), number of updates (``updates``) and of dropped pushes (``late``), numbers of refused messages
            (``malformed``) and connections (``keys_refused``), bytes of tensors sent and received (``bytes``), and,
            after a push, ``updates_per_second``. An empty dict on all other ranks.

        Raises:
            PeerError: on rank 0, a server does not reply in time, or has ended.
        """
        return self._link.facts()

    def _all_finite(self) -> bool:
        return not self._pushes.nonfinite
