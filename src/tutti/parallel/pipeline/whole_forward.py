"""Put a model that cannot be cut into stages on the last stage as a whole, beside other models that are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from tutti.parallel.pipeline.recorded_forward import hold_tensors
from tutti.torch_compat import uncompiled_call


class WholeForward:
    """The forward of a model that one pipeline stage computes alone, in the form of a ``ForwardRecord``.

    Args:
        plain: the whole model.

    Attributes:
        buffers: empty: no buffer is read on several stages.
        writes_inputs: False: each call looks by itself for writes to its arguments.
    """

    buffers: frozenset[str] = frozenset()
    writes_inputs = False

    def __init__(self, plain: nn.Module) -> None:
        self._plain = plain

    def graph(self) -> fx.Graph:
        """Return a graph of one node, a call of the whole model, whose name is ""."""
        graph = fx.Graph()
        inputs = graph.placeholder("inputs")
        graph.output(graph.create_node("call_module", "", (inputs,), name="whole"))
        return graph

    def stage(self, nodes: Sequence[fx.Node], incoming: Sequence[fx.Node], outgoing: Sequence[fx.Node]) -> WholeStage:
        """Make the module of one virtual pipeline stage of a model that is not cut: all of it, or nothing. Local.

        A module of all of it takes the model's inputs and returns its output; one of nothing has no parameters and
        returns an empty tuple. ``ForwardRecord.stage``, for models that are cut, takes the same arguments.

        Args:
            nodes: the only node of ``graph()``, for the stage that computes the model; empty for all others.
            incoming: unused; no stage receives activations.
            outgoing: unused; no stage sends activations.
        """
        return WholeStage(self._plain if nodes else None)


class WholeStage(nn.Module):
    """Module of a virtual pipeline stage that computes a whole model, or nothing.

    Args:
        plain: the whole model; None for a stage that computes nothing.
    """

    def __init__(self, plain: nn.Module | None) -> None:
        super().__init__()
        self._plain = (plain,)  # in a tuple: the model keeps its place in the prepared module

    @property
    def whole(self) -> nn.Module | None:
        """The whole model; None on a stage that computes nothing."""
        return self._plain[0]

    def hold(self, names: Iterable[str], plain: nn.Module) -> None:
        """Register tensors of the whole model on a stage that computes nothing; another has all of them already.

        Args:
            names: names of the tensors in the whole model.
            plain: the whole model; the tensors are shared with it, not copied.
        """
        if self.whole is None:
            hold_tensors(self, names, plain)

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *values: Any) -> Any:
        """Return the model's output, or an empty tuple on a stage that computes nothing.

        Args:
            args: positional arguments of the model's call.
            kwargs: keyword arguments of the model's call.
            values: empty.
        """
        return () if self.whole is None else uncompiled_call(self.whole)(*args, **kwargs)
