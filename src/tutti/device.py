"""The accelerator of this machine: the only module that knows names of vendors.

All other modules ask the functions below, which ask ``torch.accelerator``, ``torch.get_device_module`` and a device's
type. So every accelerator that PyTorch knows, or that registers itself with PyTorch, takes the same path as a GPU.
Torch is imported inside functions, because the command line answers without it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import itertools
import os
import platform
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.errors import UsageError, counted

if TYPE_CHECKING:
    import torch

DEVICE_FILES = Path("/dev")

KNOWN = ("cuda", "xpu", "mps", "hpu", "mtia", "xla", "npu")
"""Accelerators that PyTorch names itself, as ``--device`` takes them; a plugin registers others."""

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables that limit which devices a process sees; processes on other nodes get them too."""

DEVICE_RESOURCE = "nvidia.com/gpu"
"""Kubernetes' name of an accelerator, unless the user states another."""

COLLECTIVE_VARIABLES = ("NCCL_", "RCCL_", "CCL_", "TORCH_NCCL_")
"""Prefixes of environment variables that configure a vendor's collectives, or PyTorch's use of them."""

COLLECTIVE_DEFAULTS: Mapping[str, Mapping[tuple[str, ...], str]] = {
    "nccl": {("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"): "3"},
}
"""By backend: a variable with its old names, and its value where none of them is set.

3, ``SkipCleanUp``: a collective that fails or is late ends the process without aborting communicators, which may hang.
"""

DEVICE_FLAGS = (
    *("is_cpu", "is_cuda", "is_xpu", "is_mps", "is_xla", "is_mtia", "is_maia", "is_ipu", "is_vulkan"),
    *("is_meta", "is_mkldnn"),
)
"""Attributes of a tensor that tell its device's type."""

_CAPTURED = {"cuda": "CUDA", "xpu": "XPU", "hpu": "HPU", "mtia": "MTIA"}
_UNPINNED = ("cpu", "mps", "meta")

WITHOUT_FLOAT64 = ("mps",)
"""Types of devices that have no tensors of float64."""


# --- without torch -------------------------------------------------------------------------------------------------


def is_device_choice(name: str) -> bool:
    """Return whether a text can be the value of ``--device``: ``auto``, ``cpu``, an accelerator's type or a plugin's.

    Accelerators' types are the names that PyTorch itself knows, such as ``cuda``, ``xpu`` and ``mps``. A plugin is an
    installed package that registers a device with PyTorch (entry point ``torch.backends``). The device's name is known
    only once torch has loaded the plugin, so any identifier passes if one is installed; ``choose`` refuses it later if
    it names no accelerator here.

    Args:
        name: the text.

    >>> is_device_choice("cuda"), is_device_choice("2 gpus")
    (True, False)
    """
    return name in ("auto", "cpu", *KNOWN) or (name.isidentifier() and bool(_plugins(os.environ)))


def check_device(choice: str, where: str = "--device") -> None:
    """Check that a text can be the value of ``--device`` on some machine with these packages; needs no torch.

    Args:
        choice: the device that the user stated.
        where: the option or key that states it, which UsageError names.

    Raises:
        UsageError: ``choice`` is none of the possible values; the error suggests one.
    """
    if is_device_choice(choice):
        return
    choices = ("auto", "cpu", *KNOWN)
    kind, _, index = choice.partition(":")
    if index.isdecimal() and is_device_choice(kind):
        only = f", and {VISIBLE_DEVICES[0]}={index} to use that device alone" * (kind == "cuda")
        raise UsageError(
            f"unknown device '{choice}'",
            where=where,
            why="each process takes the device of its number on the node",
            remedy=f"take {kind}{only}",
        )
    near = [] if choice.lower() == "gpu" else difflib.get_close_matches(choice, choices, 1)
    remedy = f"take {near[0]}" if near else f"take auto for the GPU that is here; choices: {', '.join(choices)}"
    raise UsageError(f"unknown device '{choice}'", where=where, remedy=remedy)


def count_by_driver(environ: Mapping[str, str]) -> int | None:
    """Count the accelerator's devices without torch and without a driver library; None if only torch can tell.

    Counts the device files of NVIDIA's driver (``/dev/nvidiaN``), or the entries of ``CUDA_VISIBLE_DEVICES`` if these
    are fewer. Under the Windows subsystem for Linux the driver makes no such files: there, state ``--devices``.

    Args:
        environ: environment variables. Read are ``CUDA_VISIBLE_DEVICES``, and ``TORCH_DEVICE_BACKEND_AUTOLOAD``: with
            a value other than 1, torch loads no plugins, and plugins do not count.

    Returns:
        The number of devices. None if a plugin is installed (a package that registers a device with PyTorch), or if
        torch is built for ROCm, XPU or macOS. Otherwise 0 if torch is built for CPUs or not installed.
    """
    version = _torch_version()
    if _plugins(environ) or re.search(r"\+(rocm|xpu)", version) or (version != "+cpu" and sys.platform == "darwin"):
        return None
    if version.endswith("+cpu"):
        return 0
    present = sum(1 for path in DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA ignores everything from the first invalid entry on; "-1" is the usual way to hide all.
    valid = itertools.takewhile(lambda name: name and not name.startswith("-"), map(str.strip, visible.split(",")))
    return min(present, sum(1 for _ in valid))


def _plugins(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of installed packages' devices that ``import torch`` loads, unless that is switched off."""
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return ()
    return tuple(entry.name for entry in importlib.metadata.entry_points(group="torch.backends"))


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "+cpu"


# --- choice --------------------------------------------------------------------------------------------------------


def accelerator_type() -> str | None:
    """Return the device type of this machine's accelerator, such as ``cuda``; None without a usable one.

    The call may use the driver; a process that has used a driver must not fork. ``is_compiled_in`` does not use it.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def choose(choice: str, local_rank: int, local_size: int, where: str) -> torch.device:
    """Return this process's device: the accelerator with the index ``local_rank``, or the CPU.

    An accelerator also becomes the current device of this process (``torch.accelerator.set_device_index``).

    Args:
        choice: ``auto`` (the accelerator if there is one), ``cpu``, or the accelerator's type.
        local_rank: index of this process among those on this node, which is also the index of its accelerator.
        local_size: number of processes on this node.
        where: the rank in words, such as ``rank 3``, for the UsageError about more processes than devices.

    Raises:
        UsageError: an unknown type, an accelerator that is not here, or no device with the index ``local_rank``.
    """
    import torch

    if choice == "cpu":
        return torch.device("cpu")
    here = accelerator_type()
    if choice not in ("auto", here, *KNOWN):
        known = ", ".join(dict.fromkeys((*filter(None, (here,)), *KNOWN)))
        raise UsageError(f"unknown device '{choice}'", remedy=f"choices: auto, cpu, {known}")
    if here is None and choice == "auto":
        return torch.device("cpu")
    if here is None:
        raise UsageError(f"{choice.upper()} was asked for, but PyTorch sees no GPU", remedy="take --device cpu")
    if choice not in ("auto", here):
        raise UsageError(
            f"{choice.upper()} was asked for, but the accelerator that PyTorch sees is {here.upper()}",
            remedy=f"take --device {here}",
        )
    count = torch.accelerator.device_count()
    if local_rank >= count:
        limits = ", ".join(f"{name}={os.environ[name]}" for name in VISIBLE_DEVICES if name in os.environ)
        raise UsageError(
            f"{local_size} processes on this host share {counted(count, 'GPU')}",
            where=where,
            why=f"this process sees no others, because of {limits}" if limits else None,
            remedy=f"start at most {counted(count, 'process')} a host, or take --device cpu"
            + "; or let every process see all GPUs of its host (Slurm: --gpus-per-node, not --gpus-per-task)"
            * bool(limits),
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(here, local_rank)


def check_processes(choice: str, processes: int, where: str) -> None:
    """Raise UsageError if a job would have more than one process on ``mps``, an Apple GPU; needs no torch.

    Other types of device have no limit.

    Args:
        choice: ``--device``, or the type of a device.
        processes: number of processes of the job, on all nodes.
        where: the option or the rank in words, such as ``--devices``, for the UsageError.

    Raises:
        UsageError: more than one process on ``mps``.
    """
    if choice == "mps" and processes > 1:
        raise UsageError(
            f"MPS computes in 1 process, not in {processes}",
            where=where,
            why="an Apple GPU is one device, and PyTorch has no collectives for its tensors",
            remedy="take one device, or --device cpu",
        )


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is an accelerator: neither the CPU nor ``meta``.

    Args:
        device: the device.
    """
    return device.type not in ("cpu", "meta")


def is_compiled_in() -> bool:
    """Return whether torch is built for an accelerator or has a plugin for one, whether or not one is present.

    Does not touch the driver: a process that has used a driver must not fork.
    """
    import torch

    return torch.accelerator.current_accelerator(check_available=False) is not None


def reason_not_to_fork() -> str | None:
    """Return a reason why processes forked from this one could not compute on the accelerator; None if none is found.

    Checks two reasons. A driver that a process has used does not work in its forks. Neither do the threads of autograd,
    which a backward starts wherever torch is built for an accelerator, also for CPU tensors; they are found by their
    names in ``/proc``, and missed on systems without it. Does not touch the driver.

    Returns:
        The reason, a text for messages; None if neither is found, torch is not imported, or torch is built for CPUs.
    """
    if "torch" not in sys.modules:
        return None
    import torch

    # Whether the accelerator is available is not asked: the question itself may use the driver.
    here = torch.accelerator.current_accelerator(check_available=False)
    if here is None:
        return None
    if getattr(torch.get_device_module(here), "is_initialized", lambda: False)():
        return f"this process has used the {here.type.upper()} driver, which does not work in a forked process"
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8").startswith("pt_autograd"):
                return "a backward in this process has started the threads of autograd, which a fork does not copy"
    return None


# --- collectives ---------------------------------------------------------------------------------------------------


def collective_backend(device: torch.device) -> str | None:
    """Return PyTorch's default ``torch.distributed`` backend for an accelerator, such as ``nccl``.

    Args:
        device: the device, of which only the type counts.

    Returns:
        The backend's name; None for the CPU, ``meta``, and accelerators for which PyTorch names no backend.
    """
    import torch

    return torch.distributed.Backend.default_device_backend_map.get(device.type) if is_accelerator(device) else None


def set_collective_defaults(device: torch.device, environ: MutableMapping[str, str]) -> list[str]:
    """Set defaults for the collective backend's environment variables in ``environ``, where the user has not set them.

    Only NCCL has a default: ``TORCH_NCCL_ASYNC_ERROR_HANDLING=3``, with which a collective that fails or is late ends
    the process without a clean-up of communicators that may hang. An old name of the variable counts as set, too.

    Args:
        device: determines the backend.
        environ: changed in place.

    Returns:
        Names of the variables that this call has set; empty for other backends, and where the user has set them.
    """
    chosen = []
    for names, value in COLLECTIVE_DEFAULTS.get(collective_backend(device) or "", {}).items():
        if not any(name in environ for name in names):
            environ[names[0]] = value
            chosen.append(names[0])
    return chosen


def collective_options(device: torch.device, timeout: timedelta) -> Any:
    """Return the ``pg_options`` of ``new_group`` for groups that reduce gradients: with NCCL, a high-priority stream.

    Kernels on such a stream start as soon as a multiprocessor is free, so that a reduction overlaps with the backward
    and does not queue behind its kernels.

    Args:
        device: determines the backend.
        timeout: timeout of the group's collectives.

    Returns:
        NCCL's process group options; None for other backends.
    """
    from tutti.torch_compat import high_priority_options

    return high_priority_options(timeout) if collective_backend(device) == "nccl" else None


# --- streams, memory, generators -----------------------------------------------------------------------------------


def pins_memory(device: torch.device) -> bool:
    """Return whether ``non_blocking`` copies from the host to a device need pinned memory to be asynchronous.

    False for the CPU, an Apple GPU (``mps``) and ``meta``; True for all other devices.

    Args:
        device: destination of the copies.
    """
    return device.type not in _UNPINNED


def numbers_for(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return a CPU tensor of ``numbers``, pinned where that makes ``non_blocking`` copies to ``device`` asynchronous.

    Args:
        device: destination of the copy, which the caller makes.
        numbers: sequence of n numbers or truth values.
        dtype: dtype of the tensor.

    Returns:
        A new tensor of shape (n,), on the CPU.
    """
    import torch

    return torch.tensor(numbers, dtype=dtype, pin_memory=pins_memory(device))


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread's kernels for an accelerator run.

    Kernels of one stream run in order.

    Args:
        device: an accelerator; for a CPU, which has no streams, PyTorch raises RuntimeError or ValueError.
    """
    import torch

    return torch.accelerator.current_stream(device)


def synchronize(device: torch.device) -> None:
    """Block this thread until all kernels on all streams of a device have finished; does nothing on the CPU.

    Args:
        device: the device.
    """
    import torch

    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Restart the count of ``peak_memory`` at the bytes that a device's tensors take now.

    Does nothing on the CPU, and on ``mps``, whose allocator counts no peak.

    Args:
        device: the device.
    """
    import torch

    if is_accelerator(device) and device.type != "mps":
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the largest number of bytes that this process's tensors took on a device at one time.

    The time counted begins at the last call of ``reset_peak_memory``, or else at the start of the process. Memory that
    PyTorch's allocator has reserved without a tensor in it is not counted.

    Args:
        device: the device.

    Returns:
        Bytes; None on the CPU, and on ``mps``, whose allocator counts no peak.
    """
    import torch

    counted = is_accelerator(device) and device.type != "mps"
    return int(torch.accelerator.max_memory_allocated(device)) if counted else None


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which norms and counts are added up on a device: float64, or float32 where that is missing.

    Only an Apple GPU (``mps``) has no float64.

    Args:
        device: the device.
    """
    import torch

    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def check_float64(device: torch.device) -> None:
    """Check that a device can compute in float64, as ``--precision fp64`` asks.

    Args:
        device: the device.

    Raises:
        UsageError: the device has no tensors of float64; only an Apple GPU (``mps``).
    """
    if device.type in WITHOUT_FLOAT64:
        raise UsageError(
            f"{device.type.upper()} has no float64",
            where="--precision fp64",
            remedy="take --precision fp32, or --device cpu",
        )


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operators on a device use by default.

    Args:
        device: the CPU, or an accelerator, whose index counts (0 if it has none).
    """
    import torch

    if not is_accelerator(device):
        return torch.default_generator
    if device.type == "mps":
        from tutti.torch_compat import mps_generator

        return mps_generator()
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index or 0]
    return generator


@contextlib.contextmanager
def forked_generators(device: torch.device) -> Iterator[None]:
    """Return a context manager that restores the global random generators at its end.

    Random draws within its block therefore do not change later ones. The generators are the default generators of the
    CPU and of a device, and those of Python and NumPy.

    Args:
        device: device of the run; for the CPU, no accelerator's generator is restored.
    """
    import numpy as np
    import torch

    devices = (device.index or 0,) if is_accelerator(device) else ()
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# --- capabilities --------------------------------------------------------------------------------------------------


def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether PyTorch's optimizers accept ``fused=True`` for parameters on a device.

    Args:
        device: the device.
    """
    from tutti.torch_compat import fused_optimizer_devices

    return device.type in fused_optimizer_devices()


def multiplies_in_tf32(device: torch.device) -> bool:
    """Return whether matrix products of float32 on a device may round their factors to TensorFloat-32.

    PyTorch's default is no; ``torch.set_float32_matmul_precision("high")`` allows it.

    Args:
        device: the device; False for all types but ``cuda``.
    """
    import torch

    backends: Any = torch.backends
    chosen = backends.cuda.matmul.fp32_precision
    return device.type == "cuda" and (backends.fp32_precision if chosen == "none" else chosen) == "tf32"


def convolves_in_tf32(device: torch.device) -> bool:
    """Return whether convolutions of float32 on a device may round their factors to TensorFloat-32.

    PyTorch's default is yes; ``torch.backends.cudnn.allow_tf32 = False`` forbids it.

    Args:
        device: the device; False for all types but ``cuda``.
    """
    import torch

    backends: Any = torch.backends
    chosen = backends.cudnn.conv.fp32_precision
    return device.type == "cuda" and (backends.fp32_precision if chosen == "none" else chosen) == "tf32"


def describe_products(device: torch.device, precision: str) -> str | None:
    """Return a line for the run's header on whether float32 matrix products and convolutions are rounded to TF32.

    Args:
        device: the run's device.
        precision: the run's ``--precision``, such as ``fp32``.

    Returns:
        The line, such as ``matrix products in full float32, convolutions in TF32``; None for devices other than
        ``cuda``, and for precisions other than ``fp32``, whose matrix products are not computed in float32.
    """
    if device.type != "cuda" or precision != "fp32":
        return None
    products, convolutions = (
        "TF32" if rounded else "full float32" for rounded in (multiplies_in_tf32(device), convolves_in_tf32(device))
    )
    return f"matrix products in {products}, convolutions in {convolutions}"


def replays_graphs(device: torch.device) -> bool:
    """Return whether ``torch.compile`` can record kernels on a device as graphs that are launched as a whole.

    True for CUDA and ROCm (device type ``cuda``), in modes of ``torch.compile`` such as ``reduce-overhead``. On other
    devices the same mode compiles the same kernels and launches them one by one.

    Args:
        device: the device.
    """
    return device.type == "cuda"


def release_graph_results() -> None:
    """Mark the start of a step for the CUDA graphs of ``torch.compile`` (``cudagraph_mark_step_begin``).

    Call it once a step, before the first forward. Tensors that compiled functions returned in earlier steps, gradients
    among them, may be overwritten by the next compiled call; tensors that they return in this step stay valid until
    this function is called again, so that the micro-batches of the step can add up their gradients. Without recorded
    graphs the call has no effect.
    """
    import torch

    torch.compiler.cudagraph_mark_step_begin()


def reason_against_float8(device: torch.device) -> str | None:
    """Return why a device has no matrix products of 8-bit floats, as a text for messages; None if it has such products.

    They need CUDA devices of compute capability 8.9 (Ada, Hopper and later).

    Args:
        device: the device.
    """
    import torch

    if device.type != "cuda" or torch.version.hip is not None:
        name = "ROCm" if device.type == "cuda" else device.type.upper()
        return f"{name} has no matrix products of 8-bit floats with their scales that tutti uses"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"its compute capability is {major}.{minor}, and products of 8-bit floats need 8.9"
    return None


def use_deterministic_kernels(device: torch.device) -> None:
    """Let this process's operators on an accelerator take kernels that give the same bits for the same inputs.

    Does nothing on the CPU, whose kernels do so for a fixed number of threads. Sets PyTorch's deterministic algorithms,
    with which an operator that has no such kernel raises RuntimeError; on CUDA also ``CUBLAS_WORKSPACE_CONFIG`` where
    it is unset, and turns off cuDNN's choice of kernels by timing. These settings hold for the whole process and are
    not undone; call this function before the first matrix product on the device, after which
    ``CUBLAS_WORKSPACE_CONFIG`` may have no effect.

    Args:
        device: device of the run.
    """
    import torch

    if not is_accelerator(device):
        return
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


def autocast_types() -> tuple[str, ...]:
    """Return the device types whose autocast state a computation on this machine may depend on.

    Returns:
        ``cpu``, and the type of the machine's accelerator, such as ``cuda``, if it has a usable one.
    """
    here = accelerator_type()
    return ("cpu",) if here is None else ("cpu", here)


def profiled_activities(device: torch.device) -> list[Any]:
    """Return the activities that PyTorch's profiler has to record for a run on a device.

    Args:
        device: the device.

    Returns:
        Values of ``torch.profiler.ProfilerActivity``: the CPU's, and for an accelerator also that of its kernels.
    """
    from torch.profiler import ProfilerActivity

    if not is_accelerator(device):
        return [ProfilerActivity.CPU]
    return [ProfilerActivity.CPU, getattr(ProfilerActivity, _CAPTURED.get(device.type, "PrivateUse1"))]


def profiled_time(device: torch.device) -> str:
    """Return the name of the PyTorch profiler's column with the operators' own time on a device, to sort a table by.

    Time in operators that an operator calls is not in it.

    Args:
        device: the device.

    Returns:
        ``self_device_time_total`` for an accelerator, else ``self_cpu_time_total``.
    """
    return f"self_{'device' if is_accelerator(device) else 'cpu'}_time_total"


# --- facts for reports ---------------------------------------------------------------------------------------------


def device_names() -> list[str]:
    """Return the names of this machine's accelerators, such as ``NVIDIA H100 80GB HBM3``.

    Returns:
        One name for each device, in the order of device indices; empty without a usable accelerator.
    """
    import torch

    here = accelerator_type()
    if here is None:
        return []
    module = torch.get_device_module(here)
    name = getattr(module, "get_device_name", lambda index: here)
    return [str(name(index)) for index in range(torch.accelerator.device_count())]


def cpu_model() -> str:
    """Return the processor's name from ``/proc/cpuinfo``, else its name or type (``x86_64``) from ``platform``."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join(named[1].split()) if named else platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores in this process's CPU affinity; all cores where the system has no affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def toolkit_versions() -> dict[str, str | None]:
    """Return the version of CUDA with which torch is built, in the form in which a run's ``env.json`` records it.

    Returns:
        ``{"cuda": VERSION}``; the version is None if torch is built without CUDA.
    """
    import torch

    return {"cuda": torch.version.cuda}


def has_toolkit(name: str) -> bool:
    """Return whether the installed torch is built with a vendor's toolkit.

    Args:
        name: ``cuda`` or ``rocm``; any other name raises KeyError.
    """
    import torch

    return bool({"cuda": torch.version.cuda, "rocm": torch.version.hip}[name])


def collective_library_version() -> int:
    """Return the version of the vendor's collectives (NCCL, RCCL) as one number; 0 if torch is built without them.

    The number is major · 10,000 + minor · 100 + patch: 22705 for version 2.27.5.
    """
    import torch

    if not (has_toolkit("cuda") or has_toolkit("rocm")):
        return 0
    major, minor, patch = (int(part) for part in torch.cuda.nccl.version()[:3])
    return major * 10000 + minor * 100 + patch


def accelerator_facts() -> dict[str, Any]:
    """Return facts about this machine's accelerators as torch states them, for ``tutti doctor``. Loads the driver.

    Returns:
        Facts by name: ``toolkit`` and ``collectives`` (versions of CUDA and NCCL, or None), ``available`` (whether
        there is a usable accelerator), ``complaint`` (torch's first warning, one line, or None), ``gpus`` (a list with
        a dict for each device: ``name``, and ``memory_bytes`` in total, None on ``mps``) and ``backends``
        (``{"nccl": …}``, whether torch is built with NCCL).
    """
    import torch

    present = torch.distributed.is_available()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.accelerator.is_available()
    devices = []
    for index, name in enumerate(device_names() if available else ()):
        total = None
        if accelerator_type() != "mps":
            total = int(torch.accelerator.get_memory_info(index)[1])
        devices.append({"name": name, "memory_bytes": total})
    cuda = torch.version.cuda
    return {
        "toolkit": cuda,
        "collectives": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "available": available,
        "complaint": str(caught[0].message).splitlines()[0] if caught else None,
        "gpus": devices,
        "backends": {"nccl": present and torch.distributed.is_nccl_available()},
    }


def describe_toolkit(facts: Mapping[str, Any], driver: str | None) -> tuple[str, str, dict[str, Any]]:
    """Return name, text and values of the line of ``tutti doctor`` about CUDA, NCCL and the driver.

    Args:
        facts: result of ``accelerator_facts``.
        driver: version of the driver; None if there is none.

    Returns:
        The line's name ``cuda``, its text, such as ``CUDA 12.8 · NCCL 2.27.5 · driver not found``, and the versions
        ``{"cuda": …, "nccl": …, "driver": …}``, each None if missing.
    """
    built = f"CUDA {facts['toolkit']} · NCCL {facts['collectives']}" if facts["toolkit"] else ""
    text = f"{built or 'torch is built without CUDA'} · driver {driver or 'not found'}"
    return "cuda", text, {"cuda": facts["toolkit"], "nccl": facts["collectives"], "driver": driver}
