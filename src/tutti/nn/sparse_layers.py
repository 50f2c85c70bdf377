"""Layers whose weights have sparse gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from tutti.errors import UsageError


def sparse_parameters(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return parameters that may get sparse gradients, by name: parameters of modules with ``sparse = True``.

    ``nn.Embedding`` and ``nn.EmbeddingBag`` have that attribute; a user's module that calls
    ``F.embedding(…, sparse=True)`` must set it too.

    Args:
        parts: the modules on this rank; tied parameters are returned once.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for part in parts:
        for prefix, module in part.named_modules():
            if getattr(module, "sparse", False) is True:
                for key, parameter in module.named_parameters(prefix, recurse=False):
                    found.setdefault(id(parameter), (key, parameter))
    return dict(found.values())


def make_gradients_dense(model: nn.Module) -> None:
    """Set the attribute ``sparse`` of all modules of ``model`` to False where it is True, in place."""
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            setattr(module, "sparse", False)  # noqa: B010


def check_sparse_step(optimizer: Optimizer, error: Exception, where: str | None = None) -> None:
    """Raise UsageError in place of an error of ``optimizer.step()`` that is about sparse or dense gradients.

    Args:
        optimizer: the optimizer that raised.
        error: the exception of ``optimizer.step()``. If it is about something else, the function returns without an
            error, and the caller raises the exception again.
        where: names of the parameters concerned, for the error.

    Raises:
        UsageError: the exception's text is about sparse or dense gradients.
    """
    text = str(error)
    if "sparse" not in text.lower() and "dense gradients" not in text:
        return
    kinds = {p.grad.is_sparse for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
    given = (
        "sparse gradients and dense ones" if len(kinds) > 1 else "sparse gradients" if True in kinds else "dense ones"
    )
    raise UsageError(
        f"{type(optimizer).__name__} cannot step with {given}",
        where=where,
        why=text.splitlines()[0],
        remedy="take SGD or Adagrad without weight decay, which take both kinds, SparseAdam for sparse ones alone, or "
        "sparse=False in nn.Embedding",
    ) from error
