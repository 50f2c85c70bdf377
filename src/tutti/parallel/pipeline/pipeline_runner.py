"""Run micro-batches through the pipeline stages of this rank, in a schedule's order.

The user's own loss function runs on every stage. It calls ``StageRelay`` as its model: the relay receives the previous
stage's activations, computes this stage, and either returns the model's output (last stage) or ends the loss function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.broadcast import broadcast_result
from tutti.comm.communicator import Communicator
from tutti.comm.graph_breaks import left_out_of_graphs
from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.errors import TuttiError, UsageError
from tutti.nn.absent_tensor import put_attributes_away, put_away
from tutti.nn.ac_and_compile import has_compiled_code
from tutti.nn.gradient_hooks import add_accumulation_hook
from tutti.nn.script_mode import ScriptMode
from tutti.nn.sparse_layers import sparse_parameters
from tutti.nn.swap import parameters, training_mode
from tutti.parallel.ddp import loss_output
from tutti.parallel.ddp.loss_count import annotate_targets, loss_count
from tutti.parallel.ddp.output_graph import reads_output
from tutti.parallel.ddp.replica_part import ReplicaPart
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.pipeline_schedule import Action, bubble_fraction, forwards, make_order
from tutti.parallel.pipeline.split_backward import BackwardRoots, SplitBackward
from tutti.parallel.pipeline.stage_messages import shapes
from tutti.parallel.pipeline.stage_ownership import StageOwnership, groups_of
from tutti.parallel.pipeline.stage_parameters import StageParameters
from tutti.parallel.pipeline.stage_passes import MicroBatchState, StagePasses
from tutti.parallel.pipeline.stage_relay import StageRelay
from tutti.parallel.pipeline.staged_call import StagedModel
from tutti.parallel.pipeline.tied_gradients import SharedGradients
from tutti.torch_compat import compiled_module, is_fake, replace_call, tree_leaves
from tutti.types.micro_batch import LossFn, LossSums, MicroBatch
from tutti.types.replica_runner import GradientReadyHook
from tutti.types.run_context import RunContext


class PipelineRunner(ReplicaPart):
    """Runs micro-batches through this rank's virtual pipeline stages of one replica of the model.

    The inherited attribute ``parts`` lists the stages' modules; their tensors have the names of the whole model. Code
    that calls ``plain`` runs the stages one after another, on all ranks of the replica together.

    Args:
        config: options of the layout, among them the schedule.
        run_context: mesh, communicators and flags of the run.
        plain: the prepared module: a model, or a container of several.
        holding: this rank's virtual stages, and which ranks hold which tensors; None where no model is cut.

    Attributes:
        plain: the prepared module, with placeholders for tensors that other ranks hold.
        passes: for each model that is cut, the calls of the model through its stages.
        own_backward: whether micro-batches run one after the other, each with forward and backward on every rank: no
            model is cut, or the loss function calls a model several times for a micro-batch.
        bubble: idle fraction, 0 to 1, of the schedule of the last training step; None before the first one, and where
            no model is cut.
        shared: sums the gradients of parameters that several stages use.
        not_owned: names of tensors of which this rank's stages hold a copy that another rank saves and counts in norms.
        summary: entries for the run's header, text by label: the stages of each model, and the schedule's idle time.
        script_parameters: function mode that gives the script the parameters of all stages; not set where no model is
            cut.
        script_code, model_code: contexts of ``ReplicaPart`` that switch this mode on and off; without effect where no
            model is cut, and in compiled code.
        calls_in_body: number of calls of models since ``begin``.
        split_backwards: one ``SplitBackward`` a virtual stage for the schedule ``zero_bubble``, otherwise empty.
    """

    def __init__(
        self,
        config: PipelineConfig | LayersConfig,
        run_context: RunContext,
        plain: nn.Module,
        holding: StageOwnership | None,
    ) -> None:
        parts = [plain] if holding is None else holding.parts
        super().__init__(parts[0], run_context, others=parts[1:], plain=plain)
        self._comm = run_context.comms.axis("stage")
        self._schedule, self._ranks, self._here = config.schedule, self._comm.size, self._comm.rank
        self._known: dict[bool, tuple[LossFn, tuple[str, ...]]] = {}
        self.passes: list[StagePasses] = []
        self.own_backward = holding is None or any(each.cuts.several_calls for each in holding.models)
        self._touched: set[Tensor] = set()
        self.calls_in_body = 0
        self._grad_hook: GradientReadyHook | None = None
        self._reporting = False
        self._forget_writes: Callable[[], None] = lambda: None
        if holding is None:
            self.shared = SharedGradients([], run_context.reproducible)
            return
        sparse = sparse_parameters([plain]).values()
        self.shared = SharedGradients(groups_of(holding, run_context), run_context.reproducible, sparse)
        self.not_owned = holding.not_owned
        for model in holding.models:
            self.passes.append(StagePasses(self, model, self._comm, holding.drawn_apart))
            label = f"stages of {model.name}" if len(holding.models) > 1 else "stages"
            self.summary = {**self.summary, **_summary(label, model.cuts, config, self._ranks)}
        if config.schedule == "zero_bubble" and len(self.passes) == 1:
            self.split_backwards = [SplitBackward(stage.module) for stage in self.passes[0].virtual_stages]
        if not self.own_backward:
            self._relay = StageRelay(self.passes[0])
        owners = {p: (name, holding.stages[name][0] % self._ranks) for name, p in parameters([plain])}
        whole = run_context.mesh.tensor == 1 and not run_context.shards_parameters
        self.script_parameters = StageParameters(owners, self._comm if whole else None)
        held = [stage.holder for each in self.passes for stage in each.virtual_stages]
        if not has_compiled_code(held, run_context):
            # Compiled code takes no function mode.
            script = ScriptMode(self.script_parameters)
            self.script_code, self.model_code = script.script_code, script.model_code
        self._forget_writes = self.script_parameters.forget
        places = {name: f"on stage {rows[0]} of the model" for name, rows in holding.stages.items()}
        put_away(plain, places, self.parts, self.script_parameters.undo, self._comm.device)
        for each in self.passes:
            staged = left_out_of_graphs(StagedModel(each, self._comm))
            replace_call(each.model, staged)
            if each.model is compiled_module(plain):
                replace_call(plain, staged)
                self.summary = {**self.summary, "compiled": "no, stages run eagerly; compile=… compiles each of them"}
            put_attributes_away(each.model, dict.fromkeys(each.cuts.written, "on another stage"), self.parts)

    @property
    def stage_copies(self) -> Sequence[tuple[Communicator, Sequence[nn.Parameter]]]:
        """Trained parameters that several pipeline stages use, such as tied weights, with the ranks that hold copies.

        A list of pairs: a communicator over the ranks of the stages that hold the same parameters, and the list of
        these parameters on this rank, in an order equal on these ranks.
        """
        return self.shared.copies

    def connect(self, grad_hook: GradientReadyHook) -> None:
        """Set the hook whose ``gradient_ready`` is called for each trained parameter of this rank's pipeline stages.

        Each ``run``, over the micro-batches of one logical worker (one of N fixed shares of the global batch), calls
        ``gradient_ready`` once for each parameter that gets a gradient, when the gradient over all micro-batches is
        complete: in the backward of the last micro-batch, or, for parameters that several stages share, after their
        gradients have been summed over the stages. Not collective.

        Args:
            grad_hook: object with the method ``gradient_ready(parameter)``; replaces the hook of an earlier call.
        """
        for handle in self._connected:
            handle.remove()
        trained = [p for _, p in parameters(self.parts) if p.requires_grad and p not in self.shared.parameters]
        self._connected = [add_accumulation_hook(parameter, self._ready) for parameter in trained]
        self._grad_hook = grad_hook

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take over new parameter objects that have replaced former ones in this rank's pipeline stages.

        Afterwards the sum of gradients over stages and the weight backward use the new objects. Not collective.

        Args:
            by: mapping from each former parameter to the new one in its place; parameters that are not keys stay.
        """
        self.shared.replace(by)
        for each in self.split_backwards:
            each.replace(by)

    def _ready(self, parameter: Tensor) -> None:
        self._touched.add(parameter)
        if self._reporting and self._grad_hook is not None:
            self._grad_hook.gradient_ready(parameter)

    def run(self, micro_batches: Sequence[MicroBatch], loss: LossFn, grad_hook: GradientReadyHook | None) -> LossSums:
        """Run one logical worker's micro-batches through all pipeline stages, in the schedule's order.

        A logical worker is one of N fixed shares of the global batch. Collective over the ranks of one replica's
        stages, all of which make this call with the same micro-batches: point-to-point messages between neighbouring
        stages, an all-reduce (or all-gather) of the gradients of each parameter that several stages share, and a
        broadcast of the loss sums from the last stage. A loss function that calls the model several times for a
        micro-batch runs on every rank, with one micro-batch after the other.

        Gradients are added to the ``.grad`` of this rank's parameters. Backward weights each sample's loss by
        ``MicroBatch.weight``, so that gradients of all micro-batches are to be summed, not averaged.

        Args:
            micro_batches: one logical worker's micro-batches of a step, in order; at least one.
            loss: the user's loss function ``loss_fn(model, batch)``, called for each micro-batch on every virtual
                stage; it returns a mean, ``(sum, count)`` or ``(sum, count, metric_sums)``.
            grad_hook: gradient-ready hook; None to run forwards only. Its ``prepare_for_backward`` is called once,
                before this rank's first backward of the last micro-batch, with the loss sums so far on the last
                stage's rank and None on others; not at all for a dummy micro-batch (without samples).
                ``gradient_ready`` is called on the hook that ``connect`` has set, usually the same object; with a
                single stage, and for a loss function that calls the model several times, on ``grad_hook`` itself.

        Returns:
            A ``LossSums`` over all micro-batches, equal on every stage: the float tensor ``sums`` holds loss sum, count
            and metric sums in this order, ``names`` the names of the metrics, ``samples`` the number of samples.

        Raises:
            UsageError: the loss has an unknown form or requires no gradient; the loss function calls the model in a way
                that stages cannot follow; the script has changed an attribute of the model that the trace of its
                forward holds as a constant; or the script has put a forward hook on a module that no stage calls.
            Exception: the loss function's own error. If it fails on the last stage alone, after the model's output,
                that stage's rank raises it. The other ranks then raise UsageError in the first call with this loss
                function, and PeerError in later calls.
            PeerError: a rank of the stages is lost or late.
            MismatchError: the ranks of the stages wait in different calls.
        """
        training = grad_hook is not None
        count, chunks = len(micro_batches), len(self.parts)
        if training and self.passes and micro_batches[0].samples:
            name = "one_by_one" if self.own_backward else self._schedule
            self.bubble = bubble_fraction(name, self._ranks, count, 1 if self.own_backward else chunks)
        if self.own_backward:
            return super().run(micro_batches, loss, grad_hook)
        order = (
            make_order(self._schedule, self._ranks, count, chunks) if training else forwards(self._ranks, count, chunks)
        )
        [passes] = self.passes
        flights: dict[tuple[int, int], MicroBatchState] = {}
        turn = _Turn(passes, loss, grad_hook)
        passes.update_learns()
        for each in self.split_backwards:
            each.look()
        self._forget_writes()
        if training:
            self.shared.begin()
        actions = order.ranks[self._here]
        expected = 0
        passes.begin()
        if training:
            passes.watch_hooks(all_stages=False)
        for number, action in enumerate(actions):
            if action.kind != "F":
                self._agree_on_loss(turn)
            # Inputs of this action and of the next one are received while this one computes.
            expected = max(expected, number)
            while expected < min(number + 2, len(actions)) and self._expect(
                passes, (ahead := actions[expected]), micro_batches[ahead.micro], training
            ):
                expected += 1
            micro_batch, at = micro_batches[action.micro], (action.stage, action.micro)
            if action.kind == "F":
                flights[at] = self._forward(action, micro_batch, turn)
                if turn.failure is not None:
                    break
                if not training:
                    del flights[at]
            else:
                self._backward(action, micro_batch, flights[at], turn)
                if action.kind != "I":
                    del flights[at]
        self._agree_on_loss(turn)
        passes.messages.finish()
        if training:
            self._finish_shared(count, turn)
        if not micro_batches[0].samples:
            self.forget()
        return self._broadcast_sums(turn, sum(micro_batch.samples for micro_batch in micro_batches))

    def _expect(self, passes: StagePasses, action: Action, micro_batch: MicroBatch, training: bool) -> bool:
        """Start the receives of an action's inputs; False where their forms are not known yet."""
        key = (training, *shapes(micro_batch.batch))
        if action.kind == "F":
            return action.stage == 0 or passes.messages.expect("activations", (action.stage, *key))
        if action.kind == "W" or action.stage == passes.last or not passes.learns[action.stage + 1]:
            return True
        return passes.messages.expect("gradients", (action.stage + 1, *key))

    def _forward(self, action: Action, micro_batch: MicroBatch, turn: _Turn) -> MicroBatchState:
        """Run the loss function up to its call of the model; on the last stage, up to the loss."""
        stage, chunk = action.stage, action.stage // self._ranks
        training = turn.grad_hook is not None
        self.enter(micro_batch, turn.passes.calls_before[chunk])
        flight = MicroBatchState(training, (training, *shapes(micro_batch.batch)))
        if self.split_backwards and training:
            flight.calls = self.split_backwards[chunk].record()
        self._relay.enter(stage, flight)
        try:
            self._compute_loss(stage, micro_batch, flight, turn)
        except Exception as error:
            # The other ranks wait for the broadcast in _agree_on_loss.
            fatal = isinstance(error, TuttiError) and not isinstance(error, UsageError)
            # An error before the call of the model occurs on every stage.
            if fatal or stage != turn.passes.last or self._knows(turn) or not self._relay.computed:
                raise
            turn.failure = error
            return flight
        if training:
            self.draws.check()
            flight.moment = self.draws.moment
        return flight

    def _compute_loss(self, stage: int, micro_batch: MicroBatch, flight: MicroBatchState, turn: _Turn) -> None:
        """Call the loss function; on the last stage, store the root of backward and add to the loss sums."""
        with self.script_code():
            result = self._relay.call(turn.loss, micro_batch.batch)
        if not self._relay.called:
            raise UsageError("the loss function did not call the model", remedy="call model(...) once in it")
        if stage == turn.passes.last:
            if any(is_fake(leaf) for leaf in tree_leaves(result)):
                raise UsageError(
                    "the loss depends on a value of another stage that the stages do not send",
                    why="with the first micro-batch it did not depend on it, or the model returns it in an object whose"
                    " tensors are not known",
                    remedy="return tensors, tuples, lists or dicts of them from the model, or take mirrored",
                )
            objective, start, part = loss_output.read_loss(result, micro_batch)
            if flight.training:
                loss_output.check_trains(objective)
            flight.roots = BackwardRoots([objective], [start])
            turn.total = part if turn.total is None else turn.total + part

    def _knows(self, turn: _Turn) -> bool:
        """Return whether the last stage has reported success of this loss function before."""
        known = self._known.get(turn.grad_hook is not None)
        return known is not None and known[0] is turn.loss

    def _agree_on_loss(self, turn: _Turn) -> None:
        """Broadcast from the last stage, before the first backward, whether the loss function succeeded. Collective.

        Raises on every rank where it failed: on the last stage the error itself, on the others a UsageError.
        """
        if self._knows(turn):
            return
        names = None if turn.total is None else list(turn.total.names)
        reply = {"names": names} if turn.failure is None else _as_reply(turn.failure)
        reply = self._comm.broadcast_json(reply, self._ranks - 1, "what the loss function returns")
        if turn.failure is not None:
            raise turn.failure
        if "what" in reply:
            raise UsageError(**reply)
        self._known[turn.grad_hook is not None] = turn.loss, tuple(reply["names"])

    def _backward(self, action: Action, micro_batch: MicroBatch, flight: MicroBatchState, turn: _Turn) -> None:
        """Run a backward, or its input or weight half, and send the inputs' gradients to the previous stage."""
        kind, stage, _ = action
        chunk = stage // self._ranks
        self.draws.moment = flight.moment
        last = bool(micro_batch.samples) and micro_batch.last and kind != "I"
        if last and turn.grad_hook is not None:
            turn.arm()
        if kind != "W" and flight.roots is None:
            pairs = turn.passes.receive_gradients(flight, stage, flight.key)
            flight.roots = BackwardRoots([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        roots = flight.roots
        self._reporting = last
        if roots is not None and any(tensor.requires_grad for tensor in roots.tensors):
            if kind == "B":
                torch.autograd.backward(roots.tensors, roots.gradients)
            elif kind == "I":
                found = self.split_backwards[chunk].inputs(roots, flight.entered, flight.calls)
                entered, flight.call_gradients = found[: len(flight.entered)], found[len(flight.entered) :]
                flight.gradients |= {i: g for i, g in enumerate(entered) if g is not None}
            else:
                for parameter in self.split_backwards[chunk].weights(roots, flight.calls, flight.call_gradients):
                    if parameter not in self.shared.parameters:
                        self._ready(parameter)
        self._reporting = False
        if kind != "I" and self.shared.parameters:
            self.shared.take(action.micro)
        if kind != "W" and flight.entered:
            own = [flight.gradients.get(i) for i in range(len(flight.entered))]
            turn.passes.messages.send_gradients(own, flight.entered, (stage, *flight.key))

    # --- calls of the whole model: custom training loops -----------------------------------------------------------

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seed the model's random number streams (dropout) for one micro-batch, before a custom loop's body.

        Called before the script's code for the micro-batch. Accepts the script's writes to parameters so far: a later
        error no longer reverts them (``StageParameters.forget``). A dummy micro-batch (without samples) gets copies of
        the buffers, so that its forward leaves the model's own unchanged. Not collective.

        Args:
            micro_batch: the micro-batch; its key, a hash of seed, step, logical worker (share of the global batch) and
                micro-batch, seeds the streams.
        """
        self._forget_writes()
        self.calls_in_body = 0
        super().begin(micro_batch)

    def backward(
        self,
        result: Any,
        micro_batch: MicroBatch,
        before: LossSums | None,
        grad_hook: GradientReadyHook,
        retain_graph: bool = False,
    ) -> LossSums:
        """Run backward of one micro-batch, on all stages for each call of the model; gradients add up in ``.grad``.

        Collective over the ranks of the replica's stages, which all compute the loss from the model's output and make
        this call: point-to-point messages between neighbouring stages, and sums over stages of shared parameters'
        gradients. A parameter's gradient is complete, and reported by ``grad_hook.gradient_ready``, after the backward
        of the last of these calls in the worker's last micro-batch.

        Args:
            result: the loss function's result: a mean, ``(sum, count)`` or ``(sum, count, metric_sums)``.
            micro_batch: the micro-batch of the forward.
            before: loss sums of earlier micro-batches of the same logical worker (share of the global batch); None for
                the first.
            grad_hook: gradient-ready hook; its ``prepare_for_backward`` is called with the loss sums so far if this is
                the worker's last micro-batch.
            retain_graph: keep the autograd graph for another backward, as in ``Tensor.backward``.

        Returns:
            A ``LossSums`` of the worker so far, this micro-batch included; its float tensor ``sums`` holds loss sum,
            count and metric sums in this order.

        Raises:
            UsageError: the loss has an unknown form or requires no gradient; or it depends on several calls of the
                model, and a parameter has a gradient hook of the script.
            PeerError: a rank of the stages is lost or late.
        """
        self._touched.clear()
        for each in self.passes:
            each.backwards = 0
        total = super().backward(result, micro_batch, before, grad_hook, retain_graph)
        for each in self.passes:
            each.backwards = -1
        if micro_batch.samples and micro_batch.last:
            for _, parameter in parameters(self.parts):
                if parameter in self._touched or (parameter in self.shared.parameters and parameter.grad is not None):
                    grad_hook.gradient_ready(parameter)
        return total

    def read_loss(self, result: Any, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, LossSums]:
        """Parse the loss that a custom loop has computed on the ranks of all stages, before its backward.

        Where a scalar loss contains a number that the model has returned, such as a loss of its own, the call is
        collective over the ranks of the replica's stages: the last stage's rank, which has the graph of this number,
        broadcasts the number of targets that it is a mean over. Otherwise nothing is sent.

        Args:
            result: a scalar (mean over the micro-batch's samples, or over the targets of a cross-entropy), ``(sum,
                count)`` or ``(sum, count, metric_sums)`` with a mapping of metrics by name. In place of the mean or of
                the sum a tensor (samples,) of one loss a sample is allowed.
            micro_batch: the micro-batch that the loss was computed on.

        Returns:
            A tuple of three: the tensor to call ``backward`` on; the start gradient to pass to that ``backward``, of
            the same shape, scaled so that the gradients of all micro-batches add up to that of the mean loss; and a
            ``LossSums``, whose tensor ``sums`` has loss, count and metrics summed over the micro-batch, in this order.

        Raises:
            UsageError: on all ranks, ``result`` has another form; or it is a scalar loss of a part of the global batch,
                and such losses do not add up to the loss of the whole batch, such as the root of a mean.
            PeerError: a rank of the stages is lost or late.
        """
        if isinstance(result, Tensor) and result.numel() == 1 and micro_batch.samples and reads_output(result):
            count = broadcast_result(
                self._comm, self._ranks - 1, partial(_count_of, result, micro_batch), "number of targets of the loss"
            )
            if count is not None:
                annotate_targets(result, torch.tensor(count, dtype=result.dtype), micro_batch.samples)
        return super().read_loss(result, micro_batch)

    @contextmanager
    def evaluating(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Return a context in which the model holds other values, for evaluation: in eval mode, without autograd.

        The whole model and this rank's stages are in eval mode within it. On exit the previous values and training
        modes come back. Not collective.

        Args:
            values: tensors to put in place of parameters and buffers of this rank's stages, by name in the model; all
                other parameters and buffers keep their values.
        """
        with training_mode([self.plain], training=False), super().evaluating(values):
            yield

    def _finish_shared(self, count: int, turn: _Turn) -> None:
        self.shared.finish(count)
        if turn.armed and self._grad_hook is not None:
            for parameter in self.shared.parameters:
                self._grad_hook.gradient_ready(parameter)

    def _broadcast_sums(self, turn: _Turn, samples: int) -> LossSums:
        """Broadcast the last stage's loss sums to every stage."""
        _, names = self._known[turn.grad_hook is not None]
        sums = torch.zeros(2 + len(names), dtype=torch.float64, device=self._comm.device)
        if turn.total is not None:
            sums.copy_(turn.total.sums)
        self._comm.broadcast_unchecked(sums, self._ranks - 1, "totals of the last stage")
        return LossSums(sums, names, samples)


@dataclass
class _Turn:
    """State of one ``run``, that is of one logical worker's micro-batches."""

    passes: StagePasses
    loss: LossFn
    grad_hook: GradientReadyHook | None
    total: LossSums | None = None
    armed: bool = False
    failure: Exception | None = None

    def arm(self) -> None:
        """Call the gradient-ready hook's ``prepare_for_backward``, unless this was done earlier in this ``run``.

        To be called before the first backward after which a gradient is complete. Without a hook nothing is called.
        """
        if not self.armed and self.grad_hook is not None:
            self.grad_hook.prepare_for_backward(self.total)
        self.armed = True


def _count_of(loss: Tensor, micro_batch: MicroBatch) -> float | None:
    """Return the number of targets that a loss is a mean over, as a JSON value: see ``loss_count``."""
    count = loss_count(loss, micro_batch)
    return None if count is None else float(count)


def _as_reply(error: Exception) -> dict[str, Any]:
    """Return the fields of the UsageError that other ranks raise where the loss function fails on the last stage."""
    if isinstance(error, TuttiError):
        return {"what": error.what, "where": error.where, "why": error.why, "remedy": error.remedy}
    return {
        "what": "the loss function failed on the last stage of the model",
        "why": f"{type(error).__name__}: {error}",
        "remedy": "mend it there, or take strategy='mirrored'",
    }


def _summary(
    label: str, found: stage_partition.StagePartition, config: PipelineConfig | LayersConfig, ranks: int
) -> dict[str, str]:
    """Return lines for the run's header: where the model is cut, and how long devices are idle."""
    where = f"{len(found.shares)}, cut before {', '.join(found.names)}" if found.names else "whole on the last one"
    shares = " | ".join(f"{share:.0%}" for share in found.shares)
    if config.schedule == "one_by_one" or found.several_calls:
        waits = f"devices work in turn, each is idle {1 - 1 / ranks:.0%} of the time"
    else:
        known = [
            (m, bubble_fraction(config.schedule, ranks, m, config.chunks)) for m in (1, ranks, 2 * ranks, 4 * ranks)
        ]
        waits = f"{config.schedule}, idle " + ", ".join(f"{part:.0%} with {m}" for m, part in known) + " micro-batches"
    text = f"{where} ({shares} of the {'time' if found.measured else 'parameters'})"
    return {label: text, "schedule": waits}
