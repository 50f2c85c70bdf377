"""TP plans that a user writes: ``{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}``.

A plan by hand restricts the layers that ``PlanFinder`` splits. Its splits are proved by computing like any others. A
plan that cannot be carried out whole is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from tutti.config.layout_config import TP_STYLES
from tutti.errors import UsageError, did_you_mean
from tutti.parallel.tensor.linear_layer import is_linear
from tutti.parallel.tensor.tp_plan import PlanEntry, is_convolution, is_embedding


class _Fit(NamedTuple):
    """The modules that a style is for: a test, and words."""

    test: Callable[[nn.Module], bool]
    words: str


_FITS: Mapping[str, _Fit] = {
    "colwise": _Fit(is_linear, "linear layers"),
    "rowwise": _Fit(is_linear, "linear layers"),
    "heads": _Fit(lambda module: isinstance(module, nn.MultiheadAttention), "nn.MultiheadAttention"),
    "gathered": _Fit(lambda module: is_linear(module) or is_convolution(module), "linear and convolution layers"),
    "vocabulary": _Fit(is_embedding, "embeddings"),
    "whole": _Fit(lambda module: True, "all modules"),
}


def roles_asked(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the role of each module that the user's hand-written TP plan splits, by the module's name.

    Args:
        model: the whole, unsplit model.
        styles: style (a key of ``tutti.config.layout_config.TP_STYLES``, such as ``colwise``) by a pattern of whole
            module names, as of ``fnmatch``; of several patterns that match a name the last one counts.

    Returns:
        A dict from module names to roles, such as ``column`` for ``colwise``; modules of style ``whole`` are left out.

    Raises:
        UsageError: a pattern matches no module, or a module of another kind than its style is for.
    """
    found: dict[str, str] = {}
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern, style in styles.items():
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            remedy = did_you_mean(pattern, modules)
            raise UsageError(f"the model has no module '{pattern}'", where="TP plan", remedy=remedy)
        for name in matching:
            if not _FITS[style].test(modules[name]):
                raise UsageError(
                    f"{name} cannot be {style}",
                    where="TP plan",
                    why=f"it is a {type(modules[name]).__name__}, and {style} is for {_FITS[style].words}",
                    remedy="leave it out of the plan, and it stays whole",
                )
            found[name] = TP_STYLES[style]
    return {name: role for name, role in found.items() if role != "whole"}


def check_asked(plan: Sequence[PlanEntry], asked: Mapping[str, str]) -> None:
    """Check that a derived tensor-parallel plan gives every module the role that the user's plan by hand asks for.

    The derived plan contains no split of a block that was not verified by computing with it. The role ``scores``
    (logits that are never gathered) counts as ``gathered``.

    Args:
        plan: entries of the derived plan.
        asked: asked roles by the module's name, from ``roles_asked``.

    Raises:
        UsageError: a module has another role in the derived plan, or stays whole.
    """
    roles = {entry.name: "gathered" if entry.role == "scores" else entry.role for entry in plan}
    styles = {role: style for style, role in TP_STYLES.items()}
    for name, role in asked.items():
        got = roles.get(name, "whole")
        if got == role:
            continue
        raise UsageError(
            f"{name} cannot be {styles[role]}",
            where="TP plan",
            why=f"in a trial it is {styles[got]}" if got != "whole" else _UNPROVED.get(role, _UNFIT),
            remedy="leave it out of the plan, and it stays whole; or leave the plan out, and tutti finds one",
        )


_PAIR = (
    "no trial of a block with the plan's layers gives the block's own result: after colwise layers comes a rowwise one,"
    " with operations on single features or heads alone between them; a block of several arguments needs a loss_fn"
)
_UNPROVED = {"column": _PAIR, "row": _PAIR}
_UNFIT = "it has fewer outputs, rows or heads than there are tensor ranks, or its weight is read or tied elsewhere"
