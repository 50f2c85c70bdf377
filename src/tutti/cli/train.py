"""``tutti train``: refuses what cannot work, then starts or joins the run. Loads no torch before that."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tutti import strategies
from tutti.cli.devices import count_gpus
from tutti.cli.settings import FILES, HEADINGS, flag_table, resolve
from tutti.data.contract import BatchContract
from tutti.errors import DiskError, ExitCode, TuttiError, UsageError, no_memory
from tutti.nn.config import OfTheWorker, Sync, check_batch_norm, check_checkpointing, check_compile, check_compiler
from tutti.optim.config import check_optimizer, check_schedule
from tutti.optim.loss_scale import chosen as check_loss_scale
from tutti.optim.noise import by_worker, check_noise
from tutti.optim.scaling import Adaptive, check_rule, scaled
from tutti.state.source import check_source
from tutti.tasks import table
from tutti.training.best import RAW
from tutti.training.config import TrainConfig
from tutti.training.records import config_toml, find_run, make_run_directory, read_summary, record_exit
from tutti.world import heartbeat, identity, watchdog
from tutti.world.heartbeat import Phase
from tutti.world.launch import launch

PRELOADED = ("tutti.training.main", "torch._dynamo")
"""What every rank imports before its first step, the second because every optimizer of torch does."""

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
) -> int:
    """Train linear, digits, cifar10, or your own file.py:function.

    Example: tutti train digits --workers 8 --devices 2 --epochs 3

    Parameters
    ----------
    config:
        TOML file of these options; may be repeated, the later wins
    print_config:
        print the resolved configuration as TOML and stop
    as_json:
        print summary.json instead of one line
    dry_run:
        only say what memory a device needs, measure one step, and refuse what cannot fit
    memory:
        of a device, for --dry-run: 16GB; default: what is here
    """
    name, chosen = resolved(task, flags, config)
    if print_config:
        print(config_toml(chosen, name), end="")
        return ExitCode.DONE
    joined = identity.read(os.environ) if identity.joined(os.environ) else None
    chosen = dataclasses.replace(chosen, devices=str(count_devices(chosen, joined)))
    if joined is not None and chosen.max_restarts:
        raise UsageError(
            "--max-restarts needs tutti's own launcher", remedy="use the restarts of torchrun or the scheduler"
        )
    refuse(name, chosen)
    if dry_run:
        return _dry_run(name, chosen, memory, joined)
    if memory is not None:
        raise UsageError("--memory is for --dry-run alone", remedy="add --dry-run, or leave it out")
    # Every rank of a job that was started elsewhere comes here; the first one's directory is everybody's.
    first = joined is None or joined.rank == 0
    directory = run_directory(chosen, name, joined is not None and joined.attempt > 0) if first else None
    if joined is not None:
        watchdog.start(joined.rank, chosen.limits())
    code = _start(name, chosen, directory, joined is not None)
    if directory is not None:
        _report(name, directory, as_json, code)
    return code


def _dry_run(task: str, config: TrainConfig, memory: str | None, joined: identity.Identity | None) -> int:
    """What ``--dry-run`` does in place of training."""
    from tutti.cli.dry_run import dry_run

    if joined is not None:
        raise UsageError("--dry-run starts processes of its own", remedy="call it without torchrun, srun or mpirun")
    return dry_run(task, config, memory, PRELOADED)


BARE = {"--resume": "auto", "--profile": "10:5", "--trace": "10:3", "--compile": "default"}
"""What an option without its value stands for."""


def bare_options(words: list[str]) -> list[str]:
    """``--resume`` without a directory means ``--resume auto``; see ``BARE``.

    >>> bare_options(["train", "digits", "--resume", "--devices", "4", "--profile"])
    ['train', 'digits', '--resume', 'auto', '--devices', '4', '--profile', '10:5']
    """
    if words[:1] != ["train"]:
        return words
    filled: list[str] = []
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        filled.append(word)
        if word in BARE and after.startswith("-"):
            filled.append(BARE[word])
    return filled


def resolved(task: str | None, flags: Mapping[str, Any], config: Sequence[Path]) -> tuple[str, TrainConfig]:
    """The task and its configuration, from what ``train`` is given. Raises UsageError."""
    name, found = resolve(flags, (*_resumed_config(flags, task), *config), task)
    if found.resume not in (None, "auto") and found.workers is None:
        # As many as there were, and not as there are devices now.
        found = dataclasses.replace(found, workers=_saved_workers(Path(str(found.resume))))
    return name, found


def _saved_workers(directory: Path) -> int | None:
    """The workers of a run's newest checkpoint; None where there is none, which is told later."""
    from tutti.state.folder import scan

    manifests = scan(directory / "checkpoints")
    workers = manifests[0].facts.get("workers") if manifests else None
    return workers if isinstance(workers, int) else None


def _resumed_config(flags: Mapping[str, Any], task: str | None) -> tuple[Path, ...]:
    """The configuration of the run to resume, where the command line names the run and not the task."""
    resumed = flags.get("resume")
    if resumed in (None, "auto") or task is not None:
        return ()
    path = Path(str(resumed)) / "config.toml"
    if not path.is_file():
        raise UsageError("there is no run to resume", where=str(resumed), remedy="give a run directory")
    return (path,)


def run_directory(config: TrainConfig, task: str, restarted: bool = False) -> Path:
    """The run directory: a new one, or that of the run to resume; in a restarted job that of the attempt before."""
    if config.resume is None:
        before = Path(config.out or "") / "config.toml"
        return before.parent if restarted and config.out and before.is_file() else make_run_directory(config, task)
    if config.resume == "auto":
        return find_run(config, task)
    path = Path(config.resume)
    if not (path / "config.toml").is_file():
        raise UsageError("there is no run to resume", where=str(path), remedy="give a run directory, or plain --resume")
    return path


def refuse(task: str, config: TrainConfig) -> None:
    """Everything about a run that can be known to be wrong before a process starts.

    Raises UsageError, DataError, and CheckpointError.
    """
    devices = int(config.devices)
    rule = check_rule(config.lr_scale)
    adaptive = isinstance(rule, Adaptive)
    compiling = check_compile(config.compile, config.reproducible)
    cuda = config.device == "cuda" or (config.device == "auto" and count_gpus(os.environ) > 0)
    choice = strategies.check(
        config.strategy,
        devices,
        workers=config.workers,
        reproducible=config.reproducible,
        adaptive=adaptive,
        averaging=config.averaging() is not None,
        compiled=compiling is not None,
        cuda=cuda,
    )
    ranks = choice.data_ranks(devices)
    # Whether the batch can be shared out does not depend on how many samples there are.
    workers = config.workers or ranks
    micro = strategies.micro_batch(choice, config.micro_batch, config.batch_size, workers)
    contract = BatchContract(1, config.batch_size, workers, ranks, micro, config.identical_batches)
    scaled(check_optimizer(config.optimizer), rule, config.batch_size)
    check_schedule(config.schedule)
    for slow in config.slowness():
        slow.check(devices, workers, cuda)
    noise = check_noise(config.gradient_noise, config.batch_size, adaptive)
    norm = check_batch_norm(config.batch_norm)
    if isinstance(norm, Sync):
        strategies.check_sync(choice, devices, config.reproducible, by_worker(adaptive, noise))
        contract.check_whole()
    check_loss_scale(config.loss_scale, config.precision)
    check_checkpointing(config.activation_checkpointing, compiled=compiling is not None)
    if compiling and not cuda:
        check_compiler(compiling[1])
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard",
            remedy="run pip install 'tutti[tensorboard]', or leave it out",
        )
    other = not isinstance(norm, OfTheWorker)
    table.check(task, data=config.data, model=config.model, augment=config.augment, batch_norm=other)
    # A run that goes on has its weights from its own checkpoint.
    if config.init_from is not None and config.resume is None:
        check_source(Path(config.init_from))


def count_devices(config: TrainConfig, joined: identity.Identity | None) -> int:
    """Processes of the whole run."""
    if joined is None:
        if config.devices == "auto":
            return (count_gpus(os.environ) if config.device != "cpu" else 0) or 1
        return int(config.devices)
    if config.devices not in ("auto", str(joined.size)):
        raise UsageError(
            f"--devices is {config.devices}, but this job was started with {joined.size} processes",
            remedy="leave --devices away under torchrun, srun and mpirun",
        )
    return joined.size


def _start(task: str, config: TrainConfig, directory: Path | None, joined: bool) -> int:
    """Train here, or once a device; a run that fails leaves its exit code in ``summary.json``."""
    try:
        alone = config.devices == "1" and not config.max_restarts and not config.watched
        if directory is None or joined or alone:
            code = train_here(task, config, directory)
        else:
            code = launch(
                _one_device,
                (task, config, directory),
                processes=int(config.devices),
                logs=directory / "logs",
                timeout=config.timeout,
                restarts=config.max_restarts,
                preload=PRELOADED,
                progress=functools.partial(_saved_step, directory),
                limits=config.limits(),
            )
    except KeyboardInterrupt:
        # A second Ctrl-C ends at once, also where the disk that the run was saved to does not answer.
        writer = threading.Thread(target=_leave_code, args=(directory, ExitCode.INTERRUPTED), daemon=True)
        writer.start()
        writer.join(_MOMENT)
        raise
    except BaseException as error:
        _leave_code(directory, exit_code(error))
        raise
    if code:
        _leave_code(directory, code)
    return code


def train_here(task: str, config: TrainConfig, directory: Path | None) -> int:
    """This process's part of the run. Whatever is printed meanwhile goes to stderr: stdout has the result alone."""
    heartbeat.training.enter(Phase.START, 0)
    from tutti.training.main import main

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return main(task, config, None if directory is None else str(directory))
    except Exception as error:
        if (told := no_memory(error)) is not None:
            raise told from error
        raise


def _one_device(task: str, config: TrainConfig, directory: Path) -> None:
    if code := train_here(task, config, directory):
        raise SystemExit(code)


def _saved_step(directory: Path) -> int:
    """Step of the newest complete checkpoint of a run; 0 where there is none."""
    from tutti.state.folder import last_step

    return last_step(directory / "checkpoints")


def exit_code(error: BaseException) -> int:
    """The exit code that an exception ends the process with."""
    if isinstance(error, TuttiError):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.UNEXPECTED)


def _leave_code(directory: Path | None, code: int) -> None:
    # On a full disk the error that ends the run matters more than this one.
    with contextlib.suppress(DiskError):
        if directory is not None:
            record_exit(directory, code)


def _report(task: str, directory: Path, as_json: bool, code: int) -> None:
    summary = read_summary(directory)
    if as_json:
        print(json.dumps(summary, indent=2, ensure_ascii=False))
    elif code == ExitCode.DONE:
        print(result_line(task, directory, summary))


def result_line(task: str, directory: Path, summary: dict[str, Any]) -> str:
    """What came out and where it is, in one line.

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
    if isinstance(speed := summary.get("samples_per_second"), int | float) and speed > 0:
        parts.append(f"{speed:,.0f} samples/s")
    if digest := summary.get("weights_sha256"):
        parts.append(f"weights {digest[:12]}")
    return f"{task}: {' · '.join([*parts, str(directory)])}"
