"""``docs/environment.md`` lists all that tutti changes in a process, and all its further calls of the script's code."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT, dotted, modules, trees

CALLS = (
    "atexit.register",
    "child.drain_gloo",
    "faulthandler.enable",
    "faulthandler.register",
    "gc.disable",
    "gc.freeze",
    "libc.mallopt",
    "os.environ.pop",
    "os.environ.setdefault",
    "os.environ.update",
    "random.seed",
    "signal.pthread_sigmask",
    "signal.signal",
    "sys.meta_path.insert",
    "torch.manual_seed",
    "torch.set_num_threads",
    "torch.use_deterministic_algorithms",
    "warnings.filterwarnings",
    "warnings.simplefilter",
)
METHODS = ("__enter__", "addHandler")
"""Methods whose calls are effects, whatever their object: a function mode may stay entered."""

ASSIGNED = ("os.environ", "sys.excepthook", "sys.stderr", "sys.stdout", "threading.excepthook", "torch.save")

LISTED = {
    "tutti.config.verbosity": ("a handler of the logger `tutti`",),
    "tutti.device": (
        "`torch.use_deterministic_algorithms(True)`",
        "`TORCH_NCCL_ASYNC_ERROR_HANDLING=3`",
        "is the current device",
    ),
    "tutti.launcher.context": (
        "`sys.excepthook`",
        "`GLOO_SOCKET_IFNAME`",
        "exit handler (`tutti.shutdown`)",
        "a twentieth of a second",
    ),
    "tutti.launcher.malloc_tuning": ("`mallopt`",),
    "tutti.launcher.watchdog": ("a forked watchdog process with an exit handler",),
    "tutti.launcher.dumps": ("`faulthandler`",),
    "tutti.comm.collective_engine": ("an exit handler of the collectives",),
    "tutti.horovod.torch.job": ("`import tutti.horovod.torch`",),
    "tutti.horovod.installing": ("`tutti.horovod.install()`",),
    "tutti.metrics.profile": ("`KINETO_LOG_LEVEL=6`",),
    "tutti.nn.global_draws": ("the global generators of Python and NumPy get a seed",),
    "tutti.nn.script_mode": ("a torch function mode stays on the calling thread's stack",),
    "tutti.optim.mixing": ("tries the optimizer once with a single CPU thread",),
    "tutti.parallel.parameter_server.server_supervisor": ("an exit handler of the parameter servers",),
    "tutti.train.metric_loggers": ("an exit handler of each logger",),
    "tutti.train.preemption": ("`run.stopping()`",),
    "tutti.train.prepare": ("`torch.set_num_threads(1)`",),
    "tutti.train.script_checks.followed_numbers": ("`torch.save` writes these numbers as plain ones",),
    "tutti.train.script_checks.entered_mode": (
        "a function mode follows values from batches to losses",
        "another one follows them to the step of an optimizer",
    ),
}
"""Modules that change the process of a user's script, with words of the page for each change."""

OWN_PROCESS = """
    __main__ cli.chaos_command cli.run_command cli.train_command compare.runs horovod.run_function launcher.agent
    launcher.child launcher.elastic_driver launcher.launch launcher.ray_engine launcher.script_rank
    launcher.stdin_control launcher.supervisor train.rank_entry train.task_run workload.bench_device data.loader
    parallel.parameter_server.server parallel.parameter_server.server_session
"""
"""Modules that do so in processes of tutti alone: its commands, the ranks it starts, loader processes and servers."""

WITHIN_A_CALL = {
    "tutti.checkpoint.export_folder",
    "tutti.data.global_generators",
    "tutti.launcher.held_signals",
    "tutti.nn.init_on_disk",
    "tutti.nn.recompute",
    "tutti.python_compat",
    "tutti.report.report_charts",
    "tutti.train.batch_size_schedule",
    "tutti.train.script_checks.loss_calls",
}
"""Modules that change filters of warnings, handlers of signals, the garbage collector or modes, and restore them."""

FURTHER = ("check_repeats", "python_state", "trace_workload", "trial_call", "untouched")
"""Functions for a further call of the script's code: context managers that undo its effects, and such calls."""

CALLS_AGAIN = {
    "tutti.data.reader": ("the first iteration reads the rank's first sample of a map-style data set two more times",),
    "tutti.parallel.fsdp.routed_modules": ("rank 0 calls the loss function once on the first samples",),
    "tutti.parallel.pipeline.module_timing": ("the modules' times",),
    "tutti.parallel.pipeline.pipeline_layout": ("what a forward writes",),
    "tutti.parallel.tensor.block_call": ("which layers can be split",),
    "tutti.parallel.tensor.loss_parallel_plan": ("which layers can be split",),
    "tutti.parallel.tensor.split_reads": ("which layers can be split",),
    "tutti.parallel.tensor.whole_flop": ("what share of its operations stays whole",),
    "tutti.train.script_checks.mistake_checks": ("five to nine times on a few samples", "the second derivative"),
    "tutti.train.script_checks.module_trials": ("up to three forwards, without gradients, of a module of yours",),
    "tutti.train.script_checks.worker_trials": (
        "up to three calls of the loss function for each worker's first micro-batch",
        "up to three calls of the loss function for each micro-batch",
        "up to 27 calls of the loss function",
    ),
    "tutti.train.training_data": ("is called several times on the first samples",),
    "tutti.train.utilisation": ("traces the loss function of the task",),
}
"""Modules that call the script's code more often than plain PyTorch, with words of the page for each case."""

OF_COMMANDS = "cli planning tasks workload"
"""Rooms whose further calls are a command's own work, such as that of ``tutti plan``."""


def calls_again(tree: ast.AST) -> bool:
    """Return whether ``tree`` uses one of ``FURTHER``."""
    calls = [dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(name.rpartition(".")[2] in FURTHER for name in calls)


def effects(tree: ast.AST) -> Iterator[str]:
    """Yield each change of the process that ``tree`` makes by its own code."""
    for node in ast.walk(tree):
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        if called in CALLS or called.rpartition(".")[2] in METHODS:
            yield called
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            place = target.value if isinstance(target, ast.Subscript) else target
            if dotted(place) in ASSIGNED:
                yield dotted(place)


def test_modules_that_change_the_process_are_known() -> None:
    names = {path: name for name, path in modules().items()}
    words = {name.rpartition(".")[2] for name in (*CALLS, *METHODS, *ASSIGNED)}
    found = {names[path] for path, tree in trees(names, *words) if any(effects(tree))}
    assert found == {*LISTED, *(f"tutti.{name}" for name in OWN_PROCESS.split()), *WITHIN_A_CALL}


@pytest.mark.parametrize("words", [words for found in LISTED.values() for words in found])
def test_the_page_lists_the_change(words: str) -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    changes = page.split("## What `tutti.init` changes in a process")[1].split("\n## What calls your code")[0]
    assert words in changes


def test_modules_that_call_the_scripts_code_again_are_known() -> None:
    names = {path: name for name, path in modules().items()}
    found = {names[path] for path, tree in trees(names, *FURTHER) if calls_again(tree)}
    assert {name for name in found if name.split(".")[1] not in OF_COMMANDS.split()} == set(CALLS_AGAIN)


@pytest.mark.parametrize("words", [words for found in CALLS_AGAIN.values() for words in found])
def test_the_page_lists_the_calls(words: str) -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert words in page.split("## What calls your code more often")[1].split("\n## Signals")[0]


def test_each_call_has_a_way_out() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    rows = page.split("## What calls your code more often")[1].split("\n## Signals")[0].split("|---|---|---|\n")[1]
    assert all(len(row.strip("| ").split(" | ")) == 3 for row in rows.strip().splitlines())


@pytest.mark.parametrize("code", ["atexit.register(f)", "sys.excepthook = f", "os.environ['A'] = ''", "m.__enter__()"])
def test_a_change_is_noticed(code: str) -> None:
    assert list(effects(ast.parse(code)))
