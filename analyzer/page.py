"""HTML fragments of the page: header, navigation, panels with their legends, configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from analyzer.charts.frame import LegendItem
from analyzer.charts.palette import DARK_COLOURS, Style
from analyzer.embedding import ELEMENT_PREFIX
from analyzer.panels import DrawnChart, Panel
from recorder.manifest import Manifest

SHORT_SHA = 10
MOST_LEGEND_ITEMS = 12
SWATCH_MARKERS = {
    "circle": '<circle cx="14" cy="5" r="3.2"/>',
    "square": '<rect x="11" y="2" width="6" height="6"/>',
    "triangle": '<path d="M14 1.4 17.6 8h-7.2z"/>',
    "inverted_triangle": '<path d="M14 8.6 17.6 2h-7.2z"/>',
    "diamond": '<path d="M14 1 17.4 5 14 9 10.6 5z"/>',
    "plus": '<path d="M13 1h2v3h3v2h-3v3h-2V6h-3V4h3z"/>',
    "square_pin": '<rect x="11.5" y="2.5" width="5" height="5"/>',
}


def text(value: object) -> str:
    """A value as HTML text, safe in an attribute too."""
    return escape(str(value), quote=True)


def header(
    name: str, run: Mapping[str, Any], manifest: Manifest, warnings: Sequence[str], blind: bool
) -> str:
    """Name and facts of the run, then what the log reader had to say."""
    facts = {"Status": run["status"], "Steps": _steps(run)}
    if not blind:
        facts |= {
            "Seed": run["seed"],
            "Git": _git(manifest),
            "Created": run["created"],
            "Run id": run["run_id"],
        }
        facts |= {"Loss reduction": run["loss_reduction"]}
    rows = "".join(
        f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>"
        for key, value in facts.items()
        if value not in (None, "")
    )
    notices = "".join(f"<li>{text(warning)}</li>" for warning in warnings)
    listed = f'<ul class="notices" aria-label="Warnings of the log reader">{notices}</ul>' if notices else ""
    title = "Blind reading" if blind else name
    return f'<h1>{text(title)}</h1>\n<dl class="facts">{rows}</dl>\n{listed}'


def _steps(run: Mapping[str, Any]) -> str:
    if not run["steps"]:
        return "0 recorded"
    return f"{run['steps']:,} recorded, last {run['last_step']}"


def _git(manifest: Manifest) -> str | None:
    sha = manifest.git.get("sha")
    if not sha:
        return None
    return f"{str(sha)[:SHORT_SHA]}{' with uncommitted changes' if manifest.git.get('dirty') else ''}"


def navigation(panels: Iterable[Panel]) -> str:
    """Links to the panels."""
    return " ".join(f'<a href="#{p.anchor}">{p.number}&nbsp;{text(p.title)}</a>' for p in panels)


def panel(panel: Panel, charts: Sequence[DrawnChart]) -> str:
    """A section with heading, question and charts; several charts have a title each."""
    wide = " wide" if panel.is_wide else ""
    several = " several" if len(charts) > 1 else ""
    body = "\n".join(chart(drawn, titled=len(charts) > 1) for drawn in charts)
    heading = f'{panel.number}. {text(panel.title)} <span class="question">{text(panel.question)}</span>'
    anchor = panel.anchor
    return (
        f'<section class="panel{wide}" id="{anchor}" aria-labelledby="{anchor}-title" tabindex="-1">'
        f'<h2 id="{anchor}-title">{heading}</h2><div class="charts{several}">\n{body}\n</div></section>'
    )


def chart(drawn: DrawnChart, titled: bool) -> str:
    """Summary, legend and the element that the plot goes into; or what was not recorded, in its place."""
    name, title = drawn.chart.name, drawn.chart.title
    opening = f'<div class="chart" id="{drawn.chart.anchor}" tabindex="-1">'
    heading = f"<h3>{text(title)}</h3>" if titled else ""
    missing = [f"not recorded: {column}" for column in drawn.missing]
    if drawn.drawing is None:
        lines = "<br>".join(text(line) for line in missing)
        return f'{opening}{heading}<p class="unrecorded">{lines}</p></div>'
    drawing = drawn.drawing
    queries = ", ".join(f"<code>{text(query)}</code>" for query in drawn.chart.queries(blind=True))
    notes = " · ".join([*(text(note) for note in (*missing, *drawing.notes)), f"From {queries}."])
    return (
        f"{opening}{heading}"
        f'<p class="summary" id="summary-{name}">{text(drawing.summary)}</p>'
        f"{legend(name, drawing.legend)}"
        f'<div class="plot" id="{ELEMENT_PREFIX}{name}" role="img" aria-label="{text(title)}"'
        f' aria-describedby="summary-{name}"></div>'
        f'<p class="notes">{notes}</p></div>'
    )


def legend(chart_name: str, items: Sequence[LegendItem]) -> str:
    """A list of what is drawn; an item with a renderer is a button that hides it."""
    if not items:
        return ""
    listed = [f"<li>{_legend_item(chart_name, item)}</li>" for item in items[:MOST_LEGEND_ITEMS]]
    more = len(items) - len(listed)
    if more:
        listed.append(f"<li>and {more} more: point at a line for its name</li>")
    return f'<ul class="legend">{"".join(listed)}</ul>'


def _legend_item(chart_name: str, item: LegendItem) -> str:
    label = f"{swatch(item.style, item.line, item.marker)}<span>{text(item.label)}</span>"
    if item.renderer is None:
        return label
    return (
        f'<button type="button" aria-pressed="true" data-chart="{chart_name}"'
        f' data-renderer="{text(item.renderer)}" disabled>{label}</button>'
    )


def swatch(style: Style, line: bool, marker: bool) -> str:
    """A piece of the line with its dash and marker, as inline SVG; CSS gives the colour of the scheme."""
    dash = f' stroke-dasharray="{" ".join(map(str, style.dash))}"' if style.dash else ""
    drawn = f'<path d="M0 5h28" fill="none" stroke="currentColor" stroke-width="2"{dash}/>' if line else ""
    point = f'<g fill="currentColor">{SWATCH_MARKERS[style.marker]}</g>' if marker else ""
    ink = ink_class(style.colour)
    return f'<svg width="28" height="10" aria-hidden="true" class="{ink}">{drawn}{point}</svg>'


def ink_class(colour: str) -> str:
    """The CSS class of a palette colour."""
    return f"ink-{colour[1:]}"


def ink_styles() -> str:
    """CSS that gives each palette colour its light or its dark form."""
    light = "".join(f".{ink_class(c)}{{color:{c}}}" for c in DARK_COLOURS)
    dark = "".join(f".{ink_class(c)}{{color:{d}}}" for c, d in DARK_COLOURS.items())
    return f"{light}\n@media (prefers-color-scheme: dark){{{dark}}}"


def configuration(manifest: Manifest) -> str:
    """The declared configuration, schedule and environment, folded."""
    parts = {
        "config": manifest.config,
        "planned_schedule": manifest.planned_schedule,
        "environment": manifest.environment,
    }
    document = json.dumps(
        {key: dict(value) for key, value in parts.items() if value}, indent=2, ensure_ascii=False
    )
    summary = "<summary>Declared configuration and environment</summary>"
    return f"<details>{summary}<pre>{text(document)}</pre></details>"
