"""Pass each call of a block in a model's forward to the forward's recording, or to the run of a pipeline stage.

A block is a module that one pipeline stage calls as a unit. For a block that is not computed, the dispatch makes fake
tensors of the shapes that the block would return: fake tensors have shapes and no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tutti.device import forked_generators
from tutti.errors import UsageError
from tutti.nn.absent_tensor import is_absent
from tutti.nn.untraced import has_hooks
from tutti.nn.written_tensors import share_memory
from tutti.parallel.pipeline.made_values import PLAIN, made_numbers
from tutti.torch_compat import (
    FakeTensorMode,
    is_fake,
    module_parameters,
    replace_call,
    tensor_version,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    uncompiled_call,
    without_dispatch_modes,
)


class BlockOutput(NamedTuple):
    """Address of a tensor that a block, a module that one pipeline stage calls as a unit, returns in a forward.

    Attributes:
        call: index, from 0, of the block's call among all calls of blocks in the forward.
        tensor: index, from 0, of the tensor among the tensors that this call returns.
    """

    call: int
    tensor: int


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, a module that one pipeline stage calls as a unit, in a model's forward.

    Attributes:
        name: the block's name in the whole model.
        reads: tensors returned by earlier calls from which this call's arguments are computed.
        tensors: number of tensors that the call returns.
        parameters: names of parameters that the code outside of blocks reads for this call's arguments.
    """

    name: str
    reads: frozenset[BlockOutput]
    tensors: int
    parameters: frozenset[str] = frozenset()


class ReadsValuesError(Exception):
    """Raised where a block (module called as a unit) cannot run on fake tensors, because it reads tensors' values.

    Args:
        name: name of the block in the whole model.
        error: error of the block on fake tensors.

    Attributes:
        name, error: as given.
    """

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(str(error))
        self.name, self.error = name, error


class StageEnd(BaseException):
    """Raised to leave the model's forward behind the last block of a pipeline stage, with the activations to send.

    A ``BaseException``, because it is no error that code of the model should handle.

    Args:
        values: the activations that the stage sends.

    Attributes:
        values: as given.
    """

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        super().__init__("no error: this stage of the pipeline is done, and the forward goes on on the next stage")
        self.values = values


class _FakesByMasks(FakeTensorMode):
    """Mode of fake tensors in which an index by a mask with values gives as many elements as the mask names.

    Every stage knows a mask that the code outside of blocks computes from the model's inputs, such as the places of
    images among words.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and any(map(_is_mask, args[1])):
            indices = [each.nonzero().unbind(1) if _is_mask(each) else (each,) for each in args[1]]
            args = (args[0], [index for each in indices for index in each], *args[2:])
        return super().__torch_dispatch__(func, types, args, kwargs or {})


class ForwardRun(Protocol):
    """One run of a model's forward that decides the result of each call of a block (module called as a unit); protocol.

    A run either records the calls on fake tensors, or computes the blocks of one pipeline stage. ``BlockDispatch.run``
    calls its methods.

    Attributes:
        inside: whether a block is running; calls of modules within it are not handed to the run.
    """

    inside: bool

    def watching(self) -> AbstractContextManager[None]:
        """Return the context in which ``BlockDispatch.run`` calls the model's forward, such as a function mode."""
        ...

    def block(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result of a call of a block: the block's own, or fake tensors of equal shapes in its place.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.
        """
        ...

    def end(self, output: Any) -> Any:
        """Return the result of ``BlockDispatch.run``, once the model's forward has returned.

        Args:
            output: the return value of the forward.
        """
        ...


class BlockDispatch:
    """Passes every call of a block (module called as a unit) to the forward's run that is under way.

    Args:
        plain: the whole model.
        opened: names of the modules whose own Python code every pipeline stage runs, and whose submodules are the
            blocks.
        device: the device of fake tensors and of made-up numbers.
        numbered: blocks that run on made-up numbers (``made_numbers``) in place of fake tensors, by name, each with its
            error on these.

    Attributes:
        plain: the whole model.
        fakes: the mode of the fake tensors.
        active: the run under way; None between forwards.
        blocks: the blocks by name.
        opened_names: names of the opened modules.
        opened: the opened modules.

    Raises:
        UsageError: an opened module has hooks.
    """

    def __init__(
        self, plain: nn.Module, opened: frozenset[str], device: torch.device, numbered: Mapping[str, Exception]
    ) -> None:
        self.plain, self.fakes = plain, _FakesByMasks(allow_non_fake_inputs=True)
        self.active: ForwardRun | None = None
        self.blocks = {
            name: module
            for name, module in plain.named_modules(remove_duplicate=True)
            if name not in opened
            and name.rpartition(".")[0] in opened | _containers(plain, opened)
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        }
        self.opened_names, self.opened = opened, [plain.get_submodule(name) for name in opened]
        if any(has_hooks(module) for module in self.opened):
            raise cannot_be_cut(plain, "it has hooks of its own")
        with self.fakes:
            self._values = {
                name: {
                    key: torch.empty_like(tensor, requires_grad=False, device=device)
                    for key, tensor in (*module.named_parameters(), *module.named_buffers())
                }
                for name, module in self.blocks.items()
            }
        slots: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in plain.modules():
            for key, parameter in module_parameters(module).items():
                slots.setdefault(id(parameter), []).append((module, key))
        self._slots = {name: slots[id(parameter)] for name, parameter in plain.named_parameters()}
        self._forms: dict[Any, tuple[Any, list[Any], list[set[int]]]] = {}
        self._numbered, self._device = numbered, device
        # Blocks that fail on made integers.
        self._valued: set[str] = set()
        self._first = {inner: dict(vars(inner)) for block in self.blocks.values() for inner in block.modules()}

    def run(self, run: ForwardRun, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the whole model's forward, with each call of a block (module called as a unit) handed to ``run``.

        Args:
            run: records the calls, or computes the blocks of one pipeline stage.
            args: positional arguments of the model's call.
            kwargs: keyword arguments of the model's call.

        Returns:
            The model's output; on a stage that is not the last one, the tuple of the activations to send.
        """
        before = {name: replace_call(block, partial(self._call, name, block)) for name, block in self.blocks.items()}
        self.active = run
        try:
            with run.watching():
                return run.end(uncompiled_call(self.plain)(*args, **kwargs))
        except StageEnd as end:
            return end.values
        finally:
            self.active = None
            for name, call in before.items():
                replace_call(self.blocks[name], call)

    def _call(self, name: str, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = self.active
        if run is None or run.inside:
            return uncompiled_call(block)(*args, **kwargs)
        run.inside = True
        try:
            return run.block(name, block, args, kwargs)
        finally:
            run.inside = False

    def shape(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result that a block (module called as a unit) would return for these arguments, with fake tensors.

        The block runs on fake tensors, which have shapes and no values. The form of the result is cached for later
        arguments of equal shapes and dtypes.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Raises:
            ReadsValuesError: the block is not ``numbered`` (see the constructor), and fails on fake tensors.
            UsageError: the block writes its arguments in place; or it is ``numbered``, and the shapes of its result
                depend on values, or the result holds other objects than tensors and plain values.
        """
        return self.shape_and_memory(name, block, args, kwargs)[0]

    def shape_and_memory(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[set[int]]]:
        """Return the result of ``shape``, and for each tensor in it the indices of tensors that share its memory.

        The indices count the leaves of ``(args, kwargs)``, flattened as a pytree, and after them the result's own
        tensors.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Raises:
            ReadsValuesError: the block is not ``numbered`` (see the constructor), and fails on fake tensors.
            UsageError: the block writes its arguments in place; or it is ``numbered``, and the shapes of its result
                depend on values, or the result holds other objects than tensors and plain values.
        """
        leaves, spec = tree_flatten((args, kwargs))
        run = self._on_numbers if name in self._numbered else self._on_fakes
        key = self._key(name, block, leaves, spec)
        simple = name in self._numbered or all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves)
        if not simple or key not in self._forms:
            entering, result = run(name, block, leaves, spec)
            found, returned = tree_flatten(result)
            tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
            memory = [leaves_sharing_memory(leaf, [*entering, *tensors[:at]]) for at, leaf in enumerate(tensors)]
            if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in found):
                if name in self._numbered:
                    raise cannot_be_cut(self.plain, f"its block {name} reads values of tensors and returns an object")
                return result, memory
            key = self._key(name, block, leaves, spec)
            self._forms[key] = returned, found, memory
        returned, found, memory = self._forms[key]
        with self.fakes, torch.no_grad():
            made = [torch.empty_like(f) if isinstance(f, Tensor) else f for f in found]
        return tree_unflatten(made, returned), memory

    def _key(self, name: str, block: nn.Module, leaves: Sequence[Any], spec: Any) -> Any:
        """Return a key that is equal for calls of a block whose results have equal forms."""
        form = _value if name in self._valued else _type if name in self._numbered else _form
        return name, block.training, torch.is_grad_enabled(), str(spec), *map(form, leaves)

    def _on_fakes(self, name: str, block: nn.Module, leaves: Sequence[Any], spec: Any) -> tuple[list[Any], Any]:
        """Return fake arguments, and what a block returns for them. Raises ReadsValuesError."""
        try:
            with self._attributes(block), self.fakes, torch.no_grad():
                entering = [torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return entering, self._returned(name, block, entering, spec, self._values[name])
        except UsageError:
            raise
        except Exception as error:
            raise ReadsValuesError(name, error) from error

    def _on_numbers(self, name: str, block: nn.Module, leaves: Sequence[Any], spec: Any) -> tuple[list[Any], Any]:
        """Return made arguments, and what a block that reads values, such as a mixture of experts, returns for them.

        The block must return tensors of the same shapes for other numbers. Integers that every stage knows, such as the
        lengths of images among the model's inputs, are given as they are to a block that fails on made ones.
        """
        made = []
        with self._attributes(block), without_dispatch_modes(), forked_generators(self._device), torch.no_grad():
            for low in (0.0, 0.5):
                made_like = partial(
                    made_numbers, low=low, device=self._device, generator=torch.Generator().manual_seed(0)
                )
                try:
                    values = {key: made_like(value) for key, value in self._values[name].items()}
                    entering = [
                        leaf.clone() if name in self._valued and _is_known(leaf) else made_like(leaf) for leaf in leaves
                    ]
                    made.append((entering, self._returned(name, block, entering, spec, values)))
                except UsageError:
                    raise
                except Exception:
                    # The block fails on any numbers: the error on fake tensors says why it has got them.
                    if name in self._valued or not any(map(_is_known, leaves)):
                        raise self._numbered[name] from None
                    break
        if len(made) < 2:
            self._valued.add(name)
            return self._on_numbers(name, block, leaves, spec)
        one, other = ([_type(leaf) for leaf in tree_leaves(result)] for _, result in made)
        if one != other:
            raise cannot_be_cut(self.plain, f"its block {name} returns tensors whose shapes depend on values")
        return made[0]

    def _returned(
        self, name: str, block: nn.Module, entering: Sequence[Any], spec: Any, values: Mapping[str, Tensor]
    ) -> Any:
        """Return what a block returns for arguments that it must not write, with other parameters and buffers."""
        versions = [tensor_version(leaf) for leaf in entering if isinstance(leaf, Tensor)]
        args, kwargs = tree_unflatten(entering, spec)
        result = functional_call(block, dict(values), args, kwargs)
        if versions != [tensor_version(leaf) for leaf in entering if isinstance(leaf, Tensor)]:
            raise cannot_be_cut(self.plain, f"its block {name} writes its arguments in place")
        return result

    def foreseen(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> list[Any] | None:
        """Return the shapes and dtypes that other stages assume for the result of a block that reads values.

        Other stages run such a block on made-up numbers to find them, so that ``check_shapes`` must compare them with
        the real result. To be called before the block, which may change objects among its arguments, such as a cache.

        Args:
            name: name of the block in the whole model.
            block: the block.
            args, kwargs: positional and keyword arguments of the call.

        Returns:
            One key of shape and dtype for each leaf of the result, for ``check_shapes``. None for a block that runs on
            fake tensors, whose shapes are certain.
        """
        if name not in self._numbered:
            return None
        return [_type(leaf) for leaf in tree_leaves(self.shape(name, block, args, kwargs))]

    def check_shapes(self, name: str, foreseen: list[Any] | None, result: Any) -> None:
        """Raise UsageError if a block's result has other shapes or dtypes than all other pipeline stages assume.

        Args:
            name: name of the block in the whole model.
            foreseen: the result of the method ``foreseen`` before the call; None checks nothing.
            result: the block's result.

        Raises:
            UsageError: the shapes or dtypes differ, as they depend on values of tensors.
        """
        if foreseen is not None and [_type(leaf) for leaf in tree_leaves(result)] != foreseen:
            raise cannot_be_cut(self.plain, f"its block {name} returns tensors whose shapes depend on values")

    @contextmanager
    def with_parameters(self, given: Mapping[str, nn.Parameter | None]) -> Iterator[None]:
        """Return a context in which the whole model has other parameters, and fake tensors in place of missing ones.

        Every pipeline stage runs the code outside of blocks (modules called as units), which may also read parameters
        for other stages' blocks.

        Args:
            given: the parameters by their first name in the whole model; None for one that the stage does not have.
        """
        before = []
        try:
            for name, parameter in given.items():
                for module, key in self._slots[name]:
                    table = module_parameters(module)
                    known = cast(nn.Parameter, table[key])
                    if parameter is not known:
                        before.append((table, key, known))
                        table[key] = self._fake(known) if parameter is None else parameter
            yield
        finally:
            for table, key, known in before:
                table[key] = known

    def _fake(self, like: nn.Parameter) -> nn.Parameter:
        with self.fakes:
            return cast(nn.Parameter, torch.empty(like.shape, dtype=like.dtype, device=self._device))

    @contextmanager
    def _attributes(self, block: nn.Module) -> Iterator[None]:
        """Within the block a module has the attributes of before the cut in place of placeholders."""
        away = [
            (inner, name, value)
            for inner in block.modules()
            for name, value in vars(inner).items()
            if isinstance(value, Tensor) and is_absent(value)
        ]
        try:
            for inner, name, _ in away:
                vars(inner)[name] = self._first[inner].get(name)
            yield
        finally:
            for inner, name, value in away:
                vars(inner)[name] = value


def leaves_sharing_memory(tensor: Tensor, leaves: Sequence[Any]) -> set[int]:
    """Return the indices in ``leaves`` of the tensors that share memory with ``tensor``.

    Args:
        tensor: the tensor.
        leaves: leaves of a pytree, such as arguments of a call; other objects than tensors are skipped.
    """
    return {index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and share_memory([tensor], [leaf])}


def _containers(plain: nn.Module, opened: frozenset[str]) -> set[str]:
    """Return the names of lists and dictionaries of modules, however deep, in opened modules."""
    found: set[str] = set()
    for name, module in plain.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and name.rpartition(".")[0] in opened | found:
            found.add(name)
    return found


def _form(leaf: Any) -> Any:
    """Return a key that is equal for tensors of equal layout and for equal plain values; other objects by identity."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.stride() if leaf.layout == torch.strided else None
    return leaf if isinstance(leaf, PLAIN) else id(leaf)


def _type(leaf: Any) -> Any:
    """Return a key that is equal for tensors of equal shapes, for equal plain values, and for objects of one class."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, PLAIN) else type(leaf)


def _is_known(leaf: Any) -> bool:
    """Return whether an argument has integers that every stage computes from the model's inputs."""
    return isinstance(leaf, Tensor) and not is_fake(leaf) and not (leaf.is_floating_point() or leaf.is_complex())


def _is_mask(index: Any) -> bool:
    """Return whether an index of a tensor is a mask with values."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and not is_fake(index)


def _value(leaf: Any) -> Any:
    """Return the key of ``_type``, with the values of integers that every stage knows."""
    return (_type(leaf), tuple(leaf.flatten().tolist())) if _is_known(leaf) else _type(leaf)


def cannot_be_cut(plain: nn.Module, why: str) -> UsageError:
    """Return the error of a model that cannot be cut into pipeline stages.

    Args:
        plain: the whole model, whose class the message names.
        why: the reason.
    """
    return UsageError(
        f"a {type(plain).__name__} cannot be cut into stages",
        why=why,
        remedy="make the model an nn.Sequential of its blocks, or move what its forward decides, draws or keeps into"
        " modules; or take strategy='mirrored'",
    )
