"""``tutti export``: write a run's weights for use without tutti. Loads no torch, but for ``--format dcp``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tutti.checkpoint.chosen_checkpoint import chosen_checkpoint
from tutti.checkpoint.export import export_weights
from tutti.checkpoint.export_folder import export_dcp_folder, export_hf_folder
from tutti.checkpoint.weights import SavedWeights, matching_weights
from tutti.config.metric_direction import RAW
from tutti.errors import ExitCode, UsageError
from tutti.launcher.encoding import json_text


def export(
    run: Annotated[Path, Parameter(show=False)],
    /,
    *,
    step: Annotated[str, Parameter(show_default=False)] = "newest",
    form: Annotated[Literal["safetensors", "hf", "dcp"], Parameter(name="--format")] = "safetensors",
    output: Annotated[Path | None, Parameter(name=("--out", "-o", "--output"), show_default=False)] = None,
    only: Annotated[str | None, Parameter(show_default=False)] = None,
    ema: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    overwrite: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="", show_default=False)] = False,
) -> int:
    """Write a run's weights as files that plain PyTorch loads.

    Example: tutti export runs/NAME --step best -o model.safetensors

    RUN is a run directory or one of its checkpoints. Loads in PyTorch with
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

    Parameters
    ----------
    step:
        which checkpoint: its step, best, best:NAME or newest; default: newest
    form:
        one file; hf: a folder for from_pretrained; dcp: one for torch.distributed.checkpoint
    output:
        the file or folder to write; default: model.safetensors, or model
    only:
        export tensors whose names match, such as *lora_* or head.*+norm.*
    ema:
        export the average of the weights, of a run with --ema
    overwrite:
        allow the file, or weights in the folder, to exist
    as_json:
        print one JSON object instead of one line

    Returns
    -------
    int
        Exit code. 0: the weights are written, and one line or JSON on them is printed. A missing run or an
        existing file raises UsageError, which ``tutti`` turns into exit code 2; a checkpoint that is missing or
        damaged raises CheckpointError (4), a file that cannot be written DiskError (8).
    """
    manifest = chosen_checkpoint(run, step, lambda text: print(f"tutti: {text}", file=sys.stderr))
    whole = SavedWeights(manifest, ema)
    weights = whole if only is None else matching_weights(whole, only)
    facts = {
        "step": manifest.step,
        "weights": "ema" if ema else "model",
        "config_sha256": manifest.config_sha256,
        "task": str(manifest.facts.get("task", "")),
    }
    metadata = {name: str(value) for name, value in facts.items()}
    output = output or Path("model.safetensors" if form == "safetensors" else "model")
    if form == "dcp":
        if overwrite:
            raise UsageError("--format dcp writes a new folder", remedy="choose another -o, and leave --overwrite out")
        digest, size = export_dcp_folder(weights, output)
    else:
        write = export_hf_folder if form == "hf" else export_weights
        digest, size = write(weights, output, metadata, overwrite)
    found: dict[str, Any] = {
        "path": str(output),
        "format": form,
        **facts,
        "checkpoint": str(manifest.path),
        "tensors": len(weights.records),
    }
    found |= {"bytes": size, "weights_sha256": digest, "eval": manifest.facts.get("eval")}
    print(json_text(found, sys.stdout) if as_json else export_line(found))
    return ExitCode.DONE


def export_line(found: dict[str, Any]) -> str:
    """Summarise exported weights in one line: file, step, tensors, size, held-out values and digest of the weights.

    ``found`` is the JSON object of ``tutti export --json``, with ``path``, ``step``, ``weights`` (``ema`` for the
    average of the weights, else ``model``), ``tensors``, ``bytes``, ``weights_sha256``, and ``eval``, held-out values
    by name or None.

    >>> export_line({"path": "m.safetensors", "step": 1200, "weights": "ema", "tensors": 12, "bytes": 2_345_678,
    ...       "weights_sha256": "3fa9", "eval": {"loss": 0.5, "raw_loss": 0.6}})
    'm.safetensors: average of the weights at step 1200 · 12 tensors, 2.3 MB · held-out loss 0.5000 · weights 3fa9'
    """
    what = "average of the weights" if found["weights"] == "ema" else "weights"
    held_out = ", ".join(f"{name} {value:.4f}" for name, value in _values(found).items())
    parts = [
        f"{what} at step {found['step']}",
        f"{found['tensors']} tensors, {found['bytes'] / 1e6:.1f} MB",
        *([f"held-out {held_out}"] if held_out else []),
        f"weights {found['weights_sha256'][:12]}",
    ]
    return f"{found['path']}: {' · '.join(parts)}"


def _values(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the held-out values of the exported weights: of their average, or of the trained weights."""
    known = {name: value for name, value in (found["eval"] or {}).items() if isinstance(value, int | float)}
    raw = {name.removeprefix(RAW): value for name, value in known.items() if name.startswith(RAW)}
    if raw and found["weights"] != "ema":
        return raw
    return {name: value for name, value in known.items() if not name.startswith(RAW)}
