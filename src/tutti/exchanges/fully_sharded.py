"""Parameters in rows on every rank, gathered unit by unit while a forward or backward needs them: PyTorch's FSDP2.

Zhao et al. 2023, arXiv 2304.11277; ``torch.distributed.fsdp.fully_shard``. What it is told, and why: gradients are
summed and not averaged, because a cell's weight already makes the sum the mean; every backward ends in reduce-scatters,
so that no more than a unit's gradient is ever whole; a parameter that a rank did not use has a gradient of zeros there,
because the ranks must send as much. On CPUs its messages go through our communicator, which names who is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError
from tutti.exchanges.config import RowsConfig
from tutti.exchanges.rows import Rows, rows_of
from tutti.nn.parallel import Divided
from tutti.nn.shares import seen_as_shares
from tutti.nn.swap import parameters, swapped
from tutti.nn.wrapping import units
from tutti.types import ShardSpec

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FullySharded:
    """The rows of all parameters of one model but ``whole``.

    Args:
        model: becomes FSDP2's; its parameters become the rows.
        specs: what its tensors are slices of, and tied names.
        whole: parameters that stay as they are on every rank.
        config: stage, units, offload and number format.
        comm: the ranks that share one copy, more than one.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: Mapping[str, ShardSpec],
        whole: set[nn.Parameter],
        config: RowsConfig,
        comm: Communicator,
    ) -> None:
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UsageError("the model is sharded already", remedy="build it anew for another run")
        self._model = model
        named = [(name, p) for name, p in parameters([model]) if p not in whole]
        shapes = [p.shape for _, p in named]
        self._beginning = _Beginning(comm)
        self._units = _shard(model, whole, config, comm, self._beginning)
        own = dict(parameters([model]))
        self._gathered = [own[name] for name, _ in named]
        self.rows = [
            rows_of(name, _become(p, rows), specs[name], shape, comm)
            for (name, p), rows, shape in zip(named, self._gathered, shapes, strict=True)
        ]
        self._trained = {each.name: i for i, each in enumerate(filter(_trains, self.rows))}
        self._used = [False] * len(self._trained)
        for unit in self._units:
            self._watch(unit)

    def used(self) -> list[bool]:
        return self._used

    def collect(self, step: int) -> None:
        for each, gathered in zip(self.rows, self._gathered, strict=True):
            gradient = gathered.grad
            each.parameter.grad = None if gradient is None else _local(gradient)

    def publish(self) -> None:
        for unit in self._units:
            unit.reshard()

    def clear(self) -> None:
        self._beginning.over = True
        self._used = [False] * len(self._used)
        for each, gathered in zip(self.rows, self._gathered, strict=True):
            gathered.grad = each.parameter.grad = None

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the model holds ``values``, of which those of its rows are rows, too."""
        kept = []
        others = dict(values)
        for each in self.rows:
            value, rows = others.pop(each.name, None), each.parameter.data
            if value is not None and value.data_ptr() != rows.data_ptr():
                kept.append((rows, rows.clone()))
                rows.copy_(value)
        self.publish()
        try:
            with swapped([self._model], others):
                yield
        finally:
            for rows, own in kept:
                rows.copy_(own)
            self.publish()

    def _watch(self, unit: FSDPModule) -> None:
        """Once its parameters have been there, note which of them get a gradient."""

        def watch(module: nn.Module, args: Any) -> None:
            handle.remove()
            for name, parameter in self._here():
                parameter.register_post_accumulate_grad_hook(partial(self._note, self._trained[name]))

        handle = cast(nn.Module, unit).register_forward_pre_hook(watch)

    def _here(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters that are gathered now and have not been watched yet."""
        for name, parameter in parameters([self._model]):
            watched = hasattr(parameter, "to_local") or getattr(parameter, "_post_accumulate_grad_hooks", None)
            if name in self._trained and not watched:
                yield name, parameter

    def _note(self, index: int, parameter: Tensor) -> None:
        self._used[index] = True


def _shard(
    model: nn.Module, whole: set[nn.Parameter], config: RowsConfig, comm: Communicator, beginning: _Beginning
) -> list[FSDPModule]:
    """Apply FSDP2 to the units and to what is left; the root is the last."""
    if comm.group is None:
        raise ValueError("one rank has nothing to share out")
    device = comm.device.type
    dtype = _NARROW.get(config.param_dtype or "")
    offload: OffloadPolicy = CPUOffloadPolicy() if config.offload else OffloadPolicy()
    mesh, made = DeviceMesh.from_group(comm.group, device), list[FSDPModule]()
    names = {module: name for name, module in model.named_modules()}
    divided = any(isinstance(module, Divided) for module in model.modules())
    for unit in [*units(model, config.units), model]:
        root = unit is model
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=None if dtype is None else torch.float32,
            output_dtype=torch.float32 if root and dtype is not None else None,
        )
        # What is left over is needed by the backward that begins as its forward ends.
        reshard = config.stage == 3 and not root
        with seen_as_shares(unit) if divided else nullcontext():
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=reshard,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=whole,
            )
        if not isinstance(unit, FSDPModule):
            raise TypeError(f"fully_shard left {type(unit).__name__} as it was")
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)
        if device == "cpu":
            place = names[unit] or "the model"
            unit.set_custom_all_gather(_Gather(comm, place, beginning))  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_ScatterSum(comm, place, beginning))  # type: ignore[arg-type]
        made.append(unit)
    return made


class _Beginning:
    """Compares over the ranks what each is about to send, until the first step is over."""

    over = False

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def compare(self, call: str) -> None:
        """Raise MismatchError where the ranks' models go different ways. Collective."""
        if not self.over:
            self._comm.agree(
                [call],
                "which unit's parameters or gradients come next",
                "let every batch use the same units of the model, or take sharded:stage=1",
            )


class _Message:
    """A collective of FSDP2's through our communicator."""

    def __init__(self, comm: Communicator, place: str, beginning: _Beginning) -> None:
        self._comm, self._place, self._beginning = comm, place, beginning

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Message):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        self._beginning.compare(text := f"all_gather of {self._place}")
        self._comm.gather_into(output_tensor, input_tensor, text)


class _ScatterSum(_Message):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self._beginning.compare(text := f"reduce_scatter of gradients of {self._place}")
        self._comm.scatter_sum(output_tensor, input_tensor, text)


def _become(parameter: nn.Parameter, rows: nn.Parameter) -> nn.Parameter:
    """The model's own parameter as the rows that took its place, in the same memory."""
    parameter.data = _local(rows)
    return parameter


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    rows: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return rows.detach()


def _trains(rows: Rows) -> bool:
    return rows.parameter.requires_grad
