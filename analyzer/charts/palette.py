"""Colours, dashes and markers. A series differs from its neighbours in colour and in dash or marker.

The hues are those of Okabe and Ito, "Color Universal Design" (2008), darkened for a white page and
lightened for a dark one until each has at least 3:1 against its background (WCAG 2.2, 1.4.11).
"""

from __future__ import annotations

from dataclasses import dataclass

TEXT = "#40474f"
AXIS = "#8a929b"
GRID = "#e4e7ea"
REFERENCE = "#6a7178"
ALARM = "#b3261e"

SERIES_COLOURS = ("#0072b2", "#d55e00", "#00855f", "#a8568a", "#9a6700", "#2b87b8")

DARK_COLOURS = {
    TEXT: "#c5ccd3",
    AXIS: "#6d7680",
    GRID: "#2b3138",
    REFERENCE: "#9aa3ac",
    ALARM: "#ff7b72",
    "#0072b2": "#56b4e9",
    "#d55e00": "#ff8f4d",
    "#00855f": "#2fc79a",
    "#a8568a": "#e29cc6",
    "#9a6700": "#e6a817",
    "#2b87b8": "#9fd0f5",
}
"""Light colour to dark colour; the page's script replaces every one of them, and only these."""

DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "plus")


@dataclass(frozen=True)
class Style:
    """How one series is told from the others."""

    colour: str
    dash: tuple[int, ...] = ()
    marker: str = "circle"
    width: float = 1.6


def series_style(index: int) -> Style:
    """The style of the index-th series: 24 colour and dash pairs come before the first repeat."""
    turn = index // 12  # 6 colours and 4 dashes share a factor 2: without the turn only 12 pairs differ
    return Style(
        SERIES_COLOURS[index % len(SERIES_COLOURS)],
        DASHES[(index + turn) % len(DASHES)],
        MARKERS[index % len(MARKERS)],
    )


REFERENCE_STYLES = (
    Style(REFERENCE, (8, 4)),
    Style(REFERENCE, (2, 3)),
    Style(REFERENCE, (8, 3, 2, 3)),
    Style(REFERENCE, (1, 5)),
)

THEME = {
    "attrs": {
        "Plot": {
            "background_fill_color": None,
            "border_fill_color": None,
            "outline_line_color": None,
        },
        "Axis": {
            "axis_line_color": AXIS,
            "major_tick_line_color": AXIS,
            "minor_tick_line_color": None,
            "major_label_text_color": TEXT,
            "major_label_text_font": "system-ui, sans-serif",
            "major_label_text_font_size": "11px",
            "axis_label_text_color": TEXT,
            "axis_label_text_font": "system-ui, sans-serif",
            "axis_label_text_font_size": "11px",
            "axis_label_text_font_style": "normal",
            "axis_label_standoff": 4,
            "major_tick_in": 0,
            "major_tick_out": 4,
        },
        "Grid": {"grid_line_color": GRID},
        "ColorBar": {
            "background_fill_color": None,
            "major_label_text_color": TEXT,
            "major_label_text_font": "system-ui, sans-serif",
            "major_label_text_font_size": "10px",
            "major_tick_line_color": None,
            "bar_line_color": None,
        },
    }
}
