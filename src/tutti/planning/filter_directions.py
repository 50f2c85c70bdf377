"""Random directions in parameter space whose filters have the lengths of the model's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tutti.comm.random_keys import mix, name_key

_MASK = (1 << 63) - 1


def filter_direction(parameters: Mapping[str, Tensor], seed: int) -> Tensor:
    """Draw a random direction in parameter space whose filters have the norms of the model's filters.

    The numbers are standard normal, and each filter is then scaled. A filter is a slice of a weight along its first
    dimension: an output channel of a convolution, an output of a linear layer. For tensors of less than two dimensions
    (biases, batch norm) the direction is zero.

    Args:
        parameters: the trained parameters by name.
        seed: seed of the random numbers, which depend on the parameter's name too and are made on the CPU, so that they
            are equal on every device.

    Returns:
        The direction as one CPU vector (n,) of all n elements, in the order of ``parameters`` and in their dtype.

    Source: Li et al. 2018, arXiv 1712.09913, §4.
    """
    pieces = []
    for name, parameter in parameters.items():
        if parameter.dim() < 2:
            pieces.append(torch.zeros(parameter.numel(), dtype=parameter.dtype))
            continue
        generator = torch.Generator().manual_seed(mix(seed, name_key(name)) & _MASK)
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        pieces.append(scale_filters(drawn, parameter.detach().cpu().double()).to(parameter.dtype).reshape(-1))
    return torch.cat(pieces)


def scale_filters(direction: Tensor, weight: Tensor) -> Tensor:
    """Return ``direction`` with each filter d scaled to d · ‖θ‖ / (‖d‖ + 1e-10), for the filters θ of ``weight``.

    Filters are the slices along the first dimension, such as the output channels of a convolution.

    Args:
        direction: a tensor of the weight's shape.
        weight: the weight, of at least one dimension.

    Returns:
        A new tensor of the weight's shape.

    >>> scale_filters(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()
    [[5.0, 0.0], [1.0, 0.0]]
    """
    lengths = [tensor.reshape(len(tensor), -1).norm(dim=1) for tensor in (weight, direction)]
    factor: Tensor = lengths[0] / (lengths[1] + 1e-10)
    return direction * factor.reshape(-1, *[1] * (direction.dim() - 1))
