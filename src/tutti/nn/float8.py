"""Linear layers that multiply in 8-bit floats with a scale for each tensor, by the package torchao.

Micikevicius et al. 2022, arXiv 2209.05433: products of E4M3 values, gradients in E5M2. Each tensor is scaled by its
largest absolute value, anew in every micro-batch, so that a layer needs no state. Parameters stay float32.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        model: changed in place, unless it is itself a linear layer.
        device: where the model will compute.
        emulate: round to 8-bit floats and multiply in float32, on any device; for tests.

    Returns:
        The model; a new module if ``model`` is itself a linear layer.

    Raises:
        UsageError: torchao is missing; the device cannot multiply 8-bit floats, and ``emulate`` is False; or no layer
            can be converted.
    """
    check_float8_package()
    why = None if emulate else reason_against_float8(device)
    if why is not None:
        raise UsageError("precision=fp8 cannot run here", why=why, remedy="take precision=bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    chosen = {id(module) for _, module in linear if _reason_against(module) is None}
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


def layers_left_in_bf16(model: nn.Module) -> dict[str, str]:
    """Return the layers with matrix products that ``convert_to_float8`` leaves as they are, which compute in bfloat16.

    These have a parameter of two dimensions or more; embeddings and norms, which multiply no matrices, are left out.

    Args:
        model: the model before its conversion.

    Returns:
        A dict from names of layers, in the model's order, to the reason, a short text; "the model" names ``model``
        itself.

    >>> layers_left_in_bf16(nn.Sequential(nn.Linear(16, 32), nn.Embedding(3, 5), nn.Linear(32, 10)))
    {'2': '32 → 10, not multiples of 16'}
    """
    reasons = {
        name or "the model": _reason_against(module)
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag | nn.LayerNorm | nn.RMSNorm)
        and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def describe_layers(reasons: Mapping[str, str], most: int = 5) -> str:
    """Return text that names layers with the reasons why they do not multiply in 8-bit floats, for the run's header.

    Args:
        reasons: reasons by the layer's name, the result of ``layers_left_in_bf16``.
        most: largest number of layers to name; the others are only counted.

    >>> describe_layers({"conv": "a Conv2d", "0": "8 → 3, not multiples of 16", "1": "it has hooks"}, most=2)
    'conv (a Conv2d); 0 (8 → 3, not multiples of 16); and 1 more'
    """
    named = [f"{name} ({reason})" for name, reason in list(reasons.items())[:most]]
    return "; ".join([*named, *([f"and {len(reasons) - most} more"] if len(reasons) > most else [])])


def _reason_against(module: nn.Module) -> str | None:
    """Return why a layer cannot multiply in 8-bit floats; None if it can."""
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__}"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"{module.in_features} → {module.out_features}, not multiples of {MULTIPLE}"
    return "it has hooks" if has_forward_hook(module) or has_backward_hook(module) else None
