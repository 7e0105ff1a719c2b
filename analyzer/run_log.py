"""Run directories -> one read-only DuckDB connection: views of every table, and the query library."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import pyarrow as pa

from analyzer.errors import AnalyzerError
from analyzer.query_library import load_queries
from analyzer.run_facts import create_run_facts, malformed_field, missing_ranks
from analyzer.streams import read_streams
from analyzer.views import LoadedStream, create_segments, create_t_quantiles, create_table_views
from recorder.errors import RecorderError
from recorder.manifest import Manifest, read_manifest
from recorder.schema import LOG_DIRECTORY, MANIFEST_FILE

ENGINE_THREADS = 1
"""A float sum depends on its order, and a page must come out the same twice. Logs are small enough."""


@dataclass(frozen=True)
class RunLog:
    """Opened runs. Use as a context manager; ``query`` runs our own SQL, user SQL goes to the sandbox."""

    connection: duckdb.DuckDBPyConnection
    paths: Mapping[str, Path]  # run name -> run directory, in the order given
    manifests: Mapping[str, Manifest]
    warnings: list[str]  # one line each: cut tails, hidden columns, empty logs
    streams: tuple[LoadedStream, ...]

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()

    def query(self, sql: str) -> pa.Table:
        """The result of one SELECT as an Arrow table. Raises AnalyzerError with the engine's message."""
        try:
            return self.connection.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise AnalyzerError(f"{sql}: {error}") from None

    def until(self, step: int) -> RunLog:
        """The log without rows of later steps. It takes over the connection: use it in place of this one.

        Macros read the views that are there when they are called, so nothing else is made anew.
        """
        kept = {run: [s.stream.until(step) for s in self.streams if s.run == run] for run in self.paths}
        loaded = create_table_views(self.connection, kept)
        create_segments(self.connection, loaded)
        return dataclasses.replace(self, streams=loaded)

    def has_rows(self, table: str) -> bool:
        """Any segment of any opened run has a row of this table."""
        return any(s.stream.rows.num_rows for s in self.streams if s.stream.table.name == table)

    def recorded_columns(self, table: str, run: str | None = None) -> set[str]:
        """Columns of a table that hold any value; of "manifest", the fields that were declared.

        run: only this run's; None: of any opened run.
        """
        if table == "manifest":
            manifests = self.manifests.values() if run is None else [self.manifests[run]]
            return set().union(*(_declared_fields(manifest) for manifest in manifests))
        return {
            name
            for loaded in self.streams
            if loaded.stream.table.name == table and run in (None, loaded.run)
            for name in loaded.stream.rows.column_names
            if loaded.stream.rows.column(name).null_count < loaded.stream.rows.num_rows
        }

    def lost_row_count(self, run: str) -> int:
        """Rows that a closed log held and that are not there now."""
        return sum(loaded.stream.lost_row_count for loaded in self.streams if loaded.run == run)


def open_runs(paths: Sequence[Path], until_step: int | None = None) -> RunLog:
    """The logs of one or more run directories, opened for queries.

    until_step: show only the rows up to this step, as the log was while training; None shows all.
    Raises AnalyzerError for a missing or foreign directory and for a newer schema version.
    """
    run_paths = run_names(paths)
    manifests = {run: _manifest(path) for run, path in run_paths.items()}
    streams = {run: read_streams(path) for run, path in run_paths.items()}
    warnings = [w for run_streams in streams.values() for s in run_streams for w in s.warnings]
    for run, path in run_paths.items():
        if not any(s.rows.num_rows for s in streams[run]):
            warnings.append(f"{path / LOG_DIRECTORY}: empty log: not one whole row was written")
    connection = duckdb.connect(":memory:", config={"threads": ENGINE_THREADS})
    # A name in a query must never resolve to a Python variable of this process.
    connection.execute("SET python_enable_replacements = false; SET TimeZone = 'UTC'")
    loaded = create_table_views(connection, streams)
    create_segments(connection, loaded)
    create_t_quantiles(connection)
    create_run_facts(connection, run_paths, manifests)
    for run, path in run_paths.items():
        warnings += missing_ranks(connection, run, path)
    load_queries(connection)
    run_log = RunLog(connection, run_paths, manifests, warnings, loaded)
    return run_log if until_step is None else run_log.until(until_step)


def run_names(paths: Sequence[Path]) -> dict[str, Path]:
    """Run name -> directory: the directory's name, made unique by as many of its parents as it takes."""
    unique = {path.resolve(): path for path in paths}
    for depth in range(1, max((len(p.parts) for p in unique), default=1) + 1):
        names = ["/".join(resolved.parts[-depth:]) for resolved in unique]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, unique.values(), strict=True)) if unique else {}


def _manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise AnalyzerError(f"{path}: no such run directory: list the runs with: analyzer ls")
    try:
        manifest = read_manifest(path)
    except RecorderError as error:
        raise AnalyzerError(str(error)) from None
    if field := malformed_field(manifest):
        raise AnalyzerError(
            f"{path / MANIFEST_FILE}: {field} is malformed: write it as the recorder's Manifest declares it"
        )
    return manifest


def _declared_fields(manifest: Manifest) -> set[str]:
    losses = manifest.reference_losses
    values: dict[str, Any] = {**vars(manifest), **vars(manifest.label_roles), **vars(losses)}
    return {name for name, value in values.items() if value not in (None, "", {})}
