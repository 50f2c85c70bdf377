"""Find how a block may be split over ranks, and prove the split by computing in double precision on random numbers.

The block runs as it is, but with random weights. Then each rank's slice of it runs in turn, with the sums over ranks
that a real run makes. The split is right where outputs and the gradients of the input and of unsplit parameters are the
same, and in evaluation the outputs. After an error, a draw other than by dropout, or a difference the block is not
split.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.comm.partition import even_share
from tutti.nn.untraced import Untraced
from tutti.parallel.tensor.block_call import BlockArguments, fill_zeros
from tutti.parallel.tensor.linear_layer import is_linear, matrix
from tutti.parallel.tensor.local_shape import ATTENTION, DROPOUTS, LocalForward, LocalShapeMode, local_counts
from tutti.parallel.tensor.tensor_slice import LayerSlice, SilentRanks, mark_local, unmark_local
from tutti.torch_compat import tree_leaves

MOST_LINEAR = 8
"""Linear layers of the largest block that is tried."""
_SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
_SECTIONS = ("equal", "grouped", "each", "one")
"""Layouts of fused outputs: sections of the width, as queries, keys and values; queries, and fewer keys and values; or
one section, where each head, or each group of heads that shares keys and values, has all its outputs together."""
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29)


class TensorCut(NamedTuple):
    """How a tensor is split over tensor-parallel ranks along one dimension.

    Attributes:
        dim: the split dimension.
        units: number of equal units along ``dim`` that are never divided, such as heads; ranks get even shares of them.
        sections: sizes of consecutive parts of ``dim`` that are split alike, as queries, keys and values in one matrix;
            each of them has ``units`` units. Empty for a dimension that is one part.
    """

    dim: int
    units: int
    sections: tuple[int, ...] = ()

    def take(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a tensor-parallel rank's slice of a whole tensor, cut along the split dimension. Not collective.

        The slice is a view of ``tensor``; a copy where the split dimension has several ``sections`` (queries, keys,
        values).

        Args:
            tensor: the whole tensor.
            rank: index of the rank among the tensor-parallel ranks, from 0.
            ranks: number of these ranks; if it does not divide the units (such as heads), the first ranks have one
                more.
        """
        places = self.ranges(tensor.shape[self.dim], rank, ranks)
        parts = [tensor.narrow(self.dim, begin, end - begin) for begin, end in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def ranges(self, length: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return begin and end of each part of a rank's slice along the split dimension: one part for each section.

        Args:
            length: size of the whole tensor along the split dimension.
            rank: index of the rank among the tensor-parallel ranks, from 0.
            ranks: number of these ranks; see ``take``.

        >>> TensorCut(0, 4, (8, 4, 4)).ranges(16, 1, 2)
        [(4, 8), (10, 12), (14, 16)]
        """
        mine, begin, found = even_share(self.units, ranks, rank), 0, []
        for size in self.sections or (length,):
            each = size // self.units
            found.append((begin + each * mine.start, begin + each * mine.stop))
            begin += size
        return found

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> TensorCut:
        """Return the cut from a list of its three attributes, which may have gone through JSON.

        Args:
            value: ``dim``, ``units`` and ``sections``.
        """
        dim, units, sections = value
        return cls(dim, units, tuple(sections))


@dataclass(frozen=True)
class BlockSplit:
    """How tensor parallelism splits a block, such as attention: column-parallel linear layers and a row-parallel one.

    The column-parallel layers have a common input; the row-parallel layer is the linear layer called after them.

    Attributes:
        columns: a ``TensorCut`` of the outputs of each column-parallel layer, by the layer's name in the block.
        row: name of the row-parallel layer in the block.
        units: number of heads or features that are divided over ranks.
        local: a ``LocalForward``: which sizes of views, calls of dropout and attributes that count heads the block's
            own forward reduces to a rank's slice, and which parameters get their gradients summed over the ranks.
        dropout: whether attention itself applies dropout.
    """

    columns: Mapping[str, TensorCut]
    row: str
    units: int
    local: LocalForward
    dropout: bool = False


def find_block_split(
    block: nn.Module, ranks: int, linears: Collection[str] | None = None, call: BlockArguments | None = None
) -> BlockSplit | None:
    """Find a column- and row-parallel split of a block's linear layers, and verify it on random numbers in float64.

    A block is a module of two to ``MOST_LINEAR`` (8) linear layers, such as attention. The slices of all
    tensor-parallel ranks are computed in this process, and their outputs and gradients must equal those of the whole
    block; in evaluation, without gradients, their outputs. A copy of the block is computed with random parameters,
    since its own may hide a difference, as an output layer of zeros does. Random generators stay as they are.

    Args:
        block: any module; it is not changed.
        ranks: number of tensor-parallel ranks.
        linears: names of the linear layers in the block that may be split; default: all. Every other module stays
            whole.
        call: recorded arguments for a block whose forward takes several; default: one random input.

    Returns:
        A ``BlockSplit``: ``columns``, a dict from the names of the column-parallel layers to the cut of their outputs
        (a ``TensorCut``); ``row``, the name of the row-parallel layer; ``units``, the number of heads or features that
        are divided; and ``local``, the adaptations of the block's own code to a slice. None where no split gives the
        same result, where the block raises an error, and where it has too few or too many linear layers.
    """
    chosen = {name for name, m in block.named_modules() if (is_linear(m) if linears is None else name in linears)}
    if not 2 <= len(chosen) <= MOST_LINEAR or (call is None and not takes_one(block)):
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            trial = copy.deepcopy(block).cpu().double().requires_grad_(False).train()
            _randomise(trial, chosen)
            return _examine(trial, chosen, ranks, call)
    except Exception:
        # The block may need another kind of input, or shapes that a slice does not have.
        return None


def _randomise(block: nn.Module, linears: Collection[str]) -> None:
    """Make the parameters random, and buffers of zeros, in place.

    Parameters of split layers, and all others of zeros such as a gate, get new numbers. Any other parameter is
    multiplied by numbers near 1, as a vector may have to be positive; any other buffer may be a mask or a table.
    """
    generator = torch.Generator().manual_seed(0)
    split = {id(p) for name in linears for p in block.get_submodule(name).parameters()}
    for parameter in block.parameters():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue
        if parameter.dim() > 1 and (id(parameter) in split or not parameter.any()):
            parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
        elif id(parameter) in split:
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            fill_zeros(parameter, generator)
            parameter.mul_(torch.empty_like(parameter.real).uniform_(0.8, 1.2, generator=generator))
    for buffer in block.buffers():
        fill_zeros(buffer, generator)


def _examine(block: nn.Module, linears: Collection[str], ranks: int, call: BlockArguments | None) -> BlockSplit | None:
    trial = _Trial(block, linears, ranks, call)
    reference = trial.reference()
    if reference is None:
        return None
    found = _search(trial, reference, ("", "counted", "opened"))
    by_head = any(group.heads is not None for group in reference.groups)
    if found is None and by_head and 1 < len(reference.final) < len(linears):
        # The other layers stay whole, and their gradients are compared.
        inner = _Trial(block, linears, ranks, call, reference.final)
        whole = inner.reference()
        found = None if whole is None else _search(inner, whole, ("", "shared"))
    if found is None and reference.wide:
        # Ranks round their parts of a gradient to single precision, where the code names it, before these are summed.
        trial.exact = True
        reference = trial.reference()
        found = None if reference is None else _search(trial, reference, ("widened",))
    return found


def _search(trial: _Trial, reference: _Whole, fits: Sequence[str]) -> BlockSplit | None:
    """Return the first split that is right; ``fits``: how the block's code may be fitted to a slice, as ``propose``."""
    tried: list[tuple[bool, BlockSplit]] = []
    for fit, group, prefer_last, layout in product(fits, reference.groups, (False, True), _SECTIONS):
        proposal = trial.propose(reference, group, layout, fit)
        if proposal is None or (prefer_last, proposal) in tried:
            continue
        tried.append((prefer_last, proposal))
        try:
            block_split = trial.prove(proposal, reference, prefer_last)
            if block_split is not None and trial.holds_in_evaluation(block_split, prefer_last):
                return trial.with_other_calls(block_split, prefer_last)
        except Exception:
            # The shapes do not fit; another way to cut may.
            continue
    return None


def takes_one(block: nn.Module) -> bool:
    """Return whether a module's forward has exactly one argument, which can be given by position.

    Tensor parallelism tries such a block with a random input; a block with further arguments, such as a mask, may
    compute something else in a later call.

    Args:
        block: the module.
    """
    names = list(inspect.signature(block.forward).parameters.values())
    return len(names) == 1 and names[0].kind in (names[0].POSITIONAL_ONLY, names[0].POSITIONAL_OR_KEYWORD)


class _Group(NamedTuple):
    """Linear layers with a common input, the linear layer called next, and the number of heads seen between them."""

    firsts: list[str]
    last: str
    heads: int | None


class _Whole(NamedTuple):
    """Results of the block as it is.

    Attributes:
        x: the input.
        outs: tensors of the output.
        directions: gradients of the outputs that have one.
        gradients: of the input, of other arguments that have one, and last of all parameters that are not the linear
            layers'.
        groups: layers that may be split together.
        draws: shapes of the inputs of dropout and of attention, by call.
        dropout: whether attention itself applies dropout.
        drops: whether any call applies dropout.
        wide: inputs of layers between linear ones that have a number for each feature, such as norms, by name.
        final: linear layers whose outputs are no inputs of further ones but of the one called last, and this one.
    """

    x: Tensor
    outs: list[Tensor]
    directions: list[Tensor]
    gradients: list[Tensor | None]
    groups: list[_Group]
    draws: list[torch.Size]
    dropout: bool
    drops: bool
    wide: Mapping[str, Tensor]
    final: list[str]


class _Watch(TorchFunctionMode):
    """Records calls of dropout, attention and softmax, and turns dropout off."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self._exact = exact
        self.draws: list[torch.Size] = []
        self.dropout = self.drops = False
        self.events: list[tuple[str, Tensor]] = []
        self.outputs: list[tuple[str, Tensor]] = []
        self.between: list[tuple[str, Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._exact:
            func, args, kwargs = _in_double(func, args, kwargs)
        if func in DROPOUTS:
            self.draws.append(args[0].shape)
            self.drops = self.drops or _is_active(*args, **kwargs)
            return args[0]
        if func is ATTENTION:
            self.draws.append(args[0].shape)
            self.events.append(("", args[0]))
            self.dropout = self.dropout or (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
            self.drops = self.drops or self.dropout
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        if func in _SOFTMAX and args[0].dim() > 3:
            self.events.append(("", args[0]))
        return func(*args, **kwargs)

    def note_between(self, name: str, module: nn.Module, args: Any) -> None:
        """Record the input of a layer that is called after a linear one and has a number for each of its features."""
        calls = sum(1 for event, _ in self.events if event)
        sizes = {p.numel() for p in module.parameters(recurse=False)}
        if calls and len(args) == 1 and isinstance(args[0], Tensor) and args[0].shape[-1:].numel() in sizes:
            self.between.append((name, args[0].detach(), calls))

    def groups(self) -> list[_Group]:
        """Return the groups of linear layers in the recorded block that tensor parallelism may split together.

        Returns:
            A list, in the order of the calls: ``firsts``, names of consecutive layers with a common input; ``last``,
            the name of the layer called next; and ``heads``, the number of attention heads between them, or None.
        """
        calls = [i for i, (name, _) in enumerate(self.events) if name]
        names = [self.events[i][0] for i in calls]
        given = [self.events[i][1].data_ptr() for i in calls]
        found, start = list[_Group](), 0
        while start < len(calls):
            end = next((i for i in range(start, len(calls)) if given[i] != given[start]), None)
            if end is None:
                break
            between = self.events[calls[start] : calls[end]]
            heads = next((tensor.shape[-3] for name, tensor in between if not name and tensor.dim() > 3), None)
            if names[end] not in names[start:end]:
                found.append(_Group(_once(names[start:end]), names[end], heads))
            start = end + 1
        if len(calls) > 2 and (_once(names[:-1]), names[-1]) not in [(group.firsts, group.last) for group in found]:
            # Attention between two inputs: queries of one, keys and values of the other. It comes first, because
            # the values alone could be split, too.
            heads = next((t.shape[-3] for name, t in self.events if not name and t.dim() > 3), None)
            found.insert(0, _Group(_once(names[:-1]), names[-1], heads))
        return found

    def final(self) -> list[str]:
        """Return the linear layers on whose outputs no linear layer but the one called last depends, and this one.

        Of the others the outputs are inputs of further layers, as in DeepSeek's latent attention, which projects its
        input down by one layer and up to the heads by the next one.
        """
        *names, last = [name for name, _ in self.events if name]
        makers = {output.grad_fn: name for name, output in self.outputs if output.grad_fn is not None}
        before: set[str] = set()
        for name, given in self.events:
            seen, left = set(), [given.grad_fn] if name in names and name != last else []
            while left:
                node = left.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                before |= {makers[node]} if node in makers else set()
                left += [following for following, _ in node.next_functions]
        return [name for name in _once([*names, last]) if name not in before]


def _once(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _in_double(func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return a call that keeps double precision where the block's code asks for single precision by name."""
    if not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
        return func, args, dict(kwargs)
    if func is Tensor.float:
        return Tensor.double, args, dict(kwargs)

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    return func, tuple(map(wide, args)), {key: wide(value) for key, value in kwargs.items()}


def _is_active(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True) -> bool:
    return training and train and p > 0.0


class _Probe(LocalShapeMode):
    """Runs one rank's slice of a block without dropout, and chooses the sizes of views and the dimensions to cut."""

    drops = False

    def __init__(
        self,
        slice_: LayerSlice,
        local: LocalForward,
        draws: list[torch.Size],
        prefer_last: bool,
        tap: Callable[[str, Tensor], Tensor],
        exact: bool,
    ) -> None:
        super().__init__(slice_, local)
        self._whole, self._prefer_last, self._tap, self._exact = draws, prefer_last, tap, exact
        self.sizes, self.draws, self._shared = list[int](), list[int](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._exact:
            func, args, kwargs = _in_double(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def share(self, whole: Tensor) -> Tensor:
        self._shared += 1
        return self._tap(f"shared {self._shared}", whole)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        mine = self.slice_.mine
        return self._tap(f"{self.taken}", whole).narrow(dim, mine.start, len(mine))

    def cut(self, have: int, sizes: list[int], left: int | None) -> int:
        whole = math.prod(sizes)
        if left is not None:
            # Code that names the heads alone; any other open size is the one that a slice has less of.
            self.sizes.append(next((i for i, size in enumerate(sizes) if size == self.slice_.length), left))
            return self.sizes[-1]
        able = [i for i, size in enumerate(sizes) if size * have % whole == 0]
        named = [i for wanted in (self.slice_.length, self.local.width) for i in able if sizes[i] == wanted] or able
        self.sizes.append(named[-1 if self._prefer_last else 0])
        return self.sizes[-1]

    def dim(self, tensor: Tensor) -> int:
        whole = self._whole[self.drawn]
        differ = [d - tensor.dim() for d in range(tensor.dim()) if tensor.shape[d] != whole[d]]
        if len(differ) > 1:
            raise ValueError("the tensor is split in several dimensions")
        self.draws.append(differ[0] if differ else 0)
        return self.draws[-1]


class _Tap(torch.autograd.Function):
    """Identity where ranks exchange gradients in backward, which applies ``backward_fn`` to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward_fn: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.backward_fn = backward_fn
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.backward_fn(gradients[0]), None


class _Trial:
    """One block, on which ways to split it are tried.

    ``split``: names of the layers among ``linears`` that may be split, all by default; others stay whole, and their
    gradients are compared.
    """

    def __init__(
        self,
        block: nn.Module,
        linears: Collection[str],
        ranks: int,
        call: BlockArguments | None = None,
        split: Collection[str] | None = None,
    ) -> None:
        self.block, self.ranks, self.call = block, ranks, call
        self._every = {name: m for name, m in block.named_modules() if name in linears}
        self.linears = {name: m for name, m in self._every.items() if split is None or name in split}
        own = {id(p) for m in self.linears.values() for p in m.parameters()}
        others = [(name, p.requires_grad_()) for name, p in block.named_parameters() if id(p) not in own]
        self._names, self.others = [name for name, _ in others], [p for _, p in others]
        features = {matrix(m).shape[1] for m in self._every.values()}
        self.index = 0 if call is None else call.main_input(features)
        self.exact = False

    def run(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Call the tried block with another main input, in double precision.

        Args:
            x: the main input, which the block's linear layers take.

        Returns:
            The tensors of the output, and a list of the tensors whose gradients are compared: ``x``, the other
            arguments that require a gradient, and the parameters outside of the split layers.
        """
        args, kwargs, learned = ((x,), {}, []) if self.call is None else self.call.arguments(self.index, x)
        outs = [leaf for leaf in tree_leaves(self.block(*args, **kwargs)) if isinstance(leaf, Tensor)]
        return outs, [x, *learned, *self.others]

    def with_other_calls(self, split: BlockSplit, prefer_last: bool) -> BlockSplit:
        """Return the split with the forms of calls (kinds of arguments) for which it has been verified.

        These are the recorded call's form, and those of calls with other attention masks, with which the split is tried
        here. The forms are those for any number where the split holds for all other numbers with which the block runs.
        The split of a block of one argument is returned as it is.

        Args:
            split: the split, verified with the recorded call.
            prefer_last: cut the last size of a view that can be cut, not the first.
        """
        if self.call is None:
            return split
        calls = [self.call]
        for call in self.call.variants(self.block, self.index):
            if call.form not in [each.form for each in calls]:
                with suppress(Exception):
                    calls += [call] if self._holds(split, call, prefer_last) else []
        any_number = all(self._holds_or_fails(split, call, prefer_last) for call in self.call.other_numbers())
        forms = [call.form_for_any_number if any_number else call.form for call in calls]
        return replace(split, local=split.local._replace(forms=forms))

    def _holds(self, split: BlockSplit, call: BlockArguments, prefer_last: bool) -> bool:
        """Return whether the split is right for another call. Raises any error of the block or of a slice."""
        other = _Trial(self.block, self._every, self.ranks, call, self.linears)
        other.exact = self.exact
        whole = other.reference()
        found = whole and other.prove(split, whole, prefer_last)
        same = found and found.local == split.local
        return bool(same) and other.holds_in_evaluation(split, prefer_last)

    def _holds_or_fails(self, split: BlockSplit, call: BlockArguments, prefer_last: bool) -> bool:
        """Return whether the split is right for another call, or the whole block raises an error in it."""
        try:
            _Trial(self.block, self._every, self.ranks, call, self.linears).reference()
        except Exception:
            return True
        try:
            return self._holds(split, call, prefer_last)
        except Exception:
            return False

    def holds_in_evaluation(self, split: BlockSplit, prefer_last: bool) -> bool:
        """Return whether the split gives the same outputs in evaluation, without gradients.

        Raises any error of the block or of a slice.

        Args:
            split: the split, verified in training.
            prefer_last: cut the last size of a view that can be cut, not the first.
        """
        self.block.eval()
        try:
            with torch.no_grad():
                whole = self.reference()
                found = whole and self.prove(split, whole, prefer_last)
        finally:
            self.block.train()
        if (
            not whole
            or not found
            or found.local._replace(draws=split.local.draws, summed=split.local.summed) != split.local
        ):
            return False
        draws = split.local.draws
        return found.local.draws == draws or (not whole.drops and len(found.local.draws) <= len(draws))

    def reference(self) -> _Whole | None:
        """Run the whole block, not split, on random numbers in double precision, to compare its slices with.

        Returns:
            The input, the outputs and the gradients, with the groups of layers that may be split together. None where
            the block draws random numbers other than by dropout, writes attributes, calls its last linear layer twice,
            or changes leading dimensions.
        """
        sizes = {n for m in self._every.values() for n in matrix(m).shape}
        samples, positions = [p for p in _PRIMES if all(size % p for size in sizes)][:2]
        generator = torch.Generator().manual_seed(0)
        first = matrix(next(iter(self._every.values()))).shape[1]
        shape = samples, positions, first
        if self.call is not None:
            shape = tree_leaves((self.call.args, self.call.kwargs))[self.index].shape
        x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        before, watch = torch.get_rng_state(), _Watch(self.exact)
        handles = [
            m.register_forward_pre_hook(lambda m, args, name=name: watch.events.append((name, args[0])))
            for name, m in self.linears.items()
        ]
        handles += [
            m.register_forward_pre_hook(lambda m, args, name=name: watch.note_between(name, m, args))
            for name, m in self.block.named_modules()
            if name not in self.linears and next(m.children(), None) is None
        ]
        handles += [
            m.register_forward_hook(lambda m, args, out, name=name: watch.outputs.append((name, out)))
            for name, m in self.linears.items()
        ]
        attributes = Untraced(self.block)
        with watch:
            outs, wanted = self.run(x)
        buffers = {name for name, _ in self.block.named_buffers()}
        if set(attributes.undo()) - buffers:
            # A slice would write other attributes, which code outside of the block may read.
            return None
        for handle in handles:
            handle.remove()
        drew = not torch.equal(before, torch.get_rng_state())
        order = [name for name, _ in watch.events if name]
        # A layer before the last one may be called twice, on different inputs.
        if drew or not outs or outs[0].shape[:-1] != x.shape[:-1] or not order or order.count(order[-1]) > 1:
            return None
        learned = [out for out in outs if out.requires_grad]
        directions = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in learned]
        gradients = _gradients(learned, wanted, directions)
        plain = [out.detach() for out in outs]
        groups, wide = watch.groups(), {name: given for name, given, calls in watch.between if calls < len(order)}
        return _Whole(
            x.detach(),
            plain,
            directions,
            gradients,
            groups,
            watch.draws,
            watch.dropout,
            watch.drops,
            wide,
            watch.final(),
        )

    def propose(self, whole: _Whole, group: _Group, layout: str, fit: str) -> BlockSplit | None:
        """Return a split of a group of layers that may be right; None where the sizes do not fit.

        Args:
            whole: results of the block as it is.
            group: layers that are split together.
            layout: of the outputs of a layer that has more of them than the width, one of ``_SECTIONS``.
            fit: how the block's code is fitted to a slice beyond views of global sizes: "counted", attributes that
                count heads become those of this rank; "opened", views that name the heads and leave one size open;
                "shared", whole tensors that all heads use get gradients summed over ranks; "widened", layers that need
                all features get them; or "". None where there is nothing of the kind.
        """
        width = matrix(self.linears[group.last]).shape[1]
        heads, by_head = group.heads or width, group.heads is not None
        if width % heads:
            return None
        each, outputs = width // heads, {name: len(matrix(self.linears[name])) for name in group.firsts}
        # Fewer heads of keys and values are shared by heads of queries: whole groups stay together.
        grouped = by_head and layout in ("grouped", "one")
        keys = [_keys(number, width) if grouped else number for number in outputs.values()]
        alone = layout == "each" or any(number % each for number in keys)
        units = heads if alone else min(heads, *(number // each for number in keys))
        columns = {name: _cut(number, width, units, layout) for name, number in outputs.items()}
        if width % units or units < self.ranks or None in columns.values():
            return None
        local = LocalForward(width, takes=int(by_head))
        if fit == "counted":
            local = local._replace(counts=self._counts(units, heads) if by_head else ())
        elif fit == "opened":
            local = local._replace(opened=by_head)
        elif fit == "shared":
            local = local._replace(shares=by_head)
        elif fit == "widened":
            sizes = {number for number in outputs.values() if number % units == 0}
            local = local._replace(widened=tuple(n for n, given in whole.wide.items() if given.shape[-1] in sizes))
        if fit and not (local.counts or local.opened or local.widened or local.shares):
            return None
        cuts = {name: cut for name, cut in columns.items() if cut}
        return BlockSplit(cuts, group.last, units, local, whole.dropout and by_head)

    def _counts(self, units: int, heads: int) -> tuple[str, ...]:
        """Return the names of attributes that may count heads: of queries, or of keys and values."""
        return tuple(
            f"{name}.{key}".lstrip(".")
            for name, module in self.block.named_modules()
            for key, value in vars(module).items()
            if type(value) is int and value in (units, heads) and "head" in key.lower()
        )

    def prove(self, block_split: BlockSplit, whole: _Whole, prefer_last: bool) -> BlockSplit | None:
        """Return a split with how the block's code is fitted to it, if its results are the whole block's; else None.

        Raises any error of running a slice.

        Args:
            block_split: the split.
            whole: results of the block as it is.
            prefer_last: cut the last size of a view that can be cut, not the first.
        """
        runs = [_Run(self, block_split, rank, whole, prefer_last) for rank in range(self.ranks)]
        for run in runs:
            run.forward(None)
        total = torch.stack([run.part for run in runs]).sum(0)
        sums = None
        if torch.is_grad_enabled():
            sums = _summed_over(runs, total, None)
            if block_split.local.widened:
                # The gradients of layers before a widened one follow from the sum of its input's.
                sums = _summed_over(runs, total, {name: sums[name] for name in block_split.local.widened})
        results = [run.backward(total, sums) for run in runs]
        outs = [_split_outs(found, whole.outs, run.slice_) for run, (found, _) in zip(runs, results, strict=True)]
        summed = self._summed([gradients for _, gradients in results], whole.gradients)
        if summed is None or outs[0] is None or any(each != outs[0] for each in outs):
            return None
        mode = runs[0].mode
        if any(
            (each.mode.sizes, each.mode.draws, each.mode.taken) != (mode.sizes, mode.draws, mode.taken) for each in runs
        ):
            return None
        local = block_split.local._replace(
            sizes=tuple(mode.sizes),
            draws=tuple(mode.draws),
            summed=summed,
            takes=mode.taken,
            outs=outs[0] if any(outs[0]) else (),
        )
        return replace(block_split, local=local)

    def _summed(
        self, found: Sequence[Sequence[Tensor | None]], whole: Sequence[Tensor | None]
    ) -> tuple[str, ...] | None:
        """Return the names of unsplit parameters whose gradients are those of the whole block as sums over ranks.

        Args:
            found: gradients on each rank.
            whole: gradients of the whole block.

        Returns:
            The names; None where some gradient is neither on each rank nor as a sum that of the whole block.
        """
        if any(len(gradients) != len(whole) for gradients in found):
            return None
        rounding, names = _rounding(whole), []
        begin = len(whole) - len(self.others)
        for index, wanted in enumerate(whole):
            each = [gradients[index] for gradients in found]
            some = [gradient for gradient in each if gradient is not None]
            # The gradient of a key's bias is rounding alone: that of each rank, if the ranks do not sum theirs.
            alike = len(some) in (0, len(each)) and all(torch.equal(gradient, some[0]) for gradient in some)
            if some and not alike and index >= begin and is_close(torch.stack(some).sum(0), wanted, rounding):
                names.append(self._names[index - begin])
            elif not all(is_close(gradient, wanted, rounding) for gradient in each):
                return None
        return tuple(names)


class _Run:
    """One rank's slice of a block."""

    def __init__(self, trial: _Trial, block_split: BlockSplit, rank: int, whole: _Whole, prefer_last: bool) -> None:
        self._trial, self._block_split, self._rank, self._whole = trial, block_split, rank, whole
        self._prefer_last = prefer_last
        self.slice_ = LayerSlice("", SilentRanks(rank, trial.ranks), block_split.units)
        self.part = torch.empty(0)
        self.gradients: dict[str, Tensor] = {}
        self.mode: _Probe

    def forward(
        self, total: Tensor | None, sums: Mapping[str, Tensor] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of the slice's output, and all that its gradient is wanted of.

        Args:
            total: sum of the row-parallel layer's outputs over all ranks; None in the first pass.
            sums: gradients of the column-parallel layers' inputs, and of tensors that give each rank its heads, summed
                over all ranks.
        """
        block_split, ranks, linears = self._block_split, self._trial.ranks, self._trial.linears
        x, inner = self._whole.x.clone().requires_grad_(), [*linears.values()]
        for name, cut in block_split.columns.items():
            linears[name].forward = self._column(name, cut, sums)
        for name in block_split.local.widened:
            inner.append(self._trial.block.get_submodule(name))
            inner[-1].forward = self._widened(name, inner[-1].forward, sums)
        last, cut = linears[block_split.row], TensorCut(1, block_split.units)

        def row(inputs: Tensor) -> Tensor:
            self.part = part = functional.linear(inputs, cut.take(matrix(last), self._rank, ranks))
            out = part if total is None else part + (total - part).detach()
            unmark_local(out)
            return out if last.bias is None else out + cast(Tensor, last.bias)

        last.forward = row

        def tap(key: str, tensor: Tensor) -> Tensor:
            return self._tapped(key, tensor, sums)

        local, draws = block_split.local, self._whole.draws
        self.mode = _Probe(self.slice_, local, draws, self._prefer_last, tap, self._trial.exact)
        try:
            with local_counts(self._trial.block, block_split.local.counts, self.slice_), self.mode:
                found = self._trial.run(x)
        finally:
            for module in inner:
                vars(module).pop("forward", None)
        self.part = self.part.detach()
        return found

    def backward(self, total: Tensor, sums: Mapping[str, Tensor] | None) -> tuple[list[Tensor], list[Tensor | None]]:
        """Run forward and backward of one rank's slice of the block.

        Args:
            total: sum of the row-parallel layer's outputs over all ranks.
            sums: gradients of the column-parallel layers' inputs, and of tensors that give each rank its heads, summed
                over all ranks; None in the first pass.

        Returns:
            The detached tensors of the output, and the gradients, None where the output does not depend on a tensor, of
            the tensors that ``forward`` returns second.
        """
        outs, wanted = self.forward(total, sums)
        learned = [out for out in outs if out.requires_grad]
        given = zip(learned, self._whole.directions, strict=True)
        directions = [_heads_here(direction, _head_dim(out, direction), self.slice_) for out, direction in given]
        return [out.detach() for out in outs], _gradients(learned, wanted, directions)

    def _tapped(self, key: str, tensor: Tensor, sums: Mapping[str, Tensor] | None) -> Tensor:
        """Return the tensor, whose gradient is recorded under ``key``, and replaced by the sum over all ranks."""

        def backward_fn(gradient: Tensor) -> Tensor:
            self.gradients[key] = gradient
            return gradient if sums is None else sums.get(key, gradient)

        tapped: Tensor = _Tap.apply(tensor, backward_fn)  # type: ignore[no-untyped-call]
        return tapped

    def _column(self, name: str, cut: TensorCut, sums: Mapping[str, Tensor] | None) -> Callable[[Tensor], Tensor]:
        linear, ranks, calls = self._trial.linears[name], self._trial.ranks, count()

        def column(inputs: Tensor) -> Tensor:
            whole = cast(Tensor | None, linear.bias)
            bias = None if whole is None else cut.take(whole, self._rank, ranks)
            weight = cut.take(matrix(linear), self._rank, ranks)
            result = functional.linear(self._tapped(f"input {next(calls)} of {name}", inputs, sums), weight, bias)
            mark_local(result, cut.sections)
            return result

        return column

    def _widened(
        self, name: str, plain: Callable[[Tensor], Tensor], sums: Mapping[str, Tensor] | None
    ) -> Callable[[Tensor], Tensor]:
        """Return the forward of a layer that gets the features of all ranks, those of others from the whole block."""
        mine, whole = self.slice_.mine, self._whole.wide[name]

        def widened(inputs: Tensor) -> Tensor:
            each = inputs.shape[-1] // len(mine)
            before, after = whole[..., : each * mine.start], whole[..., each * mine.stop :]
            result = plain(self._tapped(name, torch.cat([before, inputs, after], -1), sums))
            part = result.narrow(-1, each * mine.start, each * len(mine))
            mark_local(part)
            return part

        return widened


def _summed_over(runs: Sequence[_Run], total: Tensor, sums: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Return the gradients that ranks exchange in backward, summed over them, with those that are known in ``sums``."""
    for run in runs:
        run.backward(total, sums)
    return {key: torch.stack([run.gradients[key] for run in runs]).sum(0) for key in runs[0].gradients}


def _gradients(outs: list[Tensor], wanted: list[Tensor], directions: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of tensors; without a gradient of any output, none."""
    return list(torch.autograd.grad(outs, wanted, directions, allow_unused=True)) if outs else []


def _keys(outputs: int, width: int) -> int:
    """Return the outputs of a linear layer for keys alone: those of a fused layer that are not queries, by two."""
    return (outputs - width) // 2 if width < outputs < 3 * width else outputs


def _cut(outputs: int, width: int, units: int, layout: str) -> TensorCut | None:
    """Return the cut of a layer's outputs into units, with the sections of a ``layout``, one of ``_SECTIONS``."""
    sections: tuple[int, ...] = ()
    if layout == "equal" and outputs % width == 0 and outputs > width:
        sections = (width,) * (outputs // width)
    elif layout == "grouped" and width < outputs < 3 * width and (outputs - width) % 2 == 0:
        sections = width, (outputs - width) // 2, (outputs - width) // 2
    return None if any(size % units for size in sections or (outputs,)) else TensorCut(0, units, sections)


def _split_outs(found: Sequence[Tensor], whole: Sequence[Tensor], slice_: LayerSlice) -> tuple[int, ...] | None:
    """Return the dimension of heads in each output of one rank, counted from the last; 0 where it is whole.

    None where an output is neither the whole block's nor this rank's heads of it.
    """
    if len(found) != len(whole):
        return None
    dims = tuple(_head_dim(out, wanted) for out, wanted in zip(found, whole, strict=True))
    here = [_heads_here(wanted, dim, slice_) for wanted, dim in zip(whole, dims, strict=True)]
    rounding = _rounding(whole)
    return dims if all(is_close(out, wanted, rounding) for out, wanted in zip(found, here, strict=True)) else None


def _head_dim(part: Tensor, whole: Tensor) -> int:
    """Return the dimension, counted from the last, in which a rank's tensor is smaller; 0 for none or several."""
    if part.dim() != whole.dim():
        return 0
    differ = [d - part.dim() for d in range(part.dim()) if part.shape[d] != whole.shape[d]]
    return differ[0] if len(differ) == 1 else 0


def _heads_here(whole: Tensor, dim: int, slice_: LayerSlice) -> Tensor:
    """Return this rank's even share of a tensor along a dimension counted from the last; all of it for 0."""
    mine = slice_._replace(length=whole.shape[dim]).mine if dim else range(0)
    return whole.narrow(dim, mine.start, len(mine)) if dim else whole


def _rounding(whole: Sequence[Tensor | None]) -> float:
    """Return the error of rounding, of which the largest of the tensors makes the most.

    The gradient of a key's bias is zero but for rounding.
    """
    return 1e-12 * max((_size(tensor) for tensor in whole), default=0.0)


def is_close(one: Tensor | None, other: Tensor | None, rounding: float = 0.0) -> bool:
    """Return whether two tensors in double precision are equal but for rounding, or both None.

    Args:
        one, other: the tensors.
        rounding: error that is allowed beside 1e-9 of the largest number of ``other``.
    """
    if one is None or other is None:
        return one is other
    atol = max(1e-9 * _size(other), rounding)
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=1e-9, atol=atol))


def _size(tensor: Tensor | None) -> float:
    return float(tensor.abs().max()) if tensor is not None and tensor.numel() else 0.0
