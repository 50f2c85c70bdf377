"""Refuse step hooks of a script's optimizer that would compute with parts of parameters, or are never called."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from tutti.errors import UsageError
from tutti.nn.gradient_hooks import hook_package
from tutti.nn.incomplete_gradient import IncompleteGradient
from tutti.nn.script_mode import acts_by_element, tensors_among
from tutti.nn.written_tensors import DATA, METADATA
from tutti.torch_compat import step_hooks

_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_guards: WeakSet[StepHookGuard] = WeakSet()


class StepHookGuard:
    """Refuses step hooks of a script's optimizer that would act otherwise than in plain PyTorch.

    A step hook is a function of ``register_step_pre_hook`` or ``register_step_post_hook``, which expects whole
    parameters and gradients. If the optimizer steps on this rank's parts of them, a hook may compute with the parts
    element by element, and raises UsageError for other functions. If another object makes the updates, so that PyTorch
    does not call the hook for all parameters, the hook is refused altogether.

    Args:
        optimizer: the script's optimizer.
        strategy: name of the strategy, for the error.
        is_part: function that returns whether a tensor is this rank's part of a parameter; None to refuse all hooks.
    """

    def __init__(self, optimizer: Optimizer, strategy: str, is_part: Callable[[Tensor], bool] | None) -> None:
        self._optimizer, self._strategy, self._is_part = ref(optimizer), strategy, is_part
        _guards.add(self)

    def check(self) -> None:
        """Replace step hooks that the script has registered since the previous call by watched ones. Not collective.

        The run calls this before each step. A watched hook calls the script's hook, and raises UsageError if the hook
        calls a function that is not element-wise, such as a norm, on this rank's part of a parameter or gradient. Hooks
        for all optimizers of the process (``register_optimizer_step_pre_hook``) are replaced, too; called with an
        optimizer without a guard, they act as before.

        Raises:
            UsageError: the script has registered a step hook, and the optimizer's hooks are not called, or not for all
                parameters (``is_part`` is None).
        """
        optimizer = self._optimizer()
        for hooks in () if optimizer is None else step_hooks(optimizer):
            for key, hook in hooks.items():
                # Another run's guard may have replaced a hook for all optimizers.
                of_script = hook.of_script if isinstance(hook, _WatchedHook) else hook
                if hook_package(of_script) in ("torch", "tutti"):
                    continue
                if self._is_part is None:
                    _refuse_step_hook(of_script, self._strategy)
                hooks[key] = _WatchedHook(of_script)

    def watching(self, optimizer: Optimizer, hook: Any) -> _PartsWatched | None:
        """Return a torch-function mode for a call of a step hook, which allows only element-wise functions of parts.

        A part is this rank's part of a parameter or gradient, or a tensor computed from one. In the mode, a function
        that is not element-wise, such as a norm, raises UsageError if an argument is a part.

        Args:
            optimizer: the optimizer that steps.
            hook: the script's step hook, which the error names.

        Returns:
            The mode, not entered; None for another optimizer than the one that this guard was constructed with, and
            without ``is_part``, as ``check`` refuses all hooks then.
        """
        if self._is_part is None or self._optimizer() is not optimizer:
            return None
        return _PartsWatched(partial(_refuse_step_hook, hook, self._strategy), self._is_part)


class _WatchedHook:
    """A step hook that raises UsageError where it mixes elements of parts of parameters or gradients."""

    def __init__(self, of_script: Any) -> None:
        self.of_script = of_script

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        found = (guard.watching(optimizer, self.of_script) for guard in _guards)
        with next((mode for mode in found if mode is not None), nullcontext()):
            return self.of_script(optimizer, args, kwargs)


class _PartsWatched(TorchFunctionMode):
    """Function mode that calls ``refuse`` where code mixes elements of parts of parameters or gradients."""

    def __init__(self, refuse: Callable[[], NoReturn], is_part: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self._refuse, self._is_part = refuse, is_part
        # Gradients, and tensors that the hook has computed from parts, by identity.
        self._made: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follows = func in (_GRADIENT, DATA) or acts_by_element(func)
        if func in METADATA and not follows:
            return func(*args, **kwargs)
        parts = any(id(each) in self._made or self._is_part(each) for each in tensors_among(args, kwargs))
        if parts and not follows:
            self._refuse()
        result = func(*args, **kwargs)
        if parts:
            made = tensors_among((result,), {})
            self._made |= {id(each): each for each in made if not isinstance(each, IncompleteGradient)}
        return result


def _refuse_step_hook(hook: Any, strategy: str) -> NoReturn:
    """Raise UsageError for a step hook of a script, with the line of the hook."""
    code = getattr(hook, "__code__", None)
    raise UsageError(
        f"a step hook of an optimizer (register_step_pre_hook, …) cannot be combined with strategy '{strategy}'",
        where="the script" if code is None else f"{code.co_filename}:{code.co_firstlineno}",
        why="each rank updates a part of the parameters, or another object does, so that the hook would compute with"
        " parts of parameters and gradients, or not be called",
        remedy="run its code in a custom loop, before or after optimizer.step(); give tutti.prepare clip=… to clip; or"
        " take strategy='mirrored'",
    )
