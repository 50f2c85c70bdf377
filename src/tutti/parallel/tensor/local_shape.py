"""Run a block's own forward on this rank's heads or features, although its code names the global sizes.

Code such as ``x.view(samples, positions, heads, width // heads)`` names global sizes. Within ``LocalShapeMode`` the
outputs of split layers are smaller. A view whose sizes do not fit is cut in the one dimension that was proved right
when the plan was made; a cut between queries, keys and values is moved to where they meet on this rank; dropout draws
for all heads or features and applies this rank's slice of the draws; a tensor that is whole on every rank and has a
number for each head, such as a relative position bias, gives this rank's heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.errors import UsageError
from tutti.nn.forward_hooks import find_script_hook
from tutti.nn.script_mode import acts_by_element, tensors_among
from tutti.nn.written_tensors import may_write
from tutti.parallel.tensor.block_call import check_form, with_fewer_gradients
from tutti.parallel.tensor.head_parallel import attend
from tutti.parallel.tensor.split_tensor import SplitTensor
from tutti.parallel.tensor.tensor_slice import LayerSlice, dropped, local_sections, mark_local
from tutti.parallel.tensor.tp_layers import TensorParallelLayer, refuse_hook
from tutti.torch_compat import module_parameters, tree_flatten, tree_unflatten

VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
UNFLATTENS = (Tensor.unflatten, torch.unflatten)
SPLITS = (Tensor.split, torch.split)
DROPOUTS = (functional.dropout, torch.dropout)
ATTENTION = functional.scaled_dot_product_attention


class LocalForward(NamedTuple):
    """Adaptations of a block's own forward, whose code names sizes of all heads, to this rank's slice of the heads.

    Attributes:
        width: features of all heads together.
        sizes: for each call of ``view`` or the like whose sizes do not fit the slice, in the order of the calls, the
            index of the size to reduce to the slice's.
        draws: for each call of dropout or attention, in their order, the split dimension, counted from the last (-1); 0
            where the input is not split.
        forms: kinds of arguments of the calls for which the split was verified, as texts of ``form_of``. Empty for a
            block of one argument, whose calls are not checked.
        summed: names in the block of parameters that are whole on every rank and used for this rank's slice, such as
            the weight of a norm within heads: their gradients are summed over the ranks.
        counts: names in the block of attributes that count heads, such as ``num_heads``; while the block runs, they
            have the number of this rank's heads.
        takes: number of calls in which a tensor that is whole on every rank, such as a position bias, is cut to this
            rank's heads because the other operand is a slice.
        outs: for each tensor of the output, the dimension of its heads, counted from the last (-1); 0 where the tensor
            is whole. Empty where all tensors of the output are whole.
        widened: names in the block of layers whose input is all-gathered to the features of all ranks, such as norms
            over all heads.
        opened: whether ``sizes`` lists views of a slice that leave one size open (-1), too.
        shares: whether tensors that are whole on every rank and meet a slice, such as the rotated part of the keys in
            DeepSeek's latent attention, which all heads share, get gradients that are summed over the ranks.
    """

    width: int = 0
    sizes: Sequence[int] = ()
    draws: Sequence[int] = ()
    forms: Sequence[str] = ()
    summed: Sequence[str] = ()
    counts: Sequence[str] = ()
    takes: int = 0
    outs: Sequence[int] = ()
    widened: Sequence[str] = ()
    opened: bool = False
    shares: bool = False


class LocalShapeMode(TorchFunctionMode):
    """Function mode in which a block's own forward runs on this tensor-parallel rank's slice of its heads or features.

    The block's code names the sizes of the whole. Within this mode ``view``, ``reshape``, ``unflatten``, ``split`` and
    ranges of the last dimension with such sizes get this rank's sizes instead. Dropout and
    ``scaled_dot_product_attention`` draw masks for all heads or features, as one device does, and apply this rank's
    slice. The mode serves one call of the block. It sends nothing in the forward. A tensor that is whole on every rank,
    such as a position bias, may be cut to this rank's heads; the backward all-gathers its gradient over the tensor
    ranks.

    Args:
        slice_: the heads or features of the block that this rank has.
        local: the adaptations of the block's code to the slice, from the tensor-parallel plan.

    Attributes:
        drops: whether dropout is applied.
        viewed, drawn, taken: numbers so far of the views that were reduced, of the calls of dropout or attention, and
            of the whole tensors that were cut to this rank's heads.
    """

    drops = True

    def __init__(self, slice_: LayerSlice, local: LocalForward) -> None:
        super().__init__()
        self.slice_, self.local = slice_, local
        self.viewed = self.drawn = self.taken = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marks = self.local.takes or self.local.opened or self.local.shares
        if not marks or all(local_sections(each) is None for each in tensors_among(args, kwargs)):
            return self._call(func, args, kwargs)
        args, kwargs = self._with_heads_here(func, args, kwargs)
        result = self._call(func, args, kwargs)
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and local_sections(each) is None:
                mark_local(each)
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with this rank's sizes, and keep the mark of a slice through elementwise functions."""
        sections = local_sections(args[0]) if args else None
        if func in VIEWS:
            args = self._view(*args)
        elif func in UNFLATTENS and not kwargs and len(args) == 3:
            func, args = Tensor.reshape, self._view(*_as_view(*args))
        elif func in DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        elif func is ATTENTION:
            return self._attention(*args, **kwargs)
        elif sections and func in SPLITS:
            args, kwargs = self._split(sections, *args, **kwargs)
        elif sections and func is Tensor.__getitem__:
            args = self._item(sections, *args)
        result = func(*args, **kwargs)
        if sections and acts_by_element(func) and isinstance(result, Tensor) and result.shape == args[0].shape:
            mark_local(result, sections)
        return result

    def cut(self, have: int, sizes: list[int], left: int | None) -> int:
        """Return which size of a view to reduce so that it fits this rank's tensor slice, as an index in ``sizes``.

        A block such as attention runs on this tensor-parallel rank's heads, but its code names the sizes of the whole
        tensor, such as the number of heads in ``x.view(samples, positions, heads, features)``; one of the sizes has to
        become that of the slice. The index comes from the tensor-parallel plan, which lists one for each such view in
        the order of the calls. The attribute ``viewed``, which the caller then increments, is the present view's place
        in the list.

        Args:
            have: number of elements of the tensor on this rank, for the message of the error.
            sizes: sizes of the view as the code gives them, for the whole tensor.
            left: index of the size that the code leaves open (-1), and that is computed here; None for none.

        Raises:
            UsageError: the plan lists no more views, or its index is not one of ``sizes``.
        """
        known = self.local.sizes
        if self.viewed >= len(known) or not known[self.viewed] < len(sizes):
            self._refuse(f"a view of {have} numbers as {sizes}")
        return known[self.viewed]

    def dim(self, tensor: Tensor) -> int:
        """Return the dimension along which ranks split the input of the present call of dropout or attention.

        The call is one in the forward of a block, such as attention, that runs on this tensor-parallel rank's heads or
        features. The tensor-parallel plan lists these dimensions in the order of the calls. The attribute ``drawn``,
        which the caller then increments, is the present call's place in the list.

        Args:
            tensor: the input; unused here, for subclasses.

        Returns:
            The dimension, counted from the last (-1); 0 where the input is not split.

        Raises:
            UsageError: the plan lists no more calls.
        """
        if self.drawn >= len(self.local.draws):
            self._refuse("another call of dropout")
        return self.local.draws[self.drawn]

    def check(self) -> None:
        """Raise UsageError unless the forward has cut as many whole tensors to this rank's heads as the plan says.

        Called after the block's forward. The tensor-parallel plan has the number from the trial that verified the
        split.

        Raises:
            UsageError: the numbers differ: the code takes another branch, or a size equals the number of heads by
                chance.
        """
        if self.taken != self.local.takes:
            self._refuse(f"{self.taken} operations of heads with a whole tensor, not {self.local.takes},")

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this tensor-parallel rank's heads of a tensor that is whole on every rank, such as a position bias.

        Collective over the tensor ranks in backward alone, which all-gathers the gradient of the heads, so that the
        gradient of ``whole`` is whole.

        Args:
            whole: the tensor.
            dim: the dimension of its heads.
        """
        return self.slice_.ranks.take_slice(whole, dim, self.slice_.length, self.slice_.name)

    def share(self, whole: Tensor) -> Tensor:
        """Return a whole tensor unchanged for use by this rank's heads; backward sums its gradient over tensor ranks.

        The result shares memory with ``whole``, and is ``whole`` itself while gradients are disabled. Collective over
        the tensor ranks in backward alone, which all-reduces the gradient.

        Args:
            whole: the tensor, equal on all tensor ranks.

        Raises:
            UsageError: within ``torch.func`` transforms.
        """
        return self.slice_.ranks.all_reduce_gradient(whole, self.slice_.name)

    def _with_heads_here(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a function of slices, with this rank's heads of tensors that have all heads.

        Heads are the third dimension from last, or a whole number of times all heads: as in (samples · heads, …), or,
        where samples have a dimension of their own, several heads of queries for each of keys and values.
        """
        here, length = len(self.slice_.mine), self.slice_.length
        given = [each for each in tensors_among(args, kwargs) if local_sections(each) is not None]
        places = {each.shape[-3] for each in given if each.dim() > 2}
        grouped = func is ATTENTION and (args[7] if len(args) > 7 else kwargs.get("enable_gqa", False))

        def cut(value: Any) -> Any:
            if type(value) in (list, tuple):
                return type(value)(map(cut, value))
            if not isinstance(value, Tensor) or local_sections(value) is not None:
                return value
            if value is args[0] and may_write(func):
                return value
            times, left = divmod(value.shape[-3], length) if value.dim() > 2 else (0, 0)
            # Grouped attention has several heads of queries for each of keys and values.
            alike = times * here in places or (grouped and value is args[0] and times > 0)
            if left or not alike:
                # A linear layer knows itself of which slice its weight is.
                shared = self.local.shares and value.requires_grad and func is not functional.linear
                if not (shared and torch.is_grad_enabled()):
                    return value
                # Ranks have different numbers of heads over which the tensor is expanded.
                return self.share(_unexpanded(value)).expand(value.shape)
            self.taken += 1
            if times == 1:
                return self.take(value, value.dim() - 3)
            batched = value.dim() > 3
            split = value.unflatten(-3, (length, times) if batched else (times, length))
            return self.take(split, split.dim() - (4 if batched else 3)).flatten(-4, -3)

        return tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}

    def _view(self, tensor: Tensor, *rest: Any) -> tuple[Any, ...]:
        sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
        have, left = tensor.numel(), None
        if not all(type(size) is int for size in sizes):
            return (tensor, *rest)
        if -1 in sizes:
            here, others = len(self.slice_.mine), -math.prod(sizes)
            whole = have // here * self.slice_.length
            if not self.local.opened or local_sections(tensor) is None or have % here or whole % others:
                return (tensor, *rest)
            left = sizes.index(-1)
            sizes[left] = whole // others
        elif math.prod(sizes) == have:
            return (tensor, *rest)
        index = self.cut(have, sizes, left)
        self.viewed += 1
        size, rest_of_it = divmod(sizes[index] * have, math.prod(sizes))
        if rest_of_it:
            self._refuse(f"a view of {have} numbers as {sizes}")
        sizes[index] = size
        return tensor, sizes

    def _split(
        self, sections: Sequence[int], tensor: Tensor, *rest: Any, **named: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a split of fused outputs, such as queries, keys and values, with this rank's sizes.

        The tensor is a view without the mark, because the mode of an enclosing block sees the call, too.
        """
        dim = rest[1] if len(rest) > 1 else named.pop("dim", 0)
        [size] = rest[:1] or named.values()
        if dim % tensor.dim() != tensor.dim() - 1:
            return (tensor, size, dim), {}
        length = sum(sections)
        sizes = [min(size, length - begin) for begin in range(0, length, size)] if type(size) is int else list(size)
        ends = [self._place(sections, end) for end in accumulate(sizes, initial=0)]
        return (_unmarked(tensor), [end - begin for begin, end in pairwise(ends)], dim), {}

    def _item(self, sections: Sequence[int], tensor: Tensor, index: Any) -> tuple[Any, ...]:
        """Return the arguments of an index of fused outputs with this rank's bounds of the last dimension."""
        given = list(index) if isinstance(index, tuple) else [index]
        counted = sum(1 for each in given if each is not None and each is not ...)
        if given[-1] is ... or (... not in given and counted < tensor.dim()):
            return tensor, index
        last = given[-1]
        if type(last) is not slice or last.step not in (None, 1):
            self._refuse(f"an index {index} of the outputs of a layer that is split")
        begin, end, _ = last.indices(sum(sections))
        here = slice(self._place(sections, begin), self._place(sections, end))
        return _unmarked(tensor), (*given[:-1], here)

    def _place(self, sections: Sequence[int], bound: int) -> int:
        """Return where this rank's slice has the bound of a section, such as that between queries and keys."""
        bounds = list(accumulate(sections, initial=0))
        if bound not in bounds:
            self._refuse(f"a cut at {bound} of {bounds[-1]} outputs")
        before = sections[: bounds.index(bound)]
        return sum(size // self.slice_.length * len(self.slice_.mine) for size in before)

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        dim = self.dim(input)
        self.drawn += 1
        if not (training and train and self.drops) or p == 0.0:
            # The call is made nevertheless: the mode of an enclosing block counts calls.
            kept: Tensor = functional.dropout(input, p, False)
            return kept
        if not dim:
            result: Tensor = functional.dropout(input, p, True, inplace)
            return result
        return dropped(input, p, dim, self.slice_)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        dim = self.dim(query)
        self.drawn += 1
        dropout_p = dropout_p if self.drops else 0.0
        if dropout_p == 0.0 or not dim:
            return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        return attend(query, key, value, attn_mask, dropout_p, self.slice_, scale)[0]

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"the layer does {what}, which it did not when its plan was made",
            where=self.slice_.name,
            why="its code takes a different branch than before, which the plan does not cover",
            remedy=f"leave it whole: strategy='tensor:whole={self.slice_.name}'",
        )


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a tensor with one element in place of each dimension along which it is expanded."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if size > 1 and stride == 0 else tensor
    return tensor


def _unmarked(tensor: Tensor) -> Tensor:
    same: Tensor = torch.ops.aten.alias(tensor)
    return same


def _as_view(tensor: Tensor, dim: int, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the arguments of the view that ``unflatten`` makes."""
    dim %= tensor.dim()
    return tensor, [*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]]


@contextmanager
def local_counts(module: nn.Module, names: Iterable[str], slice_: LayerSlice) -> Iterator[None]:
    """Return a context in which attributes of a block that count heads have the number of heads of this rank.

    Args:
        module: the block.
        names: dotted names of the attributes, whose values are multiples of the number of heads that ranks divide.
        slice_: which of these heads this rank has.
    """
    before: list[tuple[nn.Module, str, int]] = []
    try:
        for name in names:
            owner, _, key = name.rpartition(".")
            inner = module.get_submodule(owner)
            count = vars(inner)[key]
            before.append((inner, key, count))
            vars(inner)[key] = count // slice_.length * len(slice_.mine)
        yield
    finally:
        for inner, key, count in before:
            vars(inner)[key] = count


@contextmanager
def _summed_gradients(module: nn.Module, names: Sequence[str], slice_: LayerSlice) -> Iterator[None]:
    """Return a context in which parameters are views of them whose gradients backward sums over the tensor ranks.

    Raises UsageError where the forward has replaced them by other tensors, whose gradients would be those of a slice.
    """
    if not names or not torch.is_grad_enabled():
        yield
        return
    places = [(module_parameters(module.get_submodule(owner)), key) for owner, _, key in map(_parted, names)]
    own = [table[key] for table, key in places]
    views = slice_.ranks.all_reduce_gradients([parameter for parameter in own if parameter is not None], slice_.name)
    try:
        for (table, key), view in zip(places, views, strict=True):
            table[key] = view  # type: ignore[assignment]
        yield
        if any(table[key] is not view for (table, key), view in zip(places, views, strict=True)):
            raise UsageError(
                f"the strategy cannot shard {', '.join(names)} apart from the module around it",
                where=slice_.name,
                why="each tensor rank has the gradient of its own heads, which are summed in that module",
                remedy=f"leave out units= of the modules inside, or leave it whole: tensor:whole={slice_.name}",
            )
    finally:
        for (table, key), parameter in zip(places, own, strict=True):
            table[key] = parameter


def _parted(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")


class HeadParallelBlock(TensorParallelLayer):
    """Tensor-parallel block, such as attention: its own forward runs on this rank's slice of the heads or features.

    Attributes:
        tutti_local: the adaptations of the forward's code to the slice, set by ``run_within``.
        tutti_forms: kinds of arguments, as texts of ``form_of``, that the forward accepts; empty for no check.
        tutti_inner: names and modules of the block's submodules, on which forward hooks of the script are refused.
    """

    tutti_local: LocalForward
    tutti_forms: frozenset[str]
    tutti_inner: Sequence[tuple[str, nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unsplit block's own forward on this tensor-parallel rank's heads or features.

        View sizes and dropout in that code are fitted to the slice (``LocalShapeMode``). Arguments and result are those
        of the unsplit block, the same on every rank; a tensor of the result that has this rank's heads, such as
        attention weights, is a ``SplitTensor``. The split layers in the block are collective over the tensor
        ranks: the row-parallel one all-reduces (or reduce-scatters) the outputs, and the column-parallel ones
        all-reduce their inputs' gradients in backward, as do whole parameters that the block uses for its heads.

        Args:
            args, kwargs: arguments of the unsplit block's forward, with whole tensors.

        Raises:
            UsageError: the arguments are of other kinds than in the calls for which the split was verified; the code
                makes a view or a call of dropout that was not recorded when the tensor-parallel plan was made; or the
                script has put a forward hook on a module in the block.
        """
        if (hooked := find_script_hook(self.tutti_inner)) is not None:
            refuse_hook(*hooked, self.tutti_slice.name)
        check_form(args, kwargs, self.tutti_forms, self.tutti_slice.name)
        local, place = self.tutti_local, self.tutti_slice
        counts, summed = local_counts(self, local.counts, place), _summed_gradients(self, local.summed, place)
        with counts, summed, LocalShapeMode(place, local) as mode:
            result = super().forward(*args, **kwargs)
            mode.check()
        return _with_split_outputs(result, local.outs, place)


def _with_split_outputs(result: Any, outs: Sequence[int], slice_: LayerSlice) -> Any:
    """Return a block's result with tensors of this rank's heads as ``SplitTensor``s; ``outs``: see ``LocalForward``."""
    if not outs:
        return result
    leaves, spec = tree_flatten(result)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(places) != len(outs):
        raise UsageError(
            f"the layer returns {len(places)} tensors and not {len(outs)}, as when its plan was made",
            where=slice_.name,
            why="each of them may have the heads of this rank alone",
            remedy=f"leave it whole: strategy='tensor:whole={slice_.name}'",
        )
    for place, dim in zip(places, outs, strict=True):
        if dim:
            # Heads of queries may be several for each head of keys and values.
            length = leaves[place].shape[dim] // len(slice_.mine) * slice_.length
            leaves[place] = SplitTensor.of(leaves[place], dim, slice_._replace(length=length))
    return tree_unflatten(leaves, spec)


def run_within(module: nn.Module, local: LocalForward) -> None:
    """Set the adaptations of a block's own forward to this rank's heads or features, as attributes of the block.

    Args:
        module: the block, a ``HeadParallelBlock``.
        local: the adaptations, from the tensor-parallel plan. The forward raises UsageError for calls of other kinds
            than ``local.forms``; it accepts calls of these kinds in which no tensor needs a gradient, too.
    """
    module.tutti_local = local  # type: ignore[assignment]
    prefix = f"{module.tutti_slice.name}." if module.tutti_slice.name else ""  # type: ignore[union-attr]
    inner = [(prefix + name, each) for name, each in module.named_modules() if each is not module]
    module.tutti_inner = inner  # type: ignore[assignment]
    module.tutti_forms = with_fewer_gradients(local.forms)  # type: ignore[assignment]
