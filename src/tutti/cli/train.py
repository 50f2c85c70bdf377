"""``tutti train``: refuses what cannot work, then starts or joins the run. Loads no torch before that."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tutti import strategies
from tutti.cli.devices import count_gpus
from tutti.cli.settings import FILES, HEADINGS, flag_table, resolve
from tutti.data.contract import BatchContract
from tutti.errors import DiskError, ExitCode, TuttiError, UsageError
from tutti.nn.config import check_batch_norm
from tutti.optim.config import check_optimizer, check_schedule
from tutti.optim.scaling import check_rule, scaled
from tutti.tasks import table
from tutti.training.config import TrainConfig
from tutti.training.records import config_toml, find_run, make_run_directory, read_summary, record_exit
from tutti.world import identity
from tutti.world.launch import launch

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
    """
    name, chosen = resolve(flags, (*_resumed_config(flags, task), *config), task)
    if print_config:
        print(config_toml(chosen, name), end="")
        return ExitCode.DONE
    joined = identity.read(os.environ) if identity.joined(os.environ) else None
    chosen = dataclasses.replace(chosen, devices=str(_devices(chosen, joined)))
    if joined is not None and chosen.max_restarts:
        raise UsageError(
            "--max-restarts needs tutti's own launcher", remedy="use the restarts of torchrun or the scheduler"
        )
    refuse(name, chosen)
    # Every rank of a job that was started elsewhere comes here; the first one's directory is everybody's.
    first = joined is None or joined.rank == 0
    directory = _directory(chosen, name) if first else None
    code = _start(name, chosen, directory, joined is not None)
    if directory is not None:
        _report(name, directory, as_json, code)
    return code


def bare_resume(words: list[str]) -> list[str]:
    """``--resume`` without a directory means ``--resume auto``.

    >>> bare_resume(["train", "digits", "--resume", "--devices", "4"])
    ['train', 'digits', '--resume', 'auto', '--devices', '4']
    """
    if words[:1] != ["train"] or "--resume" not in words:
        return words
    after = words.index("--resume") + 1
    bare = after == len(words) or words[after].startswith("-")
    return [*words[:after], "auto", *words[after:]] if bare else words


def _resumed_config(flags: Mapping[str, Any], task: str | None) -> tuple[Path, ...]:
    """The configuration of the run to resume, where the command line names the run and not the task."""
    resumed = flags.get("resume")
    if resumed in (None, "auto") or task is not None:
        return ()
    path = Path(str(resumed)) / "config.toml"
    if not path.is_file():
        raise UsageError("there is no run to resume", where=str(resumed), remedy="give a run directory")
    return (path,)


def _directory(config: TrainConfig, task: str) -> Path:
    """The run directory: a new one, or that of the run to resume."""
    if config.resume is None:
        return make_run_directory(config, task)
    if config.resume == "auto":
        return find_run(config, task)
    path = Path(config.resume)
    if not (path / "config.toml").is_file():
        raise UsageError("there is no run to resume", where=str(path), remedy="give a run directory, or plain --resume")
    return path


def refuse(task: str, config: TrainConfig) -> None:
    """Everything about a run that can be known to be wrong before a process starts. Raises UsageError and DataError."""
    devices = int(config.devices)
    choice = strategies.check(config.strategy, devices, workers=config.workers, reproducible=config.reproducible)
    ranks = choice.shape(devices)["replica"]
    # Whether the batch can be shared out does not depend on how many samples there are.
    BatchContract(1, config.batch_size, config.workers or ranks, ranks, config.micro_batch)
    scaled(check_optimizer(config.optimizer), check_rule(config.lr_scale), config.batch_size)
    check_schedule(config.schedule)
    check_batch_norm(config.batch_norm)
    table.check(task, data=config.data, model=config.model, augment=config.augment)


def _devices(config: TrainConfig, joined: identity.Identity | None) -> int:
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
        if directory is None or joined or (config.devices == "1" and not config.max_restarts):
            code = train_here(task, config, directory)
        else:
            code = launch(
                _one_device,
                (task, config, directory),
                processes=int(config.devices),
                logs=directory / "logs",
                timeout=config.timeout,
                restarts=config.max_restarts,
            )
    except BaseException as error:
        _leave_code(directory, exit_code(error))
        raise
    if code:
        _leave_code(directory, code)
    return code


def train_here(task: str, config: TrainConfig, directory: Path | None) -> int:
    """This process's part of the run. Whatever is printed meanwhile goes to stderr: stdout has the result alone."""
    from tutti.training.main import main

    with contextlib.redirect_stdout(sys.stderr):
        return main(task, config, None if directory is None else str(directory))


def _one_device(task: str, config: TrainConfig, directory: Path) -> None:
    if code := train_here(task, config, directory):
        raise SystemExit(code)


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
    numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, int | float))
    parts = [f"{'held-out' if group == 'eval' else 'training'} {numbers}"] if numbers else ["done"]
    if isinstance(speed := summary.get("samples_per_second"), int | float) and speed > 0:
        parts.append(f"{speed:,.0f} samples/s")
    if digest := summary.get("weights_sha256"):
        parts.append(f"weights {digest[:12]}")
    return f"{task}: {' · '.join([*parts, str(directory)])}"
