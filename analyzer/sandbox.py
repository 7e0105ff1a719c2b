"""A user's SQL, run in a child process that can read the opened runs and nothing else.

The child opens the log, then forbids files, extensions and settings, and runs the SQL under a limit on its
data and a timer: one read-only statement here, rules in ``analyzer.diagnoses.user_rules``. DuckDB's own
memory limit does not bound list and string functions, so the operating system's does. The answer is one
JSON line, then the result as an Arrow stream where there is one, on a pipe.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from analyzer.errors import AnalyzerError
from analyzer.run_log import open_runs

TIMEOUT_SECONDS = 60.0
"""A person waits no longer, for a query or for all rules of a directory; the whole query library takes a
quarter of a second on a 2000-step run."""

DATA_LIMIT_BYTES = 4 * 2**30
"""Private memory of the child: RLIMIT_DATA, since an address-space limit would count the mapped log too."""

ENGINE_SHARE = 0.5
"""Part of the limit that DuckDB plans for: a sort or join then fails with the engine's own message."""

KILL_GRACE_SECONDS = 5.0
"""Between the interrupt of the child's timer and its end by the parent."""

INTERRUPT_SECONDS = 0.02

READ_ONLY_STATEMENTS = (
    duckdb.StatementType.SELECT,  # FROM, WITH, VALUES, DESCRIBE, SUMMARIZE and SHOW are of this type too
    duckdb.StatementType.EXPLAIN,
    duckdb.StatementType.MULTI,  # what the parser makes of PIVOT
)


@dataclass(frozen=True)
class Limits:
    """What a child may take."""

    timeout_seconds: float = TIMEOUT_SECONDS
    data_limit_bytes: int = DATA_LIMIT_BYTES


LIMITS = Limits()


@dataclass(frozen=True)
class QueryResult:
    """Rows, and what the reader had to say about the log."""

    table: pa.Table
    warnings: tuple[str, ...]


Json = dict[str, Any]
Answer = tuple[Json, pa.Table | None]


def run_query(paths: Sequence[Path], sql: str, limits: Limits = LIMITS) -> QueryResult:
    """The result of one read-only statement over the opened runs.

    Raises AnalyzerError with the engine's message and position, for a statement that is not read-only, and
    when the query took too long or too much memory.
    """
    request = {"paths": [str(path) for path in paths], "sql": sql}
    header, stream = ask("analyzer.sandbox", request, limits, "query")
    try:
        table = pa.ipc.open_stream(stream).read_all()
    except pa.ArrowException:
        raise AnalyzerError(memory_message("query", limits)) from None
    return QueryResult(table, tuple(header["warnings"]))


def ask(module: str, request: Mapping[str, Any], limits: Limits, what: str) -> tuple[Json, bytes]:
    """(header, stream) that a module, run as a child process, answers to a request.

    what: names the work in messages, as in "query stopped".
    Raises AnalyzerError with the child's message, and when it took too long or died.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_child_environment(),
    )
    try:
        answer, complaint = child.communicate(
            json.dumps({"limits": asdict(limits), "request": request}).encode(),
            timeout=limits.timeout_seconds + KILL_GRACE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise AnalyzerError(timeout_message(what, limits)) from None
    finally:
        child.kill()  # nothing is left of it after a timeout or Ctrl-C
        child.wait()
    if b"\n" not in answer:
        raise AnalyzerError(_death_message(complaint.decode(errors="replace"), what, limits))
    head, _, stream = answer.partition(b"\n")
    header: Json = json.loads(head)
    if header["error"] is not None:
        raise AnalyzerError(header["error"])
    return header, stream


def _child_environment() -> dict[str, str]:
    """This process's environment; the child imports the package from where this one did."""
    package_parent = str(Path(__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package_parent, inherited)))}


def timeout_message(what: str, limits: Limits) -> str:
    """What is said of work that took too long."""
    return (
        f"{what} stopped after {limits.timeout_seconds:g} s: narrow it, or allow more with --timeout SECONDS"
    )


def memory_message(what: str, limits: Limits) -> str:
    """What is said of work that took too much memory."""
    gibibytes = limits.data_limit_bytes / 2**30
    return f"{what} stopped: it needs more than {gibibytes:.3g} GiB of memory: narrow it"


def _death_message(complaint: str, what: str, limits: Limits) -> str:
    """Why a child ended without an answer: a failed allocation kills it silently or from within C++."""
    lines = complaint.strip().splitlines()
    if not lines or "bad_alloc" in complaint or "MemoryError" in complaint:
        return memory_message(what, limits)
    return f"{what} process failed: {lines[-1]}"


def serve(answer: Callable[[Json, Limits], Answer], what: str) -> int:
    """The child's side: reads a request from stdin, answers on stdout within its limits. Exit code 0."""
    asked = json.load(sys.stdin)
    limits = Limits(**asked["limits"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.data_limit_bytes, limits.data_limit_bytes))
    try:
        header, table = answer(asked["request"], limits)
        _write_answer({"error": None, **header}, table)
    except AnalyzerError as error:
        _write_answer({"error": str(error)}, None)
    except MemoryError:
        _write_answer({"error": memory_message(what, limits)}, None)
    return 0


def _write_answer(header: Mapping[str, object], table: pa.Table | None) -> None:
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    if table is not None:
        with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
            writer.write_table(table)
    sys.stdout.buffer.flush()


def lock_down(connection: duckdb.DuckDBPyConnection, limits: Limits) -> None:
    """No files, no network, no extensions, no spilling to disk, and no way back."""
    engine_bytes = int(limits.data_limit_bytes * ENGINE_SHARE)
    connection.execute(f"SET memory_limit = '{engine_bytes // 2**20}MiB'")
    connection.execute("SET temp_directory = ''")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def bounded(
    connection: duckdb.DuckDBPyConnection, limits: Limits, what: str, spent_seconds: float = 0.0
) -> Iterator[None]:
    """Interrupts the engine when the time is over; errors of the engine leave as AnalyzerError.

    spent_seconds: of the time that the limits allow, what earlier work has taken.
    """
    remaining = limits.timeout_seconds - spent_seconds
    if remaining <= 0:
        raise AnalyzerError(timeout_message(what, limits))
    expired, done = threading.Event(), threading.Event()

    def interrupt_when_late() -> None:
        """Runs in a thread of its own until the work is done."""
        if not done.wait(remaining):
            expired.set()
            connection.interrupt()
        # An interrupt between two statements is lost: ask until the work has ended.
        while not done.wait(INTERRUPT_SECONDS):
            connection.interrupt()

    watch = threading.Thread(target=interrupt_when_late, daemon=True)
    watch.start()
    try:
        yield
    except (duckdb.Error, AnalyzerError) as error:
        if expired.is_set():
            raise AnalyzerError(timeout_message(what, limits)) from None
        if _is_out_of_memory(error):
            raise AnalyzerError(memory_message(what, limits)) from None
        raise AnalyzerError(str(error)) from None
    finally:
        done.set()
        watch.join()


def _is_out_of_memory(error: BaseException | None) -> bool:
    """The error, or what it was made of: ``RunLog.query`` puts the engine's into one of ours."""
    while error is not None and not isinstance(error, duckdb.OutOfMemoryException):
        error = error.__context__
    return error is not None


def _answer(request: Json, limits: Limits) -> Answer:
    """Rows of the request's statement, and the reader's warnings."""
    with open_runs([Path(path) for path in request["paths"]]) as run_log:
        connection = run_log.connection
        _check_read_only(connection, request["sql"])
        lock_down(connection, limits)
        with bounded(connection, limits, "query"):
            table = _relation(connection, request["sql"]).to_arrow_table()
        return {"warnings": run_log.warnings}, table


def _relation(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.DuckDBPyRelation:
    """The bound query. ``sql`` leaves the position out of its errors, ``execute`` points at it."""
    try:
        return connection.sql(sql)
    except duckdb.Error:
        connection.execute(sql)
        raise


def _check_read_only(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise AnalyzerError(str(error)) from None
    if len(statements) != 1:
        raise AnalyzerError(f"{len(statements)} statements in the query; expected one: run them one by one")
    kind = statements[0].type
    if kind not in READ_ONLY_STATEMENTS:
        raise AnalyzerError(
            f"{kind.name} refused: a run is only read: use SELECT, FROM, WITH, DESCRIBE, SUMMARIZE, PIVOT or "
            "EXPLAIN; -o FILE and --parquet FILE write the result"
        )


if __name__ == "__main__":
    raise SystemExit(serve(_answer, "query"))
