"""``Module.to``, ``double`` and ``cpu`` of a prepared model: kept where nothing changes, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from weakref import ref

import torch
from torch import Tensor, nn

from tutti.errors import UsageError, script_line
from tutti.nn.swap import parameters
from tutti.torch_compat import CONVERSION, TorchFunctionDisabled, convert_module
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.run_context import RunContext

_REMEDY = (
    "convert the model before tutti.prepare, or give it precision=…; to compute elsewhere, convert a copy of the plain"
    " model that has loaded run.state()"
)


class ModelConversions:
    """Checks calls by which a script converts a prepared model to another dtype or device, such as ``model.half()``.

    Where each rank has all of the model, a script may convert it and convert it back between two steps; otherwise
    ``check`` raises UsageError. Where each has a part (slices, stages, shards), a conversion that would change anything
    raises UsageError at once. To notice the calls, the constructor sets ``_apply`` on each module instance; copies and
    pickles of the modules leave it out.

    Args:
        model: the script's model.
        replica: this rank's part of it.
        run_context: the run's device mesh and communicators.
    """

    def __init__(self, model: nn.Module, replica: ReplicaRunner, run_context: RunContext) -> None:
        self._replica, mesh = replica, run_context.mesh
        self._in_parts = run_context.shards_parameters or mesh.tensor > 1 or mesh.stage > 1
        self._device = run_context.comms.world.device
        self._line: str | None = None
        self._before = {name: _place(p) for name, p in parameters(replica.parts)}
        for module in model.modules():
            # Instance attributes take precedence over the class's, and PyTorch has no hook for conversions.
            vars(module)[CONVERSION] = _Conversion(module, self)

    def convert(self, module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> nn.Module:
        """Convert a module of a prepared model to another dtype or device, as ``nn.Module._apply`` does.

        ``module.to(…)``, ``half()``, ``cpu()`` and their like call this method in place of ``_apply``. Where this rank
        has the whole model, the module is converted; if it then has another dtype or device than in ``tutti.prepare``
        when the next step begins, ``check`` raises UsageError. Where each rank has only a part of the model (slices,
        stages or shards), the call only checks that the conversion would change nothing, and leaves the module as it
        is. Not collective.

        Args:
            module: the module of the model.
            function: returns the converted tensor for a tensor.
            recurse: whether to convert the module's children as well.

        Returns:
            ``module`` itself.

        Raises:
            UsageError: each rank has only a part of the model, and the conversion would change the dtype or device of a
                tensor, or moves tensors to shared memory.
        """
        changed = self._change(module, function)
        if not self._in_parts:
            if changed is not None:
                self._line = script_line()
            return convert_module(module, function, recurse)
        if changed is not None:
            raise UsageError(
                f"the script converts the model after tutti.prepare, from {changed}",
                where=script_line(),
                why="each rank has a part of the parameters, which the optimizer updates as they are",
                remedy=_REMEDY,
            )
        return module

    def check(self, step: int) -> None:
        """Raise UsageError if parameters have another dtype or device than in ``tutti.prepare``. Not collective.

        The run calls this before each step. Parameters are compared only if the script has called a conversion, such
        as ``model.half()``, since the last step; a model that was converted back passes.

        Args:
            step: number of the coming step, from 1, which the error names.
        """
        line, self._line = self._line, None
        if line is None:
            return
        for name, parameter in parameters(self._replica.parts):
            before, now = self._before.get(name), _place(parameter)
            if before is not None and before != now:
                raise UsageError(
                    f"the script has converted the model after tutti.prepare: {name} was {before}, and is {now}",
                    where=f"before step {step}, {line}",
                    why="batches, gradients and the optimizer's state are as the model was in tutti.prepare",
                    remedy=f"convert it back before the next step; {_REMEDY}",
                )

    def _change(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> str | None:
        """Return text of a change of dtype, device or memory of any tensor, by empty tensors that stand for them.

        None where nothing changes.
        """
        seen = set()
        with TorchFunctionDisabled(), torch.no_grad():
            for tensor in chain(module.parameters(), module.buffers()):
                # Placeholders of tensors on other ranks have no memory.
                device = self._device if tensor.device.type == "meta" else tensor.device
                if (tensor.dtype, device) in seen:
                    continue
                seen.add((tensor.dtype, device))
                small = torch.empty(0, dtype=tensor.dtype, device=device)
                shared, result = small.is_shared(), function(small)
                if _place(small) != (now := _place(result)):
                    return f"{_place(small)} to {now}"
                if self._in_parts and result.is_shared() != shared:
                    return "memory of this process to shared memory"
        return None


class _Conversion:
    """The ``_apply`` of one module."""

    def __init__(self, module: nn.Module, conversions: ModelConversions) -> None:
        self._module, self._conversions = ref(module), ref(conversions)

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Convert the module by a function of a tensor."""
        module = self._module()
        if module is None:
            raise TypeError("the module of this method has been deleted")
        if (conversions := self._conversions()) is None:
            # The run is gone.
            return convert_module(module, function, recurse)
        return conversions.convert(module, function, recurse)


def _place(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
