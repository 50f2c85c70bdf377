"""Load a checkpoint's weights into a plain model, outside of a run."""

from __future__ import annotations

import torch
from torch import nn

from tutti.checkpoint.checkpoint_reader import check_model
from tutti.checkpoint.dtypes import tensor_from_bytes
from tutti.checkpoint.manifest import Manifest
from tutti.checkpoint.weights import SavedWeights, whole_tensor
from tutti.types.shard_spec import ShardSpec


@torch.no_grad()
def load_plain_model(model: nn.Module, manifest: Manifest, ema: bool = False) -> None:
    """Copy the weights and buffers of a checkpoint into a module that no strategy has split or sharded. Local.

    Values are converted to the dtype of the module's tensors; one tensor at a time is in memory.

    Args:
        model: the module, whose state dict has the names and shapes of the checkpoint's tensors.
        manifest: manifest of a checkpoint whose files were verified.
        ema: load the moving average (EMA) of the weights in place of the weights.

    Raises:
        CheckpointError: names or shapes differ, the checkpoint has no average of the weights, or a file differs from
            the manifest.
    """
    weights = SavedWeights(manifest, ema)
    own = model.state_dict()
    specs = {name: ShardSpec(tuple(t.shape), (0,) * t.dim(), ()) for name, t in own.items()}
    check_model(specs, {name: record.shape for name, record in weights.records.items()}, str(manifest.path))
    for name, tensor in own.items():
        tensor.copy_(tensor_from_bytes(whole_tensor(weights, name), weights.records[name].dtype))
