"""Compare how the bodies of one global batch compute their losses, to find counters that each body changes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tutti.errors import script_line
from tutti.nn.global_draws import draws_marker
from tutti.nn.rng_streams import RngStreams
from tutti.nn.written_tensors import METADATA
from tutti.torch_compat import tree_leaves
from tutti.train.script_checks.body_counters import counted_seed
from tutti.train.script_checks.followed_numbers import FollowedNumber
from tutti.train.script_checks.in_place_updates import MicroBatchKey
from tutti.train.script_checks.loss_watch import leaves_of_call, reads_values
from tutti.train.script_checks.plain_numbers import plain_digest
from tutti.train.script_checks.sample_reads import SampleReads
from tutti.train.script_checks.storage_records import memories_of, memory_of

_CLEARS = frozenset(("zero_", "_foreach_zero_"))
"""Names of functions that ``zero_grad`` calls for gradients that are there, as not in every body."""
_VIEWS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ViewAsBackward0", "AliasBackward0"))
"""Names of autograd nodes that compute nothing; tutti's own checks of a first body make some."""
_LARGEST = 1 << 22
"""Most elements of an array that is compared (a guess)."""
_Graph: TypeAlias = list[tuple[str, int]]


class _Call(NamedTuple):
    """A call of PyTorch: the function's name, the shapes of its results, and the numbers among its arguments.

    Lists of numbers and NumPy's arrays stand there as hashes, and so do tensors of ``torch.from_numpy``.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    numbers: tuple[Any, ...]


class _Body(NamedTuple):
    """Calls of PyTorch that the body for a micro-batch has made, and the autograd graph of each of its losses.

    ``values``: by line of the script the numbers without ints, which may be sizes, that it has given to each call of
    PyTorch after values of all samples were read.
    """

    key: MicroBatchKey
    calls: list[_Call]
    graphs: list[_Graph | None]
    values: dict[str, list[tuple[Any, ...]]]


class BodyLossComparison:
    """Finds a custom loop whose body computes its loss in another way for a later micro-batch, and not by its samples.

    A rank with several micro-batches runs the body once for each. The Python numbers that a body passes to PyTorch, and
    the autograd graph of its loss, are compared with those of the first body of this global batch whose micro-batch has
    equal shapes. If neither body has read a value of a tensor, they can differ for one reason alone: a Python object
    that every body changes, such as a counter; with another number of devices a body would find another value in it.
    Where both have read values of all samples alone, such as a mean (``SampleReads``), other numbers are those of the
    samples, which on one device would be one number; bodies of one worker are compared then, too. Bodies that draw from
    the global generators of Python and NumPy are not compared, unless they seed them by a counter; of PyTorch's
    generator the seeds are compared by which the script draws. ``CrossWorkerWatch``, a torch-function mode, calls
    ``begin_batch``, ``begin``, ``note`` and ``other_graph``. Not collective.

    Args:
        draws: RNG streams of the model.
    """

    def __init__(self, draws: RngStreams) -> None:
        self._draws = draws
        # State that PyTorch's generator had after the call before, since the script has seeded it.
        self._drawn: Tensor | None = None
        self._first: dict[Any, _Body] = {}
        self._own = _Body(MicroBatchKey(0, 0), [], [], {})
        self._other: _Body | None = None
        self._comparable = self._aligned = self._elsewhere = False
        self._generators = 0
        # Memory of the micro-batch's samples, and of the model.
        self._known = set[StorageWeakRef]()

    def begin_batch(self) -> None:
        """Begin a global batch: delete the calls and graphs recorded for bodies of the batch before.

        Only bodies (runs of the custom loop's code) for micro-batches of one global batch are compared.
        """
        self._first.clear()

    def begin(self, key: MicroBatchKey, batch: Any, own: set[StorageWeakRef]) -> None:
        """Begin to record the body of a custom loop for a micro-batch, to compare it with the first of equal shapes.

        Args:
            key: the micro-batch, as ``micro_batch_key`` returns it.
            batch: its samples. If a leaf of the batch is no tensor, the body is not compared.
            own: storages of the model's parameters and buffers.
        """
        leaves = tree_leaves(batch)
        self._comparable = self._aligned = all(isinstance(each, Tensor) for each in leaves)
        self._own, self._generators, self._drawn = _Body(key, [], [], {}), draws_marker(), None
        found = self._first.setdefault(tuple(_shapes(leaves)), self._own) if self._comparable else self._own
        self._other, self._elsewhere = None if found is self._own else found, found.key != key
        self._known = memories_of(each for each in leaves if isinstance(each, Tensor)) | own

    def note(
        self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, reads: SampleReads
    ) -> MicroBatchKey | None:
        """Record a PyTorch call of the running loop body, and compare it with the first body's call at this position.

        The first body is that of the global batch's first micro-batch with the same shapes as this one. A body is no
        longer compared once it has read a value that is not of all samples, or has drawn from Python's or NumPy's
        global generators. To be called after each call of PyTorch, except calls in tutti's own code.

        Args:
            func, name: the function that is called, and its name.
            args, kwargs: its arguments.
            result: what it has returned.
            reads: the values that this body has read of its samples.

        Returns:
            The ``MicroBatchKey`` of the first body's micro-batch, if its call has the same name and result shapes, but
            other Python numbers among its arguments, or has drawn by another seed of the script; else None. The key's
            field ``moved`` is True if this body has read no value before, ``by_number`` if it has read values of all
            samples.
        """
        if not (self._comparable or reads.are_of_all) or func in METADATA or name in _CLEARS:
            return None
        if reads_values(name, args, kwargs, result):
            # From here on the samples may be the reason.
            self._comparable = False
            return None
        seed = self._draws.script_seed
        if seed is None:
            self._drawn = None
        elif not self._draws_by_seed():
            seed = None
        made = [leaf for leaf in leaves_of_call((result,)) if isinstance(leaf, Tensor)]
        if not made:
            return None
        if not self._comparable:
            return self._other_values(args, kwargs)
        numbers = tuple(found for each in chain(args, kwargs.values()) if (found := self._number(each)) is not None)
        call, index = _Call(name, tuple(_shapes(made)), (*numbers, seed)), len(self._own.calls)
        self._own.calls.append(call)
        if self._other is None or not self._aligned or index >= len(self._other.calls):
            return None
        before = self._other.calls[index]
        self._aligned = call[:2] == before[:2]
        moves = self._aligned and self._elsewhere and self._moves(call.numbers != before.numbers)
        return self._other.key._replace(moved=True) if moves else None

    def _other_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MicroBatchKey | None:
        """Return the first body's micro-batch if that body has given other values to PyTorch in the present line.

        The calls are compared line by line and without their shapes, because the samples may decide how often a line
        runs. None if the values are equal, or the first body has made fewer calls in the line.
        """
        values = tuple(found for each in leaves_of_call(args, kwargs) if (found := self._value(each)) is not None)
        if not values:
            return None
        line = script_line()
        here = self._own.values.setdefault(line, [])
        here.append(values)
        there = [] if self._other is None else self._other.values.get(line, [])
        if self._other is None or len(here) > len(there) or there[len(here) - 1] == values:
            return None
        return self._other.key._replace(by_number=True) if draws_marker() == self._generators else None

    def other_graph(self, loss: Tensor) -> MicroBatchKey | None:
        """Compare the autograd graph of a loss with that of the same loss of the first body.

        The first body is that of the global batch's first micro-batch with the same shapes as this one; the same loss
        is the one with the same index among the losses of a body.

        Args:
            loss: the loss of the present body, before its backward.

        Returns:
            The ``MicroBatchKey`` of the first body's micro-batch, if that body has computed its loss by other functions
            or from other parameters; else None, also for bodies that have read values or drawn random numbers.
        """
        graph = _graph(loss) if self._comparable else None
        index = len(self._own.graphs)
        self._own.graphs.append(graph)
        if self._other is None or not self._elsewhere or graph is None or index >= len(self._other.graphs):
            return None
        before = self._other.graphs[index]
        return self._other.key if before is not None and self._moves(graph != before) else None

    def _draws_by_seed(self) -> bool:
        """Return whether the call that has just ended has drawn from the generator that the script has seeded."""
        state, before = self._draws.states_of_seed()
        before, self._drawn = before if self._drawn is None else self._drawn, state
        return not torch.equal(state, before)

    def _number(self, value: Any) -> Any:
        """Return a number among a call's arguments, or a hash of numbers; None for another argument."""
        if type(value) in (int, float) or isinstance(value, np.integer | np.floating):
            return float(value)
        if type(value) is slice:
            value = value.start, value.stop, value.step
        if type(value) is tuple:
            return tuple(map(self._number, value))
        if type(value) is list:
            return plain_digest(value)
        if type(value) is Tensor and _is_from_numpy(value) and memory_of(value) not in self._known:
            value = value.resolve_conj().resolve_neg().flatten().contiguous().view(torch.uint8).numpy()
        if not isinstance(value, np.ndarray) or value.dtype.hasobject or value.size > _LARGEST:
            return None
        return zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)

    def _value(self, leaf: Any) -> Any:
        """Return a float, or a number that is followed, among a call's arguments, or a hash of an array; else None."""
        if isinstance(leaf, FollowedNumber | float | np.floating):
            return float(leaf)  # type: ignore[arg-type]
        return self._number(leaf) if isinstance(leaf, np.ndarray | Tensor) else None

    def _moves(self, differs: bool) -> bool:
        """Return ``differs``; but False for bodies that have drawn random numbers, which are no longer compared.

        Bodies that seed a generator by a counter go on being compared.
        """
        if differs and draws_marker() != self._generators and not counted_seed():
            self._comparable = False
        return differs and self._comparable


def _is_from_numpy(tensor: Tensor) -> bool:
    """Return whether a tensor may have the memory of a NumPy array, which PyTorch cannot resize, nor pinned memory."""
    on_host = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    return on_host and not (tensor.untyped_storage().resizable() or tensor.is_pinned())


def _shapes(tensors: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    return (tuple(each.shape) for each in tensors if isinstance(each, Tensor))


def _graph(loss: Tensor) -> _Graph:
    """Return the nodes of a loss's autograd graph in a fixed order, by name and parameter; views are left out."""
    found: _Graph = []
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() not in _VIEWS:
            leaf = getattr(node, "variable", None)
            found.append((node.name(), id(leaf) if isinstance(leaf, nn.Parameter) else 0))
        waiting += [each for each, _ in reversed(node.next_functions)]
    return found
