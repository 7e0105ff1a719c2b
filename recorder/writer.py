"""Rows to Arrow IPC streams: one file per table, rank and segment, appended to by one process only.

Rows wait in preallocated column buffers and leave as record batches, so that a step costs a few
assignments. Arrow arrays are made from these buffers: ``pa.array`` would import pandas on first use
and stall a step by a third of a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from recorder.schema import KEYED_STRING, WALL_TIME

Value = Any
"""What a column takes: a number, bool or str; None for "not measured"; or one array of them per block."""


class Block(NamedTuple):
    """Rows for one table; a column that is left out is null in all of them."""

    table: str
    row_count: int
    columns: dict[str, Value]


_INITIAL_ROWS = 256
_DTYPES: dict[pa.DataType, Any] = {
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint64(): np.uint64,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
    pa.bool_(): np.bool_,
    WALL_TIME: np.int64,
    KEYED_STRING: np.int16,
}


class FixedColumn:
    """Buffer of one fixed-width column: values and which of them are there."""

    def __init__(self, arrow_type: pa.DataType, rows: int) -> None:
        self._type = arrow_type
        self._values = np.zeros(rows, _DTYPES[arrow_type])
        self._valid = np.zeros(rows, np.bool_)

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows, keeping what is there."""
        self._values = np.resize(self._values, rows)
        self._valid = np.resize(self._valid, rows)

    def put(self, start: int, stop: int, value: Value) -> None:
        """Write one value, or an array of stop - start of them, to rows start..stop; None is null."""
        self._valid[start:stop] = value is not None
        if value is not None:
            self._values[start:stop] = value

    def array(self, rows: int) -> pa.Array:
        """The first ``rows`` rows as an Arrow array over the buffer's own memory where that is possible."""
        values = self._values[:rows]
        data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
        return pa.Array.from_buffers(self._type, rows, [self._validity(rows), pa.py_buffer(data)])

    def _validity(self, rows: int) -> pa.Buffer | None:
        valid = self._valid[:rows]
        return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


class KeyedColumn(FixedColumn):
    """Buffer of one column of repeated strings: 2-byte keys into a list of names that only grows."""

    def __init__(self, rows: int) -> None:
        super().__init__(KEYED_STRING, rows)
        self._keys: dict[str, int] = {}
        self._names = pa.array([], pa.string())

    def put(self, start: int, stop: int, value: Value) -> None:
        """Write one name, or a sequence of names, to rows start..stop; None is null."""
        if value is None or isinstance(value, str):
            super().put(start, stop, None if value is None else self._key(value))
        else:
            super().put(start, stop, np.fromiter((self._key(name) for name in value), np.int16))

    def array(self, rows: int) -> pa.Array:
        """The first ``rows`` rows as a dictionary array."""
        if len(self._names) != len(self._keys):
            self._names = string_array(list(self._keys))
        keys = pa.Array.from_buffers(
            pa.int16(), rows, [self._validity(rows), pa.py_buffer(self._values[:rows])]
        )
        return pa.DictionaryArray.from_arrays(keys, self._names)

    def _key(self, name: str) -> int:
        return self._keys.setdefault(name, len(self._keys))


class TextColumn:
    """Buffer of one column of strings that seldom repeat."""

    def __init__(self) -> None:
        self._values: list[str | None] = []

    def grow(self, rows: int) -> None:
        """Nothing to do: a list grows by itself."""

    def put(self, start: int, stop: int, value: Value) -> None:
        """Write one string, or a sequence of them, to rows start..stop; None is null."""
        repeated = value is None or isinstance(value, str)
        self._values[start:] = [value] * (stop - start) if repeated else list(value)

    def array(self, rows: int) -> pa.Array:
        """The first ``rows`` strings."""
        return string_array(self._values[:rows])


def string_array(values: Sequence[str | None]) -> pa.Array:
    """Arrow string array from Python strings, None becoming null, built from buffers."""
    encoded = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    valid = np.array([value is not None for value in values], np.bool_)
    validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _column(arrow_type: pa.DataType, rows: int) -> FixedColumn | TextColumn:
    if arrow_type == KEYED_STRING:
        return KeyedColumn(rows)
    return TextColumn() if arrow_type == pa.string() else FixedColumn(arrow_type, rows)


class Stream:
    """One Arrow IPC stream file and the rows that wait for it. Not thread-safe: the segment locks.

    An I/O error breaks the stream for good, because a torn batch may lie at its end: the error is
    kept, later rows are counted as lost. What was written before stays readable.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Create the file. Raises FileExistsError when it is there: a stream has one writer."""
        self.path = path
        self.error: OSError | None = None
        self.lost_row_count = 0
        self.written_row_count = 0
        self._schema = schema
        self._capacity = _INITIAL_ROWS
        self._rows = 0
        self._oldest = 0.0
        self._columns = {field.name: _column(field.type, self._capacity) for field in schema}
        self._file: BinaryIO | None = None
        try:
            # One large Python buffer makes one write of each batch; unbuffered, Arrow writes each part.
            self._file = path.open("xb", buffering=1 << 20)
            self._writer = pa.ipc.new_stream(self._file, schema)
            self._file.flush()
        except FileExistsError:
            raise
        except OSError as error:
            self.error = error

    @property
    def oldest_age(self) -> float:
        """Seconds that the oldest waiting row has waited; 0 when none waits."""
        return time.monotonic() - self._oldest if self._rows else 0.0

    @property
    def waiting_row_count(self) -> int:
        """Rows that were appended and not yet handed to the file."""
        return self._rows

    def append(self, columns: Mapping[str, Value], count: int = 1) -> None:
        """Append ``count`` rows; a column that is left out is null. KeyError on an unknown column."""
        if self.error is not None:
            self.lost_row_count += count
            return
        if self._rows == 0:
            self._oldest = time.monotonic()
        start, stop = self._rows, self._rows + count
        if stop > self._capacity:
            self._capacity = max(stop, 2 * self._capacity)
            for column in self._columns.values():
                column.grow(self._capacity)
        unknown = columns.keys() - self._columns.keys()
        if unknown:
            raise KeyError(f"{self.path.name}: no column {sorted(unknown)}")
        with np.errstate(over="ignore"):  # a statistic beyond float32's range is recorded as infinite
            for name, column in self._columns.items():
                column.put(start, stop, columns.get(name))
        self._rows = stop

    def flush(self) -> None:
        """Hand the waiting rows to the operating system as one record batch."""
        if self._rows == 0 or self.error is not None or self._file is None:
            return
        arrays = [column.array(self._rows) for column in self._columns.values()]
        try:
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            self._file.flush()
            self.written_row_count += self._rows
        except OSError as error:
            self.error = error
            self.lost_row_count += self._rows
        self._rows = 0

    def break_off(self, error: OSError) -> None:
        """Stop writing for a reason that a write would not show, such as a deleted directory."""
        self.error = self.error or error
        self.lost_row_count += self._rows
        self._rows = 0

    def file_descriptor(self) -> int | None:
        """A duplicate of the open file's descriptor, to be closed by the caller; None when there is none."""
        return None if self._file is None or self._file.closed else os.dup(self._file.fileno())

    def close(self) -> None:
        """Flush, write the end-of-stream mark and close the file."""
        self.flush()
        if self._file is None:
            return
        try:
            if self.error is None:
                self._writer.close()
            self._file.close()
        except OSError as error:
            self.error = self.error or error
