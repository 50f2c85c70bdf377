"""Who may import whom: the table of ``docs/architecture.md``, held by reading every import there is."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import ROOT, SOURCE, imports, modules, room

SHARED = frozenset({"types", "errors", "spec", "laws", "native"})
"""Every room may import these, and these import no room."""

MAY_IMPORT = {
    "schedules": "",
    "world": "",
    "state": "",
    "nn": "",
    "optim": "",
    "measure": "",
    "data": "world",
    "comm": "world schedules",
    "tasks": "data nn",
    "layouts": "world comm nn schedules state",
    "exchanges": "world comm nn schedules state",
    "strategies": "layouts exchanges",
    "training": "strategies tasks optim nn data measure state world comm",
    "compare": "training",
    "chaos": "training state",
    "planning": "schedules",
    "report": "measure planning",
    "horovod": "world comm exchanges optim nn data",
}
ROOMS = {name: frozenset(text.split()) for name, text in MAY_IMPORT.items()}

MODULES = modules()
KNOWN = frozenset(MODULES)

TYPES_ONLY = {("types", "world"), ("types", "comm")}
"""Imports allowed under TYPE_CHECKING alone, where they never run: the protocols name what a layout is built with."""

ENTRANCES = frozenset({"tutti", "cli", "__main__"})
"""May import everything: the package itself (lazily: test_imports.py) and the command line."""


def allowed(importer: str) -> frozenset[str]:
    """Rooms that ``importer`` may import, itself included."""
    if importer in ENTRANCES:
        return SHARED | ROOMS.keys() | {"cli", "tutti"}
    if importer in SHARED:
        return SHARED
    return SHARED | ROOMS[importer] | {importer}


def test_every_room_is_in_the_table() -> None:
    assert {room(name) for name in MODULES} <= SHARED | ROOMS.keys() | ENTRANCES


def test_the_document_says_the_same() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text.split("## Rooms")[1].split("## ")[0], re.MULTILINE)
    assert {name: frozenset(re.findall(r"`(\w+)`", may)) for name, may in rows if name != "cli"} == ROOMS


def test_the_table_has_no_cycle() -> None:
    TopologicalSorter(ROOMS).prepare()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    here = room(module)
    wrong = [
        f"{MODULES[module].relative_to(SOURCE)}:{found.line} imports {found.target}"
        for found in imports(MODULES[module], KNOWN)
        if found.target.split(".")[0] == "tutti"
        and room(found.target) not in allowed(here)
        and not (found.typing_only and (here, room(found.target)) in TYPES_ONLY)
    ]
    assert not wrong, f"'{here}' may import {', '.join(sorted(allowed(here)))}"


def run_time_imports(name: str) -> set[str]:
    """Our own modules that ``name`` loads when it runs, at once or later."""
    return {found.target for found in imports(MODULES[name], KNOWN) if not found.typing_only} & KNOWN - {name}


def test_no_cycle_between_modules_at_run_time() -> None:
    graph = {name: run_time_imports(name) for name in MODULES if room(name) not in ENTRANCES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " → ".join(error.args[1]))


def test_only_comm_and_world_import_torch_distributed() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{found.line}"
        for name, path in MODULES.items()
        if room(name) not in {"comm", "world"}
        for found in imports(path, KNOWN)
        if found.target == "torch.distributed" and not found.typing_only
    ]
    assert not wrong, "collectives are called in tutti.comm alone; use what it offers"


COLLECTIVES = """
    all_reduce reduce broadcast all_gather all_gather_into_tensor gather scatter reduce_scatter reduce_scatter_tensor
    all_to_all all_to_all_single send recv isend irecv batch_isend_irecv barrier monitored_barrier
    broadcast_object_list all_gather_object gather_object scatter_object_list
"""


def test_only_comm_calls_collectives() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node.func)}"
        for name, path in MODULES.items()
        if room(name) != "comm"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in COLLECTIVES.split()
        and ast.unparse(node.func.value) in {"dist", "distributed", "torch.distributed"}
    ]
    assert not wrong, "collectives are called in tutti.comm alone; use what it offers"
