"""What may happen to a checkpoint on disk, and that nothing half-written, damaged or forged is ever trusted."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.checkpoints import Canary, forge, own, same, save
from tests.disks import fill, small_disk
from tests.forkserver import run
from tests.launching import SAFETY_NET
from tutti.checkpoint.folder import newest_checkpoint
from tutti.checkpoint.read import TensorReader, load_manifest, verify
from tutti.checkpoint.write import WritableSlice, begin, write_part
from tutti.errors import CheckpointError, DiskError

pytestmark = [pytest.mark.faults, pytest.mark.row(15)]
ROOT = Path(__file__).parents[2]
PART = "model/rank0.safetensors"
Record = Callable[[str, object], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of steps 10 and 20."""
    save(tmp_path / "checkpoints", 10)
    save(tmp_path / "checkpoints", 20)
    return tmp_path / "checkpoints"


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def refused(folder: Path, name: str) -> str:
    """Why step 20 is refused, its message naming ``name``; step 10 must then be the newest."""
    with pytest.raises(CheckpointError) as caught:
        verify(folder / "step-00000020")
    message = str(caught.value)
    assert caught.value.exit_code == 4 and f"step-00000020/{name}" in message and "older checkpoint" in message
    found, broken = newest_checkpoint(folder)
    assert found is not None and found.step == 10 and same(found) and broken == [message]
    return message


def saving(what: str, when: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    return run(["-m", "tests.faults.saving", what, when, str(folder)], ROOT, environ, SAFETY_NET)


@pytest.mark.row(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["next", "again", "first"])
def test_killed_at_every_system_call_of_a_save(tmp_path: Path, what: str, when: str, record_property: Record) -> None:
    done = saving(what, when, tmp_path / "checkpoints")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    record_property("kills at every point of a save", report["points"])
    record_property("unusable checkpoints", len(report["unusable"]))
    assert report["points"] > 100
    assert report["unusable"] == [] and report["left"] == []
    assert report["loaded"][0] == {"next": [10, False], "again": [20, False], "first": None}[what]
    assert report["loaded"][-1] == [20, True]
    # Once the new one is there it stays: what is found never goes back.
    assert sum(a != b for a, b in pairwise(report["loaded"])) == 1


@pytest.mark.row(2)
def test_everything_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, Path]] = []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def noting_replace(source: Path, target: Path) -> None:
        written = {source, *source.rglob("*")}
        assert written == {path for kind, path in events if kind == "fsync"}
        replace(source, target)
        events.append(("replace", target))

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    save(tmp_path, 10)
    assert events[-2:] == [("replace", tmp_path / "step-00000010"), ("fsync", tmp_path)]


@pytest.mark.row(14)
def test_a_thousand_bit_flips(folder: Path, seed: int, record_property: Record) -> None:
    path, dice = folder / "step-00000020", random.Random(seed)
    verify(path)
    data = {file: file.read_bytes() for file in files(path)}
    places = [(file, byte) for file, content in data.items() for byte in range(len(content))]
    detected, hit = 0, set()
    for file, byte in dice.choices(places, k=1000):
        flipped = bytearray(data[file])
        flipped[byte] ^= 1 << dice.randrange(8)
        file.write_bytes(flipped)
        try:
            verify(path)
        except CheckpointError as error:
            detected += file.name in str(error)
        file.write_bytes(data[file])
        hit.add(file)
    verify(path)
    record_property("bit flips detected of 1000", detected)
    assert detected == 1000 and hit == data.keys()


@pytest.mark.row(13)
def test_truncated_at_sixteen_places(folder: Path, record_property: Record) -> None:
    path = folder / "step-00000020"
    for file in files(path):
        content, name = file.read_bytes(), str(file.relative_to(path))
        for place in range(16):
            file.write_bytes(content[: len(content) * place // 16])
            message = refused(folder, name)
            assert "SHA-256" in message if name == "manifest.json" else "bytes and not" in message
        file.write_bytes(content + b"\0")
        refused(folder, name)
        file.write_bytes(content)
    record_property("truncations refused", 16 * len(files(path)))
    verify(path)


@pytest.mark.row(13)
def test_every_file_is_missed(folder: Path) -> None:
    path = folder / "step-00000020"
    for file in files(path):
        file.rename(folder / "aside")
        assert "it is missing" in refused(folder, str(file.relative_to(path)))
        (folder / "aside").rename(file)
    shutil.rmtree(path / "optim")
    assert "it is missing" in refused(folder, "optim/rank0.safetensors")


@pytest.mark.row(13)
def test_files_of_two_steps(folder: Path) -> None:
    path = folder / "step-00000020"
    for file in files(path):
        content, name = file.read_bytes(), str(file.relative_to(path))
        shutil.copy(folder / "step-00000010" / name, file)
        if name == "manifest.json":
            with pytest.raises(CheckpointError, match="SHA-256"):
                verify(path)
        else:
            assert "SHA-256" in refused(folder, name)
        file.write_bytes(content)


def test_a_pickle_in_every_role(folder: Path, tmp_path: Path, record_property: Record) -> None:
    path, canary = folder / "step-00000020", tmp_path / "executed"
    poison = pickle.dumps(Canary(canary))
    pickle.loads(poison).close()
    assert canary.exists()
    canary.unlink()
    for file in files(path):
        content, manifest = file.read_bytes(), (path / "manifest.json").read_bytes()
        group, rank = file.parent.name, file.name.removeprefix("rank").partition(".")[0]
        for data in (poison, (poison * (len(content) // len(poison) + 1))[: len(content)]):
            file.write_bytes(data)
            name = str(file.relative_to(path))
            if name != "manifest.json":
                refused(folder, name)
                forge(path, lambda d, g=group, r=int(rank): own(d, path, g, r) and None)
                # A size that the slices do not make is the manifest's contradiction; the same size, the file's.
                name = name if len(data) == len(content) else "manifest.json"
            refused(folder, name)
            (path / "manifest.json").write_bytes(manifest)
        file.write_bytes(content)
    verify(path)
    record_property("canaries executed", int(canary.exists()))
    assert not canary.exists()


def test_a_header_of_eight_exbibytes(folder: Path, record_property: Record) -> None:
    path = folder / "step-00000020"
    part = path / PART
    part.write_bytes((2**63 - 1).to_bytes(8, "little") + part.read_bytes()[8:])
    forge(path, lambda document: own(document, path) and None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "header is not the one" in refused(folder, PART)
    with pytest.raises(CheckpointError, match="header"):
        list(TensorReader(load_manifest(path)).read("model"))
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    record_property("growth of memory, MiB", growth)
    assert growth < 32


def test_a_header_that_tells_another_story(folder: Path) -> None:
    path = folder / "step-00000020"
    part = path / PART
    part.write_bytes(part.read_bytes().replace(b'"F32"', b'"I32"', 1))
    forge(path, lambda document: own(document, path) and None)
    assert "header is not the one" in refused(folder, PART)


def test_an_immense_manifest_is_not_read(folder: Path) -> None:
    os.truncate(folder / "step-00000020" / "manifest.json", 2**40)
    assert f"{2**40} bytes, more than" in refused(folder, "manifest.json")


def entry(document: dict[str, Any]) -> dict[str, Any]:
    """The first file's record."""
    found: dict[str, Any] = document["files"][0]
    return found


def first_slice(position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: entry(document)["slices"][0].__setitem__(position, value)


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (lambda d: d.update(version=2), "format version 2, and this tutti reads version 1"),
    "another document": (lambda d: {"name": "package"}, "'format' is missing"),
    "no document": (lambda d: {"x": 1} and {"format": [1]}, "'format' is missing or not of type str"),
    "step": (lambda d: d.update(step=-1), "-1 is not a size"),
    "step that is a word": (lambda d: d.update(step="20"), "'step' is missing or not of type int"),
    "facts": (lambda d: d.pop("facts") and None, "'facts' is missing"),
    "path as group": (lambda d: entry(d).update(group="../step-00000010/model"), "there is no group '../step"),
    "absolute group": (lambda d: entry(d).update(group="/etc"), "there is no group '/etc'"),
    "path as rank": (lambda d: entry(d).update(rank="../../x"), "'rank' is missing or not of type int"),
    "true as rank": (lambda d: entry(d).update(rank=True), "'rank' is missing or not of type int"),
    "negative size": (lambda d: entry(d).update(size=-5), "-5 is not a size"),
    "immense size": (lambda d: entry(d).update(size=2**62), f"is said to have {2**62} bytes, but its slices make"),
    "hash": (lambda d: entry(d).update(sha256="0"), "'0' is not a SHA-256"),
    "listed twice": (lambda d: d["files"].append(entry(d)), "a file is listed twice"),
    "unlisted": (lambda d: d["files"].pop() and None, "hold 5 of its 7 elements|of its"),
    "dtype": (first_slice(1, "OBJECT"), "unknown dtype 'OBJECT'"),
    "shape": (first_slice(2, [2**62, 2**62]), "has the impossible shape"),
    "part": (first_slice(4, [1, 2, 3]), "does not lie within shape"),
    "negative offset": (first_slice(3, [-1, 0]), "-1 is not a size"),
    "fractional offset": (first_slice(3, [0.5, 0]), "0.5 is not a size"),
    "slice": (lambda d: entry(d)["slices"].append("w"), "a slice is not"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_a_forged_manifest(folder: Path, what: str) -> None:
    change, why = FORGERIES[what]
    forge(folder / "step-00000020", change)
    message = refused(folder, "manifest.json")
    assert any(part in message for part in why.split("|")), message


def test_a_manifest_nested_beyond_reason(folder: Path) -> None:
    body = b'{"format": ' + b"[" * 200_000 + b"]" * 200_000
    (folder / "step-00000020" / "manifest.json").write_bytes(
        body + f', "sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()
    )
    assert "recursion" in refused(folder, "manifest.json")


@pytest.mark.parametrize("name", [PART, "model", "manifest.json"])
def test_links_are_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    target, outside = folder / "step-00000020" / name, tmp_path / "outside"
    target.rename(outside)
    target.symlink_to(outside)
    assert "link" in refused(folder, name) or name == "model"
    if name != "manifest.json":
        with pytest.raises(CheckpointError, match="step-00000020/model"):
            list(TensorReader(load_manifest(folder / "step-00000020")).read("model"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
@pytest.mark.parametrize("name", [PART, "manifest.json"])
def test_what_is_no_file_is_not_opened(folder: Path, name: str, make: Callable[[Path], None]) -> None:
    target = folder / "step-00000020" / name
    target.unlink()
    make(target)
    assert "no regular file" in refused(folder, name)


@pytest.mark.row(13)
def test_a_link_to_a_checkpoint_is_not_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "step-00000020").rename(tmp_path / "elsewhere")
    (folder / "step-00000020").symlink_to(tmp_path / "elsewhere")
    (folder / "latest").symlink_to(tmp_path / "elsewhere")
    found, broken = newest_checkpoint(folder)
    assert found is not None and (found.step, broken) == (10, [])


@pytest.mark.row(13)
def test_a_file_cut_short_after_it_was_verified(folder: Path) -> None:
    manifest = verify(folder / "step-00000020")
    os.truncate(manifest.path / PART, 100)
    with pytest.raises(CheckpointError, match="it has 100 bytes and not"):
        list(TensorReader(manifest).read("model"))


@pytest.mark.row(12)
def test_a_file_too_large_for_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 10)
    done = saving("limited", "", folder)
    assert done.returncode == 8, done.stderr
    assert "File too large" in done.stderr and "rank0.safetensors" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in folder.iterdir()] == ["step-00000010"]
    assert same(verify(folder / "step-00000010"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "256k") as disk:
        yield disk


@pytest.mark.row(12)
def test_a_full_disk_at_every_page_of_a_save(disk: Path) -> None:
    folder = disk / "checkpoints"
    save(folder, 10)
    failed = 0
    for spare in range(40):
        free = os.statvfs(disk).f_bavail
        filler = fill(disk, spare)
        try:
            save(folder, 20)
        except DiskError as error:
            failed += 1
            assert error.exit_code == 8 and "No space left" in str(error) and "free space" in str(error).lower()
        else:
            break
        finally:
            filler.unlink()
        assert [path.name for path in folder.iterdir()] == ["step-00000010"]
        found, broken = newest_checkpoint(folder)
        assert found is not None and same(found) and broken == []
        assert os.statvfs(disk).f_bavail == free
    assert failed >= 5 and same(verify(folder / "step-00000020"))


@pytest.mark.row(12)
def test_a_rank_whose_disk_is_full_frees_what_it_wrote(disk: Path) -> None:
    temporary = begin(disk / "checkpoints", 10, attempt=0)
    with pytest.raises(DiskError, match="No space left"):
        write_part(temporary, "model", 0, [WritableSlice.whole("w", torch.zeros(2**18))])
    assert list((temporary / "model").iterdir()) == []
