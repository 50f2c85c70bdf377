"""The reference: N logical workers in plain PyTorch, each a thread with a model and an optimizer of its own.

One thread runs at a time, in worker order, until it needs the other workers' numbers. Nothing of tutti's exchanges and
layouts is used; its order of samples, its shares and its keys of random draws are, because they are the definition of
what a worker computes on. Backward of a micro-batch is that of its part of the global batch's loss, ``loss · n_w / n``
with n_w of the n samples, or of ``sum / n`` where the loss is a sum and its count, of which the complete gradient
is made n / count as large. With one worker and one micro-batch it is the loss function's own mean, as in plain PyTorch.
Workers with weights of their own do the same, each with its share as n. In a loop of the script's own they meet once a
backward, for the loss, and a worker without samples runs the body without an update.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.scripts import State
from tutti.comm.partition import chunks, even_share
from tutti.comm.random_keys import mix
from tutti.data.adapt import adapt
from tutti.data.batches import length, slice_batch
from tutti.data.order import permutation
from tutti.nn.rng_streams import RngStreams


@dataclass(frozen=True)
class Algorithm:
    """How workers agree: on gradients each step, or on parameters every ``period`` steps.

    ``outer``: learning rate and momentum of DiLoCo's outer optimizer; None for the plain average.
    """

    period: int | None = None
    outer: tuple[float, float] | None = None


SYNCHRONOUS = Algorithm()


class Diverged(AssertionError):
    """Workers do not meet in the same places: the script is not one that N workers can run."""


class Ring:
    """``size`` threads of which one runs at a time; each hands over in worker order where it needs the others."""

    def __init__(self, size: int) -> None:
        self._size, self._turn = size, 0
        self._changed = threading.Condition()
        self._table: dict[int, dict[int, tuple[str, Any]]] = {}
        self._round = [0] * size
        self._ended: set[int] = set()
        self._failure: str | None = None

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """``function(worker)`` on every thread; results in worker order."""
        results: list[Any] = [None] * self._size

        def thread(worker: int) -> None:
            try:
                self._wait(worker)
                torch.manual_seed(0)
                results[worker] = function(worker)
            except BaseException:
                with self._changed:
                    self._failure = self._failure or traceback.format_exc()
            with self._changed:
                self._ended.add(worker)
                self._pass_on(worker)

        threads = [threading.Thread(target=thread, args=(w,), daemon=True) for w in range(self._size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if self._failure is not None:
            raise AssertionError(self._failure)
        return results

    def meet(self, worker: int, call: str, value: Any) -> list[Any]:
        """What all workers bring to this call, in worker order."""
        number = self._round[worker]
        self._round[worker] += 1
        state = torch.get_rng_state()
        with self._changed:
            self._table.setdefault(number, {})[worker] = call, value
            self._pass_on(worker)
        self._wait(worker)
        torch.set_rng_state(state)
        entries = self._table[number]
        calls = {w: name for w, (name, _) in entries.items()}
        if len(entries) < self._size or len(set(calls.values())) > 1:
            raise Diverged(f"call {number}: {calls}, ended: {sorted(self._ended)}")
        self._table.pop(number - 1, None)
        return [entries[w][1] for w in range(self._size)]

    def _pass_on(self, worker: int) -> None:
        later = [(worker + i) % self._size for i in range(1, self._size + 1)]
        self._turn = next((w for w in later if w not in self._ended), worker)
        self._changed.notify_all()

    def _wait(self, worker: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == worker or self._failure is not None)
            if self._failure is not None:
                raise Diverged("another worker failed")


@dataclass
class Played:
    """What the oracle found: each worker's result, and the parameters at the start and after every update."""

    results: list[State]
    history: list[State] = field(default_factory=list)


def play(script: Callable[..., State], workers: int, algorithm: Algorithm = SYNCHRONOUS, micro: int = 0) -> Played:
    """Run a script with ``workers`` logical workers; ``micro``: into how many micro-batches a share is cut."""
    ring, history = Ring(workers), list[State]()

    def worker(number: int) -> State:
        def prepare(*arguments: Any, **options: Any) -> OracleRun:
            record = history.append if number == 0 else (lambda state: None)
            return OracleRun(ring, number, workers, algorithm, micro, record, *arguments, **options)

        return script(prepare)

    return Played(ring.run(worker), history)


def container(model: Any) -> nn.Module:
    """One module of what a script gives as its model."""
    if isinstance(model, Mapping):
        return nn.ModuleDict(model)
    return nn.ModuleList(model) if isinstance(model, list | tuple) else model


class OracleRun:
    """What ``tutti.prepare`` returns, for one worker."""

    def __init__(
        self,
        ring: Ring,
        worker: int,
        workers: int,
        algorithm: Algorithm,
        micro: int,
        record: Callable[[State], None],
        model: Any,
        optimizer: Any,
        dataset: Any,
        loss_fn: Callable[..., Any] | None = None,
        *,
        batch_size: int,
        micro_batch: int | None = None,
        clip: float | None = None,
    ) -> None:
        self._ring, self._worker, self._workers, self._algorithm, self._record = (
            ring,
            worker,
            workers,
            algorithm,
            record,
        )
        self.model, self._all = model, container(model)
        self._optimizers: Sequence[Optimizer] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self._data, self._loss, self._batch, self._clip = adapt(dataset), loss_fn, batch_size, clip
        self._micro = math.ceil(math.ceil(batch_size / workers) / micro) if micro else micro_batch
        self._draws = RngStreams(self._all, torch.device("cpu"))
        self._taken, self._samples, self._stand_in, self._went_back = 0, 0, False, False
        self._evaluated_again = False
        self._sums: tuple[float, float, dict[str, float]] = 0.0, 0.0, {}
        self.global_step, self.stepped, self.stats = 0, False, SimpleNamespace(loss=math.nan, metrics={}, count=0)
        self._outer = [p.detach().clone() for p in self._all.parameters()]
        self._velocities = [torch.zeros_like(p) for p in self._outer]
        for each in self._optimizers:
            self._gate(each)
        self._remember()

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self._data) / self._batch)

    def epochs(self, number: int) -> range:
        return range(number)

    # --- the data ---------------------------------------------------------------------------------------------------

    def epoch(self, number: int) -> Iterator[Any]:
        """This worker's share of every global batch; one sample of another's where it has none."""
        for batch in global_batches(self._data, self._batch, number):
            mine = even_share(length(batch), self._workers, self._worker)
            self._stand_in = not mine
            self._samples = len(mine)
            # What the script itself has written since.
            self._remember()
            rows = mine or even_share(length(batch), self._workers, 0)
            yield slice_batch(batch, rows.start, rows.stop)

    def microbatches(self, number: int) -> Iterator[Any]:
        for batch in self.epoch(number):
            if self._micro is not None and self._samples > self._micro:
                raise Diverged("the oracle's custom loop has one micro-batch a worker")
            self._draws.enter(mix(0, self._taken, self._worker, 0))
            kept = {name: b.clone() for name, b in self._buffers().items()}
            gradients = [p.grad for p in self._parameters()]
            if self._void:
                for parameter in self._parameters():
                    parameter.grad = None
            self._went_back = False
            yield batch
            if self._stand_in:
                for name, buffer in self._buffers().items():
                    buffer.copy_(kept[name])
            if self._void:
                for parameter, gradient in zip(self._parameters(), gradients, strict=True):
                    parameter.grad = gradient
            self._taken += 1
            if self._algorithm.period is not None and self._taken % self._algorithm.period == 0:
                self._average()

    @property
    def _void(self) -> bool:
        """Whether this worker, which makes updates of its own, has no samples for one."""
        return self._stand_in and self._algorithm.period is not None

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> float:
        """One update from ``loss_fn``: of all workers together, or of each by itself."""
        sums: list[Tensor | None] = [None] * len(self._parameters())
        total, count, metrics = 0.0, 0.0, dict[str, float]()
        given = 0 if self._stand_in else length(batch)
        pieces = chunks(given, self._micro)
        whole = len(pieces) == 1 and (self._workers == 1 or self._algorithm.period is not None)
        n = self._global(batch)
        for number, rows in enumerate(pieces):
            self._draws.enter(mix(0, self._taken, self._worker, number))
            found = self._loss(self.model, slice_batch(batch, rows.start, rows.stop))  # type: ignore[misc]
            part, own, size, more = self._local(found, len(rows), n, whole)
            sums = [_add(a, b) for a, b in zip(sums, part, strict=True)]
            total, count = total + own, count + size
            metrics = {name: metrics.get(name, 0.0) + value for name, value in more.items()}
        self._note(self._ring.meet(self._worker, "step", (total, count, metrics)))
        if self._algorithm.period is None:
            complete = self._complete(sums, count, n, whole)
        else:
            factor = 1.0 if whole or not count else n / count
            complete = [None if g is None else g * factor for g in sums]
        for parameter, gradient in zip(self._parameters(), complete, strict=True):
            parameter.grad = gradient
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._parameters(), self._clip)
        if self._algorithm.period is None or given:
            for each in self._optimizers:
                each._opt_called = True  # type: ignore[attr-defined]
                each._plain_step()  # type: ignore[attr-defined]
        for parameter in self._parameters():
            parameter.grad = None
        self._taken += 1
        self.global_step = self._taken
        if self._algorithm.period is not None and self._taken % self._algorithm.period == 0:
            self._average()
        self._remember()
        return self.stats.loss

    def backward(self, loss: Any, *, retain_graph: bool = False) -> None:
        """Leaves the gradient of the global batch in ``.grad``, added to what was there."""
        parameters = self._parameters()
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        alone = self._algorithm.period is not None
        whole, n = alone or self._workers == 1, self._global()
        sums, total, count, metrics = self._local(loss, self._samples or int(alone), n, whole, retain_graph)
        if self._stand_in:
            sums, total, count = sums if alone else [None] * len(sums), 0.0, 0.0
        if not self._evaluated_again:
            self._note(self._ring.meet(self._worker, "backward", (total, count, metrics)))
        complete = sums if alone else self._complete(sums, count, n, whole)
        for parameter, own, gradient in zip(parameters, before, complete, strict=True):
            parameter.grad = _add(own, gradient)
        self._went_back = True

    def _parameters(self) -> list[nn.Parameter]:
        return list(self._all.parameters())

    def _local(
        self, found: Any, samples: int, n: int, whole: bool, retain_graph: bool = False
    ) -> tuple[list[Tensor | None], float, float, dict[str, float]]:
        """Backward of a micro-batch's part of the loss over n samples: gradient, loss sum, count, metric sums.

        Of the mean over what is counted, where the micro-batch is the ``whole`` batch.
        """
        more: Mapping[str, Any] = {}
        if isinstance(found, tuple | list):
            total, count, more = found[0].sum(), float(found[1]), found[2] if len(found) == 3 else {}
        else:
            total, count = found.mean() * samples, float(samples)
        if samples and total.requires_grad:
            (total / ((count or 1.0) if whole else n)).backward(retain_graph=retain_graph)
        sums = [p.grad for p in self._parameters()]
        for parameter in self._parameters():
            parameter.grad = None
        return sums, float(total.detach()), count, {name: float(value) for name, value in more.items()}

    def _global(self, batch: Any = None) -> int:
        """Samples that a gradient is the mean over: those of the global batch, or of this worker's own share."""
        if self._algorithm.period is not None:
            return self._samples if batch is None else length(batch)
        return int(sum(self._ring.meet(self._worker, "samples", 0 if self._stand_in else self._samples)))

    def _complete(
        self, sums: Sequence[Tensor | None], count: float, n: int, whole: bool = False
    ) -> list[Tensor | None]:
        """Σ over workers of gradients of their part of the loss, × n / Σ of counts; None where no worker has one."""
        rows = self._ring.meet(self._worker, "gradients", (list(sums), count))
        total = sum(each for _, each in rows)
        complete: list[Tensor | None] = [None] * len(sums)
        for row, _ in rows:
            complete = [_add(a, b) for a, b in zip(complete, row, strict=True)]
        factor = 1.0 if whole or not total else n / total
        return [None if g is None else g * factor for g in complete]

    def _note(self, rows: Sequence[tuple[float, float, dict[str, float]]]) -> None:
        count = sum(row[1] for row in rows)
        names = {name for row in rows for name in row[2]}
        metrics = {name: sum(row[2].get(name, 0.0) for row in rows) / count for name in names}
        self.stats = SimpleNamespace(loss=sum(row[0] for row in rows) / count, metrics=metrics, count=count)

    def _gate(self, optimizer: Optimizer) -> None:
        """Let the user's ``optimizer.step()`` complete gradients made by hand, and note that it was called."""
        kind = type(optimizer)
        run = self

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]
            if run._void:
                result = None if closure is None else closure()
            elif closure is None:
                run._complete_by_hand([p for group in self.param_groups for p in group["params"]])
                result = kind.step(self)
            else:
                result = kind.step(self, lambda: run._evaluated(closure))  # type: ignore[arg-type]
                run._evaluated_again = False
            run.stepped, run.global_step = True, run._taken + 1
            run._remember()
            return result

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer._plain_step = MethodType(kind.step, optimizer)  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def reduce_gradients(self) -> None:
        """Leaves the gradient of the global batch in ``.grad``, where each worker has put the mean over its samples."""
        self._complete_by_hand(self._parameters())
        self._went_back = True

    def _complete_by_hand(self, members: Sequence[nn.Parameter]) -> None:
        if self._went_back or self._algorithm.period is not None:
            return
        count, n = float(self._samples), self._global()
        sums = [None if p.grad is None or not count else p.grad * (count / n) for p in members]
        for parameter, gradient in zip(members, self._complete(sums, count, n), strict=True):
            parameter.grad = gradient

    def _evaluated(self, closure: Callable[[], Any]) -> Tensor:
        """The closure's loss over the global batch, or of this worker where it makes updates of its own."""
        with torch.enable_grad():
            loss = closure()
        if self._algorithm.period is not None:
            # Each worker's optimizer evaluates as often as it needs.
            self._evaluated_again = True
            return loss
        return torch.tensor(self.stats.loss, dtype=torch.float64)

    # --- local SGD and DiLoCo ---------------------------------------------------------------------------------------

    def _mean(self) -> list[Tensor]:
        rows = self._ring.meet(self._worker, "parameters", [p.detach().clone() for p in self._parameters()])
        return [torch.stack(tensors).mean(0) for tensors in zip(*rows, strict=True)]

    @torch.no_grad()
    def _average(self) -> None:
        means = self._mean()
        if self._algorithm.outer is not None:
            rate, momentum = self._algorithm.outer
            tensors = zip(self._parameters(), self._outer, means, self._velocities, strict=True)
            for parameter, theta, mean, velocity in tensors:
                if not parameter.requires_grad:
                    # What the script froze stays where it is, and what it writes itself is what it writes.
                    theta.copy_(mean)
                    continue
                change = theta - mean
                velocity.mul_(momentum).add_(change)
                theta.sub_(rate * (change + momentum * velocity))
            means = self._outer
        for parameter, value in zip(self._parameters(), means, strict=True):
            parameter.copy_(value)

    # --- what is read -----------------------------------------------------------------------------------------------

    def state(self) -> State:
        """One plain model's state: parameters (their mean where workers differ), workers' buffers merged."""
        found = {name: tensor.detach().clone() for name, tensor in self._all.state_dict().items()}
        if self._algorithm.period is not None:
            known = {id(p): mean for p, mean in zip(self._parameters(), self._mean(), strict=True)}
            found |= {n: known[id(p)] for n, p in self._all.named_parameters(remove_duplicate=False)}
        return {**found, **self._merged()}

    def evaluate(self, data: Any, loss: Callable[..., Any] | None = None) -> SimpleNamespace:
        """Mean loss and metrics over all samples, in evaluation mode, with the merged buffers."""
        source, chosen = adapt(data), loss or self._loss
        kept = {name: b.clone() for name, b in self._buffers().items()}
        weights = [p.detach().clone() for p in self._parameters()]
        values = self.state()
        modes = [(module, module.training) for module in self._all.modules()]
        with torch.no_grad():
            for name, tensor in {**self._buffers(), **dict(self._all.named_parameters())}.items():
                if name in values:
                    tensor.copy_(values[name])
            self._all.eval()
            found = chosen(self.model, source.fetch(permutation(0, 0, len(source)), None))  # type: ignore[misc]
            for name, buffer in self._buffers().items():
                buffer.copy_(kept[name])
            for parameter, weight in zip(self._parameters(), weights, strict=True):
                parameter.copy_(weight)
        for module, training in modes:
            module.training = training
        total, count, more = (found, 1.0, {}) if isinstance(found, Tensor) else (*found, {})[:3]
        metrics = {name: float(value) / float(count) for name, value in more.items()}
        return SimpleNamespace(loss=float(total) / float(count), metrics=metrics, samples=len(source))

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._all.named_buffers())

    def _merged(self) -> State:
        """Means of floating buffers, the pooled variance of batch norms, the largest of integers."""
        names = [name for name in self._all.state_dict() if name in self._buffers()]
        own = {name: self._buffers()[name].detach().clone() for name in names}
        rows = self._ring.meet(self._worker, "buffers", own)
        merged: State = {}
        for name in names:
            table = torch.stack([row[name] for row in rows])
            if not table.is_floating_point():
                merged[name] = table.amax(0)
                continue
            merged[name] = table.mean(0)
            means = name.removesuffix("running_var") + "running_mean"
            if name.endswith("running_var") and means in own:
                centres = torch.stack([row[means] for row in rows])
                merged[name] = merged[name] + centres.var(0, correction=0)
        return merged

    def _remember(self) -> None:
        self._record({n: p.detach().clone() for n, p in self._all.named_parameters(remove_duplicate=False)})


def global_batches(data: Any, size: int, epoch: int) -> Iterator[Any]:
    """The global batches of an epoch in the order in which tutti yields them."""
    source = adapt(data)
    order = permutation(0, epoch, len(source))
    for start in range(0, len(source), size):
        yield source.fetch(order[start : start + size], None)


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
