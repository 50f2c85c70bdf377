"""Muon on matrices and AdamW on everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.optim import config
from tutti.types import Wholes

_MUON = ("lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps", "adjust_lr_fn")
_ADAM = ("lr", "weight_decay", "betas", "eps")


class Muon(Optimizer):
    """Momentum whose matrices are orthogonalized (K. Jordan 2024, kellerjordan.github.io/posts/muon); AdamW elsewhere.

    The steps are those of ``torch.optim.Muon`` and ``torch.optim.AdamW``. A convolution kernel (out, in, k, k) is the
    matrix (out, in·k²). Orthogonalization is done in bfloat16 and needs the whole matrix: of one that is split over
    ranks it is gathered in every step, with its gradient and its momentum.

    Args:
        params: named parameters (``model.named_parameters()``), parameters, or groups. Groups with ``adam`` True or
            False are taken as they are; others are divided: AdamW has tensors of at most one dimension and names that
            ``adam_names`` match (without names: tensors of at most one dimension).
        lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn: of the matrices, as in ``torch.optim.Muon``.
        adam_lr, adam_betas, adam_eps, adam_weight_decay: of the rest.
        adam_names: patterns.

    Attributes:
        wholes: gathers matrices of which this rank holds slices; None: it holds them whole.
    """

    wholes: Wholes | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original",
        adam_lr: float = 1e-3,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float = 0.0,
        adam_names: Sequence[str] = config.Muon.adam,
    ) -> None:
        matrices = {
            "adam": False,
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": 1e-7,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        rest = {
            "adam": True,
            "lr": adam_lr,
            "weight_decay": adam_weight_decay,
            "betas": adam_betas,
            "eps": adam_eps,
        }
        self._kinds: dict[bool, dict[str, Any]] = {False: matrices, True: rest}
        super().__init__(_divided(params, adam_names), {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer``; the group must say whether it is ``adam``."""
        if "adam" not in param_group:
            raise UsageError("a group of Muon must say what it is", remedy='give "adam": True or False')
        super().add_param_group(self._kinds[param_group["adam"]] | param_group)
        group = self.param_groups[-1]
        if not group["adam"] and any(p.ndim < 2 for p in group["params"]):
            del self.param_groups[-1]
            raise UsageError("a group for orthogonal steps has a tensor that is no matrix", remedy='give "adam": True')

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of everything that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params and group["adam"]:
                self._adam(params, group)
            elif params:
                self._muon(params, group)
        return loss

    def _adam(self, params: list[Tensor], group: dict[str, Any]) -> None:
        fused = all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params)
        inner = torch.optim.AdamW(params, **{key: group[key] for key in _ADAM}, fused=fused)
        inner.state = self.state
        inner.step()

    def _muon(self, params: list[Tensor], group: dict[str, Any]) -> None:
        views, shapes, momenta = [], [], []
        for param in params:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param)
            whole = param, _gradient(param), state["momentum_buffer"]
            if self.wholes is not None:
                whole = tuple(self.wholes.gather(param, whole))  # type: ignore[assignment]
            view, gradient, momentum = (tensor.flatten(1) for tensor in whole)
            view.grad = gradient
            views.append(view)
            shapes.append(whole[0].shape)
            momenta.append(momentum)
        inner = torch.optim.Muon(views, **{key: group[key] for key in _MUON})
        for view, momentum in zip(views, momenta, strict=True):
            inner.state[view]["momentum_buffer"] = momentum
        inner.step()
        for view, shape, param in zip(views, shapes, params, strict=True):
            # Where the memory is not in the order of the matrix (channels-last kernels) the view is a copy.
            self._put(param, param, view, shape)
            self._put(param, self.state[param]["momentum_buffer"], inner.state[view]["momentum_buffer"], shape)

    def _put(self, param: Tensor, tensor: Tensor, matrix: Tensor, shape: torch.Size) -> None:
        """Write a parameter or its momentum from the whole matrix, which is of ``shape``."""
        if tensor.data_ptr() != matrix.data_ptr():
            whole = matrix.view(shape)
            tensor.copy_(whole if self.wholes is None else self.wholes.mine(param, whole))


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError("a matrix without a gradient")
    return param.grad


def _divided(params: Any, adam_names: Sequence[str]) -> list[dict[str, Any]]:
    """Groups that say what they are."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    found = []
    for group in groups:
        if "adam" in group:
            found.append(group)
            continue
        own = group["params"]
        members = [own] if isinstance(own, Tensor) else list(own)
        is_adam = [_for_adam(member, adam_names) for member in members]
        for adam in (False, True):
            chosen = [member for member, kind in zip(members, is_adam, strict=True) if kind is adam]
            if chosen:
                found.append({**group, "params": chosen, "adam": adam})
    return found


def _for_adam(member: Tensor | tuple[str, Tensor], names: Iterable[str]) -> bool:
    name, param = member if isinstance(member, tuple) else ("", member)
    return param.ndim < 2 or any(fnmatchcase(name, pattern) for pattern in names)
