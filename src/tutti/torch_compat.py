"""Private and version-dependent names of PyTorch that tutti uses, each with its reason and its public replacement.

No other module of the package may use a private name of PyTorch (``tests/architecture/test_private_names.py``).
``tests/test_torch_compat.py`` touches every name of ``__all__``: run it to try a new release of PyTorch. Private names
of CPython are in ``python_compat.py``, which loads no torch.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvBase
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from torch.utils.data._utils import worker
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator
from torch.utils.hooks import RemovableHandle

__all__ = [
    "CONVERSION",
    "ELASTIC_AGENT_MEMBERS",
    "FAKE_VALUE_ERRORS",
    "FUNCTION_MODE_ENTRIES",
    "FUSED_ACTIVATION",
    "FUSED_PRODUCTS",
    "FX_CONSTANT",
    "GRADIENT_HOOK_ATTRIBUTES",
    "GROUPED_PRODUCT",
    "IS_VIEW",
    "MODULE_ATTRIBUTES",
    "MODULE_HOOK_TABLES",
    "READ_NUMBER",
    "RESET_METHODS",
    "VERSION_ATTRIBUTE",
    "BatchNormBase",
    "ConvBase",
    "ConvTransposeBase",
    "CrossEntropyNode",
    "DropoutBase",
    "FakeTensorMode",
    "FunctionModesDisabled",
    "LoaderIterator",
    "NormBase",
    "TorchDispatchMode",
    "TorchFunctionDisabled",
    "accept_gradient_scale",
    "accumulation_hooks",
    "all_gather_single",
    "assert_async",
    "calls_forward",
    "chunk_cat",
    "compiled_module",
    "constant_operand",
    "convert_module",
    "count_of_nansum",
    "cross_entropy_of",
    "current_autograd_node",
    "default_store",
    "differentiable_once",
    "dispatch_mode_depth",
    "divisor_of_cross_entropy",
    "divisor_of_node",
    "draws_samples",
    "elastic_processes",
    "end_traced_graph",
    "engine_backward",
    "enter_loader_process",
    "factor_of_node",
    "flight_recorder",
    "foreach_add_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sqrt",
    "foreach_sub",
    "foreach_sub_",
    "forget_process_groups",
    "forward_hooks",
    "function_mode_aside",
    "function_mode_depth",
    "function_modes_active",
    "functorch_level",
    "fused_optimizer_devices",
    "gradient_hooks",
    "has_backward_hook",
    "has_forward_hook",
    "has_packed_projection",
    "has_scaled",
    "high_priority_options",
    "hook_ids",
    "hooks_registered",
    "in_backward",
    "index_of_node",
    "inductor_lacks",
    "inductor_mode_options",
    "is_compiled",
    "is_dtensor",
    "is_fake",
    "is_hook_of_fsdp",
    "is_reached",
    "is_scalar_node",
    "is_wrapped_by_scheduler",
    "keeps_graph",
    "label_smoothing_of",
    "leave_function_mode",
    "loader_position",
    "local_tensor",
    "make_elastic_agent",
    "make_wrapper_subclass",
    "mark_stepped",
    "mark_wrapped_by_scheduler",
    "mask_of_node",
    "module_buffers",
    "module_parameters",
    "mps_generator",
    "next_node_sequence",
    "node_sequence",
    "non_persistent_buffers",
    "operator_arguments",
    "optimizer_attributes",
    "order_members",
    "reduce_scatter_single",
    "reduce_unused_parameters",
    "reduces_first_dimension",
    "reduces_losses",
    "replace_call",
    "saved_tensor_hooks",
    "set_elastic_restarts",
    "set_fsdp_collectives",
    "set_gradient_hooks",
    "set_group_timeout",
    "shape_of_node",
    "skip_graph_capture_checks",
    "sparse_indices",
    "sparse_values",
    "step_hooks",
    "storage_key",
    "storage_uses",
    "sums_losses",
    "tensor_version",
    "tensor_versions",
    "top_function_mode",
    "traced_function_modes",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "treespec_dumps",
    "treespec_loads",
    "uncompiled_call",
    "version_counting_view",
    "view_base",
    "without_dispatch_modes",
    "wrap_forward_hooks",
    "write_event",
]

# --- operators on lists of tensors ---------------------------------------------------------------------------------
# One kernel for a list of tensors, as in PyTorch's optimizers (``foreach=True``). A public replacement would be
# ``torch.foreach``, or ``torch.compile`` of the loop.

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt = torch._foreach_sqrt
foreach_sub = torch._foreach_sub
foreach_sub_ = torch._foreach_sub_

# --- operators without a public name -------------------------------------------------------------------------------

assert_async = torch._assert_async
"""Assert a condition on the device without synchronising the host; a public name would be ``torch.assert_async``."""

chunk_cat = torch._chunk_cat
"""Copy many gradients into one reduce-scatter buffer in the order of ranks, in one kernel, as FSDP2 does; no public
operator does it."""

FUSED_PRODUCTS = (
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
)
"""Operators of ``torch.ops.aten`` behind public matrix products and attention. Releases differ in which they have, so
each is looked up. A public replacement would be a tag for expensive operators, which PyTorch does not have yet."""


def operator_arguments(operator: Any) -> list[Any]:
    """Return the arguments that the schema of an operator of ``torch.ops`` declares.

    A public replacement would be ``inspect.signature`` of an operator.

    Args:
        operator: an overload, such as ``torch.ops.aten.add.Tensor``.

    Returns:
        One object for each argument, in order, with ``name``, ``default_value`` and ``alias_info``.
    """
    arguments: list[Any] = operator._schema.arguments
    return arguments


# --- tensors -------------------------------------------------------------------------------------------------------

VERSION_ATTRIBUTE = "_version"
"""Name of a tensor's version counter, for tables of attributes; elsewhere call ``tensor_version``."""

IS_VIEW = "_is_view"
"""Name of the method that tells whether a tensor is a view; public functions call it to print or copy a tensor."""

GRADIENT_HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Names of a tensor's tables of hooks. ``torch.nn`` and optimizers touch them on tensors without data."""


def tensor_version(tensor: Tensor) -> int:
    """Return the version counter that a tensor shares with its views; every in-place write increments it.

    Autograd relies on the counter; no public function returns it.

    Args:
        tensor: the tensor; an inference tensor has no counter and raises RuntimeError.
    """
    return tensor._version


def tensor_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return ``tensor_version`` of each tensor, in their order; no function mode sees these reads.

    Args:
        tensors: any tensors; the number of an inference tensor, which has no counter, is 0.
    """
    with FunctionModesDisabled():
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def is_dtensor(tensor: object) -> bool:
    """Return whether an object is a ``DTensor``: this rank's part of a tensor that PyTorch has split over ranks.

    The public test is ``isinstance``, for which ``torch.distributed.tensor`` must be imported. That takes a second,
    which most runs do not need; the test here is whether the object has the method ``to_local``, which no other tensor
    has.

    Args:
        tensor: any object.
    """
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a ``DTensor``; any other tensor as it is.

    Args:
        tensor: any tensor.
    """
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return part


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage as long as the storage exists; views have the same number.

    The public ``data_ptr()`` is 0 on ``meta``.

    Args:
        tensor: the tensor.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


_more_uses = itertools.count()


def storage_uses(tensor: Tensor) -> int:
    """Return the number of references to a tensor's storage: the tensor, its views, and Python's storage objects.

    No public function tells whether a script keeps a view. Compare the number only with an earlier one of the same
    storage: it is larger if there are more tensors on the storage now. A release of torch without the private function
    that this calls gets a counter that rises with each call, so that callers always assume a new view.

    Args:
        tensor: the tensor.
    """
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return next(_more_uses) if count is None else count(storage_key(tensor))


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which a tensor is a view, as autograd records it; None if it is no view.

    The result is never a view itself: for a view of a view it is the tensor on which both are views.

    Args:
        tensor: the possible view.
    """
    base: Tensor | None = tensor._base
    return base


def sparse_indices(tensor: Tensor) -> Tensor:
    """Return the indices of a sparse COO tensor, int64 (sparse dimensions, entries), without coalescing it.

    They share memory with the tensor. The public ``indices()`` raises for an uncoalesced tensor.

    Args:
        tensor: the sparse tensor, coalesced or not.
    """
    return tensor._indices()


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, (entries, dense dimensions …), without coalescing it.

    They share memory with the tensor. The public ``values()`` raises for an uncoalesced tensor, such as a sum of two on
    an accelerator.

    Args:
        tensor: the sparse tensor, coalesced or not.
    """
    return tensor._values()


make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Make a tensor subclass without storage. PyTorch documents it in its notes on subclasses under this private name."""


def gradient_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the hooks that ``register_hook`` has added to a tensor; None if it never had one.

    No public function lists the hooks.

    Args:
        tensor: the tensor.

    Returns:
        Id of the hook → hook, in the order of calls. The table is the tensor's own, not a copy.
    """
    hooks: dict[int, Any] | None = tensor._backward_hooks
    return hooks


def hook_ids(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[tuple[int, ...]]:
    """Return the ids of all gradient hooks of tensors and modules; each registration or removal of a hook changes them.

    Callers that compare the ids of two calls need to inspect the hooks only where the ids differ. No public function
    lists the hooks.

    Args:
        tensors: leaves, for ``register_hook`` and ``register_post_accumulate_grad_hook``.
        modules: for ``register_full_backward_hook`` and ``register_full_backward_pre_hook``; submodules do not count.

    Returns:
        A tuple of ids for each table of hooks, two for each tensor and then two for each module, in the order of the
        arguments; an empty tuple where there are no hooks.
    """
    tables = [table for t in tensors for table in (t._backward_hooks, t._post_accumulate_grad_hooks)]
    tables += [table for module in modules for table in (module._backward_hooks, module._backward_pre_hooks)]
    return [tuple(table) if table else () for table in tables]


def hooks_registered() -> int:
    """Return a number that each registration of a hook on a tensor or module in this process increases.

    As long as it stays, no hook has been added, and hooks need not be looked for. PyTorch documents no such number.
    """
    return RemovableHandle.next_id


def set_gradient_hooks(tensor: Tensor, hooks: dict[int, Any] | None) -> None:
    """Replace a tensor's table of ``register_hook`` hooks; two tensors with one table share later changes to it.

    Args:
        tensor: the tensor.
        hooks: hooks by their ids, as ``gradient_hooks`` returns them; None for no hooks.
    """
    tensor._backward_hooks = hooks


def accumulation_hooks(tensor: Tensor) -> dict[int, Any] | None:
    """Return the hooks that ``register_post_accumulate_grad_hook`` has added to a tensor; None if it never had one.

    No public function lists these hooks.

    Args:
        tensor: the tensor, a leaf.

    Returns:
        Id of the hook → hook, in the order of calls. The table is the tensor's own, not a copy.
    """
    hooks: dict[int, Any] | None = tensor._post_accumulate_grad_hooks
    return hooks


# --- autograd and modes --------------------------------------------------------------------------------------------

# FakeTensorMode, TorchDispatchMode and the pytree functions, imported above, are public in practice: PyTorch's
# documentation and many libraries import them from these modules. A replacement would be the same names in public
# modules; the contents of ``torch.utils.pytree`` differ between releases.

TorchFunctionDisabled = torch._C.DisableTorchFunctionSubclass
"""Context within which ``__torch_function__`` of tensor subclasses is off; PyTorch's documentation names it."""

FunctionModesDisabled = torch._C.DisableTorchFunction
"""Context within which neither a ``TorchFunctionMode`` nor ``__torch_function__`` of a subclass sees calls of PyTorch.

No public context disables modes of other code.
"""


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context manager within which no ``TorchDispatchMode`` is on, ``FakeTensorMode`` included.

    The modes are on again after the block. No public name does this for modes that a caller has entered.
    """
    return _disable_current_modes()


def in_backward() -> bool:
    """Return whether autograd runs a backward in this thread at this moment.

    True in a backward hook, or in a forward that activation checkpointing recomputes.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def keeps_graph() -> bool:
    """Return whether the backward that runs in this thread keeps its graph for another one (``retain_graph=True``).

    To be called in the backward of an autograd function, which has a graph of its own to keep. No public name tells.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def is_reached(node: Any) -> bool:
    """Return whether the backward that runs in this thread will execute an autograd node.

    To be called in the backward of an autograd function. False for the node of a leaf in which this backward
    accumulates no gradient: in ``torch.autograd.grad``, and in ``backward(inputs=…)`` for other tensors.
    ``torch.autograd.graph.register_multi_grad_hook`` calls the same private function.

    Args:
        node: an autograd node, such as one of ``next_functions`` of another.

    Raises:
        RuntimeError: no backward runs in this thread, or the node is a leaf's and ``torch.autograd.grad`` was asked for
            the gradient of this very leaf.
    """
    return bool(torch._C._will_engine_execute_node(node))


_ONCE = once_differentiable(lambda ctx: None).__code__


def differentiable_once(node: Any) -> str | None:
    """Return the name of a node's custom autograd function if its backward is ``once_differentiable``, else None.

    A backward through the gradients (``create_graph=True``) cannot differentiate such a function: in some graphs
    PyTorch raises an error, in others it leaves out the function's terms, so that callers must look for it. A public
    replacement would be a property of nodes.

    Args:
        node: an autograd node, such as ``loss.grad_fn``.
    """
    if not isinstance(node, BackwardCFunction):
        return None
    function: Any = node._forward_cls  # type: ignore[attr-defined]
    return function.__name__ if getattr(function.backward, "__code__", None) is _ONCE else None


current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the autograd node whose backward this thread runs, or None. No public function does."""

next_node_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the number that this thread's next autograd node gets. The profiler relates backward to forward by it; no
public function returns it."""


def node_sequence(node: Any) -> int | None:
    """Return an autograd node's sequence number, which counts the nodes of a thread in the order of its forward.

    None for ``AccumulateGrad``, which has no place in that order.

    Args:
        node: an autograd node, such as ``loss.grad_fn``.
    """
    number = int(node._sequence_nr())
    return None if number >= 1 << 63 else number


def version_counting_view(tensor: Tensor) -> Tensor:
    """Return a detached view of a tensor that shares its version counter, for use within a ``TorchDispatchMode``.

    Within such a mode plain ``detach()`` gives the view a counter of its own, because the dispatch key that shares
    counters (ADInplaceOrView) is excluded. ``torch.utils.checkpoint`` does the same for selective checkpointing, under
    a private name.

    Args:
        tensor: the tensor; in-place writes to it or to the view increment the counter of both.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")


class CrossEntropyNode(NamedTuple):
    """Facts of a cross-entropy loss, read from the autograd node that computed it.

    Attributes:
        reduction: ``mean`` or ``sum``.
        total: () sum of the weights of the targets that are not ignored, by which a mean is divided.
        targets: number of targets, ignored ones included.
        scores: the node of the log-softmax that the loss read; None if it read other log probabilities.
    """

    reduction: str
    total: Tensor
    targets: int
    scores: Any = None


def cross_entropy_of(node: Any) -> CrossEntropyNode | None:
    """Return reduction, divisor and number of targets of the cross-entropy that an autograd node computed.

    The attributes of nodes for saved tensors are private. No public function tells a loss's divisor.

    Args:
        node: an autograd node, such as ``loss.grad_fn``.

    Returns:
        A ``CrossEntropyNode``: ``reduction`` (``mean`` or ``sum``), ``total`` (a tensor (), the sum of the weights of
        the targets that are not ignored, by which a mean is divided), ``targets`` (number of targets, ignored ones
        included) and ``scores`` (the node of the log-softmax). None for other nodes, and for a loss without reduction.

    Raises:
        RuntimeError: a backward has freed the tensors that the node has saved.
    """
    if node.name() not in _CROSS_ENTROPIES or not node._saved_reduction:
        return None
    reduction = "mean" if node._saved_reduction == 1 else "sum"
    scores = _below(node, "ViewBackward0")
    found = scores if _is(scores, "LogSoftmaxBackward0") else None
    return CrossEntropyNode(reduction, node._saved_total_weight, node._saved_target.numel(), found)


def divisor_of_cross_entropy(node: Any) -> Tensor | None:
    """Return the number by which a mean cross-entropy was divided: its targets, or the sum of their class weights.

    Targets of ``ignore_index`` do not count. Costs a fraction of ``cross_entropy_of``, whose attribute ``total`` is the
    same number.

    Args:
        node: the autograd node of the loss, such as ``loss.grad_fn`` of an unchanged result of ``F.cross_entropy``.

    Returns:
        A tensor () of the scores' floating-point dtype, on their device. None for the nodes of other functions, of a
        cross-entropy with class probabilities as targets, and of one whose reduction is not ``mean``.

    Raises:
        RuntimeError: a backward has freed the tensors that the node has saved.
    """
    return node._saved_total_weight if node.name() in _CROSS_ENTROPIES and node._saved_reduction == 1 else None


def label_smoothing_of(node: Any) -> tuple[Any, Tensor] | None:
    """Return log-softmax and divisor of a label-smoothing term, if an autograd node computed such a term.

    ``cross_entropy(…, label_smoothing=…, reduction="mean")`` adds this term to the loss of the targets: a sum of the
    negative log-softmax over all classes of the targets that are not ignored, divided. No public function tells the
    term from the terms of other losses.

    Args:
        node: an autograd node; for a label-smoothing term, the node of its division.

    Returns:
        A pair: the node of the log-softmax, and the divisor, a tensor (). None for other nodes.

    Raises:
        RuntimeError: a backward has freed the tensors that the node has saved.
    """
    divisor = divisor_of_node(node)
    for name in ("SumBackward0", "MaskedFillBackward0", "NegBackward0", "SumBackward1") if divisor is not None else ():
        node = node.next_functions[0][0]
        if not _is(node, name):
            return None
    scores = None if divisor is None else _below(node, "MulBackward0")
    return (scores, divisor) if divisor is not None and _is(scores, "LogSoftmaxBackward0") else None


def _below(node: Any, passed: str) -> Any:
    """Return the node of the first input of ``node``, or where that is a node named ``passed``, of its first input."""
    below = node.next_functions[0][0]
    return below.next_functions[0][0] if _is(below, passed) else below


def _is(node: Any, name: str) -> bool:
    return node is not None and bool(node.name() == name)


def shape_of_node(node: Any) -> tuple[int, ...] | None:
    """Return the shape of the tensor that an autograd node's operator returned in the forward.

    Nodes' shapes are private.

    Args:
        node: an autograd node, such as ``loss.grad_fn``.

    Returns:
        The shape; None if the operator returned several tensors.
    """
    found = node._input_metadata
    return tuple(found[0].shape) if len(found) == 1 else None


def divisor_of_node(node: Any) -> Tensor | None:
    """Return the divisor tensor of a division that autograd has recorded; None for other operators.

    Args:
        node: an autograd node, such as ``loss.grad_fn``; a division's is ``DivBackward0``.

    Raises:
        RuntimeError: a backward has freed the tensors that the node has saved.
    """
    return node._saved_other if node.name() == "DivBackward0" else None


def factor_of_node(node: Any) -> Tensor | None:
    """Return the constant factor of a product, or the constant divisor of a division, that autograd has recorded.

    Constant means that the operand needs no gradient.

    Args:
        node: an autograd node; a product's is ``MulBackward0``, a division's ``DivBackward0``.

    Returns:
        The factor or divisor, a tensor. None for other operators, for a constant divided by a tensor, and where both
        operands need a gradient.

    Raises:
        RuntimeError: a backward has freed the tensors that the node has saved.
    """
    found: Tensor | None = None
    if node.name() in ("DivBackward0", "MulBackward0"):
        (first, _), (second, _) = node.next_functions
        if second is None:
            found = node._saved_other
        elif first is None and node.name() == "MulBackward0":
            found = node._saved_self
    return found


def count_of_nansum(node: Any) -> int | None:
    """Return the number of elements that ``nansum`` has added up: those that are not NaN.

    Args:
        node: an autograd node, such as ``loss.grad_fn``; None is returned for the nodes of other operators.

    Raises:
        RuntimeError: a backward has freed the tensors that the node has saved.
    """
    return int(node._saved_self.isnan().logical_not().sum()) if node.name() == "NansumBackward0" else None


def sums_losses(node: Any) -> bool:
    """Return whether an autograd node belongs to a loss function of PyTorch with ``reduction="sum"``.

    Args:
        node: an autograd node; False for one of another function.
    """
    return getattr(node, "_saved_reduction", 0) == 2


def reduces_losses(node: Any) -> bool:
    """Return whether an autograd node belongs to a loss function of PyTorch with ``reduction="mean"`` or ``"sum"``.

    Args:
        node: an autograd node; False for one of another function.
    """
    return getattr(node, "_saved_reduction", 0) != 0


def constant_operand(node: Any) -> Tensor | None:
    """Return the operand that requires no gradient of a product that autograd has recorded (dot, mv, mm or bmm).

    Args:
        node: an autograd node; that of ``torch.dot`` is ``DotBackward0``, of ``torch.bmm`` ``BmmBackward0``.

    Returns:
        The tensor; None for other operators, and where both operands need a gradient.
    """
    saved = {"DotBackward0": "tensor", "BmmBackward0": "mat2", "MmBackward0": "mat2", "MvBackward0": "vec"}
    if (second_name := saved.get(node.name())) is None:
        return None
    (first, _), (second, _) = node.next_functions
    found: Tensor | None = None
    if first is None:
        found = node._saved_self
    elif second is None:
        found = getattr(node, f"_saved_{second_name}")
    return found


def index_of_node(node: Any, output: int = 0) -> int | None:
    """Return the index of the single row that an operator has taken along a tensor's first dimension.

    Args:
        node: an autograd node; that of ``tensor[3]`` is ``SelectBackward0``, of ``tensor[3:4]`` ``SliceBackward0``.
        output: index of the operator's result, if it has several, as ``tensor.unbind()`` and ``tensor.split(1)``.

    Returns:
        The index, from 0; None for other operators, for several rows, and for a selection in another dimension.
    """
    name = node.name()
    if name not in ("SelectBackward0", "SliceBackward0", "UnbindBackward0", "SplitBackward0") or node._saved_dim:
        return None
    if name == "UnbindBackward0":
        return output
    if name == "SplitBackward0":
        return output if node._saved_split_size == 1 else None
    if name == "SliceBackward0" and shape_of_node(node)[:1] != (1,):  # type: ignore[index]
        return None
    index = int(node._saved_index if name == "SelectBackward0" else node._saved_start)
    # Negative indices are kept as numbers without a sign.
    return index if index < 2**63 else index - 2**64 + (shape_of_node(node.next_functions[0][0]) or (0,))[0]


def mask_of_node(node: Any) -> Tensor | None:
    """Return the mask by which an indexing that autograd has recorded, such as ``losses[mask]``, selects elements.

    Args:
        node: an autograd node.

    Returns:
        The mask, a tensor of booleans or uint8; of several masks the first. None for other operators, and for indexing
        by numbers alone.
    """
    if node.name() == "MaskedSelectBackward0":
        mask: Tensor = node._saved_mask
        return mask
    indices = node._saved_indices if node.name() == "IndexBackward0" else ()
    return next((each for each in indices if each is not None and each.dtype in (torch.bool, torch.uint8)), None)


def reduces_first_dimension(node: Any) -> bool:
    """Return whether a reduction that autograd has recorded, such as a mean, is over its input's first dimension.

    True also for a reduction over several dimensions that include the first, or over all.

    Args:
        node: an autograd node of an operator that reduces one tensor.
    """
    found = getattr(node, "_saved_dim", None)
    dims = (found,) if isinstance(found, int) else found or ()
    inputs = node.next_functions[0][0]
    rank = 0 if inputs is None else len(shape_of_node(inputs) or ())
    # Negative dimensions are kept as numbers without a sign.
    return not dims or 0 in dims or 2**64 - rank in dims


def is_scalar_node(node: Any) -> bool:
    """Return whether every tensor that an autograd node's operator returned in the forward has one element.

    Nodes' shapes are private.

    Args:
        node: an autograd node, such as ``loss.grad_fn``.
    """
    return all(math.prod(result.shape) == 1 for result in node._input_metadata)


def saved_tensor_hooks() -> Any:
    """Return the innermost active hooks of ``torch.autograd.graph.saved_tensors_hooks``; None outside of such a block.

    No public function returns them.

    Returns:
        A pair of functions: the first packs a tensor that is saved for backward, the second unpacks it.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def functorch_level() -> int | None:
    """Return the nesting level of active ``torch.func`` transforms (``vmap``, ``grad``); None outside of these.

    No public function returns it.
    """
    level: int | None = torch._C._functorch.maybe_current_level()
    return level


FUNCTION_MODE_ENTRIES = ((TorchFunctionMode, "__enter__"), (DeviceContext, "__init__"))
"""Classes and their methods of which one is called when a function mode is entered.

``with torch.device("cpu"):`` makes a ``DeviceContext``, which PyTorch puts on its stack without ``__enter__``.
"""


def engine_backward(tensor: Tensor, gradient: Tensor, retain_graph: bool) -> None:
    """Run the backward of a plain tensor, as ``tensor.backward(gradient, retain_graph=…)`` does, without its checks.

    These checks compare shapes and dtypes, and take longer than the backward of a small layer.

    Args:
        tensor: a tensor that autograd has computed; no subclass.
        gradient: its gradient, of the tensor's shape, dtype and device.
        retain_graph: whether to keep the graph for another backward.
    """
    _engine_run_backward((tensor,), (gradient,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True)


function_modes_active = torch._C._is_torch_function_mode_enabled
"""Return whether a ``TorchFunctionMode`` would see a call of PyTorch at this moment. No public function does."""

function_mode_depth = torch._C._len_torch_function_stack
"""Return the number of active ``TorchFunctionMode``s. No public function does."""

top_function_mode: Callable[[], TorchFunctionMode | None] = _get_current_function_mode
"""Return the innermost active ``TorchFunctionMode``, or None. No public function does."""


def leave_function_mode(mode: TorchFunctionMode) -> int | None:
    """Leave a function mode that need not be the innermost one; the modes within it stay active.

    ``mode.__exit__`` would leave the innermost one instead. Nothing happens if the mode is not active, as while it
    handles a call.

    Args:
        mode: the mode, which has been entered.

    Returns:
        The number of active modes outside of the mode; None if the mode was not active.
    """
    within, outside = [], None
    while (top := top_function_mode()) is not None and top is not mode:
        within.append(_pop_mode())
    if top is mode:
        _pop_mode()
        outside = function_mode_depth()
    for each in reversed(within):
        _push_mode(each)
    return outside


@contextmanager
def function_mode_aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave a function mode for a block, and enter it again in its place among the active modes.

    A mode that stays active and passes all calls on would cost a call of Python code for each of them. If the mode is
    not active, as while it handles a call, the block leaves it as it is.

    Args:
        mode: the mode.
    """
    outside = leave_function_mode(mode)
    try:
        yield
    finally:
        if outside is not None:
            within = [_pop_mode() for _ in range(outside, function_mode_depth())]
            for each in (mode, *reversed(within)):
                _push_mode(each)


def traced_function_modes() -> list[TorchFunctionMode]:
    """Return the active torch function modes whose code Dynamo traces, as a list from the outermost.

    These are all but the modes of ``with torch.device(…)`` and ``torch.set_default_device``.
    """
    return [mode for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]


dispatch_mode_depth = torch._C._len_torch_dispatch_stack
"""Return the number of active ``TorchDispatchMode``s. No public function does."""

# --- modules -------------------------------------------------------------------------------------------------------

# BatchNormBase, NormBase, ConvBase, ConvTransposeBase and DropoutBase, imported above, are the base classes of the 1-,
# 2- and 3-dimensional layers; PyTorch's own isinstance checks use them. A tuple of the public classes would miss future
# subclasses and is no type to annotate with.

MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_is_full_backward_hook", "_compiled_call_impl"}
"""Attributes of every ``nn.Module``, including those that its methods add; others belong to a subclass or a script."""

FX_CONSTANT = "_tensor_constant"
"""Prefix of the attributes that ``torch.fx`` adds to a module for constant tensors of its graph."""

FUSED_ACTIVATION = "activation_relu_or_gelu"
"""Attribute of ``nn.TransformerEncoderLayer``; False turns off its fused kernel, which reads the weights of submodules
without calling their forwards. The public ``torch.backends.mha.set_fastpath_enabled`` turns it off process-wide."""


RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""Names of the method that gives a module's parameters their initial values, as its constructor does;
``nn.MultiheadAttention`` and ``nn.Transformer`` have only the private one. A public replacement would be
``reset_parameters`` of all modules."""


def module_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own table of parameters, without those of its submodules, for reading or writing.

    The public ``named_parameters(recurse=False)`` omits names whose parameter is None, and all but the first name of a
    shared parameter.

    Args:
        module: the module.

    Returns:
        Name → parameter, or None for a name that was registered without one. The table is the module's own, not a copy.
    """
    return module._parameters


def module_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own table of buffers, without those of its submodules, for reading or writing.

    The public ``named_buffers(recurse=False)`` omits names whose buffer is None, and all but the first name of a shared
    buffer.

    Args:
        module: the module.

    Returns:
        Name → buffer, or None for a name that was registered without one. The table is the module's own, not a copy.
    """
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own non-persistent buffers, without those of its submodules.

    Publicly, such buffers can only be told by their absence from ``state_dict()``.

    Args:
        module: the module.

    Returns:
        The module's own set, not a copy.
    """
    return module._non_persistent_buffers_set


def order_members(module: nn.Module, like: nn.Module) -> None:
    """Give ``module`` the order of submodules, parameters and buffers of ``like``; drop names that ``like`` lacks.

    Names that only ``like`` has are not added. A buffer is persistent if it is in ``like``. The public way, to remove
    and add every member, would call registration hooks.

    Args:
        module: the module that is changed in place.
        like: the module whose order is taken.
    """
    for table in ("_modules", "_parameters", "_buffers"):
        members = getattr(module, table)
        setattr(module, table, {name: members[name] for name in getattr(like, table) if name in members})
    module._non_persistent_buffers_set = like._non_persistent_buffers_set & module._buffers.keys()


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Let ``module(…)`` call ``call`` in place of the forward and its hooks; None restores the usual call.

    ``nn.Module.compile`` sets the same attribute. The public way would be a forward pre-hook that ends a call with a
    result, which PyTorch does not have.

    Args:
        module: the module.
        call: called with the arguments of ``module(…)``; its result is that of ``module(…)``.

    Returns:
        The replacement that an earlier call has set; None without one.
    """
    before: Callable[..., Any] | None = module._compiled_call_impl
    module._compiled_call_impl = call
    return before


CONVERSION = "_apply"
"""Method of ``nn.Module`` by which ``to``, ``double``, ``cpu`` and their like convert its tensors. There is no hook."""


def convert_module(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert a module's tensors by ``_apply`` of its class, as ``module.to(…)`` and ``module.half()`` do.

    ``nn.Module._apply`` is private. The class's method is called even if an attribute of the instance replaces it.

    Args:
        module: the module, which is changed in place.
        function: converts a tensor.
        recurse: whether to convert its children.

    Returns:
        The module.
    """
    converted: nn.Module = type(module)._apply(module, function, recurse)
    return converted


def end_traced_graph(why: str) -> None:
    """End the graph that ``torch.compile`` traces at this moment, before the call that it traces; else do nothing.

    Raises Dynamo's own exception, ``Unsupported``, which callers must let pass: Dynamo catches it, and makes the call
    eagerly between two graphs. With ``fullgraph=True`` Dynamo raises it to the user. The public
    ``torch.compiler.disable`` wraps functions, and Dynamo traces the forward of a module whatever its call runs.

    Args:
        why: reason for the compiler's log or error.

    Raises:
        torch._dynamo.exc.Unsupported: ``torch.compile`` is tracing.
    """
    if TracingContext.try_get() is not None:
        # Importing Dynamo takes a second, and while it traces it is imported.
        from torch._dynamo.exc import Unsupported

        raise Unsupported(why)


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module itself, not of a submodule, run compiled code and not its plain forward.

    True for the wrapper that ``torch.compile`` returns, after ``Module.compile``, and while ``replace_call`` has set
    another function. No public function tells it.

    Args:
        module: the module, or the wrapper that ``torch.compile`` has returned.
    """
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` has wrapped; None for a module that is no such wrapper.

    Args:
        module: a module, or the wrapper that ``torch.compile(module)`` returns.
    """
    return module._modules.get("_orig_mod")


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that runs a module's forward and hooks in eager mode.

    It does so even after ``replace_call`` or ``Module.compile`` have changed what ``module(…)`` calls.

    Args:
        module: the module.

    Returns:
        A function with the arguments of ``module(…)`` and its result.
    """
    return module._call_impl


def calls_forward(frame: FrameType) -> bool:
    """Return whether a stack frame runs the method by which every module calls its hooks and its forward.

    Public functions cannot tell which modules' forwards run now, without hooks on all of them.

    Args:
        frame: the frame, whose argument ``self`` is the module.
    """
    return frame.f_code is nn.Module._call_impl.__code__


def is_fake(value: Any) -> bool:
    """Return whether a value is a ``FakeTensor``, which has shape, dtype and device but no values.

    The class is public in practice, as ``FakeTensorMode`` is.

    Args:
        value: any object.
    """
    return isinstance(value, FakeTensor)


FAKE_VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Errors of operations that need the values of a ``FakeTensor``: for a number, for their shapes, or for anything.

They are public in practice, as ``FakeTensorMode`` is."""

READ_NUMBER = torch.ops.aten._local_scalar_dense.default
"""Operator by which ``item()`` and ``bool`` read a tensor's value; dispatch modes see it under no public name."""

GROUPED_PRODUCT = torch._grouped_mm
"""Function that the public ``torch.nn.functional.grouped_mm`` calls, and which function modes see in its place."""

MODULE_HOOK_TABLES = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
"""Names of a module's tables of hooks, by id, and of the tables that tell how the hook of an id is called. Copies and
pickles of a module have them all; no public function lists them."""


def has_forward_hook(module: nn.Module) -> bool:
    """Return whether a module itself has forward hooks or forward pre-hooks. No public function lists them.

    Args:
        module: the module; hooks of its submodules do not count.
    """
    return bool(module._forward_pre_hooks or module._forward_hooks)


def forward_hooks(module: nn.Module) -> list[Any]:
    """Return the functions that hooks of a module's forward call: pre-hooks first, then hooks, each in order of calls.

    No public function lists them.

    Args:
        module: the module; hooks of its submodules are not included.
    """
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def wrap_forward_hooks(module: nn.Module, wrap: Callable[[Any], Any]) -> None:
    """Replace each forward hook and forward pre-hook of a module by ``wrap(hook)``.

    The handle that the registration of a hook returned removes the replacement of this hook. No public function
    replaces a hook in its place among the others.

    Args:
        module: the module.
        wrap: returns a hook that takes the same arguments, or the hook itself.
    """
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in table.items():
            table[key] = wrap(hook)


def has_backward_hook(module: nn.Module) -> bool:
    """Return whether a module itself has backward hooks or backward pre-hooks. No public function lists them.

    Args:
        module: the module; hooks of its submodules do not count.
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_scaled(scaler: torch.amp.GradScaler) -> bool:
    """Return whether an enabled scaler has scaled a loss. No public function tells it.

    Args:
        scaler: the scaler.
    """
    return scaler.is_enabled() and scaler._scale is not None


def draws_samples(pool: nn.FractionalMaxPool2d | nn.FractionalMaxPool3d) -> bool:
    """Return whether fractional max pooling draws random regions: it was made without ``_random_samples=``.

    Args:
        pool: the pooling module.
    """
    return pool._random_samples is None


def has_packed_projection(attention: nn.MultiheadAttention) -> bool:
    """Return whether a ``MultiheadAttention`` projects queries, keys and values by one parameter, ``in_proj_weight``.

    The public test, ``in_proj_weight is not None``, reads a parameter that this rank may not hold.

    Args:
        attention: the module.
    """
    return bool(attention._qkv_same_embed_dim)


def is_hook_of_fsdp(hook: Any) -> bool:
    """Return whether FSDP2 registered a hook on a module or tensor, judged by the Python module of the hook function.

    No public function tells it.

    Args:
        hook: the hook function.
    """
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


# --- torch.compile -------------------------------------------------------------------------------------------------


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Return the options of the inductor backend that ``torch.compile(mode=…)`` stands for.

    ``torch._inductor.list_mode_options`` is public but in a private module. ``torch.compile`` takes either a mode or
    options, and tutti adds an option to a mode.

    Args:
        mode: name of a mode, such as ``max-autotune``; an unknown one raises RuntimeError.

    Returns:
        Name of the option, such as ``triton.cudagraphs``, → value.
    """
    import torch._inductor

    options: dict[str, Any] = torch._inductor.list_mode_options(mode)
    return options


def inductor_lacks(device: torch.device) -> str | None:
    """Return a known reason why the inductor backend of ``torch.compile`` cannot compile for an accelerator, or None.

    Two reasons are checked for, without compiling: no code generator for the device type, and no package triton on a
    ``cuda`` or ``xpu`` device. Inductor itself finds these out at the first forward, and raises a KeyError or an error
    of Triton's. Publicly one can only compile and see.

    Args:
        device: the accelerator.

    Returns:
        A text for messages: inductor has no code generator for the device, or needs the package triton. None where
        neither holds, which does not promise that compiling succeeds.
    """
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration
    from torch.utils._triton import has_triton_package

    init_backend_registration()
    if get_scheduling_for_device(device.type) is None:
        return f"it generates no code for {device.type.upper()}"
    if device.type in ("cuda", "xpu") and not has_triton_package():
        return "it needs the package triton for this device"
    return None


# --- generators ----------------------------------------------------------------------------------------------------


def mps_generator() -> torch.Generator:
    """Return the default generator of an Apple GPU; publicly, ``torch.mps`` only seeds it and copies its state."""
    return torch.mps._get_default_mps_generator()


# --- optimizers ----------------------------------------------------------------------------------------------------


@cache
def optimizer_attributes() -> frozenset[str]:
    """Return the names of the instance attributes that PyTorch itself gives to optimizers.

    These are the attributes of every optimizer, and the additions of learning-rate schedulers and gradient scalers.
    Other attributes belong to an optimizer's own class. The first call makes an optimizer, which imports
    ``torch._dynamo`` and so takes about a second.
    """
    own = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))
    added = ("_opt_called", "_step_count", "_need_device_dtype_check_for_fused", "_step_supports_amp_scaling")
    return own.union(added)


def step_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Return the four tables in which PyTorch keeps the step hooks of an optimizer and those of all optimizers.

    PyTorch has public functions that add hooks, and none that lists them.

    Args:
        optimizer: the optimizer.

    Returns:
        The optimizer's step pre-hooks and post-hooks, then the pre-hooks and post-hooks of all optimizers of the
        process: dicts of the hook by the id of its handle, PyTorch's own objects, which may be changed in place. For
        an optimizer without tables, which has not called ``Optimizer.__init__``, the first two are new, empty dicts.
    """
    # A wrapper, such as Lookahead, may not have called ``Optimizer.__init__``.
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return [*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def is_wrapped_by_scheduler(step: object) -> bool:
    """Return whether a function is a learning-rate scheduler's wrapper of an optimizer's ``step``.

    The wrapper lets the scheduler warn if it is stepped before the optimizer. A public replacement would be a hook
    (``register_step_post_hook``).

    Args:
        step: the function, such as ``optimizer.step``.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_wrapped_by_scheduler(step: Any) -> None:
    """Mark an optimizer's ``step`` function as wrapped, so that learning-rate schedulers do not wrap it again.

    The schedulers' wrapper records that the optimizer has stepped; in its place, ``step`` must call ``mark_stepped``.

    Args:
        step: the function, which gets an attribute.
    """
    step._wrapped_by_lr_sched = True


def accept_gradient_scale(optimizer: Any) -> bool:
    """Mark an optimizer so that ``GradScaler.step`` passes it scaled gradients and always calls ``optimizer.step()``.

    The scaler then sets ``optimizer.grad_scale`` and ``optimizer.found_inf`` before the call, as it does for fused
    optimizers. Without the mark it unscales the gradients itself, and does not call ``step`` where one is infinite or
    NaN. No public function sets the mark.

    Args:
        optimizer: the ``torch.optim.Optimizer``, marked in place.

    Returns:
        Whether the optimizer had the mark before, as fused optimizers do.
    """
    before = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    optimizer._step_supports_amp_scaling = True
    return before


def mark_stepped(optimizer: Any) -> None:
    """Mark an optimizer as stepped, so that learning-rate schedulers do not warn that they were stepped before it.

    Args:
        optimizer: the optimizer, marked in place.
    """
    optimizer._opt_called = True


def fused_optimizer_devices() -> list[str]:
    """Return the device types for which PyTorch's optimizers accept ``fused=True``, such as ``cuda`` and ``cpu``.

    PyTorch's optimizers call the same private function; there is no public one.
    """
    import torch.utils._foreach_utils

    devices: list[str] = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    return devices


# --- torch.distributed ---------------------------------------------------------------------------------------------

_distributed: Any = torch.distributed

all_gather_single: Callable[..., Any] = getattr(_distributed, "all_gather_single", None) or (
    _distributed.all_gather_into_tensor
)
"""All-gather into one tensor; the name differs between releases."""

reduce_scatter_single: Callable[..., Any] = getattr(_distributed, "reduce_scatter_single", None) or (
    _distributed.reduce_scatter_tensor
)
"""Reduce-scatter of one tensor; the name differs between releases."""


def default_store() -> torch.distributed.Store:
    """Return the key-value store of the default process group; ValueError without such a group.

    No public function returns the store.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def set_group_timeout(group: Any, limit: timedelta) -> None:
    """Set the timeout of a process group's later collectives, for which PyTorch has no public function.

    Sets the timeout on this rank alone, and sends nothing; collectives that have begun keep their timeout. Only the
    backends Gloo and NCCL have one: for others PyTorch warns, and nothing is set.

    Args:
        group: the ``torch.distributed.ProcessGroup``.
        limit: the timeout.

    Raises:
        ValueError: this rank is not in the group.
    """
    torch.distributed.distributed_c10d._set_pg_timeout(limit, group)


def forget_process_groups() -> None:
    """Destroy the default process group if there is one, and restart PyTorch's count of process groups at 0.

    All groups of this process are destroyed with it; a RuntimeError of this is ignored.

    The number of a process group is part of the group's keys in the key-value store. ``destroy_process_group`` restarts
    the count too, but not after a group that failed to connect: this process would then look for the next job's groups
    under other keys than the other ranks.
    """
    if torch.distributed.is_initialized():
        with suppress(RuntimeError):
            torch.distributed.destroy_process_group()
    torch.distributed.distributed_c10d._world.group_count = 0


def high_priority_options(timeout: timedelta) -> Any:
    """Return NCCL's process group options with a high-priority stream; None in a build of torch without NCCL.

    The class of the options exists only in builds with NCCL. ``new_group`` warns unless the options repeat the group's
    timeout, which has no public name.

    Args:
        timeout: timeout of the group's collectives.
    """
    backend = getattr(_distributed, "ProcessGroupNCCL", None)
    if backend is None:
        return None
    options = backend.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


def flight_recorder() -> Callable[..., Any] | None:
    """Return PyTorch's function that dumps the latest collectives of the flight recorder as JSON.

    The public way is environment variables with which NCCL's watchdog writes files.

    Returns:
        The function, which called without arguments returns JSON text as bytes; None in a build of torch without it.
    """
    recorder: Callable[..., Any] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    return recorder


def set_fsdp_collectives(unit: Any, all_gather: Any, reduce_scatter: Any) -> None:
    """Replace the all-gather (unless None) and the reduce-scatter of an FSDP2 module.

    It calls the module's ``set_custom_all_gather`` and ``set_custom_reduce_scatter``, which are public but may change,
    as their documentation says. PyTorch's protocols of the two objects are private; they ask only for ``allocate`` and
    ``__call__``.

    Args:
        unit: an ``FSDPModule`` (FSDP2).
        all_gather: object that allocates the buffer of, and performs, an all-gather of parameters; None for PyTorch's.
        reduce_scatter: object that allocates the buffer of, and performs, a reduce-scatter of gradients.
    """
    if all_gather is not None:
        unit.set_custom_all_gather(all_gather)
    unit.set_custom_reduce_scatter(reduce_scatter)


def skip_graph_capture_checks() -> None:
    """Let all optimizers of this process step without asking the accelerator whether it is recording a graph.

    For a process on the CPU that was forked from a process that has used CUDA. ``Optimizer.step`` asks the accelerator
    also for parameters on the CPU, and in such a process the driver's error would end the step. Such a process records
    no graphs. There is no public switch.
    """
    torch.optim.Optimizer._accelerator_graph_capture_health_check = _check_nothing  # type: ignore[assignment, method-assign]


def _check_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Take the place of a check that cannot fail here."""


def reduce_unused_parameters(unit: Any) -> None:
    """Let an FSDP2 module reduce zeros for parameters that a backward has not used; otherwise ranks' messages differ.

    Before PyTorch 2.13 there is no ``set_reduce_scatter_unused_params``. There, the backward of the module's group of
    parameters begins by giving zero gradients to the parameters that have none.

    Args:
        unit: an ``FSDPModule`` (FSDP2); changed in place.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True)
        return
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or (state._fsdp_param_group,):
        if group is not None:
            group.post_backward = _BackwardWithZeros(group, group.post_backward)


class _BackwardWithZeros:
    """``post_backward`` of an FSDP2 group of parameters, after zero gradients for parameters that have none."""

    def __init__(self, group: Any, post_backward: Callable[..., None]) -> None:
        self._group, self._post_backward = group, post_backward

    def __call__(self, *unused: Any) -> None:
        for parameter in self._group.fsdp_params if self._group.reduce_grads else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if whole is None or not whole.requires_grad:
                continue
            if whole.grad is None and parameter.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        self._post_backward(*unused)


ELASTIC_AGENT_MEMBERS = (
    "_start_workers",
    "_monitor_workers",
    "_shutdown",
    "_remaining_restarts",
    "_worker_group",
    "_pcontext",
)
"""Members of ``LocalElasticAgent`` that the functions below override, read or set; its constructor makes some of them.

tutti starts processes with signals blocked, monitors and ends them itself, and decides about restarts. A public
replacement would be the same methods without underscores.
"""


def make_elastic_agent(
    spec: Any,
    logs: Any,
    prefix: str,
    *,
    start: Callable[[Callable[[], dict[int, Any]]], dict[int, Any]],
    monitor: Callable[[], Any],
    shut_down: Callable[[signal.Signals], None],
) -> Any:
    """Make a ``LocalElasticAgent`` of torchrun that starts, monitors and ends processes by the caller's functions.

    Args:
        spec: the ``WorkerSpec``: number of processes, their program, and the interval at which they are monitored.
        logs: the ``LogsSpecs``: the destinations of the processes' output.
        prefix: template of the text before each line of output on the terminal, as torchrun's
            ``log_line_prefix_template``.
        start: called to start all processes with the agent's own method, which it must call and whose result (process
            ids by local rank) it must return.
        monitor: returns the processes' state as a ``RunResult``; called at every monitoring interval of ``spec``.
        shut_down: ends the processes before the agent releases what belongs to them; its argument is a signal.

    Returns:
        The agent, which has not started anything; ``run()`` does.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            return start(partial(super()._start_workers, worker_group))

        def _monitor_workers(self, worker_group: Any) -> Any:
            return monitor()

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            shut_down(death_sig)
            super()._shutdown(death_sig)

    return Agent(spec, logs, start_method="fork", log_line_prefix_template=prefix)


def set_elastic_restarts(agent: Any, left: int) -> None:
    """Set the number of restarts that an elastic agent of torchrun has left, and keep the number that it has used.

    The agent numbers the starts of the processes, and with them the key-value stores, by the number used, which must
    not repeat.

    Args:
        agent: the ``LocalElasticAgent``.
        left: number of further restarts.
    """
    used = agent._worker_group.spec.max_restarts - agent._remaining_restarts
    agent._remaining_restarts = left
    agent._worker_group.spec.max_restarts = used + left


def elastic_processes(agent: Any) -> list[Any]:
    """Return the process objects that an elastic agent of torchrun has started.

    PyTorch's public interface gives the process ids only.

    Args:
        agent: the ``LocalElasticAgent``.

    Returns:
        One process object of ``multiprocessing`` for each rank of this node, with ``pid`` and ``exitcode``, in the
        order of local ranks.

    Raises:
        AttributeError: the agent has not started processes yet.
    """
    return list(agent._pcontext._pc.processes)


# --- TensorBoard ---------------------------------------------------------------------------------------------------


def write_event(writer: Any, summary: Any, step: int) -> None:
    """Write one TensorBoard event with several scalars; the public ``add_scalar`` writes one event each.

    Args:
        writer: a ``SummaryWriter``.
        summary: the event's ``Summary``, with the scalars.
        step: step of the event.
    """
    writer._get_file_writer().add_summary(summary, step)


def loader_position(iterator: LoaderIterator) -> int:
    """Return how many batches an iterator of a ``DataLoader`` has yielded; no public name tells it."""
    return iterator._num_yielded


def enter_loader_process(number: int, processes: int, dataset: Any) -> None:
    """Set what ``torch.utils.data.get_worker_info()`` returns in this process, a data loader's.

    The public function reads ``torch.utils.data._utils.worker._worker_info``, which has no setter.

    Args:
        number: index of this loader process, from 0: the result's ``id``, and also its ``seed``.
        processes: number of loader processes of this rank: ``num_workers``.
        dataset: the data set: ``dataset``.
    """
    worker._worker_info = worker.WorkerInfo(id=number, num_workers=processes, seed=number, dataset=dataset)
