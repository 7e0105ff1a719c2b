"""The SQL files of `queries/`: one file, one table macro, one name, with its documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import duckdb

from analyzer.errors import AnalyzerError

LAYERS = ("series", "events", "breakdowns", "diagnoses")
"""Folders in load order; a macro may use only macros of the folders before its own."""

PARAMETER_LINE = re.compile(r"^\s+(\w+)(?: := (.+?))?,?\s+-- (.+)$")
COLUMN_LINE = re.compile(r"^\s+(?:.*\bAS )?(?:\w+\.)?(\w+),?\s+-- (.+)$")


@dataclass(frozen=True)
class Field:
    """A parameter or an output column: name, default (parameters only), meaning and unit."""

    name: str
    description: str
    default: str | None = None


@dataclass(frozen=True)
class Query:
    """One macro: its layer, what it answers, its signature and its SQL."""

    name: str
    layer: str
    summary: str  # first line of the comment
    source: str  # the rest of it
    parameters: tuple[Field, ...]
    columns: tuple[Field, ...]
    sql: str

    def signature(self) -> str:
        """The call with every parameter and its default."""
        inside = ", ".join(
            p.name if p.default is None else f"{p.name} := {p.default}" for p in self.parameters
        )
        return f"{self.name}({inside})"


def query_directory() -> Path:
    """Where the SQL files are: in the wheel, or beside the package when it is installed editable."""
    package = Path(__file__).parent
    for directory in (package / "queries", package.parent / "queries"):
        if directory.is_dir():
            return directory
    raise AnalyzerError(f"{package / 'queries'}: query library missing: install the package again")


@cache
def library() -> tuple[Query, ...]:
    """Every query, in load order: by layer, then by name."""
    directory = query_directory()
    return tuple(
        parse_query(path.stem, layer, path.read_text(encoding="utf-8"))
        for layer in LAYERS
        for path in sorted((directory / layer).glob("*.sql"))
    )


def parse_query(name: str, layer: str, text: str) -> Query:
    """The documentation that one SQL file carries."""
    comment, _, body = text.partition("CREATE OR REPLACE MACRO")
    lines = [line.removeprefix("--").strip() for line in comment.splitlines() if line.startswith("--")]
    head, _, definition = body.partition("AS TABLE")
    final_select = definition.rpartition("\nSELECT\n")[2].partition("\nFROM ")[0]
    return Query(
        name,
        layer,
        summary=lines[0] if lines else "",
        source=" ".join(lines[1:]),
        parameters=tuple(Field(*_fields(m, 1, 3), m[2]) for m in _matches(PARAMETER_LINE, head)),
        columns=tuple(Field(*_fields(m, 1, 2)) for m in _matches(COLUMN_LINE, final_select)),
        sql=text,
    )


def _matches(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return [match for line in text.splitlines() if (match := pattern.match(line))]


def _fields(match: re.Match[str], name: int, description: int) -> tuple[str, str]:
    return match[name], match[description]


def load_queries(connection: duckdb.DuckDBPyConnection) -> None:
    """Create every macro; the views must be there, since DuckDB binds a macro's body at once."""
    for query in library():
        try:
            connection.execute(query.sql)
        except duckdb.Error as error:
            raise AnalyzerError(f"queries/{query.layer}/{query.name}.sql: {error}") from None
