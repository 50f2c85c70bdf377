"""Conversion of the model before it is laid out: batch norm, dtype and memory layout; and of the loss function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tutti.config.loss_scale_config import LossScaleConfig, choose_loss_scale
from tutti.config.module_config import BatchNormConfig, GhostBatchNormConfig, SyncBatchNormConfig, check_float8
from tutti.device import check_float64
from tutti.errors import UsageError
from tutti.host_memory import free_memory
from tutti.launcher import context
from tutti.launcher.malloc_tuning import free_at_once
from tutti.nn import ghost, norms, sync
from tutti.nn.float8 import convert_to_float8
from tutti.nn.init_on_disk import as_built
from tutti.optim.loss_scale import LossScale
from tutti.types.micro_batch import LossFn
from tutti.types.run_context import RunContext
from tutti.workload.tensor_memory import bytes_of

_DTYPES = {
    **dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), torch.float32),
    "fp64": torch.float64,
}
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def convert_model(
    model: nn.Module, batch_norm: BatchNormConfig, run_context: RunContext, precision: str | None, channels_last: bool
) -> tuple[nn.Module, torch.dtype]:
    """Convert a model's batch norm, dtype and memory layout, before the model is laid out over ranks.

    Collective over all ranks for ``sync`` batch norm, which makes a process group; otherwise nothing is sent.

    Args:
        model: the script's model; parameters and buffers are converted in place.
        batch_norm: options of batch norm: synchronised over ranks (``sync``), over groups of samples (``ghost``), or as
            PyTorch's.
        run_context: the run's communicators, device mesh and number of logical workers, over which ``sync`` batch norm
            computes.
        precision: ``fp64`` makes floating-point parameters and buffers float64; ``fp32``, ``bf16``, ``fp16`` and
            ``fp8`` make them float32, because narrow precisions use autocast in the loss function (``cast_loss``);
            ``fp8`` also replaces linear layers by layers that multiply in 8-bit floats. None leaves the dtype.
        channels_last: convert 4-d tensors to the channels-last memory format.

    Returns:
        A pair: the model, and the dtype to which floating-point inputs are converted, that of the model's first
        floating-point parameter, or float32 if the model has none.

    Raises:
        UsageError: the precision is unknown; ``fp64`` on a device without float64; or ``fp8`` on a CPU, with tensor
            parallelism, without torchao, or for a model of which no layer can be converted.
    """
    if run_context.shards_parameters and run_context.comms.world.device.type == "cpu" and _is_large(model):
        free_at_once()
    with as_built(model):
        model = _normalised(model, batch_norm, run_context)
        if precision == "fp8":
            device = run_context.comms.world.device
            check_float8(device.type == "cpu", run_context.mesh.tensor > 1)
            model = convert_to_float8(model, device)
        if precision == "fp64":
            check_float64(run_context.comms.world.device)
        return model, _precise(model, precision, channels_last)


def _is_large(model: nn.Module) -> bool:
    """Return whether the model is so large that malloc should return freed memory of gathered layers to the system.

    Kept memory is about three times the memory in use. With Adam a model of a sixteenth of the free memory needs a
    quarter of it, and three times that leaves little (the threshold is a guess).
    """
    return bytes_of([*model.parameters(), *model.buffers()]) > free_memory(context.local_size()) // 16


def _normalised(model: nn.Module, batch_norm: BatchNormConfig, run_context: RunContext) -> nn.Module:
    """Convert the model's batch norm as ``batch_norm`` says. Collective for ``sync``: makes a process group."""
    model = norms.restore_norms(model)
    if isinstance(batch_norm, SyncBatchNormConfig):
        line = run_context.comms.new_group("batch norm")
        line.share_memory()
        return sync.convert_sync_batch_norm(model, line, run_context.workers, run_context.mesh.data_ranks)
    return (
        ghost.convert_ghost_batch_norm(model, batch_norm.size)
        if isinstance(batch_norm, GhostBatchNormConfig)
        else model
    )


def _precise(model: nn.Module, precision: str | None, channels_last: bool) -> torch.dtype:
    """Convert the model's dtype and memory layout in place; return the dtype for floating-point inputs."""
    if precision is not None and precision not in _DTYPES:
        raise UsageError(f"unknown precision '{precision}'", remedy=f"choices: {', '.join(_DTYPES)}")
    if precision is not None:
        model.to(_DTYPES[precision])
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def cast_loss(loss_fn: LossFn | None, device: str, precision: str | None) -> LossFn | None:
    """Return a function that calls the loss function under autocast to the precision's 16-bit dtype.

    Args:
        loss_fn: the loss function ``loss_fn(model, batch)``; None if the run has no loss function.
        device: type of the device, such as ``cpu`` or ``cuda``.
        precision: ``bf16``, ``fp16``, or ``fp8``, whose other operations than 8-bit linear layers run in bfloat16; for
            any other precision, and None, ``loss_fn`` is returned as it is.

    Returns:
        A function with the arguments and the result of ``loss_fn``; None where ``loss_fn`` is None.
    """
    dtype = _CAST.get(precision or "")
    if loss_fn is None or dtype is None:
        return loss_fn

    def cast(model: Any, batch: Any) -> Any:
        with torch.autocast(device, dtype):
            return loss_fn(model, batch)

    return cast


def make_loss_scale(
    given: LossScaleConfig | str | None, precision: str | None, loss_fn: LossFn | None
) -> LossScale | None:
    """Return the object that scales the run's loss against underflow of fp16 gradients; None if no scale is needed.

    Args:
        given: options of the loss scale, or their text; None: dynamic for ``fp16``, none for other precisions.
        precision: ``precision`` of the run; None: the script's own autocast, if any, sets the precision.
        loss_fn: the loss function; None for none.

    Returns:
        A ``LossScale``, whose ``value`` is the factor on the loss of the next step; the value of a dynamic scale adapts
        to overflows.

    Raises:
        UsageError: ``precision`` is ``bf16``, ``fp16`` or ``fp8``, which needs autocast around a loss function, and
            ``loss_fn`` is None; or ``given`` is invalid, or given with a precision other than ``fp16``.
    """
    if loss_fn is None and precision in _CAST:
        raise UsageError(
            f"precision={precision} casts inside loss_fn, and there is none",
            remedy="give a loss_fn, or wrap your own forward in torch.autocast"
            + " and set loss_scale='dynamic'" * (precision == "fp16"),
        )
    config = given if isinstance(given, LossScaleConfig) else choose_loss_scale(given, precision)
    return None if config is None else LossScale(config)
