"""A run's log and its assessments to one standalone HTML page that makes no request to anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

import numpy as np
import pyarrow as pa

from analyzer import page, verdicts
from analyzer.charts.bokeh_models import BokehModel
from analyzer.charts.frame import Context, step_range
from analyzer.diagnoses import Assessment
from analyzer.diagnosis_report import spike_rows
from analyzer.embedding import bokeh_script, plots_json
from analyzer.panels import PANELS, Chart, DrawnChart, Panel
from analyzer.run_log import RunLog

VIEWS = ("reference_losses",)
"""Names that are views, not macros, and so take no parentheses."""


def render(run_log: RunLog, assessments: Sequence[Assessment], blind: bool = False) -> str:
    """The page of the first opened run. The same log and the same versions give the same bytes.

    blind: leave out verdicts, marks that judge, the run's name and its configuration.
    """
    name, manifest = next(iter(run_log.manifests.items()))
    tables = run_queries(run_log, blind)
    run = run_log.query("FROM runs").to_pylist()[0]
    steps = step_range(*step_extent(tables))
    drawn = {panel: draw_panel(panel, tables, steps, run, blind) for panel in PANELS}
    plots = {d.chart.name: d.drawing.plot for charts in drawn.values() for d in charts if d.drawing}
    warnings = [] if blind else run_log.warnings
    return Template(template("page.html")).substitute(
        title=page.text("Blind reading" if blind else f"{name} · training run"),
        style=template("page.css") + page.ink_styles(),
        header=page.header(name, run, manifest, warnings, blind),
        verdicts=verdicts.blind_verdict() if blind else _verdicts(run_log, name, assessments),
        navigation=page.navigation(PANELS),
        panels="\n".join(page.panel(panel, charts) for panel, charts in drawn.items()),
        configuration="" if blind else page.configuration(manifest),
        plots=plots_json(plots),
        bokeh=bokeh_script(),
        script=template("page.js"),
    )


def _verdicts(run_log: RunLog, name: str, assessments: Sequence[Assessment]) -> str:
    spikes = spike_rows(run_log, name, assessments)
    return verdicts.verdict_section(run_log.paths[name], assessments, spikes)


def template(name: str) -> str:
    """A file that lies beside this module."""
    return (files("analyzer") / name).read_text(encoding="utf-8")


def run_queries(run_log: RunLog, blind: bool) -> dict[str, pa.Table]:
    """Every query of every panel by name, each run once."""
    names = dict.fromkeys(name for panel in PANELS for chart in panel.charts for name in chart.queries(blind))
    return {name: run_log.query(f"FROM {name}" if name in VIEWS else f"FROM {name}()") for name in names}


def step_extent(tables: Mapping[str, pa.Table]) -> tuple[int, int]:
    """First and last step of anything drawn over steps; (0, 0) when nothing was recorded."""
    charts = [chart for panel in PANELS for chart in panel.charts if chart.over_steps]
    columns = [tables[source.query]["step"] for chart in charts for source in chart.sources]
    measured = [np.asarray(column.drop_null(), np.int64) for column in columns if len(column.drop_null())]
    if not measured:
        return 0, 0
    return min(int(c.min()) for c in measured), max(int(c.max()) for c in measured)


def draw_panel(
    panel: Panel, tables: Mapping[str, pa.Table], steps: BokehModel, run: Mapping[str, Any], blind: bool
) -> tuple[DrawnChart, ...]:
    """Each chart of the panel, drawn from the tables that it declares and no others."""
    return tuple(
        _draw(chart, {name: tables[name] for name in chart.queries(blind)}, steps, run)
        for chart in panel.charts
    )


def _draw(
    chart: Chart, tables: Mapping[str, pa.Table], steps: BokehModel, run: Mapping[str, Any]
) -> DrawnChart:
    missing = chart.missing(tables)
    names = tuple(source.recorded_as for source in missing)
    if len(missing) == len(chart.sources):
        return DrawnChart(chart, None, names)
    return DrawnChart(chart, chart.draw(tables, Context(chart.name, steps, run)), names)
