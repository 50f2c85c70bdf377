"""Linear layers in either orientation: ``nn.Linear``, and layers whose weight is (inputs, outputs).

GPT-2 of transformers multiplies by weights that are stored transposed (its ``Conv1D``). A layer with a matrix and at
most a vector is known as one by computing with it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.torch_compat import module_parameters


class TransposedLinear(nn.Module):
    """A linear layer whose weight is transposed from ``nn.Linear``'s, as in GPT-2's ``Conv1D``.

    Attributes:
        weight: (inputs, outputs).
        bias: (outputs,), or None for none.
    """

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight + bias`` of a linear layer whose weight is stored as (inputs, outputs).

        Args:
            input: (…, inputs).

        Returns:
            (…, outputs).
        """
        return functional.linear(input, self.weight.t(), self.bias)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that tensor parallelism can split: ``nn.Linear``, or a transposed one.

    True for ``nn.Linear`` itself and where ``is_transposed`` is True (weight stored as (inputs, outputs)). False for
    subclasses of ``nn.Linear``, and where a parametrization computes the weight.

    Args:
        module: the module; one of another class than ``nn.Linear`` may be computed with, see ``is_transposed``.
    """
    if type(module) is nn.Linear:
        return module_parameters(module).keys() == {"weight", "bias"}
    return is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is a linear layer x · W + b with weight W (inputs, outputs), as GPT-2's ``Conv1D``.

    A copy of the module, with random parameters, is run on random numbers on the CPU and compared with that formula.
    Only modules with just a matrix ``weight`` and a fitting vector ``bias``, without submodules and buffers, and of a
    class from outside of PyTorch are tried; others, and those that raise an error, are False. ``TransposedLinear`` is
    True.

    Args:
        module: the module; it is not changed.
    """
    if isinstance(module, TransposedLinear):
        return True
    parameters = module_parameters(module)
    if type(module).__module__.startswith("torch.") or parameters.keys() != {"weight", "bias"}:
        return False
    weight, bias = parameters["weight"], parameters["bias"]
    if weight is None or bias is None or weight.dim() != 2 or bias.shape != weight.shape[1:]:
        return False
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            trial = copy.deepcopy(module).cpu().double()
            inputs = torch.randn(2, 3, weight.shape[0], generator=generator, dtype=torch.float64)
            for parameter in trial.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            own = dict(trial.named_parameters())
            want = inputs @ own["weight"] + own["bias"]
            return bool(torch.allclose(trial(inputs), want, rtol=1e-9, atol=1e-9))
    except Exception:
        # It takes other inputs.
        return False


def output_dim(linear: nn.Module) -> int:
    """Return which dimension of a linear layer's weight counts outputs: 0 for ``nn.Linear``, 1 for transposed layers.

    Args:
        linear: an ``nn.Linear``, or a layer whose weight is (inputs, outputs); see ``is_linear``.
    """
    return 0 if isinstance(linear, nn.Linear) else 1


def matrix(linear: nn.Module) -> Tensor:
    """Return the weight of a linear layer of either orientation as (outputs, inputs), a view.

    Args:
        linear: an ``nn.Linear``, or a layer whose weight is (inputs, outputs); see ``is_linear``.

    Raises:
        ValueError: the layer's weight is None.
    """
    weight = module_parameters(linear)["weight"]
    if weight is None:
        raise ValueError("a linear layer has a weight")
    return weight if output_dim(linear) == 0 else weight.t()
