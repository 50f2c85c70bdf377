"""Compiled loops are built once, by one process, where nobody else can write; without a compiler nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import worlds
from tests.contract import models
from tests.faults.commands import tutti as command
from tests.faults.commands import write_task
from tutti.native import compiled_passes
from tutti.native import native_library as loading
from tutti.optim import LAMB

compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(compiler is None, reason="there is no C++ compiler")

COUNTING = """#!/bin/sh
echo run >> "$COMPILER_LOG"
exec {compiler} "$@"
"""
STEP = """
import torch
from tutti.optim import LAMB
param = torch.nn.Parameter(torch.ones(300, 301))
param.grad = torch.full_like(param, 0.5)
LAMB([param], fused=True).step()
print(param[0, 0].item())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "tutti"


def script(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700)
    return str(path)


def built(environment: dict[str, str]) -> bool:
    """Whether this rank gets a library, in an environment of its own."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        return compiled_passes.load_kernels() is not None
    finally:
        os.environ.clear()
        os.environ.update(before)


@needs_compiler
def test_of_many_processes_one_builds(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    counting = script(tmp_path / "compiler", COUNTING.format(compiler=compiler))
    environment = {"COMPILER_LOG": str(log), "CXX": counting, "XDG_CACHE_HOME": str(cache.parent)}
    assert worlds.run(4, built, environment=environment) == [True] * 4
    assert log.read_text(encoding="utf-8").count("run") == 2, "one compilation and one linking in all"
    [made] = cache.glob("kernels-*.so")
    assert sorted(p.name for p in cache.iterdir()) == [made.name, "lock"]
    assert cache.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_a_broken_library_is_built_again(cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    broken = cache / f"kernels-{loading._digest(compiled_passes._SOURCE)}.so"
    broken.write_bytes(b"\x7fELF and nothing more")
    assert compiled_passes.load_kernels() is not None
    assert broken.stat().st_size > 1000


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_used(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert compiled_passes.load_kernels() is not None
    assert list(cache.iterdir()) == []


@needs_compiler
def test_without_openmp_one_thread_does_the_same(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '#!/bin/sh\ncase "$*" in *-fopenmp*) exit 1;; esac\nexec {compiler} "$@"\n'
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text.format(compiler=compiler)))
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=200, check=True)
    param = nn.Parameter(torch.ones(300, 301))
    param.grad = torch.full_like(param, 0.5)
    LAMB([param], fused=True).step()
    assert float(done.stdout) == param[0, 0].item()


def test_a_compiler_that_fails_is_told_of(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", "#!/bin/sh\necho no headers here >&2\nexit 1\n"))
    with pytest.warns(RuntimeWarning, match="no headers here"):
        assert compiled_passes.load_kernels() is None
    assert [p.name for p in cache.iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["PATH", "TUTTI_KERNELS"])
def test_without_a_compiler_or_wanting_none(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, {"PATH": os.devnull, "TUTTI_KERNELS": "off"}[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled_passes.load_kernels() is None
    assert not cache.exists()


@needs_compiler
def test_a_stray_quote_and_a_lock_that_cannot_be_opened(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f'{compiler} -DNAME="')
    assert loading.find_compiler() == compiler
    (cache / "lock").mkdir(parents=True)
    cache.chmod(0o700)
    built: list[Path] = []
    monkeypatch.setattr(loading, "_build", lambda compiler, source, path: built.append(path))
    assert loading.library(Path(loading.__file__).with_name("ghost.cpp")) is None and len(built) == 1


def test_only_plain_dense_tensors_on_the_cpu_are_taken() -> None:
    dense = torch.zeros(2, 3, 4, 4)
    refused = [
        dense.half(),
        dense.to("meta"),
        torch.zeros(4, 6).t(),
        torch.zeros(4, 6)[:, :3],
        torch.zeros(1, 3).expand(2, 3),
        torch.zeros(2, dtype=torch.complex64),
    ]
    assert [compiled_passes.passes(nn.Parameter(t) if t.is_floating_point() else t) for t in refused] == [None] * 6
    if compiled_passes.load_kernels() is not None:
        taken = [dense, dense.double(), dense.to(memory_format=torch.channels_last), torch.zeros(3), torch.zeros(())]
        assert None not in [compiled_passes.passes(nn.Parameter(t)) for t in taken]


# --- ranks agree ----------------------------------------------------------------------------------------------------


def trained(lame: int | None, optimizer: str) -> tuple[bool, str]:
    """Whether this rank has compiled loops, and the weights, where rank ``lame`` has none."""
    import tutti

    available = compiled_passes._all
    if tutti.rank() == lame:
        compiled_passes._all = dict  # type: ignore[assignment]
    try:
        made = LAMB if optimizer == "instance" else "lamb:lr=0.01"
        net = models.model()
        chosen = made if isinstance(made, str) else made(net.parameters(), lr=0.01)
        run = tutti.prepare(net, chosen, models.samples(), models.loss, workers=3, batch_size=25)
        for batch in run.epoch(0):
            run.step(batch)
        return bool(compiled_passes._all()), run.weights_sha256()
    finally:
        compiled_passes._all = available


@needs_compiler
@pytest.mark.parametrize("optimizer", ["options", "instance"])
def test_a_rank_that_cannot_compile_holds_the_same_bits(optimizer: str) -> None:
    found = {}
    for lame in (None, 0, 2):
        answers = worlds.run(3, trained, lame=lame, optimizer=optimizer)
        assert [compiled for compiled, _ in answers] == [rank != lame for rank in range(3)]
        found[lame] = {digest for _, digest in answers}
    assert len(set.union(*found.values())) == 1


# --- a run says so, and gives the same bits ---------------------------------------------------------------------------


@needs_compiler
def test_a_run_without_a_compiler_repeats_one_with_it(cache: Path, tmp_path: Path) -> None:
    """Ghost batch norm and LAMB in one model, by the command line, with an empty cache and a PATH without compilers."""
    model = "def model():\n    return nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))"
    write_task(tmp_path, model)
    options = ("--optimizer", "lamb:lr=0.02", "--batch-norm", "ghost:size=4", "--batch-size", "16", "--reproducible")
    digests = []
    hidden = tmp_path / "bin"
    hidden.mkdir()
    places = {"with": {}, "without": {"PATH": str(hidden)}, "off": {"TUTTI_KERNELS": "off"}}
    for name, environ in places.items():
        fresh = {"XDG_CACHE_HOME": str(tmp_path / f"cache-{name}"), **environ}
        words = ("train", "own.py:task", *options, "--device", "cpu", "--steps", "6", "--out", name)
        result = command(tmp_path, *words, **fresh)
        assert result.code == 0, result.err
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        told = [json.loads((tmp_path / name / "env.json").read_text())["kernels"], summary["kernels"]]
        assert told == [told[0]] * 2 and told[0] in " ".join(result.err.split())
        assert told[0].startswith("compiled (" if name == "with" else "PyTorch's own operations (")
        digests.append(summary["weights_sha256"])
    assert digests[0] == digests[1] == digests[2]
    assert list((tmp_path / "cache-with" / "tutti").glob("*.so")) and not (tmp_path / "cache-without").exists()
