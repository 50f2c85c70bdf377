"""The task ``text``: windows of any text file, the embedded text, the GPT, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import tutti
from tests import worlds
from tutti.config.task_config import GptConfig
from tutti.data.text_source import WindowSource, embedded, encode_characters, read_text
from tutti.errors import DataError, UsageError
from tutti.tasks import task_registry
from tutti.tasks.gpt import gpt
from tutti.tasks.text import next_character

SMALL = "gpt:layers=2,heads=2,width=8,block=5"


@pytest.fixture
def poem(tmp_path: Path) -> str:
    path = tmp_path / "poem.txt"
    path.write_bytes("Ünder the sea,\r\nwhere 鯨 sing.\n".encode() * 20)
    return str(path)


def refused(what: str, data: Path, model: str = SMALL) -> None:
    with pytest.raises(DataError, match=what) as caught:
        task_registry.load_task("text", data=str(data), model=model)
    assert str(data) in str(caught.value)


def test_windows_are_the_text(poem: str) -> None:
    text = Path(poem).read_bytes().decode()
    task = task_registry.load_task("text", data=poem, model=SMALL)
    vocabulary, split = sorted(set(text)), len(text) * 9 // 10
    for source, part in ((task.train, text[:split]), (task.eval, text[split:])):
        assert len(source) == (len(part) - 1) // 5
        numbers = np.array([len(source) - 1, 0, 1])
        inputs, targets = source.fetch(numbers, None)
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous() and targets.is_contiguous()
        for number, *pair in zip(numbers, inputs, targets, strict=True):
            start = 5 * int(number)
            read_back = ["".join(vocabulary[code] for code in row) for row in pair]
            assert read_back == [part[start : start + 5], part[start + 1 : start + 6]]
    assert f"{len(task.train)} + {len(task.eval)} windows of 5 characters, {len(vocabulary)} diff" in task.describe


def test_inputs_and_targets_share_the_text() -> None:
    codes = encode_characters("to be or not to be" * 10, "").codes
    source = WindowSource(codes, 4, "")
    assert np.shares_memory(source._inputs, codes) and np.shares_memory(source._targets, codes)


@pytest.mark.parametrize(("characters", "windows"), [(5, None), (6, 1), (10, 1), (11, 2)])
def test_number_of_windows(characters: int, windows: int | None) -> None:
    codes = np.zeros(characters, dtype=np.uint16)
    if windows is None:
        with pytest.raises(DataError, match=r"5 characters is too short for a window of 5.*block=5"):
            WindowSource(codes, 5, "a.txt")
    else:
        assert len(WindowSource(codes, 5, "a.txt")) == windows


def test_embedded_text_is_the_standard_library() -> None:
    text = embedded()
    assert 900_000 < len(text.encode()) <= 1_000_000
    import argparse

    assert Path(argparse.__file__).read_text(encoding="utf-8") in text
    assert read_text(None).vocabulary == "".join(sorted(set(text)))
    assert len(task_registry.load_task("text").train) > 10_000


def test_files_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    refused("no such text file", file)
    refused("no such text file", tmp_path)
    file.touch()
    refused("is empty", file)
    file.write_text("short")
    refused("too short for a window of 5", file)
    file.write_bytes(b"text " * 20 + b"\xff\xfe")
    refused(r"not UTF-8 text .*, byte 100\)", file)


def test_number_of_different_characters(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    most = "".join(map(chr, range(0x10000, 0x20000)))
    file.write_text(most, encoding="utf-8")
    assert (read_text(str(file)).codes == np.arange(65536)).all()
    file.write_text(most + "a", encoding="utf-8")
    refused("65,537 different characters", file)


def test_options_are_refused_without_torch(tmp_path: Path) -> None:
    for model, what in (
        ("gpt:heads=3", "width is 128 and should be a multiple of heads"),
        ("gpt:layers=0", "layers is 0"),
        ("gpt:block=0", "block is 0"),
        ("gpt:dropout=1", "dropout is 1.0"),
        ("gtp", "Did you mean 'gpt'"),
    ):
        with pytest.raises(UsageError, match=what):
            task_registry.check_task("text", model=model)
    with pytest.raises(UsageError, match="does not use --augment"):
        task_registry.check_task("text", augment=True)
    code = (
        "import sys\nfrom tutti.errors import DataError\n"
        "from tutti.tasks import task_registry\ntask_registry.check_task('text')\n"
        "try:\n    task_registry.check_task('text', data=sys.argv[1])\nexcept DataError as error:\n"
        "    code = error.exit_code\n"
        "sys.exit(f'{code:d}' + ' torch' * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{tmp_path}/x"], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == "3"


def test_scores_depend_on_no_later_character() -> None:
    torch.manual_seed(0)
    model = gpt(GptConfig(layers=2, heads=2, width=8, block=6), 11)
    a = torch.randint(11, (3, 6))
    b = torch.cat([a[:, :4], (a[:, 4:] + 1) % 11], dim=1)
    before, after = model(a), model(b)
    assert before.shape == (3, 6, 11)
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-6) and not torch.allclose(before, after, atol=1e-3)
    first = a.clone()
    first[:, 0] = (first[:, 0] + 1) % 11
    assert not torch.allclose(model(first)[:, 3], before[:, 3], atol=1e-6), "nothing looks back"


def test_every_parameter_has_a_gradient_and_any_cut_works() -> None:
    torch.manual_seed(0)
    model = gpt(GptConfig(layers=2, heads=2, width=8, block=6, dropout=0.1), 11).double()
    batch = torch.randint(11, (8, 6)), torch.randint(11, (8, 6))
    next_character(model, batch)[0].sum().backward()
    largest = {name: float(p.grad.abs().max()) for name, p in model.named_parameters() if p.grad is not None}
    assert largest.keys() == dict(model.named_parameters()).keys()
    # Of a bias each element: a key's has no effect at all, and it would lie in one tensor with those of the values.
    least = {
        name: float(p.grad.abs().min()) for name, p in model.named_parameters() if p.dim() == 1 and p.grad is not None
    }
    assert min((largest | least).values()) > 1e-9 * max(largest.values()), largest | least
    for at in range(1, len(model)):
        received = model[:at](batch[0]).detach().requires_grad_()
        model[at:](received).sum().backward()
        assert received.grad is not None


def test_loss_is_the_mean_over_characters() -> None:
    torch.manual_seed(0)
    model = gpt(GptConfig(layers=1, heads=1, width=8, block=6), 11).double()
    inputs, targets = torch.randint(11, (4, 6)), torch.randint(11, (4, 6))
    total, count, metrics = next_character(model, (inputs, targets))
    scores = model(inputs)
    assert count == 24 and total.shape == (4,)
    assert torch.allclose(total.sum() / count, functional.cross_entropy(scores.transpose(1, 2), targets))
    right = sum(int(s.argmax()) == int(t) for s, t in zip(scores.flatten(0, 1), targets.flatten(), strict=True))
    assert int(metrics["accuracy"]) == right


def train(data: str, strategy: str) -> tuple[list[float], str]:
    """Losses and hash after an epoch with three workers."""
    torch.manual_seed(0)
    task = task_registry.load_task("text", data=data, model=f"{SMALL},dropout=0.1")
    run = tutti.prepare(
        *(task.model(), "adam:lr=0.01", task.train, task.loss),
        strategy=strategy,
        workers=3,
        batch_size=16,
        reproducible=True,
    )
    losses = [run.step(batch) for _ in range(5) for batch in run.epoch(0)]
    assert run.stats is not None and 0 < run.stats.metrics["accuracy"] < 1
    return [losses[0], losses[-1], run.evaluate(task.eval).loss], run.weights_sha256()


def test_trains_alike_on_any_number_of_devices(poem: str) -> None:
    (losses, weights), *_ = worlds.run(1, train, data=poem, strategy="mirrored")
    assert losses[1] < 0.9 * losses[0]
    for devices, strategy in ((2, "mirrored"), (3, "mirrored"), (2, "model_parallel")):
        for result in worlds.run(devices, train, data=poem, strategy=strategy):
            assert result == (losses, weights), f"{strategy} on {devices}"
