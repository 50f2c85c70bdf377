"""The model that a user's loss function calls on a pipeline stage: it computes this stage alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from tutti.comm.single_call import single_call
from tutti.errors import TuttiError, UsageError, script_line_of
from tutti.parallel.pipeline.stage_passes import MicroBatchState, StagePasses, StageReached
from tutti.python_compat import calling_frame
from tutti.types.micro_batch import LossFn


class StageRelay:
    """Stands in for the model that the user's loss function calls, and computes one virtual stage of it.

    A loss function may catch exceptions. The relay therefore records that this stage has sent its activations, or that
    the model has failed, and decides by these records, not by the loss function's result or exception.

    Args:
        passes: passes the model's activations between the stages.

    Attributes:
        called: whether the loss function has called the model since ``enter``.
        computed: whether this call has begun to compute the stage.
    """

    def __init__(self, passes: StagePasses) -> None:
        self._passes = passes
        self._names = list(inspect.signature(passes.model.forward).parameters)
        self.called = self.computed = self._handed_over = False
        self._failure: tuple[Exception, str] | None = None

    def enter(self, stage: int, flight: MicroBatchState) -> None:
        """Let the next call of this stand-in for the model compute the given virtual stage on a micro-batch.

        Args:
            stage: index of the virtual stage in the whole model; this rank holds the stage.
            flight: state of the micro-batch on this stage.
        """
        self._stage, self._flight, self.called, self.computed = stage, flight, False, False
        self._handed_over, self._failure = False, None

    def call(self, loss: LossFn, batch: Any) -> Any:
        """Call the loss function with this stand-in for the model, which computes one virtual pipeline stage.

        Args:
            loss: the user's loss function ``loss_fn(model, batch)``.
            batch: the micro-batch.

        Returns:
            The loss function's result; None on a stage that has sent its activations to the next one.

        Raises:
            TuttiError: the loss function has caught an error of the model and gone on; the error itself if it is a
                ``TuttiError``, else a ``UsageError``.
            UsageError: after its call of the model, the loss function reads an attribute of a module that does not
                exist on the last stage, as one that a forward or a hook on another stage has set.
            Exception: any error that the loss function lets through.
        """
        reads = self._passes.replica.script_parameters
        try:
            # The loss function goes on after its call of the model on the last stage alone.
            reads.apart = True
            result = loss(self, batch)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            if self._failure is not None and isinstance(self._failure[0], TuttiError):
                raise self._failure[0] from None
            # A loss function that catches StageReached goes on without an output, and may fail in any way.
            if not self._handed_over:
                if self.called and isinstance(raised, AttributeError) and isinstance(raised.obj, nn.Module):
                    _refuse_attribute(raised)
                raise
            result = None
        finally:
            reads.apart = False
        if self._failure is not None:
            error, place = self._failure
            if isinstance(error, TuttiError):
                raise error
            raise UsageError(
                "the loss function continues after an error of the model",
                where=place,
                why=f"{type(error).__name__}: {error}; the other stages cannot know what it does instead",
                remedy="let the error propagate, look at the batch before calling the model, or take"
                " strategy='mirrored'",
            ) from error
        return None if self._handed_over else result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the stage on a micro-batch; return the model's output on the last stage, else raise StageReached."""
        if self._handed_over:
            raise StageReached
        try:
            with self._passes.replica.model_code():
                return self._called(args, kwargs)
        except StageReached:
            self._handed_over = True
            raise
        except Exception as error:
            caller = calling_frame(1)
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            self._failure = self._failure or (error, place)
            raise

    @single_call
    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run this stage's forward. Raises UsageError for a second call, and for arguments that stages cannot take."""
        if self.called:
            raise UsageError(
                "the loss function calls the model twice",
                why="it called it once for the first micro-batch, and every stage has left it after this call",
                remedy="call it as often for every batch, or once, as model(torch.cat([first, second])); or take"
                " strategy='mirrored'",
            )
        self.called = True
        given = self._passes.bind(args, kwargs)
        tensors = {**dict(zip(self._names, args, strict=False)), **kwargs}
        asked = next((n for n, v in tensors.items() if isinstance(v, Tensor) and v.requires_grad), None)
        if asked is not None:
            raise UsageError(
                f"the loss function asks for the gradient of the model's input '{asked}'",
                why="the gradient would have to return through all stages before the loss function continues",
                remedy="give the model inputs that do not require a gradient, or take strategy='mirrored'",
            )
        self.computed = True
        return self._passes.compute(self._flight, self._stage, given)

    def __getattr__(self, name: str) -> Any:
        # Of the whole model, whose placeholders refuse to be read: a penalty on all weights is none on some of them.
        owner = self._passes.virtual_stages[0].module if name == "training" else self._passes.model
        return getattr(owner, name)

    def __getitem__(self, index: Any) -> Any:
        return self._passes.model[index]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        yield from self._passes.model  # type: ignore[misc]


def _refuse_attribute(error: AttributeError) -> NoReturn:
    """Raise UsageError: the loss function reads an attribute of a module that does not exist on the last stage."""
    raise UsageError(
        f"the loss function reads '{error.name}' of the model ({type(error.obj).__name__}), which the last stage of the"
        " model does not have",
        where=script_line_of(error),
        why="a hook or a forward that sets an attribute sets the one of its own stage",
        remedy="let the model's forward return the value, or take strategy='mirrored'",
    ) from error
