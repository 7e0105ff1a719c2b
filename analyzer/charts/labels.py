"""Panel 7: loss by the groups of a label, with an interval over clusters, and a map of two labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analyzer.charts.bokeh_models import BokehModel, models
from analyzer.charts.frame import Context, Drawing, Tables, number
from analyzer.charts.heatmaps import category_map
from analyzer.charts.lines import Axis, line_chart
from analyzer.charts.palette import series_style
from analyzer.charts.series import nonfinite_as_nan, series_by


def draw_label_losses(tables: Tables, context: Context) -> Drawing:
    """Loss of each group on the primary split with its delete-one-cluster interval."""
    table = nonfinite_as_nan(tables["label_loss_by_step"], "loss")
    series = series_by(table, "loss", "value")
    label, cluster = context.run.get("group_label"), context.run.get("cluster_label")
    axis = Axis("loss, nats/token", log=True)
    chart = line_chart(context.name, context.steps, series, axis)
    for index, one in enumerate(series):
        _draw_interval(chart.plot, table.filter(pc.equal(table["value"], one.name)), one.name, index)
    words = " ".join(_last_words(table, one.name) for one in series)
    unit = cluster or "example"
    note = f"Groups of the label “{label}”. Bands: 95% jackknife interval, leaving out one {unit} at a time."
    return Drawing(chart.plot, words, chart.legend, (note, *chart.notes))


def _draw_interval(plot: BokehModel, table: pa.Table, name: str, index: int) -> None:
    """A band between lower and upper, where both are finite; cut off at the bottom of the log axis."""
    lower, upper = (np.asarray(table[column], np.float64) for column in ("lower", "upper"))
    shown = np.isfinite(lower) & np.isfinite(upper) & (upper > 0)
    if not shown.any():
        return
    steps = np.asarray(table["step"])[shown].astype(np.int32)
    bottom = np.maximum(lower[shown], plot.y_range.start)
    source = models.ColumnDataSource({"step": steps, "lower": bottom, "upper": upper[shown]})
    band = models.VArea(
        x="step", y1="lower", y2="upper", fill_color=series_style(index).colour, fill_alpha=0.14
    )
    plot.add_glyph(source, band, name=name)


def _last_words(table: pa.Table, value: str) -> str:
    row = table.filter(pc.equal(table["value"], value)).to_pylist()[-1]
    words = f"{value}: {number(row['loss'])} nats/token at step {row['step']}"
    if row["lower"] is None or not np.isfinite(row["lower"]):
        return f"{words}, no interval ({row['cluster_count']} clusters)."
    interval = f"{number(row['lower'])} to {number(row['upper'])}"
    return f"{words} (95% {interval}, {row['cluster_count']} clusters)."


def draw_loss_map(tables: Tables, context: Context) -> Drawing:
    """Loss by two labels at the last evaluation, the worst row on top, one that is not finite above all."""
    table = nonfinite_as_nan(tables["loss_map"], "loss")
    table = table.filter(pc.and_(table["row_value"].is_valid(), table["loss"].is_valid()))
    rows = _by_mean_loss(table)
    columns = sorted({str(v) for v in table["column_value"].to_pylist()})
    plot = category_map(context.name, table, rows, columns)
    row_label, column_label = context.run.get("map_row_label"), context.run.get("map_column_label")
    notes = (
        f"Rows: {row_label}, the highest mean loss on top. Columns: {column_label}.",
        "Empty: no example in the split.",
    )
    return Drawing(plot, _map_sentence(table), notes=notes)


def _by_mean_loss(table: pa.Table) -> Sequence[str]:
    sums: dict[str, tuple[float, int]] = {}
    for row in table.to_pylist():
        loss, tokens = sums.get(str(row["row_value"]), (0.0, 0))
        count = row["token_count"]
        sums[str(row["row_value"])] = (loss + row["loss"] * count, tokens + count)
    means = {name: loss / max(1, tokens) for name, (loss, tokens) in sums.items()}
    return sorted(means, key=lambda name: (-np.nan_to_num(means[name], nan=np.inf), name))


def _map_sentence(table: pa.Table) -> str:
    cells = [row for row in table.to_pylist() if np.isfinite(row["loss"])]
    if not cells:
        return f"{table.num_rows} cells, none finite."
    worst = max(cells, key=lambda row: float(row["loss"]))
    best = min(cells, key=lambda row: float(row["loss"]))
    lost = f", {table.num_rows - len(cells)} of them not finite" if len(cells) < table.num_rows else ""
    return (
        f"At step {worst['step']}, {table.num_rows} cells{lost}: highest {number(worst['loss'])} "
        f"({worst['row_value']}, {worst['column_value']}), lowest {number(best['loss'])} "
        f"({best['row_value']}, {best['column_value']})."
    )
