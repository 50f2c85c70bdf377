"""Find losses that mix a batch's samples: by targets, by top-k and quantiles, or by their places in the batch."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.comm.current_session import collectives_refused
from tutti.data.global_generators import own_generators
from tutti.errors import UsageError, script_line
from tutti.nn.global_draws import draws_marker
from tutti.nn.written_tensors import METADATA
from tutti.parallel.ddp.loss_output import read_loss
from tutti.parallel.ddp.output_graph import nodes_below
from tutti.torch_compat import leave_function_mode, tensor_versions, tree_flatten, tree_leaves, tree_map, tree_unflatten
from tutti.train.script_checks.loss_watch import leaves_of_call
from tutti.types.micro_batch import MicroBatch

_MOST = 1_000_000
"""Largest number of elements of the model's outputs; they are computed with twice more."""
_CALLS = 2_000
"""Largest number of calls between the model and the loss that are computed again."""
_FAR = 30.0
"""Distance by which outputs move, more than usual losses of a batch differ by (a guess)."""
_SMALL = 1e-4
"""Relative difference of gradients that counts as rounding."""
_NODES = 4096
"""Most autograd nodes of a loss in which the model's outputs are looked for (a guess)."""
_PARTS = frozenset(("split", "split_with_sizes", "tensor_split", "chunk", "unsafe_split", "unsafe_chunk", "unbind"))
"""Names of functions that divide a tensor along a dimension."""
_TURNING = frozenset(
    (
        *("__get__", "t", "transpose", "transpose_", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("adjoint", "rot90", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum", "tensordot"),
    )
)
"""Names of functions after which the first dimension may not be that of the samples, such as an attribute ``T``."""


class TargetProbe(TorchFunctionMode):
    """Tests in one micro-batch whether a sample's gradient depends on targets, other data or outputs of other samples.

    The probe records what a loss function, or the body of a custom training loop, computes from its batch and from the
    model's outputs. It then computes the loss twice more from the same outputs: for the batch, and for a batch in which
    all other samples equal the first. A mean over samples gives the first sample's outputs the same gradient both
    times. To find a selection of samples (top-k, quantile, hard negatives), the outputs of all samples but one are
    moved far up, far down, or to that sample's: with a selection the sample's gradient changes. The probe changes
    nothing: calls that write to tensors of the script, or draw random numbers, end it. Not collective. Call ``close``
    at the end of the loss function or loop body.

    Args:
        model: the model; it gets hooks that only read, until ``mixes`` is called.
        micro_batch: the micro-batch of the loss function or loop body.
    """

    def __init__(self, model: nn.Module, micro_batch: MicroBatch) -> None:
        super().__init__()
        self._micro_batch, self._within, self._open = micro_batch, 0, True
        self._outputs: dict[int, Tensor] = {}
        # Outputs for other numbers of samples, as for a part of them.
        self._parts: dict[int, Tensor] = {}
        self._inputs: list[Tensor] = []
        self._forwards: list[_Forward] = []
        self._batch = {id(leaf): leaf for leaf in tree_leaves(micro_batch.batch) if self._has_rows(leaf)}
        # The script may write into its batch.
        self._before = {key: leaf.clone() for key, leaf in self._batch.items()}
        self._known = set(self._batch)
        self._calls: list[_Call] | None = []
        # Tensors that were computed from single rows, and those whose first dimension may not be that of the samples.
        self._single, self._turned = set[int](), set[int]()
        self._reads_rows = False
        self._drawn = draws_marker()
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    def _has_rows(self, leaf: Any) -> bool:
        return type(leaf) is Tensor and leaf.dim() > 0 and len(leaf) == self._micro_batch.samples

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        self._within += 1
        if self._within == 1:
            self._inputs = [leaf for leaf in tree_leaves(args) if id(leaf) in self._known][:1]

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._within -= 1
        for leaf in tree_leaves(output) if self._calls is not None and not self._within else ():
            # Not a loss that the model itself has computed, whose graph must stay unread.
            if not (isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dim()):
                continue
            outputs = self._outputs if self._has_rows(leaf) else self._parts
            outputs[id(leaf)] = leaf
            self._known.add(id(leaf))
            self._forwards += [_Forward(given, leaf) for given in self._inputs]
            if any(id(given) in self._turned for given in self._inputs):
                self._turned.add(id(leaf))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Dynamo traces this mode with the code that it compiles.
        if torch.compiler.is_compiling() or self._calls is None or self._within:
            return func(*args, **kwargs)
        if func in METADATA and not isinstance(result := func(*args, **kwargs), Tensor):
            return result
        given = [leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        if name.startswith(("rand", "normal", "bernoulli", "multinomial", "dropout")) and name != "normalize":
            self._calls = None
        if not any(id(leaf) in self._known for leaf in given):
            return func(*args, **kwargs)
        before = tensor_versions(given)
        result = func(*args, **kwargs)
        written = {id(leaf) for leaf, old, new in zip(given, before, tensor_versions(given), strict=True) if old != new}
        leaves = leaves_of_call((result,))
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._calls is not None and (made or written):
            if len(self._calls) == _CALLS or not written <= self._known:
                self._calls = None
            else:
                line = script_line() if self._takes_places(name, args, kwargs) else ""
                self._calls.append(_Call(func, args, kwargs, result, torch.is_grad_enabled(), line))
                self._known.update(map(id, made))
                if name in _TURNING or any(id(leaf) in self._turned for leaf in given):
                    self._turned.update(map(id, made))
                if any(id(leaf) in self._single for leaf in given):
                    self._single.update(map(id, made))
                elif line:
                    self._single.update(id(each) for each in made if each.dim() < args[0].dim() or len(each) == 1)
        if len(made) < len(leaves) and any(isinstance(leaf, int | float | complex | np.ndarray) for leaf in leaves):
            self._reads_rows |= any(leaf.dim() > 0 or id(leaf) in self._single for leaf in given)
        return result

    def _takes_places(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether a call takes some rows of a tensor with a row for each sample, by their places."""
        given, samples = args[0] if args else None, self._micro_batch.samples
        if not isinstance(given, Tensor) or given.shape[:1] != (samples,) or id(given) in self._turned:
            return False
        if name in _PARTS:
            return bool(kwargs.get("dim", args[-1] if len(args) > (1 if name == "unbind" else 2) else 0) == 0)
        if name in ("narrow", "select"):
            return bool(kwargs.get("dim", (*args, None)[1]) == 0)
        key = args[1] if name == "__getitem__" else None
        first = key[0] if isinstance(key, tuple) and key else key
        if isinstance(first, slice) and first.step in (None, 1):
            return len(range(*slice(first.start, first.stop).indices(samples))) < samples
        return type(first) is int

    def check_places(self, loss: Any) -> None:
        """Check that a scalar loss takes no samples by their places in the micro-batch, such as ``losses[:8].mean()``.

        Another micro-batch has samples of its own at these places. The loss is computed again from equal outputs for a
        batch of equal samples: unless it is a mean over samples, or over groups of neighbours (pairs, triplets), they
        get unequal gradients. Where the model is given a part of the samples, the parts of all its calls must make up
        the whole. Losses that depend on values of samples that the script has read are not judged. To be called before
        ``mixes``.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``; tuples pass, by which
                scripts declare what a loss counts.

        Raises:
            UsageError: the loss takes samples by their places.
        """
        # The mode, which is still active, is to record no calls of the check.
        calls, self._calls = self._calls, None
        try:
            scalar = isinstance(loss, Tensor) and loss.numel() == 1 and id(loss) in self._known
            if calls and scalar and not self._reads_rows and not self._has_drawn():
                self._check_places(calls, loss)
        finally:
            self._calls = calls

    def _check_places(self, calls: list[_Call], loss: Tensor) -> None:
        if line := self._line_of_part(calls, loss):
            _refuse_places(line)
        parts = list(self._parts.values())
        in_parts = sum(map(len, parts)) == self._micro_batch.samples and len({each.shape[1:] for each in parts}) == 1
        outputs = self._outputs or (self._parts if in_parts else {})
        size = sum(output.numel() for output in outputs.values())
        if not outputs or size > _MOST:
            return
        used = _leading_to(calls, [loss])
        line = next((call.line for call in used if call.line), "")
        given = [leaf for call in used for leaf in leaves_of_call(call.args, call.kwargs)]
        # What the script has made otherwise may belong to the samples row by row.
        others = any(self._has_rows(leaf) and id(leaf) not in self._known for leaf in given)
        if line and not others and self._prefers_places(calls, loss, outputs):
            _refuse_places(line)

    def _line_of_part(self, calls: list[_Call], loss: Tensor) -> str:
        """Return the line that takes a part of the samples by places for the model's input; empty for none."""
        nodes = set(nodes_below(loss.grad_fn, lambda _: True, _NODES))
        inputs = [each.given for each in self._forwards if each.output.grad_fn in nodes]
        line = next((call.line for call in _leading_to(calls, inputs) if call.line), "")
        if not line:
            return ""
        with suppress(Exception), own_generators():
            values = self._batch_of(0)
            _replay(calls, values)
            rows = sum(len(values.get(id(each), each)) for each in inputs)
            return line if rows % self._micro_batch.samples else ""
        return ""

    def _prefers_places(self, calls: list[_Call], loss: Tensor, outputs: dict[int, Tensor]) -> bool:
        """Return whether equal samples get unequal gradients, which are not those of equal groups of neighbours.

        Args:
            calls: the calls of the loss function or body.
            loss: the loss.
            outputs: the model's outputs by their ids, each for all samples, or for parts that make up all samples.
        """
        samples = self._micro_batch.samples
        equal = dict[int, Tensor]()
        for key, output in outputs.items():
            first = output if self._has_rows(output) else next(iter(outputs.values()))
            equal[key] = first.detach()[:1].expand_as(output)
        with suppress(Exception), own_generators():
            value, _ = self._again(calls, loss, self._batch_of(None), outputs)
            if not torch.allclose(value, loss.detach().reshape(()), rtol=1e-6, equal_nan=False):
                return False
            _, found = self._again(calls, loss, self._batch_of(0), equal)
            rows = torch.cat(found, 0 if outputs is self._parts else 1)
            groups = [each for each in range(1, samples // 2 + 1) if not samples % each]
            return bool(rows.isfinite().all()) and not any(
                _alike(rows, rows[:each].repeat(samples // each, 1)) for each in groups
            )
        return False

    def _has_drawn(self) -> bool:
        """Return whether Python's or NumPy's global generators have drawn since the probe began."""
        return draws_marker() != self._drawn

    def mixes(self, loss: Any) -> str:
        """Return which data of the other samples in the micro-batch a sample's gradient depends on.

        Removes the probe's hooks from the model, and leaves its torch-function mode. ``close`` must still be called: a
        mode cannot be left while it handles a call, as where the script calls ``loss.backward()``.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.

        Returns:
            A phrase for messages: ``"targets of"`` if the gradient depends on targets or other data of other samples,
            ``"model's outputs for"`` if the loss selects samples by the model's outputs. Empty if the gradient depends
            on neither, or if that cannot be told, such as after a random draw.
        """
        calls, outputs = self._calls, list(self._outputs.values())
        self.close()
        drawn = self._has_drawn()
        size = sum(output.numel() for output in outputs)
        # A loss that the model itself has computed does not come out of the calls, and its graph must stay unread.
        computed = id(next(iter(tree_leaves(loss)), None)) in self._known
        if not calls or not outputs or not computed or size > _MOST or drawn:
            return ""
        with suppress(Exception), own_generators():
            value, found = self._again(calls, loss, self._batch_of(None), self._outputs)
            whole, told = torch.cat(found, 1), read_loss(loss, self._micro_batch)[0]
            if not torch.allclose(value, told.detach(), rtol=1e-6, equal_nan=False) or not whole.isfinite().all():
                return ""
            _, found = self._again(calls, loss, self._batch_of(0), self._outputs)
            # A deviation of equal targets is 0, and may have made the second gradient one that is not finite.
            if not _alike(whole[0], torch.cat(found, 1)[0]):
                return "targets of"
            if self._selects(calls, loss, whole):
                return "model's outputs for"
        return ""

    def _selects(self, calls: list[_Call], loss: Any, whole: Tensor) -> bool:
        """Return whether a sample's gradient changes where other samples' outputs move.

        Examines the samples with the largest and the smallest gradient: a selection has left out the latter.

        Args:
            calls: the calls of the loss function or body.
            loss: what the loss function returned, or what ``run.backward`` was given.
            whole: gradient of the outputs, a row a sample.
        """
        sizes = whole.abs().sum(1)
        for row in {int(sizes.argmax()), int(sizes.argmin())}:
            for distance in (0.0, _FAR, -_FAR):
                batch = self._batch_of(None if distance else row)
                with suppress(Exception):
                    _, found = self._again(calls, loss, batch, self._moved(row, distance))
                    other = torch.cat(found, 1)[row]
                    if other.isfinite().all() and not _alike(whole[row], other):
                        return True
        return False

    def _batch_of(self, row: int | None) -> dict[int, Tensor]:
        """Return copies of the batch's tensors; with ``row`` all samples equal that one."""
        return {
            key: (leaf if row is None else leaf[row : row + 1].expand_as(leaf)).clone()
            for key, leaf in self._before.items()
        }

    def _moved(self, row: int, distance: float) -> dict[int, Tensor]:
        """Return the outputs with those of all samples but ``row`` moved by ``distance``; 0: equal to that sample's."""
        found = {}
        for key, output in self._outputs.items():
            own = output.detach()[row : row + 1]
            moved = output.detach() + distance if distance else own.expand_as(output).clone()
            moved[row] = own[0]
            found[key] = moved
        return found

    def _again(
        self, calls: list[_Call], loss: Any, values: dict[int, Tensor], outputs: dict[int, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the gradients of outputs, a row a sample, for other values of batch and outputs."""
        leaves = {key: output.detach().clone().requires_grad_() for key, output in outputs.items()}
        # A view: the script may have written into the outputs in place.
        values = values | {key: leaf.view_as(leaf) for key, leaf in leaves.items()}

        _replay(calls, values)
        flat, tree = tree_flatten(loss)
        with torch.enable_grad():
            outcome = tree_unflatten([_newest(values, value) for value in flat], tree)
            objective, start, _ = read_loss(outcome, self._micro_batch)
            # Not around read_loss: its graph's constants cannot be read within a dispatch mode.
            with collectives_refused():
                found = torch.autograd.grad(objective, list(leaves.values()), start, allow_unused=True)
        return objective.detach(), [each.reshape(len(each), -1) for each in found if each is not None]

    def close(self) -> None:
        """End the test whether a loss mixes samples: remove its hooks from the model, and leave its function mode.

        Other function modes may lie above this one on PyTorch's stack. A second call does nothing.
        """
        self._calls = None
        for handle in self._handles:
            handle.remove()
        if self._open:
            # PyTorch puts a mode that handles a call back afterwards.
            self._open = leave_function_mode(self) is None


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two gradients are equal but for rounding; False where the second is not finite."""
    most = _SMALL * torch.maximum(one.abs().max(), other.abs().max())
    return bool((one - other).abs().max() <= most)


class _Call(NamedTuple):
    """A call of PyTorch by the body of a loop; ``line``: of the script, where it takes samples by their places."""

    func: Any
    args: Any
    kwargs: Any
    result: Any
    gradients: bool
    line: str = ""


class _Forward(NamedTuple):
    """A call of the model: the first tensor among its arguments that is computed from the batch, and an output."""

    given: Tensor
    output: Tensor


def _newest(values: dict[int, Tensor], value: Any) -> Any:
    return values.get(id(value), value) if isinstance(value, Tensor) else value


def _replay(calls: list[_Call], values: dict[int, Tensor]) -> None:
    """Make recorded calls again with other values, by the recorded tensors' ids, and add the results to these."""
    for call in calls:
        args, kwargs = tree_map(partial(_newest, values), (call.args, call.kwargs))
        with torch.set_grad_enabled(call.gradients), collectives_refused():
            result = call.func(*args, **kwargs)
        (olds, _), (news, _) = tree_flatten(call.result), tree_flatten(result)
        values.update((id(old), value) for old, value in zip(olds, news, strict=True) if isinstance(old, Tensor))


def _leading_to(calls: list[_Call], wanted: list[Tensor]) -> list[_Call]:
    """Return the calls that have computed tensors, the last one first."""
    found, ids = list[_Call](), set(map(id, wanted))
    for call in reversed(calls):
        if any(id(leaf) in ids for leaf in leaves_of_call((call.result,))):
            found.append(call)
            ids.update(id(leaf) for leaf in leaves_of_call(call.args, call.kwargs) if isinstance(leaf, Tensor))
    return found


def _refuse_places(line: str) -> NoReturn:
    raise UsageError(
        "the loss takes samples by their places in the micro-batch",
        where=line,
        why="a micro-batch is a part of the global batch, with samples of its own at these places: equal samples would"
        " count unequally, by how the batch is divided over workers and micro-batches",
        remedy="choose samples by their data, such as losses[mask].mean() with a mask from the data set; or take one"
        " worker without micro_batch; to take the samples at these places of each micro-batch, as gradient accumulation"
        " by hand does, return (loss * n, n) of n samples",
    )
