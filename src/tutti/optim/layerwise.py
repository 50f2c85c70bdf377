"""Base of layer-wise optimizers: options of groups, norms over ranks, compiled or multi-tensor passes.

A step is: norms of all layers → one factor a layer → the update. If a rank holds only slices of tensors, an injected
reduction (``NormReducer``) completes the norms, in one message for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.native import compiled_passes
from tutti.native.passes import Foreach, Passes, dense_format
from tutti.torch_compat import is_dtensor, local_tensor
from tutti.types.optimizer_protocols import NormReducer

_PLAIN = (Tensor, nn.Parameter)

Excluded = Collection[str] | Callable[[str, Tensor], bool]


@dataclass(slots=True)
class TensorUpdate:
    """One parameter tensor in one step of a layer-wise optimizer, with its gradient, state and group's options.

    Attributes:
        index: position, from 0, among all tensors of the step, over all parameter groups.
        param: the parameter, a local tensor if it is a ``DTensor``.
        grad: its gradient, which the step may convert to the parameter's dtype and memory format.
        state: its entry of the optimizer's ``state``: values by key, which the step changes in place.
        group: its parameter group, whose options are read.
    """

    index: int
    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: Mapping[str, Any]

    @property
    def adapted(self) -> bool:
        """Whether a layer-wise optimizer scales this tensor's step by norms of the tensor and its gradient.

        True if the parameter group sets ``adapt``, and also ``adapt_1d`` if the tensor has at most one dimension.
        """
        group = self.group
        return bool(group["adapt"] and (group["adapt_1d"] or self.param.dim() > 1))

    @property
    def decay(self) -> float:
        """Coefficient λ of weight decay with which a layer-wise optimizer updates this parameter tensor.

        It is 0 for a tensor of at most one dimension if its parameter group sets ``decay_1d`` to False, else the
        group's ``weight_decay``.
        """
        group = self.group
        return float(group["weight_decay"]) if group["decay_1d"] or self.param.dim() > 1 else 0.0

    @property
    def sign(self) -> float:
        """Factor on this parameter's gradient in a layer-wise optimizer's step, a float.

        It is -1 if the parameter group's option ``maximize`` is set, which turns descent into ascent, else 1.
        """
        return -1.0 if self.group["maximize"] else 1.0


@dataclass
class RowGroup:
    """Tensors of one step of a layer-wise optimizer that one call of multi-tensor or compiled loops updates.

    Attributes:
        passes: the loops that update them, compiled ones or PyTorch's.
        rows: the tensors, each with gradient, state and options.
    """

    passes: Passes
    rows: list[TensorUpdate] = field(default_factory=list)

    @property
    def params(self) -> list[Tensor]:
        """The parameters of this group, which one call of a layer-wise optimizer's loops updates together.

        A list in the order of ``rows``, the group's ``TensorUpdate`` objects (a parameter each, with gradient, state
        and options); the gradients ``grads`` and the states have the same order.
        """
        return [row.param for row in self.rows]

    @property
    def grads(self) -> list[Tensor]:
        """The gradients of this group's parameters, which a layer-wise optimizer updates together.

        The gradients are in the order of ``params``; each has the dtype of its parameter.
        """
        return [row.grad for row in self.rows]

    def states(self, name: str) -> list[Tensor]:
        """Return one kind of optimizer state of each parameter that is updated together; create missing ones as zeros.

        A state has its parameter's shape, dtype, device and strides; a state that was loaded with others is converted.

        Args:
            name: key in the optimizer's state of a parameter, such as a momentum buffer's.

        Returns:
            One tensor for each parameter, in the order of ``params``: the optimizer's own, for updates in place.
        """
        found = []
        for row in self.rows:
            state, param = row.state.get(name), row.param
            if state is None:
                row.state[name] = state = torch.zeros_like(param)
            elif not _alike(state, param):
                row.state[name] = state = torch.empty_like(param).copy_(state.view(param.shape))
            found.append(state)
        return found


class LayerWiseArguments(TypedDict, total=False):
    """Keyword arguments that the constructors of LARS, LARC, LAMB and NovoGrad have in common, for type checkers.

    Attributes:
        adapt: whether norms of a tensor and its gradient scale its step.
        adapt_1d, decay_1d: whether tensors of at most one dimension are adapted and decayed.
        maximize: maximize the objective.
        fused: compiled loops: None uses them where available, True requires them, False never uses them.
        norms: reduces sums of squares over the ranks that hold slices of the same tensors; None for whole tensors.
    """

    adapt: bool
    adapt_1d: bool
    decay_1d: bool
    maximize: bool
    fused: bool | None
    norms: NormReducer | None


class LayerWise(Optimizer):
    """Base of LARS, LARC, LAMB and NovoGrad, which scale a tensor's step by norms of the tensor and its gradient.

    All options but ``norms`` can be set for each parameter group. Construction compiles or loads the compiled loops.

    Args:
        params: parameters, named parameters or groups.
        own: the subclass's own options, with their defaults.
        adapt: whether norms scale the steps.
        adapt_1d, decay_1d: whether tensors of at most one dimension (biases, scales of norm layers) are adapted and
            decayed.
        maximize: maximize the objective.
        fused: compiled loops: None uses them where available, True raises UsageError elsewhere, False never uses them.
        norms: sets the attribute ``norms``; None leaves the class's default.

    Attributes:
        norms: reduces sums of squares over ranks if this rank holds slices of tensors; None: it holds whole tensors.
        grad_norm: norm of the whole model's gradient for the next step, if the caller knows it; None: computed over the
            optimizer's own parameters. Each step sets it to None.
    """

    norms: NormReducer | None = None
    grad_norm: float | None = None

    def __init__(
        self,
        params: Any,
        own: dict[str, Any],
        *,
        adapt: bool = True,
        adapt_1d: bool = False,
        decay_1d: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        norms: NormReducer | None = None,
    ) -> None:
        if norms is not None:
            self.norms = norms
        shared = {"adapt": adapt, "adapt_1d": adapt_1d, "decay_1d": decay_1d, "maximize": maximize, "fused": fused}
        super().__init__(params, own | shared)
        # Build the compiled loops now, and raise now if ``fused=True`` cannot be met, not in the first step.
        for group in self.param_groups:
            for param in group["params"]:
                passes_for(param, group["fused"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient by a layer-wise rule (LARS, LARC, LAMB or NovoGrad).

        Collective if ``norms`` is set, which completes the norms of tensors of which each rank holds a slice: one
        all-reduce over those ranks (LAMB without ``grad_norm``: two), which must have gradients of the same tensors.

        Args:
            closure: called first, with gradients enabled; None for none.

        Returns:
            The result of ``closure``; None without it.

        Raises:
            UsageError: a gradient is sparse or complex; or ``norms`` is None and a parameter is a ``DTensor``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        rows = [
            TensorUpdate(i, self._here(p), self._here(_dense(p)), self.state[p], group)
            for i, (p, group) in enumerate(pairs)
        ]
        if rows:
            self._update(parts_of(rows, self._kind))
        self.grad_norm = None
        return loss

    def _update(self, parts: Sequence[RowGroup]) -> None:
        """Update the parameters and states of all rows."""
        raise NotImplementedError

    def _kind(self, row: TensorUpdate) -> Any:
        """Return a key; only rows with equal keys share a ``RowGroup``."""

    def _here(self, tensor: Tensor) -> Tensor:
        """Return a ``DTensor``'s local tensor; any other tensor as it is."""
        if type(tensor) in _PLAIN or not is_dtensor(tensor):
            return tensor
        if self.norms is None:
            raise UsageError(
                f"a tensor of shape {list(tensor.shape)} is distributed over ranks, so that its norm would be that of"
                f" a slice",
                remedy="give the optimizer norms=",
            )
        return local_tensor(tensor)

    def _whole(
        self, parts: Sequence[RowGroup], squares: Sequence[Sequence[Sequence[float]]]
    ) -> list[list[list[float]]]:
        """Reduce sums of squares of this rank's slices to those of whole tensors, [part][row][column]. One message."""
        if self.norms is None:
            return [[list(row) for row in part] for part in squares]
        places = [[row.index for row in part.rows] for part in parts]
        table = torch.empty(sum(map(len, places)), len(squares[0][0]), dtype=torch.float64)
        for indices, values in zip(places, squares, strict=True):
            table[indices] = torch.tensor(values, dtype=torch.float64)
        whole = self.norms(table.view(-1)).view_as(table)
        return [whole[indices].tolist() for indices in places]


def parts_of(rows: Sequence[TensorUpdate], kind: Callable[[TensorUpdate], Any]) -> list[RowGroup]:
    """Group the tensors of a step so that each group is updated in one call of multi-tensor or compiled loops.

    Called by ``LayerWise.step``. Sets ``grad`` of an element of ``rows`` to a copy in the dtype and memory format of
    its parameter where they differ; the parameter's own ``.grad`` stays.

    Args:
        rows: a ``TensorUpdate`` (parameter, gradient, optimizer state and options) for each tensor of the step.
        kind: function from a ``TensorUpdate`` to a hashable key, such as its options; a group has one key.

    Returns:
        One ``RowGroup`` for each pair of an implementation and a key, in the order of first appearance: its tensors as
        the lists ``params`` and ``grads``, and as ``passes`` the implementation (compiled loops or PyTorch's operators)
        that updates them.

    Raises:
        UsageError: a tensor's option ``fused`` is True and there are no compiled loops for it.
    """
    parts: dict[Any, RowGroup] = {}
    plain = Foreach()
    for row in rows:
        param, grad = row.param, row.grad
        passes = passes_for(param, row.group["fused"])
        format_ = dense_format(param)
        if format_ is not None and not grad.is_contiguous(memory_format=format_):
            row.grad = grad.contiguous(memory_format=format_)
        if grad.dtype != param.dtype:
            row.grad = torch.empty_like(param).copy_(grad)
        parts.setdefault((passes, kind(row)), RowGroup(passes or plain)).rows.append(row)
    return list(parts.values())


def _alike(state: Tensor, param: Tensor) -> bool:
    """Whether a state has shape, strides, dtype and device of its parameter; after loading it may differ."""
    return (
        state.stride() == param.stride()
        and state.shape == param.shape
        and state.dtype == param.dtype
        and state.device == param.device
    )


def passes_for(parameter: Tensor, fused: bool | None) -> Passes | None:
    """Return the compiled loops that can update this parameter; None without such loops, or with ``fused=False``.

    The first call in a process compiles the loops, or loads them from the user's cache, and blocks meanwhile. They need
    a CPU, float32 or float64, dense memory and a C++ compiler. The returned object has methods such as ``squares`` and
    ``momentum``, which compute the norms and updates of lists of tensors.

    Args:
        parameter: the parameter, whose device, dtype and memory format decide.
        fused: None for loops where available, False for none, True to require them.

    Raises:
        UsageError: ``fused`` is True and there are none.
    """
    passes = None if fused is False else compiled_passes.passes(parameter)
    if fused and passes is None:
        raise UsageError(
            f"there are no compiled loops for a {parameter.dtype} tensor of shape {list(parameter.shape)}",
            where=f"on {parameter.device}",
            why="they need a CPU, float32 or float64, dense memory and a C++ compiler",
            remedy="leave out fused=True",
        )
    return passes


def _dense(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None or grad.is_sparse or grad.is_complex():
        raise UsageError(
            f"the gradient of a tensor of shape {list(parameter.shape)} is sparse or complex",
            remedy="take an optimizer of torch.optim for it",
        )
    return grad


def split_groups(named: Iterable[tuple[str, nn.Parameter]], exclude: Excluded) -> list[dict[str, Any]]:
    """Split parameters into two groups for a layer-wise optimizer: adapted and decayed, and excluded from both.

    Args:
        named: (name, parameter) pairs, such as ``model.named_parameters()``.
        exclude: shell patterns of excluded names (``"*.embedding.*"``), or a function of name and parameter that
            returns True for a parameter to exclude.

    Returns:
        Parameter groups for the optimizer's constructor, the excluded one with ``adapt`` False and ``weight_decay`` 0;
        an empty group is left out.

    >>> layers = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "out": torch.nn.Linear(2, 3, bias=False)})
    >>> [len(group["params"]) for group in split_groups(layers.named_parameters(), ["embed.*"])]
    [1, 1]
    """
    inside: list[nn.Parameter] = []
    outside: list[nn.Parameter] = []
    for name, parameter in named:
        excluded = exclude(name, parameter) if callable(exclude) else any(fnmatchcase(name, e) for e in exclude)
        (outside if excluded else inside).append(parameter)
    groups: list[dict[str, Any]] = [{"params": inside}, {"params": outside, "adapt": False, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
