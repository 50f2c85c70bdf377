"""Fault 26: mistakes in a configuration. One message with the nearest choice, exit 2, before any process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import SAFETY_NET, SOURCE

pytestmark = [pytest.mark.faults, pytest.mark.row(26)]

# All command lines in one process, where torch cannot be imported and nothing can be forked, started or bound.
_GUARD = """
import contextlib, io, json, os, pathlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise BaseException("torch was imported")
sys.meta_path.insert(0, Absent())
def forbidden(event, arguments):
    if event in ("os.fork", "os.forkpty", "subprocess.Popen", "os.posix_spawn", "socket.bind", "os.system"):
        raise BaseException(f"{event} happened")
sys.addaudithook(forbidden)
from tutti.cli.app import main
answers = []
for words, environ, text in json.load(sys.stdin):
    pathlib.Path("own.toml").write_bytes(bytes.fromhex(text))
    os.environ.update(environ)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    for name in environ:
        del os.environ[name]
    answers.append([code, out.getvalue(), err.getvalue(), sorted(os.listdir())])
print(json.dumps(answers))
"""


def ask(folder: Path, cases: list[tuple[list[str], dict[str, str], bytes]]) -> list[Any]:
    """For each (words, environment, file own.toml): exit code, stdout, stderr, what lies in the folder afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", _GUARD],
        input=json.dumps([(words, environ, text.hex()) for words, environ, text in cases]),
        capture_output=True,
        text=True,
        timeout=SAFETY_NET,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def check(answer: Any, message: str) -> None:
    """One message that says ``message``, exit code 2, and nothing left behind."""
    code, out, err, left = answer
    assert (code, out) == (2, ""), err
    assert err.startswith("tutti: ") and len(err.splitlines()) == 1
    assert message.lower() in err.lower()
    assert left == ["own.toml"]


TYPOS = [
    # a key or a value that is nearly right: the nearest is suggested
    ("--strategy mirored", "Did you mean 'mirrored'?"),
    ("--strategy localsgd", "Did you mean 'local_sgd'?"),
    ("--strategy model-parallel", "Did you mean 'model_parallel'?"),
    ("--strategy mirrored:wires=bf16", "Did you mean 'wire'?"),
    ("--strategy mirrored:wire=bf17", "Did you mean 'bf16'?"),
    ("--strategy mirrored:bucket-mbs=3", "Did you mean 'bucket_mb'?"),
    ("--strategy local_sgd:perod=3", "Did you mean 'period'?"),
    ("--optimizer sdg", "Did you mean 'sgd'?"),
    ("--optimizer sgd:momentun=0.9", "Did you mean 'momentum'?"),
    ("--schedule linaer", "Did you mean 'linear'?"),
    ("--schedule cosine:warmpu=3ep", "Did you mean 'warmup'?"),
    ("--model cnnn", "Did you mean 'cnn'?"),
    ("--worker 3", "Did you mean --workers?"),
    # values of a wrong kind
    ("--strategy mirrored:wire", "cannot read 'wire'"),
    ("--strategy mirrored:wire=bf16,wire=fp16", "'wire' is given twice"),
    ("--strategy mirrored:bucket_mb=big", "'big' is not a number"),
    ("--strategy mirrored:bucket_mb=-1", "bucket_mb"),
    ("--strategy local_sgd:period=0", "period"),
    ("--strategy local_sgd:period=nan", "'nan' is not a whole number"),
    ("--optimizer sgd:lr=fast", "'fast' is not a number"),
    ("--optimizer sgd:lr=nan", "lr"),
    ("--optimizer sgd:lr=-0.1", "lr"),
    ("--optimizer sgd:nesterov=maybe", "'maybe' is neither true nor false"),
    ("--optimizer sgd:nesterov=true", "momentum"),
    ("--duration 3", "cannot read '3' as a duration"),
    ("--duration 3epochs", "cannot read '3epochs' as a duration"),
    ("--duration 0ep", "--duration"),
    ("--eval-every 0st", "--eval-every is 0"),
    ("--epochs 0", "--epochs is 0"),
    ("--epochs nan", "--epochs is nan"),
    ("--epochs inf", "--epochs is inf"),
    ("--clip nan", "--clip is nan"),
    ("--timeout nan", "--timeout is nan"),
    ("--timeout inf", "--timeout is inf"),
    ("--workers -2", "--workers is -2"),
    ("--seed -1", "--seed is -1"),
    ("--max-nonfinite 0", "--max-nonfinite is 0"),
    ("--devices two", "--devices is 'two'"),
    ("--threads 0", "--threads is 0"),
    # combinations
    ("--strategy single --devices 3", "take --strategy mirrored, or --devices 1"),
    ("--strategy mirrored --workers 2 --devices 3", "--workers 3 or more, or fewer devices"),
    ("--strategy model_parallel:stages=2 --devices 3", "stages"),
    ("--strategy mirrored:wire=bf16 --reproducible", "leave out one of the two"),
    ("--workers 8 --batch-size 4", "--batch-size 8"),
    ("--steps 3 --duration 3ep", "--steps and --duration exclude each other"),
    ("--data somewhere", "leave --data out"),
]


FILES: list[tuple[str | bytes, str]] = [
    (b"\xff\xfe\x80\x02}q\x00.", "the configuration is not TOML (own.toml)"),
    ('stratgy = "single"\n', "Did you mean 'strategy'?"),
    ('strategy = "singel"\n', "Did you mean 'single'?"),
    ('task = "digitz"\n', "Did you mean 'digits'?"),
    ("task = 3\nsteps = 2\n", "task"),
    ("task = []\n", "task"),
    ('strategy = ["mirrored"]\n', "is not text (own.toml, strategy)"),
    ('[strategy]\nname = "mirrored"\n', "is not text (own.toml, strategy)"),
    ('[train]\nstrategy = "mirrored"\n', "unknown key 'train'"),
    ("[[strategy]]\n", "is not text (own.toml, strategy)"),
    ("workers = 2.0\n", "2.0 is not a whole number (own.toml, workers)"),
    ("workers = 1979-05-27\n", "is not a whole number (own.toml, workers)"),
    ("clip = true\n", "True is not a number (own.toml, clip)"),
    ("clip = nan\n", "--clip is nan"),
    ("epochs = inf\n", "--epochs is inf"),
    ("devices = [1]\n", "is not text (own.toml, devices)"),
    ("workers = 9223372036854775807\n", "workers"),
    ('device = "gpu"\n', "unknown device 'gpu' (own.toml, device). take auto for the gpu that is here"),
    ("steps = 1\nsteps = 2\n", "the configuration is not TOML (own.toml)"),
    ("batch-size = 3\nbatch_size = 4\n", "batch"),
    ("\x00", "the configuration is not TOML (own.toml)"),
    ('!!python/object/apply:os.system ["touch canary"]\n', "the configuration is not TOML (own.toml)"),
    ("strategy = \"__import__('os').system('touch canary')\"\n", "unknown strategy"),
    ('_target_ = "os.system"\nsteps = 1\n', "unknown key '_target_'"),
    ('__post_init__ = "x"\n', "unknown key '__post_init__'"),
    ("seed = -1\n", "--seed is -1"),
]


VARIABLES = [
    ({"TUTTI_STRATEGY": "mirored"}, "Did you mean 'mirrored'?"),
    ({"TUTTI_WORKERS": "0"}, "workers"),
    ({"TUTTI_REPRODUCIBLE": "perhaps"}, "TUTTI_REPRODUCIBLE"),
    ({"RANK": "3", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "RANK is 3, but WORLD_SIZE is 3"),
    ({"RANK": "one", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "RANK is 'one'"),
    ({"RANK": "1"}, "WORLD_SIZE is missing"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    cases: list[tuple[list[str], dict[str, str], bytes]] = []
    cases += [(["train", "digits", *flags.split()], {}, b"") for flags, _ in TYPOS]
    for text, _ in FILES:
        raw = text if isinstance(text, bytes) else text.encode()
        words = (
            ["train", "--config", "own.toml"]
            if raw.startswith(b"task")
            else ["train", "digits", "--config", "own.toml"]
        )
        cases.append((words, {}, raw))
    cases += [(["train", "digits"], environ, b"") for environ, _ in VARIABLES]
    return ask(tmp_path_factory.mktemp("configuration"), cases)


@pytest.mark.parametrize("number", range(len(TYPOS)), ids=[flags for flags, _ in TYPOS])
def test_refused_flags(number: int, answers: list[Any]) -> None:
    check(answers[number], TYPOS[number][1])


@pytest.mark.parametrize("number", range(len(FILES)), ids=[repr(text) for text, _ in FILES])
def test_refused_file(number: int, answers: list[Any]) -> None:
    check(answers[len(TYPOS) + number], FILES[number][1])


@pytest.mark.parametrize("number", range(len(VARIABLES)), ids=[str(environ) for environ, _ in VARIABLES])
def test_refused_environment(number: int, answers: list[Any]) -> None:
    check(answers[len(TYPOS) + len(FILES) + number], VARIABLES[number][1])
