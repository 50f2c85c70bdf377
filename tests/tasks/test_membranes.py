"""The task ``membranes``: images with masks from folders, the U-Net, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

import tutti
from tests import worlds
from tutti.config.task_config import UnetConfig
from tutti.data.masks import MaskSource, find_masks, flip_pairs, read_masks
from tutti.data.source import AugmentKey
from tutti.errors import DataError, UsageError
from tutti.tasks import task_registry
from tutti.tasks.membranes import mask_pixels
from tutti.tasks.unet import unet

SMALL = "unet:depth=2,width=2"


def folder(root: Path, count: int = 8, shape: tuple[int, int] = (8, 12), part: str = "train") -> Path:
    """Images of noise; a mask is where its image is bright."""
    for number in range(count):
        levels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        for name, pixels in (("image", levels), ("label", (levels > 127) * np.uint8(255))):
            save(root / part / name / f"{number:02d}.png", pixels)
    return root


def save(file: Path, pixels: NDArray[np.integer]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    return folder(tmp_path / "data")


def refused(data: Path, what: str, where: Path | None = None) -> None:
    with pytest.raises(DataError, match=what) as caught:
        task_registry.load_task("membranes", data=str(data), model=SMALL)
    assert str(where or data) in str(caught.value)


def test_last_five_are_held_out(data: Path) -> None:
    task = task_registry.load_task("membranes", data=str(data), model=SMALL)
    assert (len(task.train), len(task.eval)) == (3, 5) and task.images
    assert task.describe == "3 + 5 grey images 12×8 with masks"
    batch = task.eval.fetch(np.array([4, 0]), None)
    assert {key: (value.dtype, tuple(value.shape)) for key, value in batch.items()} == {
        "image": (torch.float32, (2, 1, 8, 12)),
        "mask": (torch.uint8, (2, 1, 8, 12)),
    }
    for row, name in enumerate(("07", "03")):
        levels = np.asarray(Image.open(data / "train" / "image" / f"{name}.png"))
        assert np.allclose(batch["image"][row, 0].numpy() * 63.75 + 127.5, levels, atol=1e-3)
        assert (batch["mask"][row, 0].numpy() == (levels > 127)).all()


def test_folder_test_is_held_out_when_present(data: Path) -> None:
    task = task_registry.load_task("membranes", data=str(folder(data, 2, part="test")), model=SMALL)
    assert (len(task.train), len(task.eval)) == (8, 2)


def test_masks_of_ones_or_of_one_level_are_binary(data: Path) -> None:
    masks = data / "train" / "label"
    save(masks / "00.png", np.eye(8, 12, dtype=np.uint8))
    save(masks / "01.png", np.zeros((8, 12), dtype=np.uint8))
    Image.new("1", (12, 8), 1).save(masks / "02.png")
    pairs = read_masks(find_masks(str(data))[0])
    assert (pairs[0, 1] == np.eye(8, 12)).all() and not pairs[1, 1].any() and (pairs[2, 1] == 1).all()


def test_folders_that_are_refused(data: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path / "data" / "train", "cannot be listed.*train/image/NN.png")
    refused(folder(tmp_path / "few", 5), "5 images, and 5 are held out.*add test/image")
    empty = folder(tmp_path / "empty", 1)
    (empty / "train" / "image" / "00.png").unlink()
    refused(empty, "no images", empty / "train" / "image")


def test_files_that_do_not_pair_are_refused(data: Path) -> None:
    mask, image = (data / "train" / name / "03.png" for name in ("label", "image"))
    kept = mask.read_bytes()
    mask.unlink()
    refused(data, "no mask for it", image)
    mask.write_bytes(kept)
    mask.with_name("99.png").write_bytes(kept)
    refused(data, "no image for it", mask.with_name("99.png"))
    mask.with_name("99.png").unlink()
    image.with_suffix(".bmp").write_bytes(kept)
    refused(data, "two files of the name 03", image)
    image.with_suffix(".bmp").unlink()
    outside = data.parent / "outside.png"
    outside.write_bytes(kept)
    mask.unlink()
    mask.symlink_to(outside)
    refused(data, "not an image file of the folder", mask)


def test_images_that_are_refused(data: Path) -> None:
    image, mask = (data / "train" / name / "01.png" for name in ("image", "label"))
    kept = image.read_bytes(), mask.read_bytes()
    save(mask, np.zeros((8, 8), dtype=np.uint8))
    refused(data, "8×8 and the first one 12×8", mask)
    save(mask, np.arange(96, dtype=np.uint8).reshape(8, 12))
    refused(data, "96 different levels", mask)
    mask.write_bytes(kept[1])
    save(image, np.zeros((8, 16), dtype=np.uint8))
    refused(data, "16×8 and the first one 12×8", image)
    save(image, np.zeros((8, 12), dtype=np.uint16))
    refused(data, "more than 8 bits", image)
    image.write_bytes(kept[0][:60])
    refused(data, "broken", image)
    image.write_bytes(kept[0])
    task_registry.load_task("membranes", data=str(data), model=SMALL)


def test_sizes_that_do_not_fit_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"12×8 pixels cannot be halved 3 times.*multiples of 8.*smaller depth"):
        task_registry.load_task("membranes", data=str(data), model="unet:depth=3,width=2")
    refused(folder(data, 2, (8, 8), "test"), "held-out images are 8×8 and those for training 12×8")


def test_options_are_refused_without_torch(data: Path, tmp_path: Path) -> None:
    for model, what in (("unet:depth=0", "depth is 0"), ("unet:width=0", "width is 0"), ("unett", "mean 'unet'")):
        with pytest.raises(UsageError, match=what):
            task_registry.check_task("membranes", model=model, data=str(data))
    with pytest.raises(DataError, match=r"needs data.*--data FOLDER \(train/image"):
        task_registry.check_task("membranes")
    code = (
        "import sys\nfrom tutti.errors import DataError\nfrom tutti.tasks import task_registry\n"
        "task_registry.check_task('membranes', data=sys.argv[1], augment=True)\n"
        "try:\n    task_registry.check_task('membranes', data=sys.argv[2])\nexcept DataError as error:\n"
        "    code = error.exit_code\n"
        "sys.exit(f'{code:d}' + ' torch' * ('torch' in sys.modules) + ' PIL' * ('PIL' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(data), f"{tmp_path}/x"], capture_output=True, text=True, timeout=300
    )
    assert done.stderr.strip() == "3"


@pytest.mark.parametrize(("shape", "ways"), [((6, 6), 8), ((6, 4), 4)])
def test_augmentation_turns_image_and_mask_alike(shape: tuple[int, int], ways: int) -> None:
    grey = np.arange(shape[0] * shape[1], dtype=np.uint8).reshape(shape)
    pairs = np.repeat(np.stack([grey, grey % 2])[None], 64, axis=0)
    source, numbers = MaskSource(pairs, augment=True), np.arange(64)
    first = source.fetch(numbers, AugmentKey(0, 0))
    levels = (first["image"] * 63.75 + 127.5).round().to(torch.uint8)
    assert (levels % 2 == first["mask"]).all()
    assert len({bytes(image.numpy()) for image in levels}) == ways
    assert all((np.sort(image.flatten().numpy()) == grey.flatten()).all() for image in levels)
    # Of the sample and the epoch alone: not of the place in a batch, and nothing in evaluation.
    again = source.fetch(numbers[10:20][::-1].copy(), AugmentKey(0, 0))
    assert torch.equal(again["image"], first["image"][10:20].flip(0))
    assert not torch.equal(source.fetch(numbers, AugmentKey(0, 1))["image"], first["image"])
    plain = MaskSource(pairs).fetch(numbers, AugmentKey(0, 0))["image"]
    assert torch.equal(source.fetch(numbers, None)["image"], plain)
    assert (pairs[:, 0] == grey).all(), "the source's own images were changed"


def test_the_eight_symmetries() -> None:
    square = np.arange(9, dtype=np.uint8).reshape(3, 3)
    pairs = np.repeat(np.stack([square, square])[None], 8, axis=0)
    flip_pairs(pairs, np.arange(8, dtype=np.uint64) << np.uint64(61))
    rotations = [np.rot90(square, k) for k in range(4)]
    expected = {bytes(r.copy()) for r in rotations} | {bytes(r[:, ::-1].copy()) for r in rotations}
    assert {bytes(pair[0].copy()) for pair in pairs} == expected and (pairs[:, 0] == pairs[:, 1]).all()


@pytest.mark.parametrize("norm", [False, True])
def test_every_parameter_of_the_unet_has_a_gradient(norm: bool) -> None:
    torch.manual_seed(0)
    model = unet(UnetConfig(depth=2, width=4, batch_norm=norm)).double()
    image = torch.randn(3, 1, 16, 24, dtype=torch.float64)
    scores = model(image)
    assert scores.shape == image.shape
    (scores * torch.randn_like(scores)).sum().backward()
    largest = {name: float(p.grad.abs().max()) for name, p in model.named_parameters() if p.grad is not None}
    assert largest.keys() == dict(model.named_parameters()).keys()
    assert min(largest.values()) > 1e-9 * max(largest.values()), largest
    for at in range(1, len(model)):
        received = model[:at](image).detach().requires_grad_()
        model[at:](received).sum().backward()
        assert received.grad is not None


def test_a_pixel_is_seen_near_and_far() -> None:
    """Through the shortcut at full size, and through the lowest scale beyond the reach of the upper ones."""
    torch.manual_seed(0)
    model = unet(UnetConfig(depth=3, width=4)).double()
    image = torch.randn(1, 1, 64, 64, dtype=torch.float64, requires_grad=True)
    model(image)[0, 0, 32, 32].backward()
    assert image.grad is not None
    rows = image.grad[0, 0].abs().amax(dim=1).nonzero().flatten()
    assert int(rows.min()) < 12 and int(rows.max()) > 52 and float(image.grad[0, 0, 32, 32].abs()) > 0
    with torch.no_grad():
        model.scales.below.down[1].conv1.weight.zero_()
        without = model(image)
        model.scales.up.weight.zero_()
        only_shortcut = model(image)
    assert not torch.equal(without, only_shortcut) and only_shortcut.std() > 0


def test_loss_is_the_mean_over_pixels() -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(1, 1, 1).double()
    image, mask = torch.randn(4, 1, 6, 5).double(), torch.randint(2, (4, 1, 6, 5), dtype=torch.uint8)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(0.0)
        image[3], mask[3] = -1.0, 0
    total, count, metrics = mask_pixels(model, {"image": image, "mask": mask})
    scores, found = model(image), model(image) > 0
    assert count == 120 and total.shape == (4,)
    assert torch.allclose(total.sum() / count, functional.binary_cross_entropy_with_logits(scores, mask.double()))
    assert int(metrics["accuracy"]) == int((found == mask).sum())
    dice = [
        2 * int((f & m).sum()) / (int(f.sum()) + int(m.sum())) for f, m in zip(found[:3], mask[:3].bool(), strict=True)
    ]
    assert float(metrics["dice"]) / 30 == pytest.approx(sum(dice) + 1)


def train(data: str, strategy: str) -> tuple[list[float], str]:
    """Losses and hash after a few epochs with three workers."""
    torch.manual_seed(0)
    task = task_registry.load_task("membranes", data=data, model=f"{SMALL},batch_norm=true", augment=True)
    run = tutti.prepare(
        *(task.model(), "adam:lr=0.03", task.train, task.loss),
        strategy=strategy,
        workers=3,
        batch_size=7,
        channels_last=True,
        reproducible=True,
    )
    losses = [run.step(batch) for epoch in range(12) for batch in run.epoch(epoch)]
    return [losses[0], losses[-1], run.evaluate(task.eval).loss], run.weights_sha256()


def test_trains_alike_on_any_number_of_devices(data: Path) -> None:
    options = {"data": str(folder(data, 16)), "strategy": "mirrored"}
    (losses, weights), *_ = worlds.run(1, train, **options)
    assert losses[1] < 0.9 * losses[0]
    for devices in (2, 3):
        for result in worlds.run(devices, train, **options):
            assert result == (losses, weights), f"on {devices} devices"


def test_trains_alike_when_cut_into_stages(data: Path) -> None:
    whole = worlds.run(1, train, data=str(folder(data, 16)), strategy="mirrored")
    for result in worlds.run(2, train, data=str(data), strategy="model_parallel"):
        assert result == whole[0]
