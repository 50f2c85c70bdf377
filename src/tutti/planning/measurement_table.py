"""Read published measurements: a table is recognised by its columns, its units are read from their names.

A role without a column is derived where others determine it: devices from the sizes of a grid, nodes from a placement,
seconds from a bus bandwidth. Column names are compared in lower case without punctuation, so that `# GPUs`, `gpus` and
`GPUs` are one; a suffix such as `_ms` or `(GB)` states the unit. A cell that is empty, `N/A`, not a number or not
positive is missing. A row that lacks what the table's kind needs is left out and named by its line; a table that is
left without rows is named with the reason.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TIME = {
    "s": 1.0,
    "sec": 1.0,
    "secs": 1.0,
    "seconds": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "min": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
}
_RATE = {"gb_s": 1e9, "gbps": 1e9, "mb_s": 1e6}
_SIZE = {"bytes": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}

# Roles: names that published tables use for one quantity, without their unit.
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "set": ("set", "dataset_name", "study"),
    "model": ("model", "model_name"),
    "params_b": ("params_b", "parameters_b", "params_billion", "params"),
    "layers": ("layers", "num_layers", "n_layers", "n_layer", "num_hidden_layers"),
    "hidden": ("hidden", "hidden_size", "hidden_dim", "d_model", "n_embd"),
    "heads": ("heads", "attention_heads", "num_heads", "n_heads", "n_head", "num_attention_heads"),
    "vocabulary": ("vocab", "vocab_size", "vocabulary"),
    "seq_len": ("seq_len", "seq_length", "sequence_length", "seqlen", "context_length"),
    "hardware": ("hardware", "gpu", "gpu_type", "gpu_name", "gpu_model", "accelerator", "device_type"),
    "devices": (
        *("devices", "gpus", "num_gpus", "n_gpus", "num_devices", "n_devices", "gpu_count", "world_size"),
        *("accelerators", "num_accelerators", "n_accelerators", "chips", "num_chips", "n_chips"),
    ),
    "per_node": (
        *("devices_per_node", "gpus_per_node", "per_node", "accelerators_per_node", "chips_per_node"),
        *("devices_per_host", "gpus_per_host"),
    ),
    "interconnect": ("interconnect", "network"),
    "framework": ("framework",),
    "precision": ("precision", "dtype"),
    "recompute": ("recompute", "activation_checkpointing"),
    "sharding": ("sharding", "zero"),
    "micro_batch": ("micro_batch", "micro_batch_size", "mbs", "batch_size_per_gpu", "batch_size_gpu", "per_gpu_batch"),
    "global_batch": ("global_batch", "global_batch_size", "total_batch_size", "gbs"),
    "batch_unit": ("batch_unit",),
    "dp": ("dp", "data_parallelism", "data_parallel", "data_parallel_size", "dp_size"),
    "tp": ("tp", "tensor_parallelism", "tensor_parallel", "tensor_parallel_size", "tp_size"),
    "pp": ("pp", "pipeline_parallelism", "pipeline_parallel", "pipeline_parallel_size", "pp_size"),
    "cp": ("cp", "context_parallelism", "context_parallel", "context_parallel_size", "cp_size"),
    "ep": ("ep", "expert_parallelism", "expert_parallel", "expert_parallel_size", "ep_size"),
    "vpp": ("vpp", "vp", "virtual_pipeline_parallel_size"),
    "step_time": (
        *("step_time", "iteration_time", "iter_time"),
        *("time_per_step", "time_per_iteration", "time_per_iter", "time_per_global_step"),
    ),
    "samples_per_s": (
        *("samples_per_s", "samples_per_sec", "samples_per_second", "samples_s", "samples_sec"),
        *(
            "images_per_s",
            "images_per_sec",
            "images_per_second",
            "images_s",
            "images_sec",
            "img_s",
            "img_sec",
            "imgs_s",
        ),
        *("sequences_per_s", "sequences_per_sec", "sequences_per_second", "sequences_s", "sequences_sec"),
        *("throughput_samples_per_s", "throughput_samples_s", "throughput_images_s", "throughput_img_s"),
    ),
    "samples_per_s_per_device": (
        *("samples_per_s_per_device", "samples_per_sec_per_device", "samples_per_s_per_gpu", "samples_per_sec_per_gpu"),
        *("samples_s_gpu", "samples_sec_gpu", "images_s_gpu", "images_sec_gpu", "sequences_s_gpu", "sequences_sec_gpu"),
        *("images_per_s_per_gpu", "images_per_sec_per_gpu", "images_per_s_per_device", "images_per_sec_per_device"),
    ),
    "tokens_per_s": (
        *("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tokens_s", "tokens_sec", "tok_s", "tok_sec"),
        *("throughput_tokens_per_s", "throughput_tokens_s", "total_tokens_per_s", "total_tokens_s"),
    ),
    "tokens_per_s_per_device": (
        *("tokens_per_s_per_device", "tokens_per_sec_per_device", "tokens_per_s_per_gpu", "tokens_per_sec_per_gpu"),
        *("tokens_s_gpu", "tokens_sec_gpu", "tok_s_gpu", "tps_gpu"),
    ),
    "tflops_per_device": (
        *("tflops_per_device", "tflops_per_gpu", "tflops_gpu", "tflop_s_gpu", "tflops_s_gpu", "tflop_sec_gpu"),
        *(
            "model_tflops_per_gpu",
            "model_tflop_s_gpu",
            "model_tflops_s_gpu",
            "model_tflop_sec_gpu",
            "model_tflops_sec_gpu",
        ),
    ),
    "tflops_kind": ("tflops_kind",),
    "workload": ("workload", "application", "job"),
    "nodes": ("nodes", "num_nodes", "n_nodes", "hosts"),
    "replicas": ("replicas", "num_replicas", "n_replicas"),
    "placement": ("placement",),
    "local_batch": ("local_batch", "local_bsz", "local_batch_size"),
    "ranks": ("ranks", "num_ranks", "n_ranks", "nranks"),
    "size": ("bytes", "size", "message", "message_size"),
    "out_of_place": ("out_of_place", "oop", "out_of_place_time", "time"),
    "in_place": ("in_place", "in_place_time"),
    "bus_rate": ("out_of_place_busbw", "in_place_busbw", "busbw"),
    "bench": ("bench", "benchmark"),
    "version": ("version", "round"),
    "seq": ("seq",),
    "batch": ("batch", "batch_size"),
    "last_eval": (
        *("last_eval", "epochs", "epochs_to_target", "epochs_to_train", "epochs_to_converge"),
        *("samples_to_target", "samples_to_train", "samples_to_converge"),
    ),
    "minutes": ("mean_min", "time_to_target", "time_to_train", "training_time", "train_time"),
    "throughput": ("thr",),
    "runs": ("runs",),
    "ok": ("ok",),
    "acc": ("acc",),
    "system": ("system",),
    "epoch": ("epoch",),
    "iteration": ("iteration",),
    "metric": ("metric",),
    "grad_sqr": ("grad_sqr",),
    "grad_var": ("grad_var",),
    "model_size": ("model_size", "n_params", "num_params", "num_parameters"),
    "training_flop": ("training_flop", "training_flops"),
    "training_tokens": ("training_tokens", "tokens"),
    "loss": ("loss", "final_loss", "eval_loss", "val_loss", "validation_loss"),
}
_ROLE = {name: role for role, names in _ALIASES.items() for name in names}

# Kinds in the order of recognition: all roles of the second field, one of the third where there are several, and of
# the fourth any that the table has a column for.
_TRUTHS = ("step_time", "samples_per_s", "tokens_per_s_per_device", "tflops_per_device")
_PER_STEP = re.compile(rf"({'|'.join(_TIME)})_(?:per_)?(?:step|iteration|iter|it)")
_GRID = ("devices", "global_batch", "micro_batch", "hidden", "layers", "seq_len", "dp", "tp", "pp", "step_time")
_KINDS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("all-reduce", ("ranks", "size"), ("out_of_place", "in_place"), ()),
    ("metric by epoch", ("batch", "metric"), ("iteration", "epoch"), ("workload", "grad_sqr", "grad_var")),
    ("data to target", ("batch", "last_eval"), (), ("bench",)),
    ("published jobs", ("set", "devices"), _TRUTHS, ()),
    ("iteration by grid", _GRID, (), ()),
    ("small cluster", ("replicas", "step_time"), (), ("workload", "nodes", "local_batch")),
    ("scaling law", ("model_size", "training_flop", "loss"), (), ()),
    ("published jobs", ("devices",), _TRUTHS, ("model",)),
)

_MISSING = frozenset(
    {"", "na", "n/a", "n.a.", "#n/a", "nan", "none", "null", "-", "--", "–", "—", "?", "inf", "tbd", "unknown"}
)


@dataclass(frozen=True)
class TableRow:
    """One row of a table of measurements; numbers are in SI units, and missing values are absent.

    Attributes:
        text: text of each cell by the role of its column: the standard name of the column's quantity (``column_role``),
            such as ``hardware``.
        numbers: number of each cell by role, such as ``step_time``, and numbers that other cells of the row determine.
    """

    text: Mapping[str, str]
    numbers: Mapping[str, float]

    def number(self, role: str, default: float = math.nan) -> float:
        """Return the number that a row of a measurement table has in the column of a quantity, in SI units.

        Args:
            role: standard name of the quantity, such as ``step_time``, as ``column_role`` gives it.
            default: returned where the row has no number of this quantity; default: NaN.
        """
        return self.numbers.get(role, default)

    def label(self, *roles: str) -> str:
        """Return the texts of a table row in columns with given roles, such as ``hardware``, joined by `` / ``.

        Missing cells are left out; the text is empty where all are missing.

        Args:
            roles: standard names of the quantities in the columns, as ``column_role`` gives them.
        """
        return " / ".join(self.text[role] for role in roles if self.text.get(role))


@dataclass
class MeasurementTable:
    """A published table of measurements with its recognised kind, or the reason why the table cannot be used.

    Attributes:
        name: the file's name, for messages alone.
        kind: kind of the measurements, such as ``all-reduce`` or ``published jobs``; empty where it is not recognised.
        rows: a ``TableRow`` for each row that has all cells which the kind needs: its ``text`` and ``numbers`` are
            dictionaries by role, the standard name of a column's quantity such as ``step_time``; numbers are in SI
            units. Empty where the table cannot be used.
        reason: reason why the table, or some of its rows, are not used; empty if all rows are used.
    """

    name: str
    kind: str = ""
    rows: list[TableRow] = field(default_factory=list)
    reason: str = ""


def column_role(name: str) -> tuple[str, float]:
    """Return the standard name of the quantity in a column, and the factor that converts its numbers to SI units.

    Args:
        name: header of the column, in any of the spellings that published tables use.

    Returns:
        The role, a key such as ``step_time`` or ``devices``, and the factor; an empty text and 1 for a name that is not
        known.

    >>> column_role("iteration time (ms)"), column_role("# GPUs"), column_role("Bytes"), column_role("colour")
    (('step_time', 0.001), ('devices', 1.0), ('size', 1.0), ('', 1.0))
    >>> column_role("ms/step"), column_role("s/it")
    (('step_time', 0.001), ('step_time', 1.0))
    """
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if plain in _ROLE:
        return _ROLE[plain], 1.0
    stem, _, unit = plain.rpartition("_")
    units = _SIZE if _ROLE.get(stem) == "size" else _TIME
    if stem in _ROLE and unit in units:
        return _ROLE[stem], units[unit] / (60.0 if _ROLE[stem] == "minutes" else 1.0)
    if (per_step := _PER_STEP.fullmatch(plain)) is not None:
        return "step_time", _TIME[per_step[1]]
    for unit, factor in _RATE.items():
        if _ROLE.get(plain.removesuffix(f"_{unit}")) == "bus_rate":
            return "bus_rate", factor
    return "", 1.0


_SCALES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_DECIMAL_COMMA = re.compile(r"[-+]?(0|\d*),(\d{1,2}|\d{4,})|[-+]?0,\d+|[-+]?\d{1,3}(\.\d{3})+,\d+")
_DECIMAL_POINT = re.compile(r"[-+]?\d[\d,]*\.\d+")


def _number(text: str, decimal_comma: bool = False) -> float:
    """Return the number of a cell, NaN where there is none: ``1,024.5``, ``12,5`` and ``6.7B`` are numbers.

    Args:
        text: the cell.
        decimal_comma: whether the table writes decimals with a comma, so that ``1,024`` is a bit more than one.

    >>> _number("1,024"), _number("1,024", decimal_comma=True), _number("9 800"), _number("6.7B"), _number("1,2,3")
    (1024.0, 1.024, 9800.0, 6700000000.0, nan)
    """
    plain = re.sub(r"(?<=\d)[ \u00a0\u202f'’](?=\d{3}(\D|$))", "", text.strip()).replace("_", "").lstrip("~≈")
    if decimal_comma and plain.count(",") == 1:
        plain = plain.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", plain):
        plain = plain.replace(",", "")
    elif plain.count(",") == 1 and "." not in plain:
        plain = plain.replace(",", ".")
    scaled = re.fullmatch(r"([-+]?[\d.]+) ?([kmgbt])", plain, re.IGNORECASE)
    try:
        value = float(scaled[1]) * _SCALES[scaled[2].lower()] if scaled else float(plain)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _has_decimal_comma(cells: Sequence[str], separator: str) -> bool:
    """Return whether a table writes decimals with a comma: a cell shows it, or semicolons do and no cell has a point.

    Programs separate columns by semicolons where the comma is the decimal mark.
    """
    texts = [text.strip() for text in cells]
    if any(_DECIMAL_POINT.fullmatch(text) for text in texts):
        return False
    return separator == ";" or any(_DECIMAL_COMMA.fullmatch(text) for text in texts)


_SIGNED = frozenset({"metric", "last_eval"})
_LARGE = frozenset({"training_flop", "grad_sqr", "grad_var"})
"""Roles whose numbers may pass 10¹⁵; any other number outside 10⁻¹⁵ to 10¹⁵ is a mistake and missing."""


def _plausible(role: str, value: float) -> bool:
    if role in _SIGNED:
        return abs(value) < 1e15
    return 1e-15 < value < 1e15 or (role in _LARGE and 0 < value < 1e30)


def read_row(cells: Mapping[str, str], roles: Mapping[str, tuple[str, float]], decimal_comma: bool = False) -> TableRow:
    """Convert the cells of a table's row to texts and to numbers in SI units, both by the role of the column.

    A number is kept if it is positive and plausible: between 1e-15 and 1e15, for training FLOP and squared gradients up
    to 1e30. Numbers of the roles ``metric`` and ``last_eval`` may have any sign. An empty cell, or one such as ``n/a``
    or ``unknown``, is left out.

    Args:
        cells: text of each cell by header of its column.
        roles: role (standard name, such as ``step_time``) and unit factor of each known column, by its header.
        decimal_comma: whether the table writes decimals with a comma.

    Returns:
        A ``TableRow`` with two dicts by role: ``text`` of each cell, and ``numbers`` of the cells that have a number to
        keep. Of several columns with one role the first with a cell counts.
    """
    text: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for column, (role, factor) in roles.items():
        cell = " ".join((cells.get(column) or "").split())
        if cell.lower() in _MISSING or role in text:
            continue
        text[role] = cell
        value = _number(cell, decimal_comma) * factor
        if math.isfinite(value) and _plausible(role, value):
            numbers[role] = value
    return TableRow(text, numbers)


def replicas_by_node(placement: str, replicas: float = math.nan, nodes: float = math.nan) -> list[int]:
    """Parse a text on the placement of replicas on nodes into the number of replicas on each node.

    The text is one digit for each node, separated numbers, or one number for all nodes.

    Args:
        placement: the text.
        replicas: number of replicas on all nodes; NaN if unknown.
        nodes: number of nodes; NaN if unknown.

    Returns:
        Number of replicas of each node, in the first reading that agrees with both totals; empty if none does.

    >>> replicas_by_node("224"), replicas_by_node("4,4,16"), replicas_by_node("4", replicas=8)
    ([2, 2, 4], [4, 4, 16], [4, 4])
    """
    numbers = [int(each) for each in re.findall(r"\d+", placement)[:4096]]
    readings = [[int(digit) for digit in str(numbers[0])]] if len(numbers) == 1 else []
    readings.append(numbers)
    if len(numbers) == 1 and 0 < numbers[0] < 1e5:
        count = nodes if nodes > 0 else replicas / numbers[0]
        readings += [numbers * int(count)] if 1 <= count < 1e5 else []
    for each in readings:
        fits = math.isnan(replicas) or sum(each) == replicas
        if each and min(each) > 0 and fits and (math.isnan(nodes) or len(each) == nodes):
            return each
    return []


_COUNTED = 1e5
"""Parameters above which a number counts them one by one: no model has so many billions."""


def _derive(row: TableRow) -> TableRow:
    """Return a row with the numbers that its other cells determine."""
    found, text = dict(row.numbers), row.text
    have = found.get
    if have("params_b", 0.0) >= _COUNTED:
        found["params_b"] /= 1e9
    if "params_b" in found:
        found.setdefault("model_size", 1e9 * found["params_b"])
    if "global_batch" in found:
        found.setdefault("batch", found["global_batch"])
    if "hardware" in text:
        text = {"acc": text["hardware"], **text}
    grid = math.prod(have(role, 1.0) for role in ("dp", "tp", "pp", "cp", "ep"))
    if "dp" in found:
        found.setdefault("devices", grid)
    elif "nodes" in found and "per_node" in found:
        found.setdefault("devices", found["nodes"] * found["per_node"])
    if "devices" in found and "size" in found:
        found.setdefault("ranks", found["devices"])
    if "devices" in found and "tokens_per_s" in found:
        found.setdefault("tokens_per_s_per_device", found["tokens_per_s"] / found["devices"])
    if "devices" in found and "samples_per_s_per_device" in found:
        found.setdefault("samples_per_s", found["samples_per_s_per_device"] * found["devices"])
    for missing in ("dp", "tp", "pp"):
        if "devices" in found and sum(role in found for role in ("dp", "tp", "pp")) == 2 and missing not in found:
            found[missing] = max(1.0, found["devices"] / grid)
    placed = replicas_by_node(row.text.get("placement", ""), have("replicas", math.nan), have("nodes", math.nan))
    if placed:
        found.setdefault("replicas", float(sum(placed)))
        found.setdefault("nodes", float(len(placed)))
    stated = re.search(r"(\d+)\s*(?:a|per)\s*node", row.text.get("hardware", ""))
    each = float(stated[1]) if stated else have("per_node", math.nan)
    if "replicas" in found and each > 0:
        found.setdefault("nodes", float(math.ceil(found["replicas"] / each)))
    if "size" in found and "bus_rate" in found and have("ranks", 1.0) > 1:
        seconds = 2 * (1 - 1 / found["ranks"]) * found["size"] / found["bus_rate"]
        if "in_place" not in found:
            found.setdefault("out_of_place", seconds)
    if "model_size" in found and "training_tokens" in found:
        found.setdefault("training_flop", 6 * found["model_size"] * found["training_tokens"])
    return TableRow(text, found)


_TEXTUAL = frozenset({"set", "workload", "bench", "model"})


_NAMED = 5
"""Lines of a file that a reason names for each missing number; further ones are counted."""


def _missing_role(row: TableRow, needed: Sequence[str], any_of: Sequence[str]) -> str:
    """Return the first role that a row needs and lacks; empty for a complete row."""
    lacking = [role for role in needed if role not in (row.text if role in _TEXTUAL else row.numbers)]
    if any_of and not any(role in row.numbers for role in any_of):
        lacking.append(" or ".join(any_of))
    return lacking[0] if lacking else ""


def _name_lines(every: int, incomplete: Mapping[str, Sequence[int]]) -> str:
    """Return how many of a table's rows are left out, with the lines of the file that lack each role."""
    left = sum(map(len, incomplete.values()))
    parts = []
    for role, lines in incomplete.items():
        more = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        many = "lines" if len(lines) > 1 else "line"
        parts.append(f"{role} in {many} {', '.join(map(str, lines[:_NAMED]))}{more}")
    return f"{left} of {every} rows lack a number: {'; '.join(parts)}" if left else ""


def recognise_table(
    name: str,
    header: Sequence[str],
    cells: Sequence[Mapping[str, str]],
    lines: Sequence[int] | None = None,
    separator: str = ",",
) -> MeasurementTable:
    """Recognise the kind of a published table of measurements by its columns, and keep the rows that are complete.

    Args:
        name: the file's name, copied into the result.
        header: names of the columns.
        cells: the rows, each with the text of its cells by column.
        lines: line of the file in which each row ends, by which ``reason`` names incomplete rows; None: one line a row,
            after the header's.
        separator: separator of the columns in the file. With semicolons, commas in numbers are decimal marks if no
            number of the table has a point.

    Returns:
        A ``MeasurementTable`` with its ``kind`` (``all-reduce``, ``metric by epoch``, ``data to target``, ``published
        jobs``, ``iteration by grid``, ``small cluster`` or ``scaling law``), its complete ``rows`` in SI units, and
        ``reason``, which counts the incomplete rows. Where no kind is recognised, ``kind`` and ``rows`` are empty, and
        ``reason`` says which columns or numbers the nearest kind would have needed.
    """
    roles = {column: column_role(column) for column in header if column_role(column)[0]}
    named = {role for role, _ in roles.values()}
    numeric = [column for column, (role, _) in roles.items() if role not in (*_TEXTUAL, "version", "hardware")]
    decimal_comma = _has_decimal_comma([row.get(column) or "" for row in cells for column in numeric], separator)
    every = [_derive(read_row(each, roles, decimal_comma)) for each in cells]
    if "last_eval" not in named and {"minutes", "throughput"} <= named:
        every = [_samples_seen(row) for row in every]
    have = named.union(*(row.numbers for row in every))
    lacking: list[tuple[int, str, list[str]]] = []
    for kind, needed, any_of, optional in _KINDS:
        missing = [role for role in needed if role not in have]
        if any_of and not have & set(any_of):
            missing.append(" or ".join(any_of))
        if missing:
            lacking.append((len(missing), kind, missing))
            continue
        wanted = (*needed, *(role for role in optional if role in have))
        missed = [_missing_role(row, wanted, any_of) for row in every]
        rows = [row for row, role in zip(every, missed, strict=True) if not role]
        if not rows:
            lacking.append((0, kind, ["numbers in one row at least"]))
            continue
        incomplete: dict[str, list[int]] = {}
        for line, role in zip(lines or range(2, len(every) + 2), missed, strict=True):
            if role:
                incomplete.setdefault(role, []).append(line)
        return MeasurementTable(name, kind, rows, _name_lines(len(every), incomplete))
    _, kind, missing = min(lacking)
    return MeasurementTable(name, reason=f"not recognised: {kind}, the nearest kind, needs {', '.join(missing)}")


def _samples_seen(row: TableRow) -> TableRow:
    """Return a row with the samples that were seen up to the target: minutes × samples per second."""
    if "minutes" not in row.numbers or "throughput" not in row.numbers:
        return row
    samples = 60 * row.numbers["minutes"] * row.numbers["throughput"]
    return TableRow(row.text, {**row.numbers, "last_eval": samples})


def _decode(content: bytes) -> str:
    """Return the text of a file in UTF-8, in UTF-16 with a byte order mark, or else in Latin-1."""
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return content.decode("utf-16", errors="replace")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")


_TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_OTHER_DATA = frozenset(
    {".json", ".jsonl", ".xls", ".xlsx", ".ods", ".parquet", ".feather", ".zip", ".gz", ".bz2", ".xz", ".zst"}
)
"""Files that may hold measurements, and are named as not read."""


def _lines_of_table(text: str) -> tuple[list[str], str, int]:
    """Return the lines of a table from its header on, the separator of its columns, and the lines before the header.

    The separator is a comma, semicolon or tab, the one that the header has most of. Lines before the header are empty,
    are Excel's ``sep=;``, or are comments with ``#`` that name no known column.
    """
    lines = io.StringIO(text, newline="").readlines()
    for number, line in enumerate(lines):
        separator = max(",;\t", key=line.count)
        comment = line.startswith("#") and not any(column_role(name)[0] for name in line.split(separator))
        if line.strip() and not comment and not re.fullmatch(r"sep=.", line.strip().lower()):
            return lines[number:], separator, number
    return [], ",", 0


def read_tables(folder: Path) -> list[MeasurementTable]:
    """Read every CSV or TSV file in a folder and its subfolders as a table of measurements, and recognise its kind.

    The separator is a comma, semicolon or tab, the one that the header has most of. Files may be compressed by gzip.
    Nothing is raised: a file that cannot be read or recognised becomes a table without rows, whose ``reason`` says why.

    Args:
        folder: folder that is searched for names that end in ``.csv`` or ``.tsv``, with or without ``.gz``.

    Returns:
        One ``MeasurementTable`` for each file, sorted by path, with its ``name`` (path within ``folder``), ``kind``,
        such as ``all-reduce``, and ``rows`` in SI units. Files of other data formats, such as spreadsheets, are in the
        list with a ``reason`` alone. Empty where there is no such file.
    """
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = str(path.relative_to(folder))
        if not name.lower().endswith(_TABLES):
            if path.suffix.lower() in _OTHER_DATA:
                found.append(MeasurementTable(name, reason="not read: write it as CSV or TSV, or gzip one of these"))
            continue
        try:
            content = path.read_bytes()
            content = gzip.decompress(content) if path.suffix.lower() == ".gz" else content
            table, separator, before = _lines_of_table(_decode(content))
            reader = csv.DictReader(table, delimiter=separator, restkey="_rest", restval="")
            header = [column for column in (reader.fieldnames or []) if column]
            cells, lines = [], []
            for row in reader:
                cells.append({key: value for key, value in row.items() if isinstance(value, str)})
                lines.append(before + reader.line_num)
        except (OSError, EOFError, zlib.error, csv.Error) as error:
            found.append(MeasurementTable(name, reason=f"cannot be read: {error}"))
            continue
        if not header or not cells:
            found.append(MeasurementTable(name, reason="no header or no rows"))
        else:
            found.append(recognise_table(name, header, cells, lines, separator))
    return found
