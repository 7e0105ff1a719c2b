"""Panels 4 to 6: activations, spectral norms, dead units and gradient/activation ratios by layer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from analyzer.charts.frame import Context, Drawing, Tables, number
from analyzer.charts.heatmaps import Grid, step_heat_map
from analyzer.charts.lines import Axis, line_chart
from analyzer.charts.series import Series, nonfinite_as_nan, series_by

MOST_LAYERS_TOLD = 6
"""In the sentence of the dead units; the chart has a line for every layer."""


def draw_activations(tables: Tables, context: Context) -> Drawing:
    """Mean absolute activation by module (rows, in forward order) and step, on a log colour scale."""
    series = module_series(tables["activation_by_layer"], "mean_abs")
    plot, grid = step_heat_map(context.name, context.steps, series, "mean |activation|")
    return Drawing(plot, _range_sentence(series), notes=_heat_notes(grid))


def module_series(table: pa.Table, column: str) -> tuple[Series, ...]:
    """One series per module in forward order; NaN where some elements were not finite."""
    return series_by(nonfinite_as_nan(table, column), column, "module")


def _heat_notes(grid: Grid) -> tuple[str, ...]:
    notes = ["Rows are modules in forward order, the first on top."]
    if grid.steps_per_column > 1:
        shown, total = int(np.sum(~np.isnan(grid.largest))), int(grid.recorded.sum())
        notes.append(
            f"{shown:,} of {total:,} points shown: each cell is the largest of "
            f"{grid.steps_per_column} recorded steps, the smallest is in the hover box."
        )
    lost = int(grid.lost.sum())
    if lost:
        notes.append(f"{lost:,} recorded values hold NaN or infinities, or are zero: red crosses.")
    return tuple(notes)


def _range_sentence(series: tuple[Series, ...]) -> str:
    """Smallest and largest value at the last step of each series, and how many were not finite."""
    last = {one.name: one.last() for one in series}
    finite = {name: value for name, value in last.items() if np.isfinite(value)}
    lost = sum(int((~np.isfinite(one.values)).sum()) for one in series)
    tail = f" {lost:,} recorded values are not finite." if lost else ""
    step = max((int(one.steps[-1]) for one in series), default=0)
    if not finite:
        return f"{len(series)} rows, none finite at the last step.{tail}"
    low, high = min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)
    return (
        f"At step {step}: from {number(finite[low])} ({low}) to {number(finite[high])} ({high}), "
        f"over {len(series)} rows.{tail}"
    )


def draw_spectral_norms(tables: Tables, context: Context) -> Drawing:
    """Largest singular value of each weight matrix on a log axis."""
    series = series_by(tables["spectral_norm_by_step"], "spectral_norm", "name")
    chart = line_chart(context.name, context.steps, series, Axis("spectral norm", log=True))
    return Drawing(chart.plot, _range_sentence(series) + _growth(series), chart.legend, chart.notes)


def _growth(series: tuple[Series, ...]) -> str:
    """The matrix that grew most between its first and last value, of those where both are finite."""
    grown = {one.name: one.values[-1] / one.values[0] for one in series if one.values[0] > 0}
    grown = {name: ratio for name, ratio in grown.items() if np.isfinite(ratio)}
    if not grown:
        return ""
    most = max(grown, key=grown.__getitem__)
    return f" Grew most: {most}, to {number(float(grown[most]))} times its first value."


def draw_dead_units(tables: Tables, context: Context) -> Drawing:
    """Share of units that were zero on every real token of the window, by layer."""
    table = tables["dead_units_by_layer"]
    series = _by_layer(table, "dead_fraction")
    chart = line_chart(
        context.name, context.steps, series, Axis("dead share", floor=0.0), also_in_range=(0.05,)
    )
    return Drawing(chart.plot, _dead_sentence(table), chart.legend, chart.notes)


def _by_layer(table: pa.Table, column: str) -> tuple[Series, ...]:
    series = series_by(table, column, "layer")
    return tuple(Series(f"layer {one.name}", one.steps, one.values) for one in series)


def _dead_sentence(table: pa.Table) -> str:
    """Dead units at the last step of the first layers; how many layers more there are."""
    last = {row["layer"]: row for row in table.to_pylist()}
    ordered = sorted(last.items(), key=lambda item: -1 if item[0] is None else item[0])
    words = [
        f"layer {layer}: {row['dead_unit_count']} of {row['unit_count']} units dead at step {row['step']}"
        for layer, row in ordered[:MOST_LAYERS_TOLD]
    ]
    if len(last) > MOST_LAYERS_TOLD:
        words.append(f"and {len(last) - MOST_LAYERS_TOLD} layers more")
    windows = sorted({row["window_steps"] for row in last.values() if row["window_steps"] is not None})
    window = f" (window of {' or '.join(map(str, windows))} steps)" if windows else ""
    return "; ".join(words).capitalize() + window + "."


def draw_gradient_ratios(tables: Tables, context: Context) -> Drawing:
    """Root mean square of the loss gradient at a module's output over that of the output itself."""
    series = module_series(tables["gradient_activation_ratio_by_layer"], "ratio")
    chart = line_chart(context.name, context.steps, series, Axis("gradient / activation", log=True))
    return Drawing(chart.plot, _range_sentence(series), chart.legend, chart.notes)
