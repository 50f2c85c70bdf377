"""The text of an option is parsed where it enters the program, and the object is carried from there."""

from __future__ import annotations

import ast

from tests.architecture.sources import dotted, modules, trees

STRATEGIES = {
    "tutti.config.train_config": "options of a command, as a flag or from a file",
    "tutti.train.strategy_spec": "the argument of tutti.prepare",
    "tutti.planning.plan_search": "texts that a search of plans makes",
    "tutti.planning.plan_candidates": "strategies of runs that were measured, and of --strategy of tutti plan",
    "tutti.planning.planned_run": "device meshes of the plans of a search, which are cached by text",
    "tutti.planning.device_plan": "the strategy of a plan that was found",
    "tutti.cli.plan_command": "--strategy of tutti plan, which may be several",
}
"""Modules that parse the text of a strategy, with the text's origin."""

SPECIFICATIONS = {
    *("tutti.config." + name for name in ("gradient_noise", "loss_scale_config", "lr_rule", "module_config")),
    *(
        "tutti.config." + name
        for name in ("engine_config", "logger_config", "optimizer_config", "strategy_choice", "spec")
    ),
    "tutti.tasks.task_registry",  # --model, whose options the task declares
    "tutti.cli.submit_command",  # the target of tutti submit
    "tutti.planning.plan_search",  # changes the text of a strategy
    "tutti.planning.pipeline_memory",  # changes the text of a strategy
}
"""Modules that split a text ``name:key=value,…``."""


def callers(function: str) -> set[str]:
    """Modules that call a function by this name, with or without a module or class before it."""
    names = {path: name for name, path in modules().items()}
    return {
        names[path]
        for path, tree in trees(names, function.rpartition(".")[2])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and f".{dotted(node.func)}".endswith(f".{function}")
    }


def test_a_strategy_is_parsed_where_it_enters() -> None:
    assert callers("parse_strategy") == STRATEGIES.keys()


def test_a_specification_is_split_where_its_options_are() -> None:
    assert callers("Spec.parse") <= SPECIFICATIONS
