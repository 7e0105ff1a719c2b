"""Query one or more runs with SQL, or list what there is to query.

An argument with white space, or that starts with FROM, SELECT, WITH, DESCRIBE or SUMMARIZE, is the query.
Without one, tables with their columns and units are listed, and the queries of the library.

  analyzer sql runs/19-healthy "FROM loss_spikes(z_threshold := 5)"
  analyzer sql runs/* "SELECT run, max(step) FROM steps GROUP BY run" --csv
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from analyzer.exit_codes import FINE
from analyzer.output import (
    csv_text,
    emit,
    json_text,
    note,
    table_text,
    terminal_size,
    write_parquet,
    write_whole,
)
from recorder.schema import TABLES, Table

QUERY_START = re.compile(r"(from|select|with|describe|summarize)([\s(]|$)", re.IGNORECASE)
VIEWS = ("runs", "reference_losses", "segments", "example_labels")
TABLE_NOTE = """every table also has run, rank and segment;
<table>_all shows in addition the rows that a later segment replaced"""
EXPLAIN_COLUMNS = ["explain_key", "explain_value"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``analyzer sql``."""
    parser.add_argument("runs_and_query", nargs="+", metavar="RUN... [QUERY]", help="run directories, SQL")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--parquet", type=Path, metavar="FILE", help="write Parquet")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write what would be printed")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="stop the query after this long")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the result of the query, or the list of tables and queries."""
    runs, queries = split_arguments(arguments.runs_and_query)
    if not runs:
        arguments.usage_error("name at least one run directory before the query")
    if arguments.parquet is not None and arguments.output is not None:
        arguments.usage_error("--parquet and -o each name a file to write: give one of them")
    if len(queries) > 1:
        arguments.usage_error(f"{len(queries)} queries given, expected one: {queries[1]!r}")
    if not queries and arguments.parquet is not None:
        arguments.usage_error("--parquet writes the rows of a query: give one")
    if not queries:
        _write(arguments, listing(runs))
        return FINE
    from analyzer.sandbox import TIMEOUT_SECONDS, Limits, run_query

    result = run_query(runs, queries[0], Limits(arguments.timeout or TIMEOUT_SECONDS))
    for warning in result.warnings:
        note(f"warning: {warning}")
    if arguments.parquet is not None:
        write_parquet(arguments.parquet, result.table)
    else:
        _write(arguments, _text(arguments, result.table))
    return FINE


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(run directories, queries): what exists as a directory is a run, whatever its name."""
    queries = [a for a in arguments if is_query(a)]
    return [Path(a) for a in arguments if not is_query(a)], queries


def is_query(argument: str) -> bool:
    """The argument is SQL and no path."""
    looks_like_sql = bool(re.search(r"\s", argument) or QUERY_START.match(argument))
    # Not Path.is_dir: it raises on a query that is longer than a file name may be.
    return looks_like_sql and not os.path.isdir(argument)  # noqa: PTH112


def listing(runs: Sequence[Path]) -> str:
    """Tables with columns, units and what was not recorded, then queries with what they answer."""
    from analyzer.query_library import library
    from analyzer.run_log import open_runs

    blocks: list[str] = []
    with open_runs(runs) as run_log:
        for warning in run_log.warnings:
            note(f"warning: {warning}")
        blocks += [_table_listing(table, run_log.recorded_columns(table.name)) for table in TABLES]
        blocks.append(TABLE_NOTE)
        blocks += [f"{view}: {', '.join(run_log.query(f'FROM {view}').column_names)}" for view in VIEWS]
    blocks += [f"FROM {query.signature()}\n  {query.summary}" for query in library()]
    return "\n\n".join(blocks) + "\n"


def _table_listing(table: Table, recorded: set[str]) -> str:
    lines = [f"{table.name}: one row per {table.row}" + ("" if recorded else " (not recorded)")]
    for column in table.columns:
        absent = " (not recorded)" if recorded and column.name not in recorded else ""
        lines.append(f"  {column.name:<26} {column.unit:<18} {column.description}{absent}")
    labels = sorted(recorded.difference(table.column_names()))
    return "\n".join([*lines, *(f"  {name:<26} {'text':<18} label" for name in labels)])


def _text(arguments: argparse.Namespace, table: pa.Table) -> str:
    if arguments.csv:
        return csv_text(table)
    if arguments.json:
        return json_text(table)
    if table.column_names == EXPLAIN_COLUMNS:
        return "\n".join(table.column("explain_value").to_pylist()) + "\n"
    text, left_out = table_text(table, None if arguments.output else terminal_size())
    if left_out:
        note(left_out)
    return text


def _write(arguments: argparse.Namespace, text: str) -> None:
    if arguments.output is None:
        emit(text)
    else:
        write_whole(arguments.output, lambda file: file.write(text.encode()))


def seconds(text: str) -> float:
    """A positive number of seconds."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("expected a positive number of seconds")
    return value
