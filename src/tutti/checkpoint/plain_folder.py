"""Read plain weights from a folder of safetensors files, as ``save_pretrained`` of transformers writes it. No torch.

Either one file, or several beside an index ``NAME.safetensors.index.json`` whose ``weight_map`` names the file of each
tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tutti.checkpoint.plain import PlainFile
from tutti.checkpoint.tensorfile import SliceRecord
from tutti.errors import CheckpointError

INDEX_END = ".safetensors.index.json"
_DCP = ".metadata"


def is_plain_folder(path: Path) -> bool:
    """Return whether a folder holds safetensors files, their index, or a ``torch.distributed.checkpoint``.

    A ``torch.distributed.checkpoint`` cannot be read: ``PlainFolder`` raises an error that says how to convert it.

    Args:
        path: the folder.
    """
    return any(path.glob("*.safetensors")) or any(path.glob(f"*{INDEX_END}")) or (path / _DCP).exists()


class PlainFolder:
    """Reads weights from a folder of safetensors files with whole tensors; implements the protocol ``Weights``.

    Such a folder is written by ``save_pretrained`` of transformers. Files are mapped into memory, and tensors are read
    one at a time.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        records: every tensor's dtype and shape, by name.

    Raises:
        CheckpointError: a file or the index cannot be used, several files have no index, or the folder is a checkpoint
            of ``torch.distributed.checkpoint``, whose metadata is a pickle.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, PlainFile] = {}
        self._of: dict[str, PlainFile] = {}
        for name, file in self._places().items():
            if file not in self._files:
                self._files[file] = PlainFile(path / file)
            if name not in self._files[file].records:
                raise self._broken(f"its index names {name} in {file}, which does not have it")
            self._of[name] = self._files[file]
        self.records: Mapping[str, SliceRecord] = {name: file.records[name] for name, file in self._of.items()}

    def region(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> NDArray[Any]:
        """Return a region of one tensor as a read-only view of its file, which is mapped into memory.

        Args:
            name: name of the tensor, a key of ``records``.
            offset: index of the region's first element in the tensor, one number a dimension.
            shape: shape of the region.

        Raises:
            CheckpointError: the region does not lie within the tensor.
        """
        return self._of[name].region(name, offset, shape)

    def verify(self) -> None:
        """Hash the weights of each safetensors file in the folder and compare with the hash in its metadata, if any.

        Raises:
            CheckpointError: a file's weights do not have the hash that its metadata state.
        """
        for file in self._files.values():
            file.verify()

    def _places(self) -> dict[str, str]:
        """Return the name of each tensor's file."""
        indexes = sorted(self.path.glob(f"*{INDEX_END}"))
        files = sorted(self.path.glob("*.safetensors"))
        if len(indexes) == 1:
            return self._indexed(indexes[0])
        if len(files) == 1 and not indexes:
            return dict.fromkeys(PlainFile(files[0]).records, files[0].name)
        if files:
            raise self._broken(f"it has {len(files)} .safetensors files and {len(indexes)} indexes (*{INDEX_END})")
        raise CheckpointError(
            "the weights are a checkpoint of torch.distributed.checkpoint, whose metadata is a pickle, never loaded"
            " because it can run code",
            where=str(self.path),
            remedy="convert it: torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, 'x.pt'), then"
            " safetensors.torch.save_file of its tensors; or save it by HuggingFaceStorageWriter of"
            " torch.distributed.checkpoint, which writes safetensors files",
        )

    def _indexed(self, index: Path) -> dict[str, str]:
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            places = {str(name): str(file) for name, file in found.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._broken(f"{index.name} cannot be used: {error!r}") from error
        for file in set(places.values()):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise self._broken(f"{index.name} names {file!r}, which is no safetensors file of the folder")
        return places

    def _broken(self, why: str) -> CheckpointError:
        remedy = "give a .safetensors file, or a folder with one of them or with several and their index"
        return CheckpointError("the weights cannot be read", where=str(self.path), why=why, remedy=remedy)
