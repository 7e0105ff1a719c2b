"""Line charts over the shared step range: a few named lines, or many with one hover for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from analyzer.charts.bokeh_models import BokehModel, models
from analyzer.charts.frame import (
    LegendItem,
    Mark,
    draw_marks,
    draw_strip,
    draw_zeros,
    hover,
    step_plot,
    value_range,
)
from analyzer.charts.palette import REFERENCE_STYLES, Style, series_style
from analyzer.charts.series import Floats, Series, drawable, points_allowed, thin

MOST_SINGLE_LINES = 8
"""With more, one MultiLine draws them all: a hundred renderers would slow the page."""
MOST_MARKED_POINTS = 80
HOVER_REACH_PIXELS = 14


@dataclass(frozen=True)
class Reference:
    """A horizontal line that the curves are read against."""

    label: str
    value: float


@dataclass(frozen=True)
class Axis:
    """How the values of a chart are shown."""

    label: str
    log: bool = False
    floor: float | None = None  # a linear axis reaches at least down to it
    zeros_on_edge: bool = False  # on a log axis zero is a value like others: a bar at the bottom, no cross


@dataclass(frozen=True)
class LineChart:
    """A plot, its legend, and what was left out of it."""

    plot: BokehModel
    legend: tuple[LegendItem, ...]
    notes: tuple[str, ...]


def line_chart(
    name: str,
    steps: BokehModel,
    series: Sequence[Series],
    axis: Axis,
    references: Sequence[Reference] = (),
    marks: Sequence[Mark] = (),
    also_in_range: Sequence[float] = (),
    styles: Sequence[Style] | None = None,
) -> LineChart:
    """Lines over steps, the first on top, with references, marks and the strip of what cannot be shown."""
    chosen = styles or [series_style(i) for i in range(len(series))]
    # A series without a positive value is all on the edges: no line, no row of the legend.
    pairs = [
        (one, style)
        for one, style in zip(series, chosen, strict=True)
        if not axis.zeros_on_edge or np.any(one.values > 0)
    ]
    lines, chosen = [one for one, _ in pairs], [style for _, style in pairs]
    drawn = [thin(one, [m.step for m in marks], points_allowed(len(series))) for one in lines]
    extent = np.concatenate([*(one.values for one in drawn), [r.value for r in references], also_in_range])
    y_range = value_range(extent, axis.log, axis.floor, axis.zeros_on_edge)
    plot = step_plot(name, steps, y_range, axis.label, axis.log)
    legend = draw_lines(plot, drawn, chosen, axis)
    legend += draw_references(plot, references, axis) + draw_marks(plot, marks)
    if axis.zeros_on_edge:
        legend += draw_zeros(plot, series)
    lost = draw_strip(plot, series, axis.log, axis.zeros_on_edge)
    return LineChart(plot, legend, (*thinning_note(lines, drawn), *strip_note(lost)))


def thinning_note(every: Iterable[Series], drawn: Iterable[Series]) -> tuple[str, ...]:
    """``n of N points shown`` when the plot holds fewer than were measured."""
    total = sum(len(one.steps) for one in every)
    shown = sum(len(one.steps) for one in drawn)
    if shown == total:
        return ()
    return (
        f"{shown:,} of {total:,} points shown; each bin keeps its extremes, and every flagged step is kept.",
    )


def strip_note(lost: int) -> tuple[str, ...]:
    """What the crosses along the top edge are, when there are any."""
    if not lost:
        return ()
    return (
        f"{lost:,} values cannot be drawn on this axis (NaN, infinite, or not positive on a log axis): "
        "red crosses at the top edge.",
    )


def draw_lines(
    plot: BokehModel, series: Sequence[Series], styles: Sequence[Style], axis: Axis
) -> tuple[LegendItem, ...]:
    """Draw every series, the first last; returns the legend in the order of the series."""
    if len(series) > MOST_SINGLE_LINES:
        return _draw_many(plot, series, styles, axis)
    pairs = list(zip(series, styles, strict=True))
    return tuple([draw_line(plot, one, style, axis) for one, style in reversed(pairs)][::-1])


def draw_line(plot: BokehModel, series: Series, style: Style, axis: Axis) -> LegendItem:
    """Draw one series as a line, with markers where points are few or stand alone."""
    values = drawable(series.values, axis.log)
    source = models.ColumnDataSource({"step": series.steps.astype(np.int32), "value": values})
    line = models.Line(x="step", y="value", line_color=style.colour, line_dash=list(style.dash))
    line.line_width = style.width
    # Bokeh finds a line only within half its width: an invisible wide copy is what the pointer meets.
    reach = models.Line(x="step", y="value", line_alpha=0, line_width=HOVER_REACH_PIXELS)
    plot.add_glyph(source, line, name=series.name)
    target = plot.add_glyph(source, reach, name=series.name)
    rows = [("", "$name"), ("step", "@step"), (axis.label, "@value{%.6g}")]
    hover(plot, [target], rows)
    marked = _draw_points(plot, series, values, style)
    return LegendItem(series.name, style, renderer=series.name, marker=marked)


def _draw_points(plot: BokehModel, series: Series, values: Floats, style: Style) -> bool:
    """Markers on every point when they are few, else only where a line has no second point."""
    shown = ~np.isnan(values)
    few = int(shown.sum()) <= MOST_MARKED_POINTS
    if not few:
        padded = np.concatenate(([False], shown, [False]))
        shown &= ~padded[:-2] & ~padded[2:]
    if shown.any():
        source = models.ColumnDataSource(
            {"step": series.steps[shown].astype(np.int32), "value": values[shown]}
        )
        colour = style.colour
        point = models.Scatter(
            x="step", y="value", marker=style.marker, size=4, fill_color=colour, line_color=colour
        )
        plot.add_glyph(source, point, name=series.name)
    return few


def _draw_many(
    plot: BokehModel, series: Sequence[Series], styles: Sequence[Style], axis: Axis
) -> tuple[LegendItem, ...]:
    source = models.ColumnDataSource(
        {
            "steps": [one.steps.astype(np.int32) for one in series],
            "values": [drawable(one.values, axis.log) for one in series],
            "name": [one.name for one in series],
            "colour": [style.colour for style in styles],
            "dash": [list(style.dash) for style in styles],
        }
    )
    lines = models.MultiLine(xs="steps", ys="values", line_color="colour", line_dash="dash", line_width=1.4)
    reach = models.MultiLine(xs="steps", ys="values", line_alpha=0, line_width=HOVER_REACH_PIXELS // 2)
    plot.add_glyph(source, lines)
    target = plot.add_glyph(source, reach)
    hover(plot, [target], [("", "@name"), ("step", "$snap_x{%d}"), (axis.label, "$snap_y{%.6g}")])
    for one, style in zip(series, styles, strict=True):
        if len(one.steps) == 1:
            _draw_points(plot, one, drawable(one.values, axis.log), style)
    by_last = sorted(
        zip(series, styles, strict=True), key=lambda pair: np.nan_to_num(-pair[0].last(), nan=-np.inf)
    )
    return tuple(LegendItem(one.name, style) for one, style in by_last)


def draw_references(plot: BokehModel, references: Sequence[Reference], axis: Axis) -> tuple[LegendItem, ...]:
    """Draw horizontal reference lines; those that the axis cannot show stay in the legend's words."""
    items = []
    for reference, style in zip(references, REFERENCE_STYLES, strict=False):
        source = models.ColumnDataSource({"value": [reference.value]})
        line = models.HSpan(y="value", line_color=style.colour, line_dash=list(style.dash), line_width=1.3)
        target = plot.add_glyph(source, line, name=reference.label)
        hover(plot, [target], [("", "$name"), (axis.label, "@value{%.6g}")])
        items.append(LegendItem(f"{reference.label} {reference.value:.3g}", style, renderer=reference.label))
    return tuple(items)
