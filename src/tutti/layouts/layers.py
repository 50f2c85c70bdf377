"""A replica is cut between layers over several devices, which work in turn: one micro-batch is under way at a time.

Without micro-batches in flight p stages are busy 1/p of the time, so this saves memory, never time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from tutti.comm.communicator import Communicator
from tutti.errors import UsageError
from tutti.layouts import outcome
from tutti.layouts.config import LayersConfig
from tutti.layouts.part import Part
from tutti.nn import units
from tutti.nn.swap import describe
from tutti.types import Cell, GradSink, LossFn, Setting, Totals

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_FORMATS = (torch.contiguous_format, torch.channels_last)
_MAX_DIMS = 8


class Layers:
    """The layout of ``model_parallel``."""

    def __init__(self, config: LayersConfig, setting: Setting) -> None:
        self._setting = setting

    def build(self, plain: nn.Module) -> LayersReplica:
        """Keep this stage's children of a sequential model and drop the others. Raises UsageError as ``stage``."""
        return LayersReplica(self.stage(plain), self._setting)

    def stage(self, plain: nn.Module) -> nn.Sequential:
        """This stage's children of a sequential model.

        Raises UsageError where the model is not an ``nn.Sequential``, has fewer children than stages, or ties
        parameters across a cut; or where it has nothing to compute again.
        """
        self._setting.comms.model.agree(
            describe([plain]), "the model", "build the same model, in the same order and precision, on every rank"
        )
        units.check(plain, self._setting.activation_checkpointing)
        stages, here = self._setting.grid.stage, self._setting.grid.at("stage")
        bounds = cut(plain, stages)
        children = _children(plain)[bounds[here] : bounds[here + 1]]
        return nn.Sequential(OrderedDict(children))


def cut(plain: nn.Module, stages: int) -> list[int]:
    """Bounds of the stages among the children of a sequential model, balancing parameters; (stages + 1,) indices.

    Raises UsageError as ``Layers.build``.
    """
    if not isinstance(plain, nn.Sequential):
        raise UsageError(
            f"model_parallel cannot cut a {type(plain).__name__}",
            why="only an nn.Sequential says where a model can be cut",
            remedy="make the model an nn.Sequential of its blocks, or take --strategy mirrored",
        )
    children = [child for _, child in _children(plain)]
    if len(children) < stages:
        raise UsageError(f"a model of {len(children)} blocks cannot be cut into {stages} stages", remedy="use fewer")
    weights = [sum(p.numel() for p in child.parameters()) for child in children]
    bounds = balance(weights, stages)
    owner: dict[int, int] = {}
    for stage in range(stages):
        for child in children[bounds[stage] : bounds[stage + 1]]:
            for parameter in child.parameters():
                if owner.setdefault(id(parameter), stage) != stage:
                    raise UsageError(
                        "a parameter is shared by blocks on both sides of a cut",
                        where=f"stages {owner[id(parameter)]} and {stage}",
                        remedy="take fewer stages, or --strategy mirrored",
                    )
    return bounds


def _children(plain: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every step of a sequential model; ``named_children`` leaves out a module that comes again."""
    return [(name, child) for name, child in plain._modules.items() if child is not None]


def balance(weights: Sequence[float], parts: int) -> list[int]:
    """Contiguous parts, none empty, whose largest sum is as small as possible; of equal ones the evenest.

    >>> balance([4, 1, 1, 4], 2), balance([0, 0, 9], 2)
    ([0, 2, 4], [0, 1, 3])
    """
    count = len(weights)
    # best[p][i]: (largest sum, sum of squares) of cutting the first i into p parts, and the last cut.
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for part in range(1, parts + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(part, count - (parts - part) + 1):
            options = []
            for start, (largest, squares, _) in best[part - 1].items():
                if start < end:
                    weight = sum(weights[start:end])
                    options.append((max(largest, weight), squares + weight**2, start))
            row[end] = min(options)
        best.append(row)
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(best[part][bounds[-1]][2])
    return bounds[::-1]


class LayersReplica(Part):
    """This stage of one replica. The user's loss function runs on every stage; its model call hands over."""

    def __init__(self, stage: nn.Sequential, setting: Setting) -> None:
        self._comm = setting.comms.axis("stage")
        super().__init__(stage, setting)
        self._relay = _Relay(stage, self._comm)
        self._names: dict[bool, tuple[str, ...]] = {}

    def run(self, cells: Sequence[Cell], loss: LossFn, sink: GradSink | None) -> Totals:
        """Forward through all stages and back, one cell after the other; totals come from the last stage."""
        total: Totals | None = None
        for cell in cells:
            self.enter(cell)
            self._relay.batch_shapes = (sink is not None, *_shapes(cell.batch))
            objective = start = None
            try:
                objective, start, part = outcome.read(loss(self._relay, cell.batch), cell)
                total = part if total is None else total + part
            except _HandedOver:
                pass
            if sink is not None:
                self.draws.check()
                if cell.samples and cell.last:
                    sink.arm(total)
                self._relay.backward(objective, start)
            if not cell.samples:
                self.forget()
        return self._spread(total, sink is not None, sum(cell.samples for cell in cells))

    def _spread(self, total: Totals | None, training: bool, samples: int) -> Totals:
        """The last stage's totals on every stage; the names of its metrics once."""
        last = self._comm.size - 1
        if training not in self._names:
            names = list(total.names) if total is not None else None
            self._names[training] = tuple(self._comm.broadcast_json(names, last, "names of the metrics"))
        names_ = self._names[training]
        lanes = torch.zeros(2 + len(names_), dtype=torch.float64, device=self._comm.device)
        if total is not None:
            lanes.copy_(total.lanes)
        self._comm.spread(lanes, last, "totals of the last stage")
        return Totals(lanes, names_, samples)


class _Form(NamedTuple):
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: torch.memory_format


class _HandedOver(Exception):
    """Leaves the user's loss function on a stage that is not the last."""


class _Relay:
    """Stands for the whole model in the user's loss function."""

    def __init__(self, stage: nn.Sequential, comm: Communicator) -> None:
        self._stage, self._comm = stage, comm
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._gradient: Tensor | None = None
        self.batch_shapes: tuple[Any, ...] = ()
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Take the input or the previous stage's output, run this stage, return on the last one, else hand over."""
        first, last = self._comm.rank == 0, self._comm.rank == self._comm.size - 1
        self._input = inputs if first else self._receive("activation", self._comm.rank - 1)
        if not first and torch.is_grad_enabled() and self._input.is_floating_point():
            # A hook, not .grad: autograd lays a leaf's .grad out like the leaf, and kernels round by layout.
            self._input.requires_grad_().register_hook(self._take_gradient)
        result: Tensor = self._stage(self._input)
        if last:
            return result
        self._output = result
        self._send("activation", result.detach(), self._comm.rank + 1)
        self._leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def backward(self, objective: Tensor | None, start: Tensor | None) -> None:
        """Backward through this stage, from the loss or from the next stage's gradient; hand ours to the previous."""
        if objective is not None:
            objective.backward(start)
        elif self._output is not None:
            gradient = self._receive("gradient", self._comm.rank + 1)
            if self._output.requires_grad:
                self._output.backward(gradient)
        if self._comm.rank > 0 and self._input is not None:
            own = torch.zeros_like(self._input) if self._gradient is None else self._gradient
            self._send("gradient", own, self._comm.rank - 1)
        self._input = self._output = self._gradient = None

    def _take_gradient(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def _leave(self) -> NoReturn:
        raise _HandedOver

    def _send(self, kind: str, tensor: Tensor, to: int) -> None:
        """To a neighbour; shape, dtype and memory format first, once for each shape of the batch."""
        form, key = _Form(tuple(tensor.shape), tensor.dtype, _memory_format(tensor)), (kind, to, self.batch_shapes)
        if key not in self._forms:
            header = [_DTYPES.index(form.dtype), _FORMATS.index(form.memory), tensor.dim(), *form.shape]
            padded = torch.tensor(header + [0] * (3 + _MAX_DIMS - len(header)), device=self._comm.device)
            self._comm.send(padded, to)
            self._forms[key] = form
        if self._forms[key] != form:
            raise UsageError(
                f"a stage's {kind} is {form} and was {self._forms[key]} for an equal batch",
                remedy="the shape between layers must depend on the batch's shape alone",
            )
        self._comm.send(tensor.contiguous(memory_format=form.memory), to)

    def _receive(self, kind: str, source: int) -> Tensor:
        """From a neighbour, with the sender's own memory format: kernels may round differently in another one."""
        key = (kind, source, self.batch_shapes)
        if key not in self._forms:
            header = torch.zeros(3 + _MAX_DIMS, dtype=torch.int64, device=self._comm.device)
            self._comm.receive(header, source)
            dtype, memory, dims, *shape = header.tolist()
            self._forms[key] = _Form(tuple(shape[:dims]), _DTYPES[dtype], _FORMATS[memory])
        form = self._forms[key]
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self._comm.device, memory_format=form.memory)
        self._comm.receive(tensor, source)
        return tensor


def _memory_format(tensor: Tensor) -> torch.memory_format:
    """In which order its numbers are sent: both sides must write and read the same."""
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _shapes(batch: Any) -> list[torch.Size]:
    """Shapes of all tensors of a batch."""
    if isinstance(batch, Tensor):
        return [batch.shape]
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple | list) else ()
    return [shape for value in values for shape in _shapes(value)]
