"""Rows of ``tensors`` made whole: their counts and their values of weights are in streams of their own.

Once, as a log is opened: a join in the view would cost every query that reads ``tensors``.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recorder.schema import ALL_FINITE, NONFINITE_COUNTS, TENSOR_KINDS, WEIGHT_VALUES, Column

Indices = NDArray[np.int64]
"""(rows,) of another table, its length standing for no row."""


def whole_tensor_rows(rows: pa.Table, nonfinite: pa.Table, weights: pa.Table) -> tuple[pa.Table, int]:
    """(rows with every column of TENSORS, how many are left out because their counts are lost).

    All three are of one rank and segment. A row whose counts are lost must not pass for a finite one.
    Rows of schema version 1 have no ``all_finite``: they are whole already.
    """
    if ALL_FINITE.name not in rows.column_names:
        return rows, 0
    keys = _keys(rows, rows.column("kind"))
    all_finite = rows.column(ALL_FINITE.name)
    zero = pc.if_else(all_finite, pa.scalar(0, pa.int64()), None)
    rows = rows.drop_columns([ALL_FINITE.name])
    weight_rows = _matches(keys, _keys(weights, pa.scalar("weight")))
    rows = _with_columns(rows, {c.name: _taken(weights, c, weight_rows) for c in WEIGHT_VALUES})
    is_counted = pc.equal(all_finite, False)  # null where there is nothing to count
    if not pc.any(is_counted).as_py():
        return _with_columns(rows, {c.name: zero for c in NONFINITE_COUNTS}), 0
    count_rows = _matches(keys, _keys(nonfinite, nonfinite.column("kind")))
    counted = {c.name: _taken(nonfinite, c, count_rows) for c in NONFINITE_COUNTS}
    counts = {name: pc.if_else(is_counted, values, zero) for name, values in counted.items()}
    is_lost = pc.fill_null(is_counted, False).to_numpy() & (count_rows == nonfinite.num_rows)
    kept = _with_columns(rows, counts).take(_arrow(np.flatnonzero(~is_lost)))
    return kept, int(np.count_nonzero(is_lost))


def _keys(rows: pa.Table, kind: pa.ChunkedArray | pa.Scalar) -> NDArray[np.int64]:
    """(rows,) one number for each step, tensor and kind: 31 bits, 30 bits and 3 bits."""
    kinds = pc.fill_null(pc.index_in(kind, pa.array(TENSOR_KINDS)), len(TENSOR_KINDS))
    step, tensor_id = (pc.fill_null(pc.cast(rows.column(n), pa.int64()), -1) for n in ("step", "tensor_id"))
    kind_number = kinds.as_py() if isinstance(kinds, pa.Scalar) else kinds.to_numpy()
    keys: NDArray[np.int64] = step.to_numpy() << 33 | tensor_id.to_numpy() << 3 | kind_number
    return keys


def _matches(keys: NDArray[np.int64], part_keys: NDArray[np.int64]) -> Indices:
    """The row of the part that has each key."""
    order = np.argsort(part_keys, kind="stable")
    places = np.searchsorted(part_keys, keys, sorter=order)
    order = np.append(order, len(part_keys))
    found: Indices = order[places]
    is_match = np.append(part_keys, -1)[found] == keys
    return np.where(is_match & (found < len(part_keys)), found, len(part_keys))


def _taken(part: pa.Table, column: Column, indices: Indices) -> pa.ChunkedArray:
    """A column's values at these rows, null for no row."""
    values = pa.chunked_array([*part.column(column.name).chunks, pa.nulls(1, column.type)])
    return values.take(_arrow(indices))


def _arrow(indices: Indices) -> pa.Array:
    """Without ``pa.array``, which imports pandas for an array of NumPy."""
    return pa.Array.from_buffers(pa.int64(), len(indices), [None, pa.py_buffer(indices)])


def _with_columns(rows: pa.Table, columns: dict[str, pa.ChunkedArray]) -> pa.Table:
    """The rows with these columns in the place of those of the same name."""
    for name, values in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows
