"""Named parameters and buffers of modules, and temporary replacement of their tensors without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from tutti.torch_compat import module_buffers, non_persistent_buffers


@dataclass(frozen=True)
class BufferRef:
    """Reference to one buffer of a module, by which its tensor can be read and replaced.

    Attributes:
        name: name of the buffer in the whole model.
        owner: the module that has it.
        key: name of the buffer in that module.
    """

    name: str
    owner: nn.Module
    key: str

    def get(self) -> Tensor:
        """Return the tensor, not a copy, that a module now has as the buffer to which this object refers.

        Raises:
            KeyError: the buffer is None.
        """
        tensor = module_buffers(self.owner)[self.key]
        if tensor is None:
            raise KeyError(self.name)
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Make ``tensor`` itself, not a copy, the module's buffer to which this object refers.

        Args:
            tensor: the new buffer; of any shape and dtype.
        """
        module_buffers(self.owner)[self.key] = tensor


def parameters(parts: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return a list of (name, parameter) pairs of all modules in ``parts``, in the model's order.

    Args:
        parts: modules whose parameter names are those of the whole model.

    Returns:
        The pairs; a tied parameter occurs once, under the first of its names.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def to_float64(model: nn.Module) -> nn.Module:
    """Convert all floating-point parameters and buffers of a model to float64 in place, and return the model.

    ``Module.double`` does the same, but fails on fake tensors: it swaps the contents of two tensors, which PyTorch
    refuses for tensors with weak references, as a ``FakeTensorMode`` keeps them.

    Args:
        model: the model, on real or fake tensors.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
    return model


def registered_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a (name, submodule) pair for each registration directly in a module, in order.

    Unlike ``named_children``, a submodule with two names is returned twice: ``nn.Sequential(a, act, b, act)`` calls
    ``act`` under both.

    Args:
        module: the module; its children's own children are left out.
    """
    entries = module.named_modules(remove_duplicate=False)
    return [(name, child) for name, child in entries if name and "." not in name]


def buffers(parts: Sequence[nn.Module], persistent: bool = True) -> list[BufferRef]:
    """Return a reference to each buffer of all modules in ``parts``, in the model's order.

    Args:
        parts: modules whose buffer names are those of the whole model.
        persistent: True for the buffers in the ``state_dict`` only, False for all.

    Returns:
        References with the buffer's ``name`` in the whole model; ``get`` returns the present tensor, ``put`` sets
        another.
    """
    slots = []
    for part in parts:
        for prefix, module in part.named_modules():
            for key, tensor in module_buffers(module).items():
                if tensor is not None and not (persistent and key in non_persistent_buffers(module)):
                    slots.append(BufferRef(f"{prefix}.{key}" if prefix else key, module, key))
    return slots


def other_names(parts: Sequence[nn.Module]) -> dict[str, tuple[str, ...]]:
    """Return further ``state_dict`` names of tied parameters, and of buffers in modules that occur more than once.

    Args:
        parts: modules whose names are those of the whole model.

    Returns:
        A dict from the first name, in the model's order, of each such tensor to its other names; tensors with one name
        are left out.
    """
    names: dict[object, list[str]] = {}
    for part in parts:
        for name, parameter in part.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for prefix, module in part.named_modules(remove_duplicate=False):
            for key, tensor in module_buffers(module).items():
                if tensor is not None and key not in non_persistent_buffers(module):
                    names.setdefault((id(module), key), []).append(f"{prefix}.{key}" if prefix else key)
    return {first: tuple(others) for first, *others in names.values() if others}


def describe_tensors(parts: Sequence[nn.Module]) -> list[str]:
    """Return name, dtype, shape and trainability of each parameter and persistent buffer as text, a line for each.

    Ranks compare the lines to find out whether they have built the same model.

    Args:
        parts: modules whose names are those of the whole model.

    Returns:
        Lines such as ``parameter 0.weight float32[4, 3], frozen``: parameters, then persistent buffers, in the model's
        order.
    """
    lines = [f"parameter {_line(name, p)}{'' if p.requires_grad else ', frozen'}" for name, p in parameters(parts)]
    return lines + [f"buffer {_line(slot.name, slot.get())}" for slot in buffers(parts)]


def _line(name: str, tensor: Tensor) -> str:
    return f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@contextmanager
def swapped(parts: Sequence[nn.Module], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Return a context in which parameters and buffers hold other tensors; the previous ones come back on exit.

    Args:
        parts: modules whose names are those of the whole model.
        values: tensors by name of a parameter (of a tied one, the first name) or persistent buffer, used without a
            copy. Other parameters and buffers stay; names that the modules lack are ignored.
    """
    own: list[tuple[nn.Parameter, Tensor]] = []
    held: list[tuple[BufferRef, Tensor]] = []
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
def copied_buffers(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which modules have copies of their buffers; on exit their former buffers come back.

    Buffers that are registered within the context are removed on exit.

    Args:
        parts: the modules, whose submodules are included.
    """
    tables = [module_buffers(module) for part in parts for module in part.modules()]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({key: None if tensor is None else tensor.clone() for key, tensor in table.items()})
        yield
    finally:
        for table, former in zip(tables, before, strict=True):
            table.clear()
            table.update(former)


@contextmanager
def training_mode(parts: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Return a context in which modules are in training or evaluation mode; every submodule's mode comes back on exit.

    Args:
        parts: the modules.
        training: True for training mode, False for evaluation.
    """
    before = [(module, module.training) for part in parts for module in part.modules()]
    try:
        for part in parts:
            part.train(training)
        yield
    finally:
        for module, was in before:
            module.training = was
