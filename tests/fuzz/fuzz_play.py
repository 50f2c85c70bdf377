"""Plays a drawn script: in plain PyTorch, as N logical workers by hand, or through tutti."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import tutti
from tests.fuzz.fuzz_script import EPOCHS, Edit, Loop, Script, build, dataset, global_batches, in_form, losses
from tests.scripts import State, oracle
from tests.scripts.harness import Arrays, Outcome, Reference, arrays
from tutti.errors import ExitCode, TuttiError


class PlainRun:
    """What ``tutti.prepare`` returns, in plain PyTorch on one device."""

    def __init__(self, script: Script, model: nn.Module, optimizers: list[Any]) -> None:
        self._script, self._model, self._optimizers = script, model, optimizers
        self.history: list[Arrays] = []
        self.loss = 0.0
        self._remember()

    def epoch(self, number: int) -> Iterator[Any]:
        return global_batches(self._script, number)

    microbatches = epoch

    def backward(self, loss: Any) -> None:
        mean_of(loss).backward()

    def step(self, batch: Any) -> float:
        self._model.zero_grad()
        loss = mean_of(in_form(self._script, losses(self._model, batch), batch[1]))
        loss.backward()
        if self._script.clip is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._script.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        self._model.zero_grad()
        self._remember()
        return float(loss.detach())

    def state(self) -> State:
        return self._model.state_dict()

    def _remember(self) -> None:
        self.history.append(arrays(dict(self._model.named_parameters(remove_duplicate=False))))


def mean_of(loss: Any) -> Tensor:
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss.mean()  # type: ignore[no-any-return]


class Player:
    """The script's own code: its loop, with its edits.

    Args:
        by: ``plain``, ``oracle`` or ``tutti``: who the run is. N workers by hand cannot tell gradients of one worker
            from those of all, so that there ``run.backward`` stands for what makes gradients without it.
    """

    def __init__(self, script: Script, by: str, prepare: Callable[..., Any]) -> None:
        self.script, self.by = script, by
        self.model, self.optimizers = build(script)
        given = {p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        self.members = {name for name, p in self.model.named_parameters() if p in given}
        self.run = prepare(self.model, self.optimizers)
        self.done: set[Edit] = set()
        self.number = 0

    def play(self) -> State:
        seen = []
        for epoch in range(EPOCHS):
            if self.script.loop is None:
                for batch in self.run.epoch(epoch):
                    self.edit("begin")
                    loss = self.run.step(batch)
                    seen.append(loss if self.by == "plain" else self.run.stats.loss)
                    self.number += 1
                    self.edit("end", behind=1)
                continue
            for batch in self.run.microbatches(epoch):
                self.edit("begin")
                self.body(self.script.loop, batch)
                self.number += 1
        return {**self.run.state(), **({"losses": torch.tensor(seen)} if seen else {})}

    @property
    def global_step(self) -> int:
        """Global batches before this one; a rank may run the body several times for one."""
        return self.run.global_step if self.by == "tutti" else self.number  # type: ignore[no-any-return]

    # --- the body -----------------------------------------------------------------------------------------------------

    def body(self, loop: Loop, batch: Any) -> None:
        clock = self.global_step
        if loop.skip and clock % loop.skip == loop.skip - 1:
            return
        if loop.zero == "before" and clock % loop.every == 0:
            self.clear(loop.how)
        if loop.backward == "closure":
            self.optimizers[0].step(lambda: self.evaluated(batch))
        else:
            getattr(self, f"by_{loop.backward}")(batch)
            for name in loop.middle:
                getattr(self, name)()
            self.edit("between")
            if clock % loop.every != loop.every - 1:
                return
            if loop.unstepped and clock % loop.unstepped == loop.unstepped - 1:
                return
            for optimizer in self.optimizers:
                optimizer.step()
        if self.by != "tutti" or self.run.stepped:
            self.edit("end", clock)
            self.written(loop.after)
        if loop.zero == "after":
            self.clear(loop.how)

    def clear(self, how: str) -> None:
        if how == "model":
            self.model.zero_grad()
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=how == "optimizer")

    def written(self, after: str) -> None:
        if after == "shrink":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.99)
        elif after == "shrink_through_data":
            for parameter in self.model.parameters():
                parameter.data.mul_(0.99)
        if self.by != "tutti":
            self.run._remember()

    def loss(self, batch: Any, scale: float = 1.0) -> Any:
        return in_form(self.script, scale * losses(self.model, batch), batch[1])

    def evaluated(self, batch: Any) -> Tensor:
        self.optimizers[0].zero_grad()
        loss = losses(self.model, batch).mean()
        self.run.backward(loss)
        return loss

    # --- how gradients come about -------------------------------------------------------------------------------------

    def by_run(self, batch: Any) -> None:
        self.run.backward(self.loss(batch, 1 / (self.script.loop or Loop()).every))

    def by_two(self, batch: Any) -> None:
        self.run.backward(self.loss(batch))
        self.run.backward(0.1 * self.model(batch[0]).square().mean())

    def by_plain(self, batch: Any) -> None:
        self.local(losses(self.model, batch).mean())

    def by_plain_then_run(self, batch: Any) -> None:
        self.local(0.1 * self.model(batch[0]).square().mean())
        self.run.backward(self.loss(batch))

    def by_run_then_plain(self, batch: Any) -> None:
        self.run.backward(self.loss(batch))
        self.local(0.1 * self.model(batch[0]).square().mean())

    def by_cleared_then_run(self, batch: Any) -> None:
        losses(self.model, batch).mean().backward()
        self.model.zero_grad()
        self.run.backward(self.loss(batch))

    def by_run_cleared_run(self, batch: Any) -> None:
        self.run.backward(0.1 * self.model(batch[0]).square().mean())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.run.backward(self.loss(batch))

    def by_assigned(self, batch: Any) -> None:
        """Gradients that ``torch.autograd.grad`` gives, put into ``.grad``."""
        loss = losses(self.model, batch).mean()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.by == "oracle":
            for parameter in trained:
                parameter.grad = None
            self.run.backward(loss)
            return
        for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            parameter.grad = gradient
        if self.by == "tutti":
            self.run.reduce_gradients()

    def by_adversarial(self, batch: Any) -> None:
        inputs = batch[0].clone().requires_grad_(True)
        losses(self.model, (inputs, batch[1])).mean().backward()
        self.model.zero_grad()
        self.run.backward(self.loss((inputs.detach() + 0.1 * inputs.grad.sign(), batch[1])))

    def by_penalty(self, batch: Any) -> None:
        inputs = batch[0].clone().requires_grad_(True)
        [slope] = torch.autograd.grad(losses(self.model, (inputs, batch[1])).sum(), inputs, create_graph=True)
        self.run.backward(losses(self.model, batch).mean() + slope.square().sum(dim=1).mean())

    def local(self, loss: Tensor) -> None:
        """A plain ``loss.backward()``."""
        self.run.backward(loss) if self.by == "oracle" else loss.backward()

    # --- what is done to gradients ------------------------------------------------------------------------------------

    def graded(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.grad is not None]

    def clip_norm(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def clip_value(self) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), 0.02)

    def decay(self) -> None:
        for parameter in self.graded():
            parameter.grad.add_(parameter.detach(), alpha=0.1)  # type: ignore[union-attr]

    def decay_anew(self) -> None:
        for parameter in self.graded():
            parameter.grad = parameter.grad + 0.1 * parameter.detach()  # type: ignore[operator]

    def halve(self) -> None:
        for parameter in self.graded():
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

    def drop(self) -> None:
        """The first parameter is left out of this update."""
        for parameter in self.graded()[:1]:
            parameter.grad = None

    def halve_through_data(self) -> None:
        for parameter in self.graded():
            parameter.grad.data.mul_(0.5)  # type: ignore[union-attr]

    def zero_one(self) -> None:
        for parameter in self.graded()[-1:]:
            parameter.grad.zero_()  # type: ignore[union-attr]

    def drop_head(self) -> None:
        for parameter in self.model.head.parameters():
            parameter.grad = None

    def delete_one(self) -> None:
        for parameter in self.graded()[:1]:
            del parameter.grad

    def scale_by_own(self) -> None:
        """By a number of the rank's own, which is 1 on one device."""
        number = 1 / (1 + (tutti.rank() if self.by == "tutti" else 0))
        for parameter in self.graded():
            parameter.grad.mul_(number)  # type: ignore[union-attr]

    # --- edits at one step --------------------------------------------------------------------------------------------

    def edit(self, where: str, clock: int | None = None, behind: int = 0) -> None:
        clock = (self.global_step if clock is None else clock) - behind
        for edit in self.script.edits:
            if (edit.step, edit.where) == (clock, where) and edit not in self.done:
                self.done.add(edit)
                self.apply(edit)

    def apply(self, edit: Edit) -> None:
        layer = self.model.layers[edit.layer] if self.script.layers else self.model.head
        if edit.kind in ("thaw", "freeze"):
            layer.requires_grad_(edit.kind == "thaw")
        elif edit.kind == "rate":
            for group in self.optimizers[0].param_groups:
                group["lr"] *= 0.5
        elif edit.kind == "hook":
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient * 0.5)
        else:
            own = {id(p) for p in layer.parameters()}
            new = {n: p for n, p in self.model.named_parameters() if id(p) in own and n not in self.members}
            self.members |= set(new)
            if new:
                self.optimizers[0].add_param_group({"params": list(new.values())})


# --- by whom ---------------------------------------------------------------------------------------------------------


def play_reference(script: Script) -> Reference | str:
    """What the script's result must be; why, where plain PyTorch refuses the script itself."""
    torch.manual_seed(0)
    try:
        if script.plain_is_enough:
            player = Player(script, "plain", lambda model, optimizers: PlainRun(script, model, optimizers))
            state = arrays(player.play())
            return Reference([state] * script.place.workers, player.run.history)

        def scripted(prepare: Callable[..., Any]) -> State:
            options: dict[str, Any] = {"batch_size": script.batch, "micro_batch": script.micro, "clip": script.clip}

            def prepared(model: Any, optimizers: Any) -> Any:
                return prepare(model, optimizers, dataset(script), loss_fn(script), **options)

            return Player(script, "oracle", prepared).play()

        played = oracle.play(scripted, script.place.workers, script.algorithm, script.parts)
        return Reference([arrays(result) for result in played.results], [arrays(state) for state in played.history])
    except Exception:
        return traceback.format_exc(limit=-4)


def play_tutti(script: Script) -> Outcome:
    """The script on this rank."""
    runs: list[Any] = []
    models: list[nn.Module] = []

    def prepare(model: Any, optimizers: Any) -> Any:
        options: dict[str, Any] = {"batch_size": script.batch, "micro_batch": script.micro, "clip": script.clip}
        options |= {"workers": script.place.workers, "reproducible": script.place.reproducible}
        given = optimizers[0] if len(optimizers) == 1 else optimizers
        models.append(model)
        runs.append(tutti.prepare(model, given, dataset(script), loss_fn(script), strategy=script.strategy, **options))
        return runs[-1]

    torch.manual_seed(0)
    try:
        return Outcome("ended", arrays(Player(script, "tutti", prepare).play()))
    except TuttiError as error:
        updates = max((run.updates for run in runs), default=0)
        state = None
        if updates and error.exit_code in (ExitCode.USAGE, ExitCode.DATA):
            try:
                state = arrays(runs[-1].state())
            except TuttiError:
                # Another rank has not got to the refusal, and waits in a collective or has ended.
                named = models[-1].named_parameters(remove_duplicate=False)
                state = arrays({n: p for n, p in named if not isinstance(p, DTensor)}) or None
            except Exception:
                state = {"unreadable": np.array(traceback.format_exc())}
        text = f"{type(error).__name__}: {error}"
        return Outcome("refused", state, text, error.what, error.remedy, int(error.exit_code), updates)
    except Exception:
        return Outcome("raw", text=traceback.format_exc(limit=-6))


def loss_fn(script: Script) -> Callable[..., Any]:
    return lambda model, batch: in_form(script, losses(model, batch), batch[1])
