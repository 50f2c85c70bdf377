"""Tensor-parallel layers, each with the names and parameters of its plain layer, which are sliced.

``divide`` gives a plain layer a subclass of its own class: hooks, copies and the model around it stay as they were.
Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et al. 2022, arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import functional

from tutti.errors import UsageError
from tutti.nn.eager_layer import EagerLayer
from tutti.nn.forward_hooks import find_script_hook
from tutti.parallel.tensor.linear_layer import FormulaLinear, matrix
from tutti.parallel.tensor.split_tensor import SplitTensor, copied, local_part, summed
from tutti.parallel.tensor.tensor_slice import LayerSlice, dropped, mark_local, unmark_local
from tutti.torch_compat import ConvBase


class TensorParallelLayer(EagerLayer):
    """Base class of layers whose parameters and forward are those of this tensor-parallel rank's slice.

    Attributes:
        tutti_slice: which slice of the layer this rank has, and the ranks that have the others.
    """

    tutti_slice: LayerSlice


class ColumnParallelLinear(TensorParallelLayer):
    """A linear layer split by outputs: whole inputs → this rank's outputs.

    Collective over the tensor ranks in backward alone: an all-reduce of the inputs' gradient.

    Attributes:
        tutti_hookable: names and modules, up to the row-parallel layer, whose forward hooks would be given slices.
        tutti_compiled: whether the modules after this layer are compiled, and take no ``SplitTensor``.
        tutti_sections: sizes of the parts of all outputs that are split alike, such as queries, keys and values; none
            for one part.
    """

    tutti_hookable: Sequence[tuple[str, nn.Module]] = ()
    tutti_compiled: bool = False
    tutti_sections: tuple[int, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's outputs of a linear layer split by outputs: (…, inputs) → (…, outputs here).

        The input is whole on every rank, so that forward sends nothing; backward all-reduces its gradient over the
        tensor ranks. A ``SplitTensor`` as input is all-gathered first, and its gradient reduce-scattered.

        Args:
            input: (…, inputs), equal on all tensor ranks, or a ``SplitTensor`` of this shape.

        Returns:
            A plain tensor of this rank's outputs. Where the script has put forward hooks on this layer, or on modules
            up to the row-parallel layer, a ``SplitTensor`` of them, which the hooks see as the whole outputs.

        Raises:
            UsageError: there are such hooks, but they cannot be given whole outputs: the layer is split by heads of
                several features, or the modules after it are compiled.
        """
        result: Tensor = super().forward(copied(input, self.tutti_slice))
        hooked = find_script_hook(self.tutti_hookable)
        if hooked is None:
            mark_local(result, self.tutti_sections)
            return result
        if self.tutti_compiled or result.shape[-1] != len(self.tutti_slice.mine):
            refuse_hook(*hooked, self.tutti_slice.name)
        for _, module in self.tutti_hookable:
            if isinstance(module, ParallelDropout):
                module.tutti_by_feature = True
        return SplitTensor.of(result, -1, self.tutti_slice)


class RowParallelLinear(TensorParallelLayer):
    """A linear layer split by inputs: this rank's inputs → whole outputs. The bias is whole on every rank.

    Collective over the tensor ranks: an all-reduce of the outputs, or a reduce-scatter with sequence parallelism.

    Attributes:
        weight: this rank's columns, (outputs, inputs here), or transposed as in the layer that was split.
        bias: (outputs,), the same on every rank; None for none.
    """

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Compute whole outputs of a linear layer split by inputs: (…, inputs here) → (…, outputs).

        Collective over the tensor ranks: an all-reduce of their partial outputs; backward sends nothing. With sequence
        parallelism the ranks reduce-scatter instead, and backward all-gathers the gradient. (An input of fewer than two
        positions a rank, or of two dimensions, is all-reduced also then.)

        Args:
            input: this rank's slice of the inputs. A whole input, which the script may have computed, is cut to the
                slice; its backward all-gathers. A ``SplitTensor`` gives its slice, or is all-gathered and then cut if
                it is split along another dimension than the last.

        Returns:
            The outputs, equal on all tensor ranks; after a reduce-scatter a ``SplitTensor``, of which each rank holds
            the outputs of its own positions.

        Raises:
            UsageError: an autograd function of the script has returned the input as a ``SplitTensor``.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        weight = matrix(self)
        part = functional.linear(local_part(input, weight.shape[1], self.tutti_slice), weight)
        whole = summed(part, self.tutti_slice)
        # The bias, and what the block computes next, are the same on every rank.
        unmark_local(whole)
        return whole if self.bias is None else whole + self.bias.to(whole.dtype)


class GatheredOutput(TensorParallelLayer):
    """A linear or convolution layer split by outputs: whole inputs → whole outputs.

    Collective over the tensor ranks: an all-gather of the outputs in forward, an all-reduce of the inputs' gradient in
    backward.
    """

    def forward(self, input: Tensor, *rest: Any, **options: Any) -> Tensor:
        """Compute the whole outputs of a linear or convolution layer that is split by outputs over ranks.

        Collective over the tensor ranks: an all-gather of their outputs; in backward an all-reduce of the inputs'
        gradient.

        Args:
            input: the whole input, equal on all tensor ranks, or a ``SplitTensor`` of it, which is all-gathered.
            rest, options: further arguments of the unsplit layer's forward, such as ``output_size`` of a transposed
                convolution.

        Returns:
            The output of the unsplit layer, a plain tensor, equal on all tensor ranks.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        name, ranks, length, _ = self.tutti_slice
        part = super().forward(copied(input, self.tutti_slice), *rest, **options)
        dim = -1 - len(self.kernel_size) if isinstance(self, ConvBase) else -1
        return ranks.all_gather(part, part.dim() + dim, length, name)


class WidenedLayer(TensorParallelLayer):
    """A layer between split layers that needs all features, such as a norm over the features of all heads (OLMo 2).

    Its parameters are whole on every rank; the block around it sums their gradients. Collective over the tensor ranks:
    an all-gather of the input in forward, a reduce-scatter of its gradient in backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's features of a layer that needs all features: (…, features here) → the same shape.

        Collective over the tensor ranks: an all-gather of the input; backward reduce-scatters its gradient.

        Args:
            input: this rank's slice of the features, as a column-parallel layer returns them.

        Returns:
            This rank's slice of the whole layer's output.

        Raises:
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        name, ranks, units, _ = self.tutti_slice
        mine = self.tutti_slice.mine
        each = input.shape[-1] // len(mine)
        split = input.unflatten(-1, (len(mine), each))
        whole = ranks.all_gather_input(split, split.dim() - 2, units, name).flatten(-2)
        part: Tensor = super().forward(whole).narrow(-1, each * mine.start, each * len(mine))
        mark_local(part)
        return part


class LossParallelLinear(TensorParallelLayer):
    """The last linear layer, split by outputs (classes): whole inputs → scores of this rank's classes, never gathered.

    Cross-entropy then all-gathers two or three numbers for each position (loss parallelism).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's logits in the last linear layer, which is split by classes: (…, inputs) → (…, classes).

        Forward sends nothing; backward all-reduces the inputs' gradient over the tensor ranks. A ``SplitTensor`` as
        input is all-gathered first, and its gradient reduce-scattered.

        Args:
            input: (…, inputs), equal on all tensor ranks, or a ``SplitTensor`` of this shape.

        Returns:
            A ``SplitTensor`` of the shape of all classes, of which each rank holds the logits of its own classes.
        """
        return SplitTensor.of(super().forward(copied(input, self.tutti_slice)), -1, self.tutti_slice)


class VocabParallelEmbedding(TensorParallelLayer):
    """An embedding split by rows of its table over ranks: indices → whole embeddings, which are summed over the ranks.

    Collective over the tensor ranks: an all-reduce, or a reduce-scatter with sequence parallelism.

    Attributes:
        weight: this rank's rows of the table, (rows here, features).
        padding_idx: index in the whole table whose embedding gets no gradient; None for none.
    """

    weight: Tensor
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        """Look up whole embeddings in a table split by rows over the tensor ranks: indices (…) → (…, features).

        Collective over the tensor ranks: an all-reduce; each rank contributes the rows that it holds, and zeros for
        other indices. With sequence parallelism the ranks reduce-scatter instead, and backward all-gathers the
        gradient; embeddings of fewer than two positions a rank, or of two dimensions, are all-reduced also then.

        Args:
            input: indices of rows of the whole table, equal on all tensor ranks.

        Returns:
            The embeddings, equal on all tensor ranks; after a reduce-scatter a ``SplitTensor``, of which each rank
            holds the embeddings of its own positions.

        Raises:
            IndexError: on a CPU, an index is outside of the whole table, as ``torch.nn.Embedding`` raises; on an
                accelerator its assertion fails.
            PeerError: a rank is lost, or does not take part within the timeout.
        """
        mine, padding = self.tutti_slice.mine, self.padding_idx
        # An index outside of the table is no other rank's: the look-up below refuses it on every rank.
        before, after = (input >= 0) & (input < mine.start), (input >= mine.stop) & (input < self.tutti_slice.length)
        elsewhere = before | after
        rows = (input - mine.start).masked_fill(elsewhere, 0)
        own = padding - mine.start if padding is not None and padding in mine else None
        part = functional.embedding(rows, self.weight, own).masked_fill(elsewhere.unsqueeze(-1), 0)
        return summed(part, self.tutti_slice)


class ParallelDropout(TensorParallelLayer):
    """Dropout on this rank's slice of the features, with the masks that one device draws for all features.

    Attributes:
        p: probability that a feature is set to zero.
        tutti_by_feature: whether ``tutti_slice`` counts features, so that a whole input can be told from a slice.
    """

    p: float
    tutti_by_feature: bool = False

    def forward(self, input: Tensor) -> Tensor:
        """Apply dropout to this tensor-parallel rank's slice of the features: (…, features here) → the same shape.

        Not collective: each rank draws the mask of all features, from equal RNG states, so that masks are those of one
        device. In evaluation, and for ``p`` 0, the features stay as they are.

        Args:
            input: this rank's slice, or a ``SplitTensor``. Where ``tutti_by_feature`` is True, also the whole tensor,
                which gets dropout as on one device.

        Returns:
            The features after dropout, a slice, ``SplitTensor`` or whole tensor as ``input`` is.
        """
        if not self.training or self.p == 0.0:
            return functional.dropout(input, self.p, False)
        # A forward hook of the script may have returned the whole tensor.
        whole = self.tutti_by_feature and input.shape[-1] == self.tutti_slice.length
        if isinstance(input, SplitTensor) or whole:
            return functional.dropout(input, self.p, True)
        return dropped(input, self.p, input.dim() - 1, self.tutti_slice)


def refuse_hook(name: str, place: str, layer: str) -> NoReturn:
    """Raise UsageError for a script's forward hook that would be given this tensor-parallel rank's slice of a tensor.

    Args:
        name: name of the module with the hook.
        place: place of the hook's definition, as text for the message.
        layer: name of the split layer or block that the module belongs to.

    Raises:
        UsageError: always; the message proposes to register the hook before ``tutti.prepare``, to leave the layer
            whole, or to take the strategy ``mirrored``.
    """
    raise UsageError(
        f"the strategy cannot be combined with the forward hook on {name}",
        where=place,
        why="the module computes on this rank's heads or features, so that the hook would be given a slice",
        remedy="register the hook before tutti.prepare, which then leaves the layers around it whole, or leave them"
        f" whole by tensor:whole={layer}; or take strategy='mirrored'",
    )


_BY_OUTPUTS = (ColumnParallelLinear, GatheredOutput, LossParallelLinear)


def divide(module: nn.Module, kind: type[TensorParallelLayer], slice_: LayerSlice) -> None:
    """Convert an unsplit layer into a tensor-parallel layer, in place, by a subclass of its own class.

    The layer's class changes, and its attribute ``tutti_slice`` is set. The parameters keep their values and shapes:
    the caller replaces them by this rank's slices. Not collective.

    Args:
        module: the layer.
        kind: tensor-parallel class; the layer's new class inherits from it first and then from the old class.
        slice_: which slice of the layer this rank has.
    """
    plain = type(module)
    body = {"__module__": plain.__module__, "_whole": plain}
    # The forward of a class from outside of PyTorch may have the number of all outputs.
    own = kind in _BY_OUTPUTS and plain is not nn.Linear and not isinstance(module, ConvBase)
    between = (FormulaLinear,) if own else ()
    module.__class__ = type(f"{kind.__name__}{plain.__name__}", (kind, *between, plain), body)
    module.tutti_slice = slice_  # type: ignore[assignment]
