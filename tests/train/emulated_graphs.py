"""A backend of ``torch.compile`` that does to memory what CUDA graphs do, on the CPU.

As in ``torch/_inductor/cudagraph_trees.py``, results of compiled forwards and backwards, saved activations and
gradients among them, belong to a pool, which the first compiled call of a new generation overwrites, here with NaN.
``torch.compiler.cudagraph_mark_step_begin`` begins a generation; in a process that never calls it, each forward after a
backward does. A step that reads results of an earlier generation therefore gets NaN.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import list_backends, register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import TracingContext

NAME = "emulated_graphs"


class Pool:
    """The results of this process's compiled calls in the present generation, and counts for tests."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.overwritten = 0
        self.addresses: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        self._mark, self._calls, self._after_backward = 0, 0, False

    def begin(self, backward: bool) -> int:
        """Overwrite the last generation where this call begins another; return the number of the call within it."""
        # A process that has marked no step has not imported the module, which takes half a second.
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        marked = trees.MarkStepBox.mark_step_counter if trees is not None else 0
        if marked != self._mark if marked else self._after_backward and not backward:
            self.overwritten += len(self.held)
            for tensor in self.held:
                ctypes.memset(tensor.untyped_storage().data_ptr(), 0xFF, tensor.untyped_storage().nbytes())
            self.held.clear()
            self._calls = 0
        self._mark, self._after_backward = marked, backward
        self._calls += 1
        return self._calls


POOL = Pool()


def register() -> None:
    """Let ``backend=emulated_graphs`` name this backend in this process."""
    if NAME not in list_backends(()):
        backend = aot_autograd(fw_compiler=_compiler(False), bw_compiler=_compiler(True), inference_compiler=_plain)
        register_backend(backend, name=NAME)


def _plain(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return make_boxed_func(graph.forward)


def _compiler(backward: bool) -> Callable[..., Any]:
    def compiled(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        context = TracingContext.try_get()
        facts = None if context is None else context.fw_metadata
        static = [] if facts is None or backward else list(facts.static_input_indices)

        def run(*inputs: Any) -> Any:
            call = POOL.begin(backward)
            if not backward:
                found = tuple(inputs[index].data_ptr() for index in static)
                POOL.addresses.setdefault((id(graph), call), set()).add(found)
            given = {each.untyped_storage().data_ptr() for each in inputs if isinstance(each, Tensor)}
            results = graph.forward(*inputs)
            for each in results:
                if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                    POOL.held.append(each.detach())
            return results

        return make_boxed_func(run)

    return compiled
