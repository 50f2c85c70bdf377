"""The Python side of the simulated accelerator: names the device type ``simgpu`` and gives it ``torch.simgpu``.

The builder copies this file beside the compiled library. ``install`` is the entry point that ``import torch`` calls in
every process that has that folder on its path, and that a test calls in a process that has loaded torch already.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

NAME, COLLECTIVES = "simgpu", "simccl"
_PRIVATE_USE_1 = 20  # its number in c10::DeviceType


def install() -> None:
    """Register the device with PyTorch; a second call does nothing."""
    if hasattr(torch, NAME):
        return
    spec = importlib.util.spec_from_file_location("_simgpu", Path(__file__).with_name("_simgpu.so"))
    assert spec is not None and spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(library)
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_collectives(library)


def _register_collectives(library: Any) -> None:
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend(
            COLLECTIVES,
            lambda store, rank, size, timeout: library.collectives(dist.ProcessGroupGloo(store, rank, size, timeout)),
            devices=[NAME],
        )


def _device_module(library: Any) -> Any:
    """Return ``torch.simgpu``, with the functions that PyTorch and libraries expect of a device's module."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    generators = tuple(library.default_generator(index) for index in range(library.device_count()))

    def index(device: Any = None) -> int:
        if device is None:
            return int(library.current_device())
        return device if isinstance(device, int) else torch.device(device).index or 0

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    module.counts = library.counts
    module.device_count, module.current_device = library.device_count, library.current_device
    module.set_device = lambda device: library.set_device(index(device))
    module.device = lambda device: torch.accelerator.device_index(index(device))
    module.is_available = lambda: True
    # As on CUDA, the first kernel or copy initialises the driver.
    module.is_initialized = lambda: library.counts()["kernels"] > 0
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.get_device_name = lambda device=None: "simulated accelerator"
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))

    module.default_generators = generators
    module.manual_seed = lambda seed: generators[index()].manual_seed(int(seed))
    module.manual_seed_all = manual_seed_all
    module.initial_seed = lambda: generators[index()].initial_seed()
    module.get_rng_state = lambda device=None: generators[index(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index(device)].set_state(state)

    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda *_: True

    module.Stream = lambda device=None, priority=0, **_: torch.Stream(
        torch.device(NAME, index(device)), priority=priority
    )
    module.Event = lambda *_, **__: torch.Event(NAME)
    module.stream = lambda stream: nullcontext() if stream is None else stream
    module.set_stream = torch.accelerator.set_stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index(device))
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=index(device), device_type=_PRIVATE_USE_1
    )

    module.mem_get_info = lambda device=None: torch.accelerator.get_memory_info(index(device))
    for name in (
        *("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        *("reset_peak_memory_stats", "empty_cache"),
    ):
        setattr(module, name, getattr(torch.accelerator, name))
    return module
