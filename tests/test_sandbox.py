"""A user's SQL reads the opened runs, and nothing else; it can neither write nor run away."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import write_run

from analyzer.errors import AnalyzerError
from analyzer.sandbox import LIMITS, Limits, run_query


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three steps and a cut stream."""
    steps = [{"step": step, "train_loss": 0.5 * step} for step in range(3)]
    return write_run(tmp_path_factory.mktemp("runs") / "a", {"steps": steps})


def refusal(run: Path, sql: str, limits: Limits = LIMITS) -> str:
    """The message of a query that must fail."""
    with pytest.raises(AnalyzerError) as caught:
        run_query([run], sql, limits)
    return str(caught.value)


def test_a_query_answers_with_typed_rows(run: Path) -> None:
    """Views and macros are there, and the types come through the pipe."""
    table = run_query([run], "SELECT run, step, train_loss FROM training_loss_by_step()").table
    assert table.to_pydict() == {"run": ["a"] * 3, "step": [0, 1, 2], "train_loss": [0.0, 0.5, 1.0]}


@pytest.mark.parametrize(
    "sql",
    [
        "DESCRIBE steps",
        "SUMMARIZE steps",
        "EXPLAIN FROM steps",
        "WITH a AS (FROM steps) FROM a",
        "PIVOT steps ON step USING sum(train_loss)",
    ],
)
def test_every_read_only_statement_is_allowed(run: Path, sql: str) -> None:
    """Looking at the data in another shape is reading too."""
    assert run_query([run], sql).table.num_rows > 0


def test_warnings_of_the_reader_come_along(tmp_path: Path) -> None:
    """A cut tail is said to whoever queries the log."""
    cut = write_run(tmp_path / "a", {"steps": [{"step": 0}]})
    path = cut / "log/steps-r0-s0.arrows"
    path.write_bytes(path.read_bytes() + b"torn")
    expected = (f"{path}: cut: 4 bytes after the last whole batch not readable",)
    assert run_query([cut], "FROM steps").warnings == expected


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("COPY steps TO 'out.csv'", "COPY"),
        ("CREATE TABLE t AS FROM steps", "CREATE"),
        ("ATTACH 'other.db'", "ATTACH"),
        ("SET memory_limit = '1TB'", "SET"),
        ("INSTALL httpfs", "LOAD"),
        ("DELETE FROM runs", "DELETE"),
    ],
)
def test_a_statement_that_is_not_read_only_is_refused(run: Path, sql: str, kind: str) -> None:
    """One line that names the statement and what may be used."""
    message = refusal(run, sql)
    assert message.startswith(f"{kind} refused: a run is only read: use SELECT")
    assert "\n" not in message


@pytest.mark.parametrize(
    "sql",
    [
        "FROM '{file}'",
        "FROM read_text('{file}')",
        "FROM glob('{file}')",
        "EXPLAIN ANALYZE COPY steps TO '{file}'",
        "FROM query('FROM read_csv(''{file}'')')",
    ],
)
def test_files_are_out_of_reach(run: Path, tmp_path: Path, sql: str) -> None:
    """No way round: not by name, not by function, not inside another statement."""
    file = tmp_path / "private.csv"
    file.write_text("secret\n1\n")
    assert "file system operations are disabled" in refusal(run, sql.format(file=file))
    assert file.read_text() == "secret\n1\n"


def test_a_list_of_statements_is_refused(run: Path) -> None:
    """One query, one result."""
    assert (
        refusal(run, "SELECT 1; SELECT 2") == "2 statements in the query; expected one: run them one by one"
    )


@pytest.mark.parametrize("sql", ["", " -- nothing"])
def test_an_empty_query_is_refused(run: Path, sql: str) -> None:
    """Nothing to run is an error too."""
    assert refusal(run, sql).startswith("0 statements in the query; expected one")


@pytest.mark.parametrize(
    ("sql", "first", "position"),
    [
        ("SELECT nope FROM steps", 'Binder Error: Referenced column "nope" not found', "       ^^^^"),
        ("SELCT 1", 'Parser Error: syntax error at or near "SELCT"', "^^^^^"),
        ("FROM stepz", "Catalog Error: Table with name stepz does not exist!", "     ^^^^^"),
        ("FROM loss_spikes(z := 1)", "Binder Error: Macro loss_spikes() does not support", None),
    ],
)
def test_the_engines_message_keeps_its_position(
    run: Path, sql: str, first: str, position: str | None
) -> None:
    """LINE 1 is quoted, with a mark under the wrong word."""
    message = refusal(run, sql)
    assert message.startswith(first)
    if position is not None:
        assert message.splitlines()[-2:] == [f"LINE 1: {sql}", " " * len("LINE 1: ") + position]


def test_a_query_that_takes_too_long_is_stopped(run: Path) -> None:
    """The timer interrupts the engine, and the message says how to allow more."""
    endless = "SELECT sum(range) FROM range(1000000000000000)"
    expected = "query stopped after 0.5 s: narrow it, or allow more with --timeout SECONDS"
    assert refusal(run, endless, Limits(timeout_seconds=0.5)) == expected


@pytest.mark.parametrize(
    "sql",
    ["SELECT list_sum(range(1000000000))", "SELECT length(repeat('x', 2000000000))", "FROM range(200000000)"],
)
def test_a_query_that_takes_too_much_memory_is_stopped(run: Path, sql: str) -> None:
    """Lists and strings escape the engine's own limit, but not the operating system's."""
    expected = "query stopped: it needs more than 0.5 GiB of memory: narrow it"
    assert refusal(run, sql, Limits(data_limit_bytes=2**29)) == expected


def test_a_broken_run_is_the_same_error_as_elsewhere(tmp_path: Path) -> None:
    """Errors of the log come back from the child as they are."""
    missing = tmp_path / "no"
    assert (
        refusal(missing, "FROM steps") == f"{missing}: no such run directory: list the runs with: analyzer ls"
    )
