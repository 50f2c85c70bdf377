"""Gradients on parameter servers as seen by a custom training loop: it cannot read them after the push."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.nn.incomplete_gradient import conceal, is_cleared
from tutti.parallel.ddp.unsharded_gradients import TrainedGradients
from tutti.types.custom_loop_sync import GradientPlace
from tutti.types.step_records import StepContext


class RemoteGradients(TrainedGradients):
    """Mixin of parameter-server strategies: ``.grad`` in custom training loops, where the servers sum the gradients.

    ``SynchronousServerSync`` and ``AsynchronousServerSync`` inherit from it; it implements methods of
    ``CustomLoopSync``, some of which ``ReadableServerSync`` replaces. After ``run.backward`` has pushed the gradients,
    a script that reads ``.grad`` gets an error.

    Attributes:
        gradient_at: ``"servers"``: the place of the complete gradient.
        accumulated: always False: ``add_gradients`` never adds gradients of earlier reductions here.
    """

    gradient_at: GradientPlace = "servers"
    accumulated = False
    _pushed = False

    def pop_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Set ``.grad`` of all trained parameters to None, and return an empty dict.

        Strategies without parameter servers return here the gradients that earlier backwards have summed, by parameter,
        and ``add_gradients`` adds them to the next ones. With parameter servers these sums stay on the servers. Not
        collective.
        """
        for parameter in self.script_parameters():
            parameter.grad = None
        return {}

    def add_gradients(self, held: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace ``.grad`` of every trained parameter by a placeholder that raises UsageError when it is read.

        Other strategies add the gradients of earlier steps here (``CustomLoopSync``). Called after the push to the
        parameter servers, which alone have the sums of gradients. If the script then sets ``.grad`` to None,
        ``apply_edits`` raises UsageError. Not collective.

        Args:
            held: always empty here: ``pop_gradients`` returns no gradients of earlier steps.
        """
        conceal(self.script_parameters(), "on the parameter servers, which add it up and apply it")
        self._pushed = True

    def apply_edits(self, edited: Collection[nn.Parameter]) -> None:
        """Check that the script has cleared no ``.grad`` between the push to the parameter servers and the update.

        Called at the script's ``optimizer.step()``, before the update. Not collective.

        Args:
            edited: unused; parameters whose ``.grad`` the script has edited.

        Raises:
            UsageError: the script has set the ``.grad`` of a parameter to None or zero; the parameter servers have
                added the gradients up already, so that this has no effect.
        """
        cleared = [name for name, p in self._trained if is_cleared(p.grad)] if self._pushed else []
        self._pushed = False
        if cleared:
            raise UsageError(
                f"the script clears the gradient of {cleared[0]} between run.backward and optimizer.step()",
                why="the parameter servers have added it up already",
                remedy="freeze the parameter before the forward (requires_grad_(False)), or take strategy='mirrored'",
            )

    def norm_of(self, members: Sequence[nn.Parameter], step_context: StepContext) -> float:
        """Raise ValueError: a rank cannot compute the norm of summed gradients, which are on the parameter servers.

        Other strategies return here the norm of some parameters' gradients.

        Args:
            members, step_context: unused; the parameters, and the step under way.

        Raises:
            ValueError: always.
        """
        raise ValueError("gradients on parameter servers have no norm here")

    @contextmanager
    def stepping(self, index: int | None, members: Sequence[nn.Parameter]) -> Iterator[None]:
        """Return a context that does nothing: with parameter servers the script has a single optimizer.

        Strategies that allow several optimizers step only one of them within this context.

        Args:
            index: unused; position of the optimizer among those of the script.
            members: unused; the optimizer's parameters.
        """
        yield

    def clip_gradients(self, norm: float) -> NoReturn:
        """Raise ValueError: the summed gradients are on the parameter servers, which clip them in the update.

        Args:
            norm: unused.

        Raises:
            ValueError: always.
        """
        raise ValueError("gradients on parameter servers are not clipped here")

    def steps_whole(self, optimizer: Optimizer) -> bool:
        """Return False: the script's optimizer updates no parameters on this rank, because the parameter servers do.

        Where other strategies return True, ``optimizer.step(closure)`` may call the closure several times, as LBFGS
        does.

        Args:
            optimizer: unused; one of the script's optimizers.
        """
        return False

    def adopt(self, optimizer: Optimizer) -> None:
        """Raise UsageError: the script has added parameters to ``optimizer`` or taken parameters out of it.

        The parameter servers keep the parameter groups with which they were started. Called when the groups have
        changed.

        Args:
            optimizer: unused.

        Raises:
            UsageError: always.
        """
        _refuse("the script has changed which parameters the optimizer has")

    def abandon_step(self) -> bool:
        """Return False: a step that an exception has ended before its update cannot be undone.

        The parameter servers may have received gradients of this step. Called after such an exception; nothing is sent
        and nothing changes.
        """
        return False

    def reattach(self, names: Sequence[str], late: bool = False) -> None:
        """Check that parameters which the script unfreezes were trainable when the parameter servers were started.

        Called where the script has set ``requires_grad`` of frozen parameters to True. The servers have only the
        parameters that were trainable at the start, and cannot take others. Nothing is sent. Not collective.

        Args:
            names: names of parameters whose ``requires_grad`` the script has set to True.
            late: unused; True if a forward of this step has been computed already.

        Raises:
            UsageError: one of the named parameters was frozen at the start of the run.
        """
        known = {name for name, _ in self._trained}
        for name in names:
            if name not in known:
                _refuse(f"the script trains {name} from here on, which was frozen in tutti.prepare")


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        what,
        why="parameter servers are started with the parameters and the optimizer groups that they keep",
        remedy="freeze after tutti.prepare what is to be trained later (requires_grad_(False), which also stops the"
        " training of a parameter), and give the optimizer all groups before; or take strategy='mirrored'",
    )
