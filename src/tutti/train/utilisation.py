"""What a sample of a run is worth to a device: its tokens, its FLOP from a trace, and the device's peak."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tutti.config.train_config import TrainConfig
from tutti.config.variables import is_off
from tutti.data.batches import length, map_tensors, slice_batch
from tutti.data.global_generators import own_generators
from tutti.device import cpu_model, device_names, is_accelerator, multiplies_in_tf32
from tutti.errors import TuttiError
from tutti.launcher.context import World
from tutti.metrics.throughput import DeviceThroughput
from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_modules
from tutti.tasks.task import Task
from tutti.train.run import Run
from tutti.types.micro_batch import Batch
from tutti.workload.device_peaks import published_peak
from tutti.workload.machine_file import peak_name, read_machine
from tutti.workload.workload_trace import TracedModel, tokens_of, trace_workload


def measured_throughput(
    task: Task, config: TrainConfig, world: World, run: Run, warn: Callable[[str], None], batch: Batch
) -> DeviceThroughput:
    """Return the tokens and FLOP of one sample, from which tokens/s and MFU of a device are reported. Not collective.

    FLOP are counted by tracing another model of the task, which calls the loss function, if the device's peak FLOP/s
    are known and the checks for mistakes are not switched off.

    Args:
        task: the task, for its model and loss function.
        config: the configuration.
        world: ranks and device.
        run: the run, for its batches.
        warn: called with a text where a peak is known and the FLOP are not, where some operators have no formula of
            their FLOP, or where the machine file that the configuration names has no peak for this device.
        batch: this rank's first batch, whose first sample is traced.

    Returns:
        A ``DeviceThroughput`` of numbers: ``devices``, ``tokens`` of a sample, ``model_flop`` and ``hardware_flop``
        (FLOP of its forward and backward, without and with recomputed activations), and ``peak`` FLOP/s of a device; an
        unknown number is None; all but ``devices`` are None if ``batch`` is empty, or the task has a ``collate``.

    Raises:
        UsageError: the machine file of the configuration cannot be read.
    """
    devices = world.identity.size
    # Batches that the task collates may hold samples of any length, so that one does not tell the others' tokens.
    if task.collate is not None or not length(batch):
        return DeviceThroughput(devices)
    sample = map_tensors(slice_batch(batch, 0, 1), lambda tensor: tensor.detach().cpu())
    peak = device_peak(config, world.device, torch.get_num_threads(), warn)
    if peak is None:
        return DeviceThroughput(devices, tokens_of(sample))
    samples = len(run.feed.contract.first_micro_batch(config.batch_size))
    choice = config.activation_checkpointing
    if is_off("DIAGNOSTICS", os.environ):
        # The trace calls the loss function, on this rank alone.
        return DeviceThroughput(devices, tokens_of(sample))
    subject = TracedModel(
        name=task.name,
        build=task.model,
        loss=task.loss,
        sample=sample,
        groups=wrapped_modules,
        precision=config.precision,
    )
    try:
        with own_generators():
            found = trace_workload(subject, choices=tuple(dict.fromkeys(("none", choice))))
    except TuttiError as error:
        warn(f"no MFU is reported: {error}")
        return DeviceThroughput(devices, tokens_of(sample))
    if bent := [text for text in found.not_affine if " flop: " in text]:
        warn(f"no MFU is reported: FLOP are no line in samples ({bent[0]})")
        return DeviceThroughput(devices, found.tokens_per_sample)
    if found.without_formula:
        warn(f"MFU leaves out operators without a formula of their FLOP: {', '.join(found.without_formula)}")
    model, hardware = (flop / samples for flop in (found.model_flop(samples), found.hardware_flop(samples, choice)))
    return DeviceThroughput(devices, found.tokens_per_sample, model, hardware, peak)


def device_peak(config: TrainConfig, device: Any, threads: int, warn: Callable[[str], None]) -> float | None:
    """Return the peak FLOP/s of this device in the run's precision; None if unknown.

    The peak is the one measured in the configuration's machine file (``config.machine``); without such a file the
    published peak of an accelerator.

    Args:
        config: the configuration.
        device: this rank's device.
        threads: CPU threads of this rank.
        warn: called with a text where the machine file is of another machine, or has no peak for this precision and
            number of threads.

    Raises:
        UsageError: the machine file cannot be read.
    """
    accelerator = is_accelerator(device)
    here = device_names()[device.index or 0] if accelerator else cpu_model()
    precision: str = config.precision
    # Products of float32 run in TensorFloat-32 where the script allows it.
    if precision == "fp32" and multiplies_in_tf32(device):
        precision = "tf32"
    if config.machine is None:
        found = published_peak(here, precision) if accelerator else None
        return None if found is None else found[0]
    machine = read_machine(Path(config.machine))
    name = peak_name(precision, None if accelerator else threads)
    if machine.device.get("name") != here:
        warn(f"no MFU is reported: {config.machine} is of a {machine.device.get('name')}, and this device is a {here}")
        return None
    if name not in machine.figures:
        peaks = ", ".join(key for key in machine.figures if key.startswith("device/peak/")) or "none"
        warn(f"no MFU is reported: {config.machine} has no {name}; it has {peaks}")
        return None
    return machine.figures[name].value
