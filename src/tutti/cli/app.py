"""``tutti``: run a command and turn its outcome into one message and one exit code. Loads no torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from tutti.cli import chaos_command, config_command
from tutti.cli.bench_command import bench
from tutti.cli.compare_command import compare
from tutti.cli.doctor_command import doctor
from tutti.cli.export_command import export
from tutti.cli.goodput_command import goodput
from tutti.cli.help_pages import OneScreen
from tutti.cli.landscape_command import landscape
from tutti.cli.launch_flags import hosts_as_engine, node_of_job, start_node
from tutti.cli.noise_command import noise
from tutti.cli.other_names import name_here
from tutti.cli.plan_command import plan_devices
from tutti.cli.report_command import report_runs
from tutti.cli.run_command import end_options, run, run_options
from tutti.cli.simulate_command import simulate_step
from tutti.cli.submit_command import submit, submitted
from tutti.cli.train_command import bare_options, train
from tutti.cli.workload_command import workload
from tutti.config.settings import USUAL
from tutti.config.variables import check_variables
from tutti.config.verbosity import EPILOGUE, configure_logging, take_verbosity
from tutti.distribution import VERSION
from tutti.errors import ExitCode, TuttiError, UsageError
from tutti.horovod.run_flags import translate_flags
from tutti.launcher.encoding import replace_unencodable
from tutti.launcher.failure import failure_exit_code

ALL_OPTIONS = "tutti train --help-all lists all options."
_TRAIN = Group("Train", sort_key=1)
_RUNS = Group("Look at a run", sort_key=2)
_PLANS = Group("Plan for other devices", sort_key=3)
_OTHERS = Group("Other", sort_key=4)
_NEGATIVE = re.compile(r"-\d+(\.\d+)?[a-zA-Z]+")


def version() -> str:
    """Return the text of ``tutti --version``: two lines, with the versions of tutti and of the installed torch.

    The lines are ``tutti VERSION`` and ``torch VERSION``; the second is ``torch (not installed)`` where torch is
    missing.
    """
    return f"tutti {VERSION}\ntorch {_installed('torch')}"


def build_app(whole_help: bool = False) -> App:
    """Build the ``cyclopts`` application of the command ``tutti``, with subcommands such as ``train`` and ``run``.

    Args:
        whole_help: whether ``train --help`` lists all options, and not only the usual ones.
    """
    app = App(
        name="tutti",
        help="One PyTorch model, trained by many devices as if by one.\n\n"
        "Example: tutti train digits --workers 8 --devices 2 --epochs 3",
        usage="Usage: tutti COMMAND [OPTIONS]      (tutti COMMAND --help says more)",
        version=version,
        help_formatter=OneScreen(),
        help_format="plaintext",
        help_epilogue=EPILOGUE,
        group_commands=_OTHERS,
    )
    app.command(
        train,
        group=_TRAIN,
        usage="Usage: tutti train TASK [OPTIONS]",
        help_formatter=OneScreen(None if whole_help else {f"--{name.replace('_', '-')}" for name in USUAL}),
        help_epilogue=EPILOGUE if whole_help else f"{ALL_OPTIONS}\n{EPILOGUE}",
    )
    app.command(run, group=_TRAIN, usage="Usage: tutti run [OPTIONS] SCRIPT [ARGUMENTS]")
    app.command(submit, group=_TRAIN, usage="Usage: tutti submit slurm|kubeflow|skypilot[:OPTIONS] -- train|run …")
    app.command(compare, group=_RUNS, usage="Usage: tutti compare TASK [OPTIONS]")
    app.command(export, group=_RUNS, usage="Usage: tutti export RUN [OPTIONS]")
    app.command(goodput, group=_RUNS, usage="Usage: tutti goodput RUN [--json]")
    app.command(noise, group=_RUNS, usage="Usage: tutti noise RUN… [OPTIONS]")
    app.command(landscape, group=_RUNS, usage="Usage: tutti landscape RUN [OPTIONS]")
    app.command(workload, group=_PLANS, usage="Usage: tutti workload TASK [OPTIONS] [-- ARGUMENTS]")
    app.command(bench, group=_PLANS, usage="Usage: tutti bench [PARTS] [OPTIONS]")
    app.command(
        simulate_step,
        name="simulate",
        group=_PLANS,
        usage="Usage: tutti simulate TASK --machine FILE|a100x8 [OPTIONS] [-- ARGUMENTS]",
    )
    app.command(
        plan_devices, name="plan", group=_PLANS, usage="Usage: tutti plan TASK --runs DIR [OPTIONS] [-- ARGUMENTS]"
    )
    app.command(report_runs, name="report", group=_RUNS, usage="Usage: tutti report RUN... [OPTIONS]")
    app.command(doctor, usage="Usage: tutti doctor [--json]")
    for verb, group in ((config_command.config_verb(), _TRAIN), (chaos_command.verb(), _RUNS)):
        verb.group = group
        app.command(verb)
    app.register_install_completion_command(
        add_to_startup=False,
        help="Complete commands and options from the next shell on.",
        help_formatter=OneScreen(),
    )
    return app


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command line of ``tutti`` and return its exit code; an error is printed to stderr as one message.

    Only an unexpected exception shows its traceback. If the command fails in a process that has joined a job of several
    ranks, the process ends here, because ordinary interpreter exit would wait for the other ranks.

    Args:
        tokens: the words after ``tutti``; None for the words in ``sys.argv``.

    Returns:
        The command's own exit code, 0 if it has ended as it should; that of a ``TuttiError`` (a member of
        ``tutti.errors.ExitCode``); 2 for a malformed command line, 130 after Ctrl-C, 141 if the reader of standard
        output has closed the pipe; and for an unexpected exception 8 or 5 if it tells of a full disk or a lost peer,
        else 1.
    """
    replace_unencodable(sys.stdout, sys.stderr)
    code = _run(tokens)
    # The module is loaded only in a process that joined a job.
    context = sys.modules.get("tutti.launcher.context")
    if code and context is not None:
        context.leave(code)
    return code


def _run(tokens: Sequence[str] | None) -> int:
    try:
        given = translate_flags(list(sys.argv[1:] if tokens is None else tokens), os.environ, run_options())
        asked, whole_help = take_help_all(take_verbosity(end_options(given), os.environ))
        configure_logging(os.environ)
        words = submitted(hosts_as_engine(bare_options(_negative_values(asked))), os.environ)
        if (part := node_of_job(words, os.environ)) is not None:
            return start_node(*part)
        app = build_app(whole_help)
        command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
        # Help, --version and doctor must work in spite of a mistyped variable.
        if command not in (doctor, app.help_print, app.version_print):
            check_variables(os.environ)
            _check_folder()
        code = int(command(*bound.args, **bound.kwargs) or ExitCode.DONE)
        sys.stdout.flush()
        return code
    except CycloptsError as error:
        return _refuse(_malformed(error, words), ExitCode.USAGE)
    except TuttiError as error:
        return _refuse(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _refuse("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            # The reader closed the pipe: end as SIGPIPE does, and discard the rest of the output.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        traceback.print_exc()
        code = failure_exit_code(error)
        ask = " Please report it." * (code == ExitCode.UNEXPECTED)
        return _refuse(f"unexpected {type(error).__name__}: {error}.{ask}", code)


def take_help_all(words: Sequence[str]) -> tuple[list[str], bool]:
    """Replace ``--help-all`` by ``--help``, and return the words and whether it was among them.

    Words behind ``--`` belong to another command.

    Args:
        words: the command line without ``tutti``.

    >>> take_help_all(["train", "--help-all"])
    (['train', '--help'], True)
    """
    end = words.index("--") if "--" in words else len(words)
    found = "--help-all" in words[:end]
    return [*("--help" if word == "--help-all" else word for word in words[:end]), *words[end:]], found


def _malformed(error: CycloptsError, words: Sequence[str]) -> str:
    """Return the message of a malformed command line; how to write the command where words are missing or too many."""
    error.verbose = False
    usage = str(error.app.usage).removeprefix("Usage: ") if error.app else "tutti COMMAND"
    command = " ".join(("tutti", *(error.command_chain or ())))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{command} does not take '{error.unused_tokens[0]}'. Write {usage}."
    if isinstance(error, MissingArgumentError) and error.argument:
        if error.keyword:
            places = [place for place, word in enumerate(words[:-1]) if word == error.keyword]
            if places and re.match(r"-[\d.]", value := words[places[-1] + 1]):
                return f"{error.keyword} has no value, because '{value}' begins with -. Write {error.keyword}={value}."
            return f"{error.keyword} has no value. See {command} --help."
        return f"{command} needs {error.argument.name}. Write {usage}; see {command} --help."
    if isinstance(error, CoercionError) and error.msg is None and error.target_type is float and error.token:
        return f"{error.token.keyword} is '{error.token.value}'. Give a number, such as 3 or 0.5."
    if isinstance(error, UnknownOptionError) and {*(error.command_chain or ())} & {"train", "compare", "config"}:
        word = (error.token.keyword or error.token.value).split("=")[0]
        if here := name_here("train", word):
            return f"unknown option {word}. Did you mean {here}? See tutti train --help."
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        return _unknown(error, error.unused_tokens[0])
    return str(error)


def _unknown(error: UnknownCommandError, word: str) -> str:
    """Return the message of a first word that is no command: a script, an option, or a mistyped command."""
    if word.endswith(".py"):
        return f"{word} is no command. Write tutti run {word} to start a script; see tutti run --help."
    if word.startswith("-"):
        return f"unknown option {word}. See tutti --help."
    return f"{error} See tutti --help."


def _check_folder() -> None:
    """Raise UsageError if the working directory was deleted: paths of files and ranks start there."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the working directory was deleted", remedy="change to a folder that exists") from error


def _negative_values(words: list[str]) -> list[str]:
    """Return the words with ``--wait -5s`` as ``--wait=-5s``, so that the option says which values it takes.

    The parser takes such a word for an option.
    """
    end = words.index("--") if "--" in words else len(words)
    made = words[:1]
    for word in words[1:end]:
        if _NEGATIVE.fullmatch(word) and made[-1].startswith("--") and "=" not in made[-1]:
            made[-1] += f"={word}"
        else:
            made.append(word)
    return made + words[end:]


def _unread() -> bool:
    """Return whether standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _refuse(message: str, code: int) -> int:
    print(f"tutti: {message}", file=sys.stderr)
    return int(code)


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
