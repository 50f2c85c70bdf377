"""Formulas of the memory that training takes on a device: parameters, gradients and optimizer state, sharded or not.

Rajbhandari et al. 2019, arXiv 1910.02054 (ZeRO), §3 and §5. The formulas count this state; activations, message buffers
and fragmentation come on top.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """State of training in bytes for each parameter of the model.

    ``State(2, 2, 12)`` is 16-bit weights with Adam on 32-bit copies: K = 12 of the ZeRO paper (arXiv 1910.02054).

    Attributes:
        parameter: bytes of the parameter itself.
        gradient: bytes of its gradient.
        optimizer: bytes of the optimizer state, such as moments and 32-bit copies.
    """

    parameter: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0


@dataclass(frozen=True)
class DeviceSplit:
    """Distribution of a model's training state over devices.

    Attributes:
        shards: number of devices that shard one copy of the state.
        zero: ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.
        stages, tensor: number of pipeline stages, and of tensor-parallel ranks, of one replica.
    """

    shards: int = 1
    zero: int = 0
    stages: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes of each kind that training takes on the fullest device.

    Attributes:
        parameters, gradients, optimizer: parameters, their gradients, and optimizer state.
        messages: communication buffers: gradients in buckets, gathered parameters.
        average: the exponential moving average of the weights.
        activations: activations that the forward keeps for backward.
        buffers: buffers of the model.
    """

    parameters: float
    gradients: float
    optimizer: float
    messages: float = 0.0
    average: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all kinds that training takes on the device: state, messages, average, activations and buffers.

        State is parameters, gradients and optimizer state; messages are communication buffers.
        """
        return self.state + self.messages + self.average + self.activations + self.buffers

    @property
    def state(self) -> float:
        """Bytes of parameters, gradients and optimizer state on the device, as the ZeRO paper counts."""
        return self.parameters + self.gradients + self.optimizer


def state_memory(parameters: float, each: State = State(), split: DeviceSplit = DeviceSplit()) -> Memory:
    """Compute the bytes of parameters, gradients and optimizer state on one device, assuming equal stages.

    ZeRO stages 1, 2, 3 keep 4Ψ+KΨ/N, 2Ψ+(2+K)Ψ/N and (4+K)Ψ/N bytes of Ψ parameters on N devices (Rajbhandari et al.
    2019, arXiv 1910.02054, Fig. 1), with K bytes of optimizer state for each parameter.

    Args:
        parameters: Ψ, the model's number of parameters.
        each: bytes of parameter, gradient and optimizer state for each parameter; default: 4, 4 and 8.
        split: distribution over devices: sharding ranks, ZeRO stage, pipeline stages and tensor-parallel ranks;
            default: one device.

    Returns:
        A ``Memory``: bytes (floats) of ``parameters``, ``gradients`` and ``optimizer`` state, with their sum ``state``;
        the other kinds, such as ``activations``, are 0.

    >>> mixed = State(2, 2, 12)
    >>> [state_memory(7.5e9, mixed, DeviceSplit(shards=64, zero=z)).state / 1e9 for z in range(4)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    here = parameters / (split.stages * split.tensor)
    parts = [split.shards if split.zero >= stage else 1 for stage in (3, 2, 1)]
    return Memory(
        here * each.parameter / parts[0],
        here * each.gradient / parts[1],
        here * each.optimizer / parts[2],
    )


def smallest_split(
    parameters: float, room: float, each: State, most_shards: int, rest: float = 0.0
) -> DeviceSplit | None:
    """Find the smallest sharding whose training state fits into a device: fewest devices, then lowest ZeRO stage.

    Args:
        parameters: the model's number of parameters.
        room: bytes of a device.
        each: bytes of parameter, gradient and optimizer state for each parameter.
        most_shards: largest number of devices to try.
        rest: bytes on every device that do not depend on the split, such as activations.

    Returns:
        A ``DeviceSplit``: ``shards`` (number of devices) and ``zero`` (ZeRO stage, 0 for one device), with one pipeline
        stage and tensor rank. None if no split fits.

    >>> smallest_split(110e6, 16e9, State(), 8)
    DeviceSplit(shards=1, zero=0, stages=1, tensor=1)
    >>> smallest_split(340e6, 4e9, State(), 8)
    DeviceSplit(shards=2, zero=2, stages=1, tensor=1)
    >>> smallest_split(1e12, 1e9, State(), 8) is None
    True
    """
    for shards in range(1, most_shards + 1):
        for zero in (0,) if shards == 1 else (1, 2, 3):
            split = DeviceSplit(shards, zero)
            if state_memory(parameters, each, split).state + rest <= room:
                return split
    return None
