"""Find losses that mix the samples of a batch by their targets or their ranks, such as top-k and quantiles."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tutti.comm.current_session import collectives_refused
from tutti.data.global_generators import own_generators
from tutti.nn.global_draws import draws_marker
from tutti.nn.written_tensors import METADATA
from tutti.parallel.ddp.loss_output import read_loss
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
        self._batch = {id(leaf): leaf for leaf in tree_leaves(micro_batch.batch) if self._has_rows(leaf)}
        # The script may write into its batch.
        self._before = {key: leaf.clone() for key, leaf in self._batch.items()}
        self._known = set(self._batch)
        self._calls: list[_Call] | None = []
        self._drawn = draws_marker()
        self._handles = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward, always_call=True),
        ]
        self.__enter__()  # type: ignore[no-untyped-call]

    def _has_rows(self, leaf: Any) -> bool:
        return type(leaf) is Tensor and leaf.dim() > 0 and len(leaf) == self._micro_batch.samples

    def _begin_forward(self, *_: Any) -> None:
        self._within += 1

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._within -= 1
        for leaf in tree_leaves(output) if self._calls is not None and not self._within else ():
            if self._has_rows(leaf) and leaf.requires_grad:
                self._outputs[id(leaf)] = leaf
                self._known.add(id(leaf))

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
        made = [leaf for leaf in leaves_of_call((result,)) if isinstance(leaf, Tensor)]
        if self._calls is not None and (made or written):
            if len(self._calls) == _CALLS or not written <= self._known:
                self._calls = None
            else:
                self._calls.append(_Call(func, args, kwargs, result, torch.is_grad_enabled()))
                self._known.update(map(id, made))
        return result

    def mixes(self, loss: Any) -> str:
        """Return which data of the other samples in the micro-batch a sample's gradient depends on.

        Removes the probe's hooks from the model, and leaves its torch-function mode, which would pass on all further
        calls. ``close`` must still be called: a mode that handles a call, such as ``Tensor.backward``, stays.

        Args:
            loss: what the loss function returned, or what the script passed to ``run.backward``.

        Returns:
            A phrase for messages: ``"targets of"`` if the gradient depends on targets or other data of other samples,
            ``"model's outputs for"`` if the loss selects samples by the model's outputs. Empty if the gradient depends
            on neither, or if that cannot be told, such as after a random draw.
        """
        calls, outputs = self._calls, list(self._outputs.values())
        self.close()
        drawn = draws_marker() != self._drawn
        size = sum(output.numel() for output in outputs)
        # A loss that the model itself has computed does not come out of the calls, and its graph must stay unread.
        computed = id(next(iter(tree_leaves(loss)), None)) in self._known
        if not calls or not outputs or not computed or size > _MOST or drawn:
            return ""
        with suppress(Exception), own_generators():
            value, whole = self._again(calls, loss, self._batch_of(None), self._outputs)
            told = read_loss(loss, self._micro_batch)[0]
            if not torch.allclose(value, told.detach(), rtol=1e-6, equal_nan=False) or not whole.isfinite().all():
                return ""
            _, other = self._again(calls, loss, self._batch_of(0), self._outputs)
            # A deviation of equal targets is 0, and may have made the second gradient one that is not finite.
            if not _alike(whole[0], other[0]):
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
                    _, other = self._again(calls, loss, batch, self._moved(row, distance))
                    if other[row].isfinite().all() and not _alike(whole[row], other[row]):
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
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the gradient of the outputs, a row a sample, for other values of batch and outputs."""
        leaves = {key: output.detach().clone().requires_grad_() for key, output in outputs.items()}
        # A view: the script may have written into the outputs in place.
        values = values | {key: leaf.view_as(leaf) for key, leaf in leaves.items()}

        def new(value: Any) -> Any:
            return values.get(id(value), value) if isinstance(value, Tensor) else value

        for call in calls:
            args, kwargs = tree_map(new, (call.args, call.kwargs))
            with torch.set_grad_enabled(call.gradients), collectives_refused():
                result = call.func(*args, **kwargs)
            (olds, _), (news, _) = tree_flatten(call.result), tree_flatten(result)
            values.update((id(old), value) for old, value in zip(olds, news, strict=True) if isinstance(old, Tensor))
        flat, tree = tree_flatten(loss)
        with torch.enable_grad():
            objective, start, _ = read_loss(tree_unflatten([new(value) for value in flat], tree), self._micro_batch)
            # Not around read_loss: its graph's constants cannot be read within a dispatch mode.
            with collectives_refused():
                found = torch.autograd.grad(objective, list(leaves.values()), start, allow_unused=True)
        return objective.detach(), torch.cat([each.reshape(len(each), -1) for each in found if each is not None], 1)

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
    """A call of PyTorch by the body of a loop."""

    func: Any
    args: Any
    kwargs: Any
    result: Any
    gradients: bool
