"""Rules of the user's own: a directory of SQL macros, each checked like those of ``queries/diagnoses``.

A file's comment begins with the question that it asks. It may have header lines of its own:
``-- title: ...``, ``-- severity: S1`` to ``S4``, ``-- evidence: proof`` or ``signature``, and
``-- requires: steps.train_loss, gradient.l2_norm``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import duckdb

from analyzer.diagnoses.declaration import EVIDENCES, SEVERITIES, Diagnosis, Evidence, Severity
from analyzer.errors import AnalyzerError
from analyzer.query_library import Query, library, parse_query
from analyzer.run_log import RunLog

FINDING_COLUMNS = ("run", "first_step", "last_step", "subject", "observed", "threshold", "detail")
HEADER_LINE = re.compile(r"^-- (title|severity|evidence|requires): (.+)$", re.MULTILINE)
MEMORY_LIMIT = "2GiB"
LOSS_PANEL = 1


def load_rules(run_log: RunLog, directory: Path) -> tuple[Diagnosis, ...]:
    """The rules of a directory, by name, their macros created on the log's connection.

    From here on the connection reads no files and takes no settings, since the SQL is not ours.
    Raises AnalyzerError with one line for the first file that is not a rule.
    """
    if not directory.is_dir():
        raise AnalyzerError(f"{directory}: no such directory: name one that holds rules as .sql files")
    paths = sorted(directory.glob("*.sql"))
    if not paths:
        raise AnalyzerError(f"{directory}: no .sql file in it: write one macro per rule, named like its file")
    lock_down(run_log.connection)
    return tuple(_load_rule(run_log, path) for path in paths)


def lock_down(connection: duckdb.DuckDBPyConnection) -> None:
    """No files, no network, no extensions, bounded memory, and no way back."""
    connection.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
    connection.execute("SET temp_directory = ''")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _load_rule(run_log: RunLog, path: Path) -> Diagnosis:
    text = path.read_text(encoding="utf-8")
    header = {match[1]: match[2].strip() for match in HEADER_LINE.finditer(text)}
    query = parse_query(path.stem, "rules", HEADER_LINE.sub("", text).strip())
    _check_text(path, query, header)
    _create(run_log.connection, path, text)
    try:
        columns = tuple(run_log.query(f"FROM {path.stem}() LIMIT 0").column_names)
    except AnalyzerError as error:
        raise AnalyzerError(f"{path}: {_first_line(error)}") from None
    if columns != FINDING_COLUMNS:
        raise AnalyzerError(
            f"{path}: columns {', '.join(columns)}; expected {', '.join(FINDING_COLUMNS)}: select these"
        )
    return _declaration(query, header)


def _check_text(path: Path, query: Query, header: dict[str, str]) -> None:
    """Raises AnalyzerError for what the text alone shows to be wrong."""
    if query.name in {known.name for known in library()}:
        raise AnalyzerError(f"{path}: {query.name} is a query of the library: give the rule another name")
    if not query.summary:
        raise AnalyzerError(f"{path}: no comment above the macro: say in its first line what the rule asks")
    if not re.search(rf"CREATE (OR REPLACE )?MACRO {re.escape(query.name)}\s*\(", query.sql, re.IGNORECASE):
        raise AnalyzerError(f"{path}: no CREATE MACRO {query.name}(...): the macro is named like its file")
    for key, allowed in (("severity", SEVERITIES), ("evidence", EVIDENCES)):
        if header.get(key, allowed[0]) not in allowed:
            raise AnalyzerError(f"{path}: {key} {header[key]}; expected one of {', '.join(allowed)}")


def _create(connection: duckdb.DuckDBPyConnection, path: Path, text: str) -> None:
    try:
        statements = connection.extract_statements(text)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.CREATE:
            raise AnalyzerError(f"{path}: {len(statements)} statements; expected one CREATE MACRO")
        connection.execute(statements[0])
    except duckdb.Error as error:
        raise AnalyzerError(f"{path}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _declaration(query: Query, header: dict[str, str]) -> Diagnosis:
    title = header.get("title") or query.name.replace("_", " ").capitalize()
    return Diagnosis(
        name=query.name,
        title=title,
        question=query.summary,
        meaning=query.source or query.summary,
        remedy="A rule of your own: its remedy is yours to know.",
        source=query.source or "the rule's own file",
        evidence=cast(Evidence, header.get("evidence", "signature")),
        severity=cast(Severity, header.get("severity", "S2")),
        explains=(),
        requires=tuple(need.strip() for need in header.get("requires", "").split(",") if need.strip()),
        panel=LOSS_PANEL,
    )
