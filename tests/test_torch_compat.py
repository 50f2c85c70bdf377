"""Each private name of PyTorch does here what tutti uses it for; a release that changes one fails by its name."""

from __future__ import annotations

import inspect
import json
import math
import signal
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from tutti import torch_compat
from tutti.torch_compat import (
    CONVERSION,
    ELASTIC_AGENT_MEMBERS,
    FAKE_VALUE_ERRORS,
    FUNCTION_MODE_ENTRIES,
    FUSED_ACTIVATION,
    FUSED_PRODUCTS,
    FX_CONSTANT,
    GRADIENT_HOOK_ATTRIBUTES,
    GROUPED_PRODUCT,
    IS_VIEW,
    MODULE_ATTRIBUTES,
    MODULE_HOOK_TABLES,
    READ_NUMBER,
    RESET_METHODS,
    VERSION_ATTRIBUTE,
    BatchNormBase,
    ConvBase,
    ConvTransposeBase,
    CrossEntropyNode,
    DropoutBase,
    FakeTensorMode,
    FunctionModesDisabled,
    LoaderIterator,
    NormBase,
    TorchDispatchMode,
    TorchFunctionDisabled,
    accept_gradient_scale,
    accumulation_hooks,
    all_gather_single,
    assert_async,
    calls_forward,
    chunk_cat,
    compiled_module,
    constant_operand,
    convert_module,
    count_of_nansum,
    cross_entropy_of,
    current_autograd_node,
    default_store,
    differentiable_once,
    dispatch_mode_depth,
    divisor_of_cross_entropy,
    divisor_of_node,
    draws_samples,
    elastic_processes,
    end_traced_graph,
    engine_backward,
    enter_loader_process,
    factor_of_node,
    flight_recorder,
    foreach_add_,
    foreach_copy_,
    foreach_div_,
    foreach_lerp_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sqrt,
    foreach_sub,
    foreach_sub_,
    forget_process_groups,
    forward_hooks,
    function_mode_aside,
    function_mode_depth,
    function_modes_active,
    functorch_level,
    fused_optimizer_devices,
    gradient_hooks,
    has_backward_hook,
    has_forward_hook,
    has_packed_projection,
    has_scaled,
    high_priority_options,
    hook_ids,
    hooks_registered,
    in_backward,
    index_of_node,
    inductor_mode_options,
    is_compiled,
    is_dtensor,
    is_fake,
    is_hook_of_fsdp,
    is_reached,
    is_scalar_node,
    is_wrapped_by_scheduler,
    keeps_graph,
    label_smoothing_of,
    leave_function_mode,
    loader_position,
    local_tensor,
    make_elastic_agent,
    make_wrapper_subclass,
    mark_stepped,
    mark_wrapped_by_scheduler,
    mask_of_node,
    module_buffers,
    module_parameters,
    next_node_sequence,
    node_sequence,
    non_persistent_buffers,
    operator_arguments,
    optimizer_attributes,
    order_members,
    reduce_scatter_single,
    reduce_unused_parameters,
    reduces_first_dimension,
    reduces_losses,
    replace_call,
    saved_tensor_hooks,
    set_elastic_restarts,
    set_fsdp_collectives,
    set_gradient_hooks,
    set_group_timeout,
    shape_of_node,
    skip_graph_capture_checks,
    sparse_indices,
    sparse_values,
    step_hooks,
    storage_key,
    storage_uses,
    sums_losses,
    tensor_version,
    tensor_versions,
    top_function_mode,
    traced_function_modes,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
    uncompiled_call,
    version_counting_view,
    view_base,
    without_dispatch_modes,
    wrap_forward_hooks,
    write_event,
)


def lists() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.tensor([3.0, 4.0]), torch.tensor([16.0])], [torch.tensor([1.0, 2.0]), torch.tensor([4.0])]


def numbers(tensors: object) -> list[list[float]]:
    return [t.reshape(-1).tolist() for t in tensors]  # type: ignore[attr-defined]


def in_place(function: Callable[..., object], *rest: object, **options: float) -> list[list[float]]:
    first, second = lists()
    function(first, second, *rest, **options)
    return numbers(first)


def scaled(function: Callable[..., object], factors: object) -> list[list[float]]:
    first, _ = lists()
    return numbers(function(first, factors) or first)


def lists_are_computed_with_at_once() -> None:
    first, second = lists()
    assert in_place(foreach_add_) == [[4, 6], [20]] and in_place(foreach_add_, alpha=2) == [[5, 8], [24]]
    assert in_place(foreach_sub_) == numbers(foreach_sub(first, second)) == [[2, 2], [12]]
    assert in_place(foreach_copy_) == numbers(second)
    assert in_place(foreach_div_) == [[3, 2], [4]]
    assert in_place(foreach_lerp_, 0.5) == [[2, 3], [10]]
    assert scaled(foreach_mul, [2.0, 3.0]) == scaled(foreach_mul_, [2.0, 3.0]) == [[6, 8], [48]]
    assert in_place(foreach_mul_) == numbers(foreach_mul(first, second)) == [[3, 8], [64]]
    assert numbers(foreach_norm(first)) == numbers(foreach_norm(first, 2)) == [[5], [16]]
    assert numbers(foreach_sqrt(second))[1] == [2]


def expensive_operators_are_in_aten() -> None:
    found = [getattr(torch.ops.aten, name).default for name in FUSED_PRODUCTS]
    arguments = {argument.name: argument.default_value for argument in operator_arguments(found[3])}
    assert arguments["dropout_p"] == 0.0


def rows_are_written_in_the_order_of_ranks() -> None:
    out = torch.empty(2, 3)
    chunk_cat([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])], 0, 2, out=out)
    assert out.tolist() == [[1, 3, 4], [2, 5, 6]]


def a_false_condition_stops() -> None:
    assert_async(torch.tensor(True))
    with pytest.raises(RuntimeError):
        assert_async(torch.tensor(False))


def writes_are_counted() -> None:
    tensor = torch.zeros(3)
    before = tensor_version(tensor)
    tensor.view(3)[0] = 1
    assert tensor_version(tensor) == before + 1 == getattr(tensor, VERSION_ATTRIBUTE)

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(function)

    with Refusing():
        assert tensor_versions([tensor]) == [before + 1]
    with torch.inference_mode():
        assert tensor_versions([torch.zeros(3)]) == [0]
    assert getattr(tensor.view(3), IS_VIEW)() and not getattr(tensor, IS_VIEW)()


def memory_is_told_apart() -> None:
    for device in ("cpu", "meta"):
        tensor = torch.empty(4, device=device)
        assert storage_key(tensor) == storage_key(tensor[2:]) != storage_key(torch.empty(4, device=device))
    alone = storage_uses(tensor)
    view = tensor[2:]
    assert storage_uses(tensor) == alone + 1
    del view
    assert storage_uses(tensor) == alone


def step_hooks_are_found() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    before, after, *everywhere = step_hooks(optimizer)
    assert not before and len(after) == 1 and len(everywhere) == 2
    handle.remove()
    assert not after
    # A wrapper that has not called Optimizer.__init__.
    before, after, *_ = step_hooks(object.__new__(torch.optim.SGD))
    assert not before and not after


def indices_need_no_coalescing() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    assert not twice.is_coalesced() and sparse_indices(twice).tolist() == [[1, 1]]
    sparse_values(twice).mul_(2)
    assert twice.to_dense().tolist() == [0.0, 10.0, 0.0, 0.0]


def subclasses_have_no_memory() -> None:
    class Empty(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *call: object) -> str:
            return "asked"

        @classmethod
        def __torch_dispatch__(cls, *call: object) -> None:
            raise AssertionError

    made = make_wrapper_subclass(Empty, (2, 3), dtype=torch.float64)
    assert made + 1 == "asked"
    with TorchFunctionDisabled():
        assert made.shape == (2, 3) and made.dtype is torch.float64
    with torch.device("meta"):
        assert torch.ones(1).is_meta
        with FunctionModesDisabled():
            assert not torch.ones(1).is_meta


def hooks_of_tensors_are_found() -> None:
    own, other = (torch.zeros(2, requires_grad=True) for _ in range(2))
    assert not gradient_hooks(own) and not accumulation_hooks(own)
    called: list[float] = []
    handle = own.register_hook(lambda gradient: called.append(float(gradient.sum())))
    own.register_post_accumulate_grad_hook(lambda parameter: called.append(-1))
    assert len(gradient_hooks(own) or ()) == len(accumulation_hooks(own) or ()) == 1
    set_gradient_hooks(other, gradient_hooks(own))
    other.sum().backward()
    assert called == [2]
    handle.remove()
    assert not gradient_hooks(other)
    assert all(getattr(own, name) is not None for name in GRADIENT_HOOK_ATTRIBUTES)


def ids_tell_of_registered_and_removed_hooks() -> None:
    tensor, module = torch.zeros(2, requires_grad=True), torch.nn.Linear(2, 2)
    registrations: list[Callable[[], Any]] = [
        lambda: tensor.register_hook(print),
        lambda: tensor.register_post_accumulate_grad_hook(print),
        lambda: module.register_full_backward_hook(print),
        lambda: module.register_full_backward_pre_hook(print),
    ]
    for register in registrations:
        before, registered = hook_ids([tensor], [module]), hooks_registered()
        first = register()
        assert hooks_registered() > registered
        with_first = hook_ids([tensor], [module])
        first.remove()
        assert hook_ids([tensor], [module]) == before
        second = register()
        assert len({str(each) for each in (before, with_first, hook_ids([tensor], [module]))}) == 3
        second.remove()


def fused_optimizers_have_devices() -> None:
    assert "cpu" in fused_optimizer_devices() and "meta" not in fused_optimizer_devices()


def backward_is_noticed() -> None:
    tensor, found = torch.zeros(1, requires_grad=True), []
    tensor.register_hook(lambda gradient: found.append(in_backward()))
    tensor.sum().backward()
    assert found == [True] and not in_backward()


class _Telling(torch.autograd.Function):
    found: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _Telling.found.append((is_reached(ctx.next_functions[0][0]), keeps_graph()))
        return gradient, gradient


def backwards_tell_what_they_accumulate_and_keep() -> None:
    first, second = (torch.zeros((), requires_grad=True) for _ in range(2))
    total = _Telling.apply(first, second)  # type: ignore[no-untyped-call]
    total.backward(retain_graph=True)
    torch.autograd.grad(total, second, retain_graph=True)
    total.backward(inputs=[second], retain_graph=True)
    with pytest.raises(RuntimeError, match="leaf node was passed"):
        torch.autograd.grad(total, first, retain_graph=True)
    total.backward()
    assert _Telling.found == [(True, True), (False, True), (False, True), (True, False)]


class _BackwardOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _BackwardTwice(_BackwardOnce):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def functions_of_one_backward_are_known() -> None:
    x = torch.ones(2, requires_grad=True)
    assert differentiable_once(_BackwardOnce.apply(x).grad_fn) == "_BackwardOnce"  # type: ignore[no-untyped-call]
    assert differentiable_once(_BackwardTwice.apply(x).grad_fn) is None  # type: ignore[no-untyped-call]
    assert differentiable_once(x.exp().grad_fn) is None


def backward_runs_without_checks() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    total = (weight * weight).sum()
    engine_backward(total, torch.tensor(0.5), True)
    engine_backward(total, torch.tensor(0.5), False)
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 4.0]


def nodes_are_numbered_in_the_order_of_the_forward() -> None:
    seen: list[int | None] = []
    tensor = torch.ones(2, requires_grad=True)
    assert current_autograd_node() is None
    first = next_node_sequence()
    total = (tensor * 2).sum()
    total.register_hook(lambda gradient: None)
    tensor.register_hook(lambda gradient: seen.append(node_sequence(current_autograd_node())))
    assert node_sequence(total.grad_fn) == first + 1 and next_node_sequence() == first + 2
    total.backward()
    assert seen == [None]


def losses_say_what_they_are_means_over() -> None:
    scores, targets = torch.zeros(3, 2, requires_grad=True), torch.tensor([0, 1, -100])
    mean = nn.functional.cross_entropy(scores, targets)
    found = cross_entropy_of(mean.grad_fn)
    assert isinstance(found, CrossEntropyNode) and (found.reduction, float(found.total), found.targets) == (
        "mean",
        2.0,
        3,
    )
    assert float(cast(torch.Tensor, divisor_of_cross_entropy(mean.grad_fn))) == 2.0
    total = nn.functional.cross_entropy(scores, targets, reduction="sum")
    assert divisor_of_cross_entropy(total.grad_fn) is divisor_of_cross_entropy((mean * 2).grad_fn) is None
    assert (cross_entropy_of(total.grad_fn) or found).reduction == "sum"
    assert cross_entropy_of(nn.functional.cross_entropy(scores, targets, reduction="none").grad_fn) is None
    targets_term, smoothing = nn.functional.cross_entropy(scores, targets, label_smoothing=0.1).grad_fn.next_functions  # type: ignore[union-attr]
    [scores_node, divisor] = label_smoothing_of(smoothing[0].next_functions[0][0]) or [None, 0.0]
    smoothed = cross_entropy_of(targets_term[0].next_functions[0][0])
    assert smoothed is not None and smoothed.scores is scores_node is not None and float(divisor) == 2.0
    assert label_smoothing_of(mean.grad_fn) is label_smoothing_of((total / total).grad_fn) is None
    fifth = total / 5
    assert float(cast(torch.Tensor, divisor_of_node(fifth.grad_fn))) == 5.0
    for product in (scores * 5, 5 * scores, scores / 5):
        assert float(cast(torch.Tensor, factor_of_node(product.grad_fn))) == 5.0
    assert factor_of_node((scores * scores).grad_fn) is factor_of_node((scores.detach() / scores).grad_fn) is None
    assert factor_of_node(total.grad_fn) is count_of_nansum(total.grad_fn) is None
    assert count_of_nansum(torch.tensor([1.0, math.nan], requires_grad=True).nansum().grad_fn) == 1
    assert reduces_losses(total.grad_fn) and reduces_losses(mean.grad_fn)
    assert not reduces_losses(nn.functional.cross_entropy(scores, targets, reduction="none").grad_fn)
    assert sums_losses(total.grad_fn) and not sums_losses(mean.grad_fn) and not sums_losses(fifth.grad_fn)
    assert [reduces_first_dimension(scores.mean(dim).grad_fn) for dim in (0, -2, (0, 1), 1, -1)] == [True] * 3 + [
        False
    ] * 2
    assert divisor_of_node(total.grad_fn) is cross_entropy_of(fifth.grad_fn) is None
    assert is_scalar_node(fifth.grad_fn) and not is_scalar_node((scores * 2).grad_fn)
    assert shape_of_node((scores * 2).grad_fn) == tuple(scores.shape) and shape_of_node(fifth.grad_fn) == ()
    assert shape_of_node(scores.unbind()[0].grad_fn) is None
    row, weights = scores[0], scores[1].detach()
    products = (row.dot(weights), weights.dot(row), torch.bmm(row[None, None], weights[None, :, None]))
    for product in (*products, row[None].mv(weights), weights[None].mv(row), weights[None].mm(row[:, None])):
        constant = constant_operand(product.grad_fn)
        assert constant is not None and constant.flatten().equal(weights)
    assert constant_operand(row.dot(row).grad_fn) is constant_operand(row.grad_fn) is None
    last = len(scores) - 1
    for rows, index in ((scores[1], 1), (scores[-1], last), (scores[1:2], 1), (scores[-1:], last), (scores[:2], None)):
        assert index_of_node(rows.grad_fn) == index
    assert index_of_node(scores[:, 0].grad_fn) is index_of_node(scores.split(2)[0].grad_fn, 0) is None
    assert index_of_node(scores.unbind()[1].grad_fn, 1) == index_of_node(scores.split(1)[1].grad_fn, 1) == 1
    chosen = (scores[scores > 0], scores.masked_select(scores > 0), scores[[0, 1]], scores[0])
    assert [mask_of_node(each.grad_fn) is None for each in chosen] == [False, False, True, True]


def modes_are_counted() -> None:
    seen = []
    assert all(method in vars(kind) for kind, method in FUNCTION_MODE_ENTRIES)

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **(kwargs or {}))

    assert function_mode_depth() == dispatch_mode_depth() == 0 and not function_modes_active()
    with Functions(), Operators():
        assert function_mode_depth() == dispatch_mode_depth() == 1 and function_modes_active()
        with FunctionModesDisabled():
            assert function_mode_depth() == 1 and not function_modes_active()
        with torch.device("cpu"):
            assert function_mode_depth() == 2 and len(traced_function_modes()) == 1
        outer, inner = Functions(), Functions()
        outer.__enter__()  # type: ignore[no-untyped-call]
        with inner:
            stack = traced_function_modes()
            with function_mode_aside(outer):
                assert traced_function_modes() == [stack[0], inner]
                with function_mode_aside(inner), function_mode_aside(outer), Functions():
                    assert function_mode_depth() == 2
            assert traced_function_modes() == stack == [stack[0], outer, inner]
            assert leave_function_mode(outer) == 1
            assert function_mode_depth() == 2 and top_function_mode() is inner
            assert leave_function_mode(outer) is None
            assert function_mode_depth() == 2 and top_function_mode() is inner
        tensor = torch.zeros(2) + 1
        view = version_counting_view(tensor)
        before = tensor_version(view)
        tensor.add_(1)
    assert seen and tensor_version(view) == before + 1


def transforms_are_counted() -> None:
    found: list[int | None] = []

    def loss(value: torch.Tensor) -> torch.Tensor:
        found.append(functorch_level())
        return value**2

    torch.func.grad(loss)(torch.ones(()))
    assert found == [1] and functorch_level() is None


def saving_of_tensors_is_noticed() -> None:
    assert saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(str, len):
        assert saved_tensor_hooks() == (str, len)


def trees_are_walked() -> None:
    tree = {"a": [1, (2, 3)], "b": 4}
    leaves, form = tree_flatten(tree)
    assert leaves == tree_leaves(tree) == [1, 2, 3, 4]
    assert treespec_loads(treespec_dumps(form)) == form
    assert tree_unflatten(leaves, form) == tree and tree_map(lambda leaf: -leaf, tree) == {"a": [-1, (-2, -3)], "b": -4}
    assert tree_map_only(str, str.upper, ["a", 1]) == ["A", 1]


def fake_tensors_take_no_memory() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = torch.empty(1 << 20, 1 << 20) + torch.zeros(1)
    assert made.shape == (1 << 20, 1 << 20)


def operations_that_need_values_of_fake_tensors_raise() -> None:
    with FakeTensorMode():
        fake, lengths = torch.ones(3, 1, 4), torch.ones(1, dtype=torch.long)
    for call in (
        lambda: bool(fake.sum() > 0),
        fake.nonzero,
        lambda: torch.nn.functional.ctc_loss(fake, lengths[None], lengths, lengths),
    ):
        with pytest.raises(FAKE_VALUE_ERRORS):
            call()


def items_are_read_by_one_operator() -> None:
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        assert torch.ones(()).item() == 1.0 and bool(torch.tensor(True))
    assert seen.count(READ_NUMBER) == 2


def grouped_products_are_seen_by_function_modes() -> None:
    seen = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, sorted(kwargs or {})))
            return func(*args, **(kwargs or {}))

    rows, experts = torch.ones(4, 8), torch.ones(2, 8, 16)
    with Seeing():
        found = torch.nn.functional.grouped_mm(rows, experts, offs=torch.tensor([1, 4], dtype=torch.int32))
    assert (GROUPED_PRODUCT, ["bias", "offs", "out_dtype"]) in seen and torch.equal(found, torch.full((4, 16), 8.0))


def an_apple_gpu_has_one_generator() -> None:
    made = torch.Generator()
    with patch.object(torch.mps, "_default_mps_generator", made):
        assert torch_compat.mps_generator() is made


def modes_of_compiling_stand_for_options() -> None:
    assert inductor_mode_options("max-autotune-no-cudagraphs")["max_autotune"] is True
    assert inductor_mode_options("reduce-overhead") == {"triton.cudagraphs": True}


def inductor_compiles_for_some_devices() -> None:
    assert torch_compat.inductor_lacks(torch.device("cpu")) is None
    assert torch_compat.inductor_lacks(torch.device("hpu")) == "it generates no code for HPU"
    with patch("torch.utils._triton.has_triton_package", lambda: False):
        assert "the package triton" in str(torch_compat.inductor_lacks(torch.device("cuda")))


def classes_of_layers_are_found() -> None:
    assert isinstance(nn.BatchNorm2d(2), BatchNormBase) and not isinstance(nn.InstanceNorm2d(2), BatchNormBase)
    assert isinstance(nn.InstanceNorm2d(2), NormBase) and isinstance(nn.BatchNorm1d(2), NormBase)
    assert isinstance(nn.Conv1d(1, 1, 1), ConvBase) and not isinstance(nn.Conv1d(1, 1, 1), ConvTransposeBase)
    assert isinstance(nn.ConvTranspose3d(1, 1, 1), ConvTransposeBase)
    assert isinstance(nn.Dropout2d(), DropoutBase)


def members_of_modules_are_tables() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert module_parameters(module) == {"weight": None, "bias": None}
    assert list(module_buffers(module)) == ["running_mean", "running_var", "num_batches_tracked", "scratch"]
    assert non_persistent_buffers(module) == {"scratch"}
    module_parameters(module)["bias"] = parameter = nn.Parameter(torch.zeros(2))
    module_buffers(module)["scratch"] = buffer = torch.ones(1)
    assert module.bias is parameter and module.scratch is buffer


def members_are_put_in_order() -> None:
    def made(names: str) -> nn.Module:
        module = nn.Module()
        for name in names:
            module.register_buffer(name, torch.zeros(1), persistent=name != "c")
        return module

    own, like = made("cba"), made("abcd")
    own.register_buffer("c", torch.zeros(1), persistent=True)
    order_members(own, like)
    assert list(module_buffers(own)) == ["a", "b", "c"] and list(own.state_dict()) == ["a", "b"]
    children, order = nn.ModuleDict({"b": nn.ReLU(), "a": nn.ReLU()}), nn.ModuleDict({"a": nn.ReLU(), "b": nn.ReLU()})
    order_members(children, order)
    assert list(children) == ["a", "b"]


def hooks_of_modules_are_noticed() -> None:
    for register, has in (
        (nn.Module.register_forward_hook, has_forward_hook),
        (nn.Module.register_forward_pre_hook, has_forward_hook),
        (nn.Module.register_full_backward_hook, has_backward_hook),
        (nn.Module.register_full_backward_pre_hook, has_backward_hook),
    ):
        module = nn.ReLU()
        handle = register(module, print)
        assert has(module) and has_forward_hook(module) != has_backward_hook(module)
        assert forward_hooks(module) == [print] * has_forward_hook(module)
        wrap_forward_hooks(module, lambda hook: repr)
        assert forward_hooks(module) == [repr] * has_forward_hook(module)
        handle.remove()
        assert not has(module)


def scalers_that_have_scaled_are_known() -> None:
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        assert not has_scaled(scaler)
        scaler.scale(torch.ones(1))
        assert has_scaled(scaler) == enabled


def views_know_their_base() -> None:
    whole = torch.zeros(4, requires_grad=True)
    assert view_base(whole) is None and view_base(whole + 1) is None and view_base(whole[:2][:1]) is whole


def tables_of_hooks_hold_each_hook() -> None:
    for register in (
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
        nn.Module.register_state_dict_pre_hook,
        nn.Module.register_load_state_dict_pre_hook,
        nn.Module.register_load_state_dict_post_hook,
    ):
        module = nn.ReLU()
        handle = register(module, tables_of_hooks_hold_each_hook)
        [hook] = [vars(module)[name][handle.id] for name in MODULE_HOOK_TABLES if handle.id in vars(module)[name]]
        assert hook.__module__ == __name__


def hooks_of_fsdp_are_told_from_others() -> None:
    assert not is_hook_of_fsdp(print) and not is_hook_of_fsdp(partial(print)) and not is_hook_of_fsdp(nn.ReLU.forward)
    assert is_hook_of_fsdp(FSDPModule.reshard)


def options_of_layers_are_known() -> None:
    assert draws_samples(nn.FractionalMaxPool2d(2, output_size=2)) and draws_samples(nn.FractionalMaxPool3d(2, 2))
    assert not draws_samples(nn.FractionalMaxPool2d(2, output_size=2, _random_samples=torch.rand(1, 1, 2)))
    assert has_packed_projection(nn.MultiheadAttention(4, 2))
    assert not has_packed_projection(nn.MultiheadAttention(4, 2, kdim=3))
    assert getattr(nn.TransformerEncoderLayer(4, 2, activation="gelu"), FUSED_ACTIVATION) == 2


def layers_are_initialised_by_a_method() -> None:
    for layer in (nn.Linear(2, 2), nn.BatchNorm1d(2), nn.MultiheadAttention(2, 1)):
        [reset] = [getattr(layer, name) for name in RESET_METHODS if hasattr(layer, name)]
        for parameter in layer.parameters():
            parameter.data.fill_(7)
        reset()
        own = [*layer.parameters(recurse=False)]
        assert own and not any(bool((p == 7).any()) for p in own)


def a_modules_own_attributes_are_known() -> None:
    module = nn.ReLU()
    module.register_full_backward_hook(print)
    module.compile()
    assert vars(module).keys() - MODULE_ATTRIBUTES == {"inplace"} and "training" in MODULE_ATTRIBUTES

    class Adding(nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value + torch.ones(2)

    plain = Adding()
    torch.fx.Tracer().trace(plain)
    (added,) = vars(plain).keys() - MODULE_ATTRIBUTES or {FX_CONSTANT}
    assert added.startswith(FX_CONSTANT)


def optimizers_and_schedulers_keep_their_books() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def step() -> None:
        mark_stepped(optimizer)

    mark_wrapped_by_scheduler(step)
    optimizer.step = own = step  # type: ignore[method-assign]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step is own
    with warnings.catch_warnings(action="error"):
        optimizer.step()
        scheduler.step()
    assert vars(optimizer).keys() - optimizer_attributes() == {"step"}
    other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torch.optim.lr_scheduler.StepLR(other, 1)
    assert is_wrapped_by_scheduler(other.step) and is_wrapped_by_scheduler(step) and not is_wrapped_by_scheduler(None)


def scalers_call_marked_optimizers_after_an_overflow() -> None:
    class Told(torch.optim.SGD):
        found: float | None = None

        def step(self, closure: Any = None) -> None:
            self.found = float(getattr(self, "found_inf", -1.0))

    optimizer = Told([torch.ones(1, requires_grad=True)], lr=1.0)
    assert not accept_gradient_scale(optimizer) and accept_gradient_scale(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    (scaler.scale(optimizer.param_groups[0]["params"][0].sum()) * math.inf).backward()
    scaler.step(optimizer)
    assert optimizer.found == 1.0


def collectives_of_one_rank_pass() -> None:
    # An earlier test of this process may have made the group.
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default_store().set("key", "value")
        recorder = flight_recorder()
        assert recorder is not None and "version" in json.loads(recorder())
        for collective in (all_gather_single, reduce_scatter_single):
            result = torch.zeros(2)
            collective(result, torch.ones(2), group=dist.group.WORLD, async_op=True).wait()
            assert result.tolist() == [1, 1]
    finally:
        if own:
            dist.destroy_process_group()


def dtensors_have_a_local_part() -> None:
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import DTensor, init_device_mesh

        plain = torch.ones(2)
        split = DTensor.from_local(plain, init_device_mesh("cpu", (1,)))
        assert is_dtensor(split) and is_dtensor(nn.Parameter(split)) and type(local_tensor(split)) is torch.Tensor
        assert not is_dtensor(plain) and not is_dtensor(None) and local_tensor(plain) is plain
    finally:
        if own:
            dist.destroy_process_group()


def groups_are_numbered_anew() -> None:
    if dist.is_initialized():
        pytest.skip("an earlier test of this process has made the group")
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None and dist.group.WORLD.group_name == "0"
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        set_group_timeout(dist.group.WORLD, timedelta(seconds=7))
        assert backend.options._timeout == timedelta(seconds=7)
        forget_process_groups()
        assert not dist.is_initialized()
        # The group of a job whose ranks did not connect: it has a number, and is none.
        with pytest.raises(dist.DistError):
            dist.init_process_group(
                "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(milliseconds=50)
            )
        forget_process_groups()


def options_of_groups_have_a_timeout() -> None:
    given = timedelta(seconds=7)
    options = high_priority_options(given)
    assert (options is None) is not dist.is_nccl_available()
    if options is not None:
        assert options.is_high_priority_stream and options._timeout == given


def fsdp_takes_other_collectives() -> None:
    found: list[object] = []
    unit = SimpleNamespace(set_custom_all_gather=found.append, set_custom_reduce_scatter=found.append)
    set_fsdp_collectives(unit, "gather", "scatter")
    assert found == ["gather", "scatter"]
    assert hasattr(FSDPModule, "set_custom_all_gather") and hasattr(FSDPModule, "set_custom_reduce_scatter")


def fsdp_reduces_zeros_for_unused_parameters() -> None:
    unit = nn.Linear(2, 2)
    unused = SimpleNamespace(_unsharded_param=nn.Parameter(torch.ones(2)), unsharded_accumulated_grad=None)
    seen: list[object] = []
    group = SimpleNamespace(
        fsdp_params=[unused], reduce_grads=False, post_backward=lambda: seen.append(unused._unsharded_param.grad)
    )
    unit._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_group=group)  # type: ignore[assignment]
    reduce_unused_parameters(unit)
    group.post_backward()
    group.reduce_grads = True
    group.post_backward()
    assert seen[0] is None and torch.equal(seen[1], torch.zeros(2))  # type: ignore[arg-type]
    found: list[object] = []
    reduce_unused_parameters(SimpleNamespace(set_reduce_scatter_unused_params=found.append))
    assert found == [True]
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        source = inspect.getsource(FSDPParamGroup)
        assert all(name in source for name in ("def post_backward", "_unsharded_param", "unsharded_accumulated_grad"))


def optimizers_skip_the_check_for_graphs() -> None:
    name = "_accelerator_graph_capture_health_check"
    assert f"self.{name}()" in inspect.getsource(torch.optim.Adam.step)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim.Optimizer, name, lambda self: pytest.fail("it was asked"))
        skip_graph_capture_checks()
        torch.optim.Adam([nn.Parameter(torch.ones(1))]).step()


def agents_are_written_by_overriding() -> None:
    source = "".join(inspect.getsource(kind) for kind in LocalElasticAgent.__mro__[:2])
    assert all(f"def {name}(" in source or f"self.{name}" in source for name in ELASTIC_AGENT_MEMBERS)
    assert "self._pc" in inspect.getsource(MultiprocessContext)
    agent = SimpleNamespace(_pcontext=SimpleNamespace(_pc=SimpleNamespace(processes=(1, 2))))
    assert elastic_processes(agent) == [1, 2]


def loader_processes_know_their_number() -> None:
    before = torch.utils.data.get_worker_info()
    try:
        enter_loader_process(1, 3, "data")
        info = torch.utils.data.get_worker_info()
        assert info is not None and (info.id, info.num_workers, info.dataset) == (1, 3, "data")
    finally:
        torch.utils.data._utils.worker._worker_info = before


def loaders_count_their_batches() -> None:
    iterator = iter(torch.utils.data.DataLoader(range(3)))
    assert isinstance(iterator, LoaderIterator) and loader_position(iterator) == 0
    next(iterator)
    assert loader_position(iterator) == 1


def agents_count_the_restarts_that_are_used() -> None:
    agent = SimpleNamespace(_remaining_restarts=3, _worker_group=SimpleNamespace(spec=SimpleNamespace(max_restarts=5)))
    for left in (0, 4):
        set_elastic_restarts(agent, left)
        assert (agent._remaining_restarts, agent._worker_group.spec.max_restarts) == (left, 2 + left)


def agents_ask_at_three_places() -> None:
    handler = SimpleNamespace(get_run_id=lambda: "0", shutdown=lambda: True)
    spec = WorkerSpec(role="r", local_world_size=1, rdzv_handler=cast(Any, handler), entrypoint=print, max_restarts=0)
    asked: list[object] = []
    agent = make_elastic_agent(
        spec,
        DefaultLogsSpecs(),
        "",
        start=lambda fork: {0: fork},
        monitor=lambda: "result",
        shut_down=asked.append,
    )
    assert isinstance(agent, LocalElasticAgent) and agent._monitor_workers(None) == "result"
    assert callable(agent._start_workers(None)[0])
    agent._shutdown(signal.SIGINT)
    assert asked == [signal.SIGINT]


class Looks(nn.Module):
    """Returns the modules whose forward runs."""

    def forward(self) -> list[nn.Module]:
        frame, found = inspect.currentframe(), []
        while frame is not None:
            if calls_forward(frame):
                found.append(frame.f_locals["self"])
            frame = frame.f_back
        return found


def calls_of_modules_are_replaced() -> None:
    layer = nn.Linear(2, 2)
    before = replace_call(layer, lambda *_: "replaced")
    assert (before, layer(1)) == (None, "replaced") and uncompiled_call(layer)(torch.ones(2)).shape == (2,)
    assert is_compiled(layer)
    replace_call(layer, before)
    wrapper = cast(nn.Module, torch.compile(layer))
    assert not is_compiled(layer) and is_compiled(wrapper)
    assert compiled_module(wrapper) is layer and compiled_module(layer) is None
    assert torch.equal(layer(torch.ones(2)), uncompiled_call(layer)(torch.ones(2)))
    looks = Looks()
    assert looks() == [looks] and looks.forward() == []
    with FakeTensorMode():
        assert is_fake(torch.ones(1))
    assert not is_fake(torch.ones(1)) and not is_fake(1)


def conversions_go_through_one_method() -> None:
    layer, asked = nn.Sequential(nn.Linear(2, 2)), []
    vars(layer)[CONVERSION] = lambda function, recurse=True: asked.append(function)
    for convert in (layer.double, layer.cpu, partial(layer.to, torch.float64)):
        convert()
    assert len(asked) == 3 and layer[0].weight.dtype == torch.float32
    assert convert_module(layer, asked[0]) is layer and layer[0].weight.dtype == torch.float64


def modes_are_left_and_entered_again() -> None:
    with FakeTensorMode():
        with without_dispatch_modes():
            assert not is_fake(torch.ones(1))
        assert is_fake(torch.ones(1))


def events_are_written_at_once() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        write_event(writer, Summary(value=[Summary.Value(tag="loss", simple_value=1.0)]), 3)
        writer.close()
        (written,) = Path(folder).iterdir()
        assert b"loss" in written.read_bytes()


class _Ending(torch.Tensor):
    """Ends each graph in which it is read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        end_traced_graph("it is read")
        return super().__torch_function__(func, types, args, kwargs or {})


def graphs_end_before_calls_that_cannot_be_traced() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(_Ending))
    inputs = torch.ones(1, 2)
    assert torch.equal(torch.compile(lambda x: layer(x) + 1, backend="eager")(inputs), layer(inputs) + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it is read"):
        torch.compile(lambda x: layer(x) + 1, backend="eager", fullgraph=True)(inputs)


TOUCHED: dict[Callable[[], None], str] = {
    lists_are_computed_with_at_once: """
        foreach_add_ foreach_copy_ foreach_div_ foreach_lerp_ foreach_mul foreach_mul_ foreach_norm foreach_sqrt
        foreach_sub foreach_sub_
    """,
    expensive_operators_are_in_aten: "FUSED_PRODUCTS operator_arguments",
    rows_are_written_in_the_order_of_ranks: "chunk_cat",
    a_false_condition_stops: "assert_async",
    writes_are_counted: "tensor_version tensor_versions VERSION_ATTRIBUTE IS_VIEW",
    memory_is_told_apart: "storage_key storage_uses",
    dtensors_have_a_local_part: "is_dtensor local_tensor",
    step_hooks_are_found: "step_hooks",
    indices_need_no_coalescing: "sparse_indices sparse_values",
    subclasses_have_no_memory: "FunctionModesDisabled make_wrapper_subclass TorchFunctionDisabled",
    hooks_of_tensors_are_found: "gradient_hooks set_gradient_hooks accumulation_hooks GRADIENT_HOOK_ATTRIBUTES",
    ids_tell_of_registered_and_removed_hooks: "hook_ids hooks_registered",
    fused_optimizers_have_devices: "fused_optimizer_devices",
    backward_is_noticed: "in_backward",
    backward_runs_without_checks: "engine_backward",
    backwards_tell_what_they_accumulate_and_keep: "is_reached keeps_graph",
    functions_of_one_backward_are_known: "differentiable_once",
    nodes_are_numbered_in_the_order_of_the_forward: "current_autograd_node next_node_sequence node_sequence",
    losses_say_what_they_are_means_over: """
        CrossEntropyNode cross_entropy_of divisor_of_cross_entropy divisor_of_node is_scalar_node label_smoothing_of
        shape_of_node factor_of_node count_of_nansum sums_losses reduces_first_dimension
        reduces_losses constant_operand index_of_node mask_of_node
    """,
    modes_are_counted: """
        FUNCTION_MODE_ENTRIES function_mode_depth function_modes_active dispatch_mode_depth TorchDispatchMode
        function_mode_aside leave_function_mode top_function_mode traced_function_modes version_counting_view
    """,
    transforms_are_counted: "functorch_level",
    saving_of_tensors_is_noticed: "saved_tensor_hooks",
    trees_are_walked: """
        tree_flatten tree_leaves tree_map tree_map_only tree_unflatten treespec_dumps treespec_loads
    """,
    fake_tensors_take_no_memory: "FakeTensorMode",
    operations_that_need_values_of_fake_tensors_raise: "FAKE_VALUE_ERRORS",
    items_are_read_by_one_operator: "READ_NUMBER",
    grouped_products_are_seen_by_function_modes: "GROUPED_PRODUCT",
    classes_of_layers_are_found: "BatchNormBase NormBase ConvBase ConvTransposeBase DropoutBase",
    members_of_modules_are_tables: "module_parameters module_buffers non_persistent_buffers",
    members_are_put_in_order: "order_members",
    hooks_of_modules_are_noticed: "forward_hooks has_forward_hook has_backward_hook wrap_forward_hooks",
    views_know_their_base: "view_base",
    tables_of_hooks_hold_each_hook: "MODULE_HOOK_TABLES",
    hooks_of_fsdp_are_told_from_others: "is_hook_of_fsdp",
    options_of_layers_are_known: "draws_samples has_packed_projection FUSED_ACTIVATION",
    layers_are_initialised_by_a_method: "RESET_METHODS",
    a_modules_own_attributes_are_known: "MODULE_ATTRIBUTES FX_CONSTANT",
    optimizers_and_schedulers_keep_their_books: """
        optimizer_attributes is_wrapped_by_scheduler mark_stepped mark_wrapped_by_scheduler
    """,
    scalers_call_marked_optimizers_after_an_overflow: "accept_gradient_scale",
    scalers_that_have_scaled_are_known: "has_scaled",
    collectives_of_one_rank_pass: "all_gather_single reduce_scatter_single default_store flight_recorder",
    groups_are_numbered_anew: "forget_process_groups set_group_timeout",
    options_of_groups_have_a_timeout: "high_priority_options",
    fsdp_takes_other_collectives: "set_fsdp_collectives",
    fsdp_reduces_zeros_for_unused_parameters: "reduce_unused_parameters",
    optimizers_skip_the_check_for_graphs: "skip_graph_capture_checks",
    agents_are_written_by_overriding: "ELASTIC_AGENT_MEMBERS elastic_processes",
    agents_count_the_restarts_that_are_used: "set_elastic_restarts",
    agents_ask_at_three_places: "make_elastic_agent",
    graphs_end_before_calls_that_cannot_be_traced: "end_traced_graph",
    calls_of_modules_are_replaced: "calls_forward replace_call uncompiled_call compiled_module is_compiled is_fake",
    conversions_go_through_one_method: "CONVERSION convert_module",
    modes_are_left_and_entered_again: "without_dispatch_modes",
    events_are_written_at_once: "write_event",
    loader_processes_know_their_number: "enter_loader_process",
    loaders_count_their_batches: "LoaderIterator loader_position",
    modes_of_compiling_stand_for_options: "inductor_mode_options",
    inductor_compiles_for_some_devices: "inductor_lacks",
    an_apple_gpu_has_one_generator: "mps_generator",
}
"""Each check, with the names that it touches."""


@pytest.mark.parametrize("check", TOUCHED, ids=lambda check: check.__name__)
def test_a_private_name_does_what_it_is_used_for(check: Callable[[], None]) -> None:
    check()


def test_releases_without_a_count_of_references_report_more_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    tensor = torch.empty(4)
    assert storage_uses(tensor) < storage_uses(tensor) < storage_uses(tensor)


def test_every_name_is_touched() -> None:
    public = {
        name
        for name, value in vars(torch_compat).items()
        if getattr(value, "__module__", "") == torch_compat.__name__ and not name.startswith("_")
    }
    assert public <= set(torch_compat.__all__)
    assert sorted(name for names in TOUCHED.values() for name in names.split()) == sorted(torch_compat.__all__)
