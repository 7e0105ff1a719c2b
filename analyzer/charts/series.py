"""Arrow tables to series, and series to what a plot can hold: thinned, non-finite steps apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

POINTS_PER_SERIES = 2400
"""Twice the width of a wide panel in pixels: more points cannot be told apart before zooming."""
POINTS_PER_CHART = 24_000
"""Bounds the page: a chart of many series gives each of them fewer points."""
FEWEST_POINTS = 60
KEPT_PER_BIN = 5  # first, last, smallest, largest, first non-finite
RUNS_PER_SERIES = 150
ZERO_ON_LOG_AXIS = "zero on a log axis"


@dataclass(frozen=True)
class Series:
    """One measured quantity over steps, in step order. NaN and infinities are values; nulls are left out."""

    name: str
    steps: Integers
    values: Floats

    def finite(self) -> Floats:
        """The finite values."""
        return self.values[np.isfinite(self.values)]

    def last(self) -> float:
        """The value at the last step; NaN when there is none."""
        return float(self.values[-1]) if len(self.values) else float("nan")


@dataclass(frozen=True)
class Run:
    """Consecutive rows of a series that cannot be drawn, and why."""

    first_step: int
    last_step: int
    kind: str  # "NaN", "+inf", "-inf", "zero on a log axis", "negative on a log axis"
    row_count: int


def series_of(table: pa.Table, column: str, name: str) -> Series:
    """The rows in which a column was measured, sorted by step; rows of one step keep their order."""
    measured = table.filter(pc.and_(table["step"].is_valid(), table[column].is_valid()))
    steps = np.asarray(measured["step"], np.int64)
    values = np.asarray(measured[column], np.float64)
    order = np.argsort(steps, kind="stable")
    return Series(name, steps[order], values[order])


def series_by(table: pa.Table, column: str, key: str) -> tuple[Series, ...]:
    """One series per value of a key column, in order of first appearance; keys without one are left out."""
    keys = table[key].combine_chunks().dictionary_encode()
    names = keys.dictionary.to_pylist()
    codes = keys.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    every = (series_of(table.filter(pa.array(codes == i)), column, str(n)) for i, n in enumerate(names))
    return tuple(series for series in every if len(series.steps))


def nonfinite_as_nan(table: pa.Table, column: str) -> pa.Table:
    """The table with NaN in a column wherever ``nonfinite_count`` says that non-finite values were left out.

    Such a value is over the finite part only, so that drawing it would hide the rest.
    """
    if "nonfinite_count" not in table.column_names:
        return table
    lost = np.asarray(table["nonfinite_count"].fill_null(0)) > 0
    values = np.asarray(table[column].cast(pa.float64()))
    measured = np.asarray(table[column].is_valid()) | lost
    marked = pa.array(np.where(lost, np.nan, values), pa.float64(), mask=~measured)
    return table.set_column(table.column_names.index(column), column, marked)


def thin(series: Series, kept_steps: Iterable[int], most_points: int) -> Series:
    """The series with at most about ``most_points`` rows, plus the rows of every kept step.

    Equal bins of rows keep their first, last, smallest and largest row, which draws the same picture as
    all rows at one bin per pixel (M4: Jugel et al., VLDB 2014), and their first non-finite row, so that
    a line breaks where the data do.
    """
    count = len(series.steps)
    if count <= most_points:
        return series
    bin_count = max(1, most_points // KEPT_PER_BIN)
    edges = np.linspace(0, count, bin_count + 1).astype(np.int64)
    width = int(np.max(np.diff(edges)))
    grid = edges[:-1, None] + np.arange(width)  # (bins, width)
    inside = grid < edges[1:, None]
    values = series.values[np.minimum(grid, count - 1)]
    finite = inside & np.isfinite(values)
    lost = inside & ~np.isfinite(values)
    kept = [
        edges[:-1],
        edges[1:] - 1,
        edges[:-1] + np.argmin(np.where(finite, values, np.inf), axis=1),
        edges[:-1] + np.argmax(np.where(finite, values, -np.inf), axis=1),
        (edges[:-1] + np.argmax(lost, axis=1))[lost.any(axis=1)],
        np.flatnonzero(np.isin(series.steps, np.fromiter(kept_steps, np.int64))),
    ]
    rows = np.unique(np.concatenate(kept))
    return Series(series.name, series.steps[rows], series.values[rows])


def points_allowed(series_count: int) -> int:
    """Points that each of the series of one chart may have."""
    share = POINTS_PER_CHART // max(1, series_count)
    return max(FEWEST_POINTS, min(POINTS_PER_SERIES, share))


def undrawable_runs(series: Series, log: bool) -> tuple[Run, ...]:
    """Runs of rows that a plot would silently drop, by kind, at most about RUNS_PER_SERIES of each kind.

    When there are more, neighbouring runs are joined; their row count stays exact.
    """
    values = series.values
    kinds = {
        "NaN": np.isnan(values),
        "+inf": np.isposinf(values),
        "-inf": np.isneginf(values),
    }
    if log:
        kinds[ZERO_ON_LOG_AXIS] = values == 0
        kinds["negative on a log axis"] = np.isfinite(values) & (values < 0)
    return tuple(run for kind, mask in kinds.items() for run in _runs(series.steps, mask, kind))


def _runs(steps: Integers, mask: NDArray[np.bool_], kind: str) -> Iterable[Run]:
    changes = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    starts, ends = changes[::2], changes[1::2] - 1
    joined = max(1, -(-len(starts) // RUNS_PER_SERIES))
    for i in range(0, len(starts), joined):
        first, last = starts[i], ends[min(i + joined, len(ends)) - 1]
        yield Run(int(steps[first]), int(steps[last]), kind, int(mask[first : last + 1].sum()))


def drawable(values: Floats, log: bool) -> Floats:
    """The values with NaN in place of everything that the axis cannot show."""
    shown = np.isfinite(values) & (values > 0) if log else np.isfinite(values)
    return np.where(shown, values, np.nan)
