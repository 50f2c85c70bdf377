"""Refuse a custom loop whose body skips small batches, as every micro-batch is a small part of the global batch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tutti.errors import UsageError
from tutti.train.script_checks.script_source import has_line, source_nodes
from tutti.types.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tutti.train.run import Run


class SkippedBodies:
    """Raises UsageError where the body of a custom training loop skips a micro-batch because the micro-batch is small.

    ``if len(inputs) < batch_size: continue`` leaves out an incomplete last batch in plain PyTorch. With several ranks
    or logical workers every micro-batch is smaller than the global batch, and would be skipped. No error is raised if
    the global batch itself is incomplete, and smaller than each micro-batch that has been trained on. Not collective.

    Args:
        run: the run, whose global batch is read.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._smallest: int | None = None

    def end_body(self, micro_batch: MicroBatch, trained: bool, lines: Iterable[str]) -> None:
        """Check, at the end of a custom loop's body, that it has not skipped the micro-batch because of its size.

        Args:
            micro_batch: the micro-batch.
            trained: whether the body has computed gradients.
            lines: the script's lines, as ``FILE:LINE``, that have read the size of a tensor of the micro-batch.

        Raises:
            UsageError: all of this holds: the body has not trained; an ``if`` in the loop tests a size read in
                ``lines``; the micro-batch is a part of the global batch; and the body would have trained on the whole,
                as that is complete, or at least as large as a micro-batch on which it has trained.
        """
        own, whole = micro_batch.samples, self._run.lifecycle.step_context.samples
        if trained:
            self._smallest = own if self._smallest is None else min(own, self._smallest)
            return
        most = self._run.feed.contract.batch
        if not 0 < own < whole or whole < (most if self._smallest is None else min(most, self._smallest)):
            return
        line = next(filter(_decides, lines), "")
        if line:
            raise UsageError(
                "the loop's body skips a micro-batch because of its size",
                where=f"step {self._run.global_step + 1}, {line}",
                why=f"this rank's micro-batch has {own} of the {whole} samples of the global batch, and one device"
                " would train on all of them",
                remedy="leave the condition out, and give tutti.prepare drop_last=True, which leaves out incomplete"
                " global batches",
            )


def _decides(line: str) -> bool:
    """Return whether an ``if`` in the innermost loop around a line tests what the line has read.

    Args:
        line: ``FILE:LINE``; the ``if`` is there, or tests a variable that is assigned there.
    """
    file, _, number = line.rpartition(":")
    around = [each for each in source_nodes(file) if has_line(each, int(number))]
    loops = [each for each in around if isinstance(each, ast.For | ast.While)]
    names = {
        each.id
        for node in around
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    # Of nested loops ast.walk yields the innermost last.
    tests = [each.test for loop in loops[-1:] for each in ast.walk(loop) if isinstance(each, ast.If)]
    return any(has_line(test, int(number)) or names & set(_names(test)) for test in tests)


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
