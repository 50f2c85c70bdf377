"""Parameters that replicas compute with on an accelerator, and optimizers update in host memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tutti.device import is_accelerator, pins_memory, synchronize
from tutti.torch_compat import foreach_copy_


class HostParameters:
    """Parameters with two tensors each: the host's, which is updated, and the device's, which replicas compute with.

    A parameter stays one object, for hooks and optimizers: its ``data`` is the device's tensor, and the host's within
    ``on_host``.

    Args:
        homes: the host's tensor of each parameter, in the model's order.
    """

    def __init__(self, homes: Mapping[nn.Parameter, Tensor]) -> None:
        self._homes = homes
        self._here = {parameter: parameter.data for parameter in homes}
        self.fetch()

    def fetch(self) -> None:
        """Copy the values of all parameters from their tensors in host memory to their tensors on the accelerator."""
        foreach_copy_(list(self._here.values()), list(self._homes.values()))

    def send(self, parameters: Collection[nn.Parameter]) -> None:
        """Copy parameter values from the accelerator to the parameters' tensors in host memory.

        Args:
            parameters: some of those given to the constructor.
        """
        for parameter in parameters:
            self._homes[parameter].copy_(self._here[parameter])

    @contextmanager
    def on_host(
        self, parameters: Collection[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor] | None = None
    ) -> Iterator[None]:
        """Return a context in which ``parameters`` have data and ``.grad`` in host memory, for an optimizer step there.

        On exit data and ``.grad`` are again the accelerator's tensors, with their old values: updated values reach the
        accelerator by ``fetch``.

        Args:
            parameters: some of those given to the constructor.
            gradients: ``.grad`` of the parameters within the context, on the host; a parameter that is not a key has
                none. None takes copies of the accelerator's ``.grad``.
        """
        own = {parameter: parameter.grad for parameter in parameters}
        for parameter, gradient in own.items():
            parameter.grad = None
            parameter.data = self._homes[parameter]
            if gradients is None:
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            else:
                parameter.grad = gradients.get(parameter)
        try:
            yield
        finally:
            self._to_device(own)

    @contextmanager
    def receiving(self) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Return a context for a reducer that sums gradients and sets ``.grad`` to sums in host memory.

        Within the context each parameter's data is its tensor in host memory, as PyTorch requires of a ``.grad`` there;
        ``.grad`` is still on the accelerator until the reducer sets it. Afterwards data is on the accelerator and every
        ``.grad`` is None.

        Yields:
            A dictionary, empty within the context, that afterwards holds the gradients on the host by parameter.
        """
        received: dict[nn.Parameter, Tensor] = {}
        for parameter, home in self._homes.items():
            parameter.data = home
        try:
            yield received
            received.update({p: p.grad for p in self._homes if p.grad is not None})
        finally:
            self._to_device(dict.fromkeys(self._homes))

    def _to_device(self, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
        for parameter, gradient in gradients.items():
            _set(parameter, self._here[parameter], gradient)


class OffloadedUpdate:
    """Optimizer steps in host memory for parameters that are on an accelerator; the host keeps the optimizer's state.

    Ren et al. 2021, arXiv 2101.06840 (ZeRO-Offload). Values and gradients are copied to page-locked memory together,
    and the updated values back while the host goes on. The values are copied each time, because a script may have
    written to them.

    Args:
        device: where the parameters are between updates.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[nn.Parameter, Tensor] = {}
        self._gradients: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def on_host(self, parameters: Collection[nn.Parameter]) -> Iterator[None]:
        """Return a context in which ``parameters`` and their ``.grad`` are in host memory, for an optimizer step there.

        On exit the updated values are copied back to the device, and ``.grad`` is the device's tensor of before.
        Parameters that are on the host anyway stay as they are. Entry blocks until the copies to the host are complete.
        """
        here = {p: (p.data, p.grad) for p in parameters if is_accelerator(p.device)}
        there = {p: self._copy(p, value, gradient) for p, (value, gradient) in here.items()}
        synchronize(self._device)
        for parameter, (value, gradient) in there.items():
            _set(parameter, value, gradient)
        try:
            yield
        finally:
            for parameter, (value, gradient) in here.items():
                value.copy_(parameter.data, non_blocking=True)
                _set(parameter, value, gradient)

    def _copy(self, parameter: nn.Parameter, value: Tensor, gradient: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Start the copies of one parameter's value and gradient; their memory is used again in the next update."""
        copied = self._fill(self._values, parameter, value)
        return copied, None if gradient is None else self._fill(self._gradients, parameter, gradient)

    def _fill(self, kept: dict[nn.Parameter, Tensor], parameter: nn.Parameter, source: Tensor) -> Tensor:
        held = kept.get(parameter)
        if held is None or held.shape != source.shape or held.dtype != source.dtype:
            held = kept[parameter] = torch.empty_like(source, device="cpu", pin_memory=pins_memory(self._device))
        return held.copy_(source, non_blocking=True)


def _set(parameter: nn.Parameter, value: Tensor, gradient: Tensor | None) -> None:
    parameter.grad = None
    parameter.data = value
    parameter.grad = gradient
