"""What every layout's replica has in common: modules on this rank whose gradients are reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tutti.nn.draws import Draws
from tutti.nn.swap import mode, parameters, swapped
from tutti.types import GradSink, ShardSpec


class Part:
    """The modules of one replica that live on this rank, each tensor of them whole.

    Attributes:
        parts: the modules.
        specs: where each parameter sits in the plain model.
        draws: the random streams of these modules.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.parts: Sequence[nn.Module] = (module.to(device),)
        self.specs = {name: ShardSpec(tuple(p.shape), (0,) * p.dim()) for name, p in parameters(self.parts)}
        self.draws = Draws(module, device)

    def connect(self, sink: GradSink) -> None:
        """Autograd reports each parameter's gradient when it has been accumulated."""
        for _, parameter in parameters(self.parts):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(sink.ready)

    @contextmanager
    def evaluating(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block the modules hold ``values``, do not train and record nothing."""
        with torch.no_grad(), mode(self.parts, training=False), swapped(self.parts, values):
            yield
