"""Render each run as one standalone HTML page; prints its path and the verdict.

The page is written to RUN/dashboard.html, or to -o FILE for a single run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from analyzer.errors import AnalyzerError
from analyzer.exit_codes import ERROR, FINE
from analyzer.output import emit, note, write_whole
from recorder.schema import DASHBOARD_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer render``."""
    parser.add_argument("run_directories", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write here; one run only")
    parser.add_argument("--blind", action="store_true", help="leave out verdicts, names and configuration")


def run(arguments: argparse.Namespace) -> int:
    """Write one page per run; a run that cannot be rendered does not stop the others."""
    runs: list[Path] = arguments.run_directories
    if arguments.output is not None and len(runs) > 1:
        arguments.usage_error(f"-o names one file, but {len(runs)} runs are given")
    code = FINE
    for path in runs:
        try:
            page = arguments.output or path / DASHBOARD_FILE
            emit(render_page(path, page, arguments.blind))
        except AnalyzerError as error:
            note(str(error))
            code = ERROR
    return code


def render_page(path: Path, page: Path, blind: bool) -> str:
    """Write the page of a run; returns the line that says where it is and what it says."""
    from analyzer.diagnoses import assess, verdict
    from analyzer.report import render
    from analyzer.run_log import open_runs

    with open_runs([path]) as run_log:
        for warning in run_log.warnings:
            note(f"warning: {warning}")
        assessments = assess(run_log)
        html = render(run_log, assessments, blind)
    write_whole(page, lambda file: file.write(html.encode()))
    return str(page) if blind else f"{page}: {verdict(assessments)}"
