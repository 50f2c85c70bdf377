"""Back-tests on folders whose law is known, on damaged folders, and where it is present on published measurements."""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tutti.planning import backtest
from tutti.planning.conformal_band import (
    NO_BAND,
    CellScores,
    CheckedPrediction,
    band_factor,
    band_unit,
    collect_scores,
    read_residuals,
    shipped_residuals,
    write_residuals,
)
from tutti.planning.hardware_anchor import HardwareAnchor, anchored_rate, kindred_rate, shipped_anchors
from tutti.planning.law_fit import FittedLaw, fit_law, fit_target
from tutti.planning.measurement_table import column_role, read_tables
from tutti.planning.scaling_laws import ALLREDUCE_LAW, ANCHORED_LAW, DATA_PARALLEL_LAW, GPT_GRID_LAW

ROOT = Path(__file__).parents[2]
DATA = os.environ.get("TEST_SCALING_DATA", "")
TRUTH = np.array([0.05, 0.002, 1e-4, 0.02, 1e-4, 0.1, 1.0, 2.0])
MEASURED = pytest.mark.skipif(not DATA, reason="TEST_SCALING_DATA names no folder of published measurements")


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def synthetic_folder(folder: Path, noise: float = 0.02) -> Path:
    """Tables of the published layout, whose laws are known, under names that say nothing."""
    random = np.random.default_rng(3)

    def near(value: float) -> float:
        return float(value * np.exp(noise * random.standard_normal()))

    cluster = []
    for workload, factor in (("p", 1.0), ("q", 3.0)):
        for replicas in (1, 2, 4, 8, 16, 32):
            for nodes in sorted({max(1, replicas // 4), max(1, replicas // 2), replicas}):
                for batch in (8, 16, 32):
                    inputs = {"replicas": replicas, "nodes": nodes, "local_batch": batch}
                    arrays = {name: np.array([float(value)]) for name, value in inputs.items()}
                    seconds = factor * float(DATA_PARALLEL_LAW.seconds(TRUTH, arrays)[0])
                    cluster.append([workload, "X1", nodes, replicas, batch, 1e3 * near(seconds)])
    write(folder / "a.csv", ["workload", "gpu", "nodes", "replicas", "local_batch", "step_time_ms"], cluster)
    ring = []
    for ranks in (2, 3, 4, 6, 8):
        for size in 2.0 ** np.arange(12, 28):
            one = {"ranks": np.array([float(ranks)]), "bytes": np.array([size])}
            seconds = ALLREDUCE_LAW.seconds(np.array([2e-6, 1e-5, 1e11, 4e11, 1e-5, 1e10]), one)
            ring.append([ranks, size, near(float(seconds[0])), "x1"])
    write(folder / "b.csv", ["ranks", "bytes", "out_of_place_s", "hardware"], ring)
    target = [
        [name, "", batch, near(1e6 * (1 + batch / 5000)), 3, 3]
        for name in ("u", "v")
        for batch in (256, 512, 1024, 2048, 4096)
    ]
    write(folder / "c.csv", ["bench", "seq", "batch", "last_eval", "runs", "ok"], target)
    jobs = []
    for devices in (8, 16, 32, 64):
        for length in (1024, 2048, 4096):
            flops = (6 * 1.3e9 + 12 * 24 * 2048 * length) * length
            seconds = near(flops * 4 / 1.5e14)
            jobs.append(["s", "m", 1.3, 24, 2048, 16, length, "A100 80GB", devices, 8, 4, 4 * devices, "bf16", seconds])
    header = "set,model,params_b,layers,hidden,heads,seq_len,hardware,devices,devices_per_node,micro_batch,global_batch"
    write(folder / "d.csv", [*header.split(","), "precision", "step_time_s"], jobs)
    return folder


def named(result: backtest.BacktestResult, table: str, protocol: str) -> list[dict[str, float]]:
    return [row for row in result.rows if row["table"] == table and row["protocol"] == protocol]  # type: ignore[misc]


def test_known_laws_are_recovered_beyond_the_fitted_sizes(tmp_path: Path) -> None:
    result = backtest.run_backtest(synthetic_folder(tmp_path))
    for table, protocol, limit in (
        ("small cluster", "extrapolated", 0.05),
        ("all-reduce", "extrapolated", 0.04),
        ("published jobs", "anchored", 0.12),
        ("data to target", "extrapolated", 0.1),
    ):
        rows = named(result, table, protocol)
        assert rows, (table, protocol)
        assert all(row["mean"] < limit for row in rows), (table, protocol, rows)
        assert all(row["n"] > 0 and row["median"] <= row["worst"] for row in rows)


def test_the_file_name_and_the_set_name_change_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    synthetic_folder(first)
    for number, path in enumerate(sorted(first.iterdir(), reverse=True)):
        text = path.read_text().replace("\ns,", "\nllm-foundry,").replace("\nu,", "\nresnet,")
        (second / f"mlperf{number}.csv").write_text(text)
    figures = [
        sorted((row["table"], row["protocol"], row["n"], row["mean"]) for row in backtest.run_backtest(folder, {}).rows)  # type: ignore[type-var]
        for folder in (first, second)
    ]
    kept = [[row for row in rows if not str(row[1]).startswith("zero-shot")] for rows in figures]
    assert kept[0] == kept[1]


def test_units_and_spellings_of_columns(tmp_path: Path) -> None:
    header = ["# GPUs", "Global Batch", "micro batch", "hidden size", "# layers", "sequence length"]
    header += ["tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)"]
    write(tmp_path / "x.csv", header, [[8, "1,024", 2, 1024, 24, 1024, 1, 8, 1, 250.0]])
    (table,) = read_tables(tmp_path)
    assert table.kind == "iteration by grid"
    assert table.rows[0].number("step_time") == 0.25
    assert table.rows[0].number("global_batch") == 1024


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("#-GPUs", "devices"),
        ("Tokens / sec / GPU", "tokens_per_s_per_device"),
        ("Model TFLOP / sec / GPU", "tflops_per_device"),
        ("Time per Global Step (s)", "step_time"),
        ("images/sec", "samples_per_s"),
        ("Batch size / GPU", "micro_batch"),
        ("MBS", "micro_batch"),
        ("GBS", "global_batch"),
        ("VP", "vpp"),
        ("# chips", "devices"),
        ("GPUs per host", "per_node"),
        ("s/it", "step_time"),
        ("tokens/s", "tokens_per_s"),
        ("images/s/GPU", "samples_per_s_per_device"),
    ],
)
def test_names_that_people_give_to_columns(name: str, role: str) -> None:
    assert column_role(name) == (role, 1.0)


def test_a_page_of_a_framework_is_recognised(tmp_path: Path) -> None:
    header = ["Model", "#-GPUs", "GBS", "MBS", "Sequence Length", "TP", "PP", "CP", "VP", "Tokens / sec / GPU"]
    rows = [["m", 64 * share, 256 * share, 2, 2048, 2, 1, 1, 1, 5851 - share] for share in (1, 2, 4)]
    write(tmp_path / "x.csv", header, rows)
    result = backtest.run_backtest(tmp_path, {})
    (row,) = named(result, "published jobs", "anchored")
    assert row["n"] == 2 and row["mean"] < 0.05


def test_commas_group_digits_or_stand_for_a_point_and_other_cells_are_missing(tmp_path: Path) -> None:
    cells = [("1,024", 1024.0), ("1,234,567.5", 1234567.5), ("12,5", 12.5), ("0,125", 0.125), ("1,2,3", None)]
    rows = [f"x;{cell};1,5" for cell, _ in cells]
    (tmp_path / "x.csv").write_text("\n".join(["gpu;bytes;out_of_place_ms;ranks", *(f"{row};8" for row in rows)]))
    (table,) = read_tables(tmp_path)
    assert [row.number("size") for row in table.rows] == [value for _, value in cells if value is not None]
    assert {row.number("out_of_place") for row in table.rows} == {0.0015}
    assert table.reason == "1 of 5 rows lack a number: size in line 6"


def test_a_table_is_read_in_the_encodings_of_spreadsheets(tmp_path: Path) -> None:
    text = "hardware;ranks;bytes;out_of_place_s\r\nÉtude;2;1000;0,001\r\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "latin-1"):
        (tmp_path / f"{encoding}.csv").write_bytes(text.encode(encoding))
    assert [row.text["hardware"] for table in read_tables(tmp_path) for row in table.rows] == ["Étude"] * 4


@pytest.mark.parametrize(
    ("separator", "cells", "expected"),
    [
        (";", ("187,125", "1.024,5"), (0.187125, 1.0245)),
        (";", ("1,024", "12.5"), (1.024, 0.0125)),
        (",", ('"1,024"', "9 800"), (1.024, 9.8)),
        ("\t", ("0,125", "1,024"), (0.000125, 0.001024)),
    ],
)
def test_a_comma_is_the_decimal_mark_of_a_whole_table_or_of_none(
    separator: str, cells: tuple[str, str], expected: tuple[float, float], tmp_path: Path
) -> None:
    lines = [f"replicas{separator}step time (ms)", f"1{separator}{cells[0]}", f"2{separator}{cells[1]}"]
    (tmp_path / "a.csv").write_text("\n".join(lines), encoding="utf-8")
    (table,) = read_tables(tmp_path)
    assert tuple(row.number("step_time") for row in table.rows) == pytest.approx(expected)


def test_packed_files_and_lines_before_the_header_are_read_and_other_data_are_named(tmp_path: Path) -> None:
    text = "sep=;\n\n# exported, of a cluster\nGPUs;Message size (MB);Time (us)\n2;16;211\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.tsv.gz").write_bytes(b"no gzip")
    (tmp_path / "c.xlsx").write_bytes(b"")
    (tmp_path / "d.md").write_bytes(b"")
    packed, broken, sheet = read_tables(tmp_path)
    assert packed.kind == "all-reduce" and packed.rows[0].number("ranks") == 2
    assert "cannot be read" in broken.reason and "write it as CSV or TSV" in sheet.reason


def test_a_table_of_trainings_is_read_by_the_words_of_its_page(tmp_path: Path) -> None:
    head = ["benchmark", "nodes", "accelerators_per_node", "accelerator", "global batch size"]
    rows = [["resnet", n, 8, "H100", 1024 * n, 35 + n, 6 / n] for n in (1, 2, 8)]
    write(tmp_path / "a.csv", [*head, "epochs to target", "time to train (h)"], rows)
    (table,) = read_tables(tmp_path)
    assert table.kind == "data to target" and table.rows[0].number("minutes") == pytest.approx(360)
    result = backtest.run_backtest(tmp_path)
    assert named(result, "data to target", "extrapolated")[0]["n"] == 2
    assert named(result, "data to target", "time, from at most 1/4 of the devices")[0]["n"] == 1


def test_one_short_message_says_nothing_of_a_rate(tmp_path: Path) -> None:
    header = ["hardware", "ranks", "bytes", "time (us)"]
    write(tmp_path / "a.csv", header, [["A100", 2, 1024, 11], ["A100", 4, 2**20, 60]])
    assert named(backtest.run_backtest(tmp_path), "all-reduce", "anchored")[0]["worst"] < 1


def test_rows_that_are_left_out_are_named_by_their_lines(tmp_path: Path) -> None:
    lines = ["ranks,bytes,out_of_place_s,notes", "2,1e6,1e-4,", "", '4,,1e-4,"two', 'lines"', "n/a,1e6,1e-4,"]
    (tmp_path / "x.csv").write_text("\n".join([*lines, *["4,-1,1e-4,"] * 9, "8,1e6,1e-4,", ""]))
    (table,) = read_tables(tmp_path)
    assert len(table.rows) == 2
    assert table.reason == "11 of 13 rows lack a number: size in lines 5, 7, 8, 9, 10 and 5 more; ranks in line 6"


def test_a_unit_that_rounds_sizes_leaves_series_as_they_are(tmp_path: Path) -> None:
    found = []
    for unit, factor in (("bytes", 1.0), ("size_mb", 1e-6)):
        folder = tmp_path / unit
        folder.mkdir()
        sizes = [2.0**power * factor for power in range(11, 30)]
        rows = [["x", ranks, size, 1e-5 * ranks + size / factor / 1e9] for ranks in (2, 4) for size in sizes]
        write(folder / "x.csv", ["hardware", "ranks", unit, "out_of_place_s"], rows)
        found.append({one.series for _, one in backtest.run_backtest(folder, {}).checked})
    assert found[0] == found[1] and len(found[0]) == 19


def damaged(folder: Path) -> None:
    """Every way in which a table was seen to be broken, or could be."""
    (folder / "empty.csv").write_text("")
    (folder / "header.csv").write_text("ranks,bytes,out_of_place_s\n")
    (folder / "binary.csv").write_bytes(bytes(range(256)) * 20)
    write(folder / "words.csv", ["set", "devices", "step_time_s"], [["s", "many", "slow"], ["s", "-1", "0"]])
    write(folder / "unknown.csv", ["colour", "taste"], [["red", "sweet"]])
    (folder / "ragged.csv").write_text("ranks,bytes,out_of_place_s,hardware\n2,1e6\n4,1e6,1e-4,x,y,z\n8,1e6,2e-4,x\n")
    write(
        folder / "lone.csv",
        ["workload", "gpu", "nodes", "replicas", "local_batch", "step_time_s"],
        [["w", "", 1, 1, 8, 0.1]],
    )
    jobs = [["s", "m", 8, "0.5"], ["s", "m", 16, "0.5"], ["t", "", 8, "N/A"], ["s", "m", 16, "inf"]]
    write(folder / "bare.csv", ["set", "model", "devices", "samples_per_s"], jobs)
    write(
        folder / "target.csv", ["bench", "batch", "last_eval"], [["b", 8, 1], ["b", 8, 2e9], ["b", 64, 3], ["b", 0, 3]]
    )
    header = ["workload", "batch", "epoch", "iteration", "metric", "grad_sqr", "grad_var"]
    flat = [["w", batch, epoch, 10 * epoch, 0.5, 1, 1] for batch in (8, 16) for epoch in (1, 2)]
    write(folder / "flat.csv", header, flat)
    write(folder / "laws.csv", ["Model Size", "Training FLOP", "loss"], [[1e9, 1e20, 3.0]])


def test_no_table_makes_it_fail_and_each_has_a_reason(tmp_path: Path) -> None:
    damaged(tmp_path)
    result = backtest.run_backtest(tmp_path)
    reasons = {row["table"]: str(row["reason"]) for row in result.refused}
    for name in ("empty.csv", "header.csv", "binary.csv", "words.csv", "unknown.csv"):
        assert reasons[name], name
    assert "nearest kind" in reasons["unknown.csv"]
    assert all(np.isfinite([row["mean"], row["worst"]]).all() for row in result.rows)  # type: ignore[arg-type]


def test_notes_on_predictions_are_no_refusals(tmp_path: Path) -> None:
    rows = [["w", n, 8, 0.1 + 0.01 * n] for n in (1, 2, 3, 4, 8)] + [["w", 8, 8, "n/a"]]
    write(tmp_path / "a.csv", ["workload", "replicas", "local_batch", "step_time_s"], rows)
    result = backtest.run_backtest(tmp_path, {})
    predicted = {(row["table"], row["group"], row["protocol"]) for row in result.rows}
    refused = {(row["table"], row["group"], row["protocol"]) for row in result.refused}
    assert predicted and refused and not predicted & refused
    noted = {(str(row["table"]), str(row["protocol"])): str(row["note"]) for row in result.notes}
    assert noted["a.csv", ""] == "1 of 6 rows lack a number: step_time in line 7"
    assert "each replica counts as a node" in noted["small cluster", "anchored"]


def test_a_folder_without_tables_says_so(tmp_path: Path) -> None:
    assert [row["reason"] for row in backtest.run_backtest(tmp_path).refused] == ["no CSV file"]


def checked(name: str, series: int, error: float) -> list[CheckedPrediction]:
    return [
        CheckedPrediction(name, "basis", 2.0, f"{name} {each}", 1.0, 0.0, float(np.exp(error * (each + 1) / series)))
        for each in range(series)
    ]


def test_a_sets_own_residuals_never_band_it() -> None:
    both = [*checked("tame", 100, 0.1), *checked("calm", 100, 0.1)]
    residuals = collect_scores([*checked("wild", 400, 2.0), *both])
    cell = "basis, at most 2 ×"
    wild, tame = band_factor(residuals, cell, "wild"), band_factor(residuals, cell, "tame")
    assert wild is not None and tame is not None
    # 90 % of 0.1 and of 2.0, in the unit of a prediction without spread.
    assert wild * band_unit(0.0) < 0.1 < 1.5 < tame * band_unit(0.0)


@pytest.mark.parametrize(
    ("others", "own", "band"),
    [((10, 10), 9, False), ((10, 10), 10, True), ((5, 3), 50, False), ((50,), 50, False), ((20, 10), 0, True)],
)
def test_a_band_needs_thirty_series_of_which_nine_are_of_two_other_sets(
    others: tuple[int, ...], own: int, band: bool
) -> None:
    sets = [one for name, count in enumerate(others) for one in checked(f"set {name}", count, 0.1)]
    residuals = collect_scores([*sets, *checked("own", own, 0.1)])
    assert (band_factor(residuals, "basis, at most 2 ×", "own") is not None) == band
    assert band_factor(residuals, "nothing like it", "own") is None


def test_groups_in_small_cells_say_that_they_have_no_band(tmp_path: Path) -> None:
    rows = backtest.run_backtest(synthetic_folder(tmp_path), shipped={}).rows
    assert {row.get("band") for row in rows if row["coverage90"] is None} == {NO_BAND}


def test_residuals_are_read_as_they_are_written() -> None:
    residuals = {"cell": {"set": CellScores((0.5, 1.25), 2)}}
    assert read_residuals(write_residuals(residuals)) == residuals
    assert shipped_residuals()


def test_bands_cover_nine_in_ten_new_sets() -> None:
    random = np.random.default_rng(0)
    sets = [
        CheckedPrediction(f"set {name}", "basis", 2.0, f"{name} {each}", 1.0, 0.0, float(np.exp(0.1 * error)))
        for name in range(8)
        for each, error in enumerate(random.standard_normal(40))
    ]
    residuals = collect_scores(sets)
    inside = [one.score <= (band_factor(residuals, one.cell, one.set_name) or 0.0) for one in sets]
    assert 0.85 < np.mean(inside) < 0.95


def test_bands_cover_a_source_that_differs_from_the_others_as_they_differ() -> None:
    random = np.random.default_rng(1)
    spreads = np.exp(random.standard_normal(24))
    sets = [
        CheckedPrediction(f"set {name}", "basis", 2.0, f"{name} {each}", 1.0, 0.0, float(np.exp(0.1 * spread * error)))
        for name, spread in enumerate(spreads)
        for each, error in enumerate(random.standard_normal(40))
    ]
    seen, unseen = sets[: 12 * 40], sets[12 * 40 :]
    factor = band_factor(collect_scores(seen), seen[0].cell, "")
    pooled = np.quantile([one.score for one in seen], 0.9)
    assert factor is not None and factor > pooled
    assert 0.86 < np.mean([one.score <= factor for one in unseen]) < 0.97


THREE = ("zero-shot", "anchored", "extrapolated")


def lines(folder: Path) -> dict[tuple[str, str], set[str]]:
    """Protocols with a line or a reason, by table and group."""
    result = backtest.run_backtest(folder, {})
    found: dict[tuple[str, str], set[str]] = {}
    for row in (*result.rows, *result.refused):
        if row["group"]:
            found.setdefault((str(row["table"]), str(row["group"])), set()).add(str(row["protocol"]))
    return found


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_each_group_has_a_line_or_a_reason_for_each_protocol_without_any_one_column(tmp_path: Path, name: str) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    folder.mkdir()
    synthetic_folder(whole)
    header, *rows = csv.reader((whole / f"{name}.csv").read_text(encoding="utf-8").splitlines())
    kept = rows[:: max(1, len(rows) // 30)]
    vital = {"step_time_ms", "bytes", "out_of_place_s", "ranks", "batch", "last_eval", "devices", "step_time_s"}
    for place, column in enumerate(header):
        write(folder / "x.csv", header[:place] + header[place + 1 :], [r[:place] + r[place + 1 :] for r in kept])
        found = lines(folder)
        if column in vital or (column == "replicas" and name == "a"):
            assert not found, column
            continue
        assert found, column
        assert all(set(THREE) <= protocols for protocols in found.values()), (column, found)


def test_what_other_columns_determine_is_derived(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ["replicas", "placement", "step_time_s"], [[5, "14", 0.5], [3, "1,2", 0.5]])
    write(tmp_path / "b.csv", ["set", "dp", "tp", "pp", "samples_per_s"], [["s", 4, 2, 2, 9.0]])
    write(tmp_path / "c.csv", ["ranks", "bytes", "busbw_gb_s"], [[4, 3e9, 1.5]])
    write(tmp_path / "d.csv", ["replicas", "gpu", "step_time_s"], [[9, "X1 (4 a node)", 0.5]])
    write(tmp_path / "e.csv", ["batch", "mean_min", "thr"], [[64, 2.0, 100.0]])
    cluster, jobs, ring, named, target = read_tables(tmp_path)
    assert [row.number("nodes") for row in (*cluster.rows, *named.rows)] == [2, 2, 3]
    assert jobs.rows[0].number("devices") == 16
    assert ring.rows[0].number("out_of_place") == pytest.approx(3.0)
    assert target.rows[0].number("last_eval") == 12000


@pytest.mark.parametrize(
    ("column", "numbers", "role"),
    [
        ("tokens/s", (8000.0, 15000.0), "tokens_per_s_per_device"),
        ("samples/s/GPU", (2.0, 1.9), "samples_per_s"),
        ("ms/step", (500.0, 530.0), "step_time"),
    ],
)
def test_a_throughput_of_all_devices_and_one_of_each_are_the_same(
    tmp_path: Path, column: str, numbers: tuple[float, float], role: str
) -> None:
    known = {"tokens_per_s_per_device": [1000, 937.5], "samples_per_s": [16, 30.4], "step_time": [0.5, 0.53]}
    rows = [["m", chips, 64 * chips, 1024, value] for chips, value in zip((8, 16), numbers, strict=True)]
    write(tmp_path / "a.csv", ["model", "accelerators", "gbs", "seq_len", column], rows)
    (table,) = read_tables(tmp_path)
    assert table.kind == "published jobs" and not table.reason
    assert [row.number(role) for row in table.rows] == pytest.approx(known[role])
    (row,) = named(backtest.run_backtest(tmp_path, {}), "published jobs", "anchored")
    assert row["n"] == 1


def test_a_step_without_a_global_batch_is_no_throughput(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ["model", "devices", "step_time_s"], [["m", 8, 0.5], ["m", 16, 0.5]])
    result = backtest.run_backtest(tmp_path, {})
    assert not result.rows
    assert {row["protocol"] for row in result.refused} == set(THREE)
    assert all("global batch" in str(row["reason"]) for row in result.refused)


def test_unstated_nodes_are_a_guess_that_is_printed(tmp_path: Path) -> None:
    rows = [["w", replicas, 8, 0.1 + 0.01 * replicas] for replicas in (1, 2, 3, 4, 8)]
    write(tmp_path / "a.csv", ["workload", "replicas", "local_batch", "step_time_s"], rows)
    (row,) = [row for row in backtest.run_backtest(tmp_path, {}).rows if row["protocol"] == "anchored"]
    assert "each replica counts as a node" in str(row["note"])


def extrapolated(folder: Path) -> list[float]:
    checked = backtest.run_backtest(folder, {}).checked
    return [one.predicted for asked, one in checked if asked.protocol == "extrapolated" and "small" in one.set_name]


def test_extrapolated_never_sees_more_than_half_the_devices(tmp_path: Path) -> None:
    folder = synthetic_folder(tmp_path)
    before = extrapolated(folder)
    header, *rows = csv.reader((folder / "a.csv").read_text(encoding="utf-8").splitlines())
    slower = [[*row[:5], 10 * float(row[5])] if row[3] == "32" else row for row in rows]
    write(folder / "a.csv", header, slower)
    # 32 replicas are asked and never fitted, so steps ten times as long change no prediction.
    assert before and extrapolated(folder) == before


def test_time_to_a_target_is_predicted_from_a_quarter_of_the_devices(tmp_path: Path) -> None:
    header = ["bench", "version", "acc", "nodes", "per_node", "batch", "last_eval", "mean_min"]

    def predicted(spoilt: int | None = None) -> dict[float, float]:
        rows = []
        for devices in (2, 4, 8, 16):
            local = 16 if devices == 16 else 64
            data = 1e6 * (1 + local * devices / 20000)
            # Eight devices work for about two minutes; 10 s of every training are the same on any number.
            minutes = (data / devices * (1 + 0.05 * 64 / local) / 6e4 + 1 / 6) * (9 if devices == spoilt else 1)
            rows.append(["u", "1", "X", 1, devices, local * devices, data, minutes])
        write(tmp_path / "runs.csv", header, rows)
        checked = [one for asked, one in backtest.run_backtest(tmp_path).checked if "1/4" in asked.protocol]
        assert [one.distance for one in checked] == [4, 4]
        return {round(float(rows[2 + place][-1]), 6): one.predicted for place, one in enumerate(checked)}

    truth = predicted()
    assert [value / measured for measured, value in truth.items()] == pytest.approx([1, 1], abs=0.05)
    assert [*predicted(spoilt=8).values()] == [*truth.values()]
    assert [*predicted(spoilt=4).values()][1] > 1.5 * [*truth.values()][1]


def progress(
    folder: Path, spoilt: dict[tuple[int, int], float], batches: Sequence[int] = (32, 64, 128, 256)
) -> backtest.BacktestResult:
    """Runs at several batches whose metric rises to 1; some (batch, epoch) have another metric."""
    rows = []
    for batch in batches:
        for epoch in range(1, 41):
            metric = 1 - np.exp(-epoch / (4 + batch / 64))
            rows.append(["w", batch, epoch, spoilt.get((batch, epoch), metric), 1.0, 4.0])
    write(folder / "p.csv", ["workload", "batch", "epoch", "metric", "grad_sqr", "grad_var"], rows)
    return backtest.run_backtest(folder, {})


def test_trainings_without_an_accelerator_say_so(tmp_path: Path) -> None:
    rows = [["u", n, 64 * n, 1e6, 1e6 / n / 6e4] for n in (2, 4, 8, 16)]
    write(tmp_path / "runs.csv", ["bench", "devices", "batch", "last_eval", "mean_min"], rows)
    refused = [row for row in backtest.run_backtest(tmp_path, {}).refused if "1/4" in str(row["protocol"])]
    assert [row["reason"] for row in refused] == ["the table does not say the accelerator of a training (acc)"]


def test_a_pipeline_of_unknown_micro_batches_is_not_all_bubble(tmp_path: Path) -> None:
    header = ["set", "model", "params_b", "seq_len", "hardware", "devices", "tp", "pp", "global_batch", "samples_per_s"]
    rows = [["s", "m", 1.3, 1024, "A100", n, 1, pp, 256, 10 * n] for n, pp in ((8, 1), (16, 2), (64, 8))]
    write(tmp_path / "jobs.csv", header, rows)
    result = backtest.run_backtest(tmp_path)
    found = [one for asked, one in result.checked if asked.protocol == "anchored"]
    assert [one.predicted / one.measured for one in found] == pytest.approx([1, 1], abs=0.3)
    assert "micro_batch not stated: one of all samples" in str(named(result, "published jobs", "anchored"))


def test_a_row_without_its_iteration_leaves_the_unit_of_the_others(tmp_path: Path) -> None:
    rows = [
        ["w", batch, epoch, "" if (batch, epoch) == (128, 9) else 50000 // batch * epoch, 1 - np.exp(-epoch / 6), 1, 4]
        for batch in (32, 64, 128)
        for epoch in range(1, 30)
    ]
    write(tmp_path / "p.csv", ["workload", "batch", "epoch", "iteration", "metric", "grad_sqr", "grad_var"], rows)
    checked = backtest.run_backtest(tmp_path, {}).checked
    assert checked and all(0.2 < one.predicted / one.measured < 5 for _, one in checked)


def test_an_outlier_of_a_metric_reaches_no_level(tmp_path: Path) -> None:
    clean = progress(tmp_path, {})
    spoilt = progress(tmp_path, {(32, 20): 70.0, (64, 30): -9.0, (128, 2): 70.0, (256, 40): 70.0})
    pairs = [(one, other) for (_, one), (_, other) in zip(clean.checked, spoilt.checked, strict=True)]
    assert len(pairs) > 10
    for one, other in pairs:
        # Beside an outlier, a level may move by an epoch.
        assert other.measured == pytest.approx(one.measured, abs=1.05)
        assert other.predicted == pytest.approx(one.predicted, rel=0.05)


def test_a_metric_is_predicted_from_batches_of_at_most_an_eighth_too(tmp_path: Path) -> None:
    result = progress(tmp_path, {}, (32, 64, 128, 512))
    far = [one for asked, one in result.checked if asked.protocol == "extrapolated, at least 8 ×"]
    assert far and {(one.distance, one.series) for one in far} == {(8.0, "w 512")}
    half = [one for asked, one in result.checked if asked.protocol == "extrapolated"]
    assert min(one.distance for one in half) == 2
    near = progress(tmp_path, {}, (32, 64, 128, 256))
    reasons = [row["reason"] for row in near.refused if row["protocol"] == "extrapolated, at least 8 ×"]
    assert reasons == ["no batch so much smaller than another"]


def test_targets_between_two_whole_epoch_evaluations_are_named_on_the_page(tmp_path: Path) -> None:
    rows = [["b", "r1", n, epochs] for n, epochs in ((128, 4.0), (256, 4.0), (512, 5.0), (1024, 6.5), (2048, 9.0))]
    samples = [["s", "r1", n, 2e6 + 1e3 * n] for n in (128, 256, 512)]
    write(tmp_path / "t.csv", ["bench", "version", "batch", "last_eval"], [*rows, *samples])
    code = (
        "import json, sys; from pathlib import Path; import backtest; from tutti.planning.backtest import run_backtest;"
        "print(json.dumps(backtest.whole_epochs(run_backtest(Path(sys.argv[1])))))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    found = {row["series"]: row["measured"] for row in json.loads(done.stdout)}
    assert found == {"b / r1 256": 4.0, "b / r1 512": 5.0, "b / r1 2048": 9.0}


def test_a_source_is_left_out_of_its_own_bands(tmp_path: Path) -> None:
    result = backtest.run_backtest(synthetic_folder(tmp_path))
    rows = result.left_out()
    assert {row["source"] for row in rows} == {one.set_name for _, one in result.checked}
    assert sum(int(str(row["n"])) for row in rows) == len(result.checked)
    banded = [row for row in rows if row["others90"] is not None]
    assert banded
    for row in banded:
        cell = {name: scores for name, scores in result.residuals[str(row["cell"])].items() if name != row["source"]}
        assert row["others90"] == pytest.approx(band_factor({str(row["cell"]): cell}, str(row["cell"]), ""))
        same = [one for _, one in result.checked if (one.set_name, one.cell) == (row["source"], row["cell"])]
        scores = []
        for one in same:
            half, error = row["others90"] * one.width, abs(math.log(one.measured / one.predicted))
            scores.append(2 * half + 20 * max(error - half, 0))
        assert row["interval_score"] == pytest.approx(sum(scores) / len(scores))


def test_rounding_errors_leave_the_width_of_bands_as_it_is() -> None:
    """Measurements that say nothing of some constants leave their posterior without directions of its own."""
    asked = {"replicas": np.array([8.0]), "nodes": np.array([2.0]), "local_batch": np.array([1.0])}
    noise = np.random.default_rng(0).normal(0, 1e-15, (8, 8))
    widths = [
        float(FittedLaw(DATA_PARALLEL_LAW, np.log(TRUTH), covariance, 1).predict(asked)[1][0])
        for covariance in (np.eye(8), np.eye(8) + noise + noise.T)
    ]
    assert widths[1] == pytest.approx(widths[0], rel=1e-6)


def test_hyperbola_is_found_from_three_batches() -> None:
    batches = np.array([100.0, 1000.0, 4000.0])
    posterior = fit_target(batches, 1e6 * (1 + batches / 2000), np.full(3, 5.0))
    predicted, spread = posterior.predict(16000.0)
    assert predicted == pytest.approx(9e6, rel=0.15)
    assert 0.02 < spread < 0.5


def test_fewer_points_than_constants_leave_the_prior_wide() -> None:
    one = {"ranks": np.array([2.0]), "bytes": np.array([1e6])}
    fitted = fit_law(ALLREDUCE_LAW, one, np.array([1e-4]))
    _, sigma = fitted.predict({"ranks": np.array([8.0]), "bytes": np.array([1e9])})
    assert sigma[0] > 0.2


def test_costs_of_which_one_device_says_nothing_count_by_their_median_sum_and_widen_with_distance() -> None:
    inputs = {"replicas": np.ones(3), "nodes": np.ones(3), "local_batch": np.array([1.0, 2.0, 4.0])}
    fitted = fit_law(DATA_PARALLEL_LAW, inputs, np.array([0.1, 0.15, 0.25]))
    asked = {"replicas": np.array([16.0]), "nodes": np.array([4.0]), "local_batch": np.array([1.0])}
    (centre,), (wide,) = fitted.predict(asked)
    assert centre > 1.05 * DATA_PARALLEL_LAW.seconds(np.exp(fitted.log_constants), asked)[0]
    normal = np.random.default_rng(2).standard_normal((20_000, 8)) * DATA_PARALLEL_LAW.spread
    # Computing is known, and the first two constants are computing.
    normal[:, :2] = 0
    drawn = [DATA_PARALLEL_LAW.seconds(np.exp(fitted.log_constants + each), asked)[0] for each in normal]
    assert centre == pytest.approx(np.median(drawn), rel=0.06)
    (same,), (wider,) = fitted.predict(asked, np.array([4.0]))
    assert same == centre and wider**2 - wide**2 == pytest.approx(4 * fitted.misfit**2)


def test_what_the_best_constants_leave_widens_predictions() -> None:
    replicas = np.repeat([1.0, 2.0, 4.0, 8.0], 12)
    inputs = {"replicas": replicas, "nodes": np.ones(48), "local_batch": np.tile([1.0, 2.0, 4.0], 16)}
    exact = DATA_PARALLEL_LAW.seconds(TRUTH, inputs)
    noise = np.exp(0.3 * np.random.default_rng(0).standard_normal(48))
    tame, wild = (fit_law(DATA_PARALLEL_LAW, inputs, seconds).predict(inputs)[1] for seconds in (exact, exact * noise))
    assert tame.max() < 0.1 and wild.min() > 0.2


def test_rings_over_nodes_are_priced_by_the_usual_network_of_the_hardware() -> None:
    inputs = {"replicas": np.ones(3), "nodes": np.ones(3), "local_batch": np.array([1.0, 2.0, 4.0])}
    seconds = np.array([0.1, 0.15, 0.25])
    asked = {"replicas": np.array([16.0]), "nodes": np.array([16.0]), "local_batch": np.array([1.0])}
    slow, fast = (
        fit_law(DATA_PARALLEL_LAW, inputs | {"wire": np.full(3, wire)}, seconds).predict(asked)[0][0]
        for wire in (1.5e9, 2.5e10)
    )
    assert slow > 1.5 * fast


def test_hops_over_nodes_grow_as_the_logarithm_and_within_a_node_one_by_one(tmp_path: Path) -> None:
    constants = np.array([2e-6, 1e-5, 2e11, 8e11, 1e-5, 2.5e10])

    def seconds(ranks: float, nodes: float, size: float) -> float:
        one = {"ranks": np.array([ranks]), "nodes": np.array([nodes]), "bytes": np.array([size])}
        return float(ALLREDUCE_LAW.seconds(constants, one)[0])

    chain, tree = (seconds(*many, 1.0) - seconds(*few, 1.0) for few, many in (((2, 1), (8, 1)), ((8, 1), (64, 8))))
    assert chain == pytest.approx(12 * 2e-6, rel=1e-3) and tree == pytest.approx(6 * 1e-5, rel=1e-3)
    # Two ranks of a node have two adapters, which a ring over nodes uses, up to the rate of the node's own links.
    assert seconds(4, 2, 1e12) > 1.8 * seconds(8, 2, 1e12) * (3 / 4) / (7 / 8)
    sizes = [2.0**power for power in range(12, 30)]
    measured = [(4, 1), (8, 1), (16, 2), (32, 4), (128, 16), (512, 64)]
    rows = [["x", nodes, ranks, size, seconds(ranks, nodes, size)] for ranks, nodes in measured for size in sizes]
    write(tmp_path / "a.csv", ["hardware", "nodes", "ranks", "bytes", "out_of_place_s"], rows)
    result = backtest.run_backtest(tmp_path, {})
    assert named(result, "all-reduce", "extrapolated, more than 4 ×")[0]["mean"] < 0.45
    near = [one for each, one in result.checked if each.protocol == "extrapolated" and one.distance == 4]
    assert max(abs(one.predicted / one.measured - 1) for one in near[-len(sizes) :]) < 0.1


def test_tensor_ranks_of_several_nodes_wait_for_the_network() -> None:
    plain = {"micro_batch": 1.0, "hidden": 4096.0, "layers": 32.0, "seq_len": 2048.0, "global_batch": 64.0}
    plain |= {"heads": 32.0, "data": 1.0, "pipeline": 1.0}

    def seconds(tensor: float, per_node: float) -> float:
        inputs = {name: np.array([value]) for name, value in (plain | {"tensor": tensor, "per_node": per_node}).items()}
        return float(GPT_GRID_LAW.seconds(GPT_GRID_LAW.centre(inputs, np.ones(1)), inputs)[0])

    assert seconds(8, 8) == pytest.approx(seconds(8, 16))
    assert seconds(16, 4) > seconds(16, 8) > 1.1 * seconds(16, 16)


def split_jobs(tmp_path: Path, plans: Sequence[tuple[int, int, float]]) -> list[CheckedPrediction]:
    """Predictions from at most half the devices of jobs with a number of devices, tensor ranks and seconds a step."""
    header = "set,model,params_b,layers,hidden,seq_len,hardware,devices,tp,pp,micro_batch,global_batch,precision"
    rows = [
        ["s", "m", 1.3, 24, 2048, 2048, "A100 80GB", devices, tensor, 1, 4, 4 * devices, "bf16", seconds]
        for devices, tensor, seconds in plans
    ]
    write(tmp_path / "a.csv", [*header.split(","), "step_time_s"], rows)
    result = backtest.run_backtest(tmp_path, {})
    return [one for each, one in result.checked if each.protocol == "extrapolated"]


def test_a_job_is_predicted_from_one_with_its_split_and_else_says_so(tmp_path: Path) -> None:
    found = split_jobs(tmp_path, [(8, 1, 1.0), (8, 2, 1.5), (16, 2, 1.5), (16, 4, 2.5)])
    assert [one.basis for one in found] == ["several measured sizes", "one measured row of another split of the model"]
    assert found[0].predicted == pytest.approx(found[0].measured, rel=0.1)


def test_own_rows_on_fewer_devices_say_how_far_the_law_is_off(tmp_path: Path) -> None:
    tame = [(8, 1, 1.0), (16, 1, 1.01), (32, 1, 1.02), (64, 1, 1.03)]
    wild = [(8, 1, 1.0), (16, 1, 2.5), (32, 1, 1.0), (64, 1, 2.5)]
    calm, wide = (split_jobs(tmp_path, plans)[-1].sigma for plans in (tame, wild))
    assert calm < 0.1 < 0.3 < wide


def job(**changed: float) -> dict[str, float]:
    """A job on sixteen devices of two nodes, as the law of published jobs reads it."""
    plain = {"devices": 16, "per_node": 8, "split": 1, "tensor": 1, "wire": 2.5e10, "local": 2.3e11, "parameters": 7e9}
    plain |= {"word": 2, "sharded": 1, "recompute": 0, "layers": 32, "hidden": 4096, "passes": 4, "call": 4096}
    plain |= {"gathers": 3}
    return plain | {"tokens": 2048, "global_batch": 128, "flops": 9e13} | changed


def scaled(anchor: dict[str, float], asked: dict[str, float], seconds: float = 1.0) -> float:
    both = asked | {f"a_{name}": value for name, value in (anchor | {"seconds": seconds}).items()}
    inputs = {name: np.array([float(value)]) for name, value in both.items()}
    constants = ANCHORED_LAW.centre(inputs, np.ones(1))
    return float(ANCHORED_LAW.seconds(constants, inputs)[0])


def test_a_measured_job_predicts_itself_whatever_its_communication() -> None:
    for own in (job(), job(sharded=0, passes=1), job(tensor=8, split=8), job(parameters=7e12), job(global_batch=1)):
        assert scaled(own, own, 0.5) == pytest.approx(0.5)


def test_causes_of_communication_are_counted() -> None:
    few = job(devices=8, global_batch=64)
    more_gathered = scaled(job(passes=1, call=16384), job(passes=8, call=2048))
    # A gradient's ring counts once a step, and gathered weights once a micro-batch.
    assert more_gathered > scaled(job(passes=1, call=16384, sharded=0), job(passes=8, call=2048, sharded=0)) + 0.1
    # A framework that gathers weights once more for recomputation passes over them four times in place of three.
    third = more_gathered - scaled(job(passes=1, call=16384, gathers=0), job(passes=8, call=2048, gathers=0))
    fourth = scaled(job(passes=1, call=16384, gathers=4), job(passes=8, call=2048, gathers=4)) - more_gathered
    assert third > 0.1 and fourth == pytest.approx(third / 3, rel=0.2)
    # Hops grow with devices, for each layer.
    many = {
        layers: scaled(few | {"layers": layers}, job(devices=1024, global_batch=8192, layers=layers))
        for layers in (1, 80)
    }
    assert many[80] > many[1] + 0.1
    slow, fast = (scaled(few, job(devices=64, global_batch=512, wire=wire)) for wire in (1e9, 2.5e10))
    assert slow > fast + 0.1
    # In a pipeline weights are gathered once a step, and not once a micro-batch.
    gathered = [scaled(job(passes=1, split=4, tensor=tensor), job(split=4, tensor=tensor)) for tensor in (1, 4)]
    assert gathered[0] == pytest.approx(1) and gathered[1] > 1.005
    # Tensor ranks all-reduce activations, between nodes over a slower link.
    assert scaled(job(), job(split=8, tensor=8)) > 1.0
    assert scaled(job(), job(split=16, tensor=16)) > scaled(job(), job(split=8, tensor=8))


def test_a_narrow_model_fills_its_tensor_ranks_less_than_a_wide_one() -> None:
    whole, split = job(parameters=0), job(parameters=0, split=8, tensor=8, local=1e20)
    lost = [scaled(whole | {"hidden": width}, split | {"hidden": width}) for width in (1024, 2048, 12288, 0)]
    assert lost[0] > lost[1] > lost[2] > 1
    assert lost[2] < 1.1 and lost[3] == pytest.approx(lost[1], rel=1e-3)


def test_wide_models_reach_more_of_the_peak_than_narrow_ones() -> None:
    anchors = [HardwareAnchor("A100", 0, "16", 0.5, 0.1, 3, "s", "", 1600.0)]
    narrow, same, wide, unknown = (anchored_rate("A100", "bf16", anchors, "", w)[0] for w in (400.0, 1600.0, 6400.0, 0))
    assert narrow < same < wide < 1.25 * same and same == pytest.approx(unknown) == pytest.approx(0.5 * 312e12)


def test_an_anchor_is_another_sets_and_never_the_data_sheet_alone() -> None:
    anchors = shipped_anchors()
    rate, spread, reason = anchored_rate("NVIDIA A100-SXM4-80GB", "bf16", anchors, without="")
    assert 0.3 * 312e12 < rate < 0.8 * 312e12 and spread > 0 and not reason
    for chip in ("V100", "A100", "H100", "T4"):
        assert any(anchor.chip == chip and anchor.source for anchor in anchors)
    assert "no published row" in anchored_rate("L40S", "bf16", anchors, without="")[2]
    # A card has less power than the socketed chip of the same name, and two chips at once have no rate.
    for other in ("NVIDIA H100-PCIe-80GB", "A100 PCI-E 40GB", "8 x A100 and 8 x V100"):
        assert "no published row" in anchored_rate(other, "bf16", anchors, without="")[2]
    (own,) = {anchor.set_name for anchor in anchors if anchor.chip == "T4"}
    assert "another set" in anchored_rate("T4", "fp32", anchors, without=own)[2]


def test_a_chip_without_rows_reaches_what_its_kin_reach_and_an_unknown_one_is_refused() -> None:
    anchors = shipped_anchors()
    hopper = [each.utilisation for each in anchors if (each.chip, each.precision) == ("H100", "16")]
    rate, spread, reason = kindred_rate("H200 141GB", "bf16", anchors, without="")
    assert min(hopper) * 989e12 <= rate <= max(hopper) * 989e12 and spread >= 0.35 and not reason
    # Without a chip of its architecture all others count; its own rows never do.
    assert (
        kindred_rate("MI300X", "bf16", anchors, "")[0] == kindred_rate("MI300X", "bf16", anchors, "nothing")[0] > 3e14
    )
    lone = [each for each in anchors if each.chip == "H100"]
    assert "another chip" in kindred_rate("H100", "bf16", lone, "")[2]
    for hardware, precision in (("abacus", "bf16"), ("", ""), ("H100", "fp64"), ("TPU v4", "fp32")):
        assert "no data sheet" in kindred_rate(hardware, precision, anchors, "")[2]
    # A memory-bound model loses more on a chip with more FLOP/s for each byte/s.
    narrow, wide = (kindred_rate("H200", "bf16", anchors, "", width)[0] for width in (512.0, 8192.0))
    assert narrow < 0.75 * wide


SPLIT = ["set", "model", "params_b", "layers", "hidden", "seq_len", "hardware", "devices", "tp", "pp", "cp", "vpp"]


def zero_shot(tmp_path: Path, *rows: Sequence[object]) -> list[CheckedPrediction]:
    """Predictions of jobs from other sources' rates: the columns of ``SPLIT``, batches, words and seconds."""
    header = [*SPLIT, "micro_batch", "global_batch", "framework", "recompute", "precision", "step_time_s"]
    write(tmp_path / "jobs.csv", header, rows)
    return [one for asked, one in backtest.run_backtest(tmp_path, {}).checked if asked.protocol == "zero-shot"]


def test_jobs_on_hardware_without_rows_rest_on_other_hardware(tmp_path: Path) -> None:
    head, tail = ["s", "m", 7, 32, 4096, 2048], [8, 1, 1, 1, "", 4, 32, "FSDP", "none", "bf16", 1]
    found = zero_shot(tmp_path, *([*head, name, *tail] for name in ("A100", "MI300X", "H200", "abacus")))
    bases = [one.basis for one in found]
    assert bases == ["published rows of the hardware", *["published rows of other hardware"] * 2]
    assert found[1].sigma > found[0].sigma


def test_an_unstated_schedule_widens_a_deep_pipeline_and_context_ranks_hold_one_replica(tmp_path: Path) -> None:
    head, end = ["s", "m", 405, 128, 16384, 8192, "H100", 1024, 8], ["Megatron", "none", "bf16", 10]
    for chunks in (1, 8):
        rows = [[*head, 16, 1, vpp, 1, 128, *end] for vpp in (chunks, "")]
        known, unknown = zero_shot(tmp_path, *rows)
        ratio = known.predicted / unknown.predicted
        assert (ratio > 1.2) if chunks == 1 else (ratio < 0.9)
        assert unknown.sigma > known.sigma + 0.05
    # Context ranks share a sample: of eight times as many devices, each replica has as many micro-batches.
    plain = zero_shot(tmp_path, [*head, 16, 1, 1, 1, 128, *end])[0]
    shared = zero_shot(tmp_path, [*head[:-2], 8 * 1024, 8, 16, 8, 1, 1, 128, *end])[0]
    assert shared.predicted == pytest.approx(plain.predicted, rel=0.3)


def test_the_command_prints_a_line_of_json_a_group(tmp_path: Path) -> None:
    folder = synthetic_folder(tmp_path)
    command = [sys.executable, str(ROOT / "benchmarks" / "backtest.py"), str(folder), "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    keys = {"table", "group", "protocol", "n", "mean", "median", "worst", "coverage90", "median_band_width"}
    assert rows and all(keys <= set(row) for row in rows)
    assert all(row["n"] > 0 or row["reason"] for row in rows)
    left = subprocess.run([*command, "--leave-out", "source"], check=True, capture_output=True, text=True).stdout
    assert all(set(json.loads(line)) >= {"source", "cell", "others90", "coverage"} for line in left.splitlines())
    missing = subprocess.run([*command[:2], str(tmp_path / "none"), "--json"], capture_output=True, text=True)
    assert missing.returncode == 2 and "no folder" in missing.stderr


@MEASURED
def test_published_measurements_are_predicted_as_the_page_says() -> None:
    """The kept figures of the newest back-test are those of the code.

    The published measurements are no part of the project. Without ``TEST_SCALING_DATA``, the path of the folder that
    ``make backtest DATA=folder`` was given, this test is skipped, and only tests on made-up tables run.
    """
    newest = max((ROOT / "benchmarks" / "results").glob("*-backtest.json"))
    stored = json.loads(newest.read_text(encoding="utf-8"))
    result = backtest.run_backtest(Path(DATA))
    said = {(row["table"], row["group"], row["protocol"]): row["mean"] for row in stored["rows"]}
    for row in result.rows:
        want = said[row["table"], row["group"], row["protocol"]]
        assert row["mean"] == pytest.approx(want, rel=0.02, abs=0.002), row
    for cell in result.cells:
        assert cell.get("holds", True), cell
