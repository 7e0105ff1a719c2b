"""Reads back what a run has logged: enough to resume it and to compare runs; questions are the analyzer's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recorder import schema


def current_rows(run_directory: Path, table_name: str) -> pa.Table:
    """Rows of rank 0 that no later segment has replaced, in the order they were written.

    A row is replaced when a later segment begins at or below its step.
    """
    segments = _segments(run_directory, table_name)
    first_steps = {number: _first_step(rows) for number, rows in _segments(run_directory, "steps").items()}
    kept = []
    for number, rows in segments.items():
        later = [step for other, step in first_steps.items() if other > number and step is not None]
        if later and "step" in rows.column_names:
            rows = rows.filter(pc.less(rows.column("step"), min(later)))
        kept.append(rows)
    if not kept:
        return schema.table(table_name).arrow_schema().empty_table()
    return pa.concat_tables(kept, promote_options="permissive")  # widths differ between schema versions


def last_logged_step(run_directory: Path) -> int:
    """Step of the last current row of ``steps``; -1 when there is none."""
    steps = current_rows(run_directory, "steps").column("step")
    return -1 if len(steps) == 0 else int(pc.max(steps).as_py())


def has_finished(run_directory: Path) -> bool:
    """The newest segment was closed in an orderly way."""
    segments = _segments(run_directory, "events")
    return bool(segments) and "finished" in list(segments.values())[-1].column("kind").to_pylist()


def _segments(run_directory: Path, table_name: str) -> dict[int, pa.Table]:
    """The whole record batches of each segment of rank 0, by its number, ascending."""
    found = {}
    for path in (run_directory / schema.LOG_DIRECTORY).glob(f"{table_name}-r0-s*.arrows"):
        parsed = schema.parse_stream_name(path.name)
        if parsed is not None:
            found[parsed[2]] = _whole_batches(path)
    return dict(sorted(found.items()))


def _whole_batches(path: Path) -> pa.Table:
    """What a killed process left readable: reading ends at the torn tail."""
    content = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        reader = pa.ipc.open_stream(content)
    except (pa.ArrowInvalid, OSError):  # killed before its header was out
        return schema.table(path.name.split("-", 1)[0]).arrow_schema().empty_table()
    with contextlib.suppress(pa.ArrowInvalid, OSError):
        batches.extend(reader)
    return pa.Table.from_batches(batches, reader.schema)


def _first_step(steps: pa.Table) -> int | None:
    first: int | None = pc.min(steps.column("step")).as_py()
    return first
