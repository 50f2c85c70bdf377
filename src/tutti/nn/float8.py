"""Linear layers that multiply in 8-bit floats with a scale for each tensor, by the package torchao.

Micikevicius et al. 2022, arXiv 2209.05433: products of E4M3 values, gradients in E5M2. Each tensor is scaled by its
largest absolute value, anew in every micro-batch, so that a layer needs no state. Parameters stay float32.
"""

from __future__ import annotations

import torch
from torch import nn

from tutti.config.module_config import check_float8_package
from tutti.device import reason_against_float8
from tutti.errors import UsageError
from tutti.torch_compat import has_backward_hook, has_forward_hook

MULTIPLE = 16
"""Products of 8-bit floats need both dimensions of a weight to be multiples of this."""


def convert_to_float8(model: nn.Module, device: torch.device, emulate: bool = False) -> nn.Module:
    """Replace linear layers whose weights have multiples of 16 as dimensions by layers that multiply in 8-bit floats.

    Parameters stay the same objects, and keep their names. Layers of other dimensions, subclasses of ``nn.Linear``, and
    layers with hooks stay as they are.

    Args:
        model: changed in place, but for a model that is itself a linear layer.
        device: where the model will compute.
        emulate: round to 8-bit floats and multiply in float32, on any device; for tests.

    Returns:
        The model.

    Raises:
        UsageError: torchao is missing, the device has no such products, or no layer can be converted.
    """
    check_float8_package()
    why = None if emulate else reason_against_float8(device)
    if why is not None:
        raise UsageError("precision=fp8 cannot run here", why=why, remedy="take precision=bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    chosen = {
        id(module)
        for _, module in linear
        if _fits(module) and not (has_forward_hook(module) or has_backward_hook(module))
    }
    if not chosen:
        shown = [f"{name or 'the model'} {tuple(module.weight.shape)}" for name, module in linear[:3]]
        raise UsageError(
            "precision=fp8 converts no layer of this model",
            where=", ".join(shown) or None,
            why=f"it takes linear layers without hooks, both of whose dimensions are multiples of {MULTIPLE}",
            remedy="pad the layers, or take precision=bf16",
        )
    # Padding: the number of samples of a micro-batch is an inner dimension in the weights' gradient.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    converted: nn.Module = convert_to_float8_training(
        model, module_filter_fn=lambda module, _: id(module) in chosen, config=config
    )
    return converted


def _fits(module: nn.Linear) -> bool:
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
