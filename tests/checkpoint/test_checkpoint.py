"""Checkpoints as they should be: what is written reads back, whole or in other parts, and loads in safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.checkpoints import FACTS, contents, pieces, same, save
from tutti.checkpoint.checkpoint_reader import CheckpointReader
from tutti.checkpoint.dtypes import DTYPES
from tutti.checkpoint.folder import newest_checkpoint, prune
from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.read import TensorReader, load_manifest, verify
from tutti.checkpoint.write import WritableSlice, begin, commit, write_part
from tutti.errors import CheckpointError


def write(folder: Path, *ranks: list[WritableSlice]) -> Manifest:
    """A checkpoint of the ranks' slices of the model."""
    temporary = begin(folder, 1, attempt=0)
    records = [record for rank, slices in enumerate(ranks) for record in write_part(temporary, "model", rank, slices)]
    return commit(temporary, records, step=1, config_sha256="", facts={})


def back(manifest: Manifest) -> dict[str, Tensor]:
    return dict(TensorReader(verify(manifest.path)).read("model"))


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bytes_ = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bytes_.view(dtype).reshape(shape)
    read = back(
        write(
            tmp_path, [WritableSlice.whole("x", tensor), WritableSlice.whole("other", torch.ones(3, dtype=torch.int8))]
        )
    )["x"]
    assert (read.dtype, read.shape, raw(read)) == (dtype, tensor.shape, raw(tensor))


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    base, wave = torch.arange(24.0).view(4, 6), torch.tensor([1 + 2j, 3 - 4j])
    views = {"t": base.t(), "strided": base[::2, 1::3], "expanded": base[:1].expand(3, 6), "conj": wave.conj()}
    views |= {"negative": wave.conj().imag, "reversed": base.flip(0)}
    read = back(
        write(tmp_path, [WritableSlice.whole(name, view.requires_grad_(False)) for name, view in views.items()])
    )
    assert read.keys() == views.keys() and all(torch.equal(read[name], views[name]) for name in views)


NAMES = [
    "a.b",
    "",
    "__metadata__",
    "w",
    "w[0:1,0:2]",
    'quo"te',
    "new\nline",
    "../x",
    "/etc",
    "\0",
    "π 🎼",
    "\ud800",
    "'",
]


def test_names_may_be_anything(tmp_path: Path) -> None:
    tensors = {name: torch.tensor([index]) for index, name in enumerate(NAMES)}
    matrix = torch.arange(4).view(2, 2)
    parts = [WritableSlice("part", part, (2, 2), offset) for part, offset in pieces(matrix, 2, axis=0)]
    clash = [WritableSlice.whole("part[0:1,0:2]", torch.tensor(7))]
    manifest = write(
        tmp_path, [*(WritableSlice.whole(name, tensor) for name, tensor in tensors.items()), *parts, *clash]
    )
    read = back(manifest)
    assert torch.equal(read.pop("part"), matrix) and read.pop("part[0:1,0:2]") == 7
    assert read == tensors
    assert len(load_file(manifest.path / "model" / "rank0.safetensors")) == len(NAMES) + 3


def test_files_load_in_safetensors(tmp_path: Path) -> None:
    manifest = save(tmp_path, 5)
    loaded = load_file(manifest.path / "model" / "rank0.safetensors")
    expected = contents(5)["model"]
    assert torch.equal(loaded["scale"], expected["scale"])
    assert torch.equal(loaded["rows[0:3,0:4]"], expected["rows"][:3])


def test_three_writers_read_as_whole(tmp_path: Path) -> None:
    manifest = save(tmp_path, 5)
    assert same(verify(manifest.path)) and verify(manifest.path) == manifest == load_manifest(manifest.path)
    assert (manifest.step, manifest.config_sha256, manifest.facts) == (5, "c0ffee", FACTS)
    assert sorted(p.name for p in (manifest.path / "model").iterdir()) == [f"rank{r}.safetensors" for r in range(3)]
    # Nobody but rank 0 has random state: a rank without slices makes no file.
    assert [p.name for p in (manifest.path / "rng").iterdir()] == ["rank0.safetensors"]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("name", ["rows", "columns"])
def test_three_writers_read_in_other_parts(tmp_path: Path, name: str, readers: int, axis: int) -> None:
    reader = TensorReader(save(tmp_path, 5))
    for part, offset in pieces(contents(5)["model"][name], readers, axis):
        assert torch.equal(reader.read_slice("model", name, offset, part.shape), part)


def test_a_region_reads_no_other_file(tmp_path: Path) -> None:
    manifest = save(tmp_path, 5)
    (manifest.path / "model" / "rank2.safetensors").unlink()
    region = TensorReader(manifest).read_slice("model", "rows", (1, 1), (3, 2))
    assert torch.equal(region, contents(5)["model"]["rows"][1:4, 1:3])
    with pytest.raises(CheckpointError, match=r"rank2\.safetensors.*missing"):
        TensorReader(manifest).read_slice("model", "rows", (1, 1), (5, 2))


def test_what_is_read_may_be_written_to(tmp_path: Path) -> None:
    manifest = save(tmp_path, 5)
    for _, tensor in TensorReader(manifest).read("model"):
        tensor.zero_()
    assert same(verify(manifest.path))


def test_chosen_names_and_groups(tmp_path: Path) -> None:
    manifest = save(tmp_path, 5)
    reader = TensorReader(manifest)
    assert [name for name, _ in reader.read("model", ["scale", "rows"])] == ["scale", "rows"]
    assert list(reader.read("wire")) == []
    with pytest.raises(CheckpointError, match=r"no model tensor 'head\.weight'") as caught:
        list(reader.read("model", ["head.weight"]))
    assert caught.value.exit_code == 4
    with pytest.raises(CheckpointError, match=r"no model tensor 'head\.weight'"):
        CheckpointReader(manifest).shape("model", "head.weight")
    with pytest.raises(CheckpointError, match=r"does not lie within shape \[7, 4\]"):
        reader.read_slice("model", "rows", (5, 0), (3, 4))


def test_empty_parts_of_ranks_without_rows_are_left_out(tmp_path: Path) -> None:
    rows = torch.randn(2, 3)
    ranks = [[WritableSlice("w", part, (2, 3), offset)] for part, offset in pieces(rows, 3, axis=0)]
    manifest = write(tmp_path, *ranks)
    assert len(manifest.files) == 2 and torch.equal(back(manifest)["w"], rows)


HALF = WritableSlice("w", torch.zeros(2), (4,), (0,))
REFUSED = {
    "slices of model tensor 'w' hold 2 of its 4": ([HALF], []),
    "slices of model tensor 'w' overlap": ([HALF], [WritableSlice("w", torch.zeros(3), (4,), (1,))]),
    "slices of model tensor 's' overlap": (
        [WritableSlice.whole("s", torch.tensor(1))],
        [WritableSlice.whole("s", torch.tensor(1))],
    ),
    r"files disagree about model tensor 'w': F32\[4\] and F64\[4\]": (
        [HALF],
        [WritableSlice("w", torch.zeros(2, dtype=torch.float64), (4,), (2,))],
    ),
    "does not lie within": ([WritableSlice("w", torch.zeros(2), (4,), (3,))], []),
    "float32, sparse_coo": ([WritableSlice.whole("w", torch.eye(2).to_sparse())], []),
    "complex128": ([WritableSlice.whole("w", torch.zeros(1, dtype=torch.complex128))], []),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_whole_state_is_not_committed(tmp_path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, *REFUSED[message])
    assert newest_checkpoint(tmp_path) == (None, [])


def test_blocks_of_a_grid_make_a_whole(tmp_path: Path) -> None:
    whole = torch.arange(60).view(6, 10)
    rows = pieces(whole, 4, axis=0)
    blocks = [(part, (r, c)) for row, (r, _) in rows for part, (_, c) in pieces(row, 3, axis=1)]
    manifest = write(tmp_path, *([WritableSlice("w", part, (6, 10), offset)] for part, offset in blocks))
    assert len(manifest.files) == 12 and torch.equal(back(manifest)["w"], whole)


def test_facts_must_be_json(tmp_path: Path) -> None:
    for facts in ({"loss": float("nan")}, {"model": torch.zeros(1)}):
        with pytest.raises(CheckpointError, match="facts cannot be written as JSON"):
            save(tmp_path, 1, facts)
        assert list(tmp_path.iterdir()) == []


def test_newest_is_by_step_and_a_later_save_of_a_step_replaces_the_earlier(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "absent") == (None, [])
    for step in (9, 100, 20):
        save(tmp_path, step)
    save(tmp_path, 100, {"again": True})
    found, broken = newest_checkpoint(tmp_path)
    assert found is not None and (found.step, found.facts, broken) == (100, {"again": True}, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000009", "step-00000020", "step-00000100"]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.iterdir())


def test_prune_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4), (5, 0.5)):
        save(tmp_path, step, {"accuracy": accuracy})
    (tmp_path / "step-00000006.tmp-0").mkdir()
    (tmp_path / "notes").mkdir()
    known: set[Path] = set()
    assert prune(tmp_path, keep_last=2, keep_best=1, score=lambda facts: facts["accuracy"], verified=known) == []
    (tmp_path / "notes").rmdir()
    assert steps(tmp_path) == [2, 4, 5] == sorted(int(path.name[5:]) for path in known)


def test_prune_counts_only_those_that_verify(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    damage(tmp_path / "step-00000005")
    damage(tmp_path / "step-00000003")
    broken = prune(tmp_path, keep_last=2)
    assert [message.count("step-0000000") for message in broken] == [1, 1]
    assert steps(tmp_path) == [2, 3, 4, 5]
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [4, 5]
    damage(tmp_path / "step-00000004")
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [4, 5]


def damage(path: Path) -> None:
    file = path / "model" / "rank1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
