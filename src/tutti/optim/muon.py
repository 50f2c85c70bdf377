"""Muon on matrices and AdamW on everything else, as one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.config import optimizer_config
from tutti.device import has_fused_optimizers
from tutti.errors import UsageError
from tutti.types.optimizer_protocols import FullTensorGatherer

_MUON = ("lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps", "adjust_lr_fn")
_ADAM = ("lr", "weight_decay", "betas", "eps")


class Muon(Optimizer):
    """Optimizer Muon: updates matrices by their orthogonalized momentum, and all other tensors by AdamW.

    K. Jordan 2024, kellerjordan.github.io/posts/muon. The steps are those of ``torch.optim.Muon`` and
    ``torch.optim.AdamW``. A convolution kernel (out, in, k, k) counts as the matrix (out, in·k²). Orthogonalization is
    done in bfloat16 and needs the whole matrix: a matrix that is sharded over ranks is all-gathered in every step, with
    its gradient and its momentum, if ``wholes`` is set.

    Args:
        params: named parameters (``model.named_parameters()``), parameters, or groups. Groups with ``adam`` True or
            False are taken as they are; other groups are split: AdamW gets tensors of at most one dimension and names
            that match ``adam_names`` (without names: tensors of at most one dimension).
        lr, weight_decay, momentum, nesterov, ns_steps, adjust_lr_fn: options of the matrices' updates, as in
            ``torch.optim.Muon``.
        adam_lr, adam_betas, adam_eps, adam_weight_decay: options of AdamW's updates.
        adam_names: ``fnmatch`` patterns of the names of matrices that AdamW updates.

    Attributes:
        wholes: gathers matrices of which this rank holds slices; None: it holds whole matrices.
    """

    wholes: FullTensorGatherer | None = None
    # PyTorch's optimizers compute the updates: built in the first step, with tensors and options set in each.
    _adamw: torch.optim.AdamW | None = None
    _matrices: torch.optim.Muon | None = None

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
        adam_names: Sequence[str] = optimizer_config.MuonConfig.adam,
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
        """Add a parameter group as ``torch.optim.Optimizer`` does; its boolean ``adam`` selects AdamW's or Muon's step.

        Options that the group does not give come from the constructor's arguments for that step.

        Args:
            param_group: the group, with keys ``params`` and ``adam``.

        Raises:
            UsageError: ``adam`` is missing, or it is False and a tensor has fewer than two dimensions.
        """
        if "adam" not in param_group:
            raise UsageError("a parameter group of Muon has no key 'adam'", remedy='give "adam": True or False')
        super().add_param_group(self._kinds[param_group["adam"]] | param_group)
        group = self.param_groups[-1]
        if not group["adam"] and any(p.ndim < 2 for p in group["params"]):
            del self.param_groups[-1]
            raise UsageError(
                'a parameter group of Muon with "adam": False has a tensor that is not a matrix',
                remedy='put it into a group with "adam": True',
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient: by AdamW in groups with ``adam`` True, else by Muon.

        The steps are those of ``torch.optim.AdamW`` and ``torch.optim.Muon`` (a matrix moves by its orthogonalised
        momentum).

        Collective if the attribute ``wholes`` is set, over the ranks that hold slices of the matrices: parameter,
        gradient and momentum of each matrix are all-gathered, the whole matrix is updated, and each rank keeps its
        slice. All these ranks must then have gradients of the same matrices.

        Args:
            closure: called first, with gradients enabled; None for none.

        Returns:
            The result of ``closure``; None without it.

        Raises:
            RuntimeError: a gradient is sparse.
        """
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
        if self._adamw is None:
            self._adamw = torch.optim.AdamW(params)
        fused = all(p.is_floating_point() and has_fused_optimizers(p.device) for p in params)
        [own] = self._adamw.param_groups
        own.update({key: group[key] for key in _ADAM}, params=params, fused=fused)
        for param in params:
            # A group does not say whether kernels are fused: what loads its state leaves the counters on the CPU.
            place, step = param.device if fused else torch.device("cpu"), self.state[param].get("step")
            if step is not None and step.device != place:
                self.state[param]["step"] = step.to(place)
        self._adamw.state = self.state
        self._adamw.step()

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
        if self._matrices is None:
            self._matrices = torch.optim.Muon(views)
        [own] = self._matrices.param_groups
        own.update({key: group[key] for key in _MUON}, params=views)
        state = {view: {"momentum_buffer": momentum} for view, momentum in zip(views, momenta, strict=True)}
        self._matrices.state = defaultdict(dict, state)
        self._matrices.step()
        for view, shape, param in zip(views, shapes, params, strict=True):
            # If the memory order differs from the matrix's (channels-last kernels), the flattened view is a copy.
            self._put(param, param, view, shape)
            self._put(param, self.state[param]["momentum_buffer"], state[view]["momentum_buffer"], shape)

    def _put(self, param: Tensor, tensor: Tensor, matrix: Tensor, shape: torch.Size) -> None:
        """Write a parameter or its momentum from the whole matrix; ``shape``: shape of the whole parameter."""
        if tensor.data_ptr() != matrix.data_ptr():
            whole = matrix.view(shape)
            tensor.copy_(whole if self.wholes is None else self.wholes.mine(param, whole))


def _gradient(param: Tensor) -> Tensor:
    if param.grad is None:
        raise ValueError("a matrix without a gradient")
    return param.grad


def _divided(params: Any, adam_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return groups that all have ``adam``, splitting groups without it."""
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
