"""Put a model that cannot be cut into stages on the last stage as a whole, beside other models that are cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from tutti.parallel.pipeline.recorded_stage import hold_tensors
from tutti.torch_compat import uncompiled_call


class WholeForward:
    """Forward of a model that cannot be cut, which one pipeline stage computes; a substitute for a ``ForwardRecord``.

    Args:
        plain: the whole model.

    Attributes:
        buffers: empty: no buffer is read on several stages.
        writes_inputs: False: no forward has been recorded, so that writes to the model's arguments are not known
            beforehand.
    """

    buffers: frozenset[str] = frozenset()
    writes_inputs = False

    def __init__(self, plain: nn.Module) -> None:
        self._plain = plain

    def graph(self) -> fx.Graph:
        """Return a new graph of three nodes: a placeholder for all inputs, a call of the whole model, and the output.

        The call is a ``call_module`` node, whose target "" is the model itself.
        """
        graph = fx.Graph()
        inputs = graph.placeholder("inputs")
        graph.output(graph.create_node("call_module", "", (inputs,), name="whole"))
        return graph

    def stage(self, nodes: Sequence[fx.Node], incoming: Sequence[fx.Node], outgoing: Sequence[fx.Node]) -> WholeStage:
        """Return the module of one virtual pipeline stage of a model that is not cut. Not collective.

        One stage computes the whole model, and all other stages compute nothing. ``ForwardRecord.stage``, for models
        that are cut, takes the same arguments.

        Args:
            nodes: the only node of ``graph()``, for the stage that computes the model; empty for all other stages.
            incoming: unused; no stage receives activations.
            outgoing: unused; no stage sends activations.

        Returns:
            An ``nn.Module`` without parameters of its own. With ``nodes`` its forward calls the model and returns the
            model's output; without, its forward returns an empty tuple.
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
        """The model that this stage computes, the object itself, not a copy; None if the stage computes nothing."""
        return self._plain[0]

    def hold(self, names: Iterable[str], plain: nn.Module) -> None:
        """Register tensors of the whole model on this module if its stage computes nothing; otherwise do nothing.

        A stage that computes the model has all tensors of the model already.

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
            values: activations from the previous stage; always empty, as only one stage computes the model.
        """
        return () if self.whole is None else uncompiled_call(self.whole)(*args, **kwargs)
