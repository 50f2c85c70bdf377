"""Folders of safetensors files: read as their index says, written as transformers writes them, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests import worlds
from tutti.checkpoint.dtypes import tensor_from_bytes
from tutti.checkpoint.export_folder import export_dcp_folder, export_hf_folder
from tutti.checkpoint.plain import PlainFile
from tutti.checkpoint.plain_folder import PlainFolder
from tutti.checkpoint.weights import weights_hash, whole_tensor
from tutti.checkpoint.weights_source import check_source, open_weights, verified
from tutti.errors import CheckpointError, UsageError
from tutti.launcher import context

INDEX = "model.safetensors.index.json"
STATE = {"b.weight": torch.arange(6.0).view(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "n": torch.tensor(3)}


@pytest.fixture
def weights(tmp_path: Path) -> PlainFile:
    save_file(STATE, tmp_path / "source.safetensors")
    return PlainFile(tmp_path / "source.safetensors")


def same(found: dict[str, Tensor]) -> bool:
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize(("most", "files"), [(10**9, 1), (20, 3), (32, 2)])
def test_written_and_read(weights: PlainFile, tmp_path: Path, most: int, files: int) -> None:
    digest, size = export_hf_folder(weights, tmp_path / "hf", {"step": "3"}, most=most)
    written = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(written) == files and size == sum(path.stat().st_size for path in written)
    assert same({name: tensor for path in written for name, tensor in load_file(path).items()})
    assert all(PlainFile(path).metadata["format"] == "pt" for path in written)
    assert (tmp_path / "hf" / INDEX).exists() == (files > 1)
    check_source(tmp_path / "hf")
    assert verified(tmp_path / "hf") == tmp_path / "hf"
    folder = PlainFolder(tmp_path / "hf")
    assert digest == weights_hash(folder) == weights_hash(weights)
    assert np.array_equal(whole_tensor(folder, "a"), whole_tensor(weights, "a"))


def test_other_files_stay_and_earlier_shards_go(weights: PlainFile, tmp_path: Path) -> None:
    output = tmp_path / "hf"
    export_hf_folder(weights, output, {}, most=20)
    (output / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="the folder holds weights already"):
        export_hf_folder(weights, output, {})
    export_hf_folder(weights, output, {}, overwrite=True)
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors"]


def test_dcp_is_written_and_loaded_by_pytorch(weights: PlainFile, tmp_path: Path) -> None:
    digest, _ = export_dcp_folder(weights, tmp_path / "dcp")
    found = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(found) and digest == weights_hash(weights)
    with pytest.raises(UsageError, match="exists already"):
        export_dcp_folder(weights, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"metadata is a pickle, never loaded.*dcp_to_torch_save"):
        check_source(tmp_path / "dcp")


def index(**places: str) -> Callable[[Path], object]:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (index(a="../source.safetensors"), "which is no safetensors file of the folder"),
        (index(a="x.bin"), "which is no safetensors file of the folder"),
        (index(gone="one.safetensors"), "its index names gone in one.safetensors, which does not have it"),
        (index(a="two.safetensors"), "two.safetensors"),
        (lambda folder: (folder / INDEX).write_text("[]"), "cannot be used"),
        (lambda folder: (folder / INDEX).write_text("{"), "cannot be used"),
        (lambda folder: save_file(STATE, folder / "other.safetensors"), "2 .safetensors files and 0 indexes"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(
    change: Callable[[Path], object], words: str, weights: PlainFile, tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    save_file(STATE, tmp_path / "x" / "one.safetensors")
    check_source(tmp_path / "x")
    change(tmp_path / "x")
    with pytest.raises(CheckpointError) as caught:
        check_source(tmp_path / "x")
    assert words in str(caught.value)


def test_damage_is_found_by_the_hash_of_a_file(weights: PlainFile, tmp_path: Path) -> None:
    export_hf_folder(weights, tmp_path / "hf", {}, most=20)
    path = sorted((tmp_path / "hf").glob("*.safetensors"))[1]
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="do not have the weights_sha256"):
        verified(tmp_path / "hf")


def saved_by_ranks(folder: str) -> None:
    """Save rows and columns of DTensors, of which a rank has none, a replicated tensor and a number."""
    context.init()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "rows": distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.arange(12).view(2, 6).bfloat16(), mesh, [Shard(1)]),
        "few": distribute_tensor(torch.arange(2.0).view(2, 1), mesh, [Shard(0)]),
        "whole": torch.ones(3, dtype=torch.float64),
    }
    writer = dcp.HuggingFaceStorageWriter(f"{folder}/sharded", save_distributed=True)
    dcp.save(state, storage_writer=writer)


def test_slices_that_dcp_has_written_in_safetensors_are_put_together(tmp_path: Path) -> None:
    worlds.run(3, saved_by_ranks, folder=str(tmp_path))
    folder = tmp_path / "sharded"
    assert len(list(folder.glob("*.safetensors"))) == 3
    check_source(folder)
    assert verified(folder) == folder
    weights = open_weights(folder)
    assert {name: (r.dtype, r.shape) for name, r in weights.records.items()} == {
        "rows": ("F32", (5, 4)), "columns": ("BF16", (2, 6)), "few": ("F32", (2, 1)), "whole": ("F64", (3,)),
    }  # fmt: skip
    assert tensor_from_bytes(whole_tensor(weights, "rows"), "F32").tolist() == torch.arange(20.0).view(5, 4).tolist()
    assert (
        tensor_from_bytes(whole_tensor(weights, "columns"), "BF16").tolist() == torch.arange(12.0).view(2, 6).tolist()
    )
    assert weights.region("rows", (1, 1), (3, 2)).view("<f4").tolist() == [[5, 6], [9, 10], [13, 14]]
    assert whole_tensor(weights, "few").view("<f4").tolist() == [[0], [1]]
    with pytest.raises(CheckpointError, match="does not lie within"):
        weights.region("rows", (3, 0), (3, 4))
    next(folder.glob("shard-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"hold .* of its .* elements"):
        check_source(folder)
