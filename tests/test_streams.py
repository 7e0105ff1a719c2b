"""A stream gives back every whole record batch in the contract's types, and says what was cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import stream_table

from analyzer.errors import AnalyzerError
from analyzer.streams import read_stream
from recorder.schema import STEPS, VERSION_KEY, table

BATCH_ROWS = (3, 1, 7, 2)


def stream_bytes() -> tuple[bytes, list[int]]:
    """A stream of `evaluations` in BATCH_ROWS batches whose dictionary grows, and each batch's end."""
    rows = [
        {"step": step, "split": f"split{step // 3}", "loss_sum": float(step)}
        for step in range(sum(BATCH_ROWS))
    ]
    whole = stream_table("evaluations", rows)
    sink = pa.BufferOutputStream()
    ends = []
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, whole.schema, options=options) as writer:
        start = 0
        for count in BATCH_ROWS:
            part = stream_table("evaluations", rows[start : start + count])
            writer.write_table(part)
            ends.append(sink.tell())
            start += count
    return sink.getvalue().to_pybytes(), ends


STREAM, BATCH_ENDS = stream_bytes()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cut=st.integers(0, len(STREAM)))
def test_a_log_cut_at_any_byte_gives_exactly_the_whole_batches(cut: int) -> None:
    """Every batch that ends before the cut is read, nothing of the one after it."""
    whole = sum(end <= cut for end in BATCH_ENDS)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "evaluations-r0-s0.arrows"
        path.write_bytes(STREAM[:cut])
        steps = read_stream(path, table("evaluations"), 0, 0).rows.column("step").to_pylist()
    assert steps == list(range(sum(BATCH_ROWS[:whole])))


def test_a_cut_tail_is_a_warning_with_the_bytes_lost(tmp_path: Path) -> None:
    """The warning names the file and how much of it could not be read."""
    path = tmp_path / "evaluations-r0-s0.arrows"
    path.write_bytes(STREAM[: BATCH_ENDS[1] + 300])
    stream = read_stream(path, table("evaluations"), 0, 0)
    assert stream.warnings == (f"{path}: cut: 300 bytes after the last whole batch not readable",)


@pytest.mark.parametrize("size", [0, 5])
def test_a_stream_without_a_whole_header_has_no_rows(tmp_path: Path, size: int) -> None:
    """A part of a header is a warning; a file without a byte waits for its first rows."""
    path = tmp_path / "evaluations-r0-s0.arrows"
    path.write_bytes(STREAM[:size])
    stream = read_stream(path, table("evaluations"), 0, 0)
    warnings = (f"{path}: cut: no readable header in 5 bytes; no rows read",) if size else ()
    assert (stream.rows.num_rows, stream.warnings) == (0, warnings)


def test_a_dictionary_that_grows_between_batches_reads_back(tmp_path: Path) -> None:
    """Each batch's keys are resolved in the dictionary that it was written with."""
    path = tmp_path / "evaluations-r0-s0.arrows"
    path.write_bytes(STREAM)
    splits = read_stream(path, table("evaluations"), 0, 0).rows.column("split").to_pylist()
    assert splits == [f"split{step // 3}" for step in range(sum(BATCH_ROWS))]


def versioned_steps(path: Path, version: bytes | None) -> None:
    """A stream of `steps` whose metadata has this schema version, or none."""
    metadata = {} if version is None else {VERSION_KEY: version}
    rows = stream_table("steps", [{"step": 0}]).replace_schema_metadata(metadata)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)


@pytest.mark.parametrize(("version", "found"), [(b"3", "3"), (b"x", "x"), (None, "missing")])
def test_an_unknown_schema_version_is_one_clear_error(
    tmp_path: Path, version: bytes | None, found: str
) -> None:
    """The error names the file, the version found, the versions known, and what to do."""
    path = tmp_path / "steps-r0-s0.arrows"
    versioned_steps(path, version)
    with pytest.raises(AnalyzerError) as caught:
        read_stream(path, STEPS, 0, 0)
    assert str(caught.value) == f"{path}: schema version {found}; this analyzer reads 1-2: upgrade it"


def test_a_missing_column_is_null_in_the_contracts_type(tmp_path: Path) -> None:
    """A log of an older or smaller writer has every column of the contract."""
    path = tmp_path / "steps-r0-s0.arrows"
    rows = stream_table("steps", [{"step": 4}]).select(["step"])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
        writer.write_table(rows)
    read = read_stream(path, STEPS, 0, 0).rows
    assert read.schema.field("train_loss").type == pa.float64()
    assert (read.column("step").to_pylist(), read.column("train_loss").to_pylist()) == ([4], [None])


def one_column_stream(path: Path, name: str, values: pa.Array) -> None:
    """A stream with this one column and a valid version."""
    schema = pa.schema([pa.field(name, values.type)], metadata={VERSION_KEY: b"1"})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(pa.table([values], schema=schema))


def test_another_type_is_converted_where_nothing_is_lost(tmp_path: Path) -> None:
    """A writer that logs float32 losses is read as the contract's float64."""
    path = tmp_path / "steps-r0-s0.arrows"
    one_column_stream(path, "train_loss", pa.array([0.5], pa.float32()))
    read = read_stream(path, STEPS, 0, 0).rows.column("train_loss")
    assert (read.type, read.to_pylist()) == (pa.float64(), [0.5])


def test_a_type_that_cannot_be_converted_is_an_error(tmp_path: Path) -> None:
    """The error names file, column, and both types."""
    path = tmp_path / "steps-r0-s0.arrows"
    one_column_stream(path, "train_loss", pa.array(["low"]))
    with pytest.raises(AnalyzerError) as caught:
        read_stream(path, STEPS, 0, 0)
    assert str(caught.value) == (
        f"{path}: column train_loss is string, expected double: write it as the contract says"
    )
