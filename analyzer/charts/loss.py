"""Panel 1: training and evaluation loss against what can be expected of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from analyzer.charts.frame import PLOT_HEIGHT, Context, Drawing, Mark, Tables, number
from analyzer.charts.lines import Axis, Reference, line_chart
from analyzer.charts.palette import SERIES_COLOURS, Style, series_style
from analyzer.charts.series import Series, series_by, series_of
from analyzer.charts.ticks import perplexity_axis

REFERENCE_LABELS = {
    "uniform": "ln V (uniform guess)",
    "unigram": "unigram entropy",
    "n_gram": "n-gram model",
    "entropy_floor": "entropy floor",
}
# Thin and without markers: one value per batch is noise around what the evaluations measure.
TRAIN = Style(SERIES_COLOURS[4], width=1.0)


def draw_loss(tables: Tables, context: Context) -> Drawing:
    """Train and evaluation loss in nats/token on a log axis, perplexity on the right, events on top."""
    primary = context.run.get("primary_split")
    train = series_of(tables["training_loss_by_step"], "train_loss", "train, each batch")
    splits = evaluation_series(tables["evaluation_loss_by_step"], primary)
    series = [one for one in (*splits, train) if len(one.steps)]
    references = reference_lines(tables["reference_losses"], primary)
    axis = Axis("loss, nats/token", log=True)
    styles = [TRAIN if one is train else series_style(i) for i, one in enumerate(series)]
    marks = loss_marks(tables)
    chart = line_chart(context.name, context.steps, series, axis, references, marks, styles=styles)
    chart.plot.height = PLOT_HEIGHT + 60  # it has the width of the page
    y_range = chart.plot.y_range
    chart.plot.add_layout(perplexity_axis(y_range.start, y_range.end), "right")
    return Drawing(chart.plot, " ".join(_sentence(one) for one in series), chart.legend, chart.notes)


def evaluation_series(table: pa.Table, primary: str | None) -> list[Series]:
    """One series per split, the primary split first."""
    splits = sorted(series_by(table, "loss", "split"), key=lambda one: one.name != primary)
    names = [f"{one.name} split{' (primary)' if one.name == primary else ''}" for one in splits]
    return [Series(name, one.steps, one.values) for name, one in zip(names, splits, strict=True)]


def reference_lines(table: pa.Table, primary: str | None) -> list[Reference]:
    """Reference losses in display order; of the entropy floors only the primary split's."""
    values = {
        row["reference"]: row["loss"]
        for row in table.to_pylist()
        if row["loss"] is not None and row["split"] in (None, primary)
    }
    return [Reference(label, values[key]) for key, label in REFERENCE_LABELS.items() if key in values]


def loss_marks(tables: Tables) -> list[Mark]:
    """Spikes, overfit onset and resumes; tables that were left out (a blind page) give none."""
    marks = [
        Mark(row["step"], f"spike to {number(row['loss'])}, z = {number(row['z'])}", "spike")
        for row in _rows(tables, "loss_spikes")
    ]
    marks += [
        Mark(
            row["minimum_step"],
            f"lowest {row['split']} loss; rise confirmed at {row['confirmed_step']}",
            "onset",
        )
        for row in _rows(tables, "overfit_onset")
        if not row["is_superseded"]  # a later, lower minimum
    ]
    return marks + resume_marks(tables)


def resume_marks(tables: Tables) -> list[Mark]:
    """First steps of later segments, each once, however many ranks resumed there."""
    steps = {row["step"]: row["segment"] for row in _rows(tables, "resumes")}
    return [Mark(step, f"resumed: segment {segment}", "resume") for step, segment in sorted(steps.items())]


def _rows(tables: Tables, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = tables[query].to_pylist() if query in tables else []
    return rows


def _sentence(series: Series) -> str:
    finite = np.isfinite(series.values)
    last = f"{series.name}: {number(series.last())} nats/token at step {series.steps[-1]}"
    if not finite.any():
        return f"{last}, never finite."
    best = int(np.argmin(np.where(finite, series.values, np.inf)))
    lost = f", {int((~finite).sum()):,} values not finite" if not finite.all() else ""
    lowest = f"lowest {number(float(series.values[best]))} at step {series.steps[best]}"
    return f"{last} ({'its lowest' if best == len(finite) - 1 else lowest}{lost})."
