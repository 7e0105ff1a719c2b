"""Panels 2 and 3: learning rate and gradient norm."""

from __future__ import annotations

import numpy as np

from analyzer.charts.frame import Context, Drawing, Mark, Tables, number
from analyzer.charts.lines import Axis, line_chart
from analyzer.charts.loss import resume_marks
from analyzer.charts.palette import SERIES_COLOURS, Style
from analyzer.charts.series import Series, series_of

# One noisy value per step: thin, so that the level that clipping holds it to can be seen beneath.
BEFORE = Style(SERIES_COLOURS[0], width=1.0)
AFTER = Style(SERIES_COLOURS[1], (6, 3), "square", width=2.0)
APPLIED = Style(SERIES_COLOURS[0], marker="circle")
# Wide, and beneath the applied one: where both agree it frames the line instead of hiding it.
PLANNED = Style(SERIES_COLOURS[1], (6, 3), "square", width=4.5)


def draw_learning_rate(tables: Tables, context: Context) -> Drawing:
    """Applied and planned learning rate on a linear axis."""
    table = tables["learning_rate_by_step"]
    applied = series_of(table, "learning_rate", "applied")
    planned = series_of(table, "planned_learning_rate", "planned")
    series = [one for one in (applied, planned) if len(one.steps)]
    axis = Axis("learning rate", floor=0.0)
    styles = [APPLIED if one is applied else PLANNED for one in series]
    chart = line_chart(context.name, context.steps, series, axis, marks=resume_marks(tables), styles=styles)
    words = [_peak(one) for one in series]
    if len(series) == 2:
        words.append(_difference(applied, planned))
    return Drawing(chart.plot, " ".join(words), chart.legend, chart.notes)


def _peak(series: Series) -> str:
    finite = np.isfinite(series.values)
    if not finite.any():
        return f"{series.name.capitalize()}: no finite value."
    best = int(np.argmax(np.where(finite, series.values, -np.inf)))
    peak = f"peak {number(float(series.values[best]))} at step {series.steps[best]}"
    return f"{series.name.capitalize()}: {peak}, {number(series.last())} at step {series.steps[-1]}."


def _difference(applied: Series, planned: Series) -> str:
    """Where the two differ most, or that they do not: 1e-6 of the planned peak is rounding."""
    _, at, plan_at = np.intersect1d(applied.steps, planned.steps, return_indices=True)
    gap = np.abs(applied.values[at] - planned.values[plan_at])
    finite = np.isfinite(gap)
    peak = np.max(np.abs(planned.finite()), initial=0.0)
    if not finite.any() or np.max(gap[finite]) <= 1e-6 * peak:
        return "Applied and planned agree at every step with both."
    worst = int(np.argmax(np.where(finite, gap, -1.0)))
    return f"They differ most at step {applied.steps[at[worst]]}, by {number(float(gap[worst]))}."


def draw_gradient_norm(tables: Tables, context: Context) -> Drawing:
    """Global gradient norm before and after clipping on a log axis, with its spikes."""
    table = tables["gradient_norm_by_step"]
    before = series_of(table, "gradient_norm", "before clipping")
    after = series_of(table, "clipped_gradient_norm", "after clipping")
    series = [one for one in (before, after) if len(one.steps)]
    axis = Axis("gradient norm", log=True)
    marks = gradient_marks(tables)
    styles = [BEFORE if one is before else AFTER for one in series]
    chart = line_chart(context.name, context.steps, series, axis, marks=marks, styles=styles)
    words = [_peak(one) for one in series]
    if len(series) == 2:
        words.append(_clipped_share(before, after))
    return Drawing(chart.plot, " ".join(words), chart.legend, chart.notes)


def gradient_marks(tables: Tables) -> list[Mark]:
    """Spikes of the gradient norm and resumes."""
    spikes = tables["gradient_norm_spikes"].to_pylist() if "gradient_norm_spikes" in tables else []
    marks = [
        Mark(row["step"], f"spike to {number(row['gradient_norm'])}, z = {number(row['z'])}", "spike")
        for row in spikes
    ]
    return marks + resume_marks(tables)


def _clipped_share(before: Series, after: Series) -> str:
    _, at, after_at = np.intersect1d(before.steps, after.steps, return_indices=True)
    # Clipping rescales by less than one; a share of 1e-6 is the rounding of a float32 norm.
    clipped = after.values[after_at] < before.values[at] * (1 - 1e-6)
    share = float(np.mean(clipped)) if len(at) else 0.0
    return f"Clipped on {share:.1%} of steps."
