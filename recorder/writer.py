"""Rows to Arrow IPC streams: one file per table, rank and segment, appended to by one process only.

Appending keeps a reference and returns. Encoding builds each column for all waiting blocks at once, which
takes the interpreter for as long as it lasts; writing is one system call, which does not. Arrow arrays are
made from buffers: ``pa.array`` would import pandas on first use and stall the process by a third of a second.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recorder.schema import WALL_TIME

Value = Any
"""What a column takes: a number, bool or str; None for "not measured"; or one array of them per block."""


MOST_HELD_ROWS = 1 << 19
"""Of one table, in memory while the disk hangs: some tens of MB."""
ROWS_OF_A_BLOCK = 16
"""As many take the memory that a block takes beside its rows."""


class Matrix(NamedTuple):
    """Several number columns of a block at once: one small copy each time instead of one per column."""

    names: tuple[str, ...]  # the same in every block of a stream
    values: NDArray[Any]  # (rows, names)


class Block(NamedTuple):
    """Rows for one table; a column that is left out is null in all of them. Its arrays are not to change."""

    table: str
    row_count: int
    columns: dict[str, Value]
    matrix: Matrix | None = None


DTYPES: dict[pa.DataType, Any] = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint32(): np.uint32,
    pa.uint64(): np.uint64,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
    pa.bool_(): np.bool_,
    WALL_TIME: np.int64,
}
_NARROW = frozenset(map(np.dtype, (np.int8, np.int16, np.int32, np.uint32)))

Counts = NDArray[np.int64]
"""Rows of each block, (blocks,)."""


def fixed_array(arrow_type: pa.DataType, values: Sequence[Value], row_counts: Counts) -> pa.Array:
    """Arrow array of a fixed-width type from one value, array or None (null) per block of rows."""
    data = _joined(values, row_counts, DTYPES[arrow_type])
    return _arrow(arrow_type, data, _validity([value is not None for value in values], row_counts))


def _arrow(arrow_type: pa.DataType, data: NDArray[Any], validity: pa.Buffer | None) -> pa.Array:
    buffer = np.packbits(data, bitorder="little") if data.dtype == np.bool_ else data
    return pa.Array.from_buffers(arrow_type, len(data), [validity, pa.py_buffer(buffer)])


def _joined(values: Sequence[Value], row_counts: Counts, dtype: Any) -> NDArray[Any]:
    """One array over all blocks; nulls are zero."""
    types = set(map(type, values))
    if types == {type(None)}:
        return np.zeros(row_counts.sum(), dtype)
    filled = [0 if value is None else value for value in values] if type(None) in types else values
    if np.ndarray not in types:
        return np.repeat(np.array(filled, dtype), row_counts)
    parts = [_part(value, count, dtype) for value, count in zip(filled, row_counts.tolist(), strict=True)]
    return _cast(np.concatenate(parts), dtype)


def _part(value: Value, count: int, dtype: Any) -> NDArray[Any]:
    """(count,) values of one block, numbers in the column's own type.

    An int64 zero beside uint64 hashes would make float64 of both, which has no room for a hash.
    """
    return value if type(value) is np.ndarray else np.full(count, value, dtype)


def _cast(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Contiguous values of that type. Raises OverflowError on a whole number that would wrap around."""
    if np.dtype(dtype) in _NARROW and values.dtype != dtype and values.size:
        limits = np.iinfo(dtype)
        if not (limits.min <= values.min() and values.max() <= limits.max):
            raise OverflowError(f"{values.min():.0f} to {values.max():.0f} in a column of {limits.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):  # beyond float32's range is recorded as infinite
        return np.ascontiguousarray(values, dtype)


def _validity(present: Sequence[bool], row_counts: Counts) -> pa.Buffer | None:
    """Arrow's validity bitmap; None when every block has a value."""
    if all(present):
        return None
    return pa.py_buffer(np.packbits(np.repeat(present, row_counts), bitorder="little"))


def string_array(values: Sequence[str | None]) -> pa.Array:
    """Arrow string array from Python strings; None is null, what UTF-8 can not write becomes an escape."""
    encoded = [b"" if value is None else value.encode(errors="backslashreplace") for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in encoded], out=offsets[1:])
    validity = _validity([value is not None for value in values], np.ones(len(values), np.int64))
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


class KeyedStrings:
    """Repeated strings of one column: keys of 1, 2 or 4 bytes into a list of names that only grows."""

    def __init__(self, key_type: pa.DataType) -> None:
        self._key_type = key_type
        self._keys: dict[str | None, int] = {}
        self._names = string_array([])

    def array(self, values: Sequence[Value], row_counts: Counts) -> pa.Array:
        """Dictionary array from one name, sequence of names or None per block of rows."""
        keys = [
            np.array([self._key(name) for name in value]) if isinstance(value, list | tuple)
            else None if value is None else self._key(value)
            for value in values
        ]  # fmt: skip
        if len(self._names) != len(self._keys):
            self._names = string_array(list(self._keys))
        return pa.DictionaryArray.from_arrays(fixed_array(self._key_type, keys, row_counts), self._names)

    def _key(self, name: str | None) -> int:
        key = self._keys.get(name)
        if key is None:
            if not isinstance(name, str | None):  # among the names it would cost every later row
                raise TypeError(f"{name!r} is no text")
            key = self._keys[name] = len(self._keys)
        return key


def _texts(values: Sequence[Value], row_counts: Counts) -> list[str | None]:
    """One text per row."""
    texts: list[str | None] = []
    for value, count in zip(values, row_counts.tolist(), strict=True):
        texts += value if isinstance(value, list | tuple) else [value] * count
    return texts


class Stream:
    """One Arrow IPC stream file and the blocks that wait for it. The segment does the locking.

    An I/O error breaks the stream for good, because a torn batch may lie at its end: the error is
    kept, later rows are counted as lost. What was written before stays readable.

    An interrupt (Ctrl-C, a signal handler that raises) may come after any call. What was not finished then
    stays where it was, and the next encoding or writing takes it up.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        """Create the file. One that is there is an error like others: a stream has one writer."""
        self.path = path
        self.error: OSError | None = None
        self.rejection: str | None = None  # why a row could not become a row of Arrow
        self.is_overfull = False
        self.lost_row_count = 0
        self.written_row_count = 0
        self.waiting_row_count = 0
        self._encoded_row_count = 0
        self._schema = schema
        self._names = frozenset(schema.names)
        self._keyed = {
            field.name: KeyedStrings(field.type.index_type)
            for field in schema
            if pa.types.is_dictionary(field.type)
        }
        self._fields = {field.name: field for field in schema}  # asking the schema again costs a microsecond
        self._matrix_names: tuple[str, ...] = ()
        self._waiting: list[Block] = []
        self._taken: list[Block] = []  # to be encoded
        self._oldest = 0.0
        self._encoded = io.BytesIO()  # a batch is made of many small writes, and goes to the file as one
        self._encoded_place = 0  # in the file
        self._is_ended = False
        self._writer = pa.ipc.new_stream(self._encoded, schema)
        self._file: io.FileIO | None = None
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            self.error = error

    @property
    def oldest_age(self) -> float:
        """Seconds that the oldest row has waited to be encoded; 0 when none waits."""
        return time.monotonic() - self._oldest if self._waiting or self._taken else 0.0

    def append(self, block: Block) -> None:
        """Let rows wait for the next write. KeyError on an unknown column."""
        if not block.columns.keys() <= self._names:
            raise KeyError(f"{self.path.name}: no column {sorted(block.columns.keys() - self._names)}")
        if block.matrix is not None and block.matrix.names is not self._matrix_names:
            self._accept(block.matrix.names)
        if self.error is not None:
            self.lost_row_count += block.row_count
            return
        if self.waiting_row_count + ROWS_OF_A_BLOCK * len(self._waiting) > MOST_HELD_ROWS:
            self.is_overfull = True
            self.lost_row_count += block.row_count
            return
        if not self._waiting:
            self._oldest = time.monotonic()
        self._waiting.append(block)
        self.waiting_row_count += block.row_count

    def take(self) -> None:
        """The waiting blocks wait no longer: they are to be encoded."""
        self._taken, self._waiting, self.waiting_row_count = [*self._taken, *self._waiting], [], 0

    def encode(self) -> None:
        """Make record batches of what was taken, in memory: it waits for no disk."""
        if not self._taken:
            return
        if self.error is not None or self._file is None or self._file.closed:
            lost = sum(block.row_count for block in self._taken)
            self.lost_row_count, self._taken = self.lost_row_count + lost, []
            return
        try:
            self._encode(self._taken)
        except Exception:  # a value that its column can not hold: only the block that it is in is lost
            while self._taken:
                self._encode_or_lose(self._taken[0])

    def _encode_or_lose(self, block: Block) -> None:
        try:
            self._encode([block])
        except Exception as error:
            self.rejection = self.rejection or f"{type(error).__name__}: {error}"
            self.lost_row_count, self._taken = self.lost_row_count + block.row_count, self._taken[1:]

    def _encode(self, blocks: Sequence[Block]) -> None:
        """Make a record batch of the first blocks taken."""
        row_counts = np.array([block.row_count for block in blocks])
        row_count, block_count = int(row_counts.sum()), len(blocks)
        batch = self._batch(blocks, row_counts)
        end = self._encoded.tell()
        if not end and self._file is not None:
            self._encoded_place = self._file.seek(0, os.SEEK_END)
        try:
            self._writer.write_batch(batch)
        finally:  # an interrupt comes when the call is over
            if self._encoded.tell() > end:
                rest = self._taken[block_count:]
                self._encoded_row_count, self._taken = self._encoded_row_count + row_count, rest

    @property
    def encoded_byte_count(self) -> int:
        """Bytes of record batches that are not in the file yet."""
        return self._encoded.tell()

    def write(self) -> None:
        """Hand the record batches to the operating system."""
        if not self._encoded_row_count:
            return
        if self.error is None:
            try:
                self._hand_over()
            except OSError as error:
                self.error = error
        row_count = self._encoded_row_count
        if self.error is None:
            self.written_row_count, self._encoded_row_count = self.written_row_count + row_count, 0
        else:
            self.lost_row_count, self._encoded_row_count = self.lost_row_count + row_count, 0
            self._forget_encoded()

    def _hand_over(self) -> None:
        """Write the encoded bytes to the file, over what an interrupt left there of the same bytes."""
        rest = memoryview(self._encoded.getvalue())[: self._encoded.tell()]
        if self._file is not None:
            self._file.seek(self._encoded_place)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._forget_encoded()

    def _forget_encoded(self) -> None:
        self._encoded.seek(0)
        self._encoded.truncate()

    def notice_deletion(self) -> None:
        """Break where the file has no name any more: writes to it succeed, and nobody will ever read them."""
        if self.error is not None or self._file is None:
            return
        try:
            if os.fstat(self._file.fileno()).st_nlink:
                return
            self.error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except OSError as error:  # on a network's disk
            self.error = error
        self.lost_row_count += self.written_row_count
        self.written_row_count = 0

    def touch(self) -> None:
        """Make the file as old as now."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a disk that became read-only shows at the next write
                os.utime(self._file.fileno())

    def file_descriptor(self) -> int | None:
        """A duplicate of the open file's descriptor, to be closed by the caller; None when there is none."""
        return None if self._file is None or self._file.closed else os.dup(self._file.fileno())

    def close(self) -> None:
        """Write what waits and the end-of-stream mark, and close the file."""
        self.take()
        self.encode()
        self.write()
        if self._file is None or self._file.closed:
            return
        try:
            if self.error is None:
                if not self._is_ended:
                    self._encoded_place = self._file.seek(0, os.SEEK_END)
                    self._is_ended = True
                    self._writer.close()
                self._hand_over()
            self._file.close()
        except OSError as error:
            self.error = self.error or error

    def _batch(self, blocks: Sequence[Block], row_counts: Counts) -> pa.RecordBatch:
        of_matrices = self._matrix_arrays(blocks, row_counts)
        columns = [block.columns for block in blocks]
        arrays = [
            of_matrices[name] if name in of_matrices
            else self._array(field, [column.get(name) for column in columns], row_counts)
            for name, field in self._fields.items()
        ]  # fmt: skip
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _accept(self, names: tuple[str, ...]) -> None:
        """Matrices of a stream have one list of columns. KeyError on unknown or other ones."""
        if not self._names.issuperset(names) or self._matrix_names not in ((), names):
            raise KeyError(f"{self.path.name}: no matrix of columns {', '.join(names)}")
        self._matrix_names = names

    def _matrix_arrays(self, blocks: Sequence[Block], row_counts: Counts) -> dict[str, pa.Array]:
        """The columns that came in matrices, by name; null where a block has none."""
        parts = [block.matrix.values for block in blocks if block.matrix is not None]
        if not parts:
            return {}
        present = [block.matrix is not None for block in blocks]
        joined = np.concatenate(parts)
        if not all(present):
            rows = np.repeat(present, row_counts)
            joined, found = np.zeros((len(rows), joined.shape[1])), joined
            joined[rows] = found
        validity = _validity(present, row_counts)
        columns = zip(self._matrix_names, joined.T, strict=True)
        types = {name: self._schema.field(name).type for name in self._matrix_names}
        return {name: _arrow(types[name], _cast(c, DTYPES[types[name]]), validity) for name, c in columns}

    def _array(self, field: pa.Field, values: Sequence[Value], row_counts: Counts) -> pa.Array:
        if field.name in self._keyed:
            return self._keyed[field.name].array(values, row_counts)
        if field.type == pa.string():
            return string_array(_texts(values, row_counts))
        return fixed_array(field.type, values, row_counts)
