"""Detect parameters that a script thaws, freezes or replaces, or adds to its optimizers, during a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from tutti.errors import UsageError
from tutti.nn.swap import buffers, parameters
from tutti.types.gradient_sync import GradientSync
from tutti.types.optimizer_protocols import NamedParameters
from tutti.types.replica_runner import ReplicaRunner
from tutti.types.weight_average import Average


class TrainabilityWatch:
    """Finds changes of ``requires_grad`` and of optimizers' parameter groups, and passes them to the ``GradientSync``.

    Args:
        replica: this rank's part of the model.
        sync: gradient synchronisation, which reduces gradients and makes the update.
        optimizers: the script's optimizers; none where ``tutti.prepare`` was given options.
        average: average of the weights, which takes in parameters that become trainable; None for none.
        given: parameters of the script's model before the strategy replaced any of them.
        shards: whether parameters are sharded, so that modules may get other objects of the same names; parameters are
            then told apart by name.
    """

    def __init__(
        self,
        replica: ReplicaRunner,
        sync: GradientSync,
        optimizers: Sequence[Optimizer],
        average: Average | None,
        given: Iterable[Tensor] = (),
        shards: bool = False,
    ) -> None:
        self._replica, self._sync, self._optimizers, self._average = replica, sync, optimizers, average
        self._by_name = shards
        # Parameters, their flags, and the sizes of the optimizers' groups when this object last looked.
        self._named: NamedParameters = []
        self._flags, self._counts = list[bool](), list[int]()
        self._record()
        members = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._known = {id(p): ref(p) for p in [*given, *(p for _, p in self._named), *members]}

    def _record(self) -> None:
        self._named = parameters(self._replica.parts)
        self._flags = [p.requires_grad for _, p in self._named]
        self._counts = self._sizes()

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def changed(self) -> bool:
        """Whether the script has changed ``requires_grad`` of a parameter since ``follow`` was last called.

        Not collective. Changes of optimizers' groups do not count. Reading the property does not take note of a change;
        ``follow`` does. A sharded parameter has several ``nn.Parameter`` objects, such as the gathered one and this
        rank's rows: where the script has set the flag of one, a read sets it on the others, too.
        """
        self._replica.unify_flags()
        return [p.requires_grad for _, p in self._named] != self._flags

    def follow(self, late: bool) -> bool:
        """Let the ``GradientSync`` train parameters that the script has thawed, or added to its optimizers' groups.

        A parameter is thawed if its ``requires_grad`` has become True since the last call. If one is, the call is
        collective over the data ranks, by an all-gather of digests of ``requires_grad``: all of them must thaw the same
        parameters before the same step. If an optimizer's group has another number of parameters than at the last call,
        the strategy begins to update the new ones; only a rank that had nothing to train before then builds an
        optimizer, which is collective over the tensor ranks. In all other cases, freezing included, nothing is sent.

        Args:
            late: whether a forward of this step has been computed already.

        Returns:
            Whether ``requires_grad`` of any parameter has changed, by thawing or freezing.

        Raises:
            UsageError: the strategy or the average of the weights cannot take a thawed parameter, or the strategy an
                added one; a parameter is thawed, and the script has no optimizer object; or the script has added a
                parameter to an optimizer that the model did not have in ``tutti.prepare``.
            MismatchError: data ranks have thawed different parameters, or one did not.
        """
        changed = self.changed
        if changed:
            flags = [p.requires_grad for _, p in self._named]
            thawed = [
                name
                for (name, _), now, before in zip(self._named, flags, self._flags, strict=True)
                if now and not before
            ]
            if thawed:
                self._check_trained(thawed[0])
                self._sync.reattach(thawed, late)
                if self._average is not None:
                    self._average.adopt(thawed)
            self._record()
        if self._sizes() != self._counts:
            self._check_known()
            for optimizer in self._optimizers:
                self._sync.adopt(optimizer)
            self._record()
        return changed

    def _check_known(self) -> None:
        """Raise UsageError if an optimizer has a parameter that the model did not have in ``tutti.prepare``."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for p in [p for group in groups for p in group["params"]]:
            known = self._known.get(id(p))
            if known is None or known() is not p:
                names = [name for name, other in parameters(self._replica.parts) if other is p]
                self._refuse_new(f"the script has added {names[0] if names else 'a parameter'} to the optimizer")

    def check_replaced(self) -> None:
        """Check that the modules still have the parameter objects with which the run began. Not collective.

        Raises:
            UsageError: the script has replaced, tied, added or removed a parameter since ``tutti.prepare``.
        """
        before, now = self._objects(self._named), self._objects(parameters(self._replica.parts))
        if now.keys() - before.keys():
            name = next(name for key, name in now.items() if key not in before)
            self._refuse_new(f"the script has made {name} a parameter of the model")
        if before.keys() - now.keys():
            name = next(name for key, name in before.items() if key not in now)
            self._refuse_new(f"the script has taken the parameter {name} out of the model")
        if (replaced := self._replica.replaced_name()) is not None:
            self._refuse_new(f"the script has made {replaced} a parameter of the model")

    def check_buffers(self) -> None:
        """Check that the modules have no more persistent buffers than when the run began. Not collective.

        Raises:
            UsageError: a forward or the script has made a buffer, or given a tensor to one that was None.
        """
        late = [slot.name for slot in buffers(self._replica.parts) if slot.name not in self._replica.specs]
        if late:
            raise UsageError(
                f"the model got the buffer {late[0]} after tutti.prepare",
                why="weights and buffers are compared, saved and returned by the names that the model had then",
                remedy="register it with its first values before tutti.prepare, or call the model on a batch there; or"
                " with persistent=False, which leaves it out of checkpoints, as in PyTorch",
            )

    def _objects(self, named: NamedParameters) -> dict[str | int, str]:
        """Return the parameters' names by what tells parameters apart: their objects, or else their names."""
        return {name if self._by_name else id(p): name for name, p in named}

    def _refuse_new(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} after tutti.prepare",
            why="gradients are summed over devices and workers, and weights compared, saved and returned, for the"
            " parameters that the model had then",
            remedy="make and tie all parameters before tutti.prepare (freeze those that are trained later), write new"
            " values into them (copy_), or call tutti.prepare again",
        )

    def _check_trained(self, name: str) -> None:
        if not self._optimizers:
            raise UsageError(
                f"the script trains {name} from here on, which was frozen in tutti.prepare",
                why="the optimizer was given as options, and was made for what was trainable then",
                remedy="give tutti.prepare an optimizer that has this parameter, or freeze it after tutti.prepare",
            )
