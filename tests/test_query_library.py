"""The SQL files keep their promises: names, comments, layers, and no parameter that hides a column."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from synthetic import write_run

import analyzer
from analyzer.query_library import LAYERS, Query, library, parse_query, query_directory
from analyzer.run_log import RunLog, open_runs
from recorder.schema import TABLES

QUERIES = library()
NAMES = [query.name for query in QUERIES]
ROOT = Path(analyzer.__file__).parents[1]


@pytest.fixture(scope="module")
def run_log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLog]:
    """An opened run without rows."""
    with open_runs([write_run(tmp_path_factory.mktemp("runs") / "a", {})]) as opened:
        yield opened


def without_comments(query: Query) -> str:
    """The SQL alone."""
    return re.sub(r"--.*", "", query.sql)


def calls(query: Query) -> set[str]:
    """The other queries that a query uses."""
    words = set(re.findall(r"\b(\w+)\s*\(", without_comments(query)))
    return (words & set(NAMES)) - {query.name}


def test_one_file_is_one_macro_of_the_same_name(run_log: RunLog) -> None:
    """DuckDB knows exactly the file stems."""
    sql = "SELECT function_name FROM duckdb_functions() WHERE function_type = 'table_macro' AND NOT internal"
    found = [name for (name,) in run_log.connection.execute(sql).fetchall()]
    assert sorted(found) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_parameters_are_documented_under_duckdbs_names(run_log: RunLog, query: Query) -> None:
    """Every parameter has a comment on its own line, and no comment is left over."""
    sql = "SELECT parameters FROM duckdb_functions() WHERE function_name = ? AND NOT internal"
    (parameters,) = run_log.connection.execute(sql, [query.name]).fetchall()[0]
    assert [p.name for p in query.parameters] == parameters
    assert all(p.description and p.default for p in query.parameters)


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_columns_are_documented_under_duckdbs_names(run_log: RunLog, query: Query) -> None:
    """Every output column has a comment on its own line; the first one is the run."""
    found = run_log.query(f"FROM {query.name}()").column_names
    assert [c.name for c in query.columns] == found
    assert found[0] == "run"
    assert all(c.description for c in query.columns)


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_a_query_says_what_it_answers_and_its_source(query: Query) -> None:
    """The first comment line is the answer, the next ones start with the source."""
    assert query.summary.endswith((".", "?"))
    assert query.source.startswith("Source: ")


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_no_parameter_bears_a_logged_columns_name(query: Query) -> None:
    """The parameter would silently win over the column."""
    logged = {column for table in TABLES for column in table.column_names()} | {"run", "rank", "segment"}
    assert {p.name for p in query.parameters} & logged == set()


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_a_query_uses_only_earlier_layers(query: Query) -> None:
    """series, events, breakdowns, diagnoses: each may use only the folders before it."""
    layer_of = {q.name: LAYERS.index(q.layer) for q in QUERIES}
    assert {name for name in calls(query) if layer_of[name] >= layer_of[query.name]} == set()


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_a_query_is_ordered_and_not_random(query: Query) -> None:
    """The same log gives the same rows in the same order."""
    sql = without_comments(query)
    assert re.search(r"\nORDER BY [^;()]+;\s*$", sql)
    assert not re.search(r"\brandom\s*\(|\bsample\b", sql.lower())


@pytest.mark.parametrize("query", QUERIES, ids=NAMES)
def test_a_query_is_short(query: Query) -> None:
    """A hundred lines are as much as one reads in one go."""
    assert len(query.sql.splitlines()) <= 100
    assert max(len(line) for line in query.sql.splitlines()) <= 120


def test_layers_load_in_order() -> None:
    """A macro is created after all that it may use."""
    assert [q.layer for q in QUERIES] == sorted((q.layer for q in QUERIES), key=LAYERS.index)
    folders = {path.name for path in query_directory().iterdir() if path.is_dir()}
    assert folders == set(LAYERS)


def test_an_editable_install_reads_the_repositorys_queries() -> None:
    """Files that the build would add to the wheel are not beside the package in a checkout."""
    assert query_directory() == ROOT / "queries"


def test_a_wheel_reads_the_queries_beside_the_package(tmp_path: Path) -> None:
    """Laid out as a wheel is, the package finds its own copy."""
    for package in ("analyzer", "recorder"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copytree(ROOT / "queries", tmp_path / "analyzer/queries")
    code = "from analyzer.query_library import query_directory; print(query_directory())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()).resolve() == (tmp_path / "analyzer/queries").resolve()


def test_a_query_file_is_parsed_into_its_documentation() -> None:
    """Comment, parameters with defaults, and the columns of the outermost SELECT."""
    text = """-- What it answers.
-- Source: a book,
-- chapter two.
CREATE OR REPLACE MACRO example(
    least_count := 3, -- rows
    label_name := NULL -- label column
) AS TABLE
WITH inner_rows AS (
    SELECT
        1 AS hidden -- not a column
)
SELECT
    run, -- run directory
    a.step, -- optimizer updates
    sum(x) / 2 AS half -- nats
FROM inner_rows
ORDER BY run;
"""
    query = parse_query("example", "series", text)
    assert (query.summary, query.source) == ("What it answers.", "Source: a book, chapter two.")
    assert query.signature() == "example(least_count := 3, label_name := NULL)"
    assert [(c.name, c.description) for c in query.columns] == [
        ("run", "run directory"),
        ("step", "optimizer updates"),
        ("half", "nats"),
    ]


def test_a_parameter_wins_over_a_column_of_its_name() -> None:
    """The trap that the naming rule keeps us out of is still there in this engine."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT 1 AS step")
    connection.execute("CREATE MACRO m(step := 5) AS TABLE SELECT step AS found FROM t")
    assert connection.execute("FROM m()").fetchall() == [(5,)]
