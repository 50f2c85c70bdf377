"""Cut a replica into pipeline stages over several devices, and run micro-batches through them in a schedule's order.

The user's own loss function runs on every stage. It calls ``_Relay`` as its model: the relay receives the previous
stage's activations, computes this stage, and either returns the model's output (last stage) or ends the loss function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.config.layout_config import LayersConfig, PipelineConfig
from tutti.errors import TuttiError, UsageError, counted, script_line, script_line_of
from tutti.nn import ac_policy
from tutti.nn.absent_tensor import put_attributes_away, put_away
from tutti.nn.ac_and_compile import restore_forwards
from tutti.nn.forward_hooks import KeptGraphs, find_script_hook
from tutti.nn.gradient_hooks import add_accumulation_hook, has_accumulation_hook, has_gradient_hook
from tutti.nn.rng_streams import keyed_modules
from tutti.nn.script_mode import ScriptMode
from tutti.nn.swap import describe_tensors, parameters, training_mode
from tutti.nn.sync import peers_of
from tutti.nn.untouched import untouched
from tutti.nn.untraced import Constants, written_attributes
from tutti.parallel.ddp import loss_output
from tutti.parallel.ddp.replica_part import ReplicaPart
from tutti.parallel.pipeline import stage_partition
from tutti.parallel.pipeline.module_timing import module_seconds
from tutti.parallel.pipeline.pipeline_schedule import Action, bubble_fraction, forwards, make_order
from tutti.parallel.pipeline.split_backward import BackwardRoots, LayerOutput, SplitBackward
from tutti.parallel.pipeline.stage_messages import KINDS, StageMessages, shapes
from tutti.parallel.pipeline.stage_ownership import StageOwnership, groups_of, stages_here
from tutti.parallel.pipeline.stage_writes import StageWrites
from tutti.parallel.pipeline.staged_call import StagedModel
from tutti.parallel.pipeline.tied_gradients import SharedGradients
from tutti.parallel.pipeline.virtual_stage import VirtualStage, crossing_values
from tutti.python_compat import calling_frame
from tutti.torch_compat import is_compiled, is_fake, replace_call, tensor_version, tree_leaves, uncompiled_call
from tutti.types import GradientReadyHook, LossFn, LossSums, MicroBatch, RunContext


class PipelineLayout:
    """Cuts a model into pipeline stages, of which each rank keeps some, and builds the runner of this rank's stages.

    Used for the layouts (ways to place a model on ranks) ``pipeline`` and ``model_parallel``.

    Args:
        config: options of the layout: the schedule, the number of virtual stages a rank, any named cuts.
        run_context: mesh, communicators and flags of the run.
    """

    def __init__(self, config: PipelineConfig | LayersConfig, run_context: RunContext) -> None:
        self._config, self._run_context = config, run_context

    def build(self, plain: nn.Module) -> PipelineRunner:
        """Cut the model into pipeline stages, and return the runner of this rank's stages.

        Collective over all ranks of the job: the ranks of a replica compare their models, rank 0 broadcasts the
        modules' times where it measures them, all ranks compare the cuts, and parameters that several stages share are
        broadcast over the ranks that hold them. Runs the loss function on a first micro-batch, if the run has one.

        Args:
            plain: the whole model, equal on all ranks; changed in place: placeholders replace the tensors that other
                ranks hold.

        Returns:
            The runner, whose ``run`` sends micro-batches through all stages of the replica, together with the runners
            of the other pipeline ranks. It holds the parameters of this rank's stages only, on the rank's device.

        Raises:
            MismatchError: the ranks have built models with different parameters or buffers, or find different cuts.
            UsageError: the model cannot be cut into that many stages, or activation checkpointing matches no module.
        """
        return self.replica(plain, *self.cut_stages(plain))

    def replica(
        self, plain: nn.Module, virtual_stages: Sequence[VirtualStage], holding: StageOwnership | None
    ) -> PipelineRunner:
        """Return the runner of this rank's virtual pipeline stages of the model, moved to this rank's device.

        Collective over all ranks of the job: creates subgroups for parameters that several stages share, and broadcasts
        these parameters from the first rank that holds them. Activation checkpointing and ``torch.compile`` are applied
        as the run asks.

        Args:
            plain: the whole model, changed in place: placeholders replace the tensors that other ranks hold.
            virtual_stages: this rank's virtual stages, the first result of ``cut_stages``.
            holding: which ranks hold which tensors, the second result of ``cut_stages``; None where the model is not
                cut.

        Returns:
            The runner, whose ``run`` computes this rank's part of forward and backward of micro-batches.
        """
        return PipelineRunner(self._config, self._run_context, plain, virtual_stages, holding)

    def cut_stages(
        self, plain: nn.Module, closed: Collection[str] = ()
    ) -> tuple[Sequence[VirtualStage], StageOwnership | None]:
        """Cut the model into virtual pipeline stages, the same number on each pipeline rank.

        The number of virtual stages a rank is an option of the layout, and so are names of modules before which to cut.
        Without such names, the cuts balance the modules' measured times or, where no times are taken, such as in a
        reproducible run, their numbers of parameters. Collective over all ranks of the job: the ranks of a replica
        compare their models, rank 0 broadcasts the times, and all ranks compare the cuts. Runs the loss function on a
        first micro-batch, if the run has one, on each rank, and on rank 0 three times more to measure times.

        Args:
            plain: the whole model; it stays as it was, and the stages share its modules and parameters.
            closed: names of modules that no cut may go through.

        Returns:
            A pair. First a list of this rank's virtual stages, in the model's order: each with its ``module`` and the
            names of the values that the stage receives (``incoming``) and sends (``outgoing``). Second a
            ``StageOwnership``, whose ``stages`` has for each parameter and persistent buffer of the model the indices
            of the virtual stages that hold it; None with one pipeline rank, where the only virtual stage is the whole
            model.

        Raises:
            MismatchError: the ranks have built different models, or find different cuts.
            UsageError: the model cannot be cut into that many stages, consists of several models without a common
                forward, or has nothing for activation checkpointing to recompute.
        """
        stage = self._run_context.comms.p2p_channels(KINDS, "stage")
        self._run_context.comms.model.agree(
            describe_tensors([plain]),
            "the model",
            "build the same model, in the same order and precision, on every rank",
        )
        ac_policy.check_units(plain, self._run_context.activation_checkpointing)
        restore_forwards(plain)
        if stage.size == 1:
            return [VirtualStage(plain, alone=True)], None
        config, run_context = self._config, self._run_context
        if run_context.trial is None and isinstance(plain, nn.ModuleList | nn.ModuleDict):
            raise UsageError(
                f"{counted(len(plain), 'model')} cannot be cut into stages together",
                why="they have no forward of all of them, in whose order stages could be cut",
                remedy="prepare one module whose forward calls them, or take --strategy mirrored",
            )
        # Stages that run in turn take the same time wherever the cuts are; a reproducible run always cuts alike.
        timed = config.schedule != "one_by_one" and not run_context.reproducible and not config.begins
        took = module_seconds(plain, run_context.trial, run_context.comms.world) if timed else {}
        trial = _Trial(plain)
        written = trial.run(run_context)
        # The output of the last stage may be split over tensor ranks.
        several = trial.several_calls and run_context.grid.tensor == 1
        tried = run_context.trial or run_context.forward_trial
        found = stage_partition.find_stage_partition(
            plain, stage.size * config.chunks, config.begins, took, closed, tried, written, config.modules
        )
        run_context.comms.world.agree(
            [f"a stage begins with {name}" for name in found.names]
            + [f"a forward writes {name}" for name in written]
            + ["the loss function calls the model several times"] * several,
            "the stages of the model",
            "give every rank the same model, the same first samples and the same settings",
        )
        return stages_here(plain, replace(found, several_calls=several), self._run_context)


class _Trial:
    """Finds out what the loss function does with a model that is whole, on the first micro-batch.

    Attributes:
        several_calls: whether it calls the model several times, or asks for a gradient of its inputs.
    """

    def __init__(self, plain: nn.Module) -> None:
        self._plain, self._calls, self.several_calls = plain, 0, False

    def run(self, run_context: RunContext) -> list[str]:
        """Return the names of attributes that the model's modules write in a forward of the first micro-batch."""
        plain = self._plain
        if run_context.trial is None or peers_of(plain) is not None:
            return []
        before = replace_call(plain, self._call)
        try:
            # The first step reports any error. With gradients: loss functions may take one.
            with suppress(Exception), untouched(plain, run_context.comms.world.device), torch.enable_grad():
                return written_attributes(plain, partial(run_context.trial, plain))
        finally:
            replace_call(plain, before)
        return []

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        asked = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
        self.several_calls |= asked or self._calls > 0
        self._calls += 1
        return uncompiled_call(self._plain)(*args, **kwargs)


@dataclass
class MicroBatchState:
    """State of one micro-batch on one virtual pipeline stage, from its forward to its backward.

    Attributes:
        training: whether a backward follows.
        key: ``training`` and the shapes of the batch's tensors. For micro-batches of equal keys, neighbouring stages
            exchange tensors of equal shapes and dtypes.
        moment: RNG snapshot after the forward, restored for backward.
        values: activations received from the previous stage, and other values sent along with them.
        entered: the floating-point tensors among ``values``, whose gradients the previous stage receives.
        gradients: gradients of ``entered``, by index in ``entered``.
        leaving: activations sent to the next stage, which sends back their gradients.
        roots: the tensors where backward starts, with their gradients: the loss on the last stage, elsewhere the
            activations sent. None until the next stage's gradients have arrived.
        calls: layers and their outputs' edges in the autograd graph, recorded by the forward for a backward in two
            halves (schedule ``zero_bubble``); otherwise empty.
        call_gradients: gradients of ``calls``, which the input backward computes and the weight backward takes.
    """

    training: bool
    key: tuple[Any, ...]
    moment: Any = None
    values: list[Any] = field(default_factory=list)
    entered: list[Tensor] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    leaving: list[Tensor] = field(default_factory=list)
    roots: BackwardRoots | None = None
    calls: list[LayerOutput] = field(default_factory=list)
    call_gradients: Sequence[Tensor | None] = ()


class PipelineRunner(ReplicaPart):
    """Runs micro-batches through this rank's virtual pipeline stages of one replica of the model.

    The inherited attribute ``parts`` lists the stages' modules; their tensors have the names of the whole model. Code
    that calls ``plain`` runs the stages one after another, on all ranks of the replica together.

    Args:
        config: options of the layout, among them the schedule.
        run_context: mesh, communicators and flags of the run.
        plain: the whole model.
        virtual_stages: this rank's virtual stages, in order.
        holding: which ranks hold which of the model's tensors; None where the model is not cut.

    Attributes:
        cuts: the stage partition; None where the model is not cut.
        plain: the whole model, with placeholders for what other ranks hold.
        has_last: whether this rank has the last stage.
        split_backwards: one ``SplitBackward`` a virtual stage for the schedule ``zero_bubble``, otherwise empty.
    """

    def __init__(
        self,
        config: PipelineConfig | LayersConfig,
        run_context: RunContext,
        plain: nn.Module,
        virtual_stages: Sequence[VirtualStage],
        holding: StageOwnership | None,
    ) -> None:
        modules = [virtual_stage.module for virtual_stage in virtual_stages]
        super().__init__(modules[0], run_context, others=modules[1:], plain=plain)
        self._comm, self._virtual_stages = run_context.comms.axis("stage"), virtual_stages
        self._schedule, self._ranks, self._here = config.schedule, self._comm.size, self._comm.rank
        self._last = self._ranks * len(virtual_stages) - 1
        self.has_last = self._here == self._ranks - 1
        self._messages = StageMessages(self._comm)
        self._known: dict[bool, tuple[LossFn, tuple[str, ...]]] = {}
        self.split_backwards = [SplitBackward(m) for m in modules] if config.schedule == "zero_bubble" else []
        self._before: list[Mapping[str, int]] = [{} for _ in virtual_stages]
        self._drawing = False
        self._learns = [False] * (self._last + 2)
        self._held: list[list[nn.Parameter]] = []
        self._constants = Constants([])
        self._containers: list[tuple[str, nn.Module]] = []
        self._hooks = [KeptGraphs(module) for module in modules]
        groups: list[tuple[Communicator | None, Sequence[nn.Parameter]]] = []
        self.cuts = None if holding is None else holding.cuts
        self.own_backward = self.cuts is None or self.cuts.several_calls
        if holding is not None:
            self.not_owned = holding.not_owned
            self.summary = _said(holding.cuts, config, self._ranks)
            groups = groups_of(holding, run_context)
            self._held = [list(row.values()) for row in holding.cuts.held(plain)]
            self._constants = Constants(
                (name, plain.get_submodule(name)) for name in sorted(holding.cuts.opened) if holding.cuts.record is None
            )
            opened = [(name, plain.get_submodule(name)) for name in sorted(holding.cuts.opened)]
            self._containers = [each for each in opened if not isinstance(each[1], nn.ModuleList | nn.ModuleDict)]
            self._before = holding.calls[self._here :: self._ranks]
            self._drawing = holding.draws
        self._shared = SharedGradients(groups, run_context.reproducible)
        signature = inspect.signature(plain.forward)
        self._relay = _Relay(self, signature)
        self._touched: set[Tensor] = set()
        self._backwards = -1
        self._calls_in_body = 0
        self._synced = False
        self._drawn_apart: Sequence[str] = ()
        self._grad_hook: GradientReadyHook | None = None
        self._reporting = False
        self._forget_writes: Callable[[], None] = lambda: None
        if holding is not None:
            places = {name: f"on stage {rows[0]} of the model" for name, rows in holding.stages.items()}
            writes = StageWrites(dict(parameters(self.parts)))
            if run_context.compile is None and not any(map(is_compiled, plain.modules())):
                # Compiled code takes no function mode.
                script = ScriptMode(writes)
                self.script_code, self.model_code = script.script_code, script.model_code
            self._forget_writes = writes.forget
            put_away(plain, places, self.parts, writes.undo, self._comm.device)
            replace_call(plain, StagedModel(self, plain, self._comm, partial(_bound, holding.cuts, signature)))
            self._synced = holding.draws or bool(keyed_modules(plain))
            self._drawn_apart = holding.drawn_apart
            put_attributes_away(plain, dict.fromkeys(holding.cuts.written, "on another stage"), self.parts)

    def look_what_learns(self, asked: bool = False) -> tuple[bool, ...]:
        """Look up which stages receive values that need a gradient: scripts freeze and unfreeze parameters.

        Not collective: every rank has the ``requires_grad`` of all stages' parameters.

        Args:
            asked: whether an input of the model requires a gradient.

        Returns:
            A bool for each virtual stage of the whole model, in order, and one more for the model's output: whether the
            values that the stage receives (the output) need a gradient.
        """
        self._shared.look()
        for each in self.split_backwards:
            each.look()
        trained = [any(p.requires_grad for p in row) for row in self._held]
        self._learns = [asked or any(trained[:stage]) for stage in range(len(self._learns))]
        return tuple(self._learns)

    @property
    def stage_copies(self) -> Sequence[tuple[Communicator, Sequence[nn.Parameter]]]:
        """Trained parameters that several pipeline stages use, such as tied weights, with the ranks that hold copies.

        A list of pairs: a communicator over the ranks of the stages that hold the same parameters, and the list of
        these parameters on this rank, in an order equal on these ranks.
        """
        return self._shared.copies

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
        trained = [p for _, p in parameters(self.parts) if p.requires_grad and p not in self._shared.parameters]
        self._connected = [add_accumulation_hook(parameter, self._ready) for parameter in trained]
        self._grad_hook = grad_hook

    def replaced(self, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Take over new parameter objects that have replaced former ones in this rank's pipeline stages.

        Afterwards the sum of gradients over stages and the weight backward use the new objects.

        Args:
            by: mapping from each former parameter to the new one in its place; parameters that are not keys stay.
        """
        self._shared.replace(by)
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
            grad_hook: its ``prepare_for_backward`` is called before the first backward after which a gradient is
                complete, with the loss sums on the last stage's rank and None on others; None to run forwards only.
                ``gradient_ready`` is called on the hook that ``connect`` has set, usually the same object; but on
                ``grad_hook`` itself with a single stage, and for a loss function that calls the model several times.

        Returns:
            A ``LossSums`` over all micro-batches, equal on every stage: the float tensor ``sums`` holds loss sum, count
            and metric sums in this order, ``names`` the names of the metrics, ``samples`` the number of samples.

        Raises:
            UsageError: the loss function has failed on the last stage (whose rank raises the loss function's own error
                instead; later than in the first call with this loss function, the last stage's rank alone raises, and
                the others end with PeerError); the loss has an unknown form or requires no gradient; the loss function
                calls the model in a way that stages cannot follow; the script has changed an attribute of the model
                that the trace of its forward holds as a constant; or the script has put a forward hook on a module that
                no stage calls.
        """
        if self.own_backward:
            return super().run(micro_batches, loss, grad_hook)
        training = grad_hook is not None
        count, chunks = len(micro_batches), len(self._virtual_stages)
        order = (
            make_order(self._schedule, self._ranks, count, chunks) if training else forwards(self._ranks, count, chunks)
        )
        flights: dict[tuple[int, int], MicroBatchState] = {}
        turn = _Turn(loss, grad_hook)
        self.look_what_learns()
        self._forget_writes()
        if training:
            self._shared.begin()
        actions = order.ranks[self._here]
        expected = 0
        self._check_constants()
        self._check_containers()
        for chunk, hooks in enumerate(self._hooks if training else ()):
            if chunk * self._ranks + self._here != self._last:
                hooks.begin()
        for number, action in enumerate(actions):
            if action.kind != "F":
                self._agree_on_loss(turn)
            # Inputs of this action and of the next one are received while this one computes.
            expected = max(expected, number)
            while expected < min(number + 2, len(actions)) and self._expect(actions[expected], micro_batches, training):
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
        self._messages.finish()
        if training:
            self._finish_shared(count, turn)
        if not micro_batches[0].samples:
            self.forget()
        return self._spread(turn, sum(micro_batch.samples for micro_batch in micro_batches))

    def _expect(self, action: Action, micro_batches: Sequence[MicroBatch], training: bool) -> bool:
        """Start the receives of an action's inputs; False where their forms are not known yet."""
        key = (training, *shapes(micro_batches[action.micro].batch))
        if action.kind == "F":
            return action.stage == 0 or self._messages.expect("activations", (action.stage, *key))
        if action.kind == "W" or action.stage == self._last or not self._learns[action.stage + 1]:
            return True
        return self._messages.expect("gradients", (action.stage + 1, *key))

    def _forward(self, action: Action, micro_batch: MicroBatch, turn: _Turn) -> MicroBatchState:
        """Run the loss function up to its call of the model; on the last stage, up to the loss."""
        stage, chunk = action.stage, action.stage // self._ranks
        training = turn.grad_hook is not None
        self.enter(micro_batch, self._before[chunk])
        flight = MicroBatchState(training, (training, *shapes(micro_batch.batch)))
        if self.split_backwards and training:
            flight.calls = self.split_backwards[chunk].record()
        self._relay.enter(stage, flight)
        try:
            self._lose(stage, micro_batch, flight, turn)
        except Exception as error:
            # The other ranks wait for the broadcast in _agree_on_loss.
            fatal = isinstance(error, TuttiError) and not isinstance(error, UsageError)
            # An error before the call of the model occurs on every stage.
            if fatal or stage != self._last or self._knows(turn) or not self._relay.computed:
                raise
            turn.failure = error
            return flight
        if training:
            self.draws.check()
            flight.moment = self.draws.moment
        return flight

    def _lose(self, stage: int, micro_batch: MicroBatch, flight: MicroBatchState, turn: _Turn) -> None:
        """Call the loss function; on the last stage, store the root of backward and add to the loss sums."""
        with self.script_code():
            result = self._relay.call(turn.loss, micro_batch.batch)
        if not self._relay.called:
            raise UsageError("the loss function did not call the model", remedy="call model(...) once in it")
        if stage == self._last:
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

    def _check_constants(self) -> None:
        """Raise UsageError where the script has changed an attribute that the traced forward holds as a constant."""
        for name in self._constants.changed():
            raise UsageError(
                f"the script has changed the model's {name}",
                why="the model is cut into stages, and its forward was traced when this attribute had another value",
                remedy="keep it in a buffer, or in the module that uses it alone; or take --strategy mirrored",
            )

    def _check_containers(self) -> None:
        """Raise UsageError for a forward hook of the script on a module that no stage calls as a whole."""
        hooked = find_script_hook(self._containers)
        if hooked is not None:
            name, place = hooked
            raise UsageError(
                f"the strategy cannot be combined with the forward hook on {name or type(self.plain).__name__}",
                where=place,
                why="the pipeline calls the layers in this module, which may be on several stages, and not the module",
                remedy="register the hook on one of its layers, do the hook's work in the loss function, or take"
                " --strategy mirrored",
            )

    def _backward(self, action: Action, micro_batch: MicroBatch, flight: MicroBatchState, turn: _Turn) -> None:
        """Run a backward, or its input or weight half, and send the inputs' gradients to the previous stage."""
        kind, stage, _ = action
        chunk = stage // self._ranks
        self.draws.moment = flight.moment
        last = bool(micro_batch.samples) and micro_batch.last and kind != "I"
        if last and turn.grad_hook is not None:
            turn.arm()
        if kind != "W" and flight.roots is None:
            gradients = self._messages.receive("gradients", (stage + 1, *flight.key))[0] if flight.leaving else []
            # Some values require a gradient in some batches only; a gradient is None where the loss ignores the value.
            pairs = [
                (v, g) for v, g in zip(flight.leaving, gradients, strict=True) if v.requires_grad and g is not None
            ]
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
                    if parameter not in self._shared.parameters:
                        self._ready(parameter)
        self._reporting = False
        if kind != "I" and self._shared.parameters:
            self._shared.take(action.micro)
        if kind != "W" and flight.entered:
            own = [flight.gradients.get(i) for i in range(len(flight.entered))]
            self._messages.send_gradients(own, flight.entered, (stage, *flight.key))

    def compute(self, flight: MicroBatchState, stage: int, given: Mapping[str, Any]) -> Any:
        """Run one pipeline stage's forward of a micro-batch: receive activations, compute, start to send the results.

        This method runs when the user's loss function calls the model. The method blocks until the previous stage's
        activations have arrived, not until its own are sent.

        Args:
            flight: state of the micro-batch on this stage. The call stores the received activations in it, and those
                sent activations whose gradients the next stage will send back.
            stage: index of the virtual stage in the whole model; this rank holds the stage.
            given: arguments of the model's call, by name. Where the stages follow a recorded forward, two entries:
                ``args``, the positional arguments, and ``kwargs``, the keyword arguments.

        Returns:
            The model's output, on the last stage.

        Raises:
            StageReached: on every stage but the last, after the sends of this stage's activations have started. The
                exception ends the loss function.
            UsageError: a forward hook of the script has kept a tensor with its autograd graph on a stage but the last;
                the stage has written in place what other stages have a copy of; or activations have another form than
                for an equal batch before.
        """
        virtual_stage = self._virtual_stages[stage // self._ranks]
        shared = self._enter(flight, stage) if stage > 0 else []
        # Stages that follow a recorded forward all write what the model's own code writes between blocks.
        traced = self.cuts is not None and self.cuts.record is None
        arguments = {name: given[name] for name in virtual_stage.given} if traced else {}
        before = {name: _versions(value) for name, value in arguments.items()}, _versions(shared)
        result = virtual_stage.module(*(given[name] for name in virtual_stage.given), *flight.values)
        if traced:
            self._check_written(stage, arguments, shared, before)
        if self.split_backwards:
            self.split_backwards[stage // self._ranks].stop()
        if stage == self._last:
            return result
        values = crossing_values(result, virtual_stage)
        self._check_kept(stage // self._ranks, values)
        if self._drawing:
            values.append(self.draws.state.to(self._comm.device))
        beside = [leaf for leaf in tree_leaves((arguments, shared)) if isinstance(leaf, Tensor)]
        forms = self._messages.send("activations", values, (stage + 1, *flight.key), beside)
        if self._learns[stage + 1]:
            flight.leaving = [v for v, form in zip(values, forms, strict=True) if form.learns]
        raise StageReached

    def _check_written(
        self, stage: int, arguments: Mapping[str, Any], shared: Sequence[Tensor], before: tuple[Any, Any]
    ) -> None:
        """Raise UsageError for a write in place to a tensor of which another stage has a copy or a view of its own."""
        changed = [name for name, value in arguments.items() if _versions(value) != before[0][name]]
        if changed and (stage < self._last or shared):
            what = f"its argument '{changed[0]}'"
        elif _versions(shared) != before[1]:
            what = "a tensor of which an earlier stage has taken a view"
        else:
            return
        raise UsageError(
            f"the model's forward writes {what} in place",
            where=f"stage {stage}, from {self.cuts.names[stage - 1]} on" if stage and self.cuts else f"stage {stage}",
            why="every stage has its own copy, and the others would read it unchanged",
            remedy="make a new tensor, such as x + 1 in place of x.add_(1), or take --strategy mirrored",
        )

    def _check_kept(self, chunk: int, values: Sequence[Any]) -> None:
        """Raise UsageError for a forward hook that keeps a tensor with its graph for the loss, on another stage."""
        hooked = self._hooks[chunk].kept(values)
        if hooked is not None:
            name, place = hooked
            raise UsageError(
                f"the forward hook on {name} keeps a tensor with its graph, and the model is cut into stages after it",
                where=place,
                why="the loss is computed on the last stage, where nothing of this stage's tensors is known",
                remedy="let the model return the tensor, keep tensor.detach() for a figure of this stage, or take"
                " --strategy mirrored",
            )

    def _enter(self, flight: MicroBatchState, stage: int) -> list[Tensor]:
        """Receive the previous stage's activations and the RNG state, and hook the gradients of the activations.

        Returns the activations that share memory with others, or with arguments of the model's call, on their stage.
        """
        values, forms = self._messages.receive("activations", (stage, *flight.key))
        if self._drawing:
            self.draws.state = values[-1].cpu()
        flight.values = values[: len(values) - self._drawing]
        if flight.training and self._learns[stage]:
            # A hook, not .grad: autograd gives .grad the leaf's memory format, and kernels round by format.
            flight.entered = [v for v, form in zip(values, forms, strict=True) if form.learns]
            for number, tensor in enumerate(flight.entered):
                tensor.requires_grad_().register_hook(partial(flight.gradients.__setitem__, number))
            pairs = zip(flight.values, forms, strict=False)
            flight.values = [_Entering.apply(v) if form.learns else v for v, form in pairs]  # type: ignore[no-untyped-call]
        return [value for value, form in zip(flight.values, forms, strict=False) if form.shared]

    # --- calls of the whole model: custom training loops -----------------------------------------------------------

    def begin(self, micro_batch: MicroBatch) -> None:
        """Seed the model's random number streams (dropout) for one micro-batch, before a custom loop's body.

        What the script has written to parameters and buffers so far counts as permitted. A dummy micro-batch (without
        samples) gets copies of the buffers, so that its forward leaves the model's own unchanged. Not collective.

        Args:
            micro_batch: the micro-batch; its key, a hash of seed, step, logical worker (share of the global batch) and
                micro-batch, seeds the streams.
        """
        self._forget_writes()
        self._calls_in_body = 0
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
            result: what the loss function returned: a mean, ``(sum, count)`` or ``(sum, count, metric_sums)``.
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
        """
        self._touched.clear()
        self._backwards = 0
        total = super().backward(result, micro_batch, before, grad_hook, retain_graph)
        self._backwards = -1
        if micro_batch.samples and micro_batch.last:
            for _, parameter in parameters(self.parts):
                if parameter in self._touched or (parameter in self._shared.parameters and parameter.grad is not None):
                    grad_hook.gradient_ready(parameter)
        return total

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

    def pass_forward(
        self, key: tuple[Any, ...], given: Mapping[str, Any], training: bool
    ) -> tuple[list[MicroBatchState], Any]:
        """Run one call of the model through all pipeline stages, one after another.

        Collective over the ranks of the replica's stages: point-to-point messages between neighbouring stages and, in a
        model that draws random numbers, a broadcast of the last stage's RNG state. The model's output is not broadcast.

        Args:
            key: equal for calls whose activations have the same shapes and dtypes.
            given: arguments of the model's call, as ``compute`` takes them: by name, or ``args`` and ``kwargs`` where
                the stages follow a recorded forward.
            training: whether a backward may follow.

        Returns:
            The state of the call on each virtual stage of this rank; and the model's output on the last stage's rank,
            None on others.

        Raises:
            UsageError: a stage's forward is refused, as in ``compute``; the script has changed a constant of the traced
                forward, or has put a forward hook on a module that no stage calls; or a module that draws random
                numbers is called on several ranks, and the model more than once for a micro-batch.
        """
        self._check_constants()
        self._check_containers()
        start, flights, result = self.draws.moment, list[MicroBatchState](), None
        made = dict(start.calls)
        apart = next((name for name in self._drawn_apart if self.plain.get_submodule(name).training), None)
        if apart is not None and self._calls_in_body:
            raise UsageError(
                f"a second call of the model for a micro-batch cannot be combined with {apart} on several stages",
                where=script_line(),
                why="it draws random numbers, and a stage does not know how many the others have drawn",
                remedy="use a module of its own in each place, or take --strategy mirrored",
            )
        self._calls_in_body += 1
        for hooks in self._hooks if training else ():
            hooks.begin()
        for chunk, part in enumerate(self.parts):
            part.training = self.plain.training
            counts = made | {name: made.get(name, 0) + count for name, count in self._before[chunk].items()}
            self.draws.moment = start._replace(calls=counts)
            flight = MicroBatchState(training, key)
            with suppress(StageReached):
                result = self.compute(flight, chunk * self._ranks + self._here, given)
                self._check_kept(chunk, tree_leaves(result))
            flight.moment = self.draws.moment
            made |= {name: made.get(name, 0) + n - counts.get(name, 0) for name, n in flight.moment.calls.items()}
            flights.append(flight)
        self.draws.moment = start._replace(calls=made)
        if self._synced:
            # The script's next draws follow the last one of the model.
            state = self.draws.state.to(self._comm.device)
            self._comm.broadcast_unchecked(state, self._ranks - 1, "state of random numbers")
            self.draws.state = state.cpu()
        self._messages.finish()
        return flights, result

    def pass_backward(
        self,
        flights: Sequence[MicroBatchState],
        roots: Sequence[tuple[Tensor, Tensor]],
        inputs: Sequence[Tensor],
        key: tuple[Any, ...],
        accumulate: bool,
        keep: bool,
    ) -> None:
        """Run the backward of one call of the model through all pipeline stages, from the last one to the first.

        Collective over the ranks of the replica's stages: point-to-point messages between neighbouring stages and, with
        ``accumulate``, a sum over stages of the gradients of shared parameters.

        Args:
            flights: first result of ``pass_forward``.
            roots: on the last stage's rank the tensors of the model's output that have a gradient, with these
                gradients; empty on others.
            inputs: the tensors among the arguments of the call; hooks on them take their gradients.
            key: equal for calls in whose backward the same activations have gradients.
            accumulate: whether to add the parameters' gradients to ``.grad``.
            keep: keep the graph for another backward.

        Raises:
            UsageError: with ``accumulate``, the loss depends on several calls of the model, and a parameter has a
                gradient hook of the script.
        """
        now = self.draws.moment
        if accumulate:
            self._check_hooks()
            self._shared.begin()
        for chunk, flight in reversed([*enumerate(flights)]):
            stage = chunk * self._ranks + self._here
            self.draws.moment = flight.moment
            pairs: Sequence[tuple[Tensor, Any]] = roots
            if stage != self._last:
                received = self._messages.receive("gradients", (stage + 1, *key))[0] if flight.leaving else []
                pairs = [pair for pair in zip(flight.leaving, received, strict=True) if pair[1] is not None]
            tensors = [tensor for tensor, _ in pairs if tensor.requires_grad]
            gradients = [gradient for tensor, gradient in pairs if tensor.requires_grad]
            leaves = [leaf for leaf in (*flight.entered, *inputs) if leaf.requires_grad]
            flight.gradients.clear()
            if tensors and accumulate:
                torch.autograd.backward(tensors, gradients, retain_graph=keep)
            elif tensors and leaves:
                torch.autograd.grad(tensors, leaves, gradients, retain_graph=keep, allow_unused=True)
            for leaf in leaves:
                leaf.grad = None
            if flight.entered:
                own = [flight.gradients.get(number) for number in range(len(flight.entered))]
                self._messages.send_gradients(own, flight.entered, (stage, *key))
        self._messages.finish()
        if accumulate:
            self._shared.take(0)
            self._shared.finish(1)
        self.draws.moment = now

    def _check_hooks(self) -> None:
        """Raise UsageError for a gradient hook of the script where a loss depends on several calls of the model.

        Each call has a backward of its own, so that the hook would not be given the sum of the gradients.
        """
        self._backwards += self._backwards >= 0
        if self._backwards < 2:
            return
        named = self.plain.named_parameters()
        hooked = next((n for n, p in named if has_gradient_hook(p) or has_accumulation_hook(p)), None)
        if hooked is not None:
            raise UsageError(
                f"the gradient hook on {hooked} cannot be combined with several calls of the model in a loss",
                where=script_line(),
                why="the stages run a backward for each call, and the hook would be called for each",
                remedy="call the model once, as model(torch.cat([first, second])), edit .grad after run.backward, or"
                " take --strategy mirrored",
            )

    def _finish_shared(self, count: int, turn: _Turn) -> None:
        self._shared.finish(count)
        if turn.armed and self._grad_hook is not None:
            for parameter in self._shared.parameters:
                self._grad_hook.gradient_ready(parameter)

    def _spread(self, turn: _Turn, samples: int) -> LossSums:
        """Broadcast the last stage's loss sums to every stage."""
        _, names = self._known[turn.grad_hook is not None]
        sums = torch.zeros(2 + len(names), dtype=torch.float64, device=self._comm.device)
        if turn.total is not None:
            sums.copy_(turn.total.sums)
        self._comm.broadcast_unchecked(sums, self._ranks - 1, "totals of the last stage")
        return LossSums(sums, names, samples)


class _Entering(torch.autograd.Function):
    """Identity at the begin of a stage, in the same memory: the result is no leaf, and may be written in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _versions(values: Any) -> list[int]:
    """Return the versions of the tensors among values; inference tensors have none."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [tensor_version(leaf) for leaf in leaves if not leaf.is_inference()]


@dataclass
class _Turn:
    """State of one ``run``, that is of one logical worker's micro-batches."""

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


def _as_reply(error: Exception) -> dict[str, Any]:
    """Return the fields of the UsageError that other ranks raise where the loss function fails on the last stage."""
    if isinstance(error, TuttiError):
        return {"what": error.what, "where": error.where, "why": error.why, "remedy": error.remedy}
    return {
        "what": "the loss function failed on the last stage of the model",
        "why": f"{type(error).__name__}: {error}",
        "remedy": "mend it there, or take --strategy mirrored",
    }


class StageReached(BaseException):
    """Raised by the model's call to leave the user's loss function on every pipeline stage but the last.

    A ``BaseException``, not an ``Exception``, since this is no error that the loss function could handle.
    """

    def __str__(self) -> str:
        return "no error: this stage of the pipeline is done, and the loss function goes on on the last stage"


class _Relay:
    """The model that the user's loss function calls.

    A loss function may catch exceptions. The relay therefore records that this stage has sent its activations, or that
    the model has failed, and decides by these records, not by the loss function's result or exception.
    """

    def __init__(self, replica: PipelineRunner, signature: inspect.Signature) -> None:
        self._replica, self._signature = replica, signature
        self._names = list(signature.parameters)
        self.called = self.computed = self._handed_over = False
        self._failure: tuple[Exception, str] | None = None

    def enter(self, stage: int, flight: MicroBatchState) -> None:
        """Let the next call of this stand-in for the model compute the given virtual stage on a micro-batch.

        Args:
            stage: index of the virtual stage in the whole model; this rank holds the stage.
            flight: state of the micro-batch on this stage.
        """
        self._stage, self._flight, self.called, self.computed = stage, flight, False, False
        self._handed_over, self._failure = False, None

    def call(self, loss: LossFn, batch: Any) -> Any:
        """Call the loss function with this stand-in for the model, which computes one virtual pipeline stage.

        Args:
            loss: the user's loss function ``loss_fn(model, batch)``.
            batch: the micro-batch.

        Returns:
            The loss function's result; None on a stage that has sent its activations to the next one.

        Raises:
            TuttiError: the loss function has caught an error of the model and gone on; the error itself if it is a
                ``TuttiError``, else a ``UsageError``.
            Exception: any error that the loss function lets through.
        """
        try:
            result = loss(self, batch)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            if self._failure is not None and isinstance(self._failure[0], TuttiError):
                raise self._failure[0] from None
            # A loss function that catches StageReached goes on without an output, and may fail in any way.
            if not self._handed_over:
                if self.called and isinstance(raised, AttributeError) and isinstance(raised.obj, nn.Module):
                    _refuse_attribute(raised)
                raise
            result = None
        if self._failure is not None:
            error, place = self._failure
            if isinstance(error, TuttiError):
                raise error
            raise UsageError(
                "the loss function continues after an error of the model",
                where=place,
                why=f"{type(error).__name__}: {error}; the other stages cannot know what it does instead",
                remedy="let the error propagate, look at the batch before calling the model, or take --strategy"
                " mirrored",
            ) from error
        return None if self._handed_over else result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._handed_over:
            raise StageReached
        try:
            with self._replica.model_code():
                return self._called(args, kwargs)
        except StageReached:
            self._handed_over = True
            raise
        except Exception as error:
            caller = calling_frame(1)
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            self._failure = self._failure or (error, place)
            raise

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this stage's forward. Raises UsageError for a second call, and for arguments that stages cannot take."""
        if self.called:
            raise UsageError(
                "the loss function calls the model twice",
                why="it called it once for the first micro-batch, and every stage has left it after this call",
                remedy="call it as often for every batch, or once, as model(torch.cat([first, second])); or take"
                " --strategy mirrored",
            )
        self.called = True
        given = _bound(self._replica.cuts, self._signature, args, kwargs)
        tensors = {**dict(zip(self._names, args, strict=False)), **kwargs}
        asked = next((n for n, v in tensors.items() if isinstance(v, Tensor) and v.requires_grad), None)
        if asked is not None:
            raise UsageError(
                f"the loss function asks for the gradient of the model's input '{asked}'",
                why="the gradient would have to return through all stages before the loss function continues",
                remedy="give the model inputs that do not require a gradient, or take --strategy mirrored",
            )
        self.computed = True
        return self._replica.compute(self._flight, self._stage, given)

    def __getattr__(self, name: str) -> Any:
        # Of the whole model, whose placeholders refuse to be read: a penalty on all weights is none on some of them.
        return getattr(self._replica.parts[0] if name == "training" else self._replica.plain, name)

    def __getitem__(self, index: Any) -> Any:
        return self._replica.plain[index]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self._replica.plain  # type: ignore[misc]


def _bound(
    cuts: stage_partition.StagePartition | None, signature: inspect.Signature, args: Any, kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of a model's call as ``PipelineRunner.compute`` takes them.

    Raises UsageError for an argument with which the stages were not cut.
    """
    if cuts is None or cuts.record is not None:
        return {"args": args, "kwargs": kwargs}
    given = dict(zip(signature.parameters, args, strict=False))
    if kwargs:
        given = signature.bind(*args, **kwargs).arguments
    for name in given.keys() - cuts.arguments:
        if given[name] is not signature.parameters[name].default:
            raise UsageError(
                f"the script gives the model '{name}', whose default in its forward is different",
                where=script_line(),
                why="the stages were cut with the default",
                remedy="give the argument no default, or do not give it",
            )
    return given


def _refuse_attribute(error: AttributeError) -> NoReturn:
    """Raise UsageError: the loss function reads an attribute of a module that does not exist on the last stage."""
    raise UsageError(
        f"the loss function reads '{error.name}' of the model ({type(error.obj).__name__}), which the last stage of the"
        " model does not have",
        where=script_line_of(error),
        why="a hook or a forward that sets an attribute sets the one of its own stage",
        remedy="let the model's forward return the value, or take --strategy mirrored",
    ) from error


def _said(found: stage_partition.StagePartition, config: PipelineConfig | LayersConfig, ranks: int) -> dict[str, str]:
    """Return lines for the run's header: where the model is cut, and how long devices are idle."""
    where = f"{len(found.shares)}, cut before {', '.join(found.names)}"
    shares = " | ".join(f"{share:.0%}" for share in found.shares)
    if config.schedule == "one_by_one":
        waits = f"devices work in turn, each is idle {1 - 1 / ranks:.0%} of the time"
    else:
        known = [
            (m, bubble_fraction(config.schedule, ranks, m, config.chunks)) for m in (1, ranks, 2 * ranks, 4 * ranks)
        ]
        waits = f"{config.schedule}, idle " + ", ".join(f"{part:.0%} with {m}" for m, part in known) + " micro-batches"
    return {"stages": f"{where} ({shares} of the {'time' if found.measured else 'parameters'})", "schedule": waits}
