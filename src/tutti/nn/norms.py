"""Replace the batch norms of a model by another class that keeps parameters, buffers and names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tutti.errors import UsageError
from tutti.nn.swap import registered_children
from tutti.torch_compat import BatchNormBase, has_backward_hook, has_forward_hook

_SIGNATURE = inspect.signature(functional.batch_norm)


class BatchNormReplacement(BatchNormBase):
    """Base of batch norms that replace a plain one and take over its parameters, buffers and mode.

    Inputs have at least two dimensions: (samples, channels, …). A plain batch norm whose class has its own forward
    (timm's ``BatchNormAct2d`` has an activation in it), or that has hooks, still runs itself: only its call of
    ``torch.nn.functional.batch_norm`` is replaced, by ``normalised``.

    Args:
        plain: the batch norm to replace.
    """

    def __init__(self, plain: BatchNormBase) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        # In a tuple, so that it is not registered as a submodule.
        self._plain = (plain,)
        usual = type(plain).forward in (BatchNormBase.forward, nn.SyncBatchNorm.forward)
        self._runs_plain = not usual or has_forward_hook(plain) or has_backward_hook(plain)
        for name, child in plain.named_children():
            self.add_module(name, child)
        _hand_over(plain, self)

    def forward(self, input: Tensor) -> Any:
        """Run the forward of the batch norm that this layer replaces, but normalise by ``normalised`` of this layer.

        Hooks of that batch norm, or an activation in a forward of its own, still run.

        Args:
            input: (samples, channels, …).

        Returns:
            The normalised input in its shape; if the plain batch norm's class has a forward of its own, the result of
            that.

        Raises:
            UsageError: the forward of the plain batch norm's class does not normalise by one call of
                ``torch.nn.functional.batch_norm`` with its own parameters.
        """
        if not self._runs_plain:
            return self.normalised(input)
        [plain] = self._plain
        _hand_over(self, plain)
        if not self.training:
            return plain(input)
        mode = _Normalisation(self)
        with mode:
            result = plain(input)
        if mode.calls != 1:
            mode.refuse()
        return result

    def normalised(self, input: Tensor) -> Tensor:
        """Normalise ``input``, (samples, channels, …), and return the same shape; each subclass has its own statistics.

        ``forward`` calls it in place of ``torch.nn.functional.batch_norm``. In training it also updates the running
        statistics, and normalises by those of the batch (of its ghost batches, or of all ranks' samples).

        Raises:
            NotImplementedError: in this base class.
        """
        raise NotImplementedError

    def plain_norm(self) -> BatchNormBase:
        """Return the plain batch norm that this layer replaced, with this layer's parameters, buffers and mode.

        The plain batch norm is the original object; it gets this layer's tensors themselves, not copies, and its
        training or evaluation mode.
        """
        _hand_over(self, self._plain[0])
        return self._plain[0]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of (samples, channels, …), got {input.dim()} dimensions")


class _Normalisation(TorchFunctionMode):
    """Calls ``normalised`` of a batch norm in place of ``torch.nn.functional.batch_norm``.

    Attributes:
        calls: number of these calls so far.
    """

    def __init__(self, norm: BatchNormReplacement) -> None:
        super().__init__()
        counter = norm.num_batches_tracked
        self._norm, self._before, self.calls = norm, None if counter is None else counter.clone(), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        norm = self._norm
        self.calls += 1
        given = _SIGNATURE.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        call = given.arguments
        if not call["training"]:
            return func(*args, **(kwargs or {}))
        if call["weight"] is not norm.weight or call["bias"] is not norm.bias or call["eps"] != norm.eps:
            self.refuse()
        if self._before is not None and norm.num_batches_tracked is not None:
            # ``normalised`` counts, and the plain forward has counted already.
            norm.num_batches_tracked.copy_(self._before)
        return norm.normalised(call["input"])

    def refuse(self) -> NoReturn:
        """Raise UsageError: the plain batch norm's own forward cannot be replaced."""
        kind = type(self._norm._plain[0])
        raise UsageError(
            f"batch_norm='sync' and 'ghost' cannot be combined with the batch norm {kind.__name__}",
            where=f"{kind.__module__}.{kind.__name__}.forward",
            why="it does not normalise by one call of torch.nn.functional.batch_norm with its own weight, bias and eps",
            remedy="leave out batch_norm, or make it of torch.nn.BatchNorm2d and a module for the rest",
        )


def _hand_over(source: BatchNormBase, to: BatchNormBase) -> None:
    to.weight, to.bias = source.weight, source.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(to, name, getattr(source, name))
    to.train(source.training)


def restore_norms(model: nn.Module) -> nn.Module:
    """Put the plain batch norms back that ``replace_norms`` has replaced, in place, with the replacements' values.

    Args:
        model: the model; batch norms that were not replaced stay.

    Returns:
        ``model``, or its plain batch norm where ``model`` is itself a replaced one.
    """
    if any(isinstance(module, BatchNormReplacement) for module in model.modules()):
        return replace_norms(model, lambda norm: norm.plain_norm() if isinstance(norm, BatchNormReplacement) else norm)
    return model


def replace_norms(model: nn.Module, other: Callable[[BatchNormBase], nn.Module]) -> nn.Module:
    """Replace every batch norm of ``model`` by ``other(norm)``, in place and in the order of the modules.

    A batch norm that occurs in several modules is replaced once, by one module in all of them.

    Args:
        model: the model.
        other: function that returns the replacement of a batch norm.

    Returns:
        ``model``, or its replacement where ``model`` is itself a batch norm.

    Raises:
        UsageError: the model has no batch norm.
    """
    if isinstance(model, BatchNormBase):
        return other(model)
    found = [(m, name, child) for m in model.modules() for name, child in registered_children(m)]
    norms = [(m, name, child) for m, name, child in found if isinstance(child, BatchNormBase)]
    if not norms:
        raise UsageError("the model has no batch norm", remedy="leave out --batch-norm")
    made: dict[nn.Module, nn.Module] = {}
    for parent, name, child in norms:
        if child not in made:
            made[child] = other(child)
        setattr(parent, name, made[child])
    return model
