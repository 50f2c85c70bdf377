"""How many bytes of a device's memory training takes, by what they are for, however the model is split.

Rajbhandari et al. 2019, arXiv 1910.02054 (ZeRO), §3 and §5. Activations, the pieces of messages and fragmentation come
on top of the state, which is what the formulas are of.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """What training keeps for each parameter, in bytes.

    ``State(2, 2, 12)`` is 16-bit weights with Adam on 32-bit copies: K = 12 of the paper.
    """

    parameter: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0


@dataclass(frozen=True)
class Split:
    """How a model lives on its devices.

    Attributes:
        shards: devices that share out one copy.
        zero: what they share out: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        stages, tensor: devices that a replica is cut into, by layers and within layers.
    """

    shards: int = 1
    zero: int = 0
    stages: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, the fullest one.

    Attributes:
        messages: what is there twice, or whole for a while: gradients in buckets, gathered parameters.
        average: of the weights.
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
        """All of it."""
        return self.state + self.messages + self.average + self.activations + self.buffers

    @property
    def state(self) -> float:
        """Parameters, gradients and the optimizer's state: what the paper counts."""
        return self.parameters + self.gradients + self.optimizer


def of_state(parameters: float, each: State = State(), split: Split = Split()) -> Memory:
    """Parameters, gradients and optimizer state of a model of so many parameters, on one device.

    Equal stages are assumed. ``zero`` stages 1, 2, 3 keep 4Ψ+KΨ/N, 2Ψ+(2+K)Ψ/N and (4+K)Ψ/N bytes of Ψ parameters on
    N devices (ibid., Fig. 1).

    >>> mixed = State(2, 2, 12)
    >>> [of_state(7.5e9, mixed, Split(shards=64, zero=z)).state / 1e9 for z in range(4)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    here = parameters / (split.stages * split.tensor)
    parts = [split.shards if split.zero >= stage else 1 for stage in (3, 2, 1)]
    return Memory(
        here * each.parameter / parts[0],
        here * each.gradient / parts[1],
        here * each.optimizer / parts[2],
    )


def nearest(parameters: float, room: float, each: State, most_shards: int, rest: float = 0.0) -> Split | None:
    """The split with the fewest devices, and of those the one that shares out least, whose state fits into ``room``.

    Args:
        parameters: of the model.
        room: bytes of a device.
        each: bytes for each parameter.
        most_shards: devices to look at.
        rest: bytes that are the same on every device however the state is split, such as activations.

    >>> nearest(110e6, 16e9, State(), 8)
    Split(shards=1, zero=0, stages=1, tensor=1)
    >>> nearest(340e6, 4e9, State(), 8)
    Split(shards=2, zero=2, stages=1, tensor=1)
    >>> nearest(1e12, 1e9, State(), 8) is None
    True
    """
    for shards in range(1, most_shards + 1):
        for zero in (0,) if shards == 1 else (1, 2, 3):
            split = Split(shards, zero)
            if of_state(parameters, each, split).state + rest <= room:
                return split
    return None
