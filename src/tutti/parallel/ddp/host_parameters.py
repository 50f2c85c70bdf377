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
    ``on_host``. Construction copies the host's values to the device.

    Args:
        homes: the host's tensor of each parameter, in the model's order; the parameters' present ``data`` become the
            device's tensors.
    """

    def __init__(self, homes: Mapping[nn.Parameter, Tensor]) -> None:
        self._homes = homes
        self._here = {parameter: parameter.data for parameter in homes}
        self.fetch()

    def fetch(self) -> None:
        """Copy the values of all parameters from their tensors in host memory to their tensors on the accelerator.

        Each parameter has both tensors; the optimizer updates the host's, and forwards use the accelerator's. Called
        after an update in host memory; not collective: where ranks share the host's tensors, the caller first waits
        until all ranks have updated them.
        """
        foreach_copy_(list(self._here.values()), list(self._homes.values()))

    def send(self, parameters: Collection[nn.Parameter]) -> None:
        """Copy parameter values from the accelerator to the parameters' tensors in host memory.

        Each parameter has both tensors; the optimizer updates the host's, and forwards use the accelerator's. Called
        where the script may have written the accelerator's tensors, or assigned other ones to ``.data``, which then
        take their place. Blocks until the values are there. Not collective.

        Args:
            parameters: the parameters to copy, each a key of the constructor's ``homes`` (host tensors by parameter).
        """
        for parameter in parameters:
            self._here[parameter] = parameter.data
            self._homes[parameter].copy_(parameter.data)

    @contextmanager
    def on_host(
        self, parameters: Collection[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor] | None = None
    ) -> Iterator[None]:
        """Return a context in which ``parameters`` have data and ``.grad`` in host memory, for an optimizer step there.

        Each parameter has a lasting tensor in host memory (the constructor's ``homes``), which is its ``data`` within
        the context, and one on the accelerator. On exit data and ``.grad`` are again the accelerator's tensors, with
        their old values; the method ``fetch`` copies the updated values to the accelerator.

        Args:
            parameters: the parameters to move, each a key of ``homes``.
            gradients: ``.grad`` of each parameter within the context, a tensor on the host; a parameter that is not a
                key has ``.grad`` None. If ``gradients`` is None, copies of the accelerator's ``.grad`` are taken.
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
        """Return a context in which a reducer sums gradients over ranks and sets ``.grad`` to tensors on the host.

        Within the context each parameter's ``data`` is its tensor in host memory, because PyTorch requires ``.grad`` to
        be on the same device; ``.grad`` is still on the accelerator until the reducer sets it. On exit ``data`` is the
        accelerator's tensor again, and every ``.grad`` is None.

        Yields:
            A dictionary, empty within the context. After the exit the dictionary has the gradients that the reducer has
            set, on the host, by parameter; parameters with ``.grad`` None have no entry.
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

        Entry copies values and gradients from the accelerator to page-locked memory and blocks until the copies are
        complete. On exit the updated values are copied back to the accelerator, without waiting, and ``.grad`` is again
        the accelerator's tensor, with its old values.

        Args:
            parameters: parameters of the optimizer that is to step; those that are on the host already stay as they
                are.
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
