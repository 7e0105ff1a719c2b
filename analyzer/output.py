"""Results for people and programs: table, CSV, JSON, Parquet; a file is written whole or not at all.

Null, NaN and the infinities stay apart: empty in CSV, null in JSON, and the words NaN, Infinity, -Infinity.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from analyzer.errors import AnalyzerError

TABLE_DIGITS = 6
"""Significant digits of a float in a table; CSV and JSON keep them all."""

LEAST_TERMINAL_ROWS = 10
CELL_WIDTH = 60


def emit(text: str) -> None:
    """Print a result; a reader that closed the pipe (``| head``) has seen enough."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Say something that is not the result, on stderr, in the analyzer's name."""
    print(f"analyzer: {text}", file=sys.stderr)


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name, then rename it: a reader sees the old file or all of the new.

    Raises AnalyzerError when the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                write(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise AnalyzerError(f"{path}: cannot write: {error.strerror}: name another file with -o") from None


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a result as one Parquet file."""
    import pyarrow.parquet as pq

    try:
        write_whole(path, lambda file: pq.write_table(table, file))
    except pa.ArrowException as error:
        raise AnalyzerError(
            f"{path}: Parquet has no such type: {error}: cast the column, for example to VARCHAR"
        ) from None


def json_text(table: pa.Table) -> str:
    """A JSON array with one object per line; columns of the same name are numbered."""
    names = _unique(table.column_names)
    rows = zip(*(_plain_column(column) for column in table.columns), strict=True)
    lines = (json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) for row in rows)
    return "[\n" + ",\n".join(lines) + "\n]\n" if table.num_rows else "[]\n"


def csv_text(table: pa.Table) -> str:
    """Comma-separated values under a header; null is an empty field."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.column_names)
    columns = [[_flat(value) for value in _plain_column(column)] for column in table.columns]
    writer.writerows(zip(*columns, strict=True))
    return file.getvalue()


def table_text(table: pa.Table, terminal: os.terminal_size | None) -> tuple[str, str | None]:
    """(aligned columns, what was left out or None). Without a terminal nothing is left out."""
    shown = table
    if terminal is not None:
        shown = table.slice(0, max(terminal.lines - 4, LEAST_TERMINAL_ROWS))
    columns = [
        [name, *(_cell(value, terminal is not None) for value in _plain_column(column))]
        for name, column in zip(table.column_names, shown.columns, strict=True)
    ]
    padded = [_aligned(c, _is_number(f.type)) for c, f in zip(columns, table.schema, strict=True)]
    fitting = padded if terminal is None else _fitting(padded, terminal.columns)
    lines = ["  ".join(row).rstrip() for row in zip(*fitting, strict=True)]
    return "\n".join(lines) + "\n", _left_out(table, shown.num_rows, len(fitting))


def terminal_size() -> os.terminal_size | None:
    """Size of the terminal that stdout is, None when it is a pipe or a file."""
    return shutil.get_terminal_size() if sys.stdout.isatty() else None


def plain_value(value: Any) -> Any:
    """The value as JSON can hold it: non-finite floats and times as text, decimals as numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else _nonfinite_name(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, pa.MonthDayNano):
        return f"{value.months} months {value.days} days {value.nanoseconds / 1e9:g} s"
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return str(value)


def _nonfinite_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _plain_column(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    values = column.to_pylist()
    if pa.types.is_float32(column.type):
        # The shortest decimal that names the same float32: 0.1, not 0.10000000149011612.
        values = [None if value is None else float(str(np.float32(value))) for value in values]
    return [plain_value(value) for value in values]


def _flat(value: Any) -> Any:
    """A CSV field: nested values as JSON text, booleans in SQL's spelling."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, list, dict)) else value


def _cell(value: Any, shorten: bool) -> str:
    if value is None:
        return "NULL"
    text = f"{value:.{TABLE_DIGITS}g}" if isinstance(value, float) else str(_flat(value))
    text = " ".join(text.splitlines())
    return text[: CELL_WIDTH - 3] + "..." if shorten and len(text) > CELL_WIDTH else text


def _is_number(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_decimal(type))


def _aligned(cells: Sequence[str], right: bool) -> list[str]:
    width = max(len(cell) for cell in cells)
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]


def _fitting(columns: list[list[str]], width: int) -> list[list[str]]:
    """As many columns from the left as fit into the width, at least one."""
    used = 0
    for count, column in enumerate(columns):
        used += len(column[0]) + 2
        if used - 2 > width and count > 0:
            return columns[:count]
    return columns


def _left_out(table: pa.Table, row_count: int, column_count: int) -> str | None:
    parts = []
    if row_count < table.num_rows:
        parts.append(f"{row_count} of {table.num_rows} rows shown")
    if column_count < table.num_columns:
        parts.append(f"{column_count} of {table.num_columns} columns shown")
    return f"{', '.join(parts)}; --csv or --json print all" if parts else None


def _unique(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique
