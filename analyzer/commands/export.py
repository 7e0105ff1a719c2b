"""Write a run to another tool's store, from its log: analyzer export mlflow RUN.

The run's manifest becomes parameters, its scalar series metrics, its dashboard an artifact. The log stays
the only truth: what the other tool can not hold is named, not bent.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from analyzer.exit_codes import FINE
from analyzer.output import emit, note
from recorder.schema import DASHBOARD_FILE

TARGETS = ("mlflow",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer export``."""
    parser.add_argument("target", choices=TARGETS, help="the tool to write to")
    parser.add_argument("run_directory", type=Path, metavar="RUN")
    parser.add_argument(
        "--tracking-uri", default="sqlite:///mlflow.db", help="MLflow store (default: %(default)s)"
    )
    parser.add_argument(
        "--experiment", default="flight-recorder", help="MLflow experiment (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export one run; its dashboard is rendered first."""
    from analyzer.commands.render import render_page
    from analyzer.exporters import mlflow
    from analyzer.run_log import open_runs

    path: Path = arguments.run_directory
    dashboard = path / DASHBOARD_FILE
    render_page(path, dashboard, blind=False)
    with open_runs([path]) as run_log:
        (name,) = run_log.paths
        identifier, written, left_out = mlflow.export(
            run_log, name, dashboard, arguments.tracking_uri, arguments.experiment
        )
    if left_out:
        note(f"warning: {left_out} infinite points left out; tag {mlflow.NOT_REPRESENTABLE} names them")
    emit(f"{arguments.tracking_uri}: run {identifier}, {written} points")
    return FINE
