"""List the runs of a directory: status, steps, last loss and verdict.

A run that cannot be read is a row that says why.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa

from analyzer.errors import AnalyzerError
from analyzer.exit_codes import FINE
from analyzer.output import emit, json_text, note, table_text, terminal_size
from recorder.schema import LOG_DIRECTORY, MANIFEST_FILE

SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("status", pa.string()),
        ("steps", pa.int64()),
        ("last_loss", pa.float64()),  # nats/token, training loss of the last step
        ("verdict", pa.string()),
        ("error", pa.string()),
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer ls``."""
    parser.add_argument("directory", nargs="?", type=Path, default=Path("runs"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print one row per run directory in a directory."""
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise AnalyzerError(f"{directory}: no such directory: name the one that holds the runs")
    rows = [run_row(path) for path in sorted(directory.iterdir()) if is_run_like(path)]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    if not rows:
        note(f"{directory}: no runs here")
    if arguments.json:
        emit(json_text(table))
        return FINE
    shown = table if any("error" in row for row in rows) else table.drop_columns(["error"])
    text, left_out = table_text(shown, terminal_size())
    emit(text)
    if left_out:
        note(left_out)
    return FINE


def is_run_like(path: Path) -> bool:
    """The directory holds a manifest or a log."""
    return path.is_dir() and ((path / MANIFEST_FILE).exists() or (path / LOG_DIRECTORY).is_dir())


def run_row(path: Path) -> dict[str, str | int | float | None]:
    """The row of one run; a broken one has its error in place of everything else."""
    from analyzer.diagnoses import assess, verdict
    from analyzer.run_log import open_runs

    try:
        with open_runs([path]) as run_log:
            facts = run_log.query("SELECT status, steps, last_train_loss FROM runs").to_pylist()[0]
            judged = verdict(assess(run_log))
    except AnalyzerError as error:
        return {"run": path.name, "status": "unreadable", "error": str(error)}
    return {
        "run": path.name,
        "status": facts["status"],
        "steps": facts["steps"],
        "last_loss": facts["last_train_loss"],
        "verdict": judged,
    }
