"""Placeholders in ``.grad`` for gradients of which this rank has a part; norms and scalings act on the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.nn.incomplete_gradient import IncompleteGradient
from tutti.torch_compat import in_backward, tensor_version, tree_leaves, tree_map_only

_NORMS = ("linalg_vector_norm", "_foreach_norm")
_SCALING = (
    *("mul_", "div_", "clamp_", "clamp_min_", "clamp_max_", "zero_"),
    *("_foreach_mul_", "_foreach_div_", "_foreach_clamp_min_", "_foreach_clamp_max_", "_foreach_zero_"),
    "_amp_foreach_non_finite_check_and_unscale_",
)
_UNSCALE = _SCALING[-1]
_ADDING = ("add_", "sub_")
_PROBE = (1.0, -2.5, 1e-3)
"""Elements of ``PartGradient.probe``: of both signs and several magnitudes, for clamps."""


class GradientParts:
    """Gradients of which each rank of a group holds a part: slices of tensor parallelism, rows of sharding, or stages.

    Of the gradients of a model that is cut into stages, some ranks hold the whole and the others nothing.

    Gives norms of the whole gradients. The first norm of an order is computed for all gradients of this object in one
    all-gather; further ones are read from its result until a gradient is scaled.

    Args:
        comm: the ranks that hold the parts. All of them must take the same norms, in the same order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._parts = comm, list[tuple[PartGradient, bool]]()
        self._norms: dict[float, Tensor] = {}

    def conceal(
        self,
        parameters: Sequence[nn.Parameter],
        place: str,
        own: Callable[[], Tensor | None],
        counted: bool = True,
        scaled: Callable[[], None] = lambda: None,
        elsewhere: bool = False,
        whole: bool = False,
    ) -> None:
        """Put placeholders that know this rank's part of one gradient into the ``.grad`` of parameters.

        Args:
            parameters: the objects that stand for one parameter, such as the model's and the optimizer's.
            place: words for the location of the complete gradient, for the error message.
            own: returns this rank's part of the gradient, which scaling changes in place; None where there is none.
            counted: whether the part counts in norms; False for the second copy of a part that two ranks hold.
            scaled: called after each scaling of the part.
            elsewhere: whether this rank has no part of the gradient, and others have.
            whole: whether each rank has the whole gradient or no part of it.
        """
        probe = torch.tensor(_PROBE, dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter in parameters:
            made = PartGradient(parameter, place)
            made.parts, made.place_in_parts, made.probe = self, len(self._parts), probe
            made.own, made.scaled, made.elsewhere, made.whole = own, scaled, elsewhere, whole
            made.added_to = []
            parameter.grad = made
        self._parts.append((made, counted))

    def norm(self, index: int, order: float) -> Tensor:
        """Return the norm of one whole gradient. Collective in the first call of an order since the last scaling.

        Args:
            index: position of the gradient among the calls of ``conceal``.
            order: p > 0 of the norm (Σ|gᵢ|ᵖ)^(1/p); infinity for the largest magnitude.

        Returns:
            A tensor without dimensions, equal on all ranks of the group; float32 for gradients of 16 bits.
        """
        if order not in self._norms:
            own = [part.own() if counted else None for part, counted in self._parts]
            there = [None if g is None or not g.numel() else g for g in own]
            # By the parameters' dtypes, which are the same on all ranks.
            double = any(part.probe.dtype == torch.float64 for part, _ in self._parts)
            wide = torch.float64 if double else torch.float32
            zero = self._parts[index][0].probe.new_zeros((), dtype=wide)
            local = [zero if g is None else torch.linalg.vector_norm(g.to(wide), order).to(zero.device) for g in there]
            # The norm of the parts' norms is the norm of the whole.
            self._norms[order] = torch.linalg.vector_norm(self._gather(torch.stack(local)), order, dim=0)
        return self._norms[order][index]

    def forget(self) -> None:
        """Forget the norms, because a gradient has been scaled."""
        self._norms.clear()

    def _gather(self, mine: Tensor) -> Tensor:
        """All-gather a vector (n,): (ranks, n), on the device of ``mine``."""
        comm = self._comm
        rows = comm.gather_slices(mine.to(comm.device), "norms of gradients of which this rank has a part")
        return rows.view(comm.size, -1).to(mine.device)

    def largest(self, flag: Tensor) -> Tensor:
        """Return the largest value of a tensor of one element over the ranks of the group. Collective."""
        return self._gather(flag.reshape(1)).amax(0)


class PartGradient(IncompleteGradient):
    """Placeholder in ``.grad`` of a parameter of which this rank has a part, for ``clip_grad_norm_`` and the like.

    Norms are those of the whole gradient, equal on all ranks. Scaling and clamping in place act on this rank's part,
    and are recorded on a few numbers, ``probe``, by which ranks find that they have scaled differently. Other
    operations on the values raise UsageError. ``GradientParts.conceal`` makes it.

    Attributes:
        parts: all gradients of this kind, of which it takes norms.
        own: returns this rank's part of the gradient; None if there is none.
        place_in_parts: position of the gradient in ``parts``.
        probe: (3,), numbers that have been scaled and clamped like the gradient.
        scaled: called after each scaling of the part.
        elsewhere: whether this rank has no part of the gradient, and others have.
        whole: whether each rank has the whole gradient or no part of it; the script may then add tensors to it.
        added_to: sums of the tensors that the script has added; None for tensors that this rank does not have.
    """

    parts: GradientParts
    own: Callable[[], Tensor | None]
    place_in_parts: int
    probe: Tensor
    scaled: Callable[[], None]
    elsewhere: bool
    whole: bool
    added_to: list[Tensor | None]

    @property
    def edited(self) -> bool:
        """Whether the script has scaled or clamped the gradient, or added to it."""
        return bool(tensor_version(self.probe) or self.added_to)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, PartGradient)]
        if name in _ADDING and found == [args[0]] and found[0].takes(args[1]):
            return found[0].add_term(func, args[1], kwargs)
        if not _acts_on_parts(name, args, kwargs) or any(each.own() is None and not each.elsewhere for each in found):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if name in _NORMS:
            listed = isinstance(args[0], list | tuple)
            order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0))
            norms = [_norm_of(each, order, kwargs.get("dtype")) for each in (args[0] if listed else [args[0]])]
            return norms if listed else norms[0]
        # Scalings are elementwise: what they do to a part, they do to the whole.
        here = [each for each in args[0] if _is_here(each)] if isinstance(args[0], list | tuple) else args[0]
        if _is_here(here):
            whole = tree_map_only(PartGradient, lambda each: each.own(), ((here, *args[1:]), kwargs))
            func(*whole[0], **whole[1])
        once = {id(each.probe): each for each in found}
        for each in once.values():
            each.parts.forget()
            each.scaled()
        if name == _UNSCALE:
            # Ranks find infinities in their own parts, and must agree on whether there is one.
            for parts in {each.parts for each in once.values()}:
                args[1].copy_(parts.largest(args[1]).view_as(args[1]))
            args = (args[0], torch.zeros_like(args[1]), args[2])
        if isinstance(args[0], list | tuple):
            func([each.probe for each in once.values()], *args[1:], **kwargs)
        else:
            func(args[0].probe, *args[1:], **kwargs)
        # In-place writes below autograd do not increment the version counter.
        torch.autograd.graph.increment_version([each.probe for each in once.values()])
        return args[0] if isinstance(args[0], Tensor) else None

    def takes(self, term: Any) -> bool:
        """Return whether ``term`` is a tensor, or a number, that may be added to this gradient."""
        there = self.whole and (self.elsewhere or self.own() is not None)
        # In a backward autograd accumulates a gradient of the script's own.
        return there and not in_backward() and not isinstance(term, IncompleteGradient)

    def add_term(self, func: Any, term: Any, options: Mapping[str, Any]) -> PartGradient:
        """Add ``term`` to the gradient where this rank has it, by ``func``, and note it. Returns this object."""
        own = self.own()
        if own is not None:
            func(own, term, **options)
            self.parts.forget()
            self.scaled()
        self.note(torch.as_tensor(term).detach().sum() * options.get("alpha", 1))
        return self

    def note(self, total: Tensor | None) -> None:
        """Note that the script has added a tensor with this sum of its elements, None where it is unknown here."""
        self.parts.forget()
        self.added_to.append(total)


def _is_here(gradients: Any) -> bool:
    """Return whether this rank has a part of a gradient, or any gradient of a list is left."""
    return not gradients.elsewhere if isinstance(gradients, PartGradient) else bool(len(gradients))


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


def _norm_of(gradient: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if isinstance(gradient, PartGradient):
        return gradient.parts.norm(gradient.place_in_parts, order).to(dtype or gradient.dtype)
    found: Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return found
