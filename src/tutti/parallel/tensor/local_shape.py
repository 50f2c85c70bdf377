"""Run a block's own forward on this rank's heads or features, although its code names the global sizes.

Code such as ``x.view(samples, positions, heads, width // heads)`` names global sizes. Within ``LocalShapeMode`` the
outputs of split layers are smaller. A view whose sizes do not fit is cut in the one dimension that was proved right
when the plan was made; dropout draws for all heads or features and applies this rank's slice of the draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.errors import UsageError
from tutti.nn.forward_hooks import find_script_hook
from tutti.parallel.tensor.block_call import form_of
from tutti.parallel.tensor.head_parallel import attend
from tutti.parallel.tensor.tensor_slice import LayerSlice, dropped
from tutti.parallel.tensor.tp_layers import TensorParallelLayer, refuse_hook

VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
SPLITS = (Tensor.split, torch.split)
DROPOUTS = (functional.dropout, torch.dropout)
ATTENTION = functional.scaled_dot_product_attention


class LocalShapeMode(TorchFunctionMode):
    """Function mode in which a block's own forward runs on this tensor-parallel rank's slice of its heads or features.

    The block's code names the sizes of the whole. Within this mode ``view``, ``reshape`` and ``split`` with such sizes
    get this rank's sizes instead. Dropout and ``scaled_dot_product_attention`` draw masks for all heads or features, as
    one device does, and apply this rank's slice. ``sizes`` and ``draws`` come from the tensor-parallel plan of the
    block. The mode sends nothing, and serves one call of the block.

    Args:
        slice_: which heads or features of the block this rank has.
        width: features of all heads together.
        sizes: for each view whose sizes do not fit the slice, in the order of the calls, the index of the size to
            reduce.
        draws: for each call of dropout or attention, in their order, the split dimension, counted from the last (-1); 0
            where the input is not split.

    Attributes:
        slice_, width: as given.
        sizes, draws: as given, as lists.
        drops: whether dropout is applied: True, here.
        viewed, drawn: numbers of the views that were reduced, and of the calls of dropout or attention, so far.
    """

    drops = True

    def __init__(self, slice_: LayerSlice, width: int, sizes: Sequence[int], draws: Sequence[int]) -> None:
        super().__init__()
        self.slice_, self.width, self.sizes, self.draws = slice_, width, list(sizes), list(draws)
        self.viewed = self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in VIEWS:
            args = self._view(*args)
        elif func in SPLITS:
            args, kwargs = self._split(*args, **kwargs)
        elif func in DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        elif func is ATTENTION:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def cut(self, have: int, sizes: list[int]) -> int:
        """Return which size of a view to reduce so that it fits this rank's tensor slice, as an index in ``sizes``.

        A block such as attention runs on this tensor-parallel rank's heads, but its code names the sizes of the whole
        tensor, such as the number of heads in ``x.view(samples, positions, heads, features)``; one of the sizes has to
        become that of the slice. The index comes from the tensor-parallel plan, which lists one for each such view in
        the order of the calls. The attribute ``viewed``, which the caller then increments, is the present view's place
        in the list.

        Args:
            have: number of elements of the tensor on this rank, for the message of the error.
            sizes: sizes of the view as the code gives them, for the whole tensor.

        Raises:
            UsageError: the plan lists no more views, or its index is not one of ``sizes``.
        """
        if self.viewed >= len(self.sizes) or not self.sizes[self.viewed] < len(sizes):
            self._refuse(f"a view of {have} numbers as {sizes}")
        return self.sizes[self.viewed]

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
        if self.drawn >= len(self.draws):
            self._refuse("another call of dropout")
        return self.draws[self.drawn]

    def _view(self, tensor: Tensor, *rest: Any) -> tuple[Any, ...]:
        sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], tuple | list) else list(rest)
        have = tensor.numel()
        if not all(type(size) is int for size in sizes) or -1 in sizes or math.prod(sizes) == have:
            return (tensor, *rest)
        index = self.cut(have, sizes)
        self.viewed += 1
        size, left = divmod(sizes[index] * have, math.prod(sizes))
        if left:
            self._refuse(f"a view of {have} numbers as {sizes}")
        sizes[index] = size
        return tensor, sizes

    def _split(self, tensor: Tensor, size: Any, dim: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        here = self.width * len(self.slice_.mine) // self.slice_.length
        length, parts = tensor.shape[dim], 0 if type(size) is int else len(size)
        if size == self.width and length in (2 * here, 3 * here):
            size = here
        elif parts and all(part == self.width for part in size) and length == parts * here:
            size = [here] * parts
        return (tensor, size, dim), {}

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

    def _refuse(self, what: str) -> None:
        raise UsageError(
            f"the layer does {what}, which it did not when its plan was made",
            where=self.slice_.name,
            why="its code takes a different branch than before, which the plan does not cover",
            remedy=f"leave it whole: strategy='tensor:whole={self.slice_.name}'",
        )


class HeadParallelBlock(TensorParallelLayer):
    """Tensor-parallel block, such as attention: its own forward runs on this rank's slice of the heads or features.

    Attributes:
        tutti_local: the arguments ``width``, ``sizes`` and ``draws`` of ``LocalShapeMode``, set by ``run_within``.
        tutti_forms: kinds of arguments, as texts of ``form_of``, that the forward accepts; empty for no check.
        tutti_inner: names and modules of the block's submodules, on which forward hooks of the script are refused.
    """

    tutti_local: tuple[int, Sequence[int], Sequence[int]]
    tutti_forms: frozenset[str]
    tutti_inner: Sequence[tuple[str, nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unsplit block's own forward on this tensor-parallel rank's heads or features.

        View sizes and dropout in that code are fitted to the slice (``LocalShapeMode``). Arguments and result are those
        of the unsplit block, the same on every rank. The split layers in the block are collective over the tensor
        ranks: the row-parallel one all-reduces (or reduce-scatters) the outputs, and the column-parallel ones
        all-reduce their inputs' gradients in backward.

        Args:
            args, kwargs: arguments of the unsplit block's forward, with whole tensors.

        Raises:
            UsageError: the arguments are of other kinds than in the calls for which the split was verified; the code
                makes a view or a call of dropout that was not recorded when the tensor-parallel plan was made; or the
                script has put a forward hook on a module in the block.
        """
        if (hooked := find_script_hook(self.tutti_inner)) is not None:
            refuse_hook(*hooked, self.tutti_slice.name)
        if self.tutti_forms and not any(form_of(args, kwargs, values=v) in self.tutti_forms for v in (False, True)):
            raise UsageError(
                f"the layer is called with other arguments ({form_of(args, kwargs)}) than when its plan was made",
                where=self.tutti_slice.name,
                why="with them its code may combine heads, of which each tensor rank has some",
                remedy=f"leave it whole: strategy='tensor:whole={self.tutti_slice.name}'",
            )
        with LocalShapeMode(self.tutti_slice, *self.tutti_local):
            return super().forward(*args, **kwargs)


def run_within(module: nn.Module, width: int, sizes: Sequence[int], draws: Sequence[int], forms: Sequence[str]) -> None:
    """Store on a block how view sizes and dropout in its own forward are fitted to this rank's heads or features.

    The arguments come from the tensor-parallel plan of the block.

    Args:
        module: the block, a ``HeadParallelBlock``.
        width: features of all heads together.
        sizes: for each view whose sizes do not fit the slice, in the order of the calls, the index of the size to
            reduce.
        draws: for each call of dropout or attention, in their order, the split dimension, counted from the last (-1); 0
            where the input is not split.
        forms: kinds of arguments of the calls for which the split was verified, as texts of ``form_of``. The forward
            raises UsageError for calls of other kinds, and also takes calls of these kinds in which no tensor needs a
            gradient. Empty for no check.
    """
    module.tutti_local = (width, sizes, draws)  # type: ignore[assignment]
    prefix = f"{module.tutti_slice.name}." if module.tutti_slice.name else ""  # type: ignore[union-attr]
    inner = [(prefix + name, each) for name, each in module.named_modules() if each is not module]
    module.tutti_inner = inner  # type: ignore[assignment]
    # What was proved with gradients holds without them.
    module.tutti_forms = frozenset(forms) | {form.replace("*", "") for form in forms}  # type: ignore[assignment]
