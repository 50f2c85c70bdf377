"""Trace one forward and backward of a model and its loss, and make a ``Workload`` of it.

Operators are counted below autograd, on fake tensors that have shapes and no data. A backward operator belongs to the
module whose forward made its autograd node, which the nodes' numbers tell; an operator that runs in backward with
gradients enabled is recomputation.
"""

from __future__ import annotations

import traceback
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tutti.config.module_config import check_checkpointing
from tutti.data.adapt import adapt_training
from tutti.data.batches import map_tensors
from tutti.data.collation import collate
from tutti.data.stream import Stream
from tutti.distribution import VERSION
from tutti.errors import DataError, TuttiError, UsageError
from tutti.nn.ac_and_compile import recompute
from tutti.nn.ac_policy import find_units
from tutti.nn.swap import to_float64
from tutti.torch_compat import (
    FakeTensorMode,
    TorchDispatchMode,
    TorchFunctionDisabled,
    current_autograd_node,
    is_fake,
    next_node_sequence,
    node_sequence,
    operator_arguments,
    storage_key,
    tree_leaves,
)
from tutti.types.micro_batch import Batch, LossFn
from tutti.workload.flop_formulas import OperatorFlop, class_without_flop, count_flop, lacks_formula, operator_name
from tutti.workload.message_log import GroupMessage, MessageLog
from tutti.workload.workload_file import LOSS, REST, Affine, GroupWork, OperatorWork, PassWork, Workload

FIT, CHECK = (2, 4), 7
"""Samples of the traces that a line is drawn through, and of the trace that checks it."""

CHOICES = ("none", "blocks", "selective")
_DEVICE = torch.ops.prim.device.default
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """A model and its loss, whose work is to be traced.

    Attributes:
        name: name of the task.
        build: builds the plain model, without arguments.
        loss: loss function of the task.
        sample: a batch of one sample.
        groups: function that returns the modules of the model whose parameters are gathered together, the innermost
            first.
        precision: fp32, bf16, fp16 or fp64.
        log: records the collectives of a model whose layers are split; None for a whole model.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: LossFn
    sample: Batch
    groups: Callable[[nn.Module], Sequence[nn.Module]]
    precision: str = "fp32"
    log: MessageLog | None = None


@dataclass
class _Work:
    """Work of one class of operators: FLOP, bytes, calls, and FLOP that causal masking saves."""

    flop: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0
    masked_flop: float = 0.0


_Path = tuple[str, ...]
"""Names of the watched modules whose forwards an operator runs in, the outermost first; "" is the whole model.

Empty outside of the model; (``_ADDED``, NAME) where backward adds up the gradient of a parameter."""

_ADDED = "(gradient)"

_Key = tuple[_Path, str, str]
"""Path, pass and class of operator."""


@dataclass
class _Counts:
    """What one trace counts, by path; ``outputs`` by module."""

    work: dict[_Key, _Work] = field(default_factory=lambda: defaultdict(_Work))
    activations: dict[_Path, float] = field(default_factory=lambda: defaultdict(float))
    outputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    order: list[str] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    metrics: int = 0

    def sums(self, grouping: _Grouping) -> dict[tuple[str, ...], float]:
        """Return every counted quantity of a trace, summed over each module group.

        Keys are (module group, pass, class of operator, quantity), (module group, ``kept activations``) and (module
        group, ``output``), the latter two in bytes.
        """
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for (path, part, kind), work in self.work.items():
            name = grouping.group(path)
            for quantity, value in vars(work).items():
                found[name, part, kind, quantity] += value
        for path, value in self.activations.items():
            found[grouping.group(path), "kept activations"] += value
        for module, value in self.outputs.items():
            if module == "" or module in grouping.names:
                found[module or REST, "output"] += value
        return dict(found)


class _Grouping:
    """Says to which module group an operator belongs.

    Args:
        model: the model.
        names: modules that are groups, the innermost first.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self._known: dict[_Path, str] = {}
        inner: dict[int, str] = {}
        for name in names:
            for parameter in model.get_submodule(name).parameters():
                inner.setdefault(id(parameter), name)
        self._owners = {name: inner.get(id(parameter), REST) for name, parameter in model.named_parameters()}

    def group(self, path: _Path) -> str:
        """Return the innermost group of a path; outside of all groups the rest of the model, or the loss."""
        if path not in self._known:
            if path[:1] == (_ADDED,):
                self._known[path] = self._owners.get(path[1], REST)
            else:
                outside = REST if "" in path else LOSS
                self._known[path] = next((name for name in reversed(path) if name in self.names), outside)
        return self._known[path]


def trace_workload(subject: TracedModel, *, real: bool = False, choices: Sequence[str] = CHOICES) -> Workload:
    """Count the operators, FLOP and bytes of a model and its loss, by tracing forward and backward of a few samples.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Args:
        subject: the model and its loss: functions that build the model and compute the loss, a batch of one sample, and
            the precision.
        real: compute on real tensors, for models that read values; on fake tensors nothing is computed.
        choices: values of ``--activation-checkpointing`` to trace: ``none`` (needed), ``blocks`` (backward computes
            each of the model's repeated blocks again) and ``selective`` (the same, but results of matrix products,
            convolutions and attention are kept); choices that find nothing to recompute are left out.

    Returns:
        A ``Workload`` with the attributes ``groups``: for each module group FLOP, bytes and calls of forward and
        backward by class of operator, as linear functions of the samples of a micro-batch (``fixed`` and
        ``per_sample``); ``gradient_order``, names of the parameters in the order in which their gradients become
        complete; ``not_affine``, texts on quantities that are no linear function of the samples; and
        ``without_formula``, calls by name of the operators whose FLOP are unknown and count as 0.

    Raises:
        UsageError: the model or its loss cannot be traced; the error names the line.
    """
    with _mode(real):
        model = _build(subject)
    names = {id(module): name for name, module in model.named_modules()}
    found = [names[id(module)] for module in subject.groups(model)]
    return trace_modules(subject, real=real, choices=choices, watched=found).workload(found)


@dataclass(frozen=True)
class ModuleTraces:
    """Counts of a model's operators by module, from which a ``Workload`` is made for any choice of module groups.

    A module group is a module that FSDP wraps or a pipeline stage calls, the rest of the model, or the loss.

    Attributes:
        subject: the model and its loss.
        real: whether the traces were made on real tensors.
    """

    subject: TracedModel
    real: bool
    _counts: Mapping[str, Sequence[_Counts]]
    _model: nn.Module

    def workload(self, groups: Sequence[str]) -> Workload:
        """Return the FLOP, bytes and calls of each module group of the traced model.

        A module group is one of the modules ``groups``, the rest of the model, or the loss.

        Args:
            groups: names of the modules that are groups, inner modules before the modules that contain them; each must
                have been among the modules of the trace (``watched``).

        Returns:
            A ``Workload`` with the attributes ``groups``: for each module group FLOP, bytes and calls of forward and
            backward by class of operator, as linear functions of the samples of a micro-batch (``fixed`` and
            ``per_sample``), those of ``groups`` in the model's order, then the rest and the loss; ``gradient_order``,
            names of the parameters in the order in which their gradients become complete; ``not_affine``, texts on
            quantities that are no linear function of the samples; and ``without_formula``, calls by name of the
            operators whose FLOP are unknown and count as 0.
        """
        model, grouping = self._model, _Grouping(self._model, groups)
        lines, bent = {}, []
        for choice, counts in self._counts.items():
            lines[choice], wrong = _lines([each.sums(grouping) for each in counts])
            bent += wrong if choice == "none" else []
        ordered = [name for name, _ in model.named_modules() if name in groups]
        first = self._counts["none"][0]
        return Workload(
            task=self.subject.name,
            precision=self.subject.precision,
            groups=tuple(_group(name, model, groups, lines, first.order) for name in (*ordered, REST, LOSS)),
            gradient_order=tuple(first.order),
            tokens_per_sample=tokens_of(self.subject.sample),
            samples=(*FIT, CHECK),
            basis=f"traced on {'real' if self.real else 'fake'} tensors",
            not_affine=tuple(bent),
            without_formula=dict(first.unknown),
            versions={"tutti": VERSION, "torch": torch.__version__},
            metrics=first.metrics,
        )

    def messages(self, groups: Sequence[str]) -> dict[str, tuple[GroupMessage, ...]]:
        """Return the collectives over the tensor ranks that the traces of a model with split layers recorded.

        A module group is one of the modules ``groups``, the rest of the model, or the loss.

        Args:
            groups: names of the modules that are groups, inner modules before the modules that contain them; each must
                have been among the modules of the trace (``watched``).

        Returns:
            For each kind of activation checkpointing, such as ``none``, a tuple of the collectives of a micro-batch in
            the order of the trace, each with ``group`` (name of its module group), ``passed`` (``forward`` or
            ``backward``), ``kind`` and ``bytes`` (``fixed`` + ``per_sample`` · samples). Empty for a model whose layers
            are not split.

        Raises:
            UsageError: the traces made different collectives, or their bytes are no line in samples.
        """
        log = self.subject.log
        return {} if log is None else log.lines(_Grouping(self._model, groups).group)


def trace_modules(
    subject: TracedModel,
    *,
    real: bool = False,
    choices: Sequence[str] = CHOICES,
    watched: Sequence[str] | None = None,
) -> ModuleTraces:
    """Count the operators of a model and its loss by module, by tracing forward and backward of a few samples.

    The counts serve any choice of module groups, such as FSDP-wrapped modules or the modules of pipeline stages.

    Args:
        subject: the model and its loss; its ``groups`` are not read.
        real: compute on real tensors, for models that read values; on fake tensors nothing is computed.
        choices: values of ``--activation-checkpointing`` to trace: ``none`` (needed), ``blocks`` (backward computes
            each of the model's repeated blocks again) and ``selective`` (the same, but results of matrix products,
            convolutions and attention are kept); choices that find nothing to recompute are left out.
        watched: names of the modules that may be chosen as groups later; None for all.

    Returns:
        A ``ModuleTraces``: the counts by module. Its method ``workload(groups)`` sums them to FLOP, bytes and calls of
        each module group, and ``messages(groups)`` returns the collectives over tensor ranks.

    Raises:
        UsageError: the model or its loss cannot be traced; the error names the line.
    """
    with _mode(real):
        model = _build(subject)
    names = [name for name, _ in model.named_modules() if name] if watched is None else watched
    possible = [choice for choice in choices if choice == "none" or find_units(model, check_checkpointing(choice))]
    counts = {
        choice: [
            _trace(subject, names, samples, choice, real) for samples in ((*FIT, CHECK) if choice == "none" else FIT)
        ]
        for choice in possible
    }
    return ModuleTraces(subject, real, counts, model)


def one_sample(training: Any) -> Batch:
    """Return a batch that holds the first sample of a task's training data, without augmentation.

    Args:
        training: the training data: tensors, a map-style data set, or an iterable (a stream), of which the first item
            is read as the sample.

    Returns:
        The batch, of the nesting of tensors that the data give, each with a first dimension of 1.

    Raises:
        UsageError: the data are of another type, or are an iterator or a DataLoader.
        DataError: the data are empty, or their first sample cannot be read or made a batch.
    """
    data = adapt_training(training)
    if not isinstance(data, Stream):
        return data.fetch(np.arange(1), None)
    item = next(iter(data.open(0)), None)
    if item is None:
        raise DataError("the stream is empty", where=data.name)
    return collate([item], lambda _: "item 0", data.name)


def tokens_of(sample: Batch) -> int | None:
    """Return the number of tokens of one sample: the length of the first tensor's second dimension.

    None unless that tensor is a batch of sequences of int32 or int64.

    Args:
        sample: a batch of one sample.

    >>> tokens_of((torch.zeros(1, 128, dtype=torch.int64), torch.zeros(1))), tokens_of(torch.zeros(1, 3, 32, 32))
    (128, None)
    """
    leaves = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)]
    first = leaves[0] if leaves else None
    sequence = first is not None and first.dim() == 2 and first.dtype in (torch.int32, torch.int64)
    return int(first.shape[1]) if sequence and first is not None else None


def _mode(real: bool) -> AbstractContextManager[Any]:
    return nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)


def _build(subject: TracedModel) -> nn.Module:
    try:
        model = subject.build()
    except TuttiError:
        raise
    except Exception as error:
        raise _untraceable("the model cannot be built on fake tensors", error) from error
    return to_float64(model) if subject.precision == "fp64" else model


def _trace(subject: TracedModel, watched: Sequence[str], samples: int, choice: str, real: bool) -> _Counts:
    """Trace forward and backward of ``samples`` samples."""
    fake = _mode(real)
    with fake:
        model = _build(subject)
    model.train()
    modules = dict(model.named_modules())
    recompute(model, check_checkpointing(choice))
    meter = _Meter(model, {name: modules[name] for name in watched})
    wide = subject.precision == "fp64"

    def more(tensor: Tensor) -> Tensor:
        kind = torch.float64 if wide and tensor.is_floating_point() else tensor.dtype
        return torch.zeros((samples, *tensor.shape[1:]), dtype=kind) + tensor.to(kind)

    narrow = _CAST.get(subject.precision)
    if subject.log is not None:
        subject.log.begin(meter.place)
    try:
        with fake:
            batch = map_tensors(subject.sample, more)
            with meter.watching(), meter:
                with torch.autocast("cpu", narrow or torch.bfloat16, enabled=narrow is not None):
                    result = subject.loss(model, batch)
                meter.forward_ended()
                if isinstance(result, tuple | list) and len(result) == 3:
                    meter.counts.metrics = len(result[2])
                (result if isinstance(result, Tensor) else result[0]).sum().backward()
    except TuttiError:
        raise
    except Exception as error:
        raise _untraceable("the model or its loss cannot be traced" + " on fake tensors" * (not real), error) from error
    if subject.log is not None:
        subject.log.keep(choice, samples)
    return meter.counts


def _untraceable(what: str, error: Exception) -> UsageError:
    """Return the refusal of a model, with the last line that is neither PyTorch's nor tutti's own machinery."""
    package = Path(__file__).parents[1]
    own = tuple(str(package / name) for name in ("tasks", "nn"))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [
        frame
        for frame in frames
        if (not frame.filename.startswith(str(package)) or frame.filename.startswith(own))
        and "site-packages" not in frame.filename
        and not frame.filename.startswith("<")
    ]
    place = theirs[-1] if theirs else frames[-1]
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(
        what,
        where=f"{place.filename}, line {place.lineno}: {place.line}",
        why=f"{type(error).__name__}: {text}",
        remedy="fake tensors have shapes and no values: keep .item(), .tolist(), print and branches on values out of "
        "forward and loss, or trace on real tensors with --real",
    )


class _Meter(TorchDispatchMode):
    """Within the block, count the work of operators by path and pass.

    Args:
        model: the model, whose forward is called within the block.
        watched: modules by name, whose calls make the paths.
    """

    def __init__(self, model: nn.Module, watched: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = _Counts()
        self._model, self._watched = model, watched
        self._path: _Path = ()
        self._marks: list[tuple[int, _Path]] = [(0, ())]
        self._made: dict[int, tuple[weakref.ref[Any], _Path]] = {}
        self._backward = False
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context manager in whose block module calls are followed and the order of gradients is recorded.

        Hooks on the modules say in which of them an operator runs; they are removed at the end.
        """
        handles: list[Any] = []
        for name, module in (("", self._model), *self._watched.items()):
            handles.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
            handles.append(module.register_forward_hook(self._leaving(name), always_call=True))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._completed(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_ended(self) -> None:
        """Mark the end of the traced forward: count the bytes of tensors that it keeps alive, by path.

        All operators that follow count as backward or recomputation.
        """
        for made, path in self._made.values():
            storage = made()
            if storage is not None:
                self.counts.activations[path] += storage.nbytes()
        self._made.clear()
        self._backward = True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and is_fake(args[0]):
            # Autograd asks each gradient for its device, which is most of the calls and no work.
            return args[0].fake_device
        with TorchFunctionDisabled():
            return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        if str(func).startswith("prim."):
            return func(*args, **given)
        # Inference mode leaves compound operators whole.
        if torch.is_inference_mode_enabled() and hasattr(func, "decompose"):
            with self:
                result = func.decompose(*args, **given)
            if result is not NotImplemented:
                return result
        result = func(*args, **given)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        keys = {storage_key(tensor) for tensor in tensors}
        path, part = self.place()
        if not self._backward:
            for tensor in results:
                key = storage_key(tensor)
                if key not in keys and key not in self._made:
                    self._made[key] = weakref.ref(tensor.untyped_storage(), partial(self._freed, key)), path
        moves = not results or any(storage_key(tensor) not in keys for tensor in results) or _writes(func)
        if moves:
            self._count(func, args, given, result, path, part, sum(map(_bytes, (*tensors, *results))))
        return result

    def _freed(self, key: int, _: Any) -> None:
        self._made.pop(key, None)

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any, path: _Path, part: str, moved: float
    ) -> None:
        flop = count_flop(func, args, kwargs, result)
        if flop is None:
            flop = OperatorFlop(class_without_flop(func), 0.0)
            if lacks_formula(func):
                self.counts.unknown[operator_name(func)] += 1
        entry = self.counts.work[path, part, flop.kind]
        entry.flop += flop.flop
        entry.masked_flop += flop.masked
        entry.bytes += moved
        entry.calls += 1
        if flop.recomputed:
            self.counts.work[path, "recompute", flop.kind].flop += flop.recomputed

    def place(self) -> tuple[_Path, str]:
        """Return path and pass of the operator which is called now.

        The pass is ``forward``, ``backward`` or ``recompute`` (a forward within backward). A module that is recomputed
        in parts is called without the modules around it: their names are those of the node that needs the result.
        """
        if not self._backward:
            return self._path, "forward"
        node, again = current_autograd_node(), torch.is_grad_enabled()
        if again and "" in self._path:
            return self._path, "recompute"
        path: _Path = ()
        if node is not None:
            number = node_sequence(node)
            if number is None:
                name = self._names.get(id(getattr(node, "variable", None)))
                path = ("",) if name is None else (_ADDED, name)
            else:
                path = self._marks[bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1][1]
        if again and self._path:
            return (*path, *self._path), "recompute"
        return path, "recompute" if again and node is not None else "backward"

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._path = (*self._path, name)
            self._marks.append((next_node_sequence(), self._path))

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._path = self._path[:-1]
            self._marks.append((next_node_sequence(), self._path))
            if not self._backward:
                # A tensor that is split over ranks counts with this rank's slice, and is not gathered for it.
                with TorchFunctionDisabled():
                    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
                    self.counts.outputs[name] += sum(map(_bytes, leaves))

        return leave

    def _completed(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self.counts.order.append(name)


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that an operator reads or writes: of an expanded one, those that it has."""
    try:
        return min(tensor.nbytes, tensor.untyped_storage().nbytes())
    except NotImplementedError:
        # Sparse tensors have no storage of their own.
        return 0


def _writes(func: Any) -> bool:
    """Return whether an operator writes into one of its arguments."""
    return any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in operator_arguments(func)
    )


_Quantities = Mapping[tuple[str, ...], float]


def _lines(counts: Sequence[_Quantities]) -> tuple[dict[tuple[str, ...], Affine], list[str]]:
    """Draw a line through the first two traces; return the lines, and text on each that a third trace is not on."""
    low, high, *check = counts
    lines, bent = {}, []
    for key in [key for values in (low, high, *check) for key in values]:
        first, second = low.get(key, 0.0), high.get(key, 0.0)
        slope = (second - first) / (FIT[1] - FIT[0])
        line = lines[key] = Affine(first - slope * FIT[0], slope)
        third = [values.get(key, 0.0) for values in check]
        if third and abs(line.at(CHECK) - third[0]) > _TOLERANCE * max(abs(third[0]), 1.0):
            bent.append(f"{' '.join(key)}: {third[0]:,.0f} at {CHECK} samples, on the line {line.at(CHECK):,.0f}")
    bent = list(dict.fromkeys(bent))
    return lines, bent


def _group(
    name: str,
    model: nn.Module,
    groups: Sequence[str],
    lines: Mapping[str, Mapping[tuple[str, ...], Affine]],
    order: Sequence[str],
) -> GroupWork:
    """Return the entry of one group.

    Args:
        name: of the group.
        model: the model.
        groups: names of all wrapped modules, the innermost first.
        lines: quantities by activation checkpointing and key.
        order: names of parameters in the order of their gradients.
    """
    modules = dict(model.named_modules())
    taken: dict[int, str] = {}
    for group in groups:
        for tensor in (*modules[group].parameters(), *modules[group].buffers()):
            taken.setdefault(id(tensor), group)

    def mine(tensor: Tensor) -> bool:
        return name != LOSS and taken.get(id(tensor), REST) == name

    own = {key: parameter for key, parameter in model.named_parameters() if mine(parameter)}
    places = [order.index(key) for key in own if key in order]
    plain = lines["none"]
    return GroupWork(
        name=name,
        kind={REST: type(model).__name__, LOSS: ""}.get(name) or type(modules.get(name)).__name__ * (name != LOSS),
        parameters=sum(p.numel() for p in own.values()),
        trained_parameters=sum(p.numel() for p in own.values() if p.requires_grad),
        parameter_bytes=sum(p.nbytes for p in own.values()),
        buffer_bytes=sum(b.nbytes for b in model.buffers() if mine(b)),
        forward=_pass(plain, name, "forward"),
        backward=_pass(plain, name, "backward"),
        recompute={choice: _pass(found, name, "recompute") for choice, found in lines.items()},
        activation_bytes={c: found.get((name, "kept activations"), Affine()) for c, found in lines.items()},
        output_bytes=plain.get((name, "output"), Affine()),
        ready=max(places, default=None),
    )


def _pass(lines: Mapping[tuple[str, ...], Affine], name: str, part: str) -> PassWork:
    """Return the work of one group in one pass by class of operator."""
    kinds = {key[2]: None for key in lines if key[:2] == (name, part)}
    return {kind: OperatorWork(**{n: lines[name, part, kind, n] for n in vars(_Work())}) for kind in kinds}
