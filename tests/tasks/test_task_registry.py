"""Tasks by name and the user's own: what is loaded, and what is refused before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tutti.errors import DataError, TuttiError, UsageError
from tutti.tasks import task_registry
from tutti.tasks.losses import classification, regression
from tutti.tasks.membranes import mask_pixels
from tutti.tasks.task import Task
from tutti.tasks.text import next_character

GOOD = """
import torch
from tutti.tasks.losses import classification, regression
from tutti.tasks.membranes import mask_pixels
from tutti.tasks.task import Task
from tutti.tasks.text import next_character

def make(data="default", augment=False):
    return Task(name=f"{data} {augment}", model=lambda: torch.nn.Linear(1, 1), loss=None, train=[])

def plain():
    return make("plain")

def everything(**options):
    return make(str(sorted(options)))

def required(model):
    return make(str(model))

def other(path):
    return make(path)

def wrong():
    return 7

def missing_file():
    open("nothing-here")

def raises():
    raise KeyError("colour")

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(GOOD)
    return str(tmp_path / "mine.py")


def cifar_folder(root: Path, classes: int = 10) -> Path:
    for part in ("train", "test"):
        for label in range(classes):
            (root / part / f"class{label}").mkdir(parents=True)
            pixels = np.random.default_rng(label).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / part / f"class{label}" / "0.png")
    return root


def refused(kind: type[TuttiError], *words: str, text: str, **options: object) -> None:
    for act in (task_registry.check_task, task_registry.load_task):
        with pytest.raises(kind) as caught:
            act(text, **options)  # type: ignore[arg-type]
        for word in words:
            assert word.lower() in str(caught.value).lower()


def test_names_and_options_are_refused_by_check_and_load(tmp_path: Path) -> None:
    refused(UsageError, "did you mean 'digits'?", text="digit")
    refused(UsageError, "path/to/file.py:function", text="zzz")
    refused(UsageError, "did you mean 'cnn'?", text="digits", model="cn")
    refused(UsageError, "did you mean 'batch_norm'?", text="digits", model="cnn:batchnorm=true")
    refused(UsageError, "neither true nor false", text="digits", model="cnn:batch_norm=3")
    refused(UsageError, "dropout is 1.0", text="digits", model="mlp:dropout=1")
    refused(UsageError, "hidden is 0", text="digits", model="mlp:hidden=0")
    refused(UsageError, "does not use --data", text="linear", data=str(tmp_path))
    refused(UsageError, "does not use --augment", text="digits", augment=True)
    refused(DataError, "needs data", "--data FOLDER", text="cifar10")
    refused(DataError, "no such folder", text="cifar10", data=str(tmp_path / "x"))
    refused(DataError, "no images found", text="cifar10", data=str(tmp_path))
    refused(UsageError, "did you mean 'course'?", text="cifar10", model="cours", data=str(tmp_path))


def test_check_imports_no_torch(own: str) -> None:
    code = (
        "import sys\nfrom tutti.tasks import task_registry\n"
        "task_registry.check_task('digits', model='cnn:batch_norm=true')\ntask_registry.check_task('linear')\n"
        "task_registry.check_task(sys.argv[1])\n"
        "loaded = {'torch', 'sklearn', 'pyarrow', 'PIL', 'datasets'} & set(sys.modules)\nsys.exit(str(loaded or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{own}:plain"], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == ""


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if the package were not installed."""
    find = task_registry.importlib.util.find_spec
    monkeypatch.setattr(task_registry.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setitem(sys.modules, package, None)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "sklearn")
    refused(DataError, "sklearn", "tutti-train[demo]", text="digits")
    hide(monkeypatch, "datasets")
    refused(DataError, "pip install datasets", text="cifar10", data="uoft-cs/cifar10")


@pytest.mark.parametrize("text", ["linear", "digits"])
def test_embedded_tasks(text: str) -> None:
    task, again = task_registry.load_task(text), task_registry.load_task(text)
    batches = [source.fetch(np.arange(len(source)), None) for source in (task.train, task.eval)]
    again_inputs, _ = again.train.fetch(np.arange(len(again.train)), None)
    assert torch.equal(batches[0][0], again_inputs)
    for batch in batches:
        total, count, *_ = task.loss(task.model(), batch)
        assert count == len(batch[1]) == len(total) and torch.isfinite(total).all()


def test_linear_is_a_noisy_line() -> None:
    task = task_registry.load_task("linear")
    x, y = (tensor.double() for tensor in task.train.fetch(np.arange(512), None))
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones_like(x)], 1), y).solution.flatten()
    assert torch.allclose(solution, torch.tensor([2.0, -1.0]).double(), atol=0.15)
    noise = (y - 2 * x + 1).flatten()
    assert abs(noise.std() - 0.5) < 0.08 and x.min() >= -1 and x.max() < 1


def test_digits_split() -> None:
    task = task_registry.load_task("digits")
    assert (len(task.train), len(task.eval)) == (1438, 359) and task.images
    inputs, targets = task.train.fetch(np.arange(1438), None)
    assert inputs.shape == (1438, 1, 8, 8) and inputs.min() == 0 and inputs.max() == 1
    assert set(targets.tolist()) == set(range(10)) and targets.dtype == torch.int64


def test_cifar10_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    data = str(cifar_folder(tmp_path / "d"))
    task = task_registry.load_task("cifar10", data=data, augment=True)
    assert task.train.augment is not None and task.eval.augment is None
    assert task_registry.load_task("cifar10", data=data).train.augment is None
    assert task.describe == "10 + 10 images 32×32, 10 classes"
    _, count, metrics = task.loss(task.model(), task.train.fetch(np.arange(10), None))
    assert count == 10 and set(metrics) == {"accuracy"}
    few = task_registry.load_task("cifar10", data=str(cifar_folder(tmp_path / "few", 3)), model="resnet18")
    assert few.model()(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_own_functions_get_the_options_they_take(own: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert task_registry.load_task(f"{own}:make").name == "default False"
    assert task_registry.load_task(f"{own}:make", data="d", augment=True).name == "d True"
    assert task_registry.load_task(f"{own}:plain").name == "plain False"
    assert task_registry.load_task(f"{own}:everything", model="m", data="d").name == "['data', 'model'] False"
    assert task_registry.load_task(f"{own}:required").name == "None False"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    os.rename("mine.py", "my_module_of_this_test.py")
    assert isinstance(task_registry.load_task("my_module_of_this_test:plain"), Task)


def test_own_files_that_are_not_there(own: str, tmp_path: Path) -> None:
    refused(UsageError, "no such file", "nowhere.py", text=f"{tmp_path}/nowhere.py:make")
    refused(UsageError, "names no function", text=own)
    refused(UsageError, f"started by: tutti run {own}", text=own)
    refused(UsageError, "names no function", text=f"{own}:")
    refused(UsageError, "no module 'no_such_module'", text="no_such_module:make")
    refused(UsageError, "did you mean 'plain'?", text=f"{own}:plian")
    (tmp_path / "broken.py").write_text("def make(:\n")
    refused(UsageError, "broken.py", "line 1", text=f"{tmp_path}/broken.py:make")


def failed(kind: type[TuttiError], text: str, *words: str, **options: str) -> None:
    task_registry.check_task(text)
    with pytest.raises(kind) as caught:
        task_registry.load_task(text, **options)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_own_functions_that_fail(own: str, tmp_path: Path) -> None:
    failed(UsageError, f"{own}:wrong", "returned int", "Task")
    failed(UsageError, f"{own}:number", "no function 'number'")
    failed(UsageError, f"{own}:raises", "KeyError: 'colour'", "mine.py:")
    failed(DataError, f"{own}:missing_file", "nothing-here")
    failed(UsageError, f"{own}:other", "'path'")
    failed(UsageError, f"{own}:plain", "takes no option 'data'", data="d")
    (tmp_path / "bad.py").write_text("import no_such_thing\ndef make(): pass\n")
    failed(UsageError, f"{tmp_path}/bad.py:make", "no_such_thing", "bad.py:1")
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(5)\ndef make(): pass\n")
    failed(UsageError, f"{tmp_path}/leaves.py:make", "SystemExit")


SAMPLES = {
    "linear": lambda: (torch.zeros(2, 1), torch.zeros(2, 1)),
    "digits": lambda: (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64)),
    "cifar10": lambda: (torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64)),
    "text": lambda: (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)),
    "membranes": lambda: {"image": torch.zeros(2, 1, 8, 8), "mask": torch.ones(2, 1, 8, 8)},
}
LOSSES = {"linear": regression, "digits": classification, "cifar10": classification} | {
    "text": next_character,
    "membranes": mask_pixels,
}


@pytest.mark.parametrize("name", task_registry.TASKS)
def test_the_registry_names_the_values_that_a_task_reports(name: str) -> None:
    def model(inputs: torch.Tensor) -> torch.Tensor:
        if name == "text":
            return torch.zeros(*inputs.shape, 5)
        return torch.zeros(len(inputs), 5) if LOSSES[name] is classification else inputs

    found = LOSSES[name](model, SAMPLES[name]())  # type: ignore[arg-type, no-untyped-call]
    assert task_registry.held_out_values(name) == ("loss", *(found[2] if len(found) > 2 else ()))
