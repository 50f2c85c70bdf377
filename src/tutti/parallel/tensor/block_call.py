"""Arguments with which a model's forward calls its blocks: masks, rotary tables, caches.

A block with several arguments is tried with those of a real call. The plan then names the forms of the calls that were
proved right, and a call of any other form is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from tutti.errors import UsageError
from tutti.nn.untouched import untouched
from tutti.torch_compat import tree_flatten, tree_leaves, tree_unflatten

NEEDS_GRADIENT = "!"
"""Mark of a tensor that needs a gradient in the text of a call's kinds, in whose structure leaves are ``*``."""
_SAMPLES = 2
"""Samples of the trial of the forward."""


@dataclass(frozen=True)
class BlockArguments:
    """The arguments of one recorded call of a block: a submodule of several layers, such as attention.

    Tensor parallelism may split such a block over ranks as one unit; running the block with these arguments verifies
    the split.

    Attributes:
        args, kwargs: positional and keyword arguments of the call, with detached copies of the tensors.
        learned: one boolean for each leaf of ``(args, kwargs)``, flattened as a pytree: True for a tensor that needs a
            gradient.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    learned: tuple[bool, ...]

    @property
    def form(self) -> str:
        """Text that describes the kinds of this recorded call's arguments, equal for two calls of the same kinds.

        The call is one of a block of layers, such as attention. The text has the pytree structure of ``(args,
        kwargs)``, and for each tensor the word float, int or bool, the number of dimensions, and whether it needs a
        gradient (see ``form_of``). Sizes do not enter, but for one: of a tensor with at least four dimensions, whether
        the third from last (attention heads) is larger than 1. Numbers enter with their values.
        """
        return form_of(self.args, self.kwargs, self.learned)

    @property
    def form_for_any_number(self) -> str:
        """Text that describes the kinds of this recorded call's arguments, as ``form``, but without values of numbers.

        It is equal for two calls of a block of layers, such as attention, that differ in the values of ints and floats
        alone, and equal to ``form`` where no argument is an int or a float.
        """
        return form_of(self.args, self.kwargs, self.learned, values=False)

    def main_input(self, features: Collection[int]) -> int:
        """Return the index of the main input among the arguments of this recorded call of a block, such as attention.

        The index counts all values in ``(args, kwargs)``, flattened as a pytree. The main input is the first floating
        tensor of at least two dimensions whose last size is in ``features``.

        Args:
            features: allowed sizes of the last dimension, such as the input widths of the block's linear layers.

        Raises:
            StopIteration: no argument is such a tensor.
        """
        leaves = tree_leaves((self.args, self.kwargs))
        return next(
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1 and leaf.shape[-1] in features
        )

    def arguments(self, index: int, x: Tensor) -> tuple[Any, Any, list[Tensor]]:
        """Return copies of this recorded call's arguments in double precision, with another main input.

        The caller runs the block, a submodule such as attention, with the copies.

        Args:
            index: index of the main input (the tensor that the block's linear layers take, see ``main_input``) among
                all values in ``(args, kwargs)``, flattened as a pytree.
            x: the tensor to use as main input; it is passed on as it is, not copied.

        Returns:
            A triple ``(args, kwargs, learned)``. ``args`` and ``kwargs`` have the structure of the recorded ones;
            floating tensors are converted to float64, and all values but ``x`` are copied. A copied floating tensor
            that is all zeros gets random values, since a product with zero would hide what the block computes.
            ``learned`` is a list of the copied tensors that require a gradient: those that ``self.learned`` marks,
            without ``x``.
        """
        generator = torch.Generator().manual_seed(0)
        leaves, spec = tree_flatten((self.args, self.kwargs))
        made: list[Any] = []
        learned = []
        for number, leaf in enumerate(leaves):
            if number == index:
                made.append(x)
            elif isinstance(leaf, Tensor):
                value = (leaf.double() if leaf.is_floating_point() else leaf).clone()
                fill_zeros(value, generator)
                made.append(value.requires_grad_(self.learned[number]))
                learned += [made[-1]] if self.learned[number] else []
            else:
                made.append(copy.deepcopy(leaf))
        args, kwargs = tree_unflatten(made, spec)
        return args, kwargs, learned

    def variants(self, block: nn.Module, index: int) -> Iterator[BlockArguments]:
        """Yield this call of a block with other attention masks: none, then a boolean and an additive causal mask.

        Masks are (batch, 1, queries, keys): True where attention is allowed, or 0 there and the lowest number of the
        main input's type elsewhere. They replace every argument whose name contains "mask" and whose value is a tensor
        or None. Nothing is yielded if there is no such argument, if the main input is not of three dimensions (batch,
        positions, features), or if an argument is a mapping.

        Args:
            block: the block that is called; the signature of its ``forward`` gives the names of positional arguments.
            index: index of the main input among the values in ``(args, kwargs)``, flattened as a pytree.
        """
        names = list(inspect.signature(block.forward).parameters)
        given = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        masks = [name for name, value in given.items() if "mask" in name and isinstance(value, Tensor | None)]
        x = tree_leaves((self.args, self.kwargs))[index]
        if not masks or x.dim() != 3 or any(isinstance(value, Mapping) for value in given.values()):
            return
        allowed = torch.ones(x.shape[0], 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
        added = torch.zeros(allowed.shape, dtype=x.dtype).masked_fill_(~allowed, torch.finfo(x.dtype).min)
        for mask in (None, allowed, added):
            args = tuple(mask if name in masks else value for name, value in zip(names, self.args, strict=False))
            kwargs = {name: mask if name in masks else value for name, value in self.kwargs.items()}
            leaves = tree_leaves((args, kwargs))
            yield replace(self, args=args, kwargs=kwargs, learned=tuple(self._learned(leaf) for leaf in leaves))

    def other_numbers(self) -> Iterator[BlockArguments]:
        """Yield copies of this call of a block in which one argument that is an int or a float has another value.

        For each such argument, with value v, up to four copies are yielded: with 0, 1, v + 1 and 2 v + 1 in place of v;
        a value equal to v is left out. Arguments nested in containers count, booleans do not.
        """
        leaves, spec = tree_flatten((self.args, self.kwargs))
        for number, leaf in enumerate(leaves):
            if not _is_number(leaf):
                continue
            for value in (type(leaf)(0), type(leaf)(1), leaf + 1, 2 * leaf + 1):
                if value != leaf:
                    args, kwargs = tree_unflatten([*leaves[:number], value, *leaves[number + 1 :]], spec)
                    yield replace(self, args=args, kwargs=kwargs)

    def _learned(self, leaf: Any) -> bool:
        known = zip(tree_leaves((self.args, self.kwargs)), self.learned, strict=True)
        return any(own is leaf and learned for own, learned in known)


def form_of(args: Any, kwargs: Any, learned: Sequence[bool] | None = None, *, values: bool = True) -> str:
    """Return a text that describes the kinds of a call's arguments, equal for two calls of the same kinds.

    The text is the pytree structure of ``(args, kwargs)`` and one word for each leaf. A tensor is ``float``, ``int`` or
    ``bool`` and its number of dimensions, followed by ``h`` if the tensor has at least four dimensions and the third
    from last (attention heads) is larger than 1, and by ``!`` if the tensor needs a gradient. Numbers, booleans,
    strings and None appear with their values, other arguments as the names of their types.

    Args:
        args, kwargs: positional and keyword arguments of the call.
        learned: whether each leaf of ``(args, kwargs)``, flattened as a pytree, needs a gradient. Default (also for an
            empty collection): the ``requires_grad`` of tensors, False while gradients are disabled.
        values: whether ints and floats appear with their values; otherwise as the names of their types.
    """
    leaves, spec = tree_flatten((args, kwargs))
    flags = learned or [isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled() for x in leaves]
    return f"{_text(spec)} " + " ".join(
        _kind(leaf, values) + NEEDS_GRADIENT * flag for leaf, flag in zip(leaves, flags, strict=True)
    )


def check_form(args: Any, kwargs: Any, forms: Collection[str], layer: str) -> None:
    """Raise UsageError if the split of a block was not verified for the kind of a call's arguments.

    The kind of a call's arguments is the text of ``form_of``: their structure, dtypes, numbers of dimensions, and which
    of them need gradients.

    Args:
        args, kwargs: positional and keyword arguments of the call.
        forms: texts of ``form_of``, with or without the values of numbers; empty for no check.
        layer: name of the block.

    Raises:
        UsageError: ``forms`` does not contain the call's text.
    """
    if forms and not any(form_of(args, kwargs, values=values) in forms for values in (False, True)):
        raise UsageError(
            f"the layer is called with other arguments ({form_of(args, kwargs)}) than when its plan was made",
            where=layer,
            why="with them its code may combine heads or features, of which each tensor rank has some",
            remedy=f"leave it whole: strategy='tensor:whole={layer}'",
        )


def with_fewer_gradients(forms: Collection[str]) -> frozenset[str]:
    """Return the given texts of ``form_of``, and the same texts for calls in which no tensor needs a gradient.

    A split that was verified with gradients is also right without them, as in an evaluation.

    Args:
        forms: texts of ``form_of``.
    """
    return frozenset(forms) | {form.replace(NEEDS_GRADIENT, "") for form in forms}


@lru_cache(maxsize=256)
def _text(spec: Any) -> str:
    return " ".join(str(spec).split())


def _kind(leaf: Any, values: bool) -> str:
    if isinstance(leaf, Tensor):
        kind = "float" if leaf.is_floating_point() else "bool" if leaf.dtype == torch.bool else "int"
        by_head = leaf.dim() > 3 and leaf.shape[-3] > 1
        return f"{kind}{leaf.dim()}" + "h" * by_head
    named = isinstance(leaf, bool | str | None) or (values and _is_number(leaf))
    return repr(leaf) if named else type(leaf).__qualname__


def _is_number(leaf: Any) -> bool:
    return type(leaf) in (int, float)


def fill_zeros(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill a floating tensor of zeros, in place, with random numbers from 0.1 to 0.4; leave any other as it is.

    Args:
        tensor: the tensor, in float64 if it is floating.
        generator: generator of the random numbers, on the CPU.
    """
    if tensor.is_floating_point() and not tensor.any():
        tensor.uniform_(0.1, 0.4, generator=generator)


def record_calls(
    plain: nn.Module, names: Collection[str], trial: Callable[..., Any] | None, device: torch.device
) -> dict[str, BlockArguments]:
    """Record the arguments of a call of each block, by running the loss function on a few samples.

    A block is a module of several layers, such as attention, that tensor parallelism may split as one unit. The loss
    function runs twice: first with gradients, to see which arguments need one, and then without, to record the
    arguments of each block's first call. An error of the loss function ends that run and is not raised.

    Args:
        plain: the whole model; it is left as it was.
        names: names of the submodules to record.
        trial: ``trial(model, most)`` calls the loss function on ``model`` with at most ``most`` samples of the data;
            here ``most`` is 2. None where no data is at hand.
        device: device on which the loss function runs.

    Returns:
        The recorded calls by the block's name, with detached tensors on the CPU. Blocks that are not called in both
        runs before an error, or whose arguments cannot be copied, are left out; without ``trial`` the mapping is empty.
    """
    learned: dict[str, list[bool]] = {}
    found: dict[str, BlockArguments] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            leaves, spec = tree_flatten((args, kwargs))
            if torch.is_grad_enabled():
                learned.setdefault(name, [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves])
            elif name not in found and len(leaves) == len(learned.get(name, ())):
                with suppress(Exception):
                    copies = [x.detach().cpu().clone() if isinstance(x, Tensor) else copy.deepcopy(x) for x in leaves]
                    own_args, own_kwargs = tree_unflatten(copies, spec)
                    found[name] = BlockArguments(own_args, own_kwargs, tuple(learned[name]))

        return hook

    handles = [plain.get_submodule(n).register_forward_pre_hook(note(n), with_kwargs=True) for n in names]
    try:
        # The first step reports any error. Without gradients caches can be copied.
        for gradients in (True, False) if trial is not None and names else ():
            with suppress(Exception), untouched(plain, device), torch.set_grad_enabled(gradients):
                trial(plain, _SAMPLES)  # type: ignore[misc]
    finally:
        for handle in handles:
            handle.remove()
    return found
