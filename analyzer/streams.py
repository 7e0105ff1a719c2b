"""Arrow IPC streams of a log -> their whole record batches, in the contract's tables and types."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from analyzer.errors import AnalyzerError
from analyzer.tensor_rows import whole_tensor_rows
from recorder.schema import (
    CLOSING_EVENTS,
    EVENTS,
    LOG_DIRECTORY,
    NONFINITE,
    SCHEMA_VERSION,
    TENSORS,
    VERSION_KEY,
    WEIGHTS,
    Table,
    parse_stream_name,
    stream_name,
    table,
)

VIEW_COLUMNS = ("run", "rank", "segment")
"""Columns that the views add; a logged column of the same name is hidden."""

SMALL_BATCH_ROWS = 8192
"""Batches below this size are joined in memory: many tiny ones cost up to 16x at query time."""


@dataclass(frozen=True)
class Stream:
    """The readable rows of one table of one run, rank and segment."""

    path: Path  # of tensors, the stream that the others belong to
    table: Table
    rank: int
    segment: int
    rows: pa.Table
    warnings: tuple[str, ...]
    lost_row_count: int = 0  # of the segment, written before it was closed and not there now; in events only

    def label_columns(self) -> tuple[str, ...]:
        """Columns that the contract does not know: the user's own labels."""
        known = set(self.table.column_names())
        return tuple(name for name in self.rows.column_names if name not in known)

    def until(self, step: int) -> Stream:
        """The stream without its rows of later steps; a row or table that has no step stays."""
        if "step" not in self.table.column_names():
            return self
        steps = self.rows.column("step")
        is_kept = pc.or_kleene(pc.less_equal(steps, step), pc.is_null(steps))
        return dataclasses.replace(self, rows=self.rows.filter(is_kept))


def read_streams(run_directory: Path) -> tuple[Stream, ...]:
    """The tables in a run's log directory, ordered by name, rank and segment."""
    paths = sorted((run_directory / LOG_DIRECTORY).glob("*.arrows"), key=_reading_order)
    named = [(path, *parsed) for path in paths if (parsed := parse_stream_name(path.name))]
    found = [read_stream(path, table(name), rank, segment) for path, name, rank, segment in named]
    streams = [_with_lost_rows(stream, found) for stream in found]
    parts = {(s.table.name, s.rank, s.segment): s for s in streams if s.table in (NONFINITE, WEIGHTS)}
    whole = [_whole(s, parts) for s in streams if s.table not in (NONFINITE, WEIGHTS)]
    return tuple(sorted(whole, key=lambda s: (s.table.name, s.rank, s.segment)))


def _with_lost_rows(events: Stream, streams: Sequence[Stream]) -> Stream:
    """Events that know how many rows of their segment are gone since it was closed; other tables as they are.

    A file that a killed process left may be cut, and that costs a second at most. One that was closed and has
    fewer rows than its last event tells of was damaged since: what is left proves nothing about the rest.
    """
    if events.table != EVENTS:
        return events
    mine = {s.table.name: s for s in streams if (s.rank, s.segment) == (events.rank, events.segment)}
    lost = {}
    for name, written in _written_rows(events.rows).items():
        present = mine[name].rows.num_rows if name in mine else 0
        if written > present:
            lost[events.path.with_name(stream_name(name, events.rank, events.segment))] = (present, written)
    warnings = [f"{path}: damaged: {there} of {count} rows are left" for path, (there, count) in lost.items()]
    return dataclasses.replace(
        events,
        warnings=(*events.warnings, *warnings),
        lost_row_count=sum(count - there for there, count in lost.values()),
    )


def _written_rows(events: pa.Table) -> dict[str, int]:
    """Rows by table that the closing event tells of; none without such an event, as in a killed run."""
    kinds, payloads = (events.column(name).cast(pa.string()).to_pylist() for name in ("kind", "payload"))
    for kind, payload in zip(reversed(kinds), reversed(payloads), strict=True):
        if kind in CLOSING_EVENTS:
            try:
                rows = json.loads(payload or "")["rows"]
                return {name: int(count) for name, count in rows.items()}
            except (ValueError, TypeError, KeyError, AttributeError):
                return {}
    return {}


def _reading_order(path: Path) -> bool:
    """Tensors of a live run first: what belongs to their rows is written before them, so it is there then."""
    return not path.name.startswith(f"{TENSORS.name}-")


def _whole(stream: Stream, parts: Mapping[tuple[str, int, int], Stream]) -> Stream:
    """Tensors with what of their rows is in other streams, and its warnings; other tables as they are."""
    if stream.table != TENSORS:
        return stream
    warnings, rows = list(stream.warnings), []
    for contract in (NONFINITE, WEIGHTS):
        part = parts.get((contract.name, stream.rank, stream.segment))
        rows.append(contract.arrow_schema().empty_table() if part is None else part.rows)
        warnings += () if part is None else part.warnings
    tensors, lost_count = whole_tensor_rows(stream.rows, *rows)
    if lost_count:
        warnings.append(
            f"{stream.path}: {lost_count} rows not shown: their counts in {NONFINITE.name} are lost"
        )
    return dataclasses.replace(stream, rows=tensors, warnings=tuple(warnings))


def read_stream(path: Path, contract: Table, rank: int, segment: int) -> Stream:
    """The whole record batches of one stream, memory-mapped; what is cut off becomes a warning.

    Raises AnalyzerError when the file cannot be read, its schema version is newer than this analyzer, or a
    column has a type that cannot be converted to the contract's.
    """
    try:
        size = path.stat().st_size
    except OSError as error:  # a link to nowhere, or deleted since it was listed
        raise AnalyzerError(f"{path}: unreadable: {error.strerror}") from None
    batches, schema, whole_bytes = _whole_batches(path, size)
    warnings = []
    if schema is None:
        schema = contract.arrow_schema()
        if size:  # the header is written with the first rows: without a byte there were none
            warnings.append(f"{path}: cut: no readable header in {size} bytes; no rows read")
    else:
        _check_version(path, schema)
        if tail := size - whole_bytes:
            warnings.append(f"{path}: cut: {tail} bytes after the last whole batch not readable")
    rows = pa.Table.from_batches(batches, schema)
    if batches and rows.num_rows < SMALL_BATCH_ROWS * len(batches):
        rows = rows.combine_chunks()
    rows, hidden = _without_view_columns(rows)
    warnings += [f"{path}: column {name} hidden: the views use this name" for name in hidden]
    return Stream(path, contract, rank, segment, _conformed(path, rows, contract), tuple(warnings))


def _whole_batches(path: Path, size: int) -> tuple[list[pa.RecordBatch], pa.Schema | None, int]:
    """(batches, schema or None when the header is cut, bytes up to the end of the last whole batch)."""
    if size == 0:
        return [], None, 0
    try:
        source = pa.memory_map(str(path))
        reader = pa.ipc.open_stream(source)
    except pa.ArrowException:
        return [], None, 0
    except OSError as error:
        if not path.is_file() or isinstance(error, PermissionError):
            raise AnalyzerError(f"{path}: unreadable: {error.strerror or error}") from None
        return [], None, 0
    batches = []
    whole_bytes = source.tell()
    while True:
        try:
            batches.append(reader.read_next_batch())
        except StopIteration:
            return batches, reader.schema, source.tell()
        except (pa.ArrowException, OSError):
            return batches, reader.schema, whole_bytes
        whole_bytes = source.tell()


def _check_version(path: Path, schema: pa.Schema) -> None:
    found = (schema.metadata or {}).get(VERSION_KEY, b"missing").decode(errors="replace")
    if not found.isdigit() or not 1 <= int(found) <= SCHEMA_VERSION:
        raise AnalyzerError(
            f"{path}: schema version {found}; this analyzer reads 1-{SCHEMA_VERSION}: upgrade it"
        )


def _without_view_columns(rows: pa.Table) -> tuple[pa.Table, list[str]]:
    hidden = [name for name in rows.column_names if name.lower() in VIEW_COLUMNS]
    return rows.drop_columns(hidden), hidden


def _conformed(path: Path, rows: pa.Table, contract: Table) -> pa.Table:
    """The rows with every column of the contract, in its type and order, then the unknown ones."""
    arrays = []
    for column in contract.columns:
        if column.name in rows.column_names:
            arrays.append(_converted(path, rows.column(column.name), column.name, column.type))
        else:
            arrays.append(pa.nulls(rows.num_rows, column.type))
    names = list(contract.column_names())
    labels = [name for name in rows.column_names if name not in set(names)]
    return pa.table([*arrays, *(rows.column(name) for name in labels)], names=names + labels)


def _converted(path: Path, values: pa.ChunkedArray, name: str, type: pa.DataType) -> pa.ChunkedArray:
    if values.type == type:
        return values
    try:
        return values.cast(type)
    except pa.ArrowException:
        raise AnalyzerError(
            f"{path}: column {name} is {values.type}, expected {type}: write it as the contract says"
        ) from None
