"""Find whether a loop's body reads parameters after it has updated them, where a rank runs it several times a step.

Only the rank's last body makes the updates of a global batch. A gradient that the body computes after its first
``optimizer.step()`` is right if nothing after that step has read the updated parameters, as in mutual learning, where
both networks compute their outputs before either is updated. Else the earlier bodies have computed their parts of the
gradient from the parameters before the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tutti.errors import UsageError, script_line
from tutti.nn.owned_hooks import OwnedHook
from tutti.nn.script_mode import tensors_among
from tutti.nn.swap import parameters
from tutti.nn.written_tensors import METADATA
from tutti.parallel.fsdp.fsdp_wrap_policy import root_modules
from tutti.python_compat import calling_frame
from tutti.train.script_checks.watched_calls import calling_module

if TYPE_CHECKING:
    from tutti.train.run import Run


class SecondUpdates:
    """Records the parameters that a body of the loop has updated, and the first read of one of them after that.

    A forward of a module that holds such a parameter is a read; so is a call of PyTorch with the parameter in the steps
    in which a ``LossWatch`` follows the body. Not collective.

    Args:
        run: the training run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        # Names of the model's parameters, and of those that the body has updated, by id.
        self._names, self._updated = dict[int, str](), dict[int, str]()
        self._read: tuple[str, str] | None = None
        # Hooks on forwards, None before the first body: they go if the first global batch has no second update.
        self._hooks: list[RemovableHandle] | None = None
        self._computes_after = False

    def begin_body(self) -> None:
        """Begin a run of the loop's body: forget which parameters the previous run has updated, and read after that.

        In the first call, forward pre-hooks that find such reads are put on the model's modules.
        """
        self._updated, self._read = {}, None
        if self._hooks is None:
            self._hooks = self._hook()

    def _hook(self) -> list[RemovableHandle]:
        """Hook each module with parameters of its own; of a model that is split over ranks the model alone."""
        model = self._run.replica.plain
        self._names = names = {id(p): name for name, p in parameters([model])}
        found, whole = [], self._run.context.comms.model.size == 1
        for root in root_modules(model):
            for module in root.modules() if whole else (root,):
                own = {id(p): names[id(p)] for p in module.parameters(recurse=not whole) if id(p) in names}
                if own:
                    hook = OwnedHook(self._before_forward, own)
                    found.append(module.register_forward_pre_hook(hook, prepend=True))
        return found

    def _before_forward(self, own: Mapping[int, str], *_: Any) -> None:
        if self._updated and self._read is None:
            found = next((name for key, name in own.items() if key in self._updated), None)
            self._read = None if found is None else (found, script_line())

    def note_step(self, members: Iterable[nn.Parameter]) -> None:
        """Record that the loop's body has called ``optimizer.step()`` for parameters; a later read of one is noted.

        Only the call in the rank's last body of a global batch makes the update; calls in earlier bodies are recorded
        likewise.

        Args:
            members: the parameters, as the script's model has them.
        """
        self._updated |= {id(p): self._names.get(id(p), "a parameter") for p in members}

    def note_call(self, func: Any, args: Sequence[Any]) -> None:
        """Record a call of PyTorch that reads a parameter for which this body has called ``optimizer.step()`` before.

        Calls in the code of tutti and of PyTorch's optimizers do not count. Only the first read of a body is kept.

        Args:
            func: the function of PyTorch.
            args: its positional arguments.
        """
        if not self._updated or self._read is not None or func in METADATA:
            return
        for tensor in tensors_among(args, {}):
            if id(tensor) in self._updated:
                if not calling_module(calling_frame(2)).startswith(("tutti.", "torch.optim")):
                    self._read = self._updated[id(tensor)], script_line()
                return

    def end_batch(self) -> None:
        """End a global batch: remove the forward hooks if no body so far has computed a gradient after an update.

        The hooks find reads of updated parameters, which are wrong only where a gradient is computed afterwards. A body
        that begins to do so in a later global batch is refused by ``check``.
        """
        if self._hooks and not self._computes_after:
            for each in self._hooks:
                each.remove()
            self._hooks = []

    def check(self) -> None:
        """Check, before a gradient is computed, that nothing in the body has read parameters after their update.

        Raises:
            UsageError: the body has read a parameter after its own ``optimizer.step()`` for this parameter; or, later
                than in the first global batch, a body computes a gradient after an update for the first time.
        """
        if not self._updated:
            return
        self._computes_after = True
        ranks = self._run.context.mesh.data_ranks
        if self._read is not None:
            why = f"{self._read[1]} reads {self._read[0]} after the first update, which depends on the gradients of"
            why += " micro-batches whose bodies have not run yet"
        elif not self._hooks:
            why = "the body has made one update in the first global batch, in which tutti looks for reads of"
            why += " updated parameters"
        else:
            return
        raise UsageError(
            "two updates in one body of the loop cannot be combined with several micro-batches a rank",
            where=f"step {self._run.global_step + 1}, {script_line()}",
            why=why,
            remedy="compute all outputs and losses of the body before the first optimizer.step(), where none needs its"
            f" update; or take as many workers as data ranks ({ranks}), and no micro_batch; or more devices",
        )
