"""A user's SQL, run in a child process that can read the opened runs and nothing else.

The child opens the log, then forbids files, extensions and settings, and runs one read-only statement under
a limit on its data and a timer. DuckDB's own memory limit does not bound list and string functions, so the
operating system's does. The answer is one JSON line, then the result as an Arrow stream, on a pipe.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from analyzer.errors import AnalyzerError
from analyzer.run_log import open_runs

TIMEOUT_SECONDS = 60.0
"""A person waits no longer; the whole query library takes a quarter of a second on a 2000-step run."""

DATA_LIMIT_BYTES = 4 * 2**30
"""Private memory of the child: RLIMIT_DATA, since an address-space limit would count the mapped log too."""

ENGINE_SHARE = 0.5
"""Part of the limit that DuckDB plans for: a sort or join then fails with the engine's own message."""

KILL_GRACE_SECONDS = 5.0
"""Between the interrupt of the child's timer and its end by the parent."""

READ_ONLY_STATEMENTS = (
    duckdb.StatementType.SELECT,  # FROM, WITH, VALUES, DESCRIBE, SUMMARIZE and SHOW are of this type too
    duckdb.StatementType.EXPLAIN,
    duckdb.StatementType.MULTI,  # what the parser makes of PIVOT
)


@dataclass(frozen=True)
class Request:
    """What the child is asked to do."""

    paths: tuple[str, ...]
    sql: str
    timeout_seconds: float
    data_limit_bytes: int


@dataclass(frozen=True)
class QueryResult:
    """Rows, and what the reader had to say about the log."""

    table: pa.Table
    warnings: tuple[str, ...]


def run_query(
    paths: Sequence[Path],
    sql: str,
    timeout_seconds: float = TIMEOUT_SECONDS,
    data_limit_bytes: int = DATA_LIMIT_BYTES,
) -> QueryResult:
    """The result of one read-only statement over the opened runs.

    Raises AnalyzerError with the engine's message and position, for a statement that is not read-only, and
    when the query took too long or too much memory.
    """
    request = Request(tuple(str(path) for path in paths), sql, timeout_seconds, data_limit_bytes)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "analyzer.sandbox"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_child_environment(),
    )
    try:
        answer, complaint = child.communicate(
            json.dumps(asdict(request)).encode(), timeout=timeout_seconds + KILL_GRACE_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise AnalyzerError(_timeout_message(timeout_seconds)) from None
    finally:
        child.kill()  # nothing is left of it after a timeout or Ctrl-C
        child.wait()
    if b"\n" not in answer:
        raise AnalyzerError(_death_message(complaint.decode(errors="replace"), data_limit_bytes))
    return _parsed_answer(answer, data_limit_bytes)


def _child_environment() -> dict[str, str]:
    """This process's environment; the child imports the package from where this one did."""
    package_parent = str(Path(__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package_parent, inherited)))}


def _parsed_answer(answer: bytes, data_limit_bytes: int) -> QueryResult:
    head, _, stream = answer.partition(b"\n")
    header = json.loads(head)
    if header["error"] is not None:
        raise AnalyzerError(header["error"])
    try:
        table = pa.ipc.open_stream(stream).read_all()
    except pa.ArrowException:
        raise AnalyzerError(_memory_message(data_limit_bytes)) from None
    return QueryResult(table, tuple(header["warnings"]))


def _timeout_message(seconds: float) -> str:
    return f"query stopped after {seconds:g} s: narrow it, or allow more with --timeout SECONDS"


def _memory_message(data_limit_bytes: int) -> str:
    return f"query stopped: it needs more than {data_limit_bytes / 2**30:.3g} GiB of memory: narrow it"


def _death_message(complaint: str, data_limit_bytes: int) -> str:
    """Why a child ended without an answer: a failed allocation kills it silently or from within C++."""
    lines = complaint.strip().splitlines()
    if not lines or "bad_alloc" in complaint or "MemoryError" in complaint:
        return _memory_message(data_limit_bytes)
    return f"query process failed: {lines[-1]}"


def main() -> int:
    """Exit code of the child: 0 when it could answer. Reads a request from stdin, answers on stdout."""
    request = Request(**json.load(sys.stdin))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (request.data_limit_bytes, request.data_limit_bytes))
    try:
        table, warnings = _answer(request)
        _write_answer({"error": None, "warnings": warnings}, table)
    except AnalyzerError as error:
        _write_answer({"error": str(error), "warnings": []}, None)
    except MemoryError:
        _write_answer({"error": _memory_message(request.data_limit_bytes), "warnings": []}, None)
    return 0


def _answer(request: Request) -> tuple[pa.Table, list[str]]:
    with open_runs([Path(path) for path in request.paths]) as run_log:
        connection = run_log.connection
        _check_read_only(connection, request.sql)
        _lock_down(connection, request.data_limit_bytes)
        timer = threading.Timer(request.timeout_seconds, connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            return _relation(connection, request.sql).to_arrow_table(), run_log.warnings
        except duckdb.InterruptException:
            raise AnalyzerError(_timeout_message(request.timeout_seconds)) from None
        except duckdb.OutOfMemoryException:
            raise AnalyzerError(_memory_message(request.data_limit_bytes)) from None
        except duckdb.Error as error:
            raise AnalyzerError(str(error)) from None
        finally:
            timer.cancel()


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


def _lock_down(connection: duckdb.DuckDBPyConnection, data_limit_bytes: int) -> None:
    """No files, no network, no extensions, no spilling to disk, and no way back."""
    engine_bytes = int(data_limit_bytes * ENGINE_SHARE)
    connection.execute(f"SET memory_limit = '{engine_bytes // 2**20}MiB'")
    connection.execute("SET temp_directory = ''")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _write_answer(header: dict[str, object], table: pa.Table | None) -> None:
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n")
    if table is not None:
        with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
            writer.write_table(table)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    raise SystemExit(main())
