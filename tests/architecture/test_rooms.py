"""Who may import whom: the layers of ``docs/architecture.md``, held by reading every import there is."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.sources import ROOT, SOURCE, dotted, imports, modules, room, trees

LAYERS = (
    "cli",
    "compare chaos doctor report planning horovod",
    "train tasks",
    "parallel",
    "workload",
    "checkpoint data metrics",
    "nn optim",
    "comm",
    "launcher",
    "types errors config native process_context device cgroup host_memory torch_compat python_compat distribution",
)
"""Rooms by layer, the highest first. A room imports lower layers; of its own layer nothing."""

HEIGHT = {name: len(LAYERS) - place for place, names in enumerate(LAYERS) for name in names.split()}
BASE = frozenset(LAYERS[-1].split())
"""The lowest layer, whose modules may import each other."""

WITHIN_A_LAYER = {("train", "tasks")}

MODULES = modules()
KNOWN = frozenset(MODULES)

TYPES_ONLY = {("types", "comm")}
"""Imports allowed under TYPE_CHECKING alone, where they never run: the protocols name what a layout is built with."""

ENTRANCES = frozenset({"tutti", "__main__"})
"""May import everything: the package itself (lazily: test_imports.py)."""

COMPOSERS = frozenset({"tutti.parallel.registry", "tutti.parallel.hybrid_layout"})
"""Modules of ``parallel`` that put its members together, and that no member imports (docs/decisions/022)."""


def may_import(importer: str, target: str) -> bool:
    """Whether one module may import another, by the layers of their rooms.

    >>> may_import("tutti.parallel.fsdp.sharded", "tutti.parallel.ddp.allreduce")
    True
    >>> may_import("tutti.comm.communicator", "tutti.data.feed")
    False
    """
    here, there = room(importer), room(target)
    if here in ENTRANCES or (here, there) in WITHIN_A_LAYER:
        return True
    if here == there == "parallel":
        return member(target) in (None, "ddp", member(importer)) or importer in COMPOSERS
    return here == there or HEIGHT[here] > HEIGHT[there] or {here, there} <= BASE


def member(module: str) -> str | None:
    """The folder of ``parallel`` that a module is in; None for modules beside the folders."""
    parts = module.split(".")
    folder = len(parts) > 3 or (len(parts) == 3 and MODULES[module].name == "__init__.py")
    return parts[2] if folder else None


def violations() -> set[str]:
    """Every import against the layers, as ``module → module``."""
    return {
        f"{name} → {found.target}"
        for name, path in MODULES.items()
        for found in imports(path, KNOWN)
        if found.target.split(".")[0] == "tutti"
        and found.target != "tutti"
        and not may_import(name, found.target)
        and not (found.typing_only and (room(name), room(found.target)) in TYPES_ONLY)
    }


def test_every_room_is_in_a_layer() -> None:
    assert {room(name) for name in MODULES} <= HEIGHT.keys() | ENTRANCES


def test_the_document_says_the_same() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ((?:`\w+` ?)+) \|[^|]*\| (\d+) \|$", text.split("## Rooms")[1].split("## ")[0], re.MULTILINE
    )
    assert {name: int(layer) for names, layer in rows for name in re.findall(r"`(\w+)`", names)} == HEIGHT


def test_modules_import_lower_layers_alone() -> None:
    assert not violations(), "the importing module, or the imported part, is in the wrong room"


def test_no_member_imports_what_composes_members() -> None:
    wrong = [
        f"{name} → {found.target}"
        for name, path in MODULES.items()
        if room(name) == "parallel" and member(name) is not None
        for found in imports(path, KNOWN)
        if found.target in COMPOSERS
    ]
    assert not wrong


def run_time_imports(name: str) -> set[str]:
    """Our own modules that ``name`` loads when it runs, at once or later."""
    return {found.target for found in imports(MODULES[name], KNOWN) if not found.typing_only} & KNOWN - {name}


def test_no_cycle_between_modules_at_run_time() -> None:
    graph = {name: run_time_imports(name) for name in MODULES if room(name) not in {*ENTRANCES, "cli"}}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " → ".join(error.args[1]))


DISTRIBUTED = "torch.distributed"

DISTRIBUTED_PARTS = {
    "tutti.parallel.fsdp.fully_sharded": {
        f"{DISTRIBUTED}.fsdp",
        f"{DISTRIBUTED}.device_mesh",
        f"{DISTRIBUTED}.tensor",
    },
    "tutti.parallel.fsdp.fsdp_collectives": {f"{DISTRIBUTED}.fsdp"},
    "tutti.parallel.fsdp.sharded_reads": {f"{DISTRIBUTED}.tensor"},
    "tutti.parallel.tensor.split_reads": {f"{DISTRIBUTED}.tensor"},
    "tutti.checkpoint.export_folder": {f"{DISTRIBUTED}.checkpoint"},
    "tutti.torch_compat": {DISTRIBUTED},
    "tutti.device": {DISTRIBUTED},
}
"""Parts of ``torch.distributed`` that modules outside of ``comm`` and ``launcher`` use. No module calls a collective.

``parallel/fsdp`` wraps ``fully_shard``, which reduces over a group of ``comm``, and lets a DTensor divide itself again
that PyTorch has divided otherwise than its parameter; the two ``*_reads`` recognise DTensors, and cut one from a tensor
at hand without communication; ``export_folder`` writes PyTorch's own file format in one
process; ``torch_compat`` has the private names of every part; ``device`` asks for the backends of this PyTorch.
"""


def distributed_uses(name: str) -> set[tuple[str, int]]:
    """Every import and mention of ``torch.distributed`` or a part of it that runs, with its line."""
    path = MODULES[name]
    found = imports(path, KNOWN)
    typing_only = {each.line for each in found if each.typing_only}
    nodes = [node for _, tree in trees([path], "distributed") for node in ast.walk(tree)]
    uses = [(each.target, each.line) for each in found]
    uses += [(dotted(node), node.lineno) for node in nodes if isinstance(node, ast.Attribute)]
    return {(target, line) for target, line in uses if is_part(target, DISTRIBUTED) and line not in typing_only}


def is_part(name: str, whole: str) -> bool:
    """Whether a dotted name is ``whole`` or inside of it.

    >>> is_part("torch.distributed.fsdp", "torch.distributed"), is_part("torch.distributed_c10d", "torch.distributed")
    (True, False)
    """
    return f"{name}.".startswith(f"{whole}.")


def test_only_comm_and_launcher_use_torch_distributed() -> None:
    wrong = [
        f"{MODULES[name].relative_to(SOURCE)}:{line} {target}"
        for name in MODULES
        if room(name) not in {"comm", "launcher"}
        for target, line in sorted(distributed_uses(name))
        if not any(is_part(target, part) for part in DISTRIBUTED_PARTS.get(name, ()))
    ]
    assert not wrong, "collectives are called in tutti.comm alone; use what it offers"


def test_every_part_of_torch_distributed_that_is_allowed_is_used() -> None:
    unused = [
        f"{name}: {part}"
        for name, parts in DISTRIBUTED_PARTS.items()
        for part in parts
        if not any(is_part(target, part) for target, _ in distributed_uses(name))
    ]
    assert not unused


COLLECTIVES = """
    all_reduce reduce broadcast all_gather all_gather_into_tensor gather scatter reduce_scatter reduce_scatter_tensor
    all_to_all all_to_all_single send recv isend irecv batch_isend_irecv barrier monitored_barrier
    broadcast_object_list all_gather_object gather_object scatter_object_list
"""
HOLDERS = ("dist", "distributed", "torch.distributed")


def test_only_comm_calls_collectives() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node.func)}"
        for path, tree in trees([path for name, path in MODULES.items() if room(name) != "comm"], *HOLDERS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in COLLECTIVES.split()
        and dotted(node.func.value) in HOLDERS
    ]
    assert not wrong, "collectives are called in tutti.comm alone; use what it offers"


def test_only_normalisation_asks_whether_a_gradient_is_finite() -> None:
    rooms = {name: path for name, path in MODULES.items() if name != "tutti.parallel.normalisation"}
    asking = [path for name, path in rooms.items() if name == "tutti.train.custom_loop" or room(name) == "parallel"]
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path, tree in trees(asking, "isfinite")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) in {"math.isfinite", "torch.isfinite"}
    ]
    assert not wrong, "use finite_by_norm and is_finite of tutti.parallel.normalisation"


def test_modules_named_by_the_map_of_a_room_exist() -> None:
    """``__init__`` of a large room lists its modules by purpose; others it leaves to the reader."""
    maps = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in SOURCE.rglob("__init__.py")}
    named = {path: re.findall(r"``([a-z_0-9]+)``", text) for path, text in maps.items() if "Start with" in text}
    assert len(named) >= 10
    gone = [
        f"{path.parent}: {name}"
        for path, names in named.items()
        for name in names
        if not (path.parent / f"{name}.py").exists()
    ]
    assert not gone
