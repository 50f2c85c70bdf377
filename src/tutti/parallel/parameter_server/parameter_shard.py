"""The parameter shard of one server: its part of the parameters, and an ordinary optimizer over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.checkpoint.checkpoint_reader import GivenState
from tutti.checkpoint.state_shards import load_optimizer, optimizer_tensors
from tutti.optim.factory import is_known
from tutti.optim.layerwise import LayerWise
from tutti.optim.learning_rate import multiply_learning_rates
from tutti.optim.optimizer_copy import NestedState
from tutti.optim.several import acting, members_of
from tutti.parallel.parameter_server import hyperparameters
from tutti.parallel.parameter_server.flat_views import in_order, shaped, strides
from tutti.parallel.parameter_server.server_partition import ServerPlan, ServerSlice
from tutti.types.optimizer_protocols import NamedParameters, OptimizerFactory

Vectors = list[Tensor]
"""One flat tensor per dtype section: an element for each element of the server's shard."""


class ParameterShard:
    """The part of the parameters that one parameter server has, and an optimizer over it, in the server's process.

    The constructor points ``.data`` of the model's parameters, which the fork has copied into this process, at this
    server's slices, views of ``values``.

    Args:
        plan: partition of the parameters over the servers.
        server: index of this server.
        named: (name, parameter) pairs of the model's trained parameters, in the order of ``plan.sizes``.
        initial: (plan.size,) uint8, the bytes of the parameters' initial values, laid out as in ``plan``; copied.
        make_optimizer: builds the optimizer over the slices.
        handle: optimizer over all of ``named``, into which the hyperparameters sent by the ranks are written.
        keys: for each hyperparameter that the ranks send, in this order, the index of the parameter group, the name,
            and the index in a tuple such as ``betas`` (or None).

    Attributes:
        keys: the constructor's ``keys``.
        values: current values of the slices, one flat tensor for each dtype.
        slices: descriptions of the parameter slices of this server.
        here: (name, parameter) pairs of the parameters of which this server has a slice, in the order of ``slices``.
        optimizer: optimizer over the parameters in ``here``; None where none of them is trained.
    """

    def __init__(
        self,
        plan: ServerPlan,
        server: int,
        named: NamedParameters,
        initial: Tensor,
        make_optimizer: OptimizerFactory,
        handle: Optimizer,
        keys: Sequence[hyperparameters.Key],
    ) -> None:
        self._handle, self.keys = handle, keys
        self.values: Vectors = [
            initial[region.start : region.stop].view(_dtype(section.dtype)).clone()
            for region, section in zip(plan.regions(server), plan.sections, strict=True)
        ]
        self.slices = list(plan.slices(server))
        self._places = [_place(piece, named[piece.tensor][1]) for piece in self.slices]
        self.here = [(named[p.tensor][0], named[p.tensor][1]) for p in self.slices]
        for (_, parameter), view in zip(self.here, self.views(self.values), strict=True):
            parameter.grad = None
            parameter.data = view
        self.optimizer = make_optimizer(self.here)
        # Another optimizer may keep a ``.grad``, whose memory the next step overwrites.
        self._copies = not all(is_known(type(member)) for member in members_of(self.optimizer))
        self._groups = _pairs(handle, self.optimizer)

    def views(self, vectors: Vectors) -> list[Tensor]:
        """Cut flat buffers into one view for each slice of a parameter that this parameter server has.

        Args:
            vectors: one flat tensor for each dtype, laid out as this server's parameters, such as a received gradient.

        Returns:
            Views in the order of the attribute ``slices``, which describes the slices: flat (n,) for a slice of a
            parameter, in the parameter's shape for a whole one.
        """
        return [vectors[section][part].as_strided(shape, steps) for section, part, shape, steps in self._places]

    def update(
        self,
        gradients: Sequence[Tensor | None],
        settings: Sequence[float],
        grad_norm: float,
        rate: float = 1.0,
        optimizer: int | None = None,
    ) -> None:
        """Step the optimizer of this server's parameter shard with the given gradients; parameters change in place.

        Not collective. Does nothing on a server without an optimizer (no parameter of its shard is trained).

        Args:
            gradients: for each parameter slice of this server its gradient, in the shapes of ``views``; None for a
                parameter without a gradient. The tensor itself becomes the parameter's ``.grad``, or a copy of it if
                the optimizer's class is neither PyTorch's nor tutti's.
            settings: values of the optimizer's hyperparameters as a rank has sent them, in the order of the
                constructor's ``keys``.
            grad_norm: norm of the whole gradient over all servers, for a layer-wise optimizer that clips by it (LAMB).
            rate: factor on the learning rates in this step alone.
            optimizer: index of the only one to step of several optimizers; None for all.
        """
        if self.optimizer is None:
            return
        self._set(settings)
        for (_, parameter), gradient in zip(self.here, gradients, strict=True):
            parameter.grad = gradient.clone() if self._copies and gradient is not None else gradient
        for member in members_of(self.optimizer):
            if isinstance(member, LayerWise):
                member.grad_norm = grad_norm
        multiply_learning_rates([group for pair in self._groups for group in pair], rate)
        with acting(self.optimizer, optimizer):
            self.optimizer.step()

    def _set(self, settings: Sequence[float]) -> None:
        hyperparameters.put(self._handle.param_groups, self.keys, settings)
        for theirs, own in self._groups:
            for key in {name for number, name, _ in self.keys if self._handle.param_groups[number] is theirs}:
                own[key] = theirs[key]

    def save(self) -> bytes:
        """Return this parameter server's parameter slices and optimizer state as the bytes of a safetensors file.

        The file's tensors are named ``value/{parameter}`` and ``optim/{parameter}/{key}``, with the parameter's name in
        the model and the optimizer's own state key (such as ``exp_avg``). A slice of a parameter is a flat tensor (n,);
        a parameter that this server has whole is in its own shape.
        """
        tensors = {f"value/{name}": view for (name, _), view in zip(self.here, self.views(self.values), strict=True)}
        if self.optimizer is not None:
            tensors |= {f"optim/{key}": value for key, value in optimizer_tensors(self.optimizer, self.here).items()}
        return to_bytes({name: tensor.detach().contiguous() for name, tensor in tensors.items()})

    def load(self, raw: bytes) -> None:
        """Restore this parameter server's slices and optimizer state, replacing all state of the optimizer.

        Args:
            raw: the bytes of a safetensors file that ``save`` of the same server, or ``cut_for_server``, has returned.
                Loading the file runs no code from it.

        Raises:
            KeyError: the file lacks one of this server's slices.
            RuntimeError: a slice has another size than this server's.
        """
        tensors = from_bytes(raw)
        for (name, parameter), view in zip(self.here, self.views(self.values), strict=True):
            view.copy_(tensors[f"value/{name}"].view(view.shape))
            parameter.data = view
        if self.optimizer is not None:
            NestedState(self.optimizer).clear()
            optim = {name.removeprefix("optim/"): t for name, t in tensors.items() if name.startswith("optim/")}
            load_optimizer(self.optimizer, self.here, GivenState({}, {}, optim), "optim")


def cut_for_server(
    plan: ServerPlan, server: int, named: NamedParameters, values: dict[str, Tensor], states: dict[str, Tensor]
) -> bytes:
    """Cut one parameter server's slices of parameters and optimizer state out of the whole tensors of a checkpoint.

    Args:
        plan: partition of the parameters over the servers.
        server: index of the server.
        named: (name, parameter) of the model's trained parameters, in the order of ``plan.sizes``.
        values: whole parameters by name.
        states: whole optimizer state by ``{parameter}/{key}``; tensors of another number of elements than the parameter
            (such as a step count) are copied whole.

    Returns:
        The bytes of a safetensors file with tensors ``value/{parameter}`` and ``optim/{parameter}/{key}``, which
        ``ParameterShard.load`` takes.
    """
    tensors = {}
    for piece in plan.slices(server):
        name, parameter = named[piece.tensor]
        whole = piece.end - piece.begin == parameter.numel()
        entries = {f"value/{name}": values[name]}
        entries |= {f"optim/{key}": value for key, value in states.items() if key.rpartition("/")[0] == name}
        for key, tensor in entries.items():
            if not whole and tensor.numel() == parameter.numel() > 1:
                tensor = in_order(tensor.view(parameter.shape), parameter)[piece.begin : piece.end]
            tensors[key] = tensor.contiguous().clone()
    return to_bytes(tensors)


def join_server_state(plan: ServerPlan, named: NamedParameters, parts: Sequence[bytes]) -> dict[str, Tensor]:
    """Assemble the optimizer state of the whole model from the parts that all parameter servers have saved.

    The parameters' values, which the parts hold too, are left out.

    Args:
        plan: partition of the parameters over the servers.
        named: (name, parameter) of the model's trained parameters, in the order of ``plan.sizes``.
        parts: the bytes that ``ParameterShard.save`` has returned on each server, in the servers' order.

    Returns:
        A dict with keys ``"{parameter}/{key}"``, such as ``"head.weight/exp_avg"``: state of the parameter's size in
        the parameter's shape, other tensors (such as a step count) as one of the servers has saved them.
    """
    loaded = [from_bytes(raw) for raw in parts]
    joined: dict[str, Tensor] = {}
    for server, tensors in enumerate(loaded):
        for piece in plan.slices(server):
            name, parameter = named[piece.tensor]
            prefix, length = f"optim/{name}/", piece.end - piece.begin
            for key, tensor in tensors.items():
                if not key.startswith(prefix) or "/" in key.removeprefix(prefix):
                    continue
                entry = key.removeprefix("optim/")
                if length == parameter.numel() or tensor.numel() != length or tensor.dim() == 0:
                    joined[entry] = tensor
                    continue
                whole = joined.setdefault(entry, torch.empty(parameter.shape, dtype=tensor.dtype))
                joined[entry] = _filled(whole, parameter, piece, tensor)
    return joined


def _place(piece: ServerSlice, parameter: Tensor) -> tuple[int, slice, Sequence[int], Sequence[int]]:
    """Return section, region, shape and strides of a slice: flat, or the parameter's own where it is whole."""
    length = piece.end - piece.begin
    part = slice(piece.at, piece.at + length)
    if length != parameter.numel():
        return piece.section, part, (length,), (1,)
    return piece.section, part, tuple(parameter.shape), strides(parameter)


def _filled(whole: Tensor, parameter: nn.Parameter, piece: ServerSlice, part: Tensor) -> Tensor:
    flat = in_order(whole, parameter)
    flat[piece.begin : piece.end] = part
    return whole.copy_(shaped(flat, parameter))


def _pairs(handle: Optimizer, built: Optimizer | None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair each parameter group of the server's optimizer with the handle's group of the same parameters."""
    if built is None:
        return []
    home = {id(p): group for group in handle.param_groups for p in group["params"]}
    return [(home[id(group["params"][0])], group) for group in built.param_groups]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype
