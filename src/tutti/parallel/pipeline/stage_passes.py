"""Pass calls of a model through its pipeline stages, of which each rank has some: forward, and backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError, script_line
from tutti.nn.forward_hooks import KeptGraphs, find_script_hook
from tutti.nn.gradient_hooks import has_accumulation_hook, has_gradient_hook
from tutti.nn.untraced import Constants
from tutti.parallel.pipeline.split_backward import BackwardRoots, LayerOutput
from tutti.parallel.pipeline.stage_messages import StageMessages
from tutti.parallel.pipeline.stage_ownership import CutModel
from tutti.parallel.pipeline.virtual_stage import crossing_values
from tutti.torch_compat import tensor_version, tree_leaves

if TYPE_CHECKING:
    from tutti.parallel.pipeline.pipeline_runner import PipelineRunner


@dataclass
class MicroBatchState:
    """State of one micro-batch on one virtual pipeline stage, from its forward to its backward.

    Attributes:
        training: whether a backward follows.
        key: ``training`` and the shapes of the batch's tensors or, for a call by a ``StagedModel``, the forms of its
            arguments. For micro-batches of equal keys, neighbouring stages exchange tensors of equal shapes and dtypes.
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


class StageReached(BaseException):
    """Raised by the model's call to leave the user's loss function on every pipeline stage but the last.

    A ``BaseException``, not an ``Exception``, since this is no error that the loss function could handle.
    """

    def __str__(self) -> str:
        return "no error: this stage of the pipeline is done, and the loss function goes on on the last stage"


class StagePasses:
    """Passes calls of one model through this rank's virtual stages of it, together with the ranks of the other stages.

    Args:
        replica: runs the replica of which the model is a part: its RNG streams, and the gradients that stages share.
        cut: the model and this rank's stages of it.
        comm: communicator over the ranks of the stages, with channels for ``KINDS`` of messages.
        drawn_apart: modules with an RNG stream of their own that stages of several ranks call, by name.

    Attributes:
        replica: as given.
        model: the whole model, with placeholders for tensors that other ranks hold.
        cuts: the stage partition.
        virtual_stages: this rank's virtual stages, in order.
        messages: this rank's messages to and from its neighbours.
        calls_before: for each of this rank's stages, how often earlier stages call each module that has an RNG stream,
            by the module's name in the prepared module.
        learns: for each virtual stage of the whole model, and for the model's output, whether the activations that it
            receives need a gradient: the result of the most recent ``update_learns``.
        ranks, here: number of ranks of the stages, and this rank's index among them.
        last: index of the last stage in the whole model.
        has_last: whether this rank has the last stage.
        backwards: number of backwards through the model in the loss of the present ``run.backward``; -1 outside of it.
    """

    def __init__(
        self, replica: PipelineRunner, cut: CutModel, comm: Communicator, drawn_apart: Mapping[str, nn.Module]
    ) -> None:
        self.replica, self.model, self.cuts, self.virtual_stages = replica, cut.model, cut.cuts, cut.virtual_stages
        self.messages = StageMessages(comm)
        self.ranks, self.here = comm.size, comm.rank
        self._comm = comm
        self.last = self.ranks * len(cut.virtual_stages) - 1
        self.has_last = self.here == self.ranks - 1
        self.calls_before = cut.calls[self.here :: self.ranks]
        self._drawing, self._synced = cut.draws, cut.draws or cut.keyed
        self._drawn_apart = drawn_apart
        self.learns = [False] * (self.last + 2)
        self._held = [list(row.values()) for row in cut.cuts.held(cut.model)]
        opened = [(name, cut.model.get_submodule(name)) for name in sorted(cut.cuts.opened)]
        self._constants = Constants(opened if cut.cuts.record is None else ())
        self._containers = [each for each in opened if not isinstance(each[1], nn.ModuleList | nn.ModuleDict)]
        self._hooks = [KeptGraphs(stage.holder) for stage in cut.virtual_stages]
        self._signature = inspect.signature(cut.model.forward)
        self.backwards = -1

    def update_learns(self, asked: bool = False) -> tuple[bool, ...]:
        """Find which stages receive activations that need a gradient, by the present ``requires_grad`` of parameters.

        Called before each pass, because scripts freeze and unfreeze parameters; sets the attribute ``learns``. Not
        collective: every rank has the ``requires_grad`` of all stages' parameters.

        Args:
            asked: whether an input of the model requires a gradient.

        Returns:
            A bool for each virtual stage of the whole model, in order, whether the activations that the stage receives
            need a gradient; and one more, whether the model's output does.
        """
        self.replica.shared.look()
        trained = [any(p.requires_grad for p in row) for row in self._held]
        self.learns = [asked or any(trained[:stage]) for stage in range(len(self.learns))]
        return tuple(self.learns)

    def uses(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter belongs to this object's model, on any of the model's stages.

        Args:
            parameter: a parameter of the module given to ``tutti.prepare``, which may contain several models.
        """
        return any(parameter is own for own in self.model.parameters())

    def begin(self) -> None:
        """Check, before a pass, that the script has not changed the model in a way that its stages cannot follow.

        Not collective.

        Raises:
            UsageError: the script has changed an attribute of the model that the trace of its forward holds as a
                constant; or it has put a forward hook on a module that no stage calls, because the stages call the
                layers in it.
        """
        self._check_constants()
        self._check_containers()

    def watch_hooks(self, all_stages: bool = True) -> None:
        """Wrap the script's forward hooks on this rank's stages, to find those that keep tensors with autograd graphs.

        Called before a forward with gradients. ``compute`` and ``pass_forward`` then raise UsageError for such a hook.
        Not collective.

        Args:
            all_stages: whether hooks on the last stage, on whose rank the loss is computed, are included.
        """
        for chunk, hooks in enumerate(self._hooks):
            if all_stages or chunk * self.ranks + self.here != self.last:
                hooks.begin()

    def _check_constants(self) -> None:
        """Raise UsageError where the script has changed an attribute that the traced forward holds as a constant."""
        for name in self._constants.changed():
            raise UsageError(
                f"the script has changed the model's {name}",
                why="the model is cut into stages, and its forward was traced when this attribute had another value",
                remedy="keep it in a buffer, or in the module that uses it alone; or take strategy='mirrored'",
            )

    def _check_containers(self) -> None:
        """Raise UsageError for a forward hook of the script on a module that no stage calls as a whole."""
        hooked = find_script_hook(self._containers)
        if hooked is not None:
            name, place = hooked
            raise UsageError(
                f"the strategy cannot be combined with the forward hook on {name or type(self.model).__name__}",
                where=place,
                why="the pipeline calls the layers in this module, which may be on several stages, and not the module",
                remedy="register the hook on one of its layers, do the hook's work in the loss function, or take"
                " strategy='mirrored'",
            )

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
                the stage has written in place a tensor of which other stages have a copy; or activations have another
                shape, dtype or memory format than for an earlier batch with the same ``flight.key``.
            PeerError: the previous stage's rank is lost, or does not send within the timeout.
        """
        virtual_stage = self.virtual_stages[stage // self.ranks]
        shared = self._enter(flight, stage) if stage > 0 else []
        # Stages that follow a recorded forward all write what the model's own code writes between blocks.
        traced = self.cuts.record is None
        arguments = {name: given[name] for name in virtual_stage.given} if traced else {}
        before = {name: _versions(value) for name, value in arguments.items()}, _versions(shared)
        taken = [*(given[name] for name in virtual_stage.given), *flight.values]
        with self.replica.around_stage(stage, taken) as check:
            result = virtual_stage.module(*taken)
            check(result)
        if traced:
            self._check_written(stage, arguments, shared, before)
        if self.replica.split_backwards:
            self.replica.split_backwards[stage // self.ranks].stop()
        if stage == self.last:
            return result
        values = crossing_values(result, virtual_stage)
        self._check_kept(stage // self.ranks, values)
        if self._drawing:
            values.append(self.replica.draws.state.to(self._comm.device))
        beside = [leaf for leaf in tree_leaves((arguments, shared)) if isinstance(leaf, Tensor)]
        forms = self.messages.send("activations", values, (stage + 1, *flight.key), beside)
        if self.learns[stage + 1]:
            flight.leaving = [v for v, form in zip(values, forms, strict=True) if form.learns]
        raise StageReached

    def _check_written(
        self, stage: int, arguments: Mapping[str, Any], shared: Sequence[Tensor], before: tuple[Any, Any]
    ) -> None:
        """Raise UsageError for a write in place to a tensor of which another stage has a copy or a view of its own."""
        changed = [name for name, value in arguments.items() if _versions(value) != before[0][name]]
        if changed and (stage < self.last or shared):
            what = f"its argument '{changed[0]}'"
        elif _versions(shared) != before[1]:
            what = "a tensor of which an earlier stage has taken a view"
        else:
            return
        raise UsageError(
            f"the model's forward writes {what} in place",
            where=f"stage {stage}, from {self.cuts.names[stage - 1]} on" if stage else f"stage {stage}",
            why="every stage has its own copy, and the others would read it unchanged",
            remedy="make a new tensor, such as x + 1 in place of x.add_(1), or take strategy='mirrored'",
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
                " strategy='mirrored'",
            )

    def _enter(self, flight: MicroBatchState, stage: int) -> list[Tensor]:
        """Receive the previous stage's activations and the RNG state, and hook the gradients of the activations.

        Returns the activations that share memory with others, or with arguments of the model's call, on their stage.
        """
        values, forms = self.messages.receive("activations", (stage, *flight.key))
        if self._drawing:
            self.replica.draws.state = values[-1].cpu()
        flight.values = values[: len(values) - self._drawing]
        if flight.training and self.learns[stage]:
            # A hook, not .grad: autograd gives .grad the leaf's memory format, and kernels round by format.
            flight.entered = [v for v, form in zip(values, forms, strict=True) if form.learns]
            for number, tensor in enumerate(flight.entered):
                tensor.requires_grad_().register_hook(partial(flight.gradients.__setitem__, number))
            pairs = zip(flight.values, forms, strict=False)
            flight.values = [_Entering.apply(v) if form.learns else v for v, form in pairs]  # type: ignore[no-untyped-call]
        return [value for value, form in zip(flight.values, forms, strict=False) if form.shared]

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
            UsageError: a stage's forward is refused, as in ``compute``; the script has changed an attribute of the
                model that the trace of its forward holds as a constant, or has put a forward hook on a module that no
                stage calls; or the model is called more than once for a micro-batch, and one of its modules that draw
                random numbers is called on several ranks.
            PeerError: a rank of the stages is lost or late.
        """
        self.begin()
        start, flights, result = self.replica.draws.moment, list[MicroBatchState](), None
        made = dict(start.calls)
        apart = next((name for name, module in self._drawn_apart.items() if module.training), None)
        if apart is not None and self.replica.calls_in_body:
            raise UsageError(
                f"a second call of the model for a micro-batch cannot be combined with {apart} on several stages",
                where=script_line(),
                why="it draws random numbers, and a stage does not know how many the others have drawn",
                remedy="use a module of its own in each place, or take strategy='mirrored'",
            )
        self.replica.calls_in_body += 1
        if training:
            self.watch_hooks()
        for chunk, virtual_stage in enumerate(self.virtual_stages):
            virtual_stage.module.training = self.model.training
            counts = made | {name: made.get(name, 0) + count for name, count in self.calls_before[chunk].items()}
            self.replica.draws.moment = start._replace(calls=counts)
            flight = MicroBatchState(training, key)
            with suppress(StageReached):
                result = self.compute(flight, chunk * self.ranks + self.here, given)
                self._check_kept(chunk, tree_leaves(result))
            flight.moment = self.replica.draws.moment
            made |= {name: made.get(name, 0) + n - counts.get(name, 0) for name, n in flight.moment.calls.items()}
            flights.append(flight)
        self.replica.draws.moment = start._replace(calls=made)
        if self._synced:
            # The script's next draws follow the last one of the model.
            state = self.replica.draws.state.to(self._comm.device)
            self._comm.broadcast_unchecked(state, self.ranks - 1, "state of random numbers")
            self.replica.draws.state = state.cpu()
        self.messages.finish()
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
                gradient hook of the script; or the loss depends on an activation that it did not depend on in an
                earlier backward of the same ``key``, or no longer depends on one.
            PeerError: a rank of the stages is lost or late.
        """
        with self.accumulating(accumulate):
            for chunk, flight in reversed([*enumerate(flights)]):
                stage = chunk * self.ranks + self.here
                self.replica.draws.moment = flight.moment
                pairs = roots if stage == self.last else self.receive_gradients(flight, stage, key)
                tensors, gradients = [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
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
                    self.messages.send_gradients(own, flight.entered, (stage, *key))
            self.messages.finish()

    def receive_gradients(
        self, flight: MicroBatchState, stage: int, key: tuple[Any, ...]
    ) -> list[tuple[Tensor, Tensor]]:
        """Wait for the gradients of the activations that a stage has sent to the next stage, which sends them back.

        Blocks on a point-to-point message from the next stage's rank, which calls ``StageMessages.send_gradients``;
        returns at once where none of the activations needs a gradient.

        Args:
            flight: state of the micro-batch on the stage.
            stage: index of the virtual stage in the whole model; this rank holds the stage.
            key: equal for backwards in which the same activations have gradients.

        Returns:
            A list of pairs (activation, gradient). Left out are activations on which the loss does not depend, and
            activations that require no gradient in this micro-batch.

        Raises:
            PeerError: the next stage's rank is lost, or does not send within the timeout.
        """
        received = self.messages.receive("gradients", (stage + 1, *key))[0] if flight.leaving else []
        pairs = zip(flight.leaving, received, strict=True)
        return [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad and gradient is not None]

    @contextmanager
    def accumulating(self, accumulate: bool) -> Iterator[None]:
        """Return a context manager around a backward of one call of the model through its stages.

        At its end the RNG streams get back the state that they had at its beginning, which recomputation in a backward
        changes. With ``accumulate`` the end is collective over the ranks that share parameters: it sums the gradients
        of parameters that several stages use.

        Args:
            accumulate: whether the backward adds the parameters' gradients to ``.grad``.

        Raises:
            UsageError: with ``accumulate``, the loss depends on several calls of the model, and a parameter has a
                gradient hook of the script.
        """
        now, shared = self.replica.draws.moment, self.replica.shared
        if accumulate:
            self._check_hooks()
            shared.begin()
        yield
        if accumulate:
            shared.take(0)
            shared.finish(1)
        self.replica.draws.moment = now

    def _check_hooks(self) -> None:
        """Raise UsageError for a gradient hook of the script where a loss depends on several calls of the model.

        Each call has a backward of its own, so that the hook would not be given the sum of the gradients.
        """
        self.backwards += self.backwards >= 0
        passes = self.replica.passes
        named = self.replica.plain.named_parameters() if sum(each.backwards for each in passes) > 1 else ()
        hooks = [(name, p) for name, p in named if has_gradient_hook(p) or has_accumulation_hook(p)]
        hooked = next((name for name, p in hooks if sum(each.backwards for each in passes if each.uses(p)) > 1), None)
        if hooked is not None:
            raise UsageError(
                f"the gradient hook on {hooked} cannot be combined with several calls of the model in a loss",
                where=script_line(),
                why="the stages run a backward for each call, and the hook would be called for each",
                remedy="call the model once, as model(torch.cat([first, second])), edit .grad after run.backward, or"
                " take strategy='mirrored'",
            )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a call of the model by name, in the form that ``compute`` and ``pass_forward`` take.

        The model's forward is cut into stages in one of two ways: as a traced graph, or as a record of one run of the
        model's own code. Not collective.

        Args:
            args, kwargs: positional and keyword arguments of the call.

        Returns:
            For a traced graph, a mapping from argument names of the model's forward to the values given; arguments that
            the call leaves out have no entry. For a recorded forward, ``{"args": args, "kwargs": kwargs}``. Values are
            not copied.

        Raises:
            UsageError: the graph is traced, and the call gives an argument that the graph has no input for, with
                another object than the default in the signature; the graph was traced with the default.
            TypeError: the graph is traced, ``kwargs`` is not empty, and the call does not fit the forward's signature.
        """
        if self.cuts.record is not None:
            return {"args": args, "kwargs": kwargs}
        given = dict(zip(self._signature.parameters, args, strict=False))
        if kwargs:
            given = self._signature.bind(*args, **kwargs).arguments
        for name in given.keys() - self.cuts.arguments:
            if given[name] is not self._signature.parameters[name].default:
                raise UsageError(
                    f"the script gives the model '{name}', whose default in its forward is different",
                    where=script_line(),
                    why="the stages were cut with the default",
                    remedy="give tutti.prepare a loss_fn that calls the model so, also beside a loop of your own; or"
                    " leave the default out",
                )
        return given


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
