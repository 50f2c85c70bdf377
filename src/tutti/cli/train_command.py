"""``tutti train``: check the configuration, then start or join the run. Loads no torch before that."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tutti import process_context
from tutti.cli.config_checks import count_devices, possible_sizes, refuse_config, refuse_idle_wait, sets_wait
from tutti.config.dotted import dotted_words
from tutti.config.engine_config import EngineConfig, LocalEngineConfig, SlurmEngineConfig, parse_seconds
from tutti.config.metric_direction import RAW
from tutti.config.settings import FILES, HEADINGS, flag_table, resolve_config
from tutti.config.train_config import TrainConfig
from tutti.errors import FINISHED, DiskError, ExitCode, UsageError, counted
from tutti.launcher import slurm_engine, stdin_control, watchdog
from tutti.launcher.devices import count_accelerators
from tutti.launcher.encoding import json_text, toml_text
from tutti.launcher.engines import make_engine
from tutti.launcher.failure import failure_exit_code
from tutti.launcher.launch import launch
from tutti.launcher.supervisor import ELASTIC_RESTARTS, EngineJob, supervise
from tutti.metrics.progress import format_number
from tutti.metrics.records import (
    claim_run_directory,
    config_toml,
    find_run,
    make_run_directory,
    read_summary,
    record_exit,
)
from tutti.metrics.throughput import MFU
from tutti.process_context import LAUNCHED
from tutti.report.html_report import report_at_the_end
from tutti.train.engine_rank import CONFIGURATION
from tutti.train.rank_entry import PRELOADED, run_launched_rank, run_rank

log = logging.getLogger("tutti.train")

_MOMENT = 1.0

Flags = flag_table()
_HERE = HEADINGS[FILES]


def train(
    task: Annotated[str | None, Parameter(show=False)] = None,
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*", show_env_var=False)] = {},  # type: ignore[valid-type]  # noqa: B006
    config: Annotated[tuple[Path, ...], Parameter(negative="", group=_HERE, show_default=False)] = (),
    print_config: Annotated[bool, Parameter(negative="", group=_HERE, show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", group=_HERE, show_default=False)] = False,
    dry_run: Annotated[bool, Parameter(negative="", group=_HERE, show_default=False)] = False,
    memory: Annotated[str | None, Parameter(negative="", group=_HERE, show_default=False)] = None,
    changes: Annotated[tuple[str, ...], Parameter(name="--set", negative="", group=_HERE, show_default=False)] = (),
) -> int:
    """Train linear, digits, cifar10, text, membranes or your own.

    Example: tutti train digits --workers 8 --devices 2 --epochs 3
    A task of your own: tutti train file.py:function

    Parameters
    ----------
    config:
        TOML file of these options; may be repeated, the later wins
    print_config:
        print the resolved configuration as TOML and stop
    as_json:
        print summary.json instead of one line
    dry_run:
        predict memory and a step's time, and refuse what cannot fit
    memory:
        device memory for --dry-run: 16GB; default: this machine's
    changes:
        one key of an option, optimizer.lr=0.1; also written --optimizer.lr 0.1

    Returns
    -------
    int
        Exit code. 0: the run has ended as planned, or ``dry_run`` or ``print_config`` have printed. 9
        (``THRESHOLD``): the run has ended, and the target of ``--until`` was not reached. Otherwise the code of
        the failure, a member of ``tutti.errors.ExitCode``: 2 usage, 3 data, 4 checkpoint, 5 lost peer, 6 loss
        not finite, 8 disk, 75 preempted, 130 interrupted.

    Notes
    -----
    ``task`` is the name of a built-in task or ``file.py:function``; None: from a file, or from the run to resume.
    ``flags`` holds options of ``tutti train`` by field of ``TrainConfig``, as given by flags or ``TUTTI_*`` variables.
    """
    begun = time.time()
    name, chosen = resolved(task, flags, config, changes)
    if print_config:
        print(toml_text(config_toml(chosen, name), sys.stdout), end="")
        return ExitCode.DONE
    joined = process_context.read_identity(os.environ) if process_context.joined(os.environ) else None
    engine = chosen.engine()
    if joined is not None and chosen.on in (None, "none"):
        # The launcher has chosen a number within the range.
        engine = None
    if engine is not None and (joined is not None or dry_run):
        other = "--dry-run" if dry_run else "a job that another launcher has started"
        option = f"--on {chosen.on}" if chosen.on else f"--devices {chosen.devices}"
        raise UsageError(f"{option} cannot be combined with {other}", remedy="leave out one of the two")
    if sets_wait(flags, config):
        refuse_idle_wait(chosen, engine)
    sizes = [] if engine is None else possible_sizes(name, chosen)
    chosen = dataclasses.replace(chosen, devices=str(sizes[-1] if engine else count_devices(chosen, joined)))
    if joined is not None:
        process_context.check_own_restarts(chosen.max_restarts)
    refuse_config(name, chosen)
    if dry_run:
        return _dry_run(name, chosen, memory)
    if memory is not None:
        raise UsageError("--memory needs --dry-run", remedy="add --dry-run, or leave it out")
    os.environ[LAUNCHED] = repr(begun)
    stdin_control.control_by_stdin(os.environ)
    # Every rank of a joined job runs this code; all ranks share the directory of rank 0.
    first = joined is None or joined.rank == 0
    again = (
        slurm_engine.restarts(os.environ) if isinstance(engine, SlurmEngineConfig) else joined.attempt if joined else 0
    )
    with contextlib.ExitStack() as held:
        directory = _claimed_directory(chosen, name, again > 0, held) if first else None
        if joined is not None:
            watchdog.start_watchdog(joined.rank, chosen.limits)
        if engine is not None and directory is not None:
            directory = directory.absolute()
            code = _start_on(engine, name, chosen, directory, sizes)
        else:
            code = _start(name, chosen, directory, joined is not None)
    if directory is not None:
        # The ranks have ended without an error: a launcher must not restart a run that missed its target.
        code = code or _finished_code(directory)
        _report(name, directory, as_json, code)
        if code in FINISHED and (problem := report_at_the_end(directory, time.time() - begun)) is not None:
            print(f"tutti: {problem}", file=sys.stderr)
    return code


def _claimed_directory(config: TrainConfig, task: str, restarted: bool, held: contextlib.ExitStack) -> Path:
    """Return ``run_directory``, locked until ``held`` is closed, and before ``--overwrite`` deletes a run there."""
    if config.resume is None and config.out is not None and Path(config.out).is_dir():
        held.enter_context(claim_run_directory(Path(config.out)))
        return run_directory(config, task, restarted)
    directory = run_directory(config, task, restarted)
    held.enter_context(claim_run_directory(directory))
    return directory


def _finished_code(directory: Path) -> int:
    """Return the exit code in the summary of a finished run: ``THRESHOLD`` if it has not reached its target."""
    return ExitCode.THRESHOLD if read_summary(directory).get("exit_code") == ExitCode.THRESHOLD else ExitCode.DONE


def _dry_run(task: str, config: TrainConfig, memory: str | None) -> int:
    """Run ``--dry-run`` in place of training and return its exit code. Raises UsageError in a joined job."""
    from tutti.planning.dry_run import dry_run
    from tutti.planning.planned_run import PlannedRun

    if config.precision == "fp8":
        raise UsageError(
            "--dry-run cannot be combined with --precision fp8",
            why="the memory of copies in 8-bit floats is not predicted",
            remedy="take --precision bf16 for it",
        )
    process_context.check_own_processes("--dry-run", os.environ)
    return dry_run(task, PlannedRun.of(config), memory, PRELOADED)


BARE = {"--resume": "auto", "--profile": "10:5", "--trace": "10:3", "--noise-every": "50", "--compile": "default"}
"""Value of an option that is given without one."""


def bare_options(words: list[str]) -> list[str]:
    """Insert the values of options of ``train`` that stand without one: ``--resume`` becomes ``--resume auto``.

    The other options are completed to ``--profile 10:5``, ``--trace 10:3``, ``--noise-every 50`` and ``--compile
    default``. An option stands without a value if it is the last word, or the next word begins with ``-``. Also,
    ``--optimizer.lr 0.1`` becomes ``--set optimizer.lr=0.1``.

    Args:
        words: the command line without ``tutti``.

    Returns:
        The completed words; ``words`` unchanged for other commands than ``train`` and ``config show``.

    Raises:
        UsageError: of an option such as ``--optimizer.lr`` the part before the dot takes no ``key=value``, or the value
            is missing.

    >>> bare_options(["train", "digits", "--resume", "--devices", "4", "--profile"])
    ['train', 'digits', '--resume', 'auto', '--devices', '4', '--profile', '10:5']
    """
    if words[:1] != ["train"] and words[:2] != ["config", "show"]:
        return words
    words = dotted_words(words)
    filled: list[str] = []
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        filled.append(word)
        if word in BARE and after.startswith("-"):
            filled.append(BARE[word])
    return filled


def resolved(
    task: str | None, flags: Mapping[str, Any], config: Sequence[Path], changes: Sequence[str] = ()
) -> tuple[str, TrainConfig]:
    """Merge the arguments of ``tutti train``, TOML files and defaults into the run's configuration.

    If the command line names a run to resume and no task, the run's own ``config.toml`` is the first file. A resumed
    run without ``--workers`` keeps its number of logical workers (fixed shares of the global batch).

    Args:
        task: task on the command line; None: from a file, or from the run to resume.
        flags: values given by flags or ``TUTTI_*`` variables, by field of ``TrainConfig``.
        config: TOML files; a later one takes precedence over an earlier one, and flags over all.
        changes: the texts of ``--set``, ``field.option=value``, which change one key of a ``name:key=value,…``.

    Returns:
        Name of the task, and the configuration.

    Raises:
        UsageError: an option is malformed or unknown, or the run to resume does not exist.
    """
    name, found = resolve_config(flags, (*resumed_config(flags, task), *config), task, changes)
    if found.resume == "auto" and found.workers is None:
        # If there is no such run, the error is raised when the directory is needed.
        with contextlib.suppress(UsageError):
            found = dataclasses.replace(found, resume=str(find_run(found, name)))
    if found.resume not in (None, "auto") and found.workers is None:
        # The run's number of workers, not the number of devices now.
        found = dataclasses.replace(found, workers=_saved_workers(Path(str(found.resume))))
    return name, found


def _saved_workers(directory: Path) -> int | None:
    """Return the number of workers of a run's newest checkpoint; None without a checkpoint, which is refused later."""
    from tutti.checkpoint.folder import scan

    manifests = scan(directory / "checkpoints")
    workers = manifests[0].facts.get("workers") if manifests else None
    return workers if isinstance(workers, int) else None


def resumed_config(flags: Mapping[str, Any], task: str | None) -> tuple[Path, ...]:
    """Return the configuration file of the run to resume, if the command line names the run and not the task.

    Args:
        flags: values given by flags or ``TUTTI_*`` variables, by field of ``TrainConfig``; ``resume`` is the run
            directory, or ``auto``.
        task: task on the command line; None if it names none.

    Returns:
        One path, the run's ``config.toml``; an empty tuple if nothing is resumed, for ``auto``, and if a task is named.

    Raises:
        UsageError: the named run directory does not exist or has no ``config.toml``.
    """
    resumed = flags.get("resume")
    if resumed in (None, "auto") or task is not None:
        return ()
    path = Path(str(resumed)) / "config.toml"
    if not path.is_file():
        raise UsageError("there is no run to resume", where=str(resumed), remedy="give a run directory")
    return (path,)


def run_directory(config: TrainConfig, task: str, restarted: bool = False) -> Path:
    """Return the directory that holds a run's files: make a new one, or find the directory of the run to resume.

    Without ``config.resume`` a directory is made. With ``--resume auto`` the result is the newest directory below
    ``config.runs`` with the same task and an equal configuration; with ``--resume DIR`` it is DIR.

    If another launcher, such as torchrun, has started the job's processes again after a failure, the run goes on in the
    directory that ``--out`` names, if it holds a ``config.toml`` from the former start.

    Args:
        config: the configuration.
        task: name of the task.
        restarted: whether another launcher has started the job again after a failure.

    Returns:
        Path of the directory, which exists.

    Raises:
        UsageError: there is no run to resume, or ``--out`` is a file, or a directory with files and without
            ``--overwrite``.
        DiskError: a new directory cannot be written.
    """
    if config.resume is None:
        before = Path(config.out or "") / "config.toml"
        return before.parent if restarted and config.out and before.is_file() else make_run_directory(config, task)
    if config.resume == "auto":
        return find_run(config, task)
    path = Path(config.resume)
    if not (path / "config.toml").is_file():
        raise UsageError("there is no run to resume", where=str(path), remedy="give a run directory, or plain --resume")
    return path


def _start(task: str, config: TrainConfig, directory: Path | None, joined: bool) -> int:
    """Train in this process or in one process a device; write the exit code of a failed run to ``summary.json``.

    Args:
        task: name of the task.
        config: the configuration.
        directory: run directory; None on ranks other than 0 of a joined job.
        joined: whether another launcher started this process.
    """
    try:
        alone = config.devices == "1" and not config.max_restarts and not config.watched
        if directory is None or joined or alone:
            code = run_rank(task, config, directory)
        else:
            code = launch(
                run_launched_rank,
                (task, config, directory),
                processes=int(config.devices),
                logs=directory / "logs",
                timeout=config.timeout,
                restarts=config.max_restarts,
                preload=PRELOADED,
                progress=functools.partial(_saved_step, directory),
                limits=config.limits,
            )
    except KeyboardInterrupt:
        # Written in a thread: a second Ctrl-C must end the process at once even if the disk does not answer.
        writer = threading.Thread(target=_leave_code, args=(directory, ExitCode.INTERRUPTED), daemon=True)
        writer.start()
        writer.join(_MOMENT)
        raise
    except BaseException as error:
        _leave_code(directory, failure_exit_code(error))
        raise
    if code:
        _leave_code(directory, code)
    return code


def _start_on(engine: EngineConfig, task: str, config: TrainConfig, directory: Path, sizes: list[int]) -> int:
    """Train on an engine; write the exit code of a failed run to ``summary.json`` and return it.

    Args:
        engine: its options.
        task: name of the task.
        config: the configuration.
        directory: run directory, which all nodes must share.
        sizes: numbers of devices that the run can have.
    """
    logs = directory / "logs"
    attempts = list(read_summary(directory).get("attempts", ()))
    slots = sizes[-1]
    if isinstance(engine, LocalEngineConfig):
        slots = min(slots, count_accelerators(config.device, os.environ) or slots)
    try:
        logs.mkdir(exist_ok=True)
        # A rerun of the configuration has this number of devices, and so waits for none unless it is restarted.
        rerun = config if config.max_restarts else dataclasses.replace(config, wait=TrainConfig.wait)
        (logs / CONFIGURATION).write_text(config_toml(rerun, task), encoding="utf-8")
        job = EngineJob(
            ["-m", "tutti.train.engine_rank", str(directory)],
            sizes,
            logs,
            # A run that may shrink outlives lost nodes without being told how often.
            config.max_restarts or ELASTIC_RESTARTS * (len(sizes) > 1),
            functools.partial(_saved_step, directory),
            parse_seconds(config.wait, "--wait"),
            environment={LAUNCHED: os.environ[LAUNCHED], "TUTTI_TIMEOUT": f"{config.timeout:g}"},
            attempted=lambda attempt: attempts.append(dataclasses.asdict(attempt)),
            first_attempt=slurm_engine.restarts(os.environ) if isinstance(engine, SlurmEngineConfig) else 0,
        )
        code = supervise(make_engine(engine, slots, logs), job)
    except OSError as error:
        raise DiskError("cannot write into the run directory", where=str(directory), why=error.strerror) from error
    except BaseException as error:
        _leave_code(directory, failure_exit_code(error), attempts)
        raise
    _leave_code(directory, code or _finished_code(directory), attempts)
    if isinstance(engine, SlurmEngineConfig):
        slurm_engine.requeue(code)
    return code


def _saved_step(directory: Path) -> int:
    """Return the step of a run's newest complete checkpoint; 0 without a checkpoint."""
    from tutti.checkpoint.folder import last_step

    return last_step(directory / "checkpoints")


def _leave_code(directory: Path | None, code: int, attempts: Sequence[Mapping[str, Any]] = ()) -> None:
    # On a full disk the error that ends the run matters more than this one.
    with contextlib.suppress(DiskError):
        if directory is not None:
            record_exit(directory, code, attempts)


def _report(task: str, directory: Path, as_json: bool, code: int) -> None:
    summary = read_summary(directory)
    if as_json:
        print(json_text(summary, sys.stdout))
    elif code in FINISHED:
        print(result_line(task, directory, summary))


def _endings(summary: Mapping[str, Any]) -> list[str]:
    """Return what ``--until`` and ``--patience`` came to.

    >>> _endings({"target": {"metric": "loss", "better": "lower", "value": 0.2, "reached": True, "steps": 1200,
    ...                      "samples": 76800, "seconds": 3.21}})
    ['loss <= 0.2 at step 1,200, after 76,800 samples and 3.2 s']
    >>> _endings({"target": {"metric": "accuracy", "better": "higher", "value": 0.9, "reached": False, "best": 0.81234,
    ...                      "best_step": 1100, "ended_by": "patience"}})
    ['accuracy >= 0.9 not reached: best 0.8123 at step 1,100']
    >>> _endings({"early_stopping": {"ended_by": "patience", "without_better": 3, "metric": "loss", "best": 0.2}})
    ['ended after 3 evaluations without a better loss than 0.2000']
    """
    target, stopping = summary.get("target"), summary.get("early_stopping")
    found = []
    if target:
        wanted = f"{target['metric']} {'>=' if target['better'] == 'higher' else '<='} {target['value']:g}"
        if target["reached"]:
            found.append(
                f"{wanted} at step {target['steps']:,}, after {target['samples']:,} samples and "
                f"{target['seconds']:,.1f} s"
            )
        else:
            best = "no evaluation gave a number"
            if target["best"] is not None:
                best = f"best {format_number(target['best'])} at step {target['best_step']:,}"
            found.append(f"{wanted} not reached: {best}")
    if stopping and stopping["ended_by"] == "patience":
        best = "" if stopping["best"] is None else f" than {format_number(stopping['best'])}"
        tried = counted(stopping["without_better"], "evaluation")
        found.append(f"ended after {tried} without a better {stopping['metric']}{best}")
    return found


def result_line(task: str, directory: Path, summary: dict[str, Any]) -> str:
    """Return the result of a run in one line: held-out values, target, throughput, MFU, hash of the weights, directory.

    Values of training take the place of held-out ones in a run without evaluation.

    Args:
        task: name of the run's task.
        directory: run directory, which ends the line.
        summary: content of the run's ``summary.json``; results that are missing there are left out of the line.

    >>> held_out = {"loss": 0.05123, "accuracy": 0.985}
    >>> summary = {"eval": held_out, "samples_per_second": 12345.6, "weights_sha256": "3fa9"}
    >>> result_line("digits", Path("runs/a"), summary)
    'digits: held-out loss 0.0512, accuracy 0.9850 · 12,346 samples/s · weights 3fa9 · runs/a'
    """
    group = "eval" if summary.get("eval") else "train"
    values = summary.get(group) or {}
    shown = {n: v for n, v in values.items() if isinstance(v, int | float) and not n.startswith(RAW)}
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in shown.items())
    which = "held-out (ema)" if summary.get("ema_sha256") else "held-out"
    parts = [f"{which if group == 'eval' else 'training'} {numbers}"] if numbers else ["done"]
    parts += _endings(summary)
    if isinstance(speed := summary.get("samples_per_second"), int | float) and speed > 0:
        parts.append(f"{speed:,.0f} samples/s")
    if isinstance(utilised := summary.get(MFU), int | float):
        parts.append(f"MFU {utilised:.1%}")
    if digest := summary.get("weights_sha256"):
        parts.append(f"weights {digest[:12]}")
    return f"{task}: {' · '.join([*parts, str(directory)])}"
