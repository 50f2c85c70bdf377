"""What cannot work is refused by a real process: one message, the right exit code, no traceback, no torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tests.forkserver import run
from tutti.cli.app import main
from tutti.config.settings import USUAL
from tutti.config.train_config import TrainConfig

NO_TORCH = Path(__file__).with_name("no_torch.py")


def tutti(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where torch cannot be imported."""
    return run([str(NO_TORCH), *words], cwd, {**os.environ, "COLUMNS": "80", **environ}, 300, torch=False)


ADASCALE = "train digits --optimizer sgd:lr=0.1 --lr-scale adascale"
PIPELINE = "train digits --devices 2 --strategy pipeline"
REFUSALS = [
    ("train digits --strategy miror", 2, "unknown strategy 'miror'. Did you mean 'mirrored'? Choices:"),
    ("train digits --workers 2 --devices 3", 2, "2 workers"),
    ("train digits --strategy single --devices 2", 2, "--devices 1"),
    ("train digits --batch-size 0", 2, "--batch-size is 0."),
    ("train digits --batch-size many", 2, "'many' is not a whole number"),
    ("train digits --data-workers -1", 2, "--data-workers is -1. Give a whole number of at least 0."),
    ("train digits --profile 3", 2, "--profile is '3'. Write FIRST:STEPS, such as 10:5"),
    ("train digits --devices 1:2 --workers 2 --wait -5s", 2, "--wait is '-5s'. Write seconds, at least 0, such as 60s"),
    ("train digits --devices 2 --wait 5s", 2, "Give a range such as --devices 2:8, or leave out --wait"),
    ("train digits --devices 2 --on local --wait 5s", 2, "this run ends with its first one"),
    (
        "submit run -np 2 train.py",
        2,
        "tutti submit needs a cluster before 'run'. Write tutti submit slurm:nodes=2 -- run …",
    ),
    ("submit slurm -- train digits --devices 2 --wait 5s", 2, "this run ends with its first one"),
    ("compare digits --wait 5s", 2, "--wait 5s is for runs that outlive lost devices"),
    ("noise digits --batches 8 16 --until loss=0.3 --wait 5s", 2, "this run ends with its first one"),
    ("noise digits --batches 8 16 --until loss=0.3 --workers 2 --devices 3:4", 2, "2 workers"),
    ("chaos kill -- train digits --workers 2 --devices 1:2", 2, "--devices 1:2 is a range. Give one number"),
    ("run --horovod -np 1 --elastic-timeout 5 gone.py", 2, "Add --min-np or --host-discovery-script, or leave it out"),
    (
        "run --horovod -np 1 --min-np 1 --elastic-timeout -5 gone.py",
        2,
        "--elastic-timeout is -5. Give seconds, at least 0",
    ),
    ("run --timeout 0 gone.py", 2, "--timeout is 0. Give seconds, a number above 0."),
    ("train digits --steps 1.5", 2, "'1.5' is not a whole number"),
    ("simulate digits --machine a100x8 --devices 1.5", 2, "--devices: '1.5' is not a whole number"),
    ("run --max-restarts 1.5 gone.py", 2, "--max-restarts: '1.5' is not a whole number"),
    ("train digits --optimizer adam:lrr=1", 2, "Did you mean 'lr'?"),
    ("train digits --optimizer adm", 2, "Did you mean 'adam'?"),
    ("train digits --schedule cosin", 2, "Did you mean 'cosine'?"),
    ("train digits --lr-scale liner:base_batch=64", 2, "Did you mean 'linear'?"),
    ("train digits --lr-scale linear", 2, "base_batch=N"),
    ("train digits --lr-scale adam_sqrt:base_batch=64 --optimizer sgd", 2, "is a rule of Adam"),
    ("train digits --regime-batch 64 --steps 5", 2, "--regime-batch changes nothing"),
    ("train digits --lr-scale adascale --workers 4", 2, "a rule of SGD, and the optimizer is Adam"),
    (f"{ADASCALE}", 2, "--lr-scale adascale needs at least 2 workers"),
    (f"{ADASCALE} --workers 2 --strategy local_sgd", 2, "cannot be combined with strategy 'local_sgd'"),
    (f"{ADASCALE} --workers 2 --strategy mirrored:wire=bf16", 2, "cannot be combined with a compressed wire"),
    (f"{ADASCALE} --workers 2 --strategy mirrored:algorithm=shared_memory", 2, "through one fixed tree"),
    (f"{ADASCALE} --workers 2 --regime-batch 32", 2, "--regime-batch cannot be combined with --lr-scale adascale"),
    (
        f"{ADASCALE} --workers 2 --gradient-noise multiplicative:base_batch=8",
        2,
        "adascale would measure the added noise",
    ),
    (f"{ADASCALE} --workers 2 --batch-norm sync", 2, "--batch-norm sync cannot be combined with --lr-scale adascale"),
    (
        "train digits --batch-norm sync --gradient-noise multiplicative:base_batch=8",
        2,
        "--batch-norm sync cannot be combined with --gradient-noise",
    ),
    ("train digits --gradient-noise additive", 2, "unknown gradient noise 'additive'"),
    ("train digits --gradient-noise multiplicative", 2, "base_batch=N"),
    ("train digits --gradient-noise multiplicative:base_batch=65", 2, "larger than the global batch of 64"),
    ("train digits --batch-growth milestones=1.5ep,factor=2", 2, "all batches of an epoch have one size"),
    ("train digits --batch-growth milestones=1ep", 2, "its factor is 0. Write milestones=30ep+60ep,factor=5."),
    ("train digits --batch-growth milestones=1ep,factor=2,largest=64", 2, "a batch of 64 cannot grow"),
    (
        f"{ADASCALE} --workers 2 --batch-growth milestones=1ep,factor=2",
        2,
        "a batch that grows cannot be combined with --lr-scale",
    ),
    ("train digits --batch-norm ghst", 2, "Did you mean 'ghost'?"),
    ("train digits --batch-norm ghost:size=0", 2, "size is 0"),
    ("train digits --batch-norm ghost", 2, "the model has no batch norm. Give --model cnn:batch_norm=true"),
    ("train digits --batch-norm sync --identical-batches", 2, "cannot be combined with identical batches"),
    ("compare digits --ladder batch-norm", 2, "rung 'batch norm of all workers'"),
    ("train digits --batch-norm sync --strategy local_sgd", 2, "its workers hold different weights"),
    ("train digits --batch-norm sync --reproducible --devices 2", 2, "sync is not reproducible on several devices"),
    ("train digits --batch-norm sync --batch-size 9 --micro-batch 8", 2, "Take --micro-batch 9 or leave it out"),
    ("train digits --ema 1.5", 2, "the decay of the weights' average is 1.5"),
    ("train digits --ema 0.9:warm", 2, "Write 0.999 or 0.999:warmup."),
    ("train digits --keep-best cosiness", 2, "no held-out 'cosiness' (--keep-best)"),
    ("train digits --init-from gone", 2, "there are no weights to start from (gone)"),
    ("export", 2, "tutti export needs RUN. Write tutti export RUN [OPTIONS]; see tutti export --help."),
    ("simulate digits", 2, "tutti simulate needs --machine. Write tutti simulate TASK --machine FILE"),
    ("goodput a b", 2, "tutti goodput does not take 'b'. Write tutti goodput RUN [--json]."),
    ("compare runs/a runs/b", 2, "Write tutti report runs/a runs/b to compare runs, or give one task, such as"),
    ("compare .", 2, "tutti compare trains one task, and not ."),
    ("train digits --precision fp31", 2, '"fp32", "bf16", "fp16", "fp64"'),
    ("train digits --loss-scale dynamic", 2, "--loss-scale does nothing for fp32"),
    ("train digits --precision fp16 --loss-scale dynamic:int=1", 2, "Did you mean 'init'?"),
    ("train digits --device cuda:1", 2, "Take cuda, and CUDA_VISIBLE_DEVICES=1 to use that device alone."),
    ("train digits --compile reduce", 2, "unknown mode of torch.compile 'reduce'"),
    ("train digits --compile max-autotune --strategy local_sgd", 2, "this strategy moves parameters"),
    ("train digits --reproducible --compile", 2, "--reproducible cannot be combined with --compile"),
    ("train digits --activation-checkpointing block", 2, "Did you mean 'blocks'?"),
    ("train digits --activation-checkpointing blocks:every=0", 2, "every is 0 and should be at least 1"),
    ("train digits --activation-checkpointing selective:evry=2", 2, "Did you mean 'every'?"),
    (
        "train digits --activation-checkpointing selective --compile default",
        2,
        "selective cannot be combined with --compile",
    ),
    (f"{PIPELINE}:schedule=zero_bubble --compile", 2, "zero_bubble cannot be combined with --compile"),
    (f"{PIPELINE}:micro_batches=4 --micro-batch 8", 2, "both say how a worker's share is cut"),
    (f"{PIPELINE}:micro_batches=4 --batch-norm sync", 2, "cannot be combined with micro-batches of 16 samples"),
    (
        f"{PIPELINE}:cuts=fc1+fc2",
        2,
        "cuts=fc1+fc2 makes 3 stages, not 2. Name 1 module, the first of each stage but the first.",
    ),
    (
        "train text --devices 2 --strategy tensor:sequence=true --compile",
        2,
        "sequence=true cannot be combined with --compile",
    ),
    ("train text --devices 4 --strategy hybrid:shards=2,stages=2,stage=3", 2, "Take stage=1, which shares out"),
    ("train text --devices 6 --strategy hybrid:shards=2,tensor=2 --workers 2", 2, "Take a multiple of 4 devices"),
    ("train digits --device cpu --devices 2 --strategy sharded:offload=true", 2, "offload=true does nothing here"),
    ("train digits --devices 1 --strategy sharded:param_dtype=bf16", 2, "Take more shards, or leave it out and take"),
    ("train digits --device cuda --slow rank=0,factor=2", 2, "factor cannot slow an accelerator down"),
    ("train digits --steps 9 --trace", 2, "--trace 10:3 needs 12 steps, and the run has 9."),
    ("train digits --epochs 1 --steps 3", 2, "--epochs and --steps exclude each other."),
    ("train digits --bach-size 3", 2, "Unknown option: --bach-size. Did you mean --batch-size?"),
    ("train digits --lr 0.1", 2, "unknown option --lr. Did you mean --optimizer.lr?"),
    ("train digits --num_workers 2", 2, "unknown option --num_workers. Did you mean --data-workers?"),
    ("compare digits --gpus=2", 2, "unknown option --gpus. Did you mean --devices?"),
    ("train digits --steps", 2, "--steps has no value. See tutti train --help."),
    ("plan digits --price -2@2026-11-27", 2, "'-2@2026-11-27' begins with -. Write --price=-2@2026-11-27."),
    ("plan digits --price=-2@2026-11-27", 2, "--price is -2. Give a number above 0."),
    ("plan digits --price --json", 2, "--price has no value. See tutti plan --help."),
    ("train digits more", 2, "tutti train does not take 'more'. Write tutti train TASK [OPTIONS]."),
    ("train digts", 2, "unknown task 'digts'. Did you mean 'digits'?"),
    ("train", 2, "no task is given. Write tutti train TASK"),
    ("train digits --config gone.toml", 2, "(gone.toml): No such file"),
    ("train cifar10 --data gone", 3, "gone"),
    ("train.py -np 2", 2, "train.py is no command. Write tutti run train.py to start a script"),
    ("--verison", 2, "unknown option --verison. See tutti --help."),
    ("help", 2, "See tutti --help."),
    ("train digits --epochs 3ep", 2, "--epochs is '3ep'. Give a number, such as 3 or 0.5."),
    ("tran digits", 2, 'Unknown command "tran". Did you mean "train"?'),
    ("train digits --optimizer.lrr 1", 2, "unknown option 'lrr' (--optimizer adam). Did you mean 'lr'?"),
    ("train digits --optimzer.lr 1", 2, "'optimzer' has no options (--optimzer.lr). Did you mean 'optimizer'?"),
    ("train digits --loss-scale.init 8", 2, "--loss-scale.init changes an option of --loss-scale, which is not given"),
    ("train digits --optimizer.lr", 2, "--optimizer.lr needs a value. Write --FIELD.OPTION VALUE"),
    ("train digits --set lr=1", 2, "cannot read 'lr=1' (--set). Write --FIELD.OPTION VALUE"),
    ("config show --optimizer.lrr 1", 2, "unknown option 'lrr' (--optimizer adam). Did you mean 'lr'?"),
    ("config show --bach-size 3", 2, "Unknown option: --bach-size. Did you mean --batch-size?"),
    ("run", 2, "no script is given."),
    ("run --show gone.py", 2, "unknown option --show. Did you mean --show-all? See tutti run --help"),
    ("run -n 2 gone.py", 2, "unknown option -n. Did you mean -np?"),
    ("run --gpus 2 gone.py", 2, "unknown option --gpus. Did you mean -np? See tutti run --help"),
    ("run gone.py", 2, "there is no script 'gone.py'."),
    ("run -np 2 python gone.py", 2, "there is no script 'python'. Leave out the word python."),
    ("run -np 1:2 gone.py", 2, "-np 1:2 needs an engine. Add --on local, --on ray or -H, or give one number."),
    ("train digits --workers 2 --devices 1:2 --dry-run", 2, "--devices 1:2 cannot be combined with --dry-run"),
    ("train digits --workers 3 --devices 4:5", 2, "3 workers"),
    ("run -np 0 gone.py", 2, "-np is '0'."),
    ("run --max-restarts -1 gone.py", 2, "--max-restarts is -1."),
    ("run --step-timeout 0.5 gone.py", 2, "--step-timeout is 0.5. Give seconds, at least 1, or 0 for no limit."),
]


@pytest.mark.parametrize(("line", "code", "message"), REFUSALS, ids=[line for line, _, _ in REFUSALS])
def test_refusal(line: str, code: int, message: str, tmp_path: Path) -> None:
    done = tutti(*line.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.startswith("tutti: ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


FILES = [
    ("batchsize = 3\n", "unknown key 'batchsize' (mine.toml). Did you mean 'batch_size'?"),
    ('batch_size = "3"\n', "'3' is not a whole number (mine.toml, batch_size)."),
    ("batch_size = 3.5\n", "3.5 is not a whole number (mine.toml, batch_size)."),
    ("steps = true\n", "True is not a whole number (mine.toml, steps)."),
    ("augment = 1\n", "1 is not true or false (mine.toml, augment)."),
    ("[optimizer]\nlr = 1\n", "is not text (mine.toml, optimizer)."),
    ('precision = "fp31"\n', "'fp31' is not possible (mine.toml, precision). Did you mean 'fp32'?"),
    ("batch_size = \n", "the configuration is not TOML (mine.toml)"),
    ("batch_size = 0\n", "--batch-size is 0."),
    ('wait = "5s"\n', "--wait 5s is for runs that outlive lost devices"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=[text for text, _ in FILES])
def test_refused_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(text)
    done = tutti("train", "digits", "--config", "mine.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_refused_environment_names_the_variable(tmp_path: Path) -> None:
    done = tutti("train", "digits", cwd=tmp_path, TUTTI_BATCH_SIZE="many")
    assert done.returncode == 2
    assert "TUTTI_BATCH_SIZE" in done.stderr


def test_compiling_without_a_compiler_is_refused(tmp_path: Path) -> None:
    done = tutti("train", "digits", "--device", "cpu", "--compile", cwd=tmp_path, CXX="no-such-compiler")
    assert done.returncode == 2
    assert "--compile needs a C++ compiler, and there is no no-such-compiler. Install one" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    """``tutti train digits --print-config | head -1``, whose other end is closed before anything is written."""
    there, here = os.pipe()
    os.close(there)
    done = subprocess.run(
        [sys.executable, str(NO_TORCH), "train", "digits", "--print-config"],
        stdout=here,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    os.close(here)
    assert (done.returncode, done.stderr) == (141, "")


def test_full_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("{}")
    done = tutti("train", "digits", "--devices", "1", "--out", "old", cwd=tmp_path)
    assert done.returncode == 2
    assert "tutti: the run directory is not empty (old). Choose another --out, or add --overwrite." in done.stderr
    assert (tmp_path / "old" / "summary.json").read_text() == "{}"


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = tutti("train", "digits", "--devices", "1", "--out", "file/run", cwd=tmp_path)
    assert done.returncode == 8
    assert "cannot write the run directory (file/run): Not a directory" in done.stderr


def test_joined_job_has_its_own_number_of_devices(tmp_path: Path) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    done = tutti("train", "digits", "--devices", "3", cwd=tmp_path, **job)
    assert done.returncode == 2
    assert "--devices is 3, but this job was started with 2 processes" in done.stderr


@pytest.mark.parametrize(
    ("words", "most"),
    [
        *[("--help", 40), ("train --help", 40), ("train --help-all", 81), ("run --help", 40), ("export --help", 40)],
        *[
            ("chaos --help", 40),
            ("chaos fill --help", 40),
            ("workload --help", 40),
            ("bench --help", 40),
            ("submit --help", 40),
            ("config --help", 40),
            *[(f"{verb} --help", 40) for verb in ("compare", "plan", "landscape", "simulate", "noise", "report")],
        ],
    ],
)
def test_help_is_short(words: str, most: int, tmp_path: Path) -> None:
    done = tutti(*words.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= 80
    assert lines[3].startswith("Example: tutti ")
    # An option whose description is not found would be an empty line.
    assert "\n\n\n" not in done.stdout


def test_all_options_of_train_are_one_word_away(tmp_path: Path) -> None:
    def flags(word: str) -> set[str]:
        return set(re.findall(r"--[a-z-]+", tutti("train", word, cwd=tmp_path).stdout))

    options = {f"--{field.name.replace('_', '-')}" for field in fields(TrainConfig)}
    assert options | {"--config", "--print-config", "--json", "--dry-run", "--memory", "--set"} <= flags("--help-all")
    usual = {f"--{name.replace('_', '-')}" for name in USUAL}
    assert usual | {"--help-all"} == flags("--help")
    assert len(tutti("run", "--help-all", cwd=tmp_path).stdout) == len(tutti("run", "--help", cwd=tmp_path).stdout)


def test_help_lists_the_verbs(tmp_path: Path) -> None:
    lines = tutti("--help", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == [
        "config",
        "run",
        "submit",
        "train",
        "chaos",
        "compare",
        "export",
        "goodput",
        "landscape",
        "noise",
        "report",
        "bench",
        "plan",
        "simulate",
        "workload",
        "doctor",
        "--help",
        "--install-completion",
        "--version",
    ]


def test_version(tmp_path: Path) -> None:
    done = tutti("--version", cwd=tmp_path)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["tutti", "torch"]


def test_a_deleted_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["run", "-np", "1", "--on", "local", str(tmp_path / "script.py")]) == 2
    assert "the working directory was deleted. Change to a folder that exists." in capsys.readouterr().err
