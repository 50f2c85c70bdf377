"""What tutti changes in a process beyond its own objects is listed in ``docs/environment.md``, and nothing else is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, dotted, modules

CALLS = (
    "atexit.register",
    "faulthandler.enable",
    "faulthandler.register",
    "gc.disable",
    "gc.freeze",
    "libc.mallopt",
    "os.environ.pop",
    "os.environ.setdefault",
    "os.environ.update",
    "signal.pthread_sigmask",
    "signal.signal",
    "sys.meta_path.insert",
    "torch.manual_seed",
    "torch.set_num_threads",
    "warnings.filterwarnings",
    "warnings.simplefilter",
)
ASSIGNED = ("os.environ", "sys.excepthook", "sys.stderr", "sys.stdout", "threading.excepthook")

LISTED = {
    "tutti.launcher.context": ("`sys.excepthook`", "`GLOO_SOCKET_IFNAME`", "an exit handler"),
    "tutti.launcher.malloc_tuning": ("`mallopt`",),
    "tutti.launcher.watchdog": ("a forked watchdog process",),
    "tutti.launcher.dumps": ("`faulthandler`",),
    "tutti.comm.collective_engine": ("an exit handler of the collectives",),
    "tutti.horovod.torch.mpi_ops": ("`import tutti.horovod.torch`",),
    "tutti.horovod.installing": ("`tutti.horovod.install()`",),
    "tutti.metrics.profile": ("`KINETO_LOG_LEVEL=6`",),
    "tutti.optim.mixing": ("tries the optimizer once with a single CPU thread",),
    "tutti.parallel.parameter_server.server_supervisor": ("an exit handler of the parameter servers",),
    "tutti.train.metric_loggers": ("an exit handler of each logger",),
    "tutti.train.preemption": ("`run.stopping()`",),
    "tutti.train.prepare": ("`torch.set_num_threads(1)`",),
}
"""Modules that change the process of a user's script, with words of the page for each change."""

OWN_PROCESS = """
    __main__ cli.chaos_command cli.run_command cli.train_command compare.runs launcher.agent launcher.child
    launcher.elastic_driver launcher.launch launcher.ray_engine launcher.script_rank launcher.stdin_control
    launcher.supervisor train.rank_entry train.task_run workload.bench_device data.loader
    parallel.parameter_server.server parallel.parameter_server.server_session
"""
"""Modules that do so in processes of tutti alone: its commands, the ranks it starts, loader processes and servers."""

WITHIN_A_CALL = {
    "tutti.checkpoint.export_folder",
    "tutti.device",
    "tutti.launcher.held_signals",
    "tutti.python_compat",
    "tutti.report.report_charts",
    "tutti.train.batch_size_schedule",
}
"""Modules that change warnings' filters, signals' handlers or the garbage collector for a while, and restore them."""


def effects(tree: ast.AST) -> Iterator[str]:
    """Yield each change of the process that ``tree`` makes by its own code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in CALLS:
            yield dotted(node.func)
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            place = target.value if isinstance(target, ast.Subscript) else target
            if dotted(place) in ASSIGNED:
                yield dotted(place)


def test_modules_that_change_the_process_are_known() -> None:
    found = {name for name, path in modules().items() if any(effects(ast.parse(path.read_text(encoding="utf-8"))))}
    assert found == {*LISTED, *(f"tutti.{name}" for name in OWN_PROCESS.split()), *WITHIN_A_CALL}


@pytest.mark.parametrize("words", [words for found in LISTED.values() for words in found])
def test_the_page_lists_the_change(words: str) -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    changes = page.split("## What `tutti.init` changes in a process")[1].split("\n## Signals")[0]
    assert words in changes


@pytest.mark.parametrize("code", ["atexit.register(f)", "sys.excepthook = f", "os.environ['A'] = 'b'"])
def test_a_change_is_noticed(code: str) -> None:
    assert list(effects(ast.parse(code)))
