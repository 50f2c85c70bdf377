"""Weights as one plain file: what tutti writes PyTorch reads, and nothing that is not whole is believed."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.checkpoints import contents, save
from tutti.checkpoint.checkpoint_reader import GivenState, WeightsReader
from tutti.checkpoint.dtypes import DTYPES, tensor_from_bytes
from tutti.checkpoint.export import export_weights
from tutti.checkpoint.fingerprint import weights_sha256
from tutti.checkpoint.plain import PlainFile
from tutti.checkpoint.weights import SavedWeights, weights_hash, whole_tensor
from tutti.checkpoint.write import WritableSlice, begin, commit, write_part
from tutti.errors import CheckpointError, DiskError, UsageError

OTHER = {"tied again": "rows"}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A checkpoint that three ranks wrote in parts, as one file."""
    manifest = save(tmp_path / "checkpoints", 3, {"tied": OTHER})
    export_weights(SavedWeights(manifest), tmp_path / "model.safetensors", {"step": "3", "note": "π"})
    return tmp_path / "model.safetensors"


def test_parts_become_whole_tensors_under_all_their_names(exported: Path) -> None:
    want = contents(3)["model"]
    want["tied again"] = want["rows"]
    read = load_file(exported)
    assert read.keys() == want.keys() and all(torch.equal(read[name], want[name]) for name in want)
    with safetensors.safe_open(exported, "pt") as file:
        metadata = file.metadata()
    digest = weights_sha256(want)
    assert metadata == {"format": "pt", "step": "3", "note": "π", "weights_sha256": digest}
    file = PlainFile(exported)
    file.verify()
    assert (file.metadata, weights_hash(file)) == (metadata, digest)
    assert [path.name for path in sorted(exported.parent.iterdir())] == ["checkpoints", "model.safetensors"]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 3)], ids=str)
def test_every_dtype(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Written from a checkpoint and by safetensors; read by both."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, dtype in DTYPES.items():
        high = 2 if dtype == torch.bool else 256
        bytes_ = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        tensors[name] = bytes_.view(dtype).reshape(shape)
    temporary = begin(tmp_path, 1, attempt=0)
    records = write_part(temporary, "model", 0, [WritableSlice.whole(name, tensor) for name, tensor in tensors.items()])
    manifest = commit(temporary, records, step=1, config_sha256="", facts={})
    digest, size = export_weights(SavedWeights(manifest), tmp_path / "ours", {})
    assert (digest, size) == (weights_sha256(tensors), (tmp_path / "ours").stat().st_size)
    assert weights_sha256(load_file(tmp_path / "ours")) == digest
    save_file(tensors, tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        file = PlainFile(path)
        read = {
            name: tensor_from_bytes(whole_tensor(file, name), record.dtype) for name, record in file.records.items()
        }
        assert weights_sha256(read) == weights_hash(file) == digest


def test_the_average_goes_out_with_the_buffers_of_the_model(tmp_path: Path) -> None:
    groups = {
        "model": {"w": torch.tensor([1.0]), "frozen": torch.tensor([2.0])},
        "ema": {"w": torch.tensor([0.5])},
    }
    temporary = begin(tmp_path, 1, attempt=0)
    records = [
        record
        for group, tensors in groups.items()
        for record in write_part(temporary, group, 0, [WritableSlice.whole(n, t) for n, t in tensors.items()])
    ]
    manifest = commit(temporary, records, step=1, config_sha256="", facts={"tied": {"also": "w"}})
    export_weights(SavedWeights(manifest, ema=True), tmp_path / "x", {})
    assert {name: float(tensor) for name, tensor in load_file(tmp_path / "x").items()} == {
        "w": 0.5,
        "also": 0.5,
        "frozen": 2.0,
    }
    with pytest.raises(CheckpointError, match="no average of the weights"):
        SavedWeights(save(tmp_path / "other", 1), ema=True)


def test_what_is_there_is_not_overwritten_by_itself(exported: Path) -> None:
    weights = SavedWeights(save(exported.parent / "more", 4))
    before = exported.read_bytes()
    with pytest.raises(UsageError, match="--overwrite"):
        export_weights(weights, exported, {})
    assert exported.read_bytes() == before
    export_weights(weights, exported, {}, overwrite=True)
    assert torch.equal(load_file(exported)["rows"], contents(4)["model"]["rows"])
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="hoose another -o"):
            export_weights(weights, exported.parent / "more", {}, overwrite=overwrite)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_full_disk_leaves_what_was_there(exported: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, before = SavedWeights(save(exported.parent / "more", 4)), exported.read_bytes()
    pwrite, calls = os.pwrite, [0]

    def limited(descriptor: int, data: Any, place: int) -> int:
        calls[0] += 1
        if calls[0] > at + 1:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data[: len(data) // 2] if calls[0] > at else data, place)

    monkeypatch.setattr(os, "pwrite", limited)
    with pytest.raises(DiskError, match=r"weights could not be written.*No space left") as caught:
        export_weights(weights, exported, {}, overwrite=True)
    assert caught.value.exit_code == 8
    assert exported.read_bytes() == before
    assert sorted(path.name for path in exported.parent.iterdir()) == ["checkpoints", "model.safetensors", "more"]


def test_everything_is_on_disk_before_the_rename(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"{a} → {b}"), replace(a, b)))
    target = exported.with_name("again")
    export_weights(SavedWeights(save(exported.parent / "more", 4)), target, {})
    temporary, moved, folder = events[-3:]
    assert (moved, folder) == (f"{temporary} → {target}", str(target.parent))


def forge(path: Path, entries: dict[str, Any] | str, body: bytes) -> None:
    text = (entries if isinstance(entries, str) else json.dumps(entries)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_a_file_cut_short_anywhere(exported: Path) -> None:
    data = exported.read_bytes()
    for length in range(0, len(data), 7):
        exported.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            PlainFile(exported)
        assert caught.value.exit_code == 4 and str(exported) in str(caught.value)
    exported.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="bytes and not"):
        PlainFile(exported)


def test_bit_flips_change_no_number_unnoticed(exported: Path) -> None:
    """Those that go unnoticed change a word of the metadata, or blanks."""
    data, dice = exported.read_bytes(), random.Random(0)
    want = weights_hash(PlainFile(exported))
    start = 8 + struct.unpack("<Q", data[:8])[0]
    unnoticed = 0
    for number in range(600):
        place = dice.randrange(len(data)) if number % 2 else dice.randrange(start)
        flipped = bytearray(data)
        flipped[place] ^= 1 << dice.randrange(8)
        exported.write_bytes(flipped)
        try:
            file = PlainFile(exported)
            file.verify()
        except CheckpointError:
            continue
        unnoticed += 1
        assert place < start and weights_hash(file) == want
    assert unnoticed < 150


FORGERIES: dict[str, Any] = {
    "a hole": lambda h: h["w"].update(data_offsets=[4, 12]),
    "an overlap": lambda h: h["v"].update(data_offsets=[4, 8]),
    "beyond the end": lambda h: h["v"].update(data_offsets=[8, 16]),
    "another shape": lambda h: h["w"].update(shape=[3]),
    "a negative shape": lambda h: h["w"].update(shape=[-2]),
    "an immense shape": lambda h: h["w"].update(shape=[2**62, 2**62]),
    "a shape of words": lambda h: h["w"].update(shape="22"),
    "true as a size": lambda h: h["v"].update(shape=[True]),
    "an unknown dtype": lambda h: h["w"].update(dtype="OBJECT"),
    "no dtype": lambda h: h["w"].pop("dtype"),
    "a list as a dtype": lambda h: h["w"].update(dtype=["F32"]),
    "no entry": lambda h: h.update(w=3),
    "metadata that is none": lambda h: h.update(__metadata__=3),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_header(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x.safetensors"
    entries = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "v": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    forge(path, entries, bytes(12))
    assert load_file(path).keys() == PlainFile(path).records.keys()
    FORGERIES[what](entries)
    forge(path, entries, bytes(12))
    with pytest.raises(CheckpointError, match="its header cannot be used"):
        PlainFile(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{", '{"a": {}, "a": {}}', "\x00", "[" * 100_000])
def test_a_header_that_is_no_table(tmp_path: Path, text: str) -> None:
    forge(tmp_path / "x", text, b"")
    with pytest.raises(CheckpointError, match="its header cannot be used"):
        PlainFile(tmp_path / "x")


@pytest.mark.parametrize("data", [b"", b"abc", struct.pack("<Q", 2**63), struct.pack("<Q", 3) + b"{}", b"x" * 100])
def test_what_is_no_safetensors_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match="no safetensors file"):
        PlainFile(tmp_path / "x")


def test_a_tensor_that_the_weights_lack(exported: Path) -> None:
    reader = WeightsReader(PlainFile(exported), {})
    assert reader.shape("model", "rows") == (7, 4)
    for asked in (reader.get, reader.shape):
        with pytest.raises(CheckpointError, match=r"no tensor 'row'\. Did you mean 'rows'\?"):
            asked("model", "row")


def test_a_region_that_leaves_the_tensor_is_refused(exported: Path) -> None:
    file = WeightsReader(PlainFile(exported), {})
    whole = file.get("model", "rows")
    for saved in (file, GivenState({"rows": whole}, {})):
        assert torch.equal(saved.part("model", "rows", (5, 1), (2, 3)), whole[5:7, 1:4])
        for offset, shape in (((5, 1), (3, 3)), ((-1, 0), (1, 4)), ((5,), (2,)), ((8, 0), (0, 4))):
            with pytest.raises(CheckpointError, match=r"a slice of 'rows', .* does not lie within shape \[7, 4\]"):
                saved.part("model", "rows", offset, shape)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Exporting 24 tensors of 4 MiB takes the memory of few of them."""
    temporary = begin(tmp_path, 1, attempt=0)
    slices = [WritableSlice.whole(f"w{number}", torch.full((2**20,), float(number))) for number in range(24)]
    commit(temporary, write_part(temporary, "model", 0, slices), step=1, config_sha256="", facts={})
    code = f"""
import sys, weakref
from pathlib import Path
from tutti.checkpoint.export import export_weights
from tutti.checkpoint.read import load_manifest
from tutti.checkpoint.weights import SavedWeights
weights = SavedWeights(load_manifest(Path({str(tmp_path / "step-00000001")!r})))
tracked, region = [], weights.region
def counting(name, offset, shape):
    found = region(name, offset, shape)
    tracked.append(weakref.ref(found))
    assert sum(ref() is not None for ref in tracked) <= 2
    return found
weights.region = counting
export_weights(weights, Path({str(tmp_path / "x")!r}), {{}})
assert "torch" not in sys.modules
print(len(tracked))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "24"), done.stderr
    read: dict[str, Tensor] = load_file(tmp_path / "x")
    assert all(bool((read[f"w{number}"] == number).all()) for number in range(24))


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_looks_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    """The first two bytes of the file are then those of a pickle of protocol 2 to 5."""
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(length)
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header + b"\x03\x04")
    assert load_file(path)["a"].tolist() == whole_tensor(PlainFile(path), "a").tolist() == [3, 4]


def test_regions_are_views_of_the_file(tmp_path: Path) -> None:
    state = {"w": torch.arange(24.0).view(4, 6), "n": torch.tensor(3), "e": torch.zeros(0, 3)}
    save_file(state, tmp_path / "x.safetensors")
    file = PlainFile(tmp_path / "x.safetensors")
    region = file.region("w", (1, 2), (2, 3))
    assert not region.flags.writeable and not region.flags.owndata
    assert region.view("<f4").tolist() == state["w"][1:3, 2:5].tolist()
    assert file.region("n", (), ()).tolist() == 3 and file.region("e", (0, 0), (0, 3)).shape == (0, 3)
    assert whole_tensor(file, "w").flags.writeable
    with pytest.raises(CheckpointError, match="does not lie within"):
        file.region("w", (3, 0), (2, 6))
