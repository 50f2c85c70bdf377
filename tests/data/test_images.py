"""Images from real parquet files and folders: what is read, what is refused, and the cache that processes share."""

from __future__ import annotations

import io
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tutti.data import cache, images
from tutti.errors import DataError

pyarrow = pytest.importorskip("pyarrow")
SIZE = 8
REAL = Path(os.environ.get("TUTTI_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data") / "cifar10"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(seed: int, size: int = SIZE, mode: str = "RGB") -> bytes:
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, mode).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path: Path, rows: Sequence[tuple[Any, Any]], image: str = "img", label: str = "label") -> None:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    pictures = pyarrow.array([{"bytes": data, "path": "/etc/passwd"} for data, _ in rows], kind)
    labels = pyarrow.array([value for _, value in rows], pyarrow.int64())
    pyarrow.parquet.write_table(pyarrow.table({image: pictures, label: labels}), path)


def hub(root: Path, train: Sequence[tuple[Any, Any]] | None = None) -> Path:
    write_parquet(root / "plain_text/train-0.parquet", train or [(png(i), i % 2) for i in range(5)])
    write_parquet(root / "plain_text/test-0.parquet", [(png(9), 1)])
    return root


def folder(root: Path, held_out: str = "test") -> Path:
    for part, names in (("train", "abc"), (held_out, "d")):
        for label, kind in enumerate(("cat", "dog")):
            (root / part / kind).mkdir(parents=True)
            for name in names:
                (root / part / kind / f"{name}.png").write_bytes(png(ord(name) + label))
    return root


def load(root: Path, classes: Sequence[str] = ("a", "b")) -> list[tuple[np.ndarray, np.ndarray]]:
    return [images.read_images(split, SIZE) for split in images.find_images(str(root), classes=classes)]


def test_hub_layout(tmp_path: Path) -> None:
    root = hub(tmp_path / "d")
    write_parquet(root / "plain_text/train-1.parquet", [(png(7, mode="L"), 0)])
    (train, labels), (held_out, _) = load(root)
    assert train.shape == (6, 3, SIZE, SIZE) and train.dtype == np.uint8
    assert labels.tolist() == [0, 1, 0, 1, 0, 0] and len(held_out) == 1
    want = np.asarray(Image.open(io.BytesIO(png(3))))
    assert (train[3] == want.transpose(2, 0, 1)).all()
    assert (train[5] == np.asarray(Image.open(io.BytesIO(png(7, mode="L"))))).all(), "grey becomes colour"


def test_class_names_of_the_readme(tmp_path: Path) -> None:
    root = hub(tmp_path / "d")
    (root / "README.md").write_text(
        "---\ndataset_info:\n  features:\n  - name: label\n    dtype:\n      class_label:\n        names:\n"
        "          '0': ant\n          '1': bee\n          '2': cow\n  splits:\n  - name: train\n---\n'3': no\n"
    )
    assert images.find_images(str(root), classes=())[0].classes == ("ant", "bee", "cow")


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_image_folder(tmp_path: Path, held_out: str) -> None:
    root = folder(tmp_path / "d", held_out)
    (root / "train/cat/.hidden.png").write_bytes(b"")
    (root / "train/cat/notes.txt").write_text("not an image")
    splits = images.find_images(str(root), classes=())
    assert splits[0].classes == ("cat", "dog")
    pixels, labels = images.read_images(splits[0], SIZE)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1] and images.read_images(splits[1], SIZE)[1].tolist() == [0, 1]
    assert (pixels[4] == np.asarray(Image.open(root / "train/dog/b.png")).transpose(2, 0, 1)).all()


def refused(root: Path, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(root)
    assert caught.value.exit_code == 3 and caught.value.remedy
    for word in words:
        assert word in str(caught.value)


BAD_ROWS: dict[str, tuple[Any, Any, str]] = {
    "label too large": (png(0), 2, "label 2"),
    "label negative": (png(0), -1, "label -1"),
    "label missing": (png(0), None, "label None"),
    "image missing": (None, 0, "no image"),
    "image empty": (b"", 0, "broken"),
    "image truncated": (png(0)[:60], 0, "broken"),
    "image of another size": (png(0, size=9), 0, "9×9"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named(tmp_path: Path, case: str, own_cache: Path) -> None:
    data, label, word = BAD_ROWS[case]
    good = [(png(1), 0)] * 3
    refused(hub(tmp_path / "d", [*good, (data, label), *good]), word, "train-0.parquet, row 3")
    assert not list(own_cache.glob("*.npy"))


def test_bad_parquet_files(tmp_path: Path) -> None:
    root = hub(tmp_path / "d")
    train = root / "plain_text/train-0.parquet"
    whole = train.read_bytes()
    train.write_bytes(whole[: len(whole) // 2])
    refused(root, "train-0.parquet", "cannot be read")
    write_parquet(train, [(png(0), 0)], image="picture")
    refused(root, "picture, label", "train-0.parquet")
    write_parquet(train, [(png(0), 0)], label="target")
    refused(root, "img, target")
    write_parquet(train, [])
    refused(root, "empty")
    pyarrow.parquet.write_table(pyarrow.table({"img": [1], "label": [0]}), train)
    refused(root, "stored as int64")


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder", "nowhere")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "not a folder")
    (tmp_path / "d/train/cat").mkdir(parents=True)
    refused(tmp_path / "d", "held-out")
    (tmp_path / "d/test").mkdir()
    refused(tmp_path / "d", "no images")
    (tmp_path / "e").mkdir()
    refused(tmp_path / "e", "no images found")
    for name in ("nowhere", "file", "e"):
        with pytest.raises(DataError):
            images.check_images(str(tmp_path / name))
    images.check_images(str(hub(tmp_path / "h")))


def test_broken_image_file_is_named(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    (root / "train/dog/c.png").write_bytes(png(0)[:50])
    refused(root, "broken", "dog/c.png")


def test_unknown_class_in_the_held_out_set(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    (root / "test/emu").mkdir()
    refused(root, "emu")


def link_file(root: Path, outside: Path) -> None:
    (root / "train/cat/z.png").symlink_to(outside / "secret.png")


def link_folder(root: Path, outside: Path) -> None:
    (root / "train/fox").symlink_to(outside)


def link_train(root: Path, outside: Path) -> None:
    (root / "train").rename(outside / "train")
    (root / "train").symlink_to(outside / "train")


def link_parquet(root: Path, outside: Path) -> None:
    hub(outside)
    (root / "train").rename(root / "other")
    for part in ("train", "test"):
        (root / f"{part}-0.parquet").symlink_to(outside / f"plain_text/{part}-0.parquet")


@pytest.mark.parametrize("make", [link_file, link_folder, link_train, link_parquet])
def test_links_out_of_the_folder(tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    root, outside = folder(tmp_path / "d"), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.png").write_bytes(png(0))
    make(root, outside)
    refused(root, "points outside the data folder")


def test_links_inside_and_a_link_as_the_folder(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    (root / "train/cat/z.png").symlink_to(root / "train/dog/a.png")
    (tmp_path / "link").symlink_to(root)
    assert load(tmp_path / "link")[0][1].tolist() == [0, 0, 0, 0, 1, 1, 1]
    (root / "train/cat/y.png").symlink_to(root / "train/cat/nothing.png")
    refused(root, "has no target")


def test_what_only_looks_like_an_image(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    os.mkfifo(root / "train/cat/pipe.png")
    refused(root, "not an image file", "pipe.png")
    os.remove(root / "train/cat/pipe.png")
    (root / "train/cat/data.txt").write_bytes(png(0))
    (root / "train/cat/z.png").symlink_to(root / "train/cat/data.txt")
    refused(root, "not an image file", "z.png")


class Canary:
    """Unpickling this makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def test_pickles_are_never_run(tmp_path: Path, own_cache: Path) -> None:
    root, canary = folder(tmp_path / "d"), tmp_path / "canary"
    poison = pickle.dumps(Canary(str(canary)))
    (root / "train/cat/0.pkl").write_bytes(poison)
    # Copies: what is mapped changes with the file that this test damages.
    train = load(root)[0][0].copy()
    for file in own_cache.glob("*.npy"):
        np.save(file, np.array([Canary(str(canary))], dtype=object), allow_pickle=True)
    assert (load(root)[0][0] == train).all(), "a poisoned cache is made again"
    (root / "train/cat/0.png").write_bytes(poison)
    refused(root, "broken", "0.png")
    assert not canary.exists()
    pickle.loads(poison)
    assert canary.exists(), "the canary works"


def count_decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    decode = images.decode_images

    def counting(rows: Any, size: int) -> Any:
        calls.append(size)
        return decode(rows, size)

    monkeypatch.setattr(images, "decode_images", counting)
    return calls


def test_decoded_once_then_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    root, calls = hub(tmp_path / "d"), count_decodes(monkeypatch)
    first, second = load(root), load(root)
    assert len(calls) == 2 and (first[0][0] == second[0][0]).all()
    base: Any = second[0][0]
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) and not second[0][0].flags.writeable
    assert not list(own_cache.glob("*.tmp"))
    write_parquet(root / "plain_text/train-0.parquet", [(png(50), 1)])
    assert len(load(root)[0][0]) == 1 and len(calls) == 3, "changed files are decoded again"


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "header"])
def test_damaged_cache_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, damage: str
) -> None:
    root, calls = hub(tmp_path / "d"), count_decodes(monkeypatch)
    want = [(pixels.copy(), labels) for pixels, labels in load(root)]
    for file in own_cache.glob("*.npy"):
        data = bytearray(file.read_bytes())
        if damage == "flipped":
            data[-1] ^= 1
        if damage == "header":
            data[20:60] = b"\0" * 40
        file.write_bytes(data[: {"truncated": len(data) // 2, "empty": 0}.get(damage, len(data))])
    for expected in (4, 4):
        got = load(root)
        assert all((a == b).all() for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
        assert len(calls) == expected


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blocked").write_text("a file where the folder should be")
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "blocked"))
    assert len(load(hub(tmp_path / "d"))[0][0]) == 5


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    root = hub(tmp_path / "d", [(png(i), 0) for i in range(40)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, hard))
    try:
        assert len(load(root)[0][0]) == 40
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert not list(own_cache.glob("*.tmp")) and len(list(own_cache.glob("*.npy"))) == 1, "only the small set fits"


WORKER = """
import sys, zlib
from pathlib import Path
from tutti.data import images
decode = images.decode_images
def counting(rows, size):
    print("decoded")
    return decode(rows, size)
images.decode_images = counting
for split in images.find_images(sys.argv[1], classes="ab"):
    pixels, labels = images.read_images(split, 8)
    print(zlib.crc32(pixels.tobytes()), len(labels))
"""


def test_several_processes_decode_once(tmp_path: Path) -> None:
    root = hub(tmp_path / "d", [(png(i), i % 2) for i in range(200)])
    command = [sys.executable, "-c", WORKER, str(root)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    lines = [process.communicate(timeout=300)[0].splitlines() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum(line.count("decoded") for line in lines) == 2, "each of two sets by one process"
    assert len({tuple(word for word in line if word != "decoded") for line in lines}) == 1


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TUTTI_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "tutti"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache/tutti"


@pytest.mark.skipif(not REAL.is_dir(), reason="the real CIFAR-10 is not here")
def test_real_cifar10() -> None:
    splits = images.find_images(str(REAL), classes=())
    assert splits[0].classes[:2] == ("airplane", "automobile") and len(splits[0].classes) == 10
    pixels, labels = images.read_images(splits[1], 32)
    assert pixels.shape == (10_000, 3, 32, 32) and np.bincount(labels).tolist() == [1000] * 10
