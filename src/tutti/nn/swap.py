"""Named tensors of a module, and putting others in their place for a while, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """Where one buffer sits: its name in the whole model, the module that owns it, and the name there."""

    name: str
    owner: nn.Module
    key: str

    def get(self) -> Tensor:
        """The tensor that is there now."""
        tensor = self.owner._buffers[self.key]
        if tensor is None:
            raise KeyError(self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Put ``tensor`` there; nothing is copied."""
        self.owner._buffers[self.key] = tensor


def parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Named parameters of all parts, each shared one once, in the model's order."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def buffers(parts: Sequence[nn.Module], persistent: bool = True) -> list[Slot]:
    """Slots of all persistent buffers, or of all buffers whatever, in the model's order."""
    slots = []
    for part in parts:
        for prefix, module in part.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and not (persistent and key in module._non_persistent_buffers_set):
                    slots.append(Slot(f"{prefix}.{key}" if prefix else key, module, key))
    return slots


def other_names(parts: Sequence[nn.Module]) -> dict[str, tuple[str, ...]]:
    """Under which other names a plain model's state has a tied parameter, or a buffer of a module that it has twice.

    Keys are the names of ``parameters`` and ``buffers``.
    """
    names: dict[object, list[str]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for prefix, module in part.named_modules(remove_duplicate=False):
            for key, tensor in module._buffers.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    names.setdefault((id(module), key), []).append(f"{prefix}.{key}" if prefix else key)
    return {first: tuple(others) for first, *others in names.values() if others}


def describe(parts: Sequence[nn.Module]) -> list[str]:
    """Name, dtype, shape and trainability of every parameter and buffer, a line each, in the model's order."""
    lines = [f"parameter {_line(name, p)}{'' if p.requires_grad else ', frozen'}" for name, p in parameters(parts)]
    return lines + [f"buffer {_line(slot.name, slot.get())}" for slot in buffers(parts)]


def _line(name: str, tensor: Tensor) -> str:
    return f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@contextmanager
def swapped(parts: Sequence[nn.Module], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block the parameters and buffers named in ``values`` hold those tensors; afterwards their own."""
    own: list[tuple[nn.Parameter, Tensor]] = []
    held: list[tuple[Slot, Tensor]] = []
    try:
        for name, parameter in parameters(parts):
            if name in values and values[name] is not parameter:
                own.append((parameter, parameter.data))
                parameter.data = values[name]
        for slot in buffers(parts):
            if slot.name in values:
                held.append((slot, slot.get()))
                slot.put(values[slot.name])
        yield
    finally:
        for parameter, data in own:
            parameter.data = data
        for slot, tensor in held:
            slot.put(tensor)


@contextmanager
def mode(parts: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Within the block all parts train, or do not; afterwards every submodule is as it was."""
    before = [(module, module.training) for part in parts for module in part.modules()]
    try:
        for part in parts:
            part.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was
