"""Call a model that is cut into pipeline stages as if it were whole: the ranks of all stages make the same call.

A custom training loop and a loss function that calls the model more than once need the model's output on every rank,
and a backward that may come at any time. A call therefore is one autograd function on every stage's rank. Its forward
passes the inputs through the stages and broadcasts the last stage's outputs; its backward passes the gradients of the
outputs, which are the same on all ranks, back through the stages. The stages compute one after another.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tutti.comm.broadcast import broadcast_result
from tutti.comm.communicator import Communicator
from tutti.comm.single_call import single_call
from tutti.comm.stall import TellFailures
from tutti.device import widest_float
from tutti.errors import UsageError, script_line
from tutti.parallel.ddp.output_graph import annotate_output
from tutti.parallel.pipeline.second_backward import SecondBackward
from tutti.parallel.pipeline.stage_messages import MEMORY_FORMATS, MessageForm, message_form, tuples
from tutti.torch_compat import (
    functorch_level,
    is_reached,
    keeps_graph,
    tensor_version,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

if TYPE_CHECKING:
    from tutti.parallel.pipeline.stage_passes import MicroBatchState, StagePasses

_REMEMBERED = 128
"""For how many kinds of calls a model remembers the forms of its messages and outputs."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Outputs(NamedTuple):
    """Structure of a model's output, and the form of each leaf in it."""

    structure: str
    forms: list[MessageForm]


class LeftOnStage:
    """Stands for an object in a model's output that stays on the last stage, such as a cache of keys and values.

    A script that only uses other parts of the output, such as the loss, runs as if the object were there. Any use of it
    raises UsageError.

    Args:
        kind: name of the object's class.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def refusal(self) -> UsageError:
        """Return the UsageError that every use of this object raises: the object that it stands for cannot be sent.

        The text names the object's class and the line of the script.
        """
        return UsageError(
            f"the model returns a {self._kind}, which cannot be sent from the last stage to the others",
            where=script_line(),
            remedy="return tensors, and tuples, lists or dicts of them, or take strategy='mirrored'",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.refusal()

    def _use(self, *args: Any) -> Any:
        raise self.refusal()

    __getitem__ = __iter__ = __len__ = __call__ = __bool__ = _use


class StagedModel:
    """Stands for a whole model whose stages are on several ranks: a call computes on all of them.

    Every rank of the replica's stages makes the same calls with equal arguments, and gets the model's output: calls and
    their backwards are collective over these ranks. A gradient of the output goes back through the stages, into the
    parameters of each and to the inputs.

    Objects in the output that are neither tensors, numbers nor texts are a ``LeftOnStage`` on every rank.

    Args:
        passes: passes calls of the model through its stages.
        comm: communicator over the ranks of the stages.

    Attributes:
        passes, comm: as given.
        computing: whether a call of any staged model computes this rank's stages.
    """

    computing: ClassVar[bool] = False

    def __init__(self, passes: StagePasses, comm: Communicator) -> None:
        self.passes, self.comm = passes, comm
        self._parameters = [id(p) for p in passes.model.parameters()]
        self._anchor = torch.zeros((), device=comm.device)
        self._known: dict[tuple[Any, ...], _Outputs] = {}
        self._recent: dict[tuple[Any, ...], None] = {}
        self._calls = 0

    @TellFailures()
    @single_call
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's output on all stages, and return it on every rank.

        Collective over the ranks of the replica's stages, which all make this call with equal arguments: messages
        between neighbouring stages, and a broadcast of each tensor of the output from the last stage. A later backward
        is collective over them, too: it adds gradients to the parameters' ``.grad``, and all-reduces the gradients of
        the inputs. On the last stage's rank, too, the output's tensors are copies, which the script may write in place.

        Raises:
            UsageError: an argument is an object whose tensors are not known; the call is within a transform of
                ``torch.func``, or with other parameters than the model's own; the model writes an argument in place; or
                the output's containers cannot be sent, or it has another form than for equal arguments before.
                In backward: ``create_graph=True`` for the parameters' gradients, or a third derivative.
            PeerError: a rank has ended, or an error on another stage's rank, which the message states, ended its call.
        """
        leaves, structure = tree_flatten((args, kwargs))
        self._check(leaves)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._calls += 1
        compared = self._calls & (self._calls - 1) == 0
        if compared:
            numbers = [torch.tensor(float(leaf)) for leaf in leaves if isinstance(leaf, int | float)]
            self.compare([*inputs, *numbers], "the script calls the model with other arguments on each stage")
        asked = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        with self.passes.replica.model_code():
            learns = self.passes.update_learns(asked)
            trains = torch.is_grad_enabled() and learns[-1]
            key = (trains, learns, structure, *(_form_of_argument(leaf, self.comm.device) for leaf in leaves))
            self._forget_oldest(key)
            call = _Call(self, key, leaves, structure, trains, compared)
            if not trains:
                values = call.forward(inputs)
            else:
                values = _Through.apply(call, self._anchor.clone().requires_grad_(), *inputs)  # type: ignore[no-untyped-call]
                values = call.annotated(values)
        return tree_unflatten(call.with_values(values), treespec_loads(call.outputs.structure))

    def _forget_oldest(self, key: tuple[Any, ...]) -> None:
        """Note a call with ``key``, and forget the forms of the oldest: a number among the arguments may never repeat.

        Every rank of the stages forgets the same, because all make the same calls.
        """
        self._recent.pop(key, None)
        self._recent[key] = None
        if len(self._recent) > _REMEMBERED:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._known.pop(oldest, None)
            self.passes.messages.forget(oldest)

    def _check(self, leaves: Sequence[Any]) -> None:
        """Raise UsageError for a call that the stages cannot make."""
        why, record = "", self.passes.cuts.record
        remedy = "call model(…) with tensors and numbers, or take strategy='mirrored'"
        unknown = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))), None)
        if StagedModel.computing:
            why = "a forward or a hook within a stage makes it, and the ranks of other stages make none there"
            remedy = "make the called module a part of the model that calls it, or take strategy='mirrored'"
        elif unknown is not None:
            why = f"one of its arguments is a {type(unknown).__name__}, whose tensors are not known"
        elif functorch_level():
            why = "torch.func cannot transform the messages between stages"
        elif [id(p) for p in self.passes.model.parameters()] != self._parameters:
            why = "its parameters are not its own (torch.func.functional_call), and each stage has a part of them"
        elif record is not None and record.writes_inputs:
            why = "its forward writes its arguments in place, and every rank has its own copy"
        if why:
            raise UsageError(
                "this call of the model cannot be combined with stages on several ranks",
                where=script_line(),
                why=why,
                remedy=remedy,
            )

    def compare(self, tensors: Sequence[Tensor | None], what: str) -> None:
        """Check that tensors are equal, up to rounding, on the ranks of all stages.

        Collective over the stages' ranks: an all-gather of three numbers a tensor: the sum of its elements, their sum
        weighted by position, and the sum of their magnitudes. Tensors differ if one of the numbers differs from rank
        0's by more than a thousandth of the largest sum of magnitudes. Values of sparse tensors are not compared.

        Args:
            tensors: this rank's tensors, as many on every rank; None for no tensor.
            what: the error message's first sentence.

        Raises:
            UsageError: the tensors differ; raised on every rank.
            PeerError: a rank of the stages is lost or late.
        """
        if not tensors:
            return
        mine = torch.stack([_figures(tensor, self.comm.device) for tensor in tensors])
        rows = self.comm.gather_slices(mine.flatten(), "sums of tensors that are equal on all stages")
        table = rows.view(self.comm.size, *mine.shape).nan_to_num()
        apart = (table - table[0]).abs().amax(dim=(0, 2)) > 1e-3 * table[:, :, 2].amax(0).clamp(min=0)
        if bool(apart.any()):
            raise UsageError(
                what,
                where=script_line(),
                why="the ranks of all stages compute one forward and backward of the model together",
                remedy="compute them from the batch and from torch's random numbers, which are the same on these ranks;"
                " give Python's random and NumPy the same seed on every rank",
            )

    def share(self, key: tuple[Any, ...], result: Any, last: bool) -> tuple[_Outputs, list[Tensor]]:
        """Broadcast the model's output from the last stage's rank to the ranks of all stages; blocks.

        Collective over the ranks of the replica's stages: one broadcast for each tensor, and in the first call of a
        ``key`` one of the output's structure and forms.

        Args:
            key: equal for calls whose outputs have the same form.
            result: the model's output, on the last stage; not read on other ranks.
            last: whether this rank has the last stage.

        Returns:
            A pair, on every rank. First a named tuple of ``structure``, the pytree structure of the output as text, and
            ``forms``, a ``MessageForm`` for each leaf; of a leaf that stays on the last stage, its ``value`` is a tuple
            of the name of the leaf's class. Second a list of the output's tensors; on the last stage copies of those in
            ``result``, without their autograd graph.

        Raises:
            UsageError: the output's containers cannot be sent; or, on the last stage, it has another form than for this
                key before.
            PeerError: a rank of the stages is lost or late.
        """
        if key not in self._known:
            told = broadcast_result(self.comm, self.comm.size - 1, partial(_form, result), "form of the model's output")
            structure, forms = told
            self._known[key] = _Outputs(structure, [MessageForm(*map(tuples, row)) for row in forms])
        known = self._known[key]
        tensors, found = list[Tensor](), None
        if last:
            found, tensors = _describe(result)
        if found is not None and found != known:
            raise UsageError(
                "the model's output has another form than for equal arguments before",
                where=script_line(),
                why="each rank must know its shapes before it receives it",
                remedy="let the shapes depend on those of the arguments alone, or take strategy='mirrored'",
            )
        if not last:
            tensors = [_empty(form, self.comm.device) for form in known.forms if form.shape is not None]
        for tensor in tensors:
            self.comm.broadcast_unchecked(tensor, self.comm.size - 1, "the model's output")
        return known, tensors

    def sum_over_stages(self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Add up the gradients of the call's inputs over the stages that read them.

        Collective over the ranks of the replica's stages: one all-reduce for each input.

        Args:
            gradients: this rank's part of the gradient of each input; None where its stages do not use the input.
            inputs: the inputs, equal on all ranks.

        Returns:
            A list with the summed gradient of each input, new tensors, equal on all ranks; None where no stage uses the
            input.

        Raises:
            PeerError: a rank of the stages is lost or late.
        """
        found: list[Tensor | None] = []
        for gradient, given in zip(gradients, inputs, strict=True):
            mine = torch.zeros_like(given) if gradient is None else gradient
            flat = torch.cat([mine.reshape(-1), mine.new_tensor([float(gradient is not None)])])
            self.comm.start_all_reduce(flat, "all_reduce of the gradient of the model's inputs").wait()
            found.append(flat[:-1].view(given.shape) if bool(flat[-1].real) else None)
        return found


class _Call:
    """One call of the model: this rank's part of its graph.

    Attributes:
        outputs: structure of the output, after ``forward``.
    """

    outputs: _Outputs

    def __init__(
        self,
        model: StagedModel,
        key: tuple[Any, ...],
        leaves: Sequence[Any],
        structure: Any,
        trains: bool,
        compared: bool,
    ) -> None:
        self._model, self._key, self._structure, self._trains = model, key, structure, trains
        self._compared = compared
        self._leaves = list(leaves)
        self._flights: list[MicroBatchState] = []
        self._inputs: list[Tensor] = []
        self._results: list[Tensor] = []
        self._gradients: dict[int, Tensor] = {}
        self._freed = False

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Pass the inputs through all stages, and return the tensors of the model's output. Collective."""
        passes = self._model.passes
        before = [tensor_version(t) for t in inputs if not t.is_inference()]
        with torch.set_grad_enabled(self._trains):
            self._inputs = [t.detach().requires_grad_(self._trains and t.requires_grad) for t in inputs]
            for number, leaf in enumerate(self._inputs):
                if leaf.requires_grad:
                    leaf.register_hook(partial(self._add, number))
            given = iter(self._inputs)
            leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
            self._leaves = []
            arguments = passes.bind(*tree_unflatten(leaves, self._structure))
            StagedModel.computing = True
            try:
                self._flights, result = passes.pass_forward(self._key, arguments, self._trains)
            finally:
                StagedModel.computing = False
        if before != [tensor_version(t) for t in inputs if not t.is_inference()]:
            raise UsageError(
                "the model's forward writes an argument of its call in place",
                where=script_line(),
                why="every rank has its own copy of the argument, which is not written",
                remedy="make a new tensor, such as x + 1 in place of x.add_(1), or take strategy='mirrored'",
            )
        self.outputs, tensors = self._model.share(self._key, result, passes.has_last)
        if passes.has_last and self._trains:
            self._results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        return tensors

    def _add(self, number: int, gradient: Tensor) -> None:
        known = self._gradients.get(number)
        self._gradients[number] = gradient if known is None else known + gradient

    def with_values(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the leaves of the model's output: these tensors, and values of other types."""
        given = iter(tensors)
        values = [form.value if form.shape is None else next(given) for form in self.outputs.forms]
        return [LeftOnStage(*value) if isinstance(value, tuple) else value for value in values]

    def annotated(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of the output; numbers, which may be losses, lead to their graph on the last stage."""
        return [
            annotate_output(tensor, result) if tensor.numel() == 1 and tensor.requires_grad else tensor
            for tensor, result in zip_longest(tensors, self._results)
        ]

    @property
    def learns(self) -> list[bool]:
        """Whether each tensor of the output depends on a parameter or an input that requires a gradient."""
        return [form.learns for form in self.outputs.forms if form.shape is not None]

    @TellFailures()
    def backward_with_graph(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[SecondBackward, list[Tensor], list[Tensor | None]]:
        """Pass the gradients of the outputs back through all stages, for a loss that contains the result. Collective.

        Args:
            gradients: gradient of each tensor of the output, equal on all ranks; None where the loss ignores it.

        Returns:
            The backward, to be differentiated; the inputs that require a gradient; and their gradients.
        """
        self._check(gradients)
        back = SecondBackward(self._model.passes, self._flights, self._asked, (*self._key, *_reached(gradients)))
        with self._model.passes.replica.model_code():
            found = back.first(self._roots(gradients))
            summed = self._model.sum_over_stages([None if g is None else g.detach() for g in found], self._asked)
        self._gradients = {}
        return back, self._asked, summed

    @TellFailures()
    def second_backward(
        self, back: SecondBackward, gradients: Sequence[Tensor | None], given: Sequence[Tensor], accumulate: bool
    ) -> list[Tensor | None]:
        """Differentiate a backward through all stages. Collective.

        Args:
            back: first result of ``backward_with_graph``.
            gradients: gradient of each of its last results, equal on all ranks.
            given: the gradients of the outputs with which it was made, except for None.
            accumulate: whether to add the parameters' gradients to ``.grad``.

        Returns:
            The gradients of the inputs that require one, and of ``given``.
        """
        model = self._model
        with model.passes.replica.model_code():
            of_given, own = back.second(gradients, accumulate)
            inputs = model.sum_over_stages(own, self._asked)
            known = of_given or [None] * len(given)
            outer = [torch.zeros_like(g) if k is None else k.clone() for g, k in zip(given, known, strict=True)]
            for tensor in outer:
                model.comm.broadcast_unchecked(tensor, model.comm.size - 1, "the gradient of a gradient")
        self._gradients = {}
        return [*inputs, *outer]

    @property
    def _asked(self) -> list[Tensor]:
        return [leaf for leaf in self._inputs if leaf.requires_grad]

    def _roots(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        return [(t, g) for t, g in zip(self._results, gradients, strict=False) if t.requires_grad and g is not None]

    def _check(self, gradients: Sequence[Tensor | None]) -> None:
        """Raise an error where the graph is freed, or where stages have other gradients of the outputs. Collective."""
        if self._freed:
            # As PyTorch says it of a graph of its own; on all ranks.
            raise RuntimeError(
                "Trying to backward through the graph a second time: the activations of this call of the model are"
                " freed. Specify retain_graph=True in the first backward"
            )
        if self._compared:
            self._model.compare(gradients, "the script's loss gives the model's output other gradients on each stage")

    @TellFailures()
    def backward(self, gradients: Sequence[Tensor | None], accumulate: bool, keep: bool) -> list[Tensor | None]:
        """Pass the gradients of the outputs back through all stages, and return those of the inputs. Collective.

        Args:
            gradients: gradient of each tensor of the output, equal on all ranks; None where the loss ignores it.
            accumulate: whether to add the parameters' gradients to ``.grad``.
            keep: keep the graph for another backward.
        """
        self._check(gradients)
        passes, self._gradients = self._model.passes, {}
        with passes.replica.model_code():
            key = (*self._key, *_reached(gradients))
            passes.pass_backward(self._flights, self._roots(gradients), self._inputs, key, accumulate, keep)
            asked = [number for number, leaf in enumerate(self._inputs) if leaf.requires_grad]
            summed = self._model.sum_over_stages([self._gradients.get(number) for number in asked], self._asked)
        self._gradients = {}
        if not keep:
            self._flights, self._results, self._freed = [], [], True
        found: list[Tensor | None] = [None] * len(self._inputs)
        for number, gradient in zip(asked, summed, strict=True):
            found[number] = gradient
        return found


class _Through(torch.autograd.Function):
    """A call of the model on all stages. The anchor is a leaf by which its backward is told from a gradient alone."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t for t in inputs if t.requires_grad))
        ctx.asked = [t.requires_grad for t in inputs]
        tensors = call.forward(inputs)
        ctx.mark_non_differentiable(*(t for t, learns in zip(tensors, call.learns, strict=True) if not learns))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        accumulate = is_reached(ctx.next_functions[0][0])
        if not torch.is_grad_enabled():
            return None, None, *ctx.call.backward(gradients, accumulate, keeps_graph())
        if accumulate:
            raise UsageError(
                "backward(create_graph=True) cannot be combined with a model that is cut into stages",
                where=script_line(),
                why="the gradients in .grad would have a graph on the ranks of their stage alone",
                remedy="ask for the gradients of the inputs, by torch.autograd.grad(…, create_graph=True), or take"
                " strategy='mirrored'",
            )
        given = [gradient for gradient in gradients if gradient is not None]
        anchor = torch.zeros_like(given[0].detach()).requires_grad_()
        found = iter(_ThroughTwice.apply(ctx.call, gradients, anchor, *ctx.saved_tensors, *given))  # type: ignore[no-untyped-call]
        return None, None, *(next(found) if asked else None for asked in ctx.asked)


class _ThroughTwice(torch.autograd.Function):
    """The backward of a call of the model on all stages, as a function of its inputs and of its outputs' gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, gradients: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.back, inputs, found = call.backward_with_graph(gradients)
        ctx.given = [torch.empty_like(each) for each in tensors[len(inputs) :]]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "a third derivative cannot be combined with a model that is cut into stages",
                where=script_line(),
                why="the second backward through the stages leaves no graph",
                remedy="take strategy='mirrored'",
            )
        accumulate = is_reached(ctx.next_functions[0][0])
        return None, None, None, *ctx.call.second_backward(ctx.back, gradients, ctx.given, accumulate)


def _reached(gradients: Sequence[Tensor | None]) -> tuple[bool, ...]:
    return tuple(gradient is not None for gradient in gradients)


def _describe(result: Any) -> tuple[_Outputs, list[Tensor]]:
    """Return the structure of the model's output, and copies of its tensors, which the script may write in place."""
    leaves, structure = tree_flatten(result)
    if (text := _text_of(structure)) is None:
        raise LeftOnStage(type(result).__name__).refusal()
    forms, tensors = [], []
    for leaf in leaves:
        sent = isinstance(leaf, (Tensor, bool, int, float, str, type(None)))
        # No leaf of a structure is a tuple, which therefore marks what stays on the last stage.
        form = message_form(leaf if sent else (type(leaf).__name__,))
        if isinstance(leaf, Tensor):
            form = form._replace(learns=leaf.requires_grad)
            plain = leaf.detach().resolve_conj().resolve_neg()
            tensors.append(plain.clone(memory_format=MEMORY_FORMATS[form.memory]))
        forms.append(form)
    return _Outputs(text, forms), tensors


def _form(result: Any) -> list[Any]:
    """Return the structure of the model's output and the forms of its leaves as a JSON value."""
    outputs, _ = _describe(result)
    return [outputs.structure, [list(form) for form in outputs.forms]]


def _text_of(structure: Any) -> str | None:
    try:
        text: str = treespec_dumps(structure)
    except (NotImplementedError, TypeError, ValueError):
        return None
    # JSON turns the keys of a dict into strings, so that a dict with other keys does not survive the round trip.
    return text if treespec_loads(text) == structure and json.loads(text) is not None else None


def _figures(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Return the sum of a tensor's elements, a sum weighted by position, and the sum of their magnitudes: (3,)."""
    dtype = widest_float(device)
    if tensor is None or tensor.layout != torch.strided:
        return torch.full((3,), -1.0, dtype=dtype, device=device)
    plain = tensor.detach().resolve_conj()
    wide = (torch.view_as_real(plain) if plain.is_complex() else plain).flatten().to(device, dtype)
    places = torch.arange(1, len(wide) + 1, dtype=dtype, device=device) / max(len(wide), 1)
    return torch.stack([wide.sum(), (wide * places).sum(), wide.abs().sum()])


def _empty(form: MessageForm, device: torch.device) -> Tensor:
    memory, dtype = MEMORY_FORMATS[form.memory], getattr(torch, form.dtype)
    return torch.empty(form.shape or (), dtype=dtype, device=device, memory_format=memory)


def _form_of_argument(leaf: Any, device: torch.device) -> Any:
    """Return what the forms of activations and outputs may depend on, of one argument of a call and of autocast."""
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (message_form(leaf), leaf.requires_grad, cast) if isinstance(leaf, Tensor) else (leaf, cast)
