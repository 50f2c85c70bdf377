"""Batch norms of a model replaced by other ones that keep its parameters, its buffers and every name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.errors import UsageError


class TakenOver(_BatchNorm):
    """A batch norm with the parameters, buffers and mode of another one, for inputs of any number of dimensions."""

    def __init__(self, plain: _BatchNorm) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        # In a tuple, so that it is no module of this one.
        self._plain = (plain,)
        _hand_over(plain, self)

    def given_back(self) -> _BatchNorm:
        """The plain one, with what this one holds now."""
        _hand_over(self, self._plain[0])
        return self._plain[0]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of (samples, channels, …), got {input.dim()} dimensions")


def _hand_over(source: _BatchNorm, to: _BatchNorm) -> None:
    to.weight, to.bias = source.weight, source.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(to, name, getattr(source, name))
    to.train(source.training)


def restore(model: nn.Module) -> nn.Module:
    """Give a model that was prepared before its plain batch norms back. In place; returns as ``replace``."""
    if any(isinstance(module, TakenOver) for module in model.modules()):
        return replace(model, lambda norm: norm.given_back() if isinstance(norm, TakenOver) else norm)
    return model


def replace(model: nn.Module, other: Callable[[_BatchNorm], nn.Module]) -> nn.Module:
    """Put ``other(norm)`` in the place of every batch norm of ``model``, in its order; one used twice stays one.

    Works in place; returns the model, which is another one only if it is itself a batch norm. Raises UsageError where
    there is none.
    """
    if isinstance(model, _BatchNorm):
        return other(model)
    found = [(m, name, child) for m in model.modules() for name, child in m.named_children()]
    norms = [(m, name, child) for m, name, child in found if isinstance(child, _BatchNorm)]
    if not norms:
        raise UsageError("the model has no batch norm", remedy="leave out --batch-norm")
    made: dict[nn.Module, nn.Module] = {}
    for parent, name, child in norms:
        if child not in made:
            made[child] = other(child)
        setattr(parent, name, made[child])
    return model
