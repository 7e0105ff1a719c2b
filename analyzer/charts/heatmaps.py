"""Heat maps: a quantity per row over steps, and a table of categories coloured by loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from bokeh.palettes import Cividis256
from numpy.typing import NDArray

from analyzer.charts.bokeh_models import BokehModel, models
from analyzer.charts.frame import hover, step_plot
from analyzer.charts.palette import ALARM
from analyzer.charts.series import Floats, Integers, Series
from analyzer.charts.ticks import value_ticks

MOST_CELLS = 8_000
"""Bounds the page: with more rows or steps, one column of cells covers several recorded steps."""
MOST_COLUMNS = 320
ROW_PIXELS = 17
MOST_ROW_LABELS = 40
LONGEST_ROW_LABEL = 24
LOST_CELL = "#a8201a"
"""Not of the palette: like the other cells it stays the same in both schemes, and its ink is white."""
MOST_PRINTED_COLUMNS = 8
"""Columns for which four digits fit into a cell on a page 390 pixels wide."""


@dataclass(frozen=True)
class Grid:
    """Values by row and column of steps. All arrays are (rows, columns) but the edges."""

    names: tuple[str, ...]
    left: Integers  # (columns,) first step of a column
    right: Integers  # (columns,)
    largest: Floats  # over the finite, positive values of the cell; NaN without any
    smallest: Floats
    lost: Integers  # recorded values that are NaN, infinite, zero or negative
    recorded: Integers  # recorded values
    steps_per_column: int


def grid_of(series: Sequence[Series]) -> Grid:
    """Series on one grid of steps; a column covers several recorded steps when there are too many."""
    steps = np.unique(np.concatenate([one.steps for one in series]))
    allowed = max(8, min(MOST_COLUMNS, MOST_CELLS // len(series)))
    width = -(-len(steps) // allowed)
    left = steps[::width]
    typical = int(np.median(np.diff(left))) if len(left) > 1 else 1
    shape = (len(series), len(left))
    largest, smallest = np.full(shape, -np.inf), np.full(shape, np.inf)
    lost, recorded = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, one in enumerate(series):
        column = np.searchsorted(left, one.steps, side="right") - 1
        shown = np.isfinite(one.values) & (one.values > 0)
        np.maximum.at(largest[row], column[shown], one.values[shown])
        np.minimum.at(smallest[row], column[shown], one.values[shown])
        np.add.at(lost[row], column[~shown], 1)
        np.add.at(recorded[row], column, 1)
    empty = np.isinf(largest) & np.isinf(smallest)
    largest[empty] = smallest[empty] = np.nan
    names = tuple(one.name for one in series)
    right = np.append(left[1:], left[-1] + typical)
    return Grid(names, left, right, largest, smallest, lost, recorded, int(width))


def step_heat_map(
    name: str, steps: BokehModel, series: Sequence[Series], label: str
) -> tuple[BokehModel, Grid]:
    """One row per series, first on top; log colour; a red cross where a value is not finite or positive."""
    grid = grid_of(series)
    rows = len(series)
    plot = step_plot(name, steps, models.Range1d(rows, 0, bounds=(0, rows)), "")
    plot.height = min(560, 96 + ROW_PIXELS * max(4, rows))
    _label_rows(plot.left[0], grid.names)
    plot.center[1].grid_line_color = None
    mapper = _log_colours(grid.largest)
    colour = {"field": "largest", "transform": mapper}
    quad = models.Quad(left="left", right="right", top="top", bottom="bottom", fill_color=colour)
    quad.line_color, quad.line_width = colour, 0.7  # without it the page shows through between cells
    renderer = plot.add_glyph(_cells(grid), quad)
    text = [("", "@name"), ("steps", "@left to @until"), (label, "@largest{%.6g}")]
    hover(plot, [renderer], [*text, ("smallest", "@smallest{%.6g}")] if grid.steps_per_column > 1 else text)
    _draw_lost(plot, grid)
    ticker = models.FixedTicker(ticks=value_ticks(mapper.low, mapper.high))
    plot.add_layout(_colour_bar(mapper, ticker), "right")
    return plot, grid


def _label_rows(axis: BokehModel, names: Sequence[str]) -> None:
    """Name the rows at their middle; every k-th when there are many."""
    stride = max(1, -(-len(names) // MOST_ROW_LABELS))
    labelled = range(0, len(names), stride)
    axis.ticker = [i + 0.5 for i in labelled]
    axis.major_label_overrides = {i + 0.5: short_name(names[i]) for i in labelled}
    axis.major_label_text_font_size = "10px"
    axis.major_tick_line_color = None


def short_name(name: str) -> str:
    """A dotted name with its leading words cut to a letter until it fits: ``b.0.a.query_key_value``."""
    name = name.replace("$$", "$\u200b$")  # a pair of dollar signs would make Bokeh load MathJax
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= LONGEST_ROW_LABEL:
            break
        parts[i] = part[:1] if not part.isdigit() else part
    name = ".".join(parts)
    return name if len(name) <= LONGEST_ROW_LABEL else name[: LONGEST_ROW_LABEL - 1] + "…"


def _cells(grid: Grid) -> BokehModel:
    row, column = np.nonzero(~np.isnan(grid.largest))
    return models.ColumnDataSource(
        {
            "left": grid.left[column].astype(np.int32),
            "right": grid.right[column].astype(np.int32),
            "until": (grid.right[column] - 1).astype(np.int32),
            "top": row.astype(np.int16),
            "bottom": (row + 1).astype(np.int16),
            "largest": grid.largest[row, column].astype(np.float32),
            "smallest": grid.smallest[row, column].astype(np.float32),
            "name": _repeated(grid.names, row),
        }
    )


def _repeated(names: Sequence[str], row: NDArray[np.intp]) -> list[str]:
    return [names[i] for i in row.tolist()]


def _draw_lost(plot: BokehModel, grid: Grid) -> None:
    row, column = np.nonzero(grid.lost)
    if not len(row):
        return
    source = models.ColumnDataSource(
        {
            "x": (grid.left[column] + grid.right[column]) / 2,
            "y": row + 0.5,
            "left": grid.left[column],
            "lost": grid.lost[row, column],
            "recorded": grid.recorded[row, column],
            "name": _repeated(grid.names, row),
        }
    )
    target = plot.add_glyph(
        source, models.Scatter(x="x", y="y", marker="x", size=7, line_color=ALARM, line_width=2)
    )
    hover(
        plot, [target], [("", "@name"), ("from step", "@left"), ("not finite or zero", "@lost of @recorded")]
    )


def _log_colours(values: Floats) -> BokehModel:
    shown = values[~np.isnan(values)]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.1, 1.0)
    if high < low * 1.05:
        low, high = low / 1.5, high * 1.5
    return models.LogColorMapper(palette=list(Cividis256), low=low, high=high, nan_color="rgba(0,0,0,0)")


def _colour_bar(mapper: BokehModel, ticker: BokehModel) -> BokehModel:
    return models.ColorBar(
        color_mapper=mapper,
        ticker=ticker,
        formatter=models.PrintfTickFormatter(format="%.3g"),
        width=10,
        label_standoff=5,
        padding=6,
    )


def category_map(name: str, table: pa.Table, rows: Sequence[str], columns: Sequence[str]) -> BokehModel:
    """Loss by row and column label with the value printed in each cell; cells without examples stay empty.

    A cell whose loss is not finite is red.
    """
    losses = np.asarray(table["loss"], np.float64)
    finite = losses[np.isfinite(losses)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    high = high if high > low else low + 1.0
    mapper = models.LinearColorMapper(palette=list(Cividis256), low=low, high=high, nan_color=LOST_CELL)
    plot = _category_plot(name, rows, columns)
    places = [(rows.index(r), columns.index(c)) for r, c in _labels(table)]
    source = _category_cells(table, losses, (low + high) / 2, places)
    cell = models.Rect(x="x", y="y", width=0.96, height=0.92, line_color=None)
    cell.fill_color = {"field": "loss", "transform": mapper}
    target = plot.add_glyph(source, cell)
    if len(columns) <= MOST_PRINTED_COLUMNS:
        plot.add_glyph(source, _printed_values())
    hover(plot, [target], [("", "@row, @column"), ("loss", "@exact nats/token"), ("tokens", "@tokens")])
    plot.add_layout(_colour_bar(mapper, models.BasicTicker(desired_num_ticks=4)), "right")
    return plot


def _category_plot(name: str, rows: Sequence[str], columns: Sequence[str]) -> BokehModel:
    # Numbered rows with labels, not Bokeh's factors: two names may be the same once shortened.
    plot = models.Plot(
        name=name,
        x_range=models.Range1d(0, len(columns)),
        y_range=models.Range1d(len(rows), 0),
        height=min(620, 110 + ROW_PIXELS * max(4, len(rows))),
        min_width=200,
        sizing_mode="stretch_width",
        title=None,
        toolbar_location=None,
    )
    plot.add_layout(models.LinearAxis(), "left")
    plot.add_layout(models.LinearAxis(major_label_orientation=0.5), "below")
    _label_rows(plot.left[0], rows)
    _label_rows(plot.below[0], columns)
    return plot


def _labels(table: pa.Table) -> list[tuple[str, str]]:
    row, column = table["row_value"].to_pylist(), table["column_value"].to_pylist()
    return [(str(r), str(c)) for r, c in zip(row, column, strict=True)]


def _printed_values() -> BokehModel:
    text = models.Text(x="x", y="y", text="text", text_color="ink", text_font_size="10px")
    text.text_align, text.text_baseline = "center", "middle"
    return text


def _category_cells(
    table: pa.Table, losses: Floats, middle: float, places: Sequence[tuple[int, int]]
) -> BokehModel:
    return models.ColumnDataSource(
        {
            "y": [row + 0.5 for row, _ in places],
            "x": [column + 0.5 for _, column in places],
            "row": [row for row, _ in _labels(table)],
            "column": [column for _, column in _labels(table)],
            "loss": losses,
            "text": [f"{v:.2f}" if np.isfinite(v) else "NaN" for v in losses],
            "exact": [f"{v:.6g}" for v in losses],
            "ink": ["#101418" if v >= middle else "#ffffff" for v in losses],
            "tokens": table["token_count"].to_pylist(),
        }
    )
