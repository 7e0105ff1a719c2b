"""Rows of tensors are kept in three streams, and a reader sees them whole: the right counts, or no row."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from synthetic import healthy_tables, write_run

import analyzer.streams
from analyzer.run_log import open_runs
from analyzer.streams import read_stream, read_streams
from experiments.log_reader import current_rows
from recorder import Cadence, Recorder
from recorder.kernel import Summary
from recorder.schema import MOMENTS, NONFINITE_COUNTS, TENSORS
from recorder.writer import Block, Stream, Value

GOLDEN = Path(__file__).parent / "golden"
FINITE_ONLY = Cadence(weights=0, updates=0, spectral_norms=0, hashes=0)
COUNTS = ("nan_count", "positive_infinity_count", "negative_infinity_count")


def seen(run: Path, *columns: str) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Columns of tensors as the analyzer shows them, by step and tensor, and its warnings."""
    streams = read_streams(run)
    warnings = [warning for stream in streams for warning in stream.warnings]
    rows = [row for s in streams if s.table == TENSORS for row in s.rows.to_pylist()]
    rows.sort(key=lambda row: (row["step"], row["tensor_id"]))
    return [tuple(row[name] for name in columns) for row in rows], warnings


def test_the_kernels_statistics_are_the_columns() -> None:
    """A kernel's row is cut in two: what every row has, and what hardly any row has."""
    assert Summary._fields == tuple(column.name for column in (*MOMENTS, *NONFINITE_COUNTS))


def test_five_kinds_of_missing_and_odd_values_stay_apart(tmp_path: Path) -> None:
    """NaN, +inf, -inf, no gradient and not measured, beside a gradient that is finite."""
    gradients = {
        "nan": np.array([np.nan, 1], np.float32),
        "plus": np.array([np.inf, 1], np.float32),
        "minus": np.array([-np.inf, 1], np.float32),
        "fine": np.array([2, 1], np.float32),
    }
    with Recorder(tmp_path / "run", cadence=FINITE_ONLY, quiet=True) as recorder:
        recorder.watch({name: np.ones(2, np.float32) for name in (*gradients, "none")})
        with recorder.step(0) as record:
            record.add_gradients(gradients)
    rows, warnings = seen(tmp_path / "run", "has_gradient", "max", *COUNTS, "spectral_norm", "content_hash")
    assert rows == [
        (True, 1.0, 1, 0, 0, None, None),
        (True, 1.0, 0, 1, 0, None, None),
        (True, 1.0, 0, 0, 1, None, None),
        (True, 2.0, 0, 0, 0, None, None),
        (False, None, None, None, None, None, None),
    ]
    assert warnings == []


def test_finite_rows_and_rows_without_weights_need_one_stream(tmp_path: Path) -> None:
    """A stream is made when it has a row."""
    with Recorder(tmp_path / "run", cadence=FINITE_ONLY, quiet=True) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        with recorder.step(0) as record:
            record.add_gradients({"w": np.ones(2, np.float32)})
    names = {path.name.split("-")[0] for path in (tmp_path / "run" / "log").iterdir()}
    assert names == {"events", "steps", "tensors", "tensor_names"}


def test_what_is_written_comes_back_in_the_same_columns(tmp_path: Path) -> None:
    """Every value of a whole run, some of whose rows are not finite, whatever streams it was in."""
    tensors = dict(healthy_tables(30)["tensors"])
    generator = np.random.default_rng(0)
    for column in NONFINITE_COUNTS:
        tensors[column.name] = np.where(generator.random(len(tensors["step"])) < 0.1, 5, 0)
    is_weight = np.array(tensors["kind"]) == "weight"
    tensors["content_hash"] = [(1 << 64) - 1 - i if w and i % 3 else None for i, w in enumerate(is_weight)]
    write_run(tmp_path / "run", {"tensors": tensors})
    assert {s.name.split("-")[0] for s in (tmp_path / "run" / "log").iterdir()} >= {"nonfinite", "weights"}
    (read,) = (s.rows for s in read_streams(tmp_path / "run") if s.table == TENSORS)
    expected = pa.table(
        [pa.array(np.asarray(tensors[c.name]).tolist(), c.type) for c in TENSORS.columns],
        names=TENSORS.column_names(),
    )
    assert read.schema.names == expected.schema.names
    assert read.to_pylist() == expected.to_pylist()


def test_both_versions_show_the_same_columns(tmp_path: Path) -> None:
    """A query does not know in which version a row was written, one after the other or side by side."""
    continued = tmp_path / "continued"
    shutil.copytree(GOLDEN / "v1", continued)
    for path in (GOLDEN / "v2" / "log").iterdir():
        shutil.copy(path, continued / "log" / path.name.replace("-s0", "-s1"))
    runs = [GOLDEN / "v1", GOLDEN / "v2", continued]
    types = []
    for paths in (*([run] for run in runs), runs):
        with open_runs(paths) as run_log:
            types.append(run_log.query("DESCRIBE tensors").to_pylist())
            counts = run_log.query(
                "SELECT run, segment, count(*) AS n, sum(nan_count) AS n_nan, "
                "count(content_hash) AS n_hash FROM tensors_all GROUP BY ALL ORDER BY ALL"
            ).to_pylist()
        # what resumes and compares runs reads streams without the analyzer
        losses = current_rows(continued, "example_losses")
    assert types == types[:1] * 4
    assert (losses.num_rows, losses.field("token_count").type) == (1200, pa.int64())
    version_1, version_2 = (260, 0, 60), (280, 2, 60)
    assert [tuple(row.values()) for row in counts] == [
        ("continued", 0, *version_1),
        ("continued", 1, *version_2),
        ("v1", 0, *version_1),
        ("v2", 0, *version_2),
    ]


def test_no_row_passes_for_finite_when_its_counts_are_lost(tmp_path: Path) -> None:
    """Wherever nonfinite is cut: rows have the right counts or are left out, which is told."""
    rows = [
        {"step": step, "tensor_id": 0, "kind": "gradient", "nan_count": step if step % 3 else 0}
        for step in range(9)
    ]
    run = write_run(tmp_path / "run", {"tensors": rows})
    path = run / "log" / "nonfinite-r0-s0.arrows"
    whole = path.read_bytes()  # padded to multiples of 8 bytes
    kept_counts = set()
    for size in range(0, len(whole) + 1, 8):
        path.write_bytes(whole[:size])
        found, warnings = seen(run, "step", "nan_count")
        assert all(count == (step if step % 3 else 0) for step, count in found)
        assert {step for step, _ in found} >= {0, 3, 6}
        told = [w for w in warnings if "rows not shown: their counts in nonfinite are lost" in w]
        assert bool(told) == (len(found) < 9)
        kept_counts.add(len(found))
    assert kept_counts == {3, 9}


AtEncode = Callable[[Recorder, Stream], None]


def snapshots(
    run: Path, monkeypatch: pytest.MonkeyPatch, steps: Sequence[int], at_encode: AtEncode | None = None
) -> list[Path]:
    """A copy of the run after each single write of a stream: what a kill at that moment would leave.

    Each step has a gradient with one NaN, and is flushed. at_encode: called after a stream encoded rows.
    """
    copies: list[Path] = []
    encode, write = Stream.encode, Stream.write

    def encode_and_call(stream: Stream) -> None:
        is_due = bool(stream._taken)
        encode(stream)
        if is_due and at_encode is not None:
            at_encode(recorder, stream)

    def write_and_copy(stream: Stream) -> None:
        is_due = stream.encoded_byte_count > 0
        write(stream)
        if is_due:
            copies.append(Path(shutil.copytree(run, run.parent / f"{run.name}-{len(copies)}")))

    with Recorder(run, cadence=FINITE_ONLY, quiet=True) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        monkeypatch.setattr("recorder.segment.FLUSH_SECONDS", 60.0)  # the flusher stays out of this
        monkeypatch.setattr(Stream, "encode", encode_and_call)
        monkeypatch.setattr(Stream, "write", write_and_copy)
        for step in steps:
            with recorder.step(step) as record:
                record.add_gradients({"w": np.array([np.nan, step], np.float32)})
            recorder.flush()
    return copies


def seen_after_each_write(copies: Sequence[Path]) -> list[list[tuple[Any, ...]]]:
    """(step, nan_count) of the rows of each copy; asserts that none is left out for want of its counts."""
    found = [seen(copy, "step", "nan_count") for copy in copies]
    assert not [w for _, warnings in found for w in warnings if "not shown" in w]
    return [rows for rows, _ in found]


@pytest.mark.parametrize("encode_seconds", [60.0, 0.0], ids=["encoded when written", "encoded before"])
def test_a_kill_between_two_writes_leaves_no_row_without_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encode_seconds: float
) -> None:
    """Counts are written before the rows that they belong to: each row is seen with them, or not yet."""
    monkeypatch.setattr("recorder.segment.ENCODE_SECONDS", encode_seconds)
    found = seen_after_each_write(snapshots(tmp_path / "run", monkeypatch, range(3)))
    assert all(rows == [(step, 1) for step in range(len(rows))] for rows in found)
    assert {len(rows) for rows in found} == {0, 1, 2, 3}


def test_rows_that_come_while_others_are_encoded_wait_with_their_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that ends after the counts were taken does not go out without its own."""

    def end_another_step(recorder: Recorder, stream: Stream) -> None:
        if stream.path.name.startswith("nonfinite") and not late:
            late.append(1)
            key: dict[str, Value] = {"step": 1, "tensor_id": 0, "kind": "gradient"}
            row = {"element_count": 3, "has_gradient": True, "all_finite": False}
            counts = dict.fromkeys((c.name for c in NONFINITE_COUNTS), 2)
            blocks = [Block("tensors", 1, key | row), Block("nonfinite", 1, key | counts)]
            recorder._segment.append(blocks)

    late: list[int] = []
    found = seen_after_each_write(snapshots(tmp_path / "run", monkeypatch, [0], end_another_step))
    assert [(0, 1)] in found
    assert found[-1] == [(0, 1), (1, 2)]


def test_a_reader_of_a_live_run_finds_the_counts_of_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush after each stream that is read: rows are read before what belongs to them, so it is there."""
    monkeypatch.setattr("recorder.segment.FLUSH_SECONDS", 60.0)
    with Recorder(tmp_path / "run", cadence=FINITE_ONLY, quiet=True) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        step_numbers = itertools.count()

        def record_a_nan() -> None:
            step = next(step_numbers)
            with recorder.step(step) as record:
                record.add_gradients({"w": np.array([np.nan, step], np.float32)})
            recorder.flush()

        def read_while_writing(*arguments: Any) -> analyzer.streams.Stream:
            stream = read_stream(*arguments)
            record_a_nan()
            return stream

        record_a_nan()
        monkeypatch.setattr("analyzer.streams.read_stream", read_while_writing)
        rows, warnings = seen(tmp_path / "run", "step", "nan_count")
    assert (rows, warnings) == ([(0, 1)], [])


def test_the_largest_numbers_that_fit_are_kept(tmp_path: Path) -> None:
    """Narrow columns hold what their type can hold, to the last."""
    limits = {"step": (1 << 31) - 1, "tensor_id": 0, "kind": "weight", "element_count": (1 << 32) - 1}
    with Recorder(tmp_path / "run", quiet=True) as recorder:
        recorder._segment.append([Block("tensors", 1, limits | {"all_finite": True})])
    rows, _ = seen(tmp_path / "run", "step", "element_count", "nan_count")
    assert rows == [((1 << 31) - 1, (1 << 32) - 1, 0)]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("step", 1 << 31),
        ("step", np.int64(1 << 31)),
        ("element_count", 1 << 32),
        ("element_count", np.array([1 << 32])),
        ("element_count", np.array([-1.0])),
        ("tensor_id", np.array([1 << 31])),
    ],
)
def test_a_number_that_does_not_fit_costs_its_rows_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str, value: Value
) -> None:
    """It never wraps around to another number; the rows before and after it are kept."""
    key: dict[str, Value] = {"tensor_id": np.array([0]), "kind": "weight", "all_finite": True}
    with Recorder(tmp_path / "run", quiet=True) as recorder:
        for step in range(3):
            row = {"step": step, "element_count": np.array([5.0]), **key}
            recorder._segment.append([Block("tensors", 1, row | ({column: value} if step == 1 else {}))])
    rows, _ = seen(tmp_path / "run", "step", "tensor_id", "element_count")
    assert rows == [(0, 0, 5), (2, 0, 5)]
    told = capsys.readouterr().err
    assert "rows are lost that their columns can not hold: OverflowError" in told
    assert "rows lost: 1 of tensors" in told


def test_a_key_of_one_byte_never_stands_for_two_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 kinds have a key; the rows of another one are lost, and it is told."""
    kinds = [f"kind{number:03}" for number in range(129)]
    with Recorder(tmp_path / "run", quiet=True) as recorder:
        recorder._segment.append([Block("tensors", 1, {"tensor_id": 0, "step": 0, "kind": k}) for k in kinds])
    rows, _ = seen(tmp_path / "run", "kind")
    assert sorted(rows) == [(kind,) for kind in kinds[:128]]
    assert "rows lost: 1 of tensors" in capsys.readouterr().err


def test_a_step_beyond_the_narrow_type_keeps_its_losses(tmp_path: Path) -> None:
    """Tables of one row a step have 64 bits; only the rows of narrow tables are lost, and it is told."""
    with Recorder(tmp_path / "run", cadence=FINITE_ONLY, quiet=True) as recorder:
        recorder.watch({"w": np.ones(2, np.float32)})
        for step in ((1 << 31) - 1, 1 << 31):
            with recorder.step(step) as record:
                record.add_gradients({"w": np.ones(2, np.float32)})
                record.log(loss_sum=1.0, loss_token_count=1)
    with open_runs([tmp_path / "run"]) as run_log:
        steps, tensors = (
            run_log.query(f"SELECT step FROM {table} ORDER BY step")["step"].to_pylist()
            for table in ("steps", "tensors")
        )
        (warning,) = run_log.query("SELECT message FROM events WHERE kind = 'warning'")["message"].to_pylist()
    assert (steps, tensors) == ([(1 << 31) - 1, 1 << 31], [(1 << 31) - 1])
    assert "tensors-r0-s0.arrows: rows are lost that their columns can not hold" in warning


def test_a_norm_beyond_float32_is_no_infinity(tmp_path: Path) -> None:
    """The elements are finite, so is their norm: 2e38 * sqrt(16) = 8e38, where float32 ends at 3.4e38."""
    with Recorder(tmp_path / "run", cadence=FINITE_ONLY, quiet=True) as recorder:
        recorder.watch({"w": np.ones(16, np.float32)})
        with recorder.step(0) as record:
            record.add_gradients({"w": np.full(16, 2e38, np.float32)})
    (row,), _ = seen(tmp_path / "run", "l2_norm", *COUNTS)
    assert math.isclose(row[0], 8e38, rel_tol=1e-6)  # the elements are rounded to 2^-24
    assert row[1:] == (0, 0, 0)
