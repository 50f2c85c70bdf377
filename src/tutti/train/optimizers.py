"""Optimizers of a run, given as options or made by the user: their factory, checks and description."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tutti.config.lr_rule import NoRule
from tutti.config.optimizer_config import ImportedOptimizerConfig, LayerWiseConfig, MuonConfig, OptimizerChoice
from tutti.errors import UsageError, counted, did_you_mean
from tutti.nn.sparse_layers import check_sparse_step
from tutti.optim.factory import from_config, from_instance
from tutti.optim.scaling import scaled
from tutti.optim.several import several
from tutti.types.optimizer_protocols import OptimizerFactory


def factory(
    optimizer: Sequence[Optimizer] | OptimizerChoice, rule: NoRule, batch_size: int, sparse: Collection[str] = ()
) -> OptimizerFactory:
    """Return a function that builds the run's optimizer over named parameters, at the learning rate of the run.

    Args:
        optimizer: options of an optimizer that the run makes, or the script's optimizers.
        rule: the rule that scales the learning rate of an optimizer made from options with the batch size; ``NoRule``
            is the base class of all rules, and itself leaves the rate.
        batch_size: samples of the global batch, for ``rule``.
        sparse: names of parameters that may have sparse gradients; if there are any, an optimizer made from options
            uses none of PyTorch's fused kernels, which do not take them.

    Returns:
        A function that takes (name, parameter) pairs and returns an optimizer over these parameters. Several optimizers
        of the script become one object; for a single optimizer none of whose parameters is among the pairs the result
        is None. For a script's own optimizer, the first call whose pairs include all its parameters returns the
        optimizer itself; any other call makes a new one of the same class and settings, or raises UsageError if the
        script's optimizer has already stepped.

    Raises:
        UsageError: a rule other than ``NoRule`` for the script's own optimizers; or a rule that does not fit the
            optimizer of the options, such as AdaScale without SGD.
    """
    if not isinstance(optimizer, OptimizerChoice):
        if type(rule) is not NoRule:
            raise UsageError(
                "lr_scale is for an optimizer given as text",
                why="your own scheduler would restore its own rates",
                remedy="make it with the scaled rate: see tutti.optim.learning_rate",
            )
        return several([from_instance(each) for each in optimizer])
    return from_config(scaled(optimizer.options, rule, batch_size), bool(sparse))


def imported_optimizer(optimizer: OptimizerChoice, model: nn.Module, rule: NoRule, batch_size: int) -> list[Optimizer]:
    """Construct the optimizer of another package that ``optimizer`` names, over the model's trainable parameters.

    Its module may also lie in the current directory. The class is called with one group of parameters, the learning
    rate that ``rule`` gives for ``batch_size``, and the other options of ``optimizer``.

    Args:
        optimizer: options of an optimizer.
        model: the script's model.
        rule: the rule that scales the learning rate with the batch size; ``NoRule`` leaves the rate.
        batch_size: samples of the global batch, for ``rule``.

    Returns:
        A list of the one optimizer; an empty list for a built-in optimizer, which ``factory`` makes.

    Raises:
        UsageError: the class cannot be imported, is no optimizer, or refuses these arguments; or ``rule`` needs a
            built-in optimizer, as AdaScale does.
    """
    config = optimizer.options
    if not isinstance(config, ImportedOptimizerConfig):
        return []
    given = scaled(config, rule, batch_size)
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(config.module)
    except ImportError as error:
        raise UsageError(f"the module of --optimizer {optimizer.text} cannot be imported", why=str(error)) from error
    finally:
        sys.path.remove(here)
    kind = getattr(module, config.name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        names = [
            name for name, value in vars(module).items() if isinstance(value, type) and issubclass(value, Optimizer)
        ]
        raise UsageError(f"{config.module} has no optimizer '{config.name}'", remedy=did_you_mean(config.name, names))
    build: Any = kind
    try:
        return [build([p for p in model.parameters() if p.requires_grad], lr=given.lr, **config.options)]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{config.name} refuses its arguments: {error}",
            where=f"--optimizer {optimizer.text}",
            remedy=f"it takes {inspect.signature(build)}",
        ) from error


def check_takes_sparse(
    optimizer: Sequence[Optimizer] | OptimizerChoice, model: nn.Module, sparse: Collection[str]
) -> None:
    """Raise UsageError if an optimizer cannot step with sparse gradients, as of ``nn.Embedding(…, sparse=True)``.

    To find out, makes an optimizer of the same class and settings and lets it step on a parameter of two rows. No error
    is raised where this is not possible: a class that needs a closure, or whose constructor refuses the settings.

    Args:
        optimizer: options of an optimizer that the run makes, or the script's optimizers.
        model: the script's model.
        sparse: names of the model's parameters with sparse gradients.
    """
    toy = nn.Parameter(torch.zeros(2, 1))
    toy.grad = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), (2, 1), check_invariants=False
    )
    for trial in _trials(optimizer, model, sparse, toy):
        try:
            trial.step()
        except (RuntimeError, UsageError) as error:
            check_sparse_step(trial, error, where=", ".join(sorted(sparse)[:3]))
        except TypeError:
            # Its step() needs a closure.
            continue


def steps_alike(optimizer: Sequence[Optimizer] | OptimizerChoice, model: nn.Module, sparse: Collection[str]) -> bool:
    """Return whether an optimizer updates a parameter alike from a sparse gradient and from the same dense one.

    True for SGD and Adagrad, False for ``SparseAdam``. To find out, optimizers of the same class and settings make four
    steps on small parameters, each with a gradient of other rows.

    Args:
        optimizer: options of an optimizer that the run makes, or the script's optimizers.
        model: the script's model.
        sparse: names of the model's parameters with sparse gradients.

    Returns:
        False also where such optimizers cannot be made, or refuse one of the gradients.
    """
    toys = [nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)) for _ in range(2)]
    tried = [list(_trials(optimizer, model, sparse, toy)) for toy in toys]
    for pair in zip(*tried, strict=True):
        for step in range(4):
            dense = torch.zeros(3, 2, dtype=torch.float64)
            dense[step % 3] = 0.5 - step
            try:
                for trial, toy, gradient in zip(pair, toys, (dense.to_sparse(1), dense), strict=True):
                    toy.grad = gradient
                    trial.step()
            except (RuntimeError, TypeError, UsageError):
                return False
        if not torch.allclose(toys[0], toys[1], rtol=1e-12, atol=1e-12):
            return False
    wanted = {id(p) for name, p in model.named_parameters() if name in sparse}
    groups = [] if isinstance(optimizer, OptimizerChoice) else [g for each in optimizer for g in each.param_groups]
    needed = sum(any(id(p) in wanted for p in group["params"]) for group in groups)
    return len(tried[0]) == (1 if isinstance(optimizer, OptimizerChoice) else needed)


def _trials(
    optimizer: Sequence[Optimizer] | OptimizerChoice, model: nn.Module, sparse: Collection[str], toy: nn.Parameter
) -> Iterator[Optimizer]:
    """Yield optimizers of ``toy`` with the settings of each group that has a parameter of ``sparse``."""
    if isinstance(optimizer, OptimizerChoice):
        made = factory(optimizer, NoRule(), 1, sparse)([("toy", toy)])
        yield from () if made is None else (made,)
        return
    wanted = {id(p) for name, p in model.named_parameters() if name in sparse}
    for each in optimizer:
        kind: Any = type(each)
        known = set(inspect.signature(kind).parameters)
        for group in each.param_groups:
            if any(id(p) in wanted for p in group["params"]):
                settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
                # A custom class's constructor may not take its groups' settings; then its first real step will tell.
                with suppress(Exception):
                    yield kind([{**settings, "params": [toy]}], **{k: v for k, v in settings.items() if k in known})


def describe_optimizers(optimizer: Sequence[Optimizer] | OptimizerChoice, lr_scale: object) -> list[str]:
    """Return texts that state class and options of the run's optimizers; ``tutti.prepare`` compares them over ranks.

    Args:
        optimizer: options of an optimizer that the run makes, or the script's optimizers.
        lr_scale: the rule that scales the learning rate with the batch size; part of the text for options, unused for
            the script's optimizers.

    Returns:
        For options a list of one text, ``optimizer {options}, lr_scale {lr_scale}``. For the script's optimizers a list
        with, for each optimizer in order, a text with its class name and then one text for each parameter group: its
        index, its number of parameters, and its options (all keys except ``params``) as a dict.
    """
    if isinstance(optimizer, OptimizerChoice):
        return [f"optimizer {optimizer.text}, lr_scale {lr_scale}"]
    return [line for each in optimizer for line in _described(each)]


def _described(optimizer: Optimizer) -> list[str]:
    lines = [f"optimizer {type(optimizer).__name__}"]
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in sorted(group.items()) if key != "params"}
        lines.append(f"optimizer group {number} of {counted(len(group['params']), 'parameter')}: {options}")
    return lines


def check_fits(optimizer: Sequence[Optimizer] | OptimizerChoice, model: nn.Module) -> None:
    """Raise UsageError if an optimizer does not fit the model, by its parameters or its patterns of parameter names.

    Errors are a parameter that the model does not have, and a pattern that matches none of the model's parameter names.

    Args:
        optimizer: options of an optimizer that the run makes, whose patterns (``exclude`` of LARS and LAMB, ``adam`` of
            Muon) are matched with the model's parameter names; or the script's optimizers, whose parameters are looked
            up in the model.
        model: the script's model.
    """
    if not isinstance(optimizer, OptimizerChoice):
        known = {id(p) for p in model.parameters()}
        if any(id(p) not in known for each in optimizer for group in each.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer has parameters that the model does not have",
                why="their gradients would be of each rank's own samples",
                remedy="make it of model.parameters(), and register everything that is trained in the model; or give"
                " tutti.prepare also the module that has them, such as a loss: tutti.prepare([model, loss], …)",
            )
        return
    options, names = optimizer.options, [name for name, _ in model.named_parameters()]
    if isinstance(options, MuonConfig):
        _check_patterns(
            [p for p in options.adam if p not in MuonConfig.adam], names, f"--optimizer {optimizer.text}, adam"
        )
    elif isinstance(options, LayerWiseConfig):
        _check_patterns(options.exclude, names, f"--optimizer {optimizer.text}, exclude")


def _check_patterns(patterns: Collection[str], names: Sequence[str], where: str) -> None:
    """Raise UsageError for a name pattern other than ``none`` that fits no parameter."""
    for pattern in patterns:
        if pattern != "none" and not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"the model has no parameter '{pattern}'", where=where, remedy=did_you_mean(pattern, names)
            )
