"""The loss of a model on fixed samples as a function of its parameters: value, gradient and Hessian-vector products.

Samples are cut into blocks that do not depend on the number of devices. A block's gradient or Hessian-vector product
is a leaf of the summation tree of ``tutti.comm.tree_sum``, so that sums are equal on any number of devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tutti.comm.communicator import Communicator
from tutti.comm.partition import chunks, even_share
from tutti.comm.random_keys import mix
from tutti.comm.tree_sum import TreeSum
from tutti.data.source import Source
from tutti.device import default_generator
from tutti.errors import UsageError
from tutti.launcher import heartbeat
from tutti.parallel.ddp.loss_output import check_trains, read_loss
from tutti.torch_compat import BatchNormBase, differentiable_once
from tutti.types.micro_batch import Batch, LossFn, LossSums, MicroBatch

_END, _VALUE, _GRADIENT, _PRODUCT = range(4)
_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class SurfaceValue:
    """Mean loss and metrics of a model over all samples of a data set, at one point in parameter space.

    Attributes:
        loss: mean loss.
        metrics: mean of each metric, by its name.
    """

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class SampleBlocks:
    """One rank's share of a data set's samples, in blocks: batches that one forward and backward computes.

    Attributes:
        batches: index of the block, its batch and its number of samples, for this rank's blocks in order.
        blocks: number of blocks on all ranks.
        samples: number of samples on all ranks.
    """

    batches: Sequence[tuple[int, Batch, int]]
    blocks: int
    samples: int


def sample_blocks(
    source: Source, samples: int | None, block: int, comm: Communicator, place: Callable[[Batch], Batch], seed: int
) -> SampleBlocks:
    """Draw samples without replacement, cut them into blocks and fetch this rank's blocks without augmentation.

    A block is a batch that is computed at once; the last one may be smaller. Each rank gets consecutive blocks; where
    ranks do not divide the number of blocks, the first ranks get one more. Sends nothing: equal arguments give all
    ranks the same random choice.

    Args:
        source: the data set.
        samples: number of samples to draw; all where the source has fewer, or None.
        block: number of samples in a block.
        comm: communicator of the data ranks, of which only size and rank are read.
        place: moves a batch to the device.
        seed: seed of the random choice.

    Returns:
        A ``SampleBlocks`` with the attributes ``batches``, a list of this rank's blocks, all on the device at once,
        each as a tuple of its index among the blocks of all ranks, the batch and its number of samples; ``blocks`` and
        ``samples``, the numbers of blocks and samples of all ranks together.

    Raises:
        UsageError: there are fewer blocks than ranks.
    """
    drawn = np.sort(np.random.default_rng([seed, len(source)]).permutation(len(source))[:samples])
    pieces = chunks(len(drawn), block)
    if len(pieces) < comm.size:
        raise UsageError(
            f"{len(drawn)} samples in blocks of {block} are {len(pieces)} blocks for {comm.size} devices",
            remedy="take a smaller --micro-batch, more --samples or fewer --devices",
        )
    mine = even_share(len(pieces), comm.size, comm.rank)
    batches = [(number, place(source.fetch(drawn[pieces[number]], None)), len(pieces[number])) for number in mine]
    return SampleBlocks(batches, len(pieces), len(drawn))


class LossSurface:
    """Computes the loss of a model on fixed samples, its gradient and Hessian products at points in parameter space.

    The samples are divided over all data ranks. Rank 0 calls ``value``, ``gradient`` and ``hessian_product``; all other
    ranks call ``serve`` and take part in these calls until rank 0 calls ``close``. Creating the object sends nothing. A
    point is a vector of ``size`` trained parameters, in the order of ``named_parameters``, followed by the model's
    other floating-point tensors (running statistics of batch norm, frozen parameters), which have no derivatives. The
    model is in the mode that ``for_landscape`` sets.

    Args:
        model: the whole model, on the device.
        loss: the loss function.
        sets: samples by name of the set; derivatives are those of the mean loss over the first set.
        comm: communicator of the data ranks.
        seed: seed of random draws in the loss function, keyed by block.
        counted: called with the kind of each pass, such as ``gradient``, on the rank that calls a method.

    Attributes:
        size: number of elements of the trained parameters.
        length: number of elements of a point.
        dtype, device: dtype and device of points and gradients, which are those of the first trained parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFn,
        sets: Mapping[str, SampleBlocks],
        comm: Communicator,
        seed: int = 0,
        counted: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._model, self._loss, self._sets, self._comm, self._seed = model, loss, dict(sets), comm, seed
        self._counted, self._count = counted, 1.0
        parameters = dict(model.named_parameters())
        self._trained = [p for p in parameters.values() if p.requires_grad]
        fixed: list[Tensor] = [p for p in parameters.values() if not p.requires_grad]
        fixed += [b for b in model.buffers() if b.is_floating_point()]
        self._tensors: list[Tensor] = [*self._trained, *fixed]
        self.size = sum(p.numel() for p in self._trained)
        self.length = sum(t.numel() for t in self._tensors)
        first = self._trained[0]
        self.dtype, self.device = first.dtype, first.device
        self._tree = TreeSum(comm, self._first.blocks, self.size, self.dtype)

    @property
    def _first(self) -> SampleBlocks:
        return next(iter(self._sets.values()))

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the sets of samples on which the model's loss is measured, such as ``training`` and ``held-out``.

        Gradients and Hessian products are computed on the first set.
        """
        return tuple(self._sets)

    @property
    def samples(self) -> dict[str, int]:
        """Number of samples, over all data ranks, of each set on which the loss is measured, by the set's name."""
        return {name: data.samples for name, data in self._sets.items()}

    def point(self) -> Tensor:
        """Return the model's current values as one vector: trainable parameters, then other floating-point tensors.

        Other tensors are frozen parameters and buffers. Sends nothing; the result is a copy.

        Returns:
            A new vector with an element for each number of all these tensors, in the dtype and on the device of the
            first trainable parameter. The trainable parameters are in the order of ``named_parameters``.
        """
        return torch.cat([t.detach().reshape(-1).to(self.dtype) for t in self._tensors])

    def value(self, point: Tensor, of: str | None = None) -> SurfaceValue:
        """Set the model to a point in parameter space, and return mean loss and metrics over a set of samples there.

        Collective over the data ranks: call it on rank 0, while the other data ranks compute their shares in ``serve``.
        Rank 0 broadcasts the kind of the pass and the point, and the loss sums are all-reduced. The point is copied
        into the model's tensors, which keep it. Before each block of samples the device's default random generator is
        seeded anew, so that equal points give equal losses.

        Args:
            point: flat vector of all parameters and floating-point buffers, in the layout of ``point()``.
            of: name of the set of samples; None for the first.

        Returns:
            A ``SurfaceValue``: ``loss``, the mean loss, and ``metrics``, the mean of each metric by name, over the
            samples of all data ranks.

        Raises:
            ValueError: no set of samples is called ``of``; nothing has been sent then.
            UsageError: the loss function returns something that is no loss.
            PeerError: a data rank is lost, or does not take part within the timeout.
        """
        number = self.sets.index(of or self.sets[0])
        self._ask(_VALUE, number, point)
        self._move(point)
        self._counted("loss")
        return self._value(number)

    def gradient(self, point: Tensor) -> tuple[SurfaceValue, Tensor]:
        """Set the model to a point in parameter space, and return mean loss, metrics and the loss's gradient there.

        The means are over the first set of samples, such as ``training``, of all data ranks. Collective over the data
        ranks: call it on rank 0, while the other data ranks compute their shares in ``serve``. Rank 0 broadcasts the
        kind of the pass and the point; loss sums and gradients are all-reduced (``TreeSum``). The point is copied into
        the model's tensors, which keep it; ``grad`` of the parameters is not written.

        Args:
            point: flat vector of all parameters and floating-point buffers, in the layout of ``point()``.

        Returns:
            A pair: a ``SurfaceValue`` of the means over all samples (``loss``, and ``metrics`` by name), and the
            gradient of the mean loss over the samples of all ranks: a new flat vector (``size``,) over the trainable
            parameters in the order of ``named_parameters``, zero for parameters that the loss does not use.

        Raises:
            UsageError: the loss does not depend on any trainable parameter.
            PeerError: a data rank is lost, or does not take part within the timeout.
        """
        self._ask(_GRADIENT, 0, point)
        self._move(point)
        self._counted("gradient")
        return self._gradient()

    def hessian_product(self, vector: Tensor) -> Tensor:
        """Return H·v for the Hessian H of the mean loss over the first set of samples, at the model's current point.

        The current point is the one to which the most recent ``value`` or ``gradient`` has set the model. Reverse mode
        twice (Pearlmutter 1994): the gradient of g·v, where g is the gradient. Collective over the data ranks: call it
        on rank 0, while the other data ranks compute their shares in ``serve``. Rank 0 broadcasts the kind of the pass
        and v; products are summed over the ranks in a fixed order, so that they are equal on any number of devices.

        Args:
            vector: v, a flat vector (``size``,) over the trainable parameters, in the dtype of ``point()``.

        Returns:
            H·v over the samples of all ranks, a new vector of the shape of v.

        Raises:
            UsageError: an operator of the model or the loss has no second derivative, or the loss does not depend on
                any trainable parameter.
            PeerError: a data rank is lost, or does not take part within the timeout.
        """
        self._ask(_PRODUCT, 0, vector)
        self._counted("Hessian-vector product")
        return self._product(vector)

    def serve(self) -> None:
        """Compute this rank's share of every loss, gradient and Hessian product of the model that rank 0 asks for.

        Call it on all data ranks but rank 0, while rank 0 calls ``value``, ``gradient`` or ``hessian_product``. Each
        pass starts with broadcasts from rank 0 (kind of the pass; point or direction), and the results are all-reduced
        over the data ranks. Blocks until rank 0 calls ``close``. The model keeps the point of the newest ``value`` or
        ``gradient``. Errors of a pass, such as UsageError of ``hessian_product``, are raised here too.

        Raises:
            PeerError: a data rank is lost, or does not take part within the timeout.
        """
        while True:
            asked = torch.zeros(2, dtype=torch.int64)
            self._comm.broadcast(asked, 0, "the next pass of the landscape")
            what, number = asked.tolist()
            if what == _END:
                return
            vector = torch.empty(self.size if what == _PRODUCT else self.length, dtype=self.dtype, device=self.device)
            self._comm.broadcast_unchecked(vector, 0, "point or direction of the landscape")
            if what == _PRODUCT:
                self._product(vector)
                continue
            self._move(vector)
            self._value(number) if what == _VALUE else self._gradient()

    def close(self) -> None:
        """End the measurement of a model's loss on rank 0: make ``serve`` return on all other data ranks.

        Collective over the data ranks: a broadcast from rank 0, which the other ranks receive in ``serve``. Call it on
        rank 0 alone.

        Raises:
            PeerError: a data rank is lost, or does not take part within the timeout.
        """
        self._ask(_END, 0, None)

    def _ask(self, what: int, number: int, vector: Tensor | None) -> None:
        self._comm.broadcast(torch.tensor([what, number]), 0, "the next pass of the landscape")
        if vector is not None:
            self._comm.broadcast_unchecked(vector, 0, "point or direction of the landscape")

    @torch.no_grad()
    def _move(self, point: Tensor) -> None:
        for tensor, piece in zip(self._tensors, point.split([t.numel() for t in self._tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))

    @torch.no_grad()
    def _value(self, number: int) -> SurfaceValue:
        data = self._sets[self.sets[number]]
        found = {block: self._objective(block, batch, count)[1] for block, batch, count in data.batches}
        return self._mean(found, data)

    def _gradient(self) -> tuple[SurfaceValue, Tensor]:
        found = {}
        for block, batch, count in self._first.batches:
            objective, found[block] = self._objective(block, batch, count)
            check_trains(objective)
            self._tree.add(block, self._flat(torch.autograd.grad(objective, self._trained, allow_unused=True)))
        mean = self._mean(found, self._first)
        return mean, self._tree.total().div_(self._count)

    def _product(self, vector: Tensor) -> Tensor:
        pieces = [
            piece.view(p.shape)
            for p, piece in zip(self._trained, vector.split([p.numel() for p in self._trained]), strict=True)
        ]
        found = {}
        for block, batch, count in self._first.batches:
            objective, found[block] = self._objective(block, batch, count)
            self._tree.add(block, self._flat(self._second(objective, pieces)))
        self._mean(found, self._first)
        return self._tree.total().div_(self._count)

    def _second(self, objective: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradient of (gradient of ``objective``) · ``pieces``; None where it is zero."""
        check_trains(objective)
        _check_twice_differentiable(objective)
        try:
            first = torch.autograd.grad(objective, self._trained, create_graph=True, allow_unused=True)
            terms = [(g * v).sum() for g, v in zip(first, pieces, strict=True) if g is not None and g.requires_grad]
            if not terms:
                return [None] * len(pieces)
            return torch.autograd.grad(torch.stack(terms).sum(), self._trained, allow_unused=True)
        except RuntimeError as error:
            raise _no_second_derivative(None, str(error).splitlines()[0]) from error

    def _objective(self, block: int, batch: Batch, samples: int) -> tuple[Tensor, LossSums]:
        """Return the sum of a block's losses, recorded for autograd, and its loss sums."""
        heartbeat.training.beat()
        default_generator(self.device).manual_seed(mix(self._seed, block) & _MASK)
        micro_batch = MicroBatch(0, block, batch, samples, 1.0, 0, True)
        with _derivable():
            objective, start, sums = read_loss(self._loss(self._model, batch), micro_batch)
            return (objective * start).sum(), sums

    def _mean(self, found: Mapping[int, LossSums], data: SampleBlocks) -> SurfaceValue:
        """Return the means over all ranks' blocks, added in the order of the blocks. Collective: an all-reduce."""
        names = next(iter(found.values())).names
        table = torch.zeros(data.blocks, 2 + len(names), dtype=torch.float64)
        for block, part in found.items():
            table[block] = part.sums.cpu().double()
        self._comm.all_reduce(table, "loss sums of the landscape")
        loss, self._count, *metrics = table.sum(dim=0).tolist()
        return SurfaceValue(loss / self._count, {n: v / self._count for n, v in zip(names, metrics, strict=True)})

    def _flat(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return torch.cat(
            [
                (torch.zeros_like(p) if t is None else t).detach().reshape(-1)
                for p, t in zip(self._trained, tensors, strict=True)
            ]
        )


def for_landscape(model: nn.Module, batch_statistics: bool) -> nn.Module:
    """Set a model to evaluation mode, in place, for measuring its loss landscape: without dropout.

    Batch norms take their running statistics, or those of each block of samples; running statistics do not change. The
    change is not undone: with ``batch_statistics``, batch norms no longer track running statistics.

    Args:
        model: the model, which is returned.
        batch_statistics: let batch norms take the statistics of each block of samples (a batch that is computed at
            once); False: their running statistics.

    Returns:
        ``model`` itself.
    """
    model.eval()
    for module in model.modules():
        if batch_statistics and isinstance(module, BatchNormBase):
            module.train()
            # With this flag off and in training mode, PyTorch neither reads nor updates the running statistics.
            module.track_running_stats = False
    return model


@contextlib.contextmanager
def _derivable() -> Iterator[None]:
    """Within the block, attention takes the implementation that can be differentiated twice."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _check_twice_differentiable(objective: Tensor) -> None:
    """Raise UsageError if an autograd function between parameters and loss allows one backward only."""
    names, seen, nodes = set(), set(), [objective.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := differentiable_once(node)) is not None:
            names.add(name)
        nodes += [following for following, _ in node.next_functions]
    if names:
        raise _no_second_derivative(", ".join(sorted(names)), "its backward is marked as once_differentiable")


def _no_second_derivative(where: str | None, why: str) -> UsageError:
    return UsageError(
        "an operator of the model or the loss has no second derivative",
        where=where,
        why=why,
        remedy="write its backward with differentiable operations, or leave curvature out by --parts "
        "sharpness,line,plane",
    )
