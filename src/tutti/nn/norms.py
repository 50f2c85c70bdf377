"""Replace the batch norms of a model by another class that keeps parameters, buffers and names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tutti.errors import UsageError
from tutti.torch_compat import BatchNormBase


class TakenOver(BatchNormBase):
    """Base of batch norms that take over parameters, buffers and mode of a plain one; for inputs of ≥ 2 dimensions."""

    def __init__(self, plain: BatchNormBase) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        # In a tuple, so that it is not registered as a submodule.
        self._plain = (plain,)
        _hand_over(plain, self)

    def given_back(self) -> BatchNormBase:
        """Return the plain batch norm with the current parameters, buffers and mode."""
        _hand_over(self, self._plain[0])
        return self._plain[0]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of (samples, channels, …), got {input.dim()} dimensions")


def _hand_over(source: BatchNormBase, to: BatchNormBase) -> None:
    to.weight, to.bias = source.weight, source.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(to, name, getattr(source, name))
    to.train(source.training)


def restore_norms(model: nn.Module) -> nn.Module:
    """Undo ``replace_norms``: put the plain batch norms back, in place. Returns as ``replace_norms``."""
    if any(isinstance(module, TakenOver) for module in model.modules()):
        return replace_norms(model, lambda norm: norm.given_back() if isinstance(norm, TakenOver) else norm)
    return model


def replace_norms(model: nn.Module, other: Callable[[BatchNormBase], nn.Module]) -> nn.Module:
    """Replace every batch norm of ``model`` by ``other(norm)``, in place and in order; a shared one stays shared.

    Returns:
        ``model``, or its replacement where ``model`` is itself a batch norm.

    Raises:
        UsageError: the model has no batch norm.
    """
    if isinstance(model, BatchNormBase):
        return other(model)
    found = [(m, name, child) for m in model.modules() for name, child in m.named_children()]
    norms = [(m, name, child) for m, name, child in found if isinstance(child, BatchNormBase)]
    if not norms:
        raise UsageError("the model has no batch norm", remedy="leave out --batch-norm")
    made: dict[nn.Module, nn.Module] = {}
    for parent, name, child in norms:
        if child not in made:
            made[child] = other(child)
        setattr(parent, name, made[child])
    return model
