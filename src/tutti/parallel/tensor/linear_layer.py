"""Linear layers in either orientation: ``nn.Linear``, and layers of other classes that compute as it does.

GPT-2 of transformers multiplies by weights that are stored transposed (its ``Conv1D``), Falcon by those of a subclass
of ``nn.Linear``. A layer with a matrix and at most a vector is known as one by computing with it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti.torch_compat import module_parameters


class FormulaLinear(nn.Module):
    """Linear layer that computes x · Wᵀ + b, or x · W + b, by PyTorch's operators, in place of its class's own forward.

    Attributes:
        weight: (outputs, inputs) for a subclass of ``nn.Linear``, otherwise (inputs, outputs).
        bias: (outputs,), or None for none.
    """

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Compute a linear layer's outputs from its weight, in either orientation, and its bias.

        Args:
            input: (…, inputs).

        Returns:
            (…, outputs).
        """
        return functional.linear(input, matrix(self), self.bias)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that tensor parallelism can split.

    True for ``nn.Linear`` itself, and for a layer of a class from outside of PyTorch that computes x · Wᵀ + b, as a
    subclass of ``nn.Linear``, or x · W + b with W of (inputs, outputs), as GPT-2's ``Conv1D``. A copy of such a layer,
    with random parameters, is run on random numbers on the CPU, in training and in evaluation, and compared with the
    formula. False where a parametrization computes the weight, where there are submodules, buffers or further
    parameters, and where the copy raises an error.

    Args:
        module: the module; it is not changed.
    """
    if type(module) is nn.Linear:
        return module_parameters(module).keys() == {"weight", "bias"}
    return not type(module).__module__.startswith("torch.") and _computes_as_linear(module)


def _computes_as_linear(module: nn.Module) -> bool:
    parameters = module_parameters(module)
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if parameters.keys() != {"weight", "bias"} or weight is None or weight.dim() != 2:
        return False
    if bias is None and not isinstance(module, nn.Linear):
        # A table, such as that of an embedding.
        return False
    if bias is not None and bias.shape != matrix(module).shape[:1]:
        return False
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            trial = copy.deepcopy(module).cpu().double()
            for parameter in trial.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            own, whole = module_parameters(trial), matrix(trial)
            inputs = torch.randn(2, 3, whole.shape[1], generator=generator, dtype=torch.float64)
            want = functional.linear(inputs, whole, own["bias"])
            return all(
                torch.allclose(trial.train(training)(inputs), want, rtol=1e-9, atol=1e-9) for training in (True, False)
            )
    except Exception:
        # It takes other inputs.
        return False


def output_dim(linear: nn.Module) -> int:
    """Return which dimension of a linear layer's weight counts outputs: 0 for ``nn.Linear`` and its subclasses, else 1.

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
