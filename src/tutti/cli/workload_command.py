"""``tutti workload``: trace the model and loss of a task or script, and print what they ask of a device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from tutti.cli.console_tables import print_table
from tutti.cli.output_checks import check_writable
from tutti.errors import ExitCode, counted
from tutti.launcher.encoding import json_text
from tutti.planning.task_or_script import TaskOrScript
from tutti.tasks import task_registry

if TYPE_CHECKING:
    from tutti.workload.workload_file import Workload

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def workload(
    task: Annotated[str, Parameter(show=False)],
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    data: Annotated[str | None, Parameter(show_default=False)] = None,
    model: Annotated[str | None, Parameter(show_default=False)] = None,
    augment: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    precision: Annotated[Literal["fp32", "bf16", "fp16", "fp64"] | None, Parameter(show_default=False)] = None,
    real: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    output: Annotated[Path | None, Parameter(name=("--out", "-o", "--output"), show_default=False)] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Count the FLOP, bytes and activations of a model.

    Example: tutti workload text --model gpt:layers=4 -o workload.json

    TASK is a built-in task, your own file.py:function, or a script that calls
    tutti.prepare, which runs up to its first loss; its own arguments follow --.
    Nothing is computed: the model runs on fake tensors.

    Parameters
    ----------
    data:
        folder, file or hub name that the task reads
    model:
        model of the task, name:key=value; default: the first
    augment:
        as in tutti train
    precision:
        fp32, bf16 or fp16 (autocast, fp32 weights), or fp64; default: the
        script's, or fp32
    real:
        compute with real tensors, for models that read values
    output:
        write workload.json here
    as_json:
        print the content of workload.json

    Returns
    -------
    int
        Exit code. 0: the table or JSON is printed. A wrong option, or a model that cannot be traced, raises
        UsageError, which ``tutti`` turns into exit code 2; missing data raise DataError (3), a file that cannot be
        written DiskError (8).

    Notes
    -----
    ``task`` is a task of ``tutti train`` or the path of a script, ``arguments`` are the script's.
    """
    named = TaskOrScript.of(task, arguments)
    named.check_options(data=data, model=model, augment=augment)
    check_writable(output, "the workload")
    loaded = named.load_script()
    if loaded is None:
        chosen, stated = task_registry.load_task(task, data=data, model=model, augment=augment), "fp32"
    else:
        chosen, stated = loaded.task, loaded.options.get("precision", "fp32")

    from tutti.parallel.fsdp.fsdp_wrap_policy import wrapped_modules
    from tutti.workload.workload_file import workload_json, write_workload
    from tutti.workload.workload_trace import TracedModel, one_sample, trace_workload

    subject = TracedModel(
        name=task,
        build=chosen.model,
        loss=chosen.loss,
        sample=one_sample(chosen.train),
        groups=wrapped_modules,
        precision=precision or stated,
    )
    found = trace_workload(subject, real=real)
    if output is not None:
        write_workload(found, output)
    if as_json:
        print(json_text(workload_json(found), sys.stdout))
    else:
        _show(found)
        if output is not None:
            print(f"written to {output}")
    return ExitCode.DONE


def _show(found: Workload) -> None:
    """Print the table of module groups, the totals and what is uncertain."""
    kept = [f"{choice} kept" for choice in found.checkpointing()]
    heads = ["per sample", "module", "parameters", "forward", "backward", "bytes", *kept, "output", "ready"]
    rows = []
    for group in found.groups:
        work = (*group.forward.values(), *group.backward.values())
        rows.append(
            [
                group.name,
                group.kind,
                f"{group.parameters:,}",
                *(quantity(sum(w.flop.per_sample for w in each.values())) for each in (group.forward, group.backward)),
                quantity(sum(w.bytes.per_sample for w in work)),
                *(quantity(line.per_sample) for line in group.activation_bytes.values()),
                quantity(group.output_bytes.per_sample),
                "" if group.ready is None else str(group.ready),
            ]
        )
    print_table(heads, rows)
    print()
    for line in _totals(found):
        print(line)


def _totals(found: Workload) -> list[str]:
    """Return lines on the whole model, its attention, and quantities that are uncertain."""
    flop, dense = (_slope(found, masked) for masked in (0.0, 1.0))
    lines = [
        f"model FLOP      {quantity(flop)} a sample, forward and backward"
        + (f"; {quantity(flop / found.tokens_per_sample)} a token" if found.tokens_per_sample else "")
    ]
    if dense > flop:
        lines.append(f"                {quantity(dense)} if causal attention is counted whole, as PaLM's MFU does")
    for choice in found.checkpointing():
        again = found.hardware_flop(1, choice) - found.hardware_flop(0, choice) - flop
        lines.append(f"recomputed      {quantity(again)} a sample with activation checkpointing {choice}")
    samples = " and ".join(map(str, found.samples[:-1]))
    lines.append(f"basis           {found.basis}: a line through {samples} samples, checked at {found.samples[-1]}")
    lines += [f"NOT AFFINE      {text}" for text in found.not_affine]
    lines += [
        f"COUNTED AS 0    {name}: no formula of its FLOP ({counted(calls, 'call')})"
        for name, calls in _named(found.without_formula).items()
    ]
    return lines


def _named(calls: Mapping[str, int]) -> Mapping[str, int]:
    return dict(sorted(calls.items()))


def _slope(found: Workload, masked: float) -> float:
    return found.model_flop(1, masked=masked) - found.model_flop(0, masked=masked)


def quantity(value: float) -> str:
    """Format a number with three significant digits and, from 1000 on, a decimal prefix such as k or M: ``241 M``.

    Args:
        value: a count without a unit, such as FLOP or parameters.

    >>> quantity(240648192.0), quantity(28.0), quantity(0.0)
    ('241 M', '28', '0')
    >>> quantity(999.4), quantity(999.6), quantity(999999), quantity(1.2344e15)
    ('999', '1 k', '1 M', '1,234 T')
    """
    rounded = float(f"{value:.3g}")
    for size, prefix in _PREFIXES:
        if abs(rounded) >= size:
            text = f"{rounded / size:.3g}" if abs(rounded) < 1000 * size else f"{value / size:,.0f}"
            return f"{text} {prefix}"
    return f"{rounded:.3g}"
