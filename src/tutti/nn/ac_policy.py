"""Activation checkpointing (AC) policy: find the modules to recompute, by structure or by the user's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tutti.config.module_config import Blocks, Checkpointing, Selective
from tutti.errors import UsageError, did_you_mean
from tutti.nn.swap import registered_children

_LONG = 8
"""Length from which a sequence of plain layers is cut into runs; a shorter one is one block."""


@dataclass
class CheckpointUnits:
    """Units of a model for activation checkpointing, each of which backward recomputes as a whole.

    Its length is the number of modules and sequences with units; it is false without any.

    Attributes:
        whole: modules that are units.
        runs: for each sequence of layers, its runs of consecutive children, by their names; each run is a unit.
        every: only the first of every ``every`` neighbouring runs of a sequence is recomputed.
        selective: save results of expensive operators (``selective_checkpoint``).
    """

    whole: list[nn.Module] = field(default_factory=list)
    runs: dict[nn.Module, list[tuple[str, ...]]] = field(default_factory=dict)
    every: int = 1
    selective: bool = False

    def __len__(self) -> int:
        return len(self.whole) + len(self.runs)


def check_units(model: nn.Module, choice: Checkpointing) -> None:
    """Check that the modules chosen for activation checkpointing exist in a model, and that there is at least one.

    Args:
        model: the whole model, before it is divided over ranks.
        choice: the modules to recompute: a rule (``Blocks``), or a sequence of names and classes of modules; None for
            no activation checkpointing, which passes.

    Raises:
        UsageError: ``choice`` names a module that the model lacks, or nothing would be recomputed.
    """
    if choice is None:
        return
    if not isinstance(choice, Blocks):
        names = dict(model.named_modules())
        for entry in choice:
            if isinstance(entry, str) and entry not in names:
                raise UsageError(f"the model has no module '{entry}'", remedy=did_you_mean(entry, filter(None, names)))
    if not find_units(model, choice):
        raise UsageError(
            "activation checkpointing finds nothing in this model to compute again",
            why="it holds neither blocks nor a sequence of layers, nor a module of a class that was named",
            remedy="name modules, as in tutti.prepare(activation_checkpointing=['encoder']), or leave it out",
        )


UNCACHED = "set to False, as activation checkpointing computes forwards again, which must not find the first in a cache"
"""Text of a run's header on ``config.use_cache``, after ``turn_off_caches`` has changed it."""


def turn_off_caches(model: nn.Module) -> bool:
    """Set ``config.use_cache`` of a model and its submodules, where it is True, to False.

    Models of Hugging Face then make no cache of keys and values. With activation checkpointing the second computation
    of a forward would find the entries of the first one in the cache, and give another result.

    Args:
        model: the model; its configurations are changed in place.

    Returns:
        Whether a configuration was changed.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    found = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    return bool(found)


def find_units(part: nn.Module, choice: Checkpointing) -> CheckpointUnits:
    """Find the units of a model that activation checkpointing recomputes, each as a whole, in backward.

    By a rule (``Blocks``) the units are blocks, submodules that have parameters and children of their own. Below
    ``part`` each block is a unit, with two exceptions. A ``ModuleList``, a ``ModuleDict``, an ``nn.Sequential`` of
    several blocks, and a block with more than half of the parameters of ``part`` are searched for units in turn; if
    there are none, a block that is no list or dict is a unit itself. And an ``nn.Sequential`` of n ≥ 8 layers that are
    no blocks is cut into runs of √n layers, each a unit (Chen et al. 2016, arXiv 1604.06174). If this finds nothing,
    and ``part`` itself is an ``nn.Sequential`` of several layers, ``part`` is cut into such runs.

    Args:
        part: the modules on this rank; their names are those of the whole model.
        choice: the modules to recompute: a rule, or a sequence of names and classes of modules, of which absent ones
            are ignored; None for none, which gives empty ``whole`` and ``runs``.

    Returns:
        A ``CheckpointUnits``: ``whole``, modules to recompute; ``runs``, a dict from each sequence of layers to a list
        of tuples, each with the names of consecutive children that are recomputed together; and the options ``every``
        (only the first of so many neighbouring runs is to be recomputed; ``whole`` is already thinned out) and
        ``selective`` (save the results of expensive operators).
    """
    units = CheckpointUnits()
    if choice is None:
        return units
    if not isinstance(choice, Blocks):
        names = {entry for entry in choice if isinstance(entry, str)}
        classes = tuple(entry for entry in choice if not isinstance(entry, str))
        units.whole = [m for name, m in part.named_modules() if name in names or isinstance(m, classes)]
    else:
        units.every, units.selective = choice.every, isinstance(choice, Selective)
        _split(part, parameter_elements(part) / 2, units)
        if not units and is_sequence(part) and len(list(part.children())) > 1:
            units.runs[part] = _runs(part)
        units.whole = units.whole[:: choice.every]
    return units


def is_sequence(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Sequential`` with its original forward, which calls its children in order.

    True also for a subclass that inherits this forward; False for one that overrides it.
    """
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def is_composite(module: nn.Module) -> bool:
    """Return whether a module has children and parameters."""
    return next(module.children(), None) is not None and parameter_elements(module) > 0


def parameter_elements(module: nn.Module) -> int:
    """Return the number of elements of all parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def _split(module: nn.Module, most: float, units: CheckpointUnits) -> None:
    """Collect units below ``module``: members of stacks of blocks, and modules of at most ``most`` parameters.

    That a unit should hold at most half of the model is a guess: a unit's activations must fit into memory at once,
    and before the first batch only parameter counts are known.
    """
    for child in filter(is_composite, module.children()):
        before = len(units)
        holds_only = isinstance(child, nn.ModuleList | nn.ModuleDict)
        blocks = sum(map(is_composite, child.children()))
        if is_sequence(child) and not blocks and len(list(child.children())) >= _LONG:
            units.runs[child] = _runs(child)
        elif holds_only or (is_sequence(child) and blocks > 1) or parameter_elements(child) > most:
            _split(child, most, units)
        if len(units) == before and not holds_only and child not in units.whole:
            units.whole.append(child)


def _runs(sequence: nn.Module) -> list[tuple[str, ...]]:
    """Cut n layers into √n runs, which minimises peak activation memory (Chen et al. 2016, arXiv 1604.06174)."""
    names = [name for name, _ in registered_children(sequence)]
    length = math.ceil(math.sqrt(len(names)))
    return [tuple(names[start : start + length]) for start in range(0, len(names), length)]
