"""Tensors that are split over ranks and look whole: what is computed on shares equals what is computed on the whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import worlds
from tutti.comm.differentiable import TensorRanks
from tutti.comm.mesh_communicators import Communicators
from tutti.comm.rank_mesh import RankMesh
from tutti.errors import UsageError
from tutti.launcher import context
from tutti.parallel.tensor.split_tensor import SplitTensor
from tutti.parallel.tensor.tensor_slice import LayerSlice

CLASSES = 7
TARGETS = torch.tensor([[0, 6, 3, 3], [-100, 2, 5, 1], [4, 4, -100, 6]])
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda s: functional.cross_entropy(s.flatten(0, 1), TARGETS.flatten()),
    "sum": lambda s: functional.cross_entropy(s.view(-1, CLASSES), TARGETS.view(-1), reduction="sum"),
    "none": lambda s: functional.cross_entropy(s.flatten(0, 1), TARGETS.flatten(), reduction="none").square().sum(),
    "classes second": lambda s: functional.cross_entropy(s.transpose(1, 2), TARGETS),
    "classes second, permuted": lambda s: nn.CrossEntropyLoss(reduction="sum")(s.permute(0, 2, 1), TARGETS),
    "ignored": lambda s: functional.cross_entropy(s.flatten(0, 1), TARGETS.flatten().clamp(min=0), ignore_index=3),
    "smooth": lambda s: functional.cross_entropy(s.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.2),
    "weights": lambda s: functional.cross_entropy(s.flatten(0, 1), TARGETS.flatten(), _weights()),
    "weights and smooth": lambda s: functional.cross_entropy(
        s.flatten(0, 1), TARGETS.flatten(), _weights(), label_smoothing=0.2
    ),
    "soft targets": lambda s: functional.cross_entropy(s[:, 0], torch.full((3, CLASSES), 1 / CLASSES).double()),
    "shifted": lambda s: functional.cross_entropy(
        s[..., :-1, :].contiguous().view(-1, CLASSES), TARGETS[:, 1:].flatten()
    ),
    "of one": lambda s: functional.cross_entropy(s[0, 1], TARGETS[0, 1]),
    "tempered": lambda s: functional.cross_entropy((s / 0.5).tanh().flatten(0, 1), TARGETS.flatten()),
    "large": lambda s: functional.cross_entropy(1e4 * s.flatten(0, 1), TARGETS.flatten()),
    "masked": lambda s: functional.cross_entropy(
        s.masked_fill(torch.arange(CLASSES) == 5, -math.inf)[:1].flatten(0, 1), TARGETS[0]
    ),
    "likelihood": lambda s: functional.nll_loss(s.log_softmax(-1).flatten(0, 1), TARGETS.flatten()),
}
WHOLE = ("weights and smooth", "soft targets", "masked", "likelihood")
"""Those for which scores are gathered."""


def _weights() -> Tensor:
    return torch.linspace(0.5, 2, CLASSES).double()


def ranks() -> TensorRanks:
    world = context.current()
    mesh = RankMesh(tensor=world.identity.size, rank=world.identity.rank)
    return TensorRanks(Communicators(world, mesh).axis("tensor"))


def share(whole: Tensor, dim: int, line: TensorRanks) -> tuple[Tensor, SplitTensor, LayerSlice]:
    """This rank's share of ``whole`` as a leaf, and as what looks whole."""
    place = LayerSlice("a layer", line, whole.shape[dim])
    leaf = whole.narrow(dim, place.mine.start, len(place.mine)).clone().requires_grad_()
    return leaf, SplitTensor.of(leaf * 1, dim, place), place


def scores() -> Tensor:
    return torch.randn(3, 4, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def losses() -> dict[str, tuple[float, float, float, int]]:
    """Of each loss the difference of value and gradient from one device's, relative; and the largest message."""
    line, found = ranks(), {}
    all_ = line.all_gather_detached
    for name, loss in LOSSES.items():
        largest = 0

        def noted(part: Tensor, *rest: Any) -> Tensor:
            nonlocal largest
            largest = max(largest, part.numel() * line.size)
            return all_(part, *rest)

        line.all_gather_detached = noted  # type: ignore[method-assign]
        whole = scores().requires_grad_()
        want = loss(whole)
        want.backward()
        leaf, split, place = share(whole.detach(), -1, line)
        got = loss(split)
        got.backward()
        assert type(got) is Tensor and whole.grad is not None and leaf.grad is not None
        gradient = whole.grad[..., place.mine.start : place.mine.stop]
        found[name] = float(got - want), float((leaf.grad - gradient).abs().max()), float(want), largest
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_losses_of_split_classes(size: int) -> None:
    for answer in worlds.run(size, losses):
        for name, (value, gradient, scale, largest) in answer.items():
            assert abs(value) <= 1e-13 * max(1, abs(scale)), name
            assert gradient <= 1e-13 * (1e4 if name == "large" else 1), name
            sent = 12 * 3 * size
            assert largest <= sent or name in WHOLE, f"{name}: whole scores were gathered"


def best() -> list[Any]:
    """The best classes, of equal scores and of scores that are no numbers too."""
    line, whole = ranks(), scores()
    whole[0, 0] = 1.0
    whole[0, 1, 5] = whole[0, 1, 1] = 9.0
    whole[0, 2, 4] = math.nan
    _, split, _ = share(whole, -1, line)
    answers = []
    for x in (whole, split):
        values, classes = x.max(-1)
        answers.append(
            [x.argmax(-1), x.detach().argmax(dim=2, keepdim=True), values, classes, x.flatten(0, 1).max(1)[1]]
        )
    return [torch.equal(a.nan_to_num(), b.nan_to_num()) and type(b) is Tensor for a, b in zip(*answers, strict=True)]


def test_best_of_split_classes() -> None:
    for answer in worlds.run(3, best):
        assert answer == [True] * 5


def wrong() -> str:
    _, split, _ = share(scores(), -1, ranks())
    try:
        functional.cross_entropy(split.flatten(0, 1), torch.full((12,), CLASSES))
    except IndexError as error:
        return str(error)
    return ""


def test_a_target_that_is_no_class() -> None:
    assert all("not one of the 7 classes" in said for said in worlds.run(2, wrong))


class Layers(nn.Module):
    """What may stand between split layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.root, self.shift = nn.RMSNorm(6), nn.Parameter(torch.randn(8, 6))
        self.scale, self.number = nn.Parameter(torch.randn(6)), nn.Parameter(torch.tensor(1.5))
        self.double()


def _in_place(m: Layers, x: Tensor) -> Tensor:
    x = x * 1
    same = x
    x += m.norm(m.shift)
    functional.relu(x, inplace=True)
    return same * 2


def _beside(m: Layers, x: Tensor) -> Tensor:
    whole = m.shift.expand(2, 8, 6) * 1
    whole += x
    return whole.cumsum(1)


def _through_views(m: Layers, x: Tensor) -> Tensor:
    x = x * 1
    turned = x.transpose(0, 1)
    x[:, 1:4].mul_(m.scale)
    x.unsqueeze(0).select(-1, 2).add_(m.number)
    part = x.narrow(1, 4, 4)
    part.sub_(2)
    total = part.sum()
    del part
    with torch.no_grad():
        torch.add(m.shift, 1, out=x.data[1])
        torch._foreach_mul_([x.data], 3)
    return m.norm(x) + turned.square().transpose(0, 1) + x.detach() * total


PLACES: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "norm": lambda m, x: x + m.norm(x),
    "root norm": lambda m, x: m.root(x).tanh(),
    "linear": lambda m, x: functional.gelu(m.linear(x)) * x,
    "broadcast": lambda m, x: (x + m.shift) * m.scale + m.number,
    "from the left": lambda m, x: m.scale * x - m.shift / (1 + x.square()),
    "numbers": lambda m, x: 2 - (3 * x) ** 2 / 7,
    "over positions": lambda m, x: functional.layer_norm(x, (8, 6)) + x.softmax(1),
    "views": lambda m, x: x.transpose(0, 1).reshape(8, -1).view(8, 2, 6).permute(1, 0, 2).flatten(0, 1),
    "items": lambda m, x: torch.cat([x[:, -1], x[0, :2], x[..., 3].t()[:, :1].expand(-1, 6), x[1]]),
    "shape": lambda m, x: x.view(x.shape[0], x.size(1), 2, x.size(-1) // 2).sum(2) * len(x) * x.numel(),
    "mean": lambda m, x: x - x.mean(1, keepdim=True) + x.std(),
    "product": lambda m, x: x @ x.mT,
    "in place": _in_place,
    "beside": _beside,
    "in place, through views": _through_views,
    "two": lambda m, x: m.norm(x) * m.linear(x) + x.transpose(0, 1).transpose(0, 1),
    "other dimension": lambda m, x: x[:, :2] + x[:, :2].transpose(0, 1),
    "converted": lambda m, x: x.float().double().to(torch.float64).contiguous().clone() + x.detach() + x.data,
    "dropped": lambda m, x: functional.dropout(x, 0.4) + functional.dropout(m.norm(x), 0.2, True, True),
    "dropped, other memory": lambda m, x: functional.dropout(x.transpose(0, 1) * 2, 0.4),
}


def places() -> dict[str, float]:
    """The largest difference of outputs and gradients from one device's."""
    line, found = ranks(), {}
    whole = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    for name, function in PLACES.items():
        models = Layers(), Layers()
        whole.grad = None
        leaf, split, place = share(whole.detach(), 1, line)
        outputs = []
        for m, x in zip(models, (whole, split), strict=True):
            torch.manual_seed(2)
            out = function(m, x)
            (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
            outputs.append(out.detach() * 1.0 + torch.zeros(1))
        assert whole.grad is not None and leaf.grad is not None
        differences = [outputs[0] - outputs[1] * torch.ones(1)]
        differences.append(whole.grad[:, place.mine.start : place.mine.stop] - leaf.grad)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                differences.append(p.grad - q.grad)
        found[name] = max(float(copy.copy(d).abs().max()) for d in differences)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_places_one_by_one(size: int) -> None:
    """Values, gradients of the input's share, and gradients of parameters summed over ranks."""
    for answer in worlds.run(size, places):
        assert {name: d for name, d in answer.items() if not d <= 1e-12} == {}


def _with_a_view(x: Tensor) -> list[Tensor]:
    return [x[:2, 1:], x.exp_()]


def changed() -> list[str]:
    said = []
    writes = (lambda x: x.__setitem__((0, 0), 1), lambda x: x.cumsum_(1), lambda x: _with_a_view(x.transpose(1, 2)))
    for change in (*writes, lambda x: x.register_hook(print)):
        try:
            change(share(scores(), -1, ranks())[1])
        except UsageError as error:
            said.append(str(error))
    return said


def test_what_would_be_lost_is_refused() -> None:
    for said in worlds.run(2, changed):
        assert len(said) == 4 and all("tensor:whole=a layer" in text for text in said)
        assert ["in place" in text or "takes the gradient" in text for text in said] == [True] * 4
