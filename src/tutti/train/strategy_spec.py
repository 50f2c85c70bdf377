"""A strategy whose options are Python values: lists of modules, a TP plan as a dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tutti.config.strategy_choice import StrategyChoice, parse_strategy
from tutti.errors import UsageError


@dataclass(frozen=True)
class StrategySpec:
    """A distribution strategy (such as ``pipeline``) with options as Python values; made by ``tutti.strategy``.

    Attributes:
        name: name of the strategy.
        options: values by option name: modules, names, lists, dictionaries or numbers.
    """

    name: str
    options: Mapping[str, Any]


def strategy(name: str, **options: Any) -> StrategySpec:
    """Return a strategy for ``tutti.prepare`` whose options are Python values in place of text.

    Args:
        name: name of the strategy, as in ``name:key=value``.
        options: options of the strategy. A module may be given by name or as the module object of the model. A list
            stands for ``+`` in the text form, a list of lists for ``/``, and a dictionary for ``key:value``.

    Example:
        ``tutti.strategy("pipeline", stages=[[model.embed, model.block1], [model.block2, model.head]])`` or
        ``tutti.strategy("tensor", plan={"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise"})``

    Returns:
        A ``StrategySpec``: ``name`` and ``options`` as they were given; ``tutti.prepare`` checks the options.
    """
    return StrategySpec(name, options)


def choose_strategy(given: StrategyChoice | str | StrategySpec, model: nn.Module) -> StrategyChoice:
    """Return the strategy of a run as the object that all later stages take; text is parsed here and nowhere later.

    Args:
        given: a strategy that a configuration has parsed, which is returned as it is; text; or the result of
            ``tutti.strategy``.
        model: the script's model, in which the names of modules are looked up.

    Raises:
        UsageError: ``given`` is of another type, or an unknown strategy, option or value.
    """
    return given if isinstance(given, StrategyChoice) else parse_strategy(strategy_text(given, model))


def strategy_text(given: StrategyChoice | str | StrategySpec, model: nn.Module) -> str:
    """Return a strategy as text ``name:key=value,…``, in which modules are written as their names in ``model``.

    Text is returned as it is, also that of a parsed strategy; options that are None are left out.

    Args:
        given: a strategy as text, parsed, or as ``tutti.strategy`` makes it.
        model: the script's model, in which the names of modules are looked up.

    >>> layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> strategy_text(strategy("pipeline", stages=[[layers[0], "1"], [layers[2]]], micro_batches=4), layers)
    'pipeline:stages=0+1/2,micro_batches=4'
    >>> strategy_text(strategy("tensor", plan={"0": "colwise", "2": "rowwise"}, sequence=True), layers)
    'tensor:plan=0:colwise+2:rowwise,sequence=true'

    Raises:
        UsageError: ``given`` is of another type, or an option holds a module of another model, or a value that text
            cannot hold.
    """
    if isinstance(given, str):
        return given
    if isinstance(given, StrategyChoice):
        return given.text
    if not isinstance(given, StrategySpec):
        raise UsageError(
            f"strategy is {given!r}", remedy="give text such as 'mirrored', or tutti.strategy(name, key=value)"
        )
    names = {module: name for name, module in model.named_modules()}
    texts = [f"{key}={_text(value, names, key)}" for key, value in given.options.items() if value is not None]
    return given.name + (f":{','.join(texts)}" if texts else "")


def _text(value: Any, names: Mapping[nn.Module, str], option: str) -> str:
    if isinstance(value, nn.Module):
        if not names.get(value):
            raise UsageError(
                f"a {type(value).__name__} in {option} is no module of the model",
                where="tutti.strategy",
                remedy="give modules of the model that tutti.prepare gets, or their names",
            )
        return names[value]
    if isinstance(value, Mapping):
        return "+".join(f"{_word(key, option)}:{_word(each, option)}" for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        lists = any(isinstance(each, Sequence) and not isinstance(each, str) for each in value)
        return ("/" if lists else "+").join(_text(each, names, option) for each in value)
    if isinstance(value, bool):
        return str(value).lower()
    return _word(value, option)


def _word(value: Any, option: str) -> str:
    text = str(value)
    if not isinstance(value, str | int | float) or any(sign in text for sign in ",+/=") or not text:
        raise UsageError(
            f"{value!r} is not possible in {option}", where="tutti.strategy", remedy="give a name or a number"
        )
    return text
