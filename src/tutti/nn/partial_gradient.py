"""Placeholders in ``.grad`` for gradients of which this rank has a part; a script computes with the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.device import widest_float
from tutti.errors import MismatchError, UsageError, script_line
from tutti.nn.incomplete_gradient import CLEARING, IncompleteGradient
from tutti.nn.script_mode import acts_by_element, is_of_lists
from tutti.nn.written_tensors import METADATA, may_write, read_only, share_memory
from tutti.torch_compat import TorchFunctionDisabled, in_backward, tensor_version, tree_leaves, tree_map_only
from tutti.types.optimizer_protocols import FullTensorGatherer

_NORMS = ("linalg_vector_norm", "_foreach_norm")
_SCALING = (
    *("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_"),
    *("_foreach_mul_", "_foreach_div_", "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_zero_"),
    "_amp_foreach_non_finite_check_and_unscale_",
)
_UNSCALE = _SCALING[-1]
_ADDING = ("add_", "sub_")
_ATTRIBUTES = frozenset(getattr(Tensor, name).__get__ for name in ("T", "H", "mT", "mH", "real", "imag"))
"""Attributes whose values are views; all others are metadata, or placeholders."""
_LEFT = frozenset(
    (
        *("__repr__", "__format__", "__reduce_ex__", "__hash__", "__get__", "__set__", "data"),
        *("data_ptr", "storage", "untyped_storage"),
    )
)
"""Functions, beside in-place ones, that are called with placeholders."""
_PROBE = (1.0, -2.5, 1e-3)
"""Elements of ``PartGradient.probe``: of both signs and several magnitudes, for clamps."""


@dataclass(frozen=True)
class GradientSplit:
    """Description of a gradient's split over the ranks of a group, by which the whole gradient can be gathered.

    Attributes:
        gatherer: gathers whole tensors from the ranks' parts, and cuts this rank's part out of a whole tensor.
        key: the parameter by which ``gatherer`` looks up the split.
        shape: shape of the whole gradient.
        is_part: function that returns whether a tensor of the script is this rank's part of a tensor that is split like
            the gradient, such as the parameter itself.
    """

    gatherer: FullTensorGatherer
    key: Tensor
    shape: tuple[int, ...]
    is_part: Callable[[Tensor], bool] = lambda tensor: False


class GradientParts:
    """Gradients of which each rank of a group holds a part: slices of tensor parallelism, rows of sharding, or stages.

    With pipeline stages, some ranks hold a whole gradient and the others nothing of it.

    The object computes norms of the whole gradients. The first norm of an order p is computed for all its gradients in
    one all-gather; later norms of this order are read from the result, until a gradient is edited.

    Args:
        comm: the ranks that hold the parts. On all of them the script must take the same norms, and read the same
            gradients, in the same order, because these calls are collective.
    """

    def __init__(self, comm: Communicator) -> None:
        # Without the placeholders, so that an old gradient is freed with the last one that the script has.
        self._comm, self._parts = comm, list[tuple[Callable[[], Tensor | None], Tensor, bool]]()
        self._shapes: list[torch.Size] = []
        self._norms: dict[float, Tensor] = {}

    def conceal(
        self,
        parameters: Sequence[nn.Parameter],
        place: str,
        own: Callable[[], Tensor | None],
        counted: bool = True,
        on_edit: Callable[[], None] = lambda: None,
        split: GradientSplit | None = None,
        elsewhere: bool = False,
        whole: bool = False,
    ) -> None:
        """Set ``.grad`` of parameters to placeholders that hold this rank's part of one gradient. Not collective.

        Called once for each gradient, on all ranks of the group for the same gradients in the same order, also where a
        rank has no part: the number of the call, from 0, is the ``index`` of ``norm`` and ``total``. The previous
        ``.grad`` is dropped.

        Args:
            parameters: the objects that stand for one parameter, such as the model's and the optimizer's.
            place: location of the complete gradient, as text for the error message.
            own: function that returns this rank's part of the gradient, which edits change in place; it returns None
                where this rank has no part. Neither it nor the other arguments may refer to a parameter whose ``.grad``
                the placeholder becomes, or to the model: Python's garbage collector does not see that a parameter owns
                its ``.grad``, and would never free them.
            counted: whether the part counts in ``norm`` and ``total``; False for the second copy of a part that two
                ranks hold.
            on_edit: function without arguments that is called after each edit of the part.
            split: how the gradient is split. The script can then compute with the ``.grad`` of the first of
                ``parameters`` as with the whole gradient. With None, and with the ``.grad`` of the other
                ``parameters``, the script can only scale and clamp the gradient in place and take its norms.
            elsewhere: whether only other ranks of the group have the gradient or parts of it.
            whole: whether each rank has the whole gradient or no part of it, as with pipeline stages. The script can
                then also read the gradient, and add tensors to it, without ``split``.
        """
        probe = torch.tensor(_PROBE, dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, known in zip(parameters, [split] + [None] * len(parameters), strict=False):
            made = PartGradient(parameter, place)
            made.parts, made.place_in_parts, made.probe = self, len(self._parts), probe
            made.own, made.how_split, made.on_edit = own, known, on_edit
            made.elsewhere, made.whole, made.added_to = elsewhere, whole, []
            parameter.grad = made
        self._parts.append((own, probe, counted))
        self._shapes.append(parameters[0].shape)

    def norm(self, index: int, order: float) -> Tensor:
        """Return the norm of one whole gradient, from the parts of all ranks of the group.

        The first call for an order since a gradient of this object was last edited is collective over the group: one
        all-gather, for all gradients. Other calls send nothing.

        Args:
            index: number of the call of ``conceal`` for this gradient, from 0.
            order: p > 0 of the norm (Σ|gᵢ|ᵖ)^(1/p); infinity for the largest magnitude.

        Returns:
            A tensor without dimensions, equal on all ranks of the group: float64 if one of this object's gradients is
            float64, else float32. Later calls return the same memory: do not write to it.

        Raises:
            PeerError: a rank of the group is lost or late.
            MismatchError: the ranks wait in different calls.
        """
        if order not in self._norms:
            own = [part() if counted else None for part, _, counted in self._parts]
            there = [None if g is None or not g.numel() else g for g in own]
            # By the parameters' dtypes, which are the same on all ranks.
            double = any(probe.dtype in (torch.float64, torch.complex128) for _, probe, _ in self._parts)
            wide = torch.float64 if double else torch.float32
            zero = self._parts[index][1].new_zeros((), dtype=wide)
            local = [zero if g is None else _norm_in(wide, g, order).to(zero.device) for g in there]
            # The norm of the parts' norms is the norm of the whole.
            self._norms[order] = torch.linalg.vector_norm(self._gather(torch.stack(local)), order, dim=0)
        return self._norms[order][index]

    def forget(self) -> None:
        """Discard the computed norms after a gradient has been edited; the next ``norm`` all-gathers again."""
        self._norms.clear()

    def _gather(self, mine: Tensor) -> Tensor:
        """All-gather a vector (n,): (ranks, n), on the device of ``mine``."""
        comm = self._comm
        rows = comm.gather_slices(mine.to(comm.device), "norms of gradients of which this rank has a part")
        return rows.view(comm.size, -1).to(mine.device)

    def total(self, index: int) -> Tensor:
        """Return, on all ranks of the group, the whole gradient of a parameter that only some of the ranks hold.

        For pipeline stages, not for slices or rows: one rank of the group holds the whole gradient, others none of it.
        Where two stages share a parameter, one of them holds the sum of both gradients; the copy of the other is left
        out (``counted=False`` of ``conceal``). Collective over the group: an all-reduce; blocks.

        Args:
            index: which gradient: its place, from 0, in the order in which every rank of the group has called
                ``conceal``, the method that replaces a ``.grad`` by a placeholder. Ranks that do not hold the gradient
                have called ``conceal`` for it, too.

        Returns:
            A new tensor of the gradient's shape on the device of the group's communicator, equal on all ranks.

        Raises:
            PeerError: a rank of the group is lost or late.
            MismatchError: the ranks wait in different calls.
        """
        part, _, counted = self._parts[index]
        own = part() if counted else None
        gradient = torch.zeros(self._shapes[index], dtype=self._parts[index][1].dtype, device=self._comm.device)
        if own is not None:
            gradient.copy_(own)
        self._comm.start_all_reduce(gradient, "all_reduce of a gradient that the script reads").wait()
        return gradient

    def largest(self, flag: Tensor) -> Tensor:
        """Return the largest value of a one-element tensor over the ranks of the group.

        Collective over the group: an all-gather; blocks.

        Args:
            flag: this rank's tensor of one element, of any shape.

        Returns:
            A new tensor of shape (1,) on the device of ``flag``, equal on all ranks.

        Raises:
            PeerError: a rank of the group is lost or late.
            MismatchError: the ranks wait in different calls.
        """
        return self._gather(flag.reshape(1)).amax(0)


class PartGradient(IncompleteGradient):
    """Placeholder in ``.grad`` for a gradient of which this rank has a part: the script computes with the whole one.

    Norms, scaling and clamping in place, as in ``clip_grad_norm_``, gather no gradient. Neither do other in-place
    functions that act element by element: their operands are cut like the gradient. Any other function is called with a
    copy of the whole gradient, all-gathered over the ranks that hold the parts; if it writes the copy in place, each
    rank copies its part of the new values back into the gradient. Results are plain tensors, equal on all ranks: of the
    whole gradient, or of this rank's part where an operand is such a part. A view of the gradient is a
    ``GradientView``, whose writes go into the gradient. Every edit is also applied to ``probe``, three numbers that
    ranks compare to find whether they have edited the gradient differently. ``GradientParts.conceal`` makes these
    objects.

    Attributes:
        parts: the ``GradientParts`` that this gradient belongs to, which computes norms.
        own: function that returns this rank's part of the gradient, or None if it has none.
        place_in_parts: position of the gradient in ``parts``.
        probe: a tensor of shape (3,), edited like the gradient.
        how_split: how the gradient is split; None where the script can only take norms, scale and clamp it.
        on_edit: function without arguments that is called after each edit of the part.
        elsewhere: whether only other ranks of the group have the gradient or parts of it.
        whole: whether each rank has the whole gradient or no part of it; the script may then add tensors to it.
        added_to: sums of the tensors that the script has added; None for tensors that this rank does not have.
    """

    parts: GradientParts
    own: Callable[[], Tensor | None]
    place_in_parts: int
    probe: Tensor
    how_split: GradientSplit | None
    on_edit: Callable[[], None]
    elsewhere: bool
    whole: bool
    added_to: list[Tensor | None]

    _source: tuple[Tensor, int] | None = None

    @property
    def edited(self) -> bool:
        """Whether the script has written to the gradient on this rank, or added a tensor or number to it.

        Counts from when this placeholder was made. Not collective: all ranks whose scripts have made the same edits
        have the same value.
        """
        return bool(tensor_version(self.probe) or self.added_to)

    def compared(self) -> Tensor:
        """Return the attribute ``probe``, a tensor of shape (3,) to which every edit of the gradient is applied, too.

        Ranks that have made the same edits have the same values in it; the caller compares these over the ranks. Not a
        copy, and not collective.
        """
        return self.probe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call functions of PyTorch that are made of others with the whole gradient; the rest operator by operator."""
        kwargs = kwargs or {}
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, PartGradient)]
        if isinstance(out := kwargs.get("out"), Tensor):
            given = {key: value for key, value in kwargs.items() if key != "out"}
            return out.copy_(func(*args, **given))
        if _adds_to_each(func, args):
            for place in zip(*(each for each in args if isinstance(each, list | tuple)), strict=True):
                numbers = [each for each in args if not isinstance(each, list | tuple)]
                getattr(place[0], _base_of_list(func))(*place[1:], *numbers, **kwargs)
            return None
        if not _needs_whole(func, args, kwargs, found):
            return super().__torch_function__(func, types, args, kwargs)
        wholes = {id(each): each.assembled() for each in found}
        whole_args, whole_kwargs = tree_map_only(PartGradient, lambda each: wholes[id(each)], (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        if may_write(func):
            return found[0].write(wholes[id(found[0])])
        for each in found:
            result = GradientView.among(result, each, wholes[id(each)])
        return read_only(func, result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, PartGradient)]
        if name in _ADDING and len(found) == 1 and found[0] is args[0] and found[0].takes(args[1]):
            return found[0].add_term(func, args[1], kwargs)
        if not in_backward() and all(each.elsewhere or each.own() is not None for each in found):
            if _acts_on_parts(name, args, kwargs):
                return _norm_or_scale(name, func, args, kwargs, found)
            if name not in CLEARING and all(each.readable for each in found):
                first = args[0] if args and isinstance(args[0], PartGradient) else found[0]
                result = first._compute(name, func, args, kwargs)
                if result is not NotImplemented:
                    return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    def assign(self, value: Tensor, source: Tensor) -> None:
        """Copy a tensor that the script assigns to ``.grad`` into this placeholder's gradient.

        The placeholder stays in ``.grad``. Counts as an edit of the gradient. Not collective; the script must make the
        same assignment on every rank of the group.

        Args:
            value: the tensor, whole or this rank's part of it.
            source: the tensor object that the script has assigned, of which ``value`` may be a part or a copy;
                ``check_source`` finds later writes to it.

        Raises:
            UsageError: the gradient does not take a tensor's values, but only norms, scaling and clamping
                (``how_split`` is None, as with pipeline stages).
        """
        self.copy_(value)
        self._source = source, tensor_version(source)

    def check_source(self) -> None:
        """Verify that the script has not written to the tensor that it assigned to ``.grad`` since the assignment.

        ``assign`` has copied the tensor's values, so that later writes would be lost. Without an assignment nothing is
        checked. Not collective.

        Raises:
            UsageError: the script has written to that tensor after the assignment.
        """
        if self._source is not None and tensor_version(self._source[0]) != self._source[1]:
            raise UsageError(
                "the script has written to a tensor after it had assigned it to .grad",
                where=script_line(),
                why=f"the gradient is {self.place}, so that its values were copied in the assignment",
                remedy="assign it after the last write, or write into .grad itself",
            )

    def note_edit(self) -> None:
        """Record an edit of the gradient by the script: forget the norms of its parts, and call ``on_edit``.

        ``on_edit`` is the constructor's argument. Not collective.
        """
        self.parts.forget()
        self.on_edit()
        # In-place writes below autograd do not increment the version counter.
        torch.autograd.graph.increment_version(self.probe)

    def takes(self, term: Any) -> bool:
        """Return whether the script may add ``term`` to this gradient without gathering it. Not collective.

        True if all of this holds: the attribute ``whole`` is True (each rank has either the whole gradient or no part
        of it, as with pipeline stages); a rank of the group has the gradient; no backward runs in this thread; and
        ``term`` is not itself a placeholder of a gradient.

        Args:
            term: the tensor or number that the script adds.
        """
        there = self.whole and (self.elsewhere or self.own() is not None)
        # In a backward autograd accumulates a gradient of the script's own.
        return there and not in_backward() and not isinstance(term, IncompleteGradient)

    def add_term(self, func: Any, term: Any, options: Mapping[str, Any]) -> PartGradient:
        """Add ``term`` to the gradient in place where this rank has it, and record the edit. Not collective.

        Args:
            func: the in-place operator, ``add_`` or ``sub_``.
            term: a tensor or a number for which ``takes`` is True.
            options: further arguments of ``func``, such as ``alpha``.

        Returns:
            This object.
        """
        own = self.own()
        if own is not None:
            func(own, term, **options)
            self.parts.forget()
            self.on_edit()
        self.note(torch.as_tensor(term).detach().sum() * options.get("alpha", 1))
        return self

    def note(self, total: Tensor | None) -> None:
        """Record, for the comparison over ranks, that the script has added a tensor to the gradient. Not collective.

        The sums are kept in the attribute ``added_to``, in order. Discards the computed norms, as every edit does.

        Args:
            total: the sum of the tensor's elements; None where this rank does not have the tensor.
        """
        self.parts.forget()
        self.added_to.append(total)
        # For views, which are gathered again.
        torch.autograd.graph.increment_version(self.probe)

    def assembled(self) -> Tensor:
        """Return the whole gradient, gathered from the parts of all ranks, as a new tensor.

        The caller has checked ``readable``. Collective over the group: every rank calls it for the same gradient;
        blocks. Rows (ZeRO stage 1) are all-gathered over the shard ranks. Slices (tensor parallelism) are all-reduced
        over the tensor ranks, each of which contributes its slice, and zeros elsewhere; so are gradients of pipeline
        stages, which ranks have whole or not at all.

        Returns:
            A tensor of the whole gradient's shape, equal on all ranks of the group, in the gradient's dtype.

        Raises:
            PeerError: a rank of the group is lost, or does not take part within the timeout.
        """
        if self.whole:
            return self.parts.total(self.place_in_parts)
        split = cast(GradientSplit, self.how_split)
        [gathered] = split.gatherer.gather(split.key, [cast(Tensor, self.own())])
        return gathered.view(split.shape)

    @property
    def readable(self) -> bool:
        """Whether ``assembled`` can gather the gradient and ``write`` can write it, on all ranks alike."""
        return self.whole or (self.how_split is not None and not self.elsewhere and self.own() is not None)

    def _compute(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function; NotImplemented if its result would be another one than that on whole tensors."""
        written = args[0] if name.endswith("_") else None
        if isinstance(written, list | tuple) or "out" in kwargs:
            return NotImplemented
        with_parts = any(self._is_part(each) for each in tree_leaves((args, kwargs)))
        if acts_by_element(func.overloadpacket) and (with_parts or written is self):
            if written is not None and written is not self and not self._is_part(written):
                return NotImplemented
            return self._by_element(func, args, kwargs, edits=written is self)
        if with_parts:
            return NotImplemented
        whole_args, whole_kwargs = tree_map_only(PartGradient, PartGradient.assembled, (args, kwargs))
        result = func(*whole_args, **whole_kwargs)
        if written is self:
            return self.write(whole_args[0])
        # The whole gradient is a copy.
        gathered = [new for new, old in zip(*map(tree_leaves, (whole_args, args)), strict=True) if new is not old]
        shared = written is None and share_memory([each for each in tree_leaves(result) if _is_tensor(each)], gathered)
        return NotImplemented if shared else result

    def _by_element(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], edits: bool) -> Any:
        """Call a function that acts by element on this rank's parts, and on the probe if it ``edits`` the gradient."""
        part_args, part_kwargs = tree_map_only(Tensor, self._part_of, (args, kwargs))
        result = None if self.own() is None else func(*part_args, **part_kwargs)
        if not edits:
            return result
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and self._is_whole(each)]
        mark_args, mark_kwargs = tree_map_only(Tensor, self._mark_of, (args, kwargs))
        func(*mark_args, **mark_kwargs)
        for operand in operands:
            self.probe.add_(_digest(operand))
        self.note_edit()
        return self

    def write(self, whole: Tensor) -> Any:
        """Copy this rank's part of a whole tensor into its part of the gradient, in place. Not collective.

        For a gradient that is ``readable``, as ``assembled`` returns it whole. Every rank of the group must make the
        call with the same tensor. Counts as an edit of the gradient.

        Args:
            whole: the new values of the whole gradient, of its shape.

        Returns:
            This placeholder; NotImplemented, and nothing is written, if ``whole`` has another shape.
        """
        own, split = self.own(), self.how_split
        if whole.shape != (self.shape if split is None else split.shape):
            return NotImplemented
        if own is not None:
            own.copy_(whole if split is None else split.gatherer.mine(split.key, whole).view(own.shape))
        self.probe.add_(_digest(whole))
        self.note_edit()
        return self

    def _is_part(self, value: Any) -> bool:
        """Return whether a value is a part that the script has of a tensor that is split like the gradient."""
        is_plain = _is_tensor(value) and not isinstance(value, PartGradient)
        return is_plain and self.how_split is not None and self.how_split.is_part(value)

    def _is_whole(self, operand: Tensor) -> bool:
        """Return whether an operand is a whole tensor, which has to be cut, and not a number."""
        return not isinstance(operand, PartGradient) and operand.numel() > 1 and not self._is_part(operand)

    def _part_of(self, operand: Tensor) -> Tensor:
        """Return this rank's part of an operand. Collective for another parameter's gradient."""
        own, split = self.own(), self.how_split
        if operand is self:
            return cast(Tensor, own)
        if isinstance(operand, PartGradient):
            operand = operand.assembled()
        elif not self._is_whole(operand):
            return operand
        if own is None or split is None:
            return operand
        return split.gatherer.mine(split.key, operand.expand(split.shape)).view(own.shape)

    def _mark_of(self, operand: Tensor) -> Tensor:
        """Return numbers in place of an operand, to be combined with the probe."""
        if operand is self:
            return self.probe
        if operand.numel() == 1 and not isinstance(operand, PartGradient) and not self._is_part(operand):
            return operand.reshape(())
        ones = [1, 0, 1] if operand.dtype == torch.bool else [1, 1, 1]
        return torch.tensor(ones, dtype=operand.dtype, device=self.probe.device)


class GradientView(Tensor):
    """View of a gradient of which this rank has a part, such as ``p.grad.view(-1)``: a view of a gathered copy.

    Writes of the script into the view are also made in the gradient. A use of the view after an edit of the gradient
    gathers the gradient again; this is collective over the ranks that hold the parts, all of which make the same edits
    and uses. Functions with the view as an argument return plain tensors, except for views of it.
    """

    _gradient: PartGradient
    _whole: Tensor
    _seen: int

    @classmethod
    def among(cls, result: Any, gradient: PartGradient, whole: Tensor) -> Any:
        """Replace views of a gathered gradient in a function's result by ``GradientView``s, and return the result.

        Not collective.

        Args:
            result: return value of the function; tensors in nested lists, tuples and dicts are looked at.
            gradient: the placeholder of the gradient.
            whole: the gathered gradient, with which the function was called.

        Returns:
            ``result``, in which each tensor that shares memory with ``whole`` is a ``GradientView`` of this memory.
        """

        def made(tensor: Tensor) -> Tensor:
            if not share_memory([tensor], [whole]):
                return tensor
            view = tensor.as_subclass(cls)
            view._gradient, view._whole, view._seen = gradient, whole, tensor_version(gradient.probe)
            return view

        with TorchFunctionDisabled():
            return tree_map_only(Tensor, made, result)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch with the present values, and write into the gradient what it writes."""
        kwargs = kwargs or {}
        if func in METADATA:
            with TorchFunctionDisabled():
                return func(*args, **kwargs)
        views = [each for each in tree_leaves((args, kwargs)) if isinstance(each, GradientView)]
        for each in views:
            each._gather_again()
        with TorchFunctionDisabled():
            plain_args, plain_kwargs = tree_map_only(GradientView, _plain, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        written = tree_leaves((args[:1] if may_write(func) else (), kwargs.get("out")))
        for each in views:
            if any(each is one for one in written):
                each._gradient.write(each._whole)
                each._seen = tensor_version(each._gradient.probe)
            result = GradientView.among(result, each._gradient, each._whole)
        return read_only(func, result)

    def _gather_again(self) -> None:
        """Gather the gradient if the script has edited it since. Collective then."""
        version = tensor_version(self._gradient.probe)
        if version != self._seen:
            self._whole.copy_(self._gradient.assembled())
            self._seen = version


def _plain(view: Tensor) -> Tensor:
    return view.as_subclass(Tensor)


def _needs_whole(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[PartGradient]) -> bool:
    """Return whether a function is to be called with whole gradients, and not operator by operator with placeholders.

    True for those whose result or operands have another shape on a part. Elementwise functions, writes and norms are
    handled without a whole gradient where possible.
    """
    name = getattr(func, "__name__", "")
    if func in METADATA or in_backward() or kwargs.get("out") is not None or not found:
        return False
    if name.startswith("_") and not name.startswith("__"):
        # PyTorch's own questions about the placeholder, such as ``_is_view`` when a model is compiled.
        return False
    if (name in _LEFT and func not in _ATTRIBUTES) or acts_by_element(func) or name == _UNSCALE:
        return False
    if name in ("norm", *_NORMS, "vector_norm") and len(args) < 3 and not {"dim", "axis"} & kwargs.keys():
        return False
    if may_write(func) and (name != "__setitem__" or args[0] is not found[0]):
        return False
    if not all(each.readable for each in found):
        return False
    return not any(found[0]._is_part(each) for each in tree_leaves((args, kwargs)))


def _adds_to_each(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a function writes each gradient of a list by other numbers or tensors than the list's others."""
    written = args[0] if args and is_of_lists(func) and may_write(func) else ()
    scales = getattr(func, "__name__", "") in _SCALING and not any(isinstance(each, list | tuple) for each in args[1:])
    return bool(written) and not scales and not in_backward()


def _base_of_list(func: Any) -> str:
    """Return the name of the function of one tensor that a function of lists calls for each."""
    return str(func.__name__).removeprefix("_foreach_")


def _norm_or_scale(
    name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[PartGradient]
) -> Any:
    """Return norms of whole gradients, or scale or clamp the parts of gradients in place."""
    listed = isinstance(args[0], list | tuple)
    if name in _NORMS:
        order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
        norms = [_norm_of(each, order, kwargs.get("dtype")) for each in (args[0] if listed else [args[0]])]
        return norms if listed else norms[0]
    # Scalings are elementwise: what they do to a part, they do to the whole.
    here = [each for each in (args[0] if listed else [args[0]]) if _is_here(each)]
    if here:
        given = (here if listed else here[0], *args[1:])
        own_args, own_kwargs = tree_map_only(PartGradient, lambda each: each.own(), (given, kwargs))
        func(*own_args, **own_kwargs)
    once = {id(each.probe): each for each in found}
    if name == _UNSCALE:
        # Ranks find infinities in their own parts, and must agree on whether there is one.
        for parts in {each.parts for each in once.values()}:
            args[1].copy_(parts.largest(args[1]).view_as(args[1]))
        args = (args[0], torch.zeros_like(args[1]), args[2])
    if listed:
        func([each.probe for each in once.values()], *args[1:], **kwargs)
    else:
        func(args[0].probe, *args[1:], **kwargs)
    for each in once.values():
        each.note_edit()
    return args[0] if isinstance(args[0], Tensor) else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def real_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor's values as real numbers in the widest floating-point dtype of its device, without gradient.

    The result has the shape of ``tensor``; for a complex tensor it is (*shape, 2), with real and imaginary parts.

    Args:
        tensor: any dense tensor; not changed.
    """
    values = tensor.detach()
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return parts.to(widest_float(tensor.device))


def _digest(tensor: Tensor) -> Tensor:
    """Return three numbers between -1 and 1, of shape (3,), that nearly always differ for two tensors of one shape."""
    wide = real_numbers(tensor).flatten()
    places = torch.arange(1, wide.numel() + 1, dtype=wide.dtype, device=wide.device)
    return torch.stack([wide.sum(), wide.square().sum(), (wide * places).sum()]).sin()


def agree_on_operand(comm: Communicator, tensor: Tensor, what: str) -> None:
    """Check that a whole tensor of the script, of which each rank takes its part, is the same on all ranks.

    Collective over the ranks of ``comm``: an all-gather of three numbers that are computed from the tensor's values;
    blocks.

    Args:
        comm: the ranks that take parts of the tensor.
        tensor: this rank's tensor, whole.
        what: the beginning of the error's text, such as "the script computes with a tensor"; equal on all ranks.

    Raises:
        MismatchError: the tensor differs between ranks, or the ranks are in different calls.
        PeerError: a rank has ended, or did not make the call in time.
    """
    digests = comm.all_gather(_digest(tensor).to(comm.device), what)
    if any(not torch.equal(digest.nan_to_num(), digests[0].nan_to_num()) for digest in digests):
        raise MismatchError(
            f"{what} that is another one on each rank",
            where=script_line(),
            why="each rank has a part of the parameter, and takes the same part of the tensor",
            remedy="compute the tensor from what is the same on every rank; call torch.manual_seed with the same"
            " number on every rank right before a random draw",
        )


def _is_here(gradient: Any) -> bool:
    """Return whether this rank has a gradient, or a part of it."""
    return not (isinstance(gradient, PartGradient) and gradient.elsewhere)


def _acts_on_parts(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation on parts gives the part of its result on the whole, or is a norm of whole tensors."""
    rest = [*args[1:], *kwargs.values()]
    if any(isinstance(value, IncompleteGradient | list | tuple) for value in rest):
        return False
    if any(isinstance(value, Tensor) and value.dim() and value.numel() > 1 for value in rest):
        return False
    if name not in _NORMS:
        return name in _SCALING
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
    return isinstance(order, int | float) and order > 0 and len(args) < 3 and not ({"dim", "keepdim"} & kwargs.keys())


def _norm_in(wide: torch.dtype, part: Tensor, order: float) -> Tensor:
    """Return the norm of a real or complex tensor, computed as exactly as in the real dtype ``wide``."""
    found: Tensor = torch.linalg.vector_norm(part.to(torch.promote_types(part.dtype, wide)), order)
    return found.to(wide)


def _norm_of(gradient: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if isinstance(gradient, PartGradient):
        return gradient.parts.norm(gradient.place_in_parts, order).to(dtype or gradient.dtype.to_real())
    found: Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return found
