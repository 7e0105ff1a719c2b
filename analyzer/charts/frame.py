"""What all step charts share: the linked step range, axes, tools, and the strip along the top edge.

The strip carries what an axis cannot: non-finite rows, zeros on log axes, and marks of events. Where zero
is an expected value, zeros have a bar along the bottom edge instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzer.charts.bokeh_models import BokehModel, models
from analyzer.charts.palette import ALARM, REFERENCE, SERIES_COLOURS, Style
from analyzer.charts.series import ZERO_ON_LOG_AXIS, Floats, Series, undrawable_runs
from analyzer.charts.ticks import log_axis

PLOT_HEIGHT = 250
STRIP_RANGE = "strip"
ZERO_LABEL = "exactly 0"
ZERO_HEIGHT = 0.02
STRIP_HEIGHT_SHARE = 0.12
"""Share of the plot's height above the largest value, so that marks never cover data."""


@dataclass(frozen=True)
class LegendItem:
    """One row of the HTML legend; ``renderer`` names what its button hides, None for plain text."""

    label: str
    style: Style
    renderer: str | None = None
    marker: bool = False
    line: bool = True


@dataclass(frozen=True)
class Drawing:
    """A plot with what HTML says about it: the key numbers, the legend and how much was left out."""

    plot: BokehModel
    summary: str
    legend: tuple[LegendItem, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """What a chart knows beyond its tables: its name, the shared step range, the row of ``runs``."""

    name: str
    steps: BokehModel
    run: Mapping[str, Any]


Tables = Mapping[str, Any]
"""Query name to pyarrow Table."""


@dataclass(frozen=True)
class Mark:
    """A flagged step, or a range of them."""

    step: int
    text: str
    kind: str  # "spike", "onset", "resume"


MARK_STYLES: Mapping[str, tuple[str, Style]] = {
    "spike": ("spike", Style(ALARM, (), "inverted_triangle")),
    "onset": ("overfit onset", Style(SERIES_COLOURS[3], (), "diamond")),
    "resume": ("resume", Style(REFERENCE, (), "square_pin")),
}


def step_range(first_step: int, last_step: int) -> BokehModel:
    """The range that all step charts share, a little wider than the steps, so that the ends can be seen."""
    pad = max(0.5, 0.015 * (last_step - first_step))
    start, end = first_step - pad, last_step + pad
    return models.Range1d(
        start, end, bounds=(start, end), min_interval=1, name="steps", tags=[first_step, last_step]
    )


def value_range(
    values: Floats, log: bool, floor: float | None = None, zeros_on_edge: bool = False
) -> BokehModel:
    """A range around the finite values (the positive ones on a log axis) with room for the strip on top.

    zeros_on_edge: the same room at the bottom of a log axis.
    """
    shown = values[np.isfinite(values) & (values > 0)] if log else values[np.isfinite(values)]
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.1, 1.0)
    if log:
        span = max(math.log10(high) - math.log10(low), 0.3)
        room = 1.5 * STRIP_HEIGHT_SHARE * span
        exponents = (math.log10(low) - (room if zeros_on_edge else 0.05 * span), math.log10(high) + room)
        top = min(exponents[1], 308.0)
        # 290 decades are more than any run spans, and end / start stays a finite double for the browser.
        return models.Range1d(10 ** max(exponents[0], top - 290.0, -307.0), 10**top)
    low = low if floor is None else min(low, floor)
    span = (high - low) or abs(high) or 1.0
    return models.Range1d(low - 0.03 * span, high + 1.5 * STRIP_HEIGHT_SHARE * span)


def step_plot(
    name: str, steps: BokehModel, y_range: BokehModel, y_label: str, log: bool = False
) -> BokehModel:
    """An empty plot over the shared step range, with axes, grid and tools."""
    plot = models.Plot(
        name=name,
        x_range=steps,
        y_range=y_range,
        y_scale=models.LogScale() if log else models.LinearScale(),
        extra_y_ranges={STRIP_RANGE: models.Range1d(0, 1, bounds=(0, 1), min_interval=1)},
        extra_y_scales={STRIP_RANGE: models.LinearScale()},
        height=PLOT_HEIGHT,
        min_width=200,
        sizing_mode="stretch_width",
        title=None,
        toolbar=toolbar(),
        toolbar_location="above",
    )
    whole_steps = models.BasicTicker(min_interval=1)
    x_axis = models.LinearAxis(
        axis_label="step", ticker=whole_steps, formatter=models.BasicTickFormatter(use_scientific=False)
    )
    if log:
        y_axis = log_axis(y_label, y_range.start, y_range.end)
    else:
        y_axis = models.LinearAxis(axis_label=y_label, formatter=models.PrintfTickFormatter(format="%.4g"))
    plot.add_layout(x_axis, "below")
    plot.add_layout(y_axis, "left")
    plot.add_layout(models.Grid(dimension=0, axis=x_axis))
    plot.add_layout(models.Grid(dimension=1, axis=y_axis))
    return plot


def toolbar() -> BokehModel:
    """Box zoom by dragging, wheel zoom with Ctrl held (a bare wheel scrolls the page), pan, reset."""
    zoom = models.BoxZoomTool()
    # Width only: the wheel would zoom the strip's range too, which its bounds keep from every other tool.
    wheel = models.WheelZoomTool(modifiers="ctrl", dimensions="width", zoom_on_axis=False)
    tools = [zoom, wheel, models.PanTool(), models.ResetTool()]
    return models.Toolbar(tools=tools, active_drag=zoom, active_scroll=wheel, logo=None)


def hover(plot: BokehModel, renderers: Sequence[BokehModel], rows: Sequence[tuple[str, str]]) -> None:
    """Add a hover box; printf formats apply to every ``@column{%...}`` and ``$variable{%...}``.

    It is HTML of our own because Bokeh's rows are too pale to read; what Bokeh fills in, it escapes.
    """
    printf = {text.split("{")[0]: "printf" for _, text in rows if "{%" in text}
    cells = "".join(f"<tr><td style='color:#565e67'>{label}</td><td>{text}</td></tr>" for label, text in rows)
    table = f"<table style='border-spacing:5px 0;color:#1b1f24'>{cells}</table>"
    tool = models.HoverTool(
        renderers=list(renderers), tooltips=table, formatters=printf, limit=4, visible=False
    )
    plot.add_tools(tool)


def draw_strip(plot: BokehModel, series: Iterable[Series], log: bool, zeros_on_edge: bool = False) -> int:
    """Draw the rows that the axis cannot show as red crosses along the top edge; returns how many rows.

    zeros_on_edge: leave zeros to ``draw_zeros``.
    """
    marks = _edge_marks(series, log, lambda kind: not (zeros_on_edge and kind == ZERO_ON_LOG_AXIS))
    if not marks:
        return 0
    where = {"x0": "first", "x1": "last", "y0": 0.965, "y1": 0.965}
    glyphs = (
        models.Segment(**where, line_color=ALARM, line_width=3),
        models.Scatter(x="first", y=0.965, marker="x", size=9, line_color=ALARM, line_width=2),
        models.Segment(**where, line_alpha=0, line_width=14),  # what the pointer meets
    )
    _draw_on_edge(plot, marks, glyphs, "strip")
    return sum(key[3] * len(names) for key, names in marks.items())


def draw_zeros(plot: BokehModel, series: Iterable[Series]) -> tuple[LegendItem, ...]:
    """Draw exact zeros as a bar along the bottom edge of a log axis; returns its legend."""
    marks = _edge_marks(series, True, lambda kind: kind == ZERO_ON_LOG_AXIS)
    if not marks:
        return ()
    style = Style(REFERENCE, (), "square", width=5)
    where = {"x0": "first", "x1": "last", "y0": ZERO_HEIGHT, "y1": ZERO_HEIGHT}
    glyphs = (
        models.Segment(**where, line_color=style.colour, line_width=style.width),
        models.Scatter(
            x="first", y=ZERO_HEIGHT, marker=style.marker, size=5, fill_color=style.colour, line_color=None
        ),
        models.Segment(**where, line_alpha=0, line_width=14),
    )
    _draw_on_edge(plot, marks, glyphs, ZERO_LABEL)
    _label_zero(plot.left[0], plot.y_range.start, plot.y_range.end)
    return (LegendItem(ZERO_LABEL, style, renderer=ZERO_LABEL),)


def _label_zero(axis: BokehModel, low: float, high: float) -> None:
    """A tick at the bar of zeros, in place of those of the axis that lie beside it."""
    place = low * (high / low) ** ZERO_HEIGHT
    least = low * (high / low) ** STRIP_HEIGHT_SHARE
    axis.ticker.ticks = [place, *(tick for tick in axis.ticker.ticks if tick > least)]
    axis.major_label_overrides = {**axis.major_label_overrides, place: "0"}


EdgeMarks = dict[tuple[int, int, str, int], list[str]]
"""(first step, last step, kind, rows) of a run that an edge shows -> names of the series that have it."""


def _edge_marks(series: Iterable[Series], log: bool, is_wanted: Callable[[str], bool]) -> EdgeMarks:
    marks: EdgeMarks = {}
    for one in series:
        for run in undrawable_runs(one, log):
            if is_wanted(run.kind):
                key = (run.first_step, run.last_step, run.kind, run.row_count)
                marks.setdefault(key, []).append(one.name)
    return marks


def _draw_on_edge(plot: BokehModel, marks: EdgeMarks, glyphs: Sequence[BokehModel], name: str) -> None:
    """Draw glyphs over the marks in the fixed range of the edges; the last is what the pointer meets."""
    source = models.ColumnDataSource(
        {
            "first": [key[0] for key in marks],
            "last": [key[1] for key in marks],
            "steps": [_step_words(key[0], key[1], key[3]) for key in marks],
            "kind": [key[2] for key in marks],
            "names": [_some_names(names) for names in marks.values()],
        }
    )
    drawn = [plot.add_glyph(source, glyph, y_range_name=STRIP_RANGE, name=name) for glyph in glyphs]
    hover(plot, drawn[-1:], [("", "@kind"), ("series", "@names"), ("step", "@steps")])


def _step_words(first: int, last: int, rows: int) -> str:
    return f"{first}" if first == last else f"{first} to {last} ({rows} rows)"


def _some_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def draw_marks(plot: BokehModel, marks: Sequence[Mark]) -> tuple[LegendItem, ...]:
    """Draw flagged steps as dashed verticals with a marker on the strip; returns their legend."""
    items = []
    for kind, (label, style) in MARK_STYLES.items():
        chosen = [mark for mark in marks if mark.kind == kind]
        if not chosen:
            continue
        source = models.ColumnDataSource({"step": [m.step for m in chosen], "text": [m.text for m in chosen]})
        line = models.VSpan(x="step", line_color=style.colour, line_dash=[3, 3], line_alpha=0.6)
        point = models.Scatter(
            x="step", y=0.9, marker=style.marker, size=9, fill_color=style.colour, line_color=style.colour
        )
        plot.add_glyph(source, line, name=label)
        target = plot.add_glyph(source, point, y_range_name=STRIP_RANGE, name=label)
        hover(plot, [target], [("", "@text"), ("step", "@step")])
        items.append(LegendItem(label, style, renderer=label, marker=True, line=False))
    return tuple(items)


def number(value: float) -> str:
    """A value in words of four significant digits; thousands separated, non-finite spelt out."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+inf" if value > 0 else "-inf")
    if abs(value) >= 1e6 or (value and abs(value) < 1e-3):
        return f"{value:.3g}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
