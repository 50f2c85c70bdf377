"""Optimizers that users write, each of which mixes other numbers, and a model that they train."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tutti


class Own(Optimizer):
    """What the others have in common: SGD with momentum along a direction of their own."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(self.direction(p))
                    p.sub_(buffer, alpha=group["lr"])
        return None

    def direction(self, p: Tensor) -> Tensor:
        raise NotImplementedError


class Normalized(Own):
    """Gradient by its norm, tensor by tensor."""

    def direction(self, p: Tensor) -> Tensor:
        return p.grad / (p.grad.norm() + 1e-8)


class Ready(Normalized):
    """Makes its state as it is made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)


class Estimated(Own):
    """A rate that grows with the distance from the first weights, kept in the parameter group (as D-Adaptation's)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["distance"] = 0.1

    def direction(self, p: Tensor) -> Tensor:
        [group] = [g for g in self.param_groups if any(p is each for each in g["params"])]
        first = self.state[p].setdefault("first", p.clone())
        group["distance"] = max(group["distance"], float((p - first).norm()))
        return p.grad * group["distance"]


class Counted(Own):
    """A rate that falls with a count of steps, kept in the parameter group (as Schedule-Free's)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
        return super().step(closure)

    def direction(self, p: Tensor) -> Tensor:
        return p.grad / self.param_groups[0]["count"]


class Centralized(Own):
    """Gradient less its mean over all dimensions but the first (Yong et al. 2020, arXiv 2004.01461): rows are alone."""

    def direction(self, p: Tensor) -> Tensor:
        return p.grad - p.grad.mean(tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else p.grad


class Columns(Own):
    """Gradient less its mean over the first dimension: columns are alone."""

    def direction(self, p: Tensor) -> Tensor:
        return p.grad - p.grad.mean(0, keepdim=True) if p.dim() else p.grad


class Decayed(Own):
    """Decays matrices alone: each number by itself, but not where a matrix is flattened."""

    def direction(self, p: Tensor) -> Tensor:
        return p.grad + 0.1 * p if p.dim() > 1 else p.grad


class Together(Own):
    """Clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
        torch._foreach_mul_(gradients, 0.1 / (norm + 1e-6))
        return super().step()

    def direction(self, p: Tensor) -> Tensor:
        return p.grad


class Drawing(Own):
    """Adds noise to each gradient."""

    def direction(self, p: Tensor) -> Tensor:
        return p.grad + torch.randn_like(p)


class NumPyDrawing(Own):
    """Adds noise to each gradient that NumPy draws, and Python scales."""

    def direction(self, p: Tensor) -> Tensor:
        return p.grad + random.random() * torch.from_numpy(np.random.standard_normal(p.shape)).to(p)


class Distributed(Own):
    """Sums its direction over ranks itself, as distributed versions of Muon do."""

    def direction(self, p: Tensor) -> Tensor:
        if not torch.distributed.is_initialized():
            return p.grad
        total = p.grad.clone()
        torch.distributed.all_reduce(total)
        return total / torch.distributed.get_world_size()


class Mode(Own):
    """Has an option that is neither in its groups nor in its defaults, and not named as its argument."""

    def __init__(self, params: Any, lr: float = 0.05, how: str = "plain") -> None:
        self._mode = how
        super().__init__(params, lr)

    def direction(self, p: Tensor) -> Tensor:
        return p.grad / (p.grad.norm() + 1e-8) if self._mode == "normalized" else p.grad


class Positional(Own):
    """Takes the parameters second, and an option under another name than its attribute."""

    def __init__(self, rate: float, members: Any, power: float, /) -> None:
        super().__init__(members, rate)
        self._exponent = power

    def direction(self, p: Tensor) -> Tensor:
        return p.grad.sign() * p.grad.abs() ** self._exponent


class Lookahead(Optimizer):
    """Steps the optimizer that it wraps, and every ``k`` steps goes back towards slow weights (arXiv 1907.08610).

    As many versions do, it calls no constructor of ``Optimizer``.
    """

    def __init__(self, optimizer: Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state: Any = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in members:
            state = self.state[p]
            if not state:
                state["slow"], state["count"] = p.clone(), 0
        loss = self.optimizer.step(closure)
        for p in members:
            state = self.state[p]
            state["count"] += 1
            if state["count"] % self.k == 0:
                state["slow"].add_(p - state["slow"], alpha=self.alpha)
                p.copy_(state["slow"])
        return loss


class Ahead(Lookahead):
    """Makes its slow weights as it is made, and shares no more than the groups with what it wraps."""

    def __init__(self, optimizer: Optimizer) -> None:
        Optimizer.__init__(self, optimizer.param_groups, dict(optimizer.defaults))
        self.optimizer, self.k, self.alpha = optimizer, 3, 0.3
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(slow=p.detach().clone(), count=0)


class Proxy(Lookahead):
    """Has no defaults, and no groups but by a property, as the Lookahead of its authors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.k, self.alpha = optimizer, 2, 0.5
        self.state: Any = defaultdict(dict)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups


class Sharpness(Optimizer):
    """Takes the class of the optimizer inside, as SAM does, and steps it along an earlier gradient's signs as well."""

    def __init__(self, params: Any, base_optimizer: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    before = self.state[p].get("before")
                    self.state[p]["before"] = p.grad.clone()
                    if before is not None:
                        p.grad.add_(before.sign(), alpha=group["rho"])
        return self.base_optimizer.step(closure)


class SharpnessByNorm(Sharpness):
    """Goes along the earlier gradient divided by the norm of all tensors together, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in members]).sum().sqrt()
        for p in members:
            p.grad.div_(norm)
        return super().step(closure)


def wrapped(optimizer: str) -> Callable[[nn.Module], Optimizer]:
    """Lookahead around another one."""
    kind = Ahead if optimizer == "adamw" else Lookahead
    return lambda model: kind(OPTIMIZERS[optimizer](model))


def muon(model: nn.Module) -> Optimizer:
    """PyTorch's, which takes matrices alone."""
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05, weight_decay=0.1)


def grouped(model: nn.Module) -> Optimizer:
    """Adafactor with two groups."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.Adafactor([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.05)


def of(kind: type[Optimizer], **options: Any) -> Callable[[nn.Module], Optimizer]:
    """Makes this one of all parameters."""
    return lambda model: kind(model.parameters(), **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": of(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": of(torch.optim.AdamW, lr=0.01),
    "adagrad": of(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "muon": muon,
    "adafactor": of(torch.optim.Adafactor, lr=0.05),
    "grouped": grouped,
    "normalized": of(Normalized),
    "ready": of(Ready),
    "centralized": of(Centralized),
    "columns": of(Columns),
    "decayed": of(Decayed),
    "together": of(Together),
    "drawing": of(Drawing),
    "distributed": of(Distributed),
    "mode": of(Mode, how="normalized"),
    "lbfgs": of(torch.optim.LBFGS),
    "positional": lambda model: Positional(0.05, model.parameters(), 0.7),
    "lookahead": wrapped("sgd"),
    "ahead": wrapped("adamw"),
    "normalized ahead": wrapped("normalized"),
    "sharpness": of(Sharpness, base_optimizer=torch.optim.SGD, lr=0.05, momentum=0.9),
    "sharpness by norm": of(SharpnessByNorm, base_optimizer=torch.optim.SGD, lr=0.05, momentum=0.9),
}


class Scale(nn.Module):
    """One number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def model() -> nn.Sequential:
    """Uneven rows, a kernel, a number without dimensions, a frozen layer, and one with fewer rows than ranks."""
    torch.manual_seed(0)
    frozen = nn.Linear(10, 10).requires_grad_(False)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, bias=False), nn.Flatten(), nn.Linear(12, 10), nn.Tanh(), frozen, nn.Linear(10, 7)),
        *(Scale(), nn.Tanh(), nn.Linear(7, 2)),
    ).double()


def prepared(strategy: str, optimizer: str, **options: Any) -> tutti.Run:
    """A run of 4 logical workers."""
    made = model()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 1, 4, 4, generator=generator, dtype=torch.float64)
    targets = torch.randn(16, 2, generator=generator, dtype=torch.float64)
    options = {"workers": 4, "batch_size": 8, **options}
    return tutti.prepare(made, OPTIMIZERS[optimizer](made), (inputs, targets), loss, strategy=strategy, **options)


def loss(model: Any, batch: Any) -> Any:
    """The mean over samples."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def state(run: tutti.Run) -> dict[str, Any]:
    """The whole model, as arrays."""
    return {name: tensor.numpy().copy() for name, tensor in run.state().items()}


def trained(strategy: str, optimizer: str, epochs: Iterable[int] = (0, 1), **options: Any) -> dict[str, Any]:
    """The model after two epochs of two steps."""
    run = prepared(strategy, optimizer, **options)
    for epoch in epochs:
        for batch in run.epoch(epoch):
            run.step(batch)
    return state(run)
