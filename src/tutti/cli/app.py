"""``tutti``: the verbs, and how every outcome becomes one message and one exit code. Loads no torch."""

from __future__ import annotations

import importlib.metadata
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from tutti.cli import chaos
from tutti.cli.compare import compare
from tutti.cli.doctor import doctor
from tutti.cli.export import export
from tutti.cli.pages import OneScreen
from tutti.cli.run import end_options, run
from tutti.cli.train import bare_options, train
from tutti.errors import ExitCode, TuttiError


def version() -> str:
    """Versions of tutti and of the torch that it would load."""
    names = {name: _installed(name) for name in ("tutti", "torch")}
    return "\n".join(f"{name} {number}" for name, number in names.items())


def build() -> App:
    """The application: one entry a verb."""
    app = App(
        name="tutti",
        help="One PyTorch model, trained by many devices as if by one.\n\n"
        "Example: tutti train digits --workers 8 --devices 2 --epochs 3",
        usage="Usage: tutti COMMAND [OPTIONS]      (tutti COMMAND --help says more)",
        version=version,
        help_formatter=OneScreen(),
        help_format="plaintext",
    )
    app.command(train, usage="Usage: tutti train TASK [OPTIONS]")
    app.command(run, usage="Usage: tutti run [OPTIONS] SCRIPT [ARGUMENTS]")
    app.command(compare, usage="Usage: tutti compare TASK [OPTIONS]")
    app.command(export, usage="Usage: tutti export RUN [OPTIONS]")
    app.command(doctor, usage="Usage: tutti doctor [--json]")
    app.command(chaos.verb())
    return app


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; what went wrong is said on stderr, in one message.

    Only an error that nobody foresaw shows its traceback. A rank of a job that failed ends here.
    """
    code = _run(tokens)
    # A job that was joined has loaded it; nothing else needs it.
    context = sys.modules.get("tutti.world.context")
    if code and context is not None:
        context.leave(code)
    return code


def _run(tokens: Sequence[str] | None) -> int:
    try:
        words = bare_options(end_options(list(sys.argv[1:] if tokens is None else tokens)))
        command, bound, _ = build().parse_args(words, print_error=False, exit_on_error=False)
        code = int(command(*bound.args, **bound.kwargs) or ExitCode.DONE)
        sys.stdout.flush()
        return code
    except CycloptsError as error:
        error.verbose = False
        return _refuse(str(error), ExitCode.USAGE)
    except TuttiError as error:
        return _refuse(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _refuse("interrupted", ExitCode.INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _unread():
            # As other programs in a pipe whose end has seen enough; what is left to be written goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        traceback.print_exc()
        return _refuse(f"unexpected {type(error).__name__}: {error}. Please report it.", ExitCode.UNEXPECTED)


def _unread() -> bool:
    """Whether standard output is a pipe that nobody reads from any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _refuse(message: str, code: ExitCode) -> int:
    print(f"tutti: {message}", file=sys.stderr)
    return int(code)


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
