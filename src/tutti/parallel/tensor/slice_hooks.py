"""Give the script's hooks on gradients of tensor slices the whole gradients, and cut what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tutti.errors import UsageError, script_line
from tutti.parallel.tensor.split_reads import SplitReads
from tutti.torch_compat import gradient_hooks, tensor_version


class SliceHooks:
    """Lets hooks of ``register_hook`` on parameters of which this rank has a slice see the whole gradient.

    Called without arguments, the object replaces each of the script's hooks on split parameters by a
    ``WholeGradientHook`` of it, unless that has been done before, and returns a list of the parameters' names, one for
    each hook replaced. Not collective. The call raises UsageError for a hook on any parameter under sequence
    parallelism.

    Args:
        parameters: all parameters of the model, by name.
        reads: the function mode that knows which of them are split, and how.
        script_code: called without arguments; returns a context for code of the script, in which ``reads`` is active.
        sequence: whether the run has sequence parallelism, under which gradients of whole parameters are not complete
            in backward.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        reads: SplitReads,
        script_code: Callable[[], AbstractContextManager[None]],
        *,
        sequence: bool,
    ) -> None:
        self._parameters: Any = WeakIdKeyDictionary({parameter: name for name, parameter in parameters.items()})
        self._reads, self._script_code, self._sequence = reads, script_code, sequence

    def __call__(self) -> Sequence[str]:
        """Wrap all hooks that are not wrapped yet, in the parameters' own tables of hooks. Not collective.

        Returns:
            Names of the parameters whose hooks have been wrapped in this call.

        Raises:
            UsageError: there are hooks, and sequence parallelism.
        """
        found = []
        for parameter, name in self._parameters.items():
            hooks = gradient_hooks(parameter) or {}
            if hooks and self._sequence:
                raise UsageError(
                    f"sequence=true cannot be combined with the hook on the gradient of {name}",
                    why="a rank's backward gives it the gradient of a share of the positions",
                    remedy="leave out one of the two",
                )
            split = self._reads.name_of(parameter)
            for key, hook in list(hooks.items()):
                if split is not None and not isinstance(hook, WholeGradientHook):
                    hooks[key] = WholeGradientHook(hook, split, self._reads, self._script_code)
                    found.append(name)
        return found


class WholeGradientHook:
    """Calls a hook of the script with the whole gradient, where autograd gives it this rank's slice.

    Autograd calls this object with this rank's slice of a split parameter's gradient. The call gathers the whole
    gradient, calls the script's hook with it, and returns this rank's slice of the gradient that the hook has returned
    or made in place. It is collective over the tensor ranks: an all-reduce, and a comparison of the hook's result,
    which raises MismatchError if it differs over the ranks. A backward with ``create_graph=True``, and a result of
    another shape, raise UsageError.

    Args:
        hook: the script's hook, which returns a new gradient or None.
        name: name of the split parameter in the model.
        reads: the function mode that knows how the parameter is split.
        script_code: called without arguments; returns a context for code of the script, in which ``reads`` is active.
    """

    def __init__(
        self,
        hook: Callable[[Tensor], Tensor | None],
        name: str,
        reads: SplitReads,
        script_code: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._hook, self._name, self._reads, self._script_code = hook, name, reads, script_code

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return this rank's slice of the gradient that the script's hook makes. Collective over the tensor ranks.

        Args:
            gradient: this rank's slice of a micro-batch's gradient.

        Raises:
            UsageError: the backward makes a graph of its own (``create_graph``), or the hook returns a tensor of
                another shape.
            MismatchError: the hook makes different gradients on the ranks.
        """
        if torch.is_grad_enabled() and gradient.requires_grad:
            self._refuse("in a backward with create_graph=True", "its graph would end at the gathered gradient")
        gatherer = self._reads.gatherer(self._name, gradient)
        [whole] = gatherer.gather(gradient, [gradient])
        before = tensor_version(whole)
        with self._script_code():
            result = self._hook(whole)
        if result is None and tensor_version(whole) == before:
            return gradient
        made = whole if result is None else result.detach()
        if result is not None and self._reads.name_of(result) == self._name and made.shape == gradient.shape:
            return made
        if made.shape != whole.shape:
            self._refuse(f"that returns a tensor of {tuple(made.shape)}", f"the gradient has {tuple(whole.shape)}")
        self._reads.compare(made, f"the hook on the gradient of {self._name} makes a tensor")
        return gatherer.mine(gradient, made)

    def _refuse(self, what: str, why: str) -> None:
        raise UsageError(
            f"the strategy cannot be combined with the hook on the gradient of {self._name} {what}",
            where=script_line(),
            why=why,
            remedy=f"leave the layer whole by tensor:whole={self._name.rpartition('.')[0]}, or take mirrored",
        )
