"""Private names of PyTorch and CPython are used in ``torch_compat.py`` and ``python_compat.py`` alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler

from tests.architecture.sources import SOURCE
from tutti.torch_compat import ELASTIC_AGENT_MEMBERS

EXEMPT = {SOURCE / "torch_compat.py", SOURCE / "python_compat.py"}
PATHS = sorted(set(SOURCE.rglob("*.py")) - EXEMPT)

_OBJECTS = (torch.Tensor, nn.Module(), nn.MultiheadAttention(2, 1), SGD([torch.zeros(1)], lr=1.0), LRScheduler)
_SET_LATER = """
    _cdata _schema _random_samples _opt_called _step_count _wrapped_by_lr_sched _need_device_dtype_check_for_fused
    _step_supports_amp_scaling _is_full_backward_hook _compiled_call_impl _tensor_constant _get_default_store _pc
    _get_file_writer _fsdp_param_group _fsdp_param_groups _get_fsdp_state _sharded_param_data _local_tensor _spec
    _BatchNorm _NormBase _ConvNd _ConvTransposeNd _DropoutNd
"""
OF_TORCH = {
    name
    for name in {n for found in _OBJECTS for n in dir(found)} | {n for n in dir(LocalElasticAgent)}
    if name.startswith("_") and not name.startswith("__")
} | {*_SET_LATER.split(), *ELASTIC_AGENT_MEMBERS}
"""Private attributes of PyTorch's objects: those that it has, and others that are set later or on modules."""

OF_PYTHON = {"atexit": {"_clear", "_run_exitfuncs"}, "threading": {"_shutdown"}, "sys": {"_getframe"}}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def own_attributes() -> set[str]:
    """Attributes that our own classes set or define, which they may have in common with PyTorch's."""
    found = set()
    for tree in (ast.parse(path.read_text(encoding="utf-8")) for path in PATHS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
                found.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                found |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def of_self(node: ast.Attribute) -> bool:
    """Whether it is ``self._x``, ``cls._x`` or ``super()._x``."""
    return isinstance(node.value, ast.Name | ast.Call) and ast.unparse(node.value) in ("self", "cls", "super()")


def names_from_torch(node: ast.AST) -> Iterator[str]:
    """What a statement names that it imports from PyTorch."""
    if isinstance(node, ast.Import):
        yield from (alias.asname for alias in node.names if alias.name.startswith("torch.") and alias.asname)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        yield from (alias.asname or alias.name for alias in node.names)


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each use of a private name of PyTorch or CPython."""
    nodes = list(ast.walk(tree))
    roots = {"torch", "nn"} | {name for node in nodes for name in names_from_torch(node)}
    in_texts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            holder = ast.unparse(node.value)
            of_torch = holder.split(".")[0] in roots
            of_object = node.attr in OF_TORCH and not (of_self(node) and node.attr in own_attributes())
            if of_torch or of_object or node.attr in OF_PYTHON.get(holder, ()):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in OF_TORCH and id(node) not in in_texts:
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            outside = names[0] == "torch" or names[0] in OF_PYTHON
            if outside and any(map(is_private, names)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            for parts in (alias.name.split(".") for alias in node.names):
                if parts[0] == "torch" and any(map(is_private, parts)):
                    yield node.lineno, ast.unparse(node)


def test_no_private_name_is_used_elsewhere() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} {text}"
        for path in PATHS
        for line, text in private_uses(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "give it a name and a reason in torch_compat.py or python_compat.py, and a check in its test"


@pytest.mark.parametrize(
    "code",
    [
        "torch._foreach_add_(a, b)",
        "torch._C._current_graph_task_id()",
        "torch.distributed.distributed_c10d._get_default_store()",
        "nn.modules.dropout._DropoutNd",
        "import torch.distributed as dist; dist._make_nccl_premul_sum",
        "from torch.nn import functional as F; F._verify_batch_size",
        "import torch._dynamo",
        "import torch._inductor as inductor",
        "from torch import _foreach_add_",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch.nn.modules.conv import _ConvNd",
        "from torch.utils import _pytree",
        "from atexit import _clear",
        "module._parameters.items()",
        "self.owner._buffers[key]",
        "self._qkv_same_embed_dim",
        "setattr(module, '_modules', {})",
        "getattr(parameter, '_post_accumulate_grad_hooks', None)",
        "gradient._version",
        "tensor.untyped_storage()._cdata",
        "optimizer._opt_called = True",
        "scheduler._initial_step()",
        "agent._remaining_restarts",
        "super()._start_workers(group)",
        "atexit._run_exitfuncs()",
        "threading._shutdown()",
        "sys._getframe(1)",
    ],
)
def test_a_private_name_is_noticed(code: str) -> None:
    assert list(private_uses(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["self._parameters", "torch.__version__", "os._exit(1)", "place._replace(a=1)"],
)
def test_other_names_are_let_be(code: str) -> None:
    assert not list(private_uses(ast.parse(code)))
